"""Slices through three modes of a log posterior, along great circles (Hron 2022, Fig. 5), and their figure."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import potential_energy


class PosteriorSlice(NamedTuple):
    """Log density, (resolution, resolution), on a grid of angles, and at the three points, (3, 2)."""

    angles: tuple[np.ndarray, np.ndarray]
    log_density: np.ndarray
    points: np.ndarray
    at_points: np.ndarray


def posterior_slice(model, points, *args, resolution=41, margin=0.35, batch_size=1):
    """Compute the log posterior on the slice through three settings of the weights.

    Directions are interpolated spherically and norms linearly, so that points between two draws of a high-dimensional
    Gaussian are as far from the origin as they are. Coordinates are angles from the first point along great circles.
    The points are weights; a repriorised model's slice is one in its base site, with the density there.
    """
    raveled = [ravel_pytree(_coordinates(model, point, args)) for point in points]
    unravel = raveled[0][1]
    interpolate, places = _great_circles([np.asarray(flat, dtype=float) for flat, _ in raveled])
    reach = margin * np.ptp(places, axis=0).max()
    axes = [np.linspace(axis.min() - reach, axis.max() + reach, resolution) for axis in places.T]
    grid = jnp.asarray(np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, 2))

    def log_posterior(angles):
        return -potential_energy(model, args, {}, unravel(interpolate(angles)))

    log_posteriors = jax.jit(partial(jax.lax.map, log_posterior, batch_size=batch_size))
    found = np.asarray(log_posteriors(jnp.concatenate([jnp.asarray(places), grid])))
    return PosteriorSlice((axes[0], axes[1]), found[3:].reshape(resolution, resolution), places, found[:3])


def _coordinates(model, point, args):
    """Return unconstrained values of the latent sites at these weights, those of the base site for its readout."""
    hidden = {name: value for name, value in point.items() if name != getattr(model, "readout", None)}
    sites = handlers.trace(handlers.seed(handlers.substitute(model, hidden), 0)).get_trace(*args)
    latent = {name: site["fn"] for name, site in sites.items() if site["type"] == "sample" and not site["is_observed"]}
    values = {}
    for name, fn in latent.items():
        if name in point:
            values[name] = biject_to(fn.support).inv(jnp.asarray(point[name]))
        else:  # a base site, whose distribution is the readout's prior, pulled back by the inverse of the map
            values[name] = fn.transforms[-1](jnp.asarray(point[name.removesuffix("_base")]))
    return values


def _great_circles(points: Sequence[np.ndarray]) -> tuple[Callable, np.ndarray]:
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

    def interpolate(angles: jax.Array) -> jax.Array:
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


def plot_posterior_slice(slice_: PosteriorSlice, depth: float, ax: Any) -> None:
    """Draw contours of the log posterior below its highest value on the slice, down to ``depth`` nats."""
    highest = max(np.nanmax(slice_.log_density), np.max(slice_.at_points))
    relative = slice_.log_density - highest
    levels = np.linspace(-depth, 0, 21)
    ax.contourf(*slice_.angles, relative, levels=levels, cmap="viridis", extend="min")
    ax.plot(*slice_.points.T, "o", color="white", markeredgecolor="black", markersize=6, label="modes")
    ax.set_aspect("equal")
