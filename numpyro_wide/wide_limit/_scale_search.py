"""Search for the scales at which the infinitely wide network has most evidence, by L-BFGS-B from several starts."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import stop_gradient
from jax.scipy.linalg import cho_solve

from numpyro_wide.wide_limit._activation import Activation, activation_dual, activation_name
from numpyro_wide.wide_limit.gp import whiten, whitened_log_evidence
from numpyro_wide.wide_limit.kernels import fcn_kernel
from numpyro_wide.wide_limit.network_kernel import kernel

# Standard deviations of the logarithms a priori. Wide, but no scale is driven to where the network is a step function,
# or a constant, for a few nats; those of the weights are narrow where another scale can take their place.
_SPREADS = {"w_std": 0.5, "b_std": 0.5, "readout_w_std": 1.0, "noise_scale": 1.5, "input_scale": 1.0}
_B_STD, _NOISE = 0.5, 0.3  # medians a priori, that of the noise in units of the targets' root mean square
_BOUND = 4.0  # in those standard deviations
_STEP = 1e-3  # between the gradients whose differences are the curvature
_BLOCK = 128  # rows of the kernel at a time: its derivative is elementwise, and stays in the cache so
_TRIED = 15  # steps of each start, of which the best goes on
_NOT_FINITE = 1e12  # what the optimiser is told where the evidence is not a number


class FittedScales(NamedTuple):
    """Scales and noise of one architecture at the mode of their posterior.

    Attributes:
        activation: name of the network's activation.
        depth: number of hidden layers.
        log_evidence: log evidence at the fitted scales, without their prior.
        log_marginal: log evidence with the scales integrated out by Laplace's approximation.
        noise_scale: standard deviation of the noise, in the units of the targets.
        scales: the other scales, keywords of :func:`fcn_kernel`.
        standard_errors: standard errors of the logarithms of all scales and of the noise, by name; NaN at a bound.
        network: network that the scales are of, without them; None for a fully connected one.
    """

    activation: Activation
    depth: int
    log_evidence: float
    log_marginal: float
    noise_scale: float
    scales: dict[str, Any]
    standard_errors: dict[str, Any]
    network: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaleProblem:
    """An architecture, its data, and the priors of its scales, whose logarithms over their medians are one vector.

    Attributes:
        activation: name of the network's activation.
        depth: number of hidden layers.
        network: network whose scales are fitted, its own left out; None for a fully connected one of that activation
            and depth.
        inputs: inputs, (n, d_in), or (n, ...) for a network.
        targets: targets, (n,) or (n, k).
        medians: medians of the scales a priori, by name; a layer's ``w_std`` is a multiple of its own, the same for all
            layers.
        spreads: standard deviations of the logarithms, in the vector's order, which is that of ``_SPREADS``.
    """

    activation: Activation = field(metadata={"static": True})
    depth: int = field(metadata={"static": True})
    network: Any = field(metadata={"static": True})
    inputs: np.ndarray
    targets: np.ndarray
    medians: dict[str, np.ndarray]
    spreads: np.ndarray

    @classmethod
    def of(
        cls, activation: Activation, depth: int, inputs: np.ndarray, targets: np.ndarray, by_input: bool
    ) -> "ScaleProblem":
        """Set up the problem with the priors that suit the architecture and the size of the targets.

        Args:
            activation: name of the network's activation.
            depth: number of hidden layers.
            inputs: inputs, (n, d_in).
            targets: targets, (n,) or (n, k).
            by_input: whether each column of the inputs has a scale of its own.
        """
        # What keeps the variance at one.
        behind = float(1 / jnp.sqrt(activation_dual(activation).moments(jnp.ones(1)).product[0]))
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
        return cls(activation, depth, None, inputs, targets, medians, spreads)

    @classmethod
    def of_network(cls, network: Any, inputs: np.ndarray, targets: np.ndarray, by_input: bool) -> "ScaleProblem":
        """Set up the problem of a network's scales, which are numbers, its own but for the readout's bias left out.

        Args:
            network: module with the attributes ``w_std``, ``b_std`` and ``readout_w_std``.
            inputs: inputs, (n, ...).
            targets: targets, (n,) or (n, k).
            by_input: whether each column of the inputs has a scale of its own.
        """
        bare = network.clone(w_std=None, b_std=0.0, readout_w_std=None)
        dense = cls.of(network.activation, 2, inputs.reshape(len(inputs), -1), targets, by_input)
        medians = dense.medians | {"w_std": dense.medians["w_std"][-1]}
        # A mean over pixels lowers the variance by as much as they differ: by the kernel of some rows.
        some = kernel(bare.clone(w_std=float(medians["w_std"]), b_std=_B_STD, readout_w_std=1.0))(inputs[:20])[0]
        size = float(np.sqrt(np.mean(targets**2))) or 1.0
        medians["readout_w_std"] = np.array(size / np.sqrt(np.mean(np.diagonal(some))))
        depth = getattr(network, "depth", 0)
        return cls(network.activation, depth, bare, inputs, targets, medians, dense.spreads)

    def gram(self, scales: dict[str, Any]) -> Any:
        """Return the limit's kernel of the inputs with themselves, (n, n)."""
        if self.network is None:
            blocked = fcn_kernel(self.depth, self.activation, **scales, block_size=_BLOCK)
            return blocked(self.inputs)[0]
        return kernel(self.network.clone(**scales))(self.inputs)[0]

    def split(self, vector: Any) -> dict[str, Any]:
        """Return the numbers of a vector by name."""
        found, start = {}, 0
        for name in filter(self.medians.__contains__, _SPREADS):  # JAX sorts the names of a dictionary
            size = self.medians[name].size if name == "input_scale" else 1
            found[name] = vector[start : start + size] if name == "input_scale" else vector[start]
            start += size
        return found

    def scales(self, logarithms: Any) -> dict[str, Any]:
        """Return scales and noise by name, from logarithms over their medians."""
        multiples = self.split(jnp.exp(logarithms) if isinstance(logarithms, Array) else np.exp(logarithms))
        return {name: self.medians[name] * multiple for name, multiple in multiples.items()}

    def fit(self, rows: np.ndarray, num_restarts: int, random: np.random.Generator) -> FittedScales:
        """Find the mode of the scales' posterior, and how well it is known.

        Args:
            rows: indices of the rows that the starts see.
            num_restarts: number of starts, the first at the medians.
            random: generator of the other starts.

        Raises:
            ValueError: if no start has a finite evidence.
        """
        logarithms, loss = self._mode(rows, num_restarts, random)
        values, vectors = self._curvature(logarithms)
        errors = np.sqrt(np.sum(vectors**2 / values, axis=1))
        errors[np.abs(logarithms) > (_BOUND - 1e-6) * self.spreads] = np.nan
        found = self.scales(logarithms)
        return FittedScales(
            activation=self.activation,
            depth=self.depth,
            log_evidence=float(0.5 * np.sum((logarithms / self.spreads) ** 2) - loss),
            log_marginal=float(-loss - 0.5 * np.sum(np.log(values)) - np.sum(np.log(self.spreads))),
            noise_scale=float(found.pop("noise_scale")),
            scales={name: value if np.ndim(value) else float(value) for name, value in found.items()},
            standard_errors=self.split(errors),
            network=self.network,
        )

    def _mode(self, rows: np.ndarray, num_restarts: int, random: np.random.Generator) -> tuple[np.ndarray, float]:
        """Return the logarithms of the best start's optimum, and minus the log posterior there."""
        size = len(self.spreads)
        starts = [np.zeros(size), *(0.7 * self.spreads * random.normal(size=size) for _ in range(num_restarts - 1))]
        some = replace(self, inputs=self.inputs[rows], targets=self.targets[rows])
        begun = min((some._descend(start, _TRIED) for start in starts), key=lambda result: result.fun)
        best = some._descend(begun.x, 60)
        if len(rows) < len(self.inputs) and best.fun < _NOT_FINITE:
            values, vectors = some._curvature(best.x)
            # All rows know their scales as much better as they are more.
            best = self._descend_scaled(best.x, vectors / np.sqrt(values * len(self.inputs) / len(rows)))
        if not best.fun < _NOT_FINITE:
            name = activation_name(self.activation)
            raise ValueError(
                f"no start of a {name} network of depth {self.depth} has a finite evidence; standardise the inputs "
                "and the targets, or drop rows that repeat with other targets."
            )
        return np.asarray(best.x), best.fun

    def _descend(self, start: np.ndarray, max_steps: int) -> Any:
        from scipy.optimize import minimize  # which NumPyro has not loaded

        bounds = [(-_BOUND * spread, _BOUND * spread) for spread in self.spreads]
        options = {"maxiter": max_steps, "ftol": 1e-6, "gtol": 1e-2}
        return minimize(self._objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)

    def _descend_scaled(self, start: np.ndarray, directions: np.ndarray) -> Any:
        """Descend in coordinates, along the columns of ``directions``, in which the curvature is about one.

        From scales of some of the rows a few steps are then left, where those along the axes would be dozens.
        """
        from scipy.optimize import minimize  # which NumPyro has not loaded

        bounds = _BOUND * self.spreads
        start = np.clip(start, -bounds, bounds)

        def inside(steps: np.ndarray) -> np.ndarray:
            return np.clip(start + directions @ steps, -bounds, bounds)  # constraints hold but for rounding

        def objective(steps: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = self._objective(inside(steps))
            return value, directions.T @ gradient

        edges = np.concatenate([-directions, directions])
        room = np.concatenate([bounds - start, bounds + start])
        constraint = {"type": "ineq", "fun": lambda steps: room + edges @ steps, "jac": lambda _: edges}
        options = {"maxiter": 40, "ftol": 1e-3}
        zero = np.zeros(len(start))
        found = minimize(objective, zero, jac=True, method="SLSQP", constraints=[constraint], options=options)
        found.x = inside(found.x)
        return found

    def _curvature(self, logarithms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return eigenvalues and eigenvectors of minus the log posterior's Hessian, by differences of gradients."""
        gradient = self._objective(logarithms)[1]
        moved = [self._objective(logarithms + step)[1] - gradient for step in _STEP * np.eye(len(logarithms))]
        hessian = np.stack(moved) / _STEP
        values, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
        # No direction is known worse than a priori, whatever the curvature at a point that is not quite the optimum.
        return np.maximum(values, 1 / self.spreads.max() ** 2), vectors

    def _objective(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        """Return minus the log posterior of the logarithms, but for a constant, and its gradient."""
        loss, slope = _loss_and_gradient(jnp.asarray(logarithms), self)
        value, gradient = float(loss), np.asarray(slope)
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            return _NOT_FINITE, np.zeros_like(gradient)
        return value, gradient


# Of the module, so that a fit to other rows of as many numbers compiles nothing.
@jax.jit
@jax.value_and_grad
def _loss_and_gradient(logarithms: Array, problem: ScaleProblem) -> Array:
    found = problem.scales(logarithms)
    noise_scale = found.pop("noise_scale")
    gram = problem.gram(found)
    prior = 0.5 * jnp.sum((logarithms / problem.spreads) ** 2)
    return prior - _evidence(gram, jnp.asarray(problem.targets), noise_scale)


def _evidence(gram: Array, targets: Array, noise_scale: Array) -> Array:
    r"""Return what :func:`gp_log_evidence` does, with the gradient $(\alpha \alpha^\top - k K^{-1}) / 2$ in its place.

    The gradient of a Cholesky factor takes several times as long.
    """
    factor, whitened = whiten(stop_gradient(gram), targets, stop_gradient(noise_scale))
    value = whitened_log_evidence(factor, whitened)
    inverse = cho_solve((factor, True), jnp.eye(len(gram)))
    columns = targets.reshape(len(gram), -1)
    alpha = inverse @ columns
    slope = stop_gradient(0.5 * (alpha @ alpha.T - columns.shape[1] * inverse))
    moving = jnp.sum(slope * (gram + noise_scale**2 * jnp.eye(len(gram))))
    return value + moving - stop_gradient(moving)
