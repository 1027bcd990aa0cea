"""Every mistake has a message that says what was expected, what came and how to mend it."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import condition, reparam, seed, substitute, trace

import numpyro_wide
from numpyro_wide import (
    ReadoutPredictive,
    ReprioriseReadout,
    collapse_readout,
    guide_draws,
    repriorise,
    wide_limit_draws,
)
from numpyro_wide import linear_gaussian as lg
from tests.models import linear

Y = np.ones((6, 2))
ARGUMENTS = {"readout": "w", "features": "features", "targets": "y", "noise_scale": 0.3}
SITES = {"readout": "w", "features": "features", "observed": "y"}


def run(model, *args, **kwargs):
    return trace(seed(model, jax.random.key(0))).get_trace(*args, **kwargs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": np.ones(6)}, r"features must have shape \(n, d\), but got \(6,\)"),
        ({"targets": np.ones((5, 2))}, r"targets must have shape \(6,\) or \(6, k\).*but got \(5, 2\)"),
        ({"targets": np.ones((6, 2, 1))}, r"targets must have shape .* but got \(6, 2, 1\)"),
        ({"phi": np.ones((4, 3))}, r"phi must have shape \(4, 2\).*but got \(4, 3\)"),
        ({"noise_scale": -0.1}, r"noise_scale must be positive everywhere, but got -0.1"),
        ({"noise_scale": 0.0}, r"noise_scale must be positive"),
        ({"noise_scale": np.ones((3, 1))}, r"noise_scale must broadcast against shape \(6, 2\), but got \(3, 1\)"),
        ({"regulariser": 0.0}, r"regulariser must be positive"),
        ({"variant": "eigen"}, r"variant must be one of 'auto', 'feature', 'data', 'data-cholesky', but got 'eigen'"),
        ({"prior_scale": np.ones(7)}, r"prior_scale must broadcast against shape \(4, 2\), but got \(7,\)"),
        ({"prior_scale": -1.0}, r"prior_scale must be positive"),
    ],
)
def test_linear_gaussian(change, message):
    arguments = {"features": np.ones((6, 4)), "targets": Y, "phi": np.ones((4, 2)), "noise_scale": 0.3} | change
    with pytest.raises(ValueError, match=message):
        lg.readout_map(**arguments)


def test_other_functions_check_too():
    with pytest.raises(ValueError, match="readout must have shape"):
        lg.readout_inverse_map(np.ones((6, 4)), Y, np.ones((3, 2)), 0.3)
    with pytest.raises(ValueError, match="noise_scale must be positive"):
        lg.log_evidence(np.ones((6, 4)), Y, -0.3)
    with pytest.raises(ValueError, match="noise_scale must be positive"):
        lg.readout_posterior(np.ones((6, 4)), Y, np.nan)
    with pytest.raises(ValueError, match="phi must have shape"):
        lg.readout_draw(np.ones((6, 4)), Y, np.ones(4), 0.3)
    with pytest.raises(ValueError, match=r"test_features must have shape \(m, 4\).*but got \(6, 3\)"):
        lg.readout_predictive(np.ones((6, 3)), np.ones((6, 4)), Y, 0.3)
    with pytest.raises(ValueError, match="num_threads must be a whole number of at least 1, but got 0"):
        numpyro_wide.set_blas_threads(0)


def test_a_negative_scale_under_jit_is_not_its_mirror_image():
    features, targets = jnp.eye(3)[:, :2], jnp.ones(3)
    assert jnp.isnan(jax.jit(lg.log_evidence)(features, targets, -0.5))
    assert jnp.isfinite(jax.jit(lg.log_evidence)(features, targets, 0.5))


@pytest.mark.parametrize(
    ("change", "targets", "message"),
    [
        ({"variant": "eigen"}, Y, "variant must be one of"),
        ({"targets": "z"}, Y, "targets names the argument 'z', which the model does not have; its arguments are 'y'"),
        ({"readout": "v"}, Y, "readout names the sample site 'v', .*; its sites are 'features', 'w', 'y'"),
        ({"features": "psi"}, Y, "features names the site 'psi', which must come before the readout 'w'.*'features'"),
        ({"noise_scale": "sigma"}, Y, "noise_scale names the site 'sigma', which must come before the readout"),
        ({"noise_scale": -1.0}, Y, "noise_scale must be positive"),
        ({"regulariser": -1.0}, Y, "regulariser must be positive"),
        ({}, np.ones((5, 2)), r"targets must have shape \(6,\) or \(6, k\)"),
        ({}, np.ones((6, 3)), r"readout 'w' must have shape \(4, 3\).*but got \(4, 2\); give both the same columns"),
        ({}, np.where(np.eye(6, 2) > 0, np.nan, 1.0), "targets must not contain NaN, but 2 of its entries do"),
    ],
)
def test_repriorise(change, targets, message):
    with pytest.raises(ValueError, match=message):
        run(repriorise(linear(), **ARGUMENTS | change), targets)


def test_a_call_without_a_key_says_so():
    with pytest.raises(ValueError, match="called without a PRNG key to draw its sites with"):
        repriorise(linear(), **ARGUMENTS)(Y)
    with pytest.raises(ValueError, match="readout names the sample site 'nope', which the model does not have"):
        repriorise(linear(), **ARGUMENTS | {"readout": "nope"})(Y)


def test_repriorised_readout_cannot_be_set():
    wrapped = repriorise(linear(), **ARGUMENTS)
    value = jnp.ones((4, 2))
    with pytest.raises(ValueError, match="'w' cannot be conditioned on: set 'w_base' to linear_gaussian.readout_inv"):
        run(condition(wrapped, {"w": value}), Y)
    with pytest.raises(ValueError, match="'w' is substituted, but 'w_base' is not"):
        run(substitute(wrapped, {"w": value}), Y)
    both = run(substitute(wrapped, {"w": value, "w_base": 2 * value}), Y)
    np.testing.assert_array_equal(both["w"]["value"], value)
    with pytest.raises(ValueError, match="the readout 'w' is observed"):
        run(repriorise(condition(linear(), {"w": value}), **ARGUMENTS), Y)


def test_repriorised_readout_needs_a_normal_prior_and_the_full_plate():
    with pytest.raises(ValueError, match="readout 'w' must have a Normal distribution .* is Laplace"):
        run(repriorise(linear(prior=lambda: dist.Laplace(0, 1).expand([4, 2]).to_event(2)), **ARGUMENTS), Y)

    def subsampled(y):
        with reparam(config={"w": ReprioriseReadout(np.ones((6, 3)), y, 0.3)}), numpyro.plate("d", 9, subsample_size=3):
            numpyro.sample("w", dist.Normal(0, 1))

    with pytest.raises(ValueError, match="'w' is in the subsampled plate 'd'; use the full plate"):
        run(subsampled, np.ones(6))


def test_repriorised_model_needs_all_rows_and_an_unscaled_readout():
    def in_minibatches(y=None):
        with numpyro.plate("rows", 12, subsample_size=6):
            linear()(y)

    with pytest.raises(ValueError, match="plate 'rows' takes 6 of 12 rows.*drop subsample_size"):
        run(repriorise(in_minibatches, **ARGUMENTS), Y)

    def scaled_prior(y=None):
        with numpyro.handlers.scale(scale=0.5):
            linear()(y)

    with pytest.raises(ValueError, match="the readout that 'w_base' stands for is scaled inside the model"):
        run(repriorise(scaled_prior, **ARGUMENTS), Y)
    # Around the wrapped model it is the user's business, as where a whole ELBO is divided by the number of rows.
    run(numpyro.handlers.scale(repriorise(linear(), **ARGUMENTS), scale=0.5), Y)


def test_column_of_targets_for_a_vector_readout():
    with pytest.raises(ValueError, match=r"but got \(4,\); give targets of shape \(6,\), or change the readout"):
        run(repriorise(linear(k=None), **ARGUMENTS), Y[:, :1])


def observed_by(make_site):
    """A conjugate model whose observed site, and what follows, ``make_site`` provides."""
    features_value = jnp.asarray(np.random.default_rng(1).normal(size=(6, 4)))

    def model(y=None):
        features = numpyro.deterministic("features", features_value)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4, 2]).to_event(2))
        make_site(features, w, y)

    return model


def scaled(features, w, y):
    with numpyro.handlers.scale(scale=0.5):
        numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(2), obs=y)


def subsampled(features, w, y):
    with numpyro.plate("rows", 12, subsample_size=6):
        numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(1), obs=y)


def masked(features, w, y):
    numpyro.sample("y", dist.Normal(features @ w, 0.3).mask(jnp.arange(12).reshape(6, 2) > 3).to_event(2), obs=y)


def student(features, w, y):
    numpyro.sample("y", dist.StudentT(4, features @ w, 0.3).to_event(2), obs=y)


def nonlinear(features, w, y):
    numpyro.sample("y", dist.Normal(jnp.tanh(features @ w), 0.3).to_event(2), obs=y)


def unscaled(features, w, y):
    numpyro.sample("y", dist.Normal(features @ w / 2, 0.3).to_event(2), obs=y)


def used_twice(features, w, y):
    numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(2), obs=y)
    numpyro.sample("other", dist.Normal(w.sum(), 1.0), obs=0.0)


def latent_that_follows(features, w, y):
    numpyro.sample("star", dist.Normal(w.sum(), 1.0))
    numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(2), obs=y)


def noise_that_follows(features, w, y):
    numpyro.sample("y", dist.Normal(features @ w, 0.3 * jnp.exp(w[0])).to_event(2), obs=y)


@pytest.mark.parametrize(
    ("make_site", "message"),
    [
        (latent_that_follows, "the distribution of site 'star' depends on the readout 'w'"),
        (noise_that_follows, "the noise of observed site 'y' depends on the readout 'w'"),
        (scaled, "observed site 'y' is scaled or in a subsampled plate"),
        (subsampled, "observed site 'y' is scaled or in a subsampled plate.*Drop subsample_size"),
        (masked, "observed site 'y' must have a Normal distribution .* is MaskedDistribution"),
        (student, "observed site 'y' must have a Normal distribution .* is StudentT"),
        (nonlinear, "the mean of observed site 'y' must be features @ readout plus terms without the readout"),
        (unscaled, "the mean of observed site 'y' must be features @ readout.*with their scale and bias column"),
        (used_twice, "the distribution of site 'other' depends on the readout 'w'.*use repriorise instead"),
    ],
)
def test_collapse_needs_a_conjugate_likelihood(make_site, message):
    with pytest.raises(ValueError, match=message):
        run(collapse_readout(observed_by(make_site), **SITES), Y)


@pytest.mark.parametrize(
    ("change", "targets", "message"),
    [
        ({"variant": "eigen"}, Y, "variant must be one of"),
        ({"observed": "z"}, Y, "observed names the sample site 'z', .*; its sample sites are 'w', 'y'"),
        ({"readout": "v"}, Y, "readout names the site 'v', which must come before the observed site 'y'"),
        ({"features": "psi"}, Y, "features names the site 'psi', which must come before .* are 'features', 'w'"),
        ({}, np.where(np.eye(6, 2) > 0, np.nan, 1.0), "observed site 'y' must not contain NaN"),
    ],
)
def test_collapse_names_and_data(change, targets, message):
    with pytest.raises(ValueError, match=message):
        run(collapse_readout(linear(), **SITES | change), targets)


def test_a_readout_that_is_no_latent_site():
    def centred(y=None):
        features = numpyro.deterministic("features", jnp.ones((6, 4)))
        w = numpyro.deterministic("w", 2 * numpyro.sample("raw", dist.Normal(0, 1).expand([4, 2]).to_event(2)))
        numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(2), obs=y)

    for wrapped in (repriorise(centred, **ARGUMENTS), collapse_readout(centred, **SITES)):
        with pytest.raises(ValueError, match="the readout 'w' must be a latent sample site with a Normal prior"):
            run(wrapped, Y)


def test_collapsed_readout_cannot_be_set():
    for handler in (condition, substitute):
        with pytest.raises(ValueError, match="'w' is integrated out, and cannot be given a value"):
            run(handler(collapse_readout(linear(), **SITES), {"w": jnp.ones((4, 2))}), Y)


def test_types_of_arguments():
    with pytest.raises(TypeError, match="targets must be a name, a string, but got a ndarray"):
        repriorise(linear(), **ARGUMENTS | {"targets": Y})
    with pytest.raises(TypeError, match="fn must be a model, a callable, but got 'w'"):
        collapse_readout("w", **SITES)
    with pytest.raises(TypeError, match="noise_scale must be a number or an array, but got None"):
        run(repriorise(linear(), **ARGUMENTS | {"noise_scale": None}), Y)
    with pytest.raises(TypeError, match="regulariser must be a number or an array, but got 'data'"):
        lg.readout_map(np.ones((6, 4)), Y, np.ones((4, 2)), 0.3, "data")


def test_collapse_needs_observations_of_the_distributions_shape():
    with pytest.raises(
        ValueError, match="observations of site 'y' have shape .6, 1., but its distribution has .6,., from a mean"
    ):
        run(collapse_readout(linear(k=None), **SITES), Y[:, :1])


def test_base_without_targets_is_refused():
    """As when Predictive runs a guide at new inputs: the readout would come from its prior."""
    wrapped = repriorise(linear(), **ARGUMENTS)
    draws = {"w_base": jnp.ones((3, 4, 2))}
    with pytest.raises(ValueError, match="'w_base' is given, but the model is run without targets.*guide_draws"):
        numpyro.infer.Predictive(wrapped, draws)(jax.random.key(0))
    complete = numpyro.infer.Predictive(wrapped, draws | {"w": jnp.ones((3, 4, 2))})(jax.random.key(0))
    assert complete["y"].shape == (3, 6, 2)


def test_collapsed_weights_without_observations_are_refused():
    """As when Predictive runs a collapsed model at new inputs: the readout would come from its prior."""

    def model(x, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.1))
        features = numpyro.deterministic("features", scale * x)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(1), obs=y)

    wrapped, draws = collapse_readout(model, **SITES), {"scale": jnp.ones(3)}
    with pytest.raises(ValueError, match="value of 'scale' is given, .* 'w' is drawn from its prior.*Predictive"):
        numpyro.infer.Predictive(wrapped, draws)(jax.random.key(0), np.ones((6, 4)))
    complete = numpyro.infer.Predictive(wrapped, draws | {"w": jnp.ones((3, 4))})(jax.random.key(0), np.ones((6, 4)))
    assert complete["y"].shape == (3, 6)


def test_collapse_needs_a_latent_normal_readout():
    with pytest.raises(ValueError, match="the readout 'w' is observed"):
        run(collapse_readout(condition(linear(), {"w": jnp.ones((4, 2))}), **SITES), Y)
    with pytest.raises(ValueError, match="readout 'w' must have a Normal distribution"):
        run(collapse_readout(linear(prior=lambda: dist.Laplace(0, 1).expand([4, 2]).to_event(2)), **SITES), Y)


def with_latent_scale(x, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.1))
    features = numpyro.deterministic("features", scale * x)
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(1), obs=y)


def test_readout_predictive():
    x, y = jnp.eye(3), jnp.ones(3)
    wrapped = collapse_readout(with_latent_scale, **SITES)
    with pytest.raises(TypeError, match="collapsed_model must come from collapse_readout, but is a function"):
        ReadoutPredictive(with_latent_scale, {"scale": jnp.ones(2)}, (x, y))
    with pytest.raises(ValueError, match="every latent site, but 'scale' is missing; it has 'other'"):
        ReadoutPredictive(wrapped, {"other": jnp.ones(2)}, (x, y))
    with pytest.raises(TypeError, match="and model_args a tuple, but got a dict and a .*Array"):
        ReadoutPredictive(wrapped, {"scale": jnp.ones(2)}, x)
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1, but got -1"):
        ReadoutPredictive(wrapped, {"scale": jnp.ones(2)}, (x, y), batch_size=-1)
    with pytest.raises(ValueError, match="of the same length, but the lengths are {'scale': 2, 'other': 3}"):
        ReadoutPredictive(wrapped, {"scale": jnp.ones(2), "other": jnp.ones(3)}, (x, y))
    with pytest.raises(ValueError, match="'y' is not observed with these model_args"):
        ReadoutPredictive(wrapped, {"scale": jnp.ones(2)}, (x,))
    predictive = ReadoutPredictive(wrapped, {"scale": jnp.ones(2)}, (x, y))
    with pytest.raises(ValueError, match="the inputs give features with 4 columns, but the model was fitted with 3"):
        predictive(jax.random.key(0), jnp.eye(4))
    with pytest.raises(ValueError, match="must have shape .* but has .3, 2.; flatten chains"):
        ReadoutPredictive(wrapped, {"scale": jnp.ones((3, 2))}, (x, y))
    with pytest.raises(TypeError, match=r"cannot be called .*: missing a required argument: 'x'.*model_args=.x, y."):
        ReadoutPredictive(wrapped, {"scale": jnp.ones(2)})
    broken = ReadoutPredictive(wrapped, {"scale": jnp.full(2, jnp.inf)}, (x, y))
    with pytest.raises(FloatingPointError, match="no readouts are finite.*jax_enable_x64"):
        broken.readout(jax.random.key(0))


def test_noise_by_row_is_that_of_the_fit():
    """A default as long as the rows of the fit: JAX's own error at other rows names neither noise nor remedy."""
    by_row = jnp.array([0.1, 0.2, 0.3])

    def model(x, y=None, noise=by_row):
        features = numpyro.deterministic("features", x)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, noise).to_event(1), obs=y)

    x = jnp.eye(3)
    predictive = ReadoutPredictive(collapse_readout(model, **SITES), {"unused": jnp.ones(2)}, (x, jnp.ones(3)))
    for num_rows in (1, 2):
        with pytest.raises(
            ValueError, match=f"noise .* 'y' is by row, for the 3 rows .* the {num_rows} rows to predict"
        ):
            predictive(jax.random.key(0), x[:num_rows])
    with pytest.raises(ValueError, match="features with 2 columns, but the model was fitted with 3"):
        predictive(jax.random.key(0), x[:, :2])  # a mistake of another kind
    assert predictive(jax.random.key(0), x[:2], noise=jnp.ones(2))["y"].shape == (2, 2)


def test_param_sites_need_their_values():
    def model(x, y=None):
        noise_scale = numpyro.param("noise", 0.3)
        features = numpyro.deterministic("features", x)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, noise_scale).to_event(1), obs=y)

    wrapped, data = collapse_readout(model, **SITES), (jnp.eye(3), jnp.ones(3))
    with pytest.raises(ValueError, match="param sites 'noise'; pass their values as params"):
        ReadoutPredictive(wrapped, {"unused": jnp.ones(2)}, data)
    variances = [
        ReadoutPredictive(wrapped, {"unused": jnp.ones(2)}, data, params={"noise": noise})(jax.random.key(0), data[0])
        for noise in (0.1, 1.0)
    ]
    np.testing.assert_allclose(variances[0]["variance"], 0.01 / 1.01, rtol=1e-3)
    np.testing.assert_allclose(variances[1]["variance"], 0.5, rtol=1e-3)


def test_draws_need_their_number_and_the_guide_s_parameters():
    wrapped, y = repriorise(linear(), **ARGUMENTS), jnp.asarray(Y)
    guide = numpyro.infer.autoguide.AutoNormal(wrapped)
    fit = numpyro.infer.SVI(wrapped, guide, numpyro.optim.Adam(0.01), numpyro.infer.Trace_ELBO())
    result = fit.run(jax.random.key(0), 1, y, progress_bar=False)
    with pytest.raises(
        TypeError, match=r"num_samples must be a whole number, but is a .*Array.*; the order is wide_limit"
    ):
        wide_limit_draws(jax.random.key(0), wrapped, y)
    with pytest.raises(ValueError, match="num_samples must be a whole number of at least 1, but got 0"):
        wide_limit_draws(jax.random.key(0), wrapped, 0, y)
    with pytest.raises(
        TypeError, match=r"num_samples must be a whole number, but is a .*Array.*; the order is guide_draws"
    ):
        guide_draws(jax.random.key(0), wrapped, guide, result.params, y)
    with pytest.raises(TypeError, match=r"params must be a dictionary .*, but is a SVIRunResult;.* pass the .params"):
        guide_draws(jax.random.key(0), wrapped, guide, result, 3, y)


def test_wide_limit_draws_without_targets():
    with pytest.raises(ValueError, match="no repriorised readout in this run.*latent sites are 'w', 'y'"):
        wide_limit_draws(jax.random.key(0), repriorise(linear(), **ARGUMENTS), 3)
