"""Gaussian surrogates of other likelihoods, by which the readout of classes and counts can be repriorised."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.distributions import Distribution

from numpyro_wide._checks import (
    as_floats,
    check_key,
    check_known,
    check_names_known,
    check_no_nan,
    check_one_of,
    check_positive,
    whole_number,
)
from numpyro_wide._compile import TracedProgram, combine, partition
from numpyro_wide._traces import Sites, latent_sites, refuse_subsampled, run_model
from numpyro_wide.machine import double_precision
from numpyro_wide.readout._model import ReadoutModel, normal_parameters
from numpyro_wide.readout._repriorise import Surrogate
from numpyro_wide.wide_limit._likelihoods import (
    LIKELIHOODS,
    NUM_QUADRATURE,
    Likelihood,
    Nodes,
    StudentT,
    logit_basis,
    quadrature,
)
from numpyro_wide.wide_limit._observations import FunctionLikelihood, Observations, checked_kernel
from numpyro_wide.wide_limit._variational import VariationalFit


def surrogate_targets(
    observations: ArrayLike,
    likelihood: Literal["categorical", "bernoulli", "poisson"],
    *,
    num_classes: int | None = None,
    contrasts: bool = False,
    noise_scale: ArrayLike | None = None,
) -> Surrogate:
    r"""Make a quick Gaussian surrogate, targets and noise, of classes or counts, for ``repriorise``.

    The repriorisation map is a bijection, whatever targets and noise it is built from: the posterior stays exact
    (Hron 2022, App. F), and a good choice makes $\phi$ close to N(0, I). This one takes the likelihood of the function
    value $f$ for a Gaussian $N(t; f, s^2)$ with the same first and second derivative:

    - "categorical", softmax of $k$ logits, at $f = 0$, where the classes are alike: $s^2 = k$ and
      $t = k\,(\text{one-hot} - 1/k)$, the one-hot code minus its mean, in units of the logits;
    - "bernoulli", one logit, at $f = 0$: $s^2 = 4$ and $t = 4\,(y - \tfrac12)$;
    - "poisson", the log of the rate, near its mode at $f = \log(y + \tfrac12)$: $s^2 = 1/(y + \tfrac12)$, one
      for each observation, and $t = f - s^2/2$.

    It needs the observations alone. :func:`fitted_surrogate`, fitted before the chain to the infinite-width posterior,
    costs no more in a gradient, and predictions of classifiers mix faster with it.

    A bare one-hot code minus its mean with a small noise treats the labels as far more informative than they are, and
    can mix more slowly than the plain model.

    Softmax does not change when all logits move together, which a Gaussian for all $k$ of them does not know. A model
    whose readout gives the $k - 1$ coordinates of the logits in the basis of
    :func:`~numpyro_wide.surrogates.class_contrasts` leaves that direction out, has the same distribution over class
    probabilities, and suits the map better: use ``contrasts=True`` for it.

    Args:
        observations: class labels (n,), from 0; outcomes 0 or 1, (n,) or (n, k); counts (n,) or (n, k).
        likelihood: name of the likelihood, whose logits or log rates must be ``features @ readout`` up to terms without
            the readout, which should be subtracted from the targets if they are known.
        num_classes: number of classes $k$ of a categorical.
        contrasts: whether ``features @ readout`` are a categorical's logits in the basis of
            :func:`~numpyro_wide.surrogates.class_contrasts`.
        noise_scale: standard deviation $s$ instead of the above, a number or an array that broadcasts against the
            targets; those of a categorical or Bernoulli scale with its square.

    Returns:
        ``(targets, noise_scale)``: targets (n, k) for a categorical, or (n, k - 1) with contrasts, else of the shape of
        the observations; a number for the noise scale, and for counts one each.

    Raises:
        TypeError: for observations or a noise scale that are not real numbers.
        ValueError: for an unknown likelihood, without ``num_classes`` where it is needed, for observations that the
            likelihood cannot give, or a noise scale that is not positive or does not fit.

    Example:
        >>> from functools import partial
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_wide import repriorise, surrogate_targets
        >>> def model(x, labels=None):
        ...     hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 50]).to_event(2))
        ...     features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / 50**0.5)
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([50, 3]).to_event(2))
        ...     numpyro.sample("label", dist.Categorical(logits=features @ w).to_event(1), obs=labels)
        >>> surrogate = partial(surrogate_targets, likelihood="categorical", num_classes=3)
        >>> wrapped = repriorise(model, readout="w", features="features", targets="labels", surrogate=surrogate)
        >>> targets, noise_scale = surrogate_targets(jnp.array([2, 0]), "categorical", num_classes=3)
        >>> targets.tolist(), round(float(noise_scale) ** 2)
        ([[-1.0, -1.0, 2.0], [2.0, -1.0, -1.0]], 3)
    """
    quick: dict[str, Any] = {name: kind.quick for name, kind in LIKELIHOODS.items() if kind.quick}
    check_one_of("likelihood", likelihood, quick)
    if (num_classes is None) == (likelihood == "categorical"):
        raise ValueError(f"num_classes belongs to a categorical likelihood, but is {num_classes!r} for {likelihood!r}.")
    if contrasts and likelihood != "categorical":
        raise ValueError(f"contrasts belong to a categorical likelihood, but it is {likelihood!r}; drop them.")
    kind, values = LIKELIHOODS[likelihood], jnp.asarray(observations)
    check_no_nan("observations", values)
    parameters: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    kind.check_parameters(parameters)
    kind.check_observed(values, parameters)
    if likelihood != "categorical":
        (values,) = as_floats(values)
    if contrasts and num_classes is not None:
        parameters["basis"] = class_contrasts(num_classes)
    if noise_scale is not None:
        check_no_nan("noise_scale", noise_scale)
        check_positive("noise_scale", noise_scale)
        shape = values.shape if num_classes is None else (len(values), num_classes - contrasts)
        _check_fits(np.shape(noise_scale), shape)
    return Surrogate(*quick[likelihood](values, noise_scale, **parameters))


def _check_fits(given: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Refuse a noise scale that does not broadcast against the targets, or has more entries than these."""
    try:
        fits = np.broadcast_shapes(given, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"noise_scale must be a number or broadcast against the targets, {shape}, but has {given}.")


def class_contrasts(num_classes: int) -> Array:
    r"""Return an orthonormal basis of the logits that sum to 0: Helmert's contrasts.

    With a readout of shape (d, k - 1) and its prior N(0, I), ``features @ readout @ class_contrasts(k).T`` are logits
    that give the same distribution over class probabilities as those of a readout of shape (d, k).

    Args:
        num_classes: number of classes $k$, at least 2.

    Returns:
        matrix (k, k - 1), whose columns are orthonormal and each sum to 0.

    Raises:
        ValueError: if there are fewer than two classes.

    Example:
        >>> from numpyro_wide.wide_limit._surrogates import class_contrasts
        >>> class_contrasts(2).tolist()
        [[0.71], [-0.71]]
    """
    if num_classes < 2:
        raise ValueError(f"contrasts need at least two classes, but num_classes is {num_classes}.")
    return jnp.asarray(logit_basis(num_classes, contrasts=True), jnp.result_type(float))


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


def mean_kernel(
    rng_key: Array,
    model: Callable,
    features: str,
    *model_args: Any,
    num_draws: int = 20,
    readout: str | None = None,
    samples: Mapping[str, ArrayLike] | None = None,
    **model_kwargs: Any,
) -> np.ndarray:
    r"""Average $\Psi \Psi^\top$ over prior draws, an estimate of the wide limit's kernel for :func:`fitted_surrogate`.

    As the width grows $\Psi \Psi^\top$ is the same for all draws of the hidden weights (Mathematics, :eq:`gap`): the
    kernel of the network's Gaussian process. Any model of any architecture will do here; for a fully connected network
    ``wide_limit.fcn_kernel(...)(x)[0]`` has the kernel in closed form.

    Args:
        rng_key: a PRNG key.
        model: the model, repriorised or collapsed or neither, as it is now: what it takes from outside, such as a
            global, may change between calls.
        features: name of the site that holds what the readout multiplies, (n, d).
        *model_args: arguments of the model; observations do not matter.
        num_draws: number of draws from the prior; with ``samples``, how many of them are taken, evenly spaced, if there
            are more.
        readout: name of the readout's site, whose prior variance is multiplied in, one a weight: needed where that is
            not 1. Of variances that differ over outputs the mean is taken.
        samples: draws of sites, (draw, ...), such as ``mcmc.get_samples()`` of a pilot run, to take instead of the
            prior: for a second fit where scales are latent. Sites that are not in it come from the prior.
        **model_kwargs: keyword arguments of the model.

    Returns:
        kernel (n, n), in double precision, NumPy's.

    Raises:
        TypeError: if ``rng_key`` is not a PRNG key, or under jit, where numbers are not known.
        ValueError: if the model lacks the site, it is not a matrix, the features are not finite, the readout's prior is
            not Normal, a plate is subsampled, or the samples do not all have as many draws.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_wide import mean_kernel
        >>> def model(x, labels=None):
        ...     hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 50]).to_event(2))
        ...     features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / 50**0.5)
        ...     w = numpyro.sample("w", dist.Normal(0, 2).expand([50]).to_event(1))
        ...     numpyro.sample("label", dist.Bernoulli(logits=features @ w).to_event(1), obs=labels)
        >>> x = jnp.array([[-1.0], [0.5], [1.0]])
        >>> mean_kernel(jax.random.key(0), model, "features", x, readout="w").shape
        (3, 3)
    """
    order = "mean_kernel(rng_key, model, features, x)"
    check_key("rng_key", rng_key, order)
    check_known("mean_kernel gives numbers")
    model = model.fn if isinstance(model, ReadoutModel) else model
    count = whole_number("num_draws", num_draws, order=order)
    given = {} if samples is None else _chosen(samples, count)
    count = len(next(iter(given.values()))) if given else count
    arrays, rest = partition((model_args, model_kwargs))
    of_draw = partial(_scaled_features, model, (features, readout, rest))
    # Traced once for all draws of this call, and anew by the next: the model may have changed by then.
    program = TracedProgram(of_draw, rng_key, {name: draws[0] for name, draws in given.items()}, arrays)
    kernel: Any = 0.0
    for i, key in enumerate(random.split(rng_key, count)):
        values = {name: draws[i] for name, draws in given.items()}
        psi = np.asarray(program(key, values, arrays), float)
        if not np.isfinite(psi).all():
            raise ValueError(
                f"the features {features!r} must be finite, but those of a draw are not; check the inputs."
            )
        kernel = kernel + psi @ psi.T / count
    return kernel


def _chosen(samples: Mapping[str, ArrayLike], count: int) -> dict[str, np.ndarray]:
    """Return up to ``count`` draws, evenly spaced."""
    draws = {name: np.asarray(value) for name, value in samples.items()}
    lengths = {name: value.shape[:1] for name, value in draws.items()}
    if not draws or len(set(lengths.values())) != 1 or () in lengths.values() or (0,) in lengths.values():
        raise ValueError(
            f"samples must hold draws of sites, all with the same number of them in front, but their lengths are "
            f"{lengths}; take mcmc.get_samples()."
        )
    (total,) = next(iter(lengths.values()))
    rows = np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(int))
    return {name: value[rows] for name, value in draws.items()}


def _scaled_features(
    model: Callable, static: tuple[str, str | None, Any], key: Array, values: dict[str, Array], arrays: list[Array]
) -> Array:
    """Return the features of one draw, each column times the prior standard deviation of its weight."""
    features, readout, rest = static
    args, kwargs = combine(arrays, rest)
    sites = run_model(model, args, kwargs, values=values, rng_key=key)
    check_names_known("features", features, sites)
    for site in sites.values():
        if site["type"] == "plate":
            refuse_subsampled(site, "the kernel is that of all of them")
    psi = jnp.asarray(sites[features]["value"])
    if psi.ndim != 2:
        raise ValueError(f"the features {features!r} must have shape (n, d), but have {psi.shape}.")
    return psi if readout is None else psi * _prior_scale(sites, readout, psi.shape[1]).astype(psi.dtype)[None]


def _prior_scale(sites: Sites, readout: str, num_features: int) -> Array:
    """Return the prior standard deviation of each weight, (d,), the root of the mean variance over outputs."""
    latent = latent_sites(sites)
    check_names_known("readout", readout, latent, kind="latent site")
    fn = latent[readout]["fn"]
    if fn.shape()[:1] != (num_features,):
        raise ValueError(
            f"the readout {readout!r} must have {num_features} rows, as the features have columns, but has "
            f"the shape {fn.shape()}."
        )
    _, scale = normal_parameters(readout, "readout", fn)
    full = jnp.broadcast_to(scale, fn.shape()).reshape(num_features, -1)
    return jnp.sqrt(jnp.mean(full**2, axis=1))
