"""Every mistake has a message that says what was expected, what came and how to mend it."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas
import pytest
from flax.errors import ScopeParamShapeError
from numpyro.handlers import condition, do, reparam, scale, seed, substitute, trace

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
from numpyro_wide.nn import FCN, bnn
from tests.mistakes import Case
from tests.models import linear

KEY, DATA = jax.random.key(0), (jnp.eye(3), jnp.ones(3))
X, W, Y = np.ones((6, 4)), np.ones((4, 2)), np.ones((6, 2))
WITH_NAN = np.where(np.eye(6, 2) > 0, np.nan, 1.0)
ARGUMENTS = {"readout": "w", "features": "features", "targets": "y", "noise_scale": 0.3}
SITES = {"readout": "w", "features": "features", "observed": "y"}


def run(model, *args, **kwargs):
    return trace(seed(model, jax.random.key(0))).get_trace(*args, **kwargs)


def observed_by(make_site):
    """A conjugate model whose observed site, and what follows, ``make_site`` provides."""
    features_value = jnp.asarray(np.random.default_rng(1).normal(size=(6, 4)))

    def model(y=None):
        features = numpyro.deterministic("features", features_value)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4, 2]).to_event(2))
        make_site(features, w, y)

    return model


def of_another_width(y=None):
    """Features with a column less than the readout, which nothing reads."""
    features = numpyro.deterministic("features", jnp.ones((6, 4)))
    numpyro.sample("w", dist.Normal(0, 1).expand([5, 2]).to_event(2))
    numpyro.sample("y", dist.Normal(features[:, :2], 0.3).to_event(2), obs=y)


def half_observed(features, w, y):
    numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(1), obs=y, obs_mask=jnp.arange(6) < 3)


def scaled_likelihood(features, w, y):
    with scale(scale=0.5):
        numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(2), obs=y)


def subsampled_likelihood(features, w, y):
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


def latent_noise(features, w, y):
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(features @ w, noise).to_event(2), obs=y)


def squeezed(features, w, y):
    numpyro.sample("y", dist.Normal((features @ w)[:, 0], 0.3).to_event(1), obs=y)


def with_latent_scale(x, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.1))
    features = numpyro.deterministic("features", scale * x)
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(1), obs=y)


def laplace():
    return dist.Laplace(0, 1).expand([4, 2]).to_event(2)


def subsampled_readout(y):
    with reparam(config={"w": ReprioriseReadout(np.ones((6, 3)), y, 0.3)}), numpyro.plate("d", 9, subsample_size=3):
        numpyro.sample("w", dist.Normal(0, 1))


def in_minibatches(y=None):
    with numpyro.plate("rows", 12, subsample_size=6):
        linear()(y)


def scaled_inside(y=None):
    with scale(scale=0.5):
        linear()(y)


def centred(y=None):
    features = numpyro.deterministic("features", jnp.ones((6, 4)))
    w = numpyro.deterministic("w", 2 * numpyro.sample("raw", dist.Normal(0, 1).expand([4, 2]).to_event(2)))
    numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(2), obs=y)


def readout_map(**change):
    return lg.readout_map(**{"features": X, "targets": Y, "phi": W, "noise_scale": 0.3} | change)


def repriorised(targets=Y, model=None, **change):
    return run(repriorise(linear() if model is None else model, **ARGUMENTS | change), targets)


def collapsed(targets=Y, model=None, **change):
    return run(collapse_readout(linear() if model is None else model, **SITES | change), targets)


def predictive(draws=None, data=DATA, model=None, **settings):
    wrapped = collapse_readout(with_latent_scale, **SITES) if model is None else model
    return ReadoutPredictive(wrapped, {"scale": jnp.ones(2)} if draws is None else draws, data, **settings)


def predictive_of_network():
    model = collapse_readout(bnn(FCN(1, 4), None, 0.3), readout="readout", features="features", observed="y")
    return ReadoutPredictive(model, {"hidden.hidden_0.kernel": jnp.ones((2, 3, 4))}, DATA)


def draws_of_a_guide(*after_model_and_guide, params=None):
    wrapped = repriorise(linear(), **ARGUMENTS)
    guide = numpyro.infer.autoguide.AutoNormal(wrapped)
    fit = numpyro.infer.SVI(wrapped, guide, numpyro.optim.Adam(0.01), numpyro.infer.Trace_ELBO())
    result = fit.run(jax.random.key(0), 1, jnp.asarray(Y), progress_bar=False)
    return guide_draws(KEY, wrapped, guide, result if params == "result" else result.params, *after_model_and_guide)


def limit_draws(*after_model):
    return wide_limit_draws(KEY, repriorise(linear(), **ARGUMENTS), *after_model)


CASES = [
    # linear_gaussian
    Case(lambda: readout_map(features=np.ones(6)), r"features must have shape \(n, d\), but got \(6,\)"),
    Case(lambda: readout_map(targets=np.ones((5, 2))), r"targets must have shape \(6,\) or \(6, k\).*but got \(5, 2\)"),
    Case(lambda: readout_map(targets=np.ones((6, 2, 1))), r"targets must have shape .* but got \(6, 2, 1\)"),
    Case(lambda: readout_map(phi=np.ones((4, 3))), r"phi must have shape \(4, 2\).*but got \(4, 3\)"),
    Case(lambda: readout_map(noise_scale=-0.1), r"noise_scale must be positive everywhere, but got -0.1"),
    Case(lambda: readout_map(noise_scale=0.0), r"noise_scale must be positive"),
    Case(
        lambda: readout_map(noise_scale=np.ones((3, 1))),
        r"noise_scale must broadcast against shape \(6, 2\), but got \(3, 1\)",
    ),
    Case(lambda: readout_map(regulariser=0.0), r"regulariser must be positive"),
    Case(
        lambda: readout_map(variant="eigen"),
        r"variant must be one of 'auto', 'feature', 'data', 'data-cholesky', but got 'eigen'",
    ),
    Case(
        lambda: readout_map(prior_scale=np.ones(7)),
        r"prior_scale must broadcast against shape \(4, 2\), but got \(7,\)",
    ),
    Case(lambda: readout_map(prior_scale=-1.0), r"prior_scale must be positive"),
    Case(
        lambda: lg.readout_map(X, Y, W, 0.3, "data"),
        "regulariser must be a number or an array, but got 'data'",
        TypeError,
    ),
    Case(lambda: lg.readout_inverse_map(X, Y, np.ones((3, 2)), 0.3), "readout must have shape"),
    Case(lambda: lg.log_evidence(X, Y, -0.3), "noise_scale must be positive"),
    Case(lambda: lg.readout_posterior(X, Y, np.nan), "noise_scale must be positive"),
    Case(lambda: lg.ReadoutProblem.of(X, Y, 0.3).draw(np.ones(4)), "phi must have shape"),
    Case(
        lambda: lg.ReadoutProblem.of(X, Y, 0.3).predict(np.ones((6, 3))),
        r"test_features must have shape \(m, 4\).*but got \(6, 3\)",
    ),
    Case(lambda: numpyro_wide.set_blas_threads(0), "num_threads must be a whole number of at least 1, but got 0"),
    # repriorise
    Case(lambda: repriorised(variant="eigen"), "variant must be one of"),
    Case(
        lambda: run(repriorise(linear(), **ARGUMENTS | {"targets": "z"}), Y),
        "targets names the argument 'z', which the model does not have; its arguments are 'y'",
    ),
    Case(lambda: repriorised(readout="v"), "readout names the site 'v', .*; its sites are 'features', 'w', 'y'"),
    Case(
        lambda: repriorised(features="psi"),
        r"features names the site 'psi', which must come before the readout 'w'.*'features'.*deterministic\('psi'",
    ),
    Case(
        lambda: repriorised(noise_scale="sigma"),
        "noise_scale names the site 'sigma', which must come before the readout",
    ),
    Case(lambda: repriorised(noise_scale=-1.0), "noise_scale must be positive"),
    Case(lambda: repriorised(regulariser=-1.0), "regulariser must be positive"),
    Case(lambda: repriorised(np.ones((5, 2))), r"targets must have shape \(6,\) or \(6, k\)"),
    Case(
        lambda: repriorised(np.ones((6, 3))),
        r"readout 'w' must have shape \(4, 3\).*but got \(4, 2\); give both the same columns",
    ),
    Case(lambda: repriorised(WITH_NAN), "targets must not contain NaN, but 2 of its entries do"),
    Case(
        lambda: run(condition(repriorise(linear(), **ARGUMENTS), {"w": W}), Y),
        "'w' cannot be given a value: it is the image of 'w_base'; set that to linear_gaussian.readout_inv",
    ),
    Case(
        lambda: run(do(repriorise(linear(), **ARGUMENTS), {"w": W}), Y),
        "'w' cannot be given a value: it is the image of 'w_base'",
    ),
    Case(
        lambda: run(substitute(repriorise(linear(), **ARGUMENTS), {"w": W}), Y),
        "'w' cannot be given a value: it is the image of 'w_base'",
    ),
    Case(lambda: repriorised(model=condition(linear(), {"w": W})), "the readout 'w' is observed"),
    Case(
        lambda: repriorised(model=linear(prior=laplace)),
        "readout 'w' must have a Normal distribution .* is Laplace. Give it a Normal prior",
    ),
    Case(lambda: run(subsampled_readout, np.ones(6)), "'w' is in the subsampled plate 'd'; use the full plate"),
    Case(lambda: repriorised(model=in_minibatches), "plate 'rows' takes 6 of 12 rows.*drop subsample_size"),
    Case(lambda: repriorised(model=scaled_inside), "the readout that 'w_base' stands for is scaled inside the model"),
    Case(
        lambda: repriorised(Y[:, :1], model=linear(k=None)),
        r"but got \(4,\); give targets of shape \(6,\), or change the readout",
    ),
    Case(lambda: repriorised(model=centred), "the readout 'w' must be a latent sample site with a Normal prior"),
    Case(
        lambda: repriorise(linear(), **ARGUMENTS | {"targets": Y}),
        "targets must be a name, a string, but got an ndarray",
        TypeError,
    ),
    Case(lambda: repriorised(noise_scale=None), "noise_scale must be a number or an array, but got None", TypeError),
    # collapse_readout
    Case(
        lambda: collapsed(model=observed_by(latent_that_follows)),
        "the distribution of site 'star' depends on the readout 'w'",
    ),
    Case(
        lambda: collapsed(model=observed_by(noise_that_follows)),
        "the noise of observed site 'y' depends on the readout 'w'",
    ),
    Case(
        lambda: collapsed(model=observed_by(half_observed)), "'y' is a deterministic site. With obs_mask .* leave out"
    ),
    Case(
        lambda: collapsed(model=observed_by(scaled_likelihood)), "observed site 'y' is scaled or in a subsampled plate"
    ),
    Case(
        lambda: collapsed(model=observed_by(subsampled_likelihood)),
        "observed site 'y' is scaled or in a subsampled plate.*Drop subsample_size",
    ),
    Case(lambda: collapsed(model=of_another_width), r"readout .w. must have shape \(4, 2\)"),
    Case(lambda: jax.jit(lambda y: collapsed(y, of_another_width))(Y), r"readout .w. must have shape"),
    Case(
        lambda: collapsed(model=observed_by(masked)),
        "observed site 'y' must have a Normal distribution .* is MaskedDistribution. Leave out masked rows",
    ),
    Case(
        lambda: collapsed(model=observed_by(student)),
        "observed site 'y' must have a Normal distribution .* is StudentT. For another likelihood use repriorise",
    ),
    Case(
        lambda: collapsed(model=observed_by(nonlinear)),
        "the mean of observed site 'y' must be features @ readout plus terms without the readout",
    ),
    Case(
        lambda: collapsed(model=observed_by(unscaled)),
        "the mean of observed site 'y' must be features @ readout.*with their scale and bias column",
    ),
    Case(
        lambda: collapsed(model=observed_by(used_twice)),
        "the distribution of site 'other' depends on the readout 'w'.*use repriorise instead",
    ),
    Case(
        lambda: run(collapse_readout(observed_by(latent_noise), **SITES | {"observed": "noise"}), Y),
        "observed site 'noise' must have a Normal distribution .*, but its distribution is HalfNormal",
    ),
    Case(
        lambda: run(collapse_readout(observed_by(squeezed), **SITES), Y[:, 0]),
        r"readout 'w' must have shape \(4,\) to go with features \(6, 4\) and targets \(6,\), but got \(4, 2\)",
    ),
    Case(lambda: collapsed(variant="eigen"), "variant must be one of"),
    Case(lambda: collapsed(observed="z"), "observed names the sample site 'z', .*; its sample sites are 'w', 'y'"),
    Case(lambda: collapsed(readout="v"), "readout names the site 'v', which must come before the observed site 'y'"),
    Case(
        lambda: collapsed(features="psi"),
        "features names the site 'psi', which must come before .* are 'features', 'w'",
    ),
    Case(lambda: collapsed(WITH_NAN), "observed site 'y' must not contain NaN"),
    Case(lambda: collapsed(model=centred), "the readout 'w' must be a latent sample site with a Normal prior"),
    Case(
        lambda: run(condition(collapse_readout(linear(), **SITES), {"w": W}), Y),
        "'w' cannot be given a value: it is integrated out",
    ),
    Case(
        lambda: run(do(collapse_readout(linear(), **SITES), {"w": W}), Y),
        "'w' cannot be given a value: it is integrated out",
    ),
    Case(
        lambda: run(
            condition(collapse_readout(linear(), **SITES), condition_fn=lambda site: {"w": W}.get(site["name"])), Y
        ),
        "'w' cannot be given a value: it is integrated out",
    ),
    Case(
        lambda: run(substitute(collapse_readout(linear(), **SITES), {"w": W}), Y),
        "'w' cannot be given a value: it is integrated out",
    ),
    Case(lambda: collapse_readout("w", **SITES), "fn must be a model, a callable, but got 'w'", TypeError),
    Case(
        lambda: collapsed(Y[:, :1], model=linear(k=None)),
        "observations of site 'y' have shape .6, 1., but its distribution has .6,., from a mean",
    ),
    Case(lambda: collapsed(model=condition(linear(), {"w": W})), "the readout 'w' is observed"),
    Case(lambda: collapsed(model=linear(prior=laplace)), "readout 'w' must have a Normal distribution"),
    # ReadoutPredictive
    Case(
        lambda: predictive(model=with_latent_scale),
        "model must come from collapse_readout or repriorise, but is a function",
        TypeError,
    ),
    Case(lambda: predictive({"other": jnp.ones(2)}), "every latent site, but 'scale' is missing; they hold 'other'"),
    Case(
        lambda: predictive(data=jnp.eye(3)),
        "model_args must be a tuple of what the model is fitted on, but is an? .*Array",
        TypeError,
    ),
    Case(
        lambda: predictive(data=(pandas.DataFrame(np.eye(3)), jnp.ones(3))),
        r"must be arrays, but argument 0 is a DataFrame; pass its numbers, .to_numpy\(\)",
        TypeError,
    ),
    Case(lambda: predictive()(KEY, x=pandas.DataFrame(np.eye(3))), "must be arrays, but x is a DataFrame", TypeError),
    Case(
        lambda: run(collapse_readout(linear(), **SITES), pandas.DataFrame(Y)),
        "must be arrays, but argument 0 is a DataFrame",
        TypeError,
    ),
    Case(
        lambda: run(repriorise(linear(), **ARGUMENTS), y=pandas.DataFrame(Y)),
        "must be arrays, but y is a DataFrame",
        TypeError,
    ),
    Case(
        lambda: predictive_of_network()(KEY, np.ones((5, 2), np.float32)),
        r"argument 0 has shape \(5, 2\), where the fit had \(3, 3\). New inputs need the columns of the fit, \(m, 3\)",
        ScopeParamShapeError,
    ),
    Case(lambda: predictive(batch_size=-1), "batch_size must be a whole number of at least 1, but got -1"),
    Case(
        lambda: predictive({"scale": jnp.ones(2), "other": jnp.ones(3)}),
        "of the same length, but the lengths are {'scale': 2, 'other': 3}",
    ),
    Case(lambda: predictive(data=(jnp.eye(3),)), "'y' is not observed with these model_args"),
    Case(
        lambda: predictive()(KEY, jnp.eye(4)),
        "the inputs give features with 4 columns, but the model was fitted with 3",
    ),
    Case(lambda: predictive({"scale": jnp.ones((3, 2))}), "must have shape .* but has .3, 2.; flatten chains"),
    Case(
        lambda: ReadoutPredictive(collapse_readout(with_latent_scale, **SITES), {"scale": jnp.ones(2)}),
        "missing 1 required positional argument: 'x'",
        TypeError,
    ),
    Case(
        lambda: predictive({"scale": jnp.full(2, jnp.inf)}).readout(KEY),
        "no readouts are finite.*use a larger noise",
        FloatingPointError,
    ),
    # guide_draws and wide_limit_draws
    Case(
        lambda: limit_draws(jnp.asarray(Y)),
        r"num_samples must be a whole number, but is an? .*Array.*; the order is wide_limit",
        TypeError,
    ),
    Case(lambda: limit_draws(0, jnp.asarray(Y)), "num_samples must be a whole number of at least 1, but got 0"),
    Case(lambda: limit_draws(3), "no repriorised readout in this run.*latent sites are 'w', 'y'"),
    Case(
        lambda: draws_of_a_guide(jnp.asarray(Y)),
        r"num_samples must be a whole number, but is an? .*Array.*; the order is guide_draws",
        TypeError,
    ),
    Case(
        lambda: draws_of_a_guide(3, jnp.asarray(Y), params="result"),
        r"params must be a dictionary .*, but is an SVIRunResult;.* pass the .params",
        TypeError,
    ),
]


@pytest.mark.fault(
    "readout/_predictive.py",
    "if test is not None:\n                    self._add_hints",
    "if test is None:\n                    self._add_hints",
)
@pytest.mark.parametrize("case", CASES, ids=Case.id_of)
def test_mistakes(case):
    case.check()


def test_what_is_allowed_beside_the_mistakes():
    value = jnp.ones((4, 2))
    both = run(substitute(repriorise(linear(), **ARGUMENTS), {"w": value, "w_base": 2 * value}), Y)
    np.testing.assert_array_equal(both["w"]["value"], value)
    # Around the wrapped model it is the user's business, as where a whole ELBO is divided by the number of rows.
    run(scale(repriorise(linear(), **ARGUMENTS), scale=0.5), Y)


def test_a_negative_scale_under_jit_is_not_its_mirror_image():
    features, targets = jnp.eye(3)[:, :2], jnp.ones(3)
    assert jnp.isnan(jax.jit(lg.log_evidence)(features, targets, -0.5))
    assert jnp.isfinite(jax.jit(lg.log_evidence)(features, targets, 0.5))


def test_base_without_targets_is_refused():
    """As when Predictive runs a guide at new inputs: the readout would come from its prior."""
    wrapped = repriorise(linear(), **ARGUMENTS)
    draws = {"w_base": jnp.ones((3, 4, 2))}
    with pytest.raises(ValueError, match="value of 'w_base' is given, but the model is run without obs.*guide_draws"):
        numpyro.infer.Predictive(wrapped, draws)(jax.random.key(0))
    complete = numpyro.infer.Predictive(wrapped, draws | {"w": jnp.ones((3, 4, 2))})(jax.random.key(0))
    assert complete["y"].shape == (3, 6, 2)


@pytest.mark.fault("readout/_model.py", "if substituted and not _is_substituted(site):", "if False:")
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
            ValueError, match="The noise of observed site 'y' is by row, for the 3 rows of the fit: make that of"
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
