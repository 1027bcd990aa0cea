"""Scales and noise by the evidence of the infinitely wide network, against NumPy, SciPy and draws of the prior."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from numpyro.handlers import seed, trace

from numpyro_wide import wide_limit
from numpyro_wide.machine import double_precision
from numpyro_wide.nn import FCN, bnn
from numpyro_wide.wide_limit import fcn_kernel, gp_log_evidence
from numpyro_wide.wide_limit._fit import Evidence
from numpyro_wide.wide_limit._scale_problem import ScaleProblem
from tests.compilations import compilations
from tests.marks import parametrize

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 2))
X_NEW = RNG.normal(size=(7, 2))
Y = np.sin(2 * X[:, 0]) + 0.1 * RNG.normal(size=40)
# Of the logarithms a priori, as documented: medians are those of FCN, 0.5 for b_std, 0.3 for the noise.
SPREADS = {"w_std": 0.5, "b_std": 0.5, "readout_w_std": 1.0, "input_scale": 1.0, "noise_scale": 1.5}


def erf_kernel(x1, x2, scales):
    """Williams (1996), one hidden layer, in NumPy."""
    x1, x2 = (x * scales.get("input_scale", 1.0) for x in (x1, x2))
    w_var, b_var = scales["w_std"][0] ** 2 / x1.shape[1], scales["b_std"] ** 2
    inner = w_var * x1 @ x2.T + b_var
    sizes = [1 + 2 * (w_var * np.sum(x**2, axis=1) + b_var) for x in (x1, x2)]
    return scales["readout_w_std"] ** 2 * 2 / np.pi * np.arcsin(2 * inner / np.sqrt(np.outer(*sizes)))


def log_evidence(scales, noise_scale):
    covariance = erf_kernel(X, X, scales) + noise_scale**2 * np.eye(len(X))
    return scipy.stats.multivariate_normal(np.zeros(len(X)), covariance).logpdf(Y)


@pytest.fixture(scope="module")
def found():
    return wide_limit.fit(X, Y, input_scale=True, num_restarts=2, num_rows=30)


@pytest.mark.fault("_checks.py", "1e-12 * np.abs(values).max(axis=0)", "0.0")
def test_a_constant_column_is_no_matter_whether_its_deviation_rounds_to_zero():
    """That of 0.1 is 1e-17: its scale was a median of 1e16, and all other columns were lost."""
    inputs = [np.column_stack([X, np.full(40, constant)]) for constant in (0.1, 0.5)]
    assert inputs[0].std(axis=0)[2] > 0 == inputs[1].std(axis=0)[2]
    problems = [ScaleProblem.of("erf", 1, x, 1.0, by_input=True, has_noise=True) for x in inputs]
    np.testing.assert_allclose(*(problem.medians["input_scale"] for problem in problems))
    raced = wide_limit.fit(inputs[0], Y, structure="auto", num_restarts=1, num_rows=20)
    assert {row["structure"] for row in raced.table} == {"dense"}


def moved(found, name, index, step):
    """Scales and noise with one logarithm moved, and the log prior of all."""
    scales = {**found.scales, "noise_scale": found.noise_scale}
    scales[name] = np.array(scales[name], float)
    scales[name][index if scales[name].ndim else ()] *= np.exp(step)
    behind = FCN(1, 1, "erf").scales()["readout_w_std"]
    size = np.sqrt(np.mean(Y**2))
    medians = {"w_std": 1.0, "b_std": 0.5, "readout_w_std": size * behind, "noise_scale": 0.3 * size}
    medians["input_scale"] = 1 / X.std(axis=0)
    prior = sum(-0.5 * np.sum((np.log(scales[key] / medians[key]) / spread) ** 2) for key, spread in SPREADS.items())
    noise_scale = float(scales.pop("noise_scale"))
    return log_evidence(scales, noise_scale) + prior


def test_the_evidence_is_that_of_the_fitted_kernel(found):
    np.testing.assert_allclose(found.log_evidence, log_evidence(found.scales, found.noise_scale), rtol=1e-9)
    nngp, _ = fcn_kernel(found.depth, found.activation, **found.scales)(X)
    np.testing.assert_allclose(nngp, erf_kernel(X, X, found.scales), rtol=1e-4, atol=1e-5)


@pytest.mark.fault("wide_limit/_scale_problem.py", "*products.shape[: 1 if x2 is None else 2]", "products.shape[0]")
@parametrize("sizes", [(1, 1), (128, 3), (300, 130)], ids=str, rest="slow")
@parametrize(("activation", "depth"), [("erf", 1), ("relu", 3), ("tanh", 2)], rest="slow")
def test_kernels_by_tiles_are_those_of_the_network(found, activation, depth, sizes, x64):
    scales = {**found.scales, "w_std": np.linspace(0.5, 1.0, depth)}
    other = replace(found, activation=activation, depth=depth, scales=scales)
    x1, x2 = (RNG.normal(size=(size, 2)) for size in sizes)
    kernel = fcn_kernel(depth, activation, **scales)
    np.testing.assert_allclose(other.nngp(x1), kernel(x1)[0], rtol=1e-10)
    np.testing.assert_allclose(other.nngp(x1, x2), kernel(x1, x2)[0], rtol=1e-10)


def test_kernels_of_single_precision_inputs_are_in_double(found):
    by_column = {**found.scales, "input_scale": np.ones(2)}
    for scales in (found.scales, by_column, {**found.scales, "input_scale": np.array(1.0)}):
        other, single = replace(found, scales=scales), X.astype("f")
        np.testing.assert_array_equal(other.nngp(single), other.nngp(single.astype(float)))


def test_a_series_that_leaves_out_much_is_told_with_predictions(found):
    other = replace(found, activation="tanh", scales={**found.scales, "w_std": np.array([20.0])})
    with pytest.warns(UserWarning, match="Hermite series leaves out"):
        other.nngp(X, X_NEW)


PLACES = [("w_std", 0), ("b_std", 0), ("readout_w_std", 0), ("noise_scale", 0), ("input_scale", 0), ("input_scale", 1)]


@pytest.mark.fault(
    "wide_limit/_scale_problem.py",
    "problem.prior(logarithms) - value, logarithms / problem.spreads**2 - pulled",
    "-value, -pulled",
)
@pytest.mark.fault("wide_limit/_gp.py", "return 0.5 * (self.weights @", "return 0.4 * (self.weights @")
@pytest.mark.parametrize(("name", "index"), PLACES)
def test_it_is_at_the_mode(found, name, index):
    at, step = moved(found, name, index, 0.0), 0.05
    assert moved(found, name, index, step) < at and moved(found, name, index, -step) < at


def test_standard_errors_are_those_of_the_curvature(found):
    # The inverse of the matrix of second differences, taken in NumPy.
    step, size = 1e-3, len(PLACES)
    hessian = np.zeros((size, size))

    def at(*moves):
        scales = dict(found.scales)
        changed = replace(found, scales={name: np.array(value, float) for name, value in scales.items()})
        noise = found.noise_scale
        for (name, index), by in moves[:-1]:
            if name == "noise_scale":
                noise = noise * np.exp(by)
            else:
                changed.scales[name][index if changed.scales[name].ndim else ()] *= np.exp(by)
        (name, index), by = moves[-1]
        return moved(replace(changed, noise_scale=noise), name, index, by)

    for i, one in enumerate(PLACES):
        for j, other in enumerate(PLACES):
            corners = [a * b * at((one, a * step), (other, b * step)) for a in (1, -1) for b in (1, -1)]
            hessian[i, j] = -sum(corners) / (4 * step**2)
    errors = np.sqrt(np.diagonal(np.linalg.inv(hessian)))
    actual = [np.ravel(found.standard_errors[name])[index] for name, index in PLACES]
    np.testing.assert_allclose(actual, errors, rtol=0.02)


@pytest.mark.fault("wide_limit/_limit.py", "columns, self.noise_scale**2)]", "columns, self.noise_scale**2 / 2)]")
@pytest.mark.fault("wide_limit/_limit.py", "(fit.noise_scale**2 if with_noise else 0.0)", "0.0")
def test_predictions_are_the_dense_posterior(found):
    mean, variance = found.predict(X_NEW)
    cross = erf_kernel(X_NEW, X, found.scales)
    gram = erf_kernel(X, X, found.scales) + found.noise_scale**2 * np.eye(len(X))
    np.testing.assert_allclose(mean, cross @ np.linalg.solve(gram, Y), rtol=1e-6, atol=1e-8)
    covariance = erf_kernel(X_NEW, X_NEW, found.scales) - cross @ np.linalg.solve(gram, cross.T)
    np.testing.assert_allclose(variance, np.diagonal(covariance), rtol=1e-5, atol=1e-9)
    _, of_observations = found.predict(X_NEW, with_noise=True)
    np.testing.assert_allclose(of_observations, np.diagonal(covariance) + found.noise_scale**2, rtol=1e-5)


@pytest.mark.as_compiled
@pytest.mark.fault("wide_limit/_scale_problem.py", "self.known_noise or 0.0", "0.0")
@pytest.mark.parametrize("structure", ["dense", "additive"])
def test_a_noise_that_is_known_is_not_fitted(structure):
    options = {"structure": structure, "num_restarts": 1, "num_rows": 40, "progress_bar": False}
    fit = wide_limit.fit(X, Y, noise_scale=0.05, scales="integrated", **options)
    assert fit.noise_scale == 0.05 and "noise_scale" not in fit.standard_errors
    assert {draw.noise_scale for draw in fit.draws} == {0.05}
    at_mode = replace(fit, draws=())
    with double_precision():
        expected = gp_log_evidence(jnp.asarray(at_mode.nngp(X)), Y, 0.05)
    np.testing.assert_allclose(fit.log_evidence, expected, rtol=1e-6)
    # Scales for a noise that is twice as large as the data's are not the best ones.
    other = wide_limit.fit(X, Y, noise_scale=0.2, **options)
    with double_precision():
        assert fit.log_evidence > gp_log_evidence(jnp.asarray(other.nngp(X)), Y, 0.05)
    _, variance = at_mode.predict(X_NEW)
    np.testing.assert_allclose(at_mode.predict(X_NEW, with_noise=True)[1] - variance, 0.05**2, rtol=1e-6)


@pytest.mark.slow
def test_the_noise_of_simulated_data_is_found():
    # A draw of the process itself: log noise within three of its standard errors.
    truth = {"w_std": [1.0], "b_std": 0.5, "readout_w_std": 1.3}
    x = RNG.normal(size=(120, 2))
    covariance = erf_kernel(x, x, truth) + 0.2**2 * np.eye(len(x))
    y = np.linalg.cholesky(covariance) @ RNG.normal(size=(len(x), 2))
    fit = wide_limit.fit(x, y, num_restarts=1)
    assert abs(np.log(fit.noise_scale / 0.2)) < 3 * fit.standard_errors["noise_scale"] < 0.5


def test_architectures_are_compared_and_the_best_is_first():
    fit = wide_limit.fit(X, Y, activation=("erf", "identity"), depth=(1, 2), num_restarts=1)
    assert len(fit.table) == 4
    marginals = [row["log_marginal"] for row in fit.table]
    assert marginals == sorted(marginals, reverse=True)
    best = fit.table[0]
    assert (fit.activation, fit.depth) == (best["activation"], best["depth"])
    assert fit.activation == "erf"
    assert fit.table[0]["log_evidence"] == fit.log_evidence
    lines = str(fit).splitlines()
    assert len(lines) == 6 and f"readout_w_std {fit.scales['readout_w_std']:.3g}" in lines[-1]


@pytest.mark.fault("wide_limit/_fit.py", "structures, activations, by_column", "structures, activations, by_column[:1]")
@pytest.mark.slow
def test_scales_of_the_inputs_are_compared_with_none():
    # Of four columns one matters, or all do alike: columns' own scales pay in the first case alone.
    x = np.random.default_rng(3).normal(size=(50, 4))
    for y, pays in ((np.sin(3 * x[:, 0]), True), (np.sin(x.sum(axis=1) / 2), False)):
        y = y + 0.1 * np.random.default_rng(4).normal(size=50)
        fit = wide_limit.fit(x, y, input_scale=(False, True), num_restarts=1)
        assert [row["input_scale"] for row in fit.table] == [pays, not pays]
        assert ("input_scale" in fit.scales) == pays
        assert fit.table[0]["log_marginal"] > fit.table[1]["log_marginal"] + 1
        alone = wide_limit.fit(x, y, input_scale=pays, num_restarts=1)
        np.testing.assert_allclose(fit.table[0]["log_marginal"], alone.table[0]["log_marginal"], rtol=1e-6)
        assert ("by column" in str(fit).splitlines()[1]) == pays


@pytest.mark.as_compiled
def test_one_layer_is_compiled_for_all_depths_and_data():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 6)), rng.normal(size=20)
    # A function of its own is an activation that no other test has compiled.
    sizes = {"num_restarts": 1, "activation": lambda u: jnp.sin(u)}
    with compilations() as first:
        found = wide_limit.fit(x, y, input_scale=True, **sizes)
    with compilations() as second:
        other = wide_limit.fit(2 * x[::-1], 30 * y, input_scale=True, **sizes)
        wide_limit.fit(x[:15, :3], y[:15], depth=3, **sizes)
    assert first and not second
    assert other.noise_scale > 5 * found.noise_scale  # of the new data and not the old


@pytest.mark.slow
def test_copied_rows_that_pass_for_no_noise_are_told(recwarn):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)), rng.normal(size=30)

    def fit(x, y):
        return wide_limit.fit(x, y, input_scale=True, num_restarts=1)

    assert fit(x, y).noise_scale > 0.3
    assert fit(np.tile(x, (2, 1)), np.append(y, rng.normal(size=30))).noise_scale > 0.3  # measured twice
    assert not recwarn
    with pytest.warns(UserWarning, match=r"30 of 60 rows repeat.*fitted noise, .* is small.*fit to distinct rows"):
        assert fit(np.tile(x, (2, 1)), np.tile(y, 2)).noise_scale < 0.1


@pytest.mark.slow
def test_an_outlier_that_takes_the_fit_along_is_told():
    for far in (1e6, -30.0):
        y = Y.copy()
        y[7] = far
        with pytest.warns(UserWarning, match=r"1 of 40 rows, row 7 with the target .*, lie .* decided by them"):
            assert wide_limit.fit(X, y, num_restarts=1).noise_scale > 3
    # In one of two outputs.
    with pytest.warns(UserWarning, match="row 7 with the target -30"):
        wide_limit.fit(X, np.stack([Y, y], axis=1), num_restarts=1)


@pytest.mark.fault("wide_limit/_fit.py", "max(1, len(residuals) // _ONE_OF)", "1")
def test_two_outliers_do_not_hide_each_other():
    x, y = np.tile(X, (3, 1)) + 0.1 * RNG.normal(size=(120, 2)), np.tile(Y, 3)
    y[[3, 70]] = 1e6
    with pytest.warns(UserWarning, match="2 of 120 rows, row (3|70) with the target 1e"):
        wide_limit.fit(x, y, num_restarts=1)


def skewed(rng):
    return np.exp(rng.normal(size=60))


def step(rng):
    return np.where(np.arange(60) < 7, 1.0, 0.0)


def heavy(rng):
    return rng.standard_t(3, size=60)


@parametrize("draw", [skewed, step, heavy], rest="slow")
def test_targets_that_are_only_skewed_or_heavy_raise_no_alarm(draw):
    """Warnings are errors here; tables of the UCI archive stay further from the bounds."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(60, 2))
    for _ in range(3):
        wide_limit.fit(x, draw(rng), num_restarts=1)


@pytest.mark.fault("wide_limit/_fit.py", "np.array(x, float), np.array(y,", "np.asarray(x, float), np.asarray(y,")
def test_predictions_stay_when_the_arrays_of_the_fit_are_changed():
    x, y = X[:12].copy(), Y[:12].copy()
    fit = wide_limit.fit(x, y, num_restarts=1)
    before = fit.predict(X_NEW)
    x *= 5
    y *= 5
    np.testing.assert_array_equal(fit.predict(X_NEW), before)


@pytest.mark.slow
def test_no_scale_runs_away():
    """A step function of a skewed input, on which evidence alone takes the biases to hundreds."""
    x = np.exp(2 * RNG.normal(size=(60, 1)))
    fit = wide_limit.fit(x, np.where(x[:, 0] > 1, 1.0, -1.0), input_scale=True, num_restarts=2)
    for name, median in {"b_std": 0.5, "w_std": 1.0}.items():
        assert np.all(np.abs(np.log(np.asarray(fit.scales[name]) / median)) < 4 * SPREADS[name] + 1e-6)


@pytest.mark.fault("wide_limit/_scale_problem.py", "1 if rows == columns else 2", "1 if rows == columns else 1")
@pytest.mark.fault("wide_limit/_scale_problem.py", "by_product[rows, rows] += np.diag(square1)", "pass")
def test_value_and_gradient_by_tiles():
    """Of more rows than a tile has, two outputs, each column's scale its own; by NumPy's kernel, and differences."""
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(150, 3)), rng.normal(size=(150, 2))
    with double_precision():
        objective = Evidence(ScaleProblem.of("erf", 1, x, 1.0, True, True), y)
        at = 0.3 * rng.normal(size=7)
        value, gradient = objective(at)
        steps = 1e-5 * np.eye(7)
        differences = [(objective(at + step)[0] - objective(at - step)[0]) / 2e-5 for step in steps]
    scales = objective.problem.scales(at)
    covariance = erf_kernel(x, x, scales) + scales["noise_scale"] ** 2 * np.eye(150)
    evidence = scipy.stats.multivariate_normal(np.zeros(150), covariance).logpdf(y.T).sum()
    np.testing.assert_allclose(value, 0.5 * np.sum((at / objective.problem.spreads) ** 2) - evidence, rtol=1e-10)
    np.testing.assert_allclose(gradient, differences, rtol=1e-5, atol=1e-5)


def test_fitted_scales_go_into_a_model():
    fit = wide_limit.fit(X, Y, depth=2, input_scale=True, num_restarts=1)
    model = bnn(FCN(fit.depth, 5, fit.activation), None, fit.noise_scale, scales=fit.scales)
    sites = trace(seed(model, jax.random.key(0))).get_trace(X.astype("f"), Y.astype("f"))
    assert sites["features"]["value"].shape == (40, 5)


def test_an_evidence_that_cannot_be_had_is_minus_infinity_under_jit():
    kernel = jnp.array([[1.0, 2.0], [2.0, 1.0]])
    with jax.debug_nans(False):
        assert jax.jit(gp_log_evidence)(kernel, jnp.ones(2), 0.1) == -np.inf


@pytest.mark.as_compiled
@pytest.mark.fault("wide_limit/_scale_problem.py", "vectors * np.sqrt(share / values)", "np.eye(len(values))")
def test_few_steps_are_left_for_all_rows(monkeypatch):
    """Scales of some of the rows, and how well these know them, are where all rows begin."""
    rng, evaluations = np.random.default_rng(1), []
    x = rng.normal(size=(240, 3))
    y = np.sin(2 * x[:, 0]) + 0.3 * x[:, 1] + 0.1 * rng.normal(size=240)
    original = Evidence.__call__
    count = lambda of, logarithms: evaluations.append(len(of.targets)) or original(of, logarithms)  # noqa: E731
    monkeypatch.setattr(Evidence, "__call__", count)
    few = wide_limit.fit(x, y, input_scale=True, num_rows=80)
    num_all = evaluations.count(240)
    whole = wide_limit.fit(x, y, input_scale=True, num_rows=240)
    # One for each of the seven scales, and one, are the curvature at the end.
    assert num_all - 8 <= 12
    np.testing.assert_allclose(few.table[0]["log_marginal"], whole.table[0]["log_marginal"], atol=0.1)


def test_a_bar_tells_which_architecture_is_fitted(bars, capsys):
    x = np.linspace(-1, 1, 10)[:, None]
    options = {"depth": (1, 2), "num_restarts": 1}
    wide_limit.fit(x, np.sin(x[:, 0]), **options, progress_bar=False)
    assert capsys.readouterr().err == ""
    wide_limit.fit(x, np.sin(x[:, 0]), **options)
    shown = capsys.readouterr().err
    assert "1/2" in shown and "erf, depth 2" in shown
