"""The trainer of guides by the expected forward KL: its state, a step, a run."""

import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.typing import ArrayLike
from numpyro.distributions import biject_to, constraints
from numpyro.handlers import substitute
from numpyro.infer import SVI
from numpyro.optim import Minimize
from numpyro.util import not_jax_tracer

from numpyro_wide._checks import are_known, check_key, progress, whole_number
from numpyro_wide._compile import cache_key, run_program, split
from numpyro_wide._traces import abstract_sites, run_model, values_of_type
from numpyro_wide.amortized._importance import ImportanceSample, importance_sample
from numpyro_wide.amortized._simulation import (
    Arrays,
    Draws,
    Recorder,
    bound,
    check_guide,
    check_params,
    check_simulator,
    draw_from_guide,
    log_density,
    refuse_missing,
    run_guide,
    simulate,
    site_names,
)
from numpyro_wide.amortized._training_data import call_simulator, check_simulations, epochs, split_held_out

AXIS_NAME = "simulations"
# Most numbers in the simulations of a block of steps, and its length.
_BLOCK_NUMBERS = 2**20
_LONGEST_BLOCK = 64


class HeldOut(NamedTuple):
    """Losses on simulations that are never trained on, and the best parameters so far.

    Attributes:
        steps: numbers of steps before each evaluation, (evaluations,).
        losses: losses in nats, (evaluations,).
        best_params: values of the guide's param and mutable sites at the smallest loss.
        best_loss: smallest loss, a scalar.
        best_step: number of steps before it, a scalar.
    """

    steps: Array
    losses: Array
    best_params: dict[str, Any]
    best_loss: Array
    best_step: Array


class AmortizedState(NamedTuple):
    """State of :class:`~numpyro_wide.AmortizedForwardKL`, a pytree.

    Attributes:
        optim_state: state of the optimiser, with the unconstrained parameters.
        mutable_state: values of the guide's mutable sites, or None.
        rng_key: a PRNG key of the whole run.
        step: number of steps, skipped ones included.
        num_skipped: number of steps skipped for a loss or gradient that was not finite.
        held_out: losses on held-out simulations, or None.
    """

    optim_state: tuple
    mutable_state: dict[str, object] | None
    rng_key: Array
    step: Array
    num_skipped: Array
    held_out: HeldOut | None = None


class AmortizedRunResult(NamedTuple):
    """Result of :meth:`AmortizedForwardKL.run <numpyro_wide.AmortizedForwardKL.run>`.

    Attributes:
        params: values of the guide's param and mutable sites, the last or the best held-out ones.
        state: last state, to continue from.
        losses: loss of each step in nats, (steps,); NaN for skipped steps.
    """

    params: dict[str, Any]
    state: AmortizedState
    losses: Array


class AmortizedForwardKL:
    """Trainer of one guide for every possible observation, on simulations of the model alone.

    It minimises the expected forward KL divergence (McNamara 2025, eq. 1; Mathematics, :eq:`forward`) with unbiased
    gradients (Prop. 5), for discrete latents and simulators too. With a wide network and an exponential family
    (:eq:`family`) it converges to the global optimum (Theorem 4).

    The guide samples latents of the model, by name and shape, for *one* data set, and marginalises the others. It is
    vmapped under the axis name ``"simulations"``, and mutable states are averaged over the batch. Afterwards
    ``Predictive(guide, params=params, num_samples=...)(rng_key, observed_values, *args)`` draws from the posterior.

    Args:
        model: ``model(*args, **kwargs)``, called without data, simulates every site; no param sites.
        guide: ``guide(observed_values, *args, **kwargs)``, with values of the observed sites by name.
        optim: an optimiser of NumPyro, of optax, or of ``jax.example_libraries``.
        observed: name, or names, of the sample or deterministic sites that are data.
        batch_size: number of simulations in each step.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
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
    """

    def __init__(
        self, model: Callable, guide: Callable, optim: object, *, observed: str | Sequence[str], batch_size: int = 16
    ):
        if isinstance(optim, Minimize):
            raise TypeError("Minimize needs a loss that is not random; pass optim.Adam.")
        self.model, self.guide, self.observed = model, guide, site_names(observed)
        self.batch_size = whole_number("batch_size", batch_size)
        self.optim = SVI(model, guide, optim, None).optim  # one of numpyro.optim
        self._latents: tuple[str, ...] = ()  # of the guide
        self._supports: dict[str, constraints.Constraint] | None = None  # of param sites, from init on
        self._programs: dict[Hashable, tuple[Callable, Callable]] = {}

    def init(
        self,
        rng_key: Array,
        *args: object,
        init_params: Mapping[str, object] | None = None,
        simulations: Arrays | None = None,
        **kwargs: object,
    ) -> AmortizedState:
        """Make the state before the first step; arguments as of :meth:`run`."""
        check_key("rng_key", rng_key, "(rng_key, *args); of run, (rng_key, num_steps, *args)")
        model, guide = bound(self.model, self.guide, args, kwargs)
        model_sites = abstract_sites(model, (), {})
        stored = simulations or {}
        simulated = tuple(name for name in self.observed if name in model_sites or name not in stored)
        check_simulator(model_sites, simulated)
        if stored and hasattr(self.guide, "standardisation"):  # as AutoAmortized has
            init_params = {**self.guide.standardisation(stored, *args, **kwargs), **(init_params or {})}
        latents: list[str] = []

        def single(rng_key: Array, observed_values: Draws) -> tuple[dict[str, object], dict[str, object], dict]:
            recorder = Recorder(guide)
            sites = run_guide(recorder, rng_key, init_params or {}, observed_values)
            check_guide(sites, model_sites, self.observed)
            latents[:] = values_of_type(sites, "sample")
            params = values_of_type(sites, "param")
            if not params:
                raise ValueError("the guide must have a param site, but has none; add numpyro.param or flax_module.")
            supports = {name: sites[name]["kwargs"].get("constraint", constraints.real) for name in params}
            recorded = {name: value for name, value in recorder.values.items() if value is not None}
            return params, {name: value for name, value in recorded.items() if name not in params}, supports

        def start(rng_key: Array, data: Draws) -> tuple[Array, tuple, dict[str, object] | None, dict]:
            model_key, guide_key, run_key = random.split(rng_key, 3)
            draws = data or simulate(model, model_key, self.observed)
            # A batch of one: guides may use the axis. Constraints that hold arrays are results, as the arrays are.
            observed_values = {name: jnp.asarray(draws[name])[None] for name in self.observed}
            values = jax.vmap(partial(single, guide_key), axis_name=AXIS_NAME)(observed_values)
            params, mutable, supports = jax.tree.map(lambda leaf: leaf[0], values)
            params = {name: biject_to(supports[name]).inv(value) for name, value in params.items()}
            params, mutable = jax.tree.map(_strongly_typed, (params, mutable))
            return run_key, self.optim.init(params), mutable or None, supports

        data = {name: stored[name][0] for name in self.observed} if stored else {}
        run_key, optim_state, mutable, supports = run_program(start, rng_key, data, quick=True)
        if simulations is not None:
            refuse_missing("simulations", latents, simulations, "latent site of the guide")
        if not _are_equal((tuple(latents), supports), (self._latents, self._supports)):
            self._programs = {}  # of another guide
        self._latents, self._supports = tuple(latents), supports
        zero = jnp.zeros((), jnp.int32)
        return AmortizedState(optim_state, mutable, run_key, zero, zero)

    def get_params(self, state: AmortizedState) -> dict[str, Any]:
        """Return the values of the guide's param sites, constrained, and of its mutable sites."""
        return self._constrained(self.optim.get_params(state.optim_state), state.mutable_state)

    def update(self, state: AmortizedState, *args: object, **kwargs: object) -> tuple[AmortizedState, Array]:
        """Take one step on fresh simulations; return the new state, and the loss before the step."""
        return self._initialised(state, args, kwargs)._step(state, stable=False)

    def stable_update(self, state: AmortizedState, *args: object, **kwargs: object) -> tuple[AmortizedState, Array]:
        """Take one step as :meth:`update` does, but skip it where the loss or its gradient is not finite."""
        return self._initialised(state, args, kwargs)._step(state, stable=True)

    def evaluate(self, state: AmortizedState, *args: object, **kwargs: object) -> Array:
        """Evaluate the loss of the next :meth:`update`, averaged over the batch: a scalar."""
        trainer = self._initialised(state, args, kwargs)
        batch = trainer._batch(state.rng_key, state.step)
        return trainer._loss(self.optim.get_params(state.optim_state), state.mutable_state, batch)[0]

    def run(
        self,
        rng_key: Array,
        num_steps: int,
        *args: object,
        progress_bar: bool = True,
        stable_update: bool = True,
        init_state: AmortizedState | None = None,
        init_params: Mapping[str, object] | None = None,
        held_out: int = 0,
        evaluate_every: int | None = None,
        patience: int | None = None,
        simulations: Arrays | None = None,
        **kwargs: object,
    ) -> AmortizedRunResult:
        """Train, in compiled loops; runs that continue each other equal one longer run, bit for bit.

        Given ``simulations``, an epoch has one step for each full batch of them. The model then gives names, shapes
        and priors; its observed sites need not be simulated.

        Args:
            rng_key: a PRNG key, unused with ``init_state``.
            num_steps: number of steps.
            *args: arguments of model and guide; JAX arrays are traced, all else is compiled in.
            progress_bar: whether to show a bar.
            stable_update: whether to skip steps with a loss or gradient that is not finite.
            init_state: state to continue from.
            init_params: first values of param and mutable sites, by name.
            held_out: number of held-out simulations, the last of ``simulations``; the parameters of their smallest loss
                are returned, be they of this run or of those that ``init_state`` comes from.
            evaluate_every: steps between held-out evaluations, num_steps / 20 by default.
            patience: number of evaluations without improvement before a stop; None for all steps.
            simulations: simulations {site: (n, ...)} of latents and data to train on instead of fresh ones, shuffled
                in every epoch. Those that are not finite, or have a latent at an end of its support, are left out.
            **kwargs: keyword arguments.
        """
        num_steps, held_out = whole_number("num_steps", num_steps), whole_number("held_out", held_out, 0)
        window = max(num_steps // 20, 1)
        if not held_out and (evaluate_every is not None or patience is not None):
            raise ValueError(
                "evaluate_every and patience are about held-out simulations; pass their number, held_out=1000."
            )
        interval = window if evaluate_every is None else whole_number("evaluate_every", evaluate_every)
        if patience is not None:
            patience = whole_number("patience", patience)
        stored = training = held_out_data = None
        if simulations is not None:
            stored = check_simulations(simulations, abstract_sites(self.model, args, kwargs), self.observed)
            training, held_out_data = split_held_out(stored, held_out, self.batch_size)
        if init_state is None:
            first_state = self.init(rng_key, *args, init_params=init_params, simulations=stored, **kwargs)
        else:
            first_state = init_state
            self._initialised(first_state, args, kwargs, stored)
        train, evaluate, arrays = self._compiled(args, kwargs)

        report_interval = window if progress_bar else num_steps  # of the bar's numbers
        max_length = min(report_interval, interval) if held_out else report_interval
        capacity = max(64, 1 << (max_length - 1).bit_length())
        state, num_done, until_evaluation = first_state, 0, num_steps + 1
        best: HeldOut | None = None
        loss_blocks: list[Array] = []
        if held_out:
            empty = jnp.zeros(0, jnp.int32), jnp.zeros(0)
            best = state.held_out or HeldOut(*empty, self.get_params(state), jnp.asarray(jnp.inf), state.step)
            if best.steps.size:  # these arguments and simulations may be others than those of the loss
                loss = evaluate(best.best_params, state.rng_key, arrays, held_out_data, num_simulations=held_out)
                best = best._replace(best_loss=loss)
            # At multiples of the step itself, for runs in pieces.
            until_evaluation = interval - int(state.step) % interval
        with progress(total=num_steps, shown=progress_bar) as bar:
            while num_done < num_steps and not _is_patience_lost(best, patience):
                length = min(num_steps - num_done, report_interval - num_done % report_interval, until_evaluation)
                start, steps = state._replace(held_out=None), jnp.asarray(length, jnp.int32)
                state, losses = train(start, steps, arrays, training, capacity=capacity, stable=stable_update)
                loss_blocks.append(losses[:length])
                num_done, until_evaluation = num_done + length, until_evaluation - length
                if best and until_evaluation == 0:
                    params, until_evaluation = self.get_params(state), interval
                    loss = evaluate(params, state.rng_key, arrays, held_out_data, num_simulations=held_out)
                    best = _with_evaluation(best, state.step, loss, params)
                if progress_bar:
                    bar.set_postfix_str(_postfix(state, best, np.concatenate(loss_blocks), window), refresh=False)
                bar.update(length)
        losses = jnp.concatenate([jnp.zeros(0), *loss_blocks])
        state = state._replace(held_out=best or first_state.held_out)
        params = best.best_params if best and np.isfinite(best.best_loss) else self.get_params(state)
        num_skipped = state.num_skipped - first_state.num_skipped
        if not_jax_tracer(losses) and 2 * num_skipped > len(losses):
            warnings.warn(
                f"{num_skipped} of {len(losses)} steps were skipped, as the loss or its gradient was not finite: "
                "compare the supports of guide and model.",
                stacklevel=2,
            )
        return AmortizedRunResult(params, state, losses)

    def simulate(self, rng_key: Array, num_samples: int, *args: object, **kwargs: object) -> Draws:
        """Simulate all sample and observed sites, with a leading axis (num_samples,)."""
        return self._bound(args, kwargs)._simulate(random.split(rng_key, whole_number("num_samples", num_samples)))

    def held_out_simulations(
        self, state: AmortizedState, num_simulations: int, *args: object, **kwargs: object
    ) -> Draws:
        """Simulate the held-out data of :meth:`run`, with a leading axis (num_simulations,)."""
        num_simulations = whole_number("num_simulations", num_simulations)
        return self._bound(args, kwargs)._held_out(state.rng_key, num_simulations)[0]

    def guide_log_prob(self, params: Mapping[str, object], draws: Draws, *args: object, **kwargs: object) -> Array:
        """Score simulations as of :meth:`simulate`, (num_samples,), by values of the guide's param and mutable sites.

        Minus their mean is the loss of McNamara 2025, Figure 1.
        """
        trainer = self._bound(args, kwargs)

        def check(observed_values: Draws) -> None:
            check_params(trainer.guide, random.key(0), params, observed_values)

        jax.vmap(check, axis_name=AXIS_NAME)({name: draws[name][:1] for name in self.observed})
        keys = random.split(random.key(0), len(draws[self.observed[0]]))
        return trainer._log_prob(params, draws, keys)[0]

    def importance_sample(
        self,
        rng_key: Array,
        num_samples: int,
        params: Mapping[str, object],
        observed_values: Draws,
        *args: object,
        **kwargs: object,
    ) -> ImportanceSample:
        """Weigh draws of the guide, by :func:`numpyro_wide.amortized.importance_sample` of the trainer's model."""
        refuse_missing("observed_values", self.observed, observed_values)
        return importance_sample(rng_key, num_samples, self.model, self.guide, params, observed_values, *args, **kwargs)

    def posterior_predictive(
        self,
        rng_key: Array,
        num_samples: int,
        params: Mapping[str, object],
        observed_values: Mapping[str, ArrayLike],
        *args: object,
        simulator: Callable | None = None,
        **kwargs: object,
    ) -> dict[str, Array | np.ndarray]:
        """Draw latents from the guide given one data set, and simulate new data from them.

        Values of all sample and observed sites have a leading axis (num_samples,); arguments as of
        :meth:`importance_sample`. With a ``simulator`` in Python, as of :func:`numpyro_wide.amortized.fit`, the model
        need not simulate the data; the sites are then those of the guide and the data.
        """
        check_key("rng_key", rng_key, "(rng_key, num_samples, params, observed_values)")
        refuse_missing("observed_values", self.observed, observed_values)
        values = {name: jnp.asarray(value) for name, value in observed_values.items()}
        model, guide = bound(self.model, self.guide, args, kwargs)
        check_simulator(run_model(model), self.observed if simulator is None else ())
        check_params(guide, rng_key, params, values)

        def single(key: Array) -> Draws:
            guide_key, model_key = random.split(key)
            latents, _ = draw_from_guide(guide, guide_key, params, values)
            return latents if simulator else simulate(substitute(model, data=latents), model_key, self.observed)

        draws = jax.jit(jax.vmap(single))(random.split(rng_key, whole_number("num_samples", num_samples)))
        return {**draws, **call_simulator(simulator, draws, self.observed)} if simulator else draws

    def _bound(self, args: tuple, kwargs: dict) -> "AmortizedForwardKL":
        """Return the trainer of model and guide with these arguments."""
        trainer = copy(self)
        trainer.model, trainer.guide = bound(self.model, self.guide, args, kwargs)
        return trainer

    def _initialised(
        self, state: AmortizedState, args: tuple, kwargs: dict, simulations: Arrays | None = None
    ) -> "AmortizedForwardKL":
        """Return the bound trainer; run the guide once if another trainer has made the state."""
        if self._supports is None:
            self.init(state.rng_key, *args, simulations=simulations, **kwargs)
        return self._bound(args, kwargs)

    def _constrained(self, unconstrained: Mapping[str, object], mutable: dict[str, object] | None) -> dict[str, Any]:
        if self._supports is None:
            raise ValueError("the guide's parameters are not known yet; call init or run first.")
        supports = self._supports
        return {name: biject_to(supports[name])(value) for name, value in unconstrained.items()} | (mutable or {})

    # Of a bound trainer.
    def _simulate(self, keys: Array) -> Draws:
        """Simulate once for each key, (n,)."""
        return jax.vmap(lambda key: simulate(self.model, key, self.observed))(keys)

    def _batch(self, rng_key: Array, step: Array) -> tuple[Draws, Array]:
        """Draw the simulations of one step, and keys for the guide."""
        keys = jax.vmap(random.split)(random.split(random.fold_in(rng_key, step), self.batch_size))
        draws = self._simulate(keys[:, 0])
        return self._guide_sites(draws), keys[:, 1]

    def _guide_sites(self, draws: Draws) -> Draws:
        """Return the sites that the guide samples or is shown."""
        return {name: draws[name] for name in (*self._latents, *self.observed)}

    def _held_out(self, rng_key: Array, num_simulations: int) -> tuple[Draws, Array]:
        """Simulate held-out data, and keys for the guide."""
        # No step has this number.
        keys = random.split(random.fold_in(rng_key, 2**32 - 1), (num_simulations, 2))
        return self._simulate(keys[:, 0]), keys[:, 1]

    def _log_prob(self, params: Mapping[str, object], draws: Draws, keys: Array) -> tuple[Array, dict[str, object]]:
        """Return the guide's log densities, (n,), and its mutable state."""
        observed_values = {name: draws[name] for name in self.observed}
        latents = {name: value for name, value in draws.items() if name not in self.observed}

        def single(latents: Draws, observed_values: Draws, key: Array) -> tuple[Array, dict[str, object]]:
            sites = run_guide(self.guide, key, params, observed_values, latents)
            return log_density(sites), values_of_type(sites, "mutable")

        log_q, mutable = jax.vmap(single, axis_name=AXIS_NAME)(latents, observed_values, keys)
        return log_q, jax.tree.map(_merge, mutable)

    def _loss(
        self, unconstrained: Mapping[str, object], mutable: dict[str, object] | None, batch: tuple
    ) -> tuple[Array, dict[str, object] | None]:
        """Return the loss of a batch, and the guide's mutable state."""
        draws, keys = batch
        log_q, mutable = self._log_prob(self._constrained(unconstrained, mutable), draws, keys)
        return -jnp.mean(log_q), mutable or None

    def _step(self, state: AmortizedState, batch: tuple | None = None, *, stable: bool) -> tuple[AmortizedState, Array]:
        """Follow the gradient on a batch, of fresh simulations if None; if ``stable`` only where it is finite."""
        batch = self._batch(state.rng_key, state.step) if batch is None else batch
        loss_of = partial(self._loss, mutable=state.mutable_state, batch=batch)
        follow = self.optim.eval_and_stable_update if stable else self.optim.eval_and_update
        (loss, mutable), optim_state = follow(loss_of, state.optim_state)
        num_skipped = state.num_skipped
        if stable:
            is_skipped = jnp.isnan(loss)
            num_skipped += is_skipped.astype(num_skipped.dtype)
            mutable = jax.tree.map(partial(jnp.where, is_skipped), state.mutable_state, mutable)
        return AmortizedState(optim_state, mutable, state.rng_key, state.step + 1, num_skipped, state.held_out), loss

    def _compiled(self, args: tuple, kwargs: dict) -> tuple[Callable, Callable, list[Array]]:
        """Return the compiled loop and held-out loss, and their arrays."""
        arrays, arguments = split((args, kwargs), Array)
        leaves, structure = jax.tree.flatten(arguments([Array] * len(arrays)))
        key = structure, tuple(map(cache_key, leaves))

        def train(
            state: AmortizedState, num_steps: Array, arrays: list[Array], stored: Draws | None, **options: Any
        ) -> tuple:
            return self._bound(*arguments(arrays))._train(state, num_steps, stored, **options)

        def held_out_loss(
            params: dict, rng_key: Array, arrays: list[Array], stored: Draws | None, num_simulations: int
        ) -> Array:
            trainer = self._bound(*arguments(arrays))
            if stored is None:
                draws, keys = trainer._held_out(rng_key, num_simulations)
            else:
                draws, keys = self._guide_sites(stored), random.split(rng_key, num_simulations)
            # A simulation that failed says nothing of the guide.
            is_finite = [jnp.isfinite(value).reshape(num_simulations, -1).all(axis=1) for value in draws.values()]
            return -jnp.mean(trainer._log_prob(params, draws, keys)[0], where=jnp.stack(is_finite).all(axis=0))

        if key not in self._programs:
            self._programs[key] = _program(train), _program(held_out_loss)
        return *self._programs[key], arrays

    def _blocks(self, key: Array, stored: Draws | None) -> tuple[int, Callable[[Array], tuple], Callable]:
        """Return the length of blocks of steps, the function that draws one, and the map of an entry to a batch."""
        if stored is not None:
            return epochs(key, self._guide_sites(stored), self.batch_size)
        jaxpr = jax.make_jaxpr(lambda: self._batch(key, jnp.zeros((), jnp.int32)))()
        largest = max(variable.aval.size for equation in jaxpr.eqns for variable in equation.outvars)
        length = int(max(1, min(_LONGEST_BLOCK, _BLOCK_NUMBERS // largest)))

        def draw(first_step: Array) -> tuple[Draws, Array]:
            return jax.vmap(lambda step: self._batch(key, step))(first_step + jnp.arange(length))

        return length, draw, lambda entry: entry

    def _train(
        self, state: AmortizedState, num_steps: Array, stored: Draws | None, *, capacity: int, stable: bool
    ) -> tuple[AmortizedState, Array]:
        """Take ``num_steps`` steps; return the state and the losses, (capacity,), NaN at the end."""
        # A block starts at a multiple of its length, and is drawn whole: numbers do not depend on cuts into runs.
        length, draw, batch_of = self._blocks(state.rng_key, stored)
        offset = state.step % length
        last = offset + num_steps

        def run_block(carry: tuple) -> tuple:
            state, losses, first_index = carry
            batches = draw(state.step - state.step % length)

            def take_step(i: Array, carry: tuple) -> tuple:
                state, losses = carry
                entry = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False), batches)
                state, loss = self._step(state, batch_of(entry), stable=stable)
                return state, lax.dynamic_update_index_in_dim(losses, loss.astype(losses.dtype), i, 0)

            # By block: a long array would be copied at every step.
            begin, end = state.step % length, jnp.minimum(length, last - first_index)
            state, block = lax.fori_loop(begin, end, take_step, (state, jnp.full(length, jnp.nan)))
            return state, lax.dynamic_update_slice_in_dim(losses, block, first_index, 0), first_index + length

        num_blocks = (capacity + length - 1) // length + 1
        carry = state, jnp.full(num_blocks * length, jnp.nan), jnp.zeros_like(state.step)
        state, losses, _ = lax.while_loop(lambda carry: carry[2] < last, run_block, carry)
        return state, lax.dynamic_slice_in_dim(losses, offset, capacity)


def _merge(leaf: Array) -> Array:
    """Merge the states (n, ...) of a batch into one, strongly typed."""
    # Equal states stay as they are, to the last bit.
    merged = leaf[0] + (leaf - leaf[:1]).mean(0) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf[0]
    return lax.convert_element_type(merged, leaf.dtype)


def _program(fn: Callable) -> Callable:
    """Return a function that is compiled for arrays like its arguments, and for each value of its keywords."""
    with_options = cache(lambda **options: partial(fn, **options))  # JAX traces one function once
    return lambda *args, **options: run_program(with_options(**options), *args)


def _are_equal(left: object, right: object) -> bool:
    # Constraints that hold arrays of a program are not equal by their own rule.
    left_leaves, right_leaves = jax.tree.leaves(left), jax.tree.leaves(right)
    structure: Any = jax.tree.structure(left)
    is_same = structure == jax.tree.structure(right) and are_known((left_leaves, right_leaves))
    return is_same and all(map(np.array_equal, left_leaves, right_leaves))


def _strongly_typed(leaf: ArrayLike) -> Array:
    # Weak types would be compiled again after the first step.
    return lax.convert_element_type(leaf, jnp.result_type(leaf))


def _with_evaluation(held_out: HeldOut, step: Array, loss: Array, params: dict[str, Any]) -> HeldOut:
    """Add an evaluation of the held-out simulations."""
    # By NumPy: JAX would compile for every length.
    steps, losses = jnp.asarray(np.append(held_out.steps, step)), jnp.asarray(np.append(held_out.losses, loss))
    if loss < held_out.best_loss:
        return HeldOut(steps, losses, params, loss, step)
    return held_out._replace(steps=steps, losses=losses)


def _is_patience_lost(held_out: HeldOut | None, patience: int | None) -> bool:
    if patience is None or held_out is None:
        return False
    return bool(np.sum(np.asarray(held_out.steps) > int(held_out.best_step)) >= patience)


def _postfix(state: AmortizedState, held_out: HeldOut | None, losses: np.ndarray, window: int) -> str:
    last = losses[(len(losses) - 1) // window * window :]
    average = np.nanmean(last) if np.isfinite(last).any() else math.nan
    text = f"init loss: {losses[0]:.4f}, avg. loss [{len(losses) - len(last) + 1}-{len(losses)}]: {average:.4f}"
    if held_out is not None and held_out.steps.size:
        text += f", held-out loss: {np.asarray(held_out.losses)[-1]:.4f}"
    return text + (f", skipped: {state.num_skipped}" if state.num_skipped else "")
