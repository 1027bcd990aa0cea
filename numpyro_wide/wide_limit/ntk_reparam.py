"""The NTK reparametrisation of the weights, a research baseline that the readout's own map has superseded."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_wide._checks import as_floats, check_no_nan, check_positive, whole_number
from numpyro_wide.wide_limit.empirical import Network, empirical_ntk


def ntk_map(
    f: Network,
    phi: Any,
    x: ArrayLike,
    targets: ArrayLike,
    regulariser: ArrayLike,
    *,
    rng_key: jax.Array,
    num_probes: int = 4,
    order: int = 2,
    block_size: int | None = None,
) -> tuple[Any, jax.Array]:
    r"""All weights moved by one Levenberg-Marquardt step towards the data (Hron 2022, Appendix E.2, eq. 10).

    θ = R(φ) = φ + Jᵀ (λI + J Jᵀ)⁻¹ (y − f_φ(x)), J the Jacobian of f in its parameters at φ. For φ ~ N(0, I) and a wide
    network, f_θ is a draw of the infinite ensemble that gradient descent trains (:func:`ntk_ensemble`), not of the
    posterior. The log-determinant is *approximate*, in four ways: two terms of the Jacobian of R are dropped (eq. 13),
    the logarithm is a truncated series, which diverges where a residual bends the network so much that
    ‖H‖ ≥ 1, and its traces are estimated with a few random vectors (eqs. 11 and 14). Chains that use it do
    not sample the posterior, even in the limit of infinite time. Nor is R one-to-one unless the network is wide and λ
    large: otherwise its determinant changes sign, and several φ make the same θ.

    Use :class:`~numpyro_wide.ReprioriseReadout` instead: it maps to the right limit, its log-determinant is exact, and
    its cost grows with the width of the last layer and not with the number of all parameters. This function is
    for comparisons with it and for research.

    Args:
        f: the network, f(params, x) -> (n,) or (n, k), with N(0, 1) priors on its parameters.
        phi: φ, a pytree of floating arrays, with P numbers in all.
        x: inputs, rows along the leading axis, (n, ...).
        targets: y, of the shape of the network's outputs.
        regulariser: λ, a positive number; the noise variance, unless tuned.
        rng_key: for the random vectors. Hold it fixed within a chain: then the approximate log-determinant is a
            function of φ with exact gradients.
        num_probes: number S of Rademacher vectors, each of P numbers; they are taken one after the other.
        order: number M of terms of the series.
        block_size: as in :func:`empirical_ntk`.

    Returns:
        θ, of the structure of ``phi``, and the estimate of log|det ∂θ/∂φ|, a scalar. It is
        nk log λ − log det(λI + JJᵀ), the determinant of the first factor of eq. 12, which the paper takes to be
        constant, plus the series for log|det(I + H)|, H = Σ_i r̃_i ∂²f_i with r̃ = (λI + JJᵀ)⁻¹ (y − f). For an f
        that is linear in its parameters the sum is exact.

    Raises:
        ValueError: if the targets have not the shape of the outputs or hold NaN, if λ is not positive, or if
            ``num_probes`` or ``order`` is not a positive whole number.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.wide_limit import ntk_map
        >>> linear = lambda w, x: x @ w
        >>> x, y = jnp.ones((1, 1)), jnp.ones(1)
        >>> to_weights = jax.jit(lambda phi: ntk_map(linear, phi, x, y, 1.0, rng_key=jax.random.key(0)))
        >>> theta, log_det = to_weights(jnp.zeros(1))
        >>> float(theta[0]), float(log_det)  # 1/2 and log 1/2
        (0.5, -0.693)
    """
    num_probes, order = whole_number("num_probes", num_probes), whole_number("order", order)
    x = jnp.asarray(x)
    targets, regulariser = as_floats(targets, regulariser)
    outputs, transpose = jax.vjp(lambda params: f(params, x), phi)
    _check(outputs, targets, regulariser)
    (kernel,) = as_floats(empirical_ntk(f, phi, x, block_size=block_size))
    if outputs.ndim == 2:
        kernel = jnp.moveaxis(kernel, 2, 1).reshape(outputs.size, outputs.size)
    factor = jnp.linalg.cholesky(kernel + regulariser * jnp.eye(outputs.size, dtype=kernel.dtype))
    residuals = (targets - outputs).reshape(-1)
    weights = jax.scipy.linalg.cho_solve((factor, True), residuals).reshape(outputs.shape).astype(outputs.dtype)  # r̃
    (step,) = transpose(weights)
    theta = jax.tree.map(jnp.add, phi, step)

    def curvature(vector: Any) -> Any:
        """H v, by forward over reverse: the weights r̃ are constants of this second derivative."""
        gradient = jax.grad(lambda params: jnp.sum(weights * f(params, x)))
        return jax.jvp(gradient, (phi,), (vector,))[1]

    projected = outputs.size * jnp.log(regulariser) - 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))
    return theta, projected + log_det_series(curvature, phi, rng_key, num_probes=num_probes, order=order)


def log_det_series(
    matvec: Callable[[Any], Any], like: Any, rng_key: jax.Array, *, num_probes: int, order: int
) -> jax.Array:
    """Estimate Σ_{j ≤ M} (−1)^(j+1) tr(A^j)/j ≈ log det(I + A) of a symmetric matrix (Hron 2022, eq. 11).

    Args:
        matvec: v ↦ Av on pytrees.
        like: a pytree of the shapes of v.
        rng_key: for the Rademacher vectors.
        num_probes: how many of them; they are taken one after the other, and recomputed for gradients.
        order: number of terms M; ⌈M/2⌉ products are enough, for s·A^(i + j)s = A^i s · A^j s.
    """
    leaves, structure = jax.tree.flatten(like)

    @jax.checkpoint
    def one_probe(key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, len(leaves))
        signs = [jax.random.rademacher(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
        powers = [jax.tree.unflatten(structure, signs)]
        for _ in range(math.ceil(order / 2)):
            powers.append(matvec(powers[-1]))
        terms = [_inner(powers[j // 2], powers[j - j // 2]) * (-1) ** (j + 1) / j for j in range(1, order + 1)]
        return sum(terms[1:], start=terms[0])

    return jnp.mean(jax.lax.map(one_probe, jax.random.split(rng_key, num_probes)))


def _inner(left: Any, right: Any) -> jax.Array:
    products = [jnp.sum(a * b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)]
    return sum(products[1:], start=products[0])


def _check(outputs: jax.Array, targets: jax.Array, regulariser: jax.Array) -> None:
    if targets.shape != outputs.shape:
        raise ValueError(f"targets must have the shape of the network's outputs, {outputs.shape}, got {targets.shape}.")
    check_no_nan("targets", targets)
    if regulariser.shape != ():
        raise ValueError(
            f"regulariser must be a number, such as the noise variance, but has shape {regulariser.shape}."
        )
    check_positive("regulariser", regulariser)
