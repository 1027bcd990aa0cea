"""Posterior of a readout whose rows have been summed over: draws and predictions read no row of the fit again."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide.linear_gaussian._row_features import RowFeatures
from numpyro_wide.linear_gaussian._standardised import as_matrix


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
