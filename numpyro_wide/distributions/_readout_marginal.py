"""The likelihood with the readout integrated out."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample
from numpyro.util import is_prng_key

from numpyro_wide.linear_gaussian import log_evidence


class ReadoutMarginal(Distribution):
    r"""Marginal of Gaussian observations over a Gaussian readout.

    $N(\text{loc}, \Psi \operatorname{diag}(\text{prior\_scale}^2) \Psi^\top + \text{noise\_scale}^2)$, independent over
    outputs: what :func:`~numpyro_wide.collapse_readout` puts in the place of the model's Normal. Its log density is
    the evidence (Hron 2022, eq. 5; Mathematics, :eq:`evidence`), with
    :func:`~numpyro_wide.linear_gaussian.log_evidence`'s closed-form gradient.

    Args:
        features: $\Psi$, shape (n, d).
        loc: mean of the observations at the prior mean of the readout, shape (n,) or (n, k).
        noise_scale: standard deviation of the observations given the readout; broadcasts against ``loc``.
        prior_scale: standard deviation of the readout; broadcasts against its shape, (d,) or (d, k).
        variant: "feature", "data", "data-cholesky" or "auto".
        validate_args: as in every NumPyro distribution.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.distributions import ReadoutMarginal
        >>> marginal = ReadoutMarginal(jnp.ones((3, 2)), loc=jnp.zeros(3), noise_scale=1.0)
        >>> marginal.event_shape, marginal.variance.tolist()
        ((3,), [3.0, 3.0, 3.0])
    """

    arg_constraints = {  # noqa: RUF012
        "features": constraints.real,
        "loc": constraints.real,
        "noise_scale": constraints.positive,
        "prior_scale": constraints.positive,
    }
    reparametrized_params = ["features", "loc", "noise_scale", "prior_scale"]  # noqa: RUF012
    pytree_data_fields = ("features", "loc", "noise_scale", "prior_scale")
    pytree_aux_fields = ("variant",)

    def __init__(
        self,
        features: ArrayLike,
        loc: ArrayLike,
        noise_scale: ArrayLike,
        prior_scale: ArrayLike = 1.0,
        *,
        variant: str = "auto",
        validate_args: bool | None = None,
    ):
        self.features = jnp.asarray(features)
        self.loc = jnp.asarray(loc)
        self.noise_scale = jnp.asarray(noise_scale)
        self.prior_scale = jnp.asarray(prior_scale)
        self.variant = variant
        super().__init__((), self.loc.shape, validate_args=validate_args)

    @property
    def support(self) -> Any:
        """Real vectors or matrices."""
        return constraints.independent(constraints.real, self.event_dim)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws a readout from its prior, then observations given it."""
        if not is_prng_key(key):
            raise TypeError(f"key must be a PRNG key such as jax.random.key(0), but got {type(key).__name__}.")
        readout_key, noise_key = random.split(key)
        readout_shape = (self.features.shape[1], *self.event_shape[1:])
        readout = self.prior_scale * random.normal(readout_key, (*sample_shape, *readout_shape))
        signal = jnp.tensordot(readout, self.features.T, axes=(len(sample_shape), 0))
        signal = jnp.moveaxis(signal, -1, len(sample_shape))
        noise = self.noise_scale * random.normal(noise_key, (*sample_shape, *self.event_shape))
        return self.loc + signal + noise

    @validate_sample
    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        """Log evidence of ``value``, one number for each leading index."""

        def single(value: Array) -> Array:
            return log_evidence(
                self.features, value - self.loc, self.noise_scale, self.variant, prior_scale=self.prior_scale
            )

        for _ in range(jnp.ndim(value) - self.event_dim):
            single = jax.vmap(single)
        return single(value)

    @property
    def mean(self) -> Array:
        """Marginal means, the shape of ``loc``."""
        return self.loc

    @property
    def variance(self) -> Array:
        """Marginal variances, the shape of ``loc``."""
        readout_shape = (self.features.shape[1], *self.event_shape[1:])
        signal = self.features**2 @ jnp.broadcast_to(self.prior_scale**2, readout_shape)
        return signal + jnp.broadcast_to(self.noise_scale**2, self.event_shape)
