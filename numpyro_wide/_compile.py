"""Programs that are compiled once for each text, and functions mapped over chains."""

from collections.abc import Callable, Hashable, Iterator
from hashlib import sha256
from threading import Lock
from types import MethodType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax import Array
from jax.core import eval_jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from numpyro_wide._checks import is_tracing

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn

T = TypeVar("T")

# Compiled programs by their text, and by what the text does not show; the oldest first.
_PROGRAMS: dict[Hashable, Callable] = {}
_MAX_PROGRAMS = 256
_LOCK = Lock()
# The same by the traced function, which JAX keeps as long as the function lives: it is lowered once.
_PROGRAMS_BY_TRACE: WeakKeyDictionary["Jaxpr", dict[Hashable, Callable]] = WeakKeyDictionary()
# Half of LLVM's work takes three quarters of the time of compilation, for code as fast or faster wherever measured.
_CPU_OPTIONS = {"xla_backend_optimization_level": "1"}
# Without optimisations, and without the code generators of fusions, most of the time of compilation. Code is then
# generated in one part: parts generated in parallel have come out wrong.
_QUICK_OPTIONS = {
    "xla_backend_optimization_level": "0",
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


def run_program(fn: Callable[..., T], *args: object, quick: bool = False) -> T:
    """Run ``fn(*args)`` compiled; see :func:`program_of`."""
    return fn(*args) if is_traced(args) else program_of(fn, *args, quick=quick)(*args)


def program_of(fn: Callable[..., T], *args: object, quick: bool = False) -> Callable[..., T]:
    """Compile ``fn`` for arguments like these; a program of the same text, of whichever function, is compiled once.

    Arrays that ``fn`` closes over are arguments of the program; names, sizes and numbers are part of it. Its text does
    not show devices and Python functions that it calls: they are part of the key. The same ``fn`` is traced once for
    types and settings of JAX, by JAX, and its program then looked up without its text.

    Args:
        fn: function of trees of arrays.
        *args: trees of arrays.
        quick: whether to compile without optimisation, for a program that runs a few times.
    """
    traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    if _has_tracer(traced.consts):  # arrays of a trace that continues
        return fn
    leaves = [*traced.consts, *jax.tree.leaves(args)]
    options = _QUICK_OPTIONS if quick else _default_options()
    # Arrays that are not bound to a device follow the others, or go to the default one.
    shardings = [leaf.sharding if getattr(leaf, "committed", False) else None for leaf in leaves]
    settings = tuple(options.items()), jax.config.jax_default_device  # type: ignore[attr-defined]
    programs = _PROGRAMS_BY_TRACE.setdefault(traced.jaxpr, {})
    if (settings, *shardings) not in programs:
        programs[settings, *shardings] = _program(traced.jaxpr, leaves, options, (settings, frozenset(shardings)))
    run, results = programs[settings, *shardings], jax.tree.structure(shapes)
    return lambda *args: jax.tree.unflatten(results, run([*traced.consts, *jax.tree.leaves(args)]))


def _program(jaxpr: "Jaxpr", leaves: list, options: dict[str, Any], key: tuple) -> Callable[[list], list[Array]]:
    """Return the program of a traced function, compiled for leaves like these unless there is one of this key."""
    full = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    # Arguments that no result depends on are left out: two programs may differ in nothing but which they use.
    pruned, is_used = dce_jaxpr(full, [True] * len(full.outvars))
    used = [index for index, is_read in enumerate(is_used) if is_read]
    lowered = jax.jit(lambda *leaves: eval_jaxpr(pruned, (), *leaves)).lower(*(leaves[index] for index in used))
    types = tuple(variable.aval for variable in (*pruned.invars, *pruned.outvars))
    key = *key, types, sha256(lowered.as_text().encode()).digest(), *_host_functions(pruned)
    with _LOCK:
        compiled = _PROGRAMS.get(key)
    if compiled is None:
        compiled = _compiled(lowered, options)
        with _LOCK:
            _PROGRAMS[key] = compiled
            while len(_PROGRAMS) > _MAX_PROGRAMS:
                del _PROGRAMS[next(iter(_PROGRAMS))]
    return lambda leaves: compiled(*(leaves[index] for index in used))


def inner_programs(equation: "JaxprEqn") -> list["Jaxpr"]:
    """Return the traced programs of a function or a loop, none of other operations."""
    return [param for param in jax.tree.leaves(equation.params) if hasattr(param, "eqns")]


def operations(jaxpr: "Jaxpr") -> Iterator[Any]:
    """Yield the operations of a traced program, of functions and loops those inside."""
    for equation in jaxpr.eqns:
        programs = inner_programs(equation)
        if not programs:
            yield equation
        for program in programs:
            yield from operations(program)


def _host_functions(jaxpr: "Jaxpr") -> Iterator[Hashable]:
    """Yield keys of a program's calls of Python, and of its prints."""
    for equation in operations(jaxpr):
        if "callback" in equation.primitive.name or equation.primitive.name == "debug_print":
            for param in jax.tree.leaves(equation.params):
                # JAX wraps the functions of `pure_callback` and `io_callback` anew at each trace.
                fn = getattr(param, "callback_func", param)
                yield cache_key(fn) if callable(fn) else param, getattr(param, "in_tree", None)


class _ByIdentity:
    """Key that holds an object, and equals the keys of this object alone."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def cache_key(value: object) -> Hashable:
    """Return the key of a constant of a program: of numbers and words by what they are, of objects by identity."""
    if isinstance(value, MethodType):
        return _ByIdentity(value.__self__), _ByIdentity(value.__func__)
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return type(value), value.dtype.str, value.shape, value.tobytes()
    if type(value) in (float, complex):
        return type(value), repr(value)  # 0.0 equals -0.0, and NaN not even itself
    # An object's own equality may leave numbers out.
    return (type(value), value) if type(value) in (bool, int, str, bytes, type(None)) else _ByIdentity(value)


def _default_options() -> dict[str, Any]:
    """Return the compiler's options; none on other devices, or where a user's setting asks for less."""
    has_less = jax.config.read("jax_disable_most_optimizations")
    return {} if has_less or jax.default_backend() != "cpu" else _CPU_OPTIONS


def _compiled(lowered: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled:
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError:  # another version of XLA has other options
        return lowered.compile()


def is_traced(tree: object) -> bool:
    """Whether JAX is tracing, or a leaf is of a trace."""
    return is_tracing() or _has_tracer(tree)


def _has_tracer(tree: object) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def split(tree: T, array_types: type | UnionType = Array | np.ndarray) -> tuple[list[Array], Callable[[list], T]]:
    """Split a tree into its arrays, and a function that puts arrays in their places; all else stays as it is."""
    leaves, structure = jax.tree.flatten(tree)
    indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, array_types)]
    arrays = [leaves[index] for index in indices]
    static = dict(enumerate(leaves))  # without the arrays, which a function that is kept would hold
    static.update(dict.fromkeys(indices))

    def join(arrays: list) -> T:
        filled = static | dict(zip(indices, arrays, strict=True))
        return jax.tree.unflatten(structure, filled.values())

    return arrays, join


def run_with_arguments(fn: Callable[..., T], arguments: object, *trees: object, quick: bool = False) -> T:
    """Run ``fn(arguments, *trees)`` compiled; arguments other than arrays are part of the program."""
    arrays, join = split(arguments)
    return run_program(lambda arrays, *trees: fn(join(arrays), *trees), arrays, *trees, quick=quick)


def is_sequential() -> bool:
    """Whether chains take their turns within a program, as they do on one processor.

    XLA's batched products of small matrices are slow there: a gradient of four chains took up to five times as long at
    once as one after another, on one core and on two. In turns, chains with trajectories of several lengths do not wait
    for each other either. Where there are several devices, chains may be spread over them.
    """
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def over_chains(fn: Callable[..., T]) -> Callable[..., T]:
    """Map a function over the leading axis of all leaves of its arguments, as ``jax.vmap`` does."""
    if is_sequential():
        return lambda *chains: jax.lax.map(lambda chain: fn(*chain), chains)
    return jax.vmap(fn)
