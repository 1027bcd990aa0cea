"""Distributions on sets of Lebesgue measure zero, each with a density on its own support."""

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints

from numpyro_wide._checks import as_floats
from numpyro_wide.distributions._supports import coordinates, is_close, linear_manifold


class SingularDistribution(dist.Distribution):
    """Distribution of vectors of size D that lives on a set of Lebesgue measure zero.

    ``log_prob`` and ``entropy`` refer to the natural measure of the support: counting measure for atoms,
    Lebesgue measure on the manifold for a line or a plane. ``quasi_kl`` compares such a distribution with
    a prior density.
    """

    def covariance_factor(self) -> tuple[Array, Array]:
        """Return F (..., D, r) and weights (..., r) with covariance F diag(weights) Fᵀ."""
        raise NotImplementedError

    def entropy(self) -> Array:
        """Compute the entropy with respect to the natural measure of the support, of shape ``batch_shape``."""
        raise NotImplementedError


def check_vector(name: str, value: Array, owner: str) -> None:
    """Refuse a value without an axis for the event."""
    if value.ndim < 1:
        raise ValueError(
            f"{owner} needs `{name}` of shape (..., D), got a scalar; pass jnp.atleast_1d({name}) for D = 1."
        )


class DegenerateNormal(SingularDistribution):
    r"""Normal distribution on a linear manifold: $b + A\,\mathrm{diag}(s)\,\epsilon$, ε ~ N(0, I_K).

    The density is taken on the manifold b + span(A). For orthonormal columns it is that of N(0, diag(s²))
    in the K coordinates (Hron 2018, Theorem 5 and Prop. 6); for any basis of full column rank it has the
    extra term $-\tfrac12\log\det A^TA$, so that it does not depend on how the manifold is parametrised.

    Args:
        loc: mean, a point of the manifold, (..., D).
        basis: directions of the manifold, (..., D, K) with K ≤ D, linearly independent columns.
        scale: standard deviation along each column, positive, (..., K).
        validate_args: whether NumPyro checks the parameters; None for its global setting.

    Raises:
        ValueError: if the shapes do not fit each other.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.distributions import DegenerateNormal
        >>> line = DegenerateNormal(jnp.zeros(2), jnp.array([[0.6], [0.8]]), jnp.array([2.0]))
        >>> line.event_shape, bool(line.support(line.sample(jax.random.key(0))))
        ((2,), True)
        >>> round(float(line.log_prob(jnp.array([0.6, 0.8]))), 3)
        -1.737
        >>> float(line.log_prob(jnp.array([1.0, 0.0])))  # off the line
        -inf
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "loc": constraints.real_vector,
        "basis": constraints.real_matrix,
        "scale": constraints.independent(constraints.positive, 1),
    }
    reparametrized_params: ClassVar[list[str]] = ["loc", "basis", "scale"]

    def __init__(self, loc: Any, basis: Any, scale: Any, *, validate_args: bool | None = None):
        loc, basis, scale = as_floats(loc, basis, scale, names=("loc", "basis", "scale"))
        check_vector("loc", loc, "DegenerateNormal")
        if basis.ndim < 2 or basis.shape[-2] != loc.shape[-1] or basis.shape[-1] > loc.shape[-1]:
            raise ValueError(
                f"DegenerateNormal needs `basis` of shape (..., D, K) with D = {loc.shape[-1]} as in `loc` "
                f"and K ≤ D, got {basis.shape}; for a line pass a column, direction[:, None]."
            )
        dim, rank = basis.shape[-2:]
        if scale.ndim and scale.shape[-1] not in (1, rank):
            raise ValueError(
                f"DegenerateNormal needs `scale` of shape (..., K) with K = {rank}, one for each column of "
                f"`basis`, got {scale.shape}."
            )
        scale_batch = scale.shape[:-1]
        batches = {"loc": loc.shape[:-1], "basis": basis.shape[:-2], "scale": scale_batch}
        try:
            batch_shape = jnp.broadcast_shapes(*batches.values())
        except ValueError as error:
            raise ValueError(
                f"DegenerateNormal needs batch axes of `loc`, `basis` and `scale` that broadcast, got {batches}; "
                "insert axes of length 1 where one holds for a whole batch."
            ) from error
        self.loc = jnp.broadcast_to(loc, (*batch_shape, dim))
        self.basis = jnp.broadcast_to(basis, (*batch_shape, dim, rank))
        self.scale = jnp.broadcast_to(scale, (*batch_shape, rank))
        super().__init__(batch_shape, (dim,), validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self) -> constraints.Constraint:
        """Manifold b + span(A)."""
        return linear_manifold(self.loc, self.basis)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw vectors of shape ``sample_shape + batch_shape + (D,)``; differentiable in every parameter."""
        shape = (*sample_shape, *self.batch_shape, self.scale.shape[-1])
        noise = jax.random.normal(key, shape, self.scale.dtype)
        return self.loc + jnp.einsum("...dk,...k->...d", self.basis, self.scale * noise)

    def _log_volume(self) -> Array:
        # log of the manifold's volume element, ½ log det AᵀA + Σ log s; it is Σ log s for orthonormal
        # columns.
        gram = jnp.swapaxes(self.basis, -1, -2) @ self.basis
        diagonal = jnp.diagonal(jnp.linalg.cholesky(gram), axis1=-2, axis2=-1)
        return jnp.sum(jnp.log(diagonal) + jnp.log(self.scale), -1)

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        """Evaluate the log density on the manifold, minus infinity off it."""
        position = coordinates(self.basis, value - self.loc)
        standard = position / self.scale
        rank = standard.shape[-1]
        log_density = -0.5 * jnp.sum(jnp.square(standard), -1) - 0.5 * rank * math.log(2 * math.pi) - self._log_volume()
        nearest = self.loc + jnp.einsum("...dk,...k->...d", self.basis, position)
        return jnp.where(is_close(value, nearest), log_density, -jnp.inf)

    def entropy(self) -> Array:
        """Compute the entropy with respect to Lebesgue measure on the manifold."""
        return 0.5 * self.scale.shape[-1] * (1.0 + math.log(2 * math.pi)) + self._log_volume()

    def covariance_factor(self) -> tuple[Array, Array]:
        """Return the basis and the squared scales."""
        return self.basis, jnp.square(self.scale)

    @property
    def mean(self) -> Array:
        """Mean, of shape ``batch_shape + (D,)``."""
        return self.loc

    @property
    def variance(self) -> Array:
        """Variance of each coordinate of R^D, of shape ``batch_shape + (D,)``."""
        return jnp.sum(jnp.square(self.basis * self.scale[..., None, :]), -1)
