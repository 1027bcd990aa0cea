"""Evidence and its gradient at sizes whose factors are computed by halves, against NumPy's dense formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_wide import linear_gaussian as lg
from tests.marks import parametrize

pytestmark = pytest.mark.usefixtures("x64")
NOISE_SCALE = 0.3


def dense(features, targets):
    """Log density and (α αᵀ − k K⁻¹) Ψ, from an LU inverse of K."""
    gram = features @ features.T + NOISE_SCALE**2 * np.eye(len(features))
    inverse = np.linalg.inv(gram)
    alpha, num_outputs = inverse @ targets, targets.shape[1]
    normaliser = np.linalg.slogdet(gram)[1] + len(features) * np.log(2 * np.pi)
    return -0.5 * (np.sum(targets * alpha) + num_outputs * normaliser), (
        alpha @ alpha.T - num_outputs * inverse
    ) @ features


# Even and odd rows, few and more columns, more features than rows and fewer.
@pytest.mark.fault("linear_gaussian/_linalg.py", "-lower_right @ (factor", "lower_right @ (factor")
@pytest.mark.fault("linear_gaussian/_linalg.py", " + below.T @ below", "")
@parametrize(
    ("n", "d", "k"), [(150, 170, 1), (151, 170, 2), (151, 160, 5), (170, 151, 1), (301, 290, 3)], rest="as_compiled"
)
def test_evidence_and_gradient_by_halves(n, d, k):
    rng = np.random.default_rng(n + d + k)
    features, targets = rng.normal(size=(2, n, d)) / np.sqrt(d), rng.normal(size=(n, k))
    found = jax.value_and_grad(lambda features: lg.log_evidence(features, jnp.asarray(targets), NOISE_SCALE))
    batch = jax.jit(jax.vmap(found))(features)
    for chain in range(2):
        value, gradient = dense(features[chain], targets)
        alone = jax.jit(found)(features[chain])
        for got in (alone, (batch[0][chain], batch[1][chain])):
            np.testing.assert_allclose(got[0], value, rtol=1e-9)
            np.testing.assert_allclose(got[1], gradient, atol=1e-8 * np.abs(gradient).max())
