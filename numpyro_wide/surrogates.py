"""Gaussian surrogates of other likelihoods, by which the readout of classes and counts can be repriorised."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike

from numpyro_wide._checks import (
    as_floats,
    check_key,
    check_known,
    check_names_known,
    check_no_nan,
    check_one_of,
    num_draws_of,
    whole_number,
)
from numpyro_wide._compile import run_program, split
from numpyro_wide._traces import Sites, latent_sites, refuse_subsampled, run_model
from numpyro_wide.linear_gaussian._problem import as_scale
from numpyro_wide.linear_gaussian._surrogate import Surrogate as Surrogate
from numpyro_wide.readout._model import ReadoutModel, normal_parameters
from numpyro_wide.wide_limit._likelihoods import LIKELIHOODS, logit_basis
from numpyro_wide.wide_limit._surrogates import fitted_surrogate as fitted_surrogate

__all__ = ["class_contrasts", "fitted_surrogate", "mean_kernel", "surrogate_targets"]


def surrogate_targets(
    observations: ArrayLike,
    likelihood: str,
    *,
    num_classes: int | None = None,
    contrasts: bool = False,
    noise_scale: ArrayLike | None = None,
) -> Surrogate:
    r"""Make a quick Gaussian surrogate, targets and noise, of classes or counts, for ``repriorise``.

    The posterior stays exact for any (Hron 2022, App. F). The Gaussian $N(t; f, s^2)$ has the first and second
    derivative of the likelihood at one function value $f$:

    - "categorical", $k$ logits, at $f = 0$: $s^2 = k$ and $t = k\,(\text{one-hot} - 1/k)$;
    - "bernoulli", one logit, at $f = 0$: $s^2 = 4$ and $t = 4\,(y - \tfrac12)$;
    - "poisson", log rate, at $f = \log(y + \tfrac12)$: $s^2 = 1/(y + \tfrac12)$ and $t = f - s^2/2$.

    :func:`fitted_surrogate` costs the same per gradient, and predictions of classifiers mix faster with it.

    Args:
        observations: class labels (n,), from 0; outcomes 0 or 1, or counts, (n,) or (n, k).
        likelihood: "categorical", "bernoulli" or "poisson", of function values ``features @ readout``; subtract known
            offsets from the targets.
        num_classes: number of classes $k$ of a categorical.
        contrasts: whether the logits are in the basis of :func:`~numpyro_wide.surrogates.class_contrasts`.
        noise_scale: standard deviation $s$ instead of the above; broadcasts against the targets.

    Returns:
        Targets (n, k) for a categorical, (n, k - 1) with contrasts, else of the observations' shape; and a number for
        the noise scale, for counts one each.

    Example:
        >>> from functools import partial
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import surrogate_targets
        >>> surrogate = partial(surrogate_targets, likelihood="categorical", num_classes=3)  # as repriorise takes it
        >>> targets, noise_scale = surrogate(jnp.array([2, 0]))
        >>> targets.tolist(), round(float(noise_scale) ** 2)
        ([[-1.0, -1.0, 2.0], [2.0, -1.0, -1.0]], 3)
    """
    check_one_of("likelihood", likelihood, ("bernoulli", "categorical", "poisson"))
    if (num_classes is None) == (likelihood == "categorical"):
        raise ValueError(f"num_classes belongs to a categorical likelihood, but is {num_classes!r} for {likelihood!r}.")
    if contrasts and likelihood != "categorical":
        raise ValueError(f"contrasts belong to a categorical likelihood, but it is {likelihood!r}; drop them.")
    kind, values = LIKELIHOODS[likelihood], jnp.asarray(observations)
    check_no_nan("observations", values)
    parameters: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    kind.check_parameters(parameters)
    kind.check_observed(values, parameters)
    default_scale: Any  # by the curvature
    center: Any = 0.0  # function value of the expansion
    if num_classes is not None:
        slope = jax.nn.one_hot(values, num_classes) - 1.0 / num_classes
        slope = slope @ class_contrasts(num_classes) if contrasts else slope
        default_scale = num_classes**0.5
    elif likelihood == "bernoulli":
        slope, default_scale = as_floats(values)[0] - 0.5, 2.0
    else:
        default_scale = (as_floats(values)[0] + 0.5) ** -0.5
        slope, center = jnp.full_like(default_scale, -0.5), -2 * jnp.log(default_scale)
    noise_scale = default_scale if noise_scale is None else noise_scale
    scale = jnp.asarray(as_scale("noise_scale", noise_scale, slope.shape, slope.dtype))
    return Surrogate(center + scale**2 * slope, scale)


def class_contrasts(num_classes: int) -> Array:
    """Return an orthonormal basis of the logits of k classes that sum to 0, (k, k - 1): Helmert's contrasts.

    With a readout of shape (d, k - 1), ``features @ readout @ class_contrasts(k).T`` are logits.

    Example:
        >>> from numpyro_wide.surrogates import class_contrasts
        >>> class_contrasts(2).tolist()
        [[0.71], [-0.71]]
    """
    whole_number("num_classes", num_classes, 2)
    return jnp.asarray(logit_basis(num_classes, contrasts=True), jnp.result_type(float))


def mean_kernel(
    rng_key: Array,
    model: Callable,
    features: str,
    *model_args: object,
    num_draws: int = 20,
    readout: str | None = None,
    samples: Mapping[str, ArrayLike] | None = None,
    **model_kwargs: object,
) -> np.ndarray:
    r"""Average $\Psi \Psi^\top$ over prior draws, an estimate of the wide limit's kernel for :func:`fitted_surrogate`.

    As the width grows it is the same for all draws (Mathematics, :eq:`gap`). ``wide_limit.kernel`` gives closed forms.
    The result is NumPy's, (n, n), in double precision.

    Args:
        rng_key: a PRNG key.
        model: the model, repriorised or collapsed or neither.
        features: name of the site that holds the features, (n, d).
        *model_args: arguments of the model; observations do not matter.
        num_draws: number of draws; of more ``samples`` evenly spaced ones are taken.
        readout: name of the readout's site, for a prior variance other than 1; averaged over outputs.
        samples: draws of sites, (draw, ...), such as ``mcmc.get_samples()`` of a pilot run, instead of the prior.
        **model_kwargs: keyword arguments of the model.

    Raises:
        ValueError: for infinite features, another prior than Normal, or a subsampled plate.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide import mean_kernel, nn
        >>> model = nn.bnn(nn.FCN(depth=1, width=50), num_outputs=None, noise=0.1)
        >>> mean_kernel(jax.random.key(0), model, "features", jnp.ones((3, 1)), readout="readout").shape
        (3, 3)
    """
    order = "mean_kernel(rng_key, model, features, x)"
    check_key("rng_key", rng_key, order)
    check_known("mean_kernel gives numbers")
    model = model.fn if isinstance(model, ReadoutModel) else model
    count = whole_number("num_draws", num_draws, order=order)
    fixed_draws: dict[str, np.ndarray] = {}
    if samples is not None:
        total = num_draws_of("samples", samples)
        rows = np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(int))
        fixed_draws = {name: np.asarray(draws)[rows] for name, draws in samples.items()}
        count = len(rows)
    arrays, rebuild = split((model_args, model_kwargs))

    def features_of_draw(key: Array, values: dict[str, Array], arrays: list[Array]) -> Array:
        args, kwargs = rebuild(arrays)
        return _scaled_features(run_model(model, args, kwargs, values=values, rng_key=key), features, readout)

    kernel: Any = 0.0
    for index, key in enumerate(random.split(rng_key, count)):
        values = {name: draws[index] for name, draws in fixed_draws.items()}
        psi = np.asarray(run_program(features_of_draw, key, values, arrays), float)
        if not np.isfinite(psi).all():
            raise ValueError(f"the features {features!r} must be finite, but those of a draw are not.")
        kernel = kernel + psi @ psi.T / count
    return kernel


def _scaled_features(sites: Sites, features: str, readout: str | None) -> Array:
    """Return the features, (n, d), times each weight's prior standard deviation, the root mean square over outputs."""
    check_names_known("features", features, sites)
    for site in sites.values():
        if site["type"] == "plate":
            refuse_subsampled(site, "the kernel is that of all of them")
    psi = jnp.asarray(sites[features]["value"])
    if psi.ndim != 2:
        raise ValueError(f"the features {features!r} must have shape (n, d), but have {psi.shape}.")
    if readout is None:
        return psi
    latent, num_features = latent_sites(sites), psi.shape[1]
    check_names_known("readout", readout, latent, kind="latent site")
    fn = latent[readout]["fn"]
    if fn.shape()[:1] != (num_features,):
        raise ValueError(f"the readout {readout!r} must have {num_features} rows, but has the shape {fn.shape()}.")
    _, scale = normal_parameters(readout, "readout", fn)
    full = jnp.broadcast_to(scale, fn.shape()).reshape(num_features, -1)
    return psi * jnp.sqrt(jnp.mean(full**2, axis=1)).astype(psi.dtype)[None]
