"""What integrating a readout out assumes of a model, compared between runs of it at two readouts.

Given all other sites, the model's log density must be that of the readout's Normal prior, plus that of one Normal
likelihood whose mean is features @ readout plus terms without the readout, plus terms without the readout. The model
runs with the readout at its prior mean, and once more, hidden from all handlers and with the same values of all other
sites, moved by a fixed random δ. The program of the second run tells what the readout reaches, and that alone is
compared. A branch that neither readout enters is not seen.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.core import eval_jaxpr
from jax.interpreters.partial_eval import dce_jaxpr
from numpyro.handlers import seed, trace
from numpyro.primitives import Messenger

from numpyro_wide._checks import are_known, is_known
from numpyro_wide._compile import run_with_arguments
from numpyro_wide._traces import abstract_sites, sample_sites, unwrap
from numpyro_wide.linear_gaussian._row_blocks import as_features
from numpyro_wide.readout._model import (
    ReadoutModel,
    ReadoutRun,
    ReadoutSites,
    normal_parameters,
    only_given_values,
    read_sites,
)

# A part of a model's run, in the order of complaints: one of these four, or the log density of another site, (3, name).
Part: TypeAlias = tuple[int, str]
_FEATURES, _NOISE, _OBSERVATIONS, _OTHERS, _MEAN = (0, "features"), (1, "noise"), (2, "observations"), 3, (4, "mean")
# By part: the largest difference between the two runs, in units of what rounding allows and as it is.
Findings: TypeAlias = dict[Part, tuple[Array, Array]]

# Share of a quantity by which its rounding may differ between two runs that XLA has not merged.
_ROUNDING = 1e-4


def compare_runs(first: ReadoutSites, args: tuple, kwargs: Mapping[str, Any]) -> Findings:
    """Run a model again at the values of a first run, its readout displaced, and compare what the readout reaches."""
    values = jax.tree.map(
        lambda value: jax.lax.stop_gradient(value) if isinstance(value, Array) else value, first.free_values
    )
    loc, scale = first.prior  # type: ignore[misc]
    # A draw of the prior less its mean.
    move = scale * jnp.asarray(np.random.default_rng(0).standard_normal(loc.shape), jnp.result_type(float))

    def moved(move: Array) -> dict[Part, Any]:
        with warnings.catch_warnings(action="ignore"):  # which the first run has given
            return _parts(read_sites(first.model, values, args, kwargs, move=move, keys=first.keys))

    # The comparison has no gradient.
    move, one = jax.lax.stop_gradient((move, _parts(first)))
    two = jax.lax.stop_gradient(dependent(moved, move))
    # Products at the precision of the model's own, so that XLA merges them.
    with jax.numpy_dtype_promotion("standard"):
        found = {part: _difference(part, one[part], moved) for part, moved in two.items()}
        if one[_MEAN].shape[:1] == one[_FEATURES].shape[:1]:  # others are refused where their problem is made
            found[_MEAN] = _is_not_linear(one[_MEAN], two.get(_MEAN, one[_MEAN]), one[_FEATURES] @ move)
    return found


def hold(findings: Findings) -> Array:
    """Return whether all assumptions hold, a scalar; True of NaN, of which others complain."""
    return ~jnp.any(jnp.stack([excess > 1 for excess, _ in findings.values()]))


def _refuse(findings: Findings, model: ReadoutModel) -> None:
    """Refuse a model by the first assumption that does not hold, where numbers are known."""
    for part, (excess, amount) in sorted(findings.items()):
        if is_known(excess) and float(excess) > 1:
            by = f"by {float(amount):.3g}"
            if part == _MEAN:
                raise ValueError(
                    f"the mean of observed site {model.observed!r} must be features @ readout plus terms without the "
                    f"readout, but a change of {model.readout!r} does not move it by {model.features!r} @ that change "
                    f"(it differs {by}). Record the features as they are multiplied by the readout, with their scale "
                    "and bias column."
                )
            what = {
                _FEATURES: f"the features {model.features!r} depend",
                _NOISE: f"the noise of observed site {model.observed!r} depends",
                _OBSERVATIONS: f"the observations of site {model.observed!r} depend",
            }.get(part, f"the distribution of site {part[1]!r} depends")
            raise ValueError(
                f"{what} on the readout {model.readout!r}, which can then not be integrated out (a change of the "
                f"readout moves them {by}); use repriorise instead."
            )


def check_at(
    model: ReadoutModel, values: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any], keys: Any = ()
) -> ReadoutRun:
    """Run a model at two readouts in one program, compiled quickly; refuse it by what is found, or return a run."""

    def program(arguments: tuple) -> tuple[Findings, ReadoutRun]:
        values, args, kwargs, keys = arguments
        first = read_sites(model, values, args, kwargs, keys=keys or None)
        return compare_runs(first, args, kwargs), first.read_off()

    findings, run = run_with_arguments(program, (dict(values), args, dict(kwargs), list(keys)), quick=True)
    _refuse(findings, model)
    return run


def read_run(
    model: ReadoutModel, values: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any]
) -> tuple[ReadoutRun, Array]:
    """Run a model at values of its other sites; return the run, and whether the readout can be integrated out of it."""
    first = read_sites(model, values, args, kwargs)
    return first.read_off(), hold(compare_runs(first, args, kwargs))


def conjugate_form(
    model: ReadoutModel,
    values: Mapping[str, Any],
    args: tuple,
    kwargs: Mapping[str, Any],
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


def preview(model: ReadoutModel, args: tuple, kwargs: dict) -> tuple[dict[str, bool], frozenset[str]]:
    """Run a model without numbers, hidden from all handlers but those that set values."""
    is_observed: dict[str, bool] = {}

    def run(shift: Array) -> dict[str, Any]:
        with _Shifted(model.readout, shift):
            sites = trace(seed(model.fn, jax.random.key(0))).get_trace(*args, **kwargs)
        found = sample_sites(sites)
        is_observed.update({name: site["is_observed"] for name, site in found.items()})
        if model.observed in found:  # a latent site of another kind would never be integrated over
            normal_parameters(model.observed, "observed site", unwrap(found[model.observed]["fn"], masks=True))
        sites.pop(model.features, None)
        return {name: site["value"] for name, site in sites.items() if site["type"] == "deterministic"}

    with only_given_values():
        moving = depends(run, jnp.zeros(()))
    return is_observed, frozenset(name for name, moves in moving.items() if moves)


def depends(fn: Callable[[Any], dict[Any, Any]], argument: Any) -> dict[Any, bool]:
    """Return which entries of a function's result depend on its argument, as the traced program shows."""
    entries = _entries(*jax.make_jaxpr(fn, return_shape=True)(argument))
    return {name: moves for name, (_, moves) in entries.items()}


def dependent(fn: Callable[[Any], dict[Any, Any]], argument: Any) -> dict[Any, Any]:
    """Compute those entries of a function's result that depend on its argument."""
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(argument)
    moving = {name: places for name, (places, moves) in _entries(program, shapes).items() if moves}
    wanted = [any(place in places for places in moving.values()) for place in range(len(program.jaxpr.outvars))]
    jaxpr, _ = dce_jaxpr(program.jaxpr, wanted, instantiate=True)
    found = iter(eval_jaxpr(jaxpr, program.consts, *jax.tree.leaves(argument)))
    return {
        name: jax.tree.unflatten(jax.tree.structure(shapes[name]), [next(found) for _ in places])
        for name, places in moving.items()
    }


def _entries(program: Any, shapes: dict[Any, Any]) -> dict[Any, tuple[range, bool]]:
    """Return the places of each entry among the results of a traced program, and whether it depends on an argument."""
    found, start = {}, 0
    for name in sorted(shapes):  # as JAX sorts them
        end = start + len(jax.tree.leaves(shapes[name]))
        wanted = [start <= place < end for place in range(len(program.jaxpr.outvars))]
        found[name] = range(start, end), any(dce_jaxpr(program.jaxpr, wanted)[1])
        start = end
    return found


class _Shifted(Messenger):
    """Handler that adds a number to the value of a site."""

    def __init__(self, site: str, shift: Array):
        self.site, self.shift = site, shift
        super().__init__()

    def postprocess_message(self, msg: dict) -> None:
        if msg["type"] == "sample" and msg["name"] == self.site:
            msg["value"] = msg["value"] + self.shift


def _parts(sites: ReadoutSites) -> dict[Part, Any]:
    """Return what a run shows of the likelihood, and the log densities of the other sites."""
    loc, noise_scale = sites.likelihood  # type: ignore[misc]
    features = as_features(sites.values[sites.model.features])
    found = {_FEATURES: features, _NOISE: jnp.asarray(noise_scale), _MEAN: loc}
    if sites.observations is not None:
        found[_OBSERVATIONS] = sites.observations
    for name, (fn, scale) in sites.others.items():
        log_prob = fn.log_prob(sites.values[name])
        found[_OTHERS, name] = log_prob if scale is None else scale * log_prob
    return found


def _difference(part: Part, one: Any, two: Any) -> tuple[Array, Array]:
    if part[0] == _OTHERS:
        return _differ(one, two, _ROUNDING, least=1.0)
    if part != _FEATURES:
        return _differ(one, two, 0.0)
    # Blocks of rows are the same function of the arrays that it reads.
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    found = [_differ(a, b, _ROUNDING) for a, b in leaves if jnp.issubdtype(a.dtype, jnp.number)]
    return jax.tree.map(lambda *parts: jnp.max(jnp.stack(parts)), *found)


def _differ(one: Array, two: Array, share: float, *, least: float | None = None) -> tuple[Array, Array]:
    """Return the largest difference, in units of what is allowed and as it is."""
    error = jnp.where(one == two, 0.0, jnp.abs(two - one))  # both may be infinite, as outside of a support
    size = jnp.max(jnp.abs(one), initial=0.0) if least is None else jnp.maximum(jnp.abs(one), least)
    return _largest(error, max(share, 64 * float(jnp.finfo(error.dtype).eps)) * size)


def _largest(error: Array, allowed: Array) -> tuple[Array, Array]:
    excess = jnp.where(error > 0, error / (allowed + jnp.finfo(error.dtype).tiny), 0.0)
    return jnp.max(excess, initial=0.0), jnp.max(error, initial=0.0)


def _is_not_linear(one: Array, two: Array, expected: Array) -> tuple[Array, Array]:
    """Return by how much the mean moves by something else than the features times the change of the readout."""
    error = jnp.abs(two - one - expected)
    unit = float(jnp.finfo(error.dtype).eps)
    # A product may be near zero by chance, and accelerators multiply with fewer digits.
    share = max(1e-3, 16 * unit)
    floor = 64 * unit if jax.default_backend() == "cpu" else share
    largest_move, largest_mean = (jnp.max(jnp.abs(part), initial=0.0) for part in (expected, one))
    return _largest(error, share * jnp.abs(expected) + floor * largest_move + 64 * unit * largest_mean)
