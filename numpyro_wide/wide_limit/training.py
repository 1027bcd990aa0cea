"""Networks in the linear regime, trained by gradient flow: one of them, and the ensemble of all."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import as_floats, check_no_nan, check_not_negative
from numpyro_wide.wide_limit._flow_operator import flow_operator
from numpyro_wide.wide_limit._shapes import check_shape, check_symmetric, check_targets

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
