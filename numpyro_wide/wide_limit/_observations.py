"""Observations and their likelihood, by its name, a NumPyro distribution or a function."""

import inspect
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

from numpyro_wide._checks import as_floats, check_finite, check_no_nan, check_one_of, listing
from numpyro_wide.wide_limit._likelihoods import LIKELIHOODS, Categorical, Derivatives, Likelihood, logit_basis
from numpyro_wide.wide_limit._variational import GaussianLikelihood, VariationalFit

# Of the trace: what rounding leaves in a kernel in single precision.
_ROUNDING = 1e-5


def checked_parameters(likelihood: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters that were given, those that are None left out.

    Args:
        likelihood: name of the likelihood, or a function.
        given: all parameters that any likelihood has, by name; None where there is none.

    Raises:
        ValueError: for an unknown likelihood, or parameters that it lacks, does not have, or cannot have.
    """
    if not callable(likelihood):
        also = (
            "or a function of function values to a NumPyro distribution, or a function of an observation and its "
            "function value to the log density"
        )
        check_one_of("likelihood", likelihood, LIKELIHOODS, also=also)
    needed = () if callable(likelihood) else LIKELIHOODS[likelihood].parameters
    found = {name: value for name, value in given.items() if value is not None}
    missing = [name for name in needed if name not in found]
    called = "given as a function" if callable(likelihood) else repr(likelihood)
    if missing:
        raise ValueError(f"the likelihood {called} needs {listing(missing)}, which must be a number or an array.")
    # A function may have several function values a row, as a categorical has.
    allowed = (*needed, "num_classes") if callable(likelihood) else needed
    foreign = [name for name in found if name not in allowed]
    if foreign:
        raise ValueError(f"{listing(foreign)} must not be given where the likelihood is {called}; drop it.")
    if "num_classes" in found:
        Categorical.check_parameters(found)
    elif found:
        LIKELIHOODS[likelihood].check_parameters(found)
    return found


def checked_observations(observations: ArrayLike, likelihood: Any, parameters: dict[str, Any]) -> np.ndarray:
    """Return the observations in float64.

    Args:
        observations: outcomes, counts, labels or numbers, (n,) or (n, k).
        likelihood: name of the likelihood, or a function.
        parameters: those of the likelihood, checked.

    Raises:
        TypeError: for what does not hold real numbers.
        ValueError: for a shape other than (n,) or (n, k), NaN, infinity, or what the likelihood cannot give.
    """
    check_no_nan("observations", observations)
    values = np.array(observations, float)
    if values.ndim not in (1, 2) or not values.size:
        raise ValueError(f"observations must have shape (n,) or (n, k), with entries, but got {values.shape}.")
    check_finite("observations", values)
    if not callable(likelihood):
        broadcasted = {
            name: broadcast(name, value, values.shape) if np.ndim(value) else value
            for name, value in parameters.items()
        }
        LIKELIHOODS[likelihood].check_observed(values, broadcasted)
    return values


def checked_kernel(kernel: ArrayLike, num_rows: int) -> np.ndarray:
    """Return the kernel in float64, exactly symmetric.

    Args:
        kernel: covariance of the function values, (n, n).
        num_rows: n, the number of observations.

    Raises:
        ValueError: if it is not (n, n), symmetric, finite and positive semidefinite, up to single precision's rounding.
    """
    as_floats(kernel, names=("kernel",))  # refuses what is not an array of numbers
    matrix = np.asarray(kernel, float)
    if matrix.shape != (num_rows, num_rows):
        raise ValueError(
            f"kernel must have shape {(num_rows, num_rows)}, a row and a column for each of the observations, but got "
            f"{matrix.shape}; take it at the inputs of the observations."
        )
    check_no_nan("kernel", matrix)
    if not np.isfinite(matrix).all():
        raise ValueError("kernel must be finite, but some entries are not; standardise the inputs.")
    size = np.max(np.abs(matrix))
    if not size > 0:
        raise ValueError("kernel must not be zero everywhere; its diagonal holds the variances of function values.")
    asymmetry = np.max(np.abs(matrix - matrix.T))
    if asymmetry > _ROUNDING * size:
        raise ValueError(f"kernel must be symmetric, but differs from its transpose by up to {asymmetry:.3g}.")
    matrix = (matrix + matrix.T) / 2
    jittered = matrix + _ROUNDING * np.trace(matrix) * np.eye(num_rows)
    try:
        np.linalg.cholesky(jittered)
    except np.linalg.LinAlgError as error:
        raise ValueError(
            "kernel must be positive semidefinite, a matrix of covariances, but has clearly negative eigenvalues; take "
            "mean_kernel, or the first result of wide_limit.fcn_kernel(...)(x)."
        ) from error
    # Rounding in single precision may leave negative eigenvalues, which large weights would bring out.
    is_single = np.asarray(kernel).dtype.itemsize < 8
    return matrix + is_single * np.finfo(np.float32).eps * np.trace(matrix) * np.eye(num_rows)


def broadcast(name: str, value: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    """Return the value in float64, of the shape.

    Args:
        name: name of the argument.
        value: number or array.
        shape: the shape.

    Raises:
        ValueError: if it does not broadcast against the shape, or holds NaN.
    """
    check_no_nan(name, value)
    array = np.asarray(value, float)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{name} must broadcast against the shape {shape}, but has {array.shape}.") from None


@dataclass(frozen=True)
class FunctionLikelihood(Likelihood):
    """A likelihood that is known by a function alone; JAX must be in double precision.

    Where it is not concave it counts as straight, with a weight of zero.

    Attributes:
        log_density: function of function values, (n, c), to the log density of each row, (n,); no row of it may depend
            on the function values of another.
        shape: (n, c).
    """

    log_density: Callable[[Array], Array]
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        _check_rows_apart(self.log_density, self.shape)

    @classmethod
    def check_observed(cls, observed: Array | np.ndarray, parameters: dict[str, Any]) -> None:
        """Accept any number: a distribution says itself what it can give."""

    @property
    def start(self) -> np.ndarray:
        return np.zeros(self.shape)

    def derivatives(self, values: np.ndarray) -> Derivatives:
        value, slope, weight = map(np.asarray, self._at_nodes(values))
        return value, slope, np.maximum(weight, 0.0)

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


def takes_function_values_alone(function: Callable) -> bool:
    """Return whether a function is one of function values alone, f, and not of an observation and its own, (y, f).

    Raises:
        ValueError: if it takes neither one nor two arguments.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function that was not written in Python does not say
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    needed = [p for p in positional if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if not positional or len(needed) > 2 or keywords:
        raise ValueError(
            "likelihood must be a function of function values to a NumPyro distribution, lambda f: "
            "such as dist.Bernoulli(logits=f), or of an observation and its function value to the log density, but it "
            f"takes ({', '.join(map(str, parameters))}); give the others by a lambda or functools.partial."
        )
    return len(needed) != 2


def of_density(log_density: Callable[[Any, Any], Any], observed: np.ndarray, offset: np.ndarray) -> FunctionLikelihood:
    """Return the likelihood of observations (n,) of which each has a log density given its own function value.

    Args:
        log_density: JAX function of one observation and its function value, to a number.
        observed: observations, (n,).
        offset: what the function values have besides ``features @ readout``, (n,).
    """

    def one(y: Array, f: Array) -> Array:
        value = jnp.asarray(log_density(y, f))
        if value.shape != ():
            raise ValueError(
                f"likelihood(y, f) must give a number for one observation and its function value, but gave an array of "
                f"shape {value.shape}; write it for single numbers, it is mapped over the rows."
            )
        return value

    over_rows, given, shift = jax.vmap(one), jnp.asarray(observed), jnp.asarray(offset)
    return FunctionLikelihood(lambda values: over_rows(given, values[:, 0] + shift), (len(observed), 1))


def of_distribution(
    distribution: Callable[[Any], Any], observed: np.ndarray, offset: np.ndarray, column: tuple[int, ...] = ()
) -> FunctionLikelihood:
    """Return the likelihood of observations with a function value each, or of one column of them.

    Args:
        distribution: JAX function of function values of the shape of the observations, to a NumPyro distribution.
        observed: observations, (n,) or (n, k).
        offset: what the function values have besides ``features @ readout``, of the shape of the observations.
        column: the index of the column, of (n, k).
    """
    place = (slice(None), *column)
    shift = jnp.asarray(offset)
    values = _checked_values(distribution(shift), observed, observed.shape)

    def log_density(f: Array) -> Array:
        # Of the other columns nothing is used; they are there for a function that expects the observations' shape.
        everywhere = jnp.zeros(observed.shape).at[place].set(f[:, 0]) + shift
        return _elementwise(distribution(everywhere)).log_prob(values)[place]

    return FunctionLikelihood(log_density, (len(observed), 1))


def of_joint_distribution(
    distribution: Callable[[Any], Any], observed: np.ndarray, basis: np.ndarray, offset: np.ndarray
) -> FunctionLikelihood:
    """Return the likelihood of observations that have k function values each, such as logits.

    Args:
        distribution: JAX function of (n, k), to a NumPyro distribution over n observations.
        observed: observations, n of them in front.
        basis: what the fitted function values, of which there are c, are multiplied by, (k, c).
        offset: what is added then, (n, k).
    """
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
    """Return the observations in the type that the distribution takes.

    Raises:
        ValueError: if it is not a distribution, has another shape, or cannot give the observations.
    """
    if not isinstance(distribution, dist.Distribution):
        raise ValueError(
            "likelihood(f) must give a NumPyro distribution, such as dist.Bernoulli(logits=f), but gave a "
            f"{type(distribution).__name__}; a function to the log density has two arguments, (y, f)."
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
    # What a mask hides is not looked at, and may be anything.
    is_masked = isinstance(each, dist.MaskedDistribution)
    if not is_masked and not (np.array_equal(values, observed) and np.all(support(values))):
        raise ValueError(
            f"the observations must be such as the distribution {type(each).__name__} can give, {support}, but they "
            f"range from {observed.min()} to {observed.max()}; correct them, or the likelihood."
        )
    return values


def _check_rows_apart(log_density: Callable[[Array], Array], shape: tuple[int, int]) -> None:
    """Refuse a log density in which the function values of a row change the slope of another row."""
    slope = jax.jit(jax.grad(lambda values: jnp.sum(log_density(values))))
    values = jnp.zeros(shape)
    moved = values.at[1::2].add(0.5)
    before, after = np.asarray(slope(values))[::2], np.asarray(slope(moved))[::2]
    if not np.allclose(before, after, rtol=1e-6, atol=1e-9, equal_nan=True):
        raise ValueError(
            "the likelihood of a row must depend on the function value of that row alone, but that of others changes "
            "it; say num_classes where each row has several function values, and otherwise let no row depend on others."
        )


_LOGIT_SIZES = {"bernoulli": 10.0, "binomial": 3.0, "categorical": 10.0}  # standard deviations that one may expect
# Of the sum of w K_ii: what double precision tells from no noise at all.
_MOST_WEIGHT = 0.25 / np.finfo(float).eps


@dataclass(frozen=True)
class Observations:
    """Observations of rows, and their likelihood given function values.

    Attributes:
        likelihood: name of the likelihood, or a function.
        values: observations, (n,) or (n, k).
        parameters: parameters of the likelihood by name: the number of classes, or arrays of the shape of the values.
        offset: what the function values have besides ``features @ readout``, of the values' shape, or (n, classes).
        contrasts: whether a categorical's function values are logits in the basis of contrasts.
    """

    likelihood: Any
    values: np.ndarray
    parameters: dict[str, Any]
    offset: np.ndarray
    contrasts: bool = False

    @classmethod
    def of(
        cls, observations: ArrayLike, likelihood: Any, given: dict[str, Any], offset: ArrayLike, contrasts: bool = False
    ) -> "Observations":
        """Check observations and all that is known of their likelihood.

        Args:
            observations: outcomes, counts, labels or numbers, (n,) or (n, k).
            likelihood: name of the likelihood, or a function.
            given: all parameters that any likelihood has, by name; None where there is none.
            offset: number or array that is added to the function values.
            contrasts: whether the function values are a categorical's logits in the basis of contrasts.

        Raises:
            TypeError: for what does not hold real numbers.
            ValueError: for an unknown likelihood, parameters that it lacks or does not have, or observations that it
                cannot give.
        """
        parameters = checked_parameters(likelihood, given)
        if contrasts and "num_classes" not in parameters:
            raise ValueError(f"contrasts belong to a categorical likelihood, but it is {likelihood!r}; drop them.")
        values = checked_observations(observations, likelihood, parameters)
        if "num_classes" in parameters:
            shape: tuple[int, ...] = (len(values), int(parameters["num_classes"]))
        else:
            shape = values.shape
            parameters = {name: broadcast(name, value, shape) for name, value in parameters.items()}
        return cls(likelihood, values, parameters, broadcast("offset", offset, shape), contrasts)

    @classmethod
    def new(cls, shape: tuple[int, ...], likelihood: str, given: dict[str, Any]) -> "Observations":
        """Return observations that are not known yet, with zeros for their values.

        Args:
            shape: (m,) or (m, k).
            likelihood: name of the likelihood.
            given: its parameters and "offset".
        """
        return cls.of(np.zeros(shape), likelihood, {n: v for n, v in given.items() if n != "offset"}, given["offset"])

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
        """Return the likelihoods, each of which a Gaussian is fitted to by itself: one of classes, or one an output."""
        if "num_classes" in self.parameters:
            basis = logit_basis(int(self.parameters["num_classes"]), self.contrasts)
            if callable(self.likelihood):
                return [of_joint_distribution(self.likelihood, self.values, basis, self.offset)]
            return [Categorical(self.values.astype(int), basis, self.offset)]
        places: list[Any] = [()] if self.values.ndim == 1 else [(i,) for i in range(self.values.shape[1])]
        if callable(self.likelihood) and takes_function_values_alone(self.likelihood):
            return [of_distribution(self.likelihood, self.values, self.offset, place) for place in places]
        columns = [(self.values[:, *place], self.offset[:, *place]) for place in places]
        if callable(self.likelihood):
            return [of_density(self.likelihood, *column) for column in columns]
        kind: Any = LIKELIHOODS[self.likelihood]
        return [
            kind(*column, **{name: value[:, *place] for name, value in self.parameters.items()})
            for column, place in zip(columns, places, strict=True)
        ]

    def fitted(self, kernel: np.ndarray) -> list[GaussianLikelihood]:
        """Fit a Gaussian likelihood to every column, under the prior with this kernel, (n, n), in double precision."""
        fits = [VariationalFit(column, kernel, None) for column in self.columns()]
        return [fit.sites(fit.climb(), _MOST_WEIGHT) for fit in fits]

    def predicted(self, moments: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
        """Average what is expected of these observations over normal function values, their offset not yet included.

        Args:
            moments: mean, (n, c), and variance, (n,), of the function values of each column.

        Returns:
            Probabilities of the classes, (n, k); of 1, (n,) or (n, k), for outcomes; mean and variance of other
            observations, each of their shape.
        """
        kind = LIKELIHOODS[self.likelihood]
        if "num_classes" in self.parameters:
            ((mean, variance),) = moments
            return kind.predicted(mean + self.offset, variance)
        means, variances = (np.stack(parts, axis=-1).reshape(self.offset.shape) for parts in zip(*moments, strict=True))
        found = kind.predicted(
            (means + self.offset).ravel(), variances.ravel(), **{n: v.ravel() for n, v in self.parameters.items()}
        )
        reshaped = tuple(part.reshape(self.offset.shape) for part in (found if isinstance(found, tuple) else (found,)))
        return reshaped if isinstance(found, tuple) else reshaped[0]
