"""Distance of a network from its wide limit."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.handlers import substitute

from numpyro_wide._arviz import pareto_smoothed
from numpyro_wide._checks import IN_FLOAT64, NOISE_TOO_SMALL, check_key, kind_of, listing, whole_number
from numpyro_wide._compile import combine, partition, run_compiled
from numpyro_wide._traces import latent_sites, refuse_unobserved, run_model, sample_sites
from numpyro_wide.machine import double_precision
from numpyro_wide.readout._limit import StandardNormalBase, has_latent_noise, log_weight
from numpyro_wide.readout._model import ReadoutModel
from numpyro_wide.surrogates import mean_kernel
from numpyro_wide.wide_limit._gp import gp_log_evidence

_NUM_COLUMNS = 20_000  # of all draws together
_FEWEST, _MOST = 20, 500  # draws


def limit_log_evidence(
    rng_key: Array, model: ReadoutModel, args: tuple, kwargs: dict[str, Any], kernel: ArrayLike | None = None
) -> float:
    r"""Estimate the log evidence of the infinitely wide network from prior draws of one that is not.

    It is that of the Gaussian process with the mean kernel of the draws (:func:`~numpyro_wide.mean_kernel`): for one
    hidden layer the limit's, at any width, and up to terms of order 1/width for more.

    Args:
        rng_key: a PRNG key.
        model: a wrapped model.
        args: arguments of the model, observations included.
        kwargs: keyword arguments of the model.
        kernel: the limit's own (n, n), in the place of the mean kernel, or None.

    Returns:
        The log evidence in nats; NaN where the readout cannot be integrated out, where noise or mean are latent, for
        then the limit is a mixture of processes, and where the kernel is not positive definite.

    Raises:
        ValueError: for a kernel of another shape.
    """
    names = model.conjugate_sites(args, kwargs)
    if names is None:
        return float("nan")
    kernel_key, *probe_keys = random.split(rng_key, 3)
    one, other = (model.run(names, _prior_draw(model, key, args, kwargs), args, kwargs) for key in probe_keys)
    if has_latent_noise(model, args, kwargs) or not np.array_equal(one.loc, other.loc):
        return float("nan")
    if kernel is None:
        num_draws = int(np.clip(_NUM_COLUMNS // one.features.shape[1], _FEWEST, _MOST))
        kernel = mean_kernel(
            kernel_key, model, model.features, *args, num_draws=num_draws, readout=model.readout, **kwargs
        )
    num_rows = len(one.features)
    if np.shape(kernel) != (num_rows, num_rows):
        raise ValueError(
            f"kernel must be that of the {num_rows} rows of the features with themselves, {(num_rows, num_rows)}, but "
            f"has shape {np.shape(kernel)}; take wide_limit.kernel(network)(x)[0]."
        )
    residual = np.asarray(one.residual, float).reshape(num_rows, -1)  # (n, k)
    noises = np.broadcast_to(np.asarray(one.noise_scale, float), one.loc.shape).reshape(residual.shape)
    if np.array_equal(noises, np.broadcast_to(noises[:, :1], noises.shape)):
        problems = [(residual, noises[:, 0])]
    else:
        problems = list(zip(residual.T, noises.T, strict=True))
    with double_precision():
        try:
            return float(sum(gp_log_evidence(kernel, targets, noise) for targets, noise in problems))
        except ValueError:  # not positive definite
            return float("nan")


def _prior_draw(model: ReadoutModel, rng_key: Array, args: tuple, kwargs: dict[str, Any]) -> dict[str, Array]:
    sites = run_model(model.fn, args, kwargs, rng_key=rng_key)
    return {name: site["value"] for name, site in latent_sites(sites).items()}


class WidthRow(NamedTuple):
    r"""Distance of one network from the limit.

    Attributes:
        accept_prob: mean acceptance probability of independent N(0, I) proposals in a chain at its stationary
            distribution; 1 in the limit.
        pareto_k: $\hat k$ of the importance weights of N(0, I) draws (Vehtari et al. 2024): below 0.7 their averages
            can be trusted; −inf where the weights are all equal.
        gap: $\log E[w] - E[\log w]$ in nats, which is KL(N(0, I) ‖ posterior) of $\phi$ and, with a Gaussian
            likelihood, the log of the mean evidence less the mean log evidence; 0 in the limit.
        gap_error: its Monte Carlo standard error.
        log_evidence: $\log E[w]$, the log marginal likelihood of the data, as far as draws of the limit tell; where
            they do not, :func:`~numpyro_wide.model_evidence` does, by chains.
        log_evidence_error: its Monte Carlo standard error; not to be believed where ``pareto_k``, or
            ``prior_pareto_k``, is above 0.7.
        sample_size: effective number of the independent draws after weighting, as a share of all of them: by their
            weights, not by a chain's autocorrelations, and the same for weights and functions.
        num_draws: number of draws.
        prior_pareto_k: as ``pareto_k``, of draws of hyperparameters and weights together from their prior, which
            ``log_evidence`` is from; NaN without hyperparameters.
        limit_log_evidence: of the infinitely wide network: of the Gaussian process with the kernel that was given, or
            with the mean kernel of some prior draws, whose error is of order 1/width beyond one hidden layer. NaN
            with a latent noise, with hyperparameters, or if the readout cannot be integrated out.
    """

    accept_prob: float
    pareto_k: float
    gap: float
    gap_error: float
    log_evidence: float
    log_evidence_error: float
    sample_size: float
    num_draws: int
    prior_pareto_k: float = float("nan")
    limit_log_evidence: float = float("nan")

    @property
    def advice(self) -> str:
        """Advice on sampling at this distance from the limit."""
        if self.pareto_k >= _largest_shape(self.num_draws):
            return "far: run a chain"
        if self.prior_pareto_k >= 0.7:
            return "near, but the hyperparameters are far from their prior: narrow it, or run a chain"
        if self.accept_prob < 0.9:
            return "near: weight independent draws, or run a chain"
        return "at the limit: wide_limit_draws is enough"


class WidthReport(NamedTuple):
    """Findings of :func:`wide_enough`. Printing them gives a table.

    Attributes:
        rows: a :class:`WidthRow` for each network, by width; the key of a single network is "model".
        has_kernel: whether the limit's kernel was given.
    """

    rows: dict[Any, WidthRow]
    has_kernel: bool = False

    @property
    def slope(self) -> float:
        """Slope of log gap against log width, near −1 for wide networks; NaN unless the keys are several widths."""
        widths = [key for key in self.rows if isinstance(key, int | float)]
        gaps = [self.rows[key].gap for key in widths]
        if len(widths) < 2 or min(gaps) <= 0:
            return float("nan")
        return float(np.polyfit(np.log(widths), np.log(gaps), 1)[0])

    def __str__(self) -> str:
        lines = ["   width  acceptance  Pareto k  gap, nats          share      log evidence  advice"]
        for key, row in self.rows.items():
            evidence = f"{row.log_evidence:.2f} ± {row.log_evidence_error:.1g}"
            lines.append(
                f"{key!s:>8s}  {row.accept_prob:10.3f}  {row.pareto_k:8.2f}  {row.gap:8.3g} ± {row.gap_error:<7.1g} "
                f"{row.sample_size:5.2f}  {evidence:>16s}  {row.advice}"
            )
            if not np.isnan(row.prior_pareto_k):
                lines.append(f"          Pareto k of weights and hyperparameters together: {row.prior_pareto_k:.2f}")
        known = [row.limit_log_evidence for row in self.rows.values() if not np.isnan(row.limit_log_evidence)]
        if known:
            source = "" if self.has_kernel else ", by the last one's mean kernel"
            lines.append(f"log evidence of the infinitely wide network{source}: {known[-1]:.2f}")
        if not np.isnan(self.slope):
            lines.append(f"the gap falls like width to the power {self.slope:.2f}; near the limit it is -1")
        return "\n".join(lines)


def _largest_shape(num_draws: int) -> float:
    """Return the Pareto shape above which averages of so many draws are not to be trusted (Vehtari et al. 2024)."""
    return float(min(1 - 1 / np.log10(num_draws), 0.7))


_MIN_DRAWS = 100  # for a tail to be seen
_NUM_GIVEN = 8  # draws of the hyperparameters


def wide_enough(
    rng_key: Array,
    models: Callable | Mapping[Any, Callable],
    *model_args: Any,
    num_draws: int = 1000,
    batch_size: int = 1,
    hyperparameters: str | Sequence[str] = (),
    kernel: ArrayLike | None = None,
    **model_kwargs: Any,
) -> WidthReport:
    r"""Tell how far the posterior of $\phi$ is from its wide limit N(0, I), without a Markov chain.

    Draws hidden weights from their prior, and base sites from N(0, I), and looks at the ratio $w$ of the posterior's
    density (not normalised) to that of the draws. In the limit $w$ is constant (Hron 2022, Thm. 2.1; Mathematics,
    :eq:`gap`); with a Gaussian likelihood $w$ is the evidence $N(Y; 0, \Psi\Psi^\top + \sigma^2 I)$ given the hidden
    weights.

    A collapsed model gives $w$ with the most digits (:eq:`identity`). For a repriorised one the likelihood may be any;
    in single precision its terms lose about 1e-7 of their size. For an unwrapped model, $\phi$ is $\theta$, and the
    report tells how far the posterior is from the prior (Prop. 2.3; :eq:`plain-limit`).

    The limit is one of weights: a latent noise or prior scale is learnt from the data at any width. Name such sites as
    ``hyperparameters``, or the report tells how much the data say about them. Their posterior is drawn from as
    :func:`~numpyro_wide.wide_limit_draws` does, from their prior by the evidence of each draw, and the report is the
    mean over eight of these draws of what weights are like given each.

    The models are read anew in every call: what a global, a closure or an object among the arguments holds may
    change in between. A second call that computes the same from data of the same shapes compiles nothing.

    Args:
        rng_key: a PRNG key.
        models: a model that is repriorised, collapsed or neither; or a dictionary of several by width.
        *model_args: arguments of the models, observations included.
        num_draws: number of draws, at least 100, for a tail to be seen.
        batch_size: number of draws that are evaluated at once.
        hyperparameters: latent sites that are learnt at any width, a name or several; for
            :func:`~numpyro_wide.nn.bnn`, such as "noise_base" and "w_std_base". Weights are looked at by a quarter as
            many draws, at least 100, given each of eight draws of them.
        kernel: covariance (n, n) of an output's function values in the wide limit, such as
            ``wide_limit.kernel(network)(x)[0]``, for the log evidence of the infinitely wide network; None for the mean
            kernel of prior draws.
        **model_kwargs: keyword arguments of the models.

    Returns:
        A :class:`WidthReport`, to print, with a :class:`WidthRow` of numbers in ``report.rows[width]``; the key of a
        single model is "model".

    Raises:
        TypeError: if ``rng_key`` is not a PRNG key, a model is not callable, such as a kernel, or hyperparameters are
            not names.
        ValueError: if a model observes nothing with these arguments or has no such hyperparameters, ``num_draws`` is
            too small, or no draw has a finite weight.

    Warns:
        RuntimeWarning: if the weight of a draw is not a number, as where its noise is lost in rounding: it is left out.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide import collapse_readout
        >>> from numpyro_wide.diagnostics import wide_enough
        >>> from numpyro_wide.nn import FCN, bnn
        >>> def collapsed(width):
        ...     model = bnn(FCN(depth=1, width=width), num_outputs=None, noise=0.5)
        ...     return collapse_readout(model, readout="readout", features="features", observed="y")
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> report = wide_enough(jax.random.key(0), {8: collapsed(8), 128: collapsed(128)}, x, x[:, 0])
        >>> report.rows[128].gap < report.rows[8].gap
        True
    """
    check_key("rng_key", rng_key, "wide_enough(rng_key, model, x, y)")
    num_draws, batch_size = whole_number("num_draws", num_draws, _MIN_DRAWS), whole_number("batch_size", batch_size)
    by_width = dict(models) if isinstance(models, Mapping) else {"model": models}
    for model in by_width.values():
        if not callable(model):
            raise TypeError(
                f"models must be a model, a function, or a dictionary of several, but got {kind_of(model)}; "
                "pass the model itself, not a kernel."
            )
    names = (hyperparameters,) if isinstance(hyperparameters, str) else hyperparameters
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"hyperparameters must be the names of sites, a list of them or one, but got {names!r}.")
    names = tuple(names)
    rows = {}
    for index, (key, model) in enumerate(by_width.items()):
        draws = _Draws(model, batch_size, model_args, model_kwargs, [])
        draws_key, learnt_key, limit_key = random.split(random.fold_in(rng_key, index), 3)
        keys = random.split(draws_key, num_draws)
        rows[key] = _learnt_row(draws, learnt_key, keys, names) if names else _row(draws.log_weights(keys)[0])
        if isinstance(model, ReadoutModel) and not names:
            limit = limit_log_evidence(limit_key, model, model_args, model_kwargs, kernel)
            rows[key] = rows[key]._replace(limit_log_evidence=limit)
        if draws.lost:
            warnings.warn(
                f"{sum(draws.lost)} draws of the model {key!r} are left out, whose weights are not numbers: there "
                f"{NOISE_TOO_SMALL}. Narrow its prior, or run {IN_FLOAT64}.",
                RuntimeWarning,
                stacklevel=2,
            )
    return WidthReport(rows, kernel is not None)


class _Draws(NamedTuple):
    """Source of the draws and of their weights.

    Attributes:
        model: a model in any form.
        batch_size: number of draws that are evaluated at once.
        args: arguments of the model.
        kwargs: keyword arguments of the model.
        lost: numbers of draws that were left out, one for each call that left some out.
    """

    model: Callable
    batch_size: int
    args: tuple
    kwargs: dict[str, Any]
    lost: list[int]

    def log_weights(
        self, keys: Array, names: tuple[str, ...] = (), given: dict[str, Array] | None = None
    ) -> tuple[np.ndarray, dict[str, Array]]:
        """Return log ratios of the posterior's density to that of the draws, (draws,), and their values of some sites.

        Sites that are given keep their values. Draws whose ratio is not a number are left out.
        """
        data, rest = partition((self.args, self.kwargs))
        if given is None:  # first, outside of a compilation, where the handlers know the numbers that they check
            jax.eval_shape(lambda key: _log_weight(self.model, key, {}, names, self.args, self.kwargs), keys[0])
        found, values = run_compiled(
            _all_log_weights, self.model, (self.batch_size, names, rest), keys, given or {}, data
        )
        log_weights = np.asarray(found, dtype=float)
        kept = np.flatnonzero(~np.isnan(log_weights))
        if len(kept) < len(log_weights):
            self.lost.append(len(log_weights) - len(kept))
        return log_weights[kept], {name: value[kept] for name, value in values.items()}


def _all_log_weights(
    model: Callable, static: tuple[int, tuple[str, ...], Any], keys: Array, given: dict[str, Array], data: list[Any]
) -> tuple[Array, dict[str, Array]]:
    batch_size, names, rest = static
    args, kwargs = combine(data, rest)
    return jax.lax.map(lambda key: _log_weight(model, key, given, names, args, kwargs), keys, batch_size=batch_size)


def _log_weight(
    model: Callable, key: Array, given: dict[str, Array], names: tuple[str, ...], args: tuple, kwargs: dict[str, Any]
) -> tuple[Array, dict[str, Array]]:
    sites = run_model(substitute(model, given), args, kwargs, rng_key=key, inside=(StandardNormalBase(),))
    samples = sample_sites(sites)
    refuse_unobserved(sites, "wide_enough compares with the posterior")
    unknown = [name for name in names if name not in samples or samples[name]["is_observed"]]
    if unknown:
        raise ValueError(
            f"hyperparameters must name latent sites of the model, but has {listing(unknown)}; its sample sites are "
            f"{listing(samples)}."
        )
    return log_weight(sites), {name: samples[name]["value"] for name in names}


def _learnt_row(draws: _Draws, rng_key: Array, keys: Array, names: tuple[str, ...]) -> WidthRow:
    """Average rows given some draws of the posterior of the hyperparameters at the limit."""
    log_weights, values = draws.log_weights(keys, names)
    whole = _row(log_weights)
    choice_key, given_key = random.split(rng_key)
    chosen = random.categorical(choice_key, log_weights, shape=(_NUM_GIVEN,))
    num_draws = max(len(keys) // 4, _MIN_DRAWS)
    rows = []
    for index, key in zip(chosen, random.split(given_key, _NUM_GIVEN), strict=True):
        given = {name: value[index] for name, value in values.items()}
        rows.append(_row(draws.log_weights(random.split(key, num_draws), given=given)[0]))
    gaps = [row.gap for row in rows]
    return WidthRow(
        accept_prob=float(np.mean([row.accept_prob for row in rows])),
        pareto_k=float(np.median([row.pareto_k for row in rows])),  # the largest of eight is noise
        gap=float(np.mean(gaps)),
        gap_error=float(np.std(gaps, ddof=1) / np.sqrt(_NUM_GIVEN)),
        log_evidence=whole.log_evidence,
        log_evidence_error=whole.log_evidence_error,
        sample_size=float(np.mean([row.sample_size for row in rows])),
        num_draws=num_draws,
        prior_pareto_k=whole.pareto_k,
    )


def _row(log_weights: np.ndarray) -> WidthRow:
    if not (len(log_weights) and np.isfinite(log_weights.max())):
        raise ValueError(f"no draw has a finite weight: {NOISE_TOO_SMALL}. Run {IN_FLOAT64}.")
    num_draws = len(log_weights)
    weights = np.exp(log_weights - log_weights.max())
    mean = weights.mean()
    gap = float(np.log(mean) + log_weights.max() - log_weights.mean())
    # The two means are of the same draws: the delta method for their difference.
    gap_error = float(np.std(weights / mean - log_weights) / np.sqrt(num_draws))
    # E min(w, w') over all pairs, the smaller weight of which is at rank i in num_draws - 1 - i of them.
    smaller = np.sort(weights) @ np.arange(num_draws - 1, -1, -1) / (num_draws * (num_draws - 1) / 2)
    return WidthRow(
        accept_prob=float(smaller / mean),
        pareto_k=_pareto_k(log_weights),
        gap=gap,
        gap_error=gap_error,
        log_evidence=float(np.log(mean) + log_weights.max()),
        log_evidence_error=float(np.std(weights / mean) / np.sqrt(num_draws)),
        sample_size=float(mean**2 / np.mean(weights**2)),
        num_draws=num_draws,
    )


def _pareto_k(log_weights: np.ndarray) -> float:
    if np.ptp(log_weights) < 1e-3:  # rounding has a tail of its own
        return -np.inf
    return pareto_smoothed(log_weights)[1]
