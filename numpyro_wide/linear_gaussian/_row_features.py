"""Features that are computed a block of rows at a time, whenever they are read, and never held all at once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero

from numpyro_wide._blocks import in_row_blocks, take_rows


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["inputs", "constants"],
    meta_fields=["program", "block_size", "shape", "dtype"],
)
@dataclass(frozen=True)
class RowFeatures:
    r"""Features $\Psi$ as a function of blocks of inputs, with all that the function reads from outside as arrays.

    So the features can be passed through ``jax.jit``, ``jax.vmap`` and ``jax.grad`` instead of their numbers.
    Arithmetic with them gives those numbers, all at once; ``features @ readout`` takes them a block at a time.

    Attributes:
        inputs: rows of inputs, (n, ...).
        constants: arrays that the function reads besides, such as the network's weights.
        program: function of the constants and a block of inputs (b, ...) to features (b, d).
        block_size: b, at most n.
        shape: (n, d).
        dtype: type of the features.
    """

    inputs: Array
    constants: tuple[Array, ...]
    program: Callable
    block_size: int
    shape: tuple[int, int]
    dtype: Any

    @classmethod
    def of(cls, network: Callable[[Array], Array], inputs: Array, block_size: int) -> "RowFeatures":
        """Trace a network for a block of rows, and take what it closes over as arrays.

        Args:
            network: function of inputs (b, ...) to features (b, d), each row from its own row of inputs alone.
            inputs: (n, ...), n > 0.
            block_size: number of rows at a time.
        """
        num_rows = inputs.shape[0]
        block_size = min(block_size, num_rows)
        block = jax.ShapeDtypeStruct((block_size, *inputs.shape[1:]), inputs.dtype)
        traced, out = jax.make_jaxpr(network, return_shape=True)(block)
        if len(out.shape) != 2 or out.shape[0] != block_size:
            raise ValueError(
                f"features must be a matrix (n, d) with a row for each of the {block_size} inputs of a block, but the "
                f"network gave shape {out.shape}."
            )

        def program(constants: tuple[Array, ...], rows: Array) -> Array:
            return eval_jaxpr(traced.jaxpr, constants, rows)[0]

        return cls(inputs, tuple(traced.consts), program, block_size, (num_rows, out.shape[1]), out.dtype)

    @property
    def ndim(self) -> int:
        """Two, the number of axes."""
        return 2

    @property
    def size(self) -> int:
        """Number of entries of all features."""
        return self.shape[0] * self.shape[1]

    def rows(self, start: Array | int) -> Array:
        """Return the features of the block of rows that begins at ``start``, (b, d)."""
        return self.program(self.constants, take_rows(self.inputs, start, self.block_size))

    def map(self, function: Callable[[Array], Any]) -> Any:
        """Return what a function makes of features (b, d), row by row, for all rows."""
        return in_row_blocks(lambda start, _: function(self.rows(start)), self.shape[0], self.block_size)

    def dense(self) -> Array:
        """Return all features at once, (n, d)."""
        return self.map(lambda rows: rows)

    def astype(self, dtype: Any) -> "RowFeatures":
        """Return the same features in another floating-point type."""
        if dtype == self.dtype:
            return self
        program = self.program
        return replace(self, program=lambda constants, rows: program(constants, rows).astype(dtype), dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python, NumPy and JAX ask of every object
            raise AttributeError(name)
        raise AttributeError(
            f"features that are computed by blocks of rows have no {name!r}; use them as features @ readout alone, or "
            "leave the site of by_row_blocks, or block_size, out."
        )

    def __matmul__(self, readout: Array) -> Array:
        return _product(self, jnp.asarray(readout))

    def __jax_array__(self) -> Array:
        return self.dense()


@jax.custom_jvp
def _product(features: RowFeatures, readout: Array) -> Array:
    """Return features @ readout, with a derivative in which the readout's own is apart from the features'.

    So the program shows that the product is linear in the readout, which the loop over blocks would hide.
    """
    return features.map(lambda rows: rows @ readout)


def _product_jvp(
    primals: tuple[RowFeatures, Array], tangents: tuple[RowFeatures, Array | SymbolicZero]
) -> tuple[Array, Array]:
    features, readout = primals
    leaves, structure = jax.tree.flatten(features)
    dots = jax.tree.leaves(tangents[0], is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
    moving = [i for i, dot in enumerate(dots) if not isinstance(dot, SymbolicZero)]
    value = _product(features, readout)
    tangent = jnp.zeros_like(value)
    if not isinstance(tangents[1], SymbolicZero):
        # The derivative at zero is that anywhere. Of the loop itself, applied to the tangent, JAX has no transpose.
        origin = jnp.zeros_like(readout)
        _, tangent = jax.jvp(lambda moved: features.map(lambda rows: rows @ moved), (origin,), (tangents[1],))
    if not moving:
        return value, tangent

    def of_moving(moved: list[Array]) -> Array:
        others = dict(zip(moving, moved, strict=True))
        whole = jax.tree.unflatten(structure, [others.get(i, leaf) for i, leaf in enumerate(leaves)])
        return whole.map(lambda rows: rows @ readout)

    _, by_features = jax.jvp(of_moving, ([leaves[i] for i in moving],), ([dots[i] for i in moving],))
    return value, tangent + by_features


_product.defjvp(_product_jvp, symbolic_zeros=True)
