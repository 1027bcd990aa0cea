"""NTK reparametrisation of the weights (Hron et al. 2022, Appendix E.2), which the readout's own map has superseded."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide.wide_limit import empirical_ntk


def ntk_map(
    f: Callable[[Any, Array], Array],
    phi: Any,
    x: ArrayLike,
    targets: ArrayLike,
    regulariser: ArrayLike,
    *,
    rng_key: Array,
    num_probes: int = 4,
    order: int = 2,
    block_size: int | None = None,
) -> tuple[Any, Array]:
    r"""Move all weights by one Levenberg-Marquardt step towards the data (Hron 2022, eq. 10).

    θ = R(φ) = φ + Jᵀ (λI + J Jᵀ)⁻¹ (y − f_φ(x)), J the Jacobian of f in its parameters at φ. For φ ~ N(0, I) and a wide
    network, f_θ is a draw of the infinite ensemble that gradient descent trains, not of the posterior. The
    log-determinant is *approximate*, in four ways: two terms of the Jacobian of R are dropped (eq. 13), the logarithm
    is a truncated series, which diverges where a residual bends the network so much that ‖H‖ ≥ 1, and its traces are
    estimated with a few random vectors (eqs. 11 and 14). Chains that use it do not sample the posterior, even in the
    limit of infinite time. Nor is R one-to-one unless the network is wide and λ large: otherwise its determinant
    changes sign, and several φ make the same θ.

    Args:
        f: network with N(0, 1) priors on its parameters, f(params, x) -> (n,) or (n, k).
        phi: φ, a pytree of floating arrays, with P numbers in all.
        x: inputs, rows along the leading axis, (n, ...).
        targets: y, of the shape of the network's outputs.
        regulariser: λ, a positive number; the noise variance, unless tuned.
        rng_key: PRNG key of the random vectors. Held fixed within a chain, the approximate log-determinant is a
            function of φ with exact gradients.
        num_probes: number S of Rademacher vectors, each of P numbers; they are taken one after the other.
        order: number M of terms of the series.
        block_size: rows whose Jacobians are held at a time, as in ``empirical_ntk``.

    Returns:
        θ, of the structure of ``phi``, and the estimate of log|det ∂θ/∂φ|, a scalar. It is
        nk log λ − log det(λI + JJᵀ), the determinant of the first factor of eq. 12, which the paper takes to be
        constant, plus the series for log|det(I + H)|, H = Σ_i r̃_i ∂²f_i with r̃ = (λI + JJᵀ)⁻¹ (y − f). For an f
        that is linear in its parameters the sum is exact.
    """
    x, targets = jnp.asarray(x), jnp.asarray(targets)
    outputs, transpose = jax.vjp(lambda params: f(params, x), phi)
    kernel = empirical_ntk(f, phi, x, block_size=block_size)
    if outputs.ndim == 2:
        kernel = jnp.moveaxis(kernel, 2, 1).reshape(outputs.size, outputs.size)
    factor = jnp.linalg.cholesky(kernel + regulariser * jnp.eye(outputs.size, dtype=kernel.dtype))
    residuals = (targets - outputs).reshape(-1)
    weights = jax.scipy.linalg.cho_solve((factor, True), residuals).reshape(outputs.shape).astype(outputs.dtype)  # r̃
    (step,) = transpose(weights)
    theta = jax.tree.map(jnp.add, phi, step)

    def curvature(vector: Any) -> Any:
        """Return H v, by forward over reverse: the weights r̃ are constants of this second derivative."""
        gradient = jax.grad(lambda params: jnp.sum(weights * f(params, x)))
        return jax.jvp(gradient, (phi,), (vector,))[1]

    projected = outputs.size * jnp.log(regulariser) - 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))
    return theta, projected + log_det_series(curvature, phi, rng_key, num_probes=num_probes, order=order)


def log_det_series(matvec: Callable[[Any], Any], like: Any, rng_key: Array, *, num_probes: int, order: int) -> Array:
    """Estimate Σ_{j ≤ M} (−1)^(j+1) tr(A^j)/j ≈ log det(I + A) of a symmetric matrix (Hron 2022, eq. 11).

    Args:
        matvec: function v ↦ Av on pytrees.
        like: pytree of the shapes of v.
        rng_key: PRNG key of the Rademacher vectors.
        num_probes: number of these; they are taken one after the other, and recomputed for gradients.
        order: number of terms M; ⌈M/2⌉ products are enough, for s·A^(i + j)s = A^i s · A^j s.
    """
    leaves, structure = jax.tree.flatten(like)

    @jax.checkpoint
    def one_probe(key: Array) -> Array:
        keys = jax.random.split(key, len(leaves))
        signs = [jax.random.rademacher(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
        powers = [jax.tree.unflatten(structure, signs)]
        for _ in range(math.ceil(order / 2)):
            powers.append(matvec(powers[-1]))
        terms = [_inner(powers[j // 2], powers[j - j // 2]) * (-1) ** (j + 1) / j for j in range(1, order + 1)]
        return sum(terms[1:], start=terms[0])

    return jnp.mean(jax.lax.map(one_probe, jax.random.split(rng_key, num_probes)))


def _inner(left: Any, right: Any) -> Array:
    products = [jnp.sum(a * b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)]
    return sum(products[1:], start=products[0])
