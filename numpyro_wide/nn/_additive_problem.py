"""Scales of additive networks to fit: their kernel and its derivatives, by tiles."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._activations import Activation
from numpyro_wide._checks import column_deviations
from numpyro_wide.nn._additive import AdditiveNetwork, dense_block, effects_of, law_nodes, unit_scales
from numpyro_wide.wide_limit._additive import Effects, Scales, sum_of_effects, unit_kernel
from numpyro_wide.wide_limit._scale_problem import (
    NOISE,
    PROBLEM_TYPES,
    SPREADS,
    TILE,
    ScaleProblem,
    nngp_by_tiles,
    tile_slices,
    whole_tiles,
)

# Prior standard deviations of the logarithms.
_SPREADS = {"w_std": 1.0, "b_std": 1.0, "order_scale": 3.0, "readout_b_std": 1.0, "relevance": 1.5}
_NUM_NODES = 64  # of the inputs' law, of equal weight
_WIDTH = 16  # of the network that a fit gives
# Scales of the dense block, in an FCN and in an additive network.
_OF_BLOCK = {
    "w_std": "dense_w_std",
    "b_std": "dense_b_std",
    "readout_w_std": "dense_scale",
    "input_scale": "input_scale",
}


def structured_network(activation: Activation, order: int, depth: int, inputs: np.ndarray) -> AdditiveNetwork:
    """Return an additive network with the law of some inputs, and a dense block of this depth if that is not 0."""
    law = np.quantile(inputs, (np.arange(_NUM_NODES) + 0.5) / _NUM_NODES, axis=0)
    return AdditiveNetwork(order, _WIDTH, activation, law=law, dense=8 * _WIDTH if depth else 0, depth=max(depth, 1))


@dataclass(frozen=True)
class AdditiveProblem(ScaleProblem):
    """An additive network, its data, and the priors of its scales' logarithms."""

    block: ScaleProblem | None = None  # the dense block
    takes_labels: ClassVar[bool] = False

    @staticmethod
    def nngp_of(network: Any, x1: np.ndarray, x2: np.ndarray | None = None) -> np.ndarray:
        """Return an additive network's NNGP kernel, (n1, n2); all data have the same small programs."""
        effects, units = effects_of(network, x1.shape[1]), _Units(network, x1.shape[1])
        rows = [whole_tiles(x) for x in ([x1] if x2 is None else [x1, x2])]
        means, tiles = [units.means(x) for x in rows], []
        for above, left in (places := list(tile_slices(*map(len, rows)))):
            kernels = units.kernels(rows[0][above], rows[-1][left], x2 is None and above == left)
            tiles.append(_tile(effects, units.effect_scales, kernels, means[0][above], means[-1][left]))
        gram = np.empty((len(rows[0]), len(rows[-1])))
        for (above, left), tile in zip(places, tiles, strict=True):  # computed together
            gram[above, left] = tile
            if x2 is None:
                gram[left, above] = np.asarray(tile).T
        gram = gram[: len(x1), : len(x1 if x2 is None else x2)] + float(network.readout_b_std) ** 2
        if network.dense:
            gram += nngp_by_tiles(network.activation, _block_scales(network), x1, x2)[0]
        return gram

    @classmethod
    def of_network(cls, network: Any, inputs: np.ndarray, size: float, **options: Any) -> "AdditiveProblem":
        """Set up a network's scales, for functions of the standard deviation ``size``."""
        deviations, by_input = column_deviations(inputs), options["by_input"]
        if not np.all(deviations > 0):
            constant = np.flatnonzero(deviations == 0).tolist()
            raise ValueError(f"columns {constant} of x are constant, and have no effect; leave them out.")
        bare = network.clone(b_std=1.0, relevance=1.0, order_scale=1.0, readout_b_std=0.0, dense=0)
        main = bare.clone(which=None, w_std=1 / deviations, order_scale=np.eye(network.order)[0])  # one input each
        variance = np.mean(np.diagonal(cls.nngp_of(main, inputs[:TILE])))
        medians = {
            "w_std": 1 / deviations,
            "b_std": np.ones(len(deviations)),
            "order_scale": size * variance ** (-0.5 * np.arange(1, network.order + 1)),
            "readout_b_std": np.array(size),
        }
        if by_input:
            medians["relevance"] = np.ones(len(deviations))
        by_entry = ("order_scale", "input_scale", *["relevance", "w_std"] * by_input)
        spreads = [np.full(median.size if name in by_entry else 1, _SPREADS[name]) for name, median in medians.items()]
        block = None
        if network.dense:
            block = ScaleProblem.of(network.activation, network.depth, inputs, size, **options | {"has_noise": False})
            medians |= {_OF_BLOCK[name]: median for name, median in block.medians.items()}
            spreads.append(block.spreads)
        if options["has_noise"]:
            medians["noise_scale"] = np.array(size * NOISE)
            spreads.append(np.array([SPREADS["noise_scale"]]))
        depth = network.depth if network.dense else 1
        return cls(
            network.activation,
            depth,
            network.clone(relevance=1.0),
            inputs,
            medians,
            np.concatenate(spreads),
            by_entry,
            block=block,
        )

    def __getitem__(self, rows: np.ndarray) -> "AdditiveProblem":
        return replace(self, inputs=self.inputs[rows], block=None if self.block is None else self.block[rows])

    def row(self) -> dict[str, object]:
        structure = "additive" if self.block is None else "both"
        return super().row() | {"structure": structure, "order": self.network.order, "input_scale": self.is_by_input}

    @property
    def is_by_input(self) -> bool:
        return "relevance" in self.by_entry

    def kernel_of(self, scales: dict[str, np.ndarray]) -> np.ndarray:
        return self.nngp_of(self.network.clone(**scales), self.inputs)

    def slopes_of(self, scales: dict[str, np.ndarray], slope: np.ndarray) -> dict[str, np.ndarray]:
        network, rows = self.network.clone(**scales), whole_tiles(self.inputs)
        effects, units = effects_of(network, rows.shape[1]), _Units(network, rows.shape[1])
        means, by_means, weights = units.means(rows), np.zeros(rows.shape), np.zeros([len(rows)] * 2)
        weights[: len(slope), : len(slope)] = slope
        by_tile = []
        for above, left in tile_slices(len(rows)):
            times = 1 if above == left else 2  # two tiles off the diagonal
            tile = rows[above], rows[left], above == left
            args = units.kernels(*tile), means[above], means[left], times * weights[above, left]
            by_scale, by_kernels, of_rows, of_columns = _tile_slope(effects, units.effect_scales, *args)
            by_tile.append(by_scale | units.slopes(*tile, by_kernels))
            by_means[above] += of_rows
            by_means[left] += of_columns
        by_name = jax.tree.map(lambda *slopes: np.sum(slopes, axis=0), *by_tile)
        of_means = units.slopes_of_means(rows, by_means)
        by_name |= {name: by_name[name] + slope for name, slope in of_means.items()}
        by_name["readout_b_std"] = 2 * scales["readout_b_std"] * np.sum(slope)
        if self.block is not None:
            of_block = self.block.slopes_of(_block_scales(network), slope)
            by_name |= {_OF_BLOCK[name]: value for name, value in of_block.items()}
        return by_name


PROBLEM_TYPES[AdditiveNetwork] = AdditiveProblem

Slopes = dict[str, np.ndarray]
_COLUMNS = 4  # of units at a time


class _Units:
    """Units of single inputs, and the means of their kernels over a law, by tiles: one program for all columns."""

    def __init__(self, network: AdditiveNetwork, num_inputs: int):
        scales = {name: np.asarray(value) for name, value in unit_scales(network, num_inputs, float).items()}
        self.activation = network.activation
        self.own_scales = {name: scales.pop(name) for name in ("w_std", "b_std")}
        self.effect_scales = scales
        self.nodes, self.weights = map(np.asarray, law_nodes(network.law, num_inputs))

    def kernels(self, x1: np.ndarray, x2: np.ndarray, is_on_diagonal: bool) -> list[Array]:
        """Return the kernels of a tile, (columns, n1, n2), some columns at a time."""
        return [_units(self.activation, *columns, is_on_diagonal) for columns in self._columns(x1.T, x2.T)]

    def slopes(self, x1: np.ndarray, x2: np.ndarray, is_on_diagonal: bool, slopes: Sequence[ArrayLike]) -> Slopes:
        """Return derivatives by the scales of units, (d_in,), from those by the kernels of a tile."""
        pairs = zip(self._columns(x1.T, x2.T), slopes, strict=True)
        by_scale = [_units_slope(self.activation, *columns, is_on_diagonal, slope) for columns, slope in pairs]
        by_column = np.concatenate(by_scale, axis=1)[:, : x1.shape[1]]
        return dict(zip(self.own_scales, by_column, strict=True))

    def _columns(self, *arrays: np.ndarray) -> Iterator[list[np.ndarray]]:
        """Yield scales of units and arrays, (columns, ...), some columns at a time."""
        filled = [whole_tiles(array, _COLUMNS) for array in (*self.own_scales.values(), *arrays)]
        for start in range(0, len(filled[0]), _COLUMNS):
            yield [array[start : start + _COLUMNS] for array in filled]

    def means(self, rows: np.ndarray) -> np.ndarray:
        """Return means over the law, less half of the mean over both, (n, d_in)."""
        tiles = [np.concatenate(self.kernels(x, self.nodes, False)) @ self.weights for x in self._with_nodes(rows)]
        by_row, among, _ = np.split(np.concatenate(tiles, axis=1)[: rows.shape[1]].T, self._ends(rows))
        return by_row - 0.5 * self.weights @ among

    def slopes_of_means(self, rows: np.ndarray, slope: np.ndarray) -> Slopes:
        """Return derivatives by the scales of units, from those by the means."""
        points, by_tile = self._with_nodes(rows), []
        by_point = np.zeros((len(points) * TILE, rows.shape[1]))
        by_row, among, _ = np.split(by_point, self._ends(rows))  # views
        by_row += slope
        among -= 0.5 * np.outer(self.weights, slope.sum(axis=0))
        for x, by_mean in zip(points, by_point.reshape(points.shape), strict=True):
            by_kernel = [part[:, :, None] * self.weights for *_, part in self._columns(by_mean.T)]
            by_tile.append(self.slopes(x, self.nodes, False, by_kernel))
        return jax.tree.map(lambda *slopes: np.sum(slopes, axis=0), *by_tile)

    def _with_nodes(self, rows: np.ndarray) -> np.ndarray:
        """Return rows and the law's nodes, in tiles, (tiles, TILE, d_in)."""
        return whole_tiles(np.concatenate([rows, self.nodes])).reshape(-1, TILE, rows.shape[1])

    def _ends(self, rows: np.ndarray) -> list[int]:
        """Return where rows and nodes end."""
        return [len(rows), len(rows) + len(self.nodes)]


def _block_scales(network: AdditiveNetwork) -> dict[str, Any]:
    """Return the scales of the dense block, by their names in an FCN."""
    return {name: value for name, value in dense_block(network, parent=None).scales().items() if value is not None}


@partial(jax.jit, static_argnums=0)
def _units(activation: Activation, w_std: Array, b_std: Array, x1: Array, x2: Array, is_on_diagonal: Array) -> Array:
    """Return the kernels of units of some columns, (columns, n1, n2)."""
    same = is_on_diagonal & jnp.eye(x1.shape[1], x2.shape[1], dtype=bool)
    return jax.lax.map(lambda column: unit_kernel(activation, column, same)[0], (w_std, b_std, x1, x2))


@partial(jax.jit, static_argnums=0)
def _units_slope(
    activation: Activation, w_std: Array, b_std: Array, x1: Array, x2: Array, is_on_diagonal: Array, slope: Array
) -> Array:
    """Return derivatives by both scales of some columns, (2, columns), from those by their kernels."""
    same = is_on_diagonal & jnp.eye(x1.shape[1], x2.shape[1], dtype=bool)

    def of_column(column: tuple) -> tuple:
        *scales, x1, x2, slope = column
        return jax.vjp(lambda *scales: unit_kernel(activation, (*scales, x1, x2), same)[0], *scales)[1](slope)

    return jnp.stack(jax.lax.map(of_column, (w_std, b_std, x1, x2, slope)))


@partial(jax.jit, static_argnums=0)
def _tile(effects: Effects, scales: Scales, kernels: list[Array], means1: Array, means2: Array) -> Array:
    """Return a tile of the kernel of all effects, from the kernels of units."""
    columns = jnp.concatenate(kernels)[: means1.shape[1]]
    return sum_of_effects(effects, scales, lambda kernel: (kernel, jnp.zeros(())), columns, means1, means2)[0]


@partial(jax.jit, static_argnums=0)
def _tile_slope(
    effects: Effects, scales: Scales, kernels: list[Array], means1: Array, means2: Array, slope: Array
) -> tuple[Scales, list[Array], Array, Array]:
    """Return derivatives by the scales of effects, by the kernels of units and by both means, from that by the tile."""
    return jax.vjp(partial(_tile, effects), scales, kernels, means1, means2)[1](slope)
