"""Compiled programs: told apart by what they compute."""

import struct
from functools import partial

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

from numpyro_wide._compile import TracedProgram, complete_digest, run_compiled
from tests.compilations import compilations


def test_what_is_looked_at_and_thrown_away_is_no_part_of_the_program():
    """A check that is made in the first call alone, of a number and of an array that the program would hold."""
    held = jnp.arange(3.0)

    def looking(x):
        jnp.zeros(()) + 0
        jnp.sum(held * x)
        return jnp.sin(x)

    x = jnp.arange(3.0)
    first, second = TracedProgram(looking, x), TracedProgram(jnp.sin, x)
    assert first.digest == second.digest and first.constants == []
    first(x)
    with compilations() as count:
        np.testing.assert_array_equal(second(x + 1), jnp.sin(x + 1))
    assert [name for name in count if "lambda" in name] == []


def test_what_an_effect_shows_is_a_part_of_the_program():
    seen = []

    def shown(model, static, x):
        jax.debug.callback(seen.append, 2 * x)
        return x + 1

    run_compiled(shown, None, (), jnp.ones(()))
    jax.effects_barrier()
    assert [float(value) for value in seen] == [2.0]


def test_a_constant_that_changes_is_passed_to_the_same_program():
    def model(scale):
        held = jnp.full(3, scale)
        return TracedProgram(lambda x: held * x, jnp.ones(3))

    (first, second), x = (model(2.0), model(3.0)), jnp.ones(3)
    assert first.digest == second.digest
    np.testing.assert_array_equal(first(x), 2.0)
    np.testing.assert_array_equal(second(x), 3.0)


def test_a_number_of_the_program_makes_another():
    found = [float(run_compiled(lambda scale, static, x: scale * x, scale, (), jnp.ones(()))) for scale in (2.0, 3.0)]
    assert found == [2.0, 3.0]


def run(function, *arrays):
    return np.asarray(run_compiled(lambda model, static, *arrays: function(*arrays), None, (), *arrays))


def pairs():
    """Programs whose texts are alike in all but what is named: two functions of an array, and the array."""
    # Constants that the results do not depend on are no part of a program, whatever place they stand in.
    one, other = jnp.arange(3.0) + 1, jnp.arange(3.0) + 10
    other_nan = struct.unpack("d", struct.pack("Q", 0xFFF8000000000000))[0]
    scaled = jax.extend.core.Primitive("scaled")
    scaled.def_impl(lambda x, op: op(x))
    scaled.def_abstract_eval(lambda x, op: x)
    mlir.register_lowering(scaled, mlir.lower_fun(lambda x, op: op(x), multiple_results=False))
    x = jnp.ones(3)
    return {
        "constants": (lambda x: (jnp.sum(one * x), other * x)[1], lambda x: (one * x, jnp.sum(other * x))[0], x),
        "bits of NaN": (
            lambda x: jnp.signbit(jnp.where(x > 0, float("nan"), x)),
            lambda x: jnp.signbit(jnp.where(x > 0, other_nan, x)),
            x,
        ),
        "functions among parameters": (
            lambda x: scaled.bind(x, op=partial(jnp.multiply, 2.0)),
            lambda x: scaled.bind(x, op=partial(jnp.multiply, 3.0)),
            x,
        ),
        "callbacks": (
            lambda x: jax.pure_callback(lambda x: x + 1, x, x),
            lambda x: jax.pure_callback(lambda x: x + 2, x, x),
            x,
        ),
    }


@pytest.mark.parametrize("what", list(pairs()))
def test_programs_that_differ_are_told_apart(what):
    one, other, x = pairs()[what]
    for function in (one, other, one):
        np.testing.assert_array_equal(run(function, x), function(x))
    assert complete_digest(one, x) is None or complete_digest(one, x) != complete_digest(other, x)


def test_a_program_belongs_to_the_settings_of_jax_that_it_was_traced_under():
    def draw(key):
        return jax.random.uniform(key, (4,))

    key = jax.random.key(0)
    before = run(draw, key)
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        np.testing.assert_array_equal(run(draw, key), draw(key))
        assert not np.array_equal(run(draw, key), before)
    np.testing.assert_array_equal(run(draw, key), before)
