"""Methods of estimating the evidence from draws of the prior and of the posterior."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from scipy.special import expit
from tqdm.auto import tqdm

from numpyro_wide import _arviz
from numpyro_wide._checks import IN_FLOAT64, NOISE_TOO_SMALL
from numpyro_wide.evidence import _chains
from numpyro_wide.evidence._chains import Target
from numpyro_wide.evidence._density import Position
from numpyro_wide.mcmc._kernel import KernelState


class Bridge(NamedTuple):
    """Log ratio log Z₁ − log Z₀ of two normalisers."""

    log_ratio: float
    overlap: float  # ∫ p₀ p₁ / (s₀ p₀ + s₁ p₁), 1 for equal densities
    # Influence of each draw: the error is the mean of the first, less that of the second.
    lower: np.ndarray
    upper: np.ndarray


def bridge(lower: np.ndarray, upper: np.ndarray, sizes: tuple[float, float] | None = None) -> Bridge:
    """Estimate a ratio by Meng and Wong's optimal bridge (:eq:`bridge`)."""
    num_lower, num_upper = sizes or (lower.size, upper.size)
    share = num_upper / (num_lower + num_upper)
    offset = np.log(share) - np.log1p(-share)

    def terms(log_ratio: float) -> tuple[np.ndarray, np.ndarray]:
        return expit(lower - log_ratio + offset) / share, expit(log_ratio - upper - offset) / (1 - share)

    pooled = np.concatenate([lower.ravel(), upper.ravel()])
    finite = pooled[np.isfinite(pooled)]
    low, high = finite.min() - 60.0, finite.max() + 60.0  # far out
    for _ in range(100):  # by bisection
        middle = 0.5 * (low + high)
        lower_terms, upper_terms = terms(middle)
        low, high = (middle, high) if lower_terms.mean() > upper_terms.mean() else (low, middle)
    log_ratio = float(0.5 * (low + high))
    lower_terms, upper_terms = terms(log_ratio)
    overlap = max(float(upper_terms.mean()), np.finfo(float).tiny)
    return Bridge(log_ratio, overlap, lower_terms / overlap, upper_terms / overlap)


def effective_size(terms: np.ndarray) -> float:
    """Return the effective number of draws (chain, draw) for their mean."""
    return float(_arviz.effective_sample_size(terms, "mean")) if np.ptp(terms) else float(terms.size)


def rhat(values: np.ndarray) -> float:
    """Return the rank-normalised split R-hat of (chain, draw), 1 for equal draws."""
    return float(_arviz.rhat(values)) if np.ptp(values) else 1.0


def squared_error(terms: np.ndarray) -> tuple[float, float]:
    """Return the squared standard error of the mean of (chain, draw), and the effective size."""
    size = effective_size(terms)
    return float(np.var(terms, ddof=1) / size), size


# Effective share of draws at the next temperature, for most to be of use for a bridge.
_SHARE = 0.25
_MAX_TEMPERATURES = 400


class Sizes(NamedTuple):
    """Sizes, as ``model_evidence`` takes them."""

    num_chains: int
    num_warmup: int
    num_samples: int
    batch_size: int

    @property
    def num_independent(self) -> int:
        """Number of independent draws where a distribution can be drawn from."""
        return self.num_chains * self.num_samples


class Evidence(NamedTuple):
    r"""Log evidence of a model, with its error and checks of both.

    Attributes:
        log_evidence: in nats.
        standard_error: in nats, autocorrelation of the draws included.
        method: "bridge" or "stepping-stone".
        overlap: smallest overlap of bridged densities, from 0 to 1 (:eq:`bridge`).
        effective_size: smallest effective number of draws of a temperature.
        rhat: largest rank-normalised split R-hat of an averaged log ratio.
        inverse_temperatures: $\beta$ of the chains, (temperature,).
    """

    log_evidence: float
    standard_error: float
    method: str
    overlap: float
    effective_size: float
    rhat: float
    inverse_temperatures: np.ndarray

    @property
    def is_trusted(self) -> bool:
        """True for overlap of at least 0.1, R-hat of at most 1.1 and an effective size of at least 100."""
        return self.overlap >= 0.1 and self.rhat <= 1.1 and self.effective_size >= 100

    def __str__(self) -> str:
        count = len(self.inverse_temperatures)
        temperatures = "1 temperature" if count == 1 else f"{count} temperatures"
        return (
            f"log evidence {self.log_evidence:.3f} ± {self.standard_error:.2g} ({self.method}, {temperatures}): "
            f"overlap {self.overlap:.2f}, effective size {self.effective_size:.0f}, R-hat {self.rhat:.3f}"
        )


def first_temperature(target: Target, rng_key: Array, sizes: Sizes) -> tuple[float, Position]:
    """Choose the first inverse temperature above 0, and by weight there draws of the prior, (1, chain, ...)."""
    key_draws, key_choice = random.split(rng_key)
    keys = random.split(key_draws, sizes.num_independent)
    log_weights = _chains.prior_weights(target, keys, sizes.num_chains)
    if not np.isfinite(log_weights).any():
        raise ValueError(
            f"the likelihood is not finite at any of {log_weights.size} draws of the prior: the data are outside of "
            f"its support, or {NOISE_TOO_SMALL}. Run {IN_FLOAT64}."
        )
    beta = _arviz.next_temperature(0.0, log_weights, _SHARE)
    rows = _chains.resample(key_choice, beta * log_weights, sizes.num_chains)
    return beta, _chains.prior_positions(target, keys[rows])


def by_bridge(target: Target, rng_key: Array, sizes: Sizes, positions: Position, bar: tqdm) -> Evidence:
    """Estimate by a bridge from a Gaussian fitted to half of the draws (Gronau et al. 2017)."""
    key_start, key_gaussian = random.split(rng_key)
    half = sizes.num_samples // 2
    bar.set_description("posterior")
    state = _chains.start(target, key_start, [1.0], positions, sizes.num_warmup)
    state, gaussian = _chains.fit_gaussian(target, state, sizes.num_warmup, sizes.num_samples - half, bar)
    upper = _chains.advance(target, state, [1.0], half, bar, reference=gaussian)[2][0]
    lower = _chains.gaussian_draws(target, key_gaussian, gaussian, positions, sizes.num_chains * half, sizes.num_chains)
    if not np.isfinite(lower).any():  # nothing in common
        return Evidence(np.nan, np.inf, "bridge", 0.0, 0.0, np.inf, np.ones(1))
    estimate = bridge(lower, upper, (lower.size, effective_size(upper)))
    upper_error, size = squared_error(estimate.upper)
    error = float(np.sqrt(np.var(estimate.lower, ddof=1) / lower.size + upper_error))
    return Evidence(estimate.log_ratio, error, "bridge", estimate.overlap, size, rhat(upper), np.ones(1))


def by_stepping_stones(
    target: Target, rng_key: Array, sizes: Sizes, beta: float, positions: Position, bar: tqdm
) -> Evidence:
    """Estimate by bridges on the path from the prior (Xie et al. 2011)."""
    key_ladder, key_prior = random.split(rng_key)
    betas, states = _ladder(target, key_ladder, sizes, beta, positions, bar)
    prior = _chains.prior_weights(target, random.split(key_prior, sizes.num_independent), sizes.num_chains)
    log_weights = [prior[None]]
    bar.set_description("draws")
    for begin in range(0, len(betas), sizes.batch_size):
        group = slice(begin, begin + sizes.batch_size)
        # As many as before, for one program; the surplus is dropped.
        indices = [min(i, len(betas) - 1) for i in range(begin, begin + sizes.batch_size)]
        state = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *(states[i] for i in indices))
        recorded = _chains.advance(target, state, [betas[i] for i in indices], sizes.num_samples, bar)[2]
        log_weights.extend(recorded[: len(betas[group])])
    return _sum_of_bridges(np.asarray([0.0, *betas]), log_weights)


def _ladder(
    target: Target, rng_key: Array, sizes: Sizes, beta: float, positions: Position, bar: tqdm
) -> tuple[list[float], list[KernelState]]:
    """Choose inverse temperatures from the first on, and warm up chains at each."""
    betas: list[float] = []
    states: list[KernelState] = []
    while True:
        key_start, key_choice, rng_key = random.split(rng_key, 3)
        bar.set_description(f"temperature 1/{1 / beta:.3g}")
        state = _chains.start(target, key_start, [beta], positions, sizes.num_warmup)
        state, *_ = _chains.advance(target, state, [beta], sizes.num_warmup, bar, phase=_chains.WARM)
        state, _, log_weights = _chains.advance(target, state, [beta], max(25, sizes.num_samples // 4), bar)
        betas.append(beta)
        states.append(state)
        if beta == 1:
            return betas, states
        if len(betas) == _MAX_TEMPERATURES:
            raise ValueError(
                f"after {len(betas)} temperatures the inverse temperature is {beta:.2g}, not 1; look at the model's "
                "priors and noise, run in float64, or raise num_warmup."
            )
        next_beta = _arviz.next_temperature(beta, log_weights[0].ravel(), _SHARE)
        last = (next_beta - beta) * log_weights[0, :, -1]
        rows = _chains.resample(key_choice, last, sizes.num_chains)
        positions = jax.tree.map(lambda leaf, rows=rows: leaf[:, rows], state.z)
        beta = next_beta


def _sum_of_bridges(betas: np.ndarray, log_weights: list[np.ndarray]) -> Evidence:
    """Sum log ratios between neighbours, with the error (:eq:`stones`)."""
    sizes = [float(log_weights[0].size), *(effective_size(draws) for draws in log_weights[1:])]
    influence = [np.zeros_like(draws) for draws in log_weights]
    total, overlap = 0.0, 1.0
    for k, step in enumerate(np.diff(betas)):
        pair = bridge(step * log_weights[k], step * log_weights[k + 1], (sizes[k], sizes[k + 1]))
        influence[k] += pair.lower
        influence[k + 1] -= pair.upper
        total, overlap = total + pair.log_ratio, min(overlap, pair.overlap)
    variance = float(np.var(influence[0], ddof=1) / influence[0].size)
    errors = [squared_error(terms) for terms in influence[1:]]
    variance += sum(error for error, _ in errors)
    smallest = min(size for _, size in errors)
    largest = max(rhat(draws) for draws in log_weights[1:])
    return Evidence(total, float(np.sqrt(variance)), "stepping-stone", overlap, smallest, largest, betas[1:])
