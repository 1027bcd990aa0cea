"""Draws of the scales around their mode: weighted by the evidence, or by chains where few rows have poor weights."""

import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import MCMC, NUTS
from scipy.special import softmax

from numpyro_wide._arviz import next_temperature, pareto_smoothed, rhat
from numpyro_wide._checks import late_progress
from numpyro_wide.wide_limit._gp import Conditioned, gp_log_evidence
from numpyro_wide.wide_limit._kernels import fcn_kernel, kernel
from numpyro_wide.wide_limit._scale_problem import ScaleProblem

_NUM_PROPOSALS, _DF = 400, 7.0  # draws of Student's t
_MOST_ROUNDS = 8  # of them; chains take a hundred times as long
_EFFECTIVE = 0.26  # share of the draws, a little over a quarter, that the next round's coordinates are made from
_NUM_KEPT = 50  # draws that predictions are made by
_FLATTEST = 0.25  # curvature, of the logarithms over their prior deviations
_POOR_SHAPE = 0.7  # of weights, above which few draws dominate (Vehtari et al. 2024)
_MOST_WORK = 3e6  # rows² × scales of chains, whose thousands of gradients then take some minutes
_NUM_CHAINS, _NUM_WARMUP, _NUM_STEPS, _MAX_DEPTH = 2, 100, 200, 5


@dataclass(frozen=True)
class ScaleDraws:
    """Draws of the logarithms of the scales, and how good they are."""

    logarithms: np.ndarray  # (draws, scales)
    log_posterior: np.ndarray  # (draws,), log evidence and log prior, but for the prior's constant
    weights: np.ndarray  # (draws,), of sum one
    pareto_shape: float  # of the weights of draws from Student's t
    rhat: dict[str, Any] | None  # of chains, by name; None without chains


class ScalePosterior:
    """Posterior of the scales of a normal likelihood, in coordinates in which it is about standard normal."""

    def __init__(self, problem: ScaleProblem, targets: np.ndarray, mode: np.ndarray, hessian: np.ndarray):
        """Take the mode of the logarithms, and the Hessian of minus the log posterior there."""
        self.problem, self.columns = problem, targets.reshape(len(targets), -1)
        spreads = problem.spreads
        values, vectors = np.linalg.eigh(hessian * np.outer(spreads, spreads))
        self.center, self.basis = mode, spreads[:, None] * vectors / np.sqrt(np.maximum(values, _FLATTEST))

    def logarithms(self, coordinates: Any) -> Any:
        """Return the logarithms of the scales, (..., scales), at coordinates."""
        return self.center + coordinates @ self.basis.T

    def recentre(self, coordinates: np.ndarray, weights: np.ndarray) -> None:
        """Move and stretch the coordinates to the mean and the deviations of weighted draws."""
        mean = weights @ coordinates
        deviations = np.sqrt(weights @ (coordinates - mean) ** 2)
        self.center, self.basis = self.logarithms(mean), self.basis * deviations

    def log_density(self, logarithms: np.ndarray) -> float:
        """Return log evidence and log prior but for a constant, minus infinity at extreme scales."""
        try:
            process = Conditioned(self.problem.covariance(logarithms), self.columns)
        except ValueError:
            return -np.inf
        return process.log_evidence() - self.problem.prior(logarithms)

    def potential(self, coordinates: Array) -> Array:
        """Return minus the log density at coordinates, as a function that JAX traces."""
        problem, logarithms = self.problem, self.logarithms(coordinates)
        by_name = problem.split(logarithms)
        scales: dict[str, Any] = {name: problem.medians[name] * jnp.exp(log) for name, log in by_name.items()}
        noise_scale = scales.pop("noise_scale", problem.known_noise)
        if problem.network is None:
            gram, _ = fcn_kernel(problem.depth, problem.activation, **scales)(problem.inputs)
        else:
            gram = kernel(problem.network.clone(**scales)).nngp(problem.inputs)
        prior = 0.5 * jnp.sum((logarithms / problem.spreads) ** 2)
        return prior - gp_log_evidence(gram, self.columns, noise_scale)


def draw_scales(posterior: ScalePosterior, random: np.random.Generator, progress_bar: bool) -> ScaleDraws:
    """Draw by weights, in better coordinates while they are poor, and by chains if they remain so and rows are few."""
    for number in range(1, _MOST_ROUNDS + 1):
        coordinates, log_posterior, log_weights, shape = _weighted(posterior, random, progress_bar)
        if shape <= _POOR_SHAPE or number == _MOST_ROUNDS:
            break
        posterior.recentre(coordinates, _flattened(log_weights))
    num_rows, num_scales = len(posterior.columns), len(posterior.center)
    if shape > _POOR_SHAPE and num_rows**2 * num_scales <= _MOST_WORK:
        starts = coordinates[np.argsort(-log_weights)[:_NUM_CHAINS]]
        return _by_chains(posterior, starts, shape, random, progress_bar)
    if shape > _POOR_SHAPE:
        warnings.warn(
            f"the weights of the scales' draws have a Pareto shape of {shape:.2f}, above {_POOR_SHAPE}: few of them "
            f"decide, and {num_rows} rows with {num_scales} scales are too many for chains (rows² × scales at most "
            f"{_MOST_WORK:.2g}). Take scales='mode', fewer scales (input_scale=False), or fewer rows.",
            UserWarning,
            stacklevel=3,  # the caller of fit
        )
    rows, counts = _resampled(np.exp(log_weights), random)
    return ScaleDraws(posterior.logarithms(coordinates[rows]), log_posterior[rows], counts / _NUM_KEPT, shape, None)


def _weighted(
    posterior: ScalePosterior, random: np.random.Generator, progress_bar: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Return coordinates from Student's t, their log posteriors, log weights and the weights' Pareto shape."""
    size = len(posterior.center)
    mixed = np.sqrt(random.chisquare(_DF, size=(_NUM_PROPOSALS, 1)) / _DF)
    coordinates = random.normal(size=(_NUM_PROPOSALS, size)) / mixed
    log_proposal = -0.5 * (_DF + size) * np.log1p(np.sum(coordinates**2, axis=1) / _DF)
    with_bar = late_progress(posterior.logarithms(coordinates), desc="draws of the scales", shown=progress_bar)
    log_posterior = np.array([posterior.log_density(logarithms) for logarithms in with_bar])
    log_weights, shape = pareto_smoothed(log_posterior - log_proposal)
    return coordinates, log_posterior, log_weights, shape


def _flattened(log_weights: np.ndarray) -> np.ndarray:
    """Return the largest power of the weights that leaves enough draws effective, normalised."""
    return softmax(next_temperature(0.0, log_weights, _EFFECTIVE) * log_weights)


def _resampled(weights: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Resample systematically; return distinct indices, and how often each is chosen."""
    points = (np.arange(_NUM_KEPT) + random.uniform()) / _NUM_KEPT
    sums = np.cumsum(weights)
    return np.unique(np.searchsorted(sums / sums[-1], points), return_counts=True)


def _by_chains(
    posterior: ScalePosterior, starts: np.ndarray, shape: float, random: np.random.Generator, progress_bar: bool
) -> ScaleDraws:
    """Draw by NUTS."""
    kernel = NUTS(potential_fn=posterior.potential, max_tree_depth=_MAX_DEPTH, adapt_mass_matrix=False)
    steps = {"num_warmup": _NUM_WARMUP, "num_samples": _NUM_STEPS, "num_chains": len(starts)}
    mcmc = MCMC(kernel, **steps, chain_method="sequential", progress_bar=progress_bar)
    key = jax.random.key(int(random.integers(2**31)))
    mcmc.run(key, init_params=jnp.asarray(starts), extra_fields=("potential_energy",))
    logarithms = posterior.logarithms(np.asarray(mcmc.get_samples(group_by_chain=True)))
    thinned = slice(None, None, logarithms[..., 0].size // _NUM_KEPT)
    return ScaleDraws(
        logarithms.reshape(-1, len(posterior.center))[thinned],
        -np.asarray(mcmc.get_extra_fields()["potential_energy"])[thinned],
        np.full(_NUM_KEPT, 1 / _NUM_KEPT),
        shape,
        posterior.problem.split(rhat(logarithms)),
    )
