"""Likelihoods given as functions, to a log density or to a NumPyro distribution, with derivatives by JAX."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

from numpyro_wide.surrogates._likelihood import Derivatives, Likelihood


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
