"""How far a network is from its wide limit, by draws from that limit alone."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from numpyro.handlers import seed, trace
from numpyro.primitives import Messenger

from numpyro_wide._conjugate import listing
from numpyro_wide.draws import _readout_transform


class WidthRow(NamedTuple):
    r"""How far one network is from the limit.

    Attributes:
        accept_prob: mean acceptance probability of independent N(0, I) proposals in a chain at its stationary
            distribution; 1 in the limit.
        pareto_k: $\hat k$ of the importance weights of N(0, I) draws (Vehtari et al. 2024): below 0.7 their averages
            can be trusted; −inf where the weights are all equal.
        gap: $\log E[w] - E[\log w]$ in nats, which is KL(N(0, I) ‖ posterior) of $\phi$ and, with a Gaussian
            likelihood, the log of the mean evidence less the mean log evidence; 0 in the limit.
        gap_error: its Monte Carlo standard error.
        log_evidence: $\log E[w]$, the log marginal likelihood of the data.
        sample_size: effective number of draws after weighting, as a share of all of them.
        num_draws: number of draws.
    """

    accept_prob: float
    pareto_k: float
    gap: float
    gap_error: float
    log_evidence: float
    sample_size: float
    num_draws: int

    @property
    def advice(self) -> str:
        """What the distance from the limit means for sampling."""
        if self.pareto_k >= min(1 - 1 / np.log10(self.num_draws), 0.7):
            return "far: run a chain"
        if self.accept_prob < 0.9:
            return "near: weight independent draws, or run a chain"
        return "at the limit: wide_limit_draws will do"


class WidthReport(NamedTuple):
    """What :func:`wide_enough` found: a row for each network. Printing it gives a table."""

    rows: dict[Any, WidthRow]

    @property
    def slope(self) -> float:
        """Slope of log gap against log width, near −1 for wide networks; NaN unless the keys are several widths."""
        widths = [key for key in self.rows if isinstance(key, int | float)]
        gaps = [self.rows[key].gap for key in widths]
        if len(widths) < 2 or min(gaps) <= 0:
            return float("nan")
        return float(np.polyfit(np.log(widths), np.log(gaps), 1)[0])

    def __str__(self) -> str:
        lines = ["   width  acceptance  Pareto k  gap, nats          share  advice"]
        for key, row in self.rows.items():
            lines.append(
                f"{key!s:>8s}  {row.accept_prob:10.3f}  {row.pareto_k:8.2f}  {row.gap:8.3g} ± {row.gap_error:<7.1g} "
                f"{row.sample_size:5.2f}  {row.advice}"
            )
        if not np.isnan(self.slope):
            lines.append(f"the gap falls like width to the power {self.slope:.2f}; near the limit it is -1")
        return "\n".join(lines)


def wide_enough(
    rng_key: Array,
    models: Callable | Mapping[Any, Callable],
    *model_args: Any,
    num_draws: int = 1000,
    batch_size: int = 1,
    **model_kwargs: Any,
) -> WidthReport:
    r"""Tell how far the posterior of $\phi$ is from its wide limit N(0, I), without a Markov chain.

    Draws hidden weights from their prior, and base sites from N(0, I), and looks at the ratio $w$ of the posterior's
    density (not normalised) to that of the draws. In the limit $w$ is constant (Hron 2022, Thm. 2.1; Mathematics,
    :eq:`gap`); with a Gaussian likelihood $w$ is the evidence $N(Y; 0, \Psi\Psi^\top + \sigma^2 I)$ given the hidden
    weights.

    A collapsed model gives $w$ with the most digits (:eq:`identity`). For a repriorised one the likelihood may be any;
    in single precision its terms lose about 1e-7 of their size. For a model as it was, $\phi$ is $\theta$, and the
    report tells how far the posterior is from the prior (Prop. 2.3; :eq:`plain-limit`). The limit is one of weights:
    fix a latent noise or prior scale, by :class:`numpyro.handlers.condition` say, or the report tells how much the data
    say about it.

    Args:
        rng_key: a PRNG key.
        models: a model that is repriorised, collapsed or neither; or several, by width.
        *model_args: arguments of the models, observations included.
        num_draws: number of draws, at least 100.
        batch_size: number of draws that are evaluated at once.
        **model_kwargs: likewise arguments of the models.

    Returns:
        A report, to print, with the numbers in ``report.rows[width]``; the key of a single model is "model".

    Raises:
        TypeError: if the key is none, or a model is not callable, such as a kernel.
        ValueError: if a model observes nothing with these arguments, ``num_draws`` is too small, or no draw has a
            finite weight.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_wide import collapse_readout
        >>> from numpyro_wide.diagnostics import wide_enough
        >>> def collapsed(width):
        ...     def model(x, y=None):
        ...         hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, width]).to_event(2))
        ...         features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / width**0.5)
        ...         w = numpyro.sample("w", dist.Normal(0, 1).expand([width]).to_event(1))
        ...         numpyro.sample("y", dist.Normal(features @ w, 0.5).to_event(1), obs=y)
        ...     return collapse_readout(model, readout="w", features="features", observed="y")
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> report = wide_enough(jax.random.key(0), {8: collapsed(8), 128: collapsed(128)}, x, x[:, 0])
        >>> report.rows[128].gap < report.rows[8].gap
        True
    """
    if not isinstance(rng_key, Array | np.ndarray):
        raise TypeError(
            f"rng_key must be a PRNG key, such as jax.random.key(0), but is a {type(rng_key).__name__}; the order is "
            "wide_enough(rng_key, model, x, y)."
        )
    by_width = dict(models) if isinstance(models, Mapping) else {"model": models}
    for model in by_width.values():
        if not callable(model):
            raise TypeError(
                f"models must be a model, a function, or a dictionary of several, but got a {type(model).__name__}; "
                "pass the model itself, not a kernel."
            )
    if num_draws < 100:
        raise ValueError(f"num_draws must be at least 100, for a tail to be seen, but is {num_draws}.")
    rows = {}
    for index, (key, model) in enumerate(by_width.items()):
        keys = random.split(random.fold_in(rng_key, index), num_draws)
        rows[key] = _row(_log_weights(model, keys, batch_size, model_args, model_kwargs))
    return WidthReport(rows)


class _StandardNormalBase(Messenger):
    """Draws base sites from N(0, I)."""

    def process_message(self, msg: dict) -> None:
        if msg["type"] == "sample" and msg["value"] is None and _readout_transform(msg) is not None:
            msg["value"] = random.normal(msg["kwargs"]["rng_key"], msg["fn"].shape())


def _log_weights(model: Callable, keys: Array, batch_size: int, args: tuple, kwargs: dict[str, Any]) -> np.ndarray:
    """Log ratio of the posterior's density to that of the draws, (draws,)."""

    def single(key: Array) -> Array:
        # Seed comes last: the innermost handler is asked first, and hands the key on.
        with trace() as sites, _StandardNormalBase(), seed(rng_seed=key):
            model(*args, **kwargs)
        samples = [site for site in sites.values() if site["type"] == "sample"]
        if not any(site["is_observed"] for site in samples):
            raise ValueError(
                "wide_enough compares with the posterior, but the model observes nothing with these arguments; pass "
                f"the observations too. Its sample sites are {listing(site['name'] for site in samples)}."
            )
        return sum((_log_ratio(site) for site in samples), jnp.zeros(()))

    single(keys[0])  # outside of a compilation, where the handlers check what they are given
    return np.asarray(jax.jit(lambda keys: jax.lax.map(single, keys, batch_size=batch_size))(keys), dtype=float)


def _log_ratio(site: dict) -> Array:
    """A site's part in the log ratio of the joint density to the density that it was drawn from."""
    value = site["value"]
    log_prob = jnp.sum(site["fn"].log_prob(value))
    if site["is_observed"]:
        return log_prob if site["scale"] is None else site["scale"] * log_prob
    if _readout_transform(site) is not None:
        return log_prob - jnp.sum(dist.Normal(0.0, 1.0).log_prob(value))
    return jnp.zeros(())  # drawn from its prior


def _row(log_weights: np.ndarray) -> WidthRow:
    if not np.isfinite(log_weights.max()):
        raise ValueError(
            "no draw has a finite weight: the noise is too small against the features for this precision. Run in "
            "float64 (jax.config.update('jax_enable_x64', True))."
        )
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
        sample_size=float(mean**2 / np.mean(weights**2)),
        num_draws=num_draws,
    )


def _pareto_k(log_weights: np.ndarray) -> float:
    import arviz as az  # heavy, and needed here alone

    if np.ptp(log_weights) < 1e-3:  # rounding has a tail of its own
        return -np.inf
    if hasattr(az, "psislw"):
        return float(az.psislw(log_weights)[1])
    from arviz_stats.base import array_stats

    return float(array_stats.psislw(-log_weights)[1])  # ArviZ 1.x takes log-likelihoods to be left out
