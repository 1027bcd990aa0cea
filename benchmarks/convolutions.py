"""Gradients of two convolutional layers, alone and in the loop that a chain is: `NTKConv` beside flax's layer.

python -m benchmarks convolutions
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax import Array

from benchmarks.timing import mean_seconds
from numpyro_wide.nn import NTKConv

CASES = ((1000, 8, 16), (500, 14, 16), (500, 14, 64))  # images, pixels a side, channels
STEPS, SECONDS = 2, 1.0


def layers(kind: Any, width: int) -> linen.Module:
    """Make two layers of a kind, with zero padding."""
    return linen.Sequential([kind(width), linen.relu, kind(width), linen.relu])


def tables() -> None:
    """Make one table."""
    kinds = {"flax": partial(linen.Conv, kernel_size=(3, 3)), "ours": partial(NTKConv, padding="SAME")}
    print("\n## Gradients of two convolutional layers of 3 x 3, float32, processor seconds\n")
    print("| images | pixels | channels | Conv, alone | in a loop | NTKConv, alone | in a loop | Conv over NTKConv |")
    print("|---|---|---|---|---|---|---|---|")
    for num_images, side, width in CASES:
        x = jax.random.normal(jax.random.key(0), (num_images, side, side, 1))
        taken = []
        for kind in kinds.values():
            network = layers(kind, width)
            params = network.init(jax.random.key(1), x)

            def slope(at: Any, x: Array, network: linen.Module = network) -> Any:
                return jax.grad(lambda at: jnp.mean(network.apply(at, x) ** 2))(at)

            def chain(at: Any, x: Array, slope: Any = slope) -> Any:
                return jax.lax.fori_loop(0, STEPS, lambda _, at: jax.tree.map(jnp.add, at, slope(at, x)), at)

            taken += [mean_seconds(partial(jax.jit(slope), params, x), SECONDS)]
            taken += [mean_seconds(partial(jax.jit(chain), params, x), SECONDS) / STEPS]
        cells = [num_images, f"{side} x {side}", width, *(f"{1e3 * seconds:.1f} ms" for seconds in taken)]
        print(f"| {' | '.join(map(str, cells))} | {taken[1] / taken[3]:.1f} |", flush=True)
