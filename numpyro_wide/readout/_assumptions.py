"""What integrating a readout out assumes of a model, by structure, tangents and the values of a second run.

Given all other sites, the model's log density must be that of the readout's Normal prior, plus that of one Normal
likelihood whose mean is features @ readout plus terms without the readout, plus terms without the readout. The model is
traced, hidden from handlers, as a program of its readout μ + t δ with a fixed random δ, and of the values of its other
sites. What the readout reaches by the program's structure, and that alone, is computed at t = 1 with its tangent, in
which there is no constant, and compared with t = 0, since steps have no tangent. A part without a slope along δ at
almost every μ + δ is constant on all rays from μ. A branch that neither readout enters is not seen.
"""

import warnings
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.primitives import Messenger

from numpyro_wide._checks import are_known, is_known
from numpyro_wide._compile import run_with_arguments
from numpyro_wide._traces import abstract_sites, run_model, sample_sites, unwrap, values_of_type
from numpyro_wide.linear_gaussian._row_blocks import map_rows
from numpyro_wide.readout._model import ReadoutModel, ReadoutRun, ReadoutSites, normal_parameters, read_sites
from numpyro_wide.readout._programs import Program, as_argument

# A part of a model's run: one of these, or the log density of another site, (4, name), in the order of complaints.
Part: TypeAlias = tuple[int, str]
_FEATURES, _NOISE, _OBSERVATIONS, _OTHERS, _MEAN = (1, "features"), (2, "noise"), (3, "observations"), 4, (5, "mean")
_DETERMINISTIC, _RUN, _MOVE = 6, (7, "run"), (8, "move")  # what else a program of a run computes
Findings: TypeAlias = dict[Part, Array]  # whether the assumption holds; (0, why) for no derivative


class _FreeValues(Messenger):
    """Handler that makes the values that come from outside of a model arguments of the program that is traced."""

    def __init__(self) -> None:
        self.num_keys = 0
        self.are_all = True
        super().__init__()

    def postprocess_message(self, msg: dict) -> None:
        name = msg.get("name")
        if msg["type"] == "prng_key":  # drawn outside of sites
            name, self.num_keys = self.num_keys, self.num_keys + 1
        elif msg["type"] not in ("sample", "param", "mutable") or msg.get("is_observed"):
            return
        if msg.get("_control_flow_done"):  # NumPyro's loops have made use of the value already
            self.are_all = False
        leaves, structure = jax.tree.flatten(msg["value"])
        marked = [as_argument(leaf, (name, index)) for index, leaf in enumerate(leaves)]
        msg["value"] = jax.tree.unflatten(structure, marked)


class ReadoutProgram:
    """A run of a model as a program of t and the values of its free sites; at those of another run, if given.

    Attributes:
        is_observed: by sample site of the model, in their order; nothing else is known where the model's is not.
        moving_sites: the deterministic sites that depend on the readout.
    """

    def __init__(
        self,
        model: ReadoutModel,
        args: tuple,
        kwargs: Mapping[str, Any],
        other: ReadoutSites | None = None,
        **options: Any,
    ):
        self.model, self._call, free = model, (args, kwargs), _FreeValues()
        values, keys = (None, None) if other is None else (other.free_values, other.keys)
        self.is_observed: dict[str, bool] = {}

        def run(t: Array) -> dict[Any, Any]:
            sites = ReadoutSites(model, step=t, keys=keys)
            seen = run_model(model.fn, args, kwargs, values=values, inside=(free, sites), **options)
            self.is_observed = sites.is_observed
            if other is None and not sites.is_observed.get(model.observed, False):
                if model.observed in seen:  # a latent site of another kind would never be integrated over
                    normal_parameters(model.observed, "observed site", unwrap(seen[model.observed]["fn"], masks=True))
                return {}
            fixed = {(_DETERMINISTIC, name): value for name, value in values_of_type(seen, "deterministic").items()}
            whole = sites.read_off()
            return {**_parts(sites, whole), **fixed, _RUN: whole, _MOVE: sites.move}

        with warnings.catch_warnings(action="ignore"):  # which the other run gives
            self._program = Program(run, jnp.zeros(()))
        moving = [part for part in self._program.results if part[0] <= _DETERMINISTIC and self._program.reads(part)[0]]
        self.moving_sites = frozenset(name for kind, name in moving if kind == _DETERMINISTIC)
        self._moving_parts = [part for part in moving if part[0] < _DETERMINISTIC]
        self._is_whole = free.are_all or other is not None

    def at(self, other: ReadoutSites) -> tuple["ReadoutProgram", list[Array]]:
        """Return a program for the values of another run, itself if they are of its shapes, and its arguments."""
        source: dict[Any, Any] = {**other.values, **dict(enumerate(other.keys))}
        values: list[Array] = []
        for name, index, aval in self._program.places:
            leaves = map(jnp.asarray, jax.tree.leaves(source.get(name))[index : index + 1])
            values += [leaf for leaf in leaves if (leaf.shape, leaf.dtype) == (aval.shape, aval.dtype)]
        if self._is_whole and len(values) == len(self._program.places):
            return self, jax.lax.stop_gradient(values)
        return ReadoutProgram(self.model, *self._call, other).at(other)

    def run(self, values: list[Array]) -> ReadoutRun:
        """Return the run with the readout at its prior mean."""
        return self._program([_RUN], jnp.zeros(()), *values)[_RUN]

    def has_free_noise(self) -> bool:
        return any(self._program.reads(_NOISE)[1:])

    def findings(self, run: ReadoutRun, values: list[Array]) -> Findings:
        """Return what is found of each part that depends on the readout, and of the mean."""
        zero, one = jnp.zeros(()), jnp.ones(())

        def displaced(t: Array) -> dict[Part, Any]:
            return self._program(self._moving_parts, t, *values)

        def with_tangents(t: Array) -> dict[str, Any]:
            after, tangents = jax.jvp(displaced, (t,), (one,))
            floats = jax.tree.map(lambda leaf, slope: slope if _is_float(leaf) else None, after, tangents)
            return {"after": after, "tangents": floats}

        try:
            program = Program(with_tangents, one)
            program.check_forward()
        except (NotImplementedError, TypeError, ValueError) as error:
            return {(0, str(error)): jnp.array(False)}
        after, tangents = program(("after", "tangents"), one).values()
        others = [part for part in self._moving_parts if part != _MEAN]
        before = self._program([*others, _MOVE], zero, *values)
        run, move = jax.lax.stop_gradient((run, before[_MOVE]))
        with jax.numpy_dtype_promotion("standard"):
            found = {}
            for part in others:
                leaves = [
                    jax.tree.leaves(tree[part], is_leaf=lambda x: x is None) for tree in (before, after, tangents)
                ]
                found[part] = jnp.stack([_is_still(*arrays) for arrays in zip(*leaves, strict=True)]).all()
            if move.shape == (run.features.shape[1], *run.loc.shape[1:]):  # others are refused by their problem
                still = run.loc, jnp.zeros_like(run.loc)
                found[_MEAN] = _is_linear(run, move, after.get(_MEAN, still[0]), tangents.get(_MEAN, still[1]))
        return found


def _parts(sites: ReadoutSites, run: ReadoutRun) -> dict[Part, Any]:
    """Return what a run shows of the likelihood, and the log densities of the other sites."""
    found = {_FEATURES: run.features, _NOISE: run.noise_scale, _OBSERVATIONS: sites.observations, _MEAN: run.loc}
    for name, (fn, scale) in sites.others.items():
        log_prob = fn.log_prob(sites.values[name])
        found[_OTHERS, name] = log_prob if scale is None else scale * log_prob
    return found


def _is_float(array: Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _is_still(before: Array, after: Array, tangent: Array | None) -> Array:
    """Return whether an array has no tangent and the same values, but for rounding; NaN is of the density, too."""
    if tangent is None:
        return jnp.all(before == after)
    allowed = 256 * jnp.finfo(before.dtype).eps * jnp.maximum(jnp.abs(before), 1.0)
    is_same = (before == after) | (jnp.abs(after - before) <= allowed)  # both may be infinite, out of a support
    return jnp.all(is_same & ((tangent == 0) | jnp.isinf(before)) | jnp.isnan(before))


def _is_linear(run: ReadoutRun, move: Array, after: Array, tangent: Array) -> Array:
    """Return whether the mean moves by features @ the change of the readout, row by row, but for rounding."""
    num_features = run.features.shape[1]
    # The deviation of features @ move by row, for a move of size one, and of each output.
    sizes = jnp.sqrt(jnp.square(move).mean(axis=0))
    squares = jnp.square(move / sizes).reshape(num_features, -1).mean(axis=1)
    change, variance = map_rows(run.features, lambda rows: (rows @ move, rows**2 @ squares))
    deviation = jnp.sqrt(variance).reshape(-1, *(1 for _ in sizes.shape)) * sizes
    # Parts of a model may be computed in single precision, and accelerators multiply with fewer digits.
    unit = max(float(jnp.finfo(dtype).eps) for dtype in (run.features.dtype, run.loc.dtype, jnp.float32))
    share = max(64 * unit * num_features**0.5, 0.0 if jax.default_backend() == "cpu" else 2e-3)
    # The square of less is lost.
    allowed = share * deviation + float(jnp.finfo(run.loc.dtype).tiny) ** 0.5
    of_values = 64 * jnp.finfo(run.loc.dtype).eps * (jnp.abs(run.loc) + jnp.abs(after))
    has_slope = jnp.abs(tangent - change) <= allowed
    has_change = jnp.abs(after - run.loc - change) <= allowed + of_values
    # Where the mean or the features are not finite, the density is not, either.
    return jnp.all(has_slope & has_change | ~jnp.isfinite(run.loc + change))


def assumptions_hold(findings: Findings) -> Array:
    """Return whether all assumptions hold, a scalar."""
    return jnp.stack(list(findings.values())).all()


def refuse(findings: Findings, model: ReadoutModel) -> None:
    """Refuse a model by the first assumption that does not hold, where numbers are known."""
    failed = [part for part, holds in sorted(findings.items()) if is_known(holds) and not holds]
    if not failed:
        return
    kind, name = failed[0]
    if kind == 0:
        raise ValueError(
            f"the readout {model.readout!r} reaches a function without a forward derivative, by which the mean of "
            f"observed site {model.observed!r} must be linear in it: {name} Multiply the readout in JAX; callbacks and "
            "functions with a custom_vjp may make the features."
        )
    if (kind, name) == _MEAN:
        raise ValueError(
            f"the mean of observed site {model.observed!r} must be features @ readout plus terms without the readout, "
            f"but a change of {model.readout!r} does not move it by {model.features!r} @ that change. Record the "
            "features as they are multiplied by the readout, with their scale and bias column."
        )
    what = {
        _FEATURES: f"the features {model.features!r} depend",
        _NOISE: f"the noise of observed site {model.observed!r} depends",
        _OBSERVATIONS: f"the observations of site {model.observed!r} depend",
    }.get((kind, name), f"the distribution of site {name!r} depends")
    raise ValueError(
        f"{what} on the readout {model.readout!r}, which can then not be integrated out; use repriorise instead."
    )


def _read(
    model: ReadoutModel, values: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any]
) -> tuple[ReadoutRun, Findings]:
    """Run a model at values of its other sites, and once more as a program."""
    sites = read_sites(model, values, args, kwargs)
    run = sites.read_off()
    program, arguments = ReadoutProgram(model, args, kwargs, sites).at(sites)
    return run, program.findings(run, arguments)


def check_at(model: ReadoutModel, values: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any]) -> ReadoutRun:
    """Run a model in a program that is compiled quickly; refuse it by what is found, or return the run."""
    run, findings = run_with_arguments(lambda call: _read(model, *call), (dict(values), args, dict(kwargs)), quick=True)
    refuse(findings, model)
    return run


def read_run(
    model: ReadoutModel, values: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any]
) -> tuple[ReadoutRun, Array]:
    """Run a model at values of its other sites; return the run, and whether the readout can be integrated out of it."""
    run, findings = _read(model, values, args, kwargs)
    return run, assumptions_hold(findings)


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
