"""Programs that are shared by their text: which functions are one program, and which are not."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from numpyro_wide._compile import program_of, run_program, split
from tests.compilations import compilations

X = np.arange(1.0, 4.0, dtype="f")


def made(factor):
    return lambda x: {"sum": jnp.sum(x), "scaled": factor * x}


def test_a_function_made_anew_finds_its_program():
    first = run_program(made(1.25), X)
    with compilations() as compiled:
        second = run_program(made(1.25), X + 1)
    assert compiled == []
    np.testing.assert_allclose(first["scaled"], 1.25 * X)
    np.testing.assert_allclose(second["scaled"], 1.25 * (X + 1))
    with compilations() as compiled:
        other = run_program(made(1.75), X)
    assert compiled
    np.testing.assert_allclose(other["scaled"], 1.75 * X)


def test_arrays_of_a_closure_are_data_of_the_program():
    for constant in (np.array([1.0, 2.0, 3.5], "f"), np.array([3.0, 2.0, 1.5], "f"), jnp.array([0.5, 1.0, 2.0])):
        with compilations() as compiled:
            found = run_program(lambda x, c=constant: x * jnp.asarray(c), X)
        np.testing.assert_allclose(found, X * np.asarray(constant))
    assert compiled == []


def test_results_that_are_thrown_away_are_no_part_of_the_program():
    def checked(x):
        jnp.linalg.norm(x)
        return x + 1.0

    run_program(checked, X)
    with compilations() as compiled:
        run_program(lambda x: x + 1.0, X)
    assert compiled == []


def test_an_array_that_is_mapped_over_may_be_closed_over():
    found = jax.vmap(lambda c: run_program(lambda x: c * x, X))(jnp.arange(2.0))
    np.testing.assert_allclose(found, [0 * X, X])


@pytest.mark.fault("_compile.py", "dce_jaxpr(full, [True] * len(full.outvars))", "(full, [True] * len(full.invars))")
def test_which_argument_is_used_tells_programs_apart():
    assert run_program(lambda a, b: a, 1.0, 2.0) == 1
    assert run_program(lambda a, b: b, 1.0, 2.0) == 2


def test_types_and_results_tell_programs_apart():
    assert run_program(lambda x: (x, x), 3)[0].dtype == jnp.int32
    assert run_program(lambda x: {"one": x, "other": x}, 3.0)["one"].dtype == jnp.float32
    assert run_program(lambda x: x, jnp.float16(3.0)).dtype == jnp.float16


def test_settings_of_jax_tell_programs_apart():
    def product(x):
        return jnp.outer(x, x) @ x

    with compilations() as compiled:
        run_program(product, X)
        with jax.default_matmul_precision("float32"):
            run_program(product, X)
    assert compiled.count("jit(<lambda>)") == 2


class Factor:
    """Its repr hides the number."""

    def __init__(self, factor):
        self.factor = np.float32(factor)

    def __repr__(self):
        return "Factor"

    def __call__(self, x):
        return self.factor * x

    def method(self, x):
        return self.factor * x


def in_python(kind, fn):
    """A function of a vector that has its numbers from a function in Python."""

    def run(x):
        call = jax.pure_callback if kind == "pure" else io_callback
        return jax.lax.map(lambda entry: call(fn, jax.ShapeDtypeStruct((), "f"), entry), x)

    return run


@pytest.mark.fault("_compile.py", ", *_host_functions(pruned)", "")
@pytest.mark.parametrize("kind", ["pure", "io"])
def test_functions_in_python_tell_programs_apart(kind):
    """Inside of a loop, functions and methods of objects; the same ones are no other program."""
    one, other = Factor(2), Factor(3)
    for left, right in ((one, other), (one.method, other.method), (np.sin, np.cos)):
        np.testing.assert_allclose(run_program(in_python(kind, left), X), left(X), rtol=1e-6)
        np.testing.assert_allclose(run_program(in_python(kind, right), X), right(X), rtol=1e-6)
    with compilations() as compiled:
        run_program(in_python(kind, one.method), X)
    assert compiled == []


def test_what_is_printed_tells_programs_apart(capfd):
    seen = []

    def watched(name):
        def run(x):
            jax.debug.callback(lambda total: seen.append((name, float(total))), jnp.sum(x))
            jax.debug.print(name + " {}", x[0])
            return 5.25 * x

        return run

    for name in ("first", "second"):
        run_program(watched(name), X)
        jax.effects_barrier()
    assert seen == [("first", 6.0), ("second", 6.0)]
    assert capfd.readouterr().out.split() == ["first", "1.0", "second", "1.0"]


ON_TWO_DEVICES = """
import jax, json, numpy as np
from numpyro_wide._compile import run_program
places = []
for device in jax.devices():
    x = jax.device_put(np.ones(3, "f"), device)
    places.append(run_program(lambda x: 2 * x, x).device.id)
with jax.default_device(jax.devices()[1]):
    places.append(run_program(lambda x: 2 * x, np.ones(3, "f")).device.id)
print(json.dumps(places))
"""


@pytest.mark.fault("_compile.py", "frozenset(shardings)", "frozenset()")
def test_devices_tell_programs_apart():
    settings = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", "-c", ON_TWO_DEVICES]
    found = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == [0, 1, 1]


def test_a_program_that_another_thread_evicts_is_still_run(monkeypatch):
    class Evicted(dict):
        def __contains__(self, key):
            return super().__contains__(key) and self.pop(key) is not None

        def get(self, key, default=None):
            return self.pop(key, default)

    monkeypatch.setattr("numpyro_wide._compile._PROGRAMS", Evicted())
    for _ in range(3):
        np.testing.assert_allclose(run_program(lambda x: 7.25 * x, X), 7.25 * X)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.jacfwd])
def test_under_transformations(transform):
    found = transform(lambda x: run_program(lambda x: 2 * x, x))(X)
    np.testing.assert_allclose(found, 2 * (np.eye(3) if transform is jax.jacfwd else X))


def test_a_program_compiled_quickly_computes_the_same():
    program = program_of(lambda x: jnp.cumsum(jnp.exp(x)), X, quick=True)
    np.testing.assert_allclose(program(X + 1), np.cumsum(np.exp(X + 1)), rtol=1e-6)


def test_a_tree_is_split_into_arrays_and_all_else():
    tree = ({"x": X, "name": "relu"}, [None, 3, jnp.ones(2)])
    arrays, join = split(tree)
    assert len(arrays) == 2
    found = join([2 * array for array in arrays])
    assert found[0]["name"] == "relu" and found[1][:2] == [None, 3]
    np.testing.assert_array_equal(found[0]["x"], 2 * X)


@pytest.mark.parametrize("quick", [True, False])
def test_options_of_another_compiler_are_left_out(quick, monkeypatch):
    options = "_QUICK_OPTIONS" if quick else "_CPU_OPTIONS"
    monkeypatch.setattr(f"numpyro_wide._compile.{options}", {"xla_has_no_such_option": True})
    found = run_program(lambda x: 2.75 * x, X, quick=quick)
    np.testing.assert_allclose(found, 2.75 * X)


@pytest.mark.parametrize("is_wished", [True, False])
def test_most_optimisations_are_left_out_where_a_user_wishes_so(is_wished, monkeypatch):
    given = []
    monkeypatch.setattr("numpyro_wide._compile._PROGRAMS", {})
    monkeypatch.setattr("numpyro_wide._compile._compiled", lambda lowered, options: given.append(options))
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", is_wished)
    program_of(lambda x: 3.125 * x + is_wished, X)
    jax.config.update("jax_disable_most_optimizations", before)
    assert given == [{} if is_wished else {"xla_backend_optimization_level": "1"}]
