"""What users are told when a kernel cannot work with what they pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import MCMC
from numpyro.util import nested_attrgetter

from numpyro_wide.mcmc import (
    MicrocanonicalLangevin,
    PreconditionedCrankNicolson,
    PreconditionedCrankNicolsonLangevin,
    SplitHMC,
    UnderdampedLangevin,
)
from tests.mcmc.cases import KERNELS, regression, regression_data
from tests.mistakes import Case

KEY = jax.random.key(0)


def square(z):
    return jnp.sum(z**2)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("arguments", "settings", "error", "message"),
    [
        ((), {}, ValueError, "Exactly one of model and potential_fn must be given, but got neither"),
        ((regression,), {"potential_fn": square}, ValueError, "but got both"),
        ((3,), {}, TypeError, "model must be a function, but got int"),
        ((regression,), {"step_size": 0.0}, ValueError, r"step_size must lie in \(0, .*, but got 0.0"),
        ((regression,), {"step_size": float("nan")}, ValueError, "step_size must lie in"),
        ((regression,), {"step_size": "auto"}, TypeError, "step_size must be a number, but got 'auto'"),
        ((regression,), {"step_size": 0.1 + 0j}, TypeError, "step_size must be a number, but got .*j"),
        ((regression,), {"target_accept_prob": 1.2}, ValueError, r"target_accept_prob must lie in \(0, 1\)"),
    ],
)
def test_kernels_refuse_wrong_settings(name, arguments, settings, error, message):
    with pytest.raises(error, match=message):
        KERNELS[name](*arguments, **settings)


def first_state(kernel_class, potential_fn, position, **settings):
    return kernel_class(potential_fn=potential_fn, **settings).init(KEY, 0, position)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"weights": jnp.zeros(2), "nose": 0.0},
            ValueError,
            r"latent site, of the shapes \{.*noise.*, but holds .*nose",
        ),
        ({"weights": jnp.zeros(3), "noise": 0.0}, ValueError, r"but holds \{'weights': \(3,\)"),
        ({"weights": jnp.zeros((1, 2)), "noise": jnp.zeros(1)}, ValueError, "With several chains"),
        ({"weights": 1j * jnp.zeros(2), "noise": 0.0}, TypeError, r"init_params\['weights'\] must hold real numbers"),
        (jnp.zeros(3), TypeError, "must be a dictionary of unconstrained values by site"),
    ],
)
def test_first_positions_that_do_not_fit_the_model_are_refused(given, error, message):
    kernel = SplitHMC(regression)
    with pytest.raises(error, match=message):
        kernel.init(KEY, 0, given, regression_data())
    good = {"weights": jnp.zeros(2), "noise": 0.0}
    kernel.init(KEY, 0, good, regression_data())
    with pytest.raises(ValueError, match=r"weights': \(2, 2\)"):
        kernel.init(jax.random.split(KEY), 0, good, regression_data())


CASES = [
    Case(
        lambda: MCMC(SplitHMC(regression), num_warmup=1, num_samples=1).run(0, *regression_data()),
        r"rng_key must be a PRNG key, such as jax.random.key\(0\), but is an int",
        TypeError,
    ),
    Case(
        lambda: nested_attrgetter("num_steps")(first_state(SplitHMC, square, jnp.zeros(2))),
        "extra_fields must be among .*'num_grad', .* for this kernel, but got 'num_steps'",
        KeyError,
    ),
    Case(
        lambda: PreconditionedCrankNicolson(regression, step_size=1.1), r"step_size must lie in \(0, 1\], but got 1.1"
    ),
    Case(lambda: PreconditionedCrankNicolsonLangevin(regression, step_size=2.5), r"step_size must lie in \(0, 2\]"),
    Case(lambda: UnderdampedLangevin(regression, damping=0.0), r"damping must lie in \(0, 1\]"),
    Case(
        lambda: UnderdampedLangevin(regression, bias_tolerance=0.0), r"bias_tolerance must lie in \(0, 1\), but got 0.0"
    ),
    Case(
        lambda: UnderdampedLangevin(regression, adjusted=False, target_accept_prob=0.9),
        r"target_accept_prob is for adjusted=True, but got 0.9 with adjusted=False; .* by bias_tolerance",
    ),
    Case(lambda: MicrocanonicalLangevin(regression, bias_tolerance=1.0), r"bias_tolerance must lie in \(0, 1\)"),
    Case(
        lambda: MicrocanonicalLangevin(regression, num_steps=0),
        "num_steps must be a whole number of at least 1, but got 0",
    ),
    Case(lambda: SplitHMC(regression, num_steps=0), "num_steps must be a whole number of at least 1, but got 0"),
    Case(lambda: SplitHMC(regression, num_steps=2.5), "num_steps must be a whole number of at least 1, but got 2.5"),
    Case(
        lambda: SplitHMC(regression, max_num_steps=np.bool_(True)), "max_num_steps must be a whole number of at least 1"
    ),
    Case(
        lambda: SplitHMC(regression, persistence="much"),
        "persistence must be a number or \"auto\", but got 'much'",
        TypeError,
    ),
    Case(lambda: SplitHMC(regression, persistence=1.0), r"persistence must lie in \[0, 1\)"),
    Case(lambda: SplitHMC(regression, num_steps=5, step_size=1.0), r"step_size must lie in \(0, 0.4\]"),
    Case(
        lambda: PreconditionedCrankNicolson(potential_fn=square).init(KEY, 0),
        "needs a first position; pass init_params",
    ),
    Case(
        lambda: first_state(PreconditionedCrankNicolson, lambda z: z**2, jnp.ones(3)),
        r"must return a scalar, but returned shape \(3,\)",
    ),
    Case(
        lambda: first_state(PreconditionedCrankNicolson, lambda z: jnp.sum(jnp.log(z)), -jnp.ones(3)),
        "not finite at the first position",
    ),
    Case(
        lambda: first_state(
            MicrocanonicalLangevin, lambda z: square(z["a"]), {"a": jnp.ones(1), "b": jnp.ones((0, 2))}
        ),
        "needs at least 2 unconstrained coordinates to turn in, but there is 1; take",
    ),
    Case(lambda: UnderdampedLangevin(regression).get_potential_fn(), "call `init` first", RuntimeError),
    Case(
        lambda: UnderdampedLangevin(potential_fn=square).wrap_model(lambda model: model),
        "built from a model, not from a potential_fn",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=Case.id_of)
def test_mistakes_with_single_kernels(case):
    case.check()


def test_whole_numbers_of_numpy_are_numbers_of_rotations():
    kernel = SplitHMC(potential_fn=square, num_steps=np.int64(4), max_num_steps=np.uint8(9))
    state = kernel.init(jax.random.key(0), 0, jnp.ones(3))
    assert kernel.sample(state, (), {}).num_grad == 4


def test_whole_numbers_are_a_first_position():
    state = SplitHMC(potential_fn=lambda z: square(z[0] - z[1])).init(jax.random.key(0), 0, [1, 2])
    assert [leaf.dtype for leaf in state.z] == [jnp.float32, jnp.float32]
