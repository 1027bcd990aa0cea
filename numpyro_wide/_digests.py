"""What a program computes, as a digest that is the same in every process of the same code."""

import re
from collections.abc import Callable, Mapping
from enum import Enum
from hashlib import sha256
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from numpyro_wide._checks import is_known

_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
_PLAIN = (str, bytes, bool, int, float, complex, type(None), np.dtype, Enum)


def digest(*values: Any) -> str:
    """A digest of numbers, arrays, names, containers of them, and of programs as ``jax.make_jaxpr`` gives them.

    Of functions and of objects that do not say what they hold, only the name counts.
    """
    return _hash(_Text()(values))


def program_digest(function: Callable, *args: Any) -> str:
    """A digest of what a function computes from arrays of the shapes and types of ``args``, constants included."""
    return digest(jax.make_jaxpr(function)(*jax.tree.map(_abstract, args)))


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.numpy.result_type(leaf))


def _hash(text: str | bytes) -> str:
    return sha256(text.encode() if isinstance(text, str) else text).hexdigest()


class _Text:
    """Writes values as text. A program inside of a program is written once, and its digest from then on."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Jaxpr, str]] = {}

    def __call__(self, value: Any) -> str:
        if isinstance(value, ClosedJaxpr):
            return f"program {self.program(value.jaxpr)} {self(tuple(value.consts))}"
        if isinstance(value, Jaxpr):
            return f"program {self.program(value)}"
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            return _array(value)
        if isinstance(value, _PLAIN):
            return _ADDRESS.sub("", repr(value))
        if isinstance(value, Mapping):
            return f"{{{', '.join(sorted(f'{self(key)}: {self(item)}' for key, item in value.items()))}}}"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(map(self, value)))}}}"
        if isinstance(value, tuple | list):
            return f"{type(value).__name__}({', '.join(map(self, value))})"
        if callable(value) or hasattr(value, "call_wrapped"):
            return f"function {getattr(value, '__qualname__', type(value).__qualname__)}"
        return _ADDRESS.sub("", repr(value))

    def program(self, jaxpr: Jaxpr) -> str:
        if id(jaxpr) not in self.known:
            self.known[id(jaxpr)] = jaxpr, _hash("\n".join(self.lines(jaxpr)))
        return self.known[id(jaxpr)][1]

    def lines(self, jaxpr: Jaxpr) -> list[str]:
        """One line an equation, with variables numbered as they come."""
        numbers: dict[Var, int] = {}

        def atom(variable: Any) -> str:
            if isinstance(variable, Literal):
                return f"{self(variable.val)}:{variable.aval}"
            return f"%{numbers.setdefault(variable, len(numbers))}:{variable.aval}"

        def atoms(variables: Any) -> str:
            return " ".join(map(atom, variables))

        lines = [f"{atoms(jaxpr.constvars)} ; {atoms(jaxpr.invars)}"]
        for equation in jaxpr.eqns:
            name, params = equation.primitive.name, self(equation.params)
            lines.append(f"{name} {params} {atoms(equation.invars)} -> {atoms(equation.outvars)}")
        return [*lines, atoms(jaxpr.outvars)]


def _array(value: Any) -> str:
    """Type, shape and bytes; without the bytes if other processes hold some of them."""
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return f"keys {value.dtype} {_array(jax.random.key_data(value))}"
    held = _hash(np.asarray(value).tobytes()) if is_known(value) else ""
    return f"array {value.dtype} {value.shape} {held}"
