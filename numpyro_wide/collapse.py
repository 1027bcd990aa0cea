"""Does a mean-field guide ignore the data? A bound that says it must, and a look at whether it does."""

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_wide.elbo import ELBOTerms


class CollapseWarning(UserWarning):
    """A fitted guide sits on its prior."""


def collapse_certificate(
    inputs: Any,
    targets: Any,
    test_inputs: Any,
    num_neurons: Any,
    *,
    noise_scale: Any = 1.0,
    weight_scale: Any = 1.0,
    bias_scale: Any = 1.0,
    readout_scale: Any = 1.0,
) -> jax.Array:
    r"""Bound what the optimal mean-field guide of an erf network can predict (Coker 2021, Theorem 1).

    For $f(x) = \sum_k v_k\,\mathrm{erf}(w_k^T x + b_k)$ with priors $w \sim N(0, s_w^2)$,
    $b \sim N(0, s_b^2)$, $v \sim N(0, s_v^2/K)$ and Gaussian noise, every mean-field Gaussian
    guide whose ELBO is no worse than its prior's has

    .. math:: |E_q f(x^*)| \le s_v\sqrt{2C}\sqrt{1 - e^{-4C'/(\pi K)}}, \quad
              C = \tfrac1{2\sigma^2}\sum_n(y_n^2 + s_v^2 V(x_n)), \quad
              C' = 2(D+1)C\,(s_w^2\lVert x^*\rVert^2 + s_b^2)

    where $V(x) = E\,\mathrm{erf}^2$ under the prior. The bound vanishes like $1/\sqrt K$: a
    wide network fitted in this way ignores the data. The paper prints unit variances, for which this is
    its equation 92 (Mathematics, :eq:`certificate`); the same proof gives the general form. With several
    outputs C sums over all of them and the bound holds for each.

    Args:
        inputs: Training inputs, (n, D).
        targets: Training targets, (n,) or (n, k).
        test_inputs: Where to bound, (n*, D).
        num_neurons: The width K; an array adds leading axes to the result.
        noise_scale: Standard deviation σ of the noise.
        weight_scale: Prior standard deviation of the input weights.
        bias_scale: Prior standard deviation of the hidden biases.
        readout_scale: Prior standard deviation of a readout weight times √K.

    Returns:
        The bound at every test input, shape (..., n*).

    Raises:
        ValueError: If the shapes do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> x, y = jnp.array([[-1.0], [1.0]]), jnp.array([-1.0, 1.0])
        >>> bounds = collapse_certificate(x, y, jnp.array([[1.0]]), jnp.array([1e2, 1e4, 1e6]))
        >>> [round(float(b), 3) for b in bounds[:, 0]]
        [0.69, 0.072, 0.007]
    """
    x, y, x_test = jnp.asarray(inputs), jnp.asarray(targets), jnp.asarray(test_inputs)
    if x.ndim != 2 or x_test.ndim != 2 or x.shape[1] != x_test.shape[1] or y.shape[:1] != x.shape[:1] or y.ndim > 2:
        raise ValueError(
            "collapse_certificate needs inputs (n, D), targets (n,) or (n, k) and test_inputs (n*, D), got "
            f"{x.shape}, {y.shape} and {x_test.shape}; a single input column is x[:, None]."
        )
    y = y.reshape(len(x), -1)
    pre_activation = jnp.square(weight_scale) * jnp.sum(jnp.square(x), 1) + jnp.square(bias_scale)
    prior_variance = jnp.square(readout_scale) * _erf_second_moment(pre_activation)
    kl_bound = 0.5 * jnp.sum(jnp.square(y) + prior_variance[:, None]) / jnp.square(noise_scale)
    test_size = jnp.square(weight_scale) * jnp.sum(jnp.square(x_test), 1) + jnp.square(bias_scale)
    mean_bound = 2.0 * (x.shape[1] + 1) * kl_bound * test_size
    width = jnp.asarray(num_neurons)[..., None]
    # expm1 keeps the digits of 1 − exp(−small) for wide networks.
    saturation = -jnp.expm1(-4.0 / math.pi * mean_bound / width)
    return jnp.asarray(readout_scale) * jnp.sqrt(2.0 * kl_bound * saturation)


def _erf_second_moment(variance: jax.Array) -> jax.Array:
    # E erf(z)² for z ~ N(0, v) is (2/π) arcsin(2v / (1 + 2v)).
    return 2.0 / math.pi * jnp.arcsin(2.0 * variance / (1.0 + 2.0 * variance))


def warn_if_on_prior(terms: ELBOTerms, *, tolerance: float = 0.01) -> dict[str, float]:
    """Warn where a fitted guide has hardly left its prior.

    A collapsed guide keeps a bounded KL while its weights grow in number, so the divergence is counted in
    nats per weight. In repriorised coordinates a guide on its prior is no fault: there N(0, I) is the wide
    limit of the posterior.

    Args:
        terms: From :func:`~numpyro_wide.elbo.elbo_terms`, of the fitted guide; of the looks of
            :func:`~numpyro_wide.elbo.run_monitored`, the last is taken.
        tolerance: Nats per weight below which a site counts as collapsed. A weight whose standard
            deviation went from 1 to 0.87, or whose mean moved by 0.14 prior standard deviations, is worth
            0.01.

    Returns:
        Nats per weight of every latent site.

    Raises:
        ValueError: If the tolerance is not positive.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import SVI
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> from numpyro_wide.elbo import TemperedTraceMeanFieldELBO, elbo_terms
        >>> def model(y):
        ...     numpyro.sample("y", dist.Normal(numpyro.sample("w", dist.Normal(0, 1)), 1.0), obs=y)
        >>> svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.01), TemperedTraceMeanFieldELBO(eta=0.5))
        >>> sorted(warn_if_on_prior(elbo_terms(svi, svi.init(jax.random.key(0), 1.0), 1.0)))
        ['w']
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive nats per weight, got {tolerance}.")
    terms = jax.tree.map(lambda leaf: leaf if jnp.ndim(leaf) == 0 else leaf[-1], terms)
    per_weight = {name: float(terms.kl[name]) / count for name, count in terms.num_weights.items() if count}
    collapsed = {name: value for name, value in per_weight.items() if value < tolerance}
    if collapsed:
        listed = ", ".join(f"{name} ({value:.2g})" for name, value in collapsed.items())
        warnings.warn(
            f"The guide sits on its prior at {listed}, in nats per weight: it has learned almost nothing "
            f"there. A wide mean-field guide does this whatever the data; temper the KL "
            f"(TemperedTraceMeanFieldELBO), or fit in repriorised coordinates.",
            CollapseWarning,
            stacklevel=2,
        )
    return per_weight
