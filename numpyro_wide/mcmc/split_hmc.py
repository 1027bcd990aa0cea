"""Hamiltonian Monte Carlo that integrates the Gaussian part of the posterior exactly."""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.infer.initialization import init_to_uniform
from numpyro.util import identity

from numpyro_wide._checks import whole_number
from numpyro_wide.mcmc._adaptation import MIN_WARMUP, Autocorrelation, steps_along
from numpyro_wide.mcmc._integrators import (
    Evaluate,
    Point,
    PyTree,
    half_square_difference,
    refresh_momentum,
    split_trajectory,
)
from numpyro_wide.mcmc._kernel import (
    KernelState,
    MetropolisKernel,
    Noise,
    Proposal,
    ProposalSettings,
    StepSizeOptions,
    check_number,
)
from numpyro_wide.mcmc._reference import REFERENCE_WINDOWS, Reference

# Step size below which trajectories are cut. What the data inform needs a few rotations, whatever their angle, and what
# they do not inform needs a whole trajectory: a cut one has the geometric mean of the two.
WHOLE_FROM = 0.3
# Correlation of the energy, less that of N(0, I), that is to be left between two draws: they have as many trajectories
# as that takes, and a draw of the function is worth about one of NUTS's.
CORRELATION_LEFT = 0.15
# With 128 rotations each a draw has at most as many gradients as a tree of NUTS.
MAX_TRAJECTORIES = 8
# Half width of the uniform law, around 1, of the random factor of a trajectory's angle.
JITTER = 0.2


class SplitHMC(MetropolisKernel):
    r"""HMC that integrates a standard normal reference exactly, and treats the rest of the density by gradient kicks.

    The first choice for exact draws of collapsed and repriorised models. The step does not shrink with the dimension,
    and at the wide limit one gradient gives a nearly independent draw. A rotation costs one gradient; warmup adapts its
    angle. Mathematics has the integrator, :eq:`split` and :eq:`graded`, and what warmup adapts.

    Args:
        model: NumPyro model, or None.
        potential_fn: instead of a ``model``, function from a pytree to the potential energy U = −log p up to a
            constant, a scalar; needs ``init_params``.
        step_size: angle $h$ of a rotation to start from, in radians, at most ``trajectory_angle`` over a number of
            ``num_steps``; by default 0.1. Under ``num_steps="auto"`` it is rounded, so that a whole number of rotations
            makes a trajectory.
        num_steps: number of rotations, and gradients, of a draw, or ``"auto"``.
        trajectory_angle: angle in radians that a trajectory turns by, or, with a number of ``num_steps``, the largest
            angle that adaptation may reach. $\pi/2$ takes N(0, I) to an independent draw; a little more makes up for
            the draws that a rejection repeats. Under ``persistence="auto"`` a trajectory turns by less where rotations
            are small, by $T \sqrt{h / 0.3}$ of the angle $T$ for $h$ below 0.3, and a draw after warmup has as many of
            them, 1 to 8, as bring the correlation of the energy, less that of N(0, I), to 0.15.
        max_num_steps: largest number of rotations of a trajectory under ``"auto"``.
        persistence: share $\rho$ in [0, 1) of the velocity that outlives a trajectory, turned round after a rejection:
            the new one is $\rho v + \sqrt{1 - \rho^2}\, \xi$. While a chain falls to the posterior in warmup it keeps
            nothing. ``"auto"`` is $e^{-s}$ for a trajectory of the share $s$ of ``trajectory_angle``. A number
            goes with trajectories of the whole angle: take 0.0 for weights that are independent from draw to draw.
        adapt_step_size: whether warmup adapts the step size.
        adapt_reference: whether warmup replaces N(0, I) by a Gaussian that all units of a layer share, fitted to draws
            and gradients. A warmup shorter than 20 steps keeps N(0, I).
        target_accept_prob: mean acceptance probability that warmup aims at, in (0, 1).
        find_heuristic_step_size: whether warmup first doubles or halves ``step_size`` until the acceptance of a single
            rotation crosses ``target_accept_prob``.
        init_strategy: NumPyro's strategy for the first position of a ``model``.

    References:
        Beskos, Pinski, Sanz-Serna, Stuart 2011, Hybrid Monte Carlo on Hilbert spaces. Shahbaba, Lan,
        Johnson, Neal 2014, Split Hamiltonian Monte Carlo. Blanes, Casas, Sanz-Serna 2014, Numerical integrators for
        the hybrid Monte Carlo method. Blanes, Calvo, Casas, Sanz-Serna 2021, Symmetrically processed splitting
        integrators for enhanced Hamiltonian Monte Carlo sampling. Horowitz 1991, A generalized guided Monte Carlo
        algorithm.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import MCMC
        >>> from numpyro_wide.mcmc import SplitHMC
        >>> kernel = SplitHMC(potential_fn=lambda x: 0.5 * jnp.sum(x**2))
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=200, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), init_params=jnp.ones(3), extra_fields=("num_grad",))
        >>> int(mcmc.get_extra_fields()["num_grad"].max())  # a third of a turn at a time
        1
    """

    _windows = REFERENCE_WINDOWS

    def __init__(
        self,
        model: Callable[..., object] | None = None,
        *,
        potential_fn: Callable[[PyTree], Array] | None = None,
        step_size: float | None = None,
        num_steps: int | Literal["auto"] = "auto",
        trajectory_angle: float = 2.0,
        max_num_steps: int = 128,
        persistence: float | Literal["auto"] = "auto",
        adapt_step_size: bool = True,
        adapt_reference: bool = True,
        target_accept_prob: float = 0.9,
        find_heuristic_step_size: bool = True,
        init_strategy: Callable[..., object] = init_to_uniform,
    ) -> None:
        self._fixed_num_steps = None if num_steps == "auto" else whole_number("num_steps", num_steps)
        self._trajectory_angle = check_number("trajectory_angle", trajectory_angle, 0.0, math.inf)
        self._max_num_steps = whole_number("max_num_steps", max_num_steps)
        self._persistence = None if persistence == "auto" else _checked_persistence(persistence)
        self._needs_momentum = self._persistence != 0
        self._adapt_reference = adapt_reference
        max_step_size = self._trajectory_angle / (self._fixed_num_steps or 1)
        first = min(0.1, max_step_size) if step_size is None else step_size
        searches = find_heuristic_step_size and adapt_step_size
        options = StepSizeOptions(first, adapt_step_size, target_accept_prob, searches, max_step_size)
        super().__init__(model, potential_fn, init_strategy, options)

    def get_diagnostics_str(self, state: KernelState) -> str:
        """Describe the state for the progress bar."""
        return f"{state.num_grad} turns of {state.step_size:.2e} rad, {self._health(state)}"

    def _propose(
        self, noise: Noise, point: Point, r: PyTree, settings: ProposalSettings, evaluate: Evaluate
    ) -> Proposal:
        reference: Reference | None = settings.preconditioner
        spread, unspread = (identity, identity) if reference is None else (reference.spread, reference.unspread)
        velocity = noise.normal if r is None else refresh_momentum(r, noise.normal, settings.persistence)
        angle = (1 + JITTER * noise.uniform) * settings.step_size
        end, end_velocity = split_trajectory(evaluate, point, spread(velocity), angle, settings.num_steps, reference)
        end_velocity = unspread(end_velocity)
        # U already holds the Gaussian part of the position.
        energy_error = end.potential_energy - point.potential_energy
        energy_error += half_square_difference(end_velocity, velocity)
        if r is None:
            return Proposal(end, energy_error, num_grad=settings.num_steps)
        backwards = jax.tree.map(jnp.negative, velocity)
        return Proposal(end, energy_error, end_velocity, backwards, settings.num_steps)

    def _first_preconditioner(self, z: PyTree, num_warmup: int) -> Reference | None:
        return Reference.start(z) if self._adapt_reference and num_warmup >= MIN_WARMUP else None

    def _first_mixing(self, dtype: jnp.dtype, num_warmup: int) -> Autocorrelation | None:
        is_auto = self._persistence is None and self._fixed_num_steps is None
        return Autocorrelation.start(dtype) if is_auto and num_warmup >= MIN_WARMUP else None

    def _num_steps(self, state: KernelState) -> int | Array:
        if self._fixed_num_steps is not None:
            return self._fixed_num_steps
        angle: float | Array = self._trajectory_angle
        if self._persistence is None:
            angle *= jnp.sqrt(jnp.minimum(state.step_size / WHOLE_FROM, 1.0))
        return steps_along(angle, state.step_size, self._max_num_steps)

    def _num_proposals(self, state: KernelState) -> int | Array:
        mixing = state.adapt_state.mixing
        if mixing is None:
            return 1
        correlation = jnp.clip(jnp.nan_to_num(mixing.estimate()), 0.01, 0.99)  # NaN of energies that are all equal
        number = jnp.round(math.log(CORRELATION_LEFT) / jnp.log(correlation)).astype(state.num_grad.dtype)
        return jnp.where(state.i < state.adapt_state.num_warmup, 1, jnp.clip(number, 1, MAX_TRAJECTORIES))

    def _persistence_at(self, state: KernelState) -> float | Array:
        if self._persistence is not None:
            return self._persistence
        angle = jnp.asarray(self._num_steps(state), state.step_size.dtype) * state.step_size
        return jnp.exp(-angle / self._trajectory_angle)

    def _round_step_size(self, step_size: Array) -> Array:
        if self._fixed_num_steps is not None:
            return step_size
        return self._trajectory_angle / jnp.maximum(jnp.round(self._trajectory_angle / step_size), 1)


def _checked_persistence(persistence: float) -> float:
    if isinstance(persistence, str):
        raise TypeError(f'persistence must be a number or "auto", but got {persistence!r}.')
    return check_number("persistence", persistence, 0.0, 1.0, include_low=True)
