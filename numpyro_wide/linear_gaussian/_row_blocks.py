"""Linear Gaussian problems of many rows, by blocks of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from numpyro_wide._blocks import in_row_blocks, take_rows
from numpyro_wide._checks import as_floats
from numpyro_wide.linear_gaussian._evidence import as_matrix, broadcastable_matrix
from numpyro_wide.linear_gaussian._linalg import cholesky, diagonal, inverse_lower
from numpyro_wide.linear_gaussian._problem import as_scale


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


@partial(jax.tree_util.register_dataclass, data_fields=["mean", "root", "log_evidence"], meta_fields=[])
@dataclass(frozen=True)
class BlockedPosterior:
    r"""Gaussian posterior of a readout, and the evidence of the rows that gave it (Mathematics, :eq:`posterior`).

    Attributes:
        mean: posterior mean, (d,) or (d, k).
        root: $R$, (q, d, d), whose $R^\top R$ is the covariance of each output's readout; q is k where outputs have
            noise of their own, and else 1.
        log_evidence: log density of the targets with the readout integrated out, a scalar.
    """

    mean: Array
    root: Array
    log_evidence: Array

    def draw(self, phi: ArrayLike) -> Array:
        r"""Return the draw of the readout that a standard normal $\phi$, (d,) or (d, k), gives."""
        return self.mean + self._deviation(phi).reshape(self.mean.shape)

    def predict(
        self, test_features: RowFeatures | Array, phi: ArrayLike | None = None, residuals: None = None
    ) -> tuple[Array, Array, Array]:
        r"""Return the function's moments at new rows, and a draw of it, by blocks of these rows.

        Args:
            test_features: $\Psi_*$, (m, d).
            phi: standard normal numbers of the readout's shape, of which the draw is made; zeros by default.
            residuals: not needed here.

        Returns:
            Mean, variance and draw of the noise-free function, (m,) or (m, k) each.
        """
        center = as_matrix(self.mean)
        deviation = jnp.zeros_like(center) if phi is None else self._deviation(phi)

        def moments(rows: Array) -> tuple[Array, Array, Array]:
            rows = rows.astype(center.dtype)
            spread = jax.vmap(lambda root: jnp.sum((rows @ root.T) ** 2, axis=1))(self.root)
            mean = rows @ center
            return mean, jnp.broadcast_to(spread.T, mean.shape), mean + rows @ deviation

        found = test_features.map(moments) if isinstance(test_features, RowFeatures) else moments(test_features)
        shape = (test_features.shape[0], *self.mean.shape[1:])
        mean, spread, draw = (part.reshape(shape) for part in found)
        return mean, spread, draw

    def predict_jointly(self, test_features: RowFeatures | Array) -> tuple[Array, Array]:
        r"""Return the function's mean at new rows, (m, k), and its covariance over them, (1 or k, m, m)."""
        test = test_features.dense() if isinstance(test_features, RowFeatures) else test_features
        test = test.astype(self.mean.dtype)
        roots = jnp.einsum("md,qid->qmi", test, self.root)
        return test @ as_matrix(self.mean), jnp.einsum("qmi,qni->qmn", roots, roots)

    def _deviation(self, phi: ArrayLike) -> Array:
        columns = as_matrix(jnp.asarray(phi, self.mean.dtype))
        if len(self.root) == 1:
            return self.root[0].T @ columns
        return jnp.einsum("qid,iq->dq", self.root, columns)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["features", "targets", "noise_scale", "prior_scale"],
    meta_fields=[],
)
@dataclass(frozen=True)
class BlockedProblem:
    r"""A readout of mean zero whose features are never held all at once; see :class:`ReadoutProblem`.

    Attributes:
        features: $\Psi$, (n, d), as a function of blocks.
        targets: $Y$, (n,) or (n, k).
        noise_scale: $\sigma$, of all rows, by output or by row.
        prior_scale: standard deviation of the readout's prior, the same for all outputs.
    """

    features: RowFeatures
    targets: Array
    noise_scale: Array | np.ndarray
    prior_scale: Array | np.ndarray

    @classmethod
    def of(
        cls, features: RowFeatures, targets: ArrayLike, noise_scale: ArrayLike, prior_scale: ArrayLike = 1.0
    ) -> "BlockedProblem":
        r"""Cast to one floating-point type, and check.

        Args:
            features: $\Psi$, (n, d).
            targets: $Y$, (n,) or (n, k).
            noise_scale: $\sigma$, positive; broadcasts against the targets, but not by row and output both.
            prior_scale: standard deviation of the readout's prior, positive; a number or by feature.

        Raises:
            ValueError: if shapes do not fit, or a scale is not positive or varies by more than blocks allow.
        """
        (targets,) = as_floats(targets, names=("targets",))
        dtype = np.promote_types(features.dtype, targets.dtype)
        targets = targets.astype(dtype)
        num_rows, num_features = features.shape
        if targets.ndim not in (1, 2) or len(targets) != num_rows:
            raise ValueError(
                f"targets must be (n,) or (n, k) with the {num_rows} rows of the features, but have shape "
                f"{targets.shape}."
            )
        noise_scale = as_scale("noise_scale", noise_scale, targets.shape, dtype)
        readout_shape = (num_features, *targets.shape[1:])
        prior_scale = as_scale("prior_scale", prior_scale, readout_shape, dtype)
        is_vector = targets.ndim == 1
        by_row, by_output = broadcastable_matrix(noise_scale, is_vector).shape
        if by_row > 1 and by_output > 1:
            raise ValueError(
                f"with features by blocks of rows, noise_scale may vary over rows or over outputs, but has shape "
                f"{jnp.shape(noise_scale)}, which is both; give (n, 1) or (k,), or leave block_size out."
            )
        if broadcastable_matrix(prior_scale, is_vector).shape[1] > 1:
            raise ValueError(
                f"with features by blocks of rows, outputs share the readout's prior scale, but prior_scale has shape "
                f"{jnp.shape(prior_scale)}; give (d, 1) or a number, or leave block_size out."
            )
        return cls(features.astype(dtype), targets, noise_scale, prior_scale)

    @property
    def readout_shape(self) -> tuple[int, ...]:
        """Shape of the readout, (d,) or (d, k)."""
        return (self.features.shape[1], *self.targets.shape[1:])

    def check_readout(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a readout whose shape does not go with features and targets."""
        if tuple(shape) != self.readout_shape:
            raise ValueError(
                f"{name} must have shape {self.readout_shape} to go with features {self.features.shape} and targets "
                f"{self.targets.shape}, but got {tuple(shape)}; change the readout or the targets."
            )

    def with_targets(self, targets: Array) -> "BlockedProblem":
        """Return the same problem for other targets."""
        return replace(self, targets=targets.astype(self.targets.dtype))

    def log_evidence(self) -> Array:
        """Return the log density of the targets with the readout integrated out, a scalar."""
        layout, arrays = self._arrays()
        return log_evidence_by_blocks(layout, *arrays) - self._log_units(arrays[2])

    def evidence_error(self) -> Array:
        """Return an estimate of the error of :meth:`log_evidence` by rounding, in nats; infinite where that is NaN."""
        layout, arrays = self._arrays()
        return evidence_error_by_blocks(layout, arrays[2], arrays[3], sums_by_blocks(layout, *arrays))

    def posterior(self) -> BlockedPosterior:
        """Return the readout's posterior by sums over all rows: NaN where the noise is lost in rounding."""
        layout, arrays = self._arrays()
        rows, variance = arrays[2:]
        sums = sums_by_blocks(layout, *arrays)
        mean = jnp.where((sums.lost > 1).any(), jnp.nan, sums.mean)
        scale = self._scale()
        return BlockedPosterior(
            (scale[:, None] * mean).reshape(self.readout_shape),
            jnp.sqrt(variance)[:, None, None] * sums.inverse * scale[None, None],
            value_of_sums(layout, rows, variance, sums) - self._log_units(rows),
        )

    def _log_units(self, rows: Rows) -> Array:
        """Return the logarithm of what noise by row divides the targets by."""
        if rows.noise_scale is None:
            return jnp.zeros((), rows.targets.dtype)
        return rows.targets.shape[1] * pairwise_sum(jnp.log(rows.noise_scale))[0]

    def _scale(self) -> Array:
        return jnp.broadcast_to(jnp.asarray(self.prior_scale).reshape(-1), (self.features.shape[1],))

    def _arrays(self) -> tuple[Layout, tuple[tuple[Array, ...], Array, Rows, Array]]:
        targets = as_matrix(self.targets)
        noise = broadcastable_matrix(self.noise_scale, self.targets.ndim == 1)
        is_by_row = len(noise) > 1
        variance = jnp.ones(1, targets.dtype) if is_by_row else noise[0] ** 2
        features = self.features
        layout = Layout(features.program, features.block_size, *features.shape)
        rows = Rows(features.inputs, targets, noise if is_by_row else None)
        return layout, (features.constants, self._scale(), rows, variance)
