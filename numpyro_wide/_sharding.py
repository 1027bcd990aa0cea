"""Data over several devices."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike


def shard_rows(*arrays: ArrayLike, devices: Sequence[Any] | None = None) -> Any:
    r"""Spread the rows of inputs and targets over devices, for a model that runs on all of them.

    JAX then compiles the one program for all devices: each computes the features of its own rows, and only the Gram
    matrix $\Psi^\top \Psi$ (d, d), $\Psi^\top Y$ (d, k) and the gradient are summed over devices. The model needs no
    change; with d ≤ n, the "feature" variant is the one to use, which "auto" takes. Give the arrays to ``MCMC`` as
    arguments, with ``jit_model_args=True``, which keeps them from being copied into the program.

    With several processes (``jax.distributed``), each gives its own rows and all of them run the same program.

    Args:
        *arrays: rows along the leading axis, (n, ...); n must be a multiple of the number of devices.
        devices: all of JAX's by default.

    Returns:
        The arrays, sharded: one array for one, a list for several.

    Raises:
        ValueError: if the rows cannot be shared out evenly, or arrays differ in their numbers of rows.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import shard_rows
        >>> x, y = shard_rows(jnp.ones((8, 3)), jnp.ones(8))
        >>> x.shape, dict(x.sharding.mesh.shape)
        ((8, 3), {'rows': 1})
    """
    devices = jax.devices() if devices is None else list(devices)
    shapes = [np.shape(array) for array in arrays]
    if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
        raise ValueError(f"the arrays must have the same number of rows, but their shapes are {shapes}.")
    rows = shapes[0][0]
    num_shares = len(devices) // jax.process_count()
    if rows % num_shares:
        raise ValueError(
            f"{rows} rows cannot be shared out evenly to {num_shares} devices; leave out {rows % num_shares} of them."
        )
    sharding = NamedSharding(Mesh(np.array(devices), ("rows",)), PartitionSpec("rows"))
    sharded = [jax.make_array_from_process_local_data(sharding, np.asarray(array)) for array in arrays]
    return sharded[0] if len(sharded) == 1 else sharded
