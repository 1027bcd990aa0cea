"""Assumptions of integrating a readout out, checked by structure and tangents.

Given all other sites, the model's log density must be that of the readout's Normal prior, plus that of one Normal
likelihood whose mean is features @ readout plus terms without the readout, plus terms without the readout. The model is
traced, hidden from handlers, as a program of its readout μ + t δ with a fixed random δ, and of the values of its other
sites. What the readout reaches by the program's structure must be a straight line in t: without steps, of which
tangents do not tell, and with a tangent that does not depend on the place. Its tangent, in which there is no constant,
must be features @ δ for the mean, and exactly zero for all else.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_wide._checks import are_known, is_known
from numpyro_wide._compile import run_with_arguments
from numpyro_wide._traces import abstract_sites, run_model, sample_sites, unwrap, values_of_type
from numpyro_wide.linear_gaussian._row_blocks import map_rows
from numpyro_wide.readout._model import ReadoutModel, ReadoutRun, ReadoutSites, normal_parameters, read_sites
from numpyro_wide.readout._programs import FREE, SMOOTH, FreeValues, Program

# A quantity of a model's run: one of these, or the log density of another site, (4, name), in the order of complaints.
Quantity: TypeAlias = tuple[int, str]
_FEATURES, _NOISE, _OBSERVATIONS, _OTHER, _MEAN = (1, "features"), (2, "noise"), (3, "observations"), 4, (5, "mean")
_DETERMINISTIC, _RUN, _DIRECTION = 6, (7, "run"), (8, "direction")  # what else a program of a run computes
Findings: TypeAlias = dict[Quantity, Array]  # whether the assumption holds; (0, why) for no derivative


class ReadoutProgram:
    """A run of a model as a program of t and the values of its free sites; at those of a recorded run, if given.

    Attributes:
        is_observed: by sample site of the model, in their order; nothing else is known where the model's is not.
        moving_sites: the deterministic sites that depend on the readout.
    """

    def __init__(
        self,
        model: ReadoutModel,
        args: tuple,
        kwargs: Mapping[str, object],
        recorded: ReadoutSites | None = None,
        **options: Any,
    ):
        self.model, self._call, free_values = model, (args, kwargs), FreeValues()
        values, keys = (None, None) if recorded is None else (recorded.free_values, recorded.keys)
        self.is_observed: dict[str, bool] = {}

        def run(t: Array) -> dict[Quantity, Any]:
            sites = ReadoutSites(model, step=t, keys=keys)
            model_sites = run_model(model.fn, args, kwargs, values=values, inside=(free_values, sites), **options)
            self.is_observed = sites.is_observed
            if recorded is None and not sites.is_observed.get(model.observed, False):
                site = model_sites.get(model.observed)
                if site and site["type"] != "sample":
                    raise ValueError(
                        f"the observed site {model.observed!r} is a {site['type']} site. With obs_mask it is made of "
                        "two sample sites: leave out masked rows instead."
                    )
                if site:  # a latent site of another kind would never be integrated over
                    normal_parameters(model.observed, "observed site", unwrap(site["fn"], masks=True))
                return {}
            images = values_of_type(model_sites, "deterministic")
            deterministic = {(_DETERMINISTIC, name): value for name, value in images.items()}
            readout_run = sites.read_off()
            return {**_quantities(sites, readout_run), **deterministic, _RUN: readout_run, _DIRECTION: sites.direction}

        with warnings.catch_warnings(action="ignore"):  # which the recorded run gives
            self._program = Program(run, jnp.zeros(()))
        dependence = {quantity: found for quantity, found in self._program.dependence_on(0).items() if found}
        self.moving_sites = frozenset(name for order, name in dependence if order == _DETERMINISTIC)
        self._moving = {quantity: found for quantity, found in dependence.items() if quantity[0] < _DETERMINISTIC}
        self._is_reusable = free_values.are_all_arguments or recorded is not None

    def at(self, recorded: ReadoutSites) -> tuple["ReadoutProgram", list[Array]]:
        """Return a program for the values of a recorded run, itself if they are of its shapes, and its arguments."""
        source: dict[Any, object] = {**recorded.values, **dict(enumerate(recorded.keys))}
        values: list[Array] = []
        for name, index, aval in self._program.places:
            leaves = map(jnp.asarray, jax.tree.leaves(source.get(name))[index : index + 1])
            values += [leaf for leaf in leaves if (leaf.shape, leaf.dtype) == (aval.shape, aval.dtype)]
        if self._is_reusable and len(values) == len(self._program.places):
            return self, jax.lax.stop_gradient(values)
        return ReadoutProgram(self.model, *self._call, recorded).at(recorded)

    def run(self, values: list[Array]) -> ReadoutRun:
        """Return the run with the readout at its prior mean."""
        return self._program([_RUN], jnp.zeros(()), *values)[_RUN]

    def has_free_noise(self) -> bool:
        return any(self._program.reads(_NOISE)[1:])

    def findings(self, run: ReadoutRun, values: list[Array]) -> Findings:
        """Return whether the mean, and each quantity that depends on the readout, is as assumed."""
        zero, one, moving = jnp.zeros(()), jnp.ones(()), list(self._moving)
        program = self._program.with_true_derivatives()

        def tangents_at(t: Array, step: Array) -> dict[Quantity, Any]:
            _, tangents = jax.jvp(lambda t: program(moving, t, *values), (t,), (step,))
            return jax.tree.map(lambda tangent: None if tangent.dtype == jax.dtypes.float0 else tangent, tangents)

        try:
            tangents = Program(tangents_at, zero, one)
            tangents.check_forward()
        except (NotImplementedError, TypeError, ValueError) as error:
            return {(0, str(error)): jnp.array(False)}
        by_place, by_step = tangents.dependence_on(0), tangents.dependence_on(1)
        is_straight = {
            name: (self._moving[name], by_place[name], by_step[name]) == (SMOOTH, FREE, SMOOTH) for name in moving
        }
        found = tangents(moving, zero, one)
        direction = self._program([_DIRECTION], zero, *values)[_DIRECTION]
        run, direction = jax.lax.stop_gradient((run, direction))
        with jax.numpy_dtype_promotion("standard"):
            findings = {
                name: is_straight[name] & jnp.stack([jnp.all(leaf == 0) for leaf in jax.tree.leaves(found[name])]).all()
                for name in moving
                if name != _MEAN
            }
            if direction.shape == (run.features.shape[1], *run.loc.shape[1:]):  # others are refused by their problem
                is_linear = _is_linear(run, direction, found.get(_MEAN, jnp.zeros_like(run.loc)))
                findings[_MEAN] = is_straight.get(_MEAN, True) & is_linear
        return findings


def _quantities(sites: ReadoutSites, run: ReadoutRun) -> dict[Quantity, Any]:
    """Return what a run shows of the likelihood, and the log densities of the other sites."""
    quantities: dict[Quantity, Any]
    quantities = {_FEATURES: run.features, _NOISE: run.noise_scale, _OBSERVATIONS: sites.observations, _MEAN: run.loc}
    for name, (fn, scale) in sites.other_sites.items():
        log_prob = fn.log_prob(sites.values[name])
        # An improper density does not show its bounds.
        inside = [fn.support(sites.values[name])] if isinstance(unwrap(fn), dist.ImproperUniform) else []
        quantities[_OTHER, name] = [log_prob if scale is None else scale * log_prob, *inside]
    return quantities


def _is_linear(run: ReadoutRun, direction: Array, tangent: Array) -> Array:
    """Return whether the mean moves by features @ the change of the readout, row by row, but for rounding."""
    num_features = run.features.shape[1]
    # The deviation of features @ direction by row, for a direction whose largest entry is one, and of each output.
    sizes = jnp.abs(direction).max(axis=0)
    squares = jnp.square(direction / sizes).reshape(num_features, -1).mean(axis=1)
    change, variance = map_rows(run.features, lambda rows: (rows @ direction, rows**2 @ squares))
    deviation = jnp.sqrt(variance).reshape(-1, *(1 for _ in sizes.shape)) * sizes
    # Features may be of half the digits of the mean; accelerators multiply with fewer digits.
    own = run.features.dtype if jnp.issubdtype(run.features.dtype, jnp.inexact) else run.loc.dtype
    of_mean, of_features = (float(jnp.finfo(dtype).eps) for dtype in (run.loc.dtype, own))
    relative_tolerance = max(64 * of_mean * num_features**0.5, 4 * of_features, 2e-3 * (jax.default_backend() != "cpu"))
    # The square of less is lost.
    tolerance = relative_tolerance * deviation + float(jnp.finfo(run.loc.dtype).tiny) ** 0.5
    # Where the mean or the features are not finite, the density is not, either.
    return jnp.all((jnp.abs(tangent - change) <= tolerance) | ~jnp.isfinite(run.loc + change))


def nan_unless(findings: Findings, run: ReadoutRun) -> ReadoutRun:
    """Return a run whose mean is NaN where an assumption does not hold, as is all that follows from it."""
    return replace(run, loc=jnp.where(jnp.array(list(findings.values())).all(), run.loc, jnp.nan))


def refuse(findings: Findings, model: ReadoutModel) -> None:
    """Refuse a model by the first assumption that does not hold, where numbers are known."""
    failed = [quantity for quantity, holds in sorted(findings.items()) if is_known(holds) and not holds]
    if not failed:
        return
    order, name = failed[0]
    if order == 0:
        raise ValueError(
            f"the readout {model.readout!r} reaches a function without a forward derivative, by which the mean of "
            f"observed site {model.observed!r} must be linear in it: {name} Multiply the readout in JAX; callbacks and "
            "functions with a custom_vjp may make the features."
        )
    if (order, name) == _MEAN:
        raise ValueError(
            f"the mean of observed site {model.observed!r} must be features @ readout plus terms without the readout, "
            f"but a change of {model.readout!r} does not move it by {model.features!r} @ that change. Record the "
            "features as they are multiplied by the readout, with their scale and bias column."
        )
    subject = {
        _FEATURES: f"the features {model.features!r} depend",
        _NOISE: f"the noise of observed site {model.observed!r} depends",
        _OBSERVATIONS: f"the observations of site {model.observed!r} depend",
    }.get((order, name), f"the distribution of site {name!r} depends")
    raise ValueError(
        f"{subject} on the readout {model.readout!r}, which can then not be integrated out; use repriorise instead."
    )


def _read(
    model: ReadoutModel, values: Mapping[str, object], args: tuple, kwargs: Mapping[str, object]
) -> tuple[Findings, ReadoutRun]:
    """Run a model at values of its other sites, and once more as a program."""
    sites = read_sites(model, values, args, kwargs)
    run = sites.read_off()
    program, arguments = ReadoutProgram(model, args, kwargs, sites).at(sites)
    return program.findings(run, arguments), run


def check_at(
    model: ReadoutModel, values: Mapping[str, object], args: tuple, kwargs: Mapping[str, object]
) -> ReadoutRun:
    """Run a model in a program that is compiled quickly; refuse it by its findings, or return the run."""
    findings, run = run_with_arguments(lambda call: _read(model, *call), (dict(values), args, dict(kwargs)), quick=True)
    refuse(findings, model)
    return run


def read_run(
    model: ReadoutModel, values: Mapping[str, object], args: tuple, kwargs: Mapping[str, object]
) -> ReadoutRun:
    """Run a model at values of its other sites; the mean is NaN where the readout cannot be integrated out of it."""
    return nan_unless(*_read(model, values, args, kwargs))


def conjugate_form(
    model: ReadoutModel,
    values: Mapping[str, object],
    args: tuple,
    kwargs: Mapping[str, object],
    observed: str | None = None,
) -> ReadoutModel | None:
    """Return a model, with its observed site, out of which the readout can be integrated; None if there is none."""
    observed = model.observed or observed
    candidates = [observed]
    if observed is None:
        sites = sample_sites(abstract_sites(model.fn, args, kwargs, values))
        candidates = [
            name for name, site in sites.items() if site["is_observed"] and type(unwrap(site["fn"])) is dist.Normal
        ]
    for candidate in candidates:
        form = ReadoutModel(model.fn, model.readout, model.features, model.variant, candidate)
        if not are_known((values, args, kwargs)):
            return form  # what does not hold is NaN
        try:
            check_at(form, values, args, kwargs)
        except ValueError:
            if model.is_collapsed:
                raise
            continue
        return form
    return None
