"""The log-uniform prior, which is improper and says so."""

from typing import Any, ClassVar, NoReturn

import jax
import numpyro.distributions as dist
from numpyro.distributions import constraints

_REASON = (
    "ImproperLogUniform, p(w) = C/|w|, has infinite mass at 0, and so has the posterior of every likelihood "
    "that is continuous and positive there (Hron 2018, Prop. 1): there is no posterior to sample and no "
    "maximum to find."
)


class ImproperLogUniform(dist.Distribution):
    r"""The improper prior $p(w) = C/|w|$ of variational Gaussian dropout.

    It is no probability distribution: it cannot be sampled, and with a likelihood that is positive at 0
    its posterior has infinite mass (Hron 2018, Prop. 1). NUTS, MAP and the ordinary ELBOs ask for its
    ``log_prob``, which refuses. What remains is penalised maximum likelihood: a Normal guide and the loss
    :class:`~numpyro_wide.elbo.PenalizedMaximumLikelihood`, whose penalty is
    :func:`~numpyro_wide.divergence.log_uniform_kl`. Build an automatic guide on
    :func:`~numpyro_wide.autoguide.flat_prototype` of the model.

    Args:
        batch_shape: Shape of independent weights; ``expand`` works as well.
        validate_args: As for any NumPyro distribution.

    Example:
        >>> from numpyro_wide.distributions import ImproperLogUniform
        >>> ImproperLogUniform().expand([3]).to_event(1).event_shape
        (3,)
        >>> ImproperLogUniform().log_prob(1.0)
        Traceback (most recent call last):
            ...
        ValueError: ImproperLogUniform, p(w) = C/|w|, has infinite mass at 0, ...
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.real

    def __init__(self, batch_shape: tuple[int, ...] = (), *, validate_args: bool | None = None):
        super().__init__(tuple(batch_shape), (), validate_args=validate_args)

    def log_prob(self, value: Any, intermediates: Any = None) -> NoReturn:
        """Refuse, with the reason."""
        raise ValueError(
            f"{_REASON} Fit a Normal guide with the loss PenalizedMaximumLikelihood (build an AutoNormal on "
            "flat_prototype(model)), or choose a proper prior."
        )

    def sample(self, key: jax.Array | None, sample_shape: tuple[int, ...] = ()) -> NoReturn:
        """Refuse, with the reason."""
        raise ValueError(
            f"{_REASON} Neither can the prior be sampled; give the values of this site, as draws of a guide "
            f"are, or choose a proper prior."
        )
