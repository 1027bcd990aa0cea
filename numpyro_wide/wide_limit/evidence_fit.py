"""Scales of a network and of its noise by the evidence of its infinitely wide limit."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_factor, cho_solve
from jax.typing import ArrayLike

from numpyro_wide._checks import check_finite, check_known, listing, whole_number
from numpyro_wide.machine import double_precision
from numpyro_wide.wide_limit._activation import Activation, activation_name
from numpyro_wide.wide_limit._rules import rule_of
from numpyro_wide.wide_limit._scale_search import FittedScales, ScaleProblem
from numpyro_wide.wide_limit._shapes import check_matrix, check_targets
from numpyro_wide.wide_limit._suspect_rows import warn_of_copies, warn_of_far_rows
from numpyro_wide.wide_limit.kernels import fcn_kernel
from numpyro_wide.wide_limit.network_kernel import kernel

_BLOCK = 512  # rows predicted at a time
_BY_COLUMN = {False: "none", True: "by column"}  # scales of the inputs, in the table


@dataclass(frozen=True)
class WideLimitFit:
    """Scales fitted by :func:`fit`.

    Attributes:
        activation: the best network's activation, by name or as a function.
        depth: number of its hidden layers; 0 of a network that has no such attribute.
        log_evidence: log evidence at the fitted scales, without their prior.
        noise_scale: standard deviation of the noise, in the units of the targets.
        scales: the other fitted scales, keywords of :func:`fcn_kernel` and the ``scales`` of
            :func:`~numpyro_wide.nn.bnn`.
        standard_errors: standard errors of the logarithms of the fitted numbers, by name, from the curvature of the log
            posterior (Laplace); NaN of one that stands at its bound, four standard deviations of its prior from the
            median.
        table: a row for each architecture, a dictionary with "activation", "depth", "input_scale" (whether columns have
            scales of their own), "log_evidence", "log_marginal" (scales integrated out by Laplace) and "noise_scale";
            the largest "log_marginal" first.
        inputs: inputs of the fit, (n, d_in) or (n, ...), a copy.
        targets: targets of the fit, (n,) or (n, k), a copy.
        network: network of the fit with the fitted scales in place, where one was given.
    """

    activation: Activation
    depth: int
    log_evidence: float
    noise_scale: float
    scales: dict[str, Any]
    standard_errors: dict[str, Any]
    table: list[dict[str, Any]]
    inputs: np.ndarray
    targets: np.ndarray
    network: Any = None

    def __post_init__(self) -> None:
        # Arrays of whoever calls may change in place; predictions are those of the rows that were given.
        for name in ("inputs", "targets"):
            object.__setattr__(self, name, np.array(getattr(self, name), float))

    def __str__(self) -> str:
        head = ("activation", "depth", "input scale", "log evidence", "log marginal", "noise scale")
        rows = [
            f"{activation_name(row['activation']):>10} {row['depth']:>5} {_BY_COLUMN[row['input_scale']]:>11} "
            f"{row['log_evidence']:>12.2f} {row['log_marginal']:>12.2f} {row['noise_scale']:>11.4g}"
            for row in self.table
        ]
        return "\n".join([" ".join(head), *rows])

    def predict(self, x_new: ArrayLike, *, with_noise: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Predict the infinitely wide network's function, in double precision.

        Args:
            x_new: new inputs, (m, d_in).
            with_noise: whether the variance is that of an observation, noise included, or of the function.

        Returns:
            mean, (m,) or (m, k), and variance, (m,), which all outputs share.

        Raises:
            TypeError: for inputs that are no real numbers.
            ValueError: for inputs that are not a matrix with the columns of the fit's, have no rows, or hold NaN or
                infinities.
        """
        check_finite("x_new", x_new)
        x_new = np.asarray(x_new, float)
        if x_new.shape[1:] != self.inputs.shape[1:]:
            expected = (
                f"the {self.inputs.shape[1]} columns" if self.inputs.ndim == 2 else f"rows {self.inputs.shape[1:]}"
            )
            kind = "a matrix" if self.inputs.ndim == 2 else "an array"
            raise ValueError(f"x_new must be {kind} with {expected} of the fit's, but has {x_new.shape}.")
        if not len(x_new):
            raise ValueError("there are no rows to predict for: x_new is empty.")
        own_kernel = self._kernel()
        with double_precision():
            factor = self._factor()
            weights = np.asarray(cho_solve(factor, self.targets))
            means, variances = [], []
            for start in range(0, len(x_new), _BLOCK):
                rows = x_new[start : start + _BLOCK]
                cross = np.asarray(own_kernel(rows, self.inputs)[0])
                means.append(cross @ weights)
                explained = np.einsum("mn,nm->m", cross, np.asarray(cho_solve(factor, cross.T)))
                variances.append(np.maximum(np.diagonal(np.asarray(own_kernel(rows)[0])) - explained, 0.0))
        noise_variance = self.noise_scale**2 if with_noise else 0.0
        return np.concatenate(means), np.concatenate(variances) + noise_variance

    def _kernel(self) -> Any:
        if self.network is None:
            return fcn_kernel(self.depth, self.activation, **self.scales)
        return kernel(self.network)

    def _factor(self) -> tuple[Any, bool]:
        """Return the Cholesky factor of the targets' covariance, as ``cho_solve`` takes it."""
        gram = np.array(self._kernel()(self.inputs)[0])
        gram[np.diag_indices_from(gram)] += self.noise_scale**2
        return cho_factor(gram, lower=True)

    def left_out(self) -> np.ndarray:
        """Return the residuals of all rows, (n, k), each of the mean given all other rows (Rasmussen 2006, p. 117)."""
        inverse = np.asarray(cho_solve(self._factor(), np.eye(len(self.inputs))))
        return inverse @ self.targets.reshape(len(self.inputs), -1) / np.diagonal(inverse)[:, None]


def fit(
    x: ArrayLike,
    y: ArrayLike,
    *,
    network: Any = None,
    activation: Activation | Sequence[Activation] = "erf",
    depth: int | Sequence[int] = 1,
    input_scale: bool | Sequence[bool] = False,
    num_restarts: int = 4,
    num_rows: int = 300,
    seed: int = 0,
) -> WideLimitFit:
    r"""Fit a network's scales and its noise by the evidence of the infinitely wide network.

    The largest log evidence $\log N(y; 0, K + \sigma^2 I)$ of the NNGP kernel (Mathematics, :eq:`kernels`) plus a
    log-normal prior of every scale, within four of its standard deviations, by SciPy's L-BFGS-B, in double precision
    whatever JAX is set to. The prior keeps scales from the ends where the network is a step function or a constant; its
    medians are the scales of :class:`~numpyro_wide.nn.FCN`, ``b_std`` 0.5, and a noise of 0.3 times the targets' root
    mean square. A few starts are tried on some of the rows, and the best one goes on with all of them.

    Standardise inputs and targets, and look at skewed columns first. The scales go into
    ``bnn(FCN(fit.depth, width, fit.activation), None, fit.noise_scale, scales=fit.scales)``, or as medians of their
    priors there; ``fit.network``, of a fit of networks, has them already.

    Rows that stand in a table more than once pass for measurements without noise. Where they may have decided, a
    warning says so; then fit to distinct rows. The noise is Gaussian: a target that is far from what the others predict
    takes the noise and the scales along. A warning says so where one row, or one in fifty, holds more than half of the
    sum of squared residuals, each from a prediction by all other rows, and lies out by twenty of their robust standard
    deviations and five of the other targets'.

    Args:
        x: inputs, (n, d_in), or images for a network that takes them.
        y: targets, (n,), or (n, k) for outputs that share all scales.
        network: network whose ``w_std``, ``b_std`` and ``readout_w_std`` are fitted, a :class:`~numpyro_wide.nn.CNN`,
            :class:`~numpyro_wide.nn.WideResNet`, :class:`~numpyro_wide.nn.FCN` or one of a registered kernel, or
            several to compare, in the place of ``activation`` and ``depth``; what else it holds stays.
        activation: "erf", "gelu", "identity", "relu", "tanh" or a function of arrays, or several to compare.
        depth: number of hidden layers, at least 1, or several to compare.
        input_scale: whether each column of the inputs has a scale of its own (automatic relevance determination), or
            both to compare, ``(False, True)``: decisive on some tables, and on others only more numbers to learn.
        num_restarts: number of starts for each architecture.
        num_rows: number of rows that the starts see.
        seed: seed of the starts and of the choice of rows.

    Returns:
        fit of the best architecture, a :class:`~numpyro_wide.wide_limit.WideLimitFit`, with the table of
        all.

    Raises:
        TypeError: under a transformation of JAX, where numbers are not known, or for what does not hold real numbers.
        ValueError: for data that are not matrices of as many rows, or hold NaN or infinities; an unknown activation, a
            bad depth or ``input_scale``; or if no start has a finite evidence.

    Warns:
        UserWarning: if copied rows, or a single far one, may have decided.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide import wide_limit
        >>> x = np.linspace(-2, 2, 30)[:, None]
        >>> fit = wide_limit.fit(x, np.sin(3 * x[:, 0]), activation=("erf", "relu"), num_restarts=1)
        >>> fit.activation, sorted(fit.scales)
        ('erf', ['b_std', 'readout_w_std', 'w_std'])
        >>> mean, variance = fit.predict(np.zeros((1, 1)))
    """
    check_known("wide_limit.fit chooses by numbers")
    check_finite("x", x)
    check_finite("y", y)
    inputs, targets = np.array(x, float), np.array(y, float)
    networks = [] if network is None else [network] if callable(network) else list(network)
    if not networks:
        check_matrix("x", inputs)
    check_targets(jnp.asarray(targets), len(inputs))
    by_column = _several(input_scale)
    if not all(isinstance(choice, bool | np.bool_) for choice in by_column):
        raise ValueError(
            "input_scale must be True or False, whether each column of x has a scale that is fitted, or both to "
            f"compare, (False, True), but got {input_scale!r}."
        )
    _check_networks(networks, by_column)
    num_restarts = whole_number("num_restarts", num_restarts)
    num_rows = min(whole_number("num_rows", num_rows), len(inputs))
    architectures = [
        (name, whole_number("depth", layers), bool(choice))
        for name, layers, choice in itertools.product(_several(activation), _several(depth), by_column)
    ]
    if not architectures or (network is not None and not networks):
        raise ValueError("there is no architecture to fit; give at least one activation, depth and input_scale.")
    random = np.random.default_rng(seed)
    rows = np.sort(random.choice(len(inputs), num_rows, replace=False))
    with double_precision():
        if networks:
            pairs = itertools.product(networks, by_column)
            problems = [ScaleProblem.of_network(one, inputs, targets, bool(choice)) for one, choice in pairs]
        else:
            problems = [ScaleProblem.of(*one[:2], inputs, targets, one[2]) for one in architectures]
        fits = sorted((problem.fit(rows, num_restarts, random) for problem in problems), key=lambda f: -f.log_marginal)
    best = _as_fit(fits, inputs, targets)
    warn_of_copies(best)
    warn_of_far_rows(best)
    return best


def _check_networks(networks: Sequence[Any], by_column: Iterable[Any]) -> None:
    """Refuse networks whose scales cannot be fitted."""
    for network in networks:
        rule_of(network)
        names = ["w_std", "b_std", "readout_w_std", *["input_scale"] * any(by_column)]
        if missing := [name for name in names if not hasattr(network, name)]:
            raise ValueError(
                f"the scales {listing(names)} are fitted, but the {type(network).__name__} has no {listing(missing)}; "
                "leave input_scale out, or give the module the attributes that its rule reads."
            )


def _as_fit(fits: list[FittedScales], inputs: np.ndarray, targets: np.ndarray) -> WideLimitFit:
    """Return the first of the fits, with a table of all."""
    shown = ("activation", "depth", "log_evidence", "log_marginal", "noise_scale")
    best = fits[0]._asdict()
    del best["log_marginal"]
    if best["network"] is not None:
        best["network"] = best["network"].clone(**best["scales"])
    table = [
        {**{name: getattr(found, name) for name in shown}, "input_scale": "input_scale" in found.scales}
        for found in fits
    ]
    return WideLimitFit(**best, table=table, inputs=inputs, targets=targets)


def _several(given: Any) -> Iterable[Any]:
    """Return one or several choices as several."""
    if isinstance(given, str | int | np.integer | np.bool_) or callable(given):
        return [given]
    if not isinstance(given, Sequence) and not isinstance(given, np.ndarray):
        raise ValueError(f"activation, depth and input_scale must be one or several, but got {listing([str(given)])}.")
    return given
