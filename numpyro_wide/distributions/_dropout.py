"""Distributions of rows under Bernoulli and Gaussian dropout."""

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import xlog1py, xlogy
from numpyro.distributions import constraints

from numpyro_wide._checks import as_floats, check_positive
from numpyro_wide.distributions._singular import SingularDistribution, check_vector
from numpyro_wide.distributions._supports import is_close, linear_manifold, zero_or_row


def _unit_event(owner: str, rows: Any, parameter: Any) -> tuple[Array, Array, tuple[int, ...]]:
    """Broadcast rows (..., D) against one number per row."""
    rows, parameter = as_floats(rows, parameter, names=("rows", "the rate or alpha"))
    check_vector("rows", rows, owner)
    try:
        batch_shape = jnp.broadcast_shapes(rows.shape[:-1], parameter.shape)
    except ValueError as error:
        raise ValueError(
            f"{owner} drops whole rows, one number a row: with `rows` of shape {rows.shape} the second "
            f"argument must broadcast to {rows.shape[:-1]}, got {parameter.shape}."
        ) from error
    return (
        jnp.broadcast_to(rows, (*batch_shape, rows.shape[-1])),
        jnp.broadcast_to(parameter, batch_shape),
        batch_shape,
    )


class BernoulliDropout(SingularDistribution):
    r"""Bernoulli dropout of a row: $p\,\delta_0 + (1-p)\,\delta_\theta$ (Hron 2018, section 4.1).

    The density is with respect to counting measure; the quasi-KL from a Normal prior is that of
    Mathematics, :eq:`bernoulli`. Rows of a weight matrix are its batch: a matrix (R, D) gives R independent
    rows of event size D.

    Args:
        rows: row when it is kept, (..., D), not zero.
        rate: probability of dropping a row, in [0, 1], broadcast over the rows.
        temperature: temperature of a logistic relaxation that gives draws their derivative in ``rate``, while
            they stay exactly 0 or the row (a straight-through gradient, hence biased); None for draws without
            such a derivative.
        validate_args: whether NumPyro checks the parameters; None for its global setting.

    Raises:
        ValueError: if ``rate`` does not broadcast over the rows, or ``temperature`` is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.distributions import BernoulliDropout
        >>> rows = BernoulliDropout(jnp.array([[1.0, 2.0], [3.0, 4.0]]), rate=0.25)
        >>> rows.batch_shape, rows.event_shape
        ((2,), (2,))
        >>> jnp.exp(rows.log_prob(jnp.array([[0.0, 0.0], [3.0, 4.0]]))).round(2).tolist()
        [0.25, 0.75]
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "rows": constraints.real_vector,
        "rate": constraints.unit_interval,
    }
    pytree_data_fields = ("rows", "rate", "temperature")
    # Draws follow the rows only; with a temperature their derivative in the rate is the relaxation's.
    reparametrized_params: ClassVar[list[str]] = ["rows"]

    def __init__(self, rows: Any, rate: Any, *, temperature: Any = None, validate_args: bool | None = None):
        self.rows, self.rate, batch_shape = _unit_event("BernoulliDropout", rows, rate)
        if temperature is not None:
            check_positive("temperature", temperature)
        self.temperature = temperature
        super().__init__(batch_shape, self.rows.shape[-1:], validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self) -> constraints.Constraint:
        """Pair of atoms, 0 and the row."""
        return zero_or_row(self.rows)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw each row or zero, shape ``sample_shape + batch_shape + (D,)``."""
        shape = (*sample_shape, *self.batch_shape)
        if self.temperature is None:
            keep = jax.random.bernoulli(key, 1.0 - self.rate, shape).astype(self.rows.dtype)
            return keep[..., None] * self.rows
        eps = jnp.finfo(self.rate.dtype).eps
        rate = jnp.clip(self.rate, eps, 1.0 - eps)  # the logit must be finite, also for a rate learned to 0 or 1
        logits = jnp.log1p(-rate) - jnp.log(rate) + jax.random.logistic(key, shape, self.rate.dtype)
        relaxed = jax.nn.sigmoid(logits / self.temperature)
        # Adding a difference that is exactly zero keeps the draw on its atom and carries the derivative.
        keep = (logits > 0).astype(self.rows.dtype) + (relaxed - jax.lax.stop_gradient(relaxed))
        return keep[..., None] * self.rows

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        """Evaluate the log probability of an atom, minus infinity elsewhere; the atoms of a zero row coincide."""
        dropped = jnp.all(value == 0, -1)
        kept = is_close(value, self.rows)
        mass = jnp.where(dropped, self.rate, 0.0) + jnp.where(kept, 1.0 - self.rate, 0.0)
        # A positive stand-in where there is no mass keeps the gradient of the other branch finite.
        return jnp.where(mass > 0, jnp.log(jnp.where(mass > 0, mass, 1.0)), -jnp.inf)

    def entropy(self) -> Array:
        """Compute the binary entropy of the rate, for a row that is not zero."""
        return -xlogy(self.rate, self.rate) - xlog1py(1.0 - self.rate, -self.rate)

    def covariance_factor(self) -> tuple[Array, Array]:
        """Return the row as one column and p(1-p)."""
        return self.rows[..., None], (self.rate * (1.0 - self.rate))[..., None]

    @property
    def mean(self) -> Array:
        """Mean, (1 - rate) rows."""
        return (1.0 - self.rate)[..., None] * self.rows

    @property
    def variance(self) -> Array:
        """Variance of each entry."""
        return (self.rate * (1.0 - self.rate))[..., None] * jnp.square(self.rows)


class GaussianDropout(SingularDistribution):
    r"""Gaussian dropout of a row: $s\,\theta$ with one $s \sim N(1, \alpha)$ for the row.

    It lives on the line through 0 and the row, where its density is $N(s; 1,
    \alpha)/\lVert\theta\rVert$ (Hron 2018, section 4.1; Mathematics, :eq:`gaussian-dropout`).

    Args:
        rows: row before the noise, (..., D), not zero.
        alpha: variance of the multiplier, positive, broadcast over the rows.
        validate_args: whether NumPyro checks the parameters; None for its global setting.

    Raises:
        ValueError: if ``alpha`` does not broadcast over the rows.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.distributions import GaussianDropout
        >>> row = GaussianDropout(jnp.array([3.0, 4.0]), alpha=1.0)
        >>> round(float(row.log_prob(jnp.array([3.0, 4.0]))), 4)  # -½ log 2π - log 5
        -2.5284
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "rows": constraints.real_vector,
        "alpha": constraints.positive,
    }
    reparametrized_params: ClassVar[list[str]] = ["rows", "alpha"]

    def __init__(self, rows: Any, alpha: Any, *, validate_args: bool | None = None):
        self.rows, self.alpha, batch_shape = _unit_event("GaussianDropout", rows, alpha)
        super().__init__(batch_shape, self.rows.shape[-1:], validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self) -> constraints.Constraint:
        """Line through 0 and the row."""
        return linear_manifold(jnp.zeros_like(self.rows), self.rows[..., None])

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw rows of shape ``sample_shape + batch_shape + (D,)``; differentiable in both parameters."""
        noise = jax.random.normal(key, (*sample_shape, *self.batch_shape), self.rows.dtype)
        return (1.0 + jnp.sqrt(self.alpha) * noise)[..., None] * self.rows

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        """Evaluate the log density on the line, minus infinity off it."""
        squared_norm = jnp.sum(jnp.square(self.rows), -1)
        multiplier = jnp.sum(value * self.rows, -1) / squared_norm
        log_density = (
            -0.5 * jnp.square(multiplier - 1.0) / self.alpha
            - 0.5 * jnp.log(2 * math.pi * self.alpha)
            - 0.5 * jnp.log(squared_norm)
        )
        return jnp.where(is_close(value, multiplier[..., None] * self.rows), log_density, -jnp.inf)

    def entropy(self) -> Array:
        """Compute the entropy with respect to length along the line."""
        squared_norm = jnp.sum(jnp.square(self.rows), -1)
        return 0.5 * (1.0 + jnp.log(2 * math.pi * self.alpha) + jnp.log(squared_norm))

    def covariance_factor(self) -> tuple[Array, Array]:
        """Return the row as one column and the multiplier's variance."""
        return self.rows[..., None], self.alpha[..., None]

    @property
    def mean(self) -> Array:
        """Mean, which is the row."""
        return self.rows

    @property
    def variance(self) -> Array:
        """Variance of each entry."""
        return self.alpha[..., None] * jnp.square(self.rows)
