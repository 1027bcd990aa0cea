"""Networks over many rows, a block of rows at a time: memory for a block's hidden units, not for all rows'."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_wide._blocks import in_row_blocks, take_rows
from numpyro_wide._checks import whole_number

# Hidden units of a block under "auto": 256 MB in float32.
AUTO_NUMBERS = 2**26


def by_row_blocks(network: Callable[[Array], Array], block_size: int | str | None = "auto") -> Callable:
    """Make a network compute a block of rows at a time, and hold the hidden units of one block only.

    Values and gradients are those of the network, but for rounding. The gradient computes each block once more instead
    of keeping its hidden units: a third more work, for memory that does not grow with rows · layers. Leave it out where
    rows are sharded over devices, which block by themselves.

    Args:
        network: function of inputs (n, ...) to (n, d), each row from its own row of inputs alone.
        block_size: number of rows at a time; "auto" for as many as keep the numbers computed on the way within 64
            million, found from the network's own operations; None for all at once.

    Returns:
        A function of the inputs.

    Raises:
        ValueError: for a block size that is neither of these.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.nn import by_row_blocks
        >>> network = by_row_blocks(lambda x: jnp.tanh(x @ jnp.ones((3, 2))), block_size=2)
        >>> network(jnp.ones((5, 3))).shape
        (5, 2)
    """
    if block_size not in (None, "auto"):
        if isinstance(block_size, str):
            raise ValueError(f'block_size must be a number of rows, "auto" or None, but got {block_size!r}.')
        block_size = whole_number("block_size", block_size)

    def blocked(x: Array) -> Array:
        x = jnp.asarray(x)
        if isinstance(block_size, str):
            size: int | None = max(1, AUTO_NUMBERS // _numbers_per_row(network, x))
        else:
            size = block_size
        return in_row_blocks(lambda start, size: network(take_rows(x, start, size)), x.shape[0], size)

    return blocked


def _numbers_per_row(network: Callable, x: Array) -> int:
    """Count the numbers that the network's operations give for one row: what two rows give more than one."""

    def numbers(num_rows: int) -> int:
        rows = jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype)
        return _sizes(jax.make_jaxpr(network)(rows).jaxpr)

    return max(1, numbers(2) - numbers(1))


def _sizes(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        inner = [value for value in equation.params.values() if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
        if inner:
            total += sum(_sizes(getattr(value, "jaxpr", value)) for value in inner)
        else:
            total += sum(variable.aval.size for variable in equation.outvars)
    return total
