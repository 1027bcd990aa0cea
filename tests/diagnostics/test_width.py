"""The distance from the wide limit, against closed forms, quadrature and its rate."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import condition
from numpyro.infer import NUTS
from scipy import integrate, stats

from numpyro_wide import collapse_readout, repriorise
from numpyro_wide.diagnostics import WidthReport, _width, wide_enough
from numpyro_wide.nn import CNN, FCN, bnn
from numpyro_wide.wide_limit import fcn_kernel, gp_log_evidence, kernel
from tests.compilations import compilations
from tests.marks import parametrize
from tests.models import network, small_data

KEY = jax.random.key(0)
X = np.linspace(-1.5, 1.5, 5, dtype="f")[:, None]
Y = np.sin(2 * X[:, 0]) + 0.3


def erf_network(x, y=None, *, width):
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, width]).to_event(2))
    bias = numpyro.sample("bias", dist.Normal(0, 1).expand([width]).to_event(1))
    features = numpyro.deterministic("features", jax.lax.erf(x @ hidden + bias) / width**0.5)
    w = numpyro.sample("w", dist.Normal(0, 1).expand([width]).to_event(1))
    numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(1), obs=y)


def collapsed(width):
    model = lambda x, y=None: erf_network(x, y, width=width)  # noqa: E731
    return collapse_readout(model, readout="w", features="features", observed="y")


def linear_in_the_hidden_weight(y=None):
    """y = h w + noise: the evidence given h is N(0, h² + σ²)."""
    hidden = numpyro.sample("hidden", dist.Normal(0, 1))
    features = numpyro.deterministic("features", jnp.full((1, 1), hidden))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([1]).to_event(1))
    numpyro.sample("y", dist.Normal(features @ w, 0.5).to_event(1), obs=y)


@pytest.mark.as_compiled
def test_every_number_against_quadrature():
    model = collapse_readout(linear_in_the_hidden_weight, readout="w", features="features", observed="y")
    row = wide_enough(KEY, model, np.array([2.0], "f"), num_draws=20_000, batch_size=20_000).rows["model"]

    def evidence(h):
        return stats.norm.pdf(2.0, 0, np.sqrt(h**2 + 0.25))

    def mean(function):
        return integrate.quad(lambda h: function(h) * stats.norm.pdf(h), -8, 8)[0]

    grid = np.linspace(0, 8, 4001)
    density = stats.norm.pdf(grid)
    smaller = density @ np.minimum.outer(evidence(grid), evidence(grid)) @ density / density.sum() ** 2
    average = mean(evidence)
    gap = np.log(average) - mean(lambda h: np.log(evidence(h)))
    assert abs(row.gap - gap) < 4.5 * row.gap_error < 0.1 * gap
    np.testing.assert_allclose(row.accept_prob, smaller / average, rtol=0.02)
    assert abs(row.log_evidence - np.log(average)) < 4 * row.log_evidence_error
    spread = mean(lambda h: evidence(h) ** 2) / average**2 - 1
    np.testing.assert_allclose(row.log_evidence_error, np.sqrt(spread / 20_000), rtol=0.05)
    np.testing.assert_allclose(row.sample_size, average**2 / mean(lambda h: evidence(h) ** 2), rtol=0.02)


@pytest.mark.as_compiled
@parametrize(("num_outputs", "form"), [(None, "collapsed"), (3, "collapsed"), (3, "repriorised")], rest="slow")
def test_the_evidence_of_the_limit_is_the_gaussian_process_s(num_outputs, form):
    """One hidden layer, with a readout's bias: the closed-form kernel, noise by output."""
    targets = Y if num_outputs is None else np.stack([Y, -Y, Y**2], axis=1)
    noise = 0.4 if num_outputs is None else np.array([0.3, 0.4, 0.8], "f")
    net = FCN(1, 20, "erf", w_std=1.5, b_std=0.5, readout_b_std=0.3)
    model = bnn(net, num_outputs, noise)
    if form == "collapsed":
        model = collapse_readout(model, readout="readout", features="features", observed="y")
    else:  # the map need not be that of the model's own noise
        model = repriorise(model, readout="readout", features="features", targets="y", noise_scale=0.5)
    row = wide_enough(KEY, model, X, targets, num_draws=100).rows["model"]
    kernel = fcn_kernel(1, "erf", **net.scales())(X)[0]
    columns = targets.reshape(5, -1).T
    noises = np.broadcast_to(noise, len(columns))
    expected = sum(float(gp_log_evidence(kernel, y, sd)) for y, sd in zip(columns, noises, strict=True))
    # 500 draws of 20 units, whose mean is the kernel of 10,000 units.
    assert abs(row.limit_log_evidence - expected) < 0.15
    assert f"by the last one's mean kernel: {row.limit_log_evidence:.2f}" in str(WidthReport({20: row}))


@pytest.mark.fault("diagnostics/_width.py", "    if kernel is None:", "    if True:")
@pytest.mark.slow
def test_the_limit_of_any_network_is_taken_as_it_is():
    """A CNN of two layers, whose mean kernel is not that of its limit."""
    x = np.random.default_rng(0).normal(size=(6, 4, 4, 1)).astype("f")
    y = x.mean(axis=(1, 2, 3))
    network = CNN(2, 4, "relu", padding="SAME", pooling="mean", b_std=0.5)
    model = collapse_readout(bnn(network, None, 0.3), readout="readout", features="features", observed="y")
    gram = kernel(network)(x)[0]
    report = wide_enough(KEY, model, x, y, num_draws=100, kernel=gram)
    covariance = np.asarray(gram, float) + 0.09 * np.eye(6)
    expected = stats.multivariate_normal(np.zeros(6), covariance).logpdf(y)
    np.testing.assert_allclose(report.rows["model"].limit_log_evidence, expected, rtol=1e-5)
    assert f"infinitely wide network: {expected:.2f}" in str(report)
    with pytest.raises(ValueError, match=r"features' rows, \(6, 6\), not \(4, 6\)"):
        wide_enough(KEY, model, x, y, num_draws=100, kernel=gram[:4])


def test_the_evidence_of_the_limit_is_not_told_where_it_is_a_mixture():
    model = collapse_readout(noisy, readout="w", features="features", observed="y")
    assert np.isnan(wide_enough(KEY, model, np.array([2.0], "f"), num_draws=100).rows["model"].limit_log_evidence)


def noisy(y=None):
    """The same with a latent noise."""
    noise_scale = numpyro.sample("noise", dist.LogNormal(0.0, 0.4))
    hidden = numpyro.sample("hidden", dist.Normal(0, 1))
    features = numpyro.deterministic("features", jnp.full((1, 1), hidden))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([1]).to_event(1))
    numpyro.sample("y", dist.Normal(features @ w, noise_scale).to_event(1), obs=y)


@pytest.mark.slow
def test_hyperparameters_are_drawn_from_their_posterior_and_given():
    model = collapse_readout(noisy, readout="w", features="features", observed="y")
    log_noises, hidden = np.linspace(-2, 2, 401), np.linspace(-8, 8, 801)
    variances = hidden**2 + np.exp(2 * log_noises)[:, None]
    log_densities = stats.norm.logpdf(2.0, 0, np.sqrt(variances))
    prior = stats.norm.pdf(hidden) / stats.norm.pdf(hidden).sum()
    evidences = np.exp(log_densities) @ prior
    gaps = np.log(evidences) - log_densities @ prior
    noise_prior = stats.norm.pdf(log_noises, 0, 0.4)
    posterior = evidences * noise_prior
    gap = gaps @ posterior / posterior.sum()
    rows = [
        wide_enough(
            jax.random.key(seed), model, np.array([2.0], "f"), num_draws=2000, batch_size=2000, hyperparameters="noise"
        ).rows["model"]
        for seed in range(12)
    ]
    found = np.array([row.gap for row in rows])
    error = np.sqrt(np.mean([row.gap_error**2 for row in rows]) / len(rows))
    # Noise from its prior would be told from noise of its posterior.
    assert abs(found.mean() - gap) < 4 * error < abs(gaps @ noise_prior / noise_prior.sum() - gap)
    np.testing.assert_allclose(found.std(ddof=1), np.sqrt(len(rows)) * error, rtol=0.6)
    log_evidence = np.log(posterior.sum() / noise_prior.sum())
    assert abs(np.mean([row.log_evidence for row in rows]) - log_evidence) < 4 * rows[0].log_evidence_error / 12**0.5
    assert all(row.num_draws == 500 and np.isfinite(row.prior_pareto_k) for row in rows)
    # What the data say about the noise is no distance from the limit of weights.
    assert wide_enough(KEY, model, np.array([2.0], "f"), num_draws=2000).rows["model"].gap > 1.1 * gap


# A second look at the hidden weight, or at nothing.
OTHERS = {
    "site": lambda h, reading: numpyro.sample("reading", dist.Normal(h, 0.5), obs=reading),
    "factor": lambda h, reading: numpyro.factor("reading", dist.Normal(h, 0.5).log_prob(reading)),
    "constant": lambda h, reading: numpyro.sample("reading", dist.Normal(0.5, 0.5), obs=reading),
}


@pytest.mark.fault("diagnostics/_width.py", "form is None or observed != {form.observed}", "form is None")
@parametrize("other", OTHERS, rest="slow")
@parametrize("form", ["collapsed", "repriorised"], rest="slow")
def test_other_observed_sites_and_factors_weigh_as_well(form, other):
    def model(y=None, reading=None):
        h = numpyro.sample("hidden", dist.Normal(0, 1))
        OTHERS[other](h, reading)
        features = numpyro.deterministic("features", jnp.full((1, 1), h))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([1]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, 0.5).to_event(1), obs=y)

    wrapped = wrapped_as(form, model, noise_scale=0.5)
    row = wide_enough(KEY, wrapped, np.array([2.0], "f"), 1.5, num_draws=20_000, batch_size=20_000).rows["model"]

    def mean(function):
        return integrate.quad(lambda h: function(h) * stats.norm.pdf(h), -8, 8)[0]

    def log_weight(h):
        reading = stats.norm.logpdf(1.5, 0.5 if other == "constant" else h, 0.5)
        return stats.norm.logpdf(2.0, 0, np.sqrt(h**2 + 0.25)) + reading

    log_evidence = np.log(mean(lambda h: np.exp(log_weight(h))))
    assert abs(row.log_evidence - log_evidence) < 4.5 * row.log_evidence_error < 0.2
    assert abs(row.gap - (log_evidence - mean(log_weight))) < 4.5 * row.gap_error < 0.3
    # The Gaussian process knows one likelihood.
    assert np.isnan(row.limit_log_evidence)


@pytest.mark.as_compiled
def test_hyperparameters_far_from_their_prior_are_told_of():
    def model(y=None):
        noise_scale = numpyro.sample("noise", dist.LogNormal(7.0, 1.0))
        features = numpyro.deterministic("features", jnp.eye(5)[:, :2])
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, noise_scale).to_event(1), obs=y)

    wrapped = collapse_readout(model, readout="w", features="features", observed="y")
    row = wide_enough(KEY, wrapped, Y, num_draws=200, hyperparameters=["noise"]).rows["model"]
    assert row.prior_pareto_k > 0.7 and row.pareto_k == -np.inf
    assert "hyperparameters are far from their prior" in row.advice
    report = wide_enough(KEY, wrapped, Y, num_draws=200, hyperparameters=["noise"])
    assert f"together: {row.prior_pareto_k:.2f}" in str(report)


def test_draws_whose_weight_is_no_number_are_left_out():
    def model(y=None):
        noise_scale = numpyro.sample("noise", dist.HalfNormal(1.0))
        features = numpyro.deterministic("features", jnp.eye(5)[:, :2])
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        # As rounding does to noise that is too small.
        numpyro.sample("y", dist.Normal(features @ w, jnp.where(noise_scale < 0.1, 1e-12, 0.5)).to_event(1), obs=y)

    wrapped = collapse_readout(model, readout="w", features="features", observed="y")
    covariance = np.diag([1.25, 1.25, 0.25, 0.25, 0.25])
    expected = stats.multivariate_normal(np.zeros(5), covariance).logpdf(Y)
    with jax.debug_nans(False):
        for names in ((), "noise"):
            with pytest.warns(RuntimeWarning, match="draws of the model 'model' are left out") as told:
                row = wide_enough(KEY, wrapped, Y, num_draws=200, hyperparameters=names).rows["model"]
            assert told[0].filename == __file__
            np.testing.assert_allclose(row.log_evidence, expected, rtol=1e-5)


@parametrize("names", ["scale", ["noise", "y"]], rest="slow")
def test_hyperparameters_must_be_latent_sites(names):
    model = collapse_readout(noisy, readout="w", features="features", observed="y")
    with pytest.raises(ValueError, match="hyperparameters names the latent site .*; its latent sites are .*'noise'"):
        wide_enough(KEY, model, np.array([2.0], "f"), num_draws=200, hyperparameters=names)


def test_constant_features_are_the_limit():
    def model(y=None):
        numpyro.sample("hidden", dist.Normal(0, 1).expand([3]).to_event(1))
        features = numpyro.deterministic("features", jnp.arange(10.0).reshape(5, 2))
        w = numpyro.sample("w", dist.Normal(0.5, 2).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, 0.5).to_event(1), obs=y)

    wrapped = repriorise(model, readout="w", features="features", targets="y", noise_scale=0.5)
    report = wide_enough(KEY, wrapped, Y, num_draws=200)
    row = report.rows["model"]
    assert row.accept_prob > 0.9999 and row.pareto_k == -np.inf
    np.testing.assert_allclose([row.gap, row.sample_size], [0, 1], atol=1e-6)
    assert "at the limit: wide_limit_draws is enough" in str(report) and np.isnan(report.slope)
    covariance = 4 * np.arange(10.0).reshape(5, 2) @ np.arange(10.0).reshape(5, 2).T + 0.25 * np.eye(5)
    mean = 0.5 * np.arange(10.0).reshape(5, 2).sum(1)
    np.testing.assert_allclose(row.log_evidence, stats.multivariate_normal.logpdf(Y, mean, covariance), rtol=1e-4)


@pytest.mark.slow
def test_the_gap_falls_like_one_over_width():
    widths = (32, 128, 512)
    report = wide_enough(KEY, {width: collapsed(width) for width in widths}, X, Y, num_draws=4000, batch_size=500)
    gaps = [report.rows[width].gap for width in widths]
    # A tenth of each gap is the noise at most: 0.1 / log(16) in the slope.
    assert all(report.rows[width].gap_error < 0.1 * gap for width, gap in zip(widths, gaps, strict=True))
    assert abs(report.slope + 1) < 0.2
    probabilities = [report.rows[width].accept_prob for width in widths]
    assert sorted(probabilities) == probabilities and probabilities[-1] > 0.8
    printed = str(report)
    assert [line.split()[0] for line in printed.splitlines()[1:4]] == ["32", "128", "512"]
    assert f"power {report.slope:.2f}" in printed


@pytest.mark.slow
def test_the_repriorised_and_the_collapsed_form_agree():
    """The same hidden weights, if the same keys reach their sites; φ drops out of a repriorised model's weight."""
    x, y = small_data()
    model = condition(network, {"sigma": 0.3})
    forms = {
        "repriorised": repriorise(model, readout="w", features="features", targets="y", noise_scale="sigma"),
        "collapsed": collapse_readout(model, readout="w", features="features", observed="y"),
    }
    keys = jax.random.split(KEY, 50)
    weights = {name: _width._Weights(form, ((x, y), {}), [])(keys, {})[0] for name, form in forms.items()}
    assert np.ptp(weights["collapsed"]) > 1
    np.testing.assert_allclose(weights["repriorised"], weights["collapsed"], rtol=1e-4)


def test_pareto_k_of_weights_with_a_pareto_tail():
    weights = np.random.default_rng(0).pareto(1 / 0.5, size=4000) + 1
    row = _width._row(np.log(weights))
    assert abs(row.pareto_k - 0.5) < 0.15
    assert _width._row(4 * np.log(weights)).advice == "far: run a chain"


@parametrize("form", ["collapsed", "repriorised"], rest="slow")
def test_a_second_call_compiles_nothing(form):
    model = condition(network, {"sigma": 0.3})
    if form == "collapsed":
        model = collapse_readout(model, readout="w", features="features", observed="y")
    else:
        model = repriorise(model, readout="w", features="features", targets="y", noise_scale="sigma")
    (x, y), key = small_data(), jax.random.key(1)
    with compilations() as first:
        report = wide_enough(KEY, model, x, y, num_draws=100)
    with compilations() as second:
        other = wide_enough(key, model, x, 30 * y, num_draws=100)
    assert first and not second
    assert other.rows["model"].log_evidence < report.rows["model"].log_evidence - 1  # of the new data and not the old


def by_closure(scale):
    def model(x, y=None):
        features = numpyro.deterministic("features", scale() * jnp.concatenate([x, jnp.ones_like(x)], axis=1))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(1), obs=y)

    return model


def wrapped_as(form, model, noise_scale=0.3):
    if form == "collapsed":
        return collapse_readout(model, readout="w", features="features", observed="y")
    if form == "repriorised":
        return repriorise(model, readout="w", features="features", targets="y", noise_scale=noise_scale)
    return model


@parametrize("form", ["collapsed", "repriorised"], rest="slow")
def test_a_changed_closure_is_seen(form):
    """The evidence is a closed form: y ~ N(0, s² (x xᵀ + 1) + σ²)."""
    scale = [1.0]
    model = wrapped_as(form, by_closure(lambda: scale[0]))
    for value in (1.0, 0.1):
        scale[0] = value
        covariance = value**2 * (X @ X.T + 1) + 0.09 * np.eye(len(X))
        row = wide_enough(KEY, model, X, Y, num_draws=100).rows["model"]
        expected = stats.multivariate_normal.logpdf(Y, np.zeros(len(X)), covariance)
        np.testing.assert_allclose(row.log_evidence, expected, rtol=1e-4)
        if form == "collapsed":
            np.testing.assert_allclose(row.limit_log_evidence, expected, rtol=1e-4)


def test_mistakes_are_refused():
    with pytest.raises(TypeError, match=r"rng_key must be a PRNG key, such as jax.random.key\(0\), but is an int"):
        wide_enough(0, collapsed(4), X, Y)
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1, but got 2.5"):
        wide_enough(KEY, collapsed(4), X, Y, batch_size=2.5)
    with pytest.raises(ValueError, match="observes nothing with these arguments; pass the observations too.*'hidden'"):
        wide_enough(KEY, collapsed(4), X)
    with pytest.raises(TypeError, match="'NUTS' object is not callable"):
        wide_enough(KEY, NUTS(collapsed(4)), X, Y)
    with pytest.raises(
        TypeError, match=r"rng_key must be a PRNG key.*but is a CollapsedModel; the order is wide_enough"
    ):
        wide_enough(collapsed(4), X, Y)
    with pytest.raises(ValueError, match="num_draws must be a whole number of at least 100, but got 10"):
        wide_enough(KEY, collapsed(4), X, Y, num_draws=10)
    with pytest.raises(ValueError, match="no draw has a finite weight"):
        _width._row(np.full(100, np.nan))
