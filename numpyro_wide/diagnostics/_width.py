"""Distance of a network from its wide limit, without a Markov chain."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike

from numpyro_wide._arviz import pareto_smoothed
from numpyro_wide._checks import IN_FLOAT64, NOISE_TOO_SMALL, as_list, check_key, check_names_known, whole_number
from numpyro_wide._compile import run_with_arguments
from numpyro_wide._mixture import log_average
from numpyro_wide._traces import abstract_sites, latent_sites, refuse_unobserved, run_model, sample_sites
from numpyro_wide.diagnostics._to_arviz import Arguments
from numpyro_wide.machine import double_precision
from numpyro_wide.readout._assumptions import check_at, conjugate_form
from numpyro_wide.readout._draws import StandardNormalBase, log_weight, non_vanishing_updates
from numpyro_wide.readout._model import ReadoutModel
from numpyro_wide.surrogates import mean_kernel
from numpyro_wide.wide_limit._gp import gp_log_evidence


class WidthRow(NamedTuple):
    r"""Distance of one network from the limit; ``_error`` is a Monte Carlo standard error.

    Attributes:
        accept_prob: mean acceptance probability of independent N(0, I) proposals in a stationary chain; 1 in the limit.
        pareto_k: $\hat k$ of the importance weights of N(0, I) draws (Vehtari et al. 2024), reliable below 0.7; −inf
            for equal weights.
        gap: $\log E[w] - E[\log w]$ = KL(N(0, I) ‖ posterior) of $\phi$, in nats; 0 in the limit.
        log_evidence: $\log E[w]$; for a ``pareto_k`` above 0.7 take :func:`~numpyro_wide.model_evidence` instead.
        sample_size: effective share of the weighted draws.
        prior_pareto_k: ``pareto_k`` of prior draws of weights and hyperparameters; NaN without hyperparameters.
        limit_log_evidence: log evidence of the limit's Gaussian process; NaN where it is not one process.
    """

    accept_prob: float
    pareto_k: float
    gap: float
    gap_error: float
    log_evidence: float
    log_evidence_error: float
    sample_size: float
    num_draws: int
    prior_pareto_k: float = np.nan
    limit_log_evidence: float = np.nan

    @property
    def advice(self) -> str:
        """Advice on sampling at this distance from the limit."""
        # The limit of reliable averages (Vehtari et al. 2024).
        if self.pareto_k >= min(1 - 1 / np.log10(self.num_draws), 0.7):
            return "far: run a chain"
        if self.prior_pareto_k >= 0.7:
            return "near, but the hyperparameters are far from their prior: narrow it, or run a chain"
        if self.accept_prob < 0.9:
            return "near: weight independent draws, or run a chain"
        return "at the limit: wide_limit_draws is enough"


class WidthReport(NamedTuple):
    """Result of :func:`wide_enough`, to print.

    Attributes:
        rows: a :class:`WidthRow` by width, or "model" for a single network.
        has_kernel: whether the limit's kernel was given.
    """

    rows: dict[Any, WidthRow]
    has_kernel: bool = False

    @property
    def slope(self) -> float:
        """Slope of log gap against log width, near −1 for wide networks; NaN without several widths."""
        widths = [key for key in self.rows if isinstance(key, int | float)]
        gaps = [self.rows[key].gap for key in widths]
        if len(widths) < 2 or min(gaps) <= 0:
            return np.nan
        return float(np.polyfit(np.log(widths), np.log(gaps), 1)[0])

    def __str__(self) -> str:
        import pandas  # heavy

        table = [
            {
                "width": key,
                "acceptance": f"{row.accept_prob:.3f}",
                "Pareto k": f"{row.pareto_k:.2f}",
                "gap, nats": f"{row.gap:.3g} ± {row.gap_error:.1g}",
                "share": f"{row.sample_size:.2f}",
                "log evidence": f"{row.log_evidence:.2f} ± {row.log_evidence_error:.1g}",
                "advice": row.advice,
            }
            for key, row in self.rows.items()
        ]
        lines = [pandas.DataFrame(table).to_string(index=False)]
        for key, row in self.rows.items():
            if not np.isnan(row.prior_pareto_k):
                lines.append(f"{key}: Pareto k of weights and hyperparameters together: {row.prior_pareto_k:.2f}")
        if limits := [row.limit_log_evidence for row in self.rows.values() if not np.isnan(row.limit_log_evidence)]:
            source = "" if self.has_kernel else ", by the last one's mean kernel"
            lines.append(f"log evidence of the infinitely wide network{source}: {limits[-1]:.2f}")
        if not np.isnan(self.slope):
            lines.append(f"the gap falls like width to the power {self.slope:.2f}; near the limit it is -1")
        return "\n".join(lines)


_MIN_DRAWS = 100  # for a tail
_NUM_HYPER_DRAWS = 8  # draws of the hyperparameters


def wide_enough(
    rng_key: Array,
    models: Callable | Mapping[Any, Callable],
    *model_args: object,
    num_draws: int = 1000,
    batch_size: int = 1,
    hyperparameters: str | Sequence[str] = (),
    kernel: ArrayLike | None = None,
    **model_kwargs: object,
) -> WidthReport:
    r"""Estimate the distance of the posterior of $\phi$ from its wide limit N(0, I), without a Markov chain.

    The weight $w$ is the ratio of the posterior's unnormalised density to that of prior draws, with base sites from
    N(0, I): constant in the limit (Hron 2022, Thm. 2.1; Mathematics, :eq:`gap`). A collapsed model keeps most digits
    (:eq:`identity`); an unwrapped model is compared with its prior (:eq:`plain-limit`). Print the :class:`WidthReport`.

    Args:
        rng_key: a PRNG key.
        models: a model, repriorised, collapsed or neither; or a dictionary of several by width.
        *model_args: arguments of the models, observations included.
        num_draws: number of draws, at least 100.
        batch_size: number of draws evaluated at once.
        hyperparameters: names of latent sites learnt at any width, such as "noise_base"; the row is the mean over eight
            posterior draws of them, with a quarter of ``num_draws``, at least 100, given each.
        kernel: covariance (n, n) of an output in the wide limit; None for the mean kernel of prior draws.
        **model_kwargs: keyword arguments.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide import collapse_readout
        >>> from numpyro_wide.diagnostics import wide_enough
        >>> from numpyro_wide.nn import FCN, bnn
        >>> model, x = bnn(FCN(depth=1, width=512), num_outputs=None, noise=0.5), jnp.linspace(-1, 1, 5)[:, None]
        >>> collapsed = collapse_readout(model, readout="readout", features="features", observed="y")
        >>> wide_enough(jax.random.key(0), {512: collapsed}, x, x[:, 0]).rows[512].advice
        'at the limit: wide_limit_draws is enough'
    """
    check_key("rng_key", rng_key, "wide_enough(rng_key, model, x, y)")
    num_draws, batch_size = whole_number("num_draws", num_draws, _MIN_DRAWS), whole_number("batch_size", batch_size)
    by_width = dict(models) if isinstance(models, Mapping) else {"model": models}
    names = as_list(hyperparameters)
    rows = {}
    for index, (key, model) in enumerate(by_width.items()):
        draws_key, hyper_key, limit_key = random.split(random.fold_in(rng_key, index), 3)
        weigh = _Weights(model, (model_args, model_kwargs), names, batch_size)
        keys = random.split(draws_key, num_draws)
        rows[key] = _hyperparameter_row(weigh, hyper_key, keys) if names else _row(weigh(keys, {})[0])
        if isinstance(model, ReadoutModel) and not names:
            limit = _limit_log_evidence(limit_key, model, model_args, model_kwargs, kernel)
            rows[key] = rows[key]._replace(limit_log_evidence=limit)
        if weigh.num_lost:
            warnings.warn(
                f"{weigh.num_lost} draws of the model {key!r} are left out, whose weights are not numbers: there "
                f"{NOISE_TOO_SMALL}. Narrow its prior, or run {IN_FLOAT64}.",
                RuntimeWarning,
                stacklevel=2,
            )
    return WidthReport(rows, kernel is not None)


class _Weights:
    """Log weights of draws, without NaN, and values of the named sites."""

    def __init__(self, model: Callable, arguments: Arguments, names: Sequence[str], batch_size: int = 1):
        self.model, self.arguments, self.names, self.batch_size = model, arguments, names, batch_size
        self.num_lost = 0
        # Outside of a compilation, for the checks of numbers.
        jax.eval_shape(lambda: self._single(arguments, random.key(0), {}))

    def __call__(self, keys: Array, fixed: dict[str, Array]) -> tuple[np.ndarray, dict[str, Array]]:
        def program(arguments: Arguments, keys: Array, fixed: dict[str, Array]) -> Any:
            return jax.lax.map(lambda key: self._single(arguments, key, fixed), keys, batch_size=self.batch_size)

        log_weights, values = run_with_arguments(program, self.arguments, keys, fixed)
        log_weights = np.asarray(log_weights, dtype=float)
        rows = np.flatnonzero(~np.isnan(log_weights))
        self.num_lost += len(log_weights) - len(rows)
        return log_weights[rows], {name: value[rows] for name, value in values.items()}

    def _single(self, arguments: Arguments, key: Array, fixed: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        sites = run_model(self.model, *arguments, values=fixed, rng_key=key, inside=(StandardNormalBase(),))
        refuse_unobserved(sites, "wide_enough compares with the posterior")
        check_names_known("hyperparameters", self.names, latent_sites(sites), kind="latent site")
        return log_weight(sites), {name: sites[name]["value"] for name in self.names}


def _hyperparameter_row(weigh: _Weights, rng_key: Array, keys: Array) -> WidthRow:
    """Average rows given posterior draws of the hyperparameters."""
    log_weights, values = weigh(keys, {})
    row = _row(log_weights)
    choice_key, weights_key = random.split(rng_key)
    indices = random.categorical(choice_key, log_weights, shape=(_NUM_HYPER_DRAWS,))
    num_draws = max(len(keys) // 4, _MIN_DRAWS)
    rows = []
    for index, key in zip(indices, random.split(weights_key, _NUM_HYPER_DRAWS), strict=True):
        fixed = {name: value[index] for name, value in values.items()}
        rows.append(_row(weigh(random.split(key, num_draws), fixed)[0]))
    by_column = WidthRow(*np.transpose(rows))
    return row._replace(
        accept_prob=float(np.mean(by_column.accept_prob)),
        pareto_k=float(np.median(by_column.pareto_k)),  # the largest of eight is noise
        gap=float(np.mean(by_column.gap)),
        gap_error=float(np.std(by_column.gap, ddof=1) / np.sqrt(_NUM_HYPER_DRAWS)),
        sample_size=float(np.mean(by_column.sample_size)),
        num_draws=num_draws,
        prior_pareto_k=row.pareto_k,
    )


def _row(log_weights: np.ndarray) -> WidthRow:
    if not (len(log_weights) and np.isfinite(log_weights.max())):
        raise ValueError(f"no draw has a finite weight: {NOISE_TOO_SMALL}. Run {IN_FLOAT64}.")
    num_draws, log_evidence = len(log_weights), float(log_average(log_weights))
    weights = np.exp(log_weights - log_evidence)  # of mean 1
    # E min(w, w') over all pairs, by ranks.
    smaller = np.sort(weights) @ np.arange(num_draws - 1, -1, -1) / (num_draws * (num_draws - 1) / 2)
    has_tail = np.ptp(log_weights) >= 1e-3  # against rounding
    return WidthRow(
        accept_prob=float(smaller),
        pareto_k=pareto_smoothed(log_weights)[1] if has_tail else -np.inf,
        gap=log_evidence - float(log_weights.mean()),
        # Delta method for the difference of means of the same draws.
        gap_error=float(np.std(weights - log_weights) / np.sqrt(num_draws)),
        log_evidence=log_evidence,
        log_evidence_error=float(np.std(weights) / np.sqrt(num_draws)),
        sample_size=float(1 / np.mean(weights**2)),
        num_draws=num_draws,
    )


_NUM_COLUMNS = 20_000  # of a mean kernel
_MIN_KERNEL_DRAWS, _MAX_KERNEL_DRAWS = 20, 500  # its draws


def _limit_log_evidence(
    rng_key: Array, model: ReadoutModel, args: tuple, kwargs: Mapping[str, Any], kernel: ArrayLike | None
) -> float:
    if "likelihood" in non_vanishing_updates(model, args, kwargs):
        return np.nan
    kernel_key, *draw_keys = random.split(rng_key, 3)
    sites = abstract_sites(model.fn, args, kwargs)
    observed = sample_sites(sites).keys() - latent_sites(sites).keys()

    def latent(arguments: Arguments, key: Array) -> dict[str, Array]:
        sites = latent_sites(run_model(model.fn, *arguments, rng_key=key))
        return {name: site["value"] for name, site in sites.items()}

    runs = []
    for key in draw_keys:
        draw = run_with_arguments(latent, (args, kwargs), key)
        form = conjugate_form(model, draw, args, kwargs)
        if form is None or observed != {form.observed}:
            return np.nan
        runs.append(check_at(form, draw, args, kwargs))
    first_run, second_run = runs
    if not np.array_equal(first_run.loc, second_run.loc):
        return np.nan
    num_rows, num_features = first_run.features.shape
    if kernel is None:
        num_draws = int(np.clip(_NUM_COLUMNS // num_features, _MIN_KERNEL_DRAWS, _MAX_KERNEL_DRAWS))
        kernel = mean_kernel(
            kernel_key, model, model.features, *args, num_draws=num_draws, readout=model.readout, **kwargs
        )
    if np.shape(kernel) != (num_rows, num_rows):
        raise ValueError(f"kernel must be that of the features' rows, {(num_rows, num_rows)}, not {np.shape(kernel)}.")
    residual = np.asarray(first_run.residual, float).reshape(num_rows, -1)  # (n, k)
    noises = np.broadcast_to(np.asarray(first_run.noise_scale, float), first_run.loc.shape).reshape(residual.shape)
    is_shared = np.array_equal(noises, np.broadcast_to(noises[:, :1], noises.shape))
    problems = [(residual, noises[:, 0])] if is_shared else zip(residual.T, noises.T, strict=True)
    with double_precision():
        try:
            return float(sum(gp_log_evidence(kernel, targets, noise) for targets, noise in problems))
        except ValueError:  # not positive definite
            return np.nan
