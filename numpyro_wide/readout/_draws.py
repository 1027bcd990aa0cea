"""Draws of a repriorised model without a Markov chain: from the wide limit, or from a guide."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro.infer import Predictive
from numpyro.primitives import Messenger

from numpyro_wide._checks import check_key, is_known, is_tracing, listing, whole_number
from numpyro_wide._pareto import pareto_smoothed
from numpyro_wide._programs import combine, partition, run_compiled
from numpyro_wide._traces import Sites, latent_sites, run_model, sample_sites
from numpyro_wide.readout._reparam import readout_transform

Samples = dict[str, Array]


# Draws of the prior for each that is asked for, where they are weighted.
_NUM_PROPOSALS = 10


@jax.tree_util.register_pytree_node_class
class WideLimitDraws(dict):
    """Draws by site, as :func:`wide_limit_draws` gives them.

    Attributes:
        pareto_shape: of the tail of their weights (Vehtari et al. 2024): above 0.7 too few draws of the prior carry the
            weight. None where draws are not weighted, or nothing is known of numbers, as under ``jit``.
    """

    def __init__(self, draws: Samples, pareto_shape: float | None = None):
        super().__init__(draws)
        self.pareto_shape = pareto_shape

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[tuple[str, ...], float | None]]:
        """The draws, as of any dictionary."""
        return tuple(self.values()), (tuple(self), self.pareto_shape)

    @classmethod
    def tree_unflatten(cls, names: tuple[tuple[str, ...], float | None], values: tuple[Any, ...]) -> "WideLimitDraws":
        """Undo :meth:`tree_flatten`."""
        return cls(dict(zip(names[0], values, strict=True)), names[1])


def wide_limit_draws(
    rng_key: Array,
    repriorised_model: Callable,
    num_samples: int,
    *model_args: Any,
    weighted: bool | None = None,
    **model_kwargs: Any,
) -> WideLimitDraws:
    r"""Draw from the wide-limit approximation to the posterior.

    Hidden weights are drawn from their prior, $\phi$ from N(0, I), and the readout is their image under the map
    (Hron 2022, Prop. 2.2; Mathematics, :eq:`map`): no Markov chain. With a Gaussian likelihood the readout is exact
    given the hidden weights, and what is left out is how far the data move those from their prior, which vanishes as
    the network widens (Thm. 2.1; :eq:`gap`).

    That holds for weights. A latent noise, or a latent scale of the network, is learnt from the data at any width, and
    so draws of the prior, ten for each that is asked for, are chosen again with their evidence
    $N(Y; 0, \Psi \Psi^\top + \sigma^2 I)$ as weight: the posterior at any width as their number grows, and at the
    wide limit with few, since there the weight is the same for all hidden weights. One of them may be chosen many
    times. Where the prior is far from the posterior, take that of scales which
    :func:`wide_limit.fit <numpyro_wide.wide_limit.fit>` found.

    Args:
        rng_key: a PRNG key.
        repriorised_model: what :func:`~numpyro_wide.repriorise` gave, or a model that uses
            :class:`~numpyro_wide.ReprioriseReadout`.
        num_samples: number of draws.
        *model_args: arguments of the model, targets included.
        weighted: whether draws are chosen by their evidence; by default where the noise is latent. Say so too where the
            network's scales are.
        **model_kwargs: likewise.

    Returns:
        Draws of all latent sites and of the readout, as ``mcmc.get_samples()`` would give them, with the Pareto shape
        of their weights.

    Raises:
        TypeError: if ``rng_key`` is no PRNG key, or ``num_samples`` no number.
        ValueError: if that is not a positive whole number, or no readout is repriorised in the run, as without targets.

    Warns:
        RuntimeWarning: if the Pareto shape of the weights is above 0.7.

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
    order = "wide_limit_draws(rng_key, model, num_samples, x, y)"
    check_key("rng_key", rng_key, order)
    num_samples = whole_number("num_samples", num_samples, order=order)
    arrays, rest = partition((model_args, model_kwargs))
    _check_data(repriorised_model, model_args, model_kwargs, arrays)
    is_latent = _has_latent_noise(repriorised_model, model_args, model_kwargs)
    if not (is_latent if weighted is None else weighted):
        return WideLimitDraws(run_compiled(_wide_limit, repriorised_model, (num_samples, rest), rng_key, arrays))
    draws, log_weights = run_compiled(_weighted_limit, repriorised_model, (num_samples, rest), rng_key, arrays)
    if not is_known(log_weights):
        return WideLimitDraws(draws)
    _, shape = pareto_smoothed(np.asarray(log_weights, float))
    if shape > 0.7:
        warnings.warn(
            f"the Pareto shape of the draws' weights is {shape:.2f}, above 0.7: few draws of the prior carry them. "
            "Narrow the priors of noise and scales, around those of wide_limit.fit say, widen the network, or sample.",
            RuntimeWarning,
            stacklevel=2,
        )
    return WideLimitDraws(draws, shape)


def _wide_limit(model: Callable, static: tuple[int, Any], rng_key: Array, arrays: list[Array]) -> Samples:
    num_samples, rest = static
    args, kwargs = combine(arrays, rest)
    return jax.lax.map(lambda key: _limit_draw(model, args, kwargs, key), random.split(rng_key, num_samples))


def _limit_draw(
    model: Callable, args: tuple, kwargs: dict[str, Any], key: Array, base_key: Array | None = None
) -> Samples:
    base = StandardNormalBase(is_exact=True, rng_key=base_key)
    return _latent_and_readouts(run_model(model, args, kwargs, rng_key=key, inside=(base,)))


def _weighted_limit(
    model: Callable, static: tuple[int, Any], rng_key: Array, arrays: list[Array]
) -> tuple[Samples, Array]:
    """Draws chosen by their weights, and the logarithms of these."""
    num_samples, rest = static
    args, kwargs = combine(arrays, rest)
    key, choice_key, base_key = random.split(rng_key, 3)
    keys = random.split(key, _NUM_PROPOSALS * num_samples)

    def weigh(key: Array) -> Array:
        sites = run_model(model, args, kwargs, rng_key=key, inside=(StandardNormalBase(),))
        return log_weight(sites)

    log_weights = jax.lax.map(weigh, keys)
    finite = jnp.where(jnp.isfinite(log_weights), log_weights, -jnp.inf)
    # Only keys are chosen, and draws made anew: the weights of all proposals would fill the memory.
    chosen = keys[random.categorical(choice_key, finite, shape=(num_samples,))]
    both = chosen, random.split(base_key, num_samples)
    draws = jax.lax.map(lambda keys: _limit_draw(model, args, kwargs, *keys), both)
    return draws, log_weights


def log_weight(sites: Sites) -> Array:
    """Log ratio of a run's joint density to the density that it was drawn from, a scalar.

    That is each site's prior, and N(0, I) for the base site of a readout; with a Gaussian likelihood, and no
    regulariser, the ratio is the evidence, whatever the draw of the base site.
    """
    return sum((_log_ratio(site) for site in sample_sites(sites).values()), jnp.zeros(()))


def _log_ratio(site: dict) -> Array:
    """A site's part in it."""
    value = site["value"]
    log_prob = jnp.sum(site["fn"].log_prob(value))
    if site["is_observed"]:
        return log_prob if site["scale"] is None else site["scale"] * log_prob
    if readout_transform(site) is not None:
        return log_prob - jnp.sum(dist.Normal(0.0, 1.0).log_prob(value))
    return jnp.zeros(())  # drawn from its prior


def _has_latent_noise(model: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a readout's noise is drawn: whether it is known before the key is."""
    found: list[bool] = []

    def run(key: Array) -> None:
        for site in sample_sites(run_model(model, args, kwargs, rng_key=key)).values():
            transform = readout_transform(site)
            if transform is not None:
                found.append(isinstance(transform.problem.noise_scale, jax.core.Tracer))

    if not is_tracing():
        jax.eval_shape(run, random.key(0))
    return any(found)


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
        TypeError: if ``rng_key`` is no PRNG key, ``params`` no dictionary, or ``num_samples`` no number.
        ValueError: if ``params`` lacks one of the guide's, ``num_samples`` is not a positive whole number, or no
            readout is repriorised in the run, as without targets.

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
    order = "guide_draws(rng_key, model, guide, params, num_samples, x, y)"
    check_key("rng_key", rng_key, order)
    num_samples = whole_number("num_samples", num_samples, order=order)
    arrays, rest = partition((model_args, model_kwargs))
    _check_params(guide, params, model_args, model_kwargs)
    _check_data(repriorised_model, model_args, model_kwargs, arrays)
    return run_compiled(_from_guide, guide, (repriorised_model, num_samples, rest), rng_key, params, arrays)


def _from_guide(
    guide: Callable, static: tuple[Callable, int, Any], rng_key: Array, params: dict[str, Any], arrays: list[Array]
) -> Samples:
    model, num_samples, rest = static
    args, kwargs = combine(arrays, rest)
    latents = Predictive(guide, params=params, num_samples=num_samples)(rng_key, *args, **kwargs)

    def single(draw: Samples) -> Samples:
        return _latent_and_readouts(run_model(model, args, kwargs, values={**params, **draw}))

    return jax.lax.map(single, latents)


def _check_params(guide: Callable, params: Mapping, args: tuple, kwargs: dict[str, Any]) -> None:
    """The guide would draw from where it starts, without a word."""
    found: list[str] = []

    def run() -> None:
        sites = run_model(guide, args, kwargs, values=params)
        found.extend(name for name, site in sites.items() if site["type"] == "param")

    if getattr(guide, "prototype_trace", run) is None:
        run()  # an automatic guide that was never used sets itself up, which must not happen in an abstract run
    else:
        jax.eval_shape(run)
    missing = [name for name in found if name not in params]
    if missing:
        raise ValueError(
            f"params must hold the guide's fitted parameters, but {listing(missing)} is missing; it has "
            f"{listing(params)}. Pass svi.run(...).params."
        )


def _check_data(model: Callable, args: tuple, kwargs: dict[str, Any], arrays: list[Array]) -> None:
    """Inside a compilation no number is known: let the model's own checks see data that hold NaN."""
    if any(is_known(x) and np.issubdtype(x.dtype, np.floating) and np.isnan(np.asarray(x)).any() for x in arrays):
        jax.eval_shape(lambda: latent_sites(run_model(model, args, kwargs)).clear())


class StandardNormalBase(Messenger):
    r"""Draws the base sites of repriorised readouts from N(0, I), their wide limit, in the place of their prior.

    Args:
        rng_key: draws them, in the place of the site's own.
        is_exact: whether their images are to be draws of the readout's posterior given the features; with a
            regulariser other than the noise variance those of N(0, I) are not.
    """

    def __init__(self, is_exact: bool = False, rng_key: Array | None = None):
        self.is_exact = is_exact
        self.rng_key = rng_key
        super().__init__()

    def process_message(self, msg: dict) -> None:
        """Give a base site its value."""
        if msg["type"] != "sample" or msg["value"] is not None:
            return
        transform = readout_transform(msg)
        if transform is not None:
            key = msg["kwargs"]["rng_key"] if self.rng_key is None else self.rng_key
            standard_normal = random.normal(numpyro.prng_key() if key is None else key, msg["fn"].shape())
            msg["value"] = transform.base_of_posterior_draw(standard_normal) if self.is_exact else standard_normal


def _latent_and_readouts(sites: Sites) -> Samples:
    latent = latent_sites(sites)
    readouts = [name.removesuffix("_base") for name, site in latent.items() if readout_transform(site) is not None]
    if not readouts:
        raise ValueError(
            "the model has no repriorised readout in this run; pass a model wrapped by repriorise (or one that uses "
            f"ReprioriseReadout), and its targets; for a collapsed model, pass guide.sample_posterior(...) to "
            f"ReadoutPredictive. Its latent sites are {listing(latent)}."
        )
    # Such as latent scales of nn.bnn, which are images of their own base sites.
    images = [name.removesuffix("_base") for name in latent if name.endswith("_base")]
    found = [name for name in images if name in sites and name not in (*latent, *readouts)]
    return {name: sites[name]["value"] for name in [*latent, *readouts, *found]}
