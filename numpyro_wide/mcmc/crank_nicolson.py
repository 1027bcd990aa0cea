"""Crank-Nicolson kernels, without and with gradients."""

from collections.abc import Callable

from jax import Array
from numpyro.infer.initialization import init_to_uniform

from numpyro_wide.mcmc._integrators import (
    Evaluate,
    Point,
    PyTree,
    crank_nicolson_langevin,
    crank_nicolson_langevin_energy_error,
    reference_energy_difference,
    refresh_momentum,
)
from numpyro_wide.mcmc._kernel import MetropolisKernel, Noise, Proposal, ProposalSettings, StepSizeOptions


class PreconditionedCrankNicolson(MetropolisKernel):
    r"""Metropolis sampler whose proposal leaves N(0, I) invariant.

    With step $\beta$, $\xi \sim N(0, I)$ and $\Phi = U - \tfrac12\|\phi\|^2$, propose (Mathematics, :eq:`relative` and
    :eq:`pcn`)

    .. math::
        \phi' = \sqrt{1 - \beta^2}\, \phi + \beta \xi, \qquad
        \text{accepted with probability } \min(1, e^{\Phi(\phi) - \Phi(\phi')}).

    On N(0, I) itself everything is accepted, whatever the dimension. A step costs one evaluation of the
    potential and no gradient.

    Args:
        model: NumPyro model, or None.
        potential_fn: instead of a ``model``, function from a pytree to the potential energy U = −log p up to a
            constant, a scalar; needs ``init_params``.
        step_size: step $\beta$ in (0, 1] to start from; 1 draws from N(0, I) independently.
        adapt_step_size: whether warmup adapts the step size.
        target_accept_prob: mean acceptance probability that warmup aims at, in (0, 1).
        find_heuristic_step_size: whether warmup first doubles or halves ``step_size`` until the acceptance of a step
            crosses ``target_accept_prob``.
        init_strategy: NumPyro's strategy for the first position of a ``model``.

    References:
        Cotter, Roberts, Stuart, White 2013, MCMC methods for functions: modifying old algorithms to make
        them faster.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import MCMC
        >>> from numpyro_wide.mcmc import PreconditionedCrankNicolson
        >>> kernel = PreconditionedCrankNicolson(potential_fn=lambda x: 0.5 * jnp.sum(x**2), step_size=0.5)
        >>> mcmc = MCMC(kernel, num_warmup=0, num_samples=200, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), init_params=jnp.zeros(3), extra_fields=("accept_prob",))
        >>> bool(mcmc.get_extra_fields()["accept_prob"].min() > 0.999)
        True
    """

    _needs_gradient = False
    _is_second_order = False

    def __init__(
        self,
        model: Callable[..., object] | None = None,
        *,
        potential_fn: Callable[[PyTree], Array] | None = None,
        step_size: float = 0.2,
        adapt_step_size: bool = True,
        target_accept_prob: float = 0.25,
        find_heuristic_step_size: bool = False,
        init_strategy: Callable[..., object] = init_to_uniform,
    ) -> None:
        options = StepSizeOptions(step_size, adapt_step_size, target_accept_prob, find_heuristic_step_size, 1.0)
        super().__init__(model, potential_fn, init_strategy, options)

    def _propose(
        self, noise: Noise, point: Point, r: PyTree, settings: ProposalSettings, evaluate: Evaluate
    ) -> Proposal:
        end = evaluate(refresh_momentum(noise.normal, point.z, settings.step_size))
        return Proposal(end, reference_energy_difference(point, end))


class PreconditionedCrankNicolsonLangevin(MetropolisKernel):
    r"""Metropolis sampler that steps along the gradient and leaves N(0, I) invariant where there is none.

    With step $\delta$, $\xi \sim N(0, I)$ and $\Phi = U - \tfrac12\|\phi\|^2$, propose (Mathematics, :eq:`relative` and
    :eq:`pcnl`)

    .. math::
        (2 + \delta)\, \phi' = (2 - \delta)\, \phi - 2\delta\, \nabla\Phi(\phi) + \sqrt{8\delta}\, \xi,

    and accept by Metropolis. A step costs one gradient.

    Args:
        model: NumPyro model, or None.
        potential_fn: instead of a ``model``, function from a pytree to the potential energy U = −log p up to a
            constant, a scalar; needs ``init_params``.
        step_size: step $\delta$ in (0, 2] to start from; 2 forgets the present position.
        adapt_step_size: whether warmup adapts the step size.
        target_accept_prob: mean acceptance probability that warmup aims at, in (0, 1).
        find_heuristic_step_size: whether warmup first doubles or halves ``step_size`` until the acceptance of a step
            crosses ``target_accept_prob``.
        init_strategy: NumPyro's strategy for the first position of a ``model``.

    References:
        Cotter, Roberts, Stuart, White 2013, MCMC methods for functions: modifying old algorithms to make
        them faster.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import MCMC
        >>> from numpyro_wide.mcmc import PreconditionedCrankNicolsonLangevin
        >>> kernel = PreconditionedCrankNicolsonLangevin(potential_fn=lambda x: jnp.sum(x**2))
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=200, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), init_params=jnp.zeros(3), extra_fields=("num_grad",))
        >>> int(mcmc.get_extra_fields()["num_grad"].sum())
        200
    """

    _is_second_order = False

    def __init__(
        self,
        model: Callable[..., object] | None = None,
        *,
        potential_fn: Callable[[PyTree], Array] | None = None,
        step_size: float = 0.1,
        adapt_step_size: bool = True,
        target_accept_prob: float = 0.6,
        find_heuristic_step_size: bool = False,
        init_strategy: Callable[..., object] = init_to_uniform,
    ) -> None:
        options = StepSizeOptions(step_size, adapt_step_size, target_accept_prob, find_heuristic_step_size, 2.0)
        super().__init__(model, potential_fn, init_strategy, options)

    def _propose(
        self, noise: Noise, point: Point, r: PyTree, settings: ProposalSettings, evaluate: Evaluate
    ) -> Proposal:
        end = evaluate(crank_nicolson_langevin(point, noise.normal, settings.step_size))
        return Proposal(end, crank_nicolson_langevin_energy_error(point, end, settings.step_size))
