"""The plain, repriorised and collapsed forms of one network have one posterior."""

import arviz as az
import jax
import numpy as np
import pytest
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import MCMC, NUTS

from numpyro_wide import ReadoutPredictive, collapse_readout, repriorise
from numpyro_wide.readout._transform import ReadoutTransform
from tests.models import network, small_data

pytestmark = pytest.mark.slow

ARGUMENTS = {"readout": "w", "features": "features", "targets": "y", "noise_scale": "sigma"}
X_TEST = np.linspace(-1.2, 1.2, 5, dtype="f")[:, None]


def statistics(model, num_samples, key):
    """Draws (1, draw, statistic): log noise, and the function at five inputs."""
    x, y = small_data()
    mcmc = MCMC(NUTS(model), num_warmup=400, num_samples=num_samples)
    mcmc.run(jax.random.key(key), x, y)
    samples = mcmc.get_samples()
    if "w" not in samples:
        samples["w"] = ReadoutPredictive(model, samples, (x, y)).readout(jax.random.key(key + 1))

    def function(draw):
        sites = trace(substitute(seed(network, jax.random.key(0)), draw)).get_trace(X_TEST)
        return sites["features"]["value"] @ draw["w"][:, 0]

    draws = jax.lax.map(function, {name: samples[name] for name in ("hidden", "sigma", "w")})
    return np.concatenate([np.log(samples["sigma"])[:, None], draws], axis=1, dtype=float)[None]


@pytest.fixture(scope="module")
def reference():
    return statistics(network, 2000, key=10)


def disagreement(draws, reference):
    """Largest difference of first and second moments from the plain model's, in Monte Carlo standard errors."""
    means, errors = [], []
    for sample in (reference, draws):
        centred = sample - reference.mean((0, 1))
        moments = np.concatenate([centred, centred**2], axis=-1)
        ess = np.asarray(az.ess({"x": moments}, method="mean")["x"])
        assert ess.min() > 100
        means.append(moments.mean((0, 1)))
        errors.append(moments.std((0, 1)) / np.sqrt(ess))
    return np.abs((means[1] - means[0]) / np.hypot(*errors)).max()


@pytest.mark.parametrize("variant", ["feature", "data", "data-cholesky"])
@pytest.mark.parametrize("factor", [1, 10])
def test_repriorised_posterior(variant, factor, reference):
    wrapped = repriorise(network, **ARGUMENTS, regulariser=lambda sigma: factor * sigma**2, variant=variant)
    # Twelve statistics: a difference of 4.5 standard errors happens by chance once in 10,000 runs.
    assert disagreement(statistics(wrapped, 1000, key=20), reference) < 4.5


def test_collapsed_posterior(reference):
    collapsed = collapse_readout(network, readout="w", features="features", observed="y")
    assert disagreement(statistics(collapsed, 1000, key=30), reference) < 4.5


def test_a_flipped_log_determinant_is_seen(monkeypatch, reference):
    right = ReadoutTransform.log_abs_det_jacobian
    monkeypatch.setattr(ReadoutTransform, "log_abs_det_jacobian", lambda *args: -right(*args))
    assert disagreement(statistics(repriorise(network, **ARGUMENTS), 1000, key=20), reference) > 9
