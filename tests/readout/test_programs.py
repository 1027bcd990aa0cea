"""What traced programs say of how their results depend on their arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_wide.readout._programs import FREE, SMOOTH, STEPPED, Program

V = np.random.default_rng(0).normal(size=5)
A = np.random.default_rng(1).normal(size=(5, 5))
# Functions of v, and how they depend on it.
CASES = {
    "nothing": (lambda v: jnp.zeros_like(v) + A[0], FREE),
    "product": (lambda v: A @ v, SMOOTH),
    "one entry added to": (lambda v: v.at[0].add(1.0), SMOOTH),
    "one entry times": (lambda v: v.at[0].multiply(2.0), SMOOTH),
    "one entry from": (lambda v: jnp.zeros(5).at[0].add(v[1]), SMOOTH),
    "one entry at least": (lambda v: v.at[0].max(2.0), SMOOTH),
    "slice updated": (lambda v: jax.lax.dynamic_update_slice(v, jnp.ones(2), (0,)), SMOOTH),
    "solve": (lambda v: jnp.linalg.solve(A, v), SMOOTH),
    "solve by it": (lambda v: jnp.linalg.solve(A + jnp.diag(v), jnp.ones(5)), STEPPED),  # rows are exchanged
    "iterations": (lambda v: jax.scipy.sparse.linalg.cg(lambda x: x * (2 + v[0] ** 2), jnp.ones(5))[0], SMOOTH),
    "fourier": (lambda v: jnp.fft.fft(v).real, SMOOTH),
    "sums": (jnp.cumsum, SMOOTH),
    "sums in pairs": (lambda v: jax.lax.associative_scan(jnp.add, v), SMOOTH),
    "again in reverse": (jax.checkpoint(jnp.tanh), SMOOTH),
    "branch": (lambda v: jax.lax.cond(A[0, 0] > 0, jnp.sin, jnp.cos, v), SMOOTH),
    "branch by it": (lambda v: jax.lax.cond(v[0] > 0, jnp.sin, jnp.cos, A[0]), STEPPED),
    "rounded in a branch": (lambda v: jax.lax.cond(A[0, 0] > 0, jnp.round, jnp.cos, v), STEPPED),
    "turns": (lambda v: jax.lax.fori_loop(0, jnp.asarray(3), lambda _, x: x * v, A[0]), SMOOTH),
    "turns by it": (lambda v: jax.lax.while_loop(lambda x: x.sum() < v[0], lambda x: x + 1.0, A[0]), STEPPED),
    "carried": (lambda v: jax.lax.scan(lambda c, _: ((c[1], v), None), (A[0], A[0]), None, length=3)[0][0], SMOOTH),
    "sliced": (lambda v: jax.lax.scan(lambda c, x: (c, x**2), 0.0, v)[1], SMOOTH),
    "other results": (lambda v: jax.jit(lambda v, a: (v, a))(v, A[0])[1], FREE),
    "sorted by others": (lambda v: jax.lax.sort_key_val(A[0], v)[1], SMOOTH),
    "others sorted by it": (lambda v: jax.lax.sort_key_val(v, A[0])[1], STEPPED),
    "order": (jnp.argsort, STEPPED),
    "reduced": (lambda v: jax.lax.reduce(v, 0.0, lambda a, b: jnp.maximum(a, b) + 0.0, (0,)), SMOOTH),
    "rounded and reduced": (lambda v: jax.lax.reduce(v, 0.0, lambda a, b: jnp.floor(a) + b, (0,)), STEPPED),
    "one entry rounded": (lambda v: v.at[0].apply(jnp.floor), STEPPED),
    "stopped": (lambda v: v + jax.lax.stop_gradient(v), STEPPED),
    "signs": (jnp.sign, STEPPED),
}


@pytest.mark.fault("readout/_programs.py", "is_step = is_by_order or", "is_step =")
@pytest.mark.fault("readout/_programs.py", "for program in programs for operation", "for program in () for operation")
@pytest.mark.fault("readout/_programs.py", "if sizes != {(len(inputs) - before, len(eqn.outvars))}:", "if not sizes:")
@pytest.mark.parametrize("case", CASES)
def test_dependence(case):
    fn, expected = CASES[case]
    with jax.enable_x64():
        program = Program(lambda v: {"result": fn(v)}, jnp.asarray(V))
        found = program.dependence_on(0)["result"]
    assert found == expected
    assert (found > FREE) == program.reads("result")[0]  # by JAX's own account
