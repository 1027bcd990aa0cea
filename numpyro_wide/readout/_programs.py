"""Traced programs of models and functions: any of their results, and the arguments that these depend on."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.interpreters.partial_eval import dce_jaxpr
from numpyro.primitives import Messenger

from numpyro_wide._compile import inner_programs

_argument = Primitive("argument")
_argument.def_abstract_eval(lambda value, *, place: value)
# Inside of a loop it stays where it is.
batching.defvectorized(_argument)
mlir.register_lowering(_argument, mlir.lower_fun(lambda value, *, place: value, multiple_results=False))


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

    def __init__(self, fn: Callable[..., dict[Any, Any]], *args: Any):
        traced, self.results = jax.make_jaxpr(fn, return_shape=True)(*args)
        values = [eqn for eqn in traced.eqns if eqn.primitive is _argument]
        self.places = [(*eqn.params["place"], eqn.outvars[0].aval) for eqn in values]
        self._consts = jax.lax.stop_gradient(traced.consts)
        self._jaxpr = traced.jaxpr.replace(
            invars=[*traced.jaxpr.invars, *(eqn.outvars[0] for eqn in values)],
            eqns=[eqn for eqn in traced.eqns if eqn.primitive is not _argument],
        )

    def reads(self, name: Any) -> list[bool]:
        """Return which arguments a result depends on."""
        return dce_jaxpr(self._jaxpr, self._places_of([name]))[1]

    def __call__(self, names: Sequence[Any], *args: Any) -> dict[Any, Any]:
        """Compute some of the results."""
        jaxpr, _ = dce_jaxpr(self._jaxpr, self._places_of(names), instantiate=True)
        leaves = iter(eval_jaxpr(jaxpr, self._consts, *args))
        shapes = {name: self.results[name] for name in names}
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    def check_forward(self) -> None:
        """Refuse forward derivatives of functions with reverse ones of their own, as JAX does once it compiles."""
        if _contains(self._jaxpr.eqns, "custom_lin"):
            raise TypeError("forward-mode derivatives of a custom_vjp function.")

    def is_coarse(self) -> bool:
        """Whether the arguments enter a loop of unknown length or a print, whose results read all that enters them."""
        moving = set(map(id, self._jaxpr.invars))
        for eqn in self._jaxpr.eqns:
            if moving.intersection(map(id, eqn.invars)):
                if eqn.effects or _contains([eqn], "while"):
                    return True
                moving.update(map(id, eqn.outvars))
        return False

    def _places_of(self, names: Sequence[Any]) -> list[bool]:
        # As JAX sorts them.
        return [name in names for name in sorted(self.results) for _ in jax.tree.leaves(self.results[name])]


def _contains(equations: Sequence[Any], name: str) -> bool:
    """Whether an operation of this name is among equations, or in a function or loop of one."""
    inner = [program for eqn in equations for program in inner_programs(eqn)]
    return any(eqn.primitive.name == name for eqn in equations) or any(_contains(each.eqns, name) for each in inner)


def depends(fn: Callable[[Any], dict[Any, Any]], argument: Any) -> dict[Any, bool]:
    """Return which entries of a function's result depend on its argument, as the traced program shows."""
    program = Program(fn, argument)
    return {name: any(program.reads(name)) for name in program.results}
