"""Standardised readouts: a standard normal prior, and noise that is the same in every row."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide.linear_gaussian._rounding import above_rounding

# Core routines map (features (n, d), targets (n, k), regulariser (), *columns (d, k) or (n, k)) to a pair: arrays with
# a trailing axis for the outputs, and anything that is the same for all outputs.
Core: TypeAlias = Callable[..., tuple[Any, Any]]


class Standardised(NamedTuple):
    r"""A readout with a standard normal prior, and noise that is the same in every row.

    Attributes:
        features: $\Psi$, (n, d), or (k, n, d) where each output has its own.
        targets: $Y$, (n, k).
        regulariser: $\lambda$, scalar, or (k,) where each output has its own.
        log_scale: sum over the elements of the targets of the log of what each was divided by, scalar.
    """

    features: Array
    targets: Array
    regulariser: Array
    log_scale: Array

    @classmethod
    def of(
        cls,
        features: Array,
        targets: Array,
        regulariser: Array | np.ndarray,
        prior_loc: Array | np.ndarray,
        prior_scale: Array | np.ndarray,
    ) -> "Standardised":
        r"""Move the prior's loc and scale, and noise that varies over rows (:eq:`rows`), into features and targets.

        Args:
            features: $\Psi$, (n, d).
            targets: $Y$, (n,) or (n, k).
            regulariser: $\lambda$; broadcasts against the targets.
            prior_loc: mean of the readout's prior; broadcasts against the readout, (d,) or (d, k).
            prior_scale: standard deviation of the readout's prior; broadcasts against the readout.

        Returns:
            The same readout in standard form.
        """
        is_vector = targets.ndim == 1
        targets = as_matrix(targets)
        num_outputs = targets.shape[1]
        variance = broadcastable_matrix(regulariser, is_vector)
        loc = broadcastable_matrix(prior_loc, is_vector)
        scale = broadcastable_matrix(prior_scale, is_vector)

        if not _is_known_zero(prior_loc):
            targets = targets - features @ jnp.broadcast_to(loc, (features.shape[1], num_outputs))
        features = features * scale.T if scale.shape[1] == 1 else features[None] * scale.T[:, None]

        if variance.shape[0] == 1:
            regulariser = variance[0, 0] if variance.shape[1] == 1 else variance[0]
            return cls(features, targets, regulariser, jnp.zeros((), targets.dtype))
        row_scale = jnp.sqrt(variance)
        if variance.shape[1] == 1:
            features = features / row_scale if features.ndim == 2 else features / row_scale[None]
        else:
            features = (features if features.ndim == 3 else features[None]) / row_scale.T[:, :, None]
        log_scale = jnp.log(row_scale).sum() * (num_outputs // variance.shape[1])
        return cls(features, targets / row_scale, jnp.ones((), targets.dtype), log_scale)

    @property
    def is_shared(self) -> bool:
        """Truth of one factorisation serving all outputs."""
        return self.features.ndim == 2 and self.regulariser.ndim == 0

    @property
    def squared_norm(self) -> Array:
        r"""Squared Frobenius norm $\|\Psi\|_F^2$, scalar, or (k,) where each output has its own features."""
        return jnp.sum(self.features**2, axis=(-2, -1))

    def resolved(self) -> "Standardised":
        """Return the same with NaN for a noise variance that is lost in the rounding of the Gram matrix."""
        return self._replace(regulariser=above_rounding(self.regulariser, self.squared_norm))

    def representable(self) -> "Standardised":
        """Return the same with a regulariser that survives the rounding of the Gram matrix.

        For the maps alone, which are bijections for any positive regulariser.
        """
        floor = jnp.finfo(self.features.dtype).eps * self.squared_norm
        return self._replace(regulariser=jnp.maximum(self.regulariser, floor))

    def for_each_output(self, core: Core, *columns: Array) -> tuple[Any, Any]:
        """Run ``core`` once for all outputs, or once for each where they do not share a factorisation.

        Args:
            core: function of features, targets, regulariser and the columns, described above.
            *columns: further arrays with a trailing axis for the outputs.

        Returns:
            What ``core`` returns; the second part with a leading axis, of length 1 or k.
        """
        if self.is_shared:
            by_output, common = core(self.features, self.targets, self.regulariser, *columns)
            return by_output, jax.tree.map(lambda x: x[None], common)
        in_axes = (
            0 if self.features.ndim == 3 else None,
            0,
            0 if self.regulariser.ndim else None,
            *(0 for _ in columns),
        )
        split = [x.T[:, :, None] for x in (self.targets, *columns)]
        by_output, common = jax.vmap(core, in_axes)(self.features, split[0], self.regulariser, *split[1:])
        return jax.tree.map(lambda x: x[:, :, 0].T, by_output), common


def as_matrix(x: Array) -> Array:
    """Return a vector as a single column, and a matrix as it is."""
    return x[:, None] if x.ndim == 1 else x


def broadcastable_matrix(value: Array | np.ndarray, is_vector: bool) -> Array:
    """Return what broadcasts against a vector (m,) or a matrix (m, k) as a matrix that does so too.

    Args:
        value: numbers that broadcast.
        is_vector: whether they broadcast against a vector.

    Returns:
        The numbers, of shape (1 or m, 1 or k).
    """
    value = jnp.asarray(value)
    return value.reshape(-1, 1) if is_vector else value.reshape((1,) * (2 - value.ndim) + value.shape)


def _is_known_zero(value: Array | np.ndarray) -> bool:
    return not isinstance(value, jax.core.Tracer) and not np.any(np.asarray(value))
