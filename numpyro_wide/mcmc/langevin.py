"""Underdamped Langevin dynamics, with or without a Metropolis correction."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.infer.initialization import init_to_uniform

from numpyro_wide.mcmc._integrators import Evaluate, Point, PyTree, half_square_difference, leapfrog, refresh_momentum
from numpyro_wide.mcmc._kernel import (
    MetropolisKernel,
    Noise,
    Proposal,
    ProposalSettings,
    StepSizeOptions,
    check_number,
    energy_rule,
)


class UnderdampedLangevin(MetropolisKernel):
    r"""Langevin dynamics with momentum: refresh a part of it, then take one leapfrog step.

    With damping $\beta$, step $\epsilon$ and $\xi \sim N(0, I)$ (Mathematics, :eq:`langevin`),

    .. math::
        m \leftarrow \sqrt{1 - \beta}\, m + \sqrt{\beta}\, \xi, \qquad
        (\phi, m) \leftarrow \mathrm{leapfrog}_\epsilon(\phi, m).

    A step costs one gradient. The adjusted sampler is exact (Horowitz 1991). The unadjusted one (Hron et al. 2022, §4)
    takes every finite step, and has a bias that ``bias_tolerance`` sets (:eq:`bias`).

    Args:
        model: NumPyro model, or None.
        potential_fn: instead of a ``model``, function from a pytree to the potential energy U = −log p up to a
            constant, a scalar; needs ``init_params``.
        step_size: leapfrog step $\epsilon$ to start from, positive.
        damping: share $\beta$ in (0, 1] of the momentum's variance that every step renews.
        adjusted: whether to correct by Metropolis. If not, ``accept_prob`` is the probability that the
            correction would have had.
        adapt_step_size: whether warmup adapts the step size.
        target_accept_prob: mean acceptance probability that warmup aims at, in (0, 1), or None for 0.95; not for an
            unadjusted sampler, which has a ``bias_tolerance``.
        bias_tolerance: of an unadjusted sampler, in (0, 1): the share of a variance of the draws that may be excess,
            in root mean square over the directions of a Gaussian posterior.
        find_heuristic_step_size: whether warmup first doubles or halves ``step_size`` until the acceptance of a step
            crosses ``target_accept_prob``; not for an unadjusted sampler.
        init_strategy: NumPyro's strategy for the first position of a ``model``.

    References:
        Hron, Novak, Pennington, Sohl-Dickstein 2022, Wide Bayesian neural networks have a simple weight
        posterior. Horowitz 1991, A generalized guided Monte Carlo algorithm. Robnik, Cohn-Gordon, Seljak 2024,
        Practical and scalable Hamiltonian Monte Carlo without the Metropolis test (arXiv 2412.08876v3).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import MCMC
        >>> from numpyro_wide.mcmc import UnderdampedLangevin
        >>> kernel = UnderdampedLangevin(potential_fn=lambda x: 0.5 * jnp.sum(x**2), damping=0.2)
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=200, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), init_params=jnp.zeros(3), extra_fields=("accept_prob",))
        >>> mcmc.get_samples().shape
        (200, 3)
    """

    _needs_momentum = True

    def __init__(
        self,
        model: Callable[..., object] | None = None,
        *,
        potential_fn: Callable[[PyTree], Array] | None = None,
        step_size: float = 0.1,
        damping: float = 0.05,
        adjusted: bool = True,
        adapt_step_size: bool = True,
        target_accept_prob: float | None = None,
        bias_tolerance: float = 0.05,
        find_heuristic_step_size: bool = False,
        init_strategy: Callable[..., object] = init_to_uniform,
    ) -> None:
        target = 0.95 if target_accept_prob is None else target_accept_prob
        options = StepSizeOptions(step_size, adapt_step_size, target, find_heuristic_step_size)
        super().__init__(model, potential_fn, init_strategy, options)
        self._damping = check_number("damping", damping, 0.0, 1.0, include_high=True)
        rule = energy_rule(bias_tolerance, adjusted, target_accept_prob)
        if not adjusted:
            self._rule = rule

    def _propose(
        self, noise: Noise, point: Point, r: PyTree, settings: ProposalSettings, evaluate: Evaluate
    ) -> Proposal:
        momentum = refresh_momentum(r, noise.normal, math.sqrt(1 - self._damping))
        end, end_momentum = leapfrog(evaluate, point, momentum, settings.step_size)
        energy_error = end.potential_energy - point.potential_energy
        energy_error += half_square_difference(end_momentum, momentum)
        # Turning the momentum round after a rejection is what makes the partial refresh exact.
        backwards = jax.tree.map(jnp.negative, momentum)
        return Proposal(end, energy_error, r_accepted=end_momentum, r_rejected=backwards)
