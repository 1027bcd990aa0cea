"""Small networks that several tests use."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

WIDTH = 20


def small_data(n: int = 30, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Noisy sine: inputs (n, 1) and targets (n, 1)."""
    rng = np.random.default_rng(seed)
    x = np.sort(rng.uniform(-1, 1, n))[:, None]
    return x.astype("f"), (np.sin(4 * x) + 0.5 + 0.2 * rng.normal(size=x.shape)).astype("f")


def network(x, y=None, *, width: int = WIDTH, noise_scale=None):
    """One tanh layer, bias column, latent noise unless it is given; the readout has a prior of its own."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(0.5)) if noise_scale is None else noise_scale
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, width]).to_event(2))
    inputs = jnp.concatenate([2 * x, jnp.ones_like(x[:, :1])], axis=1)
    bias_and_units = [jnp.ones_like(x[:, :1]), jnp.tanh(inputs @ hidden) / width**0.5]
    features = numpyro.deterministic("features", jnp.concatenate(bias_and_units, axis=1))
    w = numpyro.sample("w", dist.Normal(0.3, 1.2).expand([width + 1, 1]).to_event(2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(features @ w, sigma).to_event(1), obs=y)


def linear(
    n: int = 6, d: int = 4, k: int | None = 2, noise: Callable = lambda: 0.3, prior: Callable | None = None
) -> Callable:
    """A Bayesian linear regression on random features, with everything about it adjustable."""
    features_value = jnp.asarray(np.random.default_rng(1).normal(size=(n, d)))
    shape = (d,) if k is None else (d, k)

    def model(y=None):
        sigma = noise()
        features = numpyro.deterministic("features", features_value)
        prior_fn = dist.Normal(0, 1).expand(shape).to_event(len(shape)) if prior is None else prior()
        w = numpyro.sample("w", prior_fn)
        numpyro.sample("y", dist.Normal(features @ w, sigma).to_event(len(shape)), obs=y)

    return model
