"""Microcanonical Langevin dynamics, with or without a Metropolis correction."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.infer.initialization import init_to_uniform

from numpyro_wide._checks import whole_number
from numpyro_wide.mcmc._adaptation import steps_along
from numpyro_wide.mcmc._integrators import (
    GRADIENTS_PER_STEP,
    Evaluate,
    Point,
    PyTree,
    flattened,
    isokinetic_step,
    refresh_momentum,
    size_of,
    unit,
)
from numpyro_wide.mcmc._kernel import (
    KernelState,
    MetropolisKernel,
    Noise,
    Proposal,
    ProposalSettings,
    StepSizeOptions,
    energy_rule,
)
from numpyro_wide.mcmc._whitening import WHITENING_WINDOWS, Whitening

# Half width of the uniform law, around 1, of the random factor of an adjusted trajectory's steps.
JITTER = 0.2
# Momentum length to start from.
FIRST_LENGTH = 1.0
# An adjusted trajectory has the length L, and its direction decorrelates over so many. Robnik et al. 2025 have 1.25;
# less than 2 costs effective draws of means near N(0, I), more those of variances on ill-conditioned Gaussians.
ADJUSTED_FORGETTING = 2.0
# Momentum length to have for an autocorrelation length of 1: Robnik et al. 2023 have 0.4. An adjusted draw starts
# afresh, and may continue until it is nearly independent: on N(0, I) for about a quarter turn.
LENGTH_PER_AUTOCORRELATION, ADJUSTED_LENGTH_PER_AUTOCORRELATION = 0.4, 0.6


class MicrocanonicalLangevin(MetropolisKernel):
    r"""Microcanonical Langevin Monte Carlo: MAMS, or MCLMC with ``adjusted=False``.

    It moves at a constant speed and turns downhill, so that far from N(0, I) too large a step costs it less than HMC:
    for narrow or deep networks and latent scales. A step costs two gradients. The adjusted sampler accepts exactly; the
    unadjusted one takes every finite step, with a bias of about ``bias_tolerance``.

    Mathematics has the dynamics (:eq:`isokinetic`, :eq:`isokinetic-kick`, :eq:`isokinetic-refresh`), the acceptance
    (:eq:`isokinetic-error`) and the bias (:eq:`bias`). Warmup learns the step size, the momentum length $L$ and a
    diagonal mass; shorter than 20 steps it learns the step size alone.

    Args:
        model: NumPyro model, or None.
        potential_fn: instead of a ``model``, function from a pytree to the potential energy U = −log p up to a
            constant, a scalar; needs ``init_params``.
        adjusted: whether to correct by Metropolis. If not, ``accept_prob`` is the probability that the correction would
            have had for the steps of a draw.
        step_size: step $\epsilon$ to start from, positive: how far a step moves each coordinate, on the scale of the
            mass.
        num_steps: number of steps between two draws, or ``"auto"``: as many as make the length $L$ if adjusted, else 1.
            More of them store fewer draws of an unadjusted chain.
        max_num_steps: largest number of steps of a trajectory under ``"auto"``.
        adapt_step_size: whether warmup adapts the step size.
        target_accept_prob: mean acceptance probability that warmup aims at, in (0, 1), or None for 0.9; not for an
            unadjusted sampler.
        bias_tolerance: of an unadjusted sampler, in (0, 1): the share of a variance of the draws that may be bias, in
            root mean square over the directions.
        find_heuristic_step_size: whether warmup first doubles or halves ``step_size`` until the acceptance of a step
            crosses ``target_accept_prob``; None for True if adjusted.
        init_strategy: NumPyro's strategy for the first position of a ``model``.

    References:
        Robnik, De Luca, Silverstein, Seljak 2023, Microcanonical Hamiltonian Monte Carlo (arXiv 2212.08549). Robnik,
        Cohn-Gordon, Seljak 2025, Metropolis adjusted microcanonical Hamiltonian Monte Carlo (arXiv 2503.01707). Robnik,
        Cohn-Gordon, Seljak 2024, Practical and scalable Hamiltonian Monte Carlo without the Metropolis test (arXiv
        2412.08876v3).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import MCMC
        >>> from numpyro_wide.mcmc import MicrocanonicalLangevin
        >>> kernel = MicrocanonicalLangevin(potential_fn=lambda x: 0.5 * jnp.sum(x**2))
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=200, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), init_params=jnp.ones(10), extra_fields=("accept_prob",))
        >>> bool(mcmc.get_extra_fields()["accept_prob"].mean() > 0.7)
        True
    """

    _windows = WHITENING_WINDOWS

    def __init__(
        self,
        model: Callable[..., object] | None = None,
        *,
        potential_fn: Callable[[PyTree], Array] | None = None,
        adjusted: bool = True,
        step_size: float = 0.1,
        num_steps: int | Literal["auto"] = "auto",
        max_num_steps: int = 128,
        adapt_step_size: bool = True,
        target_accept_prob: float | None = None,
        bias_tolerance: float = 0.05,
        find_heuristic_step_size: bool | None = None,
        init_strategy: Callable[..., object] = init_to_uniform,
    ) -> None:
        if find_heuristic_step_size is None:
            find_heuristic_step_size = adjusted and adapt_step_size
        target = 0.9 if target_accept_prob is None else target_accept_prob
        options = StepSizeOptions(step_size, adapt_step_size, target, find_heuristic_step_size)
        super().__init__(model, potential_fn, init_strategy, options)
        self._fixed_num_steps = None if num_steps == "auto" else whole_number("num_steps", num_steps)
        self._max_num_steps = whole_number("max_num_steps", max_num_steps)
        rule = energy_rule(bias_tolerance, adjusted, target_accept_prob)
        if not adjusted:
            self._rule = rule
        self._adjusted = adjusted
        self._needs_momentum = not adjusted
        self._forgetting = ADJUSTED_FORGETTING if adjusted else 1.0

    def get_diagnostics_str(self, state: KernelState) -> str:
        """Describe the state for the progress bar."""
        steps = f"{state.num_grad // GRADIENTS_PER_STEP} steps of {state.step_size:.2e}"
        return f"{steps}, {self._health(state)}"

    def _first_state(self, point: Point, *args: Any) -> KernelState:
        if (size := size_of(point.z)) < 2:
            raise ValueError(
                f"MicrocanonicalLangevin needs at least 2 unconstrained coordinates to turn in, but there is {size}; "
                "take SplitHMC or NUTS, or sample this site in a block with others."
            )
        return super()._first_state(point, *args)

    def _first_preconditioner(self, z: PyTree, num_warmup: int) -> Whitening:
        bounds = [percent * num_warmup // 100 for percent in self._windows]
        return Whitening.start(z, FIRST_LENGTH, max(end - start for start, end in pairwise(bounds)))

    def _close_window(self, preconditioner: Whitening, draw_length: Array) -> Whitening:
        per_autocorrelation = ADJUSTED_LENGTH_PER_AUTOCORRELATION if self._adjusted else LENGTH_PER_AUTOCORRELATION
        return preconditioner.close(draw_length, per_autocorrelation)

    def _propose(
        self, noise: Noise, point: Point, r: PyTree, settings: ProposalSettings, evaluate: Evaluate
    ) -> Proposal:
        whitening: Whitening = settings.preconditioner
        step_size, num_steps = settings.step_size, settings.num_steps
        if self._adjusted:
            r = noise.normal
            step_size *= 1 + JITTER * noise.uniform
        # On one vector: a program with operations of their own for all sites takes twice as long to compile.
        start, evaluate, unravel = flattened(point, evaluate)
        velocity = ravel_pytree(r)[0]
        length = velocity.size**0.5
        persistence = jnp.exp(-step_size / (self._forgetting * whitening.length))

        def body(i: Array, carry: tuple[Point, Array, Array, Array]) -> tuple[Point, Array, Array, Array]:
            point, direction, error, square_error = carry
            fresh = jax.random.normal(jax.random.fold_in(noise.rng_key, i), direction.shape, direction.dtype)
            direction = unit(refresh_momentum(length * direction, fresh, persistence))
            point, direction, change = isokinetic_step(evaluate, point, direction, step_size, whitening.scale)
            return point, direction, error + change, square_error + jnp.square(change)

        zero = jnp.zeros_like(point.potential_energy)
        end, direction, error, squares = jax.lax.fori_loop(0, num_steps, body, (start, unit(velocity), zero, zero))
        proposal = Proposal(
            Point(unravel(end.z), end.potential_energy, unravel(end.z_grad)),
            error,
            num_grad=GRADIENTS_PER_STEP * num_steps,
            square_error=squares / jnp.asarray(num_steps, squares.dtype),
        )
        if self._adjusted:
            return proposal
        return proposal._replace(r_accepted=unravel(length * direction), r_rejected=unravel(-velocity))

    def _num_steps(self, state: KernelState) -> int | Array:
        if self._fixed_num_steps is not None:
            return self._fixed_num_steps
        if not self._adjusted:
            return 1
        whitening: Whitening = state.adapt_state.preconditioner
        return steps_along(whitening.length, state.step_size, self._max_num_steps)
