"""A run: stretches of compiled steps, and between them the progress bar, held-out losses and checkpoints."""

import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.util import not_jax_tracer
from tqdm.auto import tqdm

from numpyro_wide import _checkpoint
from numpyro_wide._checks import whole_number
from numpyro_wide._programs import partition
from numpyro_wide.amortized._fingerprint import fingerprint, refuse_other_runs
from numpyro_wide.amortized._loop import Programs
from numpyro_wide.amortized._state import AmortizedRunResult, AmortizedState, HeldOut


class Options(NamedTuple):
    """Options of :meth:`AmortizedForwardKL.run <numpyro_wide.AmortizedForwardKL.run>`, checked and completed."""

    num_steps: int
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
    num_steps = whole_number("num_steps", num_steps)
    held_out = whole_number("held_out", held_out, least=0)
    evaluate_every = _whole_or_none("evaluate_every", evaluate_every)
    patience = _whole_or_none("patience", patience)
    checkpoint_every = _whole_or_none("checkpoint_every", checkpoint_every)
    if not held_out and (evaluate_every is not None or patience is not None):
        raise ValueError(
            "evaluate_every and patience are about held-out simulations; pass their number, held_out=1000."
        )
    if checkpoint is None and checkpoint_every is not None:
        raise ValueError("checkpoint_every needs a file to write to; pass checkpoint=path.")
    often = max(num_steps // 20, 1)
    path = None if checkpoint is None else Path(checkpoint)
    evaluate_every, checkpoint_every = evaluate_every or often, checkpoint_every or often
    return Options(num_steps, progress_bar, stable_update, held_out, evaluate_every, patience, path, checkpoint_every)


def _whole_or_none(name: str, value: int | None) -> int | None:
    return None if value is None else whole_number(name, value)


class Run:
    """One call of ``run``."""

    def __init__(self, programs: Programs, options: Options, args: tuple, kwargs: dict):
        self.objective, self.programs, self.options = programs.objective, programs, options
        self.arrays, self.static = partition((args, kwargs), jax.Array)

    def __call__(self, state: AmortizedState) -> AmortizedRunResult:
        """Take the steps from ``state`` on, less those that a checkpoint already has."""
        options, before = self.options, state
        is_looked_at = options.progress_bar or options.held_out or options.checkpoint
        params, state, losses = self._in_stretches(before) if is_looked_at else self._at_once(before)
        if not_jax_tracer(losses):
            _warn_of_skipped(int(state.num_skipped - before.num_skipped), len(losses))
        return AmortizedRunResult(params, state, losses)

    def _at_once(self, state: AmortizedState) -> AmortizedRunResult:
        state, losses = self._train(state, self.options.num_steps, self.options.num_steps)
        return AmortizedRunResult(self.objective.get_params(state), state, losses)

    def _train(self, state: AmortizedState, num_steps: int, capacity: int) -> tuple[AmortizedState, Array]:
        new, losses = self.programs.train(
            state._replace(held_out=None),
            jnp.asarray(num_steps, jnp.int32),
            self.arrays,
            static=self.static,
            capacity=max(64, 1 << (capacity - 1).bit_length()),  # so that runs of similar lengths share a program
            stable=self.options.stable_update,
        )
        return new._replace(held_out=state.held_out), losses[:num_steps]

    def _in_stretches(self, state: AmortizedState) -> AmortizedRunResult:
        options, num_steps = self.options, self.options.num_steps
        origin = int(state.step)
        if options.held_out and state.held_out is None:
            state = state._replace(held_out=self._nothing_seen(state))
        state, losses, own = self._resumed(state)
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
                    _checkpoint.save(options.checkpoint, self._record(state, losses, own))
                bar.set_postfix_str(_postfix(state, losses, max(num_steps // 20, 1)), refresh=False)
                bar.update(length)
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

    def _record(self, state: AmortizedState, losses: np.ndarray, fingerprint: str) -> dict[str, Any]:
        return {"state": state, "losses": losses, "run": fingerprint}

    def _resumed(self, state: AmortizedState) -> tuple[AmortizedState, np.ndarray, str]:
        """What the checkpoint holds, if there is one, and the fingerprint for the next ones."""
        path, losses = self.options.checkpoint, np.zeros(0, jnp.zeros(0).dtype)
        if path is None:
            return state, losses, ""
        own = fingerprint(self.objective, state, self.arrays, self.static, self.options.held_out)
        if not path.exists():
            return state, losses, own
        stored = _checkpoint.read(path)
        refuse_other_runs(path, str(stored["['run']"]), own)
        record = _checkpoint.restore(path, stored, self._record(state, losses, own))
        return record["state"], np.asarray(record["losses"]), own


def _postfix(state: AmortizedState, losses: np.ndarray, window: int) -> str:
    last = losses[(len(losses) - 1) // window * window :]
    average = np.nanmean(last) if np.isfinite(last).any() else math.nan
    text = f"init loss: {losses[0]:.4f}, avg. loss [{len(losses) - len(last) + 1}-{len(losses)}]: {average:.4f}"
    if state.held_out is not None and state.held_out.steps.size:
        text += f", held-out loss: {np.asarray(state.held_out.losses)[-1]:.4f}"
    return text + (f", skipped: {state.num_skipped}" if state.num_skipped else "")


def _warn_of_skipped(num_skipped: int, num_steps: int) -> None:
    if 2 * num_skipped > num_steps:
        warnings.warn(
            f"{num_skipped} of {num_steps} steps were skipped, as the loss or its gradient was not finite. Perhaps the "
            "guide gives simulated latents no density (compare its support with the model's), or simulations overflow.",
            stacklevel=4,
        )
