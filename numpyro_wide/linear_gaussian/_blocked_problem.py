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
    evidence_error_by_blocks,
    log_evidence_by_blocks,
    pairwise_sum,
    sums_by_blocks,
    value_of_sums,
)
from numpyro_wide.linear_gaussian._blocked_posterior import BlockedPosterior
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
