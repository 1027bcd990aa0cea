"""Kernels of additive networks: centred kernels of single inputs, and sums of their products by Newton's identities."""

import itertools
import math
from collections.abc import Callable
from functools import partial, reduce
from operator import mul
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide._activations import Activation
from numpyro_wide.wide_limit._duals import determinant_of_numbers
from numpyro_wide.wide_limit._layer_kernels import Inputs

T = TypeVar("T")
Scales = dict[str, Array]  # w_std, b_std and relevance by column, and order_scale by order
Effects = int | tuple[tuple[int, ...], ...]  # all up to an order, or the columns of each, few first
Kernel = tuple[Array, Array]  # with the share that a series leaves out


def unit_means(activation: Activation, scales: Scales, x: Array, nodes: Array, weights: Array, share: Array) -> Array:
    """Return means of the units' kernels over a law of the inputs, less half of the mean over both, (n, d_in)."""

    def of_input(column: tuple) -> Array:
        w_std, b_std, x, nodes = column
        among, _ = unit_kernel(activation, (w_std, b_std, nodes, nodes), jnp.eye(len(nodes), dtype=bool), share)
        by_row, _ = unit_kernel(activation, (w_std, b_std, x, nodes), None, share)
        mean = partial(jnp.matmul, precision="highest")
        return mean(by_row, weights) - 0.5 * mean(weights, mean(among, weights))

    return jax.lax.map(jax.checkpoint(of_input), (scales["w_std"], scales["b_std"], x.T, nodes.T)).T


def unit_kernel(activation: Activation, column: tuple, same: Array | None, share: Array | None = None) -> Kernel:
    """Return the kernel of units of one input, with a share of their tangent kernel, from scales and (n1,), (n2,)."""
    w_std, b_std, x1, x2 = column
    determinant = determinant_of_numbers(x1[:, None], x2[None, :], w_std**2, b_std**2)
    units = Inputs(x1[:, None], x2[:, None], same).vectors().dense(w_std, b_std).activate(activation, determinant)
    return units.product if share is None else units.product + share * units.tangent, units.error


def sum_of_effects(
    effects: Effects, scales: Scales, kernel: Callable[[Any], Kernel], columns: Any, means1: Array, means2: Array
) -> Kernel:
    """Return the kernel of all effects (Mathematics, :eq:`effects`), from that of a column and means, (n, d_in)."""
    columns = scales["relevance"] ** 2, means1.T, means2.T, columns

    def centred(column: tuple) -> Kernel:
        relevance, means1, means2, column = column
        product, error = kernel(column)
        return relevance * (product - means1[:, None] - means2[None, :]), error

    if isinstance(effects, int):

        def powers(column: tuple) -> tuple[tuple[Array, ...], Array]:
            product, error = centred(column)
            return tuple(product**power for power in range(1, effects + 1)), error

        sums, error = _summed(powers, columns)
        by_size = [(q, math.comb(means1.shape[1], q), e) for q, e in enumerate(_elementary(sums), start=1)]
    else:

        def product(inputs: Array) -> Kernel:
            factors = [centred(jax.tree.map(lambda part, i=i: part[i], columns)) for i in inputs]
            kernels, errors = zip(*factors, strict=True)
            return reduce(mul, kernels), reduce(jnp.maximum, errors)

        groups = [np.array(list(group)) for _, group in itertools.groupby(effects, len)]
        each = [_summed(product, group) for group in groups]
        error = reduce(jnp.maximum, [error for _, error in each])
        by_size = [(group.shape[1], len(group), e) for group, (e, _) in zip(groups, each, strict=True)]
    by_order = [scales["order_scale"][size - 1] ** 2 / count * e for size, count, e in by_size]
    return sum(by_order[1:], by_order[0]), error


def _elementary(powers: tuple[Array, ...]) -> list[Array]:
    """Return the elementary symmetric polynomials of degree 1, 2, ... from sums of powers, by Newton's identities."""
    polynomials = [jnp.ones_like(powers[0])]
    for degree in range(1, len(powers) + 1):
        signed = [(-1) ** (k - 1) * polynomials[degree - k] * powers[k - 1] for k in range(1, degree + 1)]
        polynomials.append(sum(signed[1:], signed[0]) / degree)
    return polynomials[1:]


def _summed(function: Callable[..., tuple[T, Array]], stacked: object) -> tuple[T, Array]:
    """Return the sums of a function's kernels over the leading axis of its argument, with the largest error."""

    def add(carried: tuple[T, Array], item: object) -> tuple[tuple[T, Array], None]:
        (totals, largest), (kernels, error) = carried, function(item)
        return (jax.tree.map(jnp.add, totals, kernels), jnp.maximum(largest, error)), None

    shapes = jax.eval_shape(function, jax.tree.map(lambda leaf: leaf[0], stacked))
    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    # A gradient computes each kernel anew, to keep none of them.
    return jax.lax.scan(jax.checkpoint(add, prevent_cse=False), start, stacked)[0]
