"""Which results of a program depend on which of its inputs: a matter of the program, not of numbers."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# Their inner programs feed results back, or choose among several.
_NOT_STRAIGHT = ("scan", "while", "cond")


def is_reached(program: Jaxpr, is_start: Sequence[bool], is_constant_start: Sequence[bool] = ()) -> list[bool]:
    """Which results of a program depend on the arguments, or on the constants, that are marked."""
    reached = {var for var, marked in zip(program.invars, is_start, strict=True) if marked}
    reached |= {var for var, marked in zip(program.constvars, is_constant_start, strict=False) if marked}
    for equation in program.eqns:
        marks = [not isinstance(var, Literal) and var in reached for var in equation.invars]
        if any(marks):
            inner = _inner_program(equation)
            results = [True] * len(equation.outvars) if inner is None else is_reached(inner, marks)
            reached |= {var for var, marked in zip(equation.outvars, results, strict=True) if marked}
    return [not isinstance(var, Literal) and var in reached for var in program.outvars]


def _inner_program(equation: Any) -> Jaxpr | None:
    """The program that an equation runs once, such as that of an inner ``jit``."""
    if equation.primitive.name in _NOT_STRAIGHT:
        return None
    for value in equation.params.values():
        program = value.jaxpr if isinstance(value, ClosedJaxpr) else value
        if isinstance(program, Jaxpr):
            fits = len(program.invars) == len(equation.invars) and len(program.outvars) == len(equation.outvars)
            return program if fits else None
    return None
