"""Posteriors of regression: mixtures over draws, in the units of the targets."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.scipy.linalg import cho_factor, cho_solve
from scipy.special import logsumexp

from numpyro_wide.linear_gaussian._problem import readout_posterior
from numpyro_wide.machine import double_precision
from numpyro_wide.nn._models import NoiseNetwork, bnn
from numpyro_wide.nn._networks import FCN
from numpyro_wide.readout._collapse import collapse_readout
from numpyro_wide.readout._functions import site_function
from numpyro_wide.readout._predictive import ReadoutPredictive, summarise
from numpyro_wide.wide_limit._kernels import fcn_kernel
from numpyro_wide.wide_limit._limit import WideLimitFit

SPREAD = 0.5  # of the logarithms of scales and noise a priori


class Network(NamedTuple):
    """A network, but for its scales.

    Attributes:
        depth: number of hidden layers.
        width: number of units in each.
        activation: activation, by name or as a function.
        num_outputs: number of outputs; None for targets that are a vector.
        by_row: whether the noise depends on the inputs.
    """

    depth: int
    width: int
    activation: str | Callable[[Array], Array]
    num_outputs: int | None
    by_row: bool


def run_network(network: Network, medians: Mapping[str, Array], x: Array, y: Array | None = None) -> None:
    """Run the model of a network: latent scales and noise, log-normal around medians.

    The medians are arguments, as the data are, so that what is compiled serves other data of as many rows. Where
    columns have scales of their own these are the first layer's, and ``w_std`` is held.

    Args:
        network: the network.
        medians: medians of the scales by name, that of "noise" among them.
        x: inputs, (n, d).
        y: targets, (n,) or (n, k); None to predict.
    """
    scales: dict[str, Any] = {name: dist.LogNormal(jnp.log(median), SPREAD) for name, median in medians.items()}
    noise = NoiseNetwork(level=scales.pop("noise")) if network.by_row else scales.pop("noise")
    if "input_scale" in medians:
        scales["w_std"] = medians["w_std"]
    with warnings.catch_warnings():
        # The data chose the scales, and the report tells how large the outputs are.
        warnings.filterwarnings("ignore", message="the prior variance of the network's output")
        bnn(FCN(network.depth, network.width, network.activation), network.num_outputs, noise, scales=scales)(x, y)


@cache
def collapsed(network: Network) -> Any:
    """Return the model ``(medians, x, y)`` of a network with the readout integrated out.

    Args:
        network: the network.
    """
    model = partial(run_network, network)
    return collapse_readout(model, readout="readout", features="features", observed="y")


_MIXTURE_BLOCK = 500  # rows whose quantiles are found together


@dataclass(frozen=True)
class Mixture:
    """Predictions by draw.

    Attributes:
        mean: means of the components, (draws, m, k).
        variance: variances of the components, noise included, (draws, m, k).
    """

    mean: np.ndarray
    variance: np.ndarray

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance of the mixture, (m, k) each."""
        return self.mean.mean(axis=0), self.variance.mean(axis=0) + self.mean.var(axis=0)

    def quantiles(self, levels: Sequence[float]) -> np.ndarray:
        """Return the numbers that the mixture is below with given probabilities, (levels, m, k).

        Args:
            levels: probabilities, between 0 and 1.
        """
        blocks = []
        for start in range(0, self.mean.shape[1], _MIXTURE_BLOCK):
            rows = slice(start, start + _MIXTURE_BLOCK)
            found: dict[str, Any] = {
                "mean": self.mean[:, rows],
                "predictive_variance": self.variance[:, rows],
                "variance": self.variance[:, rows],
            }
            by_level = summarise(found, "", tuple(levels)).quantiles
            blocks.append(np.stack([by_level[level] for level in levels]))
        return np.concatenate(blocks, axis=1)

    def log_density(self, y: np.ndarray) -> np.ndarray:
        """Return the log density of each row's outputs together, which are independent given the draw, (m,).

        Args:
            y: observations, (m, k).
        """
        return logsumexp(self.by_draw(y), axis=0) - np.log(len(self.mean))

    def sample(self, random: np.random.RandomState, places: np.ndarray) -> np.ndarray:
        """Draw observations, all rows of one sample from the same draw, (samples, m, k).

        Args:
            random: generator.
            places: where in the list of the draws the one of each sample is, as a share of it, (samples,).
        """
        chosen = (places * len(self.mean)).astype(int)
        noise = random.standard_normal((len(places), *self.mean.shape[1:]))
        return self.mean[chosen] + np.sqrt(self.variance[chosen]) * noise

    def by_draw(self, y: np.ndarray) -> np.ndarray:
        """Return the log density of each row's outputs together by component, (draws, m).

        Args:
            y: observations, (m, k).
        """
        square = (y - self.mean) ** 2 / self.variance
        return -0.5 * np.sum(square + np.log(2 * np.pi * self.variance), axis=-1)


_BLOCK = 1024  # rows predicted at a time


class RegressionPosterior(ABC):
    """A posterior that predicts: a mixture of Gaussians, over draws or of one."""

    @abstractmethod
    def function(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return mean and variance of the function, and the variance of the noise, (draws, m, k) each.

        Args:
            x: inputs, (m, d).
        """

    def mixture(self, x: np.ndarray) -> Mixture:
        """Return predictions of observations, one Gaussian for each draw and entry.

        Args:
            x: inputs, (m, d).
        """
        mean, variance, noise_variance = self.function(x)
        return Mixture(mean, variance + noise_variance)


class LimitPosterior(RegressionPosterior):
    """The posterior of the infinitely wide network at fixed scales, a Gaussian process.

    Args:
        fit: scales, with the rows to predict from, targets (n,) or (n, k).
    """

    def __init__(self, fit: WideLimitFit):
        self.fit = fit

    def function(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return mean and variance of the function, and the variance of the noise, (1, m, k) each.

        Args:
            x: inputs, (m, d).
        """
        mean, variance = self.fit.predict(x)
        mean = mean.reshape(1, len(x), -1)
        return mean, np.broadcast_to(variance[:, None], mean.shape), np.full(mean.shape, self.fit.noise_scale**2)

    def covariance(self, x: np.ndarray) -> np.ndarray:
        """Return the covariance of the function between rows, which all outputs share, (m, m, k).

        Args:
            x: inputs, (m, d).
        """
        fit = self.fit
        kernel = fcn_kernel(fit.depth, fit.activation, **fit.scales)
        with double_precision():
            gram = np.array(kernel(fit.inputs)[0])
            gram[np.diag_indices_from(gram)] += fit.noise_scale**2
            cross = np.asarray(kernel(x, fit.inputs)[0])
            explained = cross @ np.asarray(cho_solve(cho_factor(gram, lower=True), cross.T))
            found = np.asarray(kernel(x)[0]) - explained
        num_outputs = 1 if fit.targets.ndim == 1 else fit.targets.shape[1]
        return np.repeat(found[:, :, None], num_outputs, axis=2)


class DrawnPosterior(RegressionPosterior):
    """Draws of a finite network's weights, scales and noise, the readout integrated out. Computes in float64.

    Args:
        network: the network.
        draws: draws of the collapsed model's sites, each with a leading axis.
        known: arguments that it was fitted with: medians, inputs, targets.
    """

    def __init__(self, network: Network, draws: dict[str, Any], known: tuple[dict[str, Any], Any, Any]):
        self.network = network
        self.draws = jax.tree.map(lambda leaf: np.asarray(leaf, float), dict(draws))
        self.known = jax.tree.map(lambda leaf: np.asarray(leaf, float), known)
        self._predictive: ReadoutPredictive | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_predictive": None}  # compiled programs stay behind

    @property
    def predictive(self) -> ReadoutPredictive:
        """The predictive of the collapsed model, to be called in double precision."""
        if self._predictive is None:
            with double_precision():
                draws, known = jax.tree.map(jnp.asarray, (self.draws, self.known))
                self._predictive = ReadoutPredictive(collapsed(self.network), draws, known)
        return self._predictive

    def function(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return mean and variance of the function, and the variance of the noise, (draws, m, k) each.

        Args:
            x: inputs, (m, d).
        """
        blocks = [self._block(padded, size) for padded, size in padded_blocks(x)]
        mean, variance, noise_scale = (np.concatenate(parts, axis=1) for parts in zip(*blocks, strict=True))
        return mean, variance, noise_scale**2

    def covariance(self, x: np.ndarray) -> np.ndarray:
        """Return the covariance of the function between rows: that given a draw, averaged, and that of its means.

        Args:
            x: inputs, (m, d).
        """
        medians, x_known, y_known = self.known
        model = partial(run_network, self.network)
        num_rows = len(x)

        def given(draw: dict[str, Any]) -> Any:
            known, new, noise = (
                site_function(model, site, medians, jnp.asarray(at))(draw)
                for site, at in (("features", x_known), ("features", x), ("noise", x_known))
            )
            noise = noise[:, None] if self.network.by_row and self.network.num_outputs is not None else noise
            targets = jnp.asarray(y_known)
            mean, spread = readout_posterior(known, targets, noise)
            return (new @ mean).reshape(num_rows, -1), new @ spread @ new.T

        def add(total: Any, draw: dict[str, Any]) -> tuple[Any, Any]:
            mean, spread = given(draw)
            return total + spread, mean

        with double_precision():
            draws = jax.tree.map(jnp.asarray, self.draws)
            total, means = jax.jit(partial(jax.lax.scan, add))(jnp.zeros((num_rows, num_rows)), draws)
            means, spread = np.asarray(means), np.asarray(total) / len(means)
        deviations = means - means.mean(axis=0)
        between = np.einsum("smk,snk->mnk", deviations, deviations) / len(means)
        return spread[:, :, None] + between

    def _block(self, padded: np.ndarray, num_rows: int) -> tuple[np.ndarray, ...]:
        with double_precision():
            found = self.predictive(jax.random.key(0), self.known[0], jnp.asarray(padded))
        names = ("mean", "variance", "noise_scale")
        arrays = (np.asarray(found[name], float)[:, :num_rows] for name in names)
        return tuple(array.reshape(*array.shape[:2], -1) for array in arrays)


def padded_blocks(x: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Yield blocks of rows, padded to powers of two so that few programs are compiled, and how many rows count.

    Args:
        x: rows, (m, d).
    """
    for start in range(0, len(x), _BLOCK):
        rows = x[start : start + _BLOCK]
        size = max(16, 1 << (len(rows) - 1).bit_length())
        yield np.concatenate([rows, np.repeat(rows[:1], size - len(rows), axis=0)]), len(rows)
