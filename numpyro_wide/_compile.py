"""Programs that are compiled once for each text, and functions mapped over chains."""

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.core import eval_jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from numpyro_wide._checks import is_tracing

# By their text, the oldest first.
_SHARED: dict[str, Callable] = {}
_MOST_SHARED = 256
# Half of LLVM's work takes three quarters of the time of compilation, for code as fast or faster wherever measured.
_USUALLY = {"xla_backend_optimization_level": "1"}
# Without optimisations, and without the code generators of fusions, most of the time of compilation. Code is then
# generated in one part: parts generated in parallel have come out wrong.
_QUICKLY = {
    "xla_backend_optimization_level": "0",
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


def run_program(fn: Callable, *args: Any, quick: bool = False) -> Any:
    """Run ``fn(*args)`` compiled; see :func:`program_of`."""
    if is_tracing() or _is_traced(args):
        return fn(*args)
    return program_of(fn, *args, quick=quick)(*args)


def program_of(fn: Callable, *args: Any, quick: bool = False) -> Callable:
    """Compile ``fn`` for arguments like these; a program of the same text, of whichever function, is compiled once.

    Arrays that ``fn`` closes over are arguments of the program; names, sizes and numbers are part of it.

    Args:
        fn: function of trees of arrays.
        *args: trees of arrays.
        quick: whether to compile without optimisation, for a program that runs a few times.
    """
    traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    if _is_traced(traced.consts):  # arrays of a trace that continues
        return fn
    whole = traced.jaxpr.replace(constvars=[], invars=[*traced.jaxpr.constvars, *traced.jaxpr.invars])
    # Arguments that no result depends on are left out: two programs may differ in nothing but which they use.
    jaxpr, used = dce_jaxpr(whole, [True] * len(whole.outvars))
    results = jax.tree.structure(shapes)

    def needed(args: tuple) -> list[Any]:
        return [leaf for leaf, told in zip([*traced.consts, *jax.tree.leaves(args)], used, strict=True) if told]

    lowered = jax.jit(lambda *leaves: eval_jaxpr(jaxpr, (), *leaves)).lower(*needed(args))
    key = sha256(f"{quick} {lowered.in_avals} {lowered.as_text()}".encode()).hexdigest()
    if key not in _SHARED:
        while len(_SHARED) >= _MOST_SHARED:
            del _SHARED[next(iter(_SHARED))]
        _SHARED[key] = _compiled(lowered, _QUICKLY if quick else _usual_options())
    shared = _SHARED[key]
    return lambda *args: jax.tree.unflatten(results, shared(*needed(args)))


def _usual_options() -> dict[str, Any]:
    """Return the compiler's options; none on other devices, or where a user's setting asks for less."""
    has_less = jax.config.read("jax_disable_most_optimizations")
    return {} if has_less or jax.default_backend() != "cpu" else _USUALLY


def _compiled(lowered: Any, options: dict[str, Any]) -> Any:
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError:  # another version of XLA has other options
        return lowered.compile()


def _is_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def split(tree: Any, kind: Any = Array | np.ndarray) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Split a tree into its arrays, and a function that puts arrays in their places; all else stays as it is."""
    leaves, structure = jax.tree.flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, kind)]

    def join(arrays: list[Any]) -> Any:
        found = dict(zip(places, arrays, strict=True))
        return jax.tree.unflatten(structure, [found.get(place, leaf) for place, leaf in enumerate(leaves)])

    return [leaves[place] for place in places], join


def run_with_arguments(fn: Callable, arguments: Any, *trees: Any, quick: bool = False) -> Any:
    """Run ``fn(arguments, *trees)`` compiled; what is no array among the arguments is part of the program."""
    arrays, join = split(arguments)
    return run_program(lambda arrays, *trees: fn(join(arrays), *trees), arrays, *trees, quick=quick)


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
