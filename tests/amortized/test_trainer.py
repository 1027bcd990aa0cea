"""The trainer's protocol: steps, runs, resuming, skipping, held-out losses."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.example_libraries import optimizers

from numpyro_wide import AmortizedForwardKL
from tests.amortized.cases import (
    ENTROPY,
    INTERCEPT,
    NOISE_SCALE,
    SCALE,
    SLOPE,
    failing_model,
    linear_guide,
    normal_model,
)
from tests.marks import parametrize

KEY = jax.random.key(3)


def trainer(optim=None, model=normal_model, guide=linear_guide, **options):
    return AmortizedForwardKL(model, guide, optim or optax.adam(0.01), **{"observed": "x", "batch_size": 3, **options})


def assert_same(left, right):
    """Equal to the last bit, in structure, type and value."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        assert bool(jnp.array_equal(a, b, equal_nan=not jnp.issubdtype(a.dtype, jax.dtypes.prng_key)))


@pytest.fixture(scope="module")
def uninterrupted():
    return trainer().run(KEY, 150, progress_bar=False, held_out=50, evaluate_every=40)


@pytest.mark.as_compiled
@pytest.mark.fault("amortized/_trainer.py", "draw(state.step - state.step % length)", "draw(state.step)")
def test_run_goes_on_as_one_longer_run(uninterrupted):
    training = trainer()
    parts = [training.run(KEY, 37, progress_bar=False, held_out=50, evaluate_every=40)]
    for num_steps in (1, 70, 42):
        options = {"init_state": parts[-1].state, "held_out": 50, "evaluate_every": 40}
        parts.append(training.run(KEY, num_steps, progress_bar=False, **options))
    assert_same(parts[-1].state, uninterrupted.state)
    assert_same(jnp.concatenate([part.losses for part in parts]), uninterrupted.losses)
    assert_same(parts[-1].params, uninterrupted.params)
    # Another trainer, which has not seen the guide, goes on as well; so does one run without a look on the way.
    assert_same(
        trainer().run(KEY, 113, init_state=parts[0].state, progress_bar=False).losses, uninterrupted.losses[37:]
    )


@pytest.mark.slow
def test_a_state_on_disk_is_resumed_in_another_process(uninterrupted, tmp_path):
    first = trainer().run(KEY, 37, progress_bar=False, held_out=50, evaluate_every=40)
    path = tmp_path / "state.pickle"
    path.write_bytes(pickle.dumps(first.state))
    code = "from tests.amortized.test_trainer import resume; import sys; resume(sys.argv[1])"
    command = [sys.executable, "-W", "ignore", "-c", code, str(path)]
    finished = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    losses = [*np.asarray(first.losses).tolist(), *json.loads(finished.stdout)]
    assert losses == np.asarray(uninterrupted.losses).tolist()


def resume(path):
    """Go on from a state on disk, and print the losses of the steps that are left."""
    options = {"init_state": pickle.loads(Path(path).read_bytes()), "held_out": 50, "evaluate_every": 40}
    print(np.asarray(trainer().run(KEY, 113, progress_bar=False, **options).losses).tolist())


def test_run_is_a_loop_of_updates():
    training = trainer()
    result = training.run(KEY, 5, progress_bar=False)
    state, losses = training.init(KEY), []
    for update in (training.update, training.stable_update) * 2 + (training.update,):
        expected = training.evaluate(state)
        state, loss = update(state)
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
        losses.append(loss)
    np.testing.assert_allclose(losses, result.losses, rtol=1e-4)
    assert len(set(np.asarray(losses).tolist())) == 5  # fresh simulations at every step
    for name, value in training.get_params(state).items():
        np.testing.assert_allclose(value, result.params[name], rtol=1e-4)
    assert int(state.step) == 5


@parametrize(
    "optim", [numpyro.optim.Adam(0.05), optimizers.adam(0.05), numpyro.optim.ClippedAdam(0.05)], ids=type, rest="slow"
)
def test_optimisers_of_all_libraries_agree(optim):
    expected = trainer(optax.adam(0.05)).run(KEY, 4, progress_bar=False).params
    for name, value in trainer(optim).run(KEY, 4, progress_bar=False).params.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4)


def test_progress_bar_shows_losses_and_changes_nothing(bars, capsys, uninterrupted):
    result = trainer().run(KEY, 150, held_out=50, evaluate_every=40)
    assert_same(tuple(result), tuple(uninterrupted))
    shown = capsys.readouterr().err
    first, last = float(result.losses[0]), float(result.losses[147:150].mean())
    assert f"init loss: {first:.4f}, avg. loss [148-150]: {last:.4f}" in shown
    assert f"held-out loss: {float(result.state.held_out.losses[-1]):.4f}" in shown
    assert "150/150" in shown and "skipped" not in shown


def test_steps_that_are_not_finite_are_skipped_and_counted(bars, capsys):
    training = trainer(model=failing_model, batch_size=4)
    result = training.run(KEY, 200)
    is_skipped = np.isnan(result.losses)
    # A step is skipped with probability 1 - 0.9^4 = 0.34, and there are 200.
    assert 40 < is_skipped.sum() < 100
    assert int(result.state.num_skipped) == is_skipped.sum()
    assert f"skipped: {is_skipped.sum()}" in capsys.readouterr().err
    assert float(result.losses[is_skipped == 0][-50:].mean()) < float(result.losses[is_skipped == 0][:50].mean())

    state = training.run(KEY, int(np.flatnonzero(is_skipped)[0]), progress_bar=False).state
    new, loss = training.stable_update(state)
    assert np.isnan(loss) and int(new.num_skipped) == 1 and int(new.step) == int(state.step) + 1
    assert_same(new.optim_state, state.optim_state)
    poisoned, _ = training.update(state)
    assert np.isnan(training.get_params(poisoned)["slope"])


def test_infinite_gradient_of_a_finite_loss_is_skipped():
    def guide(observed_values):
        root = jnp.sqrt(numpyro.param("root", 0.0))  # of infinite slope where it starts
        numpyro.sample("theta", dist.Normal(root * observed_values["x"], 1.0))

    for progress_bar in (False, True):  # compiled as a whole, and in stretches
        with pytest.warns(UserWarning, match="3 of 3 steps were skipped") as caught:
            result = trainer(guide=guide).run(KEY, 3, progress_bar=progress_bar)
        assert float(result.params["root"]) == 0
        assert caught[0].filename == __file__  # the caller's line is shown


def test_held_out_loss_and_early_stopping():
    """A rate that grows until training falls apart: the best parameters are those of before."""
    rising = optax.exponential_decay(0.003, 100, 2.0)
    training = trainer(optax.adam(rising), batch_size=16)
    result = training.run(KEY, 5000, progress_bar=False, held_out=500, evaluate_every=100, patience=4)
    seen = result.state.held_out
    assert len(result.losses) == int(result.state.step) == int(seen.best_step) + 400 < 5000
    assert seen.steps.tolist() == list(range(100, len(result.losses) + 1, 100))
    assert float(seen.best_loss) == float(seen.losses.min()) < float(seen.losses[-1]) - 0.02
    assert_same(result.params, seen.best_params)
    # The loss is what fresh simulations say, within four standard errors of both.
    losses = -training.guide_log_prob(result.params, training.simulate(jax.random.key(9), 20_000))
    assert float(seen.best_loss) == pytest.approx(float(losses.mean()), abs=4 * float(losses.std()) / 500**0.5)
    assert float(losses.mean()) == pytest.approx(ENTROPY, abs=0.03)
    assert float(result.params["slope"]) == pytest.approx(SLOPE, abs=0.1)
    assert float(result.params["intercept"]) == pytest.approx(INTERCEPT, abs=0.1)
    # A stopped run stays stopped.
    again = training.run(KEY, 100, progress_bar=False, init_state=result.state, held_out=500, patience=4)
    assert len(again.losses) == 0


@pytest.mark.as_compiled
@pytest.mark.fault("amortized/_trainer.py", "best._replace(best_loss=loss)", "best._replace(best_loss=best.best_loss)")
def test_a_run_with_other_arguments_compares_by_its_own_held_out_simulations():
    """Losses of less noise are smaller: those of the run before would keep its parameters for ever."""

    def model(noise_scale):
        numpyro.sample("x", dist.Normal(numpyro.sample("theta", dist.Normal(0.0, 1.0)), noise_scale))

    training = AmortizedForwardKL(model, lambda x, _: linear_guide(x), optax.adam(0.02), observed="x", batch_size=64)
    options = {"held_out": 500, "progress_bar": False}
    precise = training.run(KEY, 400, 0.1, **options)
    result = training.run(KEY, 400, 2.0, init_state=precise.state, **options)
    seen = result.state.held_out
    assert int(seen.best_step) > 400
    assert float(seen.best_loss) > float(seen.losses[: len(precise.state.held_out.losses)].min())
    np.testing.assert_allclose(result.params["slope"], 0.2, atol=0.05)
    # The same simulations have the same loss.
    again = training.run(KEY, 1, 2.0, init_state=result.state, evaluate_every=1000, **options)
    assert float(again.state.held_out.best_loss) == float(seen.best_loss)


@pytest.mark.fault("amortized/_trainer.py", ", where=jnp.stack(is_finite).all(axis=0))", ")")
def test_held_out_simulations_that_fail_are_left_out():
    """One in ten is NaN; those that are not have the posterior's entropy as their least loss."""
    training = trainer(optax.adam(0.02), failing_model, batch_size=16)
    with pytest.warns(UserWarning, match="steps were skipped"):
        result = training.run(KEY, 600, held_out=500, progress_bar=False)
    seen = result.state.held_out
    assert np.isfinite(seen.losses).all() and int(seen.best_step) > 0
    assert float(seen.best_loss) == pytest.approx(ENTROPY, abs=0.2)


def test_without_a_finite_held_out_loss_the_last_parameters_are_returned():
    def guide(x):
        loc = numpyro.param("w", 1.0) * jnp.nan
        numpyro.sample("theta", dist.Normal(loc, 1.0, validate_args=False))

    training = trainer(guide=guide)
    result = training.run(KEY, 3, held_out=50, stable_update=False, progress_bar=False)
    assert_same(result.params, training.get_params(result.state))


@pytest.mark.slow
def test_runs_are_vectorised_over_keys():
    training = trainer()
    keys = jax.random.split(KEY, 2)
    losses = jax.vmap(lambda key: training.run(key, 70, progress_bar=False).losses)(keys)
    np.testing.assert_allclose(losses[1], training.run(keys[1], 70, progress_bar=False).losses, rtol=1e-3)


def test_initial_parameters_are_taken():
    training = trainer()
    params = {"slope": 0.4, "intercept": jnp.array(0.1), "scale": 0.6}
    state = training.init(KEY, init_params=params)
    for name, value in training.get_params(state).items():
        assert float(value) == pytest.approx(float(params[name]), rel=1e-6)


def test_arguments_that_change_are_seen():
    """Arrays are traced; other arguments make a new program."""

    def model(loc, num_draws):
        theta = numpyro.sample("theta", dist.Normal(loc, 0.1))
        numpyro.sample("x", dist.Normal(theta, 1.0).expand([num_draws]).to_event(1))

    def guide(observed_values, loc, num_draws):
        assert observed_values["x"].shape == (num_draws,)
        numpyro.sample("theta", dist.Normal(numpyro.param("loc", 0.0), 1.0))

    training = trainer(optax.sgd(0.0), model, guide)
    state = training.init(KEY, 0.0, 2)
    losses = [
        float(training.run(KEY, 2, *arguments, init_state=state, progress_bar=False).losses.mean())
        for arguments in [(jnp.array(0.0), 2), (jnp.array(3.0), 2), (np.array(5.0), 4), (np.array(7.0), 4)]
    ]
    expected = [0.919 + 0.5 * loc**2 for loc in (0, 3, 5, 7)]
    np.testing.assert_allclose(losses, expected, atol=1.0)


def test_a_second_start_compiles_nothing_unless_the_guide_is_another():
    times = []

    def guide(observed_values, upper, is_bounded):
        times.append(upper)
        support = dist.constraints.interval(-upper, upper) if is_bounded else dist.constraints.real
        numpyro.sample("theta", dist.Normal(numpyro.param("loc", 0.5, constraint=support), 1.0))

    def model(upper, is_bounded):
        normal_model()

    training, traced = trainer(optax.sgd(0.1), model, guide), []
    for arguments in [(2.0, True), (2.0, True), (3.0, True), (2.0, False)]:
        del times[:]
        result = training.run(KEY, 3, *arguments, progress_bar=False)
        traced.append(len(times))
        assert_same(result, trainer(optax.sgd(0.1), model, guide).run(KEY, 3, *arguments, progress_bar=False))
    assert traced[1] == 1 < min(traced[0], *traced[2:])  # the start itself runs the guide once


@pytest.mark.slow
def test_posterior_predictive_is_that_of_the_guide():
    params = {"slope": jnp.array(SLOPE), "intercept": jnp.array(INTERCEPT), "scale": jnp.array(SCALE)}
    training, observed = trainer(), {"x": 2.0}
    draws = training.posterior_predictive(KEY, 20_000, params, observed)
    assert set(draws) == {"theta", "x"}
    mean = SLOPE * 2 + INTERCEPT
    assert float(draws["theta"].mean()) == pytest.approx(mean, abs=0.02)
    assert float(draws["x"].mean()) == pytest.approx(mean, abs=0.02)
    assert float(draws["x"].std()) == pytest.approx(np.hypot(SCALE, NOISE_SCALE), abs=0.02)
    # New data belong to the draw they stand beside.
    assert float((draws["x"] - draws["theta"]).std()) == pytest.approx(NOISE_SCALE, abs=0.02)
    with pytest.raises(ValueError, match="observed_values must"):
        training.posterior_predictive(KEY, 10, params, {"y": 2.0})
    with pytest.raises(ValueError, match="params must be a dictionary with the param and mutable sites of"):
        training.posterior_predictive(KEY, 10, {"slope": params["slope"]}, observed)
    with pytest.raises(ValueError, match=r"params must be a dictionary .*Pass a trainer's run\(...\).params"):
        training.posterior_predictive(KEY, 10, training.run(KEY, 1, progress_bar=False), observed)
