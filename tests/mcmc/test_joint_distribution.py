"""The joint-distribution test of every adjusted kernel, and proof that it catches broken ones."""

import jax
import jax.numpy as jnp
import pytest

from numpyro_wide.mcmc import (
    MicrocanonicalLangevin,
    PreconditionedCrankNicolson,
    PreconditionedCrankNicolsonLangevin,
    SplitHMC,
    UnderdampedLangevin,
)
from numpyro_wide.mcmc._integrators import reference_energy_difference
from tests.marks import parametrize
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


def broken(kernel_class, change):
    """Make a kernel whose proposals are changed behind its back."""

    class Broken(kernel_class):
        def _propose(self, noise, point, r, move, evaluate):
            return change(super()._propose(noise, point, r, move, evaluate), point, move)

    return Broken


def without_flip(proposal, point, state):
    return proposal._replace(r_rejected=jax.tree.map(jnp.negative, proposal.r_rejected))


def without_drift_terms(proposal, point, state):
    return proposal._replace(energy_error=reference_energy_difference(point, proposal.point))


def without_correction(proposal, point, state):
    return proposal._replace(energy_error=0 * proposal.energy_error)


def upside_down(proposal, point, state):
    return proposal._replace(energy_error=-proposal.energy_error)


def with_stretch(factor):
    """Count what the steps do to volumes on the sphere another number of times."""

    def change(proposal, point, state):
        of_potential = proposal.point.potential_energy - point.potential_energy
        return proposal._replace(energy_error=of_potential + factor * (proposal.energy_error - of_potential))

    return change


class WithoutLogDet(PreconditionedCrankNicolson):
    """Forgets the Jacobian of the transform from the positive noise scale to its logarithm."""

    def get_potential_fn(self, model_args=(), model_kwargs=None):
        potential_fn = super().get_potential_fn(model_args, model_kwargs)
        return lambda z: potential_fn(z) + z["noise"]


class CountByPosition(SplitHMC):
    """Takes a number of rotations that depends on where the chain is."""

    def _num_steps(self, state):
        return jnp.where(state.z["noise"] < -0.7, 2, 8)


BROKEN = {
    "momentum not flipped": (broken(UnderdampedLangevin, without_flip), "langevin"),
    "no log-determinant": (WithoutLogDet, "pcn"),
    "no drift terms": (broken(PreconditionedCrankNicolsonLangevin, without_drift_terms), "pcnl"),
    "velocity not flipped": (broken(SplitHMC, without_flip), "split-persistent"),
    "rotations by the position": (CountByPosition, "split"),
    "no correction": (broken(MicrocanonicalLangevin, without_correction), "microcanonical"),
    "energy error upside down": (broken(MicrocanonicalLangevin, upside_down), "microcanonical"),
    "no Jacobian": (broken(MicrocanonicalLangevin, with_stretch(0.0)), "microcanonical"),
    "Jacobian of three dimensions, not two": (broken(MicrocanonicalLangevin, with_stretch(1.5)), "microcanonical"),
}


class WithMass(MicrocanonicalLangevin):
    """Has a diagonal mass, as after a warmup."""

    def _first_preconditioner(self, z, num_warmup):
        known = super()._first_preconditioner(z, num_warmup)
        return known._replace(scale=jnp.array([0.9, 0.7, 1.2]))  # of the noise and the weights


@pytest.mark.fault("mcmc/langevin.py", "energy_error += half_square_difference(end_momentum, momentum)", "pass")
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


@parametrize("fault", BROKEN, rest="slow")
def test_broken_kernels_lose_the_joint_law(fault, expected):
    kernel_class, name = BROKEN[fault]
    kernel = kernel_class(regression, adapt_step_size=False, **SETTINGS[name])
    score, _ = largest_z_score(kernel, PROBLEM, expected, jax.random.key(1))
    assert score > 7
