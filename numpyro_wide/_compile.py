"""Compiled programs, told apart by what they compute, and functions mapped over chains."""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import sha256
from types import BuiltinFunctionType, FunctionType
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from numpyro_wide._checks import is_known, is_tracing


def is_one_by_one() -> bool:
    """Tell whether chains take their turns within a program, as they do on one processor.

    XLA's batched products of small matrices are slow there: a gradient of four chains took up to five times as long at
    once as one after another, on one core and on two. In turns, chains with trajectories of several lengths do not wait
    for each other either. Where there are several devices, chains may be spread over them.
    """
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def over_chains(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Map a function over the leading axis of all leaves of its arguments, as ``jax.vmap`` does."""
    if is_one_by_one():
        return lambda *chains: jax.lax.map(lambda chain: fn(*chain), chains)
    return jax.vmap(fn)


Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Values by key, those that were asked for last.

    Args:
        most: largest number of values.
    """

    def __init__(self, most: int):
        self.most = most
        self._values: OrderedDict[str, Value] = OrderedDict()

    def get(self, key: str, make: Callable[[], Value]) -> Value:
        """Return the value of a key, which is made where there is none.

        Args:
            key: a text: what is hashed must not change while it is kept.
            make: function that makes the value.
        """
        if key not in self._values:
            self._values[key] = make()
        self._values.move_to_end(key)
        while len(self._values) > self.most:
            self._values.popitem(last=False)
        return self._values[key]


_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
# Packages whose functions and objects are told by their names and their own words.
_TOLD_BY_NAME = ("builtins", "jax", "jaxlib", "numpy", "ml_dtypes")
# Primitives that carry functions for their derivatives.
_OWN_DERIVATIVE = ("custom_jvp", "custom_vjp", "custom_vmap", "custom_lin")
_SETTINGS = ("compute_type", "threefry_partitionable", "xla_metadata", "cur_abstract_mesh")
_PLAIN = (str, bytes, bool, int, float, complex, type(None), np.dtype, Enum)

# By digest. A program holds no model: constants are among its arguments.
_PROGRAMS: Recent[Callable] = Recent(256)


def run_program(fn: Callable, *args: Any, quick: bool = False) -> Any:
    """Run ``fn(*args)`` compiled; see :func:`program_of`."""
    if is_tracing() or not all(map(is_known, jax.tree.leaves(args))):
        return jax.jit(fn)(*args)
    return program_of(fn, *args, quick=quick)(*args)


def program_of(fn: Callable, *args: Any, quick: bool = False) -> Callable:
    """Compile ``fn`` for arguments like these; a program of the same text, of whichever function, is compiled once.

    Args:
        fn: function of trees of arrays. What it closes over is part of the program: pass data as arguments.
        *args: trees of arrays.
        quick: whether to compile without optimisation, for a program that runs a few times.
    """
    leaves, structure = jax.tree.flatten(args)
    results: Any = None

    def flat(*leaves: Any) -> list[Any]:
        nonlocal results
        found, results = jax.tree.flatten(fn(*jax.tree.unflatten(structure, leaves)))
        return found

    # Unused arguments are kept, since two programs may differ in nothing but which they use.
    lowered = jax.jit(flat, keep_unused=True).lower(*leaves)
    key = sha256(f"{quick} {lowered.in_avals} {lowered.as_text()}".encode()).hexdigest()
    if key not in _SHARED:
        while len(_SHARED) >= _MOST_SHARED:
            del _SHARED[next(iter(_SHARED))]
        _SHARED[key] = lowered.compile({"xla_backend_optimization_level": "0"} if quick else None)
    shared = _SHARED[key]
    return lambda *args: jax.tree.unflatten(results, shared(*jax.tree.leaves(args)))


def split(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Split a tree into its arrays, and a function that puts arrays in their places; all else stays as it is."""
    leaves, structure = jax.tree.flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Array | np.ndarray)]

    def join(arrays: list[Any]) -> Any:
        found = dict(zip(places, arrays, strict=True))
        return jax.tree.unflatten(structure, [found.get(place, leaf) for place, leaf in enumerate(leaves)])

    return [leaves[place] for place in places], join


# By their text, the oldest first.
_SHARED: dict[str, Callable] = {}
_MOST_SHARED = 256


def run_compiled(body: Callable, model: Callable, static: Any, *arrays: Any) -> Any:
    """Run ``body(model, static, *arrays)``, compiled; a program of the same text is not compiled again.

    Args:
        body: a function.
        model: a model, a guide, or whatever the body runs; looked at anew at every call.
        static: what the program depends on besides.
        *arrays: trees of arrays.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arrays)):
        return jax.jit(lambda *arrays: body(model, static, *arrays))(*arrays)
    program = TracedProgram(lambda *arrays: body(model, static, *arrays), *arrays)
    return program(*arrays)


class TracedProgram:
    """Function of arrays, traced for those of some shapes and compiled when first called.

    Args:
        function: of trees of arrays.
        *arrays: of the shapes and types that it will be called with.

    Attributes:
        digest: of the program, its constants' values left out: they are passed to it.
        constants: arrays that the function holds, such as data in a closure.
    """

    def __init__(self, function: Callable, *arrays: Any):
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*arrays)
        jaxpr, used = _pruned(program.jaxpr)
        held = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
        self.constants = [held[variable] for variable in used]
        self._outputs = jax.tree.structure(shapes)
        text = _Text()
        self.digest = _hash(text(jaxpr))
        # What the text gives by name alone, such as a callback, may do something else. A tracer belongs to a trace that
        # continues.
        is_shared = not text.is_partial and all(map(is_known, self.constants))
        self._program = _compiled(self.digest if is_shared else None, jaxpr)

    def __call__(self, *arrays: Any) -> Any:
        """Run the program."""
        results = self._program(self.constants, jax.tree.leaves(arrays))
        return jax.tree.unflatten(self._outputs, results)


def _compiled(key: str | None, jaxpr: Jaxpr) -> Callable:
    def program() -> Callable:
        return jax.jit(lambda constants, leaves: jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*constants, *leaves))

    return program() if key is None else _PROGRAMS.get(key, program)


def _pruned(jaxpr: Jaxpr) -> tuple[Jaxpr, list[Var]]:
    """Drop equations and constants that no result depends on, and make arguments of the constants that are left.

    What is looked at on the way and thrown away, such as a check that is made in the first call alone, would make
    another program of the second call. Constants are arguments since JAX 0.12 ties those of a program to their values.

    Args:
        jaxpr: a program.

    Returns:
        The program, whose first arguments are the constants that it uses; and the variables of these.
    """
    used = {variable for variable in jaxpr.outvars if isinstance(variable, Var)}
    kept = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or used.intersection(equation.outvars):
            kept.append(equation)
            used.update(variable for variable in equation.invars if isinstance(variable, Var))
    constants = [variable for variable in jaxpr.constvars if variable in used]
    return jaxpr.replace(eqns=kept[::-1], constvars=[], invars=[*constants, *jaxpr.invars]), constants


class Static:
    """Tree without its arrays; equal if a program compiled for one serves for the other."""

    def __init__(self, leaves: tuple, structure: Any):
        self.leaves, self.structure = leaves, structure

    def __hash__(self) -> int:
        return hash((self.structure, tuple(type(leaf) for leaf in self.leaves)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Static)
            and self.structure == other.structure
            and all(map(_same, self.leaves, other.leaves))
        )


def partition(tree: Any, array_types: Any = (Array, np.ndarray)) -> tuple[list[Any], Static]:
    """Split a tree into its arrays and what stays as it is: numbers that serve as sizes, names, switches."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if isinstance(leaf, array_types)]
    return arrays, Static(tuple(_HOLE if isinstance(leaf, array_types) else leaf for leaf in leaves), structure)


def combine(arrays: list[Any], static: Static) -> Any:
    """Undo :func:`partition`."""
    remaining = iter(arrays)
    leaves = [next(remaining) if leaf is _HOLE else leaf for leaf in static.leaves]
    return jax.tree.unflatten(static.structure, leaves)


_HOLE = type("_Hole", (), {})


def _same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    try:
        return bool(left == right)
    except (TypeError, ValueError):  # a table compares entry by entry
        return False


def digest(*values: Any) -> str:
    """Digest numbers, arrays, names, containers of them, and of programs as ``jax.make_jaxpr`` gives them.

    Of functions and of objects that do not say what they hold, only the name counts.
    """
    return _hash(_Text()(values))


def program_digest(function: Callable, *args: Any) -> str:
    """Digest what a function computes from arrays of the shapes and types of ``args``, constants included."""
    return digest(jax.make_jaxpr(function)(*jax.tree.map(_abstract, args)))


def complete_digest(function: Callable, *args: Any) -> str | None:
    """Return the digest of a program with its constants, if it tells all that the program computes.

    Args:
        function: a function of trees of arrays.
        *args: arrays of the shapes and types that it is called with.

    Returns:
        The digest, results' structure included; None of a program that is written by names alone in places, such as
        one with a callback, or with constants whose numbers are not known, such as those of a trace that continues.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*jax.tree.map(_abstract, args))
    text = _Text()
    written = f"{text(program)} {jax.tree.structure(shapes)}"
    return _hash(written) if all(map(is_known, program.consts)) and not text.is_partial else None


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.numpy.result_type(leaf))


def _hash(text: str | bytes) -> str:
    return sha256(text.encode() if isinstance(text, str) else text).hexdigest()


class _Text:
    """Writer of values as text. A program inside of a program is written once, and its digest from then on.

    Attributes:
        is_partial: whether something was written by its name alone, such as a callback: what it does is not known then.
    """

    def __init__(self) -> None:
        self.known: dict[int, tuple[Jaxpr, str]] = {}
        self.is_partial = False

    def __call__(self, value: Any) -> str:
        if isinstance(value, ClosedJaxpr):
            held = dict(zip(value.jaxpr.constvars, value.consts, strict=True))
            _, used = _pruned(value.jaxpr)
            return f"program {self.program(value.jaxpr)} {self(tuple(held[variable] for variable in used))}"
        if isinstance(value, Jaxpr):
            return f"program {self.program(value)}"
        if isinstance(value, Array | np.ndarray | np.generic):
            return _array(value)
        if isinstance(value, float):
            return f"float {np.float64(value).tobytes().hex()}"  # of NaN, too, all bits
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, Mapping):
            return f"{{{', '.join(sorted(f'{self(key)}: {self(item)}' for key, item in value.items()))}}}"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(map(self, value)))}}}"
        if isinstance(value, tuple | list):
            return f"{type(value).__name__}({', '.join(map(self, value))})"
        if is_dataclass(value) and not isinstance(value, type):
            parts = ((field.name, getattr(value, field.name, None)) for field in fields(value))
            return f"{type(value).__qualname__}({', '.join(f'{name}={self(part)}' for name, part in parts)})"
        return self.name(value)

    def name(self, value: Any) -> str:
        """Write a function, a class or another object by its name or its own words, and note where these do not do."""
        is_named = isinstance(value, type | FunctionType | BuiltinFunctionType) or hasattr(value, "call_wrapped")
        module = getattr(value if is_named else type(value), "__module__", None) or ""
        self.is_partial |= module.split(".")[0] not in _TOLD_BY_NAME
        if is_named:
            self.is_partial |= isinstance(value, FunctionType) and bool(value.__closure__ or value.__defaults__)
            return f"function {getattr(value, '__qualname__', type(value).__qualname__)}"
        text = repr(value)
        self.is_partial |= bool(_ADDRESS.search(text))
        return _ADDRESS.sub("", text)

    def program(self, jaxpr: Jaxpr) -> str:
        if id(jaxpr) not in self.known:
            self.known[id(jaxpr)] = jaxpr, _hash("\n".join(self.lines(jaxpr)))
        return self.known[id(jaxpr)][1]

    def lines(self, jaxpr: Jaxpr) -> list[str]:
        """Write one line for each equation that a result depends on, with variables numbered as they come."""
        jaxpr, constants = _pruned(jaxpr)
        numbers: dict[Var, int] = {}

        def atom(variable: Any) -> str:
            if isinstance(variable, Literal):
                return f"{self(variable.val)}:{variable.aval}"
            return f"%{numbers.setdefault(variable, len(numbers))}:{variable.aval}"

        def atoms(variables: Any) -> str:
            return " ".join(map(atom, variables))

        lines = [f"{len(constants)} constants, {atoms(jaxpr.invars)}"]
        for equation in jaxpr.eqns:
            lines.append(f"{self.operation(equation)} {atoms(equation.invars)} -> {atoms(equation.outvars)}")
        return [*lines, atoms(jaxpr.outvars)]

    def operation(self, equation: Any) -> str:
        """Write an equation's primitive, its parameters, and the settings of JAX that it was traced under."""
        name, params = equation.primitive.name, equation.params
        self.is_partial |= "callback" in name
        if name.startswith(_OWN_DERIVATIVE):  # of which the rules were made use of before, where they were wanted
            params = {key: value for key, value in params.items() if isinstance(value, Jaxpr | ClosedJaxpr)}
        settings = " ".join(str(getattr(equation.ctx, key, None)) for key in _SETTINGS)
        return f"{name} {self(params)} {settings}"


def _array(value: Any) -> str:
    """Write type, shape and a digest of the bytes; without the bytes if other processes hold some of them."""
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return f"keys {value.dtype} {_array(jax.random.key_data(value))}"
    held = _hash(np.asarray(value).tobytes()) if is_known(value) else ""
    return f"array {value.dtype} {value.shape} {held}"
