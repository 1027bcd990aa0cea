"""A Gaussian N(m, C), C of low rank plus identity, that stands in for N(0, I) where the posterior is far from it.

Every leaf of a position is read as a matrix: its last axis holds the units of a layer and the axes before it what
feeds them. Units are exchangeable under the prior and, for all that warmup can see, under the posterior: their stiff
directions differ at any one position, but not on average. So m and C are learnt for one unit, with all units as
replicates, and C ⊗ I preconditions the leaf. A vector is one unit.

With z = m + S ψ and S = I + V (diag(s) − 1) Vᵀ, Vᵀ V = I, kernels work on ψ as if it were z.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_wide.mcmc._integrators import Evaluate, Point
from numpyro_wide.mcmc._tree import PyTree, select

RANK = 16


class Reference(NamedTuple):
    """The map of one leaf, of p rows.

    Attributes:
        basis: V, orthonormal columns, (p, r).
        loc: Vᵀ m, (r,); m lies in the span of V.
        scale: s, standard deviations along V, (r,).
    """

    basis: jax.Array
    loc: jax.Array
    scale: jax.Array


class Moments(NamedTuple):
    """What a window of warmup has seen of one leaf, in the directions W that the window before it found.

    Directions and variances come from different draws: with more rows than draws, the directions in which a window
    looks stiffest are stiff by chance, and their variances would confirm it.

    Attributes:
        basis: W, orthonormal columns, (p, r).
        num_replicates: number of draws times units.
        draw_sum: sum of Wᵀ z, (r,).
        gradient_sum: sum of Wᵀ g with g = ∇U, (r,).
        draws: sum of Wᵀ z zᵀ W, (r, r).
        gradients: sum of Wᵀ g gᵀ W, (r, r).
        sketch: sum of ∇Φ ∇Φᵀ W with ∇Φ = g − z, whose columns are the next window's directions, (p, r).
    """

    basis: jax.Array
    num_replicates: jax.Array
    draw_sum: jax.Array
    gradient_sum: jax.Array
    draws: jax.Array
    gradients: jax.Array
    sketch: jax.Array


def identity_reference(z: PyTree) -> tuple[Reference, ...]:
    """Return N(0, I) for the leaves of ``z``."""
    return tuple(
        Reference(moments.basis, jnp.zeros_like(moments.draw_sum), jnp.ones_like(moments.draw_sum))
        for moments in start_moments(z)
    )


def start_moments(z: PyTree) -> tuple[Moments, ...]:
    """Return empty moments along random directions."""
    keys = jax.random.split(jax.random.key(0), max(1, len(jax.tree.leaves(z))))
    rows = [_rows(leaf) for leaf in jax.tree.leaves(z)]
    noise = [jax.random.normal(k, (len(x), min(RANK, len(x))), x.dtype) for k, x in zip(keys, rows, strict=False)]
    return tuple(_empty(jnp.linalg.qr(directions)[0]) for directions in noise)


def count_draw(moments: tuple[Moments, ...], z: PyTree, z_grad: PyTree) -> tuple[Moments, ...]:
    """Add one draw and its gradient."""
    return tuple(map(_count_leaf, moments, jax.tree.leaves(z), jax.tree.leaves(z_grad)))


def close_window(
    moments: tuple[Moments, ...], reference: tuple[Reference, ...]
) -> tuple[tuple[Moments, ...], tuple[Reference, ...]]:
    """Return empty moments along the directions that the window found, and the reference that it measured."""
    found = tuple(_empty(jnp.linalg.qr(leaf.sketch)[0]) for leaf in moments)
    return found, tuple(map(_measure, moments, reference))


def colour(reference: tuple[Reference, ...], psi: PyTree) -> PyTree:
    """Map ψ to z = m + S ψ."""
    return _for_each_leaf(lambda ref, y: (ref.scale - 1)[:, None] * y + ref.loc[:, None], reference, psi)


def whiten(reference: tuple[Reference, ...], point: Point) -> Point:
    """Map z to ψ and ∇U to its gradient in ψ."""
    psi = _for_each_leaf(lambda ref, y: (y - ref.loc[:, None]) / ref.scale[:, None] - y, reference, point.z)
    return Point(psi, point.potential_energy, _pull_back(reference, point.z_grad))


def unwhiten(reference: tuple[Reference, ...], point: Point) -> Point:
    """Invert :func:`whiten`."""
    gradient = _for_each_leaf(lambda ref, y: (1 / ref.scale - 1)[:, None] * y, reference, point.z_grad)
    return Point(colour(reference, point.z), point.potential_energy, gradient)


def in_whitened_coordinates(evaluate: Evaluate, reference: tuple[Reference, ...]) -> Evaluate:
    """Return the evaluation of U as a function of ψ."""

    def evaluate_psi(psi: PyTree) -> Point:
        point = evaluate(colour(reference, psi))
        return Point(psi, point.potential_energy, _pull_back(reference, point.z_grad))

    return evaluate_psi


def _pull_back(reference: tuple[Reference, ...], gradient: PyTree) -> PyTree:
    return _for_each_leaf(lambda ref, y: (ref.scale - 1)[:, None] * y, reference, gradient)


def _for_each_leaf(change, reference: tuple[Reference, ...], tree: PyTree) -> PyTree:  # type: ignore[no-untyped-def]
    """Add V ``change(Vᵀ x)`` to every leaf x."""
    leaves, structure = jax.tree.flatten(tree)
    moved = []
    for ref, leaf in zip(reference, leaves, strict=True):
        if leaf.size == 0:
            moved.append(leaf)
            continue
        rows = _rows(leaf)
        moved.append((rows + ref.basis @ change(ref, ref.basis.T @ rows)).reshape(leaf.shape))
    return jax.tree.unflatten(structure, moved)


def _rows(leaf: jax.Array) -> jax.Array:
    """Return a leaf as a matrix with one column a unit; an empty leaf as a zero."""
    if leaf.size == 0:
        return jnp.zeros((1, 1), leaf.dtype)
    return leaf.reshape(-1, leaf.shape[-1] if leaf.ndim > 1 else 1)


def _empty(basis: jax.Array) -> Moments:
    rank = basis.shape[1]
    square = jnp.zeros((rank, rank), basis.dtype)
    return Moments(basis, square[0, 0], square[0], square[0], square, square, jnp.zeros_like(basis))


def _count_leaf(moments: Moments, z: jax.Array, z_grad: jax.Array) -> Moments:
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


def _measure(moments: Moments, previous: Reference) -> Reference:
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
    measured = Reference(moments.basis @ directions, loc, jnp.sqrt(variances))
    sound = jnp.all(jnp.isfinite(measured.basis)) & jnp.all(jnp.isfinite(loc)) & jnp.all(variances > 0)
    return select(sound, measured, previous)


def _roots(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Square root of a symmetric positive matrix, and its inverse."""
    values, vectors = jnp.linalg.eigh(matrix)
    scales = jnp.sqrt(values)
    return (vectors * scales) @ vectors.T, (vectors / scales) @ vectors.T
