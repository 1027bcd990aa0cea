"""Observations and their likelihood, by its name."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from numpyro_wide._checks import check_finite, check_no_nan, check_one_of, listing
from numpyro_wide.linear_gaussian._surrogate import Surrogate
from numpyro_wide.machine import double_precision
from numpyro_wide.wide_limit._gp import Conditioned
from numpyro_wide.wide_limit._likelihoods import LIKELIHOODS, Categorical, Likelihood, StudentT, logit_basis
from numpyro_wide.wide_limit._variational import VariationalFit

_LOGIT_SIZES = {"bernoulli": 10.0, "binomial": 3.0, "categorical": 10.0}  # expected standard deviations


def _most_weight(dtype: DTypeLike) -> float:
    """Return the largest sum of w K_ii that the map resolves."""
    return 0.25 / float(jnp.finfo(dtype).eps)


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
        cls,
        observations: ArrayLike,
        likelihood: Any,
        parameters: dict[str, Any],
        offset: ArrayLike,
        contrasts: bool = False,
    ) -> "Observations":
        """Check observations and their likelihood; parameters that are None are left out."""
        parameters = {name: value for name, value in parameters.items() if value is not None}
        if callable(likelihood):
            family: type[Likelihood] = Categorical  # as it may have several function values a row
        else:
            check_one_of("likelihood", likelihood, LIKELIHOODS, also="or a function to a NumPyro distribution")
            family = LIKELIHOODS[likelihood]
            if missing := [name for name in family.parameters if name not in parameters]:
                raise ValueError(f"the likelihood {likelihood!r} needs {listing(missing)}, a number or an array.")
        refuse_foreign(parameters, family.parameters, likelihood)
        if parameters:
            family.check_parameters(parameters)
        has_classes = "num_classes" in parameters
        if contrasts and not has_classes:
            raise ValueError(f"contrasts belong to a categorical likelihood, but it is {likelihood!r}; drop them.")
        check_finite("observations", observations)
        values = np.array(observations, float)
        if values.ndim not in (1, 2) or not values.size:
            raise ValueError(f"observations must have shape (n,) or (n, k), with entries, but got {values.shape}.")
        shape = (len(values), int(parameters["num_classes"])) if has_classes else values.shape
        if not has_classes:
            parameters = {name: _broadcast(name, value, shape) for name, value in parameters.items()}
        if not callable(likelihood):  # a distribution has its own support
            family.check_observed(values, parameters)
        return cls(likelihood, values, parameters, _broadcast("offset", offset, shape), contrasts)

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
        family: Any = LIKELIHOODS[self.likelihood]
        return [
            family(
                self.values[:, *place],
                self.offset[:, *place],
                **{name: value[:, *place] for name, value in self.parameters.items()},
            )
            for place in self.places
        ]

    def processes(self, kernel: np.ndarray) -> list[Conditioned]:
        """Return the process of each column given its fitted Gaussian likelihood, from a kernel (n, n) in float64."""
        fits = [VariationalFit(column, kernel) for column in self.columns()]
        return [Conditioned(kernel, *fit.sites(fit.climb(), _most_weight(float))) for fit in fits]

    def surrogate(self, kernel: np.ndarray, progress_bar: bool = True) -> Surrogate:
        """Fit the Gaussian likelihood of all columns, for JAX's float type."""
        sites, dtype = [], jnp.result_type(float)
        with double_precision():
            for column in self.columns():
                exact = replace(column, is_bound=False) if isinstance(column, StudentT) else column
                fit = VariationalFit(exact, kernel)
                state = fit.climb(progress_bar=progress_bar)
                sites.append(fit.sites(state, _most_weight(dtype)))
                if not state.moved < 1e-2:
                    warnings.warn(
                        f"the surrogate's means and weights still move by {state.moved:.2g} after all steps; the "
                        "posterior stays exact, but another kernel, or an offset, may give a better one.",
                        RuntimeWarning,
                        stacklevel=3,  # the caller of fitted_surrogate
                    )
        targets = np.concatenate([targets for targets, _ in sites], axis=1)
        scales = np.stack([variance for _, variance in sites], axis=1) ** 0.5
        if "num_classes" not in self.parameters:
            targets, scales = (array.reshape(self.values.shape) for array in (targets, scales))
        return Surrogate(jnp.asarray(targets, dtype), jnp.asarray(scales, dtype))

    def predicted(self, moments: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
        """Average expected observations, given each column's mean (n, c) and variance (n,)."""
        family = LIKELIHOODS[self.likelihood]
        if "num_classes" in self.parameters:
            ((mean, variance),) = moments
            return family.predicted(mean + self.offset, variance)
        by_column = zip(*moments, strict=True)
        means, variances = (np.stack(columns, axis=-1).reshape(self.offset.shape) for columns in by_column)
        return family.predicted(means + self.offset, variances, **self.parameters)


def refuse_foreign(names: Iterable[str], allowed: Iterable[str], likelihood: object) -> None:
    """Refuse parameters that a likelihood does not have."""
    if foreign := [name for name in names if name not in allowed]:
        description = "given as a function" if callable(likelihood) else repr(likelihood)
        raise ValueError(f"{listing(foreign)} must not be given where the likelihood is {description}; drop it.")


def _broadcast(name: str, value: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    """Return the value in float64, of the shape."""
    check_no_nan(name, value)
    array = np.asarray(value, float)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{name} must broadcast against the shape {shape}, but has {array.shape}.") from None
