"""Every product of the readout's algebra is a full one, whatever an accelerator's default."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_wide.linear_gaussian import ReadoutProblem
from numpyro_wide.linear_gaussian._row_blocks import BlockedProblem, RowFeatures
from tests.marks import parametrize

ROWS, COLUMNS, OUTPUTS, BLOCK = 40, 60, 2, 16
PHI, NEW = jnp.ones((COLUMNS, OUTPUTS)), jnp.ones((5, COLUMNS))
OF_ANY = {
    "evidence": lambda problem: problem.log_evidence(),
    "leave one out": lambda problem: problem.leave_one_out()[1].sum(),
    "predictions": lambda problem: sum(part.sum() for part in problem.solved().predict(NEW, PHI)),
    "joint predictions": lambda problem: sum(part.sum() for part in problem.solved().predict_jointly(NEW)),
    "draw": lambda problem: problem.solved().draw(PHI).sum(),
    "rounding error": lambda problem: problem.evidence_error(),
}
OF_DENSE = {
    "map": lambda problem: problem.map(PHI)[0].sum(),
    "inverse map": lambda problem: problem.inverse_map(PHI).sum(),
    "posterior": lambda problem: problem.posterior()[1].sum(),
}


def products(fn, *args):
    """Return a line of the program for each product."""
    return [line for line in jax.jit(fn).lower(*args).as_text().splitlines() if "dot_general" in line]


def with_gradients(fn, *args):
    # Compiled for itself, then differentiated: rules are traced after the function has returned.
    return jax.value_and_grad(jax.jit(fn), tuple(range(len(args))))


def all_are_full(lines):
    return bool(lines) and all("[HIGHEST, HIGHEST]" in line for line in lines)


@pytest.mark.fault(
    "linear_gaussian/_evidence.py", "@log_evidence_of.defjvp\n@full_precision\n", "@log_evidence_of.defjvp\n"
)
@parametrize("noise_scale", [0.3, np.array([0.2, 0.4])], ids=["shared", "by output"], rest="slow")
@parametrize("variant", ["feature", "data", "data-cholesky"], rest="slow")
@pytest.mark.parametrize("name", [*OF_ANY, *OF_DENSE])
def test_dense_algebra(name, variant, noise_scale):
    def fn(features, targets, loc):
        problem = ReadoutProblem.of(features, targets, noise_scale, variant=variant, prior_loc=loc)
        return (OF_ANY | OF_DENSE)[name](problem)

    arrays = jnp.ones((ROWS, COLUMNS)), jnp.ones((ROWS, OUTPUTS)), jnp.ones((COLUMNS, OUTPUTS))
    assert all_are_full(products(with_gradients(fn, *arrays), *arrays))


def in_blocks(network, name):
    def fn(weights, x, y):
        features = RowFeatures.of(lambda rows: network(weights, rows), x, BLOCK)
        return OF_ANY[name](BlockedProblem.of(features, y, 0.3))

    # Only the evidence has a derivative.
    args = jnp.ones((COLUMNS, COLUMNS)), jnp.ones((ROWS, COLUMNS)), jnp.ones((ROWS, OUTPUTS))
    return products(with_gradients(fn, *args) if name == "evidence" else fn, *args)


@pytest.mark.parametrize("name", OF_ANY)
def test_algebra_by_blocks_and_its_network(name):
    algebra = in_blocks(lambda weights, rows: jnp.tanh(rows * weights[0]), name)
    assert all_are_full(algebra)
    both = in_blocks(lambda weights, rows: jnp.tanh(rows @ weights), name)
    assert sum("[HIGHEST, HIGHEST]" in line for line in both) == len(algebra) < len(both)
