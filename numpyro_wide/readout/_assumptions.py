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
    ReadoutModel,
    ReadoutRun,
    ReadoutSites,
    SiteNames,
    normal_parameters,
    only_given_values,
    read_sites,
)

# By rank, kind and site: the largest difference between the two runs, in units of what rounding allows and as it is.
Findings: TypeAlias = dict[tuple[int, str, str], tuple[Array, Array]]

# Share of a quantity by which its rounding may differ between two runs that XLA has not merged.
_ROUNDING = 1e-4


def displacement(prior_scale: Array, shape: tuple[int, ...]) -> Array:
    """Return δ of a readout of this shape, a draw of its prior less the mean."""
    return prior_scale * jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.result_type(float))


def second_run(
    model: Callable, first: ReadoutSites, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[ReadoutSites, Findings]:
    """Run a model again at the values of a first run, its readout displaced, and compare the two runs."""
    is_array = lambda value: isinstance(value, Array)  # noqa: E731
    values = jax.tree.map(
        lambda value: jax.lax.stop_gradient(value) if is_array(value) else value, first.free_values, is_leaf=is_array
    )
    with warnings.catch_warnings(action="ignore"):  # which the first run has given
        second = read_sites(model, first.names, values, args, kwargs, displacement=displacement, keys=first.keys)
    one, two = (jax.lax.stop_gradient(_parts(sites)) for sites in (first, second))
    observed, found = first.names.observed, {}
    # Products at the precision of the model's own, so that XLA merges them.
    with jax.numpy_dtype_promotion("standard"):
        found[1, "noise", observed] = _differ(one["noise"], two["noise"], 0.0)
        if one["observations"] is not None:
            found[2, "observations", observed] = _differ(one["observations"], two["observations"], 0.0)
        for name, log_prob in one["others"].items():
            found[3, "other", name] = _differ(log_prob, two["others"][name], _ROUNDING, least=1.0)
        if one["loc"].shape[:1] == one["features"].shape[:1]:  # others are refused where their problem is made
            found[4, "mean", observed] = _is_not_linear(one, two)
    return second, found


def hold(findings: Findings) -> Array:
    """Return whether all assumptions hold, a scalar; True of NaN, of which others complain."""
    return ~jnp.any(jnp.stack([excess > 1 for excess, _ in findings.values()]))


def refuse(findings: Findings, names: SiteNames) -> None:
    """Refuse a model by the first assumption that does not hold, where numbers are known."""
    for (_, kind, site), (excess, amount) in sorted(findings.items()):
        if is_known(excess) and float(excess) > 1:
            by = f"by {float(amount):.3g}"
            if kind == "mean":
                raise ValueError(
                    f"the mean of observed site {site!r} must be features @ readout plus terms without the readout, "
                    f"but a change of {names.readout!r} does not move it by {names.features!r} @ that change (it "
                    f"differs {by}). Record the features as they are multiplied by the readout, with their scale and "
                    "bias column."
                )
            what = {
                "features": f"the features {site!r} depend",
                "noise": f"the noise of observed site {site!r} depends",
                "observations": f"the observations of site {site!r} depend",
                "other": f"the distribution of site {site!r} depends",
            }[kind]
            raise ValueError(
                f"{what} on the readout {names.readout!r}, which can then not be integrated out (a change of the "
                f"readout moves them {by}); use repriorise instead."
            )


def check_at(
    model: Callable, names: SiteNames, values: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any], keys: Any = ()
) -> tuple[Findings, ReadoutRun]:
    """Run a model at two readouts in one program, compiled quickly; return what was found, and the first run."""

    def program(arguments: tuple) -> tuple[Findings, ReadoutRun]:
        values, args, kwargs, keys = arguments
        first = read_sites(model, names, values, args, kwargs, keys=keys or None)
        second, findings = second_run(model, first, args, kwargs)
        # Features that depend on the readout show in the mean, too; here they are told.
        findings[0, "features", names.features] = _features_differ(
            *(sites.values[names.features] for sites in (first, second))
        )
        return findings, first.read_off()

    return run_with_arguments(program, (dict(values), args, dict(kwargs), list(keys)), quick=True)


def read_run(
    model: Callable, names: SiteNames, values: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any]
) -> tuple[ReadoutRun, Array]:
    """Run a model at values of its other sites; return the run, and whether the readout can be integrated out of it."""
    first = read_sites(model, names, values, args, kwargs)
    return first.read_off(), hold(second_run(model, first, args, kwargs)[1])


def conjugate_sites(
    model: ReadoutModel,
    values: Mapping[str, Any],
    args: tuple,
    kwargs: Mapping[str, Any],
    observed: str | None = None,
) -> SiteNames | None:
    """Return the names of the sites with which a model's readout can be integrated out; None if there are none."""
    observed = model.observed or observed
    candidates = [] if observed is None else [observed]
    if not candidates:
        sites = sample_sites(abstract_sites(model.fn, args, kwargs, values))
        candidates = [
            name for name, site in sites.items() if site["is_observed"] and type(unwrap(site["fn"])) is dist.Normal
        ]
    for candidate in candidates:
        names = SiteNames(model.readout, model.features, candidate)
        if not are_known((values, args, kwargs)):
            return names  # what does not hold is NaN
        try:
            findings, _ = check_at(model.fn, names, values, args, kwargs)
            refuse(findings, names)
        except ValueError:
            if model.is_collapsed:
                raise
            continue
        return names
    return None


def preview(model: Callable, names: SiteNames, args: tuple, kwargs: dict) -> tuple[dict[str, bool], frozenset[str]]:
    """Run a model without numbers, hidden from all handlers but those that set values."""
    is_observed: dict[str, bool] = {}

    def run(shift: Array) -> dict[str, Any]:
        with _Shifted(names.readout, shift):
            sites = trace(seed(model, jax.random.key(0))).get_trace(*args, **kwargs)
        found = sample_sites(sites)
        is_observed.update({name: site["is_observed"] for name, site in found.items()})
        if names.observed in found:  # a latent site of another kind would never be integrated over
            normal_parameters(names.observed, "observed site", unwrap(found[names.observed]["fn"], masks=True))
        kept = {name: site["value"] for name, site in sites.items() if site["type"] == "deterministic"}
        return {name: value for name, value in kept.items() if name != names.features}

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
    if sites.likelihood is None or sites.prior is None:
        sites.read_off()  # which says what is missing
    (loc, noise_scale), (prior_loc, prior_scale) = sites.likelihood, sites.prior  # type: ignore[misc]
    others = {}
    for name, (fn, scale) in sites.others.items():
        log_prob = fn.log_prob(sites.values[name])
        others[name] = log_prob if scale is None else scale * log_prob
    return {
        "features": as_features(sites.values[sites.names.features]),
        "noise": jnp.asarray(noise_scale),
        "observations": sites.observations,
        "loc": loc,
        "move": displacement(prior_scale, prior_loc.shape),
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
    worst = jax.tree.map(lambda *parts: jnp.max(jnp.stack(parts)), *found)
    return worst


def _is_not_linear(one: dict[str, Any], two: dict[str, Any]) -> tuple[Array, Array]:
    """Return by how much the mean moves by something else than the features times the change of the readout."""
    expected = one["features"] @ one["move"]
    error = jnp.abs(two["loc"] - one["loc"] - expected)
    unit = _rounding_unit(error)
    # A product may be near zero by chance, and accelerators multiply with fewer digits.
    share = max(1e-3, 16 * unit)
    floor = 64 * unit if jax.default_backend() == "cpu" else share
    largest_move, largest_mean = (jnp.max(jnp.abs(part), initial=0.0) for part in (expected, one["loc"]))
    return _largest(error, share * jnp.abs(expected) + floor * largest_move + 64 * unit * largest_mean)
