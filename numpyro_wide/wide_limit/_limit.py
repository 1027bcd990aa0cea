"""The infinite network that was fitted, and its predictions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from numpyro_wide._checks import check_finite, listing
from numpyro_wide.linear_gaussian._surrogate import Surrogate
from numpyro_wide.machine import double_precision
from numpyro_wide.wide_limit._duals import Activation, activation_name
from numpyro_wide.wide_limit._gp import Conditioned
from numpyro_wide.wide_limit._kernels import fcn_kernel, kernel
from numpyro_wide.wide_limit._label_regression import Calibration, codes_of
from numpyro_wide.wide_limit._observations import Observations
from numpyro_wide.wide_limit._scale_problem import IMAGE_BLOCK

_BLOCK = 512  # rows predicted at a time
_BY_COLUMN = {False: "none", True: "by column"}  # scales of the inputs, in the table
_COLUMNS = {  # of the table, with their formats
    **dict.fromkeys(("activation", "depth", "input_scale"), "{}"),
    **dict.fromkeys(("log_evidence", "log_marginal"), "{:.2f}"),
    **dict.fromkeys(("held_out", "held_out_se", "noise_scale"), "{:.4g}"),
}


@dataclass(frozen=True)
class WideLimitFit:
    """Scales fitted by :func:`fit`.

    Attributes:
        activation: the best network's activation, by name or as a function.
        depth: number of its hidden layers; 0 of a network without that attribute.
        log_evidence: log evidence, of classes that of their codes, or its variational bound, at the fitted scales.
        noise_scale: standard deviation of the noise, in the units of the targets or of the codes; None of others.
        scales: other fitted scales, keywords of :func:`fcn_kernel` and ``scales`` of :func:`~numpyro_wide.nn.bnn`.
        standard_errors: standard errors of the logarithms of the fitted numbers, by name (Laplace); NaN at a bound.
        table: a dictionary for each architecture, best first: "activation", "depth", "input_scale", "log_evidence",
            "log_marginal" (scales integrated out by Laplace), and "noise_scale" of a normal likelihood; of classes
            "held_out", the mean log probability of labels left out, and of codes its standard error, "held_out_se",
            of the rows of the comparison, instead of evidence and marginal.
        inputs: inputs of the fit, (n, d_in) or (n, ...), a copy.
        targets: targets of the fit, (n,) or (n, k), a copy.
        network: network of the fit with the fitted scales, where one was given.
        likelihood: name of the likelihood.
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

    def __post_init__(self) -> None:
        # The caller's arrays may change in place.
        for name in ("inputs", "targets"):
            object.__setattr__(self, name, np.array(getattr(self, name), float))

    def __str__(self) -> str:
        columns = [name for name in _COLUMNS if name in self.table[0]]
        lines = [" ".join(f"{name.replace('_', ' '):>12}" for name in columns)]
        for row in self.table:
            shown = row | {"activation": activation_name(row["activation"])}
            shown["input_scale"] = _BY_COLUMN[row["input_scale"]]
            lines.append(" ".join(f"{_COLUMNS[name].format(shown[name]):>12}" for name in columns))
        return "\n".join([*lines, f"scales of the first: {', '.join(self._shown_scales())}"])

    def _shown_scales(self) -> list[str]:
        numbers = {name: np.ravel(value) for name, value in self.scales.items()}
        return [
            f"{name} {value[0]:.3g}" if value.size == 1 else f"{name} {value.min():.3g} to {value.max():.3g}"
            for name, value in numbers.items()
        ]

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
            (m, classes); of a Bernoulli with ``labels="logits"`` that of 1, in the shape of the targets. Of others mean
            and variance of an observation, each in the shape of the targets.
        """
        x_new = self.checked_rows(x_new)
        if self.calibration is not None:
            if with_noise or known:
                raise ValueError("probabilities of classes take neither with_noise nor parameters of rows; drop them.")
            (process,) = self._processes
            means = [process.mean(cross) for _, cross in self._blocks(x_new)]
            return self.calibration(np.concatenate(means))
        if self.likelihood != "normal":
            return self._expected(x_new, with_noise, known)
        if known:
            raise ValueError(f"{listing(known)} must not be given where the likelihood is 'normal'; drop it.")
        noise_variance = float(self.noise_scale or 0.0) ** 2
        columns = self.targets.reshape(len(self.targets), -1)
        with double_precision():
            process = Conditioned(self._covariance(self.inputs), columns, noise_variance)
        ((mean, variance),) = self._moments(x_new, [process])
        return mean.reshape(len(x_new), *self.targets.shape[1:]), variance + (noise_variance if with_noise else 0.0)

    def surrogate(self) -> Surrogate:
        """Give the Gaussian likelihood that stands for the fit's own, for ``repriorise(..., surrogate=...)``.

        Returns:
            ``(targets, noise_scale)``, as of :func:`~numpyro_wide.fitted_surrogate`.
        """
        if self.likelihood == "normal" or self.calibration is not None:
            raise ValueError(
                "a normal likelihood needs no surrogate; give repriorise the noise_scale. Of logits of classes, fit "
                "with labels='logits'."
            )
        with double_precision():
            gram = self._covariance(self.inputs)
        return Observations.of(self.targets, self.likelihood, self.parameters, self.offset).surrogate(gram)

    def _expected(self, x_new: np.ndarray, with_noise: bool, known: dict[str, Any]) -> Any:
        """Return the expected observations of a likelihood that is not normal."""
        if with_noise:
            raise ValueError(f"with_noise belongs to the likelihood 'normal', but it is {self.likelihood!r}; drop it.")
        given = {**self.parameters, "offset": self.offset}
        if foreign := [name for name in known if name not in given]:
            raise ValueError(f"{listing(foreign)} must not be given where the likelihood is {self.likelihood!r}.")
        rowwise = [
            n for n, v in given.items() if n not in known and np.ndim(v) and np.shape(v)[0] == len(self.inputs) > 1
        ]
        if rowwise:
            raise ValueError(f"{listing(rowwise)} differ by row in the fit; give those of the new rows to predict.")
        given |= known
        offset, unknown = given.pop("offset"), np.zeros((len(x_new), *self.targets.shape[1:]))
        new = Observations.of(unknown, self.likelihood, given, offset)
        return new.predicted(self._moments(x_new, self._processes))

    def _moments(self, x_new: np.ndarray, processes: Sequence[Conditioned]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return mean, (m, c), and variance, (m,), of each process."""
        parts = []
        for rows, cross in self._blocks(x_new):
            with double_precision():
                prior = np.diagonal(self._covariance(rows))
            parts.append([process.moments(cross, prior) for process in processes])
        return [
            (np.concatenate(means), np.concatenate(variances))
            for means, variances in (zip(*blocks, strict=True) for blocks in zip(*parts, strict=True))
        ]

    def _blocks(self, x_new: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield new inputs, some at a time, and their covariances with the rows of the fit."""
        for start in range(0, len(x_new), _BLOCK):
            rows = x_new[start : start + _BLOCK]
            with double_precision():
                cross = self._covariance(rows, self.inputs)
            yield rows, cross

    @cached_property
    def _processes(self) -> list[Conditioned]:
        """The processes given the codes, or the fitted Gaussian likelihoods."""
        with double_precision():
            gram = self._covariance(self.inputs)
            if self.codes is not None:
                return [Conditioned(gram, self.codes, self.noise_scale**2)]
            observations = Observations.of(self.targets, self.likelihood, self.parameters, self.offset)
            return [Conditioned(gram, site.targets, 1 / site.weights) for site in observations.fitted(gram)]

    def checked_rows(self, x_new: ArrayLike) -> np.ndarray:
        """Return new inputs in float64; refuse other columns, no rows, NaN and infinities."""
        check_finite("x_new", x_new)
        x_new = np.asarray(x_new, float)
        if x_new.shape[1:] != self.inputs.shape[1:]:
            expected = (
                f"the {self.inputs.shape[1]} columns" if self.inputs.ndim == 2 else f"rows {self.inputs.shape[1:]}"
            )
            raise ValueError(f"x_new must have {expected} of the fit's inputs, but has shape {x_new.shape}.")
        if not len(x_new):
            raise ValueError("there are no rows to predict for: x_new is empty.")
        return x_new

    def _covariance(self, *x: np.ndarray) -> np.ndarray:
        """Return the NNGP kernel of one or two sets of inputs, in JAX's precision."""
        if self.network is None:
            return np.asarray(fcn_kernel(self.depth, self.activation, **self.scales)(*x)[0])
        return np.asarray(kernel(self.network, block_size=IMAGE_BLOCK).nngp(*x))
