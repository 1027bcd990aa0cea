"""The trainer of guides by the expected forward KL, and its state."""

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.example_libraries import optimizers
from numpyro.distributions import biject_to, constraints
from numpyro.infer.util import transform_fn
from numpyro.optim import Minimize, _NumPyroOptim, optax_to_numpyro
from numpyro.primitives import Messenger
from numpyro.util import not_jax_tracer
from tqdm.auto import tqdm

from numpyro_wide import _resume
from numpyro_wide._checks import check_key, whole_number
from numpyro_wide._compile import Static, combine, digest, partition, program_digest
from numpyro_wide._traces import run_model
from numpyro_wide.amortized._importance import ImportanceSample, check_observed_values, importance_sample
from numpyro_wide.amortized._simulation import (
    Draws,
    check_guide,
    check_params,
    check_simulator,
    log_density,
    run_guide,
    simulate,
    site_names,
    values_of_type,
)


class HeldOut(NamedTuple):
    """Losses on a fixed set of simulations that is never trained on, and the best parameters so far.

    Attributes:
        steps: numbers of the steps after which the set was evaluated, (evaluations,).
        losses: losses on the set, in nats, (evaluations,).
        best_params: values of the guide's param and mutable sites where the loss was smallest.
        best_loss: smallest loss, a scalar.
        best_step: number of the step after which it was reached, a scalar.
    """

    steps: Array
    losses: Array
    best_params: dict[str, Any]
    best_loss: Array
    best_step: Array


class AmortizedState(NamedTuple):
    """State of :class:`~numpyro_wide.AmortizedForwardKL`, a pytree.

    Attributes:
        optim_state: state of the optimiser, which holds the unconstrained parameters.
        mutable_state: values of the guide's mutable sites; None if there is none.
        rng_key: a PRNG key of the whole run: the simulations of a step depend on it and on the number of the step
            alone.
        step: number of steps taken, those that were skipped included.
        num_skipped: number of steps that were not taken because the loss or its gradient was not finite.
        held_out: losses on held-out simulations, if ``run`` was asked to evaluate them.
    """

    optim_state: Any
    mutable_state: dict[str, Any] | None
    rng_key: Array
    step: Array
    num_skipped: Array
    held_out: HeldOut | None = None


class AmortizedRunResult(NamedTuple):
    """Result of :meth:`AmortizedForwardKL.run <numpyro_wide.AmortizedForwardKL.run>`.

    Attributes:
        params: values of the guide's param and mutable sites: the last ones, or the best ones on held-out simulations.
        state: last state, from which training can continue.
        losses: loss of each step in nats, NaN where the step was skipped, (steps,).
    """

    params: dict[str, Any]
    state: AmortizedState
    losses: Array


def as_numpyro_optim(optim: Any) -> _NumPyroOptim:
    """Return the optimiser as one of ``numpyro.optim``.

    Raises:
        TypeError: if it is not an optimiser, or one that needs a loss without noise.
    """
    if isinstance(optim, Minimize):
        raise TypeError("Minimize needs a loss that is not random; pass a stochastic optimiser, such as optim.Adam.")
    if isinstance(optim, _NumPyroOptim):
        return optim
    if isinstance(optim, optimizers.Optimizer):
        return _NumPyroOptim(lambda *functions: functions, *optim)
    import optax  # NumPyro runs without it

    if isinstance(optim, optax.GradientTransformation):
        return optax_to_numpyro(optim)
    raise TypeError(f"optim must be an optimiser of numpyro.optim or optax, got {type(optim).__name__}.")


AXIS_NAME = "simulations"


class FirstRun(NamedTuple):
    """Sites of a guide, read off its first run.

    Attributes:
        latents: names of the latents that the guide covers.
        supports: constraints of its param sites, by name.
        params: constrained values that its param sites start from, by name.
        mutable: values that its mutable sites start from, by name.
    """

    latents: tuple[str, ...]
    supports: dict[str, Any]
    params: dict[str, Any]
    mutable: dict[str, Any]


class ModelAndGuide(NamedTuple):
    """Model that simulates and guide that scores.

    Attributes:
        model: ``model(*args, **kwargs)``.
        guide: ``guide(observed_values, *args, **kwargs)`` for one data set.
        observed: names of the sites that are data to the guide.
    """

    model: Callable
    guide: Callable
    observed: tuple[str, ...]

    def first_run(
        self, model_key: Array, guide_key: Array, params: Mapping[str, Any], args: tuple, kwargs: dict
    ) -> FirstRun:
        """Run both once, check that they fit, and read the guide's sites off its run.

        The guide runs on one simulation, as a batch of it, for it may ask for the batch's axis.
        """
        model_sites = run_model(self.model, args, kwargs, rng_key=model_key)
        check_simulator(model_sites, self.observed)
        latents: list[str] = []
        supports: dict[str, Any] = {}

        def single(observed_values: Draws) -> tuple[dict[str, Any], dict[str, Any]]:
            guide = _InitialState(self.guide)
            sites = run_guide(guide, guide_key, params, observed_values, args, kwargs)
            check_guide(sites, model_sites, self.observed)
            latents.extend(values_of_type(sites, "sample"))
            for name, site in sites.items():
                if site["type"] == "param":
                    supports[name] = site["kwargs"].get("constraint", constraints.real)
            return values_of_type(sites, "param"), guide.values

        observed_values = {name: jnp.asarray(model_sites[name]["value"])[None] for name in self.observed}
        values = jax.vmap(single, axis_name=AXIS_NAME)(observed_values)
        initial, mutable = jax.tree.map(lambda leaf: leaf[0], values)
        return FirstRun(tuple(latents), supports, initial, mutable)

    def simulate(self, keys: Array, args: tuple, kwargs: dict) -> Draws:
        """Simulate once for each key, (n,); the values have a leading axis (n,)."""
        return jax.vmap(lambda key: simulate(self.model, key, self.observed, args, kwargs))(keys)

    def held_out(self, rng_key: Array, num_simulations: int, args: tuple, kwargs: dict) -> tuple[Draws, Array]:
        """Simulate what no step is trained on, with a key for the guide beside each."""
        # Steps fold in their numbers, which do not come as far as this one.
        keys = random.split(random.fold_in(rng_key, 2**32 - 1), (num_simulations, 2))
        return self.simulate(keys[:, 0], args, kwargs), keys[:, 1]

    def log_prob(
        self, params: Mapping[str, Any], draws: Draws, keys: Array, args: tuple, kwargs: dict
    ) -> tuple[Array, dict[str, Any]]:
        """Score the latents of each simulation.

        Args:
            params: values of the guide's param and mutable sites, by name.
            draws: values of the latents and of the observed sites, by name, with a leading axis (n,).
            keys: PRNG keys for the guide, (n,).
            args: further arguments of the guide.
            kwargs: keyword arguments of the guide.

        Returns:
            The guide's log density of each simulation's latents, (n,), and the mutable state that it leaves.
        """
        observed_values = {name: draws[name] for name in self.observed}
        latents = {name: value for name, value in draws.items() if name not in self.observed}

        def single(latents: Draws, observed_values: Draws, key: Array) -> tuple[Array, dict[str, Any]]:
            sites = run_guide(self.guide, key, params, observed_values, args, kwargs, latents)
            return log_density(sites), values_of_type(sites, "mutable")

        log_q, mutable = jax.vmap(single, axis_name=AXIS_NAME)(latents, observed_values, keys)
        return log_q, jax.tree.map(_merge, mutable)

    def check_params(self, params: Mapping[str, Any], draws: Draws, args: tuple, kwargs: dict) -> None:
        """Refuse parameters that lack one of the guide's sites."""
        first = {name: draws[name][:1] for name in self.observed}

        def single(observed_values: Draws) -> None:
            check_params(self.guide, random.key(0), params, observed_values, args, kwargs)

        jax.vmap(single, axis_name=AXIS_NAME)(first)


class _InitialState(Messenger):
    """Recorder of what mutable sites hold before the guide writes into them."""

    def __init__(self, fn: Callable):
        super().__init__(fn)
        self.values: dict[str, Any] = {}

    def postprocess_message(self, msg: Any) -> None:
        if msg["type"] == "mutable" and msg["value"] is not None:
            self.values[msg["name"]] = jax.tree.map(lambda leaf: leaf, msg["value"])


def _merge(leaf: Array) -> Array:
    """Merge the states (n, ...) that the simulations of a batch leave into one, strongly typed as the first one."""
    merged = leaf.mean(0) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf[0]
    return lax.convert_element_type(merged, leaf.dtype)


class SimulatorAndGuide:
    """A model that simulates and a guide that scores: what a trainer has before and after it trains.

    Args:
        model: ``model(*args, **kwargs)``.
        guide: ``guide(observed_values, *args, **kwargs)`` for one data set.
        observed: name, or names, of the sites that are data to the guide.

    Raises:
        TypeError: if ``observed`` is not made of names, or model or guide not callable.
        ValueError: if ``observed`` is empty.
    """

    def __init__(self, model: Callable, guide: Callable, observed: str | Sequence[str]):
        if not callable(model) or not callable(guide):
            raise TypeError(
                f"model and guide must be functions, got {type(model).__name__}, {type(guide).__name__}; the order is "
                "AmortizedForwardKL(model, guide, optim, observed=...)."
            )
        self.model, self.guide, self.observed = model, guide, site_names(observed)
        self._pair = ModelAndGuide(self.model, self.guide, self.observed)

    def simulate(self, rng_key: Array, num_samples: int, *args: Any, **kwargs: Any) -> Draws:
        """Simulate data sets with their latents.

        Args:
            rng_key: a PRNG key.
            num_samples: number of simulations.
            *args: arguments of the model.
            **kwargs: keyword arguments of the model.

        Returns:
            Values of all sample sites and of the observed ones, with a leading axis (num_samples,).
        """
        return self._pair.simulate(random.split(rng_key, whole_number("num_samples", num_samples)), args, kwargs)

    def held_out_simulations(self, state: AmortizedState, num_simulations: int, *args: Any, **kwargs: Any) -> Draws:
        """Simulate what :meth:`run` with ``held_out=num_simulations`` evaluates, and never trains on.

        Args:
            state: any state of the run, whose key decides the simulations.
            num_simulations: number of simulations.
            *args: arguments of the model.
            **kwargs: keyword arguments of the model.

        Returns:
            Values of all sample sites and of the observed ones, with a leading axis (num_simulations,).
        """
        num_simulations = whole_number("num_simulations", num_simulations)
        return self._pair.held_out(state.rng_key, num_simulations, args, kwargs)[0]

    def guide_log_prob(self, params: Mapping[str, Any], draws: Draws, *args: Any, **kwargs: Any) -> Array:
        """Score simulations; minus the mean over many is the negative log-likelihood of McNamara 2025, Figure 1.

        Args:
            params: values of the guide's param and mutable sites, as :meth:`get_params` or :meth:`run` gave them.
            draws: values of all sample and observed sites, with a leading axis (num_samples,), as :meth:`simulate`
                gave them.
            *args: arguments of the guide.
            **kwargs: keyword arguments of the guide.

        Returns:
            Log density under the guide of the latents that it covers, given the observed values, (num_samples,).

        Raises:
            ValueError: if ``params`` lacks values of the guide's param sites.
        """
        num_samples = len(draws[self.observed[0]])
        keys = random.split(random.key(0), num_samples)
        self._pair.check_params(params, draws, args, kwargs)
        return self._pair.log_prob(params, draws, keys, args, kwargs)[0]

    def importance_sample(
        self,
        rng_key: Array,
        num_samples: int,
        params: Mapping[str, Any],
        observed_values: Draws,
        *args: Any,
        **kwargs: Any,
    ) -> ImportanceSample:
        """Draw from the guide given one observation, and weigh the draws to the posterior.

        This is :func:`numpyro_wide.amortized.importance_sample` of the trainer's model and guide.

        Args:
            rng_key: a PRNG key.
            num_samples: number of draws.
            params: values of the guide's param and mutable sites, as :meth:`get_params` or :meth:`run` gave them.
            observed_values: values of the observed sites of one data set, by name.
            *args: arguments of model and guide.
            **kwargs: keyword arguments of model and guide.

        Returns:
            Draws, log weights, the Pareto shape of the weights, and their effective sample size.

        Raises:
            ValueError: if ``observed_values`` has other keys than ``observed``, or as the function does.
        """
        check_observed_values(observed_values, self.observed)
        return importance_sample(rng_key, num_samples, self.model, self.guide, params, observed_values, *args, **kwargs)


@dataclass(frozen=True)
class Objective:
    """Expected forward KL divergence of one model and guide, with its optimiser.

    Attributes:
        pair: model, guide and names of the observed sites.
        batch_size: number of simulations in a step.
        optim: optimiser of the unconstrained parameters.
        latents: names of the latents that the guide covers.
        supports: constraints of the guide's param sites, by name.
    """

    pair: ModelAndGuide
    batch_size: int
    optim: _NumPyroOptim
    latents: tuple[str, ...]
    supports: dict[str, Any]

    @cached_property
    def train(self) -> Callable:
        """Compiled :func:`~numpyro_wide.amortized._trainer.train`; a static argument that changes compiles it anew."""
        return jax.jit(partial(train, self), static_argnames=("static", "capacity", "stable"))

    @cached_property
    def held_out_loss(self) -> Callable:
        """Compiled :func:`~numpyro_wide.amortized._trainer.held_out_loss`."""
        return jax.jit(partial(held_out_loss, self), static_argnames=("static", "num_simulations"))

    def is_like(self, other: "Objective | None") -> bool:
        """Tell whether the programs that are compiled for the other objective serve for this one."""
        try:
            return self == other
        except jax.errors.JAXTypeError:  # bounds of a support that are being traced
            return False

    @cached_property
    def transforms(self) -> dict[str, Any]:
        """Maps from unconstrained numbers to the values of each param site, by name."""
        return {name: biject_to(support) for name, support in self.supports.items()}

    def start(self, rng_key: Array, first: FirstRun) -> AmortizedState:
        """Make the state before the first step, from the values that the guide's param and mutable sites start from."""
        if not first.params:
            raise ValueError(
                "the guide must have a param site, but has none, and so nothing to train; add numpyro.param or "
                "flax_module."
            )
        params = {name: self.transforms[name].inv(value) for name, value in first.params.items()}
        params, mutable = jax.tree.map(_strongly_typed, (params, first.mutable))
        zero = jnp.zeros((), jnp.int32)
        return AmortizedState(self.optim.init(params), mutable or None, rng_key, zero, zero)

    def constrain(self, unconstrained: dict[str, Any]) -> dict[str, Any]:
        """Map unconstrained numbers to the values of the guide's param sites."""
        return transform_fn(self.transforms, unconstrained)

    def get_params(self, state: AmortizedState) -> dict[str, Any]:
        """Read the values of the guide's param and mutable sites off a state."""
        return {**self.constrain(self.optim.get_params(state.optim_state)), **(state.mutable_state or {})}

    def simulate_step(self, rng_key: Array, step: Array, args: tuple, kwargs: dict) -> tuple[Draws, Array]:
        """Draw the simulations of one step, and a key for the guide beside each."""
        keys = jax.vmap(random.split)(random.split(random.fold_in(rng_key, step), self.batch_size))
        draws = self.pair.simulate(keys[:, 0], args, kwargs)
        return {name: draws[name] for name in (*self.latents, *self.pair.observed)}, keys[:, 1]

    def loss(
        self, unconstrained: dict[str, Any], mutable: dict[str, Any] | None, batch: tuple, args: tuple, kwargs: dict
    ) -> tuple[Array, dict[str, Any] | None]:
        """Return the negative mean log density of a batch, and the mutable state that the guide leaves."""
        params = {**self.constrain(unconstrained), **(mutable or {})}
        draws, keys = batch
        log_q, mutable = self.pair.log_prob(params, draws, keys, args, kwargs)
        return -jnp.mean(log_q), mutable or None

    def step(
        self, state: AmortizedState, batch: tuple, args: tuple, kwargs: dict, *, stable: bool
    ) -> tuple[AmortizedState, Array]:
        """Follow the gradient on a batch; if ``stable``, keep the old values where anything is not finite."""
        loss_fn = partial(self.loss, mutable=state.mutable_state, batch=batch, args=args, kwargs=kwargs)
        params = self.optim.get_params(state.optim_state)
        (loss, mutable), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params)

        def follow() -> tuple[Any, Any]:
            return self.optim.update(gradient, state.optim_state, value=loss), mutable

        if not stable:
            optim_state, mutable_state = follow()
            return state._replace(optim_state=optim_state, mutable_state=mutable_state, step=state.step + 1), loss
        finite = jnp.isfinite(loss)
        for leaf in jax.tree.leaves(gradient):
            finite &= jnp.isfinite(leaf).all()
        # Selecting leaf by leaf would take a fifth longer.
        optim_state, mutable_state = lax.cond(finite, follow, lambda: (state.optim_state, state.mutable_state))
        num_skipped = state.num_skipped + (~finite).astype(state.num_skipped.dtype)
        new = AmortizedState(optim_state, mutable_state, state.rng_key, state.step + 1, num_skipped, state.held_out)
        return new, jnp.where(finite, loss, jnp.nan)


def _strongly_typed(leaf: Any) -> Array:
    # A weakly typed state would be compiled again after the first step, which leaves strong types.
    return lax.convert_element_type(leaf, jnp.result_type(leaf))


# Entries of the fingerprint that are digests of programs, which other versions of libraries write in other ways.
PROGRAMS = ("model", "guide", "optimiser")


def fingerprint(
    objective: Objective, state: AmortizedState, arrays: list[Array], static: Static, num_held_out: int
) -> str:
    """Write as one line of text all that decides where a run goes.

    Args:
        objective: loss and optimiser.
        state: state before the first step.
        arrays: JAX arrays among the arguments of model and guide.
        static: other arguments of model and guide.
        num_held_out: number of held-out simulations.

    Returns:
        A JSON object with numbers, digests of programs, and versions of libraries.
    """
    return json.dumps(
        {
            # The key and the batch size come with every call, and are easily mistaken for one another's effect.
            "rng_key or batch_size": digest(state.rng_key, objective.batch_size),
            "arguments": digest(static.leaves, str(static.structure), arrays),
            **_program_digests(objective, state, arrays, static),
            "held_out": num_held_out,
            "versions": _resume.versions(),
        }
    )


def _program_digests(
    objective: Objective, state: AmortizedState, arrays: list[Array], static: Static
) -> dict[str, str]:
    pair, optim = objective.pair, objective.optim
    params = optim.get_params(state.optim_state)
    keys = state.rng_key[None]

    def simulate(keys: Array, arrays: list[Array]) -> Any:
        return pair.simulate(keys, *combine(arrays, static))

    def score(params: Any, mutable: Any, batch: tuple, arrays: list[Array]) -> Any:
        # With its gradient, for a function may have a derivative of its own making.
        args, kwargs = combine(arrays, static)
        return jax.value_and_grad(objective.loss, has_aux=True)(params, mutable, batch, args, kwargs)

    def follow(gradient: Any, optim_state: Any, loss: Array) -> Any:
        return optim.update(gradient, optim_state, value=loss)

    draws = jax.eval_shape(simulate, keys, arrays)
    batch = {name: draws[name] for name in (*objective.latents, *pair.observed)}, keys
    return {
        "model": program_digest(simulate, keys, arrays),
        "guide": program_digest(score, params, state.mutable_state, batch, arrays),
        "optimiser": program_digest(follow, params, state.optim_state, jnp.zeros(()))
        + program_digest(optim.init, params),
    }


# Numbers that the simulations of a block of steps may hold; and the longest block.
_BLOCK_NUMBERS = 2**20
_LONGEST_BLOCK = 64


def train(
    objective: "Objective",
    state: AmortizedState,
    num_steps: Array,
    arrays: list[Array],
    *,
    static: Static,
    capacity: int,
    stable: bool,
) -> tuple[AmortizedState, Array]:
    """Take many steps.

    The simulations of a whole block of steps are drawn at once, which is much cheaper than step by step. A block starts
    at a multiple of its length, and is drawn whole though a run may start or end inside it, so that the numbers do not
    depend, to the last bit, on how a training is cut into runs.

    Args:
        objective: loss and optimiser.
        state: state before the steps.
        num_steps: number of steps, a scalar.
        arrays: JAX arrays among the arguments of model and guide.
        static: other arguments of model and guide, part of the program.
        capacity: largest number of steps that the program can take.
        stable: whether to skip steps whose loss or gradient is not finite.

    Returns:
        The state after the steps, and the losses, (capacity,), of which the first ``num_steps`` count.
    """
    args, kwargs = combine(arrays, static)
    key = state.rng_key
    length = _block_length(objective, key, args, kwargs)

    def simulate(step: Array) -> tuple:
        return objective.simulate_step(key, step, args, kwargs)

    offset = state.step % length
    last = offset + num_steps

    def run_block(carry: tuple) -> tuple:
        state, losses, first = carry
        batches = jax.vmap(simulate)(state.step - state.step % length + jnp.arange(length))

        def take_step(i: Array, carry: tuple) -> tuple:
            state, losses = carry
            batch = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False), batches)
            state, loss = objective.step(state, batch, args, kwargs, stable=stable)
            return state, lax.dynamic_update_index_in_dim(losses, loss.astype(losses.dtype), i, 0)

        # The losses of the block are gathered by themselves: a long array would be copied at every step.
        begin, end = state.step % length, jnp.minimum(length, last - first)
        state, block = lax.fori_loop(begin, end, take_step, (state, jnp.full(length, jnp.nan)))
        return state, lax.dynamic_update_slice_in_dim(losses, block, first, 0), first + length

    num_blocks = (capacity + length - 1) // length + 1
    carry = state, jnp.full(num_blocks * length, jnp.nan), jnp.zeros_like(state.step)
    state, losses, _ = lax.while_loop(lambda carry: carry[2] < last, run_block, carry)
    return state, lax.dynamic_slice_in_dim(losses, offset, capacity)


def held_out_loss(
    objective: "Objective", params: dict, rng_key: Array, arrays: list[Array], *, static: Static, num_simulations: int
) -> Array:
    """Average the negative log density over simulations that no step is trained on.

    Args:
        objective: loss and optimiser.
        params: values of the guide's param and mutable sites, by name.
        rng_key: a PRNG key of the whole run.
        arrays: JAX arrays among the arguments of model and guide.
        static: other arguments of model and guide, part of the program.
        num_simulations: number of simulations that are held out.
    """
    args, kwargs = combine(arrays, static)
    draws, keys = objective.pair.held_out(rng_key, num_simulations, args, kwargs)
    log_q, _ = objective.pair.log_prob(params, draws, keys, args, kwargs)
    return -jnp.mean(log_q)


def _block_length(objective: "Objective", rng_key: Array, args: tuple, kwargs: dict) -> int:
    """Choose the number of steps whose simulations are drawn at once, by the largest array that a step's make."""
    step = jnp.zeros((), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda: objective.simulate_step(rng_key, step, args, kwargs))()
    largest = max(variable.aval.size for equation in jaxpr.eqns for variable in equation.outvars)
    return int(max(1, min(_LONGEST_BLOCK, _BLOCK_NUMBERS // largest)))


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of :meth:`AmortizedForwardKL.run <numpyro_wide.AmortizedForwardKL.run>`, described there.

    Raises:
        ValueError: if a number is out of range, or an option needs another one that is missing.
    """

    num_steps: int
    progress_bar: bool
    stable_update: bool
    held_out: int
    evaluate_every: int | None
    patience: int | None
    checkpoint: str | Path | None
    checkpoint_every: int | None

    def __post_init__(self) -> None:
        """Check the numbers, and hold them as Python's."""
        for name, least in (("num_steps", 1), ("held_out", 0)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        for name in ("evaluate_every", "patience", "checkpoint_every"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if not self.held_out and (self.evaluate_every is not None or self.patience is not None):
            raise ValueError(
                "evaluate_every and patience are about held-out simulations; pass their number, held_out=1000."
            )
        if self.checkpoint is None and self.checkpoint_every is not None:
            raise ValueError("checkpoint_every needs a file to write to; pass checkpoint=path.")

    @property
    def report_every(self) -> int:
        """Steps between two updates of the progress bar, a twentieth of the run."""
        return max(self.num_steps // 20, 1)

    @property
    def intervals(self) -> tuple[int | None, int | None]:
        """Steps between two evaluations of held-out simulations and between two checkpoints; None where there are none.

        Both are a twentieth of the run where the user does not say.
        """
        evaluate = self.evaluate_every or self.report_every
        save = self.checkpoint_every or self.report_every
        return evaluate if self.held_out else None, save if self.checkpoint is not None else None


class Run:
    """One call of ``run``: an objective, the options, and the arguments of model and guide."""

    def __init__(self, objective: Objective, options: Options, args: tuple, kwargs: dict):
        self.objective, self.options = objective, options
        self.arrays, self.static = partition((args, kwargs), Array)
        self.own_fingerprint = ""

    def resumed(self, state: AmortizedState) -> tuple[AmortizedState, np.ndarray]:
        """Read how far the checkpoint is, if there is one.

        Args:
            state: state before the first step.

        Returns:
            The state to continue from, and the losses of the steps that are done.
        """
        losses = np.zeros(0, jnp.zeros(0).dtype)
        if self.options.held_out and state.held_out is None:
            state = state._replace(held_out=self._nothing_seen(state))
        if self.options.checkpoint is None:
            return state, losses
        path = Path(self.options.checkpoint)
        self.own_fingerprint = fingerprint(self.objective, state, self.arrays, self.static, self.options.held_out)
        if not path.exists():
            return state, losses
        stored = _resume.read(path)
        _resume.refuse_another_run(
            f"the checkpoint {path}", str(stored["['run']"]), self.own_fingerprint, kind="path", programs=PROGRAMS
        )
        record = _resume.restore(path, stored, self._record(state, losses))
        return record["state"], np.asarray(record["losses"])

    def finish(self, state: AmortizedState, losses: np.ndarray) -> AmortizedRunResult:
        """Take the steps that are left.

        Args:
            state: state to continue from.
            losses: losses of the steps that are done, (done,).
        """
        if self.options.progress_bar or self.options.intervals != (None, None):
            return self._in_stretches(state, losses)
        # Nothing to look at in between: a single program, which a caller may vmap.
        state, new_losses = self._train(state, self.options.num_steps, self.options.num_steps)
        return AmortizedRunResult(self.objective.get_params(state), state, new_losses)

    def _train(self, state: AmortizedState, num_steps: int, capacity: int) -> tuple[AmortizedState, Array]:
        new, losses = self.objective.train(
            state._replace(held_out=None),
            jnp.asarray(num_steps, jnp.int32),
            self.arrays,
            static=self.static,
            capacity=max(64, 1 << (capacity - 1).bit_length()),  # so that runs of similar lengths share a program
            stable=self.options.stable_update,
        )
        return new._replace(held_out=state.held_out), losses[:num_steps]

    def _in_stretches(self, state: AmortizedState, losses: np.ndarray) -> AmortizedRunResult:
        num_steps, window = self.options.num_steps, self.options.report_every
        evaluate_every, save_every = self.options.intervals
        done = len(losses)
        origin = int(state.step) - done
        with tqdm(total=num_steps, initial=done, disable=not self.options.progress_bar) as bar:
            while done < num_steps and not self._is_patience_lost(state):
                length, capacity = self._stretch(done, origin)
                state, new_losses = self._train(state, length, capacity)
                losses = np.concatenate([losses, np.asarray(new_losses)])
                done += length
                if evaluate_every and state.held_out is not None and (origin + done) % evaluate_every == 0:
                    state = state._replace(held_out=self._look(state, state.held_out))
                is_last = done == num_steps or self._is_patience_lost(state)
                if save_every and self.options.checkpoint and (is_last or done % save_every == 0):
                    _resume.save(Path(self.options.checkpoint), self._record(state, losses))
                bar.set_postfix_str(_postfix(state, losses, window), refresh=False)
                bar.update(length)
        params = self.objective.get_params(state)
        if evaluate_every and state.held_out is not None and state.held_out.steps.size:
            params = state.held_out.best_params
        return AmortizedRunResult(params, state, jnp.asarray(losses))

    def _stretch(self, done: int, origin: int) -> tuple[int, int]:
        """Count the steps to the next stop, and an upper bound of them that is the same in the whole run."""
        evaluate_every, save_every = self.options.intervals
        # Held-out losses come at multiples of the step itself, so that a resumed run sees the same ones.
        stops = [(self.options.report_every, done), (evaluate_every, origin + done), (save_every, done)]
        lengths = [(every, every - position % every) for every, position in stops if every is not None]
        num_steps = self.options.num_steps
        length = min(num_steps - done, *(length for _, length in lengths))
        return length, min(num_steps, *(every for every, _ in lengths))

    def _nothing_seen(self, state: AmortizedState) -> HeldOut:
        none = jnp.zeros(0, jnp.int32)
        return HeldOut(none, jnp.zeros(0), self.objective.get_params(state), jnp.asarray(jnp.inf), state.step)

    def _look(self, state: AmortizedState, before: HeldOut) -> HeldOut:
        """Evaluate the held-out simulations."""
        params = self.objective.get_params(state)
        loss = self.objective.held_out_loss(
            params, state.rng_key, self.arrays, static=self.static, num_simulations=self.options.held_out
        )
        # By NumPy: JAX would compile a program for every length that they have.
        steps, losses = (jnp.asarray(np.append(*pair)) for pair in ((before.steps, state.step), (before.losses, loss)))
        if loss < before.best_loss:
            return HeldOut(steps, losses, params, loss, state.step)
        return before._replace(steps=steps, losses=losses)

    def _is_patience_lost(self, state: AmortizedState) -> bool:
        if self.options.patience is None or state.held_out is None:
            return False
        return bool(np.sum(np.asarray(state.held_out.steps) > int(state.held_out.best_step)) >= self.options.patience)

    def _record(self, state: AmortizedState, losses: np.ndarray) -> dict[str, Any]:
        return {"state": state, "losses": losses, "run": self.own_fingerprint}


def _postfix(state: AmortizedState, losses: np.ndarray, window: int) -> str:
    last = losses[(len(losses) - 1) // window * window :]
    average = np.nanmean(last) if np.isfinite(last).any() else math.nan
    text = f"init loss: {losses[0]:.4f}, avg. loss [{len(losses) - len(last) + 1}-{len(losses)}]: {average:.4f}"
    if state.held_out is not None and state.held_out.steps.size:
        text += f", held-out loss: {np.asarray(state.held_out.losses)[-1]:.4f}"
    return text + (f", skipped: {state.num_skipped}" if state.num_skipped else "")


def skipped_note(before: AmortizedState, result: AmortizedRunResult) -> str | None:
    """Write the text of a warning if most steps of a run were skipped.

    Args:
        before: state before the run.
        result: result of the run.
    """
    if not not_jax_tracer(result.losses):
        return None
    num_skipped, num_steps = int(result.state.num_skipped - before.num_skipped), len(result.losses)
    if 2 * num_skipped <= num_steps:
        return None
    return (
        f"{num_skipped} of {num_steps} steps were skipped, as the loss or its gradient was not finite. Perhaps the "
        "guide gives simulated latents no density (compare its support with the model's), or simulations overflow."
    )


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
