"""Scales of a network and of its noise by the evidence of its infinitely wide limit."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jax.scipy.linalg import cho_factor, cho_solve
from jax.typing import ArrayLike

from numpyro_wide._checks import check_no_nan, is_tracing, listing, whole_number
from numpyro_wide._machine import double_precision
from numpyro_wide.wide_limit._dual import DUALS
from numpyro_wide.wide_limit._shapes import check_targets
from numpyro_wide.wide_limit.gp import whiten, whitened_log_evidence
from numpyro_wide.wide_limit.kernels import check_activation, fcn_kernel

# Standard deviations of the logarithms a priori. Wide, but no scale is driven to where the network is a step function,
# or a constant, for a few nats; those of the weights are narrow where another scale can take their place.
_SPREADS = {"w_std": 0.5, "b_std": 0.5, "readout_w_std": 1.0, "input_scale": 1.0, "noise_scale": 1.5}
_B_STD, _NOISE = 0.5, 0.3  # medians a priori, that of the noise in units of the targets' root mean square
_BOUND = 4.0  # in those standard deviations
_STEP = 1e-3  # between the gradients whose differences are the curvature
_BLOCK = 512  # rows predicted at a time
_NOT_FINITE = 1e12  # what the optimiser is told where the evidence is not a number


@dataclass(frozen=True)
class WideLimitFit:
    """Scales fitted by :func:`fit`.

    Attributes:
        activation: of the best network.
        depth: its number of hidden layers.
        log_evidence: log evidence at the fitted scales, without their prior.
        noise_scale: standard deviation of the noise, in the units of the targets.
        scales: the other fitted scales, keywords of :func:`fcn_kernel` and the ``scales`` of
            :func:`~numpyro_wide.nn.bnn`.
        standard_errors: of the logarithms of the fitted numbers, by name, from the curvature of the log posterior
            (Laplace); NaN of one that stands at its bound, four standard deviations of its prior from the median.
        table: a row for each architecture, a dictionary with "activation", "depth", "log_evidence", "log_marginal"
            (scales integrated out by Laplace) and "noise_scale"; the largest "log_marginal" first.
        inputs: as fitted, (n, d_in).
        targets: as fitted, (n,) or (n, k).
    """

    activation: str
    depth: int
    log_evidence: float
    noise_scale: float
    scales: dict[str, Any]
    standard_errors: dict[str, Any]
    table: list[dict[str, Any]]
    inputs: np.ndarray
    targets: np.ndarray

    def __str__(self) -> str:
        rows = [
            f"{row['activation']:>10} {row['depth']:>5} {row['log_evidence']:>12.2f} {row['log_marginal']:>12.2f} "
            f"{row['noise_scale']:>11.4g}"
            for row in self.table
        ]
        head = f"{'activation':>10} {'depth':>5} {'log evidence':>12} {'log marginal':>12} {'noise scale':>11}"
        return "\n".join([head, *rows])

    def predict(self, x_new: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of the infinitely wide network's function, without noise, in double precision.

        Args:
            x_new: inputs, (m, d_in).

        Returns:
            The mean, (m,) or (m, k), and the variance, (m,), which all outputs share.

        Raises:
            ValueError: for inputs that are not a matrix with the columns of the fit's, have no rows, or hold NaN.
        """
        x_new = np.asarray(x_new, float)
        if x_new.ndim != 2 or x_new.shape[1] != self.inputs.shape[1]:
            raise ValueError(
                f"x_new must be a matrix with the {self.inputs.shape[1]} columns of the fit's, but has {x_new.shape}."
            )
        if not len(x_new):
            raise ValueError("there are no rows to predict for: x_new is empty.")
        kernel = fcn_kernel(self.depth, self.activation, **self.scales)
        with double_precision():
            gram = np.array(kernel(self.inputs)[0])
            gram[np.diag_indices_from(gram)] += self.noise_scale**2
            factor = cho_factor(gram, lower=True)
            weights = np.asarray(cho_solve(factor, self.targets))
            means, variances = [], []
            for start in range(0, len(x_new), _BLOCK):
                rows = x_new[start : start + _BLOCK]
                cross = np.asarray(kernel(rows, self.inputs)[0])
                means.append(cross @ weights)
                explained = np.einsum("mn,nm->m", cross, np.asarray(cho_solve(factor, cross.T)))
                variances.append(np.maximum(np.diagonal(np.asarray(kernel(rows)[0])) - explained, 0.0))
        return np.concatenate(means), np.concatenate(variances)


def fit(
    x: ArrayLike,
    y: ArrayLike,
    *,
    activation: str | Sequence[str] = "erf",
    depth: int | Sequence[int] = 1,
    input_scale: bool = False,
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
    priors there.

    Args:
        x: inputs, (n, d_in).
        y: targets, (n,), or (n, k) for outputs that share all scales.
        activation: "erf", "gelu", "identity" or "relu", or several to compare.
        depth: number of hidden layers, at least 1, or several to compare.
        input_scale: whether each column of the inputs has a scale of its own (automatic relevance determination).
        num_restarts: number of starts for each architecture.
        num_rows: how many rows they see.
        seed: of the starts and of the choice of rows.

    Returns:
        The fit of the best architecture, and the table of all.

    Raises:
        TypeError: under a transformation of JAX, where numbers are not known.
        ValueError: for data that are not matrices of as many rows, or hold NaN; an unknown activation or a bad depth;
            or if no start has a finite evidence.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide import wide_limit
        >>> x = np.linspace(-2, 2, 30)[:, None]
        >>> fit = wide_limit.fit(x, np.sin(3 * x[:, 0]), activation=("erf", "relu"), num_restarts=1)
        >>> fit.activation, sorted(fit.scales)
        ('erf', ['b_std', 'readout_w_std', 'w_std'])
        >>> mean, variance = fit.predict(np.zeros((1, 1)))
    """
    if is_tracing():
        raise TypeError(
            "wide_limit.fit chooses by numbers that are not known under jit, grad or vmap; call it outside."
        )
    inputs, targets = np.asarray(x, float), np.asarray(y, float)
    if inputs.ndim != 2 or 0 in inputs.shape:
        raise ValueError(
            "x must be a matrix (n, d_in) with at least one row and one column, but has shape "
            f"{inputs.shape}; write a single column x[:, None]."
        )
    check_targets(jnp.asarray(targets), len(inputs))
    check_no_nan("x", inputs)
    check_no_nan("y", targets)
    num_restarts = whole_number("num_restarts", num_restarts)
    num_rows = min(whole_number("num_rows", num_rows), len(inputs))
    architectures = [
        (name, whole_number("depth", layers)) for name in _several(activation) for layers in _several(depth)
    ]
    if not architectures:
        raise ValueError("there is no architecture to fit; give at least one activation and one depth.")
    random = np.random.default_rng(seed)
    rows = np.sort(random.choice(len(inputs), num_rows, replace=False))
    fits = []
    with double_precision():
        for name, layers in architectures:
            fits.append(_fit_one(_Scales.of(name, layers, inputs, targets, input_scale), rows, num_restarts, random))
    fits.sort(key=lambda found: -found["log_marginal"])
    best = fits[0]
    names = ("activation", "depth", "log_evidence", "log_marginal", "noise_scale")
    return WideLimitFit(
        **{name: best[name] for name in names if name != "log_marginal"},
        scales=best["scales"],
        standard_errors=best["standard_errors"],
        table=[{name: found[name] for name in names} for found in fits],
        inputs=inputs,
        targets=targets,
    )


@dataclass(frozen=True)
class _Scales:
    """An architecture, the data, and what its logarithms of scales, one vector, stand for.

    Attributes:
        activation: of the network.
        depth: likewise.
        inputs: (n, d_in).
        targets: (n,) or (n, k).
        medians: of the scales a priori; a layer's ``w_std`` is a multiple of its own, the same for all layers.
        spreads: standard deviations of the logarithms, in the vector's order.
    """

    activation: str
    depth: int
    inputs: np.ndarray
    targets: np.ndarray
    medians: dict[str, np.ndarray]
    spreads: np.ndarray

    @classmethod
    def of(cls, activation: str, depth: int, inputs: np.ndarray, targets: np.ndarray, by_input: bool) -> "_Scales":
        check_activation(activation)
        one = jnp.ones(())
        behind = float(1 / jnp.sqrt(DUALS[activation](one, one, one, 0 * one)[0]))  # keeps the variance at one
        size = float(np.sqrt(np.mean(targets**2))) or 1.0
        medians = {
            "w_std": np.array([1.0] + [behind] * (depth - 1)),
            "b_std": np.array(_B_STD),
            "readout_w_std": np.array(size * behind),
            "noise_scale": np.array(size * _NOISE),
        }
        if by_input:
            spread = inputs.std(axis=0)
            medians["input_scale"] = 1 / np.where(spread > 0, spread, 1.0)
        counts = [median.size if name == "input_scale" else 1 for name, median in medians.items()]
        spreads = np.repeat([_SPREADS[name] for name in medians], counts)
        return cls(activation, depth, inputs, targets, medians, spreads)

    def split(self, vector: Any) -> dict[str, Any]:
        """The numbers of a vector by name."""
        found, start = {}, 0
        for name, median in self.medians.items():
            size = median.size if name == "input_scale" else 1
            found[name] = vector[start : start + size] if name == "input_scale" else vector[start]
            start += size
        return found

    def scales(self, logarithms: Any) -> dict[str, Any]:
        """The scales, from logarithms over their medians."""
        multiples = self.split(jnp.exp(logarithms) if isinstance(logarithms, jax.Array) else np.exp(logarithms))
        return {name: self.medians[name] * multiple for name, multiple in multiples.items()}


def _fit_one(scales: _Scales, rows: np.ndarray, num_restarts: int, random: np.random.Generator) -> dict[str, Any]:
    size = len(scales.spreads)
    starts = [np.zeros(size), *(0.7 * scales.spreads * random.normal(size=size) for _ in range(num_restarts - 1))]
    some = _objective(scales, scales.inputs[rows], scales.targets[rows])
    tried = [_descend(some, start, scales.spreads, 60) for start in starts]
    start = min(tried, key=lambda result: result.fun)
    if len(rows) < len(scales.inputs):
        full = _objective(scales, scales.inputs, scales.targets)
        start = _descend(full, start.x, scales.spreads, 40)
    else:
        full = some
    if not start.fun < _NOT_FINITE:
        raise ValueError(
            f"no start of a {scales.activation} network of depth {scales.depth} has a finite evidence; standardise the "
            "inputs and the targets, or drop rows that repeat with other targets."
        )
    logarithms = np.asarray(start.x)
    gradient = full(logarithms)[1]
    moved = [full(logarithms + step)[1] - gradient for step in _STEP * np.eye(size)]
    hessian = np.stack(moved) / _STEP
    hessian = (hessian + hessian.T) / 2
    values, vectors = np.linalg.eigh(hessian)
    # No direction is known worse than a priori, whatever the curvature at a point that is not quite the optimum.
    values = np.maximum(values, 1 / scales.spreads.max() ** 2)
    errors = np.sqrt(np.sum(vectors**2 / values, axis=1))
    errors[np.abs(logarithms) > (_BOUND - 1e-6) * scales.spreads] = np.nan
    found = scales.scales(logarithms)
    log_evidence = -start.fun + 0.5 * np.sum((logarithms / scales.spreads) ** 2)
    return {
        "activation": scales.activation,
        "depth": scales.depth,
        "log_evidence": float(log_evidence),
        "log_marginal": float(-start.fun - 0.5 * np.sum(np.log(values)) - np.sum(np.log(scales.spreads))),
        "noise_scale": float(found.pop("noise_scale")),
        "scales": {name: value if np.ndim(value) else float(value) for name, value in found.items()},
        "standard_errors": scales.split(errors),
    }


def _objective(scales: _Scales, inputs: np.ndarray, targets: np.ndarray) -> Callable:
    """Minus the log posterior of the logarithms, but for a constant, and its gradient, as NumPy's."""
    spreads = jnp.asarray(scales.spreads)

    def loss(logarithms: jax.Array, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        found = scales.scales(logarithms)
        noise_scale = found.pop("noise_scale")
        gram, _ = fcn_kernel(scales.depth, scales.activation, **found)(inputs)
        return 0.5 * jnp.sum((logarithms / spreads) ** 2) - _evidence(gram, targets, noise_scale)

    value_and_grad = jax.jit(jax.value_and_grad(loss))

    def with_gradient(logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = value_and_grad(jnp.asarray(logarithms), inputs, targets)
        value, gradient = float(value), np.asarray(gradient)
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            return _NOT_FINITE, np.zeros_like(gradient)
        return value, gradient

    return with_gradient


def _evidence(gram: jax.Array, targets: jax.Array, noise_scale: jax.Array) -> jax.Array:
    r""":func:`gp_log_evidence` with the gradient $(\alpha \alpha^\top - k K^{-1}) / 2$, not that of its factor."""
    factor, whitened = whiten(stop_gradient(gram), targets, stop_gradient(noise_scale))
    value = whitened_log_evidence(factor, whitened)
    inverse = cho_solve((factor, True), jnp.eye(len(gram)))
    columns = targets.reshape(len(gram), -1)
    alpha = inverse @ columns
    slope = stop_gradient(0.5 * (alpha @ alpha.T - columns.shape[1] * inverse))
    moving = jnp.sum(slope * (gram + noise_scale**2 * jnp.eye(len(gram))))
    return value + moving - stop_gradient(moving)


def _descend(objective: Callable, start: np.ndarray, spreads: np.ndarray, max_steps: int) -> Any:
    from scipy.optimize import minimize  # which NumPyro has not loaded

    bounds = [(-_BOUND * spread, _BOUND * spread) for spread in spreads]
    options = {"maxiter": max_steps, "ftol": 1e-6, "gtol": 1e-2}
    return minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)


def _several(given: Any) -> Iterable[Any]:
    if isinstance(given, str | int | np.integer):
        return [given]
    if not isinstance(given, Sequence) and not isinstance(given, np.ndarray):
        raise ValueError(f"activation and depth must be one or several, but got {listing([str(given)])}.")
    return given
