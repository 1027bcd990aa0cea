"""The scales at which the infinitely wide network has most evidence, by SciPy's L-BFGS-B from several starts."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jax.scipy.linalg import cho_solve

from numpyro_wide.wide_limit._dual import DUALS
from numpyro_wide.wide_limit.gp import whiten, whitened_log_evidence
from numpyro_wide.wide_limit.kernels import check_activation, fcn_kernel

# Standard deviations of the logarithms a priori. Wide, but no scale is driven to where the network is a step function,
# or a constant, for a few nats; those of the weights are narrow where another scale can take their place.
_SPREADS = {"w_std": 0.5, "b_std": 0.5, "readout_w_std": 1.0, "noise_scale": 1.5, "input_scale": 1.0}
_B_STD, _NOISE = 0.5, 0.3  # medians a priori, that of the noise in units of the targets' root mean square
_BOUND = 4.0  # in those standard deviations
_STEP = 1e-3  # between the gradients whose differences are the curvature
_NOT_FINITE = 1e12  # what the optimiser is told where the evidence is not a number


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scales:
    """An architecture, the data, and what its logarithms of scales, one vector, stand for.

    Attributes:
        activation: of the network.
        depth: likewise.
        inputs: (n, d_in).
        targets: (n,) or (n, k).
        medians: of the scales a priori; a layer's ``w_std`` is a multiple of its own, the same for all layers.
        spreads: standard deviations of the logarithms, in the vector's order, which is that of ``_SPREADS``.
    """

    activation: str = field(metadata={"static": True})
    depth: int = field(metadata={"static": True})
    inputs: np.ndarray
    targets: np.ndarray
    medians: dict[str, np.ndarray]
    spreads: np.ndarray

    @classmethod
    def of(cls, activation: str, depth: int, inputs: np.ndarray, targets: np.ndarray, by_input: bool) -> "Scales":
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
        for name in filter(self.medians.__contains__, _SPREADS):  # JAX sorts the names of a dictionary
            size = self.medians[name].size if name == "input_scale" else 1
            found[name] = vector[start : start + size] if name == "input_scale" else vector[start]
            start += size
        return found

    def scales(self, logarithms: Any) -> dict[str, Any]:
        """The scales, from logarithms over their medians."""
        multiples = self.split(jnp.exp(logarithms) if isinstance(logarithms, jax.Array) else np.exp(logarithms))
        return {name: self.medians[name] * multiple for name, multiple in multiples.items()}


def fit_scales(scales: Scales, rows: np.ndarray, num_restarts: int, random: np.random.Generator) -> dict[str, Any]:
    size = len(scales.spreads)
    starts = [np.zeros(size), *(0.7 * scales.spreads * random.normal(size=size) for _ in range(num_restarts - 1))]
    some = _objective(replace(scales, inputs=scales.inputs[rows], targets=scales.targets[rows]))
    tried = [_descend(some, start, scales.spreads, 60) for start in starts]
    start = min(tried, key=lambda result: result.fun)
    if len(rows) < len(scales.inputs):
        full = _objective(scales)
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


def _objective(scales: Scales) -> Callable:
    """Minus the log posterior of the logarithms, but for a constant, and its gradient, as NumPy's."""

    def with_gradient(logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = _loss_and_gradient(jnp.asarray(logarithms), scales)
        value, gradient = float(value), np.asarray(gradient)
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            return _NOT_FINITE, np.zeros_like(gradient)
        return value, gradient

    return with_gradient


# Of the module, so that a fit to other rows of as many numbers compiles nothing.
@jax.jit
@jax.value_and_grad
def _loss_and_gradient(logarithms: jax.Array, scales: Scales) -> jax.Array:
    found = scales.scales(logarithms)
    noise_scale = found.pop("noise_scale")
    gram, _ = fcn_kernel(scales.depth, scales.activation, **found)(scales.inputs)
    return 0.5 * jnp.sum((logarithms / scales.spreads) ** 2) - _evidence(gram, jnp.asarray(scales.targets), noise_scale)


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
