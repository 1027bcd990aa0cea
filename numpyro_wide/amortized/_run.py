"""Runs: stretches of compiled steps, and between them the progress bar, held-out losses and checkpoints."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.util import not_jax_tracer
from tqdm.auto import tqdm

from numpyro_wide import _resume
from numpyro_wide._checks import whole_number
from numpyro_wide._programs import partition
from numpyro_wide.amortized._fingerprint import PROGRAMS, fingerprint
from numpyro_wide.amortized._objective import Objective
from numpyro_wide.amortized._state import AmortizedRunResult, AmortizedState, HeldOut


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
