"""Draws of a repriorised model without a Markov chain: from the wide limit, or from a guide."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import Array, random
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import Predictive
from numpyro.primitives import Messenger

from numpyro_wide._conjugate import listing
from numpyro_wide.reparam import ReadoutTransform

Samples = dict[str, Array]


def wide_limit_draws(
    rng_key: Array, repriorised_model: Callable, num_samples: int, *model_args: Any, **model_kwargs: Any
) -> Samples:
    r"""Draw from the wide-limit approximation to the posterior.

    Hidden weights are drawn from their prior, $\phi$ from N(0, I), and the readout is their image under the map
    (Hron 2022, Prop. 2.2; Mathematics, :eq:`map`): no Markov chain. With a Gaussian likelihood the readout is exact
    given the hidden weights, and what is left out is how far the data move those from their prior, which vanishes as
    the network widens (Thm. 2.1; :eq:`gap`). That holds for weights: a latent noise or prior scale keeps its prior here
    at any width, so fix those.

    Args:
        rng_key: a PRNG key.
        repriorised_model: what :func:`~numpyro_wide.repriorise` gave, or a model that uses
            :class:`~numpyro_wide.ReprioriseReadout`.
        num_samples: number of draws.
        *model_args: arguments of the model, targets included.
        **model_kwargs: likewise.

    Returns:
        Draws of all latent sites and of the readout, as ``mcmc.get_samples()`` would give them.

    Raises:
        TypeError: if ``num_samples`` is no whole number.
        ValueError: if it is not positive, or no readout is repriorised in the run, as without targets.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import Predictive
        >>> from numpyro_wide import repriorise, wide_limit_draws
        >>> def model(x, y=None):
        ...     hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 50]).to_event(2))
        ...     features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / 50**0.5)
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([50]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(features @ w, 0.1).to_event(1), obs=y)
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> wrapped = repriorise(model, readout="w", features="features", targets="y", noise_scale=0.1)
        >>> draws = wide_limit_draws(jax.random.key(0), wrapped, 20, x, jnp.sin(x[:, 0]))
        >>> Predictive(model, draws)(jax.random.key(1), jnp.zeros((3, 1)))["y"].shape
        (20, 3)
    """
    _check_num_samples(num_samples, "wide_limit_draws(rng_key, model, num_samples, x, y)")

    def single(key: Array) -> Samples:
        # Seed comes last: the innermost handler is asked first, and hands the key on.
        with trace() as sites, _StandardNormalBase(), seed(rng_seed=key):
            repriorised_model(*model_args, **model_kwargs)
        return _latent_and_readouts(sites)

    return jax.lax.map(single, random.split(rng_key, num_samples))


def guide_draws(
    rng_key: Array,
    repriorised_model: Callable,
    guide: Callable,
    params: dict[str, Any],
    num_samples: int,
    *model_args: Any,
    **model_kwargs: Any,
) -> Samples:
    r"""Draw from a guide that was fitted to a repriorised model, readout included.

    The guide knows $\phi$, not the readout. ``Predictive(model, guide=guide, params=params)`` at new inputs would
    therefore draw the readout from its *prior*, without a word. Predict with these draws instead.

    Args:
        rng_key: a PRNG key.
        repriorised_model: what :func:`~numpyro_wide.repriorise` gave, or a model that uses
            :class:`~numpyro_wide.ReprioriseReadout`.
        guide: an autoguide or a guide function.
        params: the guide's fitted parameters, ``svi.run(...).params``.
        num_samples: number of draws.
        *model_args: what the model was fitted on, targets included.
        **model_kwargs: likewise.

    Returns:
        Draws of all latent sites and of the readout, for ``Predictive(model, draws)`` with the unwrapped model.

    Raises:
        TypeError: if ``params`` is no dictionary, or ``num_samples`` no whole number.
        ValueError: if ``num_samples`` is not positive, or no readout is repriorised in the run, as without targets.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import SVI, Predictive, Trace_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> from numpyro_wide import guide_draws, repriorise
        >>> def model(x, y=None):
        ...     hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 50]).to_event(2))
        ...     features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / 50**0.5)
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([50]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(features @ w, 0.1).to_event(1), obs=y)
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> y = jnp.sin(x[:, 0])
        >>> wrapped = repriorise(model, readout="w", features="features", targets="y", noise_scale=0.1)
        >>> guide = AutoNormal(wrapped)
        >>> fit = SVI(wrapped, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
        >>> params = fit.run(jax.random.key(0), 10, x, y, progress_bar=False).params
        >>> draws = guide_draws(jax.random.key(1), wrapped, guide, params, 20, x, y)
        >>> Predictive(model, draws)(jax.random.key(2), jnp.zeros((3, 1)))["y"].shape
        (20, 3)
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            f"params must be a dictionary of the guide's parameters, but is a {type(params).__name__}; of what svi.run "
            "gave, pass the .params."
        )
    _check_num_samples(num_samples, "guide_draws(rng_key, model, guide, params, num_samples, x, y)")
    latents = Predictive(guide, params=params, num_samples=num_samples)(rng_key, *model_args, **model_kwargs)

    def single(draw: Samples) -> Samples:
        with trace() as sites, seed(rng_seed=random.key(0)), substitute(data={**params, **draw}):
            repriorised_model(*model_args, **model_kwargs)
        return _latent_and_readouts(sites)

    return jax.lax.map(single, latents)


def _check_num_samples(num_samples: Any, order: str) -> None:
    if not isinstance(num_samples, int | np.integer):
        raise TypeError(
            f"num_samples must be a whole number, but is a {type(num_samples).__name__}; the order is {order}."
        )
    if num_samples < 1:
        raise ValueError(f"num_samples must be positive, but got {num_samples}.")


class _StandardNormalBase(Messenger):
    """Draws readouts from their posterior given the features, not from their prior: the map's image of N(0, I)."""

    def process_message(self, msg: dict) -> None:
        if msg["type"] != "sample" or msg["value"] is not None:
            return
        transform = _readout_transform(msg)
        if transform is not None:
            standard_normal = random.normal(msg["kwargs"]["rng_key"], msg["fn"].shape())
            msg["value"] = transform.base_of_posterior_draw(standard_normal)


def _readout_transform(site: dict) -> ReadoutTransform | None:
    """The map of a repriorised readout's base site; None for any other site."""
    inverses = (transform.inv for transform in getattr(site["fn"], "transforms", []))
    return next((inverse for inverse in inverses if isinstance(inverse, ReadoutTransform)), None)


def _latent_and_readouts(sites: dict[str, dict]) -> Samples:
    latent = {k: s for k, s in sites.items() if s["type"] == "sample" and not s["is_observed"]}
    readouts = [name.removesuffix("_base") for name, site in latent.items() if _readout_transform(site) is not None]
    if not readouts:
        raise ValueError(
            "the model has no repriorised readout in this run; pass a model wrapped by repriorise (or one that uses "
            f"ReprioriseReadout), and its targets; for a collapsed model, pass guide.sample_posterior(...) to "
            f"ReadoutPredictive. Its latent sites are {listing(latent)}."
        )
    return {name: sites[name]["value"] for name in [*latent, *readouts]}
