"""The predictive density of new rows, and draws whose predictions are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import log_likelihood
from scipy.special import logsumexp
from scipy.stats import multivariate_normal, norm

from numpyro_wide import ReadoutPredictive, collapse_readout
from numpyro_wide.readout import CollapsedModel
from tests.marks import parametrize

SITES = {"readout": "w", "features": "features", "observed": "y"}
PRIOR_LOC, PRIOR_SCALE = 0.4, 1.3
HIDDEN = np.random.default_rng(0).normal(size=(5, 2, 7))


def make(k=None, noise=0.3) -> CollapsedModel:
    """Seven tanh units, an offset, and a readout with a prior of its own."""
    shape = () if k is None else (k,)

    def model(x, y=None, noise=noise):
        hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, 7]).to_event(2))
        features = numpyro.deterministic("features", jnp.tanh(x @ hidden))
        w = numpyro.sample("w", dist.Normal(PRIOR_LOC, PRIOR_SCALE).expand([7, *shape]).to_event(1 + len(shape)))
        offset = x[:, 0] if k is None else x[:, :1]
        numpyro.sample("y", dist.Normal(offset + features @ w, noise).to_event(1 + len(shape)), obs=y)

    return collapse_readout(model, **SITES)


def data(n, k=None, seed=1):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 2)), rng.normal(size=(n,) if k is None else (n, k))


def dense_joint(hidden, x, noise):
    """Mean and covariance of one output at all rows, the readout integrated out."""
    features = np.tanh(x @ hidden)
    mean = x[:, 0] + PRIOR_LOC * features.sum(1)
    return mean, PRIOR_SCALE**2 * features @ features.T + np.diag(np.broadcast_to(noise, len(x)) ** 2)


def dense_log_density(x, y, x_new, y_new, noise, noise_new):
    """For each new row, the density of all data with it over that of the data without: no formula of predictions."""
    columns, columns_new = y.reshape(len(y), -1).T, y_new.reshape(len(y_new), -1).T
    noise = np.broadcast_to(noise, y.shape).reshape(len(y), -1).T
    noise_new = np.broadcast_to(noise_new, y_new.shape).reshape(len(y_new), -1).T
    terms = np.zeros((len(HIDDEN), len(x_new)))
    for draw, hidden in enumerate(HIDDEN):
        for row in range(len(x_new)):
            both = np.concatenate([x, x_new[row : row + 1]])
            for column, column_new, sd, sd_new in zip(columns, columns_new, noise, noise_new, strict=True):
                joint = multivariate_normal(*dense_joint(hidden, both, np.append(sd, sd_new[row])))
                terms[draw, row] += joint.logpdf(np.append(column, column_new[row]))
                terms[draw, row] -= multivariate_normal(*dense_joint(hidden, x, sd)).logpdf(column)
    return logsumexp(terms, axis=0) - np.log(len(HIDDEN))


@pytest.mark.fault("readout/_predictions.py", "= variance + new.noise_scale**2", "= variance + 0 * new.noise_scale**2")
@pytest.mark.fault("readout/_predictions.py", "= variance + new.noise_scale**2", "= variance + fit.noise_scale**2")
@pytest.mark.fault("readout/_predictions.py", "by_entry.sum(axis=1)", "by_entry.mean(axis=1)")
@pytest.mark.usefixtures("x64")
@parametrize("n", [4, 12], rest="slow")
@pytest.mark.parametrize(
    ("k", "noise", "noise_new"),
    [
        (None, 0.3, 0.3),
        (2, 0.3, 0.3),
        (2, np.array([0.2, 0.7]), np.array([0.2, 0.7])),
        (None, "by row", "by row"),
        (2, "by row", "by row"),
    ],
)
def test_against_ratios_of_dense_densities(k, noise, noise_new, n):
    (x, y), (x_new, y_new) = data(n, k), data(6, k, seed=2)
    if isinstance(noise, str):
        column = () if k is None else (1,)
        noise, noise_new = np.linspace(0.2, 0.9, n).reshape(n, *column), np.linspace(1, 2, 6).reshape(6, *column)
    predictive = ReadoutPredictive(make(k), {"hidden": HIDDEN}, (x, y), {"noise": noise})
    found = predictive.log_density(x_new, y_new, noise=noise_new)
    assert found.shape == (6,)
    np.testing.assert_allclose(found, dense_log_density(x, y, x_new, y_new, noise, noise_new), rtol=1e-9)
    # And it is the mixture that the predictions describe.
    given = predictive(jax.random.key(0), x_new, noise=noise_new)
    assert given["noise_scale"].shape == given["mean"].shape == (5, 6, *y.shape[1:])
    np.testing.assert_allclose(given["noise_scale"], np.broadcast_to(noise_new, given["mean"].shape))
    by_entry = norm(given["mean"], np.sqrt(given["variance"] + given["noise_scale"] ** 2)).logpdf(y_new)
    by_draw = by_entry.reshape(5, 6, -1).sum(-1)
    np.testing.assert_allclose(found, logsumexp(by_draw, axis=0) - np.log(5), rtol=1e-9)


@pytest.mark.fault("linear_gaussian/_evidence.py", "- residual / share[:, None], variance /", "- residual, variance /")
@pytest.mark.usefixtures("x64")
@parametrize("n", [4, 12], rest="slow")
@pytest.mark.parametrize(
    ("k", "noise"), [(None, 0.3), (2, 0.3), (2, np.array([0.2, 0.7])), (None, "by row"), (2, "by row")]
)
def test_leave_one_out_is_the_dense_conditional_of_each_row(k, noise, n):
    x, y = data(n, k)
    if isinstance(noise, str):
        noise = np.linspace(0.2, 0.9, n).reshape(n, *(() if k is None else (1,)))
    mean, variance = ReadoutPredictive(make(k), {"hidden": HIDDEN}, (x, y), {"noise": noise}).leave_one_out()
    assert mean.shape == variance.shape == (5, *y.shape)
    columns, scales = y.reshape(n, -1).T, np.broadcast_to(noise, y.shape).reshape(n, -1).T
    for draw, hidden in enumerate(HIDDEN):
        for output, (column, scale) in enumerate(zip(columns, scales, strict=True)):
            prior, covariance = dense_joint(hidden, x, scale)
            for row in range(n):
                others = np.arange(n) != row
                gain = np.linalg.solve(covariance[np.ix_(others, others)], covariance[others, row])
                expected = prior[row] + gain @ (column - prior)[others]
                spread = covariance[row, row] - gain @ covariance[others, row]
                place = (draw, row) if k is None else (draw, row, output)
                np.testing.assert_allclose([mean[place], variance[place]], [expected, spread], rtol=1e-10)


def dense_joint_log_density(x, y, x_new, y_new, noise, noise_new):
    """The density of all data together over that of the data of the fit."""
    terms = np.zeros(len(HIDDEN))
    both, y_both = np.concatenate([x, x_new]), np.concatenate([y, y_new])
    noise, noise_new = np.broadcast_to(noise, y.shape), np.broadcast_to(noise_new, y_new.shape)
    noise_both = np.concatenate([noise, noise_new])
    for draw, hidden in enumerate(HIDDEN):
        for sign, inputs, targets, sd in ((1, both, y_both, noise_both), (-1, x, y, noise)):
            for column, deviation in zip(
                targets.reshape(len(inputs), -1).T, sd.reshape(len(inputs), -1).T, strict=True
            ):
                terms[draw] += sign * multivariate_normal(*dense_joint(hidden, inputs, deviation)).logpdf(column)
    return logsumexp(terms) - np.log(len(HIDDEN))


@parametrize(
    ("k", "noise"), [(None, 0.3), (2, 0.3), (2, np.array([0.2, 0.7])), (None, "by row"), (2, "by row")], rest="slow"
)
def test_all_rows_together_against_dense_densities(x64, k, noise):
    (x, y), (x_new, y_new) = data(8, k), data(6, k, seed=2)
    noise_new = noise
    if isinstance(noise, str):
        column = () if k is None else (1,)
        noise, noise_new = np.linspace(0.2, 0.9, 8).reshape(8, *column), np.linspace(1, 2, 6).reshape(6, *column)
    predictive = ReadoutPredictive(make(k), {"hidden": HIDDEN}, (x, y), {"noise": noise})
    found = predictive.joint_log_density(x_new, y_new, noise=noise_new)
    assert found.shape == ()
    np.testing.assert_allclose(found, dense_joint_log_density(x, y, x_new, y_new, noise, noise_new), rtol=1e-9)
    # Of one row it is the other.
    noise_one = noise_new[:1] if np.shape(noise_new)[:1] == (6,) else noise_new
    of_one = predictive.log_density(x_new[:1], y_new[:1], noise=noise_one)
    joint = predictive.joint_log_density(x_new[:1], y_new[:1], noise=noise_one)
    np.testing.assert_allclose(joint, of_one[0], rtol=1e-9)


@pytest.mark.as_compiled
def test_all_rows_together_in_single_precision_in_blocks_and_under_jit(tmp_path):
    (x, y), (x_new, y_new) = data(8), data(6, seed=2)
    np.save(tmp_path / "hidden.npy", HIDDEN)
    stored = {"hidden": np.load(tmp_path / "hidden.npy", mmap_mode="r")}
    found = ReadoutPredictive(make(), stored, (x, y)).joint_log_density(x_new, y_new)
    np.testing.assert_allclose(found, dense_joint_log_density(x, y, x_new, y_new, 0.3, 0.3), rtol=1e-4)
    predictive = ReadoutPredictive(make(), {"hidden": HIDDEN}, (x, y))
    np.testing.assert_allclose(jax.jit(predictive.joint_log_density)(x_new, y_new), found, rtol=1e-4)


def test_all_rows_together_must_be_observed():
    (x, y), (x_new, y_new) = data(8), data(6, seed=2)
    predictive = ReadoutPredictive(make(), {"hidden": HIDDEN}, (x, y))
    with pytest.raises(ValueError, match="must not contain NaN"):
        predictive.joint_log_density(x_new, np.where(y_new > 0, np.nan, y_new))
    with pytest.raises(ValueError, match="is not observed"):
        predictive.joint_log_density(x_new)
    for far in (1e30, np.inf):
        assert predictive.joint_log_density(x_new, np.full(6, far)) == -np.inf


@pytest.mark.slow
def test_all_rows_together_are_right_where_evidences_have_no_digits_left():
    """Of 1000 rows and a noise of 0.03 in float32, the difference of two evidences is wrong by 0.3."""
    rng = np.random.default_rng(0)
    x, hidden = rng.normal(size=(1000, 2)), rng.normal(size=(1, 2, 7))
    w = rng.normal(size=7)
    y = x[:, 0] + np.tanh(x @ hidden[0]) @ w + 0.03 * rng.normal(size=1000)
    predictive = ReadoutPredictive(make(noise=0.03), {"hidden": hidden}, (x, y))
    x_new = rng.normal(size=(3, 2))
    y_new = x_new[:, 0] + np.tanh(x_new @ hidden[0]) @ w
    one = predictive.joint_log_density(x_new[:1], y_new[:1])
    np.testing.assert_allclose(one, predictive.log_density(x_new[:1], y_new[:1])[0], atol=1e-3)
    # Given that many rows, the function is known: three rows are as one, one and one.
    together = predictive.joint_log_density(x_new, y_new)
    np.testing.assert_allclose(together, predictive.log_density(x_new, y_new).sum(), atol=0.1)


def test_all_rows_together_leave_out_draws_that_are_not_finite():
    (x, y), (x_new, y_new) = data(8), data(6, seed=2)
    lost = np.concatenate([HIDDEN, np.full_like(HIDDEN[:1], np.nan)])
    with jax.debug_nans(False), pytest.raises(FloatingPointError, match="draw 5 of 6"):
        ReadoutPredictive(make(), {"hidden": lost}, (x, y)).joint_log_density(x_new, y_new)


def test_a_latent_noise_is_that_of_each_draw():
    def model(x, y=None):
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        features = numpyro.deterministic("features", x)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, sigma).to_event(1), obs=y)

    (x, y), (x_new, y_new) = data(5), data(3, seed=2)
    sigma = np.array([0.5, 1.0, 2.0])
    predictive = ReadoutPredictive(collapse_readout(model, **SITES), {"sigma": sigma}, (x, y))
    found = predictive(jax.random.key(0), x_new)
    np.testing.assert_allclose(found["noise_scale"], np.repeat(sigma[:, None], 3, axis=1))
    by_draw = norm(found["mean"], np.sqrt(found["variance"] + sigma[:, None] ** 2)).logpdf(y_new)
    np.testing.assert_allclose(predictive.log_density(x_new, y_new), logsumexp(by_draw, axis=0) - np.log(3), rtol=1e-5)


def test_densities_that_underflow_are_zero_and_no_error():
    (x, y), (x_new, _) = data(5), data(3, seed=2)
    predictive = ReadoutPredictive(make(), {"hidden": HIDDEN}, (x, y))
    far = predictive.log_density(x_new, np.array([1e3, 1e18, 1e30]))
    assert np.isfinite(far[:2]).all() and far[1] < -1e30 and far[2] == -np.inf


@pytest.mark.fault("readout/_predictions.py", "if not new.loc.size:", "if False:")
def test_no_rows_have_the_density_one():
    (x, y), (x_new, y_new) = data(5), data(3, seed=2)
    predictive = ReadoutPredictive(make(), {"hidden": HIDDEN}, (x, y))
    assert predictive.joint_log_density(x_new[:0], y_new[:0]) == 0
    assert predictive.log_density(x_new[:0], y_new[:0]).shape == (0,)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_numpyro_s_log_likelihood_of_a_collapsed_model_is_the_joint_prior_density():
    """What the documentation warns of: one number a draw, in which the data of the fit have no part."""
    (x, y), (x_new, y_new) = data(12), data(6, seed=2)
    model = make()
    found = log_likelihood(model, {"hidden": jnp.asarray(HIDDEN)}, x_new, y_new)["y"]
    expected = [multivariate_normal(*dense_joint(hidden, x_new, 0.3)).logpdf(y_new) for hidden in HIDDEN]
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    right = ReadoutPredictive(model, {"hidden": HIDDEN}, (x, y)).log_density(x_new, y_new)
    assert found.shape == (5,) and right.shape == (6,)


def test_observations_are_where_they_belong():
    (x, y), (x_new, y_new) = data(5), data(3, seed=2)
    predictive = ReadoutPredictive(make(), {"hidden": HIDDEN}, (x, y))
    with pytest.raises(ValueError, match=r"'y' is observed with these arguments.*call without them.*log_density\("):
        predictive(jax.random.key(0), x_new, y_new)
    with pytest.raises(ValueError, match=r"'y' is not observed with these arguments; pass the observations"):
        predictive.log_density(x_new)
    for value in (np.array([0.0, np.nan, np.nan]), jnp.array([0.0, jnp.nan, jnp.nan])):
        with pytest.raises(
            ValueError, match="site 'y' must not contain NaN, but 2 of its entries do, the first in row 1"
        ):
            predictive.log_density(x_new, value)
    with pytest.raises(ValueError, match=r"observations of site 'y' have shape .2,., but its distribution has .3,."):
        predictive.log_density(x_new, y_new[:2])
    with pytest.raises(AssertionError, match="There are no rows to predict for"):
        ReadoutPredictive(in_plate, {"hidden": HIDDEN}, (x, y)).log_density(x_new[:0], y_new[:0])


def _in_plate(x, y=None):
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, 7]).to_event(2))
    features = numpyro.deterministic("features", jnp.tanh(x @ hidden))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([7]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(features @ w, 0.3), obs=y)


in_plate = collapse_readout(_in_plate, **SITES)


@parametrize("name", ["mean", "variance", "noise_scale"], rest="slow")
def test_names_of_predictions_are_not_for_the_observed_site(name):
    def model(x, y=None):
        features = numpyro.deterministic("features", x)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample(name, dist.Normal(features @ w, 0.3).to_event(1), obs=y)

    with pytest.raises(ValueError, match=f"the observed site is called '{name}', but predictions .*; rename the site"):
        ReadoutPredictive(collapse_readout(model, **SITES | {"observed": name}), {"unused": np.ones(2)}, data(5))


def with_lost_draws():
    hidden = HIDDEN.copy()
    hidden[[1, 3]] = np.nan
    (x, y), (x_new, y_new) = data(5), data(3, seed=2)
    return {"hidden": hidden}, (x, y), x_new, y_new


def test_an_error_says_which_draws_are_not_finite():
    draws, fitted_on, x_new, y_new = with_lost_draws()
    predictive = ReadoutPredictive(make(), draws, fitted_on)
    which = r"of 2 draws \(1, 3\) of 5 are not finite.*Use a larger noise, or leave these draws out"
    with pytest.raises(FloatingPointError, match="readouts " + which):
        predictive.readout(jax.random.key(0))
    with pytest.raises(FloatingPointError, match="predictions " + which):
        predictive(jax.random.key(0), x_new)
    with pytest.raises(FloatingPointError, match="predictions " + which):
        predictive.log_density(x_new, y_new)
    one = {"hidden": draws["hidden"][:3]}
    with pytest.raises(FloatingPointError, match="draw 1 of 3 are not finite: the noise is too small"):
        ReadoutPredictive(make(), one, fitted_on)(jax.random.key(0), x_new)
    many = {"hidden": np.repeat(draws["hidden"], 30, axis=0)}
    with pytest.raises(FloatingPointError, match=r"60 draws \(30, 31, .*, 49, ...\) of 150"):
        ReadoutPredictive(make(), many, fitted_on).readout(jax.random.key(0))


def test_draws_none_of_which_is_finite():
    draws, fitted_on, x_new, y_new = with_lost_draws()
    none = ReadoutPredictive(make(), {"hidden": np.full((2, 2, 7), np.nan)}, fitted_on)
    for call in (lambda: none.readout(jax.random.key(0)), lambda: none.log_density(x_new, y_new)):
        with pytest.raises(FloatingPointError, match=r"of any draw.*float64; use a larger noise\.$"):
            call()
    # Where nothing can be said, nothing is left out in silence.
    some = ReadoutPredictive(make(), draws, fitted_on)
    assert jnp.isnan(jax.jit(some.log_density)(x_new, y_new)).all()
    assert jnp.isnan(jax.jit(some.readout)(jax.random.key(0))[jnp.array([1, 3])]).all()


@pytest.mark.as_compiled
def test_predictions_and_densities_have_derivatives():
    """With respect to the new inputs, as for the steepest ascent of an acquisition function."""
    x, y = data(6)
    predictive = ReadoutPredictive(make(), {"hidden": HIDDEN.astype("f")}, (x.astype("f"), y.astype("f")))
    new = jnp.asarray(data(3, seed=2)[0], jnp.float32)

    def mean(z):
        return predictive(jax.random.key(0), z)["mean"].sum()

    def density(z):
        return predictive.log_density(z, jnp.zeros(3)).sum()

    for function in (mean, density):
        slopes = jax.grad(function)(new)
        move = jnp.zeros((3, 2)).at[1, 0].set(1e-2)
        np.testing.assert_allclose(slopes[1, 0], (function(new + move) - function(new - move)) / 2e-2, rtol=2e-2)
