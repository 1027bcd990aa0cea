"""Exponential families in natural parameters η, as NumPyro distributions (McNamara 2025, Lemma 1; :eq:`family`).

Constructors are ``family(natural, *, shift=0.0, validate_args=None)``, with η = natural + shift along the last axis.
The paper takes ``shift=1e-4`` for networks with outputs near zero; ``biject_to(domain(family))`` keeps η inside.
"""

import math
from collections.abc import Callable
from functools import partial, singledispatch

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.lax import stop_gradient
from jax.typing import ArrayLike
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import ParameterFreeTransform
from numpyro.distributions.util import promote_shapes, validate_sample

from numpyro_wide._checks import as_floats, is_known

__all__ = [
    "MultivariateNormal",
    "Normal",
    "TruncatedNormal",
    "domain",
    "parameters",
]


_DOMAINS: dict[Callable[..., dist.Distribution], constraints.Constraint] = {}


def domain(constructor: Callable[..., dist.Distribution]) -> constraints.Constraint:
    """Return the space of a family's natural parameters, as a NumPyro constraint on vectors, for ``biject_to``.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro.distributions import biject_to
        >>> from numpyro_wide import natural
        >>> into = biject_to(natural.domain(natural.Normal))
        >>> natural.Normal(into(jnp.array([3.0, 0.0]))).mean  # from any two numbers
        Array(1.5, dtype=float32)
    """
    if constructor not in _DOMAINS:
        families = ", ".join(sorted(f"natural.{family.__name__}" for family in _DOMAINS))
        raise ValueError(f"domain takes a family of this package, one of {families}, but got {constructor!r}.")
    return _DOMAINS[constructor]


@singledispatch
def parameters(distribution: dist.Distribution) -> Array:
    """Compute the natural parameters of a NumPyro distribution, ``(*batch_shape, size)``.

    Example:
        >>> import numpyro.distributions as dist
        >>> from numpyro_wide import natural
        >>> natural.parameters(dist.Normal(3.0, 0.5)).tolist()
        [12.0, -2.0]
    """
    raise ValueError(
        f"natural parameters are known for the families of numpyro_wide.natural, but got "
        f"{type(distribution).__name__}; of a distribution under to_event or expand, pass the base."
    )


def _family(
    name: str,
    size: int | None,
    space: constraints.Constraint,
    from_natural: Callable[..., dist.Distribution],
    to_natural: Callable[[dist.Distribution], Array],
    distribution: type,
    doc: str,
) -> Callable[..., dist.Distribution]:
    """Make the constructor of a family, and register its space and its inverse."""

    def constructor(
        natural: ArrayLike, *, shift: ArrayLike = 0.0, validate_args: bool | None = None, **bounds: object
    ) -> dist.Distribution:
        total = jnp.add(*jnp.broadcast_arrays(*as_floats(natural, shift)))
        if total.ndim == 0 or (size is not None and total.shape[-1] != size):
            expected = "its natural parameters" if size is None else f"its {size} natural parameters"
            raise ValueError(
                f"natural.{name} takes {expected} along the last axis of one array, but got shape {total.shape}. "
                "Use jnp.stack([eta1, ...], axis=-1)."
            )
        if is_known(total) and (is_outside := ~np.asarray(space(total))).any():
            invalid = np.asarray(total).reshape(-1, total.shape[-1])[is_outside.reshape(-1)][0]
            raise ValueError(
                f"natural.{name} got natural parameters outside their space (see its docstring), first {invalid}. "
                "Give a `shift` that moves an encoder's outputs inside, or map them with "
                f"numpyro.distributions.biject_to(natural.domain(natural.{name}))."
            )
        return from_natural(total, validate_args=validate_args, **bounds)

    constructor.__name__ = constructor.__qualname__ = name
    constructor.__doc__ = doc
    _DOMAINS[constructor] = space
    parameters.register(distribution)(to_natural)
    return constructor


def _stack(*components: Array) -> Array:
    return jnp.stack(jnp.broadcast_arrays(*components), axis=-1)


@partial(jnp.vectorize, signature="(d),(d,d)->(k)")
def pack_normal(vector: Array, precision: Array) -> Array:
    """Pack Λμ (..., D) and Λ (..., D, D) into natural parameters (..., D(D + 3)/2)."""
    rows, columns = np.tril_indices(len(vector))
    weights = np.where(rows == columns, -0.5, -1.0).astype(precision.dtype)
    return jnp.concatenate([vector, weights * precision[rows, columns]])


def unpack_normal(natural: Array) -> tuple[Array, Array]:
    """Unpack Λμ (..., D) and Λ (..., D, D) from natural parameters."""
    size = natural.shape[-1]
    dim = (math.isqrt(9 + 8 * size) - 3) // 2  # D(D + 3)/2 = size
    if dim == 0 or dim * (dim + 3) // 2 != size:
        raise ValueError(
            "natural.MultivariateNormal takes D(D + 3)/2 natural parameters along the last axis, "
            f"but got shape {natural.shape}."
        )
    rows, columns = np.tril_indices(dim)
    # Each number off the diagonal is there twice.
    half = jnp.zeros((*natural.shape[:-1], dim, dim), natural.dtype).at[..., rows, columns].set(-natural[..., dim:])
    return natural[..., :dim], half + jnp.swapaxes(half, -1, -2)


class _MultivariateNormalSpace(constraints._SingletonConstraint):
    """Natural parameters with Λ positive definite."""

    event_dim = 1

    def __call__(self, x: Array) -> Array:
        return jnp.all(jnp.linalg.eigvalsh(unpack_normal(jnp.asarray(x))[1]) > 0, axis=-1)

    def feasible_like(self, prototype: Array) -> Array:
        vector, _ = unpack_normal(jnp.asarray(prototype))
        return pack_normal(jnp.zeros_like(vector), jnp.eye(vector.shape[-1], dtype=vector.dtype))


class _MultivariateNormalMap(ParameterFreeTransform):
    """Map of unconstrained vectors to natural parameters, with Λ = LLᵀ."""

    domain = constraints.real_vector
    codomain = _MultivariateNormalSpace()

    def __call__(self, x: Array) -> Array:
        dim = unpack_normal(x)[0].shape[-1]
        return pack_normal(x[..., :dim], biject_to(constraints.positive_definite)(x[..., dim:]))

    def _inverse(self, y: Array) -> Array:
        vector, precision = unpack_normal(y)
        return jnp.concatenate([vector, biject_to(constraints.positive_definite).inv(precision)], axis=-1)

    def log_abs_det_jacobian(self, x: Array, y: Array, intermediates: object = None) -> Array:
        """Add to that of the map to Λ a factor ½ for each diagonal entry."""
        _, precision = unpack_normal(y)
        dim = precision.shape[-1]
        log_det = biject_to(constraints.positive_definite).log_abs_det_jacobian(x[..., dim:], precision)
        return log_det - dim * math.log(2)


biject_to.register(_MultivariateNormalSpace)(lambda constraint: _MultivariateNormalMap())


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)
_DEPTH = 40.0  # nats below the mode that hold all mass


class NaturalTruncatedNormal(dist.TwoSidedTruncatedDistribution):
    """Normal distribution on an interval, by quadrature: it holds far from its mean, and where it is nearly uniform."""

    @validate_sample
    def log_prob(self, value: ArrayLike, intermediates: object = None) -> Array:
        """Evaluate the log density of values in the interval."""
        value, mode, width, *form, begin, end = self._around_mode(value)
        return _log_form((value - mode) / width, *form) - jnp.log(_mass(begin, end, *form) * width)

    def cdf(self, value: ArrayLike) -> Array:
        """Compute the probability below any values."""
        value, mode, width, *form, begin, end = self._around_mode(value)
        return _mass(begin, jnp.clip((value - mode) / width, begin, end), *form) / _mass(begin, end, *form)

    def icdf(self, q: ArrayLike) -> Array:
        """Compute quantiles, in the interval."""
        q, mode, width, *form, begin, end = self._around_mode(q)
        target_mass = q * _mass(begin, end, *form)

        def halve(_: Array, ends: Array) -> Array:
            middle = ends.mean(axis=0)
            is_below = _mass(begin, middle, *form) < target_mass
            return jnp.stack([jnp.where(is_below, middle, ends[0]), jnp.where(is_below, ends[1], middle)])

        ends = jnp.stack([jnp.broadcast_to(end, target_mass.shape) for end in (begin, end)])
        quantile = stop_gradient(jax.lax.fori_loop(0, jnp.finfo(ends.dtype).nmant, halve, ends).mean(axis=0))
        # A step of Newton's has the derivatives; of its value rounding is left.
        step = (_mass(begin, quantile, *form) - target_mass) / jnp.exp(_log_form(quantile, *form))
        quantile -= step - stop_gradient(step)
        is_outside = jnp.less(q, 0) | jnp.greater(q, 1)
        return jnp.where(is_outside, jnp.nan, jnp.clip(mode + width * quantile, self.low, self.high))

    def _around_mode(self, value: ArrayLike) -> list[Array]:
        """Return a value, mode and width, and in units of it slope and curvature of −log density, and the ends."""
        value, low, high, loc, scale = as_floats(value, self.low, self.high, self.base_dist.loc, self.base_dist.scale)
        width = high - low
        # Derivatives go through the slope, right at any point of expansion: those of the ends would cancel.
        mode = stop_gradient(jnp.clip(loc, low, high))
        slope, curvature = width * (mode - loc) / scale**2, (width / scale) ** 2
        steep, curved = stop_gradient((slope, 2 * _DEPTH * curvature))
        half_width = 2 * _DEPTH / jnp.maximum(jnp.abs(steep) + jnp.sqrt(steep**2 + curved), 2 * _DEPTH)
        begin, end = ((bound - mode) / width for bound in (low, high))
        ends = jnp.maximum(begin, -half_width), jnp.minimum(end, half_width)
        return promote_shapes(value, mode, width, slope, curvature, *ends)


def _log_form(x: Array, slope: Array, curvature: Array) -> Array:
    return -x * (slope + 0.5 * curvature * x)


def _mass(begin: Array, end: Array, slope: Array, curvature: Array) -> Array:
    """Integrate the form from ``begin`` to ``end``."""
    middle, half = (begin + end) / 2, (end - begin) / 2
    nodes, weights = (jnp.asarray(rule, half.dtype).reshape(-1, *[1] * half.ndim) for rule in (_NODES, _WEIGHTS))
    form = _log_form(middle[None] + half[None] * nodes, slope[None], curvature[None])
    return half * jnp.sum(weights * jnp.exp(form), axis=0)


def _loc_and_scale(eta: Array) -> tuple[Array, Array]:
    variance = -0.5 / eta[..., 1]
    return eta[..., 0] * variance, jnp.sqrt(variance)


def _natural_of_normal(q: dist.Normal) -> Array:
    precision = 1 / jnp.square(q.scale)
    return _stack(q.loc * precision, -0.5 * precision)


def _multivariate_normal(eta: Array, validate_args: bool | None) -> dist.MultivariateNormal:
    vector, precision = unpack_normal(eta)
    root = dist.MultivariateNormal(precision_matrix=precision).scale_tril
    loc = jnp.einsum("...ij,...kj,...k->...i", root, root, vector)
    return dist.MultivariateNormal(loc, scale_tril=root, validate_args=validate_args)


_NORMAL_SPACE = constraints.independent(constraints.cat((constraints.real, constraints.less_than(0.0)), dim=-1), 1)

Normal = _family(
    "Normal",
    2,
    _NORMAL_SPACE,
    lambda eta, **options: dist.Normal(*_loc_and_scale(eta), **options),
    _natural_of_normal,
    dist.Normal,
    r"Normal distribution, $T(\theta) = (\theta, \theta^2)$, η = (μ/σ², −1/(2σ²)), the second negative.",
)
MultivariateNormal = _family(
    "MultivariateNormal",
    None,
    _MultivariateNormalMap.codomain,
    _multivariate_normal,
    lambda q: pack_normal(jnp.einsum("...ij,...j->...i", q.precision_matrix, q.loc), q.precision_matrix),
    dist.MultivariateNormal,
    "Multivariate Normal distribution, T(θ) = (θ, θ_i θ_j for i ≥ j, row by row), η = (Λμ, −½ Λ_ii and −Λ_ij for i > j "
    "in the order of ``numpy.tril_indices``), D(D + 3)/2 numbers, the precision Λ positive definite.",
)
TruncatedNormal = _family(
    "TruncatedNormal",
    2,
    _NORMAL_SPACE,
    lambda eta, low=0.0, high=1.0, **options: NaturalTruncatedNormal(
        dist.Normal(*_loc_and_scale(eta)), low, high, **options
    ),
    lambda q: _natural_of_normal(q.base_dist),
    dist.TwoSidedTruncatedDistribution,
    r"Normal distribution on the interval from ``low=0.0`` to ``high=1.0``, η as for :func:`Normal`.",
)
