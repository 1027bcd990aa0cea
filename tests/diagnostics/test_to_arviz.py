"""A run as ArviZ's data: the same groups for every form of the model, and a log-likelihood that loo can use."""

import warnings
from functools import cache
from types import SimpleNamespace

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import reparam
from numpyro.infer import MCMC, NUTS, Predictive
from scipy import stats

from numpyro_wide import ReprioriseReadout, collapse_readout, repriorise
from numpyro_wide.diagnostics import to_arviz
from numpyro_wide.mcmc import PreconditionedCrankNicolson
from tests.compilations import compilations
from tests.marks import parametrize
from tests.models import small_data

X, Y = small_data(8)
Y = np.concatenate([Y, Y**2 - 1], axis=1)
X_TEST = np.linspace(-1, 1, 3, dtype="f")[:, None]
WIDTH = 4


def network(x, y=None):
    """Two outputs, a latent noise, a name with a slash, a function among the sites, and a factor."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(0.5))
    hidden = numpyro.sample("net/hidden", dist.Normal(0, 1).expand([1, WIDTH]).to_event(2))
    features = numpyro.deterministic("features", jnp.tanh(3 * x @ hidden))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([WIDTH, 2]).to_event(2))
    function = numpyro.deterministic("function", features @ w + 0.2)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(function, sigma).to_event(1), obs=y)
    numpyro.factor("shrinkage", -0.1 * jnp.sum(hidden**2))


REPRIORISED = repriorise(network, readout="w", features="features", targets="y", noise_scale="sigma")
COLLAPSED = collapse_readout(network, readout="w", features="features", observed="y")
FIELDS = ("num_grad", "accept_prob", "energy_error", "step_size")
KERNELS = {
    "repriorised": (lambda: NUTS(REPRIORISED, max_tree_depth=2), REPRIORISED, ("num_steps", "accept_prob", "z_grad")),
    "collapsed": (lambda: PreconditionedCrankNicolson(COLLAPSED), COLLAPSED, FIELDS),
}


@cache
def sampled(name):
    kernel, _, fields = KERNELS[name]
    mcmc = MCMC(kernel(), num_warmup=200, num_samples=20, num_chains=2, chain_method="vectorized")
    mcmc.run(jax.random.key(0), X, Y, extra_fields=("potential_energy", *fields))
    return mcmc


@pytest.fixture(scope="module", params=["repriorised", pytest.param("collapsed", marks=pytest.mark.slow)])
def run(request):
    _, model, fields = KERNELS[request.param]
    mcmc = sampled(request.param)
    idata = to_arviz(
        mcmc,
        model,
        X,
        Y,
        predictions=(X_TEST,),
        posterior_predictive=True,
        coords={"output": ["sine", "square"], "rows": 10 * np.arange(8)},
        dims={"y": ["rows", "output"], "w": ["unit", "output"]},
    )
    return SimpleNamespace(name=request.param, mcmc=mcmc, model=model, fields=fields, idata=idata)


def stub(draws, model=network):
    """A finished run with these draws, as far as to_arviz looks at it."""
    return SimpleNamespace(
        sampler=SimpleNamespace(model=model),
        get_samples=lambda group_by_chain: draws,
        get_extra_fields=lambda group_by_chain: {},
    )


draws_of_network = cache(lambda width: Predictive(network, num_samples=6)(jax.random.key(1), X))  # of this WIDTH


def prior_draws(model=network, *args):
    draws = (
        draws_of_network(WIDTH) if model is network else Predictive(model, num_samples=6)(jax.random.key(1), X, *args)
    )
    return {k: v.reshape(2, 3, *v.shape[1:]) for k, v in draws.items() if k not in ("y", "shrinkage")}


def function_of(posterior, x):
    hidden, w = np.asarray(posterior["net.hidden"]), np.asarray(posterior["w"])
    return np.tanh(3 * x @ hidden) @ w + 0.2


@pytest.mark.as_compiled
def test_the_posterior_holds_the_weights_and_nothing_of_the_sampler_s(run):
    posterior = run.idata["posterior"]
    expected = {"sigma", "net.hidden", "w"} | ({"function"} if run.name == "repriorised" else set())
    assert set(posterior.data_vars) == expected
    assert posterior["w"].dims == ("chain", "draw", "unit", "output")
    assert posterior["net.hidden"].dims == ("chain", "draw", "net.hidden_dim_0", "net.hidden_dim_1")
    assert posterior["output"].values.tolist() == ["sine", "square"]
    samples = run.mcmc.get_samples(group_by_chain=True)
    np.testing.assert_array_equal(posterior["net.hidden"], samples["net/hidden"])


@pytest.mark.as_compiled
def test_the_log_likelihood_is_by_observation_and_of_the_posterior_s_draws(run):
    posterior, values = run.idata["posterior"], run.idata["log_likelihood"]["y"]
    assert list(run.idata["log_likelihood"].data_vars) == ["y"]  # the factor is no observation
    assert values.dims == ("chain", "draw", "rows") and values["rows"].values.tolist() == list(range(0, 80, 10))
    sigma = np.asarray(posterior["sigma"])[..., None, None]
    expected = stats.norm.logpdf(Y, function_of(posterior, X), sigma).sum(-1)
    np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # so few draws cannot give good weights
        loo = az.loo(run.idata)
    elpd = loo.elpd if hasattr(loo, "elpd") else loo.elpd_loo  # ArviZ 1.x, or 0.x
    assert loo.n_data_points == 8 and elpd < expected.mean((0, 1)).sum()


@pytest.mark.as_compiled
def test_readouts_of_a_collapsed_model_fit_the_data(run):
    """Readouts are draws given the data: their function is as close to the data as sigma says."""
    posterior = run.idata["posterior"]
    errors = (Y - function_of(posterior, X)) / np.asarray(posterior["sigma"])[..., None, None]
    assert 0.5 < np.mean(errors**2) < 1.5


@pytest.mark.as_compiled
def test_predictions_are_at_other_inputs_and_with_noise(run):
    predictions = run.idata["predictions"]["y"]
    assert predictions.dims == ("chain", "draw", "rows", "output") and predictions["rows"].values.tolist() == [0, 1, 2]
    sigma = np.asarray(run.idata["posterior"]["sigma"])[..., None, None]
    for group, x in {"predictions": X_TEST, "posterior_predictive": X}.items():
        noise = (np.asarray(run.idata[group]["y"]) - function_of(run.idata["posterior"], x)) / sigma
        # 240 and 640 draws of N(0, 1)
        assert abs(noise.mean()) < 0.3 and 0.8 < noise.std() < 1.2
    np.testing.assert_array_equal(run.idata["observed_data"]["y"], Y)


@pytest.mark.as_compiled
def test_sample_stats_hold_every_extra_field_under_arviz_s_name(run):
    found = run.idata["sample_stats"]
    fields = run.mcmc.get_extra_fields(group_by_chain=True)
    names = {"lp", "acceptance_rate"}
    if run.name == "repriorised":
        names |= {"diverging", "n_steps", "tree_depth", "z_grad.sigma", "z_grad.net.hidden", "z_grad.w_base"}
        np.testing.assert_array_equal(found["z_grad.w_base"], fields["z_grad"]["w_base"])
        np.testing.assert_array_equal(2 ** found["tree_depth"] > found["n_steps"], True)
    else:
        names |= {"num_grad", "energy_error", "step_size"}
    assert set(found.data_vars) == names
    np.testing.assert_array_equal(found["lp"], -fields["potential_energy"])
    np.testing.assert_array_equal(found["acceptance_rate"], fields["accept_prob"])


def test_include_and_drop():
    draws = prior_draws()
    idata = to_arviz(stub(draws), network, X, Y, include="features", drop=["w", "function"], log_likelihood=False)
    assert set(idata["posterior"].data_vars) == {"sigma", "net.hidden", "features"}
    del draws["features"]  # as a wrapped model stores them
    wrapped = stub({**draws, "w_base": draws["w"]}, REPRIORISED)
    idata = to_arviz(wrapped, REPRIORISED, X, Y, include=["features", "w_base"], log_likelihood=False)
    assert set(idata["posterior"].data_vars) == {"sigma", "net.hidden", "features", "w", "w_base", "function"}
    np.testing.assert_allclose(
        idata["posterior"]["features"], np.tanh(3 * X @ np.asarray(draws["net/hidden"])), rtol=1e-3, atol=1e-5
    )


def test_a_readout_of_which_only_the_base_was_stored():
    """The image of the base site at each draw: what a run that stores both has."""
    draws = dict(sampled("repriorised").get_samples(group_by_chain=True))
    whole = to_arviz(stub(dict(draws), REPRIORISED), REPRIORISED, X, Y)
    del draws["w"]
    idata = to_arviz(stub(draws, REPRIORISED), REPRIORISED, X, Y)
    assert "w_base" not in idata["posterior"]
    np.testing.assert_allclose(idata["posterior"]["w"], whole["posterior"]["w"], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(idata["log_likelihood"]["y"], whole["log_likelihood"]["y"], rtol=1e-3, atol=1e-2)
    del draws["w_base"]
    with pytest.raises(ValueError, match="^'w_base' is neither stored by the run nor observed"):
        to_arviz(stub(draws, REPRIORISED), REPRIORISED, X, Y)
    assert "sigma" in to_arviz(stub(draws, REPRIORISED), REPRIORISED, X, Y, log_likelihood=False)["posterior"]


def test_a_site_that_integrating_out_has_hidden_comes_back_with_the_readout():
    draws = prior_draws()
    stored = {name: draws[name] for name in ("sigma", "net/hidden")}
    posterior = to_arviz(stub(stored, COLLAPSED), COLLAPSED, X, Y, include=["function"])["posterior"]
    assert set(posterior.data_vars) == {"sigma", "net.hidden", "w", "function"}
    np.testing.assert_allclose(posterior["function"], function_of(posterior, X), rtol=1e-3, atol=1e-4)


def test_a_readout_repriorised_inside_the_model():
    def inside(x, y=None):
        hidden = numpyro.sample("net/hidden", dist.Normal(0, 1).expand([1, WIDTH]).to_event(2))
        features = jnp.tanh(3 * x @ hidden)
        with reparam(config={"w": ReprioriseReadout(features, y, 0.3)}):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([WIDTH, 2]).to_event(2))
        numpyro.sample("y", dist.Normal(features @ w + 0.2, 0.3), obs=y)

    draws = prior_draws(inside, Y)
    idata = to_arviz(stub(draws, inside), inside, X, Y, predictions={"x": X_TEST})
    assert set(idata["posterior"].data_vars) == {"net.hidden", "w"}
    expected = stats.norm.logpdf(Y, function_of(idata["posterior"], X), 0.3)
    np.testing.assert_allclose(idata["log_likelihood"]["y"], expected, rtol=1e-3, atol=1e-3)
    # The posterior's readout, not one from the prior: the noise is all that differs from its function.
    noise = np.asarray(idata["predictions"]["y"]) - function_of(idata["posterior"], X_TEST)
    assert 0.2 < noise.std() < 0.4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": ["featurs"]}, "include names the site 'featurs', which .*not have.*'features'"),
        ({"return_sites": ["f"], "predictions": (X,)}, "return_sites names the site 'f', which .*not have.*'y'"),
        ({"drop": ["hiden"]}, "drop names the site 'hiden', which .*not have.*'net/hidden'"),
        ({"dims": {"v": ["a", "b"]}}, "dims names the site 'v', which .*not have.*'w'"),
        ({"dims": {"w": ["a"]}}, r"dimensions \('chain', 'draw', 'a'\) must have the same length.*4"),
        ({"dims": {"w": ["a", "b", "c"]}}, r"'a', 'b', 'c'\) must have the same length.*4"),
        (
            {"coords": {"row": range(8)}},
            "coords names the dimension 'row', which .*not have; its dimensions are .*'rows'",
        ),
    ],
)
def test_wrong_names_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        to_arviz(stub(prior_draws()), network, X, Y, log_likelihood=False, **options)


def test_draws_that_were_not_stored_are_asked_for():
    draws = prior_draws()
    del draws["w"]
    with pytest.raises(ValueError, match=r"^'w' is neither stored by the run.*log_likelihood=False"):
        to_arviz(stub(draws), network, X, Y)
    assert "net.hidden" in to_arviz(stub(draws), network, X, Y, log_likelihood=False)["posterior"]
    with pytest.raises(ValueError, match=r"the name 'net/hidden' is written 'net.hidden' for ArviZ"):
        to_arviz(stub({"net.hidden": draws["sigma"], **draws}), network, X, Y, log_likelihood=False)


@parametrize("model", [network, COLLAPSED], rest="slow")
def test_forgotten_observations_are_asked_for(model):
    draws = prior_draws()
    if model is COLLAPSED:
        del draws["w"]
    with pytest.raises(ValueError, match=r"^'y' is neither .* observed with these arguments.*Pass what mcmc.run got"):
        to_arviz(stub(draws, model), model, X)


def test_arguments_of_another_kind_or_order_are_refused():
    mcmc = stub(prior_draws())
    with pytest.raises(
        TypeError, match=r"but got a function and a SimpleNamespace; the order is to_arviz\(mcmc, model"
    ):
        to_arviz(network, mcmc, X, Y)
    with pytest.raises(
        TypeError, match=r"predictions must be a tuple .*, but is an ndarray; .* predictions=\(x_new,\)"
    ):
        to_arviz(mcmc, network, X, Y, predictions=X_TEST)
    with pytest.raises(TypeError, match=r"rng_key must be a PRNG key.*but is an int; the order is to_arviz\(mcmc"):
        to_arviz(mcmc, network, X, Y, rng_key=0)


def likelihood(fn):
    """A model whose observations are of the distribution that ``fn`` gives for the mean and the features."""

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        features = numpyro.deterministic("features", jnp.concatenate([x, jnp.ones_like(x)], axis=1))
        numpyro.sample("y", fn(features @ w), obs=y)

    return model


def two_outputs(mean):
    return dist.Normal(jnp.stack([mean, -mean], axis=1), 0.3)


HIDDEN = np.arange(len(X)) % 3 == 0
EVENTS = {
    "rows": (lambda mean: dist.Normal(mean, 0.3).to_event(1), Y[:, 0], lambda each: each),
    "outputs too": (lambda mean: two_outputs(mean).to_event(2), Y, lambda each: each.sum(-1)),
    "masked": (lambda mean: dist.Normal(mean, 0.3).mask(~HIDDEN).to_event(1), Y[:, 0], lambda each: each * ~HIDDEN),
    "masked as a whole": (lambda mean: dist.Normal(mean, 0.3).to_event(1).mask(False), Y[:, 0], lambda each: 0 * each),
    "a batch": (lambda mean: dist.Normal(mean, 0.3), Y[:, 0], lambda each: each),
    "a batch of events": (lambda mean: two_outputs(mean).to_event(1), Y, lambda each: each.sum(-1)),
}


@parametrize("case", EVENTS, rest="slow")
def test_an_event_of_rows_is_split_into_observations(case):
    fn, y, by_row = EVENTS[case]
    model = likelihood(fn)
    draws = {"w": np.random.default_rng(0).normal(size=(2, 50, 2)).astype("f")}
    values = to_arviz(stub(draws, model), model, X, y, dims={"y": ["rows", "output"][: y.ndim]})
    mean = draws["w"] @ np.concatenate([X, np.ones_like(X)], axis=1).T
    mean = mean if y.ndim == 1 else np.stack([mean, -mean], axis=-1)
    values = values["log_likelihood"]["y"]
    assert values.dims == ("chain", "draw", "rows")
    np.testing.assert_allclose(values, by_row(stats.norm.logpdf(y, mean, 0.3)), rtol=1e-3, atol=1e-3)


def test_an_event_that_is_no_product_is_one_observation_and_says_so():
    model = likelihood(lambda mean: dist.MultivariateNormal(mean, jnp.eye(len(X))))
    draws = {"w": np.ones((2, 3, 2), "f")}
    with pytest.warns(UserWarning, match=r"'y' is one event of shape \(8,\).*Write independent rows in a"):
        values = to_arviz(stub(draws, model), model, X, Y[:, 0])["log_likelihood"]["y"]
    assert values.shape == (2, 3)


def test_loo_of_a_model_without_plates():
    model = likelihood(EVENTS["rows"][0])
    wrapped = collapse_readout(model, readout="w", features="features", observed="y")
    draws = {"w": np.random.default_rng(0).normal(0, 0.1, size=(2, 50, 2)).astype("f")}
    idata = to_arviz(stub(draws, wrapped), wrapped, X, Y[:, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert az.loo(idata).n_data_points == len(X)


@parametrize("model", [network, REPRIORISED, COLLAPSED], ids=["plain", "repriorised", "collapsed"], rest="slow")
def test_a_second_call_compiles_nothing(model):
    draws = prior_draws()
    if model is COLLAPSED:
        del draws["w"]
    options = {"predictions": (X_TEST,), "posterior_predictive": True, "include": ["function"]}
    del draws["function"]
    others = {name: values + 0.1 for name, values in draws.items()}
    idata = to_arviz(stub(draws, model), model, X, Y, **options)
    with compilations() as compiled:
        again = to_arviz(stub(others, model), model, X, Y + 1, **options)
    assert not compiled
    assert not np.allclose(idata["log_likelihood"]["y"], again["log_likelihood"]["y"])
    np.testing.assert_array_equal(again["observed_data"]["y"], Y + 1)


SHARPNESS = 1.0


def changing(x, cfg, y=None):
    """What a global and an object hold enters the likelihood."""
    hidden = numpyro.sample("net/hidden", dist.Normal(0, 1).expand([1, WIDTH]).to_event(2))
    features = numpyro.deterministic("features", jnp.tanh(SHARPNESS * x @ hidden))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([WIDTH, 2]).to_event(2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(features @ w, cfg.noise).to_event(1), obs=y)


def expected_log_likelihood(posterior, sharpness, noise):
    hidden, w = np.asarray(posterior["net.hidden"]), np.asarray(posterior["w"])
    return stats.norm.logpdf(Y, np.tanh(sharpness * X @ hidden) @ w, noise).sum(-1)


@parametrize("form", ["plain", "repriorised", "collapsed"], rest="slow")
def test_the_model_is_looked_at_as_it_is_at_the_call(form, monkeypatch):
    """A notebook cell run again: a global, then an attribute of an argument, changes between two calls."""
    cfg, draws = SimpleNamespace(noise=0.3), prior_draws(changing, SimpleNamespace(noise=0.3))
    del draws["features"]
    model = changing
    if form == "collapsed":
        model = collapse_readout(changing, readout="w", features="features", observed="y")
        del draws["w"]
    if form == "repriorised":
        model = repriorise(changing, readout="w", features="features", targets="y", noise_scale=0.3)
    found = []
    for sharpness, noise in ((1.0, 0.3), (3.0, 0.3), (3.0, 0.7)):
        monkeypatch.setitem(globals(), "SHARPNESS", sharpness)
        cfg.noise = noise
        idata = to_arviz(stub(draws, model), model, X, cfg, Y, predictions=(X, cfg), include=["features"])
        expected = expected_log_likelihood(idata["posterior"], sharpness, noise)
        np.testing.assert_allclose(idata["log_likelihood"]["y"], expected, rtol=1e-3, atol=1e-3)
        features = np.tanh(sharpness * X @ np.asarray(draws["net/hidden"]))
        np.testing.assert_allclose(idata["posterior"]["features"], features, rtol=1e-3, atol=1e-4)
        function = features @ np.asarray(idata["posterior"]["w"])
        deviations = (np.asarray(idata["predictions"]["y"]) - function) / noise  # 96 draws of N(0, 1)
        assert 0.7 < deviations.std() < 1.3
        found.append(idata["log_likelihood"]["y"].values)
    assert np.abs(found[1] - found[0]).max() > 1 and np.abs(found[2] - found[1]).max() > 1
