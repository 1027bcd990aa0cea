"""Control over the threads of the BLAS that XLA calls on the CPU."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threadpoolctl


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
        ValueError: if ``num_threads`` is not a positive integer.

    Example:
        >>> import numpyro_wide
        >>> limits = numpyro_wide.set_blas_threads(1)
        >>> limits.restore_original_limits()
    """
    if not isinstance(num_threads, int) or num_threads < 1:
        raise ValueError(f"num_threads must be a positive integer, but got {num_threads!r}.")
    # threadpoolctl limits the libraries that are loaded by now, and jaxlib loads SciPy's BLAS lazily.
    import scipy.linalg  # noqa: F401
    import threadpoolctl

    return threadpoolctl.threadpool_limits(limits=num_threads, user_api="blas")
