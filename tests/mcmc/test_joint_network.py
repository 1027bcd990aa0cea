"""The joint-distribution test on a repriorised Bayesian network, whose coordinates move with the data."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_wide import linear_gaussian, repriorise
from numpyro_wide.mcmc import SplitHMC
from numpyro_wide.mcmc._reference import Reference
from tests.mcmc.cases import ADJUSTED
from tests.mcmc.joint_distribution import JointProblem, fresh_moments, largest_z_score, problem_of

pytestmark = pytest.mark.slow

INPUTS = jnp.array([[1.0, 0.3], [-0.4, 1.2], [0.8, -1.0], [-1.1, -0.6]])
NOISE_SCALE = 0.5
SETTINGS = {
    "langevin": {"step_size": 0.7, "damping": 0.3},
    "pcn": {"step_size": 0.6},
    "pcnl": {"step_size": 0.5},
    "split-persistent": {"step_size": 0.6, "num_steps": 2, "persistence": 0.8},
    "microcanonical": {"step_size": 1.2, "num_steps": 3},
}


def features_of(hidden):
    return 1.5 * jnp.tanh(INPUTS @ hidden)


def network(y=None):
    """Three units on four rows, with a readout that the data pull hard on."""
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, 3]).to_event(2))
    features = numpyro.deterministic("features", features_of(hidden))
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(features @ readout, NOISE_SCALE).to_event(1), obs=y)


MODEL = repriorise(network, readout="readout", features="features", targets="y", noise_scale=NOISE_SCALE)
PLAIN = problem_of(network, observed="y")


def draw(key):
    sites, data = PLAIN.draw(key)
    return {name: sites[name] for name in ("hidden", "readout")}, data


def to_position(latents, data):
    phi = linear_gaussian.readout_inverse_map(features_of(latents["hidden"]), data, latents["readout"], NOISE_SCALE)
    return {"hidden": latents["hidden"], "readout_base": phi}


def to_latents(z, data):
    readout, _ = linear_gaussian.readout_map(features_of(z["hidden"]), data, z["readout_base"], NOISE_SCALE)
    return {"hidden": z["hidden"], "readout": readout}


PROBLEM = JointProblem(draw, PLAIN.redraw_data, to_position, to_latents, lambda data: ((data,), {}))


class WithReference(SplitHMC):
    """Works in the coordinates of a skew Gaussian, as after a warmup."""

    def _first_state(self, point, *args, **kwargs):
        state = super()._first_state(point, *args, **kwargs)
        basis = jnp.array([[0.6, 0.8], [0.8, -0.6]]), jnp.array([[0.6, 0.0, 0.8], [0.0, 1.0, 0.0], [0.8, 0.0, -0.6]])
        loc = jnp.array([[0.4], [-0.2]]), jnp.array([[0.3], [0.0], [0.0]])
        reference = Reference.start(point.z)._replace(
            basis=basis,
            mean=tuple(rows.T @ along for rows, along in zip(basis, loc, strict=True)),
            scale=(jnp.array([[0.5], [1.3]]), jnp.array([[0.7], [1.0], [1.0]])),
        )
        return state._replace(adapt_state=state.adapt_state._replace(preconditioner=reference))


@pytest.fixture(scope="module")
def expected():
    return fresh_moments(PROBLEM, jax.random.key(0))


def score_of(kernel, expected, num_replicates=8192):
    key = jax.random.key(1)
    return largest_z_score(kernel, PROBLEM, expected, key, num_rounds=5, num_replicates=num_replicates)


@pytest.mark.parametrize("name", [*SETTINGS, "reference"])
def test_kernels_keep_the_joint_law_of_a_repriorised_network(name, expected):
    if name == "reference":
        kernel = WithReference(MODEL, adapt_step_size=False, step_size=0.4, num_steps=2)
    else:
        kernel = ADJUSTED[name](MODEL, adapt_step_size=False, **SETTINGS[name])
    score, accept_prob = score_of(kernel, expected)
    assert 0.2 < accept_prob < 0.9
    assert score < 4.5
