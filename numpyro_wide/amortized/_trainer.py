"""The trainer."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.example_libraries import optimizers
from numpyro.optim import Minimize, _NumPyroOptim, optax_to_numpyro

from numpyro_wide.amortized._importance import ImportanceSample, importance_sample
from numpyro_wide.amortized._loop import compile_programs
from numpyro_wide.amortized._objective import Objective
from numpyro_wide.amortized._run import Run, checked_options
from numpyro_wide.amortized._sites import Draws, check_model, trace_model
from numpyro_wide.amortized._state import AmortizedRunResult, AmortizedState


class AmortizedForwardKL:
    r"""Trains a guide for every possible observation at once, on simulations of the model alone.

    Minimises the expected forward KL divergence (McNamara 2025, eq. 1; Mathematics, :eq:`forward`)

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
        TypeError: if ``optim`` is no optimiser, ``observed`` not made of names, or model or guide not callable.
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
        if not callable(model) or not callable(guide):
            raise TypeError(f"model and guide must be functions, got {type(model).__name__}, {type(guide).__name__}.")
        names = (observed,) if isinstance(observed, str) or not isinstance(observed, Sequence) else tuple(observed)
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"observed must be the name of a site, or a sequence of names, got {observed!r}.")
        if not names:
            raise ValueError("observed must name at least one site; without data there is nothing to condition on.")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}.")
        self.model, self.guide, self.observed, self.batch_size = model, guide, names, batch_size
        self.optim = _as_numpyro_optim(optim)
        self._objective = Objective(model, guide, names, batch_size, self.optim)
        self._programs = compile_programs(self._objective)

    def init(
        self, rng_key: Array, *args: Any, init_params: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> AmortizedState:
        """Make the state before the first step.

        Args:
            rng_key: a PRNG key, that of the initial parameters and of all simulations.
            *args: arguments of model and guide.
            init_params: values to start param and mutable sites from, instead of the guide's own.
            **kwargs: keyword arguments of model and guide.

        Returns:
            The state.

        Raises:
            ValueError: if model and guide are not as the class asks.
        """
        model_key, guide_key, run_key = random.split(rng_key, 3)
        model_sites = trace_model(self.model, model_key, args, kwargs)
        check_model(model_sites, self.observed)
        params, mutable = self._objective.initial_values(guide_key, model_sites, init_params or {}, args, kwargs)
        if not params:
            raise ValueError("the guide has no param site, and so nothing to train; see numpyro.param, flax_module.")
        # What is weakly typed at first would be compiled a second time.
        params, mutable = jax.tree.map(_strongly_typed, (params, mutable))
        zero = jnp.zeros((), jnp.int32)
        return AmortizedState(self.optim.init(params), mutable or None, run_key, zero, zero)

    def get_params(self, state: AmortizedState) -> dict[str, Any]:
        """Read the parameters off a state.

        Args:
            state: the trainer's state.

        Returns:
            Values at the guide's param sites, constrained, and at its mutable sites: what ``Predictive`` needs.

        Raises:
            ValueError: if neither :meth:`init` nor :meth:`run` has been called.
        """
        return self._objective.get_params(state)

    def update(self, state: AmortizedState, *args: Any, **kwargs: Any) -> tuple[AmortizedState, Array]:
        """Take one step on fresh simulations.

        Args:
            state: the trainer's state.
            *args: arguments of model and guide.
            **kwargs: keyword arguments of model and guide.

        Returns:
            The new state, and the loss before the step.
        """
        return self._step(state, args, kwargs, stable=False)

    def stable_update(self, state: AmortizedState, *args: Any, **kwargs: Any) -> tuple[AmortizedState, Array]:
        """Take one step as :meth:`update` does, unless the loss or its gradient is not finite.

        Args:
            state: the trainer's state.
            *args: arguments of model and guide.
            **kwargs: keyword arguments of model and guide.

        Returns:
            The new state and the loss; if the step is skipped, the old parameters, ``num_skipped`` one higher, and NaN.
        """
        return self._step(state, args, kwargs, stable=True)

    def evaluate(self, state: AmortizedState, *args: Any, **kwargs: Any) -> Array:
        """Loss of the step that :meth:`update` would take next.

        Args:
            state: the trainer's state.
            *args: arguments of model and guide.
            **kwargs: keyword arguments of model and guide.

        Returns:
            The negative log density, averaged over the batch: a scalar.
        """
        self._get_ready(state, args, kwargs)
        batch = self._objective.simulate_step(state.rng_key, state.step, args, kwargs)
        params = self._objective.optim.get_params(state.optim_state)
        return self._objective.loss(params, state.mutable_state, batch, args, kwargs)[0]

    def simulate(self, rng_key: Array, num_samples: int, *args: Any, **kwargs: Any) -> Draws:
        """Simulate data sets with their latents.

        Args:
            rng_key: a PRNG key.
            num_samples: number of simulations.
            *args: arguments of the model.
            **kwargs: keyword arguments of the model.

        Returns:
            Values of all sample sites and of the observed ones, with a leading axis of length ``num_samples``.
        """
        return self._objective.simulate(random.split(rng_key, num_samples), args, kwargs)

    def held_out_simulations(self, state: AmortizedState, num_simulations: int, *args: Any, **kwargs: Any) -> Draws:
        """Simulate what :meth:`run` with ``held_out=num_simulations`` evaluates, and never trains on.

        Args:
            state: any state of the run.
            num_simulations: number of simulations.
            *args: arguments of the model.
            **kwargs: keyword arguments of the model.

        Returns:
            As :meth:`simulate`.
        """
        return self._objective.held_out(state.rng_key, num_simulations, args, kwargs)[0]

    def guide_log_prob(self, params: Mapping[str, Any], draws: Draws, *args: Any, **kwargs: Any) -> Array:
        """Score simulations; minus the mean over many is the negative log-likelihood of McNamara 2025, Figure 1.

        Args:
            params: what :meth:`get_params` or :meth:`run` gave.
            draws: what :meth:`simulate` gave.
            *args: arguments of the guide.
            **kwargs: keyword arguments of the guide.

        Returns:
            Log density under the guide of the latents that it covers, given the observed values, (num_samples,).
        """
        num_samples = len(draws[self.observed[0]])
        keys = random.split(random.key(0), num_samples)
        return self._objective.log_prob(params, draws, keys, args, kwargs)[0]

    def importance_sample(
        self,
        rng_key: Array,
        params: Mapping[str, Any],
        observed_values: Draws,
        num_samples: int,
        *args: Any,
        **kwargs: Any,
    ) -> ImportanceSample:
        """Draw from the guide given one observation, and weigh the draws to the posterior.

        For models whose likelihood is tractable, with guides that cover all latents. Weights are smoothed by ArviZ
        (Vehtari et al. 2024); a tail shape above 0.7 says that the guide misses parts of this posterior.

        Args:
            rng_key: a PRNG key.
            params: what :meth:`get_params` or :meth:`run` gave.
            observed_values: values of the observed sites, one data set.
            num_samples: number of draws.
            *args: arguments of model and guide.
            **kwargs: keyword arguments of model and guide.

        Returns:
            Draws, log weights, the Pareto shape of the weights, and their effective sample size.

        Raises:
            TypeError: if ``observed_values`` is no dictionary.
            ValueError: if the guide marginalises a latent, an observed site is a function of the latents, or
                ``observed_values`` has other keys than ``observed``, or other shapes than the model simulates.
            FloatingPointError: if no weight is positive and finite.
        """
        return importance_sample(
            rng_key, self.model, self.guide, self.observed, params, observed_values, num_samples, args, kwargs
        )

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

        What is trained does not depend, to the last bit, on how it is cut into runs: ``run`` with ``init_state`` goes
        on as one longer run would have, and a run with a ``checkpoint`` that was interrupted is resumed by the same
        call.

        Args:
            rng_key: a PRNG key; without effect if ``init_state`` is given.
            num_steps: number of steps, with a checkpoint those included that it holds already.
            *args: arguments of model and guide. JAX arrays are traced; all else, such as numbers that serve as sizes
                and NumPy arrays, is part of the compiled program.
            progress_bar: whether to show a bar with the first loss and the average of the latest ones.
            stable_update: whether to skip steps whose loss or gradient is not finite; they are counted in the state's
                ``num_skipped``.
            init_state: state to go on from, that of an earlier run.
            init_params: as for :meth:`init`.
            held_out: number of simulations that are set apart; their loss is kept in ``state.held_out``, and the
                parameters that are returned are those where it was smallest.
            evaluate_every: steps between two evaluations of the held-out simulations; by default num_steps / 20.
            patience: stop after this many evaluations without improvement.
            checkpoint: a file to save the run in, and to resume it from if it exists: NumPy's npz format, without
                pickled objects.
            checkpoint_every: steps between two checkpoints; by default num_steps / 20.
            **kwargs: keyword arguments of model and guide.

        Returns:
            Parameters, the last state, and the loss of each step; fewer than ``num_steps`` if patience was lost.

        Raises:
            ValueError: as :meth:`init` does; if an option is out of range, or the checkpoint is of another run.
        """
        options = checked_options(
            num_steps, progress_bar, stable_update, held_out, evaluate_every, patience, checkpoint, checkpoint_every
        )
        if init_state is None:
            init_state = self.init(rng_key, *args, init_params=init_params, **kwargs)
        self._get_ready(init_state, args, kwargs)
        return Run(self._objective, self._programs, options, args, kwargs)(init_state, num_steps)

    def _step(self, state: AmortizedState, args: tuple, kwargs: dict, *, stable: bool) -> tuple[AmortizedState, Array]:
        self._get_ready(state, args, kwargs)
        batch = self._objective.simulate_step(state.rng_key, state.step, args, kwargs)
        return self._objective.step(state, batch, args, kwargs, stable=stable)

    def _get_ready(self, state: AmortizedState, args: tuple, kwargs: dict) -> None:
        """Learn the guide's sites, if a state of another trainer is gone on from."""
        if not self._objective.is_ready:
            self.init(state.rng_key, *args, **kwargs)


def _strongly_typed(leaf: Any) -> Array:
    return lax.convert_element_type(leaf, jnp.result_type(leaf))


def _as_numpyro_optim(optim: Any) -> _NumPyroOptim:
    if isinstance(optim, Minimize):
        raise TypeError("Minimize needs a loss that is not random; pass a stochastic optimiser, such as optim.Adam.")
    if isinstance(optim, _NumPyroOptim):
        return optim
    if isinstance(optim, optimizers.Optimizer):
        return _NumPyroOptim(lambda *functions: functions, *optim)
    import optax  # heavy, and needed here alone

    if isinstance(optim, optax.GradientTransformation):
        return optax_to_numpyro(optim)
    raise TypeError(f"optim must be an optimiser of numpyro.optim or optax, got {type(optim).__name__}.")
