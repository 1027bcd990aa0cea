"""Wrapped models as they were fitted: arguments, draws and sites, looked at once and held to what they were."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from numpyro_wide._checks import listing, refuse_frames
from numpyro_wide._programs import combine, digest, partition
from numpyro_wide._traces import abstract_sites, array_leaves, latent_sites, run_model
from numpyro_wide.readout._model import Draws, ReadoutModel, check_fit_observed, first_of
from numpyro_wide.readout._run import ReadoutRun, SiteNames, refuse_other_readout
from numpyro_wide.readout._snapshot import Snapshot
from numpyro_wide.readout._through_weights import observed_site

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
