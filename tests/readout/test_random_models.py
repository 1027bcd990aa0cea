"""The front door on models drawn at random, with handlers in any order around them, against a dense oracle."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpyro.handlers import block, condition, scale, seed, substitute, trace
from numpyro.infer.util import log_density

from numpyro_wide import ReadoutPredictive, collapse_readout, repriorise
from tests.readout.random_models import SPECS, VIOLATIONS, Oracle, build

pytestmark = pytest.mark.usefixtures("x64")

VARIANTS = st.sampled_from(("auto", "feature", "data", "data-cholesky"))
HANDLERS = st.permutations(("condition hidden", "substitute other", "scale by one", "hide nothing", "wrap"))


def random_models(**strategies):
    """Make a test on some random models, as compiled, and at night on many."""
    some, many = pytest.param(10, marks=pytest.mark.as_compiled), pytest.param(200, marks=pytest.mark.slow)

    def decorate(check):
        @pytest.mark.parametrize("num_models", [some, many])
        def test(num_models):
            quietly = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
            settings(max_examples=num_models, **quietly)(given(**strategies)(check))()

        return test

    return decorate


def handled(model, order, wrap, oracle):
    """The model with handlers and wrapper around it, the innermost first; values that they set, to be left out."""
    values, given = oracle.values(), {}
    for name in order:
        if name == "wrap":
            model = wrap(model)
        elif name == "condition hidden":
            model = condition(model, {"hidden": values["hidden"]})
        elif name == "substitute other" and "other" in values:
            model, given = substitute(model, {"other": values["other"]}), {"other": values["other"]}
        elif name == "scale by one":
            model = scale(model, scale=1.0)
        else:
            model = block(model, hide=["no such site"])
    return model, {name: value for name, value in values.items() if name not in {"hidden", *given}}


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-8, atol=1e-8)


@random_models(spec=SPECS, variant=VARIANTS, order=HANDLERS, is_jitted=st.booleans())
def test_collapsed(spec, variant, order, is_jitted):
    numbers, oracle = spec.numbers(), Oracle(spec)

    def wrap(model):
        return collapse_readout(model, readout="w", features="features", observed="y", variant=variant)

    # A prior scaled by one is scaled: such a handler stands outside, and one that is inside is refused.
    order = sorted(order, key=lambda name: name == "scale by one")
    model, values = handled(build(spec), order, wrap, oracle)
    data = jnp.asarray(numbers["x"]), jnp.asarray(numbers["y"])

    def joint(x, y, values):
        return log_density(seed(model, jax.random.key(0)), (x, y), {}, values)[0]

    close(
        (jax.jit(joint) if is_jitted else joint)(*data, values), oracle.log_evidence() + oracle.log_density_of_others()
    )
    draws = {name: jnp.asarray(value)[None] for name, value in oracle.values().items()}
    predictive = ReadoutPredictive(wrap(build(spec)), draws, data)
    offset = np.broadcast_to(numbers["offset"], numbers["y"].shape).reshape(spec.num_rows, -1)
    found = predictive(jax.random.key(1), data[0])
    for column, (mean, covariance) in enumerate(oracle.posterior()):
        features = next(iter(oracle.outputs()))[0]
        close(found["mean"].reshape(spec.num_rows, -1)[:, column], features @ mean + offset[:, column])
        close(
            found["variance"].reshape(spec.num_rows, -1)[:, column],
            np.einsum("nd,de,ne->n", features, covariance, features),
        )


@random_models(spec=SPECS, violation=st.sampled_from(VIOLATIONS), order=HANDLERS, is_batched=st.booleans())
def test_no_violation_is_missed(spec, violation, order, is_batched):
    """A density of NaN under jit and vmap, and an error where numbers are known."""
    numbers, oracle = spec.numbers(), Oracle(spec)

    def wrap(model):
        return collapse_readout(model, readout="w", features="features", observed="y")

    order = sorted(order, key=lambda name: name == "scale by one")
    model, values = handled(build(spec, violation), order, wrap, oracle)
    if violation == "latent":
        values["violation"] = np.asarray(0.3)
    data = jnp.asarray(numbers["x"]), jnp.asarray(numbers["y"])

    def joint(values):
        return log_density(seed(model, jax.random.key(0)), data, {}, values)[0]

    if is_batched and values:
        batch = jax.tree.map(lambda value: jnp.stack([value, value]), values)
        assert jnp.isnan(jax.vmap(joint)(batch)).all()
    else:
        assert jnp.isnan(jax.jit(joint)(values))
    with pytest.raises(ValueError, match="depend|must be features @ readout"):
        joint(values)


@random_models(spec=SPECS, variant=VARIANTS, order=HANDLERS, factor=st.sampled_from((None, 0.3, 5.0)))
def test_repriorised(spec, variant, order, factor):
    # The map needs the features before the readout, and takes offsets for observations.
    spec = replace(spec, readout_first=False, offset_size=min(spec.offset_size, 1.0))
    numbers, oracle = spec.numbers(), Oracle(spec)
    noise_scale = "sigma" if spec.noise.startswith("latent") else numbers["noise"]
    # Targets and noise as the map takes them: offsets of the mean are the user's to subtract, or to leave in.
    is_exact = factor is None and not spec.offset_size

    def wrap(model):
        return repriorise(
            model,
            readout="w",
            features="features",
            targets="y",
            noise_scale=noise_scale,
            regulariser=None if factor is None else lambda sigma: factor * sigma**2,
            variant=variant,
        )

    order = sorted(order, key=lambda name: name == "scale by one")
    model, values = handled(build(spec), order, wrap, oracle)
    phi, data = jnp.asarray(numbers["base"]), (jnp.asarray(numbers["x"]), jnp.asarray(numbers["y"]))
    joint, sites = log_density(seed(model, jax.random.key(0)), data, {}, {**values, "w_base": phi})
    readout = np.asarray(sites["w"]["value"])
    as_mapped = Oracle(spec, is_mapped=True)
    log_abs_det = 0.0
    for column, (mean, covariance) in enumerate(as_mapped.posterior(factor or 1.0)):
        w, base = readout.reshape(len(mean), -1)[:, column], np.asarray(phi).reshape(len(mean), -1)[:, column]
        close((w - mean) @ np.linalg.solve(covariance, w - mean), base @ base)
        log_abs_det += 0.5 * np.linalg.slogdet(covariance)[1]
    expected = oracle.log_likelihood_and_prior(readout) + log_abs_det + oracle.log_density_of_others()
    close(joint, expected)
    if is_exact:  # the readout's conditional posterior is N(0, I) exactly
        normal = -0.5 * float(jnp.sum(phi**2)) - 0.5 * phi.size * np.log(2 * np.pi)
        close(joint, oracle.log_evidence() + normal + oracle.log_density_of_others())


@random_models(spec=SPECS)
def test_without_observations_both_are_the_model_as_it_was(spec):
    x = jnp.asarray(spec.numbers()["x"])
    model = build(spec)
    plain = trace(seed(model, jax.random.key(2))).get_trace(x)
    for wrapped in (
        collapse_readout(model, readout="w", features="features", observed="y"),
        repriorise(model, readout="w", features="features", targets="y", noise_scale=0.3),
    ):
        found = trace(seed(wrapped, jax.random.key(2))).get_trace(x)
        assert list(found) == list(plain)
        close(found["y"]["value"], plain["y"]["value"])
