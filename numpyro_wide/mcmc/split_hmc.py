"""Hamiltonian Monte Carlo that integrates the Gaussian part of the posterior exactly."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.infer.initialization import init_to_uniform
from numpyro.util import identity

from numpyro_wide._checks import whole_number
from numpyro_wide.mcmc._adaptation import MIN_WARMUP, AdaptState, steps_along
from numpyro_wide.mcmc._integrators import (
    Evaluate,
    Point,
    PyTree,
    half_square_difference,
    refresh_momentum,
    split_trajectory,
)
from numpyro_wide.mcmc._kernel import KernelState, MetropolisKernel, Move, Noise, Proposal, check_number
from numpyro_wide.mcmc._reference import REFERENCE_WINDOWS, Reference

# Rotations of a whole trajectory above which draws are parts of one, and how many parts.
MANY, PARTS = 24, 10
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
            the draws that a rejection repeats.
        max_num_steps: largest number of rotations of a trajectory under ``"auto"``.
        persistence: share $\rho$ in [0, 1) of the velocity that outlives a trajectory, turned round after a rejection:
            the new one is $\rho v + \sqrt{1 - \rho^2}\, \xi$. The first three quarters of warmup keep nothing.
            ``"auto"`` keeps nothing if a whole trajectory has at most 24 rotations; of a longer one each draw is a
            tenth, and keeps nine tenths: draws are cheaper, and more are needed. With a number of ``num_steps`` it is
            $1 - s$ if as many rotations turn by the share $s$ of ``trajectory_angle``. Take 0.0 for independent
            weights, or where few draws can be stored.
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
        model: Callable[..., Any] | None = None,
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
        init_strategy: Callable[..., Any] = init_to_uniform,
    ) -> None:
        self._num_steps = None if num_steps == "auto" else whole_number("num_steps", num_steps)
        self._trajectory_angle = check_number("trajectory_angle", trajectory_angle, 0.0, math.inf)
        self._max_num_steps = whole_number("max_num_steps", max_num_steps)
        self._persistence = None if persistence == "auto" else _checked_persistence(persistence)
        self._needs_momentum = self._persistence != 0
        self._adapt_reference = adapt_reference
        max_step_size = self._trajectory_angle / (self._num_steps or 1)
        super().__init__(
            model,
            potential_fn,
            step_size=min(0.1, max_step_size) if step_size is None else step_size,
            adapt_step_size=adapt_step_size,
            target_accept_prob=target_accept_prob,
            find_heuristic_step_size=find_heuristic_step_size and adapt_step_size,
            init_strategy=init_strategy,
            max_step_size=max_step_size,
        )

    def get_diagnostics_str(self, state: KernelState) -> str:
        """Describe the state for the progress bar."""
        return f"{state.num_grad} turns of {state.step_size:.2e} rad, {self._health(state)}"

    def _propose(self, noise: Noise, point: Point, r: PyTree, move: Move, evaluate: Evaluate) -> Proposal:
        known: Reference | None = move.preconditioner
        spread, unspread = (identity, identity) if known is None else (known.spread, known.unspread)
        velocity = noise.normal if r is None else refresh_momentum(r, noise.normal, 1 - move.renewal)
        angle = (1 + JITTER * noise.uniform) * move.step_size
        end, end_velocity = split_trajectory(evaluate, point, spread(velocity), angle, move.num_steps, known)
        end_velocity = unspread(end_velocity)
        # U already holds the Gaussian part of the position.
        energy_error = end.potential_energy - point.potential_energy
        energy_error += half_square_difference(end_velocity, velocity)
        if r is None:
            return Proposal(end, energy_error, num_grad=move.num_steps)
        backwards = jax.tree.map(jnp.negative, velocity)
        return Proposal(end, energy_error, end_velocity, backwards, move.num_steps)

    def _first_preconditioner(self, z: PyTree, num_warmup: int) -> Reference | None:
        return Reference.start(z) if self._adapt_reference and num_warmup >= MIN_WARMUP else None

    def _first_state(self, *args: Any) -> KernelState:
        state = super()._first_state(*args)
        # Without warmup the step size that is given decides.
        return state._replace(adapt_state=state.adapt_state._replace(is_cut=self._is_long(state.step_size)))

    def _adapt(self, state: KernelState, certain: Array, square_error: Array) -> tuple[Array, AdaptState]:
        step_size, adapted = super()._adapt(state, certain, square_error)
        if not self._adapt_step_size:
            return step_size, adapted
        # By the step size of whole trajectories; that of parts is another. After a short warmup the last is smaller.
        has_arrived = _is_arriving(state) & ~_is_arriving(state._replace(i=state.i + 1))
        is_long = self._is_long(self._rule.step_size(state.adapt_state.learnt, has_arrived))
        is_last = state.i + 1 == adapted.num_warmup
        is_cut = adapted.is_cut | (is_last & self._is_long(step_size))
        return step_size, adapted._replace(is_cut=jnp.where(has_arrived, is_long, is_cut))

    def _is_long(self, step_size: Array) -> Array:
        """Tell whether a whole trajectory takes more rotations than it pays for."""
        if self._num_steps is not None or self._persistence is not None:
            return jnp.zeros((), bool)
        return steps_along(self._trajectory_angle, step_size) > MANY

    def _renewal(self, state: KernelState) -> float | Array:
        # Where rounding or the way to the posterior refuses many steps, a velocity that is turned round each time
        # leads to and fro.
        if self._persistence is not None:
            return jnp.where(_is_arriving(state), 1.0, 1 - self._persistence)
        angle = jnp.asarray(self._count(state), state.step_size.dtype) * state.step_size
        is_kept = ~_is_arriving(state) if self._num_steps is not None else self._is_cut(state)
        return jnp.where(is_kept, jnp.minimum(angle / self._trajectory_angle, 1.0), 1.0)

    def _count(self, state: KernelState) -> int | Array:
        if self._num_steps is not None:
            return self._num_steps
        whole = steps_along(self._trajectory_angle, state.step_size)
        part = steps_along(self._trajectory_angle / PARTS, state.step_size)
        return jnp.minimum(jnp.where(self._is_cut(state), part, whole), self._max_num_steps)

    def _is_cut(self, state: KernelState) -> Array:
        return state.adapt_state.is_cut & ~_is_arriving(state)

    def _round_step_size(self, step_size: Array) -> Array:
        if self._num_steps is not None:
            return step_size
        return self._trajectory_angle / jnp.maximum(jnp.round(self._trajectory_angle / step_size), 1)


def _is_arriving(state: KernelState) -> Array:
    """Tell whether warmup is in its first three quarters, still on a way that whole trajectories make shorter."""
    return 4 * state.i < 3 * state.adapt_state.num_warmup


def _checked_persistence(persistence: float) -> float:
    if isinstance(persistence, str):
        raise TypeError(f'persistence must be a number or "auto", but got {persistence!r}.')
    return check_number("persistence", persistence, 0.0, 1.0, include_low=True)
