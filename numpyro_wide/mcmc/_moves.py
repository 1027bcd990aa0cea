"""The count of a chain's moves, and the warning that it stands still.

NumPyro's ``MCMC`` asks a kernel for nothing once a run is over, and a callback from compiled code would keep the
program out of JAX's cache on disk. But whoever runs a compiled loop gets its state back as a pytree, and a pytree may
look at what it is made of: so :class:`Moves` warns when it comes back from a run with known numbers.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide._checks import is_known

# A chain is judged after so many draws, and stands still if no more than this share of them are new.
FEWEST_DRAWS = 50
STILL = 0.02
# Number of draws at the latest warning of a run, by the numbers that its chains are told apart by.
_told: dict[bytes, int] = {}
_is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)


@contextmanager
def quietly() -> Iterator[None]:
    """Say nothing of chains that stand still, for who judges chains by other means, a few short ones at a time."""
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)


def forget_warnings() -> None:
    """Let the run that begins warn, even if one of the same key, such as a cell run before, has."""
    _told.clear()


@jax.tree_util.register_pytree_node_class
class Moves:
    """Number of draws that are new, and what tells why they are few; every field has the axes of the chains.

    Attributes:
        num_moves: number of steps after warmup that led elsewhere.
        num_draws: number of steps after warmup.
        first_step_size: step size with which the chain began.
        step_size: step size with which it goes on.
        run: random number by which a run is told apart from others.
    """

    def __init__(self, num_moves: Any, num_draws: Any, first_step_size: Any, step_size: Any, run: Any) -> None:
        self.num_moves = num_moves
        self.num_draws = num_draws
        self.first_step_size = first_step_size
        self.step_size = step_size
        self.run = run

    @classmethod
    def start(cls, step_size: Array, run: Array) -> "Moves":
        """Return the count before the first draw of a run, told apart by a random number."""
        none = jnp.zeros((), jnp.result_type(int))
        return cls(none, none, step_size, step_size, run)

    def count(self, moved: Array, num_draws: Array, step_size: Array) -> "Moves":
        """Count a step, as a draw if there are any by now.

        Args:
            moved: whether it led elsewhere.
            num_draws: number of steps after warmup, this one included.
            step_size: step size with which the chain goes on.
        """
        num_moves = self.num_moves + jnp.asarray(moved & (num_draws > 0), self.num_moves.dtype)
        return Moves(num_moves, num_draws, self.first_step_size, step_size, self.run)

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        """Return the numbers, as JAX asks of a pytree."""
        return (self.num_moves, self.num_draws, self.first_step_size, self.step_size, self.run), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Moves":
        """Put numbers together, and warn if they are those of chains that stand still."""
        moves = cls(*children)
        if not _is_quiet.get() and all(isinstance(child, Array) and is_known(child) for child in children):
            moves._warn()
        return moves

    def complaint(self) -> str:
        """Return a few words about chains that stand still, or none."""
        num_draws = np.asarray(self.num_draws)
        is_still = (num_draws >= FEWEST_DRAWS) & (np.asarray(self.num_moves) <= STILL * num_draws)
        if not is_still.any():
            return ""
        worst = np.unravel_index(np.argmax(is_still), is_still.shape)
        step_size, first = (np.asarray(size)[worst] for size in (self.step_size, self.first_step_size))
        which = f"{is_still.sum()} of {is_still.size} chains stand" if is_still.size > 1 else "the chain stands"
        return (
            f"{which} still: {np.asarray(self.num_moves)[worst]} of {num_draws[worst]} draws moved, "
            f"step size {step_size:.1e}, which began at {first:.1e}"
        )

    def _warn(self) -> None:
        run, num_draws = np.asarray(self.run).tobytes(), int(np.max(np.asarray(self.num_draws), initial=0))
        if num_draws == 0:
            _told.pop(run, None)  # a run begins
        complaint = self.complaint()
        # A progress bar brings the state back after every step: one warning a run, and another if it doubles.
        if not complaint or _told.get(run, 0) <= num_draws < 2 * _told.get(run, 0):
            return
        _told[run] = num_draws
        warnings.warn(
            f"{complaint}. Its draws are not of the posterior, whatever their acceptance. Run in float64 "
            "(jax.config.update('jax_enable_x64', True)), start elsewhere (init_params, init_strategy), or warm up "
            "longer.",
            RuntimeWarning,
            stacklevel=2,
        )
