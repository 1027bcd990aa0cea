"""Gaussian surrogates of other likelihoods, fitted at the wide limit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from numpyro.distributions import Distribution

from numpyro_wide._checks import check_finite, check_known
from numpyro_wide.linear_gaussian._surrogate import Surrogate
from numpyro_wide.machine import double_precision
from numpyro_wide.wide_limit._likelihoods import StudentT
from numpyro_wide.wide_limit._observations import Observations
from numpyro_wide.wide_limit._variational import VariationalFit

# Of the trace: what rounding leaves in a kernel in single precision.
_ROUNDING = 1e-5


def fitted_surrogate(
    observations: ArrayLike,
    likelihood: str | Callable[[Any], Distribution],
    kernel: ArrayLike,
    *,
    num_classes: int | None = None,
    contrasts: bool = False,
    total_count: ArrayLike | None = None,
    concentration: ArrayLike | None = None,
    df: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    offset: ArrayLike = 0.0,
) -> Surrogate:
    r"""Fit a Gaussian surrogate likelihood, targets and noise, at the wide limit, for ``repriorise``.

    Fitted once, before the chain: the Gaussian likelihood that gives the best Gaussian posterior of the function values
    $f$ under the prior $N(0, K)$ that they have in the wide limit (Mathematics, :eq:`sites`). The posterior of the
    repriorised model stays exact, a gradient costs as much as with :func:`~numpyro_wide.surrogate_targets`, and $\phi$
    is closer to N(0, I).

    - "bernoulli" and "binomial": $f$ is the logit;
    - "poisson": $f$ is the log of the rate;
    - "negative_binomial": $f$ is the log of the mean, as NumPyro's ``NegativeBinomial2(exp(f), concentration)``;
    - "student_t": $f$ is the location. Its log density is not concave: the weight is the mean of
      $(\nu + 1) / (\nu s^2 + (y - f)^2)$, the precision of its scale mixture given $f$, which discounts outliers;
    - "categorical": softmax of $k$ logits, all with one weight a row, so that they share a factorisation;
    - a function of function values, of the shape of the observations, to a NumPyro distribution, such as
      ``lambda f: dist.Bernoulli(logits=f)``, which JAX can differentiate twice. With ``num_classes`` it gets k
      function values a row, (n, k), such as logits, and each row has one weight. Where the log density is not concave
      its curvature counts as zero; what a ``mask`` hides has no weight.

    A latent dispersion, scale or degrees of freedom must be given as a number: for example its mean in a pilot run. A
    surrogate for other values of it, or of the network's scales, than the chain's is never wrong, but slower: fit it
    again with the pilot's numbers and :func:`~numpyro_wide.mean_kernel` of its draws.

    Computed in double precision, whatever JAX is set to: ten to fifty factorisations of (n, n). Weights are held
    to where the float type that the chain runs in can tell the surrogate from no noise at all, which counts in the
    thousands exceed in single precision. There the likelihood's own sum of $y f - e^f$ loses digits too: use float64.

    Args:
        observations: class labels (n,), from 0; otherwise (n,), or (n, k) for as many independent outputs.
        likelihood: one of the above; the function values must be ``features @ readout`` up to the offset.
        kernel: $K$ (n, n), the covariance of the function values of an output a priori:
            :func:`~numpyro_wide.mean_kernel` of the model, or ``wide_limit.fcn_kernel(...)(x)[0]``.
        num_classes: number of classes $k$ of a categorical, or of function values of a row of any likelihood that has
            several.
        contrasts: whether ``features @ readout`` are a categorical's logits in the basis of
            :func:`~numpyro_wide.surrogates.class_contrasts`.
        total_count: number of trials of a binomial, which may be zero; broadcasts against the observations, like those
            below.
        concentration: concentration $r$ of a negative binomial: its variance is $\mu + \mu^2 / r$ for a mean of $\mu$.
        df: degrees of freedom $\nu$ of Student's t.
        scale: scale $s$ of Student's t.
        offset: part of the function values besides ``features @ readout``, such as the log of an exposure; broadcasts
            against the observations, or against the (n, k) logits. Where the readout's prior has a mean it belongs
            to ``features @ readout``, not here.

    Returns:
        ``(targets, noise_scale)``, for ``repriorise(..., surrogate=...)``: of the shape of the observations; for a
        categorical (n, k), or (n, k - 1) with contrasts, and (n, 1).

    Raises:
        TypeError: under jit, grad or vmap, where numbers are not known.
        ValueError: for a parameter that the likelihood lacks or does not have, observations that it cannot give, a
            function that is no likelihood of each row by itself, or a kernel that is not a symmetric, positive
            semidefinite (n, n) matrix.

    Warns:
        RuntimeWarning: if the fit does not settle.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_wide import fitted_surrogate, mean_kernel, repriorise
        >>> def model(x, counts=None):
        ...     hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 50]).to_event(2))
        ...     features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / 50**0.5)
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([50]).to_event(1))
        ...     numpyro.sample("count", dist.Poisson(jnp.exp(features @ w)).to_event(1), obs=counts)
        >>> x, counts = jnp.array([[-1.0], [0.5], [1.0]]), jnp.array([0, 1, 3])
        >>> kernel = mean_kernel(jax.random.key(0), model, "features", x)
        >>> fitted = fitted_surrogate(counts, "poisson", kernel)
        >>> wrapped = repriorise(model, readout="w", features="features", targets="counts", surrogate=fitted)
        >>> fitted.targets.shape, fitted.noise_scale.shape
        ((3,), (3,))
    """
    remedy = "call it before, outside of the model too: repriorise(..., surrogate=fitted_surrogate(...))"
    check_known("fitted_surrogate fits once, to numbers", observations, kernel, remedy=remedy)
    given = {"num_classes": num_classes, "total_count": total_count, "concentration": concentration}
    given |= {"df": df, "scale": scale}
    observed = Observations.of(observations, likelihood, given, offset, contrasts)
    covariance = _checked_kernel(kernel, len(observed.values))
    # A sum of w K_ii short of where the map takes the noise for lost in rounding, by the spread of draws of features.
    most = 0.25 / float(jnp.finfo(jnp.result_type(float)).eps)
    with double_precision():
        columns = [
            replace(column, is_bound=False) if isinstance(column, StudentT) else column for column in observed.columns()
        ]
        fits = [VariationalFit(column, covariance).fit(most) for column in columns]
    targets = np.concatenate([fit.targets for fit in fits], axis=1)
    scales = np.stack([fit.weights for fit in fits], axis=1) ** -0.5
    if "num_classes" not in observed.parameters:
        targets, scales = (array.reshape(observed.values.shape) for array in (targets, scales))
    return Surrogate(*(jnp.asarray(array, jnp.result_type(float)) for array in (targets, scales)))


def _checked_kernel(kernel: ArrayLike, num_rows: int) -> np.ndarray:
    """Return the kernel in float64, exactly symmetric; refuse one that is not (n, n) and positive semidefinite."""
    check_finite("kernel", kernel)
    matrix = np.asarray(kernel, float)
    if matrix.shape != (num_rows, num_rows):
        raise ValueError(
            f"kernel must have shape {(num_rows, num_rows)}, a row and a column for each of the observations, but got "
            f"{matrix.shape}; take it at the inputs of the observations."
        )
    size = np.max(np.abs(matrix))
    if not size > 0:
        raise ValueError("kernel must not be zero everywhere; its diagonal holds the variances of function values.")
    asymmetry = np.max(np.abs(matrix - matrix.T))
    if asymmetry > _ROUNDING * size:
        raise ValueError(f"kernel must be symmetric, but differs from its transpose by up to {asymmetry:.3g}.")
    matrix = (matrix + matrix.T) / 2
    try:
        np.linalg.cholesky(matrix + _ROUNDING * np.trace(matrix) * np.eye(num_rows))
    except np.linalg.LinAlgError as error:
        raise ValueError(
            "kernel must be positive semidefinite, a matrix of covariances, but has clearly negative eigenvalues; take "
            "mean_kernel, or the first result of wide_limit.fcn_kernel(...)(x)."
        ) from error
    # Rounding in single precision may leave negative eigenvalues, which large weights would bring out.
    is_single = np.asarray(kernel).dtype.itemsize < 8
    return matrix + is_single * np.finfo(np.float32).eps * np.trace(matrix) * np.eye(num_rows)
