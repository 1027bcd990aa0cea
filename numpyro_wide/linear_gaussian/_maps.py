"""The repriorisation map and its inverse (Hron 2022, eq. 3; Mathematics, :eq:`map`)."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import as_floats
from numpyro_wide.linear_gaussian._problem import (
    ReadoutProblem,
    Standardised,
    as_matrix,
    broadcast_like,
    for_each_output,
    resolved,
    standardise,
)


def readout_map(
    features: ArrayLike,
    targets: ArrayLike,
    phi: ArrayLike,
    noise_scale: ArrayLike,
    regulariser: ArrayLike | None = None,
    variant: str = "auto",
    *,
    prior_loc: ArrayLike = 0.0,
    prior_scale: ArrayLike = 1.0,
) -> tuple[Array, Array]:
    r"""Map a repriorised readout to readout weights.

    $W = \text{loc} + \text{scale} \circ (\mu + A \phi)$ with $A A^\top = \Sigma = (I + \lambda^{-1} \Psi^\top
    \Psi)^{-1}$ and $\mu = \lambda^{-1} \Sigma \Psi^\top Y$ (Hron 2022, eqs. 2 and 3; Mathematics, :eq:`map`). With
    $\lambda = \sigma^2$, $\phi \sim N(0, I)$ makes $W$ a draw from the readout's posterior given the features. As
    $\lambda \to \infty$ the map tends to $\text{loc} + \text{scale} \circ \phi$, the standard parametrisation.

    Args:
        features: $\Psi$, shape (n, d).
        targets: $Y$, shape (n,) or (n, k).
        phi: $\phi$, shape (d,) or (d, k).
        noise_scale: $\sigma$, positive; broadcasts against ``targets``.
        regulariser: $\lambda$, positive; broadcasts against ``targets``. ``noise_scale ** 2`` by default. In the
            precision at hand a $\lambda$ below $\epsilon \|\Psi\|_F^2$ would drown in the Gram matrix's rounding, so
            that a larger one takes its place: the map stays a bijection with the log-determinant returned.
        variant: "feature" (Cholesky of a (d, d) matrix), "data" (eigenvectors of an (n, n) matrix),
            "data-cholesky" (Cholesky of an (n, n) matrix), or "auto": "feature" if d ≤ n, else "data-cholesky".
            They differ by a rotation of $\phi$ (Mathematics, :eq:`feature`, :eq:`data` and :eq:`data-cholesky`). "data"
            has first derivatives only.
        prior_loc: mean of the readout's prior; broadcasts against ``phi``.
        prior_scale: standard deviation of the readout's prior; broadcasts against ``phi``.

    Returns:
        The readout, with the shape of ``phi``, and $\log|\det \partial W / \partial \phi|$, a scalar.

    Raises:
        ValueError: if shapes do not fit, the noise or regulariser is not positive, or the variant is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import linear_gaussian
        >>> features, targets = jnp.array([[1.0, 0.0], [0.0, 2.0]]), jnp.array([1.0, -1.0])
        >>> readout, log_abs_det = linear_gaussian.readout_map(features, targets, jnp.zeros(2), noise_scale=1.0)
        >>> print(readout, log_abs_det.round(3))  # with φ = 0 the readout is the posterior mean
        [ 0.5 -0.4] -1.151
    """
    problem = ReadoutProblem.of(
        features,
        targets,
        noise_scale,
        regulariser,
        variant,
        prior_loc=prior_loc,
        prior_scale=prior_scale,
        readout=("phi", np.shape(phi)),
        same_type=(phi,),
    )
    return map_readout(problem, *as_floats(phi, dtype=problem.features.dtype))


def readout_inverse_map(
    features: ArrayLike,
    targets: ArrayLike,
    readout: ArrayLike,
    noise_scale: ArrayLike,
    regulariser: ArrayLike | None = None,
    variant: str = "auto",
    *,
    prior_loc: ArrayLike = 0.0,
    prior_scale: ArrayLike = 1.0,
) -> Array:
    r"""Map readout weights to the repriorised readout, $\phi = A^{-1} (W - \mu)$.

    The inverse of :func:`readout_map` for the same arguments, which are described there.

    Args:
        features: $\Psi$, shape (n, d).
        targets: $Y$, shape (n,) or (n, k).
        readout: $W$, shape (d,) or (d, k).
        noise_scale: $\sigma$, positive; broadcasts against ``targets``.
        regulariser: $\lambda$, positive; ``noise_scale ** 2`` by default.
        variant: "feature", "data", "data-cholesky" or "auto".
        prior_loc: mean of the readout's prior; broadcasts against ``readout``.
        prior_scale: standard deviation of the readout's prior; broadcasts against ``readout``.

    Returns:
        $\phi$, with the shape of ``readout``.

    Raises:
        ValueError: if shapes do not fit, the noise or regulariser is not positive, or the variant is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import linear_gaussian
        >>> features, targets = jnp.array([[1.0, 0.0], [0.0, 2.0]]), jnp.array([1.0, -1.0])
        >>> readout = jnp.array([0.0, 0.0])  # the posterior mean is [0.5, -0.4]
        >>> linear_gaussian.readout_inverse_map(features, targets, readout, noise_scale=1.0).tolist()
        [-0.707, 0.894]
    """
    problem = ReadoutProblem.of(
        features,
        targets,
        noise_scale,
        regulariser,
        variant,
        prior_loc=prior_loc,
        prior_scale=prior_scale,
        readout=("readout", np.shape(readout)),
        same_type=(readout,),
    )
    return unmap_readout(problem, *as_floats(readout, dtype=problem.features.dtype))


def map_readout(problem: ReadoutProblem, phi: Array, *, is_limited: bool = True) -> tuple[Array, Array]:
    """What stands behind :func:`readout_map`; without its lower limit on λ if ``is_limited`` is False."""

    def core(features: Array, targets: Array, regulariser: Array, phi: Array) -> tuple[Array, Array]:
        readout, log_abs_det = problem.root(features, regulariser).forward(targets, phi)
        return readout, log_abs_det * targets.shape[1]

    standard = standardise(problem)
    whitened, log_abs_det = for_each_output(
        core, _representable(standard) if is_limited else resolved(standard), as_matrix(phi)
    )
    scale = broadcast_like(problem.prior_scale, phi)
    readout = broadcast_like(problem.prior_loc, phi) + scale * whitened.reshape(phi.shape)
    return readout, log_abs_det.sum() + jnp.log(scale).sum()


def unmap_readout(problem: ReadoutProblem, readout: Array) -> Array:
    """What stands behind :func:`readout_inverse_map`."""

    def core(features: Array, targets: Array, regulariser: Array, readout: Array) -> tuple[Array, tuple[()]]:
        return problem.root(features, regulariser).inverse(targets, readout), ()

    whitened = (readout - broadcast_like(problem.prior_loc, readout)) / broadcast_like(problem.prior_scale, readout)
    phi, _ = for_each_output(core, _representable(standardise(problem)), as_matrix(whitened))
    return phi.reshape(readout.shape)


def _representable(standard: Standardised) -> Standardised:
    """Any positive regulariser gives a bijection, so take one that survives the rounding of the Gram matrix."""
    features = standard.features
    floor = jnp.finfo(features.dtype).eps * jnp.sum(features**2, axis=(-2, -1))
    return standard._replace(regulariser=jnp.maximum(standard.regulariser, floor))
