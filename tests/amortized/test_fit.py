"""The call that chooses: its posteriors against closed forms, joined guides against their members."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Predictive

from numpyro_wide import AmortizedForwardKL, amortized
from numpyro_wide.amortized._fit import _with_emulated
from numpyro_wide.amortized._joined import JoinedGuides
from numpyro_wide.autoguide import AutoAmortized
from numpyro_wide.calibration import from_guide, sbc_ranks, uniformity_p_value
from numpyro_wide.nn import ResidualEncoder
from tests.amortized.cases import ENTROPY, INTERCEPT, NOISE_SCALE, SCALE, SLOPE, normal_model

KEY = jax.random.key(0)
SMALL = ResidualEncoder(width=16, depth=1)
CHEAP = {"family": "independent", "encoder": SMALL, "num_simulations": 1000, "num_steps": 4000, "progress_bar": False}
PRIOR = {"rate": dist.Gamma(3, 1), "nuisance": dist.Normal(0, 1)}


def simulator(rate, nuisance):
    """Make three counts; its generator is its own."""
    return np.random.default_rng(int(1e6 * abs(nuisance))).poisson(rate, size=3)


@pytest.fixture(scope="module")
def counted():
    options = CHEAP | {"num_simulations": 8000, "num_steps": 8000}
    return amortized.fit(KEY, PRIOR, observed="y", sites=["rate"], simulator=simulator, **options)


@pytest.mark.as_compiled
@pytest.mark.fault("amortized/_fit.py", "[: _NUM_KEPT if cycle == 1 else 1]", "")
def test_the_posterior_of_a_conjugate_model_and_the_same_bits_for_the_same_key():
    first, again = (amortized.fit(KEY, normal_model, observed="x", **CHEAP) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first.params, again.params)
    draws = first.sample(jax.random.key(1), {"x": jnp.asarray(1.5)}, 5000)["theta"]
    np.testing.assert_allclose(draws.mean(), SLOPE * 1.5 + INTERCEPT, atol=0.05)
    np.testing.assert_allclose(draws.std(), SCALE, rtol=0.1)
    # A hundred held-out simulations have the entropy with a standard error of 0.07.
    report = first.report
    assert report.held_out == pytest.approx(ENTROPY, abs=0.2) and len(first.held_out["x"]) == 100
    losses, num_steps = zip(*((trial["held_out"], trial["num_steps"]) for trial in report.trials), strict=True)
    assert list(losses) == sorted(losses) and report.held_out <= losses[0] + 1e-6
    # Cycles of 72, 144, 288 and 576 steps: three settings go on, and then one of these.
    assert sorted(num_steps)[:2] == [216, 216] and sorted(num_steps)[2] in (216, 504, 1080)
    assert {trial["weight_decay"] for trial in report.trials} == {1.0, 10.0, 100.0}  # of 1000 simulations


@pytest.mark.slow
@pytest.mark.fault(
    "amortized/_fit.py",
    "ranking = run(further(ranking[0]), first_steps)",
    "ranking = run(further(first[0]), first_steps)",
)
def test_the_family_is_chosen_by_held_out_loss():
    """Of a square with noise only the size of the root is learnt: normals cannot have both signs."""

    def square():
        theta = numpyro.sample("theta", dist.Uniform(-1, 1))
        numpyro.sample("x", dist.Normal(theta**2, 0.05))

    options = {name: value for name, value in CHEAP.items() if name != "family"}
    fit = amortized.fit(KEY, square, observed="x", **options)
    assert {trial["family"] for trial in fit.report.trials} >= {"normal", "independent", "mixture"}
    best = fit.report.trials[0]
    assert best["family"] in ("mixture", "flow") and fit.guide.family == best["family"]
    # Further settings are of the best family alone.
    assert sum(trial["family"] == "normal" for trial in fit.report.trials) == 1
    theta = fit.sample(jax.random.key(1), {"x": jnp.asarray(0.5)}, 2000)["theta"]
    assert abs(np.mean(theta > 0) - 0.5) < 0.15
    np.testing.assert_allclose(np.abs(theta).mean(), 0.5**0.5, atol=0.05)


@pytest.mark.as_compiled
def test_a_simulator_in_python(counted):
    """Priors as distributions, and a function: the posterior is Gamma(3 + sum, 1 + 3)."""
    data = {"y": np.array([4, 2, 6])}
    rate = counted.sample(jax.random.key(1), data, 5000)["rate"]
    np.testing.assert_allclose(rate.mean(), 15 / 4, rtol=0.05)
    # The nearest log-normal's is 3 % larger.
    np.testing.assert_allclose(rate.std(), 15**0.5 / 4, rtol=0.1)
    prior, given = counted.guide.model, counted.held_out
    calibrated = from_guide(KEY, prior, counted.guide, counted.params, observed="y", simulations=given)
    assert calibrated.num_simulations == 500  # of 800
    np.testing.assert_array_equal(calibrated.truth["rate"], given["rate"][:500])
    assert uniformity_p_value(sbc_ranks(calibrated)["rate"], 99) > 0.01
    assert counted.guide.typicality(KEY, counted.params, data, simulations=given).p_value > 0.01

    def replicate(rate):
        return {"y": np.random.default_rng(int(1e5 * rate)).poisson(rate, size=3)}

    trainer = AmortizedForwardKL(prior, counted.guide, optax.sgd(0.1), observed="y")
    again = trainer.posterior_predictive(KEY, 2000, counted.params, data, simulator=replicate)
    assert again["y"].shape == (2000, 3)
    np.testing.assert_allclose(again["y"].mean(), again["rate"].mean(), rtol=0.05)
    np.testing.assert_allclose(again["y"].var(), again["rate"].mean() + again["rate"].var(), rtol=0.15)


@pytest.fixture(scope="module")
def members():
    """Two guides of one architecture, whose heads are not alike."""

    def model():
        a = numpyro.sample("a", dist.LogNormal(0.3, 0.5))
        b = numpyro.sample("b", dist.Uniform(-1.0, 2.0).expand([2]).to_event(1))
        numpyro.sample("x", dist.Normal(a + b, 0.5).to_event(1))

    guide = AutoAmortized(model, observed="x", encoder=SMALL)
    trainer = AmortizedForwardKL(model, guide, optax.sgd(1e-9), observed="x")
    first, second = (trainer.get_params(trainer.init(jax.random.key(seed))) for seed in range(2))
    keys = jax.random.split(KEY, 2)
    for params, key, offset in ((first, keys[0], -1.0), (second, keys[1], 1.0)):
        head = params["auto_head"]
        kernel = 0.05 * jax.random.normal(key, head["kernel"].shape)
        params["auto_head"] = {"kernel": kernel, "bias": head["bias"].at[1:4].add(offset)}
    return model, guide, trainer, [first, second]


@pytest.mark.as_compiled
@pytest.mark.fault(
    "amortized/_joined.py", "return logsumexp(log_probs) - jnp.log(len(log_probs))", "return logsumexp(log_probs)"
)
@pytest.mark.fault("amortized/_joined.py", "random.randint(member_key, (), 0, len(jax.tree.leaves(members)[0]))", "0")
def test_a_mixture_of_guides_has_the_mean_of_their_densities(members):
    model, guide, trainer, params = members
    mixture = JoinedGuides(guide, is_mean=False)
    joined = mixture.join(params)
    draws = trainer.simulate(KEY, 50)
    expected = np.logaddexp(*(np.asarray(trainer.guide_log_prob(each, draws)) for each in params)) - np.log(2)
    of_mixture = AmortizedForwardKL(model, mixture, optax.sgd(0.1), observed="x")
    np.testing.assert_allclose(of_mixture.guide_log_prob(joined, draws), expected, rtol=1e-4, atol=1e-4)
    # Half of the draws are of either: those of one lie below, those of the other above.
    data = {"x": jnp.array([1.0, 1.5])}
    ask = lambda guide, params: Predictive(guide, params=params, num_samples=4000)(KEY, data)["a"]  # noqa: E731
    of_members = np.concatenate([ask(guide, each) for each in params])
    drawn = ask(mixture, joined)
    for level in (0.1, 0.4, 0.8):
        assert np.mean(drawn < np.quantile(of_members, level)) == pytest.approx(level, abs=0.03)


@pytest.mark.as_compiled
@pytest.mark.fault("amortized/_joined.py", 'head["kernel"]) / len(by_member)', 'head["kernel"])')
def test_the_mean_of_guides_with_one_encoder_has_the_mean_of_their_heads(members):
    model, guide, trainer, (first, second) = members
    second = second | {"auto_encoder": first["auto_encoder"]}
    head = jax.tree.map(lambda *leaves: sum(leaves) / 2, first["auto_head"], second["auto_head"])
    mean = JoinedGuides(guide, is_mean=True)
    draws = trainer.simulate(KEY, 50)
    of_mean = AmortizedForwardKL(model, mean, optax.sgd(0.1), observed="x")
    found = of_mean.guide_log_prob(mean.join([first, second]), draws)
    np.testing.assert_allclose(found, trainer.guide_log_prob(first | {"auto_head": head}, draws), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_an_emulator_draws_as_the_simulator_does():
    """Pairs by a network have the model's own noise, and those that are held out come last, untouched."""
    draws = {name: np.asarray(v) for name, v in Predictive(normal_model, num_samples=1500)(KEY).items()}
    guide = AutoAmortized(normal_model, observed="x")
    both = _with_emulated(KEY, guide, (), draws, 150, 1500)
    np.testing.assert_array_equal(both["x"][-1500:], draws["x"])
    emulated = {name: values[:-1500] for name, values in both.items()}
    assert 40_000 < len(emulated["x"]) <= 45_000  # but for what lies beyond all simulations
    residual = emulated["x"] - emulated["theta"]
    assert residual.std() == pytest.approx(NOISE_SCALE, rel=0.1) and abs(residual.mean()) < 0.05
    assert abs(np.corrcoef(residual, emulated["theta"])[0, 1]) < 0.1


@pytest.mark.as_compiled
@pytest.mark.fault("amortized/_training_data.py", "_rows_of(finite_draws, is_kept)", "finite_draws")
@pytest.mark.fault("amortized/_guide.py", "_moments(values[np.isfinite(values).all(axis=1)])", "_moments(values)")
@pytest.mark.fault("amortized/_fit.py", "check_finite(f", "str(f")
def test_simulations_at_an_end_of_the_support_are_left_out():
    """Of a rate that is rounded to zero the logarithm is infinite."""
    rng = np.random.default_rng(0)
    rate = rng.gamma(3.0, size=2000)
    rate[::40] = 0.0
    simulations = {"rate": rate, "y": rng.poisson(rate[:, None], size=(2000, 3))}
    options = CHEAP | {"num_steps": 800, "sites": ["rate"], "simulations": simulations}
    with pytest.warns(UserWarning, match="50 of 2000 simulations hold a latent at an end of its support") as caught:
        fit = amortized.fit(KEY, PRIOR, observed="y", **options)
    assert caught[0].filename == __file__ and len(fit.held_out["y"]) == 195
    loc = fit.guide.standardisation(simulations)["auto_constants"]["latents"]["rate"]["loc"]
    np.testing.assert_allclose(loc, np.log(rate[rate > 0]).mean(), rtol=1e-4)
    rate = fit.sample(KEY, {"y": np.array([4, 2, 6])}, 2000)["rate"]
    np.testing.assert_allclose(rate.mean(), 15 / 4, rtol=0.1)  # of Gamma(3 + 12, 1 + 3)
    for value, message in ((np.nan, "must not contain NaN"), (np.inf, "must be finite")):
        with pytest.raises(ValueError, match=rf"observed_values\['y'\] {message}"):
            fit.sample(KEY, {"y": np.array([4, value, 6])})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rng_key": 3}, TypeError, r"must be a PRNG key.*\(rng_key, model"),
        ({"family": "gaussian"}, ValueError, "family must be one of"),
        ({"observed": "y"}, ValueError, "observed names the .* 'y', which the model does not have"),
        ({"num_steps": 100}, ValueError, "num_steps must be a whole number of at least 408, but got 100"),
        ({"num_simulations": 5}, ValueError, "num_simulations must be a whole number of at least 20"),
        (
            {"simulations": {"theta": np.ones(4), "x": np.ones(4)}},
            ValueError,
            "fit needs 20 simulations, but got 4 to train on",
        ),
        ({"simulator": lambda theta: {"z": theta}}, ValueError, "simulator returns must be .*site 'x', but got 'z'"),
        (
            {"simulations": {"a": np.ones(50), "x": np.ones(50)}, "model": {"a": dist.Normal(), "b": dist.Normal()}},
            ValueError,
            r"latent site 'b', but got 'a', 'x'. Where others are nuisances, pass the guide sites=\['a'\]",
        ),
    ],
)
def test_mistakes(change, error, message):
    arguments = {"rng_key": KEY, "model": normal_model, "observed": "x", **CHEAP, **change}
    with pytest.raises(error, match=message):
        amortized.fit(arguments.pop("rng_key"), arguments.pop("model"), **arguments)
