"""Architecture, data and priors of scales to fit, the kernel with its derivatives, and the search for the mode."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide._activations import Activation
from numpyro_wide._checks import column_deviations
from numpyro_wide.wide_limit._duals import activation_dual, activation_name
from numpyro_wide.wide_limit._kernels import kernel
from numpyro_wide.wide_limit._layer_kernels import LayerKernels

# Prior standard deviations of the logarithms, narrow where another scale can take a scale's place.
SPREADS = {"w_std": 0.5, "b_std": 0.5, "readout_w_std": 1.0, "noise_scale": 1.5}
_B_STD, NOISE = 0.5, 0.3  # prior medians; of the noise over the targets' root mean square
_IMAGE_BLOCK, _ROW_BLOCK = 50, 512  # images, or rows, whose kernels are computed at a time
TILE = 128  # rows and columns of a tile, to stay in the cache

Scales = dict[str, np.ndarray]  # or their derivatives, by name


@dataclass(frozen=True)
class ScaleProblem:
    """An architecture, its data, and the priors of its scales' logarithms."""

    activation: Activation
    depth: int
    network: Any  # without its scales; None for a fully connected one
    inputs: np.ndarray  # (n, d_in), or (n, ...) for a network
    medians: Scales  # of the scales a priori; of w_std by layer
    spreads: np.ndarray  # of the logarithms, one by one
    by_entry: tuple[str, ...] = ("input_scale",)  # scales with a logarithm of each number; others have one for all
    known_noise: float | None = None  # instead of a fitted "noise_scale"
    takes_labels: ClassVar[bool] = True

    @staticmethod
    def nngp_of(network: object, x1: np.ndarray, x2: np.ndarray | None = None) -> np.ndarray:
        """Return a network's NNGP kernel, (n1, n2)."""
        return np.array(kernel(network, block_size=_ROW_BLOCK if x1.ndim == 2 else _IMAGE_BLOCK).nngp(x1, x2))

    @classmethod
    def of(
        cls,
        activation: Activation,
        depth: int,
        inputs: np.ndarray,
        size: float,
        by_input: bool,
        has_noise: bool,
        relevance: float = 1.0,
    ) -> "ScaleProblem":
        """Set up a fully connected network, for functions of the standard deviation ``size``."""
        behind = float(_unit_scale(activation))
        medians = {
            "w_std": np.array([1.0] + [behind] * (depth - 1)),
            "b_std": np.array(_B_STD),
            "readout_w_std": np.array(size * behind),
        }
        if has_noise:
            medians["noise_scale"] = np.array(size * NOISE)
        spreads = [SPREADS[name] for name in medians]
        if by_input:
            deviations = column_deviations(inputs)
            medians["input_scale"] = 1 / np.where(deviations > 0, deviations, 1.0)
            spreads += [relevance] * len(deviations)
        return cls(activation, depth, None, inputs, medians, np.array(spreads))

    @classmethod
    def of_network(cls, network: Any, inputs: np.ndarray, size: float, **options: Any) -> "ScaleProblem":
        """Set up a network's ``w_std``, ``b_std`` and ``readout_w_std``, one number each."""
        bare = network.clone(w_std=None, b_std=0.0, readout_w_std=None)
        dense = cls.of(network.activation, 2, inputs.reshape(len(inputs), -1), size, **options)
        medians = dense.medians | {"w_std": dense.medians["w_std"][-1]}
        # A mean over pixels lowers the variance.
        gram = kernel(bare.clone(w_std=float(medians["w_std"]), b_std=_B_STD, readout_w_std=1.0)).nngp(inputs[:20])
        medians["readout_w_std"] = np.array(size / np.sqrt(np.mean(np.diagonal(gram))))
        depth = getattr(network, "depth", 0)
        return cls(network.activation, depth, bare, inputs, medians, dense.spreads)

    def __getitem__(self, rows: np.ndarray) -> "ScaleProblem":
        """Return the problem of some of the rows, with the same priors."""
        return replace(self, inputs=self.inputs[rows])

    def place(self, name: str) -> int:
        """Return the index of a scale among the logarithms."""
        return int(np.ravel(self.split(np.arange(len(self.spreads)))[name])[0])

    def split(self, vector: np.ndarray) -> Scales:
        """Return the numbers of a vector by name."""
        values, start = {}, 0
        for name, median in self.medians.items():
            size = median.size if name in self.by_entry else 1
            values[name] = vector[start : start + size] if name in self.by_entry else vector[start]
            start += size
        return values

    def scales(self, logarithms: np.ndarray) -> Scales:
        """Return scales and noise by name."""
        return {name: self.medians[name] * multiple for name, multiple in self.split(np.exp(logarithms)).items()}

    def gram(self, logarithms: np.ndarray) -> np.ndarray:
        """Return the limit's kernel of the inputs, (n, n)."""
        scales = self.scales(logarithms)
        scales.pop("noise_scale", None)
        return self.kernel_of(scales)

    def kernel_of(self, scales: Scales) -> np.ndarray:
        """Return the limit's kernel of the inputs, (n, n), at other scales than the noise."""
        if self.network is not None:
            bare = self.network.clone(**{name: jnp.asarray(value) for name, value in scales.items()})
            return self.nngp_of(bare, self.inputs)
        return nngp_by_tiles(self.activation, scales, self.inputs)[0]

    def covariance(self, logarithms: np.ndarray) -> np.ndarray:
        """Return the kernel with the noise, where there is one."""
        gram = self.gram(logarithms)
        gram.flat[:: len(gram) + 1] += self.noise_variance(logarithms)
        return gram

    def noise_variance(self, logarithms: np.ndarray) -> float:
        """Return the variance of the noise, zero where there is none."""
        return float(self.scales(logarithms).get("noise_scale", self.known_noise or 0.0)) ** 2

    def pull_back(self, logarithms: np.ndarray, slope: np.ndarray) -> np.ndarray:
        """Return a derivative by the logarithms, from that by the symmetric covariance, (n, n)."""
        scales = self.scales(logarithms)
        scales.pop("noise_scale", None)
        by_scale = self.slopes_of(scales, slope)
        slopes = {name: np.asarray(by_scale[name]) * value for name, value in scales.items()}
        slopes["noise_scale"] = 2 * self.noise_variance(logarithms) * np.trace(slope)
        return np.concatenate([np.ravel(slopes[n] if n in self.by_entry else np.sum(slopes[n])) for n in self.medians])

    def prior(self, logarithms: np.ndarray) -> float:
        """Return minus the log prior density, but for a constant."""
        return 0.5 * float(np.sum((logarithms / self.spreads) ** 2))

    def fields(self, scales: Mapping[str, np.ndarray | float], errors: np.ndarray) -> dict[str, Any]:
        """Return what a fit says of its network."""
        scales = {name: value if np.ndim(value) else float(value) for name, value in scales.items()}
        noise_scale = scales.pop("noise_scale", self.known_noise)
        return {
            "activation": self.activation,
            "depth": self.depth,
            "noise_scale": noise_scale,
            "scales": scales,
            "standard_errors": self.split(errors),
            "network": None if self.network is None else self.network.clone(**scales),
        }

    def row(self) -> dict[str, object]:
        """Return the columns of a table that name the architecture."""
        names = {"structure": "dense", "order": 0, "activation": self.activation, "depth": self.depth}
        return names | {"input_scale": "input_scale" in self.medians}

    def slopes_of(self, scales: Scales, slope: np.ndarray) -> Scales:
        """Return derivatives by the scales, from that by the kernel, (n, n)."""
        if self.network is not None:
            return _network_slope(self.network, scales, self.inputs, slope)
        readout, size, filled = scales["readout_w_std"], len(self.inputs), whole_tiles(self.inputs)
        weights, nothing = np.zeros((len(filled), len(filled))), np.zeros(TILE)
        weights[:size, :size] = readout**2 * slope
        tiles = []
        for rows, columns, units in _tiles(scales, self.inputs):
            times = 1 if rows == columns else 2  # two tiles off the diagonal
            after: _Units = (nothing, nothing, times * weights[rows, columns], np.zeros(()))
            through = _through(self.activation, scales, units, rows == columns)
            by_layer: list[Array] = []
            for w_std, before in reversed(list(zip(scales["w_std"], through, strict=False))):
                args = before, rows == columns, w_std, scales["b_std"], after
                after, numbers = _tile_layer_slope(self.activation, *args)
                by_layer.insert(0, numbers)
            tiles.append((rows, columns, after, by_layer))
        by_scale = np.sum([np.asarray(by_layer) for *_, by_layer in tiles], axis=0)  # (depth, 3)
        by_w_std, by_b_std, total = by_scale.T
        by_name = {"w_std": by_w_std, "b_std": np.sum(by_b_std), "readout_w_std": 2 * total[-1] / readout}
        if "input_scale" in scales:
            by_product = np.zeros_like(weights)
            for rows, columns, (square1, square2, product, _), _ in tiles:
                by_product[rows, columns] += np.asarray(product)
                by_product[rows, rows] += np.diag(square1)
                by_product[columns, columns] += np.diag(square2)
            each = np.sum(filled * (by_product @ filled), axis=0)
            by_name["input_scale"] = 2 * scales["input_scale"] * each / self.inputs.shape[1]
        return by_name


PROBLEM_TYPES: dict[type, type[ScaleProblem]] = {}  # of networks that have one of their own


def problem_type(network: object) -> type[ScaleProblem]:
    """Return the problem of a network, or of a class that it is of."""
    return next((PROBLEM_TYPES[base] for base in type(network).__mro__ if base in PROBLEM_TYPES), ScaleProblem)


# Mean squares of rows and columns, covariances, and the share that a series leaves out.
_Units = tuple[Array | np.ndarray, Array | np.ndarray, Array | np.ndarray, Array | np.ndarray]


def nngp_by_tiles(
    activation: Activation, scales: Scales, x1: np.ndarray, x2: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """Return a fully connected network's NNGP kernel, (n1, n2), and its error; all data have the same small program."""
    tiles = [
        (rows, columns, list(_through(activation, scales, units, x2 is None and rows == columns))[-1])
        for rows, columns, units in _tiles(scales, x1, x2)
    ]
    x_columns = x1 if x2 is None else x2
    gram, largest = np.empty([len(x) + -len(x) % TILE for x in (x1, x_columns)]), 0.0
    for rows, columns, (_, _, product, error) in tiles:  # computed together
        gram[rows, columns] = product
        if x2 is None:
            gram[columns, rows] = np.asarray(product).T
        largest = max(largest, float(error))
    return scales["readout_w_std"] ** 2 * gram[: len(x1), : len(x_columns)], largest


def _tiles(scales: Scales, x1: np.ndarray, x2: np.ndarray | None = None) -> Iterator[tuple[slice, slice, _Units]]:
    """Yield rows, columns and units before the first layer of tiles; of one set those on and below the diagonal."""
    input_scale = scales.get("input_scale", 1.0)
    first = whole_tiles(x1) * input_scale
    last = first if x2 is None else whole_tiles(x2) * input_scale
    products = first @ last.T / first.shape[1]
    row_squares, column_squares = (np.mean(x**2, axis=1) for x in (first, last))
    for rows, columns in tile_slices(*products.shape[: 1 if x2 is None else 2]):
        yield rows, columns, (row_squares[rows], column_squares[columns], products[rows, columns], np.zeros(()))


def tile_slices(num_rows: int, num_columns: int | None = None) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of tiles; of one set those on and below the diagonal."""
    for row in range(0, num_rows, TILE):
        for column in range(0, row + 1 if num_columns is None else num_columns, TILE):
            yield slice(row, row + TILE), slice(column, column + TILE)


def whole_tiles(x: np.ndarray, size: int = TILE) -> np.ndarray:
    """Return rows, and the first one again and again, up to whole tiles."""
    return np.concatenate([x, np.repeat(x[:1], -len(x) % size, axis=0)])


def _through(activation: Activation, scales: Scales, units: _Units, is_on_diagonal: bool) -> Iterator[_Units]:
    """Yield a tile's units before each layer, and after the last."""
    yield units
    b_std = np.asarray(scales["b_std"], float)  # a number of Python's would be another program
    for w_std in scales["w_std"]:
        units = _tile_layer(activation, units, is_on_diagonal, w_std, b_std)
        yield units


@partial(jax.jit, static_argnums=0)
def _tile_layer(activation: Activation, units: _Units, is_on_diagonal: Array, w_std: Array, b_std: Array) -> _Units:
    """Return the units after a layer; compiled once for all depths and data."""
    square1, square2, product, error = map(jnp.asarray, units)
    same = is_on_diagonal & jnp.eye(TILE, dtype=bool)
    units_before = LayerKernels(square1, square2, product, jnp.zeros_like(error), None, same, error)
    layer = units_before.dense(w_std, b_std).activate(activation)
    return layer.square1, layer.square2, layer.product, layer.error


@partial(jax.jit, static_argnums=0)
def _tile_layer_slope(
    activation: Activation, units: _Units, is_on_diagonal: Array, w_std: Array, b_std: Array, slope: _Units
) -> tuple[_Units, Array]:
    """Return derivatives by the units before a layer; by both scales, and Σ slope · product."""
    layer = lambda *args: _tile_layer(activation, args[0], is_on_diagonal, *args[1:])  # noqa: E731
    after, pull = jax.vjp(layer, units, w_std, b_std)
    before, *by_scale = pull(slope)
    return before, jnp.stack([*by_scale, jnp.sum(slope[2] * after[2])])


@partial(jax.jit, static_argnums=0)
def _network_slope(network: Any, scales: dict[str, Array], inputs: Array, slope: Array) -> dict[str, Array]:
    def product(scales: dict[str, Array]) -> Array:
        return jnp.sum(slope * kernel(network.clone(**scales), block_size=_IMAGE_BLOCK).nngp(inputs))

    return jax.grad(product)(scales)


@partial(jax.jit, static_argnums=0)
def _unit_scale(activation: Activation) -> Array:
    """Return the scale of weights that keeps the variance at one."""
    return 1 / jnp.sqrt(activation_dual(activation).moments(jnp.ones(1)).product[0])


BOUND = 4.0  # of the logarithms, in prior standard deviations
_TRIED = 15  # steps of each start
_NOT_FINITE = 1e12  # for the optimiser


class Objective(ABC):
    """Minus the log posterior of a problem's scales, of all rows or, by an index, of some."""

    step: ClassVar[float]  # of the logarithms, for the curvature
    problem: ScaleProblem

    @abstractmethod
    def __getitem__(self, rows: np.ndarray) -> "Objective": ...

    @abstractmethod
    def likelihood(self, covariance: np.ndarray) -> tuple[float, np.ndarray]:
        """Return log likelihood and its derivative by the covariance, (n, n); ``ValueError`` at extreme scales."""

    def __call__(self, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
        """Return value and gradient, always finite."""
        problem, nowhere = self.problem, (_NOT_FINITE, np.zeros_like(logarithms))
        covariance = problem.covariance(logarithms)
        if not np.isfinite(covariance).all():
            return nowhere
        try:
            value, slope = self.likelihood(covariance)
        except ValueError:
            return nowhere
        pulled = problem.pull_back(logarithms, slope)
        loss, gradient = problem.prior(logarithms) - value, logarithms / problem.spreads**2 - pulled
        return (loss, gradient) if np.isfinite([loss, *gradient]).all() else nowhere


def mode_of(objective: Objective, rows: np.ndarray, num_restarts: int, random: np.random.Generator) -> np.ndarray:
    """Return the logarithms at the mode, from starts on some rows."""
    problem, subset = objective.problem, objective[rows]
    spreads, size = problem.spreads, len(problem.spreads)
    starts = [np.zeros(size), *(0.7 * spreads * random.normal(size=size) for _ in range(num_restarts - 1))]
    begun = min((_descend(subset, start, _TRIED) for start in starts), key=lambda result: result.fun)
    best = _descend(subset, begun.x, 60)
    _check_finite(problem, best.fun)
    logarithms = np.asarray(best.x)
    if len(rows) < len(problem.inputs):
        values, vectors = _curvature(problem, hessian(subset, logarithms)[1])
        # The curvature grows with the rows.
        share = len(rows) / len(problem.inputs)
        logarithms = _descend_scaled(objective, logarithms, vectors * np.sqrt(share / values))
    return logarithms


def laplace(objective: Objective, logarithms: np.ndarray) -> tuple[float, float, np.ndarray, np.ndarray]:
    """Return the loss at the mode, the log marginal, standard errors of the logarithms, and the Hessian."""
    spreads = objective.problem.spreads
    loss, matrix = hessian(objective, logarithms)
    _check_finite(objective.problem, loss)
    values, vectors = _curvature(objective.problem, matrix)
    log_marginal = float(-loss - 0.5 * np.sum(np.log(values)) - np.sum(np.log(spreads)))
    errors = np.sqrt(np.sum(vectors**2 / values, axis=1))
    errors[np.abs(logarithms) > (BOUND - 1e-6) * spreads] = np.nan
    return loss, log_marginal, errors, matrix


def _check_finite(problem: ScaleProblem, loss: float) -> None:
    """Refuse data of which the best scales have no evidence."""
    if not loss < _NOT_FINITE:
        raise ValueError(
            f"no start of a {activation_name(problem.activation)} network of depth {problem.depth} has a finite "
            "evidence; standardise the inputs and the targets."
        )


def _descend(objective: Objective, start: np.ndarray, max_steps: int) -> Any:
    """Minimise within the bounds by L-BFGS-B."""
    from scipy.optimize import minimize  # loaded late

    bounds = [(-BOUND * spread, BOUND * spread) for spread in objective.problem.spreads]
    options = {"maxiter": max_steps, "ftol": 1e-6, "gtol": 1e-2}
    return minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)


def _descend_scaled(objective: Objective, start: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Minimise along the columns of ``directions``, in which the curvature is about one."""
    from scipy.optimize import minimize  # loaded late

    bounds = BOUND * objective.problem.spreads
    start = np.clip(start, -bounds, bounds)

    def inside(steps: np.ndarray) -> np.ndarray:
        return np.clip(start + directions @ steps, -bounds, bounds)  # constraints may fail by rounding

    def along(steps: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(inside(steps))
        return value, directions.T @ gradient

    edges = np.concatenate([-directions, directions])
    room = np.concatenate([bounds - start, bounds + start])
    constraint = {"type": "ineq", "fun": lambda steps: room + edges @ steps, "jac": lambda _: edges}
    options = {"maxiter": 40, "ftol": 1e-2}
    zero = np.zeros(len(start))
    return inside(minimize(along, zero, jac=True, method="SLSQP", constraints=[constraint], options=options).x)


def _curvature(problem: ScaleProblem, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eigenvalues and eigenvectors of a Hessian."""
    values, vectors = np.linalg.eigh(matrix)
    # No direction is known worse than a priori.
    return np.maximum(values, 1 / problem.spreads.max() ** 2), vectors


def hessian(objective: Objective, logarithms: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the loss, and the matrix of its second derivatives by the logarithms, by differences of gradients."""
    (loss, gradient), size = objective(logarithms), objective.step
    moved = [objective(logarithms + step)[1] - gradient for step in size * np.eye(len(logarithms))]
    matrix = np.stack(moved) / size
    return loss, (matrix + matrix.T) / 2
