"""The prior C/|w| of variational Gaussian dropout, which has no posterior, and its penalty for `TraceQKL`.

With it that loss is penalised maximum likelihood (Hron 2018, section 3.3): the guide's width is no uncertainty.
"""

import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.primitives import Messenger

from numpyro_wide import log_uniform_kl
from numpyro_wide.distributions import register_quasi_kl


class ImproperLogUniform(dist.Distribution):
    """Prior C/|w| whose penalty has a weight; it has no draws and no density."""

    arg_constraints = {}  # noqa: RUF012  # as NumPyro's
    support = constraints.real
    pytree_aux_fields = ("weight",)

    def __init__(self, weight=1.0, batch_shape=(), *, validate_args=None):
        self.weight = weight
        super().__init__(tuple(batch_shape), (), validate_args=validate_args)

    def sample(self, key, sample_shape=()):
        """Refuse."""
        raise ValueError(
            "p(w) = C/|w| has infinite mass at 0, and so has its posterior (Hron 2018, Prop. 1): neither can be "
            "sampled. Fit a Normal guide of flat_prototype(model) with the loss TraceQKL."
        )

    def log_prob(self, value, intermediates=None):
        """Refuse."""
        self.sample(None)


@register_quasi_kl(dist.Normal, ImproperLogUniform)
def penalty(q, p):
    """Return the penalty of N(loc, scale²), but for a constant (Hron 2018, Prop. 2)."""
    return p.weight * log_uniform_kl(q.loc, q.scale)


class flat_prototype(Messenger):  # noqa: N801  # handlers are lower case
    """Handler for automatic guides of a model with such priors, which start where the prior is."""

    def process_message(self, msg):
        """Replace such a prior by a flat one."""
        fn = inner = msg.get("fn")
        while hasattr(inner, "base_dist"):
            inner = inner.base_dist
        if msg["type"] == "sample" and isinstance(inner, ImproperLogUniform):
            msg["fn"] = dist.ImproperUniform(constraints.real, fn.batch_shape, fn.event_shape)
