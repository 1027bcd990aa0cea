"""Gaussian references fitted to the draws of warmup."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide.mcmc._integrators import PyTree, half_square_difference, select, total

RANK = 16
# Percentages of warmup: the reference is learnt from the first on, and renewed at each of the others. A trajectory
# forgets where it began, so that short windows do; the last part is left to the step size alone.
REFERENCE_WINDOWS = (10, 20, 35, 55, 75)


class Reference(NamedTuple):
    """A Gaussian N(m, C), C of low rank plus identity, with the running sums from which the next one is fitted.

    A leaf of p rows has C = S Sᵀ, S - I in the span of its r = min(p, 16) directions, the rows of V. One window of
    draws finds the directions along which the next measures: of more rows than draws, those that look stiffest are
    stiff by chance, and variances by the same draws would confirm it.
    """

    basis: tuple[Array, ...]  # V of each leaf, orthonormal rows, (r, p)
    mean: tuple[Array, ...]  # m of each leaf, (p, 1)
    scale: tuple[Array, ...]  # standard deviations s along V, (r, 1)
    window: tuple[Array, ...]  # W of each leaf, orthonormal directions that are being measured, (r, p)
    # Sum of W ∇Φ ∇Φᵀ, ∇Φ = ∇U − z, whose rows are the directions of the next window, (r, p).
    sketch: tuple[Array, ...]
    moments: tuple[Array, ...]  # sum of x xᵀ, x = (1, W z, W ∇U), over draws and units, (1 + 2 r, 1 + 2 r)

    @classmethod
    def start(cls, z: PyTree) -> Self:
        """Return N(0, I), with an empty window of random directions, for positions like ``z``."""
        rows = _leaves(z)
        window = tuple(_random_directions(i, len(x), x.dtype) for i, x in enumerate(rows))
        mean = tuple(jnp.zeros_like(x[:, :1]) for x in rows)
        moments = tuple(jnp.zeros(2 * (1 + 2 * len(directions),), directions.dtype) for directions in window)
        scale = tuple(jnp.ones_like(directions[:, :1]) for directions in window)
        return cls(window, mean, scale, window, tuple(map(jnp.zeros_like, window)), moments)

    def count_draw(self, point: Any) -> Self:
        """Add one draw and its gradient: a point, or the state of a chain."""
        moments, sketch = [], []
        for window, z, gradient in zip(self.window, *map(_leaves, (point.z, point.z_grad)), strict=True):
            along, slope = window @ z, window @ gradient
            x = jnp.concatenate([jnp.ones_like(z[:1]), along, slope])
            moments.append(x @ x.T)
            sketch.append((slope - along) @ (gradient - z).T)
        return self._replace(
            moments=jax.tree.map(jnp.add, self.moments, tuple(moments)),
            sketch=jax.tree.map(jnp.add, self.sketch, tuple(sketch)),
        )

    def close(self) -> Self:
        """Return the Gaussian that the window measured, with an empty window along the directions of its sketch."""
        current = zip(self.basis, self.mean, self.scale, strict=True)
        measured = [_measure(*leaf) for leaf in zip(self.window, self.moments, current, strict=True)]
        basis, mean, scale = (tuple(leaves) for leaves in zip(*measured, strict=True))
        zeros = jax.tree.map(jnp.zeros_like, self)
        window = tuple(_orthonormal(rows) for rows in self.sketch)
        return type(self)(basis, mean, scale, window, zeros.sketch, zeros.moments)

    def center(self, z: PyTree) -> PyTree:
        """Return z − m."""
        return self._for_each_leaf(lambda x, basis, mean, scale: x - mean, z)

    def covariance(self, gradient: PyTree) -> PyTree:
        """Return C g."""
        return self._along(lambda scale: (scale - 1) * (scale + 1), gradient)

    def spread(self, velocity: PyTree) -> PyTree:
        """Return S v."""
        return self._along(lambda scale: scale - 1, velocity)

    def unspread(self, velocity: PyTree) -> PyTree:
        """Invert :meth:`spread`."""
        return self._along(lambda scale: 1 / scale - 1, velocity)

    def unwhiten(self, psi: PyTree) -> PyTree:
        """Map ψ to z = m + S ψ."""
        return self._for_each_leaf(lambda x, basis, mean, scale: x + mean, self.spread(psi))

    def relative_log_density(self, z: PyTree) -> Array:
        """Compute log N(z; m, C) − log N(z; 0, I), a scalar, without the difference of two large numbers."""
        pairs = zip(self.scale, jax.tree.leaves(z), strict=True)
        log_scales = [_rows(leaf).shape[1] * jnp.sum(jnp.log(scale)) for scale, leaf in pairs if leaf.size]
        return half_square_difference(z, self.unspread(self.center(z))) - total(log_scales)

    def _along(self, factor: Callable[[Array], Array], tree: PyTree) -> PyTree:
        """Add Vᵀ ``factor(s)`` V x to every leaf x."""
        return self._for_each_leaf(lambda x, basis, _, scale: x + basis.T @ (factor(scale) * (basis @ x)), tree)

    def _for_each_leaf(self, change: Callable[..., Array], tree: PyTree) -> PyTree:
        """Replace every leaf, a matrix x, by ``change(x, basis, mean, scale)``."""
        leaves, structure = jax.tree.flatten(tree)
        by_leaf = zip(leaves, self.basis, self.mean, self.scale, strict=True)
        changed = [change(_rows(x), *gaussian).reshape(x.shape) if x.size else x for x, *gaussian in by_leaf]
        return jax.tree.unflatten(structure, changed)


def _leaves(tree: PyTree) -> list[Array]:
    return [_rows(leaf) for leaf in jax.tree.leaves(tree)]


def _rows(leaf: Array) -> Array:
    """Return a leaf as a matrix with one column a unit; an empty leaf as a zero."""
    if leaf.size == 0:
        return jnp.zeros((1, 1), leaf.dtype)
    return leaf if leaf.ndim == 2 else leaf.reshape(-1, leaf.shape[-1] if leaf.ndim > 1 else 1)


def _random_directions(seed: int, num_rows: int, dtype: jnp.dtype) -> Array:
    """Return orthonormal rows, (r, p), by NumPy: numbers known before a program need no compilation."""
    noise = np.random.default_rng(seed).normal(size=(num_rows, min(RANK, num_rows)))
    return jnp.asarray(np.linalg.qr(noise)[0].T, dtype)


def _orthonormal(rows: Array) -> Array:
    """Return orthonormal rows of the same span."""
    return jnp.ones_like(rows) if rows.size == 1 else jnp.linalg.qr(rows.T)[0].T


def _measure(window: Array, moments: Array, current: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return the directions, the mean and the deviations that fit a leaf's draws and gradients, or the current ones.

    N(m, C) minimises the Fisher divergence to the draws if C is the geometric mean of cov(z) and cov(∇U)⁻¹ and
    m = mean(z) − C mean(∇U) (Seyboldt, Carlson, Carpenter 2024). On a Gaussian posterior the sampling errors of the two
    cancel.
    """
    rank = len(window)
    weight = moments[0, 0] + 1  # one draw of N(0, I) more, so that short windows have covariances
    means = moments[1:, :1] / weight
    covariances = (moments[1:, 1:] + jnp.eye(2 * rank, dtype=moments.dtype)) / weight - means @ means.T
    axes, variances = _geometric_mean(covariances[:rank, :rank], covariances[rank:, rank:])
    scale = jnp.sqrt(variances)[:, None]
    basis = axes.T @ window
    mean = window.T @ means[:rank] - basis.T @ (variances[:, None] * (axes.T @ means[rank:]))
    sound = jnp.all(jnp.isfinite(mean)) & jnp.all(jnp.isfinite(scale) & (scale > 0))
    return select(sound, (basis, mean, scale), current)


def _geometric_mean(covariance: Array, precision: Array) -> tuple[Array, Array]:
    """Return eigenvectors and eigenvalues of the geometric mean of a covariance and an inverse precision."""
    if covariance.size == 1:  # biases and scalars, most leaves of many models: not worth compiling LAPACK's calls
        return jnp.ones_like(covariance), jnp.sqrt(covariance / precision)[0]
    # With the precision L Lᵀ it is L⁻ᵀ (Lᵀ covariance L)^½ L⁻¹.
    root = jax.lax.linalg.cholesky(precision, symmetrize_input=False)
    vectors, values = jax.lax.linalg.eigh(root.T @ covariance @ root)
    factor = jax.lax.linalg.triangular_solve(
        root, vectors * values[None] ** 0.25, left_side=True, lower=True, transpose_a=True
    )
    return jax.lax.linalg.eigh(factor @ factor.T)
