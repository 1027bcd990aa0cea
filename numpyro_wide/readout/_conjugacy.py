"""Whether a readout can be integrated out: read off the program that a model's run traces to."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from numpyro_wide._checks import is_known
from numpyro_wide._traces import run_model
from numpyro_wide.readout._reached import is_reached
from numpyro_wide.readout._sites import ReadoutSites, SiteNames


class Conjugacy(NamedTuple):
    """What the check of a model has found.

    Attributes:
        moving_sites: the deterministic sites that move with the readout, and mean nothing once it is integrated out.
        noise_margin: the noise variance as a multiple of the least that rounding leaves a trace of, the features being
            those of a draw from the prior. None where the noise is drawn too, or not all is known that it depends on.
    """

    moving_sites: frozenset[str]
    noise_margin: Array | None


def check_conjugacy(model: Callable, names: SiteNames, args: tuple, kwargs: dict) -> Conjugacy:
    """Follows the readout through one traced run of the model.

    Which values it reaches is a matter of the program, not of numbers, and holds under JAX's transformations as well.
    That the mean moves by features @ (change of the readout) is then seen at one random change, relative to the sizes
    that are multiplied; what is traced stands there at random numbers.

    Raises:
        ValueError: if the observed mean does not move by features @ (change of the readout), or the features, the noise
            or another site's distribution move too.
    """
    shape = _readout_shape(model, names, args, kwargs)
    if shape is None:
        return Conjugacy(frozenset(), None)
    labels: list[tuple[str, str]] = []

    def mean_and_others(displacement: Array, rng_key: Array) -> tuple[Array, tuple[Array, list[Array]]]:
        sites = ReadoutSites(names, lambda _: displacement)
        others = run_model(model, args, kwargs, rng_key=rng_key, inside=(sites,))
        run = sites.read_off()
        others.pop(names.observed)
        values = [("features", names.features, run.features), ("noise", names.observed, run.noise_scale)]
        for name, site in others.items():
            if site["type"] in ("sample", "deterministic"):
                tree = site["fn"] if site["type"] == "sample" else site["value"]
                values += [(site["type"], name, leaf) for leaf in jax.tree.leaves(tree)]
        values = [value for value in values if isinstance(value[2], Array)]
        labels[:] = [(kind, name) for kind, name, _ in values]
        return run.loc, (run.problem(names.readout).noise_above_rounding(), [value for _, _, value in values])

    def tangent_and_others(at: Array, direction: Array, rng_key: Array) -> tuple[Array, tuple[Array, list[Array]]]:
        _, tangent, others = jax.jvp(lambda at: mean_and_others(at, rng_key), (at,), (direction,), has_aux=True)
        return tangent, others

    zeros = np.zeros(shape.shape, jnp.promote_types(shape.dtype, jnp.result_type(float)))
    with jax.default_matmul_precision("highest"):
        program = jax.make_jaxpr(tangent_and_others)(zeros, zeros, jax.random.key(0))
    is_bent, _, *is_moved = is_reached(program.jaxpr, [True, False, False])
    moved = {label for label, is_label_moved in zip(labels, is_moved, strict=True) if is_label_moved}
    _refuse_moved(moved, names)
    tangent, direction, noise_margin, features = _at_a_draw(program, zeros)
    if is_bent or not _moves_by_features(tangent, direction, features):
        raise ValueError(
            f"the mean of observed site {names.observed!r} must be features @ readout plus terms without the readout, "
            f"but a change of {names.readout!r} moves it by something else than {names.features!r} times that change. "
            "Record the features as they are multiplied by the readout, with their scale and bias column."
        )
    moving_sites = frozenset(name for kind, name in moved if kind == "deterministic")
    return Conjugacy(moving_sites, noise_margin if _is_noise_given(program, labels) else None)


def _readout_shape(model: Callable, names: SiteNames, args: tuple, kwargs: dict) -> jax.ShapeDtypeStruct | None:
    """Shape and type of the readout; None where a prior cannot be sampled, such as ImproperUniform."""

    def run() -> Array:
        sites = ReadoutSites(names)
        run_model(model, args, kwargs, inside=(sites,))
        return sites.read_off().prior_loc

    try:
        return jax.eval_shape(run)
    except NotImplementedError:
        return None


def _refuse_moved(moved: set[tuple[str, str]], names: SiteNames) -> None:
    for kind, name in moved:
        if kind == "deterministic":
            continue
        what = {
            "features": f"the features {name!r} depend",
            "noise": f"the noise of observed site {name!r} depends",
            "sample": f"the distribution of site {name!r} depends",
        }[kind]
        raise ValueError(
            f"{what} on the readout {names.readout!r}, which can then not be integrated out; use repriorise instead."
        )


def _at_a_draw(program: ClosedJaxpr, zeros: np.ndarray) -> tuple[Array, Array, Array, Array]:
    """The mean's derivative in a random direction, that direction, the noise's margin, and the features."""
    with jax.ensure_compile_time_eval():
        key = jax.random.key(0)
        constants = [
            constant if is_known(constant) else _random_like(jax.random.fold_in(key, index), constant)
            for index, constant in enumerate(program.consts)
        ]
        direction = jax.random.normal(key, zeros.shape, zeros.dtype)
        results = jaxpr_as_fun(ClosedJaxpr(program.jaxpr, constants))(zeros, direction, key)
    tangent, noise_margin, features, *_ = results
    return tangent, direction, noise_margin, features


def _moves_by_features(tangent: Array, direction: Array, features: Array) -> bool:
    """Whether the mean's derivative in a direction is the features times it; True where there is no telling."""
    with jax.ensure_compile_time_eval():
        with jax.default_matmul_precision("highest"), jax.numpy_dtype_promotion("standard"):
            error = jnp.abs(tangent - features @ direction)
            size = jnp.sqrt(jnp.square(features) @ jnp.square(direction))
        tolerance = max(1e-3, 16 * float(jnp.finfo(tangent.dtype).eps))
        # Of an array over several processes, JAX compares, not NumPy; NaN is for others to complain about.
        return not bool(jnp.any(error > tolerance * size))


def _is_noise_given(program: ClosedJaxpr, labels: list[tuple[str, str]]) -> bool:
    """Whether the noise is drawn by nothing, and its margin made of no value that is traced."""
    is_unknown = [not is_known(constant) for constant in program.consts]
    _, is_margin_unknown, *_ = is_reached(program.jaxpr, [False, False, False], is_unknown)
    _, _, *is_drawn = is_reached(program.jaxpr, [False, False, True])
    # Plain numbers have no label.
    drawn = {kind for (kind, _), is_label_drawn in zip(labels, is_drawn, strict=True) if is_label_drawn}
    return not is_margin_unknown and "noise" not in drawn


def _random_like(key: Array, constant: Any) -> Array:
    if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, constant.shape)
    if jnp.issubdtype(constant.dtype, jnp.floating):
        return jax.random.normal(key, constant.shape, constant.dtype)
    return jnp.zeros(constant.shape, constant.dtype)
