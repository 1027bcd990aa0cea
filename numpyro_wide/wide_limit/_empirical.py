"""Empirical tangent kernels, and linearised networks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._blocks import in_row_blocks, take_rows
from numpyro_wide._checks import whole_number

# (params, x) -> outputs, row by row.
Network = Callable[[Any, Array], Array]


def empirical_ntk(
    f: Network,
    params: Any,
    x1: ArrayLike,
    x2: ArrayLike | None = None,
    *,
    block_size: int | None = None,
    average_outputs: bool = False,
) -> Array:
    """Compute the tangent kernel J(x1) J(x2)ᵀ of any network, J its Jacobian (McNamara 2025, equation 4).

    In the NTK parametrisation it converges to the second kernel of :func:`fcn_kernel`, times the identity between
    outputs (Jacot 2018, Theorem 1).

    Args:
        f: network, f(params, x) -> (n,) or (n, k), row by row; of a flax linen module its ``apply``.
        params: pytree of floating arrays.
        x1: inputs, (n1, ...).
        x2: other inputs, (n2, ...); None for x1.
        block_size: rows of x1, and of x2, whose Jacobians are held at a time; None for all at once.
        average_outputs: whether to average the kernel of an output with itself over outputs, (n1, n2).

    Returns:
        kernel matrix, (n1, n2) if the network returns (n,), else (n1, n2, k, k) with the outputs at x1 and x2 last.

    Example:
        >>> import jax.numpy as jnp
        >>> f = lambda params, x: jnp.tanh(x @ params["w"])
        >>> empirical_ntk(f, {"w": jnp.ones((3, 2))}, jnp.ones((4, 3)), jnp.zeros((5, 3))).shape
        (4, 5, 2, 2)
    """
    _check_params(params)
    block_size = None if block_size is None else whole_number("block_size", block_size)
    x1, x2 = _check_rows(f, params, x1, x2)
    jacobian = jax.jacrev(lambda p, row: jnp.atleast_1d(f(p, row[None])[0]))

    def jacobians(x: Array) -> list[Array]:
        """Return (rows, k, size of the leaf) for each leaf of the parameters."""
        leaves = jax.tree.leaves(jax.vmap(jacobian, in_axes=(None, 0))(params, x))
        return [leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves]

    def contract(rows: list[Array], columns: list[Array]) -> Array:
        pattern = "ikp,jkp->ij" if average_outputs else "ikp,jlp->ijkl"
        terms = [jnp.einsum(pattern, r, c, precision="highest") for r, c in zip(rows, columns, strict=True)]
        return sum(terms[1:], start=terms[0]) / (rows[0].shape[1] if average_outputs else 1)

    kernel = _pairwise(jacobians, contract, x1, x2, block_size)
    if not average_outputs and jax.eval_shape(f, params, x1).ndim == 1:
        return kernel[:, :, 0, 0]
    return kernel


def linearize(f: Network, params0: Any) -> Network:
    """Expand a network in its parameters to first order (Taylor): its linearised twin.

    f_lin(params, x) = f(params0, x) + J(x) (params − params0) (McNamara 2025, Section 5; Lee 2019, eq. 5).

    Args:
        f: network, f(params, x) -> any pytree of arrays.
        params0: parameters to expand at, a pytree of floating arrays.

    Returns:
        ``f_lin(params, x)``.

    Example:
        >>> import jax.numpy as jnp
        >>> f_lin = linearize(lambda params, x: jnp.sin(params * x), jnp.array(0.0))
        >>> bool(jnp.allclose(f_lin(jnp.array(3.0), jnp.arange(4.0)), 3 * jnp.arange(4.0)))
        True
    """
    _check_params(params0)

    def f_lin(params: Any, x: Any) -> Any:
        """Evaluate the expansion at ``params`` for the inputs ``x``."""
        step = jax.tree.map(lambda new, old: jnp.subtract(new, old).astype(jnp.result_type(old)), params, params0)
        value, change = jax.jvp(lambda p: f(p, x), (params0,), (step,))
        return jax.tree.map(jnp.add, value, change)

    return f_lin


def _pairwise(
    embed: Callable[[Array], Any],
    contract: Callable[[Any, Any], Array],
    x1: Array,
    x2: Array | None,
    block_size: int | None,
) -> Array:
    """Combine the embeddings of all pairs of rows, (n1, n2, ...), in blocks."""
    others = x1 if x2 is None else x2

    def rows(start: Array | int, size: int) -> Array:
        left = embed(take_rows(x1, start, size))

        def columns(start: Array | int, size: int) -> Array:
            shared = x2 is None and size == x1.shape[0]
            right = left if shared else embed(take_rows(others, start, size))
            return jnp.moveaxis(contract(left, right), 1, 0)

        return jnp.moveaxis(in_row_blocks(columns, others.shape[0], block_size), 1, 0)

    return in_row_blocks(rows, x1.shape[0], block_size)


def _check_params(params: Any) -> None:
    """Refuse parameters that are not a tree of floating arrays."""
    leaves = jax.tree.leaves(params)
    if not leaves or not all(jnp.issubdtype(jnp.result_type(leaf), jnp.floating) for leaf in leaves):
        dtypes = sorted({str(jnp.result_type(leaf)) for leaf in leaves})
        raise ValueError(
            f"the parameters must be a pytree of floating arrays, but got dtypes {dtypes}; close over constants."
        )


def _check_rows(f: Network, params: Any, x1: ArrayLike, x2: ArrayLike | None) -> tuple[Array, Array | None]:
    """Return the inputs as arrays, after checks of shapes and outputs."""
    x1, x2 = _as_array(x1), None if x2 is None else _as_array(x2)
    if x2 is not None and x1.shape[1:] != x2.shape[1:]:
        raise ValueError(f"the rows of x1 and x2 must have the same shape, but got {x1.shape} and {x2.shape}.")
    output = jax.eval_shape(f, params, x1)
    if not hasattr(output, "shape") or output.ndim not in (1, 2) or output.shape[0] != x1.shape[0]:
        got = output.shape if hasattr(output, "shape") else jax.tree.structure(output)
        raise ValueError(
            f"the network must return one row for each of the {x1.shape[0]} rows of x, (n,) or (n, k), "
            f"but returned {got}."
        )
    return x1, x2


def _as_array(x: ArrayLike) -> Array:
    """Return an array of JAX, of a table or a list too."""
    return x if isinstance(x, Array) else jnp.asarray(np.asarray(x))
