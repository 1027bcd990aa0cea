"""Networks over many rows, a block of rows at a time: memory for a block's hidden units, not for all rows'."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import Array
from numpyro.primitives import apply_stack

from numpyro_wide._blocks import in_row_blocks, take_rows
from numpyro_wide._checks import whole_number
from numpyro_wide.linear_gaussian.internal import RowFeatures

# Hidden units of a block under "auto": 256 MB in float32.
AUTO_NUMBERS = 2**26


def by_row_blocks(
    network: Callable[[Array], Array], block_size: int | str | None = "auto", *, site: str | None = None
) -> Callable:
    """Make a network compute a block of rows at a time, and hold the hidden units of one block only.

    Values and gradients are those of the network, but for rounding. The gradient computes each block once more instead
    of keeping its hidden units: a third more work, for memory that does not grow with rows · layers. Leave it out where
    rows are sharded over devices, which block by themselves.

    Args:
        network: function of inputs (n, ...) to (n, d), each row from its own row of inputs alone.
        block_size: number of rows at a time; "auto" for as many as keep the numbers computed on the way within 64
            million, found from the network's own operations; None for all at once.
        site: name of a model's deterministic site, which the function records with what it returns. A model that is
            collapsed then never holds all features, nor their derivative: the readout is integrated out by sums over
            blocks. The features are to be used as ``features @ readout`` alone.

    Returns:
        A function of the inputs; with a ``site`` it gives features that are computed when they are multiplied.

    Raises:
        ValueError: for a block size that is neither of these; with a ``site``, if there are no rows, or the network
            gives no matrix.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.nn import by_row_blocks
        >>> network = by_row_blocks(lambda x: jnp.tanh(x @ jnp.ones((3, 2))), block_size=2)
        >>> network(jnp.ones((5, 3))).shape
        (5, 2)

        A model of one's own that says so:

        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro_wide import collapse_readout
        >>> def model(x, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 20]).to_event(2))
        ...     features = by_row_blocks(lambda x: jnp.tanh(x @ w), block_size=2, site="features")(x)
        ...     readout = numpyro.sample("readout", dist.Normal(0, 1).expand([20]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(features @ readout, 0.1).to_event(1), obs=y)
        >>> wrapped = collapse_readout(model, readout="readout", features="features", observed="y")
    """
    if block_size not in (None, "auto"):
        if isinstance(block_size, str):
            raise ValueError(f'block_size must be a number of rows, "auto" or None, but got {block_size!r}.')
        block_size = whole_number("block_size", block_size)

    def blocked(x: Array) -> Any:
        x = jnp.asarray(x)
        if isinstance(block_size, str):
            size: int | None = max(1, AUTO_NUMBERS // _numbers_per_row(network, x))
        else:
            size = block_size
        if site is not None and size is not None and size < x.shape[0]:
            return _recorded(site, RowFeatures.of(network, x, size))
        if site is not None:
            return numpyro.deterministic(site, network(x))
        return in_row_blocks(lambda start, size: network(take_rows(x, start, size)), x.shape[0], size)

    return blocked


def _recorded(site: str, features: RowFeatures) -> RowFeatures:
    """Record features as a deterministic site, by their function where a handler asks for it, and else as numbers."""
    # Numbers nobody reads cost nothing within jit; a handler that reads the function must not have them computed.
    # Without a name, since the site of that name is another message.
    asked = apply_stack({"type": "row_features", "site": site, "value": False, "cond_indep_stack": []})
    numpyro.deterministic(site, features if asked["value"] else features.dense())
    return features


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
