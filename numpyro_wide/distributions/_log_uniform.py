"""Improper log-uniform prior, which refuses to be sampled or scored, and its penalty for Normal guides."""

from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints

from numpyro_wide._checks import as_floats, check_positive
from numpyro_wide.distributions._dawson import dawson_potential, dawson_ratio

_REASON = (
    "ImproperLogUniform, p(w) = C/|w|, has infinite mass at 0, and so has the posterior of every likelihood "
    "that is continuous and positive there (Hron 2018, Prop. 1): there is no posterior to sample and no "
    "maximum to find."
)


class ImproperLogUniform(dist.Distribution):
    r"""Improper prior $p(w) = C/|w|$ of variational Gaussian dropout.

    It is no probability distribution: it cannot be sampled, and with a likelihood that is positive at 0
    its posterior has infinite mass (Hron 2018, Prop. 1). NUTS, MAP and the ordinary ELBOs ask for its
    ``log_prob``, which refuses. What remains is penalised maximum likelihood: a Normal guide and the loss
    :class:`~numpyro_wide.elbo.PenalizedMaximumLikelihood`, whose penalty is
    :func:`~numpyro_wide.log_uniform_kl`. Build an automatic guide on
    :func:`~numpyro_wide.autoguide.flat_prototype` of the model.

    Args:
        batch_shape: shape of independent weights, which ``expand`` may give as well.
        validate_args: whether NumPyro checks the parameters; None for its global setting.

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

    def sample(self, key: Array | None, sample_shape: tuple[int, ...] = ()) -> NoReturn:
        """Refuse, with the reason."""
        raise ValueError(
            f"{_REASON} Neither can the prior be sampled; give the values of this site, as draws of a guide "
            f"are, or choose a proper prior."
        )


def log_uniform_kl(loc: Any, scale: Any) -> Array:
    r"""Evaluate the KL of N(loc, scale²) from the prior $C/|w|$, without its constant (Hron 2018, Proposition 2).

    It is a function of $u = \mu^2/2\sigma^2$ alone (Mathematics, :eq:`dawson`), which grows with u from
    $-\tfrac12(\gamma + \log 2)$; its derivative in u is exactly $D_+(\sqrt u)/\sqrt u$, 1 at u
    = 0, with Dawson's integral. Such a penalty is not a divergence between distributions: the prior has no
    mass to normalise, and what it yields is penalised maximum likelihood.

    Args:
        loc: mean of the guide, of any shape.
        scale: standard deviation of the guide, positive, broadcast against ``loc``.

    Returns:
        The penalty, elementwise.

    Raises:
        ValueError: if ``scale`` is not positive.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.distributions import log_uniform_kl
        >>> round(float(log_uniform_kl(0.0, 1.0)), 4)
        -0.6352
        >>> slope = jax.grad(log_uniform_kl)(jnp.array(2.0), 1.0)  # D₊(√2) √2
        >>> round(float(slope), 4)
        0.64
    """
    check_positive("scale", scale)
    loc, scale = as_floats(loc, scale, names=("loc", "scale"))
    return _log_uniform_penalty(0.5 * jnp.square(loc / scale))


@jax.custom_jvp
def _log_uniform_penalty(u: Array) -> Array:
    return dawson_potential(u)


@_log_uniform_penalty.defjvp
def _log_uniform_penalty_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (u,), (du,) = primals, tangents
    return _log_uniform_penalty(u), dawson_ratio(u) * du
