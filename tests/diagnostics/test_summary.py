"""Summaries of runs: the same numbers as ArviZ's and NumPy's on the same arrays, for every form of the model."""

from types import SimpleNamespace

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import block
from numpyro.infer import MCMC, NUTS
from scipy.signal import lfilter

from numpyro_wide import ReadoutPredictive, collapse_readout, repriorise, surrogate_targets
from numpyro_wide.diagnostics import summary, to_arviz
from numpyro_wide.linear_gaussian import ReadoutProblem
from numpyro_wide.mcmc import PreconditionedCrankNicolson, UnderdampedLangevin
from tests.conftest import enable_x64
from tests.marks import parametrize
from tests.models import small_data

KEY = jax.random.key(0)
X, Y = small_data(8)
Y = np.concatenate([Y, Y**2 - 1], axis=1)
WIDTH = 4


def network(x, y=None):
    """Two outputs, a noise with a coordinate of its own, a site of three numbers."""
    base = numpyro.sample("sigma_base", dist.Normal(0, 1))
    sigma = numpyro.deterministic("sigma", jnp.exp(0.5 * base - 1))
    slopes = numpyro.sample("slopes", dist.Normal(0, 0.1).expand([3]).to_event(1))
    extra = numpyro.sample("extra", dist.HalfNormal(0.1))
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, WIDTH]).to_event(2))
    features = numpyro.deterministic("features", jnp.tanh(3 * x @ hidden))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([WIDTH, 2]).to_event(2))
    offset = slopes.sum() * x + extra
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(features @ w + offset, sigma).to_event(1), obs=y)


COLLAPSED = collapse_readout(network, readout="w", features="features", observed="y")
REPRIORISED = repriorise(network, readout="w", features="features", targets="y", noise_scale="sigma")
OPTIONS = {"num_warmup": 40, "num_samples": 30, "num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
SCALARS = ["sigma", "slopes[0]", "slopes[1]", "slopes[2]", "extra"]


def run(kernel, *fields, **options):
    mcmc = MCMC(kernel, **OPTIONS | options)
    mcmc.run(KEY, X, Y, extra_fields=fields)
    return mcmc


@pytest.fixture(scope="module")
def collapsed():
    return run(PreconditionedCrankNicolson(COLLAPSED), "num_grad", "accept_prob")


@pytest.fixture(scope="module")
def repriorised():
    return run(NUTS(REPRIORISED, max_tree_depth=3), "num_steps", "accept_prob", "adapt_state.step_size")


def of_arviz(values):
    """R-hat and effective sample size of (chain, draw, entry), by ArviZ."""
    data = {"x": np.asarray(values, float)}
    return np.asarray(az.rhat(data)["x"]), np.asarray(az.ess(data)["x"])


def function_of(model, mcmc):
    mean = ReadoutPredictive(model, mcmc.get_samples(), (X, Y))(KEY, X)["mean"]
    return np.asarray(mean).reshape(2, 30, -1)


@pytest.mark.as_compiled
@pytest.mark.fault("diagnostics/_summary.py", "jnp.ravel(fit.loc + mean)", "jnp.ravel(mean)")
@parametrize("form", ["collapsed", "repriorised"], rest="slow")
def test_the_function_is_that_with_the_readout_integrated_out(form, request):
    mcmc, model = request.getfixturevalue(form), {"collapsed": COLLAPSED, "repriorised": REPRIORISED}[form]
    found = summary(mcmc, model, X, Y).function
    values = function_of(model, mcmc)
    rhat, ess = of_arviz(values)
    assert found.is_integrated and found.rhat.shape == (16,)
    np.testing.assert_allclose(found.rhat, rhat, rtol=1e-3)
    np.testing.assert_allclose(found.ess, ess, rtol=0.2)  # NumPyro's sum ends elsewhere, which few draws feel
    distinct = [1 + (np.ptp(np.stack([chain[1:], chain[:-1]]), axis=0) > 0).any(1).sum() for chain in values]
    assert found.num_distinct.tolist() == distinct


@pytest.mark.as_compiled
@parametrize("form", ["collapsed", "repriorised"], rest="slow")
def test_scalar_sites_one_by_one(form, request):
    mcmc, model = request.getfixturevalue(form), {"collapsed": COLLAPSED, "repriorised": REPRIORISED}[form]
    found = summary(mcmc, model, X, Y, quantiles=(0.1, 0.5)).sites
    # The coordinate is left out beside its image, and so are the weights that fit into a table.
    assert sorted(set(found) - {f"hidden[0, {i}]" for i in range(WIDTH)}) == sorted(
        SCALARS + ([f"w[{i}, {j}]" for i in range(WIDTH) for j in range(2)] if form == "repriorised" else [])
    )
    draws = mcmc.get_samples(group_by_chain=True)
    for name, values in {"sigma": draws["sigma"], "slopes[1]": draws["slopes"][..., 1]}.items():
        values, site = np.asarray(values, float), found[name]
        rhat, ess = of_arviz(values[..., None])
        np.testing.assert_allclose(site.rhat, rhat[0], rtol=1e-6)
        np.testing.assert_allclose(site.ess, ess[0], rtol=0.2)
        np.testing.assert_allclose([site.mean, site.standard_deviation], [values.mean(), values.std(ddof=1)])
        assert site.quantiles == {level: np.quantile(values, level) for level in (0.1, 0.5)}


@pytest.mark.slow
def test_the_sampler_and_the_size(collapsed, repriorised):
    found, fields = summary(collapsed, COLLAPSED, X, Y), collapsed.get_extra_fields()
    assert (found.num_chains, found.num_draws, found.num_features) == (2, 30, WIDTH)
    assert found.num_parameters == 1 + 3 + 1 + 2 * WIDTH  # the readout is integrated out
    assert found.num_gradients == int(np.sum(fields["num_grad"])) and found.num_divergent is None
    assert "gradients a draw by chain: 1, 1" in str(found)
    np.testing.assert_allclose(found.accept_prob, np.mean(fields["accept_prob"]), rtol=1e-6)
    np.testing.assert_allclose(found.step_size, collapsed.last_state.step_size)
    assert found.num_nonfinite == int(np.sum(collapsed.last_state.num_nonfinite))

    found, fields = summary(repriorised, REPRIORISED, X, Y), repriorised.get_extra_fields(group_by_chain=True)
    assert found.num_gradients == int(np.sum(fields["num_steps"]))
    np.testing.assert_allclose(found.gradients_per_draw, np.mean(fields["num_steps"], axis=1))
    assert found.num_divergent == int(np.sum(fields["diverging"])) and found.num_nonfinite is None
    np.testing.assert_allclose(found.step_size, fields["adapt_state.step_size"][:, -1])
    assert found.num_parameters == 1 + 3 + 1 + WIDTH + 2 * WIDTH


@pytest.mark.slow
def test_draws_of_a_plain_model_are_judged_by_the_same_function():
    mcmc = run(NUTS(network, max_tree_depth=3))
    plain, wrapped = (summary(mcmc, model, X, Y) for model in (network, COLLAPSED))
    rhat, _ = of_arviz(function_of(COLLAPSED, mcmc))
    for found in (plain, wrapped):
        assert found.function.is_integrated and found.num_features == WIDTH
        np.testing.assert_allclose(found.function.rhat, rhat, rtol=1e-3)
    np.testing.assert_allclose(plain.accept_prob, np.mean(mcmc.last_state.mean_accept_prob))
    assert plain.num_gradients is None
    last = ", ".join(str(number) for number in mcmc.last_state.num_steps)
    assert f"gradients of the last draw by chain: {last}" in str(plain)


@pytest.mark.fault("diagnostics/_to_arviz.py", "new=start - begin", "new=0")
def test_without_recorded_features_the_function_is_that_of_the_weights():
    draws = draws_of((2, 33))  # no multiple of a block's draws
    draws["w"] = np.random.default_rng(1).normal(size=(2, 33, WIDTH, 2)).astype("f")
    model = block(network, hide=["features"])
    found = summary(stub(draws, model), model, X, Y)
    offset = draws["slopes"].sum(-1)[..., None, None] * X + draws["extra"][..., None, None]
    values = np.tanh(3 * X @ draws["hidden"]) @ draws["w"] + offset
    rhat, _ = of_arviz(values.reshape(2, 33, -1))
    assert not found.function.is_integrated and found.num_features is None and "(at all weights)" in str(found)
    np.testing.assert_allclose(found.function.rhat, rhat, rtol=1e-3)
    assert {name for name, site in found.sites.items() if not site.is_exchangeable} == {"extra"}


@pytest.mark.slow
def test_classes_are_looked_at_by_their_probabilities():
    def classifier(x, labels=None):
        hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 20]).to_event(2))
        features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / 20**0.5)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([20, 3]).to_event(2))
        numpyro.sample("label", dist.Categorical(logits=features @ w).to_event(1), obs=labels)

    labels = np.arange(8) % 3
    model = repriorise(
        classifier,
        readout="w",
        features="features",
        targets="labels",
        surrogate=lambda labels: surrogate_targets(labels, "categorical", num_classes=3),
    )
    mcmc = MCMC(PreconditionedCrankNicolson(model), **OPTIONS)
    mcmc.run(KEY, X, labels)
    found = summary(mcmc, model, X, labels)
    draws = {name: np.asarray(values) for name, values in mcmc.get_samples(group_by_chain=True).items()}
    probs = jax.nn.softmax(np.tanh(X @ draws["hidden"]) / 20**0.5 @ draws["w"], axis=-1)
    rhat, ess = of_arviz(probs.reshape(2, 30, -1))
    np.testing.assert_allclose(found.function.rhat, rhat, rtol=5e-3)
    np.testing.assert_allclose(found.function.ess, ess, rtol=0.2)
    assert not found.function.is_integrated and not found.sites and found.num_features == 20
    assert str(found).startswith("2 chains of 30 draws; 80 parameters, 20 features\nfunction at the inputs (at all")


@pytest.mark.slow
def test_one_chain_is_split_into_its_halves():
    mcmc = run(PreconditionedCrankNicolson(COLLAPSED), num_chains=1)
    found = summary(mcmc, COLLAPSED, X, Y)
    sigma = np.asarray(mcmc.get_samples()["sigma"], float)
    rhat, _ = of_arviz(np.stack([sigma[:15], sigma[15:]])[..., None])
    _, ess = of_arviz(sigma[None, :, None])
    np.testing.assert_allclose(found.sites["sigma"].rhat, rhat[0], rtol=1e-6)
    np.testing.assert_allclose(found.sites["sigma"].ess, ess[0], rtol=0.2)
    assert found.step_size.shape == (1,) and str(found).startswith("1 chain of 30 draws")


def stub(draws, model=COLLAPSED, **fields):
    """A finished run with these draws and extra fields, as far as summary looks at it."""
    return SimpleNamespace(
        sampler=SimpleNamespace(model=model),
        get_samples=lambda group_by_chain: draws,
        get_extra_fields=lambda group_by_chain: fields,
    )


def draws_of(shape, moves=True, seed=0):
    rng = np.random.default_rng(seed)
    sizes = {"sigma_base": (), "slopes": (3,), "extra": (), "hidden": (1, WIDTH)}
    draws = {name: rng.normal(size=(*shape, *size)).astype("f") for name, size in sizes.items()}
    draws["extra"] = np.abs(draws["extra"])
    return draws if moves else {name: np.repeat(value[:, :1], shape[1], axis=1) for name, value in draws.items()}


def test_chains_that_stand_still_are_told_of():
    one = {name: value[:1].repeat(2, 0) for name, value in draws_of((2, 20), moves=False).items()}
    assert "no draw moves it" in str(summary(stub(one), COLLAPSED, X, Y))
    moving, still = draws_of((2, 20)), draws_of((2, 20), moves=False)
    both = {name: np.stack([moving[name][0], still[name][1]]) for name in moving}
    assert "a chain stands still: [20, 1] distinct draws by chain" in str(summary(stub(both), COLLAPSED, X, Y))
    assert "stands still" not in str(summary(stub(moving), COLLAPSED, X, Y))


def test_forgotten_arguments_of_the_model_are_told():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'(.|\\n)*pass those of the fit"):
        summary(stub(draws_of((2, 20))), COLLAPSED)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'(.|\\n)*pass those of the fit"):
        ReadoutPredictive(COLLAPSED, draws_of((20,)))


def judged(draws, **fields):
    return summary(stub(draws, **fields), COLLAPSED, X, Y)


def numbers(found):
    """What a verdict quotes: the largest R-hat and the least ESS, of the function and the sites outside of it."""
    sites = {f"site {name!r}": (site.rhat, site.ess) for name, site in found.sites.items() if "hidden" not in name}
    entries = {"the function": (found.function.rhat.max(), found.function.ess.min())} | sites
    largest = max(entries, key=lambda name: entries[name][0])
    least = min(entries, key=lambda name: entries[name][1])
    return f"R-hat {entries[largest][0]:.3f} of {largest}, least ESS {entries[least][1]:.0f} of {least}"


def test_the_last_line_is_a_verdict():
    draws = draws_of((2, 2000))
    found = judged(draws)
    assert found.is_converged and str(found).splitlines()[-1] == found.verdict == f"converged: {numbers(found)}"
    draws["extra"][1] += 0.5  # one site of one chain
    apart = judged(draws)
    largest = of_arviz(np.asarray(draws["extra"], float)[..., None])[0][0]
    assert not apart.is_converged and largest > 1.05
    assert f"not converged: R-hat {largest:.3f} of site 'extra', run longer" in str(apart)
    assert apart.verdict in apart._repr_html_()
    assert judged(draws_of((2, 5))).verdict.startswith("convergence unknown")
    assert "several chains" in judged(draws_of((1, 2000))).verdict
    energy = np.linspace(200, 0, 400) + np.zeros((2, 1))
    drifting = judged(draws_of((2, 400)), potential_energy=energy)
    assert not drifting.is_converged and drifting.verdict == "not converged: the energy drifts, run longer"


@pytest.mark.fault("diagnostics/_summary.py", "if worst.rhat > _LARGEST_RHAT or least.ess <", "if least.ess <")
@parametrize("correlation, scale, times", [(0.75, 1.0, 5), (0.0, 1.3, 2)], rest="slow")
def test_chains_that_agree_may_be_too_short_for_intervals(correlation, scale, times):
    draws = draws_of((2, 800))
    noise = np.random.default_rng(10).normal(size=(2, 800))
    path = lfilter([1], [1, -correlation], noise, axis=1) * [[1.0], [scale]]
    draws["extra"] = np.exp(0.3 * path).astype("f")
    if correlation:
        draws = {name: values[:, :400] for name, values in draws.items()}
    found = judged(draws)
    assert found.sites["extra"].rhat > 1.01
    assert found.verdict == f"too short for intervals: {numbers(found)}, run {times} times longer"
    assert not found.is_converged


@pytest.mark.fault("diagnostics/_summary.py", "or not site.is_exchangeable", "or name")
@pytest.mark.fault("diagnostics/_to_arviz.py", "self._latent.keys() - hidden if", "set() if")
def test_units_may_trade_places_and_what_is_outside_of_the_features_may_not():
    draws = draws_of((2, 2000))
    draws["hidden"] = np.sort(draws["hidden"], axis=-1)
    draws["hidden"][1] = draws["hidden"][1, ..., ::-1]  # the same function
    traded = judged(draws)
    assert traded.sites["hidden[0, 0]"].rhat > 1.5 and traded.is_converged
    draws["slopes"][1] += np.array([5.0, -5.0, 0.0], "f")  # the same function
    assert judged(draws).verdict.startswith("not converged: R-hat 1.8")
    assert "of site 'slopes[" in judged(draws).verdict


@pytest.mark.fault("_checks.py", "num_distinct < 0.2", "num_distinct.sum() < 0.2")
@parametrize("look", [summary, to_arviz], rest="slow")
def test_chains_that_do_not_move_are_warned_of(look):
    moving, still = draws_of((2, 100)), draws_of((2, 100), moves=False)
    both = {name: np.stack([moving[name][0], still[name][1]]) for name in moving}
    with pytest.warns(RuntimeWarning, match=r"1 of 2 chains hardly move: distinct draws by chain \[100, 1\]") as told:
        look(stub(both), COLLAPSED, X, Y)
    assert [warning.filename for warning in told] == [__file__]
    for name in both:  # a fifth of the draws is distinct
        both[name][1] = moving[name][1][np.arange(100) // 5]
    look(stub(both), COLLAPSED, X, Y)


@pytest.mark.fault("diagnostics/_summary.py", "_LARGEST_DRIFT = 3.0", "_LARGEST_DRIFT = 300.0")
def test_an_energy_that_drifts_is_told():
    draws, rng = draws_of((2, 100)), np.random.default_rng(0)
    energy = rng.normal(50, 5, (2, 100))
    assert "drifts" not in str(summary(stub(draws, potential_energy=energy), COLLAPSED, X, Y))
    energy[1] -= np.linspace(0, 200, 100)
    found = summary(stub(draws, potential_energy=energy), COLLAPSED, X, Y)
    quarters = energy[1, :25], energy[1, 75:]
    np.testing.assert_allclose(found.energy_drift[1], (quarters[0].mean() - quarters[1].mean()) / quarters[1].std())
    assert "the energy drifts" in str(found) and abs(found.energy_drift[0]) < 1
    # Of a run that does not hold it, the likelihood tells.
    draws["extra"] = np.broadcast_to(np.linspace(30, 0, 100, dtype="f"), (2, 100))
    assert (summary(stub(draws), COLLAPSED, X, Y).energy_drift > 3).all()
    draws["w_base"] = np.zeros((2, 100, WIDTH, 2), "f")
    del draws["hidden"]
    assert summary(stub(draws, REPRIORISED), REPRIORISED, X, Y).energy_drift is None


@pytest.mark.slow
def test_a_start_far_away_in_single_precision_is_told():
    """The chain creeps towards a mean of 50,000 with an acceptance that looks healthy."""

    def far(y=None):
        mean = numpyro.sample("mean", dist.Normal(0, 1e5))
        scale = numpyro.sample("scale", dist.HalfNormal(3.0))
        numpyro.sample("y", dist.Normal(mean, scale).expand([20]).to_event(1), obs=y)

    y = 50_000 + np.random.default_rng(0).normal(size=20).astype("f")
    mcmc = MCMC(UnderdampedLangevin(far), num_warmup=300, num_samples=400)
    mcmc.run(KEY, y)
    found = summary(mcmc, far, y)
    assert found.accept_prob > 0.5 and found.energy_drift[0] > 3 and "the energy drifts" in str(found)


@pytest.mark.as_compiled
def test_an_energy_that_single_precision_does_not_resolve_is_told():
    energy = np.full((2, 20), 2.0**25, np.float32)
    found = summary(stub(draws_of((2, 20)), potential_energy=energy), COLLAPSED, X, Y)
    assert found.energy_error == 4 and "rounding moves the log density by about 4 nats: run in float64" in str(found)
    assert summary(stub(draws_of((2, 20)), potential_energy=energy.astype(float)), COLLAPSED, X, Y).energy_error < 1e-8


@pytest.mark.fault("diagnostics/_summary.py", "errors[:, -1]", "errors[:, 0]")
@pytest.mark.parametrize("form", ["collapsed", "repriorised"])
@pytest.mark.slow
def test_a_sampled_noise_that_single_precision_does_not_resolve_is_told(form):
    model = {"collapsed": COLLAPSED, "repriorised": REPRIORISED}[form]
    draws = draws_of((2, 20))
    draws["w_base"] = np.zeros((2, 20, WIDTH, 2), "f")
    draws["sigma_base"][:, :-1] = -18.0  # sigma is 5e-5
    fine = summary(stub(draws, model), model, X, Y)
    assert fine.evidence_error < 0.1 and "rounding" not in str(fine)
    draws["sigma_base"][1, -1] = -18.0
    lost = summary(stub(draws, model), model, X, Y)
    assert lost.evidence_error == np.inf
    assert "rounding moves the log density by more than can be told: run in float64" in str(lost)

    draws["sigma_base"][1, -1] = -9.0  # 4e-3
    felt = summary(stub(draws, model), model, X, Y).evidence_error
    last = {name: values[1, -1] for name, values in draws.items()}
    values = {}
    for dtype in ("float32", "float64"):
        features = np.tanh(3 * X.astype("f") @ last["hidden"]).astype(dtype)
        residual = Y - (last["slopes"].sum() * X + last["extra"])
        sigma = np.exp(0.5 * last["sigma_base"] - 1)
        with enable_x64(dtype == "float64"):
            problem = ReadoutProblem.of(jnp.asarray(features), jnp.asarray(residual, dtype), float(sigma))
            values[dtype] = float(problem.log_evidence())
    # An estimate, and rounding differs between processors: of one the error was 0.67 nats where 0.42 were estimated.
    assert abs(values["float32"] - values["float64"]) < 4 * felt < 4e3
    with enable_x64(True):
        exact = summary(stub({name: value.astype(float) for name, value in draws.items()}, model), model, X, Y)
    assert exact.evidence_error < 1e-4


@pytest.mark.fault("diagnostics/_summary.py", "self.function is not None and self.function.num_nonfinite:", "False:")
def test_a_function_that_single_precision_loses_has_not_converged():
    draws = draws_of((2, 20))
    draws["sigma_base"][1, 5:7] = -18.0  # sigma is 5e-5
    verdict = judged(draws).verdict
    assert verdict.startswith("not converged: the function is not finite at 2 of 40 draws, run in float64")


@parametrize("form", ["collapsed", "repriorised", "plain"], rest="slow")
def test_draws_that_were_not_stored(form):
    model = {"collapsed": COLLAPSED, "repriorised": REPRIORISED, "plain": network}[form]
    draws = draws_of((2, 20))
    draws["w" if form == "plain" else "w_base"] = np.zeros((2, 20, WIDTH, 2), "f")
    assert summary(stub(draws, model), model, X, Y).function is not None
    del draws["hidden"]
    found = summary(stub(draws, model), model, X, Y)
    assert found.function is None and "unknown, since not all latent sites are stored" in str(found)
    assert "extra" in found.sites


def test_it_fits_on_a_screen_and_into_a_notebook(collapsed):
    found = summary(collapsed, COLLAPSED, X, Y)
    lines = str(found).splitlines()
    assert len(lines) <= 20 and max(map(len, lines)) <= 120
    assert lines[1].split() == ["site", "mean", "sd", "5%", "50%", "95%", "R-hat", "ESS"]
    note = next(line for line in lines if line.startswith("function at the inputs (readout integrated out): "))
    assert f"median R-hat {np.median(found.function.rhat):.3f}, largest {found.function.rhat.max():.3f}" in note
    assert f"median ESS {np.median(found.function.ess):.0f}, least {found.function.ess.min():.0f}, of 60" in note
    assert f"gradients {found.num_gradients}" in lines[-3] and f"acceptance {found.accept_prob:.3f}" in lines[-3]
    html = found._repr_html_()
    assert "<td>sigma</td>" in html and html.count("<tr") == 1 + len(found.sites)


@pytest.mark.slow
def test_more_entries_than_are_looked_at_are_thinned():
    def line(x, y=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(slope * x, 1).to_event(1), obs=y)

    draws = {"slope": np.random.default_rng(0).normal(size=(2, 20)).astype("f")}
    x = np.linspace(1, 2, 1200, dtype="f")
    found = summary(stub(draws, line), line, x, x)
    assert found.function.rhat.shape == (500,)
    np.testing.assert_allclose(found.function.rhat, found.sites["slope"].rhat, rtol=1e-5)


def test_mistakes_are_refused(collapsed):
    with pytest.raises(TypeError, match=r"the order is summary\(mcmc, model, x, y\)"):
        summary(COLLAPSED, collapsed, X, Y)
    with pytest.raises(ValueError, match=r"quantiles must lie between 0 and 1, but got \(5, 95\)"):
        summary(collapsed, COLLAPSED, X, Y, quantiles=(5, 95))
    with pytest.raises(TypeError, match="quantiles must be numbers, such as .* but got None"):
        summary(collapsed, COLLAPSED, X, Y, quantiles=None)
    with pytest.raises(TypeError, match="rng_key must be a PRNG key"):
        summary(collapsed, COLLAPSED, X, Y, rng_key=0)
    with pytest.raises(ValueError, match=r"summary\(.*takes what mcmc.run got, but the model observes nothing"):
        summary(collapsed, COLLAPSED, X)
