"""The evidence of networks: by chains, by draws of the prior, and of the Gaussian process that is their limit."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_mean

from numpyro_wide import collapse_readout, datasets, model_evidence
from numpyro_wide.diagnostics import wide_enough
from numpyro_wide.wide_limit import fcn_kernel, gp_log_evidence

pytestmark = pytest.mark.slow
GAMES = datasets.marathon()
YEARS, PACES = (np.float32((part - part.mean(0)) / part.std(0)) for part in GAMES)
NOISE = 0.4


def network(width):
    """One erf layer on the marathon's paces, its readout integrated out."""

    def model(x, y=None):
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand([1, width]).to_event(2))
        bias = numpyro.sample("bias", dist.Normal(0, 1).expand([width]).to_event(1))
        features = numpyro.deterministic("features", jax.lax.erf(3 * x @ weights + 2 * bias) / width**0.5)
        readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ readout, NOISE).to_event(1), obs=y)

    return collapse_readout(model, readout="readout", features="features", observed="y")


def mean_field_bound(model):
    """The ELBO of a fitted mean-field guide, and its standard error."""
    guide = AutoNormal(model, init_loc_fn=init_to_mean, init_scale=1.0)
    svi = SVI(model, guide, numpyro.optim.Adam(0.01), TraceMeanField_ELBO(num_particles=4))
    params = svi.run(jax.random.key(0), 300, YEARS, PACES, progress_bar=False).params
    loss = jax.jit(lambda key: TraceMeanField_ELBO().loss(key, params, model, guide, YEARS, PACES))
    bounds = -np.asarray(jax.lax.map(loss, jax.random.split(jax.random.key(1), 1000)))
    return bounds.mean(), bounds.std() / len(bounds) ** 0.5


@pytest.mark.parametrize("width", [2048, 16])
def test_evidence_of_networks_by_chains_by_importance_and_in_the_limit(width):
    model = network(width)
    row = wide_enough(jax.random.key(1), model, YEARS, PACES, num_draws=1000, batch_size=100).rows["model"]
    found = model_evidence(jax.random.key(2), model, YEARS, PACES, num_chains=4, num_warmup=100, num_samples=200)
    error = np.hypot(found.standard_error, row.log_evidence_error)
    assert found.is_trusted and row.pareto_k < 0.5
    assert abs(found.log_evidence - row.log_evidence) < 4 * error < 1.2
    bound, bound_error = mean_field_bound(model)
    gap, gap_error = found.log_evidence - bound, np.hypot(found.standard_error, bound_error)
    assert -3 * gap_error < gap  # a bound it is
    assert gap > 0.5 if width == 16 else gap < 0.3  # and a sharp one where weights are nearly as in the prior
    kernel = fcn_kernel(1, "erf", w_std=3.0, b_std=2.0)(jnp.asarray(YEARS))[0]
    limit = float(gp_log_evidence(kernel, PACES, NOISE))
    # The evidence differs from its limit by a multiple of 1/width, of the size of the gap, which does as well.
    assert abs(found.log_evidence - limit) < 3 * found.standard_error + row.gap
    if width == 16:
        assert found.log_evidence - limit > 0.5  # the data prefer the narrow network
    else:
        assert found.method == "stepping-stone" and len(found.inverse_temperatures) == 1
        assert row.gap < 0.05 and found.standard_error < 0.05
