"""A run: stretches of compiled steps, and between them the progress bar, held-out losses and checkpoints."""

import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.util import not_jax_tracer
from tqdm.auto import tqdm

from numpyro_wide.amortized import _checkpoint
from numpyro_wide.amortized._arguments import split_arguments
from numpyro_wide.amortized._loop import Programs
from numpyro_wide.amortized._objective import Objective
from numpyro_wide.amortized._state import AmortizedRunResult, AmortizedState, HeldOut


class Options(NamedTuple):
    """Options of :meth:`AmortizedForwardKL.run <numpyro_wide.AmortizedForwardKL.run>`, checked and completed."""

    progress_bar: bool
    stable_update: bool
    held_out: int
    evaluate_every: int
    patience: int | None
    checkpoint: Path | None
    checkpoint_every: int


def checked_options(
    num_steps: int,
    progress_bar: bool,
    stable_update: bool,
    held_out: int,
    evaluate_every: int | None,
    patience: int | None,
    checkpoint: str | Path | None,
    checkpoint_every: int | None,
) -> Options:
    """Fill in defaults, after checks."""
    positive = {"num_steps": num_steps, "evaluate_every": evaluate_every, "patience": patience}
    for name, value in {**positive, "checkpoint_every": checkpoint_every}.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r}.")
    if not isinstance(held_out, int) or held_out < 0:
        raise ValueError(f"held_out must be a number of simulations, 0 for none, got {held_out!r}.")
    if not held_out and (evaluate_every is not None or patience is not None):
        raise ValueError(
            "evaluate_every and patience are about held-out simulations; pass their number, held_out=1000."
        )
    if checkpoint is None and checkpoint_every is not None:
        raise ValueError("checkpoint_every needs a file to write to; pass checkpoint=path.")
    often = max(num_steps // 20, 1)
    path = None if checkpoint is None else Path(checkpoint)
    return Options(
        progress_bar, stable_update, held_out, evaluate_every or often, patience, path, checkpoint_every or often
    )


class Run:
    """One call of ``run``."""

    def __init__(self, objective: Objective, programs: Programs, options: Options, args: tuple, kwargs: dict):
        self.objective, self.programs, self.options = objective, programs, options
        self.arrays, self.fixed = split_arguments(args, kwargs)

    def __call__(self, state: AmortizedState, num_steps: int) -> AmortizedRunResult:
        """Take ``num_steps`` from ``state`` on, less those that a checkpoint already has."""
        options = self.options
        if options.progress_bar or options.held_out or options.checkpoint:
            return self._in_stretches(state, num_steps)
        skipped = state.num_skipped
        state, losses = self._train(state, num_steps, num_steps)
        if not_jax_tracer(losses):
            _warn_of_skipped(int(state.num_skipped - skipped), num_steps)
        return AmortizedRunResult(self.objective.get_params(state), state, losses)

    def _train(self, state: AmortizedState, num_steps: int, capacity: int) -> tuple[AmortizedState, Array]:
        new, losses = self.programs.train(
            state._replace(held_out=None),
            jnp.asarray(num_steps, jnp.int32),
            self.arrays,
            fixed=self.fixed,
            capacity=max(64, 1 << (capacity - 1).bit_length()),  # so that runs of similar lengths share a program
            stable=self.options.stable_update,
        )
        return new._replace(held_out=state.held_out), losses[:num_steps]

    def _in_stretches(self, state: AmortizedState, num_steps: int) -> AmortizedRunResult:
        options = self.options
        origin, skipped_before = int(state.step), int(state.num_skipped)
        if options.held_out and state.held_out is None:
            state = state._replace(held_out=self._nothing_seen(state))
        state, losses = self._resumed(state)
        done = int(state.step) - origin
        with tqdm(total=num_steps, initial=done, disable=not options.progress_bar) as bar:
            while done < num_steps and not self._is_patience_lost(state):
                length, capacity = self._stretch(done, origin, num_steps)
                state, new_losses = self._train(state, length, capacity)
                losses = np.concatenate([losses, np.asarray(new_losses)])
                done += length
                if state.held_out is not None and options.held_out and (origin + done) % options.evaluate_every == 0:
                    state = state._replace(held_out=self._look(state, state.held_out))
                is_last = done == num_steps or self._is_patience_lost(state)
                if options.checkpoint and (is_last or done % options.checkpoint_every == 0):
                    _checkpoint.save(options.checkpoint, self._record(state, losses))
                bar.set_postfix_str(_postfix(state, losses, max(num_steps // 20, 1)), refresh=False)
                bar.update(length)
        _warn_of_skipped(int(state.num_skipped) - skipped_before, done)
        params = self.objective.get_params(state)
        if options.held_out and state.held_out is not None and state.held_out.steps.size:
            params = state.held_out.best_params
        return AmortizedRunResult(params, state, jnp.asarray(losses))

    def _stretch(self, done: int, origin: int, num_steps: int) -> tuple[int, int]:
        """Number of steps to the next stop, and an upper bound of it that is the same in the whole run."""
        options = self.options
        # Held-out losses come at multiples of the step itself, so that a resumed run sees the same ones.
        stops = [(max(num_steps // 20, 1), done)]
        stops += [(options.evaluate_every, origin + done)] if options.held_out else []
        stops += [(options.checkpoint_every, done)] if options.checkpoint else []
        length = min(num_steps - done, *(every - position % every for every, position in stops), num_steps)
        return length, min(num_steps, *(every for every, _ in stops), num_steps)

    def _nothing_seen(self, state: AmortizedState) -> HeldOut:
        none = jnp.zeros(0, jnp.int32)
        return HeldOut(none, jnp.zeros(0), self.objective.get_params(state), jnp.asarray(jnp.inf), state.step)

    def _look(self, state: AmortizedState, before: HeldOut) -> HeldOut:
        """Evaluate the held-out simulations."""
        params = self.objective.get_params(state)
        loss = self.programs.held_out_loss(
            params, state.rng_key, self.arrays, fixed=self.fixed, num_simulations=self.options.held_out
        )
        steps, losses = jnp.append(before.steps, state.step), jnp.append(before.losses, loss)
        if loss < before.best_loss:
            return HeldOut(steps, losses, params, loss, state.step)
        return before._replace(steps=steps, losses=losses)

    def _is_patience_lost(self, state: AmortizedState) -> bool:
        if self.options.patience is None or state.held_out is None:
            return False
        return int(jnp.sum(state.held_out.steps > state.held_out.best_step)) >= self.options.patience

    def _record(self, state: AmortizedState, losses: np.ndarray) -> dict[str, Any]:
        return {"state": state, "losses": losses, "batch_size": np.asarray(self.objective.batch_size)}

    def _resumed(self, state: AmortizedState) -> tuple[AmortizedState, np.ndarray]:
        """What the checkpoint holds, if there is one."""
        path, losses = self.options.checkpoint, np.zeros(0, jnp.zeros(0).dtype)
        if path is None or not path.exists():
            return state, losses
        record = _checkpoint.load(path, self._record(state, losses))
        has_same_key = jnp.all(record["state"].rng_key == state.rng_key)
        if not has_same_key or record["batch_size"] != self.objective.batch_size:
            raise ValueError(
                f"the checkpoint {path} is of a run with another rng_key or batch_size; pass the same ones to resume "
                "it, or another path to start anew."
            )
        return record["state"], np.asarray(record["losses"])


def _postfix(state: AmortizedState, losses: np.ndarray, window: int) -> str:
    last = losses[(len(losses) - 1) // window * window :]
    average = np.nanmean(last) if np.isfinite(last).any() else math.nan
    text = f"init loss: {losses[0]:.4f}, avg. loss [{len(losses) - len(last) + 1}-{len(losses)}]: {average:.4f}"
    if state.held_out is not None and state.held_out.steps.size:
        text += f", held-out loss: {state.held_out.losses[-1]:.4f}"
    return text + (f", skipped: {state.num_skipped}" if state.num_skipped else "")


def _warn_of_skipped(num_skipped: int, num_steps: int) -> None:
    if 2 * num_skipped > num_steps:
        warnings.warn(
            f"{num_skipped} of {num_steps} steps were skipped, as the loss or its gradient was not finite. Perhaps the "
            "guide gives simulated latents no density (compare its support with the model's), or simulations overflow.",
            stacklevel=4,
        )
