"""Observations with their likelihood: what a Gaussian is fitted to, and what is expected of new ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from numpyro_wide.surrogates._arguments import broadcast, checked_observations, checked_parameters
from numpyro_wide.surrogates._functions import (
    of_density,
    of_distribution,
    of_joint_distribution,
    takes_function_values_alone,
)
from numpyro_wide.surrogates._likelihood import Likelihood
from numpyro_wide.surrogates._likelihoods import LIKELIHOODS, Categorical, logit_basis
from numpyro_wide.surrogates._variational import GaussianLikelihood, VariationalFit

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
