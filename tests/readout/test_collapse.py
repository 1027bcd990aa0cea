"""The handlers and the reparametriser inside NumPyro: densities, traces, samplers, guides."""

import pickle
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import linen, nnx
from numpyro.contrib.module import random_flax_module, random_nnx_module
from numpyro.handlers import condition, seed, substitute, trace
from numpyro.infer import HMC, MCMC, NUTS, SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO, log_likelihood
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from numpyro.infer.util import initialize_model, log_density

from numpyro_wide import ReprioriseReadout, collapse_readout, linear_gaussian, repriorise
from numpyro_wide.linear_gaussian import ReadoutProblem, log_evidence
from numpyro_wide.readout import ReadoutMarginal
from tests.conftest import enable_x64
from tests.marks import parametrize
from tests.models import linear, network, small_data

VARIANTS = ("feature", "data", "data-cholesky", "auto")
ARGUMENTS = {"readout": "w", "features": "features", "targets": "y", "noise_scale": "sigma"}
SITES = {"readout": "w", "features": "features", "observed": "y"}


def draw_of(model, *args, key=0, **kwargs):
    """Values of the latent sites in one run."""
    sites = trace(seed(model, jax.random.key(key))).get_trace(*args, **kwargs)
    return {k: s["value"] for k, s in sites.items() if s["type"] == "sample" and not s["is_observed"]}, sites


def without_base(draw):
    return {name: value for name, value in draw.items() if name != "w_base"}


# Densities ------------------------------------------------------------------------------------------------------------

PRIORS = {
    "standard": lambda: dist.Normal(0, 1).expand([4, 2]).to_event(2),
    "loc and scale by row": lambda: (
        dist.Normal(jnp.arange(4.0)[:, None], jnp.arange(1.0, 5.0)[:, None]).expand([4, 2]).to_event(2)
    ),
    "loc and scale by element": lambda: dist.Normal(jnp.ones((4, 2)), jnp.arange(1.0, 9.0).reshape(4, 2)).to_event(2),
    "not declared as event": lambda: dist.Normal(0.5, 2.0).expand([4, 2]),
}
NOISES = {
    "constant": lambda: 0.3,
    "latent": lambda: numpyro.sample("sigma", dist.HalfNormal(1.0)),
    "by row": lambda: numpyro.deterministic("sigma", jnp.linspace(0.2, 0.5, 6)[:, None]),
    "by output": lambda: numpyro.deterministic("sigma", jnp.array([0.2, 0.5])),
    "full": lambda: numpyro.deterministic("sigma", jnp.linspace(0.2, 0.6, 12).reshape(6, 2)),
}


@pytest.mark.as_compiled
@pytest.mark.fault("readout/_transform.py", "lambda phi: self._forward(phi)[1", "lambda phi: 0 * self._forward(phi)[1")
@pytest.mark.fault("readout/_model.py", "variant=self.variant, prior_scale=self.prior_scale", "variant=self.variant")
@pytest.mark.usefixtures("x64")
@parametrize("noise", NOISES, rest="slow")
@parametrize("prior", PRIORS, rest="slow")
def test_joint_density_is_unchanged(prior, noise):
    """Repriorised: plain density times the map's Jacobian. Collapsed: the integral over the readout."""
    model = linear(prior=PRIORS[prior], noise=NOISES[noise])
    y = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)) + 1)
    noise_scale = 0.3 if noise == "constant" else "sigma"
    for variant in ("feature", "data-cholesky"):
        for regulariser in (None, lambda sigma: 10 * sigma**2):
            options = ARGUMENTS | {"noise_scale": noise_scale, "regulariser": regulariser, "variant": variant}
            wrapped = repriorise(model, **options)
            draw, sites = draw_of(wrapped, y)
            plain = without_base(draw) | {"w": sites["w"]["value"]}
            jacobian = jax.jacobian(
                lambda phi, draw=draw, wrapped=wrapped: trace(
                    substitute(seed(wrapped, jax.random.key(0)), draw | {"w_base": phi})
                ).get_trace(y)["w"]["value"]
            )(draw["w_base"])
            log_abs_det = jnp.linalg.slogdet(jacobian.reshape(8, 8))[1]
            expected = log_density(model, (y,), {}, plain)[0] + log_abs_det
            np.testing.assert_allclose(log_density(wrapped, (y,), {}, draw)[0], expected, rtol=1e-9)
        # Bayes: evidence = joint / posterior, at any readout.
        collapsed = collapse_readout(model, variant=variant, **SITES)
        posterior = repriorise(model, **ARGUMENTS | {"noise_scale": noise_scale, "variant": variant})
        draw, sites = draw_of(posterior, y)
        log_posterior_w = dist.Normal(0, 1).log_prob(draw["w_base"]).sum()
        expected = log_density(posterior, (y,), {}, draw)[0] - log_posterior_w
        np.testing.assert_allclose(log_density(collapsed, (y,), {}, without_base(draw))[0], expected, rtol=1e-9)


@pytest.mark.as_compiled
@pytest.mark.fault("readout/_collapse.py", '"fn": marginal, "cond_indep_stack": []})', '"fn": marginal})')
@pytest.mark.usefixtures("x64")
@parametrize("with_plates", [False, True], rest="slow")
def test_vector_readout_in_plates(with_plates):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)))
    y = jnp.arange(5.0)

    def model(y=None):
        if with_plates:
            with numpyro.plate("units", 3):
                w = numpyro.sample("w", dist.Normal(0.0, 2.0))
            with numpyro.plate("rows", 5):
                numpyro.sample("y", dist.Normal(numpyro.deterministic("features", x) @ w + 0.7, 0.4), obs=y)
        else:
            w = numpyro.sample("w", dist.Normal(0, 2).expand([3]).to_event(1))
            numpyro.deterministic("features", x)
            numpyro.sample("y", dist.Normal(x @ w + 0.7, 0.4).to_event(1), obs=y)

    collapsed = collapse_readout(model, **SITES)
    expected = dist.MultivariateNormal(0.7, 4 * x @ x.T + 0.16 * jnp.eye(5)).log_prob(y)
    np.testing.assert_allclose(log_density(collapsed, (y,), {}, {})[0], expected, rtol=1e-9)
    # The marginal's rows are one draw, in no plate, whatever asks the trace for independence.
    assert numpyro.handlers.trace(collapsed).get_trace(y)["y"]["cond_indep_stack"] == []

    def repriorised(y=None):
        with numpyro.handlers.reparam(config={"w": ReprioriseReadout(x, None if y is None else y - 0.7, 0.4)}):
            model(y)

    draw, sites = draw_of(repriorised, y)
    assert draw["w_base"].shape == (3,)
    log_joint, _ = log_density(repriorised, (y,), {}, draw)
    # With this noise and these targets the repriorised readout is standard normal given the data.
    np.testing.assert_allclose(log_joint, expected + dist.Normal(0, 1).log_prob(draw["w_base"]).sum(), rtol=1e-9)
    np.testing.assert_allclose(sites["w_base"]["fn"].log_prob(jnp.stack([draw["w_base"]] * 2)).shape, (2,))


# What is in the trace -------------------------------------------------------------------------------------------------


def test_sites_of_wrapped_models():
    x, y = small_data()
    plain = {"sigma", "hidden", "features", "w", "rows", "y"}
    _, sites = draw_of(repriorise(network, **ARGUMENTS), x, y)
    assert set(sites) == plain - {"features"} | {"w_base"}
    assert sites["w"]["type"] == "deterministic"
    _, sites = draw_of(collapse_readout(network, **SITES), x, y)
    assert set(sites) == plain - {"features", "w"}
    assert isinstance(sites["y"]["fn"], ReadoutMarginal)
    assert sites["y"]["is_observed"]


@parametrize("wrap", [partial(repriorise, **ARGUMENTS), partial(collapse_readout, **SITES)], rest="slow")
def test_without_targets_nothing_changes(wrap):
    x, _ = small_data()
    (plain, plain_sites), (wrapped, wrapped_sites) = draw_of(network, x), draw_of(wrap(network), x)
    assert list(plain_sites) == list(wrapped_sites)
    jax.tree.map(np.testing.assert_array_equal, plain, wrapped)
    np.testing.assert_array_equal(plain_sites["y"]["value"], wrapped_sites["y"]["value"])


@parametrize("call", ["positional", "keyword", "condition"], rest="slow")
def test_ways_to_pass_observations(call):
    x, y = small_data()
    repriorised, collapsed = repriorise(network, **ARGUMENTS), collapse_readout(network, **SITES)
    reference = draw_of(collapse_readout(network, **SITES), x, y)[1]["y"]
    if call == "condition":
        _, sites = draw_of(condition(collapsed, {"y": y}), x)
    else:
        args, kwargs = ((x,), {"y": y}) if call == "keyword" else ((x, y), {})
        _, sites = draw_of(collapsed, *args, **kwargs)
        assert "w_base" in draw_of(repriorised, *args, **kwargs)[0]
    np.testing.assert_allclose(sites["y"]["fn"].log_prob(sites["y"]["value"]), reference["fn"].log_prob(y), rtol=1e-6)


def test_extra_keywords_and_noise_by_argument():
    def model(**data):
        features = numpyro.deterministic("features", data["x"])
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, data["noise"]).to_event(1), obs=data.get("y"))

    wrapped = repriorise(model, readout="w", features="features", targets="y", noise_scale="noise")
    data = {"x": jnp.eye(2), "noise": jnp.array([0.1, 0.2]), "y": jnp.ones(2)}
    draw, sites = draw_of(wrapped, **data)
    expected = linear_gaussian.readout_map(data["x"], data["y"], draw["w_base"], data["noise"])[0]
    np.testing.assert_allclose(sites["w"]["value"], expected, rtol=1e-6)


def test_deterministic_sites_that_move_with_the_readout_are_not_recorded():
    def model(y=None):
        features = numpyro.deterministic("features", jnp.eye(3))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        function = numpyro.deterministic("function", features @ w)
        numpyro.deterministic("other", features.sum())
        numpyro.sample("y", dist.Normal(function, 0.3).to_event(1), obs=y)

    assert set(draw_of(collapse_readout(model, **SITES), jnp.ones(3))[1]) == {"other", "y"}


def test_scope_around_a_wrapped_model():
    x, y = small_data()
    wrapped = numpyro.handlers.scope(repriorise(network, **ARGUMENTS), prefix="net")
    assert {"net/w", "net/w_base", "net/sigma"} < set(draw_of(wrapped, x, y)[1])


def test_keyword_arguments_not_given_are_no_targets():
    def model(x, **data):
        features = numpyro.deterministic("features", x)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(1), obs=data.get("y"))

    wrapped = repriorise(model, **ARGUMENTS | {"noise_scale": 0.3})
    assert "w_base" not in draw_of(wrapped, jnp.eye(2))[0]
    assert "w_base" in draw_of(wrapped, jnp.eye(2), y=jnp.ones(2))[0]


def test_improper_priors_can_be_collapsed():
    def model(y=None):
        slope = numpyro.sample("slope", dist.ImproperUniform(dist.constraints.real, (), ()))
        features = numpyro.deterministic("features", slope * jnp.eye(2))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(1), obs=y)

    found, _ = log_density(collapse_readout(model, **SITES), (jnp.ones(2),), {}, {"slope": 2.0})
    np.testing.assert_allclose(found, dist.Normal(0, 4.09**0.5).log_prob(jnp.ones(2)).sum(), rtol=1e-5)


def test_prior_predictive_and_log_likelihood_are_the_models_own():
    """No factor sites: prior draws of the readout have their prior's moments, and only y is observed."""
    x, y = small_data()
    wrapped = repriorise(network, **ARGUMENTS)
    draws = Predictive(wrapped, num_samples=4000)(jax.random.key(0), x, y)
    assert "features" not in draws
    np.testing.assert_allclose(draws["w"].mean(), 0.3, atol=5 * 1.2 / (4000 * 21) ** 0.5)
    np.testing.assert_allclose(draws["w"].std(), 1.2, rtol=5 / (2 * 4000 * 21) ** 0.5)
    subset = {name: value[:5] for name, value in draws.items() if name != "y"}
    found = log_likelihood(wrapped, subset, x, y)
    assert set(found) == {"y"}
    plain = log_likelihood(network, {k: v for k, v in subset.items() if k != "w_base"}, x, y)
    np.testing.assert_allclose(found["y"], plain["y"], rtol=1e-4)


# Inference ------------------------------------------------------------------------------------------------------------


def wrapped_models():
    return {
        "repriorised": repriorise(network, **ARGUMENTS),
        "collapsed": collapse_readout(network, **SITES),
        "inside the model": _network_with_reparam_inside,
    }


def _network_with_reparam_inside(x, y=None):
    noise = 0.2
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 20]).to_event(2))
    features = jnp.tanh(x @ hidden) / 20**0.5
    with numpyro.handlers.reparam(config={"w": ReprioriseReadout(features, y, noise)}):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([20, 1]).to_event(2))
    numpyro.sample("y", dist.Normal(features @ w, noise).to_event(2), obs=y)


@pytest.mark.as_compiled
@parametrize("kind", ["repriorised", "collapsed", "inside the model"], rest="slow")
@parametrize("chain_method", ["sequential", "vectorized"], rest="slow")
def test_nuts_and_hmc(kind, chain_method):
    x, y = small_data()
    model = wrapped_models()[kind]
    is_nuts = chain_method == "sequential"
    kernel = NUTS(model, max_tree_depth=3) if is_nuts else HMC(model, num_steps=3, trajectory_length=None)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=10, num_chains=2, chain_method=chain_method)
    mcmc.run(jax.random.key(0), x, y)
    samples = mcmc.get_samples(group_by_chain=True)
    assert "features" not in samples
    assert ("w" in samples) == (kind != "collapsed")
    assert all(value.shape[:2] == (2, 10) and np.isfinite(value).all() for value in samples.values())
    if kind == "repriorised":
        # The readout is the image of its base at each draw.
        first = {name: value[0, -1] for name, value in samples.items()}
        _, sites = draw_of(substitute(model, without_base(first) | {"w_base": first["w_base"], "w": first["w"]}), x, y)
        _, features = draw_of(substitute(network, without_base(first)), x)
        found, _ = linear_gaussian.readout_map(
            features["features"]["value"], y, first["w_base"], first["sigma"], prior_loc=0.3, prior_scale=1.2
        )
        np.testing.assert_allclose(first["w"], found, rtol=1e-3, atol=1e-3)
        assert "w" in sites


@pytest.mark.slow
def test_base_can_be_left_out_of_the_samples():
    x, y = small_data()
    mcmc = MCMC(NUTS(repriorise(network, **ARGUMENTS), max_tree_depth=3), num_warmup=5, num_samples=5)
    mcmc.run(jax.random.key(0), x, y, extra_fields=("~z.w_base",))
    assert set(mcmc.get_samples()) == {"hidden", "sigma", "w"}


@parametrize("kind", ["repriorised", "collapsed"], rest="slow")
@pytest.mark.slow
def test_rerun_on_new_data_without_recompiling(kind):
    """With jit_model_args the data are traced; the second run must see the second data."""
    x, y = small_data()
    model = wrapped_models()[kind]
    reused = MCMC(NUTS(model, max_tree_depth=3), num_warmup=10, num_samples=5, jit_model_args=True)
    reused.run(jax.random.key(0), x, y)
    reused.run(jax.random.key(0), x, -y)
    fresh = MCMC(NUTS(model, max_tree_depth=3), num_warmup=10, num_samples=5, jit_model_args=True)
    fresh.run(jax.random.key(0), x, -y)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), reused.get_samples(), fresh.get_samples())


@pytest.mark.as_compiled
@parametrize("kind", ["repriorised", "collapsed"], rest="slow")
@parametrize("guide_class", [AutoNormal, AutoMultivariateNormal], rest="slow")
@parametrize("loss", [Trace_ELBO(), TraceMeanField_ELBO(num_particles=3)], rest="slow")
def test_svi(kind, guide_class, loss):
    x, y = small_data()
    model = wrapped_models()[kind]
    svi = SVI(model, guide_class(model), numpyro.optim.Adam(0.02), loss)
    losses = svi.run(jax.random.key(0), 300, x, y, progress_bar=False).losses
    assert np.isfinite(losses).all()
    assert losses[-50:].mean() < losses[:50].mean()


@pytest.mark.as_compiled
@parametrize("kind", ["repriorised", "collapsed"], rest="slow")
def test_initialize_model_and_pickle(kind):
    x, y = small_data()
    model = pickle.loads(pickle.dumps(wrapped_models()[kind]))
    info = initialize_model(jax.random.key(0), model, model_args=(x, y))
    assert np.isfinite(info.param_info.potential_energy)
    gradients = jax.grad(info.potential_fn)(info.param_info.z)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


class LinenNetwork(linen.Module):
    @linen.compact
    def __call__(self, x):
        return jnp.tanh(linen.Dense(8)(x)) / 8**0.5


class NNXNetwork(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(1, 8, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.layer(x)) / 8**0.5


@pytest.mark.as_compiled
@parametrize("library", ["linen", "nnx"], rest="slow")
@parametrize(
    "wrap", [partial(repriorise, **ARGUMENTS | {"noise_scale": 0.2}), partial(collapse_readout, **SITES)], rest="slow"
)
def test_flax_feature_networks(library, wrap):
    def model(x, y=None):
        if library == "linen":
            net = random_flax_module("net", LinenNetwork(), prior=dist.Normal(0, 1), input_shape=(1, 1))
        else:
            net = random_nnx_module("net", NNXNetwork(nnx.Rngs(0)), prior=dist.Normal(0, 1))
        features = numpyro.deterministic("features", net(x))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([8, 1]).to_event(2))
        numpyro.sample("y", dist.Normal(features @ w, 0.2).to_event(2), obs=y)

    x, y = small_data()
    mcmc = MCMC(NUTS(wrap(model), max_tree_depth=3), num_warmup=5, num_samples=5)
    mcmc.run(jax.random.key(0), x, y)
    assert all(np.isfinite(value).all() for value in mcmc.get_samples().values())


@pytest.mark.as_compiled
def test_factorisation_is_compiled_once():
    """The base site's density and the readout share one Cholesky factor in the compiled potential."""
    x, y = small_data()
    info = initialize_model(jax.random.key(0), repriorise(network, **ARGUMENTS), model_args=(x, y))
    compiled = jax.jit(info.potential_fn).lower(info.param_info.z).compile().as_text()
    assert compiled.count("lapack_spotrf") == 1


# A noise that is lost in rounding is told when a collapsed model is first run, and no other noise is ------------------

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
@parametrize("noise", [1e-5, np.float32(1e-5), jnp.float32(1e-5), jnp.full(50, 1e-5)], rest="slow")
def test_however_the_noise_is_given(noise):
    with pytest.warns(UserWarning, match=TOLD):
        run(make(), X, Y, noise=noise)


def quietly(call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call()


@pytest.mark.slow
def test_no_word_of_noise_that_is_drawn_or_not_known():
    tiny = make(dist.HalfNormal(1e-6))
    quietly(lambda: run(tiny, X, Y))
    quietly(lambda: run(substitute(tiny, {"noise": 1e-6}), X, Y))
    for traced in ((X, Y, 1e-5), (X, Y)):
        quietly(lambda traced=traced: jax.jit(lambda *args: run(make(), *args)["y"]["fn"].log_prob(Y))(*traced))


@pytest.mark.slow
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
