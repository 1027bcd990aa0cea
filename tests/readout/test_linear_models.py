"""A linear model: what the map does to the steps that a sampler can take (Hron 2022, App. D)."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import potential_energy

from numpyro_wide import repriorise
from tests.marks import parametrize


@pytest.mark.fault(
    "linear_gaussian/_roots.py", "scaled = jnp.sqrt(self.regulariser) * phi", "scaled = self.regulariser * phi"
)
@parametrize(("num_rows", "noise_scale"), [(3, 0.5), (100, 0.5), (100, 0.05)], rest="slow")
def test_curvature_depends_on_neither_rows_nor_noise(x64, num_rows, noise_scale):
    """A leapfrog step must stay below 2/√(largest eigenvalue of the Hessian), which without the map is √n/σ."""
    rng = np.random.default_rng(num_rows)
    x, y = rng.normal(size=(num_rows, 4)), 1 + rng.normal(size=num_rows)

    def model(x, y):
        features = numpyro.deterministic("features", x)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, noise_scale).to_event(1), obs=y)

    mapped = repriorise(model, readout="w", features="features", targets="y", noise_scale=noise_scale)
    at = rng.normal(size=4)

    def hessian(model, site):
        return jax.hessian(lambda z: potential_energy(model, (x, y), {}, {site: z}))(at)

    largest = 1 + np.linalg.norm(x, 2) ** 2 / noise_scale**2
    np.testing.assert_allclose(np.linalg.norm(hessian(model, "w"), 2), largest, rtol=1e-9)
    # Terms of the order of the plain curvature cancel.
    np.testing.assert_allclose(hessian(mapped, "w_base"), np.eye(4), atol=1e-13 * largest)
