"""The joint-distribution test of every adjusted kernel."""

import jax
import jax.numpy as jnp
import pytest

from numpyro_wide.mcmc import MicrocanonicalLangevin
from tests.mcmc.cases import ADJUSTED, regression, regression_data
from tests.mcmc.joint_distribution import fresh_moments, largest_z_score, problem_of

# Steps at which the kernels reject a good part of their proposals.
SETTINGS = {
    "langevin": {"step_size": 0.3, "damping": 0.3},
    "pcn": {"step_size": 0.5},
    "pcnl": {"step_size": 0.08},
    "split": {"step_size": 0.2},
    "split-persistent": {"step_size": 0.25, "num_steps": 2, "persistence": 0.8},
    "split-whole": {"step_size": 0.2},
    "microcanonical": {"step_size": 0.7, "num_steps": 3},
}
PROBLEM = problem_of(regression, regression_data()[0], observed="y")


@pytest.fixture(scope="module")
def expected():
    return fresh_moments(PROBLEM, jax.random.key(0))


class WithMass(MicrocanonicalLangevin):
    """Has a diagonal mass, as after a warmup."""

    def _first_preconditioner(self, z, num_warmup):
        known = super()._first_preconditioner(z, num_warmup)
        return known._replace(scale=jnp.array([0.9, 0.7, 1.2]))  # of the noise and the weights


@pytest.mark.fault("mcmc/langevin.py", "energy_error += half_square_difference(end_momentum, momentum)", "pass")
@pytest.mark.fault("mcmc/split_hmc.py", "backwards = jax.tree.map(jnp.negative, velocity)", "backwards = velocity")
@pytest.mark.fault(
    "mcmc/crank_nicolson.py",
    "crank_nicolson_langevin_energy_error(point, end, settings.step_size)",
    "reference_energy_difference(point, end)",
)
@pytest.mark.fault("mcmc/microcanonical.py", "error + change, square_error", "error - change, square_error")
@pytest.mark.fault("mcmc/langevin.py", "r_rejected=backwards", "r_rejected=momentum")
@pytest.mark.as_compiled
@pytest.mark.parametrize("name", [*ADJUSTED, "mass"])
def test_adjusted_kernels_keep_the_joint_law(name, expected):
    if name == "mass":
        kernel = WithMass(regression, adapt_step_size=False, **SETTINGS["microcanonical"])
    else:
        kernel = ADJUSTED[name](regression, adapt_step_size=False, **SETTINGS[name])
    score, accept_prob = largest_z_score(kernel, PROBLEM, expected, jax.random.key(1))
    assert 0.2 < accept_prob < 0.9
    assert score < 4.5
