"""Distance of a network from its wide limit, by draws from that limit alone."""

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
from numpyro_wide._programs import combine, partition, run_compiled
from numpyro_wide._traces import refuse_unobserved, run_model, sample_sites
from numpyro_wide.diagnostics._limit_evidence import limit_log_evidence
from numpyro_wide.diagnostics._width_report import WidthReport, WidthRow
from numpyro_wide.readout.internal import ReadoutModel, StandardNormalBase, log_weight

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
