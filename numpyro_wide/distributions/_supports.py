"""Supports of Lebesgue measure zero: linear manifolds and pairs of atoms."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import constraints


def coordinates(basis: Array, offset: Array) -> Array:
    """Solve by least squares for coordinates (..., K) of ``offset`` (..., D) in columns of ``basis`` (..., D, K)."""
    gram = jnp.swapaxes(basis, -1, -2) @ basis
    right = jnp.einsum("...dk,...d->...k", basis, offset)
    factor = jnp.linalg.cholesky(gram)
    factor = jnp.broadcast_to(factor, right.shape[:-1] + gram.shape[-2:])
    return jax.scipy.linalg.cho_solve((factor, True), right[..., None])[..., 0]


def is_close(x: Array, target: Array) -> Array:
    """Tell whether vectors (..., D) agree, up to the square root of machine precision times their size."""
    tolerance = jnp.sqrt(jnp.finfo(jnp.result_type(x, target, float)).eps)
    size = jnp.sum(jnp.square(x), -1) + jnp.sum(jnp.square(target), -1)
    return jnp.sum(jnp.square(x - target), -1) <= jnp.square(tolerance) * size


class _ArrayConstraint(constraints.Constraint):
    """Constraint on vectors that is described by arrays; equal when the arrays are."""

    event_dim = 1
    _fields: tuple[str, ...] = ()

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, dict[str, Any]]]:
        """Return the arrays as leaves."""
        return tuple(getattr(self, name) for name in self._fields), (self._fields, {})

    def eq(self, other: object, static: bool = False) -> Any:
        """Compare type and arrays."""
        if type(other) is not type(self):
            return False
        pairs = [(getattr(self, name), getattr(other, name)) for name in self._fields]
        if static:
            return all(a is b or bool(jnp.array_equal(a, b)) for a, b in pairs)
        return jnp.stack([jnp.array_equal(a, b) for a, b in pairs]).all()

    __hash__ = None  # type: ignore[assignment]  # arrays are not hashable


class linear_manifold(_ArrayConstraint):  # noqa: N801  # NumPyro's constraints are lower case
    """Manifold ``loc`` + span of the columns of ``basis``; ``loc`` (..., D), ``basis`` (..., D, K)."""

    _fields = ("loc", "basis")

    def __init__(self, loc: Array, basis: Array):
        self.loc = loc
        self.basis = basis

    def __call__(self, x: Array) -> Array:
        """Tell, for vectors (..., D), whether they lie on the manifold up to rounding."""
        inside = jnp.einsum("...dk,...k->...d", self.basis, coordinates(self.basis, x - self.loc))
        return is_close(x, self.loc + inside)

    def feasible_like(self, prototype: Array) -> Array:
        """Return the point of the manifold that describes it, once for each vector."""
        return jnp.broadcast_to(self.loc, jnp.shape(prototype))


class zero_or_row(_ArrayConstraint):  # noqa: N801
    """Pair of atoms 0 and ``rows`` (..., D).

    It is not marked discrete: that word makes NumPyro look for sums over states, and these atoms move with
    the parameters, through which gradients flow.
    """

    _fields = ("rows",)

    def __init__(self, rows: Array):
        self.rows = rows

    def __call__(self, x: Array) -> Array:
        """Tell, for vectors (..., D), whether they are one of the atoms up to rounding."""
        return jnp.all(x == 0, -1) | is_close(x, self.rows)

    def feasible_like(self, prototype: Array) -> Array:
        """Return the row that is kept, once for each vector."""
        return jnp.broadcast_to(self.rows, jnp.shape(prototype))
