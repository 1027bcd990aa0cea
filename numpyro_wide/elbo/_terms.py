"""Terms of an ELBO by site, in training and after, and the warning of a guide on its prior."""

import copy
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import ELBO, SVI, TraceMeanField_ELBO
from numpyro.infer.svi import SVIState

from numpyro_wide._checks import check_positive, whole_number
from numpyro_wide._traces import latent_sites, sample_sites
from numpyro_wide.elbo._tempered import TemperedTraceMeanFieldELBO, run_pair


class ELBOTerms(NamedTuple):
    """Terms of an ELBO by site.

    Attributes:
        log_likelihood: expected log likelihood by observed site, scaled to all data.
        kl: divergence from the prior by latent site, not tempered.
        tempered_kl: divergence times η.
        ratio: ``tempered_kl`` over the absolute log likelihood; far above 1 where the prior holds a site.
        total_ratio: sum of the ratios (Huix 2022, Figures 5 and 6).
        num_weights: number of scalars by latent site.
    """

    log_likelihood: dict[str, Array]
    kl: dict[str, Array]
    tempered_kl: dict[str, Array]
    ratio: dict[str, Array]
    total_ratio: Array
    num_weights: dict[str, int]

    def warn_if_on_prior(self, *, tolerance: float = 0.01) -> dict[str, float]:
        """Warn if the guide is on its prior, and return nats per weight by latent site, at the end of a monitored run.

        Wide mean-field guides go there (Coker 2021, Theorem 1; Mathematics, :eq:`certificate`). In repriorised
        coordinates a guide on its prior is the posterior's wide limit, and no fault.

        Args:
            tolerance: nats per weight below which a site is on its prior.

        Example:
            >>> import jax.numpy as jnp
            >>> from numpyro_wide.elbo import ELBOTerms
            >>> kl = {"w": jnp.array(5.0)}
            >>> ELBOTerms({"y": jnp.array(-9.0)}, kl, kl, {"w": 5 / 9}, 5 / 9, {"w": 10}).warn_if_on_prior()
            {'w': 0.5}
        """
        check_positive("tolerance", tolerance)
        terms = jax.tree.map(lambda leaf: leaf if jnp.ndim(leaf) == 0 else leaf[-1], self)
        per_weight = {name: float(terms.kl[name]) / int(count) for name, count in terms.num_weights.items() if count}
        on_prior = {name: value for name, value in per_weight.items() if value < tolerance}
        if on_prior:
            listed = ", ".join(f"{name} ({value:.2g})" for name, value in on_prior.items())
            warnings.warn(
                f"The guide sits on its prior at {listed}, in nats per weight, as wide mean-field guides do; temper "
                "the KL (TemperedTraceMeanFieldELBO), or fit in repriorised coordinates.",
                OnPriorWarning,
                stacklevel=2,
            )
        return per_weight


class MonitoredRun(NamedTuple):
    """Result of :func:`run_monitored`.

    Attributes:
        params: fitted parameters by name, constrained.
        state: last state of SVI.
        losses: loss by step, (steps,).
        steps: steps of the evaluations, (evaluations,).
        terms: :class:`ELBOTerms`, (evaluations,) each.
    """

    params: dict[str, Array]
    state: SVIState
    losses: Array
    steps: np.ndarray
    terms: ELBOTerms


class OnPriorWarning(UserWarning):
    """Warning of a guide on its prior."""


def elbo_terms(svi: SVI, svi_state: SVIState, *args: object, **kwargs: object) -> ELBOTerms:
    """Split the ELBO of a guide into likelihood and KL terms by site, :class:`~numpyro_wide.elbo.ELBOTerms`.

    Args:
        svi: SVI with a loss by site: this package's, or a NumPyro ``Trace`` ELBO.
        svi_state: its state, such as ``svi.run(...).state``.
        *args: arguments of model and guide.
        **kwargs: their keyword arguments.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import SVI, TraceMeanField_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> from numpyro_wide.elbo import elbo_terms
        >>> def model(y):
        ...     numpyro.sample("y", dist.Normal(numpyro.sample("w", dist.Normal(0, 1)), 1.0), obs=y)
        >>> svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.01), TraceMeanField_ELBO())
        >>> elbo_terms(svi, svi.init(jax.random.key(0), 1.0), 1.0).num_weights
        {'w': 1}
    """
    loss = svi.loss
    if not hasattr(loss, "sum_sites"):
        raise ValueError(f"elbo_terms needs a loss with an attribute `sum_sites`, got {type(loss).__name__}.")
    params = {**svi.get_params(svi_state), **(svi_state.mutable_state or {})}
    kwargs = {**kwargs, **svi.static_kwargs}
    guide_trace, model_trace = run_pair(svi_state.rng_key, params, svi.model, svi.guide, args, kwargs)
    latent = sample_sites(guide_trace) | latent_sites(model_trace)

    def by_site(loss: ELBO) -> dict[str, Array]:
        loss = copy.copy(loss)
        loss.sum_sites = False
        return loss.loss(svi_state.rng_key, params, svi.model, svi.guide, *args, **kwargs)

    terms = by_site(loss)
    log_likelihood = {name: -value for name, value in terms.items() if name not in latent}
    tempered = {name: value for name, value in terms.items() if name in latent}
    untempered = tempered
    if isinstance(loss, TemperedTraceMeanFieldELBO):
        untempered = by_site(TraceMeanField_ELBO(loss.num_particles, loss.vectorize_particles))
    total = jnp.abs(sum(log_likelihood.values(), start=jnp.array(0.0)))
    ratio = {name: value / total for name, value in tempered.items()}
    return ELBOTerms(
        log_likelihood,
        {name: untempered[name] for name in tempered},
        tempered,
        ratio,
        sum(ratio.values(), start=jnp.array(0.0)),
        {name: jnp.size(latent[name]["value"]) for name in tempered},
    )


def run_monitored(
    svi: SVI, rng_key: Array, num_steps: int, *args: object, every: int = 100, **kwargs: object
) -> MonitoredRun:
    """Train as ``svi.run`` does, with terms of the ELBO at regular steps: :class:`~numpyro_wide.elbo.MonitoredRun`.

    Arguments as of ``svi.run``; ``every`` is the number of steps between evaluations, and divides ``num_steps``.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import SVI, TraceMeanField_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> from numpyro_wide.elbo import run_monitored
        >>> def model(y):
        ...     numpyro.sample("y", dist.Normal(numpyro.sample("w", dist.Normal(0, 1)), 1.0), obs=y)
        >>> svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.01), TraceMeanField_ELBO())
        >>> run_monitored(svi, jax.random.key(0), 20, 1.0, every=10).terms.kl["w"].shape
        (2,)
    """
    order = "run_monitored(svi, rng_key, num_steps, x, y, every=100)"
    num_steps, every = whole_number("num_steps", num_steps, order=order), whole_number("every", every)
    if num_steps % every:
        raise ValueError(f"num_steps must be a multiple of `every`, but got {num_steps} and every={every}.")

    @jax.jit
    def train_and_evaluate(state: SVIState, args: tuple, kwargs: dict) -> tuple[SVIState, tuple[Array, ELBOTerms]]:
        state, losses = jax.lax.scan(lambda s, _: svi.update(s, *args, **kwargs), state, length=every)
        return state, (losses, elbo_terms(svi, state, *args, **kwargs))

    state = svi.init(rng_key, *args, **kwargs)
    evaluations = []
    for _ in range(num_steps // every):
        state, evaluation = train_and_evaluate(state, args, kwargs)
        evaluations.append(evaluation)
    losses, terms = jax.tree.map(lambda *leaves: jnp.stack(leaves), *evaluations)
    steps = np.arange(every, num_steps + 1, every)
    return MonitoredRun(svi.get_params(state), state, losses.reshape(-1), steps, terms)
