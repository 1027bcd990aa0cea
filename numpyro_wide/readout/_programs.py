"""Traced programs of models and functions: any of their results, and the arguments that these depend on."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from copy import copy
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, Primitive
from jax.extend.core.primitives import closed_call_p, custom_jvp_call_p
from jax.interpreters import batching, mlir
from jax.interpreters.partial_eval import dce_jaxpr
from numpyro.primitives import Messenger

from numpyro_wide._compile import inner_programs, operations

_argument = Primitive("argument")
_argument.def_abstract_eval(lambda value, *, place: value)
# Inside of a loop it stays where it is.
batching.defvectorized(_argument)
mlir.register_lowering(_argument, mlir.lower_fun(lambda value, *, place: value, multiple_results=False))
FREE, SMOOTH, STEPPED = range(3)
# Operations on floats whose tangents do not tell how they change.
_STEPS = ("ceil", "floor", "rem", "round", "select_and_scatter_add", "sign", "stop_gradient")


class FreeValues(Messenger):
    """Handler that makes the values that come from outside of a model arguments of the program that is traced."""

    def __init__(self) -> None:
        self.num_keys = 0
        self.are_all_arguments = True
        super().__init__()

    def process_message(self, msg: dict) -> None:
        msg["_is_set_inside"] = msg["value"] is not None and not msg.get("_control_flow_done")

    def postprocess_message(self, msg: dict) -> None:
        name = msg.get("name")
        if msg["_is_set_inside"] and msg["type"] == "sample":
            return
        if msg["type"] == "prng_key":  # drawn outside of sites
            name, self.num_keys = self.num_keys, self.num_keys + 1
        elif msg["type"] not in ("sample", "param", "mutable") or msg.get("is_observed"):
            return
        if msg.get("_control_flow_done"):  # NumPyro's loops have made use of the value already
            self.are_all_arguments = False
        leaves, structure = jax.tree.flatten(msg["value"])
        marked = [_argument.bind(jnp.asarray(leaf), place=(name, index)) for index, leaf in enumerate(leaves)]
        msg["value"] = jax.tree.unflatten(structure, marked)


class Program:
    """A function of arrays as it is traced, whose results have names; without a gradient by what it closes over."""

    def __init__(self, fn: Callable[..., Mapping[Any, object]], *args: object):
        traced, self.results = jax.make_jaxpr(fn, return_shape=True)(*args)
        values = [eqn for eqn in traced.eqns if eqn.primitive is _argument]
        self.places = [(*eqn.params["place"], eqn.outvars[0].aval) for eqn in values]
        self._consts = jax.lax.stop_gradient(traced.consts)
        self._jaxpr = traced.jaxpr.replace(
            invars=[*traced.jaxpr.invars, *(eqn.outvars[0] for eqn in values)],
            eqns=[eqn for eqn in traced.eqns if eqn.primitive is not _argument],
        )

    def reads(self, name: Hashable) -> list[bool]:
        """Return which arguments a result depends on."""
        return dce_jaxpr(self._jaxpr, self._places_of([name]))[1]

    def __call__(self, names: Collection[Hashable], *args: object) -> dict[Any, Any]:
        """Compute some of the results."""
        jaxpr, _ = dce_jaxpr(self._jaxpr, self._places_of(names), instantiate=True)
        leaves = iter(eval_jaxpr(jaxpr, self._consts, *args))
        shapes = {name: self.results[name] for name in names}
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    def check_forward(self) -> None:
        """Refuse forward derivatives of functions with reverse ones of their own, as JAX does once it compiles."""
        if any(eqn.primitive.name == "custom_lin" for eqn in operations(self._jaxpr)):
            raise TypeError("forward-mode derivatives of a custom_vjp function.")

    def dependence_on(self, argument: int) -> dict[Any, int]:
        """Return how each result depends on an argument: ``FREE`` of it, ``SMOOTH``, or by steps, ``STEPPED``."""
        places = [int(index == argument) for index in range(len(self._jaxpr.invars))]
        found = iter(_dependence(self._jaxpr, places))
        return {
            name: max((next(found) for _ in jax.tree.leaves(self.results[name])), default=FREE)
            for name in sorted(self.results)
        }

    def with_true_derivatives(self) -> "Program":
        """Return the program with derivatives of what it computes, where a function defines forward ones of its own."""
        program = copy(self)
        program._jaxpr = _without_custom_jvp(self._jaxpr)
        return program

    def _places_of(self, names: Collection[Hashable]) -> list[bool]:
        # As JAX sorts them.
        return [name in names for name in sorted(self.results) for _ in jax.tree.leaves(self.results[name])]


def _dependence(jaxpr: Jaxpr, arguments: Sequence[int]) -> list[int]:
    """Return how each result depends on what the arguments depend on."""
    found = dict(zip(map(id, jaxpr.invars), arguments, strict=True))
    for eqn in jaxpr.eqns:
        inputs = [found.get(id(variable), FREE) for variable in eqn.invars]
        if any(inputs):
            found.update(zip(map(id, eqn.outvars), _dependence_through(eqn, inputs), strict=True))
    return [found.get(id(variable), FREE) for variable in jaxpr.outvars]


def _dependence_through(eqn: Any, inputs: list[int]) -> list[int]:
    """Return the same for the results of an operation; functions, branches and loops are looked into."""
    name, params = eqn.primitive.name, eqn.params
    programs = [getattr(program, "jaxpr", program) for program in inner_programs(eqn)]
    start = end = 0  # of what a loop carries along
    before = 0  # inputs that programs do not take
    outside = FREE  # what decides about branches and turns
    if name == "scan":  # what it carries comes after constants, before what it takes in slices
        pairs = zip(eqn.invars, programs[0].invars, strict=True), zip(eqn.outvars, programs[0].outvars, strict=True)
        whole = [[outer.aval.ndim == inner.aval.ndim for outer, inner in group] for group in pairs]
        end = sum(whole[0])
        start = end - sum(whole[1])
    elif name == "while":
        before, programs = params["cond_nconsts"], [params["body_jaxpr"].jaxpr]
        start, end = before + params["body_nconsts"], len(inputs)
        (outside,) = _dependence(params["cond_jaxpr"].jaxpr, inputs[:before] + inputs[start:])
    elif name == "cond":
        before, outside = 1, inputs[0]
    sizes = {(len(program.invars), len(program.outvars)) for program in programs}
    if sizes != {(len(inputs) - before, len(eqn.outvars))}:  # no program, or others than of its inputs and results
        names = {name, *(operation.primitive.name for program in programs for operation in operations(program))}
        is_by_order = name == "sort" and any(inputs[: params["num_keys"]])
        is_step = is_by_order or not names.isdisjoint(_STEPS)
        floats = [jnp.issubdtype(variable.aval.dtype, jnp.inexact) for variable in eqn.outvars]
        return [max(inputs) if is_float and not is_step else STEPPED for is_float in floats]
    found = [_dependence(program, inputs[before:]) for program in programs]
    results = [max(outside, *of_result) for of_result in zip(*found, strict=True)]
    carried = [*map(max, inputs[start:end], results)]
    if carried != inputs[start:end]:
        return _dependence_through(eqn, [*inputs[:start], *carried, *inputs[end:]])
    return results


def _without_custom_jvp(jaxpr: Jaxpr) -> Jaxpr:
    """Return a program that calls functions with a forward derivative of their own like others."""

    def changed(param: Any) -> object:
        if hasattr(param, "jaxpr"):
            return param.replace(jaxpr=_without_custom_jvp(param.jaxpr))
        return _without_custom_jvp(param) if hasattr(param, "eqns") else param

    eqns = []
    for eqn in jaxpr.eqns:
        if inner_programs(eqn):
            eqn = eqn.replace(params=jax.tree.map(changed, eqn.params))
        if eqn.primitive is custom_jvp_call_p:
            eqn = eqn.replace(primitive=closed_call_p, params={"call_jaxpr": eqn.params["call_jaxpr"]})
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)
