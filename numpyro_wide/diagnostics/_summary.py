"""Summary of a finished run on one screen."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpy.typing import ArrayLike
from numpyro.infer import MCMC

from numpyro_wide import _arviz
from numpyro_wide._checks import FELT_ERROR, IN_FLOAT64, check_key, levels_of, warn_if_stuck
from numpyro_wide._traces import latent_sites, refuse_unobserved
from numpyro_wide.diagnostics._to_arviz import Draws, FinishedRun
from numpyro_wide.readout._model import base_name
from numpyro_wide.readout._predictions import moments_of


@dataclass(frozen=True)
class SiteSummary:
    """Posterior of one number, with ArviZ's rank-normalised split R-hat and bulk ESS; NaN for constant draws.

    Attributes:
        is_exchangeable: whether it belongs to hidden units, which can trade places: it need not converge.
    """

    mean: float
    standard_deviation: float
    quantiles: dict[float, float]
    rhat: float
    ess: float
    is_exchangeable: bool


@dataclass(frozen=True)
class FunctionSummary:
    """Convergence of the function at the inputs of the fit.

    Attributes:
        is_integrated: whether it is the mean given the hidden weights.
        rhat: R-hat by entry, (entries,); NaN for constant draws.
        ess: effective sample size by entry, (entries,); NaN for constant draws.
        num_distinct: number of distinct draws, (chains,).
        num_nonfinite: number of draws, of all chains, at which it is not finite.
    """

    is_integrated: bool
    rhat: np.ndarray
    ess: np.ndarray
    num_distinct: np.ndarray
    num_nonfinite: int


class _Entry(NamedTuple):
    """Convergence of one number."""

    name: str
    rhat: float
    ess: float


@dataclass(frozen=True)
class RunSummary:
    """Result of :func:`summary`; None where the run lacks a field.

    Attributes:
        sites: a :class:`SiteSummary` by name of the number.
        evidence_error: estimated rounding error of the log evidence at the last draws, in nats; inf for NaN.
        energy_drift: mean energy of the first quarter less the last, in deviations of the last, (chains,).
        energy_error: rounding unit of the energy, in nats.
        step_size: last step size, (chains,).
        num_parameters: number of scalars that are sampled; a readout that is integrated out is not.
        num_gradients: number of gradients, from ``num_grad`` or ``num_steps``.
        gradients_per_draw: their mean by chain, or the last draw's number, (chains,).
        num_nonfinite: number of proposals without a finite energy, with the warmup's.
    """

    sites: dict[str, SiteSummary]
    function: FunctionSummary | None
    evidence_error: float | None
    energy_drift: np.ndarray | None
    energy_error: float | None
    num_chains: int
    num_draws: int
    num_parameters: int
    num_features: int | None
    accept_prob: float | None
    step_size: np.ndarray | None
    num_gradients: int | None
    gradients_per_draw: np.ndarray | None
    num_divergent: int | None
    num_nonfinite: int | None

    def __str__(self) -> str:
        table = [self._table().to_string(index=False)] if self.sites else []
        return "\n".join([self._size(), *table, *self._notes()])

    def _repr_html_(self) -> str:
        table = self._table().to_html(index=False) if self.sites else ""
        return f"<p>{self._size()}</p>{table}<p>{'<br>'.join(self._notes())}</p>"

    @property
    def is_converged(self) -> bool:
        """Whether R-hat is at most 1.01 and ESS at least 400, of the function and all sites that count."""
        return self.verdict.startswith("converged:")

    @property
    def verdict(self) -> str:
        """Whether the chains have converged, have not, or are too short for intervals, in a line."""
        if self.function is not None and self.function.num_nonfinite:
            draws = f"{self.function.num_nonfinite} of {self.num_chains * self.num_draws} draws"
            return f"not converged: the function is not finite at {draws}, run {IN_FLOAT64}"
        entries = self._judged()
        if not entries:
            return "convergence unknown: too few draws, or none that move; run longer"
        worst, least = max(entries, key=lambda entry: entry.rhat), min(entries, key=lambda entry: entry.ess)
        rhat, ess = f"R-hat {worst.rhat:.3f} of {worst.name}", f"least ESS {least.ess:.0f} of {least.name}"
        if worst.rhat > _APART:
            return f"not converged: {rhat}, run longer, scale every layer, and no prior by a latent scale (FAQ)"
        if self._drifts:
            return "not converged: the energy drifts, run longer"
        if worst.rhat > _LARGEST_RHAT or least.ess < _LEAST_ESS:
            times = max(2.0, np.ceil(_LEAST_ESS / least.ess))
            return f"too short for intervals: {rhat}, {ess}, run {times:.0f} times longer"
        return f"converged: {rhat}, {ess}" + ("; several chains would tell more" if self.num_chains == 1 else "")

    def _judged(self) -> list[_Entry]:
        """Return the numbers that the verdict is based on: those of all sites where the function is unknown."""
        judged: dict[str, Any] = {} if self.function is None else {"the function": self.function}
        for name, site in self.sites.items():
            if self.function is None or not site.is_exchangeable:
                judged[f"site {name!r}"] = site
        return [
            _Entry(name, *map(float, pair))
            for name, convergence in judged.items()
            for pair in np.broadcast(convergence.rhat, convergence.ess)
            if not np.isnan(pair[0])
        ]

    @property
    def _drifts(self) -> bool:
        return self._largest_drift() > _LARGEST_DRIFT

    def _largest_drift(self) -> float:
        return 0.0 if self.energy_drift is None else float(np.fmax.reduce(np.abs(self.energy_drift)))

    def _size(self) -> str:
        chains = f"{self.num_chains} {'chain' if self.num_chains == 1 else 'chains'} of {self.num_draws} draws"
        features = "" if self.num_features is None else f", {self.num_features} features"
        return f"{chains}; {self.num_parameters} parameters{features}"

    def _table(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row of text for each number."""
        import pandas  # heavy

        rows = []
        for name, site in self.sites.items():
            statistics = {"mean": site.mean, "sd": site.standard_deviation}
            statistics |= {f"{100 * level:g}%": value for level, value in site.quantiles.items()}
            cells = {heading: f"{value:.4g}" for heading, value in statistics.items()}
            rows.append({"site": name, **cells, "R-hat": f"{site.rhat:.3f}", "ESS": f"{site.ess:.0f}"})
        return pandas.DataFrame(rows)

    def _notes(self) -> list[str]:
        lines = self._function_notes()
        if self._drifts:
            lines.append(
                f"the energy drifts by {self._largest_drift():.2g} standard deviations from first to last quarter: "
                "start closer (init_to_optimum) or run longer"
            )
        errors = [error for error in (self.evidence_error, self.energy_error) if error is not None]
        if errors and max(errors) >= FELT_ERROR:
            size = "more than can be told" if max(errors) == np.inf else f"about {max(errors):.2g} nats"
            lines.append(f"rounding moves the log density by {size}: run {IN_FLOAT64}")
        counts = {
            "acceptance": None if self.accept_prob is None else f"{self.accept_prob:.3f}",
            "step size": None if self.step_size is None else _range_of(self.step_size),
            "gradients": self.num_gradients,
            "divergent": self.num_divergent,
            "proposals not finite, warmup's included": self.num_nonfinite,
        }
        sampler_note = ", ".join(f"{name} {value}" for name, value in counts.items() if value is not None)
        by_chain = []
        if self.gradients_per_draw is not None:
            which = "a draw" if self.num_gradients is not None else "of the last draw"
            by_chain = [f"gradients {which} by chain: {_by_chain(self.gradients_per_draw)}"]
        return [*lines, *([sampler_note] if sampler_note else []), *by_chain, self.verdict]

    def _function_notes(self) -> list[str]:
        function = self.function
        if function is None:
            return ["function at the inputs: unknown, since not all latent sites are stored"]
        start = f"function at the inputs ({'readout integrated out' if function.is_integrated else 'at all weights'})"
        if np.isnan(function.ess).all():
            return [f"{start}: {'not finite' if function.num_nonfinite else 'no draw moves it'}"]
        rhats = f"median R-hat {np.nanmedian(function.rhat):.3f}, largest {np.nanmax(function.rhat):.3f}"
        sizes = f"median ESS {np.nanmedian(function.ess):.0f}, least {np.nanmin(function.ess):.0f}"
        lines = [f"{start}: {rhats}; {sizes}, of {self.num_chains * self.num_draws}"]
        if function.num_distinct.min() < 0.1 * self.num_draws:
            lines.append(f"a chain stands still: {function.num_distinct.tolist()} distinct draws by chain")
        return lines


def _by_chain(values: np.ndarray) -> str:
    """Write a number a chain, or the range of many chains."""
    if len(values) > _MOST_CHAINS:
        return _range_of(values)
    return ", ".join(f"{value:.4g}" for value in values)


def _range_of(values: np.ndarray) -> str:
    low, high = (f"{value:.3g}" for value in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


_MOST_ENTRIES = 500  # of the function
_LARGEST_SITE = 8  # entries of a site that is shown
_MOST_CHAINS = 8  # that are listed one by one
_LARGEST_DRIFT = 3.0  # of the energy; stationary chains have less than 1
_LARGEST_RHAT, _LEAST_ESS = 1.01, 400.0  # of converged chains (Vehtari 2021)
_APART = 1.05  # R-hat of chains that more draws alone may not bring together


def summary(
    mcmc: MCMC,
    model: Callable,
    *model_args: object,
    model_kwargs: Mapping[str, object] | None = None,
    rng_key: Array | None = None,
    quantiles: ArrayLike = (0.05, 0.5, 0.95),
) -> RunSummary:
    """Summarise a run on one screen, by a :class:`RunSummary` to print.

    Shown are sites of up to eight numbers, and the convergence of the *function* at the inputs of the fit, at up to 500
    evenly spaced entries. For a Normal likelihood that is the mean given the hidden weights, also of draws of a model
    that is not wrapped, if it records its features; else pass the wrapped model. For other likelihoods it is the
    observed distribution's mean, or class probabilities. The verdict is by the function and by all sites that are shown
    but those of hidden units, which can trade places: "converged", with R-hat at most 1.01 and at least 400 effective
    samples, "not converged", with R-hat above 1.05 or an energy that drifts, and between them "too short for
    intervals".

    Args:
        mcmc: an MCMC after its run, or the result of :func:`~numpyro_wide.runs.run_in_pieces`.
        model: a model, wrapped or not.
        *model_args: arguments of the fit, observations included.
        model_kwargs: keyword arguments of the fit.
        rng_key: a PRNG key, ``jax.random.key(0)`` by default.
        quantiles: levels between 0 and 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_wide.diagnostics import summary
        >>> from numpyro_wide.nn import FCN, bnn
        >>> model, x = bnn(FCN(depth=1, width=50), num_outputs=None, noise=0.1), jnp.linspace(-1, 1, 5)[:, None]
        >>> mcmc = MCMC(NUTS(model, max_tree_depth=3), num_warmup=10, num_samples=20, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), x, x[:, 0])
        >>> str(summary(mcmc, model, x, x[:, 0])).splitlines()[0]
        '1 chain of 20 draws; 100 parameters, 50 features'
    """
    levels = levels_of("quantiles", quantiles)
    rng_key = random.key(0) if rng_key is None else rng_key
    check_key("rng_key", rng_key, "summary(mcmc, model, x, y, rng_key=jax.random.key(0))")
    run = FinishedRun("summary", mcmc, model, model_args, model_kwargs)
    refuse_unobserved(run.sites, "summary(mcmc, model, x, y) takes what mcmc.run got")
    warn_if_stuck(run.stored, by_chain=True)
    num_chains, num_draws = np.shape(next(iter(run.stored.values())))[:2]
    fields = mcmc.get_extra_fields(group_by_chain=True)
    energy = fields.get("potential_energy")
    function = error = None
    if not run.missing:
        values, log_likelihood, errors = _function(run, rng_key)
        num_distinct = 1 + np.any(np.diff(values, axis=1) != 0, axis=2).sum(axis=1)
        num_nonfinite = int(np.sum(~np.isfinite(values).all(axis=2)))
        convergence = *_rhat_and_ess(values.astype(float)), num_distinct, num_nonfinite
        function = FunctionSummary(run.conjugate is not None, *convergence)
        energy = -log_likelihood if energy is None else energy
        error = None if errors is None else float(np.max(errors[:, -1]))
    energy = None if energy is None else np.asarray(energy)
    latent = latent_sites(run.sites)
    integrated = getattr(model, "readout", None) if getattr(model, "is_collapsed", False) else None
    return RunSummary(
        sites=_sites(run, levels),
        function=function,
        evidence_error=error,
        energy_drift=None if energy is None else _drift(energy),
        energy_error=None if energy is None else float(np.spacing(np.abs(np.nanmedian(energy)).astype(energy.dtype))),
        num_chains=num_chains,
        num_draws=num_draws,
        num_parameters=sum(np.size(site["value"]) for name, site in latent.items() if name != integrated),
        num_features=run.sites[run.forms[0].features]["value"].shape[1] if run.forms else None,
        **_sampler_fields(fields, getattr(mcmc, "last_state", None)),
    )


def _sites(run: FinishedRun, levels: Sequence[float]) -> dict[str, SiteSummary]:
    hidden = {*run.internal, *map(base_name, run.stored), *map(base_name, run.sites)}
    summaries = {}
    for site, values in run.stored.items():
        size = np.prod(np.shape(values)[2:])
        if site in hidden or size > _LARGEST_SITE:
            continue
        sampled = base_name(site) if base_name(site) in run.stored else site
        for name, draws in entries_by_name({site: np.asarray(values, float)}, 2).items():
            rhat, ess = (float(statistic[0]) for statistic in _rhat_and_ess(draws[..., None]))
            summaries[name] = SiteSummary(
                mean=float(draws.mean()),
                standard_deviation=float(draws.std(ddof=1)),
                quantiles={level: float(np.quantile(draws, level)) for level in levels},
                rhat=rhat,
                ess=ess,
                is_exchangeable=bool(size > 1 and sampled not in run.identified),
            )
    return summaries


def entries_by_name(groups: Mapping[str, np.ndarray], num_leading: int) -> dict[str, np.ndarray]:
    """Return the entries of arrays after their leading axes, such as "w[0, 1]"."""
    return {
        f"{name}[{', '.join(map(str, index))}]" if index else name: values[(..., *index)]
        for name, values in groups.items()
        for index in np.ndindex(values.shape[num_leading:])
    }


def _rhat_and_ess(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute both for values (chain, draw, entry); NaN for constant or few draws."""
    num_chains, num_draws, num_entries = values.shape
    moves = np.ptp(values, axis=(0, 1)) > 0
    rhat, ess = np.full(num_entries, np.nan), np.full(num_entries, np.nan)
    if num_draws < 8 or not moves.any():
        return rhat, ess
    ess[moves] = _arviz.effective_sample_size(values[..., moves])
    # ArviZ wants two chains.
    half = num_draws // 2
    chains = values if num_chains > 1 else np.stack([values[0, :half], values[0, -half:]])
    rhat[moves] = _arviz.rhat(chains[..., moves])
    return rhat, ess


def _function(run: FinishedRun, rng_key: Array) -> tuple[np.ndarray, ...]:
    """Return the function, (chain, draw, entry), the log-likelihood and the evidence's rounding, (chain, draw)."""

    def integrated(draw: Draws, args: tuple, kwargs: Mapping[str, object]) -> tuple[Array, Array, Array]:
        fit, problem = run.read(draw, args, kwargs)
        mean, *_ = problem.predict(fit.features)
        return _thinned(jnp.ravel(fit.loc + mean)), problem.log_evidence(), problem.evidence_error()

    def at_weights(draw: Draws, args: tuple, kwargs: Mapping[str, object]) -> tuple[Array, Any, None]:
        sites = run.sites_at(draw, args, kwargs)
        observed = [sites[name] for name in run.observed]
        moments = [moments_of(site["fn"]) for site in observed]
        values = [jnp.ravel(stats["probs"] if "probs" in stats else stats["mean"]) for stats in moments]
        return (
            _thinned(jnp.concatenate(values)),
            sum(jnp.sum(site["fn"].log_prob(site["value"])) for site in observed),
            None,
        )

    if run.conjugate is not None:
        return run.map(integrated, run.stored)
    return run.map(at_weights, run.with_readout(rng_key))


def _thinned(values: Array) -> Array:
    return values[np.unique(np.linspace(0, values.size - 1, min(_MOST_ENTRIES, values.size)).round().astype(int))]


def _drift(energy: np.ndarray) -> np.ndarray | None:
    quarter = energy.shape[1] // 4
    if quarter < 4:
        return None
    first, last = energy[:, :quarter].astype(float), energy[:, -quarter:].astype(float)
    return (first.mean(axis=1) - last.mean(axis=1)) / np.maximum(last.std(axis=1), 1.0)


def _sampler_fields(fields: Mapping[str, Array | np.ndarray], state: object) -> dict[str, Any]:
    def last(name: str, default: object = None) -> Any:
        return np.asarray(fields[name])[:, -1] if name in fields else getattr(state, name, default)

    adapted = getattr(state, "adapt_state", None)
    step_size = last("adapt_state.step_size", last("step_size", getattr(adapted, "step_size", None)))
    accept_prob = fields.get("accept_prob", getattr(state, "mean_accept_prob", None))
    cost = "num_grad" if "num_grad" in fields or hasattr(state, "num_grad") else "num_steps"
    gradients = fields.get(cost)
    per_draw = getattr(state, cost, None) if gradients is None else np.mean(gradients, axis=1)
    nonfinite = last("num_nonfinite")
    return {
        "accept_prob": None if accept_prob is None else float(np.mean(accept_prob)),
        "step_size": None if step_size is None else np.atleast_1d(np.asarray(step_size, float)),
        "num_gradients": None if gradients is None else int(np.sum(gradients)),
        "gradients_per_draw": per_draw if per_draw is None else np.atleast_1d(np.asarray(per_draw, float)),
        "num_divergent": int(np.sum(fields["diverging"])) if "diverging" in fields else None,
        "num_nonfinite": None if nonfinite is None else int(np.sum(nonfinite)),
    }
