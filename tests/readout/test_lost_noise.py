"""A noise that is lost in rounding is told when a collapsed model is first run, and no other noise is."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from numpyro_wide import collapse_readout
from numpyro_wide.linear_gaussian import ReadoutProblem, log_evidence
from tests.conftest import enable_x64
from tests.marks import parametrize

SITES = {"readout": "w", "features": "features", "observed": "y"}
X = jnp.linspace(-1, 1, 50)[:, None]
Y = jnp.sin(4 * X[:, 0])
TOLD = "the noise of observed site 'y' is too small for float32: its variance is .* Run in float64"


def make(latent_noise=None):
    """A hundred features of size one."""

    def model(x, y=None, noise=1e-5):
        if latent_noise is not None:
            noise = numpyro.sample("noise", latent_noise)
        hidden = numpyro.sample("hidden", dist.Normal(0, 2).expand([1, 100]).to_event(2))
        features = numpyro.deterministic("features", jnp.tanh(x @ hidden))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([100]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(features @ w, noise), obs=y)

    return collapse_readout(model, **SITES)


def run(model, *args, **kwargs):
    return trace(seed(model, jax.random.key(0))).get_trace(*args, **kwargs)


def nuts(model):
    return MCMC(NUTS(model, max_tree_depth=1), num_warmup=1, num_samples=1)


@pytest.mark.slow
def test_mcmc_says_why_it_finds_no_start():
    with pytest.warns(UserWarning, match=TOLD), pytest.raises(RuntimeError, match="Cannot find valid initial"):
        nuts(make()).run(jax.random.key(0), X, Y)


@pytest.mark.as_compiled
def test_svi_says_why_it_finds_no_start():
    model = make()
    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.01), Trace_ELBO())
    with pytest.warns(UserWarning, match=TOLD), pytest.raises(RuntimeError, match="Cannot find valid initial"):
        svi.init(jax.random.key(0), X, Y)


@parametrize("noise", [1e-5, np.float32(1e-5), jnp.float32(1e-5), jnp.full(50, 1e-5)], rest="as_compiled")
def test_however_the_noise_is_given(noise):
    with pytest.warns(UserWarning, match=TOLD):
        run(make(), X, Y, noise=noise)


def quietly(call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call()


@pytest.mark.as_compiled
def test_no_word_of_noise_that_is_drawn_or_not_known():
    tiny = make(dist.HalfNormal(1e-6))
    quietly(lambda: run(tiny, X, Y))
    quietly(lambda: run(substitute(tiny, {"noise": 1e-6}), X, Y))
    for traced in ((X, Y, 1e-5), (X, Y)):
        quietly(lambda traced=traced: jax.jit(lambda *args: run(make(), *args)["y"]["fn"].log_prob(Y))(*traced))


@pytest.mark.slow
def test_no_word_of_noise_that_is_large_enough():
    mcmc = nuts(make())
    quietly(lambda: mcmc.run(jax.random.key(0), X, Y, noise=0.1))


@pytest.mark.as_compiled
@pytest.mark.usefixtures("x64")
def test_no_word_in_float64():
    x, y = np.asarray(X, float), np.asarray(Y, float)
    quietly(lambda: run(make(), x, y))


@pytest.mark.fault("readout/_collapse.py", "float(error) < FELT_ERROR", "float(error) < 1e9")
@pytest.mark.as_compiled
def test_digits_that_are_lost_are_told_before_the_evidence_is_nan():
    """From a tenth of a nat on; targets that are centred and standardised, or float64, are the remedies told."""

    def model(x, y=None, prior_scale=1.0, noise=0.5):
        hidden = numpyro.sample("hidden", dist.Normal(0, 2).expand([1, 100]).to_event(2))
        features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / 10)
        w = numpyro.sample("w", dist.Normal(0, prior_scale).expand([100]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, noise).to_event(1), obs=y)

    wrapped = collapse_readout(model, **SITES)
    far = 2000 + 10 * Y
    told = "rounding moves it by about .* nats.* Centre and standardise the targets.* Run in float64"
    with pytest.warns(UserWarning, match=told):
        run(wrapped, X, far, prior_scale=300.0, noise=3.0)
    quietly(lambda: run(collapse_readout(model, **SITES), X, (far - far.mean()) / far.std()))
    x, y = np.asarray(X, float), np.asarray(far, float)
    with enable_x64(True):
        quietly(lambda: run(collapse_readout(model, **SITES), x, y, prior_scale=300.0, noise=3.0))


@pytest.mark.as_compiled
def test_it_is_said_where_the_evidence_is_nan():
    """By row, by output and with a prior scale, on either side of the limit."""
    rng = np.random.default_rng(0)
    features, targets = rng.normal(size=(12, 30)).astype("f"), rng.normal(size=(12, 2)).astype("f")
    shapes = [(), (2,), (12, 1), (12, 2)]
    for noise in [np.asarray(np.linspace(1, 2, int(np.prod(shape))).reshape(shape), "f") for shape in shapes]:
        by_row = 3.0 * features[:, :, None] / np.broadcast_to(noise, targets.shape)[:, None]
        unit = 1 / (0.1 * np.finfo("f").eps * np.max(np.sum(by_row**2, axis=(0, 1))))
        for factor, is_lost in ((0.9, True), (1.1, False)):
            scale = noise * np.float32((factor / unit) ** 0.5)
            problem = ReadoutProblem.of(features, targets, scale, prior_scale=3.0)
            assert bool(jnp.isnan(log_evidence(features, targets, scale, prior_scale=3.0))) == is_lost
            assert bool(jnp.isinf(problem.evidence_error())) == is_lost
