"""The preconditioner of the microcanonical kernel: a diagonal mass, and the length over which momenta forget.

With an isotropic posterior in d dimensions, of radius √d, a momentum should decorrelate over a length of about that
radius; in these units over 1. Elsewhere the autocorrelation of the draws tells.
"""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_wide.mcmc._mass import Mass
from numpyro_wide.mcmc._point import Point, PyTree, select

NUM_PROJECTIONS = 16
# Shares of warmup: windows begin at the first and at each of the others but the last, after which the step size alone
# is left to find.
WINDOWS = (0.1, 0.3, 0.55, 0.8)
MIN_WARMUP = 20
# Robnik et al. 2023 have 0.4 of the autocorrelation length for the momentum's.
LENGTH_PER_AUTOCORRELATION = 0.4
SHORTEST, LONGEST = 0.1, 10.0


class Whitening(NamedTuple):
    """A diagonal mass and a momentum length, and what a window of warmup has seen of those that will follow them.

    Attributes:
        mass: diagonal mass.
        length: momentum length, in units of √d and of the mass.
        learns: whether a window's mass is taken, and its length, (2,).
        per_autocorrelation: momentum length to have for an autocorrelation length of 1.
        num_windows: number of windows that have been closed.
        traces: orthogonal projections of the draws of the window, (draw, projection).
        num_draws: number of draws of the window so far.
    """

    mass: Mass
    length: Array
    learns: Array
    per_autocorrelation: Array
    num_windows: Array
    traces: Array
    num_draws: Array

    @property
    def scale(self) -> PyTree:
        """The square root of the inverse of the mass, a pytree like the position."""
        return self.mass.scale

    @classmethod
    def start(
        cls,
        z: PyTree,
        scale: PyTree,
        length: float,
        learns: tuple[bool, bool],
        longest_window: int,
        per_autocorrelation: float = LENGTH_PER_AUTOCORRELATION,
    ) -> Self:
        """Return what is given, with nothing seen.

        Args:
            z: position, a pytree.
            scale: square root of the inverse of the mass, a pytree like the position, or None for 1.
            length: momentum length to start from.
            learns: whether to learn the mass, and whether to learn the length.
            longest_window: largest number of draws of a window.
            per_autocorrelation: momentum length to have for an autocorrelation length of 1.
        """
        real, none = jnp.result_type(float), jnp.zeros((), jnp.result_type(int))
        flat = ravel_pytree(z)[0]
        traces = jnp.zeros((max(2, longest_window), min(NUM_PROJECTIONS, flat.size)), real)
        share = jnp.asarray(per_autocorrelation, real)
        return cls(Mass.start(z, scale), jnp.asarray(length, real), jnp.array(learns), share, none, traces, none)

    def count_draw(self, point: Point) -> Self:
        """Add one draw."""
        whitened = jax.tree.map(jnp.divide, point.z, self.scale)
        row = _project(ravel_pytree(whitened)[0], self.traces.shape[1])
        traces = self.traces.at[self.num_draws].set(row, mode="drop")
        return self._replace(mass=self.mass.count_draw(point), traces=traces, num_draws=self.num_draws + 1)

    def close(self, draw_length: Array) -> Self:
        """Return what the window measured, with nothing seen."""
        time = autocorrelation_time(self.traces, self.num_draws)
        num_effective = jnp.asarray(self.num_draws, time.dtype) / time
        mass = self._closed_mass(num_effective)
        # The next length is wanted for momenta that are as they were: autocorrelation falls like one over the length
        # (that of an oscillator is 2 / L), so that to go all the way would be to swing around the length one wants.
        wanted = jnp.sqrt(self.length * self.per_autocorrelation * draw_length * time)
        measured = self.learns[1] & jnp.isfinite(wanted) & ((self.num_windows > 0) | ~self.learns[0])
        length = jnp.where(measured, jnp.clip(wanted, SHORTEST, LONGEST), self.length)
        none = jnp.zeros_like(self.num_draws)
        return self._replace(
            mass=mass,
            length=length,
            num_windows=self.num_windows + 1,
            traces=jnp.zeros_like(self.traces),
            num_draws=none,
        )

    def _closed_mass(self, num_effective: Array) -> Mass:
        """Return the mass of the window's variances, drawn together as far as they differ by chance alone."""
        mean, square_sum, count = self.mass.variance
        real = mean.dtype
        variances = square_sum / jnp.maximum(jnp.asarray(count, real) - 1, 1)
        sound = jnp.all(jnp.isfinite(variances) & (variances > 0)) & self.learns[0]
        logs = jnp.log(jnp.where(sound, variances, 1.0))
        # The logarithm of a variance estimated from N draws has a variance of 2 / N itself.
        by_chance = 2 / jnp.maximum(num_effective, 1.0) / jnp.maximum(jnp.var(logs), jnp.finfo(real).tiny)
        kept = jnp.clip(1 - by_chance, 0.0, 1.0)
        shrunk = jnp.mean(logs) + kept * (logs - jnp.mean(logs))
        unravel = ravel_pytree(self.scale)[1]
        scale = select(sound, unravel(jnp.exp(0.5 * shrunk)), self.scale)
        return Mass.start(scale, scale)


def whitening_windows(num_warmup: int) -> list[int]:
    """Return the boundaries of the windows in which a warmup learns; none where it is too short."""
    return [int(share * num_warmup) for share in WINDOWS] if num_warmup >= MIN_WARMUP else []


def autocorrelation_time(traces: Array, num_draws: Array) -> Array:
    """Compute how many draws are worth one that is independent, on the average over projections.

    Autocovariances of all projections are pooled, and their sum ends where a pair of them is no longer positive (Geyer
    1992).

    Args:
        traces: projections of draws, (draw, projection), zero after the first ``num_draws``.
        num_draws: number of draws, at most the number of rows.

    Returns:
        A scalar; NaN if nothing moved.
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
    """Sum every so-many-eth entry under random signs, which are the same at every call."""
    signs = jax.random.rademacher(jax.random.key(0), flat.shape, flat.dtype)
    padded = jnp.pad(signs * flat, (0, -flat.size % num_projections))
    return jnp.sum(padded.reshape(-1, num_projections), axis=0)
