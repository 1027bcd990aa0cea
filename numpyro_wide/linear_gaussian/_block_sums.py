r"""The log evidence from sums over blocks of rows, $\Psi^\top\Psi$, $\Psi^\top Y$ and the residuals' squares.

Memory is that of a block and of a few d × d matrices, whatever the number of rows: the gradient's second pass computes
each block's features anew, and their cotangent is local to the row (Mathematics, "Many rows").
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide._blocks import take_rows
from numpyro_wide.linear_gaussian._linalg import cholesky, diagonal, inverse_lower


class Rows(NamedTuple):
    """Arrays with one row for each row of the data.

    Attributes:
        inputs: of the features' function, (n, ...).
        targets: (n, k).
        noise_scale: what each row's features and targets are divided by, (n, 1); None for nothing.
    """

    inputs: Array
    targets: Array
    noise_scale: Array | None


class Layout(NamedTuple):
    """Settings that the sums depend on besides arrays.

    Attributes:
        program: function of constants and a block of inputs (b, ...) to features (b, d).
        block_size: b.
        num_rows: n.
        num_features: d.
    """

    program: Callable
    block_size: int
    num_rows: int
    num_features: int

    def block(self, constants: tuple, prior_scale: Array, rows: Rows) -> tuple[Array, Array]:
        """Return a block's features and targets, standardised."""
        features, targets = self.program(constants, rows.inputs), rows.targets
        features = features.astype(targets.dtype) * prior_scale[None]
        if rows.noise_scale is None:
            return features, targets
        return features / rows.noise_scale, targets / rows.noise_scale

    def place(self, index: Array) -> tuple[Array, Array]:
        """Return the first row of a block, and which of its rows no block before holds, (b, 1)."""
        first = index * self.block_size
        start = jnp.minimum(first, self.num_rows - self.block_size)
        return start, (start + jnp.arange(self.block_size) >= first)[:, None]

    def read(self, rows: Rows, start: Array) -> Rows:
        """Return the rows of a block."""
        return jax.tree.map(lambda array: take_rows(array, start, self.block_size), rows)

    @property
    def indices(self) -> Array:
        """Indices of the blocks."""
        return jnp.arange(-(-self.num_rows // self.block_size))


class Sums(NamedTuple):
    r"""Sums over rows, and what they give.

    Attributes:
        gram: $\Psi^\top\Psi$, (d, d).
        factor: lower Cholesky factor of $\Psi^\top\Psi + \sigma^2 I$, (q, d, d); q is 1 or k.
        inverse: its inverse matrix' factor $L^{-1}$, (q, d, d).
        mean: posterior mean of the readout, refined once by the residuals, (d, k).
        quadratic: $\operatorname{tr} Y^\top K^{-1} Y$ by output, (k,).
        lost: estimate of $\|\mathrm{d}A\, A^{-1}\|$ by rounding, (q,).
    """

    gram: Array
    factor: Array
    inverse: Array
    mean: Array
    quadratic: Array
    lost: Array

    def log_det(self, variance: Array) -> Array:
        r"""Return $\log\det(K / \sigma^2)$, (q,)."""
        return 2 * jax.vmap(lambda factor, v: jnp.log(diagonal(factor) / jnp.sqrt(v)).sum())(self.factor, variance)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def log_evidence_by_blocks(layout: Layout, constants: tuple, prior_scale: Array, rows: Rows, variance: Array) -> Array:
    r"""Return the log evidence of standardised rows, a scalar; reverse-mode derivatives alone.

    Args:
        layout: the features' function, and numbers of rows.
        constants: arrays that the function reads.
        prior_scale: standard deviations of the readout's prior, (d,).
        rows: the data, by row.
        variance: noise variance, (1,) or (k,).
    """
    sums = sums_by_blocks(layout, constants, prior_scale, rows, variance)
    return value_of_sums(layout, rows, variance, sums)


def _forward(
    layout: Layout, constants: tuple, prior_scale: Array, rows: Rows, variance: Array
) -> tuple[Array, tuple[Any, ...]]:
    sums = sums_by_blocks(layout, constants, prior_scale, rows, variance)
    return value_of_sums(layout, rows, variance, sums), (constants, prior_scale, rows, variance, sums)


def _backward(layout: Layout, kept: tuple[Any, ...], cotangent: Array) -> tuple[Any, ...]:
    constants, prior_scale, rows, variance, sums = kept
    num_outputs = rows.targets.shape[1]
    each = num_outputs // variance.shape[0]  # outputs that share a factor
    precision = jnp.einsum("qij,qik->qjk", sums.inverse, sums.inverse)
    shared = each * precision.sum(axis=0)
    moving, rebuild = _floating((constants, prior_scale))
    moving_rows, rebuild_rows = _floating(rows)

    def step(carry: tuple[Any, Any], index: Array) -> tuple[tuple[Any, Any], None]:
        totals, by_row = carry
        start, is_new = layout.place(index)
        taken = [take_rows(array, start, layout.block_size) for array in moving_rows]
        whole = layout.read(rows, start)

        def block(moving: list[Array], taken: list[Array]) -> tuple[Array, Array]:
            constants, prior_scale = rebuild(moving)
            return layout.block(constants, prior_scale, rebuild_rows(taken, whole))

        (features, targets), pull = jax.vjp(block, moving, taken)
        alpha = (targets - features @ sums.mean) / variance[None]
        of_features = alpha @ sums.mean.T - features @ shared
        of_moving, of_rows = pull((jnp.where(is_new, of_features, 0), jnp.where(is_new, -alpha, 0)))
        totals = jax.tree.map(jnp.add, totals, of_moving)
        by_row = [_add_rows(all_rows, part, start) for all_rows, part in zip(by_row, of_rows, strict=True)]
        return (totals, by_row), None

    zeros = jax.tree.map(jnp.zeros_like, (moving, moving_rows))
    (of_moving, of_rows), _ = jax.lax.scan(step, zeros, layout.indices)
    scaled = jax.tree.map(lambda x: (cotangent * x).astype(x.dtype), (of_moving, of_rows))
    of_constants, of_scale = rebuild(scaled[0], is_cotangent=True)
    return (
        of_constants,
        of_scale,
        rebuild_rows(scaled[1], is_cotangent=True),
        cotangent * _of_variance(layout, variance, sums, precision, num_outputs),
    )


log_evidence_by_blocks.defvjp(_forward, _backward)


def _of_variance(layout: Layout, variance: Array, sums: Sums, precision: Array, num_outputs: int) -> Array:
    r"""Return $\tfrac12 (\|\alpha\|^2 - k \operatorname{tr} K^{-1})$, (q,), from the sums alone."""
    squares = sums.quadratic / variance - jnp.sum(sums.mean**2, axis=0) / variance  # of alpha, (k,)
    trace = (layout.num_rows - layout.num_features) / variance + jnp.trace(precision, axis1=1, axis2=2)
    if len(variance) == 1:
        return 0.5 * (squares.sum(keepdims=True) - num_outputs * trace)
    return 0.5 * (squares - trace)


def value_of_sums(layout: Layout, rows: Rows, variance: Array, sums: Sums) -> Array:
    """Return the log evidence of standardised rows from their sums; NaN where the noise is lost in rounding."""
    each = rows.targets.shape[1] // len(variance)
    log_normaliser = each * (sums.log_det(variance) + layout.num_rows * jnp.log(2 * jnp.pi * variance))
    found = -0.5 * (sums.quadratic.sum() + log_normaliser.sum())
    # Beyond this the factor tells nothing of the small eigenvalues.
    return jnp.where((sums.lost > 1).any(), jnp.nan, found)


def sums_by_blocks(layout: Layout, constants: tuple, prior_scale: Array, rows: Rows, variance: Array) -> Sums:
    """Return the sums of two passes over the rows; arguments as of :func:`log_evidence_by_blocks`."""

    def products(index: Array) -> tuple[Array, Array]:
        features, targets = _masked_block(layout, constants, prior_scale, rows, index)
        return features.T @ features, features.T @ targets

    gram, moment = compensated_sum(products, layout.indices)
    factor = jax.vmap(partial(cholesky, gram))(variance)
    inverse = jax.vmap(inverse_lower)(factor)
    precision = jnp.einsum("qij,qik->qjk", inverse, inverse)
    solve = partial(_solve, inverse)
    mean = solve(moment)

    def residuals(index: Array) -> tuple[Array, Array]:
        features, targets = _masked_block(layout, constants, prior_scale, rows, index)
        residual = targets - features @ mean
        return pairwise_sum(residual**2), features.T @ residual

    squares, moment = compensated_sum(residuals, layout.indices)
    slope = moment - variance[None] * mean
    step = solve(slope)
    gain = jnp.sum(step * slope, axis=0)
    curvature = jnp.sum(step * (gram @ step), axis=0) + variance * jnp.sum(step**2, axis=0)
    length = gain / jnp.where(curvature > 0, curvature, 1)
    quadratic = (squares + variance * jnp.sum(mean**2, axis=0) - length * gain) / variance
    sizes = jnp.diagonal(gram)
    lost = jnp.finfo(gram.dtype).eps * jnp.sqrt(jnp.einsum("i,qij,j->q", sizes, precision**2, sizes))
    return Sums(gram, factor, inverse, mean + length[None] * step, quadratic, lost)


def _solve(inverse: Array, columns: Array) -> Array:
    """Solve for columns (d, k) with the matrices whose factors' inverses are given, (1 or k, d, d)."""
    if len(inverse) == 1:
        return inverse[0].T @ (inverse[0] @ columns)
    return jnp.einsum("qij,qi->jq", inverse, jnp.einsum("qij,jq->qi", inverse, columns))


def compensated_sum(terms: Callable[[Array], Any], indices: Array) -> Any:
    """Return the sum over blocks, with what each addition loses carried along (Knuth's two-sum)."""
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(terms, indices[0]))

    def add(total: Array, lost: Array, term: Array) -> tuple[Array, Array]:
        new = total + term
        shift = new - total
        return new, lost + ((total - (new - shift)) + (term - shift))

    def step(carry: tuple[Any, Any], index: Array) -> tuple[tuple[Any, Any], None]:
        pairs = jax.tree.map(add, *carry, terms(index))
        return jax.tree.transpose(jax.tree.structure(zeros), jax.tree.structure((0, 0)), pairs), None

    (total, lost), _ = jax.lax.scan(step, (zeros, zeros), indices)
    return jax.tree.map(jnp.add, total, lost)


def pairwise_sum(rows: Array) -> Array:
    """Return the sum over rows by halves, whose rounding grows with the logarithm of their number."""
    while len(rows) > 1:
        half = len(rows) // 2
        rest = rows[2 * half :]
        rows = jnp.concatenate([rows[:half] + rows[half : 2 * half], rest]) if len(rest) else rows[:half] + rows[half:]
    return rows[0]


def _masked_block(
    layout: Layout, constants: tuple, prior_scale: Array, rows: Rows, index: Array
) -> tuple[Array, Array]:
    start, is_new = layout.place(index)
    features, targets = layout.block(constants, prior_scale, layout.read(rows, start))
    return jnp.where(is_new, features, 0), jnp.where(is_new, targets, 0)


def _add_rows(array: Array, part: Array, start: Array) -> Array:
    there = take_rows(array, start, part.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(array, there + part, start, axis=0)


def _floating(tree: Any) -> tuple[list[Array], Callable]:
    """Return the leaves that have derivatives, and a function that puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)
    moves = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def rebuild(moving: list[Array], others: Any = None, *, is_cotangent: bool = False) -> Any:
        given = iter(moving)
        rest = leaves if others is None else jax.tree.leaves(others)
        if is_cotangent:
            rest = [np.zeros(leaf.shape, jax.dtypes.float0) for leaf in leaves]
        return jax.tree.unflatten(
            structure, [next(given) if moved else leaf for moved, leaf in zip(moves, rest, strict=True)]
        )

    return [leaf for leaf, moved in zip(leaves, moves, strict=True) if moved], rebuild


def evidence_error_by_blocks(layout: Layout, rows: Rows, variance: Array, sums: Sums) -> Array:
    r"""Return an estimate of the rounding of :func:`log_evidence_by_blocks` in nats, infinite where that is NaN.

    Of the result and its two largest terms, and of the log-determinant, $\epsilon \|D A^{-1} D\|_F$ with $D^2$ the
    Gram matrix' diagonal; the sums over rows are compensated.
    """
    each = rows.targets.shape[1] // len(variance)
    largest = sums.quadratic.sum() + each * layout.num_rows * jnp.abs(jnp.log(2 * jnp.pi * variance)).sum()
    eps = jnp.finfo(sums.gram.dtype).eps
    found = 0.5 * eps * largest + 2 * each * sums.lost.sum()
    return jnp.where((sums.lost > 1).any() | ~jnp.isfinite(found), jnp.inf, found)
