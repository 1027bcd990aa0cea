"""Slices through three modes of a log posterior, along great circles (Hron 2022, Fig. 5)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from numpyro.distributions import biject_to
from numpyro.infer.util import potential_energy

from numpyro_wide._checks import listing, whole_number
from numpyro_wide._traces import latent_sites, run_model
from numpyro_wide.readout._model import readout_of
from numpyro_wide.readout._repriorise import base_transforms

Draw = Mapping[str, ArrayLike]


class PosteriorSlice(NamedTuple):
    """Log density on a slice through three points.

    Attributes:
        angles: coordinates of the grid, in radians from the first point along both axes, (resolution,) each.
        log_density: log density on the grid up to the posterior's constant, (resolution, resolution), rows along the
            second axis.
        points: coordinates of the three points, (3, 2).
        at_points: log density at the points, (3,).
    """

    angles: tuple[np.ndarray, np.ndarray]
    log_density: np.ndarray
    points: np.ndarray
    at_points: np.ndarray


def posterior_slice(
    model: Callable,
    points: Sequence[Draw],
    *model_args: Any,
    resolution: int = 41,
    margin: float = 0.35,
    batch_size: int = 1,
    **model_kwargs: Any,
) -> PosteriorSlice:
    r"""Compute the log posterior on the two-dimensional slice through three settings of the weights.

    Directions are interpolated spherically, so that points between two draws of a high-dimensional Gaussian are as far
    from the origin as they are, and norms linearly (Hron 2022, Fig. 5). The slice's coordinates are angles
    from the first point along great circles: straight lines through it are spherical interpolations.

    The points are weights $\theta$ for every model. Where it is repriorised, the slice is one in $\phi$: the points
    are mapped by $T^{-1}$, and the density is that of $\phi$. Sites with bounded support are taken in NumPyro's
    unconstrained coordinates, with the density there.

    Args:
        model: a model, repriorised or not.
        points: three draws, dictionaries of all latent sites with the readout in weights.
        *model_args: arguments of the model, observations included.
        resolution: number of grid points along each axis.
        margin: distance that the slice reaches beyond the points, as a share of their extent.
        batch_size: number of grid points that are evaluated at once.
        **model_kwargs: keyword arguments of the model.

    Returns:
        A :class:`PosteriorSlice`, for :func:`~numpyro_wide.plots.plot_posterior_slice`.

    Raises:
        ValueError: if there are not three points, they lack a site, or they lie on one great circle.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_wide.diagnostics import posterior_slice
        >>> from numpyro_wide.plots import plot_posterior_slice
        >>> def model(y):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([30]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(w[:3], 0.1).to_event(1), obs=y)
        >>> points = [{"w": point} for point in jax.random.normal(jax.random.key(0), (3, 30))]
        >>> found = posterior_slice(model, points, jnp.ones(3), resolution=5)
        >>> found.log_density.shape, plot_posterior_slice(found).get_xlabel()
        ((5, 5), 'angle towards the second mode, radians')
    """
    resolution, batch_size = whole_number("resolution", resolution, 2), whole_number("batch_size", batch_size)
    if len(points) != 3:
        raise ValueError(f"a slice goes through three points, but got {len(points)}.")
    raveled = [ravel_pytree(_coordinates(model, point, model_args, model_kwargs)) for point in points]
    unravel = raveled[0][1]
    interpolate, places = _great_circles([np.asarray(flat, dtype=float) for flat, _ in raveled])
    reach = margin * np.ptp(places, axis=0).max()
    axes = [np.linspace(axis.min() - reach, axis.max() + reach, resolution) for axis in places.T]
    grid = jnp.asarray(np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, 2))

    def log_posterior(angles: Array) -> Array:
        return -potential_energy(model, model_args, model_kwargs, unravel(interpolate(angles)))

    log_posteriors = jax.jit(partial(jax.lax.map, log_posterior, batch_size=batch_size))
    found = np.asarray(log_posteriors(jnp.concatenate([jnp.asarray(places), grid])))
    return PosteriorSlice((axes[0], axes[1]), found[3:].reshape(resolution, resolution), places, found[:3])


def _coordinates(model: Callable, point: Draw, args: tuple, kwargs: dict[str, Any]) -> dict[str, Array]:
    """Return unconstrained values of the latent sites at these weights, φ instead of a repriorised readout."""
    values = {}
    latent = latent_sites(run_model(model, args, kwargs, values=point))
    maps = base_transforms(latent)
    for name, site in latent.items():
        transform = maps.get(name) or biject_to(site["fn"].support)
        given = readout_of(name) if name in maps else name
        if given not in point:
            raise ValueError(f"a point must hold all latent sites, but {given!r} is missing; it has {listing(point)}.")
        values[name] = transform.inv(jnp.asarray(point[given]))
    return values


def _great_circles(points: Sequence[np.ndarray]) -> tuple[Callable[[Array], Array], np.ndarray]:
    """Return the map from angles (2,) to a point of the slice, and the coordinates of the three points, (3, 2)."""
    norms = np.array([np.linalg.norm(point) for point in points])
    first, *others = [point / norm for point, norm in zip(points, norms, strict=True)]
    tangents = [_towards(first, other) for other in others]
    basis = np.linalg.qr(np.stack(tangents, axis=1))[0]
    basis *= np.sign([basis[:, 0] @ tangents[0], basis[:, 1] @ tangents[1]])
    places = np.concatenate([np.zeros((1, 2)), np.stack(tangents) @ basis])
    if not abs(places[2, 1]) > 1e-4 or not places[1, 0] > 1e-4:
        raise ValueError("the three points lie on one great circle through the origin; take points that do not.")
    slope = np.linalg.solve(places[1:], norms[1:] - norms[0])
    origin, frame, norm_slope = jnp.asarray(first), jnp.asarray(basis), jnp.asarray(slope)

    def interpolate(angles: Array) -> Array:
        angle = jnp.sqrt(jnp.sum(angles**2))
        direction = jnp.cos(angle) * origin + jnp.sinc(angle / jnp.pi) * (frame @ angles)
        return (norms[0] + norm_slope @ angles) * direction

    return interpolate, places


def _towards(first: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the tangent at a unit vector of the great circle to another one, as long as the angle between them."""
    cosine = np.clip(first @ other, -1.0, 1.0)
    across = other - cosine * first
    length = np.linalg.norm(across)
    return np.arctan2(length, cosine) * across / max(length, np.finfo(float).tiny)
