"""Snapshot of what a model reads from outside of its arguments: globals, closures, defaults, attributes."""

import dis
import functools
import inspect
import sys
import types
import zlib
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from jax import Array

from numpyro_wide._checks import is_known

# Packages whose functions read nothing from outside that changes between two calls; users' own code is in none of them.
_LIBRARIES = {*sys.stdlib_module_names, "flax", "jax", "jaxlib", "numpy", "numpyro", "numpyro_wide", "optax", "scipy"}
_LIBRARIES -= {"__main__"}
# Of these the objects are looked into: containers of users' values, networks, wrapped models, handlers.
_TRANSPARENT = {"flax", "functools", "numpyro", "numpyro_wide", "types"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_LEAVES = (*_PLAIN, np.ndarray, Array, types.CodeType)
_MOST = 2000  # values, so that the look stays cheap
_DEEPEST = 5  # objects within objects
_LARGEST = 2**26  # bytes of an array that is compared entry by entry; of a larger one a part is


class Snapshot:
    """The values that a model's code names, as they are when this is made.

    Looking takes from some ten microseconds on, where tracing the model would take milliseconds. What it cannot see are
    values that code reaches by other ways, such as attributes of attributes many times over, or files.

    Args:
        roots: functions, models, and objects that are passed to them.
    """

    def __init__(self, *roots: Any):
        self._roots = roots
        self._values = dict(_places(roots))

    def settle(self) -> None:
        """Leave out what has changed already: what the model itself writes whenever it runs, such as a counter."""
        now = dict(_places(self._roots))
        self._values = {
            place: value for place, value in self._values.items() if place in now and _is_same(value, now[place])
        }

    def change(self) -> str | None:
        """Return a sentence about the first value that is another one now; None if there is none."""
        now = dict(_places(self._roots))
        for place, before in self._values.items():
            if place not in now:
                return f"{place} is gone"
            after = now[place]
            if not _is_same(before, after):
                is_shown = isinstance(before, _PLAIN) and isinstance(after, _PLAIN) and not isinstance(before, _Content)
                return f"{place} was {before!r} and is {after!r}" if is_shown else f"{place} is another one"
        return None


class _Content(str):
    """Text that stands for an array's bytes: the array itself may be changed in place."""


def _places(roots: tuple) -> Iterator[tuple[str, Any]]:
    """Yield the values that the code of functions names, and those that these name, with where they stand."""
    # A stack instead of recursion: objects may be nested deeper than Python's frames go.
    waiting: list[tuple[str, Any, int]] = [("", root, 0) for root in reversed(roots)]
    known: set[int] = set()  # objects refer to one another in circles
    count = 0
    while waiting and count < _MOST:
        place, value, depth = waiting.pop()
        if place:
            count += 1
            yield place, _kept(value)
        if id(value) in known or isinstance(value, _LEAVES):
            continue
        known.add(id(value))
        try:
            waiting += [(name, inner, depth + 1) for name, inner in islice(_inside(place, value, depth), _MOST)]
        except Exception:  # an object that does not let itself be looked at, such as a proxy of nothing, tells nothing
            continue


def _inside(place: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    of = f" of {place}" if place else ""
    if isinstance(value, types.FunctionType):
        yield from _named(value, of)
    elif isinstance(value, types.MethodType):
        yield f"the object{of}", value.__self__
        yield f"the method{of}", value.__func__
    elif isinstance(value, functools.partial):
        yield f"the function{of}", value.func
        yield from ((f"argument {i}{of}", inner) for i, inner in enumerate(value.args))
        yield from ((f"argument {name!r}{of}", inner) for name, inner in value.keywords.items())
    elif isinstance(value, dict):
        yield from ((f"the entry {key!r}{of}", inner) for key, inner in value.items())
    elif isinstance(value, list | tuple | deque):
        yield from ((f"entry {i}{of}", inner) for i, inner in enumerate(value))
    elif isinstance(value, types.ModuleType | type):
        # Of a user's module only plain values: all that its functions use would be the whole program.
        if not _is_library(value.__name__ if isinstance(value, types.ModuleType) else value.__module__):
            yield from _attributes(vars(value), of, plain_only=isinstance(value, types.ModuleType))
    elif depth < _DEEPEST:
        yield from _of_object(value, of)


def _of_object(value: Any, of: str) -> Iterator[tuple[str, Any]]:
    module = type(value).__module__
    is_library = _is_library(module)
    if is_library and module.split(".")[0] not in _TRANSPARENT:
        return
    held = dict(getattr(value, "__dict__", {}))
    # Objects with slots have no dictionary of attributes; ``__slots__`` may be one string or several.
    slots = {name for kind in type(value).__mro__ for name in np.atleast_1d(getattr(kind, "__slots__", ()))}
    held |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    # Libraries keep in private attributes what they have computed, users what a model is made of.
    yield from _attributes({name: inner for name, inner in held.items() if not (is_library and name[0] == "_")}, of)
    for kind in type(value).__mro__:
        if not _is_library(kind.__module__):
            yield f"the class {kind.__name__!r}", kind


def _attributes(held: Any, of: str, *, plain_only: bool = False) -> Iterator[tuple[str, Any]]:
    for name, inner in held.items():
        # Python's own attributes change as it pleases, such as caches of annotations; calls are the user's code.
        is_own = not name.startswith("__") or name == "__call__"
        if is_own and (not plain_only or isinstance(inner, _LEAVES)):
            yield f"the attribute {name!r}{of}", inner


def _named(function: types.FunctionType, of: str) -> Iterator[tuple[str, Any]]:
    """Yield what a function's code names outside of itself, and its code."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"the variable {name!r} around it{of}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    # A cell redefined in a notebook gives the same name another code.
    yield f"the code{of}", function.__code__
    yield from ((f"default {i}{of}", value) for i, value in enumerate(function.__defaults__ or ()))
    yield from ((f"the default of {name!r}{of}", value) for name, value in (function.__kwdefaults__ or {}).items())
    if not _is_library(function.__module__):
        yield from _attributes(vars(function), of)
        within = "" if function.__module__ == "__main__" else f" of {function.__module__}"
        for name in _global_names(function.__code__):
            if name in function.__globals__:
                yield f"the global {name!r}{within}", function.__globals__[name]


def _is_library(module: str | None) -> bool:
    return module is not None and module.split(".")[0] in _LIBRARIES


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that code reads from its globals; attributes have names, too, and are none of these."""
    names = [instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in _READS]
    inner = [name for constant in code.co_consts if inspect.iscode(constant) for name in _global_names(constant)]
    return tuple(dict.fromkeys([*names, *inner]))


_READS = ("LOAD_GLOBAL", "LOAD_NAME")


def _kept(value: Any) -> Any:
    """Return what tells a value from a later one: of what may be changed in place, a digest."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        # Quick sums, not a cryptographic digest: this runs at every call of a predictive. Two, since one may collide.
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        if data.nbytes > _LARGEST:
            data = np.ascontiguousarray(data[:: data.nbytes // _LARGEST + 1])
        return _Content(f"{value.shape} {value.dtype} {zlib.crc32(data.data)} {zlib.adler32(data.data)}")
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, set):
        return frozenset(value)
    return value


def _is_same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, (*_PLAIN, frozenset)):
        return bool(before == after) or before != before  # NaN
    if isinstance(before, Array):
        # Nobody can change an array of JAX, so that another object is a change unless the comparison is cheap.
        if not (is_known(before) and is_known(after)) or before.nbytes > _LARGEST:
            return False
        return before.dtype == after.dtype and np.array_equal(before, after)
    if isinstance(before, types.MethodType):  # made anew whenever it is asked for
        return before.__func__ is after.__func__ and before.__self__ is after.__self__
    # What containers and partial functions hold has places of its own.
    return isinstance(before, dict | list | tuple | deque | functools.partial)
