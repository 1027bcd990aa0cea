"""The guide that is read off a model: its density against SciPy, its posteriors against closed forms."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.stats
from flax import linen
from numpyro.distributions import biject_to
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import Predictive

from numpyro_wide import AmortizedForwardKL
from numpyro_wide.amortized import importance_sample
from numpyro_wide.amortized._guide import _log_unit, _signed_log
from numpyro_wide.autoguide import AutoAmortized
from numpyro_wide.calibration import from_guide, sbc_ranks, uniformity_p_value
from numpyro_wide.nn import ResidualEncoder
from tests.marks import parametrize

KEY = jax.random.key(0)
SMALL = ResidualEncoder(width=64, depth=2)
DESIGN = np.array([[1.0, 0.4], [-0.3, 1.2], [0.8, -0.5]])
NOISE = np.array([0.6, 0.9, 0.4])


def linear_model():
    """Two sites that are correlated given the data; the first is a vector of one number, the second a scalar."""
    slope = numpyro.sample("slope", dist.Normal(0.5, 1.5).expand([1]).to_event(1))
    offset = numpyro.sample("offset", dist.Normal(-1.0, 0.7))
    theta = jnp.concatenate([slope, offset[None]])
    numpyro.sample("x", dist.Normal(jnp.asarray(DESIGN, theta.dtype) @ theta, jnp.asarray(NOISE)).to_event(1))


def exact(x):
    """Mean and covariance of the linear model's posterior."""
    precision = np.diag([1.5**-2, 0.7**-2]) + DESIGN.T / NOISE**2 @ DESIGN
    covariance = np.linalg.inv(precision)
    return covariance @ (np.array([0.5, -1.0]) / np.array([1.5, 0.7]) ** 2 + DESIGN.T @ (x / NOISE**2)), covariance


def train(model, guide, *args, num_steps=1500, observed="x", **options):
    optimiser = optax.adam(optax.cosine_decay_schedule(5e-3, num_steps))
    trainer = AmortizedForwardKL(model, guide, optimiser, observed=observed, batch_size=128)
    return trainer.run(KEY, num_steps, *args, progress_bar=False, **options).params


@pytest.fixture(scope="module")
def trained():
    guide = AutoAmortized(linear_model, observed="x", encoder=SMALL)
    return guide, train(linear_model, guide)


def mixed_model():
    """Sites of several shapes and supports, one of them discrete."""
    with numpyro.plate("groups", 2):
        scale = numpyro.sample("scale", dist.LogNormal(0.3, 0.5))
        numpyro.sample("label", dist.Bernoulli(0.3))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.array([2.0, 1.0, 3.0])))
    angle = numpyro.sample("angle", dist.Uniform(-1.0, 2.0))
    numpyro.sample("y", dist.Normal(jnp.sum(scale) + shares[0] - angle, 0.5))


def first_params(guide, data):
    sites = trace(seed(guide, KEY)).get_trace(data)
    return {name: site["value"] for name, site in sites.items() if site["type"] in ("param", "mutable")}


def random_head(params):
    """The parameters with a last layer that is not zero, so that everything depends on everything."""
    keys = jax.random.split(jax.random.key(9), 2)
    head = params["auto_head"]
    kernel = 0.05 * jax.random.normal(keys[0], head["kernel"].shape)
    return {**params, "auto_head": {"kernel": kernel, "bias": 0.4 * jax.random.normal(keys[1], head["bias"].shape)}}


@pytest.mark.as_compiled
@pytest.mark.fault(
    "amortized/_families.py",
    "return logsumexp(by_component + jnp.broadcast_to(weights, by_component.shape), axis=-1)",
    "return logsumexp(by_component, axis=-1)",
)
@pytest.mark.fault("amortized/_families.py", 'logits, jnp.einsum("kij,kj->ki", factor, loc),', "logits, loc,")
@pytest.mark.fault("amortized/_guide.py", "self.loc, self.scale)", "self.loc, 1 + 0 * self.scale)")
@pytest.mark.fault("amortized/_guide.py", "= target[:, begin:end] - jnp", "= target[:, begin:end] - 0 * jnp")
@parametrize("factor", ["precision", "covariance"], rest="slow")
@parametrize("family", ["normal", "mixture"], rest="slow")
def test_density_is_that_of_normals_in_unconstrained_coordinates(x64, family, factor):
    """Against SciPy's densities of all latents at once, and Jacobians by differentiation."""
    guide = AutoAmortized(mixed_model, observed="y", family=family, encoder=SMALL, num_components=3, factor=factor)
    data = {"y": jnp.asarray(0.7)}
    params = random_head(first_params(guide, data))
    sites = trace(substitute(seed(guide, jax.random.key(3)), params)).get_trace(data)
    draws = {name: site["value"] for name, site in sites.items() if site["type"] == "sample"}
    assert list(draws) == ["scale", "shares", "angle"] and draws["scale"].shape == (2,)
    log_q = sum(float(jnp.sum(sites[name]["fn"].log_prob(draws[name]))) for name in draws)

    supports = [dist.constraints.positive, dist.constraints.simplex, dist.constraints.interval(-1.0, 2.0)]
    flat, log_jacobian = [], 0.0
    for value, support in zip(draws.values(), supports, strict=True):
        transform = biject_to(support)
        inverse = transform.inv(value)
        # A simplex's Jacobian is that of all but its last entry.
        image = lambda v, t=transform, s=support: t(v)[..., :-1] if s is dist.constraints.simplex else t(v)  # noqa: E731
        jacobian = jax.jacobian(image)(inverse)
        log_jacobian += np.linalg.slogdet(np.asarray(jacobian).reshape(inverse.size, inverse.size))[1]
        flat.append(np.asarray(inverse).reshape(-1))
    constants = params["auto_constants"]["latents"]
    loc, scale = (np.concatenate([constants[name][key] for name in draws]) for key in ("loc", "scale"))
    u = (np.concatenate(flat) - loc) / scale
    dim = len(u)
    with substitute(data=params):
        features = np.asarray(guide.features(data, params["auto_constants"]))
    outputs = features @ np.asarray(params["auto_head"]["kernel"]) + np.asarray(params["auto_head"]["bias"])
    total = []
    outputs = outputs.reshape(guide.num_components, -1)
    for row in outputs:
        below = np.zeros((dim, dim))
        below[np.tril_indices(dim, -1)] = row[1 + 2 * dim :]
        loc, precision = row[1 : 1 + dim], np.diag(np.exp(row[1 + dim : 1 + 2 * dim]))
        if factor == "covariance":
            root = below + np.linalg.inv(precision)
            mean, covariance = loc, root @ root.T
        else:
            regression = np.eye(dim) + below
            mean = np.linalg.solve(regression, loc)
            root = np.linalg.inv(precision @ regression)
            covariance = root @ root.T
        weight = row[0] - np.log(np.sum(np.exp(outputs[:, 0])))
        total.append(weight + scipy.stats.multivariate_normal(mean, covariance).logpdf(u))
    expected = np.logaddexp.reduce(total) - np.sum(np.log(scale)) - log_jacobian
    np.testing.assert_allclose(log_q, expected, rtol=1e-9)


@pytest.mark.slow
def test_bounded_latents_of_independent_guides_are_truncated_normals():
    """A point of a box measured with a noise: the posterior is the normal around it, cut off by the box."""

    def model():
        theta = numpyro.sample("theta", dist.Uniform(jnp.array([-1.0, 0.0]), 2.0).to_event(1))
        numpyro.sample("x", dist.Normal(theta, 0.6).to_event(1))

    guide = AutoAmortized(model, observed="x", family="independent", encoder=SMALL)
    params = train(model, guide)
    x = np.array([-1.2, 1.0])
    draws = Predictive(guide, params=params, num_samples=10_000)(KEY, {"x": jnp.array(x)})["theta"]
    for values, low, centre in zip(np.asarray(draws).T, (-1.0, 0.0), x, strict=True):
        exact = scipy.stats.truncnorm((low - centre) / 0.6, (2 - centre) / 0.6, loc=centre, scale=0.6)
        assert scipy.stats.kstest(values, exact.cdf).statistic < 0.05
    weighed = importance_sample(KEY, 2000, model, guide, params, {"x": jnp.array(x)})
    assert weighed.effective_sample_size > 1900


@pytest.mark.as_compiled
def test_draws_have_the_moments_of_the_density(x64):
    """Draws of a mixture through its sites, against its means and covariances in closed form."""
    guide = AutoAmortized(linear_model, observed="x", family="mixture", encoder=SMALL, num_components=2)
    data = {"x": jnp.array([0.3, -2.0, 1.0])}
    params = random_head(first_params(guide, data))
    draws = Predictive(guide, params=params, num_samples=40_000)(jax.random.key(1), data)
    constants = params["auto_constants"]["latents"]
    loc, scale = (np.concatenate([constants[name][key] for name in ("slope", "offset")]) for key in ("loc", "scale"))
    u = (np.concatenate([draws["slope"], draws["offset"][:, None]], axis=1) - loc) / scale
    with substitute(data=params):
        features = guide.features(data, params["auto_constants"])
    outputs = np.asarray(features @ params["auto_head"]["kernel"] + params["auto_head"]["bias"]).reshape(2, -1)
    weights = np.exp(outputs[:, 0]) / np.exp(outputs[:, 0]).sum()
    means, seconds = [], []
    for row in outputs:
        root = np.linalg.inv(np.array([[1.0, 0.0], [row[5], 1.0]]))
        means.append(root @ row[1:3])
        seconds.append(root @ np.diag(np.exp(-2 * row[3:5])) @ root.T + np.outer(means[-1], means[-1]))
    mean, second = weights @ np.array(means), np.einsum("k,kij->ij", weights, np.array(seconds))
    np.testing.assert_allclose(u.mean(0), mean, atol=0.03)
    np.testing.assert_allclose(np.cov(u.T), second - np.outer(mean, mean), atol=0.06)


@pytest.mark.slow
def test_training_starts_from_the_moments_of_the_prior():
    guide = AutoAmortized(mixed_model, observed="y")
    params = first_params(guide, {"y": 0.7})
    draws = Predictive(guide, params=params, num_samples=4000)(KEY, {"y": 0.7})
    logs = np.log(draws["scale"])
    np.testing.assert_allclose(logs.mean(0), 0.3, atol=0.06)
    np.testing.assert_allclose(logs.std(0), 0.5, atol=0.04)
    np.testing.assert_allclose(draws["shares"].mean(0), np.array([2, 1, 3]) / 6, atol=0.03)
    assert draws["angle"].min() > -1 and draws["angle"].max() < 2


@pytest.mark.as_compiled
def test_conjugate_posterior(trained):
    guide, params = trained
    for x in np.array([[0.3, -2.0, 1.0], [1.4, 0.3, -0.2]]):
        mean, covariance = exact(x)
        draws = Predictive(guide, params=params, num_samples=20_000)(jax.random.key(1), {"x": jnp.array(x)})
        found = np.concatenate([draws["slope"], draws["offset"][:, None]], axis=1)
        np.testing.assert_allclose(found.mean(0), mean, atol=0.06)
        np.testing.assert_allclose(np.cov(found.T), covariance, atol=0.03)


@pytest.mark.as_compiled
def test_everything_that_takes_a_guide_takes_it(trained):
    guide, params = trained
    x = np.array([0.3, -2.0, 1.0])
    found = importance_sample(jax.random.key(2), 2000, linear_model, guide, params, {"x": jnp.array(x)})
    assert found.pareto_k < 0.7 and found.effective_sample_size > 1500
    weights = np.exp(found.log_weights)
    np.testing.assert_allclose(weights @ found.samples["slope"][:, 0], exact(x)[0][0], atol=0.03)
    simulations = from_guide(jax.random.key(3), linear_model, guide, params, observed="x", num_simulations=300)
    for ranks in sbc_ranks(simulations).values():
        assert np.all(uniformity_p_value(ranks, 99) > 0.005)


@pytest.mark.as_compiled
def test_parameters_hold_the_constants(trained):
    """A new guide with parameters from disk is the trained one, whatever its own pilot simulations are."""
    guide, params = trained

    def other_model():
        numpyro.sample("slope", dist.Normal(9.0, 20.0).expand([1]).to_event(1))
        numpyro.sample("offset", dist.Normal(3.0, 20.0))

    data = {"x": jnp.array([0.3, -2.0, 1.0])}
    params_again = pickle.loads(pickle.dumps(params))
    again = AutoAmortized(other_model, observed="x", encoder=SMALL)
    draws = [
        Predictive(g, params=p, num_samples=3)(KEY, data)["slope"] for g, p in [(guide, params), (again, params_again)]
    ]
    np.testing.assert_array_equal(*draws)


@pytest.mark.slow
def test_rows_are_pooled_in_any_number():
    """Two numbers of rows in turn; the posterior's mean and width are exact for both, and in any order of rows."""

    def model(num_rows):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", num_rows):
            numpyro.sample("y", dist.Normal(mu, 1.0))

    guide = AutoAmortized(model, observed="y", pool="rows", encoder=SMALL)
    optimiser = optax.adam(optax.cosine_decay_schedule(3e-3, 1600))
    trainer = AmortizedForwardKL(model, guide, optimiser, observed="y", batch_size=128)
    state = None
    for _ in range(40):
        for num_rows in (2, 8):
            params, state, _ = trainer.run(KEY, 20, num_rows, init_state=state, progress_bar=False)
    for y in (np.array([1.0, 0.4]), np.array([1.0, 0.4, -0.5, 1.2, 2.1, 0.3, 0.9, 1.0])):
        ask = Predictive(guide, params=params, num_samples=5000)
        mu, turned = (ask(KEY, {"y": jnp.array(values)}, len(y))["mu"] for values in (y, y[::-1]))
        np.testing.assert_allclose(mu.mean(), y.sum() / (1 + len(y)), atol=0.1)
        np.testing.assert_allclose(mu.std(), (1 + len(y)) ** -0.5, rtol=0.15)
        np.testing.assert_allclose(mu, turned, atol=1e-4)


@pytest.mark.slow
def test_latents_left_out_are_marginalised_and_data_may_be_deterministic():
    """An angle turned by a nuisance: the posterior is normal with the variance of both, by two discrete signs."""

    def model():
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        sign = numpyro.sample("sign", dist.Bernoulli(0.5))
        error = numpyro.sample("error", dist.Normal(0.0, 0.3))
        numpyro.deterministic("x", z + error + 0.4 * (2 * sign - 1))

    guide = AutoAmortized(model, observed="x", sites=["z"], encoder=SMALL)
    draws = Predictive(guide, params=train(model, guide), num_samples=5000)(KEY, {"x": 0.5})
    assert set(draws) == {"z"}
    # z given x is a mixture of two normals of variance 0.09/1.09, whose moments the guide has.
    centres = np.array([0.1, 0.9])
    weights = scipy.stats.norm(0, 1.09**0.5).pdf(centres)
    weights, means = weights / weights.sum(), centres / 1.09
    mean = weights @ means
    np.testing.assert_allclose(draws["z"].mean(), mean, atol=0.06)
    np.testing.assert_allclose(draws["z"].var(), 0.09 / 1.09 + weights @ (means - mean) ** 2, rtol=0.15)


@pytest.mark.fault("amortized/_guide.py", "low, 0.1 * least)", "low, low)")
def test_data_over_orders_of_magnitude_enter_by_their_logarithm():
    def model():
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("wide", dist.LogNormal(2 * z + 3, 1.0))
        numpyro.sample("narrow", dist.Normal(z, 1.0).expand([2]).to_event(1))

    guide = AutoAmortized(model, observed=["wide", "narrow"], encoder=SMALL)
    sites = trace(seed(guide, KEY)).get_trace({"wide": 3.0, "narrow": jnp.zeros(2)})
    constants = sites["auto_constants"]["value"]["observed"]
    assert constants["wide"]["unit"] > 0 and not np.any(constants["narrow"]["unit"])
    np.testing.assert_allclose(constants["narrow"]["scale"], 2**0.5, rtol=0.1)
    # That of LogNormal(3, 5) itself, for all its values are positive: digits of the small ones are kept.
    values = np.exp(3 + 5**0.5 * np.random.default_rng(0).normal(size=4000))
    unit, loc, scale = (float(constants["wide"][name]) for name in ("unit", "loc", "scale"))
    standardised = (np.log1p(values / unit) - loc) / scale
    np.testing.assert_allclose(standardised, (np.log(values) - 3) / 5**0.5, atol=0.4)
    # Half of a Poisson mixture's counts are zero, and the others from one on: the unit is of these.
    counts = np.where(values > np.median(values), np.ceil(values), 0.0)[:, None]
    assert float(_log_unit(counts)[0]) == pytest.approx(np.quantile(counts[counts > 0], 0.05))


def test_a_factor_is_of_joint_normals():
    for family in ("flow", "independent"):
        with pytest.raises(ValueError, match="factor='covariance' is of joint normals"):
            AutoAmortized(linear_model, observed="x", family=family, factor="covariance")


@pytest.mark.as_compiled
def test_another_encoder_and_fewer_sites(trained):
    class Encoder(linen.Module):
        @linen.compact
        def __call__(self, x):
            assert x.shape == (1, 3)
            return linen.tanh(linen.Dense(20)(x))

    guide = AutoAmortized(linear_model, observed="x", encoder=Encoder(), sites=["offset"])
    params = train(linear_model, guide, num_steps=800)
    assert params["auto_encoder"]["Dense_0"]["kernel"].shape == (3, 20)
    x = np.array([0.3, -1.0, 1.0])
    draws = Predictive(guide, params=params, num_samples=5000)(KEY, {"x": jnp.array(x)})
    assert set(draws) == {"offset"}
    mean, covariance = exact(x)
    np.testing.assert_allclose(draws["offset"].mean(), mean[1], atol=0.1)
    np.testing.assert_allclose(draws["offset"].std(), covariance[1, 1] ** 0.5, rtol=0.15)


@pytest.mark.slow
def test_an_observation_unlike_all_simulations_is_told(trained):
    guide, params = trained
    keys = jax.random.split(jax.random.key(4), 40)
    likely = Predictive(linear_model, num_samples=40)(jax.random.key(5))["x"]
    tell = lambda key, x: guide.typicality(key, params, {"x": x}, num_simulations=400)  # noqa: E731
    p_values = [tell(key, x).p_value for key, x in zip(keys[:20], likely[:20], strict=True)]
    assert scipy.stats.kstest(p_values, "uniform").pvalue > 0.01
    far = tell(KEY, jnp.array([9.0, -9.0, 9.0]))
    assert far.p_value == pytest.approx(1 / 201) and far.distance > 20
    given = {"slope": jnp.zeros((400, 1)), "offset": jnp.zeros(400), "x": jnp.tile(likely, (10, 1))}
    assert guide.typicality(KEY, params, {"x": likely[0]}, simulations=given).p_value > 0.01


def test_data_in_another_shape_than_the_simulations_are_refused(trained):
    guide, params = trained
    ask = Predictive(guide, params=params, num_samples=2)
    for wrong in (jnp.zeros(2), jnp.zeros((3, 1)), jnp.zeros((4, 3)), 1.0):
        with pytest.raises(ValueError, match=r"\['x'\] must have the shape of one simulated data set, \(3,\), but has"):
            ask(KEY, {"x": wrong})
    with pytest.raises(ValueError, match=r"observed_values\['x'\] must not contain NaN"):
        ask(KEY, {"x": jnp.array([0.0, jnp.nan, 0.0])})
    with pytest.raises(ValueError, match=r"must have the shape of one simulated data set"):
        guide.typicality(KEY, params, {"x": jnp.zeros(2)})
    with pytest.raises(ValueError, match=r"simulations must be a dictionary with the observed site 'x', but got 'y'"):
        guide.typicality(KEY, params, {"x": jnp.zeros(3)}, simulations={"y": jnp.zeros((9, 3))})


def test_rows_are_as_many_as_the_arguments_say():
    def model(num_rows):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu, 1.0).expand([num_rows]).to_event(1))

    guide = AutoAmortized(model, observed="y", pool="rows", encoder=SMALL)
    with pytest.raises(ValueError, match=r"must have the shape of one simulated data set, \(9,\), but has \(8,\)"):
        seed(guide, KEY)({"y": jnp.zeros(8)}, 9)


def test_the_logarithm_of_data_does_not_overflow():
    """Sixty orders of magnitude, in single precision, by what their logarithms are."""
    log_x = np.array([-60.0, 0.0, 60.0])
    found = _signed_log(jnp.exp(jnp.asarray(log_x)), jnp.asarray(np.exp(-65.0), float))
    np.testing.assert_allclose(found, log_x + 65, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(_signed_log(np.array([-2.0, 0.0, 3.0]), 0.5), [-np.log(5), 0, np.log(7)], rtol=1e-12)


@pytest.mark.slow
def test_a_flow_has_one_density_for_all_sites():
    pytest.importorskip("flowjax")
    guide = AutoAmortized(linear_model, observed="x", family="flow", encoder=SMALL)
    params = train(linear_model, guide, num_steps=300)
    x = np.array([0.3, -2.0, 1.0])
    ask = Predictive(guide, params=params, num_samples=2000)
    draws = ask(KEY, {"x": jnp.array(x)})
    found = np.concatenate([draws["slope"], draws["offset"][:, None]], axis=1)
    mean, covariance = exact(x)
    np.testing.assert_allclose(found.mean(0), mean, atol=0.15)
    # Weights of draws by an exact density have the mean evidence; those of a wrong one have not.
    weighed = importance_sample(KEY, 2000, linear_model, guide, params, {"x": jnp.array(x)})
    weights = np.exp(weighed.log_weights)
    np.testing.assert_allclose(weights @ weighed.samples["offset"], mean[1], atol=0.05)
    # The density integrates to one.
    axes = [np.linspace(m - 8 * s, m + 8 * s, 100) for m, s in zip(mean, np.sqrt(np.diag(covariance)), strict=True)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
    trainer = AmortizedForwardKL(linear_model, guide, optax.adam(1e-3), observed="x")
    points = {"slope": jnp.asarray(grid[:, :1]), "offset": jnp.asarray(grid[:, 1])}
    trainer.init(KEY)
    log_q = trainer.guide_log_prob(params, {**points, "x": jnp.tile(jnp.asarray(x), (len(grid), 1))})
    step = np.prod([axis[1] - axis[0] for axis in axes])
    assert float(jnp.exp(log_q).sum() * step) == pytest.approx(1, abs=0.02)


def of_counts():
    numpyro.sample("x", dist.Normal(numpyro.sample("theta", dist.Poisson(3.0)), 1.0))


def dependent():
    high = numpyro.sample("high", dist.LogNormal(0.0, 1.0))
    numpyro.sample("x", dist.Normal(numpyro.sample("low", dist.Uniform(0.0, high)), 1.0))


def failing():
    numpyro.sample("x", dist.Delta(jnp.nan * numpyro.sample("z", dist.Normal(0.0, 1.0))))


@pytest.mark.as_compiled
def test_a_guide_may_be_traced_first():
    def model():
        a = numpyro.sample("a", dist.Uniform(jnp.zeros(2), 3.0).to_event(1))
        numpyro.sample("x", dist.Normal(a.sum(), 1.0))

    guide = AutoAmortized(model, observed="x", family="independent", encoder=SMALL)
    run = lambda key: seed(guide, key)({"x": 1.0})["a"]  # noqa: E731
    np.testing.assert_allclose(jax.jit(run)(KEY), run(KEY), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"family": "gaussian"}, ValueError, "family must be one of 'normal', 'independent', 'mixture', 'flow'"),
        ({"factor": "root"}, ValueError, "factor must be one of 'precision', 'covariance'"),
        ({"pool": "columns"}, ValueError, "pool must be one of 'rows' or None"),
        ({"encoder": jnp.tanh}, AttributeError, "has no attribute 'init'"),
        ({"sites": ["slop"]}, ValueError, "names the continuous latent site 'slop', which the model does not have"),
        ({"model": of_counts}, ValueError, "needs a continuous latent site, but the model has 'theta'"),
        ({"model": dependent}, ValueError, "supports that do not vary with other sites, but those of 'low' do"),
        ({"model": failing}, ValueError, "fewer than two of the simulations are finite"),
        ({"observed": "y"}, ValueError, "first argument must be a dictionary with the observed site 'y', but got 'x'"),
        ({"sites": []}, ValueError, r"sites must be the name of a site, or a sequence of names, but is \[\]"),
        ({"encoder": ResidualEncoder}, TypeError, r"such as ResidualEncoder\(\), but got the class"),
        ({"family": "mixture", "num_components": 0}, ValueError, "num_components must be a whole number"),
    ],
)
def test_mistakes(options, error, message):
    arguments = {"model": linear_model, "observed": "x", **options}
    with pytest.raises(error, match=message):
        seed(AutoAmortized(arguments.pop("model"), **arguments), KEY)({"x": jnp.zeros(3)})


def test_mistakes_with_rows():
    def model():
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.Normal(z, 1.0).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(z, 1.0).expand([2]).to_event(1))

    guide = AutoAmortized(model, observed=["x", "y"], pool="rows")
    with pytest.raises(ValueError, match=r"of one length, but their shapes are \[\(3,\), \(2,\)\]"):
        seed(guide, KEY)({"x": jnp.zeros(3), "y": jnp.zeros(2)})
