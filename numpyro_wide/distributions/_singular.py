"""Distributions on points, lines and subspaces."""

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import xlog1py, xlogy
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.util import array_equiv

from numpyro_wide._checks import as_floats, check_positive


def coordinates(basis: Array, offset: Array) -> Array:
    """Solve by least squares for coordinates (..., K) of ``offset`` in columns of ``basis`` (..., D, K)."""
    right = jnp.einsum("...dk,...d->...k", basis, offset)
    factor = jnp.linalg.cholesky(jnp.swapaxes(basis, -1, -2) @ basis)
    factor = jnp.broadcast_to(factor, right.shape[:-1] + factor.shape[-2:])
    return jax.scipy.linalg.cho_solve((factor, True), right[..., None])[..., 0]


def is_close(x: Array, target: Array, size: ArrayLike = 0.0) -> Array:
    """Whether vectors (..., D) agree, up to the square root of rounding in them or in one of squared size."""
    size = size + jnp.sum(jnp.square(x), -1) + jnp.sum(jnp.square(target), -1)
    return jnp.sum(jnp.square(x - target), -1) <= jnp.finfo(jnp.result_type(x, target, float)).eps * size


class _ArrayConstraint(constraints.Constraint):
    """Constraint on vectors, whose attributes are arrays."""

    event_dim = 1

    def tree_flatten(self) -> tuple[tuple, tuple]:
        return tuple(vars(self).values()), (tuple(vars(self)), {})

    def eq(self, other: object, static: bool = False) -> bool | Array:
        if type(other) is not type(self):
            return False
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        equal = [array_equiv(*pair, static=static) for pair in pairs]
        return all(equal) if static else jnp.array(equal).all()


class _LinearManifold(_ArrayConstraint):
    """Manifold ``loc`` (..., D) + span of ``basis`` (..., D, K)."""

    def __init__(self, loc: Array, basis: Array):
        self.loc, self.basis = loc, basis

    def __call__(self, x: Array) -> Array:
        """Whether vectors (..., D) lie on the manifold up to rounding."""
        offset = x - self.loc
        projection = jnp.einsum("...dk,...k->...d", self.basis, coordinates(self.basis, offset))
        return is_close(offset, projection, jnp.sum(jnp.square(x), -1))

    def feasible_like(self, prototype: Array) -> Array:
        return jnp.broadcast_to(self.loc, jnp.shape(prototype))


class _ZeroOrRow(_ArrayConstraint):
    """Pair of atoms 0 and ``rows`` (..., D)."""

    def __init__(self, rows: Array):
        self.rows = rows

    def __call__(self, x: Array) -> Array:
        """Whether vectors (..., D) are an atom up to rounding."""
        return jnp.all(x == 0, -1) | is_close(x, self.rows)

    def feasible_like(self, prototype: Array) -> Array:
        return jnp.broadcast_to(self.rows, jnp.shape(prototype))


class SingularDistribution(dist.Distribution):
    """Distribution of vectors (D,) on a null set, with densities by its natural measure."""

    def covariance_factor(self) -> tuple[Array, Array]:
        """Return F (..., D, r) and weights (..., r) with covariance F diag(weights) Fᵀ."""
        raise NotImplementedError

    def entropy(self) -> Array:
        """Return the entropy by the support's measure, of shape ``batch_shape``."""
        raise NotImplementedError

    @property
    def variance(self) -> Array:
        """Variance by coordinate, of shape ``batch_shape + (D,)``."""
        factor, weights = self.covariance_factor()
        return jnp.sum(weights[..., None, :] * jnp.square(factor), -1)


class DegenerateNormal(SingularDistribution):
    r"""Normal distribution on a linear manifold: $b + A\,\mathrm{diag}(s)\,\epsilon$, ε ~ N(0, I_K).

    The density is by Lebesgue measure on b + span(A), for any basis (Hron 2018, Theorem 5 and Prop. 6).

    Args:
        loc: mean, (..., D).
        basis: directions, (..., D, K), linearly independent columns.
        scale: standard deviation by column, positive, (..., K).
        validate_args: as in NumPyro.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.distributions import DegenerateNormal
        >>> line = DegenerateNormal(jnp.zeros(2), jnp.array([[0.6], [0.8]]), jnp.array([2.0]))
        >>> line.log_prob(jnp.array([[0.6, 0.8], [1.0, 0.0]])).round(3).tolist()  # the second is off the line
        [-1.737, -inf]
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {
        "loc": constraints.real_vector,
        "basis": constraints.real_matrix,
        "scale": constraints.independent(constraints.positive, 1),
    }
    reparametrized_params: ClassVar[list[str]] = ["loc", "basis", "scale"]

    def __init__(self, loc: ArrayLike, basis: ArrayLike, scale: ArrayLike, *, validate_args: bool | None = None):
        loc, basis, scale = as_floats(loc, basis, scale, names=("loc", "basis", "scale"))
        if basis.ndim < 2 or loc.shape[-1:] != basis.shape[-2:-1] or basis.shape[-1] > basis.shape[-2]:
            raise ValueError(
                f"DegenerateNormal needs `loc` of shape (..., D) and `basis` (..., D, K) with K ≤ D, got {loc.shape} "
                f"and {basis.shape}; for a line pass a column, direction[:, None]."
            )
        dim, rank = basis.shape[-2:]
        batch_shape = jnp.broadcast_shapes(loc.shape[:-1], basis.shape[:-2], scale.shape[:-1])
        self.loc = jnp.broadcast_to(loc, (*batch_shape, dim))
        self.basis = jnp.broadcast_to(basis, (*batch_shape, dim, rank))
        self.scale = jnp.broadcast_to(scale, (*batch_shape, rank))
        super().__init__(batch_shape, (dim,), validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self) -> constraints.Constraint:
        """Manifold b + span(A)."""
        return _LinearManifold(self.loc, self.basis)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw vectors ``sample_shape + batch_shape + (D,)``."""
        shape = (*sample_shape, *self.batch_shape, self.scale.shape[-1])
        noise = jax.random.normal(key, shape, self.scale.dtype)
        return self.loc + jnp.einsum("...dk,...k->...d", self.basis, self.scale * noise)

    def _log_volume(self) -> Array:
        # ½ log det AᵀA + Σ log s
        gram = jnp.swapaxes(self.basis, -1, -2) @ self.basis
        diagonal = jnp.diagonal(jnp.linalg.cholesky(gram), axis1=-2, axis2=-1)
        return jnp.sum(jnp.log(diagonal) + jnp.log(self.scale), -1)

    def log_prob(self, value: Array, intermediates: object = None) -> Array:
        """Return the log density on the manifold, minus infinity off it."""
        standard = coordinates(self.basis, value - self.loc) / self.scale
        log_density = jnp.sum(jax.scipy.stats.norm.logpdf(standard), -1) - self._log_volume()
        return jnp.where(self.support(value), log_density, -jnp.inf)

    def entropy(self) -> Array:
        """Return the entropy by Lebesgue measure on the manifold."""
        return 0.5 * self.scale.shape[-1] * (1.0 + math.log(2 * math.pi)) + self._log_volume()

    def covariance_factor(self) -> tuple[Array, Array]:
        """Return the basis and the squared scales."""
        return self.basis, jnp.square(self.scale)

    @property
    def mean(self) -> Array:
        """Mean, of shape ``batch_shape + (D,)``."""
        return self.loc


def _by_row(rows: ArrayLike, parameter: ArrayLike) -> tuple[Array, Array]:
    """Broadcast rows (..., D) against one number by row."""
    rows, parameter = as_floats(rows, parameter, names=("rows", "the rate or alpha"))
    batch_shape = jnp.broadcast_shapes(rows.shape[:-1], parameter.shape)
    return jnp.broadcast_to(rows, (*batch_shape, rows.shape[-1])), jnp.broadcast_to(parameter, batch_shape)


class BernoulliDropout(SingularDistribution):
    r"""Bernoulli dropout of a row: $p\,\delta_0 + (1-p)\,\delta_\theta$ (Hron 2018, section 4.1).

    The density is by counting measure; its quasi-KL is :eq:`bernoulli`.

    Args:
        rows: rows when kept, (..., D), not zero.
        rate: probability of dropping a row, in [0, 1], broadcast over rows.
        temperature: temperature of a relaxation for the draws' (biased) derivative in ``rate``; None for none.
        validate_args: as in NumPyro.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.distributions import BernoulliDropout
        >>> rows = BernoulliDropout(jnp.array([[1.0, 2.0], [3.0, 4.0]]), rate=0.25)
        >>> jnp.exp(rows.log_prob(jnp.array([[0.0, 0.0], [3.0, 4.0]]))).round(2).tolist()
        [0.25, 0.75]
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"rows": constraints.real_vector, "rate": constraints.unit_interval}
    pytree_data_fields = ("rows", "rate", "temperature")
    # The derivative in the rate is a relaxation's.
    reparametrized_params: ClassVar[list[str]] = ["rows"]

    def __init__(
        self, rows: ArrayLike, rate: ArrayLike, *, temperature: float | None = None, validate_args: bool | None = None
    ):
        self.rows, self.rate = _by_row(rows, rate)
        if temperature is not None:
            check_positive("temperature", temperature)
        self.temperature = temperature
        super().__init__(self.rate.shape, self.rows.shape[-1:], validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self) -> constraints.Constraint:
        """Pair of atoms, 0 and the row."""
        return _ZeroOrRow(self.rows)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw rows or zeros, ``sample_shape + batch_shape + (D,)``."""
        shape = (*sample_shape, *self.batch_shape)
        if self.temperature is None:
            keep = jax.random.bernoulli(key, 1.0 - self.rate, shape).astype(self.rows.dtype)
            return keep[..., None] * self.rows
        eps = jnp.finfo(self.rate.dtype).eps
        rate = jnp.clip(self.rate, eps, 1.0 - eps)  # for a finite logit
        logits = jnp.log1p(-rate) - jnp.log(rate) + jax.random.logistic(key, shape, self.rate.dtype)
        relaxed = jax.nn.sigmoid(logits / self.temperature)
        # The zero difference carries the derivative only.
        keep = (logits > 0).astype(self.rows.dtype) + (relaxed - jax.lax.stop_gradient(relaxed))
        return keep[..., None] * self.rows

    def log_prob(self, value: Array, intermediates: object = None) -> Array:
        """Return the log probability of an atom, minus infinity elsewhere."""
        is_zero = jnp.all(value == 0, -1)
        is_row = is_close(value, self.rows)
        mass = jnp.where(is_zero, self.rate, 0.0) + jnp.where(is_row, 1.0 - self.rate, 0.0)
        # A stand-in for zero mass keeps gradients finite.
        return jnp.where(mass > 0, jnp.log(jnp.where(mass > 0, mass, 1.0)), -jnp.inf)

    def entropy(self) -> Array:
        """Return the binary entropy of the rate."""
        return -xlogy(self.rate, self.rate) - xlog1py(1.0 - self.rate, -self.rate)

    def covariance_factor(self) -> tuple[Array, Array]:
        """Return the row as a column, and p(1-p)."""
        return self.rows[..., None], (self.rate * (1.0 - self.rate))[..., None]

    @property
    def mean(self) -> Array:
        """Mean, (1 - rate) rows."""
        return (1.0 - self.rate)[..., None] * self.rows


class GaussianDropout(DegenerateNormal):
    r"""Gaussian dropout of a row: $s\,\theta$ with one $s \sim N(1, \alpha)$ by row.

    The density on the line is $N(s; 1, \alpha)/\lVert\theta\rVert$ (Hron 2018, section 4.1; :eq:`gaussian-dropout`).

    Args:
        rows: rows before the noise, (..., D), not zero.
        alpha: variance of the multiplier, positive, broadcast over rows.
        validate_args: as in NumPyro.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.distributions import GaussianDropout
        >>> row = jnp.array([3.0, 4.0])
        >>> round(float(GaussianDropout(row, alpha=1.0).log_prob(row)), 4)  # -½ log 2π - log 5
        -2.5284
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"rows": constraints.real_vector, "alpha": constraints.positive}
    reparametrized_params: ClassVar[list[str]] = ["rows", "alpha"]

    def __init__(self, rows: ArrayLike, alpha: ArrayLike, *, validate_args: bool | None = None):
        self.rows, self.alpha = _by_row(rows, alpha)
        scale = jnp.sqrt(self.alpha)[..., None]
        super().__init__(self.rows, self.rows[..., None], scale, validate_args=validate_args)
