"""Quasi-KL losses: an ELBO, and penalised maximum likelihood."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random
from numpyro.distributions.util import scale_and_mask
from numpyro.infer.elbo import ELBO
from numpyro.infer.elbo import _get_log_prob_sum as log_density
from numpyro.util import check_model_guide_match

from numpyro_wide._checks import whole_number
from numpyro_wide._traces import unwrap, values_of_type
from numpyro_wide.distributions._log_uniform import ImproperLogUniform
from numpyro_wide.distributions._quasi_kl import closed_quasi_kl
from numpyro_wide.elbo._tempered import check_weight, run_pair


class TraceQKL(ELBO):
    r"""Negative ELBO with the quasi-KL divergence in place of the KL (Hron 2018, section 5).

    .. math:: -E_Q \log L(y|w) + \sum_s \mathrm{QKL}(Q_s\|P_s)

    For guides on points, lines or planes, such as ``AutoDropout`` (Mathematics, :eq:`qkl`). Sites have the closed forms
    of :func:`~numpyro_wide.quasi_kl`, else draws, with gradients by the draws.

    Args:
        num_particles: number of guide draws for each evaluation.
        vectorize_particles: whether draws are mapped by ``jax.vmap``, or a map.
        sum_sites: whether sites are summed, or returned by name.

    Example:
        >>> import numpyro
        >>> from numpyro.infer import SVI
        >>> from numpyro_wide.autoguide import AutoDropout
        >>> from numpyro_wide.elbo import TraceQKL
        >>> from numpyro_wide.nn import FCN, bnn
        >>> model = bnn(FCN(depth=1, width=50), num_outputs=None, noise=0.1)
        >>> svi = SVI(model, AutoDropout(model, rate=0.1), numpyro.optim.Adam(0.01), TraceQKL())
    """

    penalty_weight: Any = None  # improper priors are refused

    def __init__(self, num_particles: int = 1, *, vectorize_particles: bool | Callable = True, sum_sites: bool = True):
        self.sum_sites = sum_sites
        super().__init__(whole_number("num_particles", num_particles), vectorize_particles)

    def loss_with_mutable_state(
        self, rng_key: Array, param_map: dict, model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        """Evaluate the loss, as any ELBO of NumPyro."""

        def particle(key: Array) -> tuple[Any, dict | None]:
            guide_trace, model_trace = run_pair(key, param_map, model, guide, args, kwargs)
            check_model_guide_match(model_trace, guide_trace)
            terms = self._terms(model_trace, guide_trace)
            mutable = values_of_type(guide_trace | model_trace, "mutable")
            return sum(terms.values(), start=jnp.array(0.0)) if self.sum_sites else terms, mutable or None

        if self.num_particles == 1:
            loss, mutable_state = particle(rng_key)
            return {"loss": loss, "mutable_state": mutable_state}
        losses, mutable_state = self.vectorize_particles_fn(particle, random.split(rng_key, self.num_particles))
        if mutable_state is not None:
            warnings.warn("Mutable state is not updated with more than one particle.", stacklevel=2)
        return {"loss": jax.tree.map(lambda x: jnp.mean(x, 0), losses), "mutable_state": None}

    def _terms(self, model_trace: dict, guide_trace: dict) -> dict[str, Array]:
        terms = {}
        for name, site in model_trace.items():
            if site["type"] == "sample":
                terms[name] = -log_density(site) if site["is_observed"] else self._quasi_kl(guide_trace[name], site)
        for name, site in guide_trace.items():
            if site["type"] == "sample" and name not in model_trace:
                terms[name] = log_density(site)
        return terms

    def _quasi_kl(self, guide_site: dict, model_site: dict) -> Array:
        is_improper = isinstance(unwrap(model_site["fn"]), ImproperLogUniform)
        if is_improper and self.penalty_weight is None:
            raise ValueError(
                f"The prior of site {model_site['name']!r} is improper and has no posterior (Hron 2018, Prop. 1); "
                "use the loss PenalizedMaximumLikelihood, or a proper prior."
            )
        try:
            value = closed_quasi_kl(guide_site["fn"], model_site["fn"])
        except NotImplementedError:
            return log_density(guide_site) - log_density(model_site)
        total = jnp.sum(scale_and_mask(value, scale=guide_site["scale"]))
        return self.penalty_weight * total if is_improper else total


class PenalizedMaximumLikelihood(TraceQKL):
    r"""Penalised maximum likelihood with the log-uniform penalty (Hron 2018, section 3.3).

    Minimises $-E_q \log L + c\sum\mathrm{KL}(q\|C/|w|)$, as variational Gaussian dropout; the guide's width is no
    uncertainty. ``penalty_weight`` is the weight c > 0 of sites with an ``ImproperLogUniform`` prior; other priors and
    arguments are as in :class:`TraceQKL`.

    Example:
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import SVI
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> from numpyro_wide.autoguide import flat_prototype
        >>> from numpyro_wide.distributions import ImproperLogUniform
        >>> from numpyro_wide.elbo import PenalizedMaximumLikelihood
        >>> def model(y):
        ...     numpyro.sample("y", dist.Normal(numpyro.sample("w", ImproperLogUniform()), 1.0), obs=y)
        >>> guide = AutoNormal(flat_prototype(model))
        >>> svi = SVI(model, guide, numpyro.optim.Adam(0.01), PenalizedMaximumLikelihood())
    """

    def __init__(
        self,
        num_particles: int = 1,
        *,
        penalty_weight: float = 1.0,
        vectorize_particles: bool | Callable = True,
        sum_sites: bool = True,
    ):
        check_weight("penalty_weight", penalty_weight)
        self.penalty_weight = penalty_weight
        super().__init__(num_particles, vectorize_particles=vectorize_particles, sum_sites=sum_sites)
