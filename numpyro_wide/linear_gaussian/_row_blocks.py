"""Linear Gaussian problems by blocks of rows."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import eval_jaxpr
from jax.typing import ArrayLike, DTypeLike

from numpyro_wide._blocks import in_row_blocks, take_rows
from numpyro_wide._checks import as_floats
from numpyro_wide.linear_gaussian._evidence import as_matrix, broadcastable_matrix
from numpyro_wide.linear_gaussian._linalg import cholesky, diagonal, full_precision, inverse_lower
from numpyro_wide.linear_gaussian._problem import STATIC, ReadoutShapes, as_scale, check_data

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowFeatures:
    r"""Features $\Psi$ as a function of blocks of inputs and constants."""

    inputs: Array  # (n, ...)
    constants: tuple[Array, ...]  # such as the network's weights
    program: Callable = field(metadata=STATIC)  # (constants, inputs (b, ...)) -> features (b, d)
    block_size: int = field(metadata=STATIC)  # b, at most n
    shape: tuple[int, int] = field(metadata=STATIC)  # (n, d)
    dtype: DTypeLike = field(metadata=STATIC)

    ndim = 2

    @classmethod
    def of(cls, network: Callable[[Array], Array], inputs: Array, block_size: int) -> "RowFeatures":
        """Trace a network, inputs (b, ...) to features (b, d), row by row, for blocks."""
        num_rows = inputs.shape[0]
        block_size = min(block_size, num_rows)
        block = jax.ShapeDtypeStruct((block_size, *inputs.shape[1:]), inputs.dtype)
        traced, out = jax.make_jaxpr(network, return_shape=True)(block)
        check_rows(out.shape, block_size)

        def program(constants: tuple[Array, ...], rows: Array) -> Array:
            return eval_jaxpr(traced.jaxpr, constants, rows)[0]

        return cls(inputs, tuple(traced.consts), program, block_size, (num_rows, out.shape[1]), out.dtype)

    @property
    def size(self) -> int:
        """Number of entries of all features."""
        return self.shape[0] * self.shape[1]

    def rows(self, start: Array | int) -> Array:
        """Return features of the block that begins at row ``start``, (b, d)."""
        return self.program(self.constants, take_rows(self.inputs, start, self.block_size))

    def map(self, function: Callable[[Array], T]) -> T:
        """Return a function's value of features (b, d), for all rows."""
        return in_row_blocks(lambda start, _: function(self.rows(start)), self.shape[0], self.block_size)

    def astype(self, dtype: DTypeLike) -> "RowFeatures":
        """Return the features in another type."""
        if dtype == self.dtype:
            return self
        program = self.program
        return replace(self, program=lambda constants, rows: program(constants, rows).astype(dtype), dtype=dtype)

    def __matmul__(self, readout: Array) -> Array:
        readout = jnp.asarray(readout)
        return self.map(lambda rows: rows @ readout)

    def __jax_array__(self) -> Array:
        return self.map(lambda rows: rows)


def check_rows(shape: tuple[int, ...], num_rows: int) -> None:
    """Refuse features other than a matrix with a row for each input."""
    if len(shape) != 2 or shape[0] != num_rows:
        raise ValueError(
            f"features must be a matrix (n, d) with a row for each of the {num_rows} inputs, but the network gave "
            f"shape {shape}; leave out a module's last layer."
        )


def as_features(features: "ArrayLike | RowFeatures") -> Array | RowFeatures:
    """Return features by blocks unchanged, others as an array."""
    return features if isinstance(features, RowFeatures) else jnp.asarray(features)


def map_rows(features: Array | RowFeatures, function: Callable[[Array], T]) -> T:
    """Return a function's value of features (b, d), for all rows; by blocks where the features are."""
    return features.map(function) if isinstance(features, RowFeatures) else function(features)


def first_block(features: Array | RowFeatures) -> Array:
    """Return the first block of rows, (b, d), or the array."""
    return features.rows(0) if isinstance(features, RowFeatures) else features


class StandardisedRows(NamedTuple):
    """Readout with a standard normal prior, by blocks of rows."""

    features: RowFeatures
    targets: Array  # (n, k)
    noise_scale: Array | None  # divisor by row, (n, 1), or None
    prior_scale: Array  # (d,)
    variance: Array  # of the noise, (1,) or (k,)

    @property
    def num_sharing(self) -> int:
        """Number of outputs for each factor."""
        return self.targets.shape[1] // len(self.variance)

    @property
    def indices(self) -> Array:
        """Indices of the blocks."""
        return jnp.arange(-(-len(self.targets) // self.features.block_size))

    def common(self) -> tuple[tuple[Array, ...], Array]:
        """Return the blocks' common arrays."""
        return self.features.constants, self.prior_scale

    def by_row(self) -> tuple[Array, Array, Array | None]:
        """Return the arrays by row."""
        return self.features.inputs, self.targets, self.noise_scale

    def place(self, index: Array) -> tuple[Array, Array]:
        """Return a block's first row, and a mask of rows new in it, (b, 1)."""
        block_size = self.features.block_size
        first_row = index * block_size
        start = jnp.minimum(first_row, len(self.targets) - block_size)
        return start, (start + jnp.arange(block_size) >= first_row)[:, None]

    def read(self, by_row: T, start: Array) -> T:
        """Return a block of arrays by row."""
        return jax.tree.map(lambda array: take_rows(array, start, self.features.block_size), by_row)

    def block(self, common: tuple, by_row: tuple) -> tuple[Array, Array]:
        """Return a block's standardised features and targets."""
        (constants, prior_scale), (inputs, targets, noise_scale) = common, by_row
        features = self.features.program(constants, inputs).astype(targets.dtype) * prior_scale[None]
        return (features, targets) if noise_scale is None else (features / noise_scale, targets / noise_scale)

    def masked_block(self, index: Array) -> tuple[Array, Array]:
        """Return a block's standardised features and targets, zero for repeated rows."""
        start, is_new = self.place(index)
        features, targets = self.block(self.common(), self.read(self.by_row(), start))
        return jnp.where(is_new, features, 0), jnp.where(is_new, targets, 0)


class Sums(NamedTuple):
    """Sums over rows and their solutions; q is 1 for a common factor, else k."""

    log_det: Array  # log det(K/σ²), (q,)
    inverse: Array  # L⁻¹ of the lower Cholesky factor L of ΨᵀΨ + σ²I, (q, d, d)
    mean: Array  # posterior mean, refined once by the residuals, (d, k)
    quadratic: Array  # tr YᵀK⁻¹Y by output, (k,)
    lost: Array  # estimate of ‖dA A⁻¹‖ by rounding, (q,)

    @property
    def is_lost(self) -> Array:
        """Whether small eigenvalues are lost in rounding."""
        return (self.lost > 1).any()


@jax.custom_vjp
def log_evidence_by_blocks(problem: StandardisedRows) -> Array:
    """Return the log evidence of standardised rows; reverse mode only."""
    return _forward(problem)[0]


def _forward(problem: StandardisedRows) -> tuple[Array, tuple[StandardisedRows, Sums]]:
    sums = sums_by_blocks(problem)
    return value_of_sums(problem, sums), (problem, sums)


def _backward(saved: tuple[StandardisedRows, Sums], cotangent: Array) -> tuple[StandardisedRows]:
    problem, sums = saved
    variance = problem.variance
    precision = full_precision(jnp.einsum)("qij,qik->qjk", sums.inverse, sums.inverse)
    shared = problem.num_sharing * precision.sum(axis=0)
    common, rows = _floats(problem.common()), _floats(problem.by_row())

    @full_precision
    def slopes(features: Array, targets: Array) -> tuple[Array, Array]:
        alpha = (targets - features @ sums.mean) / variance[None]
        return alpha @ sums.mean.T - features @ shared, alpha

    def step(carry: tuple[tuple, tuple], index: Array) -> tuple[tuple[tuple, tuple], None]:
        totals, by_row = carry
        start, is_new = problem.place(index)
        block_rows = problem.read(problem.by_row(), start)

        def block(common: tuple, rows: tuple) -> tuple[Array, Array]:
            return problem.block(_filled(common, problem.common()), _filled(rows, block_rows))

        (features, targets), pull = jax.vjp(block, common, problem.read(rows, start))
        features_bar, alpha = slopes(features, targets)
        common_bar, rows_bar = pull((jnp.where(is_new, features_bar, 0), jnp.where(is_new, -alpha, 0)))
        # In place: the derivative by whole arrays would cost as much for each block as for all.
        by_row = jax.tree.map(lambda array, update: _add_rows(array, update, start), by_row, rows_bar)
        return (jax.tree.map(jnp.add, totals, common_bar), by_row), None

    zeros = jax.tree.map(jnp.zeros_like, (common, rows))
    totals, _ = jax.lax.scan(step, zeros, problem.indices)
    (constants_bar, scale_bar), (inputs_bar, targets_bar, noise_bar) = jax.tree.map(
        lambda x: (cotangent * x).astype(x.dtype), totals
    )
    features_bar = replace(problem.features, inputs=inputs_bar, constants=constants_bar)
    variance_bar = cotangent * _variance_cotangent(problem, sums, precision)
    return (StandardisedRows(features_bar, targets_bar, noise_bar, scale_bar, variance_bar),)


log_evidence_by_blocks.defvjp(_forward, _backward)


def _variance_cotangent(problem: StandardisedRows, sums: Sums, precision: Array) -> Array:
    r"""Return $\tfrac12 (\|\alpha\|^2 - k \operatorname{tr} K^{-1})$, (q,), from the sums."""
    num_rows, num_features = problem.features.shape
    squares = sums.quadratic / problem.variance - jnp.sum(sums.mean**2, axis=0) / problem.variance  # of alpha, (k,)
    trace = (num_rows - num_features) / problem.variance + jnp.trace(precision, axis1=1, axis2=2)
    return 0.5 * (squares.reshape(-1, problem.num_sharing).sum(axis=1) - problem.num_sharing * trace)


def value_of_sums(problem: StandardisedRows, sums: Sums) -> Array:
    """Return the log evidence from sums; NaN for noise below rounding."""
    variance = problem.variance
    log_noise = len(problem.targets) * jnp.log(2 * jnp.pi * variance)
    log_normaliser = problem.num_sharing * (sums.log_det + log_noise)
    log_evidence = -0.5 * (sums.quadratic.sum() + log_normaliser.sum())
    return jnp.where(sums.is_lost, jnp.nan, log_evidence)


@full_precision
def sums_by_blocks(problem: StandardisedRows) -> Sums:
    """Return sums of two passes over the rows."""
    variance = problem.variance

    def products(index: Array) -> tuple[Array, Array]:
        features, targets = problem.masked_block(index)
        return features.T @ features, features.T @ targets

    gram, moment = compensated_sum(products, problem.indices)
    factor = jax.vmap(partial(cholesky, gram))(variance)
    log_det = 2 * jnp.log(jax.vmap(diagonal)(factor) / jnp.sqrt(variance)[:, None]).sum(axis=1)
    inverse = jax.vmap(inverse_lower)(factor)
    precision = jnp.einsum("qij,qik->qjk", inverse, inverse)
    solve = partial(_solve, inverse)
    mean = solve(moment)

    def residuals(index: Array) -> tuple[Array, Array]:
        features, targets = problem.masked_block(index)
        residual = targets - features @ mean
        return pairwise_sum(residual**2), features.T @ residual

    squares, moment = compensated_sum(residuals, problem.indices)
    slope = moment - variance[None] * mean
    step = solve(slope)
    gain = jnp.sum(step * slope, axis=0)
    curvature = jnp.sum(step * (gram @ step), axis=0) + variance * jnp.sum(step**2, axis=0)
    length = gain / jnp.where(curvature > 0, curvature, 1)
    quadratic = (squares + variance * jnp.sum(mean**2, axis=0) - length * gain) / variance
    sizes = jnp.diagonal(gram)
    lost = jnp.finfo(gram.dtype).eps * jnp.sqrt(jnp.einsum("i,qij,j->q", sizes, precision**2, sizes))
    return Sums(log_det, inverse, mean + length[None] * step, quadratic, lost)


def _solve(inverse: Array, columns: Array) -> Array:
    """Solve for columns (d, k) by the factors' inverses, (1 or k, d, d)."""
    if len(inverse) == 1:
        return inverse[0].T @ (inverse[0] @ columns)
    return jnp.einsum("qij,qi->jq", inverse, jnp.einsum("qij,jq->qi", inverse, columns))


def compensated_sum(terms: Callable[[Array], T], indices: Array) -> T:
    """Sum over blocks with compensation (Knuth's two-sum)."""
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(terms, indices[0]))

    def add(total: Array, lost: Array, term: Array) -> tuple[Array, Array]:
        new = total + term
        shift = new - total
        return new, lost + ((total - (new - shift)) + (term - shift))

    def step(carry: tuple[T, T], index: Array) -> tuple[tuple[T, T], None]:
        pairs = jax.tree.map(add, *carry, terms(index))
        return jax.tree.transpose(jax.tree.structure(zeros), jax.tree.structure((0, 0)), pairs), None

    (total, lost), _ = jax.lax.scan(step, (zeros, zeros), indices)
    return jax.tree.map(jnp.add, total, lost)


def pairwise_sum(rows: Array) -> Array:
    """Sum over rows by halves, for small rounding."""
    while len(rows) > 1:
        half = len(rows) // 2
        last = rows[2 * half :]  # of an odd number
        rows = jnp.concatenate([rows[:half] + rows[half : 2 * half], last]) if len(last) else rows[:half] + rows[half:]
    return rows[0]


def _add_rows(array: Array, update: Array, start: Array) -> Array:
    current = take_rows(array, start, update.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(array, current + update, start, axis=0)


def _floats(tree: tuple) -> tuple:
    """Return a tree with None for leaves without a derivative."""
    return jax.tree.map(lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else None, tree)


def _filled(floats: tuple, tree: tuple) -> tuple:
    """Fill a tree's floating-point leaves."""
    return jax.tree.map(
        lambda leaf, default: default if leaf is None else leaf, floats, tree, is_leaf=lambda leaf: leaf is None
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockedPosterior:
    """Gaussian posterior of a readout, and its evidence (Mathematics, :eq:`posterior`)."""

    mean: Array  # (d,) or (d, k)
    root: Array  # R with the readout's covariance RᵀR, (1, d, d), or (k, d, d) for noise by output
    log_evidence: Array  # scalar

    @full_precision
    def draw(self, phi: ArrayLike) -> Array:
        r"""Return the readout's draw for standard normal $\phi$, (d,) or (d, k)."""
        return self.mean + self._deviation(phi).reshape(self.mean.shape)

    @full_precision
    def predict(
        self, test_features: RowFeatures | Array, phi: ArrayLike | None = None, residuals: ArrayLike | None = None
    ) -> tuple[Array, Array, Array]:
        """Return mean, variance and draw at new rows, (m,) or (m, k), by blocks."""
        center = as_matrix(self.mean)
        deviation = jnp.zeros_like(center) if phi is None else self._deviation(phi)

        def moments(rows: Array) -> tuple[Array, Array, Array]:
            rows = rows.astype(center.dtype)
            spread = jax.vmap(lambda root: jnp.sum((rows @ root.T) ** 2, axis=1))(self.root)
            mean = rows @ center
            return mean, jnp.broadcast_to(spread.T, mean.shape), mean + rows @ deviation

        values = map_rows(test_features, moments)
        shape = (test_features.shape[0], *self.mean.shape[1:])
        return jax.tree.map(lambda leaf: leaf.reshape(shape), values)

    @full_precision
    def predict_jointly(self, test_features: RowFeatures | Array) -> tuple[Array, Array]:
        """Return the mean at new rows, (m, k), and covariance, (1 or k, m, m)."""
        test = jnp.asarray(test_features).astype(self.mean.dtype)
        roots = jnp.einsum("md,qid->qmi", test, self.root)
        return test @ as_matrix(self.mean), jnp.einsum("qmi,qni->qmn", roots, roots)

    def _deviation(self, phi: ArrayLike) -> Array:
        columns = as_matrix(jnp.asarray(phi, self.mean.dtype))
        if len(self.root) == 1:
            return self.root[0].T @ columns
        return jnp.einsum("qid,iq->dq", self.root, columns)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockedProblem(ReadoutShapes):
    """Readout problem by blocks of rows; see :class:`ReadoutProblem`."""

    features: RowFeatures
    targets: Array
    noise_scale: Array | np.ndarray
    prior_scale: Array | np.ndarray

    @classmethod
    def of(
        cls, features: RowFeatures, targets: ArrayLike, noise_scale: ArrayLike, prior_scale: ArrayLike = 1.0
    ) -> "BlockedProblem":
        """Cast to one floating-point type, and check."""
        (targets,) = as_floats(targets, names=("targets",))
        dtype = np.promote_types(features.dtype, targets.dtype)
        targets = targets.astype(dtype)
        check_data(features, targets)
        noise_scale = as_scale("noise_scale", noise_scale, targets.shape, dtype)
        prior_scale = as_scale("prior_scale", prior_scale, (features.shape[1], *targets.shape[1:]), dtype)
        is_vector = targets.ndim == 1
        by_row, by_output = broadcastable_matrix(noise_scale, is_vector).shape
        if by_row > 1 and by_output > 1:
            raise ValueError(
                f"with features by blocks, noise_scale may vary over rows or over outputs, but has shape "
                f"{noise_scale.shape}; give (n, 1) or (k,)."
            )
        if broadcastable_matrix(prior_scale, is_vector).shape[1] > 1:
            raise ValueError(
                f"with features by blocks, outputs share the readout's prior scale, but prior_scale has shape "
                f"{prior_scale.shape}; give (d, 1) or a number."
            )
        return cls(features.astype(dtype), targets, noise_scale, prior_scale)

    def log_evidence(self) -> Array:
        """Return the log evidence of the targets, a scalar."""
        standard = self._standardised()
        return log_evidence_by_blocks(standard) - self._log_units(standard)

    def evidence_error(self) -> Array:
        """Estimate the rounding error of :meth:`log_evidence` in nats; infinite where that is NaN."""
        standard = self._standardised()
        sums, num_sharing = sums_by_blocks(standard), standard.num_sharing
        log_noise = len(self.targets) * jnp.abs(jnp.log(2 * jnp.pi * standard.variance)).sum()
        eps = jnp.finfo(sums.mean.dtype).eps
        error = 0.5 * eps * (sums.quadratic.sum() + num_sharing * log_noise) + 2 * num_sharing * sums.lost.sum()
        return jnp.where(sums.is_lost | ~jnp.isfinite(error), jnp.inf, error)

    def solved(self) -> BlockedPosterior:
        """Return the readout's posterior, which draws and predicts; NaN for noise below rounding."""
        standard = self._standardised()
        sums, scale, variance = sums_by_blocks(standard), standard.prior_scale, standard.variance
        mean = jnp.where(sums.is_lost, jnp.nan, sums.mean)
        return BlockedPosterior(
            (scale[:, None] * mean).reshape(self.readout_shape),
            jnp.sqrt(variance)[:, None, None] * sums.inverse * scale[None, None],
            value_of_sums(standard, sums) - self._log_units(standard),
        )

    def leave_one_out(self) -> tuple[Array, Array]:
        """Return mean and variance of each row's targets given all others; see :class:`ReadoutProblem`."""
        mean, variance, _ = self.solved().predict(self.features)
        noise_variance = jnp.broadcast_to(jnp.asarray(self.noise_scale), mean.shape) ** 2
        share = jnp.maximum(1 - variance / noise_variance, jnp.finfo(mean.dtype).eps)
        return self.targets - (self.targets - mean) / share, noise_variance / share

    def _log_units(self, standard: StandardisedRows) -> Array:
        """Return the summed log of the noise by row, over all targets."""
        if standard.noise_scale is None:
            return jnp.zeros((), self.targets.dtype)
        return standard.targets.shape[1] * pairwise_sum(jnp.log(standard.noise_scale))[0]

    def _standardised(self) -> StandardisedRows:
        targets = as_matrix(self.targets)
        noise = broadcastable_matrix(self.noise_scale, self.targets.ndim == 1)
        is_by_row = len(noise) > 1
        variance = jnp.ones(1, targets.dtype) if is_by_row else noise[0] ** 2
        prior_scale = jnp.broadcast_to(jnp.asarray(self.prior_scale).reshape(-1), (self.features.shape[1],))
        return StandardisedRows(self.features, targets, noise if is_by_row else None, prior_scale, variance)
