"""Summary of a finished run on one screen."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.infer import MCMC

from numpyro_wide import _arviz
from numpyro_wide._checks import FELT_ERROR, IN_FLOAT64, check_key, check_levels, warn_if_stuck
from numpyro_wide._traces import latent_sites, refuse_unobserved
from numpyro_wide.diagnostics._to_arviz import Draws, FinishedRun
from numpyro_wide.readout._model import base_name
from numpyro_wide.readout._predictions import moments_of


@dataclass(frozen=True)
class SiteSummary:
    """Posterior of one number, with ArviZ's rank-normalised split R-hat and bulk ESS."""

    mean: float
    standard_deviation: float
    quantiles: dict[float, float]
    rhat: float
    ess: float


@dataclass(frozen=True)
class FunctionSummary:
    """Convergence of the function at the inputs of the fit.

    Attributes:
        is_integrated: whether it is the mean given the hidden weights.
        rhat: R-hat by entry, (entries,); NaN for constant draws.
        ess: effective sample size by entry, (entries,); NaN for constant draws.
        num_distinct: number of distinct draws, (chains,).
    """

    is_integrated: bool
    rhat: np.ndarray
    ess: np.ndarray
    num_distinct: np.ndarray


@dataclass(frozen=True)
class RunSummary:
    """Result of :func:`summary`; None where the run lacks a field.

    Attributes:
        sites: a :class:`SiteSummary` by name of the number.
        evidence_error: estimated rounding error of the log evidence at the last draws, in nats; inf for NaN.
        energy_drift: mean energy of the first quarter less the last, in deviations of the last, (chains,).
        energy_error: rounding unit of the energy, in nats.
        step_size: last step size, (chains,).
        num_gradients: number of gradients, from ``num_grad`` or ``num_steps``.
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
        """Whether R-hat, effective sample sizes and the energy's drift are those of converged chains."""
        rhat, ess = self._worst()
        return rhat <= _LARGEST_RHAT and ess >= _LEAST_ESS and not self._largest_drift() > _LARGEST_DRIFT

    @property
    def verdict(self) -> str:
        """Whether the chains have converged, in a line."""
        rhat, ess = self._worst()
        if np.isnan(ess):
            return "convergence unknown: too few draws, or none that move; run longer"
        told = f"R-hat {rhat:.2f}, least {ess:.0f} effective samples of {self.num_chains * self.num_draws}"
        if not self.is_converged:
            return f"not converged: {told}; run longer, or scale every layer (FAQ)"
        return f"converged: {told}" + ("; several chains would tell more" if self.num_chains == 1 else "")

    def _worst(self) -> tuple[float, float]:
        """Return the largest R-hat and the least ESS that the verdict goes by; NaN if none is known."""
        found: list[Any] = list(self.sites.values())
        if self.function is not None:
            # Units can trade places: their weights need not converge.
            found = [self.function, *(site for name, site in self.sites.items() if "[" not in name)]
        rhats = np.hstack([np.nan, *(one.rhat for one in found)])
        sizes = np.hstack([np.nan, *(one.ess for one in found)])
        return float(np.fmax.reduce(rhats)), float(np.fmin.reduce(sizes))

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
            numbers = {"mean": site.mean, "sd": site.standard_deviation}
            numbers |= {f"{100 * level:g}%": value for level, value in site.quantiles.items()}
            cells = {heading: f"{value:.4g}" for heading, value in numbers.items()}
            rows.append({"site": name, **cells, "R-hat": f"{site.rhat:.3f}", "ESS": f"{site.ess:.0f}"})
        return pandas.DataFrame(rows)

    def _notes(self) -> list[str]:
        lines = self._function_notes()
        drift = self._largest_drift()
        if drift > _LARGEST_DRIFT:
            lines.append(
                f"the energy drifts by {drift:.2g} standard deviations from first to last quarter: start closer "
                "(init_to_optimum) or run longer"
            )
        errors = [error for error in (self.evidence_error, self.energy_error) if error is not None]
        if errors and max(errors) >= FELT_ERROR:
            size = "more than can be told" if max(errors) == np.inf else f"about {max(errors):.2g} nats"
            lines.append(f"rounding moves the log density by {size}: run {IN_FLOAT64}")
        parts = {
            "acceptance": None if self.accept_prob is None else f"{self.accept_prob:.3f}",
            "step size": None if self.step_size is None else _range_of(self.step_size),
            "gradients": self.num_gradients,
            "divergent": self.num_divergent,
            "proposals not finite": self.num_nonfinite,
        }
        told = ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
        return [*lines, *([told] if told else []), self.verdict]

    def _function_notes(self) -> list[str]:
        function = self.function
        if function is None:
            return ["function at the inputs: unknown, since not all latent sites are stored"]
        start = f"function at the inputs ({'readout integrated out' if function.is_integrated else 'at all weights'})"
        if np.isnan(function.ess).all():
            return [f"{start}: no draw moves it"]
        rhats = f"median R-hat {np.nanmedian(function.rhat):.3f}, largest {np.nanmax(function.rhat):.3f}"
        sizes = f"median ESS {np.nanmedian(function.ess):.0f}, least {np.nanmin(function.ess):.0f}"
        lines = [f"{start}: {rhats}; {sizes}, of {self.num_chains * self.num_draws}"]
        if function.num_distinct.min() < 0.1 * self.num_draws:
            lines.append(f"a chain stands still: {function.num_distinct.tolist()} distinct draws by chain")
        return lines


def _range_of(values: np.ndarray) -> str:
    low, high = (f"{value:.3g}" for value in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


_MOST_ENTRIES = 500  # of the function
_LARGEST_SITE = 8  # entries of a site that is shown
_LARGEST_DRIFT = 3.0  # of the energy; stationary chains have less than 1
_LARGEST_RHAT, _LEAST_ESS = 1.05, 50.0  # of converged chains, the worst of all entries


def summary(
    mcmc: MCMC,
    model: Callable,
    *model_args: Any,
    model_kwargs: dict[str, Any] | None = None,
    rng_key: Array | None = None,
    quantiles: Sequence[float] = (0.05, 0.5, 0.95),
) -> RunSummary:
    """Summarise a run on one screen, by a :class:`RunSummary` to print.

    Shown are sites of up to eight numbers, and the convergence of the *function* at the inputs of the fit, at up to 500
    evenly spaced entries: for a Normal likelihood and a wrapped model the mean given the hidden weights, else the
    observed distribution's mean or class probabilities. The verdict is by the function and by sites of one number.

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
        '1 chain of 20 draws; 100 parameters'
    """
    check_levels("quantiles", tuple(quantiles))
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
        values, log_likelihood = _function_and_log_likelihood(run, rng_key)
        rhat, ess = _rhat_and_ess(values.astype(float))
        num_distinct = 1 + np.any(np.diff(values, axis=1) != 0, axis=2).sum(axis=1)
        function = FunctionSummary(run.conjugate is not None, rhat, ess, num_distinct)
        energy = -log_likelihood if energy is None else energy
    if run.conjugate is not None:
        last = {name: np.asarray(values)[:, -1:] for name, values in run.latent(run.stored).items()}
        error = float(np.max(run.map(lambda *at: run.read(*at)[1].evidence_error(), last)))
    energy = None if energy is None else np.asarray(energy)
    return RunSummary(
        sites=_sites(run, quantiles),
        function=function,
        evidence_error=error,
        energy_drift=None if energy is None else _drift(energy),
        energy_error=None if energy is None else float(np.spacing(np.abs(np.nanmedian(energy)).astype(energy.dtype))),
        num_chains=num_chains,
        num_draws=num_draws,
        num_parameters=sum(int(np.size(site["value"])) for site in latent_sites(run.sites).values()),
        num_features=run.sites[run.wrapped[0].features]["value"].shape[1] if run.wrapped else None,
        **_of_sampler(fields, getattr(mcmc, "last_state", None)),
    )


def _sites(run: FinishedRun, levels: Sequence[float]) -> dict[str, SiteSummary]:
    hidden = {*run.internal, *map(base_name, run.stored), *map(base_name, run.sites)}
    small = {name: values for name, values in run.stored.items() if np.prod(np.shape(values)[2:]) <= _LARGEST_SITE}
    shown = {name: np.asarray(values, float) for name, values in small.items() if name not in hidden}
    found = {}
    for name, draws in entries_by_name(shown, 2).items():
        rhat, ess = _rhat_and_ess(draws[..., None])
        found[name] = SiteSummary(
            mean=float(draws.mean()),
            standard_deviation=float(draws.std(ddof=1)),
            quantiles={level: float(np.quantile(draws, level)) for level in levels},
            rhat=float(rhat[0]),
            ess=float(ess[0]),
        )
    return found


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


def _function_and_log_likelihood(run: FinishedRun, rng_key: Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the function, (chain, draw, entry), and the log-likelihood, (chain, draw)."""

    def integrated(draw: Draws, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Array, Array]:
        fit, problem = run.read(draw, args, kwargs)
        mean, *_ = problem.predict(fit.features)
        return _some(jnp.ravel(fit.loc + mean)), problem.log_evidence()

    def at_weights(draw: Draws, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Array, Any]:
        sites = run.sites_at(draw, args, kwargs)
        observed = [sites[name] for name in run.observed]
        moments = [moments_of(site["fn"]) for site in observed]
        values = [jnp.ravel(found["probs"] if "probs" in found else found["mean"]) for found in moments]
        return _some(jnp.concatenate(values)), sum(jnp.sum(site["fn"].log_prob(site["value"])) for site in observed)

    if run.conjugate is not None:
        return jax.tree.map(np.asarray, run.map(integrated, run.stored))
    return jax.tree.map(np.asarray, run.map(at_weights, run.with_readout(rng_key)))


def _some(values: Array) -> Array:
    return values[np.unique(np.linspace(0, values.size - 1, min(_MOST_ENTRIES, values.size)).round().astype(int))]


def _drift(energy: np.ndarray) -> np.ndarray | None:
    quarter = energy.shape[1] // 4
    if quarter < 4:
        return None
    first, last = energy[:, :quarter].astype(float), energy[:, -quarter:].astype(float)
    return (first.mean(axis=1) - last.mean(axis=1)) / np.maximum(last.std(axis=1), 1.0)


def _of_sampler(fields: Mapping[str, Any], state: Any) -> dict[str, Any]:
    def last(name: str, default: Any = None) -> Any:
        return np.asarray(fields[name])[:, -1] if name in fields else getattr(state, name, default)

    adapted = getattr(state, "adapt_state", None)
    step_size = last("adapt_state.step_size", last("step_size", getattr(adapted, "step_size", None)))
    accept_prob = fields.get("accept_prob", getattr(state, "mean_accept_prob", None))
    gradients = fields.get("num_grad", fields.get("num_steps"))
    nonfinite = last("num_nonfinite")
    return {
        "accept_prob": None if accept_prob is None else float(np.mean(accept_prob)),
        "step_size": None if step_size is None else np.atleast_1d(np.asarray(step_size, float)),
        "num_gradients": None if gradients is None else int(np.sum(gradients)),
        "num_divergent": int(np.sum(fields["diverging"])) if "diverging" in fields else None,
        "num_nonfinite": None if nonfinite is None else int(np.sum(nonfinite)),
    }
