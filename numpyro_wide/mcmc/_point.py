"""Points of a chain, and the arithmetic on pytrees of arrays that integrators and kernels share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

PyTree = Any


class Point(NamedTuple):
    """A position with what is known about it.

    Attributes:
        z: position, a pytree.
        potential_energy: potential energy U at ``z``, a scalar.
        z_grad: gradient of U at ``z``, a pytree like ``z``, or None for a kernel that needs none.
    """

    z: PyTree
    potential_energy: Array
    z_grad: PyTree


Evaluate = Callable[[PyTree], Point]


def normal_like(rng_key: Array, tree: PyTree) -> PyTree:
    """Draw a pytree of independent N(0, 1) numbers with the shapes and dtypes of ``tree``."""
    # One draw for all leaves compiles faster than one a leaf, and a network has many.
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.random.normal(rng_key, flat.shape, flat.dtype))


def total(tree: PyTree) -> Array:
    """Sum all entries of all leaves."""
    return sum((jnp.asarray(jnp.sum(leaf), float) for leaf in jax.tree.leaves(tree)), start=jnp.zeros(()))


def size_of(tree: PyTree) -> int:
    """Count the entries of all leaves."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def half_square_difference(a: PyTree, b: PyTree) -> Array:
    """Compute ½‖a‖² − ½‖b‖² as ½ Σ (a − b)(a + b).

    With many dimensions the two norms are large and close together, and their difference would lose its
    digits in float32; the elementwise form does not.
    """
    return 0.5 * total(jax.tree.map(lambda x, y: (x - y) * (x + y), a, b))


def all_finite(tree: PyTree) -> Array:
    """Tell whether every entry of every leaf is finite."""
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)], dtype=bool))


def is_elsewhere(new: PyTree, old: PyTree) -> Array:
    """Tell whether any entry of a position differs from another position's."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    return jnp.any(jnp.stack([jnp.any(one != other) for one, other in pairs] or [jnp.array(True)]))


def select(condition: Array, a: PyTree, b: PyTree) -> PyTree:
    """Take ``a`` where the scalar ``condition`` holds and ``b`` elsewhere, untouched by NaNs in the other."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)
