"""A guide for any model: its latents, unconstrained and standardised, given features of the data by a network."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.distributions import biject_to
from numpyro.distributions.transforms import AffineTransform, ReshapeTransform, Transform
from numpyro.primitives import mutable

from numpyro_wide._checks import check_key, check_names_known, check_one_of, column_deviations, listing, whole_number
from numpyro_wide._compile import run_program
from numpyro_wide._traces import Sites, abstract_sites, fixed_supports, run_model
from numpyro_wide.amortized._families import (
    ConditionalNormals,
    JointPart,
    conditional_flow,
    covariance_factors,
    regressions,
)
from numpyro_wide.amortized._simulation import (
    Arrays,
    Draws,
    bound,
    check_data_set,
    check_params,
    check_simulator,
    latent_names,
    refuse_missing,
    site_names,
)
from numpyro_wide.amortized._training_data import finite
from numpyro_wide.natural import NaturalTruncatedNormal

if TYPE_CHECKING:
    from flax.linen import Module

A = TypeVar("A", Array, np.ndarray)
FAMILIES = ("normal", "independent", "mixture", "flow")
_FACTORS = {"precision": regressions, "covariance": covariance_factors}
# Simulations that the constants of standardisation are computed from.
PILOT_SIZE = 1000
# Fourth moment of a standardised column above which it may be taken to a logarithm; an exponential variable's.
_HEAVY = 9.0


class Typicality(NamedTuple):
    """How far an observation lies from simulations.

    Attributes:
        distance: Mahalanobis distance of its features from those of simulations.
        p_value: proportion of simulations that lie as far.
    """

    distance: float
    p_value: float


class AutoAmortized:
    r"""Guide for :class:`~numpyro_wide.AmortizedForwardKL` that is read off the model.

    The latents, in NumPyro's unconstrained coordinates and standardised to u by their moments over a thousand
    simulations, are given the data x a normal distribution (:eq:`forward`), a regression of each on those before it:

    $$-\log q(u \mid x) = \tfrac12 |D (A u - c)|^2 - \log\det D + \tfrac d2 \log 2\pi,$$

    with D(x) diagonal, A(x) unit lower triangular, the precision's factor D A and the mean $A^{-1} c$; convex in (c, A)
    for every D. A network computes features of the standardised data, and a linear layer, zero at first, computes
    (c, log D, A): training starts from the prior's moments. Data that are spread over orders of magnitude enter by
    sign(x) log(1 + abs(x)/unit), about their logarithm where all have one sign. The constants are a mutable site, so
    that ``params`` hold them.

    With ``factor="covariance"`` the network computes the mean and the Cholesky factor of the covariance: not convex,
    but the better where simulations are many and posteriors narrow.

    A draw is in the model's own coordinates, with its exact log density.

    Args:
        model: ``model(*args, **kwargs)``, called without data, simulates every site.
        observed: name, or names, of the sites that are data.
        family: "normal", one joint normal distribution; "independent", A the identity, with truncated normals on
            intervals; "mixture" of joint normal distributions; "flow", a masked autoregressive flow of splines, which
            needs flowjax.
        encoder: flax module from standardised data (n, ...) to features (n, k); by default
            :class:`numpyro_wide.nn.ResidualEncoder`. One observed site comes in its own shape, several as a vector.
        pool: "rows" to encode each row, along the first axis of the observed sites, and to average: a trained guide
            then takes any number of rows. Train with those numbers that it will be asked for.
        sites: names of the latents to infer, the others being marginalised; by default all that are continuous.
        num_components: number of components of a mixture.
        factor: "precision" or "covariance", of a normal distribution or a mixture.
        prefix: prefix of parameter names.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer import Predictive
        >>> from numpyro_wide import AmortizedForwardKL
        >>> from numpyro_wide.autoguide import AutoAmortized
        >>> def model():
        ...     rate = numpyro.sample("rate", dist.Gamma(3, 1))
        ...     numpyro.sample("y", dist.Poisson(rate).expand([5]).to_event(1))
        >>> guide = AutoAmortized(model, observed="y")
        >>> trainer = AmortizedForwardKL(model, guide, optax.adam(1e-3), observed="y", batch_size=64)
        >>> params = trainer.run(jax.random.key(0), 300, progress_bar=False).params
        >>> ask = Predictive(guide, params=params, num_samples=1000)
        >>> rate = ask(jax.random.key(1), {"y": jnp.array([4, 5, 3, 6, 5])})["rate"]
        >>> abs(float(rate.mean()) - 26 / 6) < 0.5  # exact: Gamma(3 + 23, 1 + 5)
        True
    """

    def __init__(
        self,
        model: Callable,
        *,
        observed: str | Sequence[str],
        family: str = "normal",
        encoder: "Module | None" = None,
        pool: str | None = None,
        sites: Sequence[str] | None = None,
        num_components: int = 8,
        factor: str = "precision",
        prefix: str = "auto",
    ):
        check_one_of("family", family, FAMILIES)
        check_one_of("factor", factor, tuple(_FACTORS))
        if factor != "precision" and family not in ("normal", "mixture"):
            raise ValueError(f"factor={factor!r} is of joint normals, but the family is {family!r}; leave it out.")
        if pool is not None:
            check_one_of("pool", pool, ("rows",), also="or None")
        if isinstance(encoder, type):
            raise TypeError(f"encoder must be a flax module, such as {encoder.__name__}(), but got the class.")
        self.model, self.observed, self.family, self.encoder = model, site_names(observed), family, encoder
        self.factor, self.pool, self.prefix = factor, pool, prefix
        self.sites = None if sites is None else site_names(sites, "sites")
        self.num_components = whole_number("num_components", num_components) if family == "mixture" else 1

    def __call__(self, observed_values: Mapping[str, ArrayLike], *args: object, **kwargs: object) -> dict[str, Array]:
        """Draw the latents given one data set; the arguments are those of the model."""
        refuse_missing("the guide's first argument", self.observed, observed_values)
        sites = run_model(self.model, args, kwargs)
        latents, constants = self.latents(sites), self._constants(args, kwargs)
        examples = {name: sites[name]["value"] for name in self.observed if name in sites}
        if self.pool is None:  # without an axis of rows, they have the shape of one data set
            examples = {name: moments["loc"] for name, moments in constants["observed"].items()}
        check_data_set(observed_values, examples)
        features = self.features(observed_values, constants)
        moments = jax.tree.map(lambda leaf: leaf.astype(features.dtype), constants["latents"])
        latents = {name: latent._replace(**moments[name]) for name, latent in latents.items()}
        sample = self._sample_flow if self.family == "flow" else self._sample_normals
        return sample(latents, features)

    def standardisation(self, simulations: Arrays, *args: object, **kwargs: object) -> dict[str, object]:
        """Compute the constants from simulations of latents and observed sites, {site: (n, ...)}.

        They are a value of the guide's mutable site; other arguments are those of the model.
        """
        model = partial(self.model, *args, **kwargs)
        sites = abstract_sites(model, (), {})
        if fixed_supports(sites) is None:
            latents, _ = self._simulate(model, random.key(0), PILOT_SIZE, ())
        else:
            latents = self.latents(sites)
        simulated = [name for name in latents if name in simulations]
        remedy = f"Where others are nuisances, pass the guide sites={simulated}."
        refuse_missing("simulations", latents, simulations, "latent site", remedy)
        return self._standardisation(simulations, latents)

    def _standardisation(self, simulations: Arrays, latents: dict[str, "_Latent"]) -> dict[str, object]:
        """Compute the constants, of the coordinates of the latents."""
        constants: dict[str, Any] = {"latents": {}, "observed": {}}
        for name, latent in latents.items():
            values = jax.jit(jax.vmap(latent.transform.inv))(jnp.asarray(simulations[name]))
            values = np.asarray(values, float).reshape(len(values), -1)
            loc, scale = _moments(values[np.isfinite(values).all(axis=1)])  # at ends of supports they are not
            constants["latents"][name] = {"loc": loc, "scale": scale}
        for name in self.observed:
            values = np.asarray(simulations[name], float)
            if self.pool and values.ndim > 1:
                constants["log_rows"] = np.log(values.shape[1])
                values = values.reshape(-1, *values.shape[2:])
            unit = _log_unit(values)
            loc, scale = _moments(np.asarray(_signed_log(values, unit)))
            constants["observed"][name] = {"loc": loc, "scale": scale, "unit": unit}
        return {f"{self.prefix}_constants": jax.tree.map(lambda leaf: jnp.asarray(leaf, float), constants)}

    def typicality(
        self,
        rng_key: Array,
        params: Mapping[str, Any],
        observed_values: Mapping[str, ArrayLike],
        *args: object,
        num_simulations: int = 2000,
        simulations: Arrays | None = None,
        **kwargs: object,
    ) -> Typicality:
        """Measure how far an observation lies from the simulations that the guide was trained on.

        A network's answer means little where it has not been trained. The distance is Mahalanobis's, of the encoder's
        features; moments are those of one half of the simulations, the p-value is the rank among the others: below
        0.01, say, the observation is unlike them.

        The p-value is at least 2 / (2 + number of simulations): few of them show nothing.

        ``params`` and ``observed_values`` are as of :func:`numpyro_wide.amortized.importance_sample`, ``simulations``,
        {site: (n, ...)}, in the place of ``num_simulations`` new ones; other arguments are those of the model.
        """
        check_key("rng_key", rng_key, "(rng_key, params, observed_values, *args)")
        refuse_missing("observed_values", self.observed, observed_values)
        values = {name: jnp.asarray(observed_values[name]) for name in self.observed}
        model, guide = bound(self.model, self, args, kwargs)
        check_params(guide, rng_key, params, values)
        if simulations is None:
            num_simulations = whole_number("num_simulations", num_simulations, 4)
            _, simulations = self._simulate(model, rng_key, num_simulations, self.observed)
        refuse_missing("simulations", self.observed, simulations)
        constants = params[f"{self.prefix}_constants"]

        def features(values: Draws) -> Array:
            with numpyro.handlers.substitute(data=dict(params)):
                return self.features(values, constants)

        data = {name: jnp.asarray(simulations[name]) for name in self.observed}
        encoded = np.asarray(jax.jit(jax.vmap(features))(data), float)
        encoded = encoded[np.isfinite(encoded).all(axis=1)]
        half = len(encoded) // 2
        covariance = np.atleast_2d(np.cov(encoded[:half].T, bias=True))
        # Features are more than the latents and data they vary with: directions without variance weigh little.
        covariance += 1e-3 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
        root = np.linalg.cholesky(covariance)
        compared = np.stack([np.asarray(features(values), float), *encoded[half:]]) - encoded[:half].mean(0)
        distances = np.linalg.norm(np.linalg.solve(root, compared.T), axis=0)
        p_value = (1 + np.sum(distances[1:] >= distances[0])) / len(distances)
        return Typicality(float(distances[0]), float(p_value))

    def features(self, observed_values: Mapping[str, ArrayLike], constants: dict[str, Any]) -> Array:
        """Compute the encoder's features (k,) of one data set, inside a model."""
        inputs = {
            name: _standardised(jnp.asarray(observed_values[name], float), constants["observed"][name])
            for name in self.observed
        }
        if self.pool is None:
            (array, *more_arrays) = inputs.values()
            vector = jnp.concatenate([value.reshape(-1) for value in inputs.values()]) if more_arrays else array
            return self._encode("encoder", self.encoder, vector[None])[0]
        rows = [value.reshape(len(value), -1) for value in inputs.values() if value.ndim]
        lengths = {len(value) for value in rows}
        if len(lengths) != 1:
            shapes = [value.shape for value in inputs.values()]
            raise ValueError(
                f"pool='rows' needs observed sites with a first axis of one length, but their shapes are {shapes}."
            )
        pooled = self._encode("encoder", self.encoder, jnp.concatenate(rows, axis=1)).mean(0)
        log_rows = jnp.log(jnp.asarray(lengths.pop(), float)) - constants["log_rows"]
        scalars = [value[None] for value in inputs.values() if not value.ndim]
        return self._encode("pooled", None, jnp.concatenate([pooled, log_rows[None], *scalars])[None])[0]

    def latents(self, sites: Sites) -> dict[str, "_Latent"]:
        """Read the latents off one run of the model."""
        candidates = latent_names(sites, self.observed)
        names = [name for name in candidates if not sites[name]["fn"].support.is_discrete]
        if not names:
            raise ValueError(f"AutoAmortized needs a continuous latent site, but the model has {listing(candidates)}.")
        if self.sites is not None:
            check_names_known("sites", self.sites, names, kind="continuous latent site")
            names = [name for name in names if name in self.sites]
        return {name: _Latent.of(sites[name]) for name in names}

    def _constants(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        name = f"{self.prefix}_constants"
        constants = mutable(name)
        if constants is None:
            # Also where the guide is first traced: bounds of latents are numbers here.
            with jax.ensure_compile_time_eval():
                model = partial(self.model, *args, **kwargs)
                latents, simulations = self._simulate(model, random.key(0), PILOT_SIZE, self.observed)
                constants = mutable(name, self._standardisation(finite(simulations)[0], latents)[name])
        return constants

    def _simulate(
        self, model: Callable, rng_key: Array, num_simulations: int, observed: tuple[str, ...]
    ) -> tuple[dict[str, "_Latent"], Draws]:
        """Read the latents off the model, and simulate them and data; refuse supports that vary."""
        sites = abstract_sites(model, (), {})
        if fixed_supports(sites) is None:  # bounds may be arrays
            sites = run_model(model)
        check_simulator(sites, observed)
        latents = self.latents(sites)

        def single(key: Array) -> tuple[Draws, dict[str, list]]:
            sites = run_model(model, rng_key=key)
            supports = {name: jax.tree.leaves(sites[name]["fn"].support) for name in latents}
            return {name: sites[name]["value"] for name in (*latents, *observed)}, supports

        def several(key: Array) -> tuple[Draws, dict[str, list]]:
            return jax.vmap(single)(random.split(key, num_simulations))

        draws, supports = run_program(several, rng_key, quick=True)
        bounds = jax.tree.map(np.asarray, supports)
        if varying := [name for name in bounds if any((bound != bound[:1]).any() for bound in bounds[name])]:
            raise ValueError(
                f"AutoAmortized needs supports that do not vary with other sites, but those of {listing(varying)} do; "
                "sample a standardised site, and compute the other by numpyro.deterministic."
            )
        return latents, draws

    def _encode(self, name: str, module: "Module | None", inputs: Array) -> Array:
        """Apply a network to inputs (n, ...); features (n, k)."""
        if module is None:
            from numpyro_wide.nn import ResidualEncoder  # flax is loaded when it is needed

            module = ResidualEncoder()
        params = numpyro.param(
            f"{self.prefix}_{name}", lambda key: jax.jit(module.init)(key, jnp.ones(inputs.shape))["params"]
        )
        features = jax.jit(module.apply)({"params": params}, inputs)
        if features.ndim < 2 or len(features) != len(inputs):
            raise ValueError(
                f"encoder must map data of shape {inputs.shape} to features ({len(inputs)}, k), but returned shape "
                f"{features.shape}; the first axis is of rows."
            )
        return features.reshape(len(inputs), -1)

    def _head(self, features: Array, size: int, start: Callable[[Array], Array]) -> Array:
        """Compute (size,) linear functions of the features, at first ``start``."""
        dtype = features.dtype

        def initial(key: Array) -> dict[str, Array]:
            return {"kernel": jnp.zeros((len(features), size), dtype), "bias": start(key).astype(dtype)}

        layer = numpyro.param(f"{self.prefix}_head", initial)
        return features @ layer["kernel"] + layer["bias"]

    def _sample_normals(self, latents: dict[str, "_Latent"], features: Array) -> Draws:
        """Draw site by site, each given those before it: the rows of A make that exact."""
        num, sizes = self.num_components, [latent.size for latent in latents.values()]
        dim = sum(sizes)
        below = 0 if self.family == "independent" else dim * (dim - 1) // 2

        def start(key: Array) -> Array:
            # Components that start alike would stay alike.
            spread = random.normal(key, (num, dim)) if num > 1 else jnp.zeros((num, dim))
            return jnp.concatenate([jnp.zeros((num, 1)), spread, jnp.zeros((num, dim + below))], axis=1).reshape(-1)

        outputs = self._head(features, num * (1 + 2 * dim + below), start).reshape(num, -1)
        logits, target, factor = _FACTORS[self.factor](outputs, dim)
        values: Draws = {}
        previous, begin = jnp.zeros(0, target.dtype), 0  # standardised values of the sites before
        for (name, latent), size in zip(latents.items(), sizes, strict=True):
            end = begin + size
            site_factor = factor[:, begin:end]
            shift = target[:, begin:end] - jnp.einsum("kij,j->ki", site_factor[:, :, :begin], previous)
            if self.family == "independent" and latent.bounds:
                site_outputs = outputs[0, 1 + begin : 1 + end], jnp.diagonal(factor[0])[begin:end]
                values[name] = numpyro.sample(name, latent.truncated(*site_outputs))
                previous, begin = jnp.zeros(end, previous.dtype), end  # to which nothing is proportional
                continue
            fn = ConditionalNormals(logits, shift, site_factor[:, :, begin:end])
            values[name] = numpyro.sample(name, latent.constrained(fn))
            standardised = latent.standardised(values[name])
            logits = logits + fn.component_log_probs(standardised)
            previous, begin = jnp.concatenate([previous, standardised]), end
        return values

    def _sample_flow(self, latents: dict[str, "_Latent"], features: Array) -> Draws:
        """Draw all latents at once; the last site has the density of all."""
        dim = sum(latent.size for latent in latents.values())
        leaves, flow_of = conditional_flow(dim, len(features))
        flow = flow_of(numpyro.param(f"{self.prefix}_flow", leaves))
        drawn = flow.sample(typed(numpyro.prng_key()), condition=features)
        values: Draws = {}
        previous, begin = jnp.zeros(0, drawn.dtype), 0

        def log_prob(previous: Array, value: Array) -> Array:
            return flow.log_prob(jnp.concatenate([previous, value.astype(drawn.dtype)]), condition=features)

        for name, latent in latents.items():
            end = begin + latent.size
            fn = JointPart(drawn[begin:end], partial(log_prob, previous) if end == dim else None)
            values[name] = numpyro.sample(name, latent.constrained(fn))
            previous, begin = jnp.concatenate([previous, latent.standardised(values[name])]), end
        return values


class _Latent(NamedTuple):
    """Coordinates of a latent site."""

    transform: Transform  # of unconstrained values
    shape: tuple[int, ...]  # unconstrained
    bounds: tuple[Array, ...]  # of an interval
    loc: Any = None  # moments of unconstrained vectors, where they are known
    scale: Any = None

    @classmethod
    def of(cls, site: dict) -> "_Latent":
        """Read them off a site of the model."""
        support = site["fn"].support
        transform, shape = biject_to(support), jnp.shape(site["value"])
        while hasattr(support, "base_constraint"):
            support = support.base_constraint
        ends = getattr(support, "lower_bound", None), getattr(support, "upper_bound", None)
        bounds = () if None in ends else tuple(jnp.broadcast_to(jnp.asarray(end, float), shape) for end in ends)
        return cls(transform, transform.inverse_shape(shape), bounds)

    @property
    def size(self) -> int:
        """Number of unconstrained values."""
        return int(np.prod(self.shape, dtype=int))

    def constrained(self, fn: dist.Distribution) -> dist.Distribution:
        """Return a distribution of standardised vectors (size,) as one of the site's values."""
        transforms = [AffineTransform(self.loc, self.scale), ReshapeTransform(self.shape, (self.size,)), self.transform]
        transformed = dist.TransformedDistribution(fn, transforms)
        return transformed.to_event(len(transformed.batch_shape))

    def truncated(self, loc: Array, precision: Array) -> dist.Distribution:
        """Return normals on the interval, of loc and 1/scale (size,) in units of its half, from its middle."""
        low, high = self.bounds
        half, middle = (high - low) / 2, (high + low) / 2
        normal = dist.Normal(middle + half * loc.reshape(self.shape), half / precision.reshape(self.shape))
        return NaturalTruncatedNormal(normal, low, high).to_event(len(self.shape))

    def standardised(self, value: Array) -> Array:
        """Return a value of the site as a standardised vector."""
        return (self.transform.inv(value).reshape(-1).astype(self.loc.dtype) - self.loc) / self.scale


def typed(key: Array | None) -> Array:
    """Return NumPyro's key as flowjax wants it; where none is at hand, nothing is drawn."""
    if key is None:
        return random.key(0)
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else random.wrap_key_data(key)


def _moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation by column; one where a column is constant."""
    scale = column_deviations(values)
    return values.mean(axis=0), np.where(scale > 0, scale, 1.0)


def _log_unit(values: np.ndarray) -> np.ndarray:
    """Return c of sign(x) log(1 + |x|/c) by column, 0 where the values are not to be transformed."""
    size = np.where(values == 0, np.nan, np.abs(values))
    has_both_signs = (values > 0).any(axis=0) & (values < 0).any(axis=0)
    size = np.where((size > 0).any(axis=0), size, 1.0)
    least, low, middle = np.nanquantile(size, [0.0, 0.05, 0.5], axis=0)
    # Without zeros the unit is small, so that this is the logarithm itself.
    unit = np.where(has_both_signs, middle, np.where((values == 0).any(axis=0), low, 0.1 * least))
    raw_moment, log_moment = _fourth_moment(values), _fourth_moment(np.asarray(_signed_log(values, unit)))
    return np.where((raw_moment > _HEAVY) & (log_moment < raw_moment), unit, 0.0)


def _fourth_moment(values: np.ndarray) -> np.ndarray:
    loc, scale = _moments(values)
    return np.mean(((values - loc) / scale) ** 4, axis=0)


def _signed_log(values: A, unit: A) -> A:
    """Take columns with a unit to their signed logarithm."""
    numpy: ModuleType = np if isinstance(values, np.ndarray) else jnp
    # log(1 + |x|/c), whose ratio may overflow.
    size, unit_size = (numpy.where(array == 0, 1.0, numpy.abs(array)) for array in (values, unit))
    logarithm = numpy.sign(values) * numpy.logaddexp(0.0, numpy.log(size) - numpy.log(unit_size))
    return numpy.where(unit > 0, logarithm, values)


def _standardised(values: Array, constants: dict[str, Array]) -> Array:
    """Standardise values of an observed site, or its rows."""
    loc, scale, unit = (jnp.broadcast_to(constants[name], values.shape) for name in ("loc", "scale", "unit"))
    return (_signed_log(values, unit) - loc) / scale
