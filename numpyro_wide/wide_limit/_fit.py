"""Fit of scales and noise by the evidence of the infinite network."""

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import check_finite, check_known, check_one_of, listing, whole_number
from numpyro_wide.machine import double_precision
from numpyro_wide.wide_limit._duals import Activation, activation_dual, activation_name
from numpyro_wide.wide_limit._gp import Conditioned, evidence_and_slope
from numpyro_wide.wide_limit._kernels import kernel
from numpyro_wide.wide_limit._layer_kernels import LayerKernels, check_matrix, check_targets, rule_of
from numpyro_wide.wide_limit._likelihoods import LIKELIHOODS
from numpyro_wide.wide_limit._limit import WideLimitFit
from numpyro_wide.wide_limit._observations import Observations
from numpyro_wide.wide_limit._variational import State, VariationalFit

# The problem.


# Prior standard deviations of the logarithms, narrow where another scale can take a scale's place.
_SPREADS = {"w_std": 0.5, "b_std": 0.5, "readout_w_std": 1.0, "noise_scale": 1.5, "input_scale": 1.0}
_B_STD, _NOISE = 0.5, 0.3  # prior medians; of the noise over the targets' root mean square
_TILE = 128  # rows and columns of a tile, to stay in the cache


@dataclass(frozen=True)
class ScaleProblem:
    """An architecture, its data, and the priors of its scales' logarithms."""

    activation: Activation
    depth: int
    network: Any  # without its scales; None for a fully connected one
    inputs: np.ndarray  # (n, d_in), or (n, ...) for a network
    medians: dict[str, np.ndarray]  # of the scales a priori; of w_std by layer
    spreads: np.ndarray  # of the logarithms

    @classmethod
    def of(
        cls, activation: Activation, depth: int, inputs: np.ndarray, size: float, by_input: bool, has_noise: bool
    ) -> "ScaleProblem":
        """Set up a fully connected network, for function values of the standard deviation ``size``."""
        behind = float(_unit_scale(activation))
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
        return cls(activation, depth, None, inputs, medians, np.repeat([_SPREADS[name] for name in medians], counts))

    @classmethod
    def of_network(
        cls, network: Any, inputs: np.ndarray, size: float, by_input: bool, has_noise: bool
    ) -> "ScaleProblem":
        """Set up a network's ``w_std``, ``b_std`` and ``readout_w_std``, one number each."""
        bare = network.clone(w_std=None, b_std=0.0, readout_w_std=None)
        dense = cls.of(network.activation, 2, inputs.reshape(len(inputs), -1), size, by_input, has_noise)
        medians = dense.medians | {"w_std": dense.medians["w_std"][-1]}
        # A mean over pixels lowers the variance, as measured on some rows.
        some = kernel(bare.clone(w_std=float(medians["w_std"]), b_std=_B_STD, readout_w_std=1.0))(inputs[:20])[0]
        medians["readout_w_std"] = np.array(size / np.sqrt(np.mean(np.diagonal(some))))
        depth = getattr(network, "depth", 0)
        return cls(network.activation, depth, bare, inputs, medians, dense.spreads)

    def __getitem__(self, rows: np.ndarray) -> "ScaleProblem":
        """Return the problem of some of the rows, with the same priors."""
        return replace(self, inputs=self.inputs[rows])

    def place(self, name: str) -> int:
        """Return the index of a scale among the logarithms."""
        return list(self.medians).index(name)

    def split(self, vector: np.ndarray) -> dict[str, Any]:
        """Return the numbers of a vector by name, those of the inputs last."""
        return {n: vector[i:] if n == "input_scale" else vector[i] for i, n in enumerate(self.medians)}

    def scales(self, logarithms: np.ndarray) -> dict[str, Any]:
        """Return scales and noise by name."""
        return {name: self.medians[name] * multiple for name, multiple in self.split(np.exp(logarithms)).items()}

    def gram(self, logarithms: np.ndarray) -> np.ndarray:
        """Return the limit's kernel of the inputs, (n, n)."""
        scales = self.scales(logarithms)
        scales.pop("noise_scale", None)
        if self.network is not None:
            return np.array(_network_gram(self.network, scales, self.inputs))
        products = self._products(scales)
        tiles = [(rows, columns, self._through(scales, *tile)[-1]) for rows, columns, tile in _tiles(products)]
        found = np.empty_like(products)
        for rows, columns, units in tiles:  # computed together
            values = np.asarray(units[2])[: rows.stop - rows.start, : columns.stop - columns.start]
            found[rows, columns], found[columns, rows] = values, values.T
        return scales["readout_w_std"] ** 2 * found

    def pull_back(self, logarithms: np.ndarray, slope: np.ndarray) -> np.ndarray:
        """Return a derivative by the logarithms, from that by the symmetric kernel, (n, n)."""
        scales = self.scales(logarithms)
        noise = {"noise_scale": 0.0} if scales.pop("noise_scale", None) is not None else {}
        if self.network is not None:
            by_scale = _network_slope(self.network, scales, self.inputs, slope)
        else:
            by_scale = self._slopes(scales, slope)
        found = {name: np.asarray(by_scale[name]) * value for name, value in scales.items()} | noise
        return np.concatenate([np.ravel(found[n] if n == "input_scale" else np.sum(found[n])) for n in self.medians])

    def _products(self, scales: dict[str, Any]) -> np.ndarray:
        """Return the mean products of the scaled inputs, (n, n)."""
        x = self.inputs * scales.get("input_scale", 1.0)
        return x @ x.T / x.shape[1]

    def _through(self, scales: dict[str, Any], units: "_Units", is_on_diagonal: bool) -> list["_Units"]:
        """Return a tile's units before each layer, and after the last."""
        found = [units]
        for w_std in scales["w_std"]:
            found.append(_tile_layer(self.activation, found[-1], is_on_diagonal, w_std, scales["b_std"]))
        return found

    def _slopes(self, scales: dict[str, Any], slope: np.ndarray) -> dict[str, Any]:
        """Return derivatives by a fully connected network's scales, from that by its kernel, (n, n)."""
        readout = scales["readout_w_std"]
        parts = []
        for rows, columns, (units, is_on_diagonal) in _tiles(self._products(scales)):
            weights = np.zeros((_TILE, _TILE))
            times = 1 if rows == columns else 2  # two tiles off the diagonal
            weights[: rows.stop - rows.start, : columns.stop - columns.start] = times * slope[rows, columns]
            after: Any = (np.zeros(_TILE), np.zeros(_TILE), readout**2 * weights)
            through = self._through(scales | {"w_std": scales["w_std"][:-1]}, units, is_on_diagonal)
            by_layer: list[Array] = []
            for before, w_std in zip(through[::-1], scales["w_std"][::-1], strict=True):
                args = before, is_on_diagonal, w_std, scales["b_std"], after
                after, numbers = _tile_layer_slope(self.activation, *args)
                by_layer.insert(0, numbers)
            parts.append((rows, columns, after, by_layer))
        by_scale = np.sum([np.asarray(by_layer) for *_, by_layer in parts], axis=0)  # (depth, 3)
        by_w_std, by_b_std, total = by_scale.T
        found = {"w_std": by_w_std, "b_std": np.sum(by_b_std), "readout_w_std": 2 * total[-1] / readout}
        if "input_scale" in scales:
            by_product = np.zeros_like(slope)
            for rows, columns, units, _ in parts:
                square1, square2, product = map(np.asarray, units)
                num_rows, num_columns = rows.stop - rows.start, columns.stop - columns.start
                by_product[rows, columns] += product[:num_rows, :num_columns]
                by_product[rows, rows] += np.diag(square1[:num_rows])
                by_product[columns, columns] += np.diag(square2[:num_columns])
            each = np.sum(self.inputs * (by_product @ self.inputs), axis=0)
            found["input_scale"] = 2 * scales["input_scale"] * each / self.inputs.shape[1]
        return found


_Units = tuple[Any, Any, Any]  # mean squares of rows and columns, covariances


def _tiles(product: np.ndarray) -> Iterator[tuple[slice, slice, tuple[_Units, bool]]]:
    """Yield rows and columns of tiles on and below the diagonal, their units, and whether on it."""
    size = len(product)
    filled = np.arange(-(-size // _TILE) * _TILE)
    filled[size:] = 0  # fills the last tile up
    squares, parts = np.diagonal(product)[filled].reshape(-1, _TILE), filled.reshape(-1, _TILE)
    slices = [slice(start, min(start + _TILE, size)) for start in range(0, size, _TILE)]
    for i, rows in enumerate(slices):
        for j, columns in enumerate(slices[: i + 1]):
            yield rows, columns, ((squares[i], squares[j], product[np.ix_(parts[i], parts[j])]), i == j)


# Compiled once for all depths and data.
@partial(jax.jit, static_argnums=0)
def _tile_layer(activation: Activation, units: _Units, is_on_diagonal: Any, w_std: Any, b_std: Any) -> _Units:
    """Return the units after a layer."""
    square1, square2, product = map(jnp.asarray, units)
    same = is_on_diagonal & jnp.eye(_TILE, dtype=bool)
    zero = jnp.zeros((), product.dtype)
    found = LayerKernels(square1, square2, product, zero, None, same, zero).dense(w_std, b_std).activate(activation)
    return found.square1, found.square2, found.product


@partial(jax.jit, static_argnums=0)
def _tile_layer_slope(
    activation: Activation, units: _Units, is_on_diagonal: Any, w_std: Any, b_std: Any, slope: _Units
) -> tuple[_Units, Array]:
    """Return derivatives by the units before a layer; by both scales, and Σ slope · product."""
    layer = lambda *args: _tile_layer(activation, args[0], is_on_diagonal, *args[1:])  # noqa: E731
    after, pull = jax.vjp(layer, units, w_std, b_std)
    before, *by_scale = pull(slope)
    return before, jnp.stack([*by_scale, jnp.sum(slope[2] * after[2])])


@partial(jax.jit, static_argnums=0)
def _network_gram(network: Any, scales: dict[str, Any], inputs: Array) -> Array:
    return kernel(network.clone(**scales))(inputs)[0]


@partial(jax.jit, static_argnums=0)
def _network_slope(network: Any, scales: dict[str, Any], inputs: Array, slope: Array) -> dict[str, Array]:
    return jax.grad(lambda scales: jnp.sum(slope * _network_gram(network, scales, inputs)))(scales)


@partial(jax.jit, static_argnums=0)
def _unit_scale(activation: Activation) -> Array:
    """Return the scale of weights that keeps the variance at one."""
    return 1 / jnp.sqrt(activation_dual(activation).moments(jnp.ones(1)).product[0])


# The objectives.

_TOLERANCE = 2e-3  # of means and weights at the largest bound


@dataclass(frozen=True)
class Evidence:
    """Minus the log posterior of the scales, given targets with Gaussian noise."""

    problem: ScaleProblem
    targets: np.ndarray
    step: ClassVar[float] = 1e-3  # of the logarithms, for the curvature
    is_of_classes: ClassVar[bool] = False

    def __getitem__(self, rows: np.ndarray) -> "Evidence":
        return Evidence(self.problem[rows], self.targets[rows])

    def __call__(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        """Return value and gradient; not finite where there is none."""
        noise_variance = self.problem.scales(logarithms)["noise_scale"] ** 2
        covariance = self.problem.gram(logarithms)
        covariance.flat[:: len(covariance) + 1] += noise_variance
        found = evidence_and_slope(covariance, self.targets.reshape(len(covariance), -1))
        if found is None:
            return np.inf, np.zeros_like(logarithms)
        value, slope = found
        pulled = self.problem.pull_back(logarithms, slope)
        pulled[self.problem.place("noise_scale")] += 2 * noise_variance * np.trace(slope)
        return _with_prior(self.problem, logarithms, value, pulled)


class Bound:
    """Minus the log posterior of the scales, bounded (Mathematics, :eq:`bound-slope`)."""

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

    def __getitem__(self, rows: np.ndarray) -> "Bound":
        return Bound(self.problem[rows], self.observations[rows])

    def __call__(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        """Return value and gradient; not finite where there is none."""
        covariance = self.problem.gram(logarithms)
        if not np.isfinite(covariance).all():
            return np.inf, np.zeros_like(logarithms)
        value, slope = self._constant, np.zeros_like(covariance)
        for i, column in enumerate(self._columns):
            fit = VariationalFit(column, covariance)
            try:
                state = self._states[i] = fit.climb(self._states[i], _TOLERANCE)
            except ValueError:  # at extreme scales
                return np.inf, np.zeros_like(logarithms)
            value += state.bound
            slope += fit.kernel_slope(state)
        return _with_prior(self.problem, logarithms, value, self.problem.pull_back(logarithms, slope))


def _with_prior(
    problem: ScaleProblem, logarithms: np.ndarray, value: float, slope: np.ndarray
) -> tuple[float, np.ndarray]:
    """Return minus the log posterior and its gradient."""
    spreads = problem.spreads
    prior = 0.5 * np.sum((logarithms / spreads) ** 2)
    return prior - value, logarithms / spreads**2 - slope


# The search for the mode.

_BOUND = 4.0  # of the logarithms, in prior standard deviations
_TRIED = 15  # steps of each start
_NOT_FINITE = 1e12  # for the optimiser


def fit_scales(
    objective: Evidence | Bound, rows: np.ndarray, num_restarts: int, random: np.random.Generator
) -> tuple[dict[str, Any], dict[str, Any], np.ndarray]:
    """Find the mode of the scales' posterior and its curvature, from starts on some rows."""
    problem, some = objective.problem, objective[rows]
    spreads, size = problem.spreads, len(problem.spreads)
    starts = [np.zeros(size), *(0.7 * spreads * random.normal(size=size) for _ in range(num_restarts - 1))]
    begun = min((_descend(some, start, _TRIED) for start in starts), key=lambda result: result.fun)
    best = _descend(some, begun.x, 60)
    _check_finite(problem, best.fun)
    logarithms = np.asarray(best.x)
    if len(rows) < len(problem.inputs):
        values, vectors = _curvature(some, logarithms)
        # The curvature grows with the rows.
        share = len(rows) / len(problem.inputs)
        logarithms = _descend_scaled(objective, logarithms, vectors * np.sqrt(share / values))
    loss = _value(objective, logarithms)[0]
    _check_finite(problem, loss)
    values, vectors = _curvature(objective, logarithms)
    log_marginal = float(-loss - 0.5 * np.sum(np.log(values)) - np.sum(np.log(spreads)))
    errors = np.sqrt(np.sum(vectors**2 / values, axis=1))
    errors[np.abs(logarithms) > (_BOUND - 1e-6) * spreads] = np.nan
    extra: dict[str, float] = {}
    if isinstance(objective, Bound) and objective.is_of_classes:
        logarithms, extra["held_out"] = choose_readout(objective[rows], logarithms)
        errors[problem.place("readout_w_std")] = np.nan
        loss = _value(objective, logarithms)[0]
    scales = {name: value if np.ndim(value) else float(value) for name, value in problem.scales(logarithms).items()}
    if (noise_scale := scales.pop("noise_scale", None)) is not None:
        extra["noise_scale"] = noise_scale
    log_evidence = float(0.5 * np.sum((logarithms / spreads) ** 2) - loss)
    row = {
        "activation": problem.activation,
        "depth": problem.depth,
        "input_scale": "input_scale" in scales,
        "log_evidence": log_evidence,
        "log_marginal": log_marginal,
        **extra,
    }
    fields = {
        "activation": problem.activation,
        "depth": problem.depth,
        "log_evidence": log_evidence,
        "noise_scale": noise_scale,
        "scales": scales,
        "standard_errors": problem.split(errors),
        "network": None if problem.network is None else problem.network.clone(**scales),
    }
    return fields, row, logarithms


def _check_finite(problem: ScaleProblem, loss: float) -> None:
    """Refuse data of which the best scales have no evidence."""
    if not loss < _NOT_FINITE:
        raise ValueError(
            f"no start of a {activation_name(problem.activation)} network of depth {problem.depth} has a finite "
            "evidence; standardise the inputs and the targets."
        )


def _value(objective: Evidence | Bound, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
    """Return an objective and its gradient, always finite."""
    value, gradient = objective(logarithms)
    if not (np.isfinite(value) and np.isfinite(gradient).all()):
        return _NOT_FINITE, np.zeros_like(gradient)
    return value, gradient


def _descend(objective: Evidence | Bound, start: np.ndarray, max_steps: int) -> Any:
    """Minimise within the bounds by L-BFGS-B."""
    from scipy.optimize import minimize  # loaded late

    bounds = [(-_BOUND * spread, _BOUND * spread) for spread in objective.problem.spreads]
    options = {"maxiter": max_steps, "ftol": 1e-6, "gtol": 1e-2}
    return minimize(partial(_value, objective), start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)


def _descend_scaled(objective: Evidence | Bound, start: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Minimise along the columns of ``directions``, in which the curvature is about one."""
    from scipy.optimize import minimize  # loaded late

    bounds = _BOUND * objective.problem.spreads
    start = np.clip(start, -bounds, bounds)

    def inside(steps: np.ndarray) -> np.ndarray:
        return np.clip(start + directions @ steps, -bounds, bounds)  # constraints may fail by rounding

    def along(steps: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = _value(objective, inside(steps))
        return value, directions.T @ gradient

    edges = np.concatenate([-directions, directions])
    room = np.concatenate([bounds - start, bounds + start])
    constraint = {"type": "ineq", "fun": lambda steps: room + edges @ steps, "jac": lambda _: edges}
    options = {"maxiter": 40, "ftol": 1e-3}
    zero = np.zeros(len(start))
    return inside(minimize(along, zero, jac=True, method="SLSQP", constraints=[constraint], options=options).x)


def _curvature(objective: Evidence | Bound, logarithms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eigenvalues and eigenvectors of the Hessian, by differences of gradients."""
    gradient, size = _value(objective, logarithms)[1], objective.step
    moved = [_value(objective, logarithms + step)[1] - gradient for step in size * np.eye(len(logarithms))]
    hessian = np.stack(moved) / size
    values, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
    # No direction is known worse than a priori.
    return np.maximum(values, 1 / objective.problem.spreads.max() ** 2), vectors


# The readout of classes.

_NUM_FOLDS = 3
_STEP = 0.5 * np.log(10)  # between the readout's scales
_MOST = 5  # of them above the bound's own


def choose_readout(bound: Bound, logarithms: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the logarithms with the best readout's scale, and its mean log probability of a label."""
    place = bound.problem.place("readout_w_std")
    spread, tried = bound.problem.spreads[place], []
    for step in range(-1, _MOST + 1):
        moved = logarithms.copy()
        moved[place] = np.clip(moved[place] + step * _STEP, -_BOUND * spread, _BOUND * spread)
        score = left_out(bound.problem.gram(moved), bound.observations)
        tried.append((score * len(bound.problem.inputs) - 0.5 * (moved[place] / spread) ** 2, moved, score))
    _, logarithms, score = max(tried, key=lambda one: one[0])
    return logarithms, score


def left_out(gram: np.ndarray, observations: Observations) -> float:
    """Return the mean log probability of labels (n,) given the other folds."""
    labels = observations.values.astype(int)
    folds = np.empty(len(labels), int)
    folds[np.argsort(labels, kind="stable")] = np.arange(len(labels)) % _NUM_FOLDS
    found = []
    for fold in np.unique(folds):
        kept, out = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        known, cross, prior = gram[np.ix_(kept, kept)], gram[np.ix_(out, kept)], np.diagonal(gram)[out]
        processes = [Conditioned(known, s.targets, 1 / s.weights) for s in observations[kept].fitted(known)]
        probs = observations[out].predicted([process.moments(cross, prior) for process in processes])
        probs = probs if probs.ndim == 2 else np.stack([1 - probs, probs], axis=1)
        found.append(np.log(np.maximum(probs[np.arange(len(out)), labels[out]], 1e-300)))
    return float(np.mean(np.concatenate(found)))


# The fit.


def fit(
    x: ArrayLike,
    y: ArrayLike,
    *,
    likelihood: str = "normal",
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

    The mode of the log evidence $\log N(y; 0, K + \sigma^2 I)$ of the NNGP kernel (Mathematics, :eq:`kernels`) plus
    log-normal priors, within four prior standard deviations; of other likelihoods, the variational bound on it
    (Mathematics, :eq:`bound-slope`). The readout's scale of classes is chosen by the log probability of labels left out
    in three folds, and has no standard error.

    Standardise inputs and targets. The scales go into
    ``bnn(FCN(fit.depth, width, fit.activation), None, fit.noise_scale, scales=fit.scales)``; ``fit.network``, of a fit
    of networks, has them already.

    Args:
        x: inputs, (n, d_in), or images for a network that takes them.
        y: targets, (n,), or (n, k) for outputs that share all scales; labels of classes, (n,), from 0.
        likelihood: "normal", with a fitted noise; "bernoulli", "categorical", "binomial", "poisson",
            "negative_binomial" or "student_t", as in :func:`~numpyro_wide.fitted_surrogate`.
        num_classes: number of classes of a categorical; None for one more than the largest label.
        total_count: number of trials of a binomial; broadcasts against the targets, like those below.
        concentration: concentration of a negative binomial.
        df: degrees of freedom of Student's t.
        scale: scale of Student's t.
        offset: added to function values, such as a log exposure; not of a normal likelihood.
        network: a :class:`~numpyro_wide.nn.CNN`, :class:`~numpyro_wide.nn.WideResNet`, :class:`~numpyro_wide.nn.FCN`
            or one of a registered kernel, or several to compare, instead of ``activation`` and ``depth``; its
            ``w_std``, ``b_std`` and ``readout_w_std`` are fitted.
        activation: "erf", "gelu", "identity", "relu", "tanh" or a function of arrays, or several to compare.
        depth: number of hidden layers, at least 1, or several to compare.
        input_scale: whether each column of the inputs has a scale of its own (automatic relevance determination), or
            ``(False, True)`` to compare.
        num_restarts: number of starts.
        num_rows: number of rows of the starts, and of the folds of classes.
        seed: seed of starts and rows.

    Returns:
        the best architecture, a :class:`~numpyro_wide.wide_limit.WideLimitFit`, with a table of all.

    Raises:
        ValueError: if no start has a finite evidence.

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
    check_targets(targets, len(inputs))
    check_one_of("likelihood", likelihood, ("normal", *LIKELIHOODS))
    is_normal = likelihood == "normal"
    given = {"num_classes": num_classes, "total_count": total_count, "concentration": concentration}
    parameters = {name: value for name, value in (given | {"df": df, "scale": scale}).items() if value is not None}
    if foreign := [*parameters, *["offset"] * bool(np.any(np.asarray(offset) != 0))] if is_normal else []:
        raise ValueError(f"{listing(foreign)} must not be given where the likelihood is 'normal'; drop it.")
    if likelihood == "categorical" and "num_classes" not in parameters:
        parameters["num_classes"] = _num_classes(targets)
    by_column = _several(input_scale)
    if not all(isinstance(choice, bool | np.bool_) for choice in by_column):
        raise ValueError(
            f"input_scale must be True or False, or both to compare, (False, True), but got {input_scale!r}."
        )
    _check_networks(networks, by_column)
    num_restarts = whole_number("num_restarts", num_restarts)
    num_rows = min(whole_number("num_rows", num_rows), len(inputs))
    architectures = [
        (name, whole_number("depth", layers), bool(choice))
        for name, layers, choice in itertools.product(_several(activation), _several(depth), by_column)
    ]
    if not architectures or (network is not None and not networks):
        raise ValueError("there is no architecture to fit; give one activation, depth and input_scale.")
    random = np.random.default_rng(seed)
    rows = np.sort(random.choice(len(inputs), num_rows, replace=False))
    with double_precision():
        observations = None if is_normal else Observations.of(targets, likelihood, parameters, offset)
        size = observations.size if observations else float(np.sqrt(np.mean(targets**2))) or 1.0
        options: dict[str, Any] = {"inputs": inputs, "size": size, "has_noise": is_normal}
        if networks:
            pairs = itertools.product(networks, by_column)
            problems = [ScaleProblem.of_network(one, by_input=bool(choice), **options) for one, choice in pairs]
        else:
            problems = [ScaleProblem.of(*one[:2], by_input=one[2], **options) for one in architectures]
        fits = []
        for problem in problems:
            objective = Bound(problem, observations) if observations else Evidence(problem, targets)
            fits.append((*fit_scales(objective, rows, num_restarts, random), problem))
        fits.sort(key=lambda one: -one[1].get("held_out", one[1]["log_marginal"]))
        fields, _, logarithms, problem = fits[0]
        found = WideLimitFit(
            **fields,
            table=[row for _, row, *_ in fits],
            inputs=inputs,
            targets=targets,
            likelihood=likelihood,
            parameters=parameters,
            offset=offset,
        )
        if is_normal:
            columns = targets.reshape(len(targets), -1)
            process = Conditioned(problem.gram(logarithms), columns, found.noise_scale**2)
            _warn_of_copies(found)
            _warn_of_far_rows(found, process.left_out())
    return found


def _num_classes(labels: np.ndarray) -> int:
    """Return the number of classes of labels that have all of them."""
    present = np.unique(labels)
    if len(present) < 2 or not np.array_equal(present, np.arange(len(present))):
        raise ValueError(
            f"labels of a categorical must be 0, 1, ..., two at least, but y holds "
            f"{listing(f'{label:g}' for label in present[:10])}; pass num_classes if y lacks a class."
        )
    return len(present)


def _check_networks(networks: Sequence[Any], by_column: Iterable[Any]) -> None:
    """Refuse networks whose scales cannot be fitted."""
    for network in networks:
        rule_of(network)
        names = ["w_std", "b_std", "readout_w_std", *["input_scale"] * any(by_column)]
        if missing := [name for name in names if not hasattr(network, name)]:
            raise ValueError(
                f"the scales {listing(names)} are fitted, but the {type(network).__name__} has no {listing(missing)}; "
                "add the attribute, or leave input_scale out."
            )


def _several(given: Any) -> Iterable[Any]:
    """Return one or several choices as several."""
    if isinstance(given, str | int | np.integer | np.bool_) or callable(given):
        return [given]
    return given


# Warnings.

_SMALL_NOISE = 0.1  # of the targets' root mean square
# Fewest rows for a test; distances in robust standard deviations of residuals, and in those of the targets.
_FEWEST_ROWS, _FAR, _FAR_OF_TARGETS = 10, 20.0, 5.0
_ONE_OF = 50  # one far row of so many


def _warn_of_far_rows(found: WideLimitFit, residuals: np.ndarray) -> None:
    """Warn if few rows hold most of the squared leave-one-out residuals, (n, k), and lie far out."""
    if len(residuals) < _FEWEST_ROWS:
        return
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
                f"up to {distance[row]:.2g} from the other rows' predictions: the fitted noise, "
                f"{found.noise_scale:.2g}, and the scales are decided by them. Correct mistakes, transform the "
                "targets, or use a likelihood with heavy tails.",
                UserWarning,
                stacklevel=3,  # the caller of fit
            )
            return


def _warn_of_copies(found: WideLimitFit) -> None:
    """Warn if the noise is small and rows repeat others."""
    inputs, targets, noise_scale = found.inputs, found.targets, found.noise_scale
    if noise_scale >= _SMALL_NOISE * np.sqrt(np.mean(targets**2)):
        return
    rows = np.column_stack([inputs.reshape(len(inputs), -1), targets])
    num_copies = len(inputs) - len(np.unique(rows, axis=0))
    if num_copies:
        warnings.warn(
            f"the fitted noise, {noise_scale:.2g}, is small, and {num_copies} of {len(inputs)} rows repeat others: "
            "copies pass for measurements without noise; fit to distinct rows.",
            UserWarning,
            stacklevel=3,  # the caller of fit
        )
