"""Likelihood with the readout integrated out, as a NumPyro distribution."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample
from numpyro.util import is_prng_key

from numpyro_wide.linear_gaussian import ReadoutProblem


class ReadoutMarginal(Distribution):
    r"""Marginal of Gaussian observations over a Gaussian readout.

    $N(\text{loc}, \Psi \operatorname{diag}(\text{prior\_scale}^2) \Psi^\top + \text{noise\_scale}^2)$, independent over
    outputs: what :func:`~numpyro_wide.collapse_readout` puts there instead of the model's Normal. Its log density is
    the evidence (Hron 2022, eq. 5; Mathematics, :eq:`evidence`), with
    :func:`~numpyro_wide.linear_gaussian.log_evidence`'s closed-form gradient.

    Args:
        problem: the readout's features, noise and prior; its targets give shape and type.
        loc: mean of the observations at the prior mean of the readout, shape (n,) or (n, k); zero by default.
        validate_args: whether to check values, as in every NumPyro distribution.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.linear_gaussian import ReadoutProblem
        >>> from numpyro_wide.readout import ReadoutMarginal
        >>> marginal = ReadoutMarginal(ReadoutProblem.of(jnp.ones((3, 2)), jnp.zeros(3), noise_scale=1.0))
        >>> marginal.event_shape, marginal.variance.tolist()
        ((3,), [3.0, 3.0, 3.0])
    """

    arg_constraints = {"loc": constraints.real}  # noqa: RUF012
    reparametrized_params = ["loc"]  # noqa: RUF012
    pytree_data_fields = ("problem", "loc")

    def __init__(self, problem: ReadoutProblem, loc: ArrayLike | None = None, *, validate_args: bool | None = None):
        self.problem = problem
        zero = jnp.zeros_like(problem.targets)
        self.loc = zero if loc is None else jnp.broadcast_to(jnp.asarray(loc, zero.dtype), zero.shape)
        super().__init__((), zero.shape, validate_args=validate_args)

    @property
    def support(self) -> Any:
        """Real vectors or matrices."""
        return constraints.independent(constraints.real, self.event_dim)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw a readout from its prior, then observations given it."""
        if not is_prng_key(key):
            raise TypeError(f"key must be a PRNG key such as jax.random.key(0), but got {type(key).__name__}.")
        readout_key, noise_key = random.split(key)
        problem = self.problem
        readout = problem.prior_scale * random.normal(readout_key, (*sample_shape, *problem.readout_shape))
        signal = jnp.tensordot(readout, problem.features.T, axes=(len(sample_shape), 0))
        signal = jnp.moveaxis(signal, -1, len(sample_shape))
        noise = problem.noise_scale * random.normal(noise_key, (*sample_shape, *self.event_shape))
        return self.loc + signal + noise

    @validate_sample
    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        """Return the log evidence of ``value``, one number for each leading index."""

        def single(value: Array) -> Array:
            return self.problem.with_targets(value - self.loc).log_evidence()

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
        problem = self.problem
        signal = problem.features**2 @ jnp.broadcast_to(problem.prior_scale**2, problem.readout_shape)
        return signal + jnp.broadcast_to(problem.noise_scale**2, self.event_shape)
