"""Models of Bayesian neural networks."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from flax import linen, nnx
from jax import Array
from jax.scipy.special import log_ndtr, ndtr, ndtri
from jax.typing import ArrayLike

from numpyro_wide._activations import Activation
from numpyro_wide._checks import (
    as_floats,
    check_finite,
    check_one_of,
    check_positive,
    is_known,
    is_tracing,
    listing,
    refuse_frames,
    whole_number,
)
from numpyro_wide._traces import unwrap, warn_of_prior_sizes
from numpyro_wide.linear_gaussian._problem import broadcasts
from numpyro_wide.linear_gaussian._row_blocks import RowFeatures, check_rows, first_block
from numpyro_wide.nn._additive import ADDITIVE_SCALES, AdditiveNetwork
from numpyro_wide.nn._layers import check_scale
from numpyro_wide.nn._networks import CNN, FCN, SCALES, WideResNet
from numpyro_wide.nn._random import by_row_blocks, is_module, random_network


def scale_site(name: str, prior: ArrayLike | dist.Distribution) -> ArrayLike:
    """Return a scale; for a prior, the deterministic image ``name`` of the N(0, 1) site ``name`` + "_base"."""
    if not isinstance(prior, dist.Distribution):
        return prior
    inner, shape = unwrap(prior), prior.shape()
    (base,) = as_floats(numpyro.sample(f"{name}_base", dist.Normal(0, 1).expand(shape).to_event(len(shape))))
    # JAX keeps NumPy's arrays in the precision of their first use.
    inner = jax.tree.map(lambda leaf: jnp.asarray(leaf, base.dtype), inner)
    return numpyro.deterministic(name, jnp.broadcast_to(IMAGES[type(inner)](inner, base), shape))


def check_prior(name: str, prior: dist.Distribution) -> None:
    """Refuse a scale's prior that is not in ``IMAGES``, or reaches below zero."""
    inner = unwrap(prior)
    check_one_of(f"the prior of {name}", type(inner).__name__, sorted(kind.__name__ for kind in IMAGES))
    # NumPyro checks other parameters, but allows uniforms on any interval.
    if isinstance(inner, dist.Uniform) and is_known(inner.low) and not np.all(np.asarray(inner.low) >= 0):
        raise ValueError(f"the prior of {name} must be one of positive numbers, but is uniform from {inner.low} on.")


def _half_normal(prior: dist.HalfNormal, z: Array) -> Array:
    return prior.scale * _by_tail(z, lambda p: jnp.sqrt(2.0) * jax.lax.erf_inv(p), lambda q: -ndtri(q / 2))


def _half_cauchy(prior: dist.HalfCauchy, z: Array) -> Array:
    z = jnp.minimum(z, 8.0)  # 1e15; beyond, its square leaves float32
    return prior.scale * _by_tail(z, lambda p: jnp.tan(jnp.pi / 2 * p), lambda q: 1 / jnp.tan(jnp.pi / 2 * q))


def _exponential(prior: dist.Exponential, z: Array) -> Array:
    # In the far tail only the logarithm is within float32.
    lower, upper = -jnp.log1p(-ndtr(jnp.minimum(z, 0.0))), -log_ndtr(-jnp.maximum(z, 0.0))
    return jnp.where(z < 0, lower, upper) / prior.rate


def _by_tail(z: Array, of_lower: Callable, of_upper: Callable) -> Array:
    """Return a quantile from the smaller tail probability, for its digits."""
    lower, upper = of_lower(ndtr(jnp.minimum(z, 0.0))), of_upper(ndtr(-jnp.clip(z, 0.0, 12.0)))
    return jnp.where(z < 0, lower, upper)


IMAGES: dict[type[dist.Distribution], Callable[[dist.Distribution, Array], Array]] = {
    dist.Exponential: _exponential,
    dist.HalfCauchy: _half_cauchy,
    dist.HalfNormal: _half_normal,
    dist.LogNormal: lambda prior, z: jnp.exp(prior.loc + prior.scale * z),
    dist.Uniform: lambda prior, z: prior.low + (prior.high - prior.low) * ndtr(z),
}


@dataclass(frozen=True, eq=False)
class NoiseNetwork:
    r"""Learnt noise by row, $\sigma_i = \ell\, e^{\tau g(x_i)}$ with a small network $g$: the ``noise`` of :func:`bnn`.

    The likelihood is Normal given $\sigma_i$ (Mathematics, :eq:`rows`, :eq:`learnt-noise`). Sites are "noise_level" and
    "noise_amplitude", with their "_base" sites, "noise.…", "noise.readout", and the deterministic "noise", (n,).

    Attributes:
        level: prior of $\ell$; or the median, in the units of the targets, of a log-normal prior with scale 1.
        amplitude: prior of $\tau$; or the scale of a half-normal prior.
        depth: number of hidden layers of $g$; 0 for a linear function.
        width: number of units in each.
        activation: as of :class:`FCN`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.handlers import seed, trace
        >>> from numpyro_wide.nn import FCN, NoiseNetwork, bnn
        >>> model = bnn(FCN(depth=1, width=50), num_outputs=None, noise=NoiseNetwork(level=0.1, depth=0))
        >>> sites = trace(seed(model, jax.random.key(0))).get_trace(jnp.ones((5, 3)))
        >>> sites["noise"]["value"].shape, sites["noise.readout"]["value"].shape
        ((5,), (3,))
    """

    level: ArrayLike | dist.Distribution
    amplitude: ArrayLike | dist.Distribution = 1.0
    depth: int = 1
    width: int = 16
    activation: Activation = "tanh"

    def __post_init__(self) -> None:
        for name in ("level", "amplitude"):
            value = getattr(self, name)
            _check_prior_or_positive(f"{name} of the noise", value)
            if shape := value.shape() if isinstance(value, dist.Distribution) else np.shape(value):
                raise ValueError(f"{name} of the noise must be one number, or its prior, but has shape {shape}.")

    def __call__(self, x: Array) -> Array:
        """Return the noise's standard deviation by row, (n,), for inputs (n, ...)."""
        level, amplitude = self.level, self.amplitude
        if not isinstance(level, dist.Distribution):
            level = dist.LogNormal(jnp.log(level), 1.0)
        if not isinstance(amplitude, dist.Distribution):
            amplitude = dist.HalfNormal(amplitude)
        level, amplitude = scale_site("noise_level", level), scale_site("noise_amplitude", amplitude)
        network = FCN(self.depth, self.width, self.activation, b_std=0.5**0.5)  # half of a unit's variance
        features = random_network("noise", network, x)(x)
        readout = numpyro.sample("noise.readout", dist.Normal(0, 1).expand((features.shape[1],)).to_event(1))
        with numpyro.plate("rows", jnp.shape(x)[0]):
            return numpyro.deterministic("noise", level * jnp.exp(amplitude * (features @ readout)))


def _check_prior_or_positive(name: str, value: ArrayLike | dist.Distribution) -> None:
    if isinstance(value, dist.Distribution):
        check_prior(name, value)
    else:
        check_finite(name, value)
        check_positive(name, value)


# Prior variances of the output without a warning.
LEAST_VARIANCE, LARGEST_VARIANCE = 1e-4, 1e3


# At one place each, so that NumPyro's several runs of a model warn once.
def warn_of_prior_size(
    features: Array | RowFeatures, readout: Any, readout_scale: ArrayLike, noise_scale: ArrayLike, y: ArrayLike | None
) -> None:
    """Warn where the output's prior variance is far from one, or from the targets'."""
    if np.ndim(readout_scale) or is_tracing():
        return
    rows = first_block(features)
    if not (is_known(rows) and is_known(readout_scale)):
        return
    variance = np.mean(np.sum(np.square(np.asarray(rows, float)), axis=1)) * np.square(np.asarray(readout_scale, float))
    if variance > 0 and not LEAST_VARIANCE <= variance <= LARGEST_VARIANCE:  # 0: inputs of 0
        warnings.warn(
            f"the prior variance of the network's output is about {variance:.2g}, far from the one of standardised "
            "targets: scale every layer by 1/sqrt(inputs), the features by 1/sqrt(width); standardise the inputs.",
            UserWarning,
            stacklevel=1,
        )
        return
    if y is None or not (is_known(y) and is_known(noise_scale)):
        return
    size = np.mean(np.square(np.asarray(y, float)))
    # A readout at zero has been integrated out, by a wrapper that compares as well.
    if readout is not None and is_known(readout) and np.any(readout):
        warn_of_prior_sizes({"y": (np.sqrt(variance), np.sqrt(size))})
    expected = max(variance, np.mean(np.square(np.asarray(noise_scale, float))))
    if expected > 0 and size > LARGEST_VARIANCE * expected:
        warnings.warn(
            f"the mean square of the targets is {size:.2g}, far above the prior's {expected:.2g}. "
            "Standardise the targets, or give their size as readout_scale and noise.",
            UserWarning,
            stacklevel=1,
        )


def bnn(
    features_net: linen.Module | nnx.Module | Callable,
    num_outputs: int | None,
    noise: ArrayLike | dist.Distribution | NoiseNetwork,
    *,
    scales: Mapping[str, ArrayLike | dist.Distribution] | None = None,
    readout_scale: ArrayLike = 1.0,
    block_size: int | str | None = None,
) -> Callable[..., None]:
    """Make a Bayesian neural network with Gaussian noise: ``model(x, y=None)``.

    Sites: "noise" and latent scales, deterministic, beside "noise_base" and so on, N(0, 1); "hidden.…"
    (:func:`random_network`); "features", (n, d); "readout", N(0, 1), (d,) or (d, k); and "y", in the plate "rows".

    Args:
        features_net: flax module of the readout's features (n, d), such as :class:`FCN`; or a function with sample
            sites.
        num_outputs: number of outputs k; None for targets (n,).
        noise: standard deviation, broadcast against the targets; its prior, log-normal, half-normal, half-Cauchy,
            exponential or uniform; or a :class:`NoiseNetwork`.
        scales: scales of a network of this package by name, such as "w_std": numbers, arrays, or priors as of noise.
        readout_scale: prior standard deviation of the readout, broadcast against it.
        block_size: rows at a time, or "auto", as of :func:`by_row_blocks`; None for all.

    Returns:
        Model; without ``y`` it predicts, or simulates from the prior.

    Warns:
        UserWarning: outside of jit, if the output's prior variance is far from one, or from the targets'.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import Predictive
        >>> from numpyro_wide.nn import FCN, bnn
        >>> model = bnn(FCN(depth=1, width=50), num_outputs=None, noise=0.1)
        >>> Predictive(model, num_samples=20)(jax.random.key(0), jnp.ones((3, 1)))["y"].shape
        (20, 3)
    """
    if num_outputs is not None:
        whole_number("num_outputs", num_outputs)
    check_finite("readout_scale", readout_scale)
    check_positive("readout_scale", readout_scale)
    if not isinstance(noise, NoiseNetwork):
        _check_prior_or_positive("noise", noise)
    if block_size is not None and not is_module(features_net):
        raise TypeError("only a flax module runs in blocks here; use by_row_blocks inside of a function of your own.")
    by_row_blocks(features_net, block_size)  # checks the size
    scales = _checked_scales(features_net, scales)
    model = partial(_bnn, features_net, num_outputs, noise, scales, readout_scale, block_size)
    vars(model)["is_scaled"] = _is_scaled(features_net)
    return model


def _bnn(
    features_net: Any,
    num_outputs: int | None,
    noise: ArrayLike | dist.Distribution | NoiseNetwork,
    scales: dict[str, ArrayLike | dist.Distribution],
    readout_scale: ArrayLike,
    block_size: int | str | None,
    x: Array,
    y: Array | None = None,
) -> None:
    """Run the model of :func:`bnn`."""
    refuse_frames((), {"x": x, "y": y})
    for name, value in (("x", x), ("y", y)):
        if value is not None:
            check_finite(name, value)
    if 0 in np.shape(x):
        raise ValueError(f"x must have a row and a column at least, but has shape {np.shape(x)}.")
    if isinstance(noise, NoiseNetwork):
        by_row = noise(x)
        noise_scale: ArrayLike = by_row if num_outputs is None else by_row[:, None]
    else:
        noise_scale = scale_site("noise", noise)
    if scales:
        features_net = features_net.clone(**{name: scale_site(name, prior) for name, prior in scales.items()})
    network = random_network("hidden", features_net, x) if is_module(features_net) else features_net
    if block_size is None:
        features = numpyro.deterministic("features", network(x))
        check_rows(jnp.shape(features), jnp.shape(x)[0])
    else:
        features = by_row_blocks(network, block_size, site="features")(x)
    if features.shape[1] == 1 and is_module(features_net):
        warnings.warn(
            "features_net gives a single feature, a network of one unit; leave out a module's last layer.",
            UserWarning,
            stacklevel=1,
        )
    outputs = () if num_outputs is None else (num_outputs,)
    readout_prior = dist.Normal(0, readout_scale).expand((features.shape[1], *outputs))
    readout = numpyro.sample("readout", readout_prior.to_event(1 + len(outputs)))
    is_latent = any(isinstance(prior, dist.Distribution) for prior in scales.values())  # one draw tells little
    compared = None if _is_scaled(features_net) else readout
    warn_of_prior_size(features, compared, readout_scale, noise_scale, None if is_latent else y)
    mean = features @ readout
    if y is not None and jnp.shape(y) != mean.shape:
        raise ValueError(
            f"y must have shape {mean.shape} for {features.shape[0]} rows and num_outputs={num_outputs}, but got "
            f"{jnp.shape(y)}."
        )
    if not broadcasts(np.shape(noise_scale), mean.shape):
        raise ValueError(
            f"noise must broadcast against the outputs {mean.shape}, but has shape {np.shape(noise_scale)}; by row it "
            "is (n,), or (n, 1) beside several outputs."
        )
    with numpyro.plate("rows", features.shape[0]):
        numpyro.sample("y", dist.Normal(mean, noise_scale).to_event(len(outputs)), obs=y)


def _is_scaled(features_net: object) -> bool:
    """Return whether a network has scales of its own."""
    return isinstance(features_net, AdditiveNetwork | FCN | CNN | WideResNet)


def _checked_scales(features_net: object, scales: Mapping | None) -> dict[str, ArrayLike | dist.Distribution]:
    """Return the scales of :func:`bnn` as a new dictionary."""
    scales = dict(scales or {})
    if not scales:
        return scales
    if not _is_scaled(features_net):
        raise TypeError(
            "scales are those of an FCN, CNN, WideResNet or AdditiveNetwork; give others sites in your own function."
        )
    names = ADDITIVE_SCALES if isinstance(features_net, AdditiveNetwork) else SCALES
    allowed = [name for name in names if hasattr(features_net, name)]
    if unknown := [name for name in scales if name not in allowed]:
        raise ValueError(
            f"scales must be among {listing(allowed)} of {type(features_net).__name__}, but got {listing(unknown)}."
        )
    for name, value in scales.items():
        if isinstance(value, dist.Distribution):
            check_prior(name, value)
        elif value is not None:
            check_scale(name, value)
    for bias, weights in (("b_std", "w_std"), ("readout_b_std", "readout_w_std")):
        weights_scale = scales.get(weights, getattr(features_net, weights, 1.0))
        if isinstance(scales.get(bias), dist.Distribution) and weights_scale is None:
            raise ValueError(
                f"{weights}=None needs biases of a known scale, but {bias} has a prior; give {weights} too, a number "
                "or its prior."
            )
    return scales
