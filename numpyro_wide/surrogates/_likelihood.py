"""Interface of a likelihood that a surrogate is fitted to: start, derivatives, and their averages over normals."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import check_no_nan, check_positive, is_known

# Log density (q, n), its slope (q, n, c) and the weight (q, n), at q nodes.
Derivatives = tuple[np.ndarray, np.ndarray, np.ndarray]
Nodes = tuple[np.ndarray, np.ndarray]  # standard normals and their weights
NUM_QUADRATURE = 32
_BATCH = 2**21  # function values at a time: bounds the memory of many nodes times many rows


def quadrature(num_nodes: int) -> Nodes:
    """Return the nodes and weights of Gauss and Hermite, (q, 1, 1) and (q,)."""
    nodes, shares = np.polynomial.hermite_e.hermegauss(num_nodes)
    return nodes[:, None, None], shares / np.sum(shares)


class Averages(NamedTuple):
    """Mean log likelihood and derivatives over normal function values.

    Attributes:
        value: mean log density, (n,).
        slope: mean slope, (n, c).
        weight: mean weight, (n,).
        matrices: minus the mean second derivatives, (n, c, c); None where the weight is all that is known.
    """

    value: np.ndarray
    slope: np.ndarray
    weight: np.ndarray
    matrices: np.ndarray | None = None


class Likelihood(ABC):
    """A likelihood of n rows, given c function values each, in float64.

    A likelihood with a name is one class, listed in ``LIKELIHOODS`` of :mod:`_likelihoods`. It says which
    ``parameters`` it has, and refuses those and the observations that cannot be; it implements ``start`` and
    ``derivatives``, usually by ``OneValue``; and it may have ``quick`` targets.

    Attributes:
        parameters: names of what has to be known besides the observations, keywords of ``fitted_surrogate``.
        predicted: function of means and variances of function values, offset included, and the parameters, to what
            one expects of observations: probabilities of classes, or mean and variance.
        quick: function ``(observed, noise_scale, **parameters)`` to quick targets and their noise scale, the
            likelihood's own where that is None; in JAX, so that it can be traced. None where there is none.
    """

    parameters: ClassVar[tuple[str, ...]] = ()
    predicted: ClassVar[Callable[..., Any]]
    quick: ClassVar[Callable[..., tuple[Array, Array]] | None] = None

    @classmethod
    def check_parameters(cls, given: dict[str, Any]) -> None:
        """Refuse parameters that the likelihood cannot have: those that are not positive, unless it says otherwise."""
        for name, value in given.items():
            check_no_nan(name, value)
            check_positive(name, value)

    @classmethod
    @abstractmethod
    def check_observed(cls, observed: Array | np.ndarray, parameters: dict[str, Any]) -> None:
        """Refuse observations that the likelihood cannot give, where their numbers are known already."""

    @property
    @abstractmethod
    def start(self) -> np.ndarray:
        """Function values to begin the fit at, (n, c)."""

    @property
    def constant(self) -> np.ndarray:
        """Terms of the log density that do not depend on the function values, (n,)."""
        return np.zeros(len(self.start))

    @abstractmethod
    def derivatives(self, values: np.ndarray) -> Derivatives:
        """Return log density, slope and weight at function values (q, n, c).

        The ``constant`` is left out of the first. The weight is minus the second derivative, the mean
        over the c function values of a row, or something positive in its place where that may be negative.
        """

    def expected(self, mean: np.ndarray, variance: np.ndarray, nodes: Nodes | None) -> Averages:
        """Average log density (n,), slope (n, c) and weight (n,) over independent normals.

        Args:
            mean: means of the function values, (n, c).
            variance: their variances, (n,), which those of a row share.
            nodes: standard normals, (q, n, c), or (q, 1, 1) for the same in all rows, and their weights, (q,), which
                sum to one; None for what the likelihood averages best by: a closed form, else Gauss and Hermite's.
        """
        normals, shares = quadrature(NUM_QUADRATURE) if nodes is None else nodes
        scale = np.sqrt(variance)[:, None]
        size = max(1, _BATCH // mean.size)
        totals: list[Any] = [0.0, 0.0, 0.0]
        for start in range(0, len(normals), size):
            some = slice(start, start + size)
            found = self.derivatives(mean + scale * normals[some])
            totals = [total + np.tensordot(shares[some], part, 1) for total, part in zip(totals, found, strict=True)]
        return Averages(*totals)


@dataclass(frozen=True)
class OneValue(Likelihood):
    """A likelihood of observations that have one function value each.

    Attributes:
        observed: observations, (n,).
        offset: what the function values have besides ``features @ readout``, (n,).
    """

    observed: np.ndarray
    offset: np.ndarray

    @property
    def start(self) -> np.ndarray:
        return (self.guess() - self.offset)[:, None]

    def derivatives(self, values: np.ndarray) -> Derivatives:
        value, slope, weight = self.along(values[..., 0] + self.offset)
        return value, slope[..., None], weight

    def guess(self) -> np.ndarray:
        """Return function values, offset included, at which a fit may begin, (n,)."""
        return np.zeros_like(self.observed)

    @abstractmethod
    def along(self, f: np.ndarray) -> Derivatives:
        """Return log density, slope and weight, (q, n) each, at function values with their offset, (q, n)."""


def check_whole(observed: Array | np.ndarray, likelihood: str, largest: ArrayLike) -> None:
    """Refuse observations that are not whole numbers from 0 to the largest, where they are known already.

    Args:
        observed: observations, of any shape.
        likelihood: its name, for the message.
        largest: a number, or one for each observation: the number of trials.

    Raises:
        ValueError: for anything else.
    """
    if not is_known(observed):
        return
    array = np.asarray(observed)
    if not np.all((array >= 0) & (array <= largest) & (array == np.round(array))):
        most = largest if np.ndim(largest) == 0 else f"total_count, at most {np.max(largest)}"
        raise ValueError(
            f"observations of a {likelihood} likelihood must be whole numbers from 0 to {most}, but they range from "
            f"{array.min()} to {array.max()}, or are not whole."
        )
