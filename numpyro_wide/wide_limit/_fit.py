"""Scales and noise by the evidence of the infinite network."""

import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from scipy.linalg import lapack

from numpyro_wide._checks import check_finite, check_known, check_one_of, listing, whole_number
from numpyro_wide.machine import double_precision
from numpyro_wide.wide_limit._duals import Activation, activation_dual, activation_name
from numpyro_wide.wide_limit._kernels import kernel
from numpyro_wide.wide_limit._layer_kernels import Inputs, check_matrix, check_targets, fully_connected, rule_of
from numpyro_wide.wide_limit._limit import WideLimitFit
from numpyro_wide.wide_limit._observations import Observations
from numpyro_wide.wide_limit._variational import State, VariationalFit

# Standard deviations of the logarithms a priori. Wide, but no scale is driven to where the network is a step function,
# or a constant, for a few nats; those of the weights are narrow where another scale can take their place.
_SPREADS = {"w_std": 0.5, "b_std": 0.5, "readout_w_std": 1.0, "noise_scale": 1.5, "input_scale": 1.0}
_B_STD, _NOISE = 0.5, 0.3  # medians a priori, that of the noise in units of the targets' root mean square


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
        medians: medians of the scales a priori, by name; a layer's ``w_std`` is a multiple of its own, the same for all
            layers.
        spreads: standard deviations of the logarithms, in the vector's order, which is that of ``_SPREADS``.
    """

    activation: Activation = field(metadata={"static": True})
    depth: int = field(metadata={"static": True})
    network: Any = field(metadata={"static": True})
    inputs: Any
    medians: dict[str, np.ndarray]
    spreads: np.ndarray

    @classmethod
    def of(
        cls, activation: Activation, depth: int, inputs: np.ndarray, size: float, by_input: bool, has_noise: bool
    ) -> "ScaleProblem":
        """Set up the problem with the priors that suit the architecture and the size of the function values.

        Args:
            activation: name of the network's activation.
            depth: number of hidden layers.
            inputs: inputs, (n, d_in).
            size: standard deviation of the function values that is expected.
            by_input: whether each column of the inputs has a scale of its own.
            has_noise: whether the noise is one of the scales.
        """
        # What keeps the variance at one.
        behind = float(1 / jnp.sqrt(activation_dual(activation).moments(jnp.ones(1)).product[0]))
        medians = {
            "w_std": np.array([1.0] + [behind] * (depth - 1)),
            "b_std": np.array(_B_STD),
            "readout_w_std": np.array(size * behind),
        }
        if has_noise:
            medians["noise_scale"] = np.array(size * _NOISE)
        if by_input:
            spread = inputs.std(axis=0)
            medians["input_scale"] = 1 / np.where(spread > 0, spread, 1.0)
        counts = [median.size if name == "input_scale" else 1 for name, median in medians.items()]
        spreads = np.repeat([_SPREADS[name] for name in medians], counts)
        return cls(activation, depth, None, inputs, medians, spreads)

    @classmethod
    def of_network(
        cls, network: Any, inputs: np.ndarray, size: float, by_input: bool, has_noise: bool
    ) -> "ScaleProblem":
        """Set up the problem of a network's scales, which are numbers, its own but for the readout's bias left out.

        Args:
            network: module with the attributes ``w_std``, ``b_std`` and ``readout_w_std``.
            inputs: inputs, (n, ...).
            size: standard deviation of the function values that is expected.
            by_input: whether each column of the inputs has a scale of its own.
            has_noise: whether the noise is one of the scales.
        """
        bare = network.clone(w_std=None, b_std=0.0, readout_w_std=None)
        dense = cls.of(network.activation, 2, inputs.reshape(len(inputs), -1), size, by_input, has_noise)
        medians = dense.medians | {"w_std": dense.medians["w_std"][-1]}
        # A mean over pixels lowers the variance by as much as they differ: by the kernel of some rows.
        some = kernel(bare.clone(w_std=float(medians["w_std"]), b_std=_B_STD, readout_w_std=1.0))(inputs[:20])[0]
        medians["readout_w_std"] = np.array(size / np.sqrt(np.mean(np.diagonal(some))))
        depth = getattr(network, "depth", 0)
        return cls(network.activation, depth, bare, inputs, medians, dense.spreads)

    def __getitem__(self, rows: np.ndarray) -> "ScaleProblem":
        """Return the problem of some of the rows, with the same priors."""
        return replace(self, inputs=self.inputs[rows])

    def kernel(self, scales: dict[str, Any], x1: Array, x2: Array, same: Array) -> Array:
        """Return the kernel of a fully connected network's limit for some inputs, (n1, n2).

        Args:
            scales: scales by name.
            x1: inputs, (n1, d_in).
            x2: inputs, (n2, d_in).
            same: which pairs are one and the same input, (n1, n2).
        """
        units = Inputs(x1, x2, same).vectors(scales.get("input_scale"))
        w_std, b_std = (jnp.broadcast_to(scales[name], (self.depth,)) for name in ("w_std", "b_std"))
        readout = scales["readout_w_std"], jnp.zeros(())
        return fully_connected(units, self.activation, (w_std, b_std, *readout)).product

    def network_kernel(self, scales: dict[str, Any]) -> Array:
        """Return the kernel of a network's limit for the inputs with themselves, (n, n)."""
        own = {name: value for name, value in scales.items() if name != "noise_scale"}
        return kernel(self.network.clone(**own))(self.inputs)[0]

    @property
    def noise(self) -> int:
        """Place of the noise among the logarithms."""
        return list(_SPREADS).index("noise_scale")

    @property
    def readout(self) -> int:
        """Place of the readout's scale among the logarithms."""
        return list(_SPREADS).index("readout_w_std")

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


_TILE = 128  # rows and columns: the derivative is elementwise, and stays in the cache so


def gram(problem: ScaleProblem, logarithms: np.ndarray) -> np.ndarray:
    """Return the limit's kernel of the inputs with themselves, (n, n).

    Args:
        problem: architecture and inputs.
        logarithms: logarithms of the scales over their medians.
    """
    vector = jnp.asarray(logarithms)
    if problem.network is not None:
        return np.array(_whole(vector, problem))
    tiles = [(rows, columns, _tile(vector, *args)) for rows, columns, args in _tiles(problem)]
    size = len(problem.inputs)
    found = np.empty((size, size))
    for rows, columns, tile in tiles:  # which JAX has computed meanwhile
        values = np.asarray(tile)[: rows.stop - rows.start, : columns.stop - columns.start]
        found[rows, columns], found[columns, rows] = values, values.T
    return found


def pull_back(problem: ScaleProblem, logarithms: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """Differentiate by the logarithms a function that has this derivative by the kernel.

    Args:
        problem: architecture and inputs.
        logarithms: logarithms of the scales over their medians.
        slope: derivative by the kernel, (n, n), symmetric.
    """
    vector = jnp.asarray(logarithms)
    if problem.network is not None:
        return np.array(_whole_slope(vector, problem, jnp.asarray(slope)))
    found = []
    for rows, columns, args in _tiles(problem):
        weights = np.zeros((_TILE, _TILE))
        times = 1 if rows == columns else 2  # a tile below the diagonal stands for the one above, too
        weights[: rows.stop - rows.start, : columns.stop - columns.start] = times * slope[rows, columns]
        found.append(_tile_slope(vector, *args, weights))
    return np.sum([np.asarray(part) for part in found], axis=0)


def _tiles(problem: ScaleProblem) -> Iterator[tuple[slice, slice, tuple[Any, ...]]]:
    """Yield the rows and columns of tiles on and below the diagonal, and what a tile is computed from."""
    size = len(problem.inputs)
    filled = np.arange(-(-size // _TILE) * _TILE)
    filled[size:] = 0  # the last tile is filled up by the first row
    parts = problem.inputs[filled].reshape(-1, _TILE, problem.inputs.shape[1])
    bare = replace(problem, inputs=None)
    slices = [slice(start, min(start + _TILE, size)) for start in range(0, size, _TILE)]
    for i, rows in enumerate(slices):
        for j, columns in enumerate(slices[: i + 1]):
            yield rows, columns, (bare, parts[i], parts[j], i == j)


# Of the module, so that a fit to other data compiles nothing.
@jax.jit
def _tile(logarithms: Array, problem: ScaleProblem, x1: Array, x2: Array, is_on_diagonal: Array) -> Array:
    same = is_on_diagonal & jnp.eye(_TILE, dtype=bool)
    return problem.kernel(problem.scales(logarithms), x1, x2, same)


@jax.jit
@jax.grad
def _tile_slope(
    logarithms: Array, problem: ScaleProblem, x1: Array, x2: Array, is_on_diagonal: Array, slope: Array
) -> Array:
    return jnp.sum(slope * _tile(logarithms, problem, x1, x2, is_on_diagonal))


@jax.jit
def _whole(logarithms: Array, problem: ScaleProblem) -> Array:
    return problem.network_kernel(problem.scales(logarithms))


@jax.jit
@jax.grad
def _whole_slope(logarithms: Array, problem: ScaleProblem, slope: Array) -> Array:
    return jnp.sum(slope * _whole(logarithms, problem))


_TOLERANCE = 2e-3  # of means and weights at the largest bound: it is level there, and its gradient is as good as this


class Objective(ABC):
    """Minus a log posterior of scales, but for a constant, as a function of their logarithms over their medians.

    Attributes:
        problem: architecture, inputs and priors.
    """

    problem: ScaleProblem
    step: ClassVar[float]  # of the logarithms, over which differences of gradients tell the curvature

    @abstractmethod
    def __getitem__(self, rows: np.ndarray) -> "Objective":
        """Return the objective of some of the rows."""

    @abstractmethod
    def __call__(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        """Return value and gradient; not finite where there is none."""

    def _with_prior(self, logarithms: np.ndarray, value: float, slope: np.ndarray) -> tuple[float, np.ndarray]:
        """Return what is minimised, and its gradient, from a log evidence and its own."""
        spreads = self.problem.spreads
        prior = 0.5 * np.sum((logarithms / spreads) ** 2)
        return prior - value, logarithms / spreads**2 - slope


@dataclass(frozen=True)
class Evidence(Objective):
    """Log evidence of targets with Gaussian noise.

    Attributes:
        problem: architecture, inputs and priors.
        targets: targets, (n,) or (n, k).
    """

    problem: ScaleProblem
    targets: np.ndarray
    step: ClassVar[float] = 1e-3

    def __getitem__(self, rows: np.ndarray) -> "Evidence":
        return Evidence(self.problem[rows], self.targets[rows])

    def __call__(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        noise_variance = self.problem.scales(logarithms)["noise_scale"] ** 2
        covariance = gram(self.problem, logarithms)
        covariance.flat[:: len(covariance) + 1] += noise_variance
        found = _evidence(covariance, self.targets.reshape(len(covariance), -1))
        if found is None:
            return np.inf, np.zeros_like(logarithms)
        value, slope = found
        pulled = pull_back(self.problem, logarithms, slope)
        pulled[self.problem.noise] += 2 * noise_variance * np.trace(slope)
        return self._with_prior(logarithms, value, pulled)


class Bound(Objective):
    """Variational bound on the log evidence of observations that are not Gaussian (Mathematics, :eq:`bound-slope`).

    Every call begins where the last one ended, which saves most of its steps.

    Args:
        problem: architecture, inputs and priors.
        observations: observations and their likelihood.
    """

    step = 0.03

    def __init__(self, problem: ScaleProblem, observations: Observations):
        self.problem, self.observations = problem, observations
        self._columns = observations.columns()
        self._constant = sum(float(np.sum(column.constant)) for column in self._columns)
        self._states: list[State | None] = [None] * len(self._columns)

    @property
    def is_of_classes(self) -> bool:
        """Whether the observations are labels of classes."""
        return self.observations.likelihood in ("bernoulli", "categorical")

    def gram(self, logarithms: np.ndarray) -> np.ndarray:
        """Return the kernel, (n, n)."""
        return gram(self.problem, logarithms)

    def __getitem__(self, rows: np.ndarray) -> "Bound":
        return Bound(self.problem[rows], self.observations[rows])

    def __call__(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        covariance = self.gram(logarithms)
        if not np.isfinite(covariance).all():
            return np.inf, np.zeros_like(logarithms)
        value, slope = self._constant, np.zeros_like(covariance)
        for i, column in enumerate(self._columns):
            fit = VariationalFit(column, covariance, None)
            try:
                state = self._states[i] = fit.climb(self._states[i], _TOLERANCE)
            except ValueError:  # of a kernel at the end of the scales' range
                return np.inf, np.zeros_like(logarithms)
            value += state.bound
            slope += fit.kernel_slope(state)
        return self._with_prior(logarithms, value, pull_back(self.problem, logarithms, slope))


def _evidence(covariance: np.ndarray, columns: np.ndarray) -> tuple[float, np.ndarray] | None:
    r"""Return what :func:`gp_log_evidence` does, and $(\alpha \alpha^\top - k K^{-1}) / 2$, its derivative by K.

    By LAPACK's own inverse of a factored matrix, which takes half as long as one by triangular solves.

    Args:
        covariance: $K$, the noise's variance included, (n, n); it is overwritten.
        columns: targets, (n, k).

    Returns:
        value and derivative, (n, n); None if the covariance is not positive definite, or not finite.
    """
    num_rows, num_columns = columns.shape
    if not np.isfinite(covariance).all():
        return None
    factor, failed = lapack.dpotrf(covariance.T, lower=1, overwrite_a=1)
    if failed:
        return None
    alpha = lapack.dpotrs(factor, columns, lower=1)[0]
    log_det = 2 * np.sum(np.log(np.diagonal(factor)))
    value = -0.5 * (np.sum(columns * alpha) + num_columns * (log_det + num_rows * np.log(2 * np.pi)))
    inverse = lapack.dpotri(factor, lower=1, overwrite_c=1)[0]  # its lower triangle
    inverse = np.tril(inverse) + np.tril(inverse, -1).T
    return float(value), 0.5 * (alpha @ alpha.T - num_columns * inverse)


_NUM_FOLDS = 3
_STEP = 0.5 * np.log(10)  # between the readout's scales that are tried
_MOST = 5  # of them, above the bound's own
_READOUT_BOUND = 4.0  # of the logarithm, in standard deviations a priori


def choose_readout(bound: Bound, logarithms: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the logarithms with the best readout's scale in their place, and its mean log probability of a label.

    The Gaussian of a bound lies inside of where the labels let the logits be, which costs more the larger they may be:
    the bound is largest at scales whose probabilities are far too unsure.

    Args:
        bound: objective of the rows that folds are made of.
        logarithms: logarithms of all scales over their medians.
    """
    place, spread = bound.problem.readout, bound.problem.spreads[bound.problem.readout]
    tried = []
    for step in range(-1, _MOST + 1):
        moved = logarithms.copy()
        moved[place] = np.clip(moved[place] + step * _STEP, -_READOUT_BOUND * spread, _READOUT_BOUND * spread)
        score = left_out(bound.gram(moved), bound.observations)
        tried.append((score * len(bound.problem.inputs) - 0.5 * (moved[place] / spread) ** 2, moved, score))
    _, logarithms, score = max(tried, key=lambda one: one[0])
    return logarithms, score


def left_out(gram: np.ndarray, observations: Observations) -> float:
    """Return the mean log probability of labels, each given the folds that it is not in; folds share classes out.

    Args:
        gram: covariance of a logit between rows, (n, n).
        observations: labels, (n,).
    """
    labels = observations.values.astype(int)
    folds = np.empty(len(labels), int)
    folds[np.argsort(labels, kind="stable")] = np.arange(len(labels)) % _NUM_FOLDS
    found = []
    for fold in np.unique(folds):
        kept, out = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        known, cross = gram[np.ix_(kept, kept)], gram[np.ix_(out, kept)]
        sites = observations[kept].fitted(known)
        probs = observations[out].predicted([site.condition(known)(cross, np.diagonal(gram)[out]) for site in sites])
        probs = probs if probs.ndim == 2 else np.stack([1 - probs, probs], axis=1)
        found.append(np.log(np.maximum(probs[np.arange(len(out)), labels[out]], 1e-300)))
    return float(np.mean(np.concatenate(found)))


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


if TYPE_CHECKING:
    from numpyro_wide.wide_limit._limit import WideLimitFit

_SMALL_NOISE = 0.1  # of the targets' root mean square: the evidence of copied rows goes far below
# From how many rows on one can be told from the others. How far it must lie from what they predict: in robust standard
# deviations of such residuals, and, for where a function is steep they are large too, in those of the other targets.
_FEWEST_ROWS, _FAR, _FAR_OF_TARGETS = 10, 20.0, 5.0
_ONE_OF = 50  # of so many rows one may be far out, and be told


def warn_of_far_rows(found: "WideLimitFit") -> None:
    """Warn if one row, or few of many, hold most of the squared residuals and lie far outside of the others."""
    if len(found.inputs) < _FEWEST_ROWS:
        return
    with double_precision():
        residuals = found.left_out()
    distances, targets = np.abs(residuals - np.median(residuals, axis=0)), found.targets.reshape(residuals.shape)
    few = max(1, len(residuals) // _ONE_OF)
    for distance, target in zip(distances.T, targets.T, strict=True):
        rows = np.argsort(-distance)[:few]
        share = np.sum(distance[rows] ** 2) / max(np.sum(distance**2), np.finfo(float).tiny)
        bound = max(_FAR * 1.4826 * np.median(distance), _FAR_OF_TARGETS * np.std(np.delete(target, rows)))
        rows = rows[distance[rows] > bound]
        if share > 0.5 and len(rows):
            row = int(rows[0])
            warnings.warn(
                f"{len(rows)} of {len(residuals)} rows, row {row} with the target {target[row]:.4g} the farthest, lie "
                f"up to {distance[row]:.2g} from what the other rows predict, and hold most of the sum of squared "
                f"residuals: the fitted noise, {found.noise_scale:.2g}, and the scales are decided by them. Correct or "
                "drop them if they are mistakes; otherwise transform the targets (take logarithms), or use a "
                "likelihood with heavy tails.",
                UserWarning,
                stacklevel=3,  # whoever calls fit
            )
            return


def warn_of_copies(found: "WideLimitFit") -> None:
    """Warn if the noise is small and rows repeat others."""
    inputs, targets, noise_scale = found.inputs, found.targets, found.noise_scale
    if noise_scale >= _SMALL_NOISE * np.sqrt(np.mean(targets**2)):
        return
    rows = np.column_stack([inputs.reshape(len(inputs), -1), targets])
    num_copies = len(inputs) - len(np.unique(rows, axis=0))
    if num_copies:
        warnings.warn(
            f"the fitted noise, {noise_scale:.2g}, is small beside the targets, and {num_copies} of {len(inputs)} rows "
            "repeat the inputs and targets of others: copies pass for measurements without noise. If they are copies, "
            "fit to distinct rows, those of numpy.unique(numpy.column_stack([x, y]), axis=0).",
            UserWarning,
            stacklevel=3,  # whoever calls fit
        )


Name = Literal["normal", "bernoulli", "binomial", "categorical", "negative_binomial", "poisson", "student_t"]


class _Data(NamedTuple):
    """Targets of a fit and their likelihood.

    Attributes:
        targets: targets, (n,) or (n, k).
        likelihood: name of the likelihood.
        parameters: its parameters that were given, by name.
        offset: what the function values have besides the network's.
    """

    targets: np.ndarray
    likelihood: str
    parameters: dict[str, Any]
    offset: Any

    @classmethod
    def of(cls, y: ArrayLike, num_rows: int, likelihood: str, given: dict[str, Any], offset: ArrayLike) -> "_Data":
        """Check targets and what is known of their likelihood."""
        check_one_of("likelihood", likelihood, get_args(Name))
        check_finite("y", y)
        targets = np.array(y, float)
        check_targets(jnp.asarray(targets), num_rows)
        parameters = {name: value for name, value in given.items() if value is not None}
        if likelihood == "normal":
            if parameters or np.any(np.asarray(offset) != 0):
                foreign = listing([*parameters, *["offset"] * bool(np.any(np.asarray(offset) != 0))])
                raise ValueError(f"{foreign} must not be given where the likelihood is 'normal'; drop it.")
            return cls(targets, likelihood, parameters, offset)
        if likelihood == "categorical" and "num_classes" not in parameters:
            parameters["num_classes"] = _num_classes(targets)
        return cls(targets, likelihood, parameters, offset)

    @property
    def observations(self) -> Observations:
        """Targets and their likelihood, other than the normal."""
        return Observations.of(self.targets, self.likelihood, self.parameters, self.offset)

    @property
    def size(self) -> float:
        """Standard deviation of the function values that is expected."""
        if self.likelihood == "normal":
            return float(np.sqrt(np.mean(self.targets**2))) or 1.0
        return self.observations.size

    def objective(self, problem: ScaleProblem) -> Objective:
        """Return minus the log posterior of a problem's scales."""
        return Evidence(problem, self.targets) if self.likelihood == "normal" else Bound(problem, self.observations)


def _num_classes(labels: np.ndarray) -> int:
    """Return the number of classes of labels that have all of them."""
    present = np.unique(labels)
    if len(present) < 2 or not np.array_equal(present, np.arange(len(present))):
        raise ValueError(
            f"labels of a categorical must be 0, 1, ... up to the number of classes, of which there are two at least, "
            f"but y holds {listing(f'{label:g}' for label in present[:10])}; pass num_classes if a class is missing "
            "from y, or number them by numpy.unique(labels, return_inverse=True)."
        )
    return len(present)


def fit(
    x: ArrayLike,
    y: ArrayLike,
    *,
    likelihood: Name | str = "normal",
    num_classes: int | None = None,
    total_count: ArrayLike | None = None,
    concentration: ArrayLike | None = None,
    df: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    offset: ArrayLike = 0.0,
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
    mean square. A few starts are tried on some of the rows, and the best one continues with all of them.

    Of another likelihood it is the variational bound on the log evidence that the largest Gaussian gives (Mathematics,
    :eq:`bound-slope`), with function values of the size of the observations a priori, of 10 for the logits of classes
    and 3 for those of a binomial. There is no noise. The bound of "bernoulli" and "categorical" prefers logits that are
    far too small: the readout's scale is chosen in the end by the log probability of labels left out, in three folds of
    ``num_rows`` rows, and has no standard error. Architectures are compared by that, too.

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
        y: targets, (n,), or (n, k) for outputs that share all scales; labels of classes, (n,), from 0.
        likelihood: "normal", with a noise that is fitted; "bernoulli" or "categorical", for classes; "binomial",
            "poisson", "negative_binomial" or "student_t", as in :func:`~numpyro_wide.fitted_surrogate`.
        num_classes: number of classes of a categorical; None for one more than the largest label.
        total_count: number of trials of a binomial; broadcasts against the targets, like those below.
        concentration: concentration of a negative binomial.
        df: degrees of freedom of Student's t.
        scale: scale of Student's t.
        offset: what is added to the function values of a likelihood that is not normal, such as the logarithm of an
            exposure, or of the mean count.
        network: network whose ``w_std``, ``b_std`` and ``readout_w_std`` are fitted, a :class:`~numpyro_wide.nn.CNN`,
            :class:`~numpyro_wide.nn.WideResNet`, :class:`~numpyro_wide.nn.FCN` or one of a registered kernel, or
            several to compare, instead of ``activation`` and ``depth``; what else it holds stays.
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
    inputs = np.array(x, float)
    networks = [] if network is None else [network] if callable(network) else list(network)
    if not networks:
        check_matrix("x", inputs)
    given = {"num_classes": num_classes, "total_count": total_count, "concentration": concentration}
    data = _Data.of(y, len(inputs), likelihood, {**given, "df": df, "scale": scale}, offset)
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
    by_noise: dict[str, Any] = {"size": data.size, "has_noise": likelihood == "normal"}
    with double_precision():
        if networks:
            pairs = itertools.product(networks, by_column)
            problems = [
                ScaleProblem.of_network(one, inputs, by_input=bool(choice), **by_noise) for one, choice in pairs
            ]
        else:
            problems = [ScaleProblem.of(*one[:2], inputs, by_input=one[2], **by_noise) for one in architectures]
        searches = [ScaleSearch(data.objective(problem)) for problem in problems]
        fits = sorted((search.fit(rows, num_restarts, random) for search in searches), key=lambda f: -f.score)
    best = _as_fit(fits, inputs, data)
    if likelihood == "normal":
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


def _as_fit(fits: list[FittedScales], inputs: np.ndarray, data: _Data) -> WideLimitFit:
    """Return the first of the fits, with a table of all."""
    shown = ("activation", "depth", "log_evidence", "log_marginal", "noise_scale", "held_out")
    best = fits[0]._asdict()
    del best["log_marginal"], best["held_out"]
    if best["network"] is not None:
        best["network"] = best["network"].clone(**best["scales"])
    table = [
        {name: getattr(found, name) for name in shown if getattr(found, name) is not None}
        | {"input_scale": "input_scale" in found.scales}
        for found in fits
    ]
    return WideLimitFit(**best, table=table, inputs=inputs, **data._asdict())


def _several(given: Any) -> Iterable[Any]:
    """Return one or several choices as several."""
    if isinstance(given, str | int | np.integer | np.bool_) or callable(given):
        return [given]
    if not isinstance(given, Sequence) and not isinstance(given, np.ndarray):
        raise ValueError(f"activation, depth and input_scale must be one or several, but got {listing([str(given)])}.")
    return given
