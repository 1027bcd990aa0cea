"""The count of a chain's moves, and the warnings that it stands still, hardly moves, or breaks trajectories off.

NumPyro's ``MCMC`` asks a kernel for nothing once a run is over, and a callback from compiled code would keep the
program out of JAX's cache on disk. But whoever runs a compiled loop gets its state back as a pytree, and a pytree may
look at what it is made of: so :class:`Moves` warns when it comes back from a run with known numbers.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide._checks import is_known

# A chain is judged after so many draws. It stands still if no more than this share of them are new, hardly moves up to
# that one, and breaks trajectories off if more than the last end at the largest number of steps.
FEWEST_DRAWS = 50
STILL, HARDLY, BROKEN_OFF = 0.02, 0.1, 0.5
# Number of draws at the latest warning of a run, by the numbers that its chains are told apart by.
_told: dict[bytes, int] = {}
_is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)


@contextmanager
def quietly() -> Iterator[None]:
    """Say nothing of what chains lack, for who judges chains by other means, a few short ones at a time."""
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)


def forget_warnings() -> None:
    """Let the run that begins warn, even if one of the same key, such as a cell run before, has."""
    _told.clear()


class Fault(NamedTuple):
    """A fault that chains may have.

    Attributes:
        is_found: whether a chain has it, by chain.
        of_one, of_many: what the chain does, and what chains do.
        tally: number of draws by chain that tell of it.
        of_draws: what these draws did.
        advice: what it means, and what to do.
    """

    is_found: np.ndarray
    of_one: str
    of_many: str
    tally: np.ndarray
    of_draws: str
    advice: str


_SMALL_STEPS = (
    "Where the noise is small, run in float64 (jax.config.update('jax_enable_x64', True)), start from "
    'init_to_optimum(..., hold="scales"), or take MicrocanonicalLangevin'
)


@jax.tree_util.register_pytree_node_class
class Moves:
    """Number of draws that are new, and what tells why they are few; every field has the axes of the chains.

    Attributes:
        num_moves: number of steps after warmup that led elsewhere.
        num_capped: number of steps after warmup whose trajectory ended at the largest number of steps.
        num_draws: number of steps after warmup.
        first_step_size: step size with which the chain began.
        step_size: step size with which it continues.
        run: random number by which a run is told apart from others.
    """

    def __init__(
        self, num_moves: Any, num_capped: Any, num_draws: Any, first_step_size: Any, step_size: Any, run: Any
    ) -> None:
        self.num_moves = num_moves
        self.num_capped = num_capped
        self.num_draws = num_draws
        self.first_step_size = first_step_size
        self.step_size = step_size
        self.run = run

    @classmethod
    def start(cls, step_size: Array, run: Array) -> "Moves":
        """Return the count before the first draw of a run, told apart by a random number."""
        none = jnp.zeros((), jnp.result_type(int))
        return cls(none, none, none, step_size, step_size, run)

    def count(self, moved: Array, is_capped: Array, num_draws: Array, step_size: Array) -> "Moves":
        """Count a step, as a draw if there are any by now.

        Args:
            moved: whether it led elsewhere.
            is_capped: whether its trajectory was to be longer than it may.
            num_draws: number of steps after warmup, this one included.
            step_size: step size with which the chain continues.
        """
        num_moves = self.num_moves + jnp.asarray(moved & (num_draws > 0), self.num_moves.dtype)
        num_capped = self.num_capped + jnp.asarray(is_capped & (num_draws > 0), self.num_capped.dtype)
        return Moves(num_moves, num_capped, num_draws, self.first_step_size, step_size, self.run)

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        """Return the numbers, as JAX asks of a pytree."""
        counts = self.num_moves, self.num_capped, self.num_draws
        return (*counts, self.first_step_size, self.step_size, self.run), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Moves":
        """Put numbers together, and warn if they are those of chains with a fault."""
        moves = cls(*children)
        if not _is_quiet.get() and all(isinstance(child, Array) and is_known(child) for child in children):
            moves._warn()
        return moves

    def complaint(self) -> str:
        """Return a few words about the worst fault of the chains, or none."""
        fault = self._fault()
        if fault is None:
            return ""
        is_found, draws = fault.is_found, np.asarray(self.num_draws)
        worst = np.unravel_index(np.argmax(is_found), is_found.shape)
        step_size, first = (np.asarray(size)[worst] for size in (self.step_size, self.first_step_size))
        which = f"the chain {fault.of_one}"
        if is_found.size > 1:
            which = f"{is_found.sum()} of {is_found.size} chains {fault.of_many}"
        return (
            f"{which}: {fault.tally[worst]} of {draws[worst]} draws {fault.of_draws}, "
            f"step size {step_size:.1e}, which began at {first:.1e}"
        )

    def _fault(self) -> Fault | None:
        """Return the worst fault of the chains, or None."""
        draws, moves, capped = (np.asarray(count) for count in (self.num_draws, self.num_moves, self.num_capped))
        is_judged = draws >= FEWEST_DRAWS
        faults = (
            Fault(
                is_judged & (moves <= STILL * draws),
                *("stands still", "stand still", moves, "moved"),
                "Its draws are not of the posterior, whatever their acceptance. Standardise inputs and targets, run in "
                "float64 (jax.config.update('jax_enable_x64', True)), start elsewhere (init_params, init_strategy), or "
                "warm up longer.",
            ),
            Fault(
                is_judged & (moves <= HARDLY * draws),
                *("hardly moves", "hardly move", moves, "were accepted"),
                f"It repeats its draws, and may not have arrived. {_SMALL_STEPS}; else warm up longer.",
            ),
            Fault(
                is_judged & (capped > BROKEN_OFF * draws),
                *("breaks its trajectories off", "break their trajectories off", capped, "ended at max_num_steps"),
                f"It moves slowly, and may not have arrived. {_SMALL_STEPS}; else raise max_num_steps.",
            ),
        )
        return next((fault for fault in faults if fault.is_found.any()), None)

    def _warn(self) -> None:
        run, num_draws = np.asarray(self.run).tobytes(), int(np.max(np.asarray(self.num_draws), initial=0))
        if num_draws == 0:
            _told.pop(run, None)  # a run begins
        fault = self._fault()
        # A progress bar brings the state back after every step: one warning a run, and another if it doubles.
        if fault is None or _told.get(run, 0) <= num_draws < 2 * _told.get(run, 0):
            return
        _told[run] = num_draws
        warnings.warn(f"{self.complaint()}. {fault.advice}", RuntimeWarning, stacklevel=2)
