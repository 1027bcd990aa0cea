"""Runs of the programs behind predictions: compiled once for some shapes, a block of draws at a time."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import logsumexp
from tqdm.auto import tqdm

from numpyro_wide._blocks import blocks_of, is_mapped
from numpyro_wide._checks import IN_FLOAT64, NOISE_TOO_SMALL, is_known, refuse_frames
from numpyro_wide._programs import TracedProgram, combine, complete_digest, partition, run_compiled
from numpyro_wide._recent import Recent
from numpyro_wide.linear_gaussian.internal import BlockedPosterior, RowFeatures
from numpyro_wide.readout._fit import Fit, refuse_mismatch, refuse_other_columns
from numpyro_wide.readout._model import Draws, first_of
from numpyro_wide.readout._prediction_programs import Quantity, Runs, Setting
from numpyro_wide.readout._run import ReadoutRun, StoppedRunError

CHOICES = ("raise", "drop")
_NUM_NAMED = 20
_MOST_KEPT = 2**28  # numbers of the matrices of all draws: 1 GB in float32
# Settings of JAX, besides the types of the arrays, that a trace depends on.
_CONFIGURED = (
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
)

# Traces of all objects, by what they compute and what their models do.
_TRACED: Recent[TracedProgram] = Recent(32)


class PredictionRuns:
    """Runs of quantities for the draws of a fit.

    Args:
        fit: the wrapped model as it was fitted, with its draws.
        batch_size: number of draws that are worked on at once; None for as many as the memory is meant for.
        posteriors: the readout's posteriors, which are kept where rows are summed over in blocks; None where they are
            of no use.
        progress_bar: whether to show how many of them there are.
    """

    def __init__(self, fit: Fit, batch_size: int | None, posteriors: Quantity | None, progress_bar: bool):
        self.fit, self.batch_size, self.progress_bar = fit, batch_size, progress_bar
        self._programs: dict[Any, TracedProgram] = {}
        self._posteriors = posteriors if self._is_kept() else None
        self._solved: BlockedPosterior | None = None

    def elsewhere(self, quantity: Quantity, rng_key: Array | None, test: tuple[tuple, dict]) -> tuple[Any, Any]:
        """Run at other inputs than those of the fit, with errors that say what is wrong with them."""
        refuse_frames(*test)
        try:
            return self(quantity, rng_key, test)
        except StoppedRunError as error:
            self._refuse_noise_of_other_rows(error)
            raise
        except (AssertionError, ZeroDivisionError) as error:
            if all(np.shape(leaf)[:1] != (0,) for leaf in jax.tree.leaves(test)):
                raise
            part = "a plate" if isinstance(error, AssertionError) else "an array"  # which is reshaped
            raise ValueError(f"there are no rows to predict for, and {part} of the model must have one.") from error
        except TypeError as error:
            refuse_mismatch(self.fit.model.fn, *test, error, "arguments", "those of the rows to predict, such as x_new")
            refuse_other_columns((self.fit.args, self.fit.kwargs), test, error)
            raise
        except Exception as error:  # flax has its own for parameters of another shape
            refuse_other_columns((self.fit.args, self.fit.kwargs), test, error)
            raise

    def __call__(self, quantity: Quantity, rng_key: Array | None, test: tuple = ()) -> tuple[Any, Any]:
        """Return a quantity by draw, or its average, and which draws are finite.

        Args:
            quantity: what is computed.
            rng_key: a PRNG key; None where nothing is drawn.
            test: arguments and keyword arguments of the model at other inputs; none for what is of the fit alone.
        """
        fit = self.fit
        fit.refuse_change()
        if self._posteriors is not None and self._solved is None:
            self._solved = self._solve(self._posteriors)
        data, rest = partition(((fit.args, fit.kwargs), test))

        def run(rng_key: Array | None, draws: Draws, num_draws: int) -> tuple[Any, Array]:
            setting = Setting(fit.names, self.batch_size, num_draws, rest)
            return self._compiled(quantity, setting, rng_key, draws, fit.params, data, self._solved)

        if not is_mapped(fit.draws):
            return run(rng_key, fit.draws, fit.num_draws)
        return _in_blocks(run, rng_key, fit.draws, is_average=quantity.is_average)

    def _is_kept(self) -> bool:
        """Tell whether all rows are summed over once for each draw, and the matrices kept for all that is asked for."""
        shapes, draws = self.fit.shapes, self.fit.draws
        if shapes is None or not isinstance(shapes.features, RowFeatures) or is_mapped(draws):
            return False
        arrays = (draws, self.fit.args, self.fit.kwargs, self.fit.params)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arrays)):
            return False
        return self.fit.num_draws * shapes.features.shape[1] ** 2 <= _MOST_KEPT

    def _solve(self, posteriors: Quantity) -> BlockedPosterior:
        """Return the readout's posterior at every draw, one draw at a time: of many rows each takes a while."""
        fit, found = self.fit, []
        data, rest = partition(((fit.args, fit.kwargs), ()))
        setting = Setting(fit.names, 1, 1, rest)
        for index in tqdm(range(fit.num_draws), "sums over rows, by draw", disable=not self.progress_bar):
            draw = {name: values[index : index + 1] for name, values in fit.draws.items()}
            posterior, _ = self._compiled(posteriors, setting, None, draw, fit.params, data, None)
            found.append(jax.block_until_ready(posterior))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)

    def _compiled(self, quantity: Quantity, setting: Setting, *arrays: Any) -> Any:
        """Run a program of this snapshot, which is traced when it is first run with arrays of some shapes."""
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arrays)):
            return run_compiled(quantity.body, self.fit.model, setting, *arrays)
        leaves, structure = jax.tree.flatten(arrays)
        configured = tuple(getattr(jax.config, name, None) for name in _CONFIGURED)
        key = quantity.body, setting, structure, tuple(map(jax.typeof, leaves)), configured
        if key not in self._programs:
            self.fit.refuse_change(thoroughly=True)
            self._programs[key] = self._traced(quantity, setting, arrays, key)
        return self._programs[key](*arrays)

    def _traced(self, quantity: Quantity, setting: Setting, arrays: tuple, key: tuple) -> TracedProgram:
        """Trace a program, unless one was traced for an earlier object whose model does the same."""
        model, read = self.fit.model, self._read(setting, arrays)

        def trace() -> TracedProgram:
            return TracedProgram(lambda *arrays: quantity.body(model, setting, *arrays), *arrays)

        # In words: arguments of the model, which it has read by now, may change, and their hashes with them.
        body, _, *described = key
        return (
            trace() if read is None else _TRACED.get(str((read, model.variant, body, setting[:-1], described)), trace)
        )

    def _read(self, setting: Setting, arrays: tuple) -> str | None:
        """Digest the model's runs, which are all that a program knows of it and quicker to trace than the program.

        Returns:
            The digest; None if it does not tell all: a readout that is not integrated out has other programs, and
            features by blocks are a function.
        """
        if self.fit.shapes is None or isinstance(self.fit.shapes.features, RowFeatures):
            return None
        model, (_, draws, params, data, _) = self.fit.model, arrays

        def runs(draw: Draws, params: dict, data: list) -> list[ReadoutRun]:
            calls = [call for call in combine(data, setting.rest) if call]
            return Runs(model, setting.names, params, calls)(draw)

        return complete_digest(runs, first_of(draws), params, data)

    def _refuse_noise_of_other_rows(self, error: StoppedRunError) -> None:
        """Say what the model's own broadcasting error does not, if it got as far as other features than the fit's."""
        shapes = self.fit.shapes
        if shapes is None:
            return
        noise, loc = shapes.noise_scale.shape, shapes.loc.shape
        is_by_row = len(noise) == len(loc) and noise[0] == loc[0] > 1
        if is_by_row and error.num_rows != loc[0]:
            raise ValueError(
                f"the noise of observed site {self.fit.names.observed!r} is by row, for the {loc[0]} rows of the fit, "
                f"and the model fails at the {error.num_rows} rows to predict; pass the noise of the new rows as an "
                "argument of the model: a default value, or an array from outside of it, is the fit's."
            ) from error


def kept_draws(what: str, is_finite: Array, on_nonfinite: str, *, stacklevel: int = 3) -> np.ndarray | None:
    """Return which draws to continue with; refuse the others, or leave them out in so many words.

    Args:
        what: name of what is computed by draw, for messages.
        is_finite: whether the results of each draw are finite, (draws,).
        on_nonfinite: what to do about the others, "raise" or "drop".
        stacklevel: number of calls up to whoever called a method of ``ReadoutPredictive``, for the warning.

    Returns:
        Indices of the draws that are finite; None for all, as where the values are traced.

    Raises:
        FloatingPointError: if a draw is not finite and is not to be dropped, or none is finite.
        ValueError: if draws are to be dropped whose values are not known, as under ``jit``.

    Warns:
        RuntimeWarning: if draws are dropped.
    """
    if not is_known(is_finite):
        if on_nonfinite == "drop":
            raise ValueError(
                f"on_nonfinite='drop' must see which {what} are finite, but their values are not known here, as under "
                "jax.jit; call outside of JAX's transformations, or take on_nonfinite='raise', where NaN is passed on "
                "if values are not known."
            )
        return None
    lost = np.flatnonzero(~np.asarray(is_finite))
    if not lost.size:
        return None
    if lost.size == is_finite.size:
        raise FloatingPointError(
            f"no {what} are finite, of any draw: look for NaN or infinity among the inputs, those of the fit and the "
            f"new ones. If there is none, {NOISE_TOO_SMALL}; run {IN_FLOAT64}."
        )
    which = f"{what} of {_which(lost, is_finite.size)} are not finite"
    why = f"{NOISE_TOO_SMALL}, or a draw is not finite itself"
    if on_nonfinite == "raise":
        raise FloatingPointError(
            f"{which}: {why}. Run {IN_FLOAT64}, or predict from the others with on_nonfinite='drop'."
        )
    warnings.warn(
        f"{which} and are left out: {why}. What is left is biased towards the draws that float64 would not be needed "
        "for.",
        RuntimeWarning,
        stacklevel=stacklevel,
    )
    return np.flatnonzero(np.asarray(is_finite))


def _which(lost: np.ndarray, num_draws: int) -> str:
    if lost.size == 1:
        return f"draw {lost[0]} of {num_draws}"
    named = ", ".join(map(str, lost[:_NUM_NAMED])) + (", ..." if lost.size > _NUM_NAMED else "")
    return f"{lost.size} of {num_draws} draws ({named})"


def _in_blocks(
    run: Callable[[Array | None, dict[str, Any], int], tuple[Any, Array]],
    rng_key: Array | None,
    draws: dict[str, Any],
    *,
    is_average: bool,
) -> tuple[Any, np.ndarray]:
    """Run a function of draws for all of them, a block at a time, with results on the host.

    Args:
        run: function of a key, a block of draws and their number, which returns results and which draws are finite.
        rng_key: a PRNG key, from which each block gets its own.
        draws: all draws.
        is_average: whether results are log densities under the average over a block's finite draws, to be averaged in
            turn, rather than one for each draw.

    Returns:
        Results, and by draw whether they are finite.
    """
    found, is_finite = [], []
    for start, block in blocks_of(draws, axis=0):
        key = None if rng_key is None else jax.random.fold_in(rng_key, start)
        results, finite = run(key, block, len(next(iter(block.values()))))
        found.append(jax.tree.map(np.asarray, results))
        is_finite.append(np.asarray(finite))
    if is_average:
        counts = np.array([finite.sum() for finite in is_finite])[:, None]
        # A block without a finite draw has the weight zero, whatever its density.
        parts = np.where(counts > 0, np.array(found), -np.inf)
        return logsumexp(parts, b=counts / max(1, counts.sum()), axis=0), np.concatenate(is_finite)
    return jax.tree.map(lambda *parts: np.concatenate(parts), *found), np.concatenate(is_finite)
