"""Summaries of a finished run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from jax import Array, random
from numpyro.infer import MCMC

from numpyro_wide import _arviz
from numpyro_wide._checks import FELT_ERROR, IN_FLOAT64, check_key, check_levels
from numpyro_wide._traces import abstract_sites
from numpyro_wide.diagnostics._convergence import evidence_error, function_values
from numpyro_wide.diagnostics._to_arviz import FinishedRun, check_run_and_model
from numpyro_wide.readout._model import base_name


@dataclass(frozen=True)
class SiteSummary:
    """Posterior of one number.

    Attributes:
        mean: mean of the draws.
        standard_deviation: standard deviation of the draws.
        quantiles: quantiles of the draws by their level.
        rhat: rank-normalised split R-hat; of a single chain, that of its two halves.
        ess: effective number of draws (ArviZ's "bulk").
    """

    mean: float
    standard_deviation: float
    quantiles: dict[float, float]
    rhat: float
    ess: float


@dataclass(frozen=True)
class FunctionSummary:
    """Convergence of the function at the inputs of the fit.

    Attributes:
        is_integrated: whether it is the mean given the hidden weights, the readout integrated out; else the observed
            distribution's mean, or the probabilities of its classes, at all weights.
        rhat: R-hat of each entry, (entries,); NaN where no draw moves it.
        ess: effective number of draws of each entry, (entries,); NaN where no draw moves it.
        num_distinct: number of draws of each chain at which the function differs from the draw before, (chains,).
    """

    is_integrated: bool
    rhat: np.ndarray
    ess: np.ndarray
    num_distinct: np.ndarray


@dataclass(frozen=True)
class RunSummary:
    """Findings of :func:`summary`. Printing them gives a table.

    Attributes:
        sites: a :class:`SiteSummary` for each number among the sites, by its name.
        function: a :class:`FunctionSummary`; None if draws of some latent sites are not stored.
        evidence_error: estimate, in nats, of how far rounding moves the log density at the last draws, the readout
            integrated out; infinite where that is NaN. None with other likelihoods, or if draws of some latent sites
            are not stored.
        num_chains: number of chains.
        num_draws: number of draws of each chain.
        num_parameters: number of latent numbers of the unwrapped model, readout included.
        num_features: number of columns of the features, which is the width of the last layer, and one more with a
            bias; None of a model that was not wrapped.
        accept_prob: mean acceptance probability; None if the run does not hold it.
        step_size: step size by chain at the end, (chains,); None if the run does not hold it.
        num_gradients: number of gradients that the stored draws took, in all chains; None if the extra field
            ``num_grad``, or NUTS's ``num_steps``, was not asked for.
        num_divergent: number of divergent draws of NUTS or HMC; None for other kernels.
        num_nonfinite: number of proposals, those of the warmup included, that were rejected because their energy was
            not finite; None if the run does not hold it.
    """

    sites: dict[str, SiteSummary]
    function: FunctionSummary | None
    evidence_error: float | None
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
        lines = [self._size()]
        if self.sites:
            table = self._table()
            first, *others = [max(map(len, column)) for column in zip(*table, strict=True)]
            lines += ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in table]
        return "\n".join([*lines, *self._notes()])

    def _repr_html_(self) -> str:
        rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self._table()]
        table = "".join(f"<tr>{row}</tr>" for row in rows) if self.sites else ""
        notes = "<br>".join(map(escape, self._notes()))
        return f"<p>{escape(self._size())}</p><table>{table}</table><p>{notes}</p>"

    def _size(self) -> str:
        chains = f"{self.num_chains} {'chain' if self.num_chains == 1 else 'chains'} of {self.num_draws} draws"
        features = "" if self.num_features is None else f", {self.num_features} features"
        return f"{chains}; {self.num_parameters} parameters{features}"

    def _table(self) -> list[list[str]]:
        """Return the cells of the sites' table, its heading included."""
        levels = next(iter(self.sites.values())).quantiles if self.sites else ()
        heading = ["site", "mean", "sd", *(f"{100 * level:g}%" for level in levels), "R-hat", "ESS"]
        rows = [heading]
        for name, site in self.sites.items():
            numbers = [site.mean, site.standard_deviation, *site.quantiles.values()]
            rows.append([name, *(f"{value:.4g}" for value in numbers), f"{site.rhat:.3f}", f"{site.ess:.0f}"])
        return rows

    def _notes(self) -> list[str]:
        """Return the lines below the table."""
        lines = []
        if self.function is None:
            lines.append("function at the inputs: unknown, since not all latent sites are stored")
        else:
            lines += self._function_notes(self.function)
        if self.evidence_error is not None and self.evidence_error >= FELT_ERROR:
            lost = "more than can be told" if np.isinf(self.evidence_error) else f"about {self.evidence_error:.2g} nats"
            lines.append(f"rounding moves the log density by {lost}: run {IN_FLOAT64}")
        parts = {
            "acceptance": None if self.accept_prob is None else f"{self.accept_prob:.3f}",
            "step size": None if self.step_size is None else _range_of(self.step_size),
            "gradients": None if self.num_gradients is None else str(self.num_gradients),
            "divergent": None if self.num_divergent is None else str(self.num_divergent),
            "proposals not finite": None if self.num_nonfinite is None else str(self.num_nonfinite),
        }
        told = ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
        return [*lines, told] if told else lines

    def _function_notes(self, function: FunctionSummary) -> list[str]:
        how = "readout integrated out" if function.is_integrated else "at all weights"
        total = self.num_chains * self.num_draws
        if np.isnan(function.ess).all():
            return [f"function at the inputs ({how}): no draw moves it"]
        median, largest = (_number(statistic, function.rhat) for statistic in (np.nanmedian, np.nanmax))
        rhats = f"median R-hat {median}, largest {largest}"
        sizes = f"median ESS {np.nanmedian(function.ess):.0f}, least {np.nanmin(function.ess):.0f}, of {total}"
        lines = [f"function at the inputs ({how}): {rhats}; {sizes}"]
        if function.num_distinct.min() < 0.1 * self.num_draws:
            lines.append(f"a chain stands still: {function.num_distinct.tolist()} distinct draws by chain")
        return lines


def _range_of(values: np.ndarray) -> str:
    low, high = (f"{value:.3g}" for value in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


def _number(statistic: Callable[[np.ndarray], Any], values: np.ndarray) -> str:
    return "unknown" if np.isnan(values).all() else f"{statistic(values):.3f}"


_MOST_ENTRIES = 500  # of the function: ArviZ takes milliseconds for each
_LARGEST_SITE = 8  # entries of a site that is shown


def summary(
    mcmc: MCMC,
    model: Callable,
    *model_args: Any,
    model_kwargs: dict[str, Any] | None = None,
    rng_key: Array | None = None,
    quantiles: Sequence[float] = (0.05, 0.5, 0.95),
) -> RunSummary:
    r"""Summarise a run on one screen.

    Sites of up to eight numbers, such as the noise and the scales of the priors, are shown one by one; a site that is
    sampled in coordinates of its own, such as "noise_base", is left out beside its image. Of the thousands of weights,
    which cannot agree between chains where hidden units trade places, only their function is looked at: R-hat and
    effective sample sizes, by ArviZ, of the function at the inputs of the fit. With a Normal likelihood that is the
    function's mean given the hidden weights, the readout integrated out, of a repriorised model too; of models that
    were not wrapped, and of classes and counts, it is the mean of the observed distribution, or the probabilities of
    its classes, at all weights. Of more than 500 entries, 500 are taken that are evenly spaced.

    A line says so if rounding moves the log density by 0.1 nats or more at the last draw of a chain, as it may where a
    small noise was sampled in single precision.

    Args:
        mcmc: an MCMC after its run, or the result of :func:`~numpyro_wide.runs.run_in_pieces`.
        model: a model, wrapped or not.
        *model_args: arguments of the model that it was fitted on, observations included.
        model_kwargs: keyword arguments of the model that it was fitted on.
        rng_key: a PRNG key for readouts that have to be drawn, where a model is wrapped more than once;
            ``jax.random.key(0)`` by default.
        quantiles: levels of the quantiles, between 0 and 1.

    Returns:
        A :class:`RunSummary`, to print, with all numbers in its fields.

    Raises:
        TypeError: if ``mcmc`` is not an MCMC, the model not callable, or ``rng_key`` not a PRNG key.
        ValueError: if levels are not between 0 and 1, or nothing is observed with these arguments.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_wide import collapse_readout
        >>> from numpyro_wide.diagnostics import summary
        >>> from numpyro_wide.mcmc import UnderdampedLangevin
        >>> from numpyro_wide.nn import FCN, bnn
        >>> model = bnn(FCN(depth=1, width=50), num_outputs=None, noise=dist.LogNormal(-2.0, 1.0))
        >>> wrapped = collapse_readout(model, readout="readout", features="features", observed="y")
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> y = jnp.sin(x[:, 0])
        >>> mcmc = MCMC(UnderdampedLangevin(wrapped), num_warmup=10, num_samples=20, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), x, y)
        >>> found = summary(mcmc, wrapped, x, y)
        >>> print(str(found).splitlines()[0])
        1 chain of 20 draws; 101 parameters, 50 features
        >>> sorted(found.sites), found.function.rhat.shape
        (['noise'], (5,))
    """
    check_run_and_model("summary", mcmc, model)
    check_levels("quantiles", tuple(quantiles))
    rng_key = random.key(0) if rng_key is None else rng_key
    check_key("rng_key", rng_key, "summary(mcmc, model, x, y, rng_key=jax.random.key(0))")
    run = FinishedRun(mcmc, model, model_args, dict(model_kwargs or {}))
    if not run.sites.observed:
        raise ValueError(
            "the function is looked at where the model was fitted, but nothing is observed with these arguments; pass "
            "what mcmc.run got, observations included: summary(mcmc, model, x, y)."
        )
    num_chains, num_draws = np.shape(next(iter(run.stored.values())))[:2]
    return RunSummary(
        sites=_sites(run, quantiles),
        function=_function(run, rng_key),
        evidence_error=None if run.missing else evidence_error(run),
        num_chains=num_chains,
        num_draws=num_draws,
        num_parameters=sum(int(np.prod(shape)) for shape in run.sites.latent.values()),
        num_features=_num_features(run),
        **_of_sampler(mcmc),
    )


def _sites(run: FinishedRun, levels: Sequence[float]) -> dict[str, SiteSummary]:
    found = {}
    for name, values in run.stored.items():
        size = int(np.prod(np.shape(values)[2:]))
        is_coordinate = any(base_name(other) == name for other in (*run.stored, *run.sites.shapes))
        if size > _LARGEST_SITE or is_coordinate or name in run.internal:
            continue
        array = np.asarray(values, float)
        for index in np.ndindex(array.shape[2:]):
            entry = name + (f"[{', '.join(map(str, index))}]" if index else "")
            found[entry] = _summary_of(array[(..., *index)] if index else array, levels)
    return found


def _summary_of(draws: np.ndarray, levels: Sequence[float]) -> SiteSummary:
    """Summarise draws (chain, draw) of one number."""
    rhat, ess = _rhat_and_ess(draws[..., None])
    return SiteSummary(
        mean=float(draws.mean()),
        standard_deviation=float(draws.std(ddof=1)),
        quantiles={level: float(np.quantile(draws, level)) for level in levels},
        rhat=float(rhat[0]),
        ess=float(ess[0]),
    )


def _rhat_and_ess(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute both by ArviZ for values (chain, draw, entry), NaN where no draw moves an entry, or there are too few."""
    num_chains, num_draws, num_entries = values.shape
    moves = np.ptp(values, axis=(0, 1)) > 0
    rhat, ess = np.full(num_entries, np.nan), np.full(num_entries, np.nan)
    if num_draws < 8 or not moves.any():
        return rhat, ess
    ess[moves] = _arviz.effective_sample_size(values[..., moves])
    # ArviZ wants two chains, and splits each in halves: of a single one they are its halves.
    half = num_draws // 2
    chains = values if num_chains > 1 else np.stack([values[0, :half], values[0, -half:]])
    rhat[moves] = _arviz.rhat(chains[..., moves])
    return rhat, ess


def _function(run: FinishedRun, rng_key: Array) -> FunctionSummary | None:
    if run.missing:
        return None
    values = function_values(run, rng_key, _MOST_ENTRIES)
    rhat, ess = _rhat_and_ess(values.astype(float))
    distinct = 1 + np.any(np.diff(values, axis=1) != 0, axis=2).sum(axis=1)
    return FunctionSummary(run.conjugate_sites is not None, rhat, ess, distinct)


def _num_features(run: FinishedRun) -> int | None:
    if not run.wrapped:
        return None
    features = abstract_sites(run.plain, *run.arguments)[run.wrapped[0].features]["value"]
    return int(features.shape[1])


def _of_sampler(mcmc: MCMC) -> dict[str, Any]:
    """Return what the sampler tells of itself, of the stored extra fields and of its last state."""
    fields, state = mcmc.get_extra_fields(group_by_chain=True), getattr(mcmc, "last_state", None)

    def last(name: str, default: Any = None) -> Any:
        return np.asarray(fields[name])[:, -1] if name in fields else getattr(state, name, default)

    adapted = getattr(state, "adapt_state", None)
    step_size = last("adapt_state.step_size", last("step_size", getattr(adapted, "step_size", None)))
    accept_prob = fields.get("accept_prob", getattr(state, "mean_accept_prob", None))
    gradients = next((fields[name] for name in ("num_grad", "num_steps") if name in fields), None)
    nonfinite = last("num_nonfinite")
    return {
        "accept_prob": None if accept_prob is None else float(np.mean(accept_prob)),
        "step_size": None if step_size is None else np.atleast_1d(np.asarray(step_size, float)),
        "num_gradients": None if gradients is None else int(np.sum(gradients)),
        "num_divergent": int(np.sum(fields["diverging"])) if "diverging" in fields else None,
        "num_nonfinite": None if nonfinite is None else int(np.sum(nonfinite)),
    }
