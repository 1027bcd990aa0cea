"""Regression on random features: the wide limit of a network for many rows, in one pass and without a chain."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro.infer import Predictive
from scipy.special import digamma, polygamma, softmax

from numpyro_wide import _mixture
from numpyro_wide._arviz import pareto_smoothed
from numpyro_wide._checks import check_finite, check_known, check_one_of, kind_of, whole_number
from numpyro_wide.machine import double_precision
from numpyro_wide.readout._collapse import collapse_readout
from numpyro_wide.readout._predictive import ReadoutPredictive
from numpyro_wide.wide_limit._fit import fit as fit_scales
from numpyro_wide.wide_limit._limit import WideLimitFit, checked_targets

_TEST_ROWS = 8192  # predicted at a time
_NOISE_DRAWS = 2  # of the regressions whose means alone are used


@dataclass(frozen=True)
class RandomFeatures:
    """Posterior of :func:`fit_random_features`, a mixture of Gaussian processes, one for each draw of the features.

    Attributes:
        fit: scales and noise, fitted to some of the rows.
        predictive: predictions by draw; call it in double precision.
        log_evidence: log evidence of all rows at each draw, (draws,).
        weights: weights of the draws in the mixture, (draws,).
        pareto_shape: of weights by the evidence; above 0.7 a few draws dominate (Vehtari et al. 2024).
        log_noise_variance: regression of the logarithm of the noise's variance, over the square of
            ``fit.noise_scale``, on the inputs; None for one noise.
    """

    fit: WideLimitFit
    predictive: ReadoutPredictive
    log_evidence: np.ndarray
    weights: np.ndarray
    pareto_shape: float
    log_noise_variance: "RandomFeatures | None" = None

    def noise_scale(self, x_new: ArrayLike) -> np.ndarray:
        """Return the noise's standard deviation at new rows, (m,).

        Args:
            x_new: new inputs, (m, d_in).
        """
        x_new = self.fit.checked_rows(x_new)
        if self.log_noise_variance is None:
            return np.full(len(x_new), self.fit.noise_scale)
        return self.fit.noise_scale * np.exp(self.log_noise_variance.predict(x_new)[0] / 2)

    def predict(self, x_new: ArrayLike, *, with_noise: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Predict the function at new rows, with all draws as one mixture.

        Args:
            x_new: new inputs, (m, d_in).
            with_noise: whether the variance includes the noise.

        Returns:
            mean and variance, (m,) or (m, k) each.
        """
        x_new = self.fit.checked_rows(x_new)
        by_block = [_mixture.moments(mean, variance, self.weights) for _, mean, variance in self._moments(x_new)]
        mean, variance = map(np.concatenate, zip(*by_block, strict=True))
        return mean, variance + self._noise_variance(x_new) if with_noise else variance

    def log_density(self, x_new: ArrayLike, y_new: ArrayLike) -> np.ndarray:
        """Return the log predictive density of observations under the mixture, row by row, (m,).

        Args:
            x_new: new inputs, (m, d_in).
            y_new: their targets, (m,) or (m, k).
        """
        x_new = self.fit.checked_rows(x_new)
        targets = checked_targets(y_new, (len(x_new), *self.fit.targets.shape[1:]))
        noise_variance, by_block = self._noise_variance(x_new), []
        for rows, mean, variance in self._moments(x_new):
            by_entry = _mixture.component_log_density(targets[rows], mean, variance + noise_variance[rows])
            by_row = by_entry.reshape(*by_entry.shape[:2], -1).sum(axis=2)
            by_block.append(_mixture.log_average(by_row, self.weights))
        return np.concatenate(by_block)

    def _noise_variance(self, x_new: np.ndarray) -> np.ndarray:
        """Return the noise's variance, broadcast against the outputs."""
        return self.noise_scale(x_new).reshape(-1, *(1 for _ in self.fit.targets.shape[1:])) ** 2

    def _moments(self, x_new: np.ndarray) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Yield blocks of rows, with means and variances by draw, (draws, rows, ...)."""
        size = min(len(x_new), _TEST_ROWS)
        for start in range(0, len(x_new), size):
            rows = slice(start, start + size)
            # Filled up, for one program.
            filled = np.resize(x_new[rows], (size, x_new.shape[1]))
            with double_precision():
                predictions = self.predictive(jax.random.key(0), jnp.asarray(filled))
            kept = len(x_new[rows])
            yield rows, np.asarray(predictions["mean"])[:, :kept], np.asarray(predictions["variance"])[:, :kept]


def fit_random_features(
    x: ArrayLike,
    y: ArrayLike,
    *,
    fit: WideLimitFit | None = None,
    noise: str = "constant",
    activation: Any = ("erf", "relu"),
    depth: int | Sequence[int] = 1,
    input_scale: bool | Sequence[bool] = True,
    structure: str | Sequence[str] = "dense",
    order: int | Sequence[int] | None = None,
    num_rows: int = 1000,
    width: int = 512,
    num_draws: int = 16,
    weighted: bool = False,
    block_size: int = 2048,
    seed: int = 0,
    progress_bar: bool = True,
) -> RandomFeatures:
    """Fit a wide network's limit to many rows by random features (Rahimi 2007): what to run first on a large table.

    :func:`wide_limit.fit <numpyro_wide.wide_limit.fit>` chooses scales, noise and architecture on some of the rows.
    Given each draw of hidden weights the readout's posterior is exact for all rows (Hron 2022, Prop. 2.2; Mathematics,
    :eq:`posterior`). Time goes with draws · rows · width². Standardise inputs and targets.

    Args:
        x: inputs, (n, d_in).
        y: targets, (n,), or (n, k) for outputs that share all scales.
        fit: known scales of fully connected or additive networks, at their mode, instead of those that the arguments
            from ``activation`` to ``num_rows`` choose.
        noise: "constant", or "by_row": a function of the inputs, shared by outputs, whose log variance is a second
            such regression, on the squared errors of rows left out; the first is then fitted anew.
        activation: activation, or several to compare.
        depth: number of hidden layers, or several to compare.
        input_scale: whether each column has a scale of its own, or both to compare.
        structure: as of :func:`wide_limit.fit <numpyro_wide.wide_limit.fit>`.
        order: as of :func:`wide_limit.fit <numpyro_wide.wide_limit.fit>`.
        num_rows: number of random rows that scales are fitted to.
        width: number of random features: units of each hidden layer, or products of all effects together.
        num_draws: number of draws of the hidden weights.
        weighted: whether draws are weighted by their evidence; with many rows one draw dominates.
        block_size: number of rows whose features are held at a time.
        seed: seed of the rows and of the draws.
        progress_bar: whether to show bars over the architectures and the draws.

    Returns:
        The posterior, a :class:`RandomFeatures`.

    Raises:
        FloatingPointError: if the noise is lost in rounding.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.wide_limit import fit_random_features
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(3000, 2))
        >>> y = np.sin(2 * x[:, 0]) + 0.1 * rng.normal(size=3000)
        >>> found = fit_random_features(x, y, activation="erf", num_rows=100, width=64, num_draws=2, progress_bar=False)
        >>> mean, variance = found.predict(np.zeros((5, 2)))
        >>> mean.shape, found.log_density(x[:5], y[:5]).shape
        ((5,), (5,))
    """
    check_known("fit_random_features chooses by numbers")
    check_finite("x", x)
    check_finite("y", y)
    inputs, targets = np.asarray(x, float), np.asarray(y, float)
    if inputs.ndim != 2 or targets.ndim not in (1, 2) or len(targets) != len(inputs):
        raise ValueError(
            f"x must be (n, d_in) and y (n,) or (n, k), with the same rows, but got {inputs.shape} and {targets.shape}."
        )
    check_one_of("noise", noise, ("constant", "by_row"))
    width, num_draws = whole_number("width", width), whole_number("num_draws", num_draws)
    num_rows = min(whole_number("num_rows", num_rows), len(inputs))
    fitted_rows = np.sort(np.random.default_rng(seed).choice(len(inputs), num_rows, replace=False))

    def scales_of(targets: np.ndarray) -> WideLimitFit:
        options = {"activation": activation, "depth": depth, "input_scale": input_scale, "seed": seed}
        options |= {"structure": structure, "order": order, "progress_bar": progress_bar}
        return fit_scales(inputs[fitted_rows], targets[fitted_rows], **options)

    def regression(
        fit: WideLimitFit, targets: np.ndarray, noise_scale: ArrayLike, num_draws: int = num_draws
    ) -> RandomFeatures:
        return _posterior(fit, inputs, targets, noise_scale, width, num_draws, weighted, block_size, seed, progress_bar)

    fit = scales_of(targets) if fit is None else fit
    _check_fit(fit, inputs, targets)
    if noise == "constant":
        return regression(fit, targets, fit.noise_scale)
    few_draws = min(num_draws, _NOISE_DRAWS)
    # Over the constant noise, so that in any units the prior of the logarithms has the right mean.
    squares = _left_out_squares(regression(fit, targets, fit.noise_scale, few_draws), targets) / fit.noise_scale**2
    # Given the variance, the squares have a Gamma law whose shape is half the number of outputs.
    half = targets[0].size / 2
    logarithms = np.log(squares) - digamma(half) + np.log(half)  # of the variance, but for noise of mean zero
    noise_fit = scales_of(logarithms)
    log_variance = regression(noise_fit, logarithms, polygamma(1, half) ** 0.5, few_draws)
    # A step of Fisher scoring: squares tell more than their logarithms, and a second step no more.
    mean = log_variance.predict(inputs)[0]
    log_variance = regression(noise_fit, mean + squares * np.exp(-mean) - 1, half**-0.5, few_draws)
    noise_scale = fit.noise_scale * np.exp(log_variance.predict(inputs)[0] / 2)
    return replace(regression(fit, targets, noise_scale), log_noise_variance=log_variance)


def _posterior(
    fit: WideLimitFit,
    inputs: np.ndarray,
    targets: np.ndarray,
    noise_scale: ArrayLike,
    width: int,
    num_draws: int,
    weighted: bool,
    block_size: int,
    seed: int,
    progress_bar: bool,
) -> RandomFeatures:
    """Return the posterior given all scales and the noise, a number or (n,)."""
    from numpyro_wide.nn._models import bnn  # which brings flax
    from numpyro_wide.nn._networks import FCN

    num_outputs = None if targets.ndim == 1 else targets.shape[1]
    if fit.network is None:
        network = FCN(fit.depth, width, fit.activation)
    else:
        num_effects = len(fit.network.terms(inputs.shape[1]))
        network = fit.network.clone(width=-(-width // num_effects), dense=width if fit.network.dense else 0)

    def model(x: Array, y: Array | None = None, noise_scale: Any = fit.noise_scale) -> None:
        noise_scale = noise_scale if num_outputs is None or not jnp.ndim(noise_scale) else noise_scale[:, None]
        bnn(network, num_outputs, noise_scale, scales=fit.scales, block_size=block_size)(x, y)

    collapsed = collapse_readout(model, readout="readout", features="features", observed="y")
    with double_precision():
        args = tuple(jnp.asarray(values, float) for values in (inputs, targets, noise_scale))
        # One row is enough to draw hidden weights.
        drawn = Predictive(model, num_samples=num_draws)(jax.random.key(seed), args[0][:1])
        draws = {name: values for name, values in drawn.items() if name.startswith("hidden.")}
        predictive = ReadoutPredictive(collapsed, draws, args, progress_bar=progress_bar)
        log_evidence = np.asarray(predictive.log_evidence())
    _, shape = pareto_smoothed(log_evidence)
    weights = softmax(log_evidence) if weighted else np.full(num_draws, 1 / num_draws)
    return RandomFeatures(fit, predictive, log_evidence, weights, float(shape))


def _left_out_squares(posterior: RandomFeatures, targets: np.ndarray) -> np.ndarray:
    """Return the mean square over outputs, (n,), of the errors of rows left out."""
    with double_precision():
        mean = np.asarray(posterior.predictive.leave_one_out()[0])
    errors = targets - np.average(mean, axis=0, weights=posterior.weights)
    squares = np.mean(errors.reshape(len(errors), -1) ** 2, axis=1)
    return np.maximum(squares, 1e-10 * squares.mean())  # whose logarithm is taken


def _check_fit(fit: object, inputs: np.ndarray, targets: np.ndarray) -> None:
    """Refuse scales of other networks or other data."""
    from numpyro_wide.nn._additive import AdditiveNetwork

    if not isinstance(fit, WideLimitFit):
        raise TypeError(f"fit must be the result of wide_limit.fit, but is {kind_of(fit)}.")
    if not (fit.network is None or isinstance(fit.network, AdditiveNetwork)):
        raise ValueError("fit must be of fully connected networks, by activation and depth, or of additive ones.")
    if fit.noise_scale is None:
        raise ValueError(f"fit must be of a Normal likelihood, but is of {fit.likelihood!r}.")
    shapes = fit.inputs.shape[1:] + fit.targets.shape[1:], inputs.shape[1:] + targets.shape[1:]
    if shapes[0] != shapes[1]:
        raise ValueError(f"fit must be of inputs and targets of shapes {shapes[1]} a row, but has {shapes[0]}.")
