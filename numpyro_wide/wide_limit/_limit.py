"""The infinite network that was fitted, and its predictions."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from numpyro_wide import _mixture
from numpyro_wide._activations import Activation
from numpyro_wide._checks import check_finite, listing
from numpyro_wide.linear_gaussian._surrogate import Surrogate
from numpyro_wide.machine import double_precision, set_blas_threads
from numpyro_wide.wide_limit._duals import activation_name, warn_of_truncation
from numpyro_wide.wide_limit._gp import Conditioned
from numpyro_wide.wide_limit._label_regression import Calibration, codes_of
from numpyro_wide.wide_limit._observations import Observations, refuse_foreign
from numpyro_wide.wide_limit._scale_draws import ScaleDraws
from numpyro_wide.wide_limit._scale_problem import ScaleProblem, nngp_by_tiles, problem_type

_BLOCK = 512  # rows predicted at a time
_MOST_KEPT = 2**27  # numbers of the Cholesky factors of all draws that are kept between predictions, 1 GB


def checked_targets(y_new: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    """Return targets of predicted rows in float64; refuse other shapes, NaN and infinities."""
    check_finite("y_new", y_new)
    targets = np.asarray(y_new, float)
    if targets.shape != shape:
        raise ValueError(f"y_new must have shape {shape}, as its rows are predicted, but has {targets.shape}.")
    return targets


@dataclass(frozen=True)
class WideLimitFit:
    """Scales fitted by :func:`fit`; of ``scales="integrated"`` at their mode, with ``draws`` around it.

    Attributes:
        activation: the best network's activation, by name or as a function.
        depth: number of its hidden layers; 0 of a network without that attribute.
        log_evidence: log evidence of the targets or codes, or its variational bound, at the fitted scales.
        noise_scale: standard deviation of the noise, in the units of the targets or of the codes; None of others.
        scales: other fitted scales, keywords of :func:`fcn_kernel` and ``scales`` of :func:`~numpyro_wide.nn.bnn`.
        standard_errors: standard errors of the logarithms of the fitted numbers, by name (Laplace); NaN at a bound.
        table: a dictionary for each architecture, best first: "structure", "order" (0 of dense ones), "activation",
            "depth", "input_scale", "log_evidence", "log_marginal" (scales integrated out by Laplace), and "noise_scale"
            of a normal likelihood; of classes "held_out", the mean log probability of labels left out, and of codes its
            standard error, "held_out_se", of the rows of the comparison, instead of evidence and marginal.
        inputs: copy of the inputs of the fit, (n, d_in) or (n, ...).
        targets: copy of its targets, (n,) or (n, k).
        network: its network with the fitted scales, where one was given or has a structure.
        likelihood: name of its likelihood.
        parameters: parameters of the likelihood, by name.
        offset: part of the function values besides the network's.
        calibration: function from predictions of codes, (..., classes), to probabilities; None without codes.
        held_out: log probability of each label, (n,), given all others; of logits given nine tenths, of codes of up to
            80 rows four fifths of them. None of others.
        draws: this fit at draws of the scales and the noise, of which ``predict``, ``log_density`` and ``nngp`` are the
            mixture; none with ``scales="mode"``.
        weights: weights of the draws, (draws,).
        pareto_shape: of the weights of draws around the mode; above 0.7 few of them dominate (Vehtari et al. 2024).
        rhat: R-hat of the logarithm of each scale, by name, where chains were run; None elsewhere.
    """

    activation: Activation
    depth: int
    log_evidence: float
    noise_scale: Any
    scales: dict[str, Any]
    standard_errors: dict[str, float | np.ndarray]
    table: list[dict[str, Any]]
    inputs: np.ndarray
    targets: np.ndarray
    network: Any = None
    likelihood: str | Callable = "normal"
    parameters: dict[str, ArrayLike] = field(default_factory=dict)
    offset: ArrayLike = 0.0
    calibration: Calibration | None = None
    held_out: np.ndarray | None = None
    draws: tuple["WideLimitFit", ...] = field(default=(), repr=False)
    weights: np.ndarray | None = None
    pareto_shape: float | None = None
    rhat: Mapping[str, float | np.ndarray] | None = None

    def __str__(self) -> str:
        import pandas  # heavy

        table = pandas.DataFrame(self.table).rename(columns=lambda name: name.replace("_", " "))
        table["activation"] = table["activation"].map(activation_name)
        table["input scale"] = np.where(table["input scale"], "by column", "none")
        scales = []
        for name, value in self.scales.items():
            to = f" to {np.max(value):.3g}" if np.size(value) > 1 else ""
            scales.append(f"{name} {np.min(value):.3g}{to}")
        shown = table.to_string(index=False, float_format="{:.6g}".format)
        lines = [shown, f"scales of the first: {', '.join(scales)}"]
        if self.draws:
            worst = None if self.rhat is None else max(np.max(value) for value in self.rhat.values())
            by = "by weight" if worst is None else f"of chains with R-hat up to {worst:.3f}"
            lines.append(
                f"integrated over: {len(self.draws)} draws {by}; Pareto shape of weights {self.pareto_shape:.2f}"
            )
        return "\n".join(lines)

    def over(self, problem: ScaleProblem, draws: ScaleDraws) -> "WideLimitFit":
        """Return this fit with draws of its scales."""
        fits = []
        for logarithms, log_posterior in zip(draws.logarithms, draws.log_posterior, strict=True):
            fields = problem.fields(problem.scales(logarithms), np.zeros(len(logarithms)))
            varying = {name: fields[name] for name in ("scales", "noise_scale", "network")}
            fits.append(replace(self, log_evidence=log_posterior + problem.prior(logarithms), **varying))
        return replace(self, draws=tuple(fits), weights=draws.weights, pareto_shape=draws.pareto_shape, rhat=draws.rhat)

    @property
    def codes(self) -> np.ndarray | None:
        """One-hot codes of the labels less their mean over classes, (n, classes); None without codes."""
        if self.calibration is None:
            return None
        return codes_of(self.targets.astype(int), len(self.calibration.shift))

    def predict(self, x_new: ArrayLike, *, with_noise: bool = False, **new_parameters: ArrayLike) -> Any:
        """Predict the infinitely wide network, in double precision.

        Args:
            x_new: new inputs, (m, d_in).
            with_noise: whether the variance includes the noise of a normal likelihood.
            **new_parameters: ``offset`` and parameters of the likelihood at the new rows, where they differ by row in
                the fit.

        Returns:
            Of a normal likelihood mean, (m,) or (m, k), and variance, (m,), of the function; with ``draws`` the
            mixture's, of the mean's shape. Of classes probabilities, (m, classes); of a Bernoulli with
            ``labels="logits"`` that of 1, (m,) or (m, k). Of others mean and variance of an observation, of that shape.
        """
        x_new, is_normal = self.checked_rows(x_new), self.likelihood == "normal"
        by_row = {} if is_normal or self.calibration is not None else {**self.parameters, "offset": self.offset}
        passed = [*new_parameters, *["with_noise"] * with_noise]
        refuse_foreign(passed, [*by_row, *["with_noise"] * is_normal], self.likelihood)
        if self.calibration is not None:
            (process,) = self.processes
            means = [process.mean(cross) for _, cross in self._blocks(x_new)]
            return self.calibration(np.concatenate(means))
        shape = (len(x_new), *self.targets.shape[1:])
        if is_normal:
            mean, variance = self._by_draw(x_new, with_noise)
            if not self.draws:
                return mean.reshape(shape), variance.ravel()
            mean, variance = _mixture.moments(mean, variance, self.weights)
            return mean.reshape(shape), variance.reshape(shape)
        num_rows = len(self.inputs)
        fixed = {name: value for name, value in by_row.items() if name not in new_parameters}
        missing = [name for name, value in fixed.items() if np.shape(value)[:1] == (num_rows,)]
        if missing and num_rows > 1:
            raise ValueError(f"{listing(missing)} differ by row in the fit; give those of the new rows to predict.")
        by_row |= new_parameters
        offset = by_row.pop("offset")
        new = Observations.of(np.zeros(shape), self.likelihood, by_row, offset)
        return new.predicted(self._moments(x_new))

    def log_density(self, x_new: ArrayLike, y_new: ArrayLike) -> np.ndarray:
        """Return the log predictive density of observations with a normal likelihood, row by row, (m,).

        Args:
            x_new: new inputs, (m, d_in).
            y_new: their targets, (m,) or (m, k); of several outputs the densities are summed within a draw.
        """
        if self.likelihood != "normal":
            raise ValueError(f"a log density is of a normal likelihood, but it is {self.likelihood!r}; call predict.")
        x_new = self.checked_rows(x_new)
        targets = checked_targets(y_new, (len(x_new), *self.targets.shape[1:]))
        mean, variance = self._by_draw(x_new, with_noise=True)
        by_entry = _mixture.component_log_density(targets.reshape(mean.shape[1:]), mean, variance)
        return _mixture.log_average(by_entry.sum(axis=2), self.weights)

    def surrogate(self) -> Surrogate:
        """Give the likelihood's Gaussian surrogate, as :func:`~numpyro_wide.fitted_surrogate` at the fitted kernel."""
        if self.likelihood == "normal" or self.calibration is not None:
            raise ValueError(
                "a normal likelihood needs no surrogate; give repriorise the noise_scale. Of logits of classes, fit "
                "with labels='logits'."
            )
        return self._observations.surrogate(self.nngp(self.inputs))

    @property
    def _observations(self) -> Observations:
        return Observations.of(self.targets, self.likelihood, self.parameters, self.offset)

    def _by_draw(self, x_new: np.ndarray, with_noise: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return means, (draws, m, k), and variances, (draws, m, 1), with a normal likelihood."""
        is_kept = len(self.draws) * len(self.inputs) ** 2 <= _MOST_KEPT
        means, variances = [], []
        with set_blas_threads(1) if self.draws else nullcontext():
            for fit in self.draws or [self]:
                ((mean, variance),) = (fit if is_kept else replace(fit))._moments(x_new)
                means.append(mean)
                variances.append(variance[:, None] + (fit.noise_scale**2 if with_noise else 0.0))
        return np.stack(means), np.stack(variances)

    def _moments(self, x_new: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return mean, (m, c), and variance, (m,), of each process."""
        by_block = []
        for rows, cross in self._blocks(x_new):
            prior = np.diagonal(self.nngp(rows))
            by_block.append([process.moments(cross, prior) for process in self.processes])
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *by_block)

    def _blocks(self, x_new: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield new inputs, some at a time, and their covariances with the rows of the fit."""
        for start in range(0, len(x_new), _BLOCK):
            rows = x_new[start : start + _BLOCK]
            yield rows, self.nngp(rows, self.inputs)

    @cached_property
    def processes(self) -> list[Conditioned]:
        """The processes given targets or codes, or the fitted Gaussian likelihoods, at the fitted scales."""
        gram = replace(self, draws=()).nngp(self.inputs)
        if self.noise_scale is None:
            return self._observations.processes(gram)
        columns = self.targets.reshape(len(gram), -1) if self.codes is None else self.codes
        return [Conditioned(gram, columns, self.noise_scale**2)]

    def checked_rows(self, x: ArrayLike, name: str = "x_new") -> np.ndarray:
        """Return inputs in float64; refuse other columns, no rows, NaN and infinities."""
        check_finite(name, x)
        x, expected = np.asarray(x, float), self.inputs.shape[1:]
        if x.ndim != self.inputs.ndim or x.shape[1:] != expected:
            raise ValueError(f"{name} must have rows of shape {expected}, as in the fit, but has shape {x.shape}.")
        if not len(x):
            raise ValueError(f"{name} is empty; give at least one row.")
        return x

    def nngp(self, x1: ArrayLike, x2: ArrayLike | None = None) -> np.ndarray:
        """Compute the prior covariance of function values at x1 (n1, ...) and x2 (n2, ...), x1 by default.

        With ``draws`` it is their mean.
        """
        x1, x2 = self.checked_rows(x1, "x1"), None if x2 is None else self.checked_rows(x2, "x2")
        if self.draws:
            return sum(w * fit.nngp(x1, x2) for w, fit in zip(np.asarray(self.weights), self.draws, strict=True))
        with double_precision():
            if self.network is None:
                gram, error = nngp_by_tiles(self.activation, self.scales, x1, x2)
                warn_of_truncation(error)
                return gram
            return problem_type(self.network).nngp_of(self.network, x1, x2)
