"""Likelihoods of one function value a row, and of one a class: their logarithms, slopes and weights, in float64."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import expit

# Function values (q, n, c) at q nodes -> log density (q, n), its slope (q, n, c), and a weight (q, n).
Derivatives = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
_BATCH = 2**21  # function values at a time: bounds the memory of many nodes times many rows


class SiteLikelihood(NamedTuple):
    """The likelihood of n rows, of c function values each; terms that do not depend on these are left out.

    Attributes:
        start: function values to begin at, (n, c).
        derivatives: the weight is minus the second derivative, shared by the classes of a categorical, or what stands
            in for it where that may be negative.
    """

    start: np.ndarray
    derivatives: Derivatives

    def shifted(self, offset: np.ndarray) -> "SiteLikelihood":
        """The likelihood of function values less an offset, which broadcasts against (n, c)."""
        return SiteLikelihood(self.start - offset, lambda values: self.derivatives(values + offset))

    def expected(
        self, mean: np.ndarray, variance: np.ndarray, nodes: np.ndarray, shares: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Means of log density (n,), slope (n, c) and weight (n,) under independent normals.

        Args:
            mean: (n, c).
            variance: (n,).
            nodes: standard normals, (q, n, c), or (q, 1, 1) for the same in all rows.
            shares: of the nodes, (q,); they sum to one.
        """
        scale = np.sqrt(variance)[:, None]
        size = max(1, _BATCH // mean.size)
        totals: list[Any] = [0.0, 0.0, 0.0]
        for start in range(0, len(nodes), size):
            some = slice(start, start + size)
            found = self.derivatives(mean + scale * nodes[some])
            totals = [total + np.tensordot(shares[some], part, 1) for total, part in zip(totals, found, strict=True)]
        return totals[0], totals[1], totals[2]


def logistic(successes: np.ndarray, total: np.ndarray, start: np.ndarray, shift: np.ndarray) -> SiteLikelihood:
    """The density e^(y f) / (1 + e^(f − shift))^total: a binomial's, and with log r for shift, negative binomial's."""

    def derivatives(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        centred = values[..., 0] - shift
        log_density = successes * values[..., 0] - total * np.logaddexp(0.0, centred)
        slope = successes - total * expit(centred)
        return log_density, slope[..., None], total * expit(centred) * expit(-centred)

    return SiteLikelihood(start[:, None], derivatives)


def poisson(counts: np.ndarray) -> SiteLikelihood:
    """Counts, by the log of their rate."""

    def derivatives(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rate = np.exp(values[..., 0])
        return counts * values[..., 0] - rate, (counts - rate)[..., None], rate

    return SiteLikelihood(np.log(counts + 0.5)[:, None], derivatives)


def student_t(observed: np.ndarray, df: np.ndarray, scale: np.ndarray) -> SiteLikelihood:
    """Student's t about the function value.

    It is not log-concave. The weight is that of the normal whose log density touches this one's from below (that of the
    E-step for t as a scale mixture): positive, small for outliers, whose targets it keeps near what was observed.
    """

    def derivatives(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        residual = observed - values[..., 0]
        weight = (df + 1) / (df * scale**2 + residual**2)
        return -0.5 * (df + 1) * np.log1p((residual / scale) ** 2 / df), (weight * residual)[..., None], weight

    return SiteLikelihood(observed[:, None].copy(), derivatives)


def categorical(labels: np.ndarray, basis: np.ndarray, offset: np.ndarray) -> SiteLikelihood:
    """Softmax of k logits, with one weight for all c function values of a row: their mean curvature.

    Args:
        labels: (n,).
        basis: (k, c), orthonormal columns that span the logits up to a shift of all; these are the function values in
            that basis plus the offset.
        offset: (n, k).
    """
    codes = np.eye(len(basis))[labels]

    def derivatives(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        logits = values @ basis.T + offset
        logits -= logits.max(axis=-1, keepdims=True)
        probs = np.exp(logits)
        total = probs.sum(axis=-1, keepdims=True)
        probs /= total
        log_density = np.sum(codes * logits, axis=-1) - np.log(total[..., 0])
        # The trace of diag p − p pᵀ, which the basis leaves as it is.
        return log_density, (codes - probs) @ basis, (1 - np.sum(probs**2, axis=-1)) / basis.shape[1]

    return SiteLikelihood(np.zeros((len(labels), basis.shape[1])), derivatives)


def from_function(log_density: Callable[[Any, Any], Any], observed: np.ndarray) -> SiteLikelihood:
    """Whatever ``log_density(y, f)`` says of one row, a JAX function; JAX must be in double precision.

    Where that is not concave it counts as straight, with a weight of zero.
    """

    def one(y: jax.Array, f: jax.Array) -> jax.Array:
        value = jnp.asarray(log_density(y, f))
        if value.shape != ():
            raise ValueError(
                f"likelihood(y, f) must give a number for one observation and its function value, but gave an array of "
                f"shape {value.shape}; write it for single numbers, it is mapped over the rows."
            )
        return value

    def three(y: jax.Array, f: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        slope = jax.grad(one, argnums=1)
        return one(y, f), slope(y, f), -jax.grad(slope, argnums=1)(y, f)

    over_rows = jax.jit(jax.vmap(jax.vmap(three), in_axes=(None, 0)))

    def derivatives(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        value, slope, weight = map(np.asarray, over_rows(observed, values[..., 0]))
        return value, slope[..., None], np.maximum(weight, 0.0)

    return SiteLikelihood(np.zeros((len(observed), 1)), derivatives)
