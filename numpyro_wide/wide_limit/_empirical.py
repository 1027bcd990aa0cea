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
    params: object,
    x1: ArrayLike,
    x2: ArrayLike | None = None,
    *,
    block_size: int | None = None,
    average_outputs: bool = False,
) -> Array:
    """Compute the tangent kernel J(x1) J(x2)ᵀ of any network, J its Jacobian (McNamara 2025, equation 4).

    At infinite width it is that of :func:`fcn_kernel` times the identity between outputs (Jacot 2018, Theorem 1).

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
    block_size = None if block_size is None else whole_number("block_size", block_size)
    x1, x2 = _as_array(x1), None if x2 is None else _as_array(x2)
    output = jax.eval_shape(f, params, x1)
    shape: tuple[int, ...] = getattr(output, "shape", ())
    if len(shape) not in (1, 2) or shape[0] != len(x1):
        raise ValueError(
            f"the network must return one row for each of the {len(x1)} rows of x, (n,) or (n, k), but gave {output}."
        )
    inputs2 = x1 if x2 is None else x2
    pattern = "ikp,jkp->ji" if average_outputs else "ikp,jlp->jikl"
    jacobian = jax.jacrev(lambda p, row: jnp.atleast_1d(f(p, row[None])[0]))

    def jacobians(x: Array) -> list[Array]:
        """Return (rows, k, size) by leaf of the parameters."""
        leaves = jax.tree.leaves(jax.vmap(jacobian, in_axes=(None, 0))(params, x))
        return [leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves]

    def rows(start: Array | int, size: int) -> Array:
        left = jacobians(take_rows(x1, start, size))

        def columns(start: Array | int, size: int) -> Array:
            is_shared = x2 is None and size == len(x1)
            right = left if is_shared else jacobians(take_rows(inputs2, start, size))
            terms = [jnp.einsum(pattern, *pair, precision="highest") for pair in zip(left, right, strict=True)]
            return sum(terms[1:], start=terms[0])

        return jnp.moveaxis(in_row_blocks(columns, len(inputs2), block_size), 1, 0)

    kernel = in_row_blocks(rows, len(x1), block_size)
    num_outputs = shape[1] if len(shape) == 2 else 1
    if average_outputs:
        return kernel / num_outputs
    return kernel[:, :, 0, 0] if len(shape) == 1 else kernel


def linearize(f: Network, params0: object) -> Network:
    """Linearise a network in its parameters.

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

    def f_lin(params: object, x: Array) -> Array:
        step = jax.tree.map(lambda new, old: jnp.subtract(new, old).astype(jnp.result_type(old)), params, params0)
        value, change = jax.jvp(lambda p: f(p, x), (params0,), (step,))
        return jax.tree.map(jnp.add, value, change)

    return f_lin


def _as_array(x: ArrayLike) -> Array:
    """Return an array of JAX, of a table or a list too."""
    return x if isinstance(x, Array) else jnp.asarray(np.asarray(x))
