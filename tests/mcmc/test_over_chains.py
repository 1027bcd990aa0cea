"""Chains in turns on a processor: what all at once would draw, without products of batches of matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_wide import collapse_readout, model_evidence, nn
from numpyro_wide._compile import is_sequential, over_chains
from numpyro_wide.mcmc import SplitHMC
from numpyro_wide.runs import init_to_optimum
from tests.marks import parametrize
from tests.mcmc.cases import KERNELS, chain, regression, regression_data, set_in_turns


def equations(program):
    """All equations of a program, and of those within it."""
    for equation in program.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def largest_batch(kernel, state, args):
    """The largest number of batch dimensions of a product of matrices in a step."""
    program = jax.make_jaxpr(lambda state: kernel.sample(state, args, {}))(state).jaxpr
    products = [equation for equation in equations(program) if equation.primitive.name == "dot_general"]
    assert products
    return max(len(equation.params["dimension_numbers"][1][0]) for equation in products)


@pytest.mark.as_compiled
@pytest.mark.fault("_compile.py", 'return jax.default_backend() == "cpu" and jax.device_count() == 1', "return False")
def test_a_step_of_many_chains_has_no_products_of_batches(monkeypatch):
    assert is_sequential()  # the suite runs on one processor
    x = jnp.linspace(-1, 1, 5)[:, None]
    model = nn.bnn(nn.FCN(depth=1, width=4), num_outputs=None, noise=0.1)
    model = collapse_readout(model, readout="readout", features="features", observed="y")
    kernel, args = SplitHMC(model), (x, x[:, 0])
    state = kernel.init(jax.random.split(jax.random.key(0), 3), 20, None, args, {})
    assert largest_batch(kernel, state, args) == 0
    set_in_turns(monkeypatch, False)
    assert largest_batch(kernel, state, args) == 1


@pytest.mark.as_compiled
@pytest.mark.usefixtures("x64")
@parametrize("name", KERNELS, rest="slow")
def test_it_draws_what_all_at_once_draw(monkeypatch, name):
    def draws():
        args = regression_data(0)
        kernel = KERNELS[name](regression)
        state = kernel.init(jax.random.split(jax.random.key(0), 2), 24, None, args, {})
        return chain(kernel, state, 30, *args, keep=lambda state: (state.z, state.step_size, state.num_grad))[1]

    in_turns = draws()
    set_in_turns(monkeypatch, False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), in_turns, draws())


@pytest.mark.usefixtures("x64")
@pytest.mark.filterwarnings("ignore:log evidence")  # chains so short are not trusted
@parametrize("method", ["bridge", "stepping-stone"], rest="slow")
@pytest.mark.slow
def test_an_evidence_is_the_same(monkeypatch, method):
    def found():
        options = {"num_chains": 2, "num_warmup": 40, "num_samples": 200}
        return model_evidence(jax.random.key(0), regression, *regression_data(0), method=method, **options)

    in_turns = found()
    set_in_turns(monkeypatch, False)
    other = found()
    assert in_turns.log_evidence == pytest.approx(other.log_evidence, rel=1e-6)
    assert in_turns.standard_error == pytest.approx(other.standard_error, rel=1e-4)


@pytest.mark.usefixtures("x64")
def test_an_optimum_is_the_same(monkeypatch):
    options = {"num_chains": 3, "num_steps": 20, "progress_bar": False}
    found = [init_to_optimum(jax.random.key(0), regression, *regression_data(0), **options)]
    set_in_turns(monkeypatch, False)
    found.append(init_to_optimum(jax.random.key(0), regression, *regression_data(0), **options))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *found)


def test_any_number_of_arguments_and_leaves():
    found = over_chains(lambda a, b: {"sum": a["x"] + b, "none": None})({"x": jnp.arange(3.0)}, jnp.ones((3, 2)))
    np.testing.assert_array_equal(found["sum"], np.arange(3.0)[:, None] + np.ones((3, 2)))
    assert found["none"] is None
