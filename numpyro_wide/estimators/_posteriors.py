"""Posteriors of regression, of standardised targets: the limit's, or mixtures over draws."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from hashlib import sha256
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from sklearn.utils import gen_batches

from numpyro_wide import _mixture
from numpyro_wide._compile import run_program
from numpyro_wide._traces import run_model
from numpyro_wide.linear_gaussian._problem import readout_posterior
from numpyro_wide.machine import double_precision
from numpyro_wide.nn._models import NoiseNetwork, bnn
from numpyro_wide.nn._networks import FCN
from numpyro_wide.readout._collapse import collapse_readout
from numpyro_wide.readout._predictive import ReadoutPredictive
from numpyro_wide.wide_limit._gp import Conditioned
from numpyro_wide.wide_limit._limit import WideLimitFit

SPREAD = 0.5  # prior deviation of log scales and noise
_AMPLITUDE = float(np.log(0.8)), 0.8  # prior of the logarithm of a noise network's amplitude
BLOCK = 4096  # rows predicted at a time
_FEWEST_ROWS, _MOST_FILLED = 16, 1024  # rows of a program of predictions
_MOST_KEPT = 1 << 23  # numbers of each moment

# Mean and variance of the function, and the noise's variance, (draws, m, k) each.
Moments = tuple[np.ndarray, np.ndarray, np.ndarray]


class Mixture(NamedTuple):
    """Equal-weight mixtures of Gaussians with noise: moments by draw, (draws, m, k)."""

    mean: np.ndarray
    variance: np.ndarray

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance of the mixture, (m, k) each."""
        return _mixture.moments(self.mean, self.variance)

    def quantiles(self, levels: Sequence[float]) -> np.ndarray:
        """Return quantiles, (levels, m, k)."""
        return np.stack([_mixture.quantile(np.asarray(level), self.mean, self.variance) for level in levels])

    def log_density(self, y: np.ndarray) -> np.ndarray:
        """Return the log density of each row of y (m, k), whose outputs are independent given the draw, (m,)."""
        return _mixture.log_average(self.by_draw(y))

    def by_draw(self, y: np.ndarray) -> np.ndarray:
        """Return the log density of each row of y (m, k) by draw, (draws, m)."""
        return _mixture.component_log_density(y, self.mean, self.variance).sum(axis=-1)

    def sample(self, random: np.random.RandomState, places: np.ndarray) -> np.ndarray:
        """Draw observations, (samples, m, k), each of one draw, at its place in [0, 1)."""
        chosen = (places * len(self.mean)).astype(int)
        noise = random.standard_normal((len(places), *self.mean.shape[1:]))
        return self.mean[chosen] + np.sqrt(self.variance[chosen]) * noise


class LimitPosterior:
    """Posterior of the infinitely wide network at fixed scales."""

    rhat: float | None = None  # of chains that did not agree, in whose place it predicts

    def __init__(self, fit: WideLimitFit):
        self.fit = fit

    def function(self, x: np.ndarray) -> Moments:
        """Return moments at x (m, d)."""
        mean, variance = self.fit.predict(x)
        mean = mean.reshape(1, len(x), -1)
        return mean, np.broadcast_to(variance[:, None], mean.shape), np.full(mean.shape, self.fit.noise_scale**2)

    def predicted(self, gram: np.ndarray, known: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return means at rows of the fit from known rows of it alone, by indices, from the kernel of all."""
        process = Conditioned(gram[np.ix_(known, known)], self.fit.targets[known], self.fit.noise_scale**2)
        return process.mean(gram[np.ix_(rows, known)])

    def left_out(self, gram: np.ndarray) -> Mixture:
        """Return leave-one-out predictions from the kernel (Rasmussen 2006, p. 117)."""
        found = Conditioned(gram, self.fit.targets.reshape(len(gram), -1), self.fit.noise_scale**2)
        variance = np.broadcast_to(1 / found.left_out_precision[:, None], found.left_out.shape)
        return Mixture(found.left_out[None], variance[None])

    def covariance(self, x: np.ndarray) -> np.ndarray:
        """Return the covariance between rows of x (m, d), (m, m, k)."""
        (process,) = self.fit.processes
        found = process.covariance(self.fit.nngp(x, self.fit.inputs), self.fit.nngp(x))
        return np.repeat(found[:, :, None], process.targets.shape[1], axis=2)


class Network(NamedTuple):
    """Finite network without its scales."""

    depth: int  # number of hidden layers
    width: int  # units in each
    activation: str | Callable[[Array], Array]
    num_outputs: int | None  # None for vector targets
    by_row: bool  # whether noise depends on inputs
    is_latent: bool = True  # whether scales and noise are drawn


def run_network(network: Network, medians: Mapping[str, Array], x: Array, y: Array | None = None) -> None:
    """Run a network with latent scales and noise, log-normal around medians by name, or with the medians."""
    scales: dict[str, Any] = dict(medians)
    if network.is_latent:
        scales = {name: dist.LogNormal(jnp.log(median), SPREAD) for name, median in medians.items()}
    noise = scales.pop("noise")
    if network.by_row:
        noise = NoiseNetwork(level=noise, amplitude=dist.LogNormal(*_AMPLITUDE))
    if "input_scale" in medians:
        scales["w_std"] = medians["w_std"]  # the first layer's are by column
    with warnings.catch_warnings():
        # The report tells the outputs' size.
        warnings.filterwarnings("ignore", message="the prior variance of the network's output")
        bnn(FCN(network.depth, network.width, network.activation), network.num_outputs, noise, scales=scales)(x, y)


def parts_of(network: Network, values: dict[str, Array], medians: dict[str, Array], x: Array) -> tuple[Array, Array]:
    """Return features (m, d) and noise, a number or by row, at values of the latent sites, each N(0, 1)."""
    sites = run_model(partial(run_network, network), (medians, x), values=values)
    noise = sites["noise"]["value"] if "noise" in sites else medians["noise"]
    is_column = network.by_row and network.num_outputs is not None
    return sites["features"]["value"], noise[:, None] if is_column else noise


@cache
def collapsed(network: Network) -> Any:
    """Return the collapsed model ``(medians, x, y)`` of a network."""
    model = partial(run_network, network)
    vars(model)["is_scaled"] = True
    return collapse_readout(model, readout="readout", features="features", observed="y")


class DrawnPosterior:
    """Draws of a collapsed network, with medians, x and y of its fit, in float64; or these and the limit, stacked."""

    limit: LimitPosterior | None = None
    weight = 1.0  # of the draws; the limit has the rest
    rhat: float | None = None  # of predictions between chains
    agrees: bool | None = None  # whether chains do
    pareto_shape: float | None = None  # of the weights of draws

    def __init__(self, network: Network, draws: Mapping[str, Array | np.ndarray], known: tuple):
        self.network, self.model = network, collapsed(network)
        self.draws, self.known = jax.tree.map(lambda leaf: np.asarray(leaf, float), (dict(draws), known))
        self._predictive: ReadoutPredictive | None = None
        self._functions: dict[str, Callable] = {}
        self._last: dict[bytes, Moments] = {}  # by inputs

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_predictive": None, "_functions": {}, "_last": {}}  # compiled programs stay behind

    @property
    def predictive(self) -> ReadoutPredictive:
        """Predictive of the model, for double precision."""
        if self._predictive is None:
            with double_precision():
                self._predictive = ReadoutPredictive(self.model, *jax.tree.map(jnp.asarray, (self.draws, self.known)))
        return self._predictive

    def predictions(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """Return moments of predictions at x (m, d), (draws, m, ...) each."""
        # Filled up to a power of two, and to the rows of the fit, for few programs.
        least = max(_FEWEST_ROWS, min(len(self.known[1]), _MOST_FILLED))
        number = 1 << (max(least, len(x)) - 1).bit_length()
        filled = np.concatenate([x, np.repeat(x[:1], number - len(x), axis=0)])

        def moments_of(draws: dict[str, Array], known: tuple, new: Array) -> dict[str, Array]:
            def of_draw(draw: dict[str, Array]) -> dict[str, Array]:
                features, noise_scale, readout, spread = given_draw(self.network, draw, known, new)
                mean = features @ readout
                variance = jnp.sum((features @ spread) * features, axis=1, keepdims=mean.ndim > 1)
                parts = {"mean": mean, "variance": variance, "noise_scale": noise_scale}
                return {name: jnp.broadcast_to(part, mean.shape) for name, part in parts.items()}

            return jax.lax.map(of_draw, draws)

        found = self._run(moments_of, filled)
        return {name: values[:, : len(x)] for name, values in found.items()}

    def function(self, x: np.ndarray) -> Moments:
        """Return moments at x (m, d), kept for the last x."""
        key = sha256(x.tobytes()).digest()
        if key in self._last:
            return self._last[key]
        moments = self._function(x)
        while self._last and sum(kept[0].size for kept in (moments, *self._last.values())) > _MOST_KEPT:
            del self._last[next(iter(self._last))]
        self._last[key] = moments
        return moments

    def choose(self, rows: np.ndarray) -> None:
        """Take draws by their indices, as many as before, from now on."""
        self.draws = {name: values[rows] for name, values in self.draws.items()}
        self._last = {key: tuple(part[rows] for part in moments) for key, moments in self._last.items()}

    def stack(self, limit: LimitPosterior, weight: float) -> None:
        """Predict as a weighted mean with the limit from now on."""
        self.limit, self.weight, self._last = limit, weight, {}

    def _function(self, x: np.ndarray) -> Moments:
        """Compute the moments of :meth:`function`; the limit's, stacked, are in the place of some draws."""
        found = self.predictions(x)
        arrays = (found[name] for name in ("mean", "variance", "noise_scale"))
        mean, variance, noise_scale = (array.reshape(*array.shape[:2], -1) for array in arrays)
        moments = mean, variance, noise_scale**2
        if self.limit is None:
            return moments
        number = len(mean)
        num_kept = min(round(self.weight * number), number - 1)
        kept = np.arange(num_kept) * number // max(num_kept, 1)
        parts = zip(moments, self.limit.function(x), strict=True)
        mean, variance, noise_variance = (
            np.concatenate([draws[kept], np.repeat(one, number - num_kept, axis=0)]) for draws, one in parts
        )
        return mean, variance, noise_variance

    def covariance(self, x: np.ndarray) -> np.ndarray:
        """Return the covariance between rows of x, (m, m, k), over draws and limit."""

        def covariance_of(draws: dict[str, Array], known: tuple, new: Array) -> tuple[Array, Array]:
            def add(total: Array, draw: dict[str, Array]) -> tuple[Array, Array]:
                features, _, mean, spread = given_draw(self.network, draw, known, new)
                return total + features @ spread @ features.T, (features @ mean).reshape(len(new), -1)

            return jax.lax.scan(add, jnp.zeros((len(new), len(new))), draws)

        total, means = self._run(covariance_of, x)
        mean = means.mean(axis=0)
        deviations = means - mean
        of_means = np.einsum("smk,snk->mnk", deviations, deviations) / len(means)
        covariance = (total / len(means))[:, :, None] + of_means
        if self.limit is None:
            return covariance
        difference = self.limit.function(x)[0][0] - mean
        between = self.weight * (1 - self.weight) * np.einsum("mk,nk->mnk", difference, difference)
        return self.weight * covariance + (1 - self.weight) * self.limit.covariance(x) + between

    def _run(self, fn: Callable, x: np.ndarray) -> Any:
        """Run ``fn(draws, known, x)`` in double precision, traced once for each number of rows."""
        fn = self._functions.setdefault(fn.__name__, fn)
        with double_precision():
            args = jax.tree.map(jnp.asarray, (self.draws, self.known, x))
            return jax.tree.map(np.asarray, run_program(fn, *args))


def given_draw(network: Network, draw: dict[str, Array], known: tuple, x: Array) -> tuple[Array, Array, Array, Array]:
    """Return features and noise at x, and the readout's posterior mean and covariance, of a draw."""
    medians, x_known, y_known = known
    at_known, noise = parts_of(network, draw, medians, x_known)
    return (*parts_of(network, draw, medians, x), *readout_posterior(at_known, y_known, noise))


def blocks(num_rows: int) -> Iterator[slice]:
    """Yield slices of at most ``BLOCK`` rows."""
    return gen_batches(num_rows, BLOCK)
