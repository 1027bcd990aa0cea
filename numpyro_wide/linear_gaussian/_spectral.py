r"""Functions of a symmetric positive definite matrix whose derivatives do not divide by eigenvalue gaps.

Autodiff through an eigendecomposition $K = Q \Lambda Q^\top$ divides by $\Lambda_i - \Lambda_j$, which is zero
whenever n > d or rows repeat. The derivative of a matrix function itself is finite (Daleckii and Krein):
$\mathrm{d} f(K) = Q (F \circ Q^\top \mathrm{d}K\, Q) Q^\top$ with the divided differences
$F_{ij} = (f(\Lambda_i) - f(\Lambda_j)) / (\Lambda_i - \Lambda_j)$. For functions of $a = \sqrt{\Lambda_i}$,
$b = \sqrt{\Lambda_j}$ and $s = \sqrt\lambda$ the difference cancels by hand, and nothing is left to divide by zero.
"""

import jax
import jax.numpy as jnp
from jax import Array


@jax.custom_jvp
def posterior_root_functions(gram: Array, regulariser: Array) -> tuple[Array, Array, Array, Array]:
    r"""Return the functions of $K$ that the symmetric root needs.

    Args:
        gram: $K$, regulariser included, shape (n, n).
        regulariser: $\lambda$, scalar.

    Returns:
        $K^{-1}$, $(\sqrt{K} (\sqrt\lambda + \sqrt{K}))^{-1}$, $(\sqrt\lambda (\sqrt\lambda + \sqrt{K}))^{-1}$, each
        (n, n), and $\log\det(K / \lambda)$. First derivatives only: a second one would go through the
        eigenvectors.
    """
    return _evaluate(*_roots(gram, regulariser))


@posterior_root_functions.defjvp
def _posterior_root_functions_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[tuple[Array, Array, Array, Array], tuple[Array, Array, Array, Array]]:
    vectors, a, s = _roots(*primals)
    gram_dot, regulariser_dot = tangents
    s_dot = regulariser_dot / (2 * s)
    b = a[:, None]
    a_row = a[None, :]
    rotated = vectors.T @ gram_dot @ vectors

    def tangent(divided_difference: Array, partial_s: Array | None = None) -> Array:
        inner = divided_difference * rotated
        if partial_s is not None:
            inner += jnp.diag(partial_s * s_dot)
        return vectors @ inner @ vectors.T

    inverse_dot = tangent(-1 / (a_row * b) ** 2)
    shared = (s + a_row) * (s + b) * (a_row + b)
    shrink_dot = tangent(-(s + a_row + b) / (a_row * b * shared), -1 / (a * (s + a) ** 2))
    stretch_dot = tangent(-1 / (s * shared), -(2 * s + a) / (s * (s + a)) ** 2)
    log_det_dot = (jnp.diagonal(rotated) / a**2).sum() - a.size * regulariser_dot / s**2
    return _evaluate(vectors, a, s), (inverse_dot, shrink_dot, stretch_dot, log_det_dot)


def _roots(gram: Array, regulariser: Array) -> tuple[Array, Array, Array]:
    values, vectors = jnp.linalg.eigh(gram, symmetrize_input=False)
    # No eigenvalue of K is below the regulariser; rounding can put one there, or below zero.
    return vectors, jnp.sqrt(jnp.maximum(values, regulariser)), jnp.sqrt(regulariser)


def _evaluate(vectors: Array, a: Array, s: Array) -> tuple[Array, Array, Array, Array]:
    def function(values: Array) -> Array:
        return (vectors * values[None, :]) @ vectors.T

    return function(a**-2), function(1 / (a * (s + a))), function(1 / (s * (s + a))), 2 * jnp.log(a / s).sum()
