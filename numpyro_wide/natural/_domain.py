"""Spaces of natural parameters, as NumPyro constraints, and the check that a vector lies in its space."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import Transform

from numpyro_wide._checks import as_floats, is_known

Family = TypeVar("Family", bound=Callable[..., Any])
_DOMAINS: dict[Callable[..., Any], constraints.Constraint] = {}


def family(space: constraints.Constraint) -> Callable[[Family], Family]:
    """Register the space of a constructor's natural parameters."""

    def register(constructor: Family) -> Family:
        _DOMAINS[constructor] = space
        return constructor

    return register


def domain(constructor: Callable[..., Any]) -> constraints.Constraint:
    """Return the space of a family's natural parameters, as a NumPyro constraint on vectors.

    ``biject_to`` of it maps unconstrained vectors of the same size into the space smoothly, so that an encoder
    cannot leave it; ``numpyro.param`` takes it as its ``constraint``.

    Args:
        constructor: constructor of ``numpyro_wide.natural``, such as ``natural.Gamma``.

    Returns:
        A constraint with ``event_dim`` 1.

    Raises:
        ValueError: if ``constructor`` is not one of them.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro.distributions import biject_to
        >>> from numpyro_wide import natural
        >>> into = biject_to(natural.domain(natural.Normal))
        >>> natural.Normal(into(jnp.array([3.0, 0.0]))).mean  # from any two numbers
        Array(1.5, dtype=float32)
    """
    if not callable(constructor) or constructor not in _DOMAINS:
        known = ", ".join(sorted(f"natural.{known.__name__}" for known in _DOMAINS))
        raise ValueError(
            f"domain takes a constructor of numpyro_wide.natural, one of {known}, but got {constructor!r}."
        )
    return _DOMAINS[constructor]


def boxed(*components: constraints.Constraint) -> constraints.Constraint:
    """Constrain the components of a vector, each by its own constraint on numbers."""
    return constraints.independent(constraints.cat(components, dim=-1), 1)


def shifted(natural: ArrayLike, shift: ArrayLike, constructor: Callable[..., Any], size: int | None) -> Array:
    """Return ``natural + shift`` as floats, after the checks that all constructors make.

    Args:
        natural: natural parameters as the user passed them, (..., size).
        shift: number or array that broadcasts against them.
        constructor: constructor that calls, for its domain and its name.
        size: number of natural parameters; None for any.
    """
    # In float32 at least: encoders may work in half precision, densities must not.
    natural, shift = as_floats(natural, shift, np.float32(0))[:2]
    name = f"natural.{constructor.__name__}"
    try:
        total = jnp.add(*jnp.broadcast_arrays(natural, shift))
    except ValueError as error:
        raise ValueError(
            f"{name} adds `shift` to the natural parameters, so that it must be a number or broadcast against their "
            f"shape {natural.shape}, but has shape {shift.shape}."
        ) from error
    if total.ndim == 0 or (size is not None and total.shape[-1] != size):
        expected = "its natural parameters" if size is None else f"its {size} natural parameter{'s' * (size > 1)}"
        raise ValueError(
            f"{name} takes {expected} along the last axis of one array, but got shape {total.shape}. "
            "Use jnp.stack([eta1, ...], axis=-1), or eta[..., None] for a single parameter."
        )
    _check_inside(total, name, _DOMAINS[constructor])
    return total


def _check_inside(natural: Array, name: str, space: constraints.Constraint) -> None:
    """Refuse values outside the space where they are known, that is, outside jit."""
    if not is_known(natural):
        return
    outside = ~np.asarray(space(natural))
    if outside.any():
        first = np.asarray(natural).reshape(-1, natural.shape[-1])[outside.reshape(-1)][0]
        raise ValueError(
            f"{name} got natural parameters outside their space (see its docstring), first {first}. Give a `shift` "
            "that moves an encoder's outputs inside, or map them with "
            f"numpyro.distributions.biject_to(natural.domain({name}))."
        )


def pack_normal(vector: Array, precision: Array) -> Array:
    """Pack Λμ (..., D) and Λ (..., D, D) of a multivariate Normal into natural parameters (..., D(D + 3)/2)."""
    rows, columns = np.tril_indices(precision.shape[-1])
    lower = precision[..., rows, columns]
    weights = jnp.broadcast_to(np.where(rows == columns, -0.5, -1.0).astype(precision.dtype), lower.shape)
    vector = jnp.broadcast_to(
        vector, (*jnp.broadcast_shapes(vector.shape[:-1], precision.shape[:-2]), vector.shape[-1])
    )
    entries = jnp.broadcast_to(weights * lower, (*vector.shape[:-1], len(rows)))
    return jnp.concatenate([vector, entries], axis=-1)


def unpack_normal(natural: Array) -> tuple[Array, Array]:
    """Unpack Λμ (..., D) and Λ (..., D, D) from the natural parameters of a multivariate Normal."""
    dim = normal_dimension(natural.shape[-1])
    if dim is None:
        raise ValueError(
            "natural.MultivariateNormal takes D(D + 3)/2 natural parameters along the last axis (2, 5, 9, 14, ... for "
            f"D = 1, 2, 3, 4, ...), but got shape {natural.shape}."
        )
    rows, columns = np.tril_indices(dim)
    weights = np.where(rows == columns, -2.0, -1.0).astype(natural.dtype)
    entries = natural[..., dim:] * jnp.broadcast_to(weights, natural[..., dim:].shape)
    lower = jnp.zeros((*natural.shape[:-1], dim, dim), natural.dtype).at[..., rows, columns].set(entries)
    return natural[..., :dim], lower + jnp.swapaxes(jnp.tril(lower, -1), -1, -2)


def normal_dimension(size: int) -> int | None:
    """Solve D(D + 3)/2 = size for D; None if there is none."""
    dim = (math.isqrt(9 + 8 * size) - 3) // 2
    return dim if dim > 0 and dim * (dim + 3) // 2 == size else None


class _MultivariateNormalSpace(constraints._SingletonConstraint):
    """Vectors (Λμ, lower triangle of Λ in the order and scale of T) with Λ positive definite."""

    event_dim = 1

    def __call__(self, x: Array) -> Array:
        """Tell which vectors have a positive definite precision."""
        return jnp.all(jnp.linalg.eigvalsh(unpack_normal(jnp.asarray(x))[1]) > 0, axis=-1)

    def feasible_like(self, prototype: Array) -> Array:
        """Return the parameters of N(0, I)."""
        vector, _ = unpack_normal(jnp.asarray(prototype))
        return pack_normal(jnp.zeros_like(vector), jnp.eye(vector.shape[-1], dtype=vector.dtype))


class _MultivariateNormalMap(Transform):
    """Map of unconstrained vectors to natural parameters: their last part becomes Λ = LLᵀ through NumPyro's own map."""

    domain = constraints.real_vector
    codomain = _MultivariateNormalSpace()

    def __call__(self, x: Array) -> Array:
        """Map to natural parameters."""
        dim = unpack_normal(x)[0].shape[-1]
        return pack_normal(x[..., :dim], biject_to(constraints.positive_definite)(x[..., dim:]))

    def _inverse(self, y: Array) -> Array:
        vector, precision = unpack_normal(y)
        return jnp.concatenate([vector, biject_to(constraints.positive_definite).inv(precision)], axis=-1)

    def log_abs_det_jacobian(self, x: Array, y: Array, intermediates: Any = None) -> Array:
        """Add to that of the map to Λ a factor ½ for each of its D diagonal entries."""
        _, precision = unpack_normal(y)
        dim = precision.shape[-1]
        log_det = biject_to(constraints.positive_definite).log_abs_det_jacobian(x[..., dim:], precision)
        return log_det - dim * math.log(2)

    def tree_flatten(self) -> tuple[tuple[()], tuple[tuple[()], dict[str, Any]]]:
        """Hold no arrays."""
        return (), ((), {})

    def __eq__(self, other: object) -> bool:
        """Tell whether the other is a map of this kind: all of them are the same."""
        return isinstance(other, _MultivariateNormalMap)

    __hash__ = None  # type: ignore[assignment]  # as NumPyro's transforms


multivariate_normal_space = _MultivariateNormalMap.codomain
biject_to.register(_MultivariateNormalSpace)(lambda constraint: _MultivariateNormalMap())
