"""Noise that depends on the inputs, as sites of a NumPyro model in coordinates that are N(0, 1)."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from numpyro_wide._checks import check_positive, whole_number
from numpyro_wide.nn._fully_connected import FCN
from numpyro_wide.nn._latent_scales import check_prior, scale_site
from numpyro_wide.nn._random import random_network
from numpyro_wide.nn._scales import Activation, activation_function, check_real

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
