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

    with $V(x) = E\,\mathrm{erf}^2$ under the prior. Several outputs share C. The result is (..., n*).

    Args:
        inputs: training inputs, (n, D).
        targets: training targets, (n,) or (n, k).
        test_inputs: test inputs, (n*, D).
        num_neurons: width K; an array adds leading axes to the result.
        noise_scale: standard deviation σ of the noise, in units of the targets.
        weight_scale: $s_w$.
        bias_scale: $s_b$.
        readout_scale: $s_v$, the prior standard deviation of a readout weight times √K.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.elbo import mean_field_bound
        >>> x = jnp.array([[-1.0], [1.0]])
        >>> mean_field_bound(x, x[:, 0], x[1:], jnp.array([1e2, 1e4])).round(2).tolist()
        [[0.69], [0.07]]
    """
    x, y, x_test = as_floats(inputs, targets, test_inputs, names=("inputs", "targets", "test_inputs"))
    if x.ndim != 2 or x_test.ndim != 2 or x.shape[1] != x_test.shape[1] or y.shape[:1] != x.shape[:1] or y.ndim > 2:
        raise ValueError(
            "mean_field_bound needs inputs (n, D), targets (n,) or (n, k) and test_inputs (n*, D), got "
            f"{x.shape}, {y.shape} and {x_test.shape}; a single input column is x[:, None]."
        )
    for name, data in (("inputs", x), ("targets", y), ("test_inputs", x_test)):
        check_finite(name, data)
    check_positive("noise_scale", noise_scale)
    check_positive("num_neurons", num_neurons)
    noise_scale, weight_scale = _one_scale("noise_scale", noise_scale), _one_scale("weight_scale", weight_scale)
    bias_scale, readout_scale = _one_scale("bias_scale", bias_scale), _one_scale("readout_scale", readout_scale)
    num_neurons = as_not_negative("num_neurons", num_neurons)

    def pre_activation_variance(x: Array) -> Array:
        return jnp.square(weight_scale) * jnp.sum(jnp.square(x), 1) + jnp.square(bias_scale)

    # E erf(z)² for z ~ N(0, v) is (2/π) arcsin(2v / (1 + 2v)).
    double = 2.0 * pre_activation_variance(x)
    prior_variance = jnp.square(readout_scale) * (2.0 / math.pi * jnp.arcsin(double / (1.0 + double)))
    kl_bound = 0.5 * jnp.sum(jnp.square(y.reshape(len(x), -1)) + prior_variance[:, None]) / jnp.square(noise_scale)
    mean_bound = 2.0 * (x.shape[1] + 1) * kl_bound * pre_activation_variance(x_test)
    mean_bound = jnp.expand_dims(mean_bound, range(num_neurons.ndim))
    # expm1 keeps the digits of 1 − exp(−small) for wide networks.
    saturation = -jnp.expm1(-4.0 / math.pi * mean_bound / num_neurons[..., None])
    return readout_scale * jnp.sqrt(2.0 * kl_bound * saturation)


def _one_scale(name: str, scale: ArrayLike) -> Array:
    if jnp.ndim(scale):
        raise ValueError(f"{name} must be one number, but has shape {jnp.shape(scale)}.")
    return as_not_negative(name, scale)
