"""The readout's problem where features are computed by blocks of rows: what is computed from sums over rows alone."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import as_floats
from numpyro_wide.linear_gaussian._arguments import as_scale
from numpyro_wide.linear_gaussian._block_sums import (
    Layout,
    Rows,
    Sums,
    evidence_error_by_blocks,
    half_solved,
    log_evidence_by_blocks,
    pairwise_sum,
    sums_by_blocks,
)
from numpyro_wide.linear_gaussian._row_features import RowFeatures
from numpyro_wide.linear_gaussian._standardised import as_matrix, broadcastable_matrix


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
        rows = arrays[2]
        found = log_evidence_by_blocks(layout, *arrays)
        if rows.noise_scale is None:
            return found
        return found - rows.targets.shape[1] * pairwise_sum(jnp.log(rows.noise_scale))[0]

    def evidence_error(self) -> Array:
        """Return an estimate of the error of :meth:`log_evidence` by rounding, in nats; infinite where that is NaN."""
        layout, arrays = self._arrays()
        return evidence_error_by_blocks(layout, arrays[2], arrays[3], sums_by_blocks(layout, *arrays))

    def draw(self, phi: ArrayLike) -> Array:
        r"""Return the draw of the readout from its posterior that a standard normal $\phi$, (d,) or (d, k), gives."""
        sums, variance = self._sums()
        phi = jnp.asarray(phi, self.targets.dtype)
        draw = sums.mean + half_solved(sums.factor, jnp.sqrt(variance)[None] * as_matrix(phi))
        return (self._scale()[:, None] * draw).reshape(self.readout_shape)

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
        sums, variance = self._sums()
        phi = jnp.zeros(self.readout_shape) if phi is None else jnp.asarray(phi)
        deviation = half_solved(sums.factor, jnp.sqrt(variance)[None] * as_matrix(phi.astype(self.targets.dtype)))
        scale, num_outputs = self._scale(), sums.mean.shape[1]

        def moments(rows: Array) -> tuple[Array, Array, Array]:
            rows = rows.astype(self.targets.dtype) * scale[None]
            spread = jax.vmap(lambda inverse, v: v * jnp.sum((rows @ inverse.T) ** 2, axis=1))(sums.inverse, variance)
            mean = rows @ sums.mean
            return mean, jnp.broadcast_to(spread.T, (len(rows), num_outputs)), mean + rows @ deviation

        found = test_features.map(moments) if isinstance(test_features, RowFeatures) else moments(test_features)
        shape = (test_features.shape[0], *self.targets.shape[1:])
        mean, spread, draw = (part.reshape(shape) for part in found)
        return mean, spread, draw

    def predict_jointly(self, test_features: RowFeatures | Array) -> tuple[Array, Array]:
        r"""Return the function's mean at new rows, (m, k), and its covariance over them, (1 or k, m, m)."""
        sums, variance = self._sums()
        test = test_features.dense() if isinstance(test_features, RowFeatures) else test_features
        test = test.astype(self.targets.dtype) * self._scale()[None]
        roots = jnp.sqrt(variance)[:, None, None] * jnp.einsum("md,qid->qmi", test, sums.inverse)
        return test @ sums.mean, jnp.einsum("qmi,qni->qmn", roots, roots)

    def _sums(self) -> tuple[Sums, Array]:
        layout, arrays = self._arrays()
        sums = sums_by_blocks(layout, *arrays)
        lost = (sums.lost > 1).any()
        return sums._replace(mean=jnp.where(lost, jnp.nan, sums.mean)), arrays[3]

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
