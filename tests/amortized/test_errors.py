"""What the trainer refuses, and what it says."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.handlers import scale
from numpyro.primitives import mutable

from numpyro_wide import AmortizedForwardKL
from tests.amortized.cases import linear_guide, normal_model

KEY = jax.random.key(0)
sample, normal = numpyro.sample, dist.Normal(0.0, 1.0)


def site(name, distribution=normal, **options):
    """A guide with one parameter and one site."""

    def guide(observed_values):
        numpyro.param("loc", 0.0)
        sample(name, distribution, **options)

    return guide


def observing():
    sample("x", dist.Normal(sample("theta", normal), 1.0), obs=0.5)


def with_factor():
    normal_model()
    numpyro.factor("penalty", 1.0)


def with_param():
    sample("x", dist.Normal(sample("theta", normal), numpyro.param("noise", 1.0)))


def with_state():
    mutable("count", 0)
    normal_model()


def subsampled():
    theta = sample("theta", normal)
    with numpyro.plate("data", 10, subsample_size=5):
        sample("x", dist.Normal(theta, 1.0))


def scaled():
    with scale(scale=2.0):
        normal_model()


def of_counts():
    sample("x", dist.Normal(sample("theta", dist.Poisson(3.0)), 1.0))


def two_sites(observed_values):
    linear_guide(observed_values)
    sample("x", normal, obs=observed_values["x"])


def no_param(observed_values):
    sample("theta", dist.Normal(observed_values["x"], 1.0))


@pytest.mark.parametrize(
    ("model", "guide", "message"),
    [
        (observing, linear_guide, r"must simulate every site, but 'x' have given values.*default None"),
        (with_factor, linear_guide, r"must simulate every site, but 'penalty'"),
        (with_param, linear_guide, r"param or mutable sites 'noise'; fix them"),
        (with_state, linear_guide, r"param or mutable sites 'count'"),
        (subsampled, linear_guide, r"plate 'data' takes 5 of 10 rows, but the model must.*drop subsample_size"),
        (scaled, linear_guide, "model's site 'theta' has a scaled log density"),
        (normal_model, two_sites, r"latents alone.*'x'.*keys 'x'"),
        (normal_model, site("x"), r"latents alone.*'x'"),
        (normal_model, site("theta", obs=1.0), r"latents alone.*'theta'"),
        (normal_model, site("phi"), r"names the latent site 'phi', which the model does not.*'theta'"),
        (normal_model, lambda observed_values: None, r"no sample site.*'theta'"),
        (normal_model, no_param, "must have a param site, but has none"),
        (
            normal_model,
            site("theta", normal.expand([3]).to_event(1)),
            r"must be continuous of shape \(\), .*is continuous of shape \(3,\)",
        ),
        (normal_model, site("theta", dist.Poisson(1.0)), "'theta' must be continuous .*but is discrete"),
        (of_counts, site("theta"), "'theta' must be discrete .*but is continuous"),
        (normal_model, scale(site("theta"), 2.0), "guide's site 'theta' has a scaled"),
    ],
)
def test_mistakes_in_model_and_guide(model, guide, message):
    with pytest.raises(ValueError, match=message):
        AmortizedForwardKL(model, guide, optax.sgd(0.1), observed="x").init(KEY)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"observed": ["x", "y"]}, ValueError, r"site 'y', which the model does not have.*'theta', 'x'"),
        ({"observed": []}, ValueError, r"sequence of names, but is \[\]"),
        ({"observed": 3}, ValueError, "sequence of names, but is 3"),
        ({"observed": [3]}, ValueError, r"sequence of names, but is \[3\]"),
        ({"batch_size": 0}, ValueError, "batch_size must be a whole number of at least 1, but got 0"),
        ({"batch_size": 2.0}, ValueError, "whole number of at least 1, but got 2.0"),
        ({"batch_size": True}, ValueError, "whole number of at least 1, but got True"),
        ({"optim": numpyro.optim.Minimize()}, TypeError, "Minimize needs a loss that is not random"),
        ({"optim": "adam"}, TypeError, "optax.GradientTransformation. Got <class 'str'>"),
    ],
)
def test_mistakes_in_the_arguments(change, error, message):
    arguments = {"model": normal_model, "guide": linear_guide, "optim": optax.sgd(0.1), "observed": "x", **change}
    with pytest.raises(error, match=message):
        AmortizedForwardKL(**arguments).init(KEY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 0}, "num_steps must be a whole number of at least 1, but got 0"),
        ({"held_out": -1}, "held_out must be a whole number of at least 0, but got -1"),
        ({"held_out": 5, "evaluate_every": 0}, "evaluate_every must be a whole number of at least 1, but got 0"),
        ({"held_out": 5, "patience": 1.5}, "patience must be a whole number of at least 1, but got 1.5"),
        ({"patience": 3}, "held_out=1000"),
    ],
)
def test_mistakes_in_the_options_of_run(options, message):
    trainer = AmortizedForwardKL(normal_model, linear_guide, optax.sgd(0.1), observed="x")
    with pytest.raises(ValueError, match=message):
        trainer.run(KEY, **{"num_steps": 2, **options})


def test_keys_that_are_none():
    trainer = AmortizedForwardKL(normal_model, linear_guide, optax.sgd(0.1), observed="x")
    for call in (
        lambda: trainer.init(3),
        lambda: trainer.run(100, KEY),
        lambda: trainer.importance_sample(normal_model, linear_guide, {}, {"x": 1.0}),
    ):
        with pytest.raises((TypeError, ValueError), match=r"must be a (PRNG key|whole number|dictionary)"):
            call()


def test_observed_values_that_are_missing():
    with pytest.raises(ValueError, match=r"observed_values\['x'\] must not contain NaN.*impute"):
        AmortizedForwardKL(normal_model, linear_guide, optax.sgd(0.1), observed="x").importance_sample(
            KEY, 10, {"slope": 1.0, "intercept": 0.0, "scale": 1.0}, {"x": jnp.nan}
        )


def test_params_before_init_are_not_known():
    trainer, other = [AmortizedForwardKL(normal_model, linear_guide, optax.sgd(0.1), observed="x") for _ in range(2)]
    state = trainer.init(KEY)
    with pytest.raises(ValueError, match="call init or run first"):
        other.get_params(state)


def test_importance_weights_need_a_likelihood():
    def with_nuisance():
        theta, z = sample("theta", normal), sample("z", normal)
        sample("x", dist.Normal(theta + z, 1.0))

    def implicit():
        numpyro.deterministic("x", 2 * sample("theta", normal))

    def delta():
        sample("x", dist.Delta(sample("theta", normal)).expand([2]).to_event(1))

    def guide(observed_values):
        sample("theta", dist.Normal(jnp.sum(observed_values["x"]), numpyro.param("scale", 1.0)))

    cases = [(with_nuisance, r"marginalises 'z'"), (implicit, r"'x' are functions"), (delta, r"'x' are func")]
    for model, message in cases:
        trainer = AmortizedForwardKL(model, guide, optax.sgd(0.1), observed="x")
        with pytest.raises(ValueError, match=message):
            trainer.importance_sample(KEY, 10, {"scale": 1.0}, {"x": jnp.array(1.0)})
    trainer = AmortizedForwardKL(normal_model, guide, optax.sgd(0.1), observed="x")
    with pytest.raises(ValueError, match=r"dictionary with the observed site 'x', but got 'y'"):
        trainer.importance_sample(KEY, 10, {"scale": 1.0}, {"y": jnp.array(1.0)})
    with pytest.raises(FloatingPointError, match="positive finite weight"):
        trainer.importance_sample(KEY, 10, {"scale": 1.0}, {"x": jnp.array(1e30)})


def test_importance_weights_need_one_data_set_in_the_model_s_shape():
    def model(size):
        theta = sample("theta", normal)
        with numpyro.plate("data", size):
            sample("x", dist.Normal(theta, 1.0))

    def guide(observed_values, size):
        sample("theta", dist.Normal(jnp.mean(observed_values["x"]), numpyro.param("scale", 1.0)))

    trainer = AmortizedForwardKL(model, guide, optax.sgd(0.1), observed="x")
    for value in (jnp.ones((5, 1)), jnp.ones(()), jnp.ones(4)):
        with pytest.raises(ValueError, match=r"\['x'\] must have the shape of one simulated data set, \(5,\), but has"):
            trainer.importance_sample(KEY, 10, {"scale": 1.0}, {"x": value}, 5)
    with pytest.raises(ValueError, match=r"dictionary with the observed site 'x', but got an? \w+"):
        trainer.importance_sample(KEY, 10, {"scale": 1.0}, jnp.ones(5), 5)
