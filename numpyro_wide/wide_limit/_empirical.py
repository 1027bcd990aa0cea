"""Empirical tangent kernels, and training in the tangent space."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._blocks import in_row_blocks, take_rows
from numpyro_wide._checks import as_floats, check_no_nan, check_not_negative, whole_number
from numpyro_wide.wide_limit._flow_operator import flow_operator
from numpyro_wide.wide_limit._layer_kernels import check_shape, check_symmetric, check_targets

# (params, x) -> outputs, row by row: the rows of x must not influence each other.
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

    In the NTK parametrisation it converges to the second kernel of :func:`fcn_kernel` as the width grows,
    with an error of order 1/√width (Jacot 2018, Theorem 1), times the identity between outputs.

    Args:
        f: network, f(params, x) -> (n,) or (n, k); each row depends on its own row of x alone. For a flax
            linen module, its ``apply``.
        params: pytree of floating arrays.
        x1: inputs, rows along the leading axis, (n1, ...).
        x2: other inputs, (n2, ...); None for x1.
        block_size: rows of x1, and of x2, whose Jacobians are held at a time: memory is 2 · block_size · k
            numbers for each parameter. The Jacobians of x2 are recomputed for each block of x1. None for
            all at once.
        average_outputs: whether to return the mean over outputs of the kernel of an output with itself, (n1, n2), the
            estimate of the limit that uses all outputs.

    Returns:
        kernel matrix, (n1, n2) if the network returns (n,), else (n1, n2, k, k) with the outputs at x1 and x2 last.

    Raises:
        ValueError: if f returns another shape, params holds other than floating arrays, the inputs' rows
            differ in shape, or block_size is not positive.

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

    f_lin(params, x) = f(params0, x) + J(x) (params − params0), as in McNamara 2025, Section 5, and Lee 2019,
    eq. 5. Linear in the parameters, it has the same tangent kernel everywhere, that of f at ``params0``.

    Args:
        f: network, f(params, x) -> any pytree of arrays.
        params0: parameters to expand at, a pytree of floating arrays.

    Returns:
        ``f_lin(params, x)``, with parameters of the structure of ``params0`` and outputs of the structure of f's.

    Raises:
        ValueError: if ``params0`` holds other than floating arrays; from f_lin, if ``params`` has another
            structure or other shapes.

    Example:
        >>> import jax.numpy as jnp
        >>> f_lin = linearize(lambda params, x: jnp.sin(params * x), jnp.array(0.0))
        >>> bool(jnp.allclose(f_lin(jnp.array(3.0), jnp.arange(4.0)), 3 * jnp.arange(4.0)))
        True
    """
    _check_params(params0)

    def f_lin(params: Any, x: Any) -> Any:
        """Evaluate the expansion at ``params`` for the inputs ``x``."""
        _check_same_shapes(params, params0)
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
    """Combine the embeddings of all pairs of rows, (n1, n2, ...), holding two blocks of them at a time."""
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
    leaves = jax.tree.leaves(params)
    if not leaves or not all(jnp.issubdtype(jnp.result_type(leaf), jnp.floating) for leaf in leaves):
        dtypes = sorted({str(jnp.result_type(leaf)) for leaf in leaves})
        raise ValueError(
            f"the parameters must be a pytree of floating arrays, but got dtypes {dtypes}. "
            f"Close over what is not differentiated: lambda params, x: f({{**params, **constants}}, x)."
        )


def _check_same_shapes(params: Any, params0: Any) -> None:
    got, expected = str(jax.tree.structure(params)), str(jax.tree.structure(params0))
    if got != expected:
        raise ValueError(f"params must have the structure of params0, {expected}, but got {got}.")
    shapes, shapes0 = ([jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (params, params0))
    if shapes != shapes0:
        raise ValueError(f"params must have the shapes of params0, {shapes0}, but got {shapes}.")


def _check_rows(f: Network, params: Any, x1: ArrayLike, x2: ArrayLike | None) -> tuple[Array, Array | None]:
    """Return the inputs as arrays, after checks of their shapes and of what ``f`` makes of them."""
    x1, x2 = jnp.asarray(_known_to_jax(x1)), None if x2 is None else jnp.asarray(_known_to_jax(x2))
    if x2 is not None and x1.shape[1:] != x2.shape[1:]:
        raise ValueError(f"the rows of x1 and x2 must have the same shape, but got {x1.shape} and {x2.shape}.")
    output = jax.eval_shape(f, params, x1)
    if not hasattr(output, "shape") or output.ndim not in (1, 2) or output.shape[0] != x1.shape[0]:
        got = output.shape if hasattr(output, "shape") else jax.tree.structure(output)
        raise ValueError(
            f"the network must return one row for each of the {x1.shape[0]} rows of x, (n,) or (n, k), "
            f"but returned {got}. Wrap it in a function that reshapes the output or picks a part."
        )
    return x1, x2


def _known_to_jax(x: ArrayLike) -> ArrayLike:
    """Return the array; of a table or a list, NumPy's."""
    return x if isinstance(x, Array) else np.asarray(x)


KernelPair = tuple[ArrayLike, ArrayLike]


def gradient_flow(
    ntk_train: ArrayLike,
    ntk_cross: ArrayLike,
    targets: ArrayLike,
    time: ArrayLike = jnp.inf,
    *,
    initial_train: ArrayLike = 0.0,
    initial_test: ArrayLike = 0.0,
) -> Array:
    """Predict with a linearised network after gradient flow on ½ Σ (f(x) − y)² for some time.

    f_t(x) = f₀(x) + Θ(x, X) Θ⁻¹ (I − exp(−tΘ)) (Y − f₀(X)) (Lee 2019, eqs. 10 and 11), Θ = Θ(X, X). Exact for
    :func:`linearize` with the empirical tangent kernel of its parameters; for a network in the limit of
    infinite width with the kernel of :func:`fcn_kernel`. A learning rate η is the time ηt, and the *mean* of
    the squared errors over n rows the time t/n.

    Rely on first derivatives only: they are exact for any kernel, while second ones differentiate an
    eigendecomposition, and are silently wrong where eigenvalues of Θ repeat (repeated or symmetric inputs).

    Args:
        ntk_train: kernel Θ(X, X) of the training inputs, (n, n).
        ntk_cross: kernel Θ(x, X) of test with training inputs, (n_test, n).
        targets: Y, (n,), or (n, k) for k outputs with independent kernels.
        time: duration of the flow, at least 0. At infinity the training data are interpolated; directions
            in which Θ is zero up to rounding (repeated inputs) are not learned.
        initial_train: f₀(X), a number or of the shape of the targets.
        initial_test: f₀(x), a number or (n_test,) or (n_test, k).

    Returns:
        f_t(x), (n_test,) or (n_test, k).

    Raises:
        ValueError: for shapes that do not fit, a kernel that is not symmetric, a negative time, or NaN.

    Example:
        >>> import jax.numpy as jnp
        >>> gradient_flow(jnp.eye(3), jnp.ones((2, 3)), jnp.arange(3.0), time=1.0).shape
        (2,)
    """
    train, cross, targets, start, test_start = as_floats(
        ntk_train,
        ntk_cross,
        targets,
        initial_train,
        initial_test,
        names=("ntk_train", "ntk_cross", "targets", "initial_train", "initial_test"),
    )
    check_targets(targets, check_symmetric("ntk_train", train))
    check_shape("ntk_cross", cross, (*cross.shape[:1], train.shape[0]), "(n_test, n_train)")
    if start.shape != ():
        check_shape("initial_train", start, targets.shape, "that of targets")
    if test_start.shape != ():
        expected = (cross.shape[0], *targets.shape[1:])
        check_shape("initial_test", test_start, expected, "(n_test,) or (n_test, k)")
    check_no_nan("initial_train", start)
    check_no_nan("initial_test", test_start)
    return test_start + jnp.matmul(_smoother(train, cross, time), targets - start, precision="highest")


def ntk_ensemble(
    kernel_train: KernelPair,
    kernel_cross: KernelPair,
    kernel_test: KernelPair,
    targets: ArrayLike,
    time: ArrayLike = jnp.inf,
) -> tuple[Array, Array]:
    """Compute mean and covariance of infinitely wide networks trained by gradient flow from N(0, 1) parameters.

    Training turns each member f₀ ~ GP(0, K) of the ensemble into f₀ + A (Y − f₀(X)) with the smoother
    A = Θ* Θ⁻¹ (I − exp(−tΘ)), so that the ensemble stays Gaussian, with mean AY and covariance
    K** − A K*ᵀ − K* Aᵀ + A K Aᵀ (Lee 2019, eqs. 14 and 15; their Corollary 1 at t = ∞). It is not a
    posterior: see :func:`gp_posterior` for that. Loss and time are those of :func:`gradient_flow`, and so is
    the limit to derivatives: first ones are exact, second ones wrong where eigenvalues of Θ repeat.

    Args:
        kernel_train: pair (nngp, ntk), each (n, n), as the kernel of :func:`fcn_kernel` returns it.
        kernel_cross: pair (nngp, ntk), each (n_test, n), of test with training inputs.
        kernel_test: pair (nngp, ntk), each (n_test, n_test); its ntk is not used.
        targets: Y, (n,), or (n, k) for k independent outputs.
        time: duration of the flow, at least 0; infinity by default.

    Returns:
        mean, (n_test,) or (n_test, k), and covariance (n_test, n_test), which all outputs share.

    Raises:
        ValueError: for anything but pairs, shapes that do not fit, a kernel that is not symmetric, a negative time, or
            NaN.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.wide_limit import fcn_kernel
        >>> x, x_test = jnp.linspace(-1, 1, 4)[:, None], jnp.zeros((2, 1))
        >>> kernel = fcn_kernel(1, "erf", w_std=1.0, b_std=0.5)
        >>> pairs = kernel(x), kernel(x_test, x), kernel(x_test)
        >>> mean, covariance = ntk_ensemble(*pairs, targets=x[:, 0], time=10.0)
        >>> mean.shape, covariance.shape
        ((2,), (2, 2))
    """
    nngp_train, ntk_train = _pair("kernel_train", kernel_train)
    nngp_cross, ntk_cross = _pair("kernel_cross", kernel_cross)
    nngp_test, _ = _pair("kernel_test", kernel_test)
    nngp_train, nngp_cross, nngp_test, ntk_train, ntk_cross, targets = as_floats(
        *(nngp_train, nngp_cross, nngp_test, ntk_train, ntk_cross, targets),
        names=("kernel_train", "kernel_cross", "kernel_test", "kernel_train", "kernel_cross", "targets"),
    )
    num_train = check_symmetric("kernel_train's nngp", nngp_train)
    num_test = check_symmetric("kernel_test's nngp", nngp_test)
    check_shape("kernel_train's ntk", ntk_train, (num_train, num_train), "(n_train, n_train)")
    check_symmetric("kernel_train's ntk", ntk_train)
    check_shape("kernel_cross's nngp", nngp_cross, (num_test, num_train), "(n_test, n_train)")
    check_shape("kernel_cross's ntk", ntk_cross, (num_test, num_train), "(n_test, n_train)")
    check_targets(targets, num_train)
    for pair, matrix in {"train": nngp_train, "cross": nngp_cross, "test": nngp_test}.items():
        check_no_nan(f"kernel_{pair}'s nngp", matrix)
    smoother = _smoother(ntk_train, ntk_cross, time)
    product = lambda left, right: jnp.matmul(left, right, precision="highest")  # noqa: E731
    removed = product(smoother, nngp_cross.T)
    kept = product(product(smoother, nngp_train), smoother.T)
    covariance = nngp_test - removed - removed.T + kept
    return product(smoother, targets), 0.5 * (covariance + covariance.T)


def _smoother(train: Array, cross: Array, time: ArrayLike) -> Array:
    """Return Θ* Θ⁻¹ (I − exp(−tΘ)), (n_test, n)."""
    check_no_nan("ntk_train", train)
    check_no_nan("ntk_cross", cross)
    check_not_negative("time", time)
    if jnp.shape(time) != ():
        raise ValueError(f"time must be a number, but got shape {jnp.shape(time)}. Use jax.vmap for several.")
    return jnp.matmul(cross, flow_operator(train, jnp.asarray(time, train.dtype)), precision="highest")


def _pair(name: str, pair: KernelPair) -> KernelPair:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        got = f"an array of shape {jnp.shape(pair)}" if hasattr(pair, "shape") else repr(type(pair))
        raise ValueError(f"{name} must be the pair (nngp, ntk) that the kernel of fcn_kernel returns, but got {got}.")
    return pair[0], pair[1]
