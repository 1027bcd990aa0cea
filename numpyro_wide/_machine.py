"""The machine that everything runs on: threads of a CPU, a jaxlib that stands still on them, several devices."""

import os
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jaxlib
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from numpyro_wide._checks import whole_number

if TYPE_CHECKING:
    import threadpoolctl

# The releases of jaxlib that stand still, from the first up to, not including, the second: of all from 0.7.0 to
# 0.12.0.1, these alone did where four batched Cholesky factorisations in one program met two cores.
STANDSTILL_FROM, STANDSTILL_UNTIL = (0, 10, 0), (0, 11, 1)
# Sixteen batched calls stood still on 8 threads and came back on 16.
ENOUGH_THREADS = 32


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


def set_blas_threads(num_threads: int) -> "threadpoolctl.threadpool_limits":
    """Limit the threads of the BLAS library that XLA's CPU backend calls.

    XLA hands Cholesky factorisations, triangular solves and eigendecompositions to SciPy's OpenBLAS,
    whose threads compete with XLA's own. Up to a few thousand rows, one BLAS thread is the fastest.
    Has no effect on accelerators.

    Args:
        num_threads: number of BLAS threads, at least 1.

    Returns:
        The limiter. The limit holds from the call on; used as a context manager, the limiter
        restores the previous numbers at its end.

    Raises:
        ValueError: if ``num_threads`` is not a positive whole number.

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


def standstill_warning(version: str, num_threads: int) -> str | None:
    """What to tell users whose jaxlib may wait for ever on a CPU.

    jaxlib 0.10.0 to 0.11.0 runs each batched LAPACK call on a thread of XLA's pool, and has it wait there for others of
    the same pool: as many calls at a time as the pool has threads wait for each other for ever.

    Args:
        version: jaxlib's version.
        num_threads: number of threads in XLA's pool.

    Returns:
        The message, with the remedy; None if there is nothing to tell.
    """
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if num_threads >= ENOUGH_THREADS or not STANDSTILL_FROM <= release < STANDSTILL_UNTIL:
        return None
    return (
        f"jaxlib {version} can stand still for ever on a CPU with few cores (here XLA's pool has {num_threads} "
        "threads), where a program factorises several batches of matrices at a time, as vectorised chains and "
        "predictions over many draws do. Install another jaxlib: pip install 'jax!=0.10.*,!=0.11.0' "
        f"'jaxlib!=0.10.*,!=0.11.0'; or set the environment variable NPROC={ENOUGH_THREADS} before Python starts, "
        "which gives the pool that many threads."
    )


def warn_of_standstill() -> None:
    """Warn whoever imports the package if the installed jaxlib may stand still on this machine."""
    message = standstill_warning(jaxlib.__version__, _num_pool_threads())
    if message is not None:
        warnings.warn(message, stacklevel=3)


def _num_pool_threads() -> int:
    """Number of threads that XLA's pool will have: what NPROC says, or the cores that this process may use."""
    given = os.environ.get("NPROC", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def double_precision() -> Any:
    """A context in which JAX computes in float64, whatever it is set to."""
    try:
        return jax.enable_x64(True)
    except AttributeError:  # jax < 0.8
        from jax.experimental import enable_x64

        return enable_x64()
