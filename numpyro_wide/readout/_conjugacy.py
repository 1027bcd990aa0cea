"""Conjugacy of a readout: whether it can be integrated out, read off the program that a model's run traces to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from numpyro_wide._checks import is_known
from numpyro_wide._compile import TracedProgram
from numpyro_wide._traces import Sites, abstract_sites, run_model, sample_sites, unwrap
from numpyro_wide.linear_gaussian._row_blocks import RowFeatures
from numpyro_wide.readout._model import ReadoutRun, ReadoutSites, SiteNames


class Conjugacy(NamedTuple):
    """Findings of the check of a model.

    Attributes:
        moving_sites: names of the deterministic sites that move with the readout, and mean nothing once it is
            integrated out.
        evidence_error: estimate of the error that rounding leaves in the log density, in nats, a scalar, the features
            being those of a draw from the prior; infinite where that density is NaN. None where the noise is drawn
            too, or not all is known that it depends on.
    """

    moving_sites: frozenset[str]
    evidence_error: Array | None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tangent", "evidence_error", "features", "noise_scale", "others"],
    meta_fields=["labels"],
)
@dataclass(frozen=True)
class _Probe:
    """Values of one run of a model whose readout is displaced in a direction.

    Attributes:
        tangent: derivative of the observed mean in that direction.
        evidence_error: estimate of the error that rounding leaves in the log density, in nats.
        features: the features.
        noise_scale: the noise of the observed site.
        others: arrays of all other sites: the parameters of distributions, and the values of deterministic sites.
        labels: kind and name of the site of each of ``others``.
    """

    tangent: Array
    evidence_error: Array
    features: Array | RowFeatures
    noise_scale: Array
    others: list[Array]
    labels: tuple[tuple[str, str], ...]


def check_conjugacy(model: Callable, names: SiteNames, args: tuple, kwargs: dict) -> Conjugacy:
    """Follow the readout through one traced run of the model, and refuse one that is not linear in it.

    Which values it reaches is a matter of the program, not of numbers, and holds under JAX's transformations as well.
    That the mean moves by features @ (change of the readout) is then seen at one random change, relative to the sizes
    that are multiplied; what is traced stands there at random numbers.

    Raises:
        ValueError: if the observed mean does not move by features @ (change of the readout), or the features,
            the noise or another site's distribution move too.
    """
    shape = _readout_shape(model, names, args, kwargs)
    if shape is None:  # of a prior that cannot be sampled there is no draw to look at
        return Conjugacy(frozenset(), None)
    # At least in single precision: rounding in half precision would hide a small term that is not linear.
    zeros = np.zeros(shape.shape, jnp.promote_types(shape.dtype, jnp.result_type(float)))
    # One trace serves three questions: what the readout reaches, what the key reaches, and the numbers at one draw.
    with jax.default_matmul_precision("highest"):
        traced, outputs = jax.make_jaxpr(partial(_probe, model, names, args, kwargs), return_shape=True)(
            zeros, zeros, jax.random.key(0)
        )
    structure = jax.tree.structure(outputs)
    # In the order of the arguments: where the readout stands, the direction of its change, the key.
    is_moved = jax.tree.unflatten(structure, is_reached(traced.jaxpr, [True, False, False]))
    _refuse_moved(is_moved, names)
    is_linear, evidence_error = _at_a_draw(traced, structure, zeros)
    # A mean whose derivative depends on where the readout stands is not linear, even if it is right at this point.
    if is_moved.tangent or not is_linear:
        raise ValueError(
            f"the mean of observed site {names.observed!r} must be features @ readout plus terms without the readout, "
            f"but a change of {names.readout!r} moves it by something else than {names.features!r} times that change. "
            "Record the features as they are multiplied by the readout, with their scale and bias column."
        )
    # Sample sites that move were refused above; functions of the readout may move, and are hidden once it is collapsed.
    moving_sites = frozenset(
        name
        for (kind, name), moves in zip(is_moved.labels, is_moved.others, strict=True)
        if moves and kind == "deterministic"
    )
    return Conjugacy(moving_sites, evidence_error if _is_noise_given(traced, structure) else None)


def conjugate_sites(model: Callable, readout: str, features: str, args: tuple, kwargs: dict) -> SiteNames | None:
    """Return the names of the sites with which a readout can be integrated out; None if there are none.

    Args:
        model: the model, not wrapped.
        readout: name of the readout's site.
        features: name of the features' site.
        args: its arguments, observations included.
        kwargs: its keyword arguments.
    """
    sites = sample_sites(abstract_sites(model, args, kwargs))
    normal = [
        name for name, site in sites.items() if site["is_observed"] and isinstance(unwrap(site["fn"]), dist.Normal)
    ]
    for name in normal:
        names = SiteNames(readout, features, name)
        try:
            check_conjugacy(model, names, args, kwargs)
        except ValueError:  # with this site it cannot be; whoever asks has another way
            continue
        return names
    return None


def _probe(
    model: Callable, names: SiteNames, args: tuple, kwargs: dict, at: Array, direction: Array, rng_key: Array
) -> _Probe:
    def mean_and_others(displacement: Array) -> tuple[Array, _Probe]:
        sites = ReadoutSites(names, lambda _: displacement)
        others = run_model(model, args, kwargs, rng_key=rng_key, inside=(sites,))
        run = sites.read_off(others)
        # NumPy's arrays and numbers are constants of the program, which no argument can reach.
        values = [value for value in _values_of(others, names) if isinstance(value[2], Array)]
        found = _Probe(
            run.loc,
            _evidence_error(run),
            run.features,
            jnp.asarray(run.noise_scale),
            [value for _, _, value in values],
            tuple((kind, name) for kind, name, _ in values),
        )
        return run.loc, found

    # Only the mean needs a derivative; all else comes along as it is.
    _, tangent, found = jax.jvp(mean_and_others, (at,), (direction,), has_aux=True)
    return _Probe(tangent, found.evidence_error, found.features, found.noise_scale, found.others, found.labels)


def _evidence_error(run: ReadoutRun) -> Array:
    """Return the estimate for a run, zero where data are missing: those have an error of their own."""
    is_missing = jnp.isnan(run.residual).any()
    if isinstance(run.features, RowFeatures):
        is_missing |= jnp.isnan(run.features.map(lambda rows: rows.sum(axis=1))).any()
    else:
        is_missing |= jnp.isnan(run.features).any()
    return jnp.where(is_missing, 0.0, run.problem().evidence_error())


def _values_of(sites: Sites, names: SiteNames) -> list[tuple[str, str, Any]]:
    """Return kind, name and each array of the sites besides the observed one."""
    found = []
    for name, site in sites.items():
        if site["type"] in ("sample", "deterministic") and name != names.observed:
            tree = site["fn"] if site["type"] == "sample" else site["value"]
            found += [(site["type"], name, leaf) for leaf in jax.tree.leaves(tree)]
    return found


def _readout_shape(model: Callable, names: SiteNames, args: tuple, kwargs: dict) -> jax.ShapeDtypeStruct | None:
    """Return shape and type of the readout; None where a prior cannot be sampled, such as ImproperUniform."""

    def run() -> Array:
        sites = ReadoutSites(names)
        run_model(model, args, kwargs, inside=(sites,))
        return sites.read_off().prior_loc

    try:
        return jax.eval_shape(run)
    except NotImplementedError:
        return None


def _refuse_moved(is_moved: _Probe, names: SiteNames) -> None:
    what = None
    if any(jax.tree.leaves(is_moved.features)):
        what = f"the features {names.features!r} depend"
    elif is_moved.noise_scale:
        what = f"the noise of observed site {names.observed!r} depends"
    for (kind, name), moves in zip(is_moved.labels, is_moved.others, strict=True):
        if what is None and moves and kind == "sample":
            what = f"the distribution of site {name!r} depends"
    if what is not None:
        raise ValueError(
            f"{what} on the readout {names.readout!r}, which can then not be integrated out; use repriorise instead."
        )


def _at_a_draw(traced: ClosedJaxpr, structure: Any, zeros: np.ndarray) -> tuple[bool, Array]:
    """Return what a run at a draw of the other sites tells, the readout being moved in a random direction.

    Args:
        traced: program of a probe.
        structure: of its results.
        zeros: where the readout stands.

    Returns:
        Whether the mean moves by features @ direction, and the estimate of the evidence's error.
    """
    # Wrapped models are checked inside of jit and vmap, too, where the numbers must be known nevertheless.
    with jax.ensure_compile_time_eval():
        # A value that is being traced has no number here; whether the mean is linear does not depend on which it is.
        constants = [
            constant if is_known(constant) else _random_like(jax.random.fold_in(jax.random.key(0), index), constant)
            for index, constant in enumerate(traced.consts)
        ]

        # An argument: what is computed from a constant would be computed here, operation by operation.
        key = jax.random.key(1)

    def look(at: Array, key: Array) -> tuple[Array, Array]:
        direction_key, model_key = jax.random.split(key)
        direction = jax.random.normal(direction_key, at.shape, at.dtype)
        results = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, constants))(at, direction, model_key)
        probe: _Probe = jax.tree.unflatten(structure, results)
        return _moves_by_features(probe.tangent, direction, probe.features), probe.evidence_error

    # One program: compiled one by one, its hundred operations would take several times as long.
    program = TracedProgram(look, zeros, key)
    with jax.ensure_compile_time_eval():
        is_linear, evidence_error = program(zeros, key)
        return bool(is_linear), evidence_error


def _moves_by_features(tangent: Array, direction: Array, features: Array | RowFeatures) -> Array:
    """Return whether the mean's derivative in a direction is the features times it; True where there is no telling."""
    with jax.default_matmul_precision("highest"), jax.numpy_dtype_promotion("standard"):
        error = jnp.abs(tangent - features @ direction)
        # The typical size of the product's terms: the product itself may be near zero by chance.
        squares = jnp.square(direction)
        if isinstance(features, RowFeatures):
            size = jnp.sqrt(features.map(lambda rows: jnp.square(rows) @ squares))
        else:
            size = jnp.sqrt(jnp.square(features) @ squares)
    tolerance = max(1e-3, 16 * float(jnp.finfo(tangent.dtype).eps))
    # NaN is for others to complain about.
    return ~jnp.any(error > tolerance * size)


def _is_noise_given(traced: ClosedJaxpr, structure: Any) -> bool:
    """Return whether the noise is drawn by nothing, and the error made of no value that is traced."""
    is_unknown = [not is_known(constant) for constant in traced.consts]
    from_unknown = jax.tree.unflatten(structure, is_reached(traced.jaxpr, [False, False, False], is_unknown))
    from_key = jax.tree.unflatten(structure, is_reached(traced.jaxpr, [False, False, True]))
    return not from_unknown.evidence_error and not from_key.noise_scale


def is_drawn(value_of: Callable[[Array], Any]) -> bool:
    """Return whether what a function of a PRNG key returns depends on the key."""
    program = jax.make_jaxpr(value_of)(jax.random.key(0))
    return any(is_reached(program.jaxpr, [True]))


def _random_like(key: Array, constant: Any) -> Array:
    if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, constant.shape)
    if jnp.issubdtype(constant.dtype, jnp.floating):
        return jax.random.normal(key, constant.shape, constant.dtype)
    return jnp.zeros(constant.shape, constant.dtype)


# Equations whose inner programs feed results back, or choose among several.
_NOT_STRAIGHT = ("scan", "while", "cond")


def is_reached(program: Jaxpr, is_start: Sequence[bool], is_constant_start: Sequence[bool] = ()) -> list[bool]:
    """Return which results of a program depend on the arguments, or on the constants, that are marked.

    That is a matter of the program, not of numbers: a dependence whose derivative is zero at some point counts.
    """
    reached = {var for var, marked in zip(program.invars, is_start, strict=True) if marked}
    reached |= {var for var, marked in zip(program.constvars, is_constant_start, strict=False) if marked}
    for equation in program.eqns:
        marks = [not isinstance(var, Literal) and var in reached for var in equation.invars]
        if any(marks):
            inner = _inner_program(equation)
            # What cannot be looked into passes every dependence on: too many refusals, never too few.
            results = [True] * len(equation.outvars) if inner is None else is_reached(inner, marks)
            reached |= {var for var, marked in zip(equation.outvars, results, strict=True) if marked}
    return [not isinstance(var, Literal) and var in reached for var in program.outvars]


def _inner_program(equation: Any) -> Jaxpr | None:
    """Return the program that an equation runs once, such as that of an inner ``jit``."""
    if equation.primitive.name in _NOT_STRAIGHT:
        return None
    for value in equation.params.values():
        program = value.jaxpr if isinstance(value, ClosedJaxpr) else value
        if isinstance(program, Jaxpr):
            # Where the inner program takes other arguments than the equation, marks would be misplaced.
            fits = len(program.invars) == len(equation.invars) and len(program.outvars) == len(equation.outvars)
            return program if fits else None
    return None
