"""Groups of named arrays, and their assembly as ArviZ's data."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro
from jax.typing import ArrayLike

from numpyro_wide._arviz import from_datasets
from numpyro_wide._checks import listing


class Group(NamedTuple):
    """One group of ArviZ's data.

    Attributes:
        values: arrays by name, with the axes of ``sample_dims`` in front.
        dims: names of the dimensions after ``sample_dims`` by name of the array, None where there is no name.
        coords: coordinates by name of the dimension.
        sample_dims: names of the leading dimensions that all arrays share.
    """

    values: Mapping[str, ArrayLike]
    dims: Mapping[str, Sequence[str | None]]
    coords: Mapping[str, Sequence] | None = None
    sample_dims: tuple[str, ...] = ("chain", "draw")


def assemble(groups: Mapping[str, Group]) -> Any:
    """Assemble an ``InferenceData``, or with ArviZ 1.x a ``DataTree``.

    Args:
        groups: groups by name.

    Returns:
        The data, with each group as a data set of its own.

    Raises:
        ValueError: if dimensions do not fit an array, coordinates belong to no dimension, or two names differ
            in "/" and "." alone.
    """
    datasets = {name: _dataset(group) for name, group in groups.items()}
    known = {str(dim) for dataset in datasets.values() for dim in dataset.dims}
    unknown = {dim for group in groups.values() for dim in group.coords or {} if dim not in known}
    if unknown:
        raise ValueError(
            f"coords names {listing(sorted(unknown))}, which is no dimension; the dimensions are "
            f"{listing(sorted(known))}."
        )
    return from_datasets(datasets)


def _dataset(group: Group) -> Any:
    import xarray as xr  # as heavy as ArviZ, which brings it

    variables: dict[str, tuple[list[str], np.ndarray]] = {}
    for site, value in group.values.items():
        array = np.asarray(jax.device_get(value))
        name = _without_slash(site)
        if name in variables:
            raise ValueError(
                f"the name {site!r} is written {name!r} for ArviZ, which another site is called; rename it."
            )
        variables[name] = (_dimensions(site, name, array, group), array)
    coords = dict(group.coords or {})
    sizes = {dim: size for dims, array in variables.values() for dim, size in zip(dims, array.shape, strict=True)}
    coordinates = {dim: coords.get(dim, np.arange(size)) for dim, size in sizes.items()}
    attributes = {"inference_library": "numpyro", "inference_library_version": numpyro.__version__}
    return xr.Dataset(variables, coordinates, attributes)


def _dimensions(site: str, name: str, array: np.ndarray, group: Group) -> list[str]:
    num_own = array.ndim - len(group.sample_dims)
    given = group.dims.get(site, [None] * num_own)
    if len(given) != num_own:
        raise ValueError(
            f"dims names {len(given)} dimensions of site {site!r}, {given}, but it has {num_own} after those for "
            f"chains and draws: its shape is {array.shape}."
        )
    own = [f"{name}_dim_{i}" if dim is None else _without_slash(dim) for i, dim in enumerate(given)]
    return [*group.sample_dims, *own]


def _without_slash(name: str) -> str:
    return name.replace("/", ".")
