"""The array functions of the room: arrays in, arrays out, each a method of the readout's problem."""

from jax import Array
from jax.typing import ArrayLike

from numpyro_wide.linear_gaussian._problem import ReadoutProblem


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
            current precision a $\lambda$ below $\epsilon \|\Psi\|_F^2$ would drown in the Gram matrix's rounding, so
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
        same_type=(phi,),
    )
    return problem.map(phi)


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
        same_type=(readout,),
    )
    return problem.inverse_map(readout)


def log_evidence(
    features: ArrayLike,
    targets: ArrayLike,
    noise_scale: ArrayLike,
    variant: str = "auto",
    *,
    prior_loc: ArrayLike = 0.0,
    prior_scale: ArrayLike = 1.0,
) -> Array:
    r"""Return the log density of the targets with the readout integrated out.

    $\log N(Y; \Psi\,\text{loc}, \Psi \operatorname{diag}(\text{scale}^2) \Psi^\top + \sigma^2 I)$, summed over the
    columns of $Y$ (Hron 2022, eq. 5, whose exponent lacks its minus sign; Mathematics, :eq:`evidence`). The derivative
    is in closed form (:eq:`gradient`), from the factor that is computed anyway; it costs one inverse of the smaller
    Gram matrix and works in forward and reverse mode.

    The quadratic form is evaluated as $\|Y - \Psi \mu\|^2 / \sigma^2 + \|\mu\|^2$ at the posterior mean $\mu$, its
    minimum, where errors of $\mu$ enter squared: differences between neighbouring states keep their digits in
    float32. The mean is refined once, so that large targets along the features keep their digits too. Below the
    rounding of the Gram matrix, $\sigma^2 < \epsilon \|\Psi\|_F^2$, float64 is needed: digits are lost, and from a
    tenth of that on the result is NaN. :meth:`ReadoutProblem.evidence_error` estimates how many nats rounding costs.

    Args:
        features: $\Psi$, shape (n, d).
        targets: $Y$, shape (n,) or (n, k).
        noise_scale: $\sigma$, positive; broadcasts against ``targets``.
        variant: "feature" works with (d, d) matrices, "data" and "data-cholesky" with (n, n) ones, through
            eigenvectors and Cholesky factors; "auto" takes "feature" if d ≤ n, else "data-cholesky". "data" has first
            derivatives only.
        prior_loc: mean of the readout's prior; broadcasts against the readout, (d,) or (d, k).
        prior_scale: standard deviation of the readout's prior; broadcasts against the readout.

    Returns:
        The log evidence, a scalar; NaN under ``jit`` where the noise is not positive.

    Raises:
        ValueError: if shapes do not fit, the noise is not positive, or the variant is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import linear_gaussian
        >>> linear_gaussian.log_evidence(jnp.zeros((2, 3)), jnp.zeros(2), noise_scale=1.0).round(4)  # -log(2π)
        Array(-1.8379, dtype=float32)
    """
    problem = ReadoutProblem.of(
        features, targets, noise_scale, variant=variant, prior_loc=prior_loc, prior_scale=prior_scale
    )
    return problem.log_evidence()


def readout_posterior(
    features: ArrayLike,
    targets: ArrayLike,
    noise_scale: ArrayLike,
    *,
    prior_loc: ArrayLike = 0.0,
    prior_scale: ArrayLike = 1.0,
) -> tuple[Array, Array]:
    r"""Return mean and covariance of the readout given the features and targets.

    $\Sigma = (I + \sigma^{-2} \Psi^\top \Psi)^{-1}$ and $\mu = \sigma^{-2} \Sigma \Psi^\top Y$ (Hron 2022, eq. 2;
    Mathematics, :eq:`posterior`) for a standard normal prior.

    Args:
        features: $\Psi$, shape (n, d).
        targets: $Y$, shape (n,) or (n, k).
        noise_scale: $\sigma$, positive; broadcasts against ``targets``.
        prior_loc: mean of the readout's prior; broadcasts against the readout, (d,) or (d, k).
        prior_scale: standard deviation of the readout's prior; broadcasts against the readout.

    Returns:
        The mean, (d,) or (d, k), and the covariance of one output's weights, (d, d); or (k, d, d) where noise or
        prior scale vary over outputs, whose covariances then differ. With d > n its error is that of the prior's
        variance times the rounding, 1e-7 in float32: smaller variances are lost, and eigenvalues may be as far below
        zero. Where they matter, use float64.

    Raises:
        ValueError: if shapes do not fit or the noise is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import linear_gaussian
        >>> features, targets = jnp.array([[1.0, 0.0], [0.0, 2.0]]), jnp.array([1.0, -1.0])
        >>> mean, covariance = linear_gaussian.readout_posterior(features, targets, noise_scale=1.0)
        >>> print(mean, jnp.diagonal(covariance))
        [ 0.5 -0.4] [0.5 0.2]
    """
    return ReadoutProblem.of(features, targets, noise_scale, prior_loc=prior_loc, prior_scale=prior_scale).posterior()
