"""A diagonal mass, learnt from the variances of the draws."""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.infer.hmc_util import build_adaptation_schedule, welford_covariance

from numpyro_wide.mcmc._point import Point, PyTree


class Mass(NamedTuple):
    """A diagonal mass, and what a window of warmup has seen of the one that will follow it.

    Attributes:
        scale: square root of the inverse of the mass, a pytree like the position.
        variance: state of NumPyro's form of Welford's recursion.
    """

    scale: PyTree
    variance: tuple[Any, ...]

    @classmethod
    def start(cls, z: PyTree, scale: PyTree = None) -> Self:
        """Return the mass that ``scale`` stands for, or else the identity, with nothing seen."""
        scale = jax.tree.map(jnp.ones_like, z) if scale is None else scale
        return cls(scale, welford_covariance()[0](ravel_pytree(z)[0].size))

    def count_draw(self, point: Point) -> Self:
        """Add one draw."""
        return self._replace(variance=welford_covariance()[1](point.z, self.variance))

    def close(self, draw_length: Array) -> Self:
        """Return the mass that the window measured, with nothing seen."""
        start, _, finish = welford_covariance()
        inverse_root = finish(self.variance, regularize=True)[2]
        return type(self)(ravel_pytree(self.scale)[1](inverse_root), start(inverse_root.size))


def mass_windows(num_warmup: int) -> list[int]:
    """Return the boundaries of the windows in which a warmup learns the mass: NumPyro's, that is Stan's."""
    windows = build_adaptation_schedule(num_warmup)[1:-1]
    return [window.start for window in windows[:1]] + [window.end + 1 for window in windows]


def given_scale(z: PyTree, inverse_mass_matrix: Array | None) -> PyTree:
    """Return the square root of a diagonal of the inverse mass as a pytree like ``z``; None for None."""
    if inverse_mass_matrix is None:
        return None
    flat, unravel = ravel_pytree(z)
    variances = jnp.asarray(inverse_mass_matrix, flat.dtype)
    if variances.shape != flat.shape:
        raise ValueError(
            f"inverse_mass_matrix must be a diagonal of shape {flat.shape}, one number a latent, "
            f"but has shape {variances.shape}."
        )
    return unravel(jnp.sqrt(variances))
