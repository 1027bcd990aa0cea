"""Draws of the wide limit and of guides, and weights of a model for draws of its wrapped form."""

import warnings
from collections.abc import Callable, Mapping
from itertools import compress

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro.infer import Predictive
from numpyro.primitives import Messenger

from numpyro_wide._arviz import pareto_smoothed
from numpyro_wide._checks import check_key, is_known, kind_of, listing, whole_number
from numpyro_wide._compile import run_with_arguments, split
from numpyro_wide._traces import Sites, abstract_sites, latent_sites, run_model, sample_sites
from numpyro_wide.readout._collapse import ReadoutMarginal
from numpyro_wide.readout._model import Draws, ReadoutModel
from numpyro_wide.readout._predictive import ReadoutPredictive
from numpyro_wide.readout._programs import FreeValues, Program
from numpyro_wide.readout._transform import base_transforms, weights_of_run

# Prior draws for each requested draw, where draws are weighted.
_NUM_PROPOSALS = 10


class WideLimitDraws(dict):
    """Draws by site, as :func:`wide_limit_draws` gives them.

    Attributes:
        pareto_shape: of the tail of their weights (Vehtari et al. 2024), above 0.7 where too few draws of the prior
            carry the weight; None where draws are not weighted, or numbers are not known, as under ``jit``.
    """

    def __init__(self, draws: Draws, pareto_shape: float | None = None):
        super().__init__(draws)
        self.pareto_shape = pareto_shape


jax.tree_util.register_pytree_node(
    WideLimitDraws,
    lambda draws: (tuple(draws.values()), (tuple(draws), draws.pareto_shape)),
    lambda static, values: WideLimitDraws(dict(zip(static[0], values, strict=True)), static[1]),
)


def wide_limit_draws(
    rng_key: Array,
    repriorised_model: Callable,
    num_samples: int,
    *model_args: object,
    weighted: bool | None = None,
    **model_kwargs: object,
) -> WideLimitDraws:
    r"""Draw from the wide-limit approximation to the posterior, without a Markov chain.

    Hidden weights are drawn from their prior, $\phi$ from N(0, I), and the readout is their image under the map
    (Hron 2022, Prop. 2.2; Mathematics, :eq:`map`). With a Gaussian likelihood the readout is exact given the hidden
    weights; how far the data move those from their prior is left out, and vanishes as the network widens (Thm. 2.1;
    :eq:`gap`).

    A latent noise, scale or output bias, and whatever another likelihood observes, is learnt from the data at any
    width. So draws of the prior, ten for each that is asked for, are chosen again by their evidence $N(Y; 0, \Psi
    \Psi^\top + \sigma^2 I)$; one of them may be chosen many times. Where the prior is far from the posterior, take
    that of scales which :func:`wide_limit.fit <numpyro_wide.wide_limit.fit>` found.

    Args:
        rng_key: a PRNG key.
        repriorised_model: result of :func:`~numpyro_wide.repriorise` or :func:`~numpyro_wide.collapse_readout`, or a
            model that uses :class:`~numpyro_wide.ReprioriseReadout`.
        num_samples: number of draws.
        *model_args: arguments of the model, targets included.
        weighted: whether draws are chosen by their evidence; by default where the noise or a term of the mean beside
            the features is latent, or another observed site or factor than the readout's likelihood depends on latent
            sites, the readout among them. Say so too where the network's scales are latent.
        **model_kwargs: its keyword arguments.

    Returns:
        Draws of all latent sites and of the readout, as ``mcmc.get_samples()`` would give them.

    Raises:
        ValueError: if no readout is repriorised in the run, as without targets, or draws that are not to be weighted
            would ignore another observed site.

    Warns:
        RuntimeWarning: if the Pareto shape of the weights is above 0.7.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide import collapse_readout, nn, wide_limit_draws
        >>> model = nn.bnn(nn.FCN(depth=1, width=50), num_outputs=None, noise=0.1)
        >>> collapsed = collapse_readout(model, readout="readout", features="features", observed="y")
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> wide_limit_draws(jax.random.key(0), collapsed, 20, x, jnp.sin(x[:, 0]))["readout"].shape
        (20, 50)
    """
    order = "wide_limit_draws(rng_key, model, num_samples, x, y)"
    check_key("rng_key", rng_key, order)
    num_samples = whole_number("num_samples", num_samples, order=order)
    check_nan_eagerly(repriorised_model, model_args, model_kwargs)
    updates = non_vanishing_updates(repriorised_model, model_args, model_kwargs)
    updating_sites = updates.keys() - {"likelihood"}
    if weighted is False and updating_sites:
        raise ValueError(
            f"the site {listing(sorted(updating_sites))} observes other latent sites than the readout, or the readout "
            "beside its likelihood, of which these draws would know nothing; take weighted=True, or a chain."
        )
    weighted = bool(updates) if weighted is None else weighted
    is_joint = weighted and any(updates.values())
    draws_key, readout_key = random.split(rng_key)

    def limit(arguments: tuple[tuple, dict], rng_key: Array) -> tuple[Draws, Array | None]:
        keys, base_keys, log_weights = random.split(rng_key, num_samples), None, None
        if weighted:
            keys, base_keys, log_weights = _resampled_keys(repriorised_model, arguments, num_samples, rng_key)

        def draw(keys: tuple[Array, Array | None]) -> Draws:
            # Weights that depend on the readout choose it with the rest.
            base = StandardNormalBase() if is_joint else StandardNormalBase(is_exact=True, rng_key=keys[1])
            return _limit_draw(repriorised_model, arguments, keys[0], base)

        return jax.lax.map(draw, (keys, base_keys)), log_weights

    draws, log_weights = run_with_arguments(limit, (model_args, model_kwargs), draws_key)
    shape = None if log_weights is None else _pareto_shape(log_weights)
    if isinstance(repriorised_model, ReadoutModel):
        draws = weights_of(repriorised_model, readout_key, draws, model_args, model_kwargs)
    return WideLimitDraws(draws, shape)


def _pareto_shape(log_weights: Array) -> float | None:
    if not is_known(log_weights):
        return None
    _, shape = pareto_smoothed(np.asarray(log_weights, float))
    if shape > 0.7:
        warnings.warn(
            f"the Pareto shape of the draws' weights is {shape:.2f}, above 0.7: few draws of the prior carry them. "
            "Narrow the priors of noise and scales (wide_limit.fit finds where), widen the network, or sample.",
            RuntimeWarning,
            stacklevel=3,
        )
    return shape


def _limit_draw(model: Callable, arguments: tuple[tuple, dict], key: Array, base: "StandardNormalBase") -> Draws:
    sites = run_model(model, *arguments, rng_key=key, inside=(base,))
    if any(isinstance(site["fn"], ReadoutMarginal) for site in sample_sites(sites).values()):
        return {name: site["value"] for name, site in latent_sites(sites).items()}  # the readout is drawn later
    return weights_of_run(sites)


def _resampled_keys(
    model: Callable, arguments: tuple[tuple, dict], num_samples: int, rng_key: Array
) -> tuple[Array, Array, Array]:
    """Return keys of draws chosen by their weights, those of their base sites, and the logarithms of all weights."""
    key, choice_key, base_key = random.split(rng_key, 3)
    keys = random.split(key, _NUM_PROPOSALS * num_samples)

    def weigh(key: Array) -> Array:
        return log_weight(run_model(model, *arguments, rng_key=key, inside=(StandardNormalBase(),)))

    log_weights = jax.lax.map(weigh, keys)
    finite = jnp.where(jnp.isfinite(log_weights), log_weights, -jnp.inf)
    # Only keys are chosen, and draws made anew: the weights of all proposals would fill the memory.
    resampled = keys[random.categorical(choice_key, finite, shape=(num_samples,))]
    return resampled, random.split(base_key, num_samples), log_weights


def log_weight(sites: Sites) -> Array:
    """Return the log ratio of a run's joint density to that of its prior, with N(0, I) for base sites, a scalar."""
    bases = base_transforms(sites)
    total = jnp.zeros(())
    for name, site in sample_sites(sites).items():
        log_prob = site["fn"].log_prob(site["value"])
        if site["is_observed"]:
            # For example, a scale for each row.
            total += jnp.sum(log_prob if site["scale"] is None else site["scale"] * log_prob)
        elif name in bases:
            total += jnp.sum(log_prob) - jnp.sum(dist.Normal(0.0, 1.0).log_prob(site["value"]))
    return total  # other latent sites were drawn from their prior


def non_vanishing_updates(model: Callable, args: tuple, kwargs: Mapping[str, object]) -> dict[str, bool]:
    """Names whose posterior differs from the prior even at infinite width, and whether a readout reaches them.

    They are of observed sites, and "likelihood", where a latent site reaches that of the map beside the features: by
    its noise, or a term of its mean, of which the map knows nothing.
    """
    sites = abstract_sites(model, args, kwargs)
    bases = {name: jnp.zeros_like(jax.typeof(sites[name]["value"])) for name in base_transforms(sites)}

    def run(key: Array) -> dict[tuple[str, str], object]:
        sites = run_model(model, args, kwargs, rng_key=key, values=bases, inside=(FreeValues(),))
        problems = [transform.problem for transform in base_transforms(sites).values()]
        results: dict[tuple[str, str], object] = {}
        for name, site in sample_sites(sites).items():
            if is_marginal := isinstance(site["fn"], ReadoutMarginal):
                problems.append(site["fn"].problem)
            if site["is_observed"]:
                results["marginal" if is_marginal else "observed", name] = site["fn"].log_prob(site["value"])
        results["", "noise"] = [problem.noise_scale for problem in problems]
        return {**results, ("", "features"): [problem.features for problem in problems]}

    program = Program(run, random.key(0))
    origins = ["prior", *(name for name, *_ in program.places)]
    reads = {result: set(compress(origins, program.reads(result))) for result in program.results}
    observed = {name for kind, name in reads if kind == "observed"}
    reached = [{name for name in observed if base in reads["observed", name]} for base in bases]
    # A site that is reached alone is the likelihood of the map.
    reached_beside = {name for names in reached if len(names) > 1 for name in names}
    by_prior_draws = {name for name in observed if reads["observed", name] - bases.keys()}.difference(*reached)
    updates = {name: name in reached_beside for name in by_prior_draws | reached_beside}
    known = reads["", "features"] | reads["", "noise"] | bases.keys()
    has_term = any(reads[result] - known for result in reads.keys() - {("observed", name) for name in updates})
    if has_term or reads["", "noise"]:
        updates["likelihood"] = has_term
    return updates


class StandardNormalBase(Messenger):
    """Handler that draws the base sites of repriorised readouts from N(0, I), not from their prior."""

    def __init__(self, is_exact: bool = False, rng_key: Array | None = None):
        self.is_exact = is_exact
        self.rng_key = rng_key
        super().__init__()

    def process_message(self, msg: dict) -> None:
        if msg["type"] != "sample" or msg["value"] is not None:
            return
        for transform in base_transforms({msg["name"]: msg}).values():
            key = numpyro.prng_key()  # taken in any case: later sites then have the keys of a run without ``rng_key``
            if self.rng_key is not None:
                self.rng_key, key = random.split(self.rng_key)
            standard_normal = random.normal(key, msg["fn"].shape())
            msg["value"] = transform.base_of_posterior_draw(standard_normal) if self.is_exact else standard_normal


def guide_draws(
    rng_key: Array,
    model: Callable,
    guide: Callable,
    params: Mapping[str, object],
    num_samples: int,
    *model_args: object,
    **model_kwargs: object,
) -> Draws:
    r"""Draw from a guide that was fitted to a wrapped model, readout included.

    The guide of a repriorised model knows $\phi$, that of a collapsed one nothing of the readout, which
    ``Predictive(model, guide=guide, params=params)`` would draw from its *prior* at new inputs. Predict with these
    draws instead, by :class:`~numpyro_wide.ReadoutPredictive` or ``Predictive``.

    Args:
        rng_key: a PRNG key.
        model: wrapped model, as of :func:`~numpyro_wide.wide_limit_draws`.
        guide: an autoguide or a guide function.
        params: its fitted parameters, ``svi.run(...).params``.
        num_samples: number of draws.
        *model_args: arguments that the model was fitted with, targets included.
        **model_kwargs: its keyword arguments.

    Returns:
        Draws of all latent sites and of the readout, for ``Predictive(model, draws)`` with the unwrapped model.

    Raises:
        ValueError: if ``params`` lacks one of the guide's, or no readout is repriorised in the run, as without targets.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro
        >>> from numpyro.infer import SVI, Trace_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> from numpyro_wide import guide_draws, nn, repriorise
        >>> model = nn.bnn(nn.FCN(depth=1, width=50), num_outputs=None, noise=0.1)
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> y = jnp.sin(x[:, 0])
        >>> wrapped = repriorise(model, readout="readout", features="features", targets="y", noise_scale=0.1)
        >>> guide = AutoNormal(wrapped)
        >>> fit = SVI(wrapped, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
        >>> params = fit.run(jax.random.key(0), 10, x, y, progress_bar=False).params
        >>> guide_draws(jax.random.key(1), wrapped, guide, params, 20, x, y)["readout"].shape
        (20, 50)
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            f"params must be a dictionary of the guide's parameters, but is {kind_of(params)}; of what svi.run "
            "gave, pass the .params."
        )
    order = "guide_draws(rng_key, model, guide, params, num_samples, x, y)"
    check_key("rng_key", rng_key, order)
    num_samples = whole_number("num_samples", num_samples, order=order)
    _check_params(guide, params, model_args, model_kwargs)
    check_nan_eagerly(model, model_args, model_kwargs, params)
    guide_key, readout_key = random.split(rng_key)

    def from_guide(arguments: tuple, rng_key: Array) -> Draws:
        params, args, kwargs = arguments
        return Predictive(guide, params=params, num_samples=num_samples)(rng_key, *args, **kwargs)

    draws = run_with_arguments(from_guide, (dict(params), model_args, model_kwargs), guide_key)
    return weights_of(model, readout_key, draws, model_args, model_kwargs, params)


def _check_params(guide: Callable, params: Mapping, args: tuple, kwargs: Mapping[str, object]) -> None:
    """Refuse parameters that lack some of the guide's: it would silently draw from where it starts."""
    if getattr(guide, "prototype_trace", guide) is None:
        # An automatic guide that was never used sets itself up, which must not happen in an abstract run.
        run_model(guide, args, kwargs, values=params)
    sites = abstract_sites(guide, args, kwargs, params)
    missing = [name for name, site in sites.items() if site["type"] == "param" and name not in params]
    if missing:
        raise ValueError(
            f"params must hold the guide's fitted parameters, but {listing(missing)} is missing; it has "
            f"{listing(params)}. Pass svi.run(...).params."
        )


def check_nan_eagerly(model: Callable, args: tuple, kwargs: dict, params: Mapping[str, object] | None = None) -> None:
    """Run the model outside jit if the data contain NaN, so that its own checks can raise."""
    arrays, _ = split((args, kwargs))
    if any(is_known(x) and np.issubdtype(x.dtype, np.floating) and np.isnan(np.asarray(x)).any() for x in arrays):
        abstract_sites(model, args, kwargs, params)


def weights_of(
    model: Callable,
    rng_key: Array,
    draws: Draws,
    args: tuple,
    kwargs: Mapping[str, object],
    params: Mapping[str, object] | None = None,
) -> Draws:
    """Return draws of the unwrapped model, readout included, for draws of the wrapped one fitted on ``args``."""
    if isinstance(model, ReadoutModel) and model.is_collapsed:
        predictive = ReadoutPredictive(model, draws, args, dict(kwargs), params=dict(params or {}))
        return {**draws, model.readout: predictive.readout(rng_key)}
    if isinstance(model, ReadoutModel) and model.readout in draws:
        return dict(draws)

    def images(arguments: tuple) -> Draws:
        draws, params, args, kwargs = arguments

        def image(draw: Draws) -> Draws:
            return weights_of_run(run_model(model, args, kwargs, values={**params, **draw}))

        return jax.lax.map(image, draws)

    return run_with_arguments(images, (draws, dict(params or {}), args, dict(kwargs)))
