"""Gaussian references fitted to the draws of warmup."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_wide.mcmc._adaptation import Mass
from numpyro_wide.mcmc._integrators import Evaluate, Point, PyTree, half_square_difference, select, total

RANK = 16
# Shares of warmup: the reference is learnt from the first on, and renewed at each of the others. A trajectory forgets
# where it began, so that short windows do; the last part is left to the step size alone.
WINDOWS = (0.1, 0.2, 0.35, 0.55, 0.75)
MIN_WARMUP = 20


class LeafMap(NamedTuple):
    """The map of one leaf, of p rows.

    Attributes:
        basis: V with orthonormal columns, (p, r).
        loc: Vᵀ m, (r,); m lies in the span of V.
        scale: standard deviations s along V, (r,).
    """

    basis: Array
    loc: Array
    scale: Array


class Moments(NamedTuple):
    """Sums over a window of warmup of one leaf, in the directions W that the window before it found.

    Directions and variances come from different draws: with more rows than draws, the directions in which a window
    looks stiffest are stiff by chance, and their variances would confirm it.

    Attributes:
        basis: W with orthonormal columns, (p, r).
        num_replicates: number of draws times units.
        draw_sum: sum of Wᵀ z, (r,).
        gradient_sum: sum of Wᵀ g with g = ∇U, (r,).
        draws: sum of Wᵀ z zᵀ W, (r, r).
        gradients: sum of Wᵀ g gᵀ W, (r, r).
        sketch: sum of ∇Φ ∇Φᵀ W with ∇Φ = g − z, whose columns are the next window's directions, (p, r).
    """

    basis: Array
    num_replicates: Array
    draw_sum: Array
    gradient_sum: Array
    draws: Array
    gradients: Array
    sketch: Array


class Draw(Protocol):
    """A position and the gradient of U there: a point, or the state of a chain."""

    @property
    def z(self) -> PyTree:
        """The position."""

    @property
    def z_grad(self) -> PyTree:
        """∇U at the position."""


class Reference(NamedTuple):
    r"""A Gaussian N(m, C), C of low rank plus identity, with the running sums from which the next one is fitted.

    What :class:`SplitHMC` takes instead of N(0, I), learnt in windows of draws: the directions that one window
    finds are those along which the next one measures. It can be fitted to the draws of any chain as well.

    Attributes:
        maps: map $z = m + S \psi$, $C = S S^\top$, of each leaf of a position.
        moments: sums over the draws of the present window, for each leaf.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.mcmc.internal import Point, Reference
        >>> draws = 2 + 0.5 * jax.random.normal(jax.random.key(0), (3, 1000))  # along the last axis, replicates
        >>> gradient = (draws - 2) / 0.25
        >>> fitted = Reference.start(draws).count_draw(Point(draws, jnp.zeros(()), gradient)).close()
        >>> fitted.unwhiten(jnp.zeros(3)).round(1)
        Array([2., 2., 2.], dtype=float32)
    """

    maps: tuple[LeafMap, ...]
    moments: tuple[Moments, ...]

    @classmethod
    def start(cls, z: PyTree) -> Self:
        """Return N(0, I), with nothing seen, for positions like ``z``."""
        moments = start_moments(z)
        return cls(
            tuple(LeafMap(m.basis, jnp.zeros_like(m.draw_sum), jnp.ones_like(m.draw_sum)) for m in moments), moments
        )

    def count_draw(self, point: Draw) -> Self:
        """Add one draw and its gradient."""
        leaves = jax.tree.leaves(point.z), jax.tree.leaves(point.z_grad)
        return self._replace(moments=tuple(map(_count_leaf, self.moments, *leaves)))

    def close(self, draw_length: Array | None = None) -> Self:
        """Return the Gaussian that the window measured, with nothing seen along the directions that it found."""
        found = tuple(_empty(jnp.linalg.qr(leaf.sketch)[0]) for leaf in self.moments)
        return type(self)(tuple(map(_measure, self.moments, self.maps)), found)

    def unwhiten(self, psi: PyTree) -> PyTree:
        """Map ψ to z = m + S ψ."""
        return self._for_each_leaf(lambda leaf, y: (leaf.scale - 1)[:, None] * y + leaf.loc[:, None], psi)

    def whiten(self, z: PyTree) -> PyTree:
        """Map z to ψ."""
        return self._for_each_leaf(lambda leaf, y: (y - leaf.loc[:, None]) / leaf.scale[:, None] - y, z)

    def relative_log_density(self, z: PyTree) -> Array:
        """Compute log N(z; m, C) − log N(z; 0, I), a scalar, without the difference of two large numbers."""
        leaves = zip(self.maps, jax.tree.leaves(z), strict=True)
        log_scales = [_rows(leaf).shape[1] * jnp.sum(jnp.log(part.scale)) for part, leaf in leaves if leaf.size]
        return half_square_difference(z, self.whiten(z)) - total(log_scales)

    def whiten_point(self, point: Point) -> Point:
        """Map z to ψ and ∇U to its gradient in ψ."""
        return Point(self.whiten(point.z), point.potential_energy, self._pull_back(point.z_grad))

    def unwhiten_point(self, point: Point) -> Point:
        """Invert :meth:`whiten_point`."""
        gradient = self._for_each_leaf(lambda leaf, y: (1 / leaf.scale - 1)[:, None] * y, point.z_grad)
        return Point(self.unwhiten(point.z), point.potential_energy, gradient)

    def in_whitened_coordinates(self, evaluate: Evaluate) -> Evaluate:
        """Return the evaluation of U as a function of ψ."""

        def evaluate_psi(psi: PyTree) -> Point:
            point = evaluate(self.unwhiten(psi))
            return Point(psi, point.potential_energy, self._pull_back(point.z_grad))

        return evaluate_psi

    def _pull_back(self, gradient: PyTree) -> PyTree:
        return self._for_each_leaf(lambda leaf, y: (leaf.scale - 1)[:, None] * y, gradient)

    def _for_each_leaf(self, change: Callable[[LeafMap, Array], Array], tree: PyTree) -> PyTree:
        """Add V ``change(Vᵀ x)`` to every leaf x."""
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, [_move(change, *pair) for pair in zip(self.maps, leaves, strict=True)])


def reference_windows(num_warmup: int) -> list[int]:
    """Return the boundaries of the windows in which a warmup learns the reference."""
    return [int(share * num_warmup) for share in WINDOWS]


def start_moments(z: PyTree) -> tuple[Moments, ...]:
    """Return empty moments along random directions."""
    keys = jax.random.split(jax.random.key(0), max(1, len(jax.tree.leaves(z))))
    rows = [_rows(leaf) for leaf in jax.tree.leaves(z)]
    noise = [jax.random.normal(k, (len(x), min(RANK, len(x))), x.dtype) for k, x in zip(keys, rows, strict=False)]
    return tuple(_empty(jnp.linalg.qr(directions)[0]) for directions in noise)


def _move(change: Callable[[LeafMap, Array], Array], leaf_map: LeafMap, leaf: Array) -> Array:
    if leaf.size == 0:
        return leaf
    rows, basis = _rows(leaf), leaf_map.basis
    return (rows + basis @ change(leaf_map, basis.T @ rows)).reshape(leaf.shape)


def _rows(leaf: Array) -> Array:
    """Return a leaf as a matrix with one column a unit; an empty leaf as a zero."""
    if leaf.size == 0:
        return jnp.zeros((1, 1), leaf.dtype)
    return leaf.reshape(-1, leaf.shape[-1] if leaf.ndim > 1 else 1)


def _empty(basis: Array) -> Moments:
    rank = basis.shape[1]
    square = jnp.zeros((rank, rank), basis.dtype)
    return Moments(basis, square[0, 0], square[0], square[0], square, square, jnp.zeros_like(basis))


def _count_leaf(moments: Moments, z: Array, z_grad: Array) -> Moments:
    z, z_grad = _rows(z), _rows(z_grad)
    draws, gradients = moments.basis.T @ z, moments.basis.T @ z_grad
    return Moments(
        moments.basis,
        moments.num_replicates + z.shape[1],
        moments.draw_sum + jnp.sum(draws, axis=1),
        moments.gradient_sum + jnp.sum(gradients, axis=1),
        moments.draws + draws @ draws.T,
        moments.gradients + gradients @ gradients.T,
        moments.sketch + (z_grad - z) @ (gradients - draws).T,
    )


def _measure(moments: Moments, previous: LeafMap) -> LeafMap:
    """Take the mean and covariance in the window's directions that fit draws and gradients best.

    N(m, C) minimises the Fisher divergence to the draws if C is the geometric mean of cov(z) and cov(∇U)⁻¹ and
    m = mean(z) − C mean(∇U) (Seyboldt, Carlson, Carpenter 2024). On a Gaussian posterior the sampling errors of the two
    cancel.
    """
    rank = len(moments.draw_sum)
    weight = moments.num_replicates + 1  # one draw of N(0, I) more, so that short windows have covariances
    mean, slope = moments.draw_sum / weight, moments.gradient_sum / weight
    one = jnp.eye(rank, dtype=mean.dtype) / weight
    draws = moments.draws / weight - jnp.outer(mean, mean) + one
    root, inverse_root = _roots(moments.gradients / weight - jnp.outer(slope, slope) + one)
    middle, _ = _roots(root @ draws @ root)
    covariance = inverse_root @ middle @ inverse_root
    variances, directions = jnp.linalg.eigh(covariance)
    loc = directions.T @ (mean - covariance @ slope)
    measured = LeafMap(moments.basis @ directions, loc, jnp.sqrt(variances))
    sound = jnp.all(jnp.isfinite(measured.basis)) & jnp.all(jnp.isfinite(loc)) & jnp.all(variances > 0)
    return select(sound, measured, previous)


def _roots(matrix: Array) -> tuple[Array, Array]:
    """Return the square root of a symmetric positive matrix, and the inverse of that root."""
    values, vectors = jnp.linalg.eigh(matrix)
    scales = jnp.sqrt(values)[None, :]
    return (vectors * scales) @ vectors.T, (vectors / scales) @ vectors.T


NUM_PROJECTIONS = 16
# Shares of warmup: windows begin at the first and at each of the others but the last, after which the step size alone
# is left to find.
WHITENING_WINDOWS = (0.1, 0.3, 0.55, 0.8)
WHITENING_MIN_WARMUP = 20
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
    return [int(share * num_warmup) for share in WHITENING_WINDOWS] if num_warmup >= WHITENING_MIN_WARMUP else []


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
