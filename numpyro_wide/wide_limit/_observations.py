"""Observations and their likelihood, by its name."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from numpyro_wide._checks import check_finite, check_no_nan, check_one_of, listing
from numpyro_wide.linear_gaussian._surrogate import Surrogate
from numpyro_wide.machine import double_precision
from numpyro_wide.wide_limit._likelihoods import LIKELIHOODS, Categorical, Likelihood, StudentT, logit_basis
from numpyro_wide.wide_limit._variational import GaussianLikelihood, VariationalFit

_LOGIT_SIZES = {"bernoulli": 10.0, "binomial": 3.0, "categorical": 10.0}  # expected standard deviations
# Of the sum of w K_ii, in double precision.
_MOST_WEIGHT = 0.25 / np.finfo(float).eps


@dataclass(frozen=True)
class Observations:
    """Observations of rows, and their likelihood given function values."""

    likelihood: Any  # its name; a subclass has functions
    values: np.ndarray  # (n,) or (n, k)
    parameters: dict[str, Any]  # number of classes, or arrays of the values' shape
    offset: np.ndarray  # part of the function values, of the values' shape, or (n, classes)
    contrasts: bool = False  # whether logits are in the basis of contrasts

    @classmethod
    def of(
        cls, observations: ArrayLike, likelihood: Any, given: dict[str, Any], offset: ArrayLike, contrasts: bool = False
    ) -> "Observations":
        """Check observations and their likelihood; parameters that are None are left out."""
        parameters = cls.checked_parameters(likelihood, given)
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
        cls.check_observed(likelihood, values, parameters)
        return cls(likelihood, values, parameters, _broadcast("offset", offset, shape), contrasts)

    @classmethod
    def checked_parameters(cls, likelihood: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters that were given."""
        check_one_of("likelihood", likelihood, LIKELIHOODS, also="or a function to a NumPyro distribution")
        needed = LIKELIHOODS[likelihood].parameters
        found = {name: value for name, value in given.items() if value is not None}
        if missing := [name for name in needed if name not in found]:
            raise ValueError(f"the likelihood {likelihood!r} needs {listing(missing)}, a number or an array.")
        refuse_foreign(found, needed, likelihood)
        if found:
            LIKELIHOODS[likelihood].check_parameters(found)
        return found

    @classmethod
    def check_observed(cls, likelihood: Any, values: np.ndarray, parameters: dict[str, Any]) -> None:
        """Refuse observations that the likelihood cannot give."""
        LIKELIHOODS[likelihood].check_observed(values, parameters)

    @property
    def is_of_labels(self) -> bool:
        """Whether the observations are labels of classes, of one output."""
        return self.likelihood in ("bernoulli", "categorical") and self.values.ndim == 1

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

    @property
    def basis(self) -> np.ndarray:
        """Basis of the logits that the function values are in, (k, c)."""
        return logit_basis(int(self.parameters["num_classes"]), self.contrasts)

    @property
    def places(self) -> list[Any]:
        """Indices of the columns behind the rows."""
        return [()] if self.values.ndim == 1 else [(i,) for i in range(self.values.shape[1])]

    def columns(self) -> list[Likelihood]:
        """Return the likelihoods of separate fits: one of classes, or one an output."""
        if "num_classes" in self.parameters:
            return [Categorical(self.values.astype(int), self.basis, self.offset)]
        kind: Any = LIKELIHOODS[self.likelihood]
        return [
            kind(
                self.values[:, *place],
                self.offset[:, *place],
                **{name: value[:, *place] for name, value in self.parameters.items()},
            )
            for place in self.places
        ]

    def fitted(self, kernel: np.ndarray) -> list[GaussianLikelihood]:
        """Fit a Gaussian likelihood to every column, given a kernel (n, n), in double precision."""
        fits = [VariationalFit(column, kernel) for column in self.columns()]
        return [fit.sites(fit.climb(), _MOST_WEIGHT) for fit in fits]

    def surrogate(self, kernel: np.ndarray, progress_bar: bool = True) -> Surrogate:
        """Fit the Gaussian likelihood of all columns, for JAX's float type."""
        # The largest sum of w K_ii that the map resolves.
        most = 0.25 / float(jnp.finfo(jnp.result_type(float)).eps)
        with double_precision():
            columns = [replace(one, is_bound=False) if isinstance(one, StudentT) else one for one in self.columns()]
            fits = [VariationalFit(column, kernel).fit(most, progress_bar) for column in columns]
        targets = np.concatenate([fit.targets for fit in fits], axis=1)
        scales = np.stack([fit.weights for fit in fits], axis=1) ** -0.5
        if "num_classes" not in self.parameters:
            targets, scales = (array.reshape(self.values.shape) for array in (targets, scales))
        return Surrogate(*(jnp.asarray(array, jnp.result_type(float)) for array in (targets, scales)))

    def predicted(self, moments: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
        """Average expected observations, given each column's mean (n, c) and variance (n,)."""
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


def refuse_foreign(found: Iterable[str], allowed: Iterable[str], likelihood: Any) -> None:
    """Refuse parameters that a likelihood does not have."""
    if foreign := [name for name in found if name not in allowed]:
        called = "given as a function" if callable(likelihood) else repr(likelihood)
        raise ValueError(f"{listing(foreign)} must not be given where the likelihood is {called}; drop it.")


def _broadcast(name: str, value: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    """Return the value in float64, of the shape."""
    check_no_nan(name, value)
    array = np.asarray(value, float)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{name} must broadcast against the shape {shape}, but has {array.shape}.") from None
