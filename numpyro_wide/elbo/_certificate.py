"""Bound on the predictions of a mean-field guide."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import as_floats, as_not_negative, check_finite, check_positive


def mean_field_bound(
    inputs: Any,
    targets: Any,
    test_inputs: Any,
    num_neurons: Any,
    *,
    noise_scale: Any = 1.0,
    weight_scale: Any = 1.0,
    bias_scale: Any = 1.0,
    readout_scale: Any = 1.0,
) -> Array:
    r"""Bound the predictions of the optimal mean-field guide of an erf network (Coker 2021, Theorem 1).

    For $f(x) = \sum_k v_k\,\mathrm{erf}(w_k^T x + b_k)$ with priors $w \sim N(0, s_w^2)$, $b \sim N(0, s_b^2)$, $v \sim
    N(0, s_v^2/K)$ and noise $\sigma$, a mean-field guide with an ELBO no worse than its prior's has (Mathematics,
    :eq:`certificate`)

    .. math:: |E_q f(x^*)| \le s_v\sqrt{2C}\sqrt{1 - e^{-4C'/(\pi K)}}, \quad
              C = \tfrac1{2\sigma^2}\sum_n(y_n^2 + s_v^2 V(x_n)), \quad
              C' = 2(D+1)C\,(s_w^2\lVert x^*\rVert^2 + s_b^2)

    with $V(x) = E\,\mathrm{erf}^2$ under the prior. Several outputs share C.

    Args:
        inputs: training inputs, (n, D).
        targets: training targets, (n,) or (n, k).
        test_inputs: test inputs, (n*, D).
        num_neurons: width K; an array adds leading axes to the result.
        noise_scale: standard deviation σ of the noise, in units of the targets.
        weight_scale: prior standard deviation of the input weights.
        bias_scale: prior standard deviation of the hidden biases.
        readout_scale: prior standard deviation of a readout weight times √K.

    Returns:
        Bound at each test input, (..., n*).

    Example:
        >>> import jax.numpy as jnp
        >>> x, y = jnp.array([[-1.0], [1.0]]), jnp.array([-1.0, 1.0])
        >>> bounds = mean_field_bound(x, y, jnp.array([[1.0]]), jnp.array([1e2, 1e4, 1e6]))
        >>> [round(float(b), 3) for b in bounds[:, 0]]
        [0.69, 0.072, 0.007]
    """
    x, y, x_test = _checked_data(inputs, targets, test_inputs)
    check_positive("noise_scale", noise_scale)
    check_positive("num_neurons", num_neurons)
    noise_scale, weight_scale = _one_scale("noise_scale", noise_scale), _one_scale("weight_scale", weight_scale)
    bias_scale, readout_scale = _one_scale("bias_scale", bias_scale), _one_scale("readout_scale", readout_scale)
    num_neurons = as_not_negative("num_neurons", num_neurons)
    pre_activation = jnp.square(weight_scale) * jnp.sum(jnp.square(x), 1) + jnp.square(bias_scale)
    prior_variance = jnp.square(readout_scale) * _erf_second_moment(pre_activation)
    kl_bound = 0.5 * jnp.sum(jnp.square(y) + prior_variance[:, None]) / jnp.square(noise_scale)
    test_size = jnp.square(weight_scale) * jnp.sum(jnp.square(x_test), 1) + jnp.square(bias_scale)
    mean_bound = 2.0 * (x.shape[1] + 1) * kl_bound * test_size
    width = num_neurons[..., None]
    mean_bound = jnp.expand_dims(mean_bound, range(num_neurons.ndim))
    # expm1 keeps the digits of 1 − exp(−small) for wide networks.
    saturation = -jnp.expm1(-4.0 / math.pi * mean_bound / width)
    return readout_scale * jnp.sqrt(2.0 * kl_bound * saturation)


def _checked_data(inputs: ArrayLike, targets: ArrayLike, test_inputs: ArrayLike) -> tuple[Array, Array, Array]:
    """Return all as finite floats of one type, targets as a matrix."""
    x, y, x_test = as_floats(inputs, targets, test_inputs, names=("inputs", "targets", "test_inputs"))
    if x.ndim != 2 or x_test.ndim != 2 or x.shape[1] != x_test.shape[1] or y.shape[:1] != x.shape[:1] or y.ndim > 2:
        raise ValueError(
            "mean_field_bound needs inputs (n, D), targets (n,) or (n, k) and test_inputs (n*, D), got "
            f"{x.shape}, {y.shape} and {x_test.shape}; a single input column is x[:, None]."
        )
    for name, data in (("inputs", x), ("targets", y), ("test_inputs", x_test)):
        check_finite(name, data)
    return x, y.reshape(len(x), -1), x_test


def _one_scale(name: str, scale: ArrayLike) -> Array:
    if jnp.ndim(scale):
        raise ValueError(f"{name} must be one number, but has shape {jnp.shape(scale)}.")
    return as_not_negative(name, scale)


def _erf_second_moment(variance: Array) -> Array:
    # E erf(z)² for z ~ N(0, v) is (2/π) arcsin(2v / (1 + 2v)).
    return 2.0 / math.pi * jnp.arcsin(2.0 * variance / (1.0 + 2.0 * variance))
