"""What integrating a readout out assumes of a model, compared between runs of it at two readouts.

Given all other sites, the model's log density must be that of the readout's Normal prior, plus that of one Normal
likelihood whose mean is features @ readout plus terms without the readout, plus terms without the readout. The model
runs with the readout at its prior mean, and once more, hidden from all handlers and with the same values of all other
sites, moved by a fixed random δ. XLA merges what the two runs share. A branch that neither readout enters is not seen.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.interpreters.partial_eval import dce_jaxpr
from numpyro.handlers import seed, trace
from numpyro.primitives import Messenger

from numpyro_wide._checks import are_known, is_known
from numpyro_wide._compile import run_with_arguments
from numpyro_wide._traces import abstract_sites, sample_sites, unwrap
from numpyro_wide.linear_gaussian._row_blocks import RowFeatures, as_features
from numpyro_wide.readout._model import (
    PlainModel,
    ReadoutModel,
    ReadoutRun,
    ReadoutSites,
    normal_parameters,
    only_given_values,
    read_sites,
)

# By rank and what depends: the largest difference between the two runs, in units of what rounding allows and as it is.
Findings: TypeAlias = dict[tuple[int, str], tuple[Array, Array]]

# Share of a quantity by which its rounding may differ between two runs that XLA has not merged.
_ROUNDING = 1e-4


def second_run(first: ReadoutSites, args: tuple, kwargs: Mapping[str, Any]) -> tuple[ReadoutSites, Findings]:
    """Run a model again at the values of a first run, its readout displaced, and compare the two runs."""
    is_array = lambda value: isinstance(value, Array)  # noqa: E731
    values = jax.tree.map(
        lambda value: jax.lax.stop_gradient(value) if is_array(value) else value, first.free_values, is_leaf=is_array
    )
    loc, scale = first.prior  # type: ignore[misc]
    # A draw of the prior less its mean.
    move = scale * jnp.asarray(np.random.default_rng(0).standard_normal(loc.shape), jnp.result_type(float))
    with warnings.catch_warnings(action="ignore"):  # which the first run has given
        second = read_sites(first.model, values, args, kwargs, move=move, keys=first.keys)
    one, two = (jax.lax.stop_gradient(_parts(sites)) for sites in (first, second))
    observed, found = first.model.observed, {}
    # Products at the precision of the model's own, so that XLA merges them.
    with jax.numpy_dtype_promotion("standard"):
        found[1, f"the noise of observed site {observed!r} depends"] = _differ(one["noise"], two["noise"], 0.0)
        if one["observations"] is not None:
            differences = _differ(one["observations"], two["observations"], 0.0)
            found[2, f"the observations of site {observed!r} depend"] = differences
        for name, log_prob in one["others"].items():
            differences = _differ(log_prob, two["others"][name], _ROUNDING, least=1.0)
            found[3, f"the distribution of site {name!r} depends"] = differences
        if one["loc"].shape[:1] == one["features"].shape[:1]:  # others are refused where their problem is made
            found[4, "the mean"] = _is_not_linear(one, two, one["features"] @ jax.lax.stop_gradient(move))
    return second, found


def hold(findings: Findings) -> Array:
    """Return whether all assumptions hold, a scalar; True of NaN, of which others complain."""
    return ~jnp.any(jnp.stack([excess > 1 for excess, _ in findings.values()]))


def _refuse(findings: Findings, model: ReadoutModel) -> None:
    """Refuse a model by the first assumption that does not hold, where numbers are known."""
    for (_, what), (excess, amount) in sorted(findings.items()):
        if is_known(excess) and float(excess) > 1:
            by = f"by {float(amount):.3g}"
            if what == "the mean":
                raise ValueError(
                    f"the mean of observed site {model.observed!r} must be features @ readout plus terms without the "
                    f"readout, but a change of {model.readout!r} does not move it by {model.features!r} @ that change "
                    f"(it differs {by}). Record the features as they are multiplied by the readout, with their scale "
                    "and bias column."
                )
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
        run = first.read_off()
        second, findings = second_run(first, args, kwargs)
        # Features that depend on the readout show in the mean, too; here they are told.
        features = (sites.values[model.features] for sites in (first, second))
        findings[0, f"the features {model.features!r} depend"] = _features_differ(*features)
        return findings, run

    findings, run = run_with_arguments(program, (dict(values), args, dict(kwargs), list(keys)), quick=True)
    _refuse(findings, model)
    return run


def read_run(
    model: ReadoutModel, values: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any]
) -> tuple[ReadoutRun, Array]:
    """Run a model at values of its other sites; return the run, and whether the readout can be integrated out of it."""
    first = read_sites(model, values, args, kwargs)
    run = first.read_off()
    return run, hold(second_run(first, args, kwargs)[1])


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
        form = PlainModel(model.fn, model.readout, model.features, candidate, model.variant)
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
        kept = {name: site["value"] for name, site in sites.items() if site["type"] == "deterministic"}
        return {name: value for name, value in kept.items() if name != model.features}

    with only_given_values():
        moving = depends(run, jnp.zeros(()))
    return is_observed, frozenset(name for name, moves in moving.items() if moves)


def depends(fn: Callable[[Any], dict[str, Any]], argument: Any) -> dict[str, bool]:
    """Return which entries of a function's result depend on its argument, as the traced program shows."""
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(argument)
    num_arguments, found, start = len(jax.tree.leaves(argument)), {}, 0
    for name in sorted(shapes):  # as JAX sorts them
        end = start + len(jax.tree.leaves(shapes[name]))
        wanted = [start <= place < end for place in range(len(program.jaxpr.outvars))]
        found[name] = any(dce_jaxpr(program.jaxpr, wanted)[1][:num_arguments])
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


def _parts(sites: ReadoutSites) -> dict[str, Any]:
    """Return what a run shows of the likelihood, and the log densities of the other sites."""
    loc, noise_scale = sites.likelihood  # type: ignore[misc]
    others = {}
    for name, (fn, scale) in sites.others.items():
        log_prob = fn.log_prob(sites.values[name])
        others[name] = log_prob if scale is None else scale * log_prob
    return {
        "features": as_features(sites.values[sites.model.features]),
        "noise": jnp.asarray(noise_scale),
        "observations": sites.observations,
        "loc": loc,
        "others": others,
    }


def _differ(one: Array, two: Array, share: float, *, least: float | None = None) -> tuple[Array, Array]:
    """Return the largest difference, in units of what is allowed and as it is."""
    error = jnp.where(one == two, 0.0, jnp.abs(two - one))  # both may be infinite, as outside of a support
    size = jnp.max(jnp.abs(one), initial=0.0) if least is None else jnp.maximum(jnp.abs(one), least)
    return _largest(error, max(share, 64 * _rounding_unit(error)) * size)


def _largest(error: Array, allowed: Array) -> tuple[Array, Array]:
    excess = jnp.where(error > 0, error / (allowed + jnp.finfo(error.dtype).tiny), 0.0)
    return jnp.max(excess, initial=0.0), jnp.max(error, initial=0.0)


def _rounding_unit(x: Array) -> float:
    return float(jnp.finfo(x.dtype).eps)


def _features_differ(one: Any, two: Any) -> tuple[Array, Array]:
    if not isinstance(one, RowFeatures):
        return _differ(jnp.asarray(one), jnp.asarray(two), _ROUNDING)
    # Blocks of rows are the same function of the arrays that it reads.
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    found = [_differ(a, b, _ROUNDING) for a, b in leaves if jnp.issubdtype(jnp.result_type(a), jnp.floating)]
    return jax.tree.map(lambda *parts: jnp.max(jnp.stack(parts)), *found)


def _is_not_linear(one: dict[str, Any], two: dict[str, Any], expected: Array) -> tuple[Array, Array]:
    """Return by how much the mean moves by something else than the features times the change of the readout."""
    error = jnp.abs(two["loc"] - one["loc"] - expected)
    unit = _rounding_unit(error)
    # A product may be near zero by chance, and accelerators multiply with fewer digits.
    share = max(1e-3, 16 * unit)
    floor = 64 * unit if jax.default_backend() == "cpu" else share
    largest_move, largest_mean = (jnp.max(jnp.abs(part), initial=0.0) for part in (expected, one["loc"]))
    return _largest(error, share * jnp.abs(expected) + floor * largest_move + 64 * unit * largest_mean)
