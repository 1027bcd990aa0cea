"""Hron 2022 by Monte Carlo: Theorem 2.1, Proposition 2.3 against the arc-sine kernel, and Proposition 3.1."""

import arviz as az
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import MCMC, NUTS, Predictive, log_likelihood
from numpyro.infer.util import log_density, potential_energy

from numpyro_wide import ReadoutPredictive, collapse_readout, linear_gaussian, repriorise
from numpyro_wide.wide_limit import fcn_kernel, gp_log_evidence
from tests.marks import parametrize
from tests.models import network, small_data

X = np.linspace(-1.5, 1.5, 5)[:, None]
Y = np.sin(2 * X[:, 0]) + 0.3
NOISE_SCALE = 0.3


def erf_network(y=None, *, width):
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, width]).to_event(2))
    bias = numpyro.sample("bias", dist.Normal(0, 1).expand([width]).to_event(1))
    features = numpyro.deterministic("features", jax.scipy.special.erf(X @ hidden + bias) / width**0.5)
    w = numpyro.sample("w", dist.Normal(0, 1).expand([width]).to_event(1))
    numpyro.sample("y", dist.Normal(features @ w, NOISE_SCALE).to_event(1), obs=y)


def log_evidence_of_prior_draws(width, num_draws, seed):
    """Log density of the data given prior draws of the hidden weights, in float64."""

    def single(key):
        one, two = jax.random.split(key)
        hidden, bias = jax.random.normal(one, (1, width)), jax.random.normal(two, (width,))
        features = jax.scipy.special.erf(X @ hidden + bias) / width**0.5
        return linear_gaussian.log_evidence(features, Y, NOISE_SCALE)

    return np.asarray(jax.lax.map(single, jax.random.split(jax.random.key(seed), num_draws), batch_size=500))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_divergence_falls_like_one_over_width():
    """KL(N(0, I) ‖ p(φ | D)) = log E[evidence] − E[log evidence], over the prior of the hidden weights."""
    widths = np.array([16, 32, 64, 128, 256, 512, 1024])
    divergences, errors = [], []
    for width in widths:
        draws = log_evidence_of_prior_draws(int(width), 4000, seed=int(width))
        ratio = np.exp(draws - draws.max())
        divergences.append(np.log(ratio.mean()) + draws.max() - draws.mean())
        # Delta method, for the noise of both terms together.
        errors.append((ratio / ratio.mean() - draws).std() / len(draws) ** 0.5)
    divergences, relative_errors = np.array(divergences), np.array(errors) / np.array(divergences)
    assert (divergences > 0).all()
    slopes = np.diff(np.log(divergences[[0, 2, 4, 6]])) / np.diff(np.log(widths[[0, 2, 4, 6]]))
    slope = np.polyfit(np.log(widths), np.log(divergences), 1)[0]
    # At width 16 the higher orders still show; the noise of the fit is far below the tolerance.
    assert relative_errors.max() < 0.1
    assert abs(slope + 1) < 0.15
    assert (slopes < -0.7).all()


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_divergence_without_repriorisation_tends_to_a_constant():
    """Proposition 2.3 at width 1024: KL(N(0, I) ‖ p(θ | D)) = log evidence − E[log likelihood]."""
    width, num_draws = 1024, 4000
    draws = Predictive(lambda: erf_network(width=width), num_samples=num_draws)(jax.random.key(0))
    latent = {name: draws[name] for name in ("hidden", "bias", "w")}
    log_likelihoods = log_likelihood(lambda: erf_network(Y, width=width), latent)["y"]
    log_evidences = log_evidence_of_prior_draws(width, num_draws, seed=1)
    log_evidence = jax.nn.logsumexp(log_evidences) - np.log(num_draws)
    found = float(log_evidence - log_likelihoods.mean())
    error = float(np.hypot(log_likelihoods.std(), log_evidences.std()) / num_draws**0.5)

    kernel, _ = fcn_kernel(1, "erf", w_std=1.0, b_std=1.0)(X, X)
    inverse = np.linalg.inv(kernel + NOISE_SCALE**2 * np.eye(5))
    limit = 0.5 * (
        np.trace(kernel) / NOISE_SCALE**2
        + Y @ (np.eye(5) / NOISE_SCALE**2 - inverse) @ Y
        + np.linalg.slogdet(NOISE_SCALE**2 * inverse)[1]
    )
    # The evidence itself is within O(1 / width) of its limit.
    np.testing.assert_allclose(log_evidence, gp_log_evidence(kernel, Y, NOISE_SCALE), atol=0.05)
    assert error < 0.05 * limit
    assert abs(found - limit) < 4.5 * error + 0.05


def weights_and_gradients(width, num_draws, seed):
    """Draws of N(0, I): the weights that make them draws of the posterior, and φ plus the gradient of its log density.

    The latter of each site, (num_draws, size).
    """

    def plain(targets=None):
        erf_network(targets, width=width)

    model = repriorise(plain, readout="w", features="features", targets="targets", noise_scale=NOISE_SCALE)
    shapes = {"hidden": (1, width), "bias": (width,), "w_base": (width,)}

    def single(key):
        keys = jax.random.split(key, len(shapes))
        draw = {name: jax.random.normal(one, shapes[name]) for name, one in zip(shapes, keys, strict=True)}
        log_joint, gradient = jax.value_and_grad(lambda point: log_density(model, (Y,), {}, point)[0])(draw)
        log_weight = log_joint - sum(dist.Normal(0, 1).log_prob(part).sum() for part in draw.values())
        return log_weight, {name: (gradient[name] + draw[name]).ravel() for name in draw}

    log_weights, gradients = jax.lax.map(single, jax.random.split(jax.random.key(seed), num_draws), batch_size=250)
    return jax.nn.softmax(log_weights), gradients


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_gradients_tend_to_those_of_a_standard_normal_like_one_over_the_root_of_the_width():
    """Proposition 3.1: at draws of the posterior, its gradient and that of N(0, I) differ less and less."""
    widths, lengths = np.array([16, 64, 256, 1024]), []
    for width in map(int, widths):
        weights, gradients = weights_and_gradients(width, 1000, seed=width)
        np.testing.assert_allclose(gradients["w_base"], 0, atol=1e-9)  # exactly, at any width
        squares = (gradients["hidden"] ** 2).sum(1) + (gradients["bias"] ** 2).sum(1)
        assert 1 / (weights**2).sum() > 200  # effective draws: the length is known to 5 % or so
        lengths.append(float(weights @ squares) ** 0.5)
    assert abs(np.polyfit(np.log(widths), np.log(lengths), 1)[0] + 0.5) < 0.1


# The plain, repriorised and collapsed forms of one network have one posterior -----------------------------------------

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


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["feature", "data", "data-cholesky"])
@pytest.mark.parametrize("factor", [1, 10])
def test_repriorised_posterior(variant, factor, reference):
    wrapped = repriorise(network, **ARGUMENTS, regulariser=lambda sigma: factor * sigma**2, variant=variant)
    # Twelve statistics: a difference of 4.5 standard errors happens by chance once in 10,000 runs.
    assert disagreement(statistics(wrapped, 1000, key=20), reference) < 4.5


@pytest.mark.slow
def test_collapsed_posterior(reference):
    collapsed = collapse_readout(network, readout="w", features="features", observed="y")
    assert disagreement(statistics(collapsed, 1000, key=30), reference) < 4.5


# A linear model: what the map does to the steps that a sampler can take (Hron 2022, App. D) ---------------------------


@pytest.mark.as_compiled
@pytest.mark.fault("linear_gaussian/_roots.py", "scaled = jnp.sqrt(self.regulariser) *", "scaled = self.regulariser *")
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
