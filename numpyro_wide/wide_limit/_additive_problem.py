"""Scales of additive networks to fit: their kernel and its derivatives, by tiles."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide._checks import listing
from numpyro_wide.wide_limit._additive import Effects, Rows, Scales, effects_of, sum_of_effects, unit_means
from numpyro_wide.wide_limit._duals import Activation
from numpyro_wide.wide_limit._scale_problem import (
    NOISE,
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


def structured_network(activation: Activation, order: int, depth: int, inputs: np.ndarray) -> Any:
    """Return an additive network with the law of some inputs, and a dense block of this depth if that is not 0."""
    from numpyro_wide.nn._additive import AdditiveNetwork  # with flax, loaded late

    law = np.quantile(inputs, (np.arange(_NUM_NODES) + 0.5) / _NUM_NODES, axis=0)
    return AdditiveNetwork(order, _WIDTH, activation, law=law, dense=8 * _WIDTH if depth else 0, depth=max(depth, 1))


@dataclass(frozen=True)
class AdditiveProblem(ScaleProblem):
    """An additive network, its data, and the priors of its scales' logarithms."""

    block: ScaleProblem | None = None  # the dense block

    @classmethod
    def of_network(cls, network: Any, inputs: np.ndarray, size: float, **options: Any) -> "AdditiveProblem":
        """Set up a network's scales, for functions of the standard deviation ``size``."""
        deviations, by_input = inputs.std(axis=0), options["by_input"]
        if not np.all(deviations > 0):
            constant = listing(map(str, np.flatnonzero(deviations == 0)))
            raise ValueError(f"columns {constant} of x are constant, and have no effect; leave them out.")
        bare = network.clone(b_std=1.0, relevance=1.0, order_scale=1.0, readout_b_std=0.0, dense=0)
        main = bare.clone(which=None, w_std=1 / deviations, order_scale=np.eye(network.order)[0])  # one input each
        variance = np.mean(np.diagonal(additive_by_tiles(main, inputs[:TILE])))
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
            block,
        )

    def __getitem__(self, rows: np.ndarray) -> "AdditiveProblem":
        return replace(self, inputs=self.inputs[rows], block=None if self.block is None else self.block[rows])

    def row(self) -> dict[str, Any]:
        structure = "additive" if self.block is None else "both"
        return super().row() | {"structure": structure, "order": self.network.order, "input_scale": self.is_by_input}

    @property
    def is_by_input(self) -> bool:
        return "relevance" in self.by_entry

    def kernel_of(self, scales: dict[str, Any]) -> np.ndarray:
        return additive_by_tiles(self.network.clone(**scales), self.inputs)

    def slopes_of(self, scales: dict[str, Any], slope: np.ndarray) -> dict[str, Any]:
        network, rows = self.network.clone(**scales), whole_tiles(self.inputs)
        program, units, law = _parts(network, rows.shape[1])
        means = np.asarray(_means(network.activation, units, rows, *law))
        by_tile, by_means, weights = [], np.zeros(rows.shape), np.zeros([len(rows)] * 2)
        weights[: len(slope), : len(slope)] = slope
        for above, left in tile_slices(len(rows)):
            pair = (rows[above], means[above]), (rows[left], means[left])
            times = 1 if above == left else 2  # two tiles off the diagonal
            by_tile.append(_tile_slope(*program, units, *pair, above == left, times * weights[above, left]))
        for (above, left), (_, of_rows, of_columns) in zip(tile_slices(len(rows)), by_tile, strict=True):
            by_means[above] += of_rows
            by_means[left] += of_columns
        found = _means_slope(network.activation, units, rows, *law, by_means)
        found = {name: value + sum(by_unit[name] for by_unit, *_ in by_tile) for name, value in found.items()}
        found["readout_b_std"] = 2 * scales["readout_b_std"] * np.sum(slope)
        if self.block is not None:
            of_block = self.block.slopes_of(_block_scales(network), slope)
            found |= {_OF_BLOCK[name]: value for name, value in of_block.items()}
        return found


def additive_by_tiles(network: Any, x1: np.ndarray, x2: np.ndarray | None = None) -> np.ndarray:
    """Return an additive network's NNGP kernel, (n1, n2); all data have the same small programs."""
    program, units, law = _parts(network, x1.shape[1])
    rows = [whole_tiles(x) for x in ([x1] if x2 is None else [x1, x2])]
    means = [np.asarray(_means(network.activation, units, x, *law)) for x in rows]
    places = list(tile_slices(*map(len, rows)))
    tiles = [
        _tile(
            *program,
            units,
            (rows[0][above], means[0][above]),
            (rows[-1][left], means[-1][left]),
            x2 is None and above == left,
        )
        for above, left in places
    ]
    found = np.empty((len(rows[0]), len(rows[-1])))
    for (above, left), tile in zip(places, tiles, strict=True):  # computed together
        found[above, left] = tile
        if x2 is None:
            found[left, above] = np.asarray(tile).T
    found = found[: len(x1), : len(x1 if x2 is None else x2)] + float(network.readout_b_std) ** 2
    if network.dense:
        found += nngp_by_tiles(network.activation, _block_scales(network), x1, x2)[0]
    return found


def _parts(network: Any, num_inputs: int) -> tuple[tuple[Activation, Effects], Scales, tuple[Any, Any]]:
    """Return what programs are compiled for, the scales of units and effects, and nodes and weights of the law."""
    from numpyro_wide.nn._additive import law_nodes, unit_scales  # with flax, loaded late

    program = network.activation, effects_of(network, num_inputs)
    return program, unit_scales(network, num_inputs, float), law_nodes(network.law, num_inputs)


def _block_scales(network: Any) -> dict[str, Any]:
    """Return the scales of the dense block, by their names in an FCN."""
    from numpyro_wide.nn._additive import dense_block  # with flax, loaded late

    return {name: value for name, value in dense_block(network, parent=None).scales().items() if value is not None}


_means = partial(jax.jit, static_argnums=0)(unit_means)


@partial(jax.jit, static_argnums=0)
def _means_slope(activation: Activation, units: Scales, x: Any, nodes: Any, weights: Any, slope: Any) -> Scales:
    """Return derivatives by the scales, from that by the means."""
    return jax.vjp(lambda units: unit_means(activation, units, x, nodes, weights), units)[1](slope)[0]


@partial(jax.jit, static_argnums=(0, 1))
def _tile(
    activation: Activation, effects: Effects, units: Scales, first: Rows, second: Rows, is_on_diagonal: Any
) -> Array:
    same = is_on_diagonal & jnp.eye(TILE, dtype=bool)
    return sum_of_effects(activation, effects, units, first, second, same)[0]


@partial(jax.jit, static_argnums=(0, 1))
def _tile_slope(
    activation: Activation,
    effects: Effects,
    units: Scales,
    first: Rows,
    second: Rows,
    is_on_diagonal: Any,
    slope: Any,
) -> tuple[Scales, Array, Array]:
    """Return derivatives by the scales and by both means, from that by the tile."""

    def tile(units: Scales, means1: Array, means2: Array) -> Array:
        return _tile(activation, effects, units, (first[0], means1), (second[0], means2), is_on_diagonal)

    return jax.vjp(tile, units, first[1], second[1])[1](slope)
