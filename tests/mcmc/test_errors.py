"""What users are told when a kernel cannot work with what they pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_wide.mcmc import (
    MicrocanonicalLangevin,
    PreconditionedCrankNicolson,
    PreconditionedCrankNicolsonLangevin,
    SplitHMC,
    UnderdampedLangevin,
)
from tests.mcmc.cases import KERNELS, regression


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
        ((regression,), {"target_accept_prob": 1.2}, ValueError, r"target_accept_prob must lie in \(0, 1\)"),
    ],
)
def test_kernels_refuse_wrong_settings(name, arguments, settings, error, message):
    with pytest.raises(error, match=message):
        KERNELS[name](*arguments, **settings)


@pytest.mark.parametrize(
    ("kernel_class", "settings", "message"),
    [
        (PreconditionedCrankNicolson, {"step_size": 1.1}, r"step_size must lie in \(0, 1\], but got 1.1"),
        (PreconditionedCrankNicolsonLangevin, {"step_size": 2.5}, r"step_size must lie in \(0, 2\]"),
        (UnderdampedLangevin, {"damping": 0.0}, r"damping must lie in \(0, 1\]"),
        (UnderdampedLangevin, {"bias_tolerance": 0.0}, r"bias_tolerance must lie in \(0, 1\), but got 0.0"),
        (
            UnderdampedLangevin,
            {"adjusted": False, "target_accept_prob": 0.9},
            r"target_accept_prob is for adjusted=True, but got 0.9 with adjusted=False; .* by bias_tolerance",
        ),
        (MicrocanonicalLangevin, {"bias_tolerance": 1.0}, r"bias_tolerance must lie in \(0, 1\)"),
        (MicrocanonicalLangevin, {"momentum_length": 0.0}, r"momentum_length must lie in \(0, inf\)"),
        (MicrocanonicalLangevin, {"step_jitter": 1.0}, r"step_jitter must lie in \[0, 1\)"),
        (MicrocanonicalLangevin, {"num_steps": 0}, "num_steps must be a whole number of at least 1, but got 0"),
        (MicrocanonicalLangevin, {"trajectory": "nuts"}, "must be 'langevin' or 'hamiltonian', but got 'nuts'"),
        (SplitHMC, {"num_steps": 0}, "num_steps must be a whole number of at least 1, but got 0"),
        (SplitHMC, {"num_steps": "many"}, "num_steps must be a whole number of at least 1, but got 'many'"),
        (SplitHMC, {"num_steps": True}, "num_steps must be a whole number of at least 1, but got True"),
        (SplitHMC, {"num_steps": 2.5}, "num_steps must be a whole number of at least 1, but got 2.5"),
        (SplitHMC, {"max_num_steps": np.bool_(True)}, "max_num_steps must be a whole number of at least 1"),
        (SplitHMC, {"persistence": 1.0}, r"persistence must lie in \[0, 1\)"),
        (SplitHMC, {"num_steps": 5, "step_size": 1.0}, r"step_size must lie in \(0, 0.4\]"),
    ],
)
def test_settings_of_single_kernels(kernel_class, settings, message):
    with pytest.raises(ValueError, match=message):
        kernel_class(regression, **settings)


@pytest.mark.parametrize("kernel_class", [PreconditionedCrankNicolson, SplitHMC])
def test_first_position_is_checked(kernel_class):
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="needs a first position; pass init_params"):
        kernel_class(potential_fn=square).init(key, 0)
    with pytest.raises(ValueError, match=r"must return a scalar, but returned shape \(3,\)"):
        kernel_class(potential_fn=lambda z: z**2).init(key, 0, jnp.ones(3))
    with pytest.raises(ValueError, match="not finite at the first position"):
        kernel_class(potential_fn=lambda z: jnp.sum(jnp.log(z))).init(key, 0, -jnp.ones(3))


def test_one_coordinate_is_no_sphere():
    kernel = MicrocanonicalLangevin(potential_fn=lambda z: square(z["a"]))
    with pytest.raises(ValueError, match="needs at least 2 unconstrained coordinates to turn in, but there is 1; take"):
        kernel.init(jax.random.key(0), 0, {"a": jnp.ones(1), "b": jnp.ones((0, 2))})


@pytest.mark.parametrize("kernel_class", [UnderdampedLangevin, MicrocanonicalLangevin])
def test_inverse_mass_must_fit(kernel_class):
    kernel = kernel_class(potential_fn=square, inverse_mass_matrix=jnp.ones(2))
    with pytest.raises(ValueError, match=r"diagonal of shape \(3,\), one number a latent, but has shape \(2,\)"):
        kernel.init(jax.random.key(0), 0, jnp.ones(3))


def test_the_model_must_have_been_seen():
    with pytest.raises(RuntimeError, match="call `init` first"):
        UnderdampedLangevin(regression).get_potential_fn()
    with pytest.raises(ValueError, match="built from a model, not from a potential_fn"):
        UnderdampedLangevin(potential_fn=square).wrap_model(lambda model: model)


def test_whole_numbers_of_numpy_are_numbers_of_rotations():
    kernel = SplitHMC(potential_fn=square, num_steps=np.int64(4), max_num_steps=np.uint8(9))
    state = kernel.init(jax.random.key(0), 0, jnp.ones(3))
    assert kernel.sample(state, (), {}).num_grad == 4


def test_whole_numbers_are_a_first_position():
    state = SplitHMC(potential_fn=lambda z: square(z[0] - z[1])).init(jax.random.key(0), 0, [1, 2])
    assert [leaf.dtype for leaf in state.z] == [jnp.float32, jnp.float32]
