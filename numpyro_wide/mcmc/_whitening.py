"""Diagonal masses and momentum lengths fitted to the draws of warmup."""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_wide.mcmc._integrators import Point, PyTree

# Percentages of warmup: the mass is learnt from the first on, and renewed at each of the others.
WHITENING_WINDOWS = (10, 30, 55, 80)
NUM_PROJECTIONS = 16
SHORTEST, LONGEST = 0.1, 10.0


class Whitening(NamedTuple):
    """A diagonal mass and a momentum length, and the sums of a window of warmup for those that will follow them."""

    scale: Array  # square root of the inverse of the mass, (d,)
    length: Array  # momentum length, in units of √d and of the mass
    mean: Array  # of the draws of the window, (d,)
    square_sum: Array  # of their deviations, (d,)
    traces: Array  # their orthogonal projections, (draw, projection)
    num_draws: Array
    num_windows: Array  # that have been closed

    @classmethod
    def start(cls, z: PyTree, length: float, longest_window: int) -> Self:
        """Return the identity and this length, with an empty window."""
        flat = ravel_pytree(z)[0]
        traces = jnp.zeros((max(2, longest_window), min(NUM_PROJECTIONS, flat.size)))
        zero, zeros = jnp.zeros((), jnp.result_type(int)), jnp.zeros_like(flat)
        return cls(jnp.ones_like(flat), jnp.asarray(length, float), zeros, zeros, traces, zero, zero)

    def count_draw(self, point: Point) -> Self:
        """Add one draw."""
        flat = ravel_pytree(point.z)[0]
        row = _project(flat / self.scale, self.traces.shape[1])
        deviation = flat - self.mean
        mean = self.mean + deviation / jnp.asarray(self.num_draws + 1, deviation.dtype)
        return self._replace(
            mean=mean,
            square_sum=self.square_sum + deviation * (deviation + self.mean - mean),
            traces=self.traces.at[self.num_draws].set(row, mode="drop"),
            num_draws=self.num_draws + 1,
        )

    def close(self, draw_length: Array, per_autocorrelation: float) -> Self:
        """Return the mass and the length that the window measured, with an empty window.

        ``draw_length`` is the length of a trajectory, ``per_autocorrelation`` the momentum length to have for an
        autocorrelation length of 1.
        """
        time = autocorrelation_time(self.traces, self.num_draws)
        # The next length is for momenta as they were: autocorrelation falls like one over the length
        # (that of an oscillator is 2 / L), so that to go all the way would be to swing around the length one wants.
        next_length = jnp.sqrt(self.length * per_autocorrelation * draw_length * time)
        is_measured = jnp.isfinite(next_length) & (self.num_windows > 0)
        zeros = jax.tree.map(jnp.zeros_like, self)
        return zeros._replace(
            scale=self._measured_scale(jnp.asarray(self.num_draws, time.dtype) / time),
            length=jnp.where(is_measured, jnp.clip(next_length, SHORTEST, LONGEST), self.length),
            num_windows=self.num_windows + 1,
        )

    def _measured_scale(self, num_effective: Array) -> Array:
        """Return the deviations of the window, drawn together as far as they differ by chance alone."""
        real = self.mean.dtype
        variances = self.square_sum / jnp.maximum(jnp.asarray(self.num_draws, real) - 1, 1)
        sound = jnp.all(jnp.isfinite(variances) & (variances > 0))
        logs = jnp.log(jnp.where(sound, variances, 1.0))
        # The logarithm of a variance estimated from N draws has a variance of 2 / N itself.
        by_chance = 2 / jnp.maximum(num_effective, 1.0) / jnp.maximum(jnp.var(logs), jnp.finfo(real).tiny)
        shrunk = jnp.mean(logs) + jnp.clip(1 - by_chance, 0.0, 1.0) * (logs - jnp.mean(logs))
        return jnp.where(sound, jnp.exp(0.5 * shrunk), self.scale)


def autocorrelation_time(traces: Array, num_draws: Array) -> Array:
    """Compute how many draws are worth an independent one, from projections (draw, projection), zero after the last.

    Autocovariances of all projections are pooled, and their sum ends where a pair of them is no longer positive (Geyer
    1992). NaN if nothing moved.
    """
    rows = len(traces)
    counted = jnp.arange(rows) < num_draws
    mean = jnp.sum(traces, axis=0) / jnp.asarray(num_draws, traces.dtype)
    deviations = jnp.where(counted[:, None], traces - mean[None], 0.0)
    power = jnp.sum(jnp.square(jnp.abs(jnp.fft.rfft(deviations, 2 * rows, axis=0))), axis=1)
    covariances = jnp.fft.irfft(power, 2 * rows)[: rows - rows % 2]
    pairs = jnp.sum((covariances / covariances[0]).reshape(-1, 2), axis=1)
    positive = jnp.cumprod(jnp.where(pairs > 0, 1.0, 0.0))
    return jnp.maximum(2 * jnp.sum(positive * pairs) - 1, 0.1)


def _project(flat: Array, num_projections: int) -> Array:
    """Sum every ``num_projections``-th entry under random signs, the same at every call."""
    signs = jax.random.rademacher(jax.random.key(0), flat.shape, flat.dtype)
    padded = jnp.pad(signs * flat, (0, -flat.size % num_projections))
    return jnp.sum(padded.reshape(-1, num_projections), axis=0)
