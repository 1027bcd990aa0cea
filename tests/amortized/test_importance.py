"""Importance weights turn a guide that is not exact into the posterior, and say when they cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import linen
from numpyro.contrib.module import flax_module

from numpyro_wide import AmortizedForwardKL
from numpyro_wide.amortized import importance_sample
from tests.amortized.cases import INTERCEPT, SCALE, SLOPE, linear_guide, normal_model

X = 2.5
MEAN = SLOPE * X + INTERCEPT


def weighted(offset, factor):
    """A guide that is off by some standard deviations, and too wide or too narrow."""
    trainer = AmortizedForwardKL(normal_model, linear_guide, optax.sgd(0.1), observed="x")
    params = {"slope": SLOPE, "intercept": INTERCEPT + offset * SCALE, "scale": factor * SCALE}
    return trainer.importance_sample(jax.random.key(0), 4000, params, {"x": X})


def test_wide_guide_is_corrected():
    sample = weighted(0.5, 1.5)
    weights, theta = np.exp(sample.log_weights), np.asarray(sample.samples["theta"])
    assert weights.sum() == pytest.approx(1, rel=1e-4)
    assert sample.effective_sample_size == pytest.approx(1 / np.sum(weights**2), rel=1e-3)
    assert 2000 < sample.effective_sample_size < 4000
    assert theta.mean() == pytest.approx(MEAN + 0.5 * SCALE, abs=4 * 1.5 * SCALE / 4000**0.5)
    mean = np.sum(weights * theta)
    error = SCALE / sample.effective_sample_size**0.5
    assert mean == pytest.approx(MEAN, abs=4 * error)
    assert np.sqrt(np.sum(weights * (theta - mean) ** 2)) == pytest.approx(SCALE, abs=4 * error)
    assert sample.pareto_k < 0.5


@pytest.mark.fault("amortized/_importance.py", "log_joint - log_q", "log_joint")
def test_exact_guide_has_equal_weights():
    sample = weighted(0.0, 1.0)
    assert sample.effective_sample_size == pytest.approx(4000, rel=1e-3)
    np.testing.assert_allclose(sample.log_weights, -np.log(4000), atol=1e-3)


def test_narrow_guide_is_found_out():
    # The weights' tail has the shape 1 - 0.25^2 = 0.94.
    assert 0.7 < weighted(0.0, 0.25).pareto_k < 1.1


def test_trainer_and_function_agree():
    params = {"slope": SLOPE, "intercept": INTERCEPT, "scale": 1.5 * SCALE}
    found = importance_sample(jax.random.key(0), np.int64(200), normal_model, linear_guide, params, {"x": X})
    trainer = AmortizedForwardKL(normal_model, linear_guide, optax.sgd(0.1), observed="x")
    expected = trainer.importance_sample(jax.random.key(0), 200, params, {"x": X})
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(left, right)


class Normalised(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(linen.BatchNorm(use_running_average=True)(x))[0]


def stateful_guide(observed_values):
    encoder = flax_module("encoder", Normalised(), jnp.ones(1), mutable=["batch_stats"])
    scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    numpyro.sample("theta", dist.Normal(encoder(jnp.atleast_1d(observed_values["x"])), scale))


@pytest.mark.fault(
    "amortized/_simulation.py", 'refuse_missing("params", recorder.values, params, kind, remedy)', "pass"
)
@pytest.mark.parametrize(
    ("left_out", "missing"),
    [
        (["encoder$params", "encoder$state", "scale"], r"'encoder\$params', 'encoder\$state', 'scale'"),
        (["scale"], r"'scale'"),
        (["encoder$params"], r"'encoder\$params'"),
        (["encoder$state"], r"'encoder\$state'"),  # NumPyro itself ends in an assertion without words
    ],
    ids=str,
)
def test_parameters_that_the_guide_would_start_from_are_refused(left_out, missing):
    trainer = AmortizedForwardKL(normal_model, stateful_guide, optax.sgd(0.1), observed="x")
    params = trainer.get_params(trainer.init(jax.random.key(0)))
    simulations = trainer.simulate(jax.random.key(1), 3)
    assert trainer.guide_log_prob(params, simulations).shape == (3,)
    assert trainer.importance_sample(jax.random.key(0), 20, params, {"x": X}).samples["theta"].shape == (20,)
    params = {name: value for name, value in params.items() if name not in left_out}
    message = rf"params must be a dictionary with .* sites of the guide {missing}, but got .*get_params"
    with pytest.raises(ValueError, match=message):
        trainer.importance_sample(jax.random.key(0), 20, params, {"x": X})
    with pytest.raises(ValueError, match=message):
        trainer.guide_log_prob(params, simulations)


def test_mistakes_in_a_guide_are_shown_as_they_are():
    def broken(observed_values):
        numpyro.sample("theta", dist.Normal(numpyro.param("loc", 0.0), observed_values["y"]))

    with pytest.raises(KeyError, match="y"):
        importance_sample(jax.random.key(0), 9, normal_model, broken, {"loc": 0.0}, {"x": X})


def test_other_mistakes():
    call = lambda **options: importance_sample(  # noqa: E731
        jax.random.key(0),
        model=normal_model,
        guide=linear_guide,
        **{"params": {}, "observed_values": {"x": X}, **options},
    )
    with pytest.raises(ValueError, match="params must be a dictionary .* but got a tuple"):
        call(params=(), num_samples=5)
    with pytest.raises(ValueError, match="num_samples must be a whole number of at least 1, but got 0"):
        call(num_samples=0)
    with pytest.raises(ValueError, match=r"observed must be the name of a site.*but is \(\)"):
        call(observed_values={}, num_samples=5)
