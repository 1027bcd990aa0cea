"""Devices, threads of a CPU, and double precision."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from numpyro_wide._checks import whole_number

if TYPE_CHECKING:
    import threadpoolctl


def shard_rows(*arrays: ArrayLike, devices: Sequence[Any] | None = None, num_chains: int = 1) -> Any:
    r"""Spread the rows of inputs and targets over devices, for a model that runs on all of them.

    JAX then compiles the one program for all devices: each computes the features of its own rows, and only the Gram
    matrix $\Psi^\top \Psi$ (d, d), $\Psi^\top Y$ (d, k) and the gradient are summed over devices. The model needs no
    change; with d ≤ n, the "feature" variant is the one to use, which "auto" takes. Give the arrays to ``MCMC`` as
    arguments, with ``jit_model_args=True``, which keeps them from being copied into the program. With several processes
    (``jax.distributed``), each gives its own rows and all of them run the same program.

    With ``num_chains`` the devices are a grid of chains by shares of the rows: chains exchange nothing, and the sums of
    a chain are over the devices that share its rows. The kernels of this package spread their chains over the groups,
    with ``MCMC(..., num_chains=..., chain_method="vectorized")`` and a multiple of ``num_chains`` there.

    Args:
        *arrays: arrays with the rows along the leading axis, (n, ...); n must be a multiple of the number of devices
            that share the rows.
        devices: devices to spread the rows over; all of JAX's by default.
        num_chains: number of groups of devices, each of which holds all rows and runs chains of its own; must divide
            the number of devices of each process.

    Returns:
        The arrays, sharded: one array for one, a list for several.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import shard_rows
        >>> x, y = shard_rows(jnp.ones((8, 3)), jnp.ones(8))
        >>> x.shape, dict(x.sharding.mesh.shape)
        ((8, 3), {'rows': 1})

        On eight devices, four chains by two shares of the rows::

            x, y = shard_rows(x, y, num_chains=4)
            mcmc = MCMC(kernel, num_chains=4, chain_method="vectorized", jit_model_args=True, ...)
            mcmc.run(jax.random.key(0), x, y)
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
    # Devices of one process are neighbours: so each has chains of all groups, and rows of its own.
    grid = np.array(devices).reshape(-1, num_chains).T
    mesh = Mesh(grid[0], ("rows",)) if num_chains == 1 else Mesh(grid, ("chains", "rows"))
    sharding = NamedSharding(mesh, PartitionSpec("rows"))
    sharded = [jax.make_array_from_process_local_data(sharding, np.asarray(array)) for array in arrays]
    return sharded[0] if len(sharded) == 1 else sharded


def chains_sharding(num_chains: int, *trees: Any) -> NamedSharding | None:
    """Return how chains are spread over the devices that :func:`shard_rows` gave arrays to; None without groups."""
    shardings = [
        getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(trees) if not isinstance(leaf, jax.core.Tracer)
    ]
    for sharding in shardings:
        if isinstance(sharding, NamedSharding) and "chains" in sharding.mesh.shape:
            groups = sharding.mesh.shape["chains"]
            if num_chains % groups:
                raise ValueError(
                    f"the rows are sharded for {groups} groups of chains, but there are {num_chains} chains; run a "
                    f"multiple of {groups}."
                )
            return NamedSharding(sharding.mesh, PartitionSpec("chains"))
    return None


def set_blas_threads(num_threads: int) -> "threadpoolctl.threadpool_limits":
    """Limit the threads of the BLAS library that XLA's CPU backend calls; it has no effect on accelerators.

    XLA hands Cholesky factorisations, triangular solves and eigendecompositions to SciPy's OpenBLAS, whose threads
    compete with XLA's own. Up to a few thousand rows, one BLAS thread is the fastest.

    Args:
        num_threads: number of BLAS threads, at least 1.

    Returns:
        The limiter, a context manager that restores the previous numbers at its end.

    Example:
        >>> import numpyro_wide
        >>> limits = numpyro_wide.set_blas_threads(1)
        >>> limits.restore_original_limits()
    """
    num_threads = whole_number("num_threads", num_threads)
    # threadpoolctl limits the libraries that are loaded by now, and jaxlib loads SciPy's BLAS lazily.
    import scipy.linalg  # noqa: F401
    import threadpoolctl

    return threadpoolctl.threadpool_limits(limits=num_threads, user_api="blas")


def double_precision() -> Any:
    """Return a context in which JAX computes in float64."""
    return precision(True)


def precision(is_double: bool) -> Any:
    """Return a context in which JAX computes in float64, or in float32, whatever it is set to."""
    try:
        return jax.enable_x64(is_double)
    except AttributeError:  # jax < 0.8
        from jax.experimental import disable_x64, enable_x64

        return enable_x64() if is_double else disable_x64()
