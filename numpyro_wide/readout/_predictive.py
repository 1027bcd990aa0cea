"""Predictions from draws of a wrapped model: what the user holds."""

import dis
import functools
import inspect
import sys
import types
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import logsumexp, ndtr
from tqdm.auto import tqdm

from numpyro_wide._blocks import blocks_of, is_mapped
from numpyro_wide._checks import (
    IN_FLOAT64,
    NOISE_TOO_SMALL,
    check_key,
    check_known,
    check_levels,
    check_one_of,
    is_known,
    kind_of,
    listing,
    refuse_frames,
    whole_number,
)
from numpyro_wide._compile import Recent, TracedProgram, combine, complete_digest, digest, partition, run_compiled
from numpyro_wide._traces import abstract_sites, array_leaves, latent_sites, run_model
from numpyro_wide.linear_gaussian._row_blocks import BlockedPosterior, RowFeatures
from numpyro_wide.readout._model import (
    Draws,
    ReadoutModel,
    ReadoutRun,
    SiteNames,
    StoppedRunError,
    check_fit_observed,
    check_wrapped,
    first_of,
    refuse_other_readout,
)
from numpyro_wide.readout._predictions import INTEGRATED, THROUGH_WEIGHTS, Quantity, Runs, Setting, observed_site

# Packages whose functions read nothing from outside that changes between two calls; users' own code is in none of them.
_LIBRARIES = {*sys.stdlib_module_names, "flax", "jax", "jaxlib", "numpy", "numpyro", "numpyro_wide", "optax", "scipy"}
_LIBRARIES -= {"__main__"}
# Of these the objects are looked into: containers of users' values, networks, wrapped models, handlers.
_TRANSPARENT = {"flax", "functools", "numpyro", "numpyro_wide", "types"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_LEAVES = (*_PLAIN, np.ndarray, Array, types.CodeType)
_MOST = 2000  # values, so that the look stays cheap
_DEEPEST = 5  # objects within objects
_LARGEST = 2**26  # bytes of an array that is compared entry by entry; of a larger one a part is


class Snapshot:
    """The values that a model's code names, as they are when this is made.

    Looking takes from some ten microseconds on, where tracing the model would take milliseconds. What it cannot see are
    values that code reaches by other ways, such as attributes of attributes many times over, or files.

    Args:
        roots: functions, models, and objects that are passed to them.
    """

    def __init__(self, *roots: Any):
        self._roots = roots
        self._values = dict(_places(roots))

    def settle(self) -> None:
        """Leave out what has changed already: what the model itself writes whenever it runs, such as a counter."""
        now = dict(_places(self._roots))
        self._values = {
            place: value for place, value in self._values.items() if place in now and _is_same(value, now[place])
        }

    def change(self) -> str | None:
        """Return a sentence about the first value that is another one now; None if there is none."""
        now = dict(_places(self._roots))
        for place, before in self._values.items():
            if place not in now:
                return f"{place} is gone"
            after = now[place]
            if not _is_same(before, after):
                is_shown = isinstance(before, _PLAIN) and isinstance(after, _PLAIN) and not isinstance(before, _Content)
                return f"{place} was {before!r} and is {after!r}" if is_shown else f"{place} is another one"
        return None


class _Content(str):
    """Text that stands for an array's bytes: the array itself may be changed in place."""


def _places(roots: tuple) -> Iterator[tuple[str, Any]]:
    """Yield the values that the code of functions names, and those that these name, with where they stand."""
    # A stack instead of recursion: objects may be nested deeper than Python's frames go.
    waiting: list[tuple[str, Any, int]] = [("", root, 0) for root in reversed(roots)]
    known: set[int] = set()  # objects refer to one another in circles
    count = 0
    while waiting and count < _MOST:
        place, value, depth = waiting.pop()
        if place:
            count += 1
            yield place, _kept(value)
        if id(value) in known or isinstance(value, _LEAVES):
            continue
        known.add(id(value))
        try:
            waiting += [(name, inner, depth + 1) for name, inner in islice(_inside(place, value, depth), _MOST)]
        except Exception:  # an object that does not let itself be looked at, such as a proxy of nothing, tells nothing
            continue


def _inside(place: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    of = f" of {place}" if place else ""
    if isinstance(value, types.FunctionType):
        yield from _named(value, of)
    elif isinstance(value, types.MethodType):
        yield f"the object{of}", value.__self__
        yield f"the method{of}", value.__func__
    elif isinstance(value, functools.partial):
        yield f"the function{of}", value.func
        yield from ((f"argument {i}{of}", inner) for i, inner in enumerate(value.args))
        yield from ((f"argument {name!r}{of}", inner) for name, inner in value.keywords.items())
    elif isinstance(value, dict):
        yield from ((f"the entry {key!r}{of}", inner) for key, inner in value.items())
    elif isinstance(value, list | tuple | deque):
        yield from ((f"entry {i}{of}", inner) for i, inner in enumerate(value))
    elif isinstance(value, types.ModuleType | type):
        # Of a user's module only plain values: all that its functions use would be the whole program.
        if not _is_library(value.__name__ if isinstance(value, types.ModuleType) else value.__module__):
            yield from _attributes(vars(value), of, plain_only=isinstance(value, types.ModuleType))
    elif depth < _DEEPEST:
        yield from _of_object(value, of)


def _of_object(value: Any, of: str) -> Iterator[tuple[str, Any]]:
    module = type(value).__module__
    is_library = _is_library(module)
    if is_library and module.split(".")[0] not in _TRANSPARENT:
        return
    held = dict(getattr(value, "__dict__", {}))
    # Objects with slots have no dictionary of attributes; ``__slots__`` may be one string or several.
    slots = {name for kind in type(value).__mro__ for name in np.atleast_1d(getattr(kind, "__slots__", ()))}
    held |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    # Libraries keep in private attributes what they have computed, users what a model is made of.
    yield from _attributes({name: inner for name, inner in held.items() if not (is_library and name[0] == "_")}, of)
    for kind in type(value).__mro__:
        if not _is_library(kind.__module__):
            yield f"the class {kind.__name__!r}", kind


def _attributes(held: Any, of: str, *, plain_only: bool = False) -> Iterator[tuple[str, Any]]:
    for name, inner in held.items():
        # Python's own attributes change as it pleases, such as caches of annotations; calls are the user's code.
        is_own = not name.startswith("__") or name == "__call__"
        if is_own and (not plain_only or isinstance(inner, _LEAVES)):
            yield f"the attribute {name!r}{of}", inner


def _named(function: types.FunctionType, of: str) -> Iterator[tuple[str, Any]]:
    """Yield what a function's code names outside of itself, and its code."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"the variable {name!r} around it{of}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    # A cell redefined in a notebook gives the same name another code.
    yield f"the code{of}", function.__code__
    yield from ((f"default {i}{of}", value) for i, value in enumerate(function.__defaults__ or ()))
    yield from ((f"the default of {name!r}{of}", value) for name, value in (function.__kwdefaults__ or {}).items())
    if not _is_library(function.__module__):
        yield from _attributes(vars(function), of)
        within = "" if function.__module__ == "__main__" else f" of {function.__module__}"
        for name in _global_names(function.__code__):
            if name in function.__globals__:
                yield f"the global {name!r}{within}", function.__globals__[name]


def _is_library(module: str | None) -> bool:
    return module is not None and module.split(".")[0] in _LIBRARIES


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that code reads from its globals; attributes have names, too, and are none of these."""
    names = [instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in _READS]
    inner = [name for constant in code.co_consts if inspect.iscode(constant) for name in _global_names(constant)]
    return tuple(dict.fromkeys([*names, *inner]))


_READS = ("LOAD_GLOBAL", "LOAD_NAME")


def _kept(value: Any) -> Any:
    """Return what tells a value from a later one: of what may be changed in place, a digest."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        # Quick sums, not a cryptographic digest: this runs at every call of a predictive. Two, since one may collide.
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        if data.nbytes > _LARGEST:
            data = np.ascontiguousarray(data[:: data.nbytes // _LARGEST + 1])
        return _Content(f"{value.shape} {value.dtype} {zlib.crc32(data.data)} {zlib.adler32(data.data)}")
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, set):
        return frozenset(value)
    return value


def _is_same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, (*_PLAIN, frozenset)):
        return bool(before == after) or before != before  # NaN
    if isinstance(before, Array):
        # Nobody can change an array of JAX, so that another object is a change unless the comparison is cheap.
        if not (is_known(before) and is_known(after)) or before.nbytes > _LARGEST:
            return False
        return before.dtype == after.dtype and np.array_equal(before, after)
    if isinstance(before, types.MethodType):  # made anew whenever it is asked for
        return before.__func__ is after.__func__ and before.__self__ is after.__self__
    # What containers and partial functions hold has places of its own.
    return isinstance(before, dict | list | tuple | deque | functools.partial)


# Names that predictions are given under, besides that of the observed site.
NAMES = ("mean", "variance", "predictive_variance", "noise_scale", "probs")


class Fit:
    """A wrapped model, the arguments that it was fitted with, and draws of it: copies that nobody else can change.

    Args:
        model: the wrapped model.
        draws: draws of its latent sites, each with a leading axis.
        args: arguments that it was fitted with.
        kwargs: keyword arguments that it was fitted with.
        params: values of its param sites.

    Attributes:
        names: names of the sites.
        is_integrated: whether the readout can be integrated out.
        num_draws: number of draws.
        shapes: the run with these arguments, shapes instead of numbers; None if it cannot.

    Raises:
        TypeError: if the model cannot be called with these arguments.
        ValueError: if nothing is observed, or draws or parameters do not fit.
    """

    def __init__(self, model: ReadoutModel, draws: Mapping[str, Any], args: tuple, kwargs: dict, params: dict):
        refuse_frames(args, kwargs)
        self.model = model
        self.args, self.kwargs, self.params = _copied(args), _copied(kwargs), _copied(params)
        self.draws: Draws = {name: _as_draws(values) for name, values in draws.items()}
        self.num_draws = _num_draws(self.draws)
        try:
            self._look()
        except TypeError as error:
            example = "what it was fitted on, observations included, such as model_args=(x, y)"
            refuse_mismatch(model.fn, self.args, self.kwargs, error, "model_args and model_kwargs", example)
            raise
        if self.names.observed in NAMES:
            raise ValueError(
                f"the observed site is called {self.names.observed!r}, but predictions are given under the names "
                f"{listing(NAMES)} and that of the site; rename the site."
            )
        self._snapshot = Snapshot(model, *self.args, *self.kwargs.values())
        self._digest = self._program()
        self._snapshot.settle()

    def refuse_change(self, *, thoroughly: bool = False) -> None:
        """Refuse to continue with a model that has changed.

        Args:
            thoroughly: whether to trace the model as well, which takes milliseconds and sees more than its code names.

        Raises:
            ValueError: if a value that the model's code names is another one, or the model computes something else.
        """
        change = self._snapshot.change()
        if change is None and thoroughly and self._program() != self._digest:
            change = "it computes something else from the arguments of the fit"
        if change is not None:
            raise ValueError(
                f"the model has changed since this ReadoutPredictive was made: {change}. Draws belong to the "
                "model that they were drawn from: put back what has changed; or make a new ReadoutPredictive, with "
                "draws of the model as it is now."
            )

    def _look(self) -> None:
        names = self.model.conjugate_sites(self.args, self.kwargs)
        self.is_integrated = names is not None
        if names is not None:
            self.names = names
            self.shapes: ReadoutRun | None = self._run()
            self._check_draws(dict(self.shapes.latent_shapes), list(self.shapes.param_names))
            return
        self.shapes = None
        sites = abstract_sites(self.model.fn, self.args, self.kwargs, self.params)
        self.names = SiteNames(self.model.readout, self.model.features, observed_site(sites))
        latent = {name: tuple(site["fn"].shape()) for name, site in latent_sites(sites).items()}
        if latent.pop(self.model.readout, None) is None:
            refuse_other_readout(self.model.readout)
        if self.model.readout not in self.draws and self.model.base not in self.draws:
            self._refuse_missing([self.model.readout])
        self._check_draws(latent, [name for name, site in sites.items() if site["type"] == "param"])

    def _run(self) -> ReadoutRun:
        """Return the run with the arguments of the fit, shapes instead of numbers."""

        def run(values: Mapping[str, Any]) -> ReadoutRun:
            found = self.model.run(self.names, values, self.args, self.kwargs)
            found.problem(self.model.variant)  # which checks it
            return found

        try:
            found = jax.eval_shape(lambda: run(self.params))
        except NotImplementedError:  # a prior that cannot be sampled, such as ImproperUniform
            found = jax.eval_shape(lambda: run({**self.params, **first_of(self.draws)}))
        check_fit_observed(found, self.names.observed)
        return found

    def _program(self) -> str:
        """Return a digest of what the model computes from the arguments of the fit, values of arrays left out."""
        data, rest = partition((self.args, self.kwargs))

        def run(data: list, draw: Draws) -> list:
            args, kwargs = combine(data, rest)
            return array_leaves(run_model(self.model.fn, args, kwargs, values={**self.params, **draw}))

        return digest(jax.make_jaxpr(run)(data, first_of(self.draws)).jaxpr)

    def _check_draws(self, latent: dict[str, tuple[int, ...]], params: list[str]) -> None:
        """Refuse draws that lack a latent site or have another shape, and param sites without a value."""
        self._refuse_missing([name for name in latent if name not in self.draws])
        # The parameters of a random flax module are replaced by its sample sites.
        modules = {name.split("/")[0] + "$params" for name in latent}
        known = modules | self.params.keys() | self.draws.keys()
        unset = [name for name in params if name not in known]
        if unset:
            raise ValueError(f"the model has the param sites {listing(unset)}; pass their values as params.")
        for name, shape in latent.items():
            if self.draws[name].shape[1:] != shape:
                raise ValueError(
                    f"draws[{name!r}] must have shape (draws, *{shape}), but has {self.draws[name].shape}; flatten "
                    "chains, as mcmc.get_samples() does."
                )

    def _refuse_missing(self, missing: list[str]) -> None:
        if missing:
            raise ValueError(
                f"draws must hold every latent site, but {listing(missing)} is missing; they hold "
                f"{listing(self.draws)}."
            )


def refuse_mismatch(model: Callable, args: tuple, kwargs: dict, error: TypeError, what: str, example: str) -> None:
    """Raise a ``TypeError`` that says why a model cannot be called with some arguments, if that is the reason.

    Args:
        model: the model.
        args: arguments of the call.
        kwargs: keyword arguments of the call.
        error: what the call has raised.
        what: name of the arguments.
        example: what to pass, for instance.
    """
    try:
        signature = inspect.signature(model)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as mismatch:
        raise TypeError(f"the model cannot be called with these {what}: {mismatch}. Pass {example}.") from error


def refuse_other_columns(fit: tuple[tuple, dict], test: tuple[tuple, dict], error: Exception) -> None:
    """Say that arguments of a prediction have other columns than those of the fit, if the model fails at them.

    A model's own ``ValueError`` may be about anything, and is kept, with a note.

    Args:
        fit: arguments and keyword arguments of the fit.
        test: arguments and keyword arguments of the prediction.
        error: what the model has raised.

    Raises:
        ValueError: if an array has other axes after the first, and the error is none that says why.
    """
    (args, kwargs), (new_args, new_kwargs) = fit, test
    pairs = [(f"argument {place}", *pair) for place, pair in enumerate(zip(args, new_args, strict=False))]
    pairs += [(name, kwargs[name], value) for name, value in new_kwargs.items() if name in kwargs]
    for name, old, new in pairs:
        if not all(hasattr(value, "shape") for value in (old, new)) or old.shape[1:] == new.shape[1:]:
            continue
        came = f"{name} has shape {new.shape}, where the fit had {old.shape}"
        columns = ", ".join(map(str, old.shape[1:]))
        said = (
            f"the model fails at the rows to predict: {came}. New inputs need the columns of the fit, (m, {columns})."
        )
        if isinstance(error, ValueError):
            error.add_note(said)
            return
        raise ValueError(said) from error


def _copied(tree: Any) -> Any:
    """Return a tree whose NumPy arrays nobody else can change."""
    return jax.tree.map(lambda leaf: leaf.copy() if type(leaf) is np.ndarray else leaf, tree)


def _as_draws(draws: Any) -> Any:
    """Return a copy as an array of JAX, which nobody can change; what is memory-mapped as it is."""
    return draws if isinstance(draws, np.memmap) else jax.numpy.array(draws)


def _num_draws(draws: Draws) -> int:
    lengths = {name: values.shape[0] if values.ndim else None for name, values in draws.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        raise ValueError(
            "draws must hold arrays with one leading axis for the draws, of the same length, "
            f"but the lengths are {lengths}."
        )
    num_draws = next(length for length in lengths.values() if length is not None)
    if num_draws == 0:
        raise ValueError("draws must hold at least one draw, but the arrays are empty.")
    return num_draws


_MOST_ROWS = 20  # of a table; more are shown by the first and last half of them


@dataclass(frozen=True, repr=False)
class PredictiveSummary:
    """Predictions as one distribution for each row, the mixture over draws with the noise included.

    It shows itself as a table. Classes have probabilities, and nothing else.

    Attributes:
        mean: mean of the mixture, (m,) or (m, k); None for classes.
        standard_deviation: standard deviation of the mixture, of the shape of ``mean``; None for classes.
        quantiles: quantiles of the mixture by their level, each of the shape of ``mean``.
        probs: probabilities of the classes, (m, classes), or of a one, (m,); None for other likelihoods.
    """

    mean: np.ndarray | None = None
    standard_deviation: np.ndarray | None = None
    quantiles: dict[float, np.ndarray] = field(default_factory=dict)
    probs: np.ndarray | None = None

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns of the table by their heading, (m,) each."""
        parts: dict[str, np.ndarray | None] = {"mean": self.mean, "sd": self.standard_deviation}
        parts |= {f"{100 * level:g}%": values for level, values in self.quantiles.items()}
        parts["p"] = self.probs
        found = {}
        for name, values in parts.items():
            if values is None:
                continue
            if values.ndim == 1:
                found[name] = values
            else:
                by_column = values.reshape(values.shape[0], -1).T
                found |= {f"{name}[{index}]": column for index, column in enumerate(by_column)}
        return found

    def __str__(self) -> str:
        heading, rows = self._table()
        widths = [max(len(row[i]) for row in [heading, *rows]) for i in range(len(heading))]
        lines = (
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [heading, *rows]
        )
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        heading, rows = self._table()
        top = "".join(f"<th>{cell}</th>" for cell in heading)
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
        return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        columns = self.columns()
        num_rows = len(next(iter(columns.values())))
        shown: list[int | None] = list(range(num_rows))
        if num_rows > _MOST_ROWS:
            shown = [*range(_MOST_ROWS // 2), None, *range(num_rows - _MOST_ROWS // 2, num_rows)]
        rows = [
            ["..."] * (len(columns) + 1)
            if row is None
            else [str(row), *(f"{values[row]:.4g}" for values in columns.values())]
            for row in shown
        ]
        return ["row", *columns], rows


def summarise(found: dict[str, Array], observed: str, levels: Sequence[float]) -> PredictiveSummary:
    """Summarise predictions over their draws.

    Args:
        found: predictions, (draw, m, ...) each.
        observed: name of the observed site, under which they hold draws with noise.
        levels: levels of the quantiles, between 0 and 1.
    """
    values = {name: np.asarray(draws, float) for name, draws in found.items()}
    probs = values["probs"].mean(axis=0) if "probs" in values else None
    if probs is not None:
        return PredictiveSummary(probs=probs)
    mean, variance = values["mean"], values["predictive_variance"]
    deviation = np.sqrt(variance.mean(axis=0) + mean.var(axis=0))
    if "variance" in values:  # each draw's prediction is a Gaussian
        scale = np.sqrt(variance)

        def share_below(at: np.ndarray) -> np.ndarray:
            return ndtr((at - mean) / scale).mean(axis=0)

        far = 10 * scale.max(axis=0)
        quantiles = {level: _root(share_below, level, mean.min(0) - far, mean.max(0) + far) for level in levels}
    else:
        quantiles = {level: np.quantile(values[observed], level, axis=0, method="inverted_cdf") for level in levels}
    return PredictiveSummary(mean.mean(axis=0), deviation, quantiles)


def _root(increasing: Callable, level: float, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return where an increasing function has a value, entry by entry, by halving: 40 times, to 1e-12 of the range."""
    for _ in range(40):
        middle = 0.5 * (low + high)
        is_below = increasing(middle) < level
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return 0.5 * (low + high)


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


_ORDER = "the order is ReadoutPredictive(model, draws, (x, y))"


class ReadoutPredictive:
    r"""Predictions from draws of a wrapped model: of a chain, of a guide, or of the wide limit.

    Given the hidden weights, and with a Normal likelihood, the readout is Gaussian (Hron 2022, eq. 2; Mathematics,
    :eq:`posterior`): its draws are independent and exact, and predictions integrate over it in closed form
    (Rao-Blackwell; :eq:`predictive`), one Gaussian for each draw of the hidden weights. That holds for collapsed
    models, and for repriorised ones whose own likelihood is Normal with a mean linear in the readout. For all others,
    such as classes and counts, predictions go through draws of all weights.

    It is a snapshot: draws belong to the model that they were drawn from, so the model is looked at here, and
    predictions are refused once a global, a closure, a default or an attribute that the model reads has changed.
    Arrays are copied. Programs are compiled at the first call for some shapes of inputs and draws; further calls, and
    other draws, use them again.

    ``{**draws, <readout>: predictive.readout(key)}`` can be used wherever samples of the unwrapped model can.

    Args:
        model: result of :func:`~numpyro_wide.collapse_readout` or :func:`~numpyro_wide.repriorise`.
        draws: draws of all its latent sites, each with a leading axis for the draws. A repriorised model's may hold its
            base site, the readout, or both. Memory-mapped ones, as of :func:`~numpyro_wide.runs.run_in_pieces`, are
            read in blocks; results are NumPy arrays then.
        model_args: arguments that the model was fitted with, observations included.
        model_kwargs: keyword arguments that the model was fitted with.
        params: values of the model's param sites, as NumPyro's ``Predictive`` takes them.
        batch_size: number of draws that are worked on at once; by default as many as keep the features of a batch, at
            the inputs of the fit and at those predicted for, within a million numbers each, 64 million off the CPU.
        on_nonfinite: what to do about draws of the hidden weights whose results are not finite, as where the noise is
            lost in rounding: "raise" an error that names them, or "drop" them with a warning that does. Results then
            have as many draws as are left, and are biased towards weights that float32 is enough for. Under ``jit``,
            where nothing is known, "raise" passes NaN on, and "drop" is refused.
        progress_bar: whether to show a bar while features are summed over by blocks of rows. That is done once, at the
            first call, for all draws whose d × d matrices are within a gigabyte; predictions read no row again.

    Raises:
        TypeError: if the model is no wrapped one, the draws not a dictionary, ``model_args`` not a tuple, or not what
            the model can be called with.
        ValueError: if there are no draws, a latent site has none, their numbers differ, nothing is observed, the
            observed site has a name that predictions are given under, or ``on_nonfinite`` is unknown.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide import ReadoutPredictive, collapse_readout, nn, wide_limit_draws
        >>> model = nn.bnn(nn.FCN(depth=1, width=50), num_outputs=None, noise=0.1)
        >>> wrapped = collapse_readout(model, readout="readout", features="features", observed="y")
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> y = jnp.sin(x[:, 0])
        >>> draws = wide_limit_draws(jax.random.key(0), wrapped, 20, x, y)
        >>> predictive = ReadoutPredictive(wrapped, draws, (x, y))
        >>> found = predictive(jax.random.key(1), jnp.zeros((3, 1)))
        >>> {name: values.shape for name, values in sorted(found.items())}
        {'mean': (20, 3), 'noise_scale': (20, 3), 'predictive_variance': (20, 3), 'variance': (20, 3), 'y': (20, 3)}
        >>> predictive.log_density(jnp.zeros((3, 1)), jnp.zeros(3)).shape
        (3,)
    """

    def __init__(
        self,
        model: ReadoutModel,
        draws: Mapping[str, Any],
        model_args: tuple = (),
        model_kwargs: dict[str, Any] | None = None,
        *,
        params: dict[str, Any] | None = None,
        batch_size: int | None = None,
        on_nonfinite: str = "raise",
        progress_bar: bool = False,
    ):
        check_wrapped(
            model, "predict from others, such as one that uses ReprioriseReadout itself, with numpyro's Predictive"
        )
        if not isinstance(draws, Mapping):
            raise TypeError(
                f"draws must be a dictionary of draws, such as mcmc.get_samples(), but got {kind_of(draws)}; {_ORDER}."
            )
        if not isinstance(model_args, tuple | list):
            raise TypeError(
                "draws must be a dictionary of draws, and model_args a tuple, but got a "
                f"{type(draws).__name__} and {kind_of(model_args)}; {_ORDER}."
            )
        check_one_of("on_nonfinite", on_nonfinite, CHOICES)
        self.on_nonfinite = on_nonfinite
        self.batch_size = None if batch_size is None else whole_number("batch_size", batch_size)
        self._fit = Fit(model, draws, tuple(model_args), dict(model_kwargs or {}), dict(params or {}))
        self._quantities = INTEGRATED if self._fit.is_integrated else THROUGH_WEIGHTS
        self._run = PredictionRuns(self._fit, self.batch_size, self._quantities.posteriors, progress_bar)

    @property
    def model(self) -> ReadoutModel:
        """The wrapped model."""
        return self._fit.model

    @property
    def draws(self) -> Draws:
        """The draws that predictions are made from, each with a leading axis."""
        return self._fit.draws

    @property
    def is_integrated(self) -> bool:
        """Whether the readout is integrated out: the model's likelihood is Normal, and linear in it."""
        return self._quantities.is_integrated

    def readout(self, rng_key: Array) -> Array:
        """Draw the readout from its posterior, once for each draw of the other sites.

        Where it cannot be integrated out, return the draws' own.

        Args:
            rng_key: a PRNG key.

        Returns:
            Readouts, (draws, d) or (draws, d, k).

        Raises:
            FloatingPointError: if a draw is not finite: the noise is too small for the features in this precision.
            ValueError: under ``jit``, if such draws are to be dropped; if the model has changed.

        Warns:
            RuntimeWarning: if such draws are dropped.
        """
        check_key("rng_key", rng_key, "predictive.readout(rng_key)")
        quantity = self._quantities.readouts
        found, is_finite = self._run(quantity, rng_key)
        kept = kept_draws(quantity.what, is_finite, self.on_nonfinite)
        return found if kept is None else found[kept]

    def __call__(self, rng_key: Array, *args: Any, **kwargs: Any) -> Draws:
        """Predict at other inputs.

        Args:
            rng_key: a PRNG key.
            *args: arguments of the model without observations.
            **kwargs: keyword arguments of the model without observations.

        Returns:
            "mean" and "variance" of the noise-free function given each draw of the hidden weights, (draws, m) or
            (draws, m, k); "noise_scale", the noise's standard deviation at every entry; "predictive_variance", that of
            an observation, noise included; and under the observed site's name draws with noise. All have the same
            shape. Where the readout is not integrated out: "mean" and "predictive_variance" of the observed
            distribution at each draw; for classes "probs", (draws, m, classes), or of a Bernoulli (draws, m); and
            draws.

        Raises:
            ValueError: if there are observations among the arguments, the inputs give features that do not fit those of
                the fit, or the noise is by row, and not passed anew for other rows; under ``jit``, if draws are to be
                dropped; if the model has changed.
            FloatingPointError: if a prediction is not finite.

        Warns:
            RuntimeWarning: if draws are dropped whose predictions are not finite.
        """
        check_key("rng_key", rng_key, "predictive(rng_key, x_new)")
        quantity = self._quantities.predictions
        found, is_finite = self._run.elsewhere(quantity, rng_key, (args, kwargs))
        kept = kept_draws(quantity.what, is_finite, self.on_nonfinite)
        return found if kept is None else {name: values[kept] for name, values in found.items()}

    def summary(
        self,
        *args: Any,
        quantiles: float | Sequence[float] = (0.05, 0.5, 0.95),
        rng_key: Array | None = None,
        **kwargs: Any,
    ) -> PredictiveSummary:
        """Summarise predictions at other inputs: the mixture over draws, noise included, as a table.

        Args:
            *args: arguments of the model without observations.
            quantiles: level of a quantile, or several, between 0 and 1.
            rng_key: a PRNG key, which matters where quantiles are those of draws; ``jax.random.key(0)`` by default.
            **kwargs: keyword arguments of the model without observations.

        Returns:
            Mean, standard deviation and quantiles by row, or the probabilities of classes; to print. With a Normal
            likelihood quantiles are exact, those of a mixture of Gaussians; else they are those of draws.

        Raises:
            ValueError: for levels outside of (0, 1), and as :meth:`__call__`.
            TypeError: under ``jit``, where numbers are not known.
        """
        levels = (quantiles,) if isinstance(quantiles, float) else tuple(quantiles)
        check_levels("quantiles", levels)
        if any(isinstance(arg, Array) and jnp.issubdtype(arg.dtype, jax.dtypes.prng_key) for arg in args):
            raise TypeError("summary(x_new) takes the rows to predict; a PRNG key goes by name, rng_key=key.")
        found = self(jax.random.key(0) if rng_key is None else rng_key, *args, **kwargs)
        check_known("a summary holds numbers", *found.values())
        return summarise(found, self._fit.names.observed, levels)

    def log_density(self, *args: Any, **kwargs: Any) -> Array:
        r"""Return the log predictive density of observations, row by row, under the average over draws.

        $\log \frac{1}{S} \sum_s \prod_k N(y_k; \text{mean}_{sk}, \text{variance}_{sk} + \text{noise\_scale}_{sk}^2)$
        with the moments of :eq:`predictive`: the readout is integrated over, outputs of one row are independent given
        the hidden weights, and what correlates them is in the average. Where the readout is not integrated out, the
        terms are the likelihood at each draw of all weights. Rows are taken one by one: their sum is the log score of a
        test set, not the density of all of it together.

        Args:
            *args: arguments of the model, observations included, such as ``(x_test, y_test)``.
            **kwargs: keyword arguments of the model, observations included.

        Returns:
            Log densities, (m,), in the units of the observations; minus infinity where a density underflows.

        Raises:
            ValueError: if there are no observations among the arguments, they hold NaN, or what predictions refuse.
            FloatingPointError: if means or variances are not finite.

        Warns:
            RuntimeWarning: if draws are dropped whose means or variances are not finite.
        """
        return self._log_average(self._quantities.log_densities, (args, kwargs))

    def joint_log_density(self, *args: Any, **kwargs: Any) -> Array:
        r"""Return the log predictive density of all rows together: the conditional log evidence $\log p(D_2 | D_1)$.

        $D_1$ is what the model was fitted on, $D_2$ the observations of these rows; $\log \frac{1}{S} \sum_s
        p(D_2 | D_1, \text{hidden}_s)$, each term a Gaussian whose covariance over rows is that of :eq:`predictive`. A
        model that learns fast from little data is ranked higher by it than by the evidence, and it is closer to how
        well the model will predict (Lotfi et al. 2022). The average over draws given $D_1$ is dominated by those under
        which $D_2$ is likely. With many rows these are few, and the estimate is then too low.

        Args:
            *args: arguments of the model, observations included, such as ``(x_2, y_2)``.
            **kwargs: keyword arguments of the model, observations included.

        Returns:
            A scalar, in nats; minus infinity where a density underflows.

        Raises:
            ValueError: as :meth:`log_density`.
            FloatingPointError: if means or covariances are not finite.

        Warns:
            RuntimeWarning: if draws are dropped whose means or covariances are not finite.
        """
        return self._log_average(self._quantities.joint_log_densities, (args, kwargs))[0]

    def log_evidence(self) -> Array:
        r"""Return the log evidence of the fit's observations at each draw of the other sites.

        $\log N(Y; \text{loc}, \Psi \Psi^\top + \sigma^2 I)$ (Mathematics, :eq:`evidence`). It is the weight of draws
        from the prior; its differences between draws are nats.

        Returns:
            Log evidences, (draws,).

        Raises:
            ValueError: if the readout is not integrated out: the model's likelihood is not Normal.
            FloatingPointError: if one is not finite.

        Warns:
            RuntimeWarning: if such draws are dropped.
        """
        quantity = self._quantities.log_evidences
        if quantity is None:
            raise ValueError(
                "the readout is not integrated out of this model, whose likelihood is not Normal, so that its evidence "
                "is not known; estimate it with numpyro_wide.model_evidence."
            )
        found, is_finite = self._run(quantity, None)
        kept = kept_draws(quantity.what, is_finite, self.on_nonfinite)
        return found if kept is None else found[kept]

    def _log_average(self, quantity: Quantity, test: tuple[tuple, dict]) -> Array:
        """Return log densities, NaN under a transformation where a draw is not finite; without NaN elsewhere."""
        found, is_finite = self._run.elsewhere(quantity, None, test)
        kept_draws(quantity.what, is_finite, self.on_nonfinite, stacklevel=4)
        if not is_known(found):
            # Draws that are not finite cannot be told of here, and must not go unnoticed.
            return jnp.where(is_finite.all(), found, jnp.nan)
        if np.isnan(found).any():
            rows = np.flatnonzero(np.isnan(found))
            which = (
                f"{len(rows)} of {len(found)} rows do, the first being row {rows[0]}" if len(found) > 1 else "some do"
            )
            raise ValueError(
                f"the observations of site {self._fit.names.observed!r} must not contain NaN, but {which}; drop or "
                "impute the missing ones."
            )
        return found
