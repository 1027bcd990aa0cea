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
from jax import Array
from jax.scipy.special import log_ndtr, ndtr, ndtri
from jax.typing import ArrayLike

from numpyro_wide._checks import (
    as_floats,
    check_finite,
    check_one_of,
    check_positive,
    is_known,
    kind_of,
    listing,
    refuse_frames,
    whole_number,
)
from numpyro_wide._traces import IS_USUAL
from numpyro_wide.linear_gaussian._row_blocks import RowFeatures
from numpyro_wide.nn._layers import Activation, activation_function, check_real, check_scale
from numpyro_wide.nn._networks import CNN, FCN, SCALES, WideResNet
from numpyro_wide.nn._random import by_row_blocks, is_module, random_network


def scale_site(name: str, prior: Any) -> Any:
    r"""Sample a scale by its prior: the site ``name`` + "_base" is N(0, 1), and ``name`` its image, deterministic.

    Args:
        name: name of the site.
        prior: distribution of one of the kinds in ``IMAGES``: for a log-normal one the image of z is
            $e^{\mu + \sigma z}$, for any other the quantile at $\Phi(z)$. What is not a distribution is itself the
            scale, and no site.

    Returns:
        The scale, of the prior's shape.

    Raises:
        ValueError: if the prior is of another kind, or not one of positive numbers.
    """
    if not isinstance(prior, dist.Distribution):
        return prior
    shape = prior.shape()
    image = _image(name, prior)
    base = numpyro.sample(f"{name}_base", dist.Normal(0, 1).expand(shape).to_event(len(shape)))
    return numpyro.deterministic(name, image(base))


def check_prior(name: str, prior: dist.Distribution) -> None:
    """Refuse a prior of a scale that is of another kind than those in ``IMAGES``, or reaches below zero.

    Args:
        name: name of the scale, for messages.
        prior: distribution, whose parameters may be traced and are then not looked at.

    Raises:
        ValueError: if the prior is of another kind, or one of numbers that may be negative.
    """
    inner = _without_shape(prior)
    kinds = sorted(kind.__name__ for kind in IMAGES)
    check_one_of(f"the prior of {name}", type(inner).__name__, kinds, also="(their quantiles are known in both tails)")
    # NumPyro has checked the parameters against their constraints; that of a uniform is any interval.
    if isinstance(inner, dist.Uniform) and is_known(inner.low) and not np.all(np.asarray(inner.low) >= 0):
        raise ValueError(
            f"the prior of {name} must be one of positive numbers, but is uniform from {inner.low} on; let it begin at "
            "0 or above."
        )


def _without_shape(prior: dist.Distribution) -> dist.Distribution:
    while isinstance(prior, dist.Independent | dist.ExpandedDistribution):
        prior = prior.base_dist
    return prior


def _image(name: str, prior: dist.Distribution) -> Callable[[Array], Array]:
    """Return the map from standard normal numbers to draws of the prior."""
    check_prior(name, prior)
    inner = _without_shape(prior)
    image = IMAGES[type(inner)]
    return lambda base: jnp.broadcast_to(image(inner, as_floats(base)[0]), prior.shape())


def _log_normal(prior: Any, z: Array) -> Array:
    return jnp.exp(prior.loc + prior.scale * z)


def _half_normal(prior: Any, z: Array) -> Array:
    return prior.scale * _by_tail(z, lambda p: jnp.sqrt(2.0) * jax.lax.erf_inv(p), lambda q: -ndtri(q / 2))


def _half_cauchy(prior: Any, z: Array) -> Array:
    z = jnp.minimum(z, 8.0)  # 1e15; beyond, the square in the derivative would leave float32
    return prior.scale * _by_tail(z, lambda p: jnp.tan(jnp.pi / 2 * p), lambda q: 1 / jnp.tan(jnp.pi / 2 * q))


def _exponential(prior: Any, z: Array) -> Array:
    # Beyond some 13 deviations the tail itself is below the least number of float32, and its logarithm is not.
    lower, upper = -jnp.log1p(-ndtr(jnp.minimum(z, 0.0))), -log_ndtr(-jnp.maximum(z, 0.0))
    return jnp.where(z < 0, lower, upper) / prior.rate


def _uniform(prior: Any, z: Array) -> Array:
    return prior.low + (prior.high - prior.low) * ndtr(z)


def _by_tail(z: Array, of_lower: Callable, of_upper: Callable) -> Array:
    """Return a quantile from the probability below it or above it, whichever is small and so keeps its digits."""
    lower, upper = of_lower(ndtr(jnp.minimum(z, 0.0))), of_upper(ndtr(-jnp.clip(z, 0.0, 12.0)))
    return jnp.where(z < 0, lower, upper)


IMAGES: dict[type[dist.Distribution], Callable[[Any, Array], Array]] = {
    dist.Exponential: _exponential,
    dist.HalfCauchy: _half_cauchy,
    dist.HalfNormal: _half_normal,
    dist.LogNormal: _log_normal,
    dist.Uniform: _uniform,
}


_LEVEL_SPREAD = 1.0  # of the level's logarithm a priori
_B_STD = 0.5**0.5  # half of a hidden unit's variance: noise may be large at both ends of the inputs, or at one


@dataclass(frozen=True, eq=False)
class NoiseNetwork:
    r"""Noise by row, a function of the inputs that is learnt: the ``noise`` of :func:`bnn`.

    The standard deviation of row i is $\sigma_i = \ell\, e^{\tau g(x_i)}$: a level $\ell$ and an amplitude
    $\tau \geq 0$, both latent, and a small network $g$ with hidden units of its own and a prior variance of about one
    for standardised inputs. Given these the likelihood is Normal, so the readout of the network of the mean is
    integrated out exactly as usual (Mathematics, :eq:`rows`, :eq:`learnt-noise`). An amplitude of zero is constant
    noise, and the prior reaches there: where the noise is constant, little is lost.

    In a model it is a function of the inputs, ``NoiseNetwork(0.1)(x)``, that samples "noise_level_base" and
    "noise_amplitude_base", beside their images "noise_level" and "noise_amplitude", and the weights "noise.…" of
    $g$, "noise.readout" the last of them. All of these are N(0, 1) a priori. It returns the deterministic site "noise",
    (n,), in the plate "rows". :func:`bnn` does so, and its outputs share the noise of their row.

    Attributes:
        level: prior of $\ell$; or a number in its place, the median of a log-normal prior whose logarithm has the
            standard deviation one, in the units of the targets, such as ``fit.noise_scale`` of
            :func:`wide_limit.fit <numpyro_wide.wide_limit.fit>`.
        amplitude: prior of $\tau$; or a number in its place, the scale of a half-normal prior. About how far the
            logarithm of the noise may stray from its mean.
        depth: number of hidden layers of $g$; 0 for a linear function of the inputs.
        width: number of units in each.
        activation: "erf", "gelu", "identity", "relu", "tanh", or a function of arrays. One that is bounded keeps the
            noise bounded far away from the data.

    Raises:
        TypeError: if the level or the amplitude is neither a prior nor a real number.
        ValueError: for numbers that are not positive and finite, priors of several numbers, or of those that may be
            negative, or of another kind than those of :func:`bnn`; a depth or width out of range; or an unknown
            activation.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.handlers import seed, trace
        >>> from numpyro_wide.nn import FCN, NoiseNetwork, bnn
        >>> model = bnn(FCN(depth=1, width=50), num_outputs=None, noise=NoiseNetwork(level=0.1, depth=0))
        >>> sites = trace(seed(model, jax.random.key(0))).get_trace(jnp.ones((5, 3)))
        >>> sites["noise"]["value"].shape, sites["noise.readout"]["value"].shape
        ((5,), (3,))
    """

    level: Any
    amplitude: Any = 1.0
    depth: int = 1
    width: int = 16
    activation: Activation = "tanh"

    def __post_init__(self) -> None:
        for name in ("level", "amplitude"):
            _check_prior_or_number(f"{name} of the noise", getattr(self, name))
        whole_number("depth of the noise", self.depth, 0)
        whole_number("width of the noise", self.width)
        activation_function(self.activation)

    def __call__(self, x: Array) -> Array:
        """Return the noise's standard deviation of each row, (n,), for inputs (n, ...)."""
        is_level_given = isinstance(self.level, dist.Distribution)
        level = self.level if is_level_given else dist.LogNormal(jnp.log(self.level), _LEVEL_SPREAD)
        is_amplitude_given = isinstance(self.amplitude, dist.Distribution)
        amplitude = self.amplitude if is_amplitude_given else dist.HalfNormal(self.amplitude)
        level, amplitude = scale_site("noise_level", level), scale_site("noise_amplitude", amplitude)
        noise_scale = level * jnp.exp(amplitude * self._network(x))
        with numpyro.plate("rows", jnp.shape(x)[0]):
            return numpyro.deterministic("noise", noise_scale)

    def _network(self, x: Array) -> Array:
        """Return g at each row."""
        network = FCN(self.depth, self.width, self.activation, b_std=_B_STD)
        # A linear function has no weights but those of its readout.
        features: Any = random_network("noise", network, x)(x) if self.depth else network.apply({}, x)
        readout = numpyro.sample("noise.readout", dist.Normal(0, 1).expand((features.shape[1],)).to_event(1))
        return features @ readout


def _check_prior_or_number(name: str, value: Any) -> None:
    if isinstance(value, dist.Distribution):
        check_prior(name, value)
        shape = value.shape()
    else:
        check_real(name, value)
        check_positive(name, value)
        shape = np.shape(value)
    if shape != ():
        raise ValueError(f"{name} must be one number, or its prior, for all rows and outputs, but has shape {shape}.")


# Of the output, a priori: between these, as far as scales of a few units go, nothing is said.
LEAST_VARIANCE, LARGEST_VARIANCE = 1e-4, 1e3


def warn_of_prior_size(
    features: Array | RowFeatures, readout_scale: ArrayLike, noise_scale: ArrayLike, y: ArrayLike | None
) -> bool | Array:
    """Warn where the prior variance of the output, given these hidden weights, is far from one, or from the targets'.

    Only where numbers are known and no plate of samples is around, as at the start of a chain: it costs a sum then.

    Args:
        features: features of the rows, (n, d).
        readout_scale: standard deviation of the readout's prior; one by entry is not looked at.
        noise_scale: standard deviation of the noise.
        y: targets; None where they are not to be compared.

    Returns:
        Whether the sizes are usual ones, where numbers are traced; True where they were known, and told.
    """
    if np.ndim(readout_scale):
        return True
    # Of many rows the first block.
    rows = features.rows(0) if isinstance(features, RowFeatures) else features
    is_told = is_known(rows) and is_known(readout_scale)
    # NumPy's where numbers are known: within jit JAX would trace what is done to them, too.
    xp = np if is_told else jnp
    variance = xp.mean(xp.sum(xp.square(xp.asarray(rows, float)), axis=1)) * xp.square(xp.asarray(readout_scale, float))
    is_usual = (variance == 0) | ((variance >= LEAST_VARIANCE) & (variance <= LARGEST_VARIANCE))  # 0: inputs of 0
    if is_told and not is_usual:
        warnings.warn(
            f"the prior variance of the network's output at these inputs is about {variance:.2g}, far from the one of "
            "standardised targets: the posterior will be hard to sample, and may predict worse than a line. Scale "
            "every layer by 1/sqrt(inputs), as nn.NTKDense does and flax.linen.Dense does not, and the features by "
            "1/sqrt(width); standardise the inputs.",
            UserWarning,
            stacklevel=3,
        )
        return True
    if y is None or (is_told and not (is_known(y) and is_known(noise_scale))):
        return is_usual | is_told
    size = xp.mean(xp.square(xp.asarray(y, float)))
    expected = xp.maximum(variance, xp.mean(xp.square(xp.asarray(noise_scale, float))))
    is_small = (size <= LARGEST_VARIANCE * expected) | (expected == 0)
    if is_told and not is_small:
        warnings.warn(
            f"the mean square of the targets is {size:.2g}, far above the {expected:.2g} that network and noise "
            "expect a priori: the posterior will be hard to sample. Standardise the targets, "
            "or give their size as readout_scale and noise.",
            UserWarning,
            stacklevel=3,
        )
    return is_told | (is_usual & is_small)


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
