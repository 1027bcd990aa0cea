"""The infinite network that was fitted, and its predictions."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from numpyro_wide._checks import check_finite, listing
from numpyro_wide.linear_gaussian._surrogate import Surrogate
from numpyro_wide.machine import double_precision
from numpyro_wide.wide_limit._additive_problem import additive_by_tiles
from numpyro_wide.wide_limit._duals import Activation, activation_name, warn_of_truncation
from numpyro_wide.wide_limit._gp import Conditioned
from numpyro_wide.wide_limit._label_regression import Calibration, codes_of
from numpyro_wide.wide_limit._observations import Observations, refuse_foreign
from numpyro_wide.wide_limit._scale_problem import network_kernel, nngp_by_tiles

_BLOCK = 512  # rows predicted at a time


@dataclass(frozen=True)
class WideLimitFit:
    """Scales fitted by :func:`fit`.

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
    """

    activation: Activation
    depth: int
    log_evidence: float
    noise_scale: Any
    scales: dict[str, Any]
    standard_errors: dict[str, Any]
    table: list[dict[str, Any]]
    inputs: np.ndarray
    targets: np.ndarray
    network: Any = None
    likelihood: Any = "normal"
    parameters: dict[str, Any] = field(default_factory=dict)
    offset: Any = 0.0
    calibration: Calibration | None = None
    held_out: np.ndarray | None = None

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
        return f"{shown}\nscales of the first: {', '.join(scales)}"

    @property
    def codes(self) -> np.ndarray | None:
        """One-hot codes of the labels less their mean over classes, (n, classes); None without codes."""
        if self.calibration is None:
            return None
        return codes_of(self.targets.astype(int), len(self.calibration.shift))

    def predict(self, x_new: ArrayLike, *, with_noise: bool = False, **known: ArrayLike) -> Any:
        """Predict the infinitely wide network, in double precision.

        Args:
            x_new: new inputs, (m, d_in).
            with_noise: whether the variance includes the noise of a normal likelihood.
            **known: ``offset`` and parameters of the likelihood at the new rows, where they differ by row in the fit.

        Returns:
            Of a normal likelihood mean, (m,) or (m, k), and variance, (m,), of the function. Of classes probabilities,
            (m, classes); of a Bernoulli with ``labels="logits"`` that of 1, (m,) or (m, k). Of others mean and variance
            of an observation, (m,) or (m, k).
        """
        x_new, is_normal = self.checked_rows(x_new), self.likelihood == "normal"
        by_row = {} if is_normal or self.calibration is not None else {**self.parameters, "offset": self.offset}
        given = [*known, *["with_noise"] * with_noise]
        refuse_foreign(given, [*by_row, *["with_noise"] * is_normal], self.likelihood)
        if self.calibration is not None:
            (process,) = self.processes
            means = [process.mean(cross) for _, cross in self._blocks(x_new)]
            return self.calibration(np.concatenate(means))
        shape = (len(x_new), *self.targets.shape[1:])
        if is_normal:
            ((mean, variance),) = self._moments(x_new)
            noise_variance = self.noise_scale**2 if with_noise else 0.0
            return mean.reshape(shape), variance + noise_variance
        rows = len(self.inputs)
        wanted = [name for name, value in by_row.items() if name not in known and np.shape(value)[:1] == (rows,)]
        if wanted and rows > 1:
            raise ValueError(f"{listing(wanted)} differ by row in the fit; give those of the new rows to predict.")
        by_row |= known
        offset = by_row.pop("offset")
        new = Observations.of(np.zeros(shape), self.likelihood, by_row, offset)
        return new.predicted(self._moments(x_new))

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

    def _moments(self, x_new: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return mean, (m, c), and variance, (m,), of each process."""
        parts = []
        for rows, cross in self._blocks(x_new):
            prior = np.diagonal(self.nngp(rows))
            parts.append([process.moments(cross, prior) for process in self.processes])
        return jax.tree.map(lambda *blocks: np.concatenate(blocks), *parts)

    def _blocks(self, x_new: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield new inputs, some at a time, and their covariances with the rows of the fit."""
        for start in range(0, len(x_new), _BLOCK):
            rows = x_new[start : start + _BLOCK]
            yield rows, self.nngp(rows, self.inputs)

    @cached_property
    def processes(self) -> list[Conditioned]:
        """The processes given targets or codes, or the fitted Gaussian likelihoods."""
        gram = self.nngp(self.inputs)
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
        """Compute the prior covariance of function values at x1 (n1, ...) and x2 (n2, ...), x1 by default."""
        x1, x2 = self.checked_rows(x1, "x1"), None if x2 is None else self.checked_rows(x2, "x2")
        with double_precision():
            if self.network is None:
                found, error = nngp_by_tiles(self.activation, self.scales, x1, x2)
                warn_of_truncation(error)
                return found
            from numpyro_wide.nn._additive import AdditiveNetwork  # loaded with the network

            by_network = additive_by_tiles if isinstance(self.network, AdditiveNetwork) else network_kernel
            return by_network(self.network, x1, x2)
