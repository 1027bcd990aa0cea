"""Surrogates fitted once, at the wide limit."""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from numpyro.distributions import Distribution

from numpyro_wide._checks import check_known, whole_number
from numpyro_wide.machine import double_precision
from numpyro_wide.readout.internal import Surrogate
from numpyro_wide.surrogates._arguments import checked_kernel
from numpyro_wide.surrogates._functions import FunctionLikelihood
from numpyro_wide.surrogates._likelihood import NUM_QUADRATURE, Likelihood, Nodes, quadrature
from numpyro_wide.surrogates._likelihoods import StudentT
from numpyro_wide.surrogates._observations import Observations
from numpyro_wide.surrogates._variational import VariationalFit

Name = Literal["bernoulli", "binomial", "categorical", "negative_binomial", "poisson", "student_t"]

_NUM_NORMALS = 128


def fitted_surrogate(
    observations: ArrayLike,
    likelihood: Name | Callable[[Any], Distribution] | Callable[[Any, Any], Any],
    kernel: ArrayLike,
    *,
    num_classes: int | None = None,
    contrasts: bool = False,
    total_count: ArrayLike | None = None,
    concentration: ArrayLike | None = None,
    df: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    offset: ArrayLike = 0.0,
    num_nodes: int | None = None,
    seed: int = 0,
) -> Surrogate:
    r"""Fit a Gaussian surrogate likelihood, targets and noise, at the wide limit, for ``repriorise``.

    Fitted once, before the chain: the Gaussian likelihood that gives the best Gaussian posterior of the function values
    $f$ under the prior $N(0, K)$ that they have in the wide limit (Mathematics, :eq:`sites`). The map by which it
    repriorises a readout is a bijection, so the posterior stays exact, and a gradient costs what it costs with
    :func:`surrogate_targets`; but this surrogate knows where the data take the function, and $\phi$ is closer to
    N(0, I).

    - "bernoulli" and "binomial": $f$ is the logit;
    - "poisson": $f$ is the log of the rate;
    - "negative_binomial": $f$ is the log of the mean, as NumPyro's ``NegativeBinomial2(exp(f), concentration)``;
    - "student_t": $f$ is the location. Its log density is not concave, so that mean curvatures may be negative: the
      weight is the mean of $(\nu + 1) / (\nu s^2 + (y - f)^2)$, the precision of its scale mixture given $f$, which is
      positive and discounts outliers;
    - "categorical": softmax of $k$ logits, all with one weight a row, so that they share a factorisation;
    - what the model holds: a function of function values, of the shape of the observations, to a NumPyro distribution,
      such as ``lambda f: dist.Bernoulli(logits=f)``, which JAX can differentiate twice. With ``num_classes`` it gets k
      function values a row, (n, k), such as logits, and each row has one weight. Where the log density is not concave
      its curvature counts as zero; what a ``mask`` hides has no weight;
    - a function $\log p(y \mid f)$ of one observation and its function value, with derivatives by JAX too.

    A latent dispersion, scale or degrees of freedom must be given as a number: for example its mean in a pilot run. A
    surrogate that is stale, since the chain moves that number or the scales of the network, is never wrong, but slower:
    fit it again with the pilot's numbers and :func:`mean_kernel` of its draws.

    Computed in double precision, whatever JAX is set to: ten to fifty factorisations of (n, n). Weights are held
    to where the float type that the chain runs in can tell the surrogate from no noise at all, as counts in the
    thousands would have it in single precision. There the likelihood's own sum of $y f - e^f$ loses digits too: use
    float64.

    Args:
        observations: class labels (n,), from 0; otherwise (n,), or (n, k) for as many independent outputs.
        likelihood: likelihood of the observations, by name or as a function; the function values must be ``features @
            readout`` up to the offset.
        kernel: $K$ (n, n), the covariance of the function values of an output a priori: :func:`mean_kernel` of the
            model, or ``wide_limit.fcn_kernel(...)(x)[0]``.
        num_classes: number of classes $k$ of a categorical, or of function values of a row of any likelihood that has
            several.
        contrasts: whether ``features @ readout`` are a categorical's logits in the basis of
            :func:`~numpyro_wide.surrogates.class_contrasts`.
        total_count: number of trials of a binomial, which may be zero; broadcasts against the observations, like those
            below.
        concentration: concentration $r$ of a negative binomial: its variance is $\mu + \mu^2 / r$ for a mean of $\mu$.
        df: degrees of freedom $\nu$ of Student's t.
        scale: scale $s$ of Student's t.
        offset: what the function values have besides ``features @ readout``, such as the log of an exposure; broadcasts
            against the observations, or against the (n, k) logits. Where the readout's prior has a mean it belongs
            to ``features @ readout``, not here.
        num_nodes: number of nodes of a quadrature where a row has one function value, and of normal draws where it has
            several. None for 32 nodes or 128 draws of a likelihood given as a function, 32 of Student's t, and
            closed forms and single integrals of the others.
        seed: seed of the normal draws.

    Returns:
        ``(targets, noise_scale)``, for ``repriorise(..., surrogate=...)``: of the shape of the observations; for a
        categorical (n, k), or (n, k - 1) with contrasts, and (n, 1).

    Raises:
        TypeError: under jit, grad or vmap, where numbers are not known, or for what does not hold real numbers.
        ValueError: for an unknown likelihood, a parameter that it lacks or does not have, observations that it cannot
            give, a function that is no likelihood of each row by itself, or a kernel that is not a symmetric, positive
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
    covariance = checked_kernel(kernel, len(observed.values))
    # A sum of w K_ii short of where the map takes the noise for lost in rounding, by what draws of features vary.
    most = 0.25 / float(jnp.finfo(jnp.result_type(float)).eps)
    with double_precision():
        fits = [
            VariationalFit(column, covariance, _nodes(column, num_nodes, seed)).fit(most)
            for column in observed.columns()
        ]
    targets = np.concatenate([fit.targets for fit in fits], axis=1)
    scales = np.stack([fit.weights for fit in fits], axis=1) ** -0.5
    if "num_classes" not in observed.parameters:
        targets, scales = (array.reshape(observed.values.shape) for array in (targets, scales))
    return Surrogate(*(jnp.asarray(array, jnp.result_type(float)) for array in (targets, scales)))


def _nodes(likelihood: Likelihood, num_nodes: int | None, seed: int) -> Nodes | None:
    """Return standard normals and their weights: Gauss-Hermite's for one function value a row, else draws.

    None for a likelihood that does better without, unless their number is given.
    """
    shape = likelihood.start.shape
    if num_nodes is not None:
        whole_number("num_nodes", num_nodes, 2)
    elif not isinstance(likelihood, FunctionLikelihood | StudentT):
        return None
    if shape[1] > 1:
        return _normals(num_nodes, shape, seed)
    return quadrature(NUM_QUADRATURE if num_nodes is None else num_nodes)


def _normals(num_nodes: int | None, shape: tuple[int, int], seed: int) -> Nodes:
    """Return normal draws in antithetic pairs, each coordinate's sample variance brought to one."""
    count = _NUM_NORMALS if num_nodes is None else num_nodes
    half = np.random.default_rng(seed).normal(size=(-(-count // 2), *shape))
    half /= np.sqrt(np.mean(half**2, axis=0))
    return np.concatenate([half, -half]), np.full(2 * len(half), 0.5 / len(half))
