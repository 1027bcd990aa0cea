"""Search for the scales at which the infinitely wide network has most evidence, by L-BFGS-B from several starts."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from numpyro_wide.wide_limit._activation import Activation, activation_name
from numpyro_wide.wide_limit._held_out import choose_readout
from numpyro_wide.wide_limit._objectives import Bound, Objective
from numpyro_wide.wide_limit._scale_problem import ScaleProblem

_BOUND = 4.0  # of the logarithms, in standard deviations a priori
_TRIED = 15  # steps of each start, of which the best continues
_NOT_FINITE = 1e12  # what the optimiser is told where the evidence is not a number


class FittedScales(NamedTuple):
    """Scales and noise of one architecture at the mode of their posterior.

    Attributes:
        activation: name of the network's activation.
        depth: number of hidden layers.
        log_evidence: log evidence at the fitted scales, without their prior.
        log_marginal: log evidence with the scales integrated out by Laplace's approximation.
        held_out: mean log probability of a label of folds left out, by which the readout's scale was chosen; None of a
            likelihood other than those of classes.
        noise_scale: standard deviation of the noise, in the units of the targets; None of a likelihood without.
        scales: the other scales, keywords of :func:`fcn_kernel`.
        standard_errors: standard errors of the logarithms of all scales and of the noise, by name; NaN at a bound.
        network: network that the scales are of, without them; None for a fully connected one.
    """

    activation: Activation
    depth: int
    log_evidence: float
    log_marginal: float
    held_out: float | None
    noise_scale: float | None
    scales: dict[str, Any]
    standard_errors: dict[str, Any]
    network: Any

    @property
    def score(self) -> float:
        """Score that architectures are compared by."""
        return self.log_marginal if self.held_out is None else self.held_out


@dataclass(frozen=True)
class ScaleSearch:
    """Search for the largest log posterior of an objective's scales.

    Attributes:
        objective: minus the log posterior.
    """

    objective: Objective

    @property
    def problem(self) -> ScaleProblem:
        """Architecture, inputs and priors."""
        return self.objective.problem

    def fit(self, rows: np.ndarray, num_restarts: int, random: np.random.Generator) -> FittedScales:
        """Find the mode of the scales' posterior, and how well it is known.

        The bound of class labels keeps logits far too small, so that the scale of their readout is chosen by folds once
        the bound has decided on the others.

        Args:
            rows: indices of the rows that the starts, and the folds, see.
            num_restarts: number of starts, the first at the medians.
            random: generator of the other starts.

        Raises:
            ValueError: if no start has a finite evidence.
        """
        logarithms = self._start(rows, num_restarts, random)
        if len(rows) < len(self.problem.inputs):
            values, vectors = replace(self, objective=self.objective[rows])._curvature(logarithms)
            # All rows know their scales as much better as they are more.
            share = len(rows) / len(self.problem.inputs)
            logarithms = self._descend_scaled(logarithms, vectors * np.sqrt(share / values))
        found = self._found(logarithms)
        if isinstance(self.objective, Bound) and self.objective.is_of_classes:
            return self._with_readout(found, *choose_readout(self.objective[rows], logarithms))
        return found

    def _with_readout(self, found: FittedScales, logarithms: np.ndarray, score: float) -> FittedScales:
        """Return what was found with another readout's scale, and the score that it was chosen by."""
        scales = found.scales | {"readout_w_std": float(self.problem.scales(logarithms)["readout_w_std"])}
        errors = found.standard_errors | {"readout_w_std": np.nan}
        evidence = self._log_evidence(logarithms, self._value(logarithms)[0])
        return found._replace(scales=scales, standard_errors=errors, log_evidence=evidence, held_out=score)

    def _log_evidence(self, logarithms: np.ndarray, loss: float) -> float:
        return float(0.5 * np.sum((logarithms / self.problem.spreads) ** 2) - loss)

    def _start(self, rows: np.ndarray, num_restarts: int, random: np.random.Generator) -> np.ndarray:
        """Return the logarithms of the best start's optimum on some of the rows."""
        size, spreads = len(self.problem.spreads), self.problem.spreads
        starts = [np.zeros(size), *(0.7 * spreads * random.normal(size=size) for _ in range(num_restarts - 1))]
        some = replace(self, objective=self.objective[rows])
        begun = min((some._descend(start, _TRIED) for start in starts), key=lambda result: result.fun)
        best = some._descend(begun.x, 60)
        self._check_finite(best.fun)
        return np.asarray(best.x)

    def _check_finite(self, loss: float) -> None:
        """Refuse data of which the best scales have no evidence."""
        if not loss < _NOT_FINITE:
            name, depth = activation_name(self.problem.activation), self.problem.depth
            raise ValueError(
                f"no start of a {name} network of depth {depth} has a finite evidence; standardise the inputs "
                "and the targets, or drop rows that repeat with other targets."
            )

    def _found(self, logarithms: np.ndarray) -> FittedScales:
        """Return what is known at the mode."""
        problem, loss = self.problem, self._value(logarithms)[0]
        self._check_finite(loss)
        values, vectors = self._curvature(logarithms)
        errors = np.sqrt(np.sum(vectors**2 / values, axis=1))
        errors[np.abs(logarithms) > (_BOUND - 1e-6) * problem.spreads] = np.nan
        found = problem.scales(logarithms)
        noise_scale = found.pop("noise_scale", None)
        return FittedScales(
            activation=problem.activation,
            depth=problem.depth,
            log_evidence=self._log_evidence(logarithms, loss),
            log_marginal=float(-loss - 0.5 * np.sum(np.log(values)) - np.sum(np.log(problem.spreads))),
            held_out=None,
            noise_scale=None if noise_scale is None else float(noise_scale),
            scales={name: value if np.ndim(value) else float(value) for name, value in found.items()},
            standard_errors=problem.split(errors),
            network=problem.network,
        )

    def _descend(self, start: np.ndarray, max_steps: int) -> Any:
        from scipy.optimize import minimize  # which NumPyro has not loaded

        bounds = [(-_BOUND * spread, _BOUND * spread) for spread in self.problem.spreads]
        options = {"maxiter": max_steps, "ftol": 1e-6, "gtol": 1e-2}
        return minimize(self._value, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)

    def _descend_scaled(self, start: np.ndarray, directions: np.ndarray) -> np.ndarray:
        """Descend in coordinates, along the columns of ``directions``, in which the curvature is about one.

        From scales of some of the rows a few steps are then left, where those along the axes would be dozens.
        """
        from scipy.optimize import minimize  # which NumPyro has not loaded

        bounds = _BOUND * self.problem.spreads
        start = np.clip(start, -bounds, bounds)

        def inside(steps: np.ndarray) -> np.ndarray:
            return np.clip(start + directions @ steps, -bounds, bounds)  # constraints hold but for rounding

        def objective(steps: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = self._value(inside(steps))
            return value, directions.T @ gradient

        edges = np.concatenate([-directions, directions])
        room = np.concatenate([bounds - start, bounds + start])
        constraint = {"type": "ineq", "fun": lambda steps: room + edges @ steps, "jac": lambda _: edges}
        options = {"maxiter": 40, "ftol": 1e-3}
        zero = np.zeros(len(start))
        found = minimize(objective, zero, jac=True, method="SLSQP", constraints=[constraint], options=options)
        return inside(found.x)

    def _curvature(self, logarithms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return eigenvalues and eigenvectors of minus the log posterior's Hessian, by differences of gradients."""
        gradient, size = self._value(logarithms)[1], self.objective.step
        moved = [self._value(logarithms + step)[1] - gradient for step in size * np.eye(len(logarithms))]
        hessian = np.stack(moved) / size
        values, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
        # No direction is known worse than a priori, whatever the curvature at a point that is not quite the optimum.
        return np.maximum(values, 1 / self.problem.spreads.max() ** 2), vectors

    def _value(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        """Return minus the log posterior, but for a constant, and its gradient."""
        value, gradient = self.objective(logarithms)
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            return _NOT_FINITE, np.zeros_like(gradient)
        return value, gradient
