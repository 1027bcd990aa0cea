"""Log evidence of a model, with checks of what users pass."""

import warnings
from collections.abc import Callable
from functools import partial

from jax import Array, random

from numpyro_wide._checks import check_key, check_one_of, progress, whole_number
from numpyro_wide.evidence._chains import Target
from numpyro_wide.evidence._density import check_model
from numpyro_wide.evidence._methods import Evidence, Sizes, by_bridge, by_stepping_stones, first_temperature


def model_evidence(
    rng_key: Array,
    model: Callable,
    *model_args: object,
    method: str = "auto",
    num_chains: int = 8,
    num_warmup: int = 200,
    num_samples: int = 400,
    batch_size: int = 1,
    progress_bar: bool = True,
    **model_kwargs: object,
) -> Evidence:
    r"""Estimate the log evidence of a model, $\log \int p(D, \theta)\, d\theta$ over all latent sites, with its error.

    The joint density is $r(z)\, w(z)$, with the prior r of the latent sites, N(0, I) for the base site of a repriorised
    readout, and the likelihood w. Chains of :class:`~numpyro_wide.mcmc.SplitHMC` draw from the densities between.

    - "bridge": the optimal bridge (Meng and Wong 1996; Gronau et al. 2017; Mathematics, :eq:`bridge`) between the
      posterior and a Gaussian fitted to half of its draws;
    - "stepping-stone": bridges between neighbours on the path $r w^\beta$ (:eq:`path`), with temperatures chosen to
      overlap (:eq:`ladder`);
    - "auto": the second where draws of r alone reach the posterior, as near the wide limit, or if the first is not to
      be trusted.

    Neither estimate nor error knows a mode that no chain has found; in a funnel the error is too small: give the sites
    ``LocScaleReparam(0)``.

    Args:
        rng_key: a PRNG key.
        model: a model, repriorised, collapsed or neither, of continuous latent sites with proper priors.
        *model_args: positional arguments of the model, observations included.
        method: "auto", "bridge" or "stepping-stone".
        num_chains: number of chains at each temperature, at least 2.
        num_warmup: number of steps by which each chain adapts, at least 20.
        num_samples: number of draws of each chain, at least 40, and 400 in all chains together.
        batch_size: number of temperatures that run together; more than 1 pays on an accelerator.
        progress_bar: whether to show a bar.
        **model_kwargs: keyword arguments of the model.

    Returns:
        The :class:`~numpyro_wide.evidence.Evidence`.

    Raises:
        ValueError: for latent sites without a proper, continuous prior, or a density that is nowhere finite.

    Warns:
        RuntimeWarning: if the result is not to be trusted, by its ``is_trusted``.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_wide import model_evidence
        >>> def model(y):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
        ...     numpyro.sample("y", dist.Normal(mean, 1).expand([2]).to_event(1), obs=y)
        >>> evidence = model_evidence(jax.random.key(0), model, jnp.array([1.0, -1.0]), progress_bar=False)
        >>> evidence.method, abs(evidence.log_evidence - -3.387) < 0.1
        ('stepping-stone', True)
    """
    check_key("rng_key", rng_key, "model_evidence(rng_key, model, x, y)")
    check_one_of("method", method, ("auto", "bridge", "stepping-stone"))
    sizes = Sizes(
        whole_number("num_chains", num_chains, 2),
        whole_number("num_warmup", num_warmup, 20),
        whole_number("num_samples", num_samples, 40),
        whole_number("batch_size", batch_size),
    )
    if sizes.num_independent < 400:
        raise ValueError(
            f"num_chains times num_samples must be at least 400, but is {num_chains} times {num_samples}; raise either."
        )
    check_model(partial(model, *model_args, **model_kwargs), rng_key)
    target = Target(model, model_args, model_kwargs)
    key_first, key_bridge, key_stones = random.split(rng_key, 3)
    with progress(shown=progress_bar) as bar:
        evidence = None
        beta, positions = first_temperature(target, key_first, sizes)
        if method == "bridge" or (method == "auto" and beta < 1):
            evidence = by_bridge(target, key_bridge, sizes, positions, bar)
        if evidence is None or (method == "auto" and not evidence.is_trusted):
            evidence = by_stepping_stones(target, key_stones, sizes, beta, positions, bar)
    if not evidence.is_trusted:
        warnings.warn(
            f"{evidence}; not to be trusted where the overlap is below 0.1, R-hat above 1.1 or the effective size "
            f"below 100. {_ADVICE[evidence.method]}",
            RuntimeWarning,
            stacklevel=2,
        )
    return evidence


_ADVICE = {
    "bridge": "Take method='stepping-stone'.",
    "stepping-stone": "Raise num_warmup and num_samples, or repriorise or collapse the readout.",
}
