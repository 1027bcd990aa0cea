"""Observations and their likelihood, by its name or as a function to a NumPyro distribution."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import check_finite, check_no_nan, check_one_of, listing
from numpyro_wide.wide_limit._likelihoods import (
    LIKELIHOODS,
    Averages,
    Categorical,
    Derivatives,
    Likelihood,
    Nodes,
    logit_basis,
)
from numpyro_wide.wide_limit._variational import GaussianLikelihood, VariationalFit

_NUM_NORMALS = 128
_LOGIT_SIZES = {"bernoulli": 10.0, "binomial": 3.0, "categorical": 10.0}  # standard deviations that one may expect
# Of the sum of w K_ii: what double precision tells from no noise at all.
_MOST_WEIGHT = 0.25 / np.finfo(float).eps


@dataclass(frozen=True)
class FunctionLikelihood(Likelihood):
    """A likelihood that is known by a function alone; JAX must be in double precision.

    Where it is not concave it counts as straight, with a weight of zero.
    """

    # From function values (n, c) to the log density of each row, (n,), which depends on the values of that row alone.
    log_density: Callable[[Array], Array]
    shape: tuple[int, int]  # (n, c)

    def __post_init__(self) -> None:
        """Refuse a log density in which the function values of a row change the slope of another row."""
        slope = jax.jit(jax.grad(lambda values: jnp.sum(self.log_density(values))))
        values = jnp.zeros(self.shape)
        moved = values.at[1::2].add(0.5)
        before, after = np.asarray(slope(values))[::2], np.asarray(slope(moved))[::2]
        if not np.allclose(before, after, rtol=1e-6, atol=1e-9, equal_nan=True):
            raise ValueError(
                "the likelihood of a row must depend on the function value of that row alone, but that of others "
                "changes it; say num_classes where each row has several function values, and otherwise let no row "
                "depend on others."
            )

    @property
    def start(self) -> np.ndarray:
        return np.zeros(self.shape)

    def derivatives(self, values: np.ndarray) -> Derivatives:
        value, slope, weight = map(np.asarray, self._at_nodes(values))
        return value, slope, np.maximum(weight, 0.0)

    def expected(self, mean: np.ndarray, variance: np.ndarray) -> Averages:
        return self.averaged(mean, variance, self._nodes)

    @cached_property
    def _nodes(self) -> Nodes | None:
        return normal_pairs(_NUM_NORMALS, self.shape) if self.shape[1] > 1 else None

    @cached_property
    def _at_nodes(self) -> Callable[[np.ndarray], tuple[Array, Array, Array]]:
        def at_node(values: Array) -> tuple[Array, Array, Array]:
            slope_at = jax.grad(lambda values: jnp.sum(self.log_density(values)))

            # Rows do not depend on each other, so that the product with a column of ones is that of every row's own
            # matrix of second derivatives with one coordinate.
            def second(column: int) -> Array:
                return jax.jvp(slope_at, (values,), (jnp.zeros_like(values).at[:, column].set(1.0),))[1][:, column]

            num_columns = self.shape[1]
            weight = -sum((second(column) for column in range(1, num_columns)), start=second(0)) / num_columns
            return self.log_density(values), slope_at(values), weight

        return jax.jit(jax.vmap(at_node))


def normal_pairs(count: int, shape: tuple[int, int]) -> Nodes:
    """Return normal draws in antithetic pairs, each coordinate's sample variance brought to one."""
    half = np.random.default_rng(0).normal(size=(-(-count // 2), *shape))
    half /= np.sqrt(np.mean(half**2, axis=0))
    return np.concatenate([half, -half]), np.full(2 * len(half), 0.5 / len(half))


def _of_column(
    distribution: Callable[[Any], Any], observed: np.ndarray, offset: np.ndarray, column: tuple[int, ...]
) -> FunctionLikelihood:
    """Return the likelihood of observations (n,), or of a column of (n, k), with one function value each.

    The distribution is over all of them, given function values of their shape.
    """
    place, shift = (slice(None), *column), jnp.asarray(offset)
    values = _checked_values(distribution(shift), observed, observed.shape)

    def log_density(f: Array) -> Array:
        # The other columns are there for a function that expects the observations' shape.
        everywhere = jnp.zeros(observed.shape).at[place].set(f[:, 0]) + shift
        return _elementwise(distribution(everywhere)).log_prob(values)[place]

    return FunctionLikelihood(log_density, (len(observed), 1))


def _of_rows(
    distribution: Callable[[Any], Any], observed: np.ndarray, basis: np.ndarray, offset: np.ndarray
) -> FunctionLikelihood:
    """Return the likelihood of n observations with k function values each, given as c coordinates in a basis (k, c)."""
    across, shift = jnp.asarray(basis.T), jnp.asarray(offset)
    values = _checked_values(distribution(shift), observed, observed.shape[:1])

    def log_density(f: Array) -> Array:
        return _elementwise(distribution(f @ across + shift)).log_prob(values)

    return FunctionLikelihood(log_density, (len(observed), basis.shape[1]))


def _elementwise(distribution: Any) -> dist.Distribution:
    """Return the distribution without ``to_event``, which would sum over rows."""
    while isinstance(distribution, dist.Independent):
        distribution = distribution.base_dist
    return distribution


def _checked_values(distribution: Any, observed: np.ndarray, shape: tuple[int, ...]) -> Array:
    """Return the observations in the type that the distribution takes, which must have this batch shape."""
    if not isinstance(distribution, dist.Distribution):
        raise ValueError(
            "likelihood(f) must give a NumPyro distribution, such as dist.Bernoulli(logits=f), but gave a "
            f"{type(distribution).__name__}."
        )
    each = _elementwise(distribution)
    support: Any = each.support
    values = jnp.asarray(np.round(observed).astype(int) if support.is_discrete else observed)
    found = jax.eval_shape(each.log_prob, values).shape
    if found != shape:
        raise ValueError(
            f"likelihood(f) must have a log density for each observation, of shape {shape}, but gives {found}; let it "
            "give a distribution of as many rows as there are, and say num_classes where each row has several function "
            "values."
        )
    # Masked rows may hold anything.
    is_masked = isinstance(each, dist.MaskedDistribution)
    if not is_masked and not (np.array_equal(values, observed) and np.all(support(values))):
        raise ValueError(
            f"the observations must be such as the distribution {type(each).__name__} can give, {support}, but they "
            f"range from {observed.min()} to {observed.max()}; correct them, or the likelihood."
        )
    return values


@dataclass(frozen=True)
class Observations:
    """Observations of rows, and their likelihood given function values."""

    likelihood: Any  # its name, or a function to a NumPyro distribution
    values: np.ndarray  # (n,) or (n, k)
    parameters: dict[str, Any]  # of the likelihood, by name: the number of classes, or arrays of the values' shape
    offset: np.ndarray  # the part of the function values besides the network's, of the values' shape, or (n, classes)
    contrasts: bool = False  # whether a categorical's function values are logits in the basis of contrasts

    @classmethod
    def of(
        cls, observations: ArrayLike, likelihood: Any, given: dict[str, Any], offset: ArrayLike, contrasts: bool = False
    ) -> "Observations":
        """Check observations and all that is known of their likelihood; parameters that are None are left out."""
        parameters = _checked_parameters(likelihood, given)
        if contrasts and "num_classes" not in parameters:
            raise ValueError(f"contrasts belong to a categorical likelihood, but it is {likelihood!r}; drop them.")
        check_finite("observations", observations)
        values = np.array(observations, float)
        if values.ndim not in (1, 2) or not values.size:
            raise ValueError(f"observations must have shape (n,) or (n, k), with entries, but got {values.shape}.")
        has_classes = "num_classes" in parameters
        shape = (len(values), int(parameters["num_classes"])) if has_classes else values.shape
        if not has_classes:
            parameters = {name: _broadcast(name, value, shape) for name, value in parameters.items()}
        if not callable(likelihood):
            LIKELIHOODS[likelihood].check_observed(values, parameters)
        return cls(likelihood, values, parameters, _broadcast("offset", offset, shape), contrasts)

    @property
    def size(self) -> float:
        """Standard deviation of the function values that is expected."""
        if self.likelihood in _LOGIT_SIZES:
            return _LOGIT_SIZES[self.likelihood]
        return float(np.sqrt(np.mean([np.mean(column.start**2) for column in self.columns()]))) or 1.0

    def __getitem__(self, rows: np.ndarray) -> "Observations":
        """Return some of the rows."""
        parameters = {name: value[rows] if np.ndim(value) else value for name, value in self.parameters.items()}
        return replace(self, values=self.values[rows], parameters=parameters, offset=self.offset[rows])

    def columns(self) -> list[Likelihood]:
        """Return the likelihoods that a Gaussian is fitted to one by one: one of classes, or one an output."""
        if "num_classes" in self.parameters:
            basis = logit_basis(int(self.parameters["num_classes"]), self.contrasts)
            if callable(self.likelihood):
                return [_of_rows(self.likelihood, self.values, basis, self.offset)]
            return [Categorical(self.values.astype(int), basis, self.offset)]
        places: list[Any] = [()] if self.values.ndim == 1 else [(i,) for i in range(self.values.shape[1])]
        if callable(self.likelihood):
            return [_of_column(self.likelihood, self.values, self.offset, place) for place in places]
        kind: Any = LIKELIHOODS[self.likelihood]
        return [
            kind(
                self.values[:, *place],
                self.offset[:, *place],
                **{name: value[:, *place] for name, value in self.parameters.items()},
            )
            for place in places
        ]

    def fitted(self, kernel: np.ndarray) -> list[GaussianLikelihood]:
        """Fit a Gaussian likelihood to every column, under the prior with this kernel, (n, n), in double precision."""
        fits = [VariationalFit(column, kernel) for column in self.columns()]
        return [fit.sites(fit.climb(), _MOST_WEIGHT) for fit in fits]

    def predicted(self, moments: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
        """Average the expected observations over normal function values, of each column's mean (n, c), variance (n,).

        The offset is added here. Returns probabilities of the classes, (n, k); of 1, (n,) or (n, k), for outcomes; mean
        and variance of other observations, each of their shape.
        """
        kind = LIKELIHOODS[self.likelihood]
        if "num_classes" in self.parameters:
            ((mean, variance),) = moments
            return kind.predicted(mean + self.offset, variance)
        means, variances = (np.stack(parts, axis=-1).reshape(self.offset.shape) for parts in zip(*moments, strict=True))
        found = kind.predicted(
            (means + self.offset).ravel(), variances.ravel(), **{n: v.ravel() for n, v in self.parameters.items()}
        )
        if isinstance(found, tuple):
            return tuple(part.reshape(self.offset.shape) for part in found)
        return found.reshape(self.offset.shape)


def _checked_parameters(likelihood: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters that were given, those that are None left out."""
    is_function = callable(likelihood)
    if not is_function:
        check_one_of(
            "likelihood", likelihood, LIKELIHOODS, also="or a function of function values to a NumPyro distribution"
        )
    needed = () if is_function else LIKELIHOODS[likelihood].parameters
    found = {name: value for name, value in given.items() if value is not None}
    called = "given as a function" if is_function else repr(likelihood)
    if missing := [name for name in needed if name not in found]:
        raise ValueError(f"the likelihood {called} needs {listing(missing)}, which must be a number or an array.")
    # A function may have several function values a row, as a categorical has.
    allowed = ("num_classes",) if is_function else needed
    if foreign := [name for name in found if name not in allowed]:
        raise ValueError(f"{listing(foreign)} must not be given where the likelihood is {called}; drop it.")
    if found:
        (Categorical if is_function else LIKELIHOODS[likelihood]).check_parameters(found)
    return found


def _broadcast(name: str, value: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    """Return the value in float64, of the shape."""
    check_no_nan(name, value)
    array = np.asarray(value, float)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{name} must broadcast against the shape {shape}, but has {array.shape}.") from None
