"""Gaussian stand-ins fitted once, at the wide limit."""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from scipy.linalg import helmert

from numpyro_wide._checks import is_known, is_tracing, whole_number
from numpyro_wide._machine import double_precision
from numpyro_wide.readout._site_likelihoods import (
    SiteLikelihood,
    categorical,
    from_function,
    logistic,
    poisson,
    student_t,
)
from numpyro_wide.readout._surrogate import Surrogate
from numpyro_wide.readout._surrogate_arguments import (
    broadcast,
    checked_kernel,
    checked_observations,
    checked_parameters,
)
from numpyro_wide.readout._variational_sites import VariationalSites

Likelihood = Literal["bernoulli", "binomial", "categorical", "negative_binomial", "poisson", "student_t"]

Nodes = tuple[np.ndarray, np.ndarray]
Arrays = tuple[np.ndarray, np.ndarray]

_NUM_QUADRATURE, _NUM_NORMALS = 32, 128


def fitted_surrogate(
    observations: ArrayLike,
    likelihood: Likelihood | Callable[[Any, Any], Any],
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
    r"""Gaussian targets and noise to repriorise a readout by, fitted to the likelihood at the wide limit.

    Fitted once, before the chain: the Gaussian sites of the variational posterior of the function values $f$ under the
    prior $N(0, K)$ that they have in the wide limit (Mathematics, :eq:`sites`). The map by which they repriorise a
    readout is a bijection, so the posterior stays exact, and a gradient costs what it costs with
    :func:`surrogate_targets`; but the stand-in knows where the data take the function, and $\phi$ is closer to N(0, I).

    - "bernoulli" and "binomial": $f$ is the logit;
    - "poisson": $f$ is the log of the rate;
    - "negative_binomial": $f$ is the log of the mean, as NumPyro's ``NegativeBinomial2(exp(f), concentration)``;
    - "student_t": $f$ is the location. Its log density is not concave, so that mean curvatures may be negative: the
      weight is the mean of $(\nu + 1) / (\nu s^2 + (y - f)^2)$, the precision of its scale mixture given $f$, which is
      positive and discounts outliers;
    - "categorical": softmax of $k$ logits, all with one weight a row, so that they share a factorisation;
    - a function $\log p(y \mid f)$ of one observation and its function value, which JAX can differentiate twice. Where
      it is not concave its curvature counts as zero.

    A latent dispersion, scale or degrees of freedom must be given as a number: its mean in a pilot run, say. Sites that
    are stale, since the chain moves that number or the scales of the network, are never wrong, but slower: fit them
    again with the pilot's numbers and :func:`mean_kernel` of its draws.

    Computed in double precision, whatever JAX is set to: ten to fifty factorisations of (n, n). Weights are held
    to where the float type that the chain runs in can tell the sites from no noise at all, as counts in the thousands
    would have it in single precision. There the likelihood's own sum of $y f - e^f$ loses digits too: use float64.

    Args:
        observations: class labels (n,), from 0; otherwise (n,), or (n, k) for as many independent outputs.
        likelihood: of what, by name or as a function; the function values must be ``features @ readout`` up to the
            offset.
        kernel: $K$ (n, n), the covariance of the function values of an output a priori: :func:`mean_kernel` of the
            model, or ``wide_limit.fcn_kernel(...)(x)[0]``.
        num_classes: number of classes $k$ of a categorical.
        contrasts: whether ``features @ readout`` are a categorical's logits in the basis of :func:`class_contrasts`.
        total_count: number of trials of a binomial; broadcasts against the observations, like those below.
        concentration: of a negative binomial, $r$: the variance is $\mu + \mu^2 / r$ for a mean of $\mu$.
        df: degrees of freedom $\nu$ of Student's t.
        scale: $s$ of Student's t.
        offset: what the function values have besides ``features @ readout``, the log of an exposure say; broadcasts
            against the observations, or against the (n, k) logits. Where the readout's prior has a mean it belongs
            to ``features @ readout``, not here.
        num_nodes: of the quadrature for one function value, 32 by default; for a categorical, of normal draws, 128.
        seed: of the normal draws.

    Returns:
        ``(targets, noise_scale)``, for ``repriorise(..., surrogate=...)``: of the shape of the observations; for a
        categorical (n, k), or (n, k - 1) with contrasts, and (n, 1).

    Raises:
        TypeError: under jit, grad or vmap, where numbers are not known.
        ValueError: for an unknown likelihood, a parameter that it lacks or does not have, observations that it cannot
            give, or a kernel that is not a symmetric, positive semidefinite (n, n) matrix.

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
    if is_tracing() or not (is_known(observations) and is_known(kernel)):
        raise TypeError(
            "fitted_surrogate fits once, by numbers that are not known under jit, grad or vmap, nor inside of a model; "
            "call it before, and pass what it gives: repriorise(..., surrogate=fitted_surrogate(...))."
        )
    given = {"num_classes": num_classes, "total_count": total_count, "concentration": concentration}
    parameters = checked_parameters(likelihood, {**given, "df": df, "scale": scale})
    if contrasts and likelihood != "categorical":
        raise ValueError(f"contrasts belong to a categorical likelihood, but it is {likelihood!r}; drop them.")
    observed = checked_observations(observations, likelihood, parameters)
    covariance = checked_kernel(kernel, len(observed))
    most = _most_weight()
    if likelihood == "categorical":
        classes = int(np.asarray(parameters["num_classes"]))
        # As class_contrasts, in float64.
        basis = helmert(classes).T if contrasts else np.eye(classes)
        nodes = _normals(num_nodes, (len(observed), basis.shape[1]), seed)
        rows = categorical(observed.astype(int), basis, broadcast("offset", offset, (len(observed), classes)))
        targets, weights = VariationalSites(rows, covariance, *nodes).fit(most)
        scales = weights[:, None] ** -0.5
    else:
        options = {name: broadcast(name, value, observed.shape) for name, value in parameters.items()}
        options["offset"] = broadcast("offset", offset, observed.shape)
        targets, scales = _fit_columns(observed, likelihood, options, covariance, _quadrature(num_nodes), most)
    return Surrogate(*(jnp.asarray(array, jnp.result_type(float)) for array in (targets, scales)))


def _fit_columns(
    observed: np.ndarray, likelihood: Any, options: dict[str, np.ndarray], kernel: np.ndarray, nodes: Nodes, most: float
) -> Arrays:
    """Every output on its own; targets and noise scales of the shape of the observations."""
    columns = {name: value.reshape(len(observed), -1).T for name, value in options.items()}
    fits = []
    with double_precision():
        for i, column in enumerate(observed.reshape(len(observed), -1).T):
            of_column = {name: value[i] for name, value in columns.items()}
            offset = of_column.pop("offset")[:, None]
            rows = _by_name(likelihood, column, **of_column).shifted(offset)
            fits.append(VariationalSites(rows, kernel, *nodes).fit(most))
    targets = np.concatenate([sites.targets for sites in fits], axis=1)
    weights = np.stack([sites.weights for sites in fits], axis=1)
    return targets.reshape(observed.shape), weights.reshape(observed.shape) ** -0.5


def _by_name(likelihood: Any, observed: np.ndarray, **parameters: np.ndarray) -> SiteLikelihood:
    none, one = np.zeros_like(observed), np.ones_like(observed)
    match likelihood:
        case "bernoulli":
            return logistic(observed, one, none, none)
        case "binomial":
            return logistic(observed, parameters["total_count"], none, none)
        case "negative_binomial":
            size = parameters["concentration"]
            return logistic(observed, observed + size, np.log(observed + 0.5), np.log(size))
        case "poisson":
            return poisson(observed)
        case "student_t":
            return student_t(observed, **parameters)
    return from_function(likelihood, observed)


def _most_weight() -> float:
    """A sum of w K_ii short of where the map takes the noise for lost in rounding, by what draws of features vary."""
    return 0.25 / float(jnp.finfo(jnp.result_type(float)).eps)


def _quadrature(num_nodes: int | None) -> Nodes:
    """Gauss and Hermite's."""
    count = _NUM_QUADRATURE if num_nodes is None else whole_number("num_nodes", num_nodes, 2)
    nodes, shares = np.polynomial.hermite_e.hermegauss(count)
    return nodes[:, None, None], shares / np.sum(shares)


def _normals(num_nodes: int | None, shape: tuple[int, int], seed: int) -> Nodes:
    """Normal draws in antithetic pairs, each coordinate's sample variance brought to one."""
    count = _NUM_NORMALS if num_nodes is None else whole_number("num_nodes", num_nodes, 2)
    half = np.random.default_rng(seed).normal(size=(-(-count // 2), *shape))
    half /= np.sqrt(np.mean(half**2, axis=0))
    return np.concatenate([half, -half]), np.full(2 * len(half), 0.5 / len(half))
