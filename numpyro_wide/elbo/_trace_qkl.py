"""Quasi-KL loss."""

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, random
from numpyro.distributions.util import scale_and_mask
from numpyro.infer.elbo import ELBO
from numpyro.infer.elbo import _get_log_prob_sum as log_density
from numpyro.util import check_model_guide_match

from numpyro_wide._checks import whole_number
from numpyro_wide._traces import values_of_type
from numpyro_wide.distributions._quasi_kl import closed_quasi_kl
from numpyro_wide.elbo._tempered import run_pair


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

    def __init__(self, num_particles: int = 1, *, vectorize_particles: bool | Callable = True, sum_sites: bool = True):
        self.sum_sites = sum_sites
        super().__init__(whole_number("num_particles", num_particles), vectorize_particles)

    def loss_with_mutable_state(
        self, rng_key: Array, param_map: dict, model: Callable, guide: Callable, *args: object, **kwargs: object
    ) -> dict[str, object]:
        """Evaluate the loss, as any ELBO of NumPyro."""

        def particle(key: Array) -> tuple[Array | dict[str, Array], dict | None]:
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
        try:
            value = closed_quasi_kl(guide_site["fn"], model_site["fn"])
        except NotImplementedError:
            return log_density(guide_site) - log_density(model_site)
        return jnp.sum(scale_and_mask(value, scale=guide_site["scale"]))
