"""Trainer of amortised guides."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax import Array, random

from numpyro_wide._checks import check_key, whole_number
from numpyro_wide.amortized._objective import Objective
from numpyro_wide.amortized._optimisers import as_numpyro_optim
from numpyro_wide.amortized._pair import FirstRun
from numpyro_wide.amortized._run import Options, Run, skipped_note
from numpyro_wide.amortized._simulator_and_guide import SimulatorAndGuide
from numpyro_wide.amortized._state import AmortizedRunResult, AmortizedState


class AmortizedForwardKL(SimulatorAndGuide):
    r"""Trainer of one guide for every possible observation, on simulations of the model alone.

    It minimises the expected forward KL divergence (McNamara 2025, eq. 1; Mathematics, :eq:`forward`)

    .. math:: E_{p(x)} \mathrm{KL}(p(\theta|x) \,\|\, q_\phi(\theta|x))
              = -E_{p(\theta, x)} \log q_\phi(\theta|x) + \mathrm{const}.

    Every step simulates ``batch_size`` fresh pairs of latents and observations from the model and follows the gradient
    of the guide's log density of these latents: unbiased (Prop. 5), with no likelihood evaluated and no
    reparametrised draw, so that latents may be discrete and the model may be a mere simulator. With a wide network and
    an exponential family in natural parameters (:eq:`family`), training converges to the global optimum (Theorem 4).

    The model, called without data, simulates every site. The guide is written for *one* simulated data set; the
    trainer vmaps it, under the axis name ``"simulations"``. It has sample sites for the latents that it covers, of the
    model's names and shapes; latents that it leaves out are marginalised, and it never sees them. It may hold
    ``numpyro.param`` sites and ``flax_module`` or ``nnx_module`` networks. Afterwards
    ``Predictive(guide, params=params, num_samples=...)(rng_key, observed_values, *args)`` draws from the
    approximate posterior given any observation.

    Mutable state, such as the running means of batch normalisation: all simulations of a step start from the same
    state, and the states they leave are averaged (of integers and PRNG keys, the first simulation's is kept). Give a
    normalisation layer ``axis_name="simulations"`` for statistics over the batch, and let an argument of model and
    guide, ``train=True``, say whether to use them: ``Predictive`` knows no such axis.

    Args:
        model: a NumPyro model without param sites, ``model(*args, **kwargs)``.
        guide: ``guide(observed_values, *args, **kwargs)`` with a dictionary of the observed sites' values.
        optim: an optimiser of NumPyro, of optax, or of ``jax.example_libraries``.
        observed: name, or names, of the sample or deterministic sites that are data at inference time.
        batch_size: number of simulations in each step.

    Raises:
        TypeError: if ``optim`` is not an optimiser, ``observed`` not made of names, or model or guide not callable.
        ValueError: if ``batch_size`` is not positive or ``observed`` empty; from :meth:`init` on, if the model does not
            simulate (it observes, has factors, param sites, subsampled plates or scaled densities), lacks an observed
            site, or if the guide scores anything but latents of the model in the model's shapes.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import Predictive
        >>> from numpyro_wide import AmortizedForwardKL
        >>> def model():
        ...     mu = numpyro.sample("mu", dist.Normal(0, 2))
        ...     with numpyro.plate("data", 3):
        ...         numpyro.sample("y", dist.Normal(mu, 1))
        >>> def guide(observed_values):
        ...     slope = numpyro.param("slope", 0.0)
        ...     scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
        ...     numpyro.sample("mu", dist.Normal(slope * observed_values["y"].sum(), scale))
        >>> trainer = AmortizedForwardKL(model, guide, numpyro.optim.Adam(0.02), observed="y")
        >>> params, state, losses = trainer.run(jax.random.key(0), 2000, progress_bar=False)
        >>> abs(float(params["slope"]) - 4 / 13) < 0.03  # exact: 1 / (3 + 1/4)
        True
        >>> posterior = Predictive(guide, params=params, num_samples=100)
        >>> posterior(jax.random.key(1), {"y": jax.numpy.array([1.0, 2.0, 1.5])})["mu"].shape
        (100,)
    """

    def __init__(
        self,
        model: Callable,
        guide: Callable,
        optim: Any,
        *,
        observed: str | Sequence[str],
        batch_size: int = 16,
    ):
        super().__init__(model, guide, observed)
        self.batch_size = whole_number("batch_size", batch_size)
        self.optim = as_numpyro_optim(optim)
        self._objective: Objective | None = None

    def init(
        self, rng_key: Array, *args: Any, init_params: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> AmortizedState:
        """Make the state before the first step.

        Args:
            rng_key: a PRNG key, that of the initial parameters and of all simulations.
            *args: arguments of model and guide.
            init_params: values to start param and mutable sites from, instead of the guide's own, by name.
            **kwargs: keyword arguments of model and guide.

        Returns:
            The state.

        Raises:
            TypeError: if ``rng_key`` is not a PRNG key.
            ValueError: if model and guide are not as the class asks.
        """
        check_key("rng_key", rng_key, "(rng_key, *args); of run, (rng_key, num_steps, *args)")
        objective, first = self._begin(rng_key, init_params or {}, args, kwargs)
        return objective.start(random.split(rng_key, 3)[2], first)

    def get_params(self, state: AmortizedState) -> dict[str, Any]:
        """Read the parameters off a state.

        Args:
            state: any state of the trainer.

        Returns:
            Values at the guide's param sites, constrained, and at its mutable sites: what ``Predictive`` needs.

        Raises:
            ValueError: if neither :meth:`init` nor :meth:`run` has been called.
        """
        if self._objective is None:
            raise ValueError("the guide's parameters are not known yet; call init or run first.")
        return self._objective.get_params(state)

    def update(self, state: AmortizedState, *args: Any, **kwargs: Any) -> tuple[AmortizedState, Array]:
        """Take one step on fresh simulations.

        Args:
            state: state before the step.
            *args: arguments of model and guide.
            **kwargs: keyword arguments of model and guide.

        Returns:
            The new state, and the loss before the step.
        """
        return self._step(state, args, kwargs, stable=False)

    def stable_update(self, state: AmortizedState, *args: Any, **kwargs: Any) -> tuple[AmortizedState, Array]:
        """Take one step as :meth:`update` does, unless the loss or its gradient is not finite.

        Args:
            state: state before the step.
            *args: arguments of model and guide.
            **kwargs: keyword arguments of model and guide.

        Returns:
            The new state and the loss; if the step is skipped, the old parameters, ``num_skipped`` one higher, and NaN.
        """
        return self._step(state, args, kwargs, stable=True)

    def evaluate(self, state: AmortizedState, *args: Any, **kwargs: Any) -> Array:
        """Evaluate the loss of the step that :meth:`update` would take next.

        Args:
            state: state before the step.
            *args: arguments of model and guide.
            **kwargs: keyword arguments of model and guide.

        Returns:
            The negative log density, averaged over the batch: a scalar.
        """
        objective = self._objective_for(state, args, kwargs)
        batch = objective.simulate_step(state.rng_key, state.step, args, kwargs)
        return objective.loss(self.optim.get_params(state.optim_state), state.mutable_state, batch, args, kwargs)[0]

    def run(
        self,
        rng_key: Array,
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        stable_update: bool = True,
        init_state: AmortizedState | None = None,
        init_params: Mapping[str, Any] | None = None,
        held_out: int = 0,
        evaluate_every: int | None = None,
        patience: int | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_every: int | None = None,
        **kwargs: Any,
    ) -> AmortizedRunResult:
        """Train, in compiled loops.

        What is trained does not depend, to the last bit, on how it is cut into runs: ``run`` with ``init_state``
        continues as one longer run would have, and a run with a ``checkpoint`` that was interrupted is resumed by the
        same call.

        Args:
            rng_key: a PRNG key; without effect if ``init_state`` is given.
            num_steps: number of steps, with a checkpoint those included that it holds already.
            *args: arguments of model and guide. JAX arrays are traced; all else, such as numbers that serve as sizes
                and NumPy arrays, is part of the compiled program.
            progress_bar: whether to show a bar with the first loss and the average of the latest ones.
            stable_update: whether to skip steps whose loss or gradient is not finite; they are counted in the state's
                ``num_skipped``.
            init_state: state to continue from, that of an earlier run.
            init_params: values to start param and mutable sites from, instead of the guide's own, by name.
            held_out: number of simulations that are set apart; their loss is kept in ``state.held_out``, and the
                parameters that are returned are those where it was smallest.
            evaluate_every: steps between two evaluations of the held-out simulations; by default num_steps / 20.
            patience: number of evaluations without improvement after which to stop; None to take all steps.
            checkpoint: path of a file to save the run in, and to resume it from if it exists: NumPy's npz format,
                without pickled objects. It holds digests of the model, the guide, the optimiser and the arguments.
            checkpoint_every: steps between two checkpoints; by default num_steps / 20.
            **kwargs: keyword arguments of model and guide.

        Returns:
            Parameters, the last state, and the loss of each step; fewer than ``num_steps`` if patience was lost.

        Raises:
            ValueError: if model and guide are not as the class asks, an option is out of range, or the checkpoint
                cannot be read or is of a run with another model, guide, optimiser, rng_key, batch_size, held_out, or
                other arguments.
        """
        options = Options(
            num_steps=num_steps,
            progress_bar=progress_bar,
            stable_update=stable_update,
            held_out=held_out,
            evaluate_every=evaluate_every,
            patience=patience,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
        )
        if init_state is None:
            init_state = self.init(rng_key, *args, init_params=init_params, **kwargs)
        run = Run(self._objective_for(init_state, args, kwargs), options, args, kwargs)
        state, losses = run.resumed(init_state)
        result = run.finish(state, losses)
        if skipped := skipped_note(init_state, result):
            warnings.warn(skipped, stacklevel=2)
        return result

    def _step(self, state: AmortizedState, args: tuple, kwargs: dict, *, stable: bool) -> tuple[AmortizedState, Array]:
        objective = self._objective_for(state, args, kwargs)
        batch = objective.simulate_step(state.rng_key, state.step, args, kwargs)
        return objective.step(state, batch, args, kwargs, stable=stable)

    def _objective_for(self, state: AmortizedState, args: tuple, kwargs: dict) -> Objective:
        """Return that of the latest start, or, for the state of another trainer, of a start with its key."""
        return self._objective or self._begin(state.rng_key, {}, args, kwargs)[0]

    def _begin(
        self, rng_key: Array, init_params: Mapping[str, Any], args: tuple, kwargs: dict
    ) -> tuple[Objective, FirstRun]:
        """Run model and guide once, and make the objective; what is compiled already is kept where it serves."""
        model_key, guide_key, _ = random.split(rng_key, 3)
        first = self._pair.first_run(model_key, guide_key, init_params, args, kwargs)
        objective = Objective(self._pair, self.batch_size, self.optim, first.latents, first.supports)
        if self._objective is None or not objective.is_like(self._objective):
            self._objective = objective
        return self._objective, first
