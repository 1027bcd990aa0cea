"""Whole Bayesian networks as NumPyro models, in one line."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import check_finite, check_positive, kind_of, listing, refuse_frames, whole_number
from numpyro_wide._traces import IS_USUAL
from numpyro_wide.nn._convolutional import CNN, WideResNet
from numpyro_wide.nn._fully_connected import FCN, SCALES
from numpyro_wide.nn._latent_scales import check_prior, scale_site
from numpyro_wide.nn._noise import NoiseNetwork
from numpyro_wide.nn._prior_size import warn_of_prior_size
from numpyro_wide.nn._random import is_module, random_network
from numpyro_wide.nn._row_blocks import by_row_blocks
from numpyro_wide.nn._scales import check_real, check_scale


def bnn(
    features_net: Any,
    num_outputs: int | None,
    noise: ArrayLike | dist.Distribution | NoiseNetwork,
    *,
    scales: Mapping[str, ArrayLike | dist.Distribution] | None = None,
    readout_scale: ArrayLike = 1.0,
    block_size: int | str | None = None,
) -> Callable[..., None]:
    r"""Make a Bayesian neural network with Gaussian noise: ``model(x, y=None)``, ready for this package's handlers.

    Its sites, in their order: "noise" and the scales that are latent, each a deterministic site beside one called
    "noise_base" and so on, which is N(0, 1) a priori, like all other weights (of noise by row, those of
    :class:`NoiseNetwork`); "hidden.…", one standard normal site for each parameter of ``features_net``
    (:func:`random_network`), such as "hidden.hidden_0.kernel"; "features", (n, d); "readout", standard normal, (d, k),
    or (d,) without ``num_outputs``; and "y" in the plate "rows". So, in full::

        repriorise(model, readout="readout", features="features", targets="y", noise_scale=noise)  # latent: "noise"
        collapse_readout(model, readout="readout", features="features", observed="y")

    Args:
        features_net: a flax module, of linen or NNX, that gives the readout's features (n, d) for inputs, scales
            included, such as :class:`FCN`; or a function of the inputs that does so and has sample sites of its own.
        num_outputs: k, the number of outputs, or None for targets that are a vector (n,).
        noise: standard deviation of the noise, a number or an array that broadcasts against the targets; or its prior,
            log-normal, half-normal, half-Cauchy, exponential or uniform; or a :class:`NoiseNetwork`, for noise by row
            that depends on the inputs.
        scales: scales of ``features_net`` by name, instead of its own: "w_std", "b_std", "readout_w_std",
            "readout_b_std" and, for an :class:`FCN`, "input_scale"; numbers or arrays, such as those of
            :func:`~numpyro_wide.wide_limit.fit`, or their priors, of the kinds that the noise may have, with a batch of
            the scale's shape. ``features_net`` must then be one of this package's modules.
        readout_scale: standard deviation of the readout's prior, which broadcasts against it; for features without
            their scale, as in the standard parametrisation.
        block_size: number of rows of the inputs whose hidden units are held at a time, "auto", or None for all: see
            :func:`by_row_blocks`. With :func:`~numpyro_wide.collapse_readout` no more than a block of features is
            ever held. Unless it is None, ``features_net`` must be a module.

    Returns:
        The model; without ``y`` it predicts, or simulates from the prior.

    Raises:
        TypeError: if ``features_net`` is neither a module nor a function, a function is to run in blocks or have
            scales, ``scales`` is not a dictionary, or a scale or the noise is neither a prior nor real numbers; when
            the model runs, if ``x`` or ``y`` does not hold real numbers.
        ValueError: for a number of outputs or a block size below 1, noise or ``readout_scale`` that are not positive
            and finite, priors of numbers that may be negative, or scales that the module does not have; when the model
            runs, if ``x`` or ``y`` is not finite, the features are not a matrix with a row for each of the inputs',
            ``y`` has another shape than the outputs, or noise does not broadcast against them.

    Warns:
        UserWarning: when the model runs on numbers, as at the start of a chain, if the variance of its output under the
            prior of the readout is below 1e-4 or above 1e3, as with layers without their 1/√inputs; or if the mean
            square of ``y`` is above 1e3 times that and the noise's, where no scale is latent, as with targets that are
            not standardised. Whenever it runs, if a module gives a single feature, as with its last layer left in.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import Predictive
        >>> from numpyro_wide import repriorise, wide_limit_draws
        >>> from numpyro_wide.nn import FCN, bnn
        >>> model = bnn(FCN(depth=1, width=50), num_outputs=None, noise=0.1)
        >>> wrapped = repriorise(model, readout="readout", features="features", targets="y", noise_scale=0.1)
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> draws = wide_limit_draws(jax.random.key(0), wrapped, 20, x, jnp.sin(x[:, 0]))
        >>> Predictive(model, draws)(jax.random.key(1), jnp.zeros((3, 1)))["y"].shape
        (20, 3)
    """
    if not callable(features_net):
        raise TypeError(
            f"features_net must be a flax module or a function of the inputs, but is {kind_of(features_net)}."
        )
    if num_outputs is not None:
        whole_number("num_outputs", num_outputs)
    if isinstance(readout_scale, dist.Distribution):
        raise TypeError(
            "readout_scale must be numbers, but is a distribution; a latent scale of the readout is the network's: "
            'scales={"readout_w_std": ...}.'
        )
    _check_positive_numbers("readout_scale", readout_scale)
    if isinstance(noise, dist.Distribution):
        check_prior("noise", noise)
    elif isinstance(noise, type) and issubclass(noise, NoiseNetwork):
        raise TypeError("noise is the class NoiseNetwork itself; give one with its level, NoiseNetwork(level=0.1).")
    elif not isinstance(noise, NoiseNetwork):
        _check_positive_numbers("noise", noise)
    if block_size is not None and not is_module(features_net):
        raise TypeError("only a flax module runs in blocks here; use by_row_blocks inside of a function of your own.")
    by_row_blocks(features_net, block_size)  # refuses a wrong size now
    scales = _checked_scales(features_net, scales)
    return partial(_bnn, features_net, num_outputs, noise, scales, readout_scale, block_size)


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
    """Run the model that :func:`bnn` gives."""
    refuse_frames((), {"x": x, "y": y})
    for name, value in (("x", x), ("y", y)):
        if value is not None:
            check_finite(name, value)
    if 0 in np.shape(x):
        raise ValueError(f"x must have a row and a column at least, but has shape {np.shape(x)}.")
    noise_scale = _noise_scale(noise, num_outputs, x)
    if scales:
        features_net = features_net.clone(**{name: scale_site(name, prior) for name, prior in scales.items()})
    network = random_network("hidden", features_net, x) if is_module(features_net) else features_net
    if block_size is None:
        features = numpyro.deterministic("features", _matrix(network(x), x))
    else:
        features = by_row_blocks(network, block_size, site="features")(x)
    if features.shape[1] == 1 and is_module(features_net):
        warnings.warn(
            "features_net gives a single feature, which makes a network of one unit; leave out a module's last layer, "
            "which bnn adds as the readout.",
            UserWarning,
            stacklevel=2,
        )
    outputs = () if num_outputs is None else (num_outputs,)
    readout_prior = dist.Normal(0, readout_scale).expand((features.shape[1], *outputs))
    readout = numpyro.sample("readout", readout_prior.to_event(1 + len(outputs)))
    is_latent = any(isinstance(prior, dist.Distribution) for prior in scales.values())  # one draw of them tells little
    is_usual = warn_of_prior_size(features, readout_scale, noise_scale, None if is_latent else y)
    mean = features @ readout
    if y is not None and jnp.shape(y) != mean.shape:
        raise ValueError(
            f"y must have shape {mean.shape} for {features.shape[0]} rows and num_outputs={num_outputs}, but got "
            f"{jnp.shape(y)}."
        )
    if not _broadcasts(np.shape(noise_scale), mean.shape):
        raise ValueError(
            f"noise must broadcast against the outputs {mean.shape}, but has shape {np.shape(noise_scale)}; noise by "
            "row is (n,) for a vector of outputs and (n, 1) or (n, k) for a matrix."
        )
    with numpyro.plate("rows", features.shape[0]):
        likelihood = dist.Normal(mean, noise_scale).to_event(len(outputs))
        numpyro.sample("y", likelihood, obs=y, infer={IS_USUAL: is_usual})


def _noise_scale(noise: Any, num_outputs: int | None, x: Array) -> Any:
    """Return the noise's standard deviation, of a shape that broadcasts against the outputs."""
    if not isinstance(noise, NoiseNetwork):
        return scale_site("noise", noise)
    by_row = noise(x)
    return by_row if num_outputs is None else by_row[:, None]


def _checked_scales(features_net: Any, scales: Any) -> dict[str, ArrayLike | dist.Distribution]:
    """Return the scales that :func:`bnn` is given as a dictionary of their own."""
    if scales is not None and not isinstance(scales, Mapping):
        raise TypeError(f'scales must be a dictionary, such as {{"w_std": 1.0}}, or None, but is {kind_of(scales)}.')
    scales = dict(scales or {})
    if not scales:
        return scales
    if not isinstance(features_net, FCN | CNN | WideResNet):
        raise TypeError(
            "scales are those of an FCN, CNN or WideResNet, but features_net is of another kind; give them sites in a "
            "function of your own."
        )
    known = [name for name in SCALES if hasattr(features_net, name)]
    if unknown := [name for name in scales if name not in known]:
        raise ValueError(
            f"scales must be among {listing(known)} of {type(features_net).__name__}, but got {listing(unknown)}."
        )
    for name, value in scales.items():
        if isinstance(value, dist.Distribution):
            check_prior(name, value)
        elif value is not None:
            check_scale(name, value)
    for bias, weights in (("b_std", "w_std"), ("readout_b_std", "readout_w_std")):
        given = scales.get(weights, getattr(features_net, weights))
        if isinstance(scales.get(bias), dist.Distribution) and given is None:
            raise ValueError(
                f"{weights}=None keeps the variance at one for biases of a known scale, but {bias} has a prior; give "
                f"{weights} too, a number or its prior."
            )
    return scales


def _check_positive_numbers(name: str, value: Any) -> None:
    check_real(name, value)
    check_positive(name, value)


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Tell whether an array of a shape broadcasts to another shape."""
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def _matrix(features: Array, x: Array) -> Array:
    if jnp.ndim(features) != 2 or features.shape[0] != jnp.shape(x)[0]:
        raise ValueError(
            f"features_net must give a matrix (n, d) with a row for each of the {jnp.shape(x)[0]} inputs, but gave "
            f"shape {jnp.shape(features)}; leave out a module's last layer, which bnn adds as the readout, and pass a "
            "single input x as x[None]."
        )
    return features
