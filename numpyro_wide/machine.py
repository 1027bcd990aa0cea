"""Devices, CPU threads, and double precision."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from numpyro_wide._checks import whole_number

if TYPE_CHECKING:
    import threadpoolctl


def shard_rows(
    *arrays: ArrayLike, devices: Sequence[jax.Device] | None = None, num_chains: int = 1
) -> jax.Array | list[jax.Array]:
    """Spread rows of inputs and targets over devices, for a model on all of them.

    Pass the arrays to ``MCMC`` as arguments, with ``jit_model_args=True``; for groups, with a multiple of
    ``num_chains`` chains and ``chain_method="vectorized"``. Each of several processes gives its own rows.

    Args:
        *arrays: arrays (n, ...), n a multiple of the number of devices that share the rows.
        devices: devices to use; all of JAX's by default.
        num_chains: number of groups of devices, each with all rows and its own chains.

    Returns:
        Sharded arrays: one array, or a list of several.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import shard_rows
        >>> x, y = shard_rows(jnp.ones((8, 3)), jnp.ones(8))
        >>> x.shape, dict(x.sharding.mesh.shape)
        ((8, 3), {'rows': 1})
    """
    devices = jax.devices() if devices is None else list(devices)
    shapes = [np.shape(array) for array in arrays]
    if len({shape[:1] for shape in shapes}) != 1 or () in shapes or not shapes[0][0]:
        raise ValueError(f"the arrays must have the same number of rows, at least one, but their shapes are {shapes}.")
    num_chains, rows = whole_number("num_chains", num_chains), shapes[0][0]
    num_local = len(devices) // jax.process_count()
    if num_local % num_chains:
        raise ValueError(f"num_chains must divide a process's number of devices, {num_local}, but is {num_chains}.")
    num_shares = num_local // num_chains
    if rows % num_shares:
        raise ValueError(f"{rows} rows cannot be shared out evenly to {num_shares} devices; leave some out.")
    # Devices of a process are neighbours: each has all groups and its own rows.
    grid = np.array(devices).reshape(-1, num_chains).T
    mesh = Mesh(grid[0], ("rows",)) if num_chains == 1 else Mesh(grid, ("chains", "rows"))
    sharding = NamedSharding(mesh, PartitionSpec("rows"))
    sharded = [jax.make_array_from_process_local_data(sharding, np.asarray(array)) for array in arrays]
    return sharded[0] if len(sharded) == 1 else sharded


def chains_sharding(num_chains: int, *trees: object) -> NamedSharding | None:
    """Return the sharding of chains over the groups of :func:`shard_rows`; None without groups."""
    shardings = [
        getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(trees) if not isinstance(leaf, jax.core.Tracer)
    ]
    for sharding in shardings:
        if isinstance(sharding, NamedSharding) and "chains" in sharding.mesh.shape:
            num_groups = sharding.mesh.shape["chains"]
            if num_chains % num_groups:
                raise ValueError(
                    f"the rows are sharded for {num_groups} groups of chains, but there are {num_chains} chains; run a "
                    f"multiple of {num_groups}."
                )
            return NamedSharding(sharding.mesh, PartitionSpec("chains"))
    return None


def set_blas_threads(num_threads: int) -> "threadpoolctl.threadpool_limits":
    """Limit the threads of the BLAS library of XLA's CPU backend.

    BLAS threads compete with XLA's own: one is the fastest, up to a few thousand rows.

    Args:
        num_threads: number of BLAS threads, at least 1.

    Returns:
        Limiter, a context manager that restores the previous numbers.

    Example:
        >>> import numpyro_wide
        >>> limits = numpyro_wide.set_blas_threads(1)
        >>> limits.restore_original_limits()
    """
    num_threads = whole_number("num_threads", num_threads)
    # threadpoolctl needs SciPy's BLAS loaded, which jaxlib does lazily.
    import scipy.linalg  # noqa: F401
    import threadpoolctl

    return threadpoolctl.threadpool_limits(limits=num_threads, user_api="blas")


def double_precision() -> AbstractContextManager[object]:
    """Return a context of JAX computations in float64."""
    return precision(True)


def precision(is_double: bool) -> AbstractContextManager[object]:
    """Return a context of JAX computations in float64 or float32."""
    try:
        return jax.enable_x64(is_double)
    except AttributeError:  # jax < 0.8
        from jax.experimental import disable_x64, enable_x64

        return enable_x64() if is_double else disable_x64()
