"""A trained guide in one call: settings are raced by the loss of held-out simulations, and guides joined."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike

from numpyro_wide._checks import check_finite, check_key, check_one_of, progress, whole_number
from numpyro_wide._compile import run_program
from numpyro_wide._traces import abstract_sites, run_model
from numpyro_wide.amortized._guide import FAMILIES, AutoAmortized
from numpyro_wide.amortized._joined import JoinedGuides
from numpyro_wide.amortized._simulation import (
    Arrays,
    Draws,
    bound,
    check_simulator,
    draw_from_guide,
    latent_names,
    simulate,
    site_names,
)
from numpyro_wide.amortized._trainer import AmortizedForwardKL, AmortizedRunResult
from numpyro_wide.amortized._training_data import call_simulator, check_simulations

if TYPE_CHECKING:
    from flax.linen import Module

_BATCH_SIZE = 128
_LEARNING_RATE = 2e-3
_WIDTH, _WIDER = 128, 256
_DECAY = 1e4  # of weights, over the number of simulations: as a prior, it has less to say beside more of them
_NUM_CYCLES = 4
_FIRST_STEPS = 500  # of the first cycle, of 10,000 simulations
_NUM_MEMBERS = 3
_NUM_KEPT = 3  # settings of the second cycle, as less weight decay pays late; those after it are of one
_NUM_EVALUATIONS = 8  # of the held-out loss, in the first cycle
_SMALLEST_GAIN = 0.003  # nats that a cycle must bring for the next one to be worth its steps
_NUM_EMULATED = 30  # for each simulation
_FEWEST = 20  # simulations


class _Setting(NamedTuple):
    """A setting to race; no width where the encoder is the user's."""

    family: str
    factor: str
    width: int | None
    weight_decay: float
    is_emulated: bool = False


class Report(NamedTuple):
    """What :func:`fit` tried and chose.

    Attributes:
        trials: settings, best first: dictionaries of "family", "factor", "width", "weight_decay" and "is_emulated" with
            "num_steps", "held_out" loss and "seconds", for a ``pandas.DataFrame``.
        joined: "single", "mixture" or "mean" of guides of the best setting that differ by their seeds.
        held_out: held-out loss of the result in nats.
        gain: nats that the last cycle, half of all steps, brought the best setting: how far it is from settled.
        seconds: seconds of everything.
    """

    trials: list[dict[str, Any]]
    joined: str
    held_out: float
    gain: float
    seconds: float


class AmortizedFit(NamedTuple):
    """Result of :func:`fit`.

    Attributes:
        guide: guide of one data set, as :class:`~numpyro_wide.autoguide.AutoAmortized` is.
        params: values of its param and mutable sites.
        report: what was tried and chosen.
        held_out: simulations that were not trained on, {site: (n, ...)}, as for ``calibration.from_guide``.
        args: arguments of model and guide.
    """

    guide: AutoAmortized
    params: dict[str, Any]
    report: Report
    held_out: Arrays
    args: tuple

    def sample(self, rng_key: Array, observed_values: Mapping[str, ArrayLike], num_samples: int = 1000) -> Draws:
        """Draw the latents given one data set, {site: (num_samples, ...)}; compiled once for all data sets."""
        check_key("rng_key", rng_key, "(rng_key, observed_values)")
        for name, value in observed_values.items():  # of which the program does not know the numbers
            check_finite(f"observed_values[{name!r}]", value)
        guide = bound(self.guide.model, self.guide, self.args, {})[1]

        def draw(params: dict[str, object], values: Draws, keys: Array) -> Draws:
            return jax.vmap(lambda key: draw_from_guide(guide, key, params, values)[0])(keys)

        values = {name: jnp.asarray(value) for name, value in observed_values.items()}
        keys = random.split(rng_key, whole_number("num_samples", num_samples))
        return run_program(draw, self.params, values, keys)


def fit(
    rng_key: Array,
    model: Callable | Mapping[str, dist.Distribution],
    *args: object,
    observed: str | Sequence[str],
    simulations: Arrays | None = None,
    simulator: Callable | None = None,
    num_simulations: int = 10_000,
    family: str = "auto",
    sites: Sequence[str] | None = None,
    encoder: "Module | None" = None,
    emulate: bool = False,
    num_steps: int | str = "auto",
    seconds: float | None = None,
    progress_bar: bool = True,
) -> AmortizedFit:
    """Simulate, train guides, and choose: the loss of a tenth of the simulations, held out, decides everything.

    Families, weight decays, both factors of joint normals and two widths are raced. The learning rate falls along a
    cosine in cycles, each twice as long as the one before (Loshchilov and Hutter 2017). The first is of all families,
    and of other settings of the best one; the best three go on, then one, and all ends where a cycle brings nothing.
    The best setting is trained from other seeds, too, and guides are joined, as a mixture or by the mean of what their
    networks compute, where that is better than one.

    Args:
        rng_key: a PRNG key; the same key gives the same result.
        model: ``model(*args)``, called without data, simulates every site; of simulations from elsewhere the prior
            alone, also as a dictionary of distributions.
        *args: arguments of model and guide.
        observed: name, or names, of the sites that are data.
        simulations: simulations {site: (n, ...)} instead of new ones.
        simulator: function in Python from one draw of the prior, by name, to its data: an array, or a dictionary.
        num_simulations: number of new simulations.
        family: family of :class:`~numpyro_wide.autoguide.AutoAmortized`; "auto" races all, a flow if flowjax is
            installed.
        sites: names of the latents to infer, all continuous ones by default; the others are nuisances.
        encoder: flax module as of :class:`~numpyro_wide.autoguide.AutoAmortized`.
        emulate: whether to add simulations by a network that learns the simulator, if that lowers the loss. It assumes
            that data given the latents are nearly normal, positive data on a logarithmic scale, counts by their roots.
        num_steps: most steps of all trainings together; "auto" is about 280 √n of n simulations, of more than 10,000 in
            proportion to n**0.8.
        seconds: time after which no further training starts.
        progress_bar: whether to show a bar.

    Example:
        >>> import jax, numpyro.distributions as dist, numpy as np
        >>> from numpyro_wide import amortized
        >>> rng = np.random.default_rng(0)
        >>> simulator = lambda rate: rng.poisson(rate, size=5)
        >>> options = {"num_simulations": 1000, "num_steps": 600, "family": "independent", "progress_bar": False}
        >>> prior = {"rate": dist.Gamma(3, 1)}
        >>> fit = amortized.fit(jax.random.key(0), prior, observed="y", simulator=simulator, **options)
        >>> rate = fit.sample(jax.random.key(1), {"y": np.array([4, 5, 3, 6, 5])})["rate"]
        >>> abs(float(rate.mean()) - 26 / 6) < 0.5  # exact: Gamma(3 + 23, 1 + 5)
        True
    """
    start = time.perf_counter()
    check_key("rng_key", rng_key, "(rng_key, model, *args, observed=...)")
    check_one_of("family", family, ("auto", *FAMILIES))
    observed, simulate_key, emulate_key, train_key = site_names(observed), *random.split(rng_key, 3)
    if isinstance(model, Mapping):
        model = partial(_sample_prior, model)
    if simulations is None:
        simulations = _simulations(simulate_key, model, args, observed, simulator, num_simulations)
    simulations = check_simulations(simulations, abstract_sites(model, args, {}), observed)
    if len(simulations[observed[0]]) < _FEWEST:
        raise ValueError(f"fit needs {_FEWEST} simulations, but got {len(simulations[observed[0]])} to train on.")
    order = np.asarray(random.permutation(simulate_key, len(simulations[observed[0]])))  # they may be sorted
    simulations, num_held_out = {name: values[order] for name, values in simulations.items()}, max(1, len(order) // 10)
    held_out = {name: values[-num_held_out:] for name, values in simulations.items()}
    data = {False: simulations}
    if emulate:
        guide = AutoAmortized(model, observed=observed, sites=sites)
        data[True] = _with_emulated(emulate_key, guide, args, simulations, num_held_out, num_steps)
    decay = _DECAY / max(1000, len(order))  # more would shrink weights to nothing in a step
    first = _first_settings(family, _WIDTH if encoder is None else None, decay)
    further = partial(_further_settings, emulate=emulate)
    num_settings = len(first) + max(len(further(setting)) for setting in first)
    interval, most_steps = _plan(num_steps, len(order), num_settings)
    batch_size = min(_BATCH_SIZE, (len(order) - num_held_out) // 4)

    @cache
    def trainer_of(family: str, factor: str, width: int | None) -> AmortizedForwardKL:
        options: dict[str, Any] = {"encoder": _encoder(width) if width else encoder, "factor": factor, "family": family}
        return _trainer(AutoAmortized(model, observed=observed, sites=sites, **options), interval, batch_size)

    import optax  # loaded late

    def train(setting: _Setting, num_steps: int, member: int, last: AmortizedRunResult | None) -> AmortizedRunResult:
        trainer, simulations = trainer_of(*setting[:3]), data[setting.is_emulated]
        if last is None:
            state = trainer.init(random.fold_in(train_key, member), *args, simulations=simulations)
            decay = jnp.asarray(setting.weight_decay)
            state = state._replace(optim_state=optax.tree_utils.tree_set(state.optim_state, weight_decay=decay))
        else:
            state = last.state
        options: dict[str, Any] = {"simulations": simulations, "held_out": num_held_out, "evaluate_every": interval}
        result = trainer.run(train_key, num_steps, *args, init_state=state, progress_bar=False, **options)
        bar.update(num_steps)
        return result

    deadline = math.inf if seconds is None else start + seconds
    with progress(total=most_steps, shown=progress_bar, desc="steps") as bar:
        best, trials, gain, params = _race(train, first, further, _NUM_EVALUATIONS * interval, deadline)
        members = [params]
        for member in range(1, _NUM_MEMBERS - (best.family == "flow")):  # whose steps take longer
            if time.perf_counter() < deadline:
                members.append(train(best, trials[0]["num_steps"], member, None).params)
    single: Any = trainer_of(*best[:3]).guide
    guide, params, joined, loss = _joined(single, members, held_out, args)
    report = Report(trials, joined, loss, gain, time.perf_counter() - start)
    return AmortizedFit(guide, params, report, held_out, args)


def _sample_prior(distributions: Mapping[str, dist.Distribution]) -> None:
    """Sample independent sites."""
    for name, distribution in distributions.items():
        numpyro.sample(name, distribution)


def _simulations(
    rng_key: Array, model: Callable, args: tuple, observed: tuple[str, ...], simulator: Callable | None, num_draws: int
) -> dict[str, np.ndarray]:
    """Simulate by the model, or its prior and a simulator in Python."""
    num_draws = whole_number("num_simulations", num_draws, _FEWEST)
    sites = abstract_sites(model, args, {})
    check_simulator(sites, observed if simulator is None else ())
    draw = partial(lax.map, lambda key: simulate(partial(model, *args), key, observed), batch_size=min(num_draws, 1000))
    draws = {name: np.asarray(values) for name, values in jax.jit(draw)(random.split(rng_key, num_draws)).items()}
    if simulator is None:
        return draws
    latents = {name: draws[name] for name in latent_names(sites, observed)}
    return latents | call_simulator(simulator, latents, observed)


def _first_settings(family: str, width: int | None, decay: float) -> list[_Setting]:
    """Return the settings of the first cycle: one of each family."""
    families = [name for name in FAMILIES if name != "flow" or find_spec("flowjax")] if family == "auto" else [family]
    return [_Setting(name, "precision", width, decay) for name in families]


def _further_settings(best: _Setting, emulate: bool) -> list[_Setting]:
    """Return the settings around the best of the first cycle: other weight decays, a wider network, another factor."""
    settings = [best._replace(weight_decay=factor * best.weight_decay) for factor in (0.1, 10.0)]
    if best.width is not None:
        settings.append(best._replace(width=_WIDER))
    factors = ("precision", "covariance") if best.family in ("normal", "mixture") else ("precision",)
    settings += [best._replace(factor=factor) for factor in factors[1:]]
    if emulate:
        emulated = best._replace(is_emulated=True)
        decays = 0.0, 0.1 * best.weight_decay
        settings += [emulated._replace(factor=factor, weight_decay=decay) for factor in factors for decay in decays]
    return settings


def _plan(num_steps: int | str, num_simulations: int, num_settings: int) -> tuple[int, int]:
    """Return the number of steps between evaluations of the held-out loss, and the most of all trainings."""
    race = num_settings + 2 * _NUM_KEPT + sum(1 << cycle for cycle in range(2, _NUM_CYCLES))
    least = _NUM_EVALUATIONS * (race + (_NUM_MEMBERS - 1) * (2**_NUM_CYCLES - 1))
    if num_steps == "auto":
        share = num_simulations / 10_000
        interval = math.ceil(_FIRST_STEPS * share ** (0.8 if share > 1 else 0.5) / _NUM_EVALUATIONS)
    else:
        interval = whole_number("num_steps", num_steps, least) // least
    return interval, interval * least


def _encoder(width: int) -> "Module":
    from numpyro_wide.nn import ResidualEncoder  # flax is loaded when it is needed

    return ResidualEncoder(width)


def _trainer(guide: AutoAmortized, interval: int, batch_size: int) -> AmortizedForwardKL:
    """Return the trainer of all weight decays: they are part of its state."""
    import optax  # loaded late

    def learning_rate(step: Array) -> Array:
        cycles = 1 + step / (_NUM_EVALUATIONS * interval)
        return _LEARNING_RATE / 2 * (1 + jnp.cos(math.pi * (cycles / 2 ** jnp.floor(jnp.log2(cycles)) - 1)))

    optimiser = optax.chain(
        optax.clip_by_global_norm(5.0),
        optax.scale_by_adam(),
        optax.inject_hyperparams(optax.add_decayed_weights, static_args="mask")(weight_decay=1.0, mask=_are_decayed),
        optax.scale_by_learning_rate(learning_rate),
    )
    return AmortizedForwardKL(guide.model, guide, optimiser, observed=guide.observed, batch_size=batch_size)


def _are_decayed(params: dict[str, object]) -> dict[str, object]:
    """Return which weights decay: hidden layers' matrices, not biases nor what is linear in features."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim > 1 and "head" not in jax.tree_util.keystr(path), params
    )


def _race(
    train: Callable, first: list[_Setting], further: Callable, first_steps: int, deadline: float
) -> tuple[_Setting, list[dict[str, Any]], float, dict[str, Any]]:
    """Train all settings for a cycle, the best few for a second, the best on; return it, trials, last gain, params."""
    results: dict[_Setting, AmortizedRunResult] = {}
    trials: dict[_Setting, dict[str, Any]] = {}

    def run(settings: list[_Setting], num_steps: int) -> list[_Setting]:
        """Train settings, and return all in the order of their losses."""
        for setting in settings:
            start = time.perf_counter()
            if results and start > deadline:
                break
            result = results[setting] = train(setting, num_steps, 0, results.get(setting))
            trial = trials.setdefault(setting, {**setting._asdict(), "num_steps": 0, "held_out": 0.0, "seconds": 0.0})
            trial["num_steps"] += num_steps
            trial["held_out"] = float(result.state.held_out.best_loss)
            trial["seconds"] += time.perf_counter() - start
        return sorted(trials, key=lambda setting: trials[setting]["held_out"])

    ranking = run(first, first_steps)
    ranking = run(further(ranking[0]), first_steps)
    for cycle in range(1, _NUM_CYCLES):
        loss = trials[ranking[0]]["held_out"]
        ranking = run(ranking[: _NUM_KEPT if cycle == 1 else 1], first_steps << cycle)
        gain = loss - trials[ranking[0]]["held_out"]
        if gain < _SMALLEST_GAIN:
            break
    return ranking[0], [trials[setting] for setting in ranking], gain, results[ranking[0]].params


def _joined(
    guide: AutoAmortized, members: list[dict[str, object]], held_out: Arrays, args: tuple
) -> tuple[AutoAmortized, dict[str, Any], str, float]:
    """Return the best of one guide, the mixture of all and their mean, with its held-out loss."""
    import optax  # loaded late

    def scores_of(guide: AutoAmortized, members: list[dict[str, object]]) -> Array:
        scorer = AmortizedForwardKL(guide.model, guide, optax.sgd(1.0), observed=guide.observed)
        score = jax.jit(lambda params, held_out: scorer.guide_log_prob(params, held_out, *args))
        return jnp.stack([score(params, held_out) for params in members])

    log_probs = scores_of(guide, members)
    best = int(jnp.argmax(log_probs.mean(1)))
    choices = [(guide, members[best], "single", -float(log_probs[best].mean()))]
    mixture, mean = (JoinedGuides(guide, is_mean=is_mean) for is_mean in (False, True))
    params = mixture.join(members)
    loss = math.log(len(members)) - float(logsumexp(log_probs, axis=0).mean())
    choices.append((mixture, params, "mixture", loss))
    if guide.family in ("normal", "independent"):  # components of mixtures have no order to agree on
        choices.append((mean, params, "mean", -float(scores_of(mean, [params]).mean())))
    return min(choices, key=lambda choice: choice[-1])


def _with_emulated(
    rng_key: Array, guide: AutoAmortized, args: tuple, simulations: Arrays, held_out: int, num_steps: int | str
) -> dict[str, Array | np.ndarray]:
    """Put simulations by a network in front: a guide for the data given the latents, trained on the simulations."""
    fit_key, draw_key, noise_key = random.split(rng_key, 3)
    latents = guide.latents(run_model(guide.model, args))
    real = {name: np.asarray(simulations[name][:-held_out], float) for name in guide.observed}
    are_counts = {name: np.array_equal(x, np.round(x)) and x.min() >= 0 for name, x in real.items()}
    # Square roots of counts, made continuous, have nearly the same noise everywhere.
    noise = np.random.default_rng(np.asarray(random.bits(noise_key, (4,), "uint32")))
    training_data = {name: np.sqrt(x + noise.random(x.shape)) if are_counts[name] else x for name, x in real.items()}
    for name, latent in latents.items():
        training_data[name] = np.asarray(jax.jit(jax.vmap(latent.transform.inv))(simulations[name][:-held_out]))
    positive = [name for name, x in real.items() if not are_counts[name] and x.min() > 0]

    def data_model() -> None:  # names, shapes and supports
        for name, x in training_data.items():
            prior = (dist.LogNormal if name in positive else dist.Normal)(0, 1)
            numpyro.sample(name, prior.expand(x.shape[1:]).to_event(x.ndim - 1))

    options: dict[str, Any] = {"observed": tuple(latents), "simulations": training_data, "sites": guide.observed}
    options |= {"num_steps": num_steps, "encoder": _encoder(2 * _WIDTH), "progress_bar": False}
    fits = [fit(fit_key, data_model, family=family, **options) for family in ("independent", "normal")]
    emulator = min(fits, key=lambda fit: fit.report.held_out)

    def draw(key: Array) -> Draws:
        prior_key, data_key = random.split(key)
        draws = simulate(partial(guide.model, *args), prior_key, ())
        coordinates = {name: latent.transform.inv(draws[name]) for name, latent in latents.items()}
        data = {name: values[0] for name, values in emulator.sample(data_key, coordinates, 1).items()}
        return {name: draws[name] for name in latents} | data

    num_emulated = _NUM_EMULATED * len(simulations[guide.observed[0]])
    draws = jax.jit(partial(lax.map, draw, batch_size=1000))(random.split(draw_key, num_emulated))
    emulated, is_inside = {name: np.asarray(values) for name, values in draws.items()}, np.ones(num_emulated, bool)
    for name, x in real.items():
        if are_counts[name]:
            emulated[name] = np.clip(np.floor(np.maximum(emulated[name], 0) ** 2), x.min(0), x.max(0))
        # What lies beyond all simulations the network has not learnt.
        in_range = (emulated[name] >= x.min(0)) & (emulated[name] <= x.max(0))
        is_inside &= in_range.reshape(num_emulated, -1).all(axis=1)
    return {name: np.concatenate([values[is_inside], simulations[name]]) for name, values in emulated.items()}
