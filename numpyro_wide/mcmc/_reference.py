"""The reference: a Gaussian N(m, C), C of low rank plus identity, that warmup learns instead of N(0, I).

Every leaf of a position is read as a matrix: its last axis holds the units of a layer and the axes before it what
feeds them. Units are exchangeable under the prior and, for all that warmup can see, under the posterior: their stiff
directions differ at any one position, but not on average. So m and C are learnt for one unit, with all units as
replicates, and C ⊗ I preconditions the leaf. A vector is one unit.

With z = m + S ψ and S = I + V (diag(s) − 1) Vᵀ, Vᵀ V = I, kernels work on ψ as if it were z.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_wide.mcmc._point import Evaluate, Point, PyTree, half_square_difference, select, total

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
