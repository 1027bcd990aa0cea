"""Models whose evidence is known: in closed form, or by quadrature."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import reparam
from numpyro.infer.reparam import LocScaleReparam
from scipy import integrate, special, stats

from numpyro_wide import collapse_readout, repriorise, surrogate_targets


class Known(NamedTuple):
    """A model, its arguments, its log evidence."""

    model: Callable
    args: tuple[Any, ...]
    log_evidence: float


@cache  # so that programs that are compiled for a model serve all tests
def conjugate(num_rows: int = 30) -> Known:
    """Linear regression: the targets are Gaussian."""
    x = np.random.default_rng(0).normal(size=(num_rows, 5)).astype("f")
    y = (0.3 * x @ np.arange(5) + 0.5 * np.random.default_rng(1).normal(size=num_rows)).astype("f")

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.5, 1.5).expand([5]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ w, 0.5).to_event(1), obs=y)

    covariance = 1.5**2 * x @ x.T + 0.5**2 * np.eye(num_rows)
    return Known(model, (x, y), stats.multivariate_normal.logpdf(y, 0.5 * x.sum(1), covariance))


@cache
def one_unit() -> Known:
    """A collapsed network of one erf unit: a sum over a fine grid of its two weights."""
    x = np.linspace(-1.5, 1.5, 6, dtype="f")
    y = (np.sin(2 * x) + 0.2).astype("f")

    def network(x, y=None):
        h = numpyro.sample("h", dist.Normal(0, 1).expand([2]).to_event(1))
        features = numpyro.deterministic("features", jax.lax.erf(2 * h[0] * x + h[1])[:, None])
        w = numpyro.sample("w", dist.Normal(0, 1).expand([1]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(1), obs=y)

    grid = np.linspace(-9, 9, 601)
    a, b = np.meshgrid(grid, grid, indexing="ij")
    unit = special.erf(2 * a[..., None] * x + b[..., None])
    total = 0.3**2 + np.sum(unit**2, -1)  # eigenvalue of σ² I + ψψᵀ, all others of which are σ²
    square = (np.sum(y**2) - (unit @ y) ** 2 / total) / 0.3**2
    log_likelihood = -0.5 * (square + np.log(total) + 5 * np.log(0.3**2) + 6 * np.log(2 * np.pi))
    log_joint = log_likelihood + stats.norm.logpdf(a) + stats.norm.logpdf(b)
    model = collapse_readout(network, readout="w", features="features", observed="y")
    return Known(model, (x, y), special.logsumexp(log_joint) + 2 * np.log(grid[1] - grid[0]))


@cache
def funnel() -> Known:
    """Neal's funnel, not centred, with noisy observations: quadrature over the logarithm of its width."""
    y = 0.1 * np.random.default_rng(3).normal(size=9).astype("f")

    def model(y=None):
        neck = numpyro.sample("neck", dist.Normal(0, 3))
        widths = numpyro.sample("widths", dist.Normal(0, jnp.exp(neck / 2)).expand([9]).to_event(1))
        numpyro.sample("y", dist.Normal(widths, 0.5).to_event(1), obs=y)

    straightened = reparam(model, config={"widths": LocScaleReparam(0)})
    grid = np.linspace(-30, 30, 20_001)
    log_joint = stats.norm.logpdf(grid, 0, 3) + stats.norm.logpdf(y[:, None], 0, np.sqrt(np.exp(grid) + 0.25)).sum(0)
    return Known(straightened, (y,), special.logsumexp(log_joint) + np.log(grid[1] - grid[0]))


@cache
def correlation() -> Known:
    """Pairs with an unknown correlation: quadrature over it."""
    y = np.random.default_rng(4).multivariate_normal([0, 0], [[1, 0.7], [0.7, 1]], size=15).astype("f")

    def model(y=None):
        root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))
        with numpyro.plate("rows", 15):
            numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(2), scale_tril=root), obs=y)

    r = np.linspace(-1, 1, 20_003)[1:-1]
    log_prior = np.log(1 - r**2)
    square = ((y**2).sum(1)[:, None] - 2 * r * y.prod(1)[:, None]) / (1 - r**2)
    log_likelihood = (-0.5 * square - 0.5 * np.log(1 - r**2) - np.log(2 * np.pi)).sum(0)
    return Known(model, (y,), special.logsumexp(log_prior + log_likelihood) - special.logsumexp(log_prior))


@cache
def rotated_counts() -> Known:
    """20 rates, each the exponential of a rotated coordinate: a product of integrals over one each, all skewed."""
    rotation = stats.ortho_group.rvs(20, random_state=0).astype("f")
    counts = np.random.default_rng(2).poisson(2, size=20)

    def model(y=None):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([20]).to_event(1))
        numpyro.sample("y", dist.Poisson(jnp.exp(1.5 * (rotation @ z))).to_event(1), obs=y)

    def integral(count):
        def density(v):
            return stats.norm.pdf(v) * stats.poisson.pmf(count, np.exp(1.5 * v))

        return integrate.quad(density, -9, 9, points=[np.log(count + 0.5) / 1.5])[0]

    return Known(model, (jnp.asarray(counts),), sum(np.log(integral(count)) for count in counts))


@cache
def classes() -> Known:
    """Repriorised logistic regression on one feature, of a size that is learnt: quadrature over size and weight."""
    x = np.linspace(-1, 2, 12, dtype="f")
    y = (x > 0.4).astype(int)
    y[3] = 1

    def regression(x, y=None):
        size = numpyro.sample("size", dist.Gamma(3.0, 2.0))
        features = numpyro.deterministic("features", size * x[:, None])
        w = numpyro.sample("w", dist.Normal(0.3, 1.2).expand([1]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=features @ w).to_event(1), obs=y)

    size, w = np.meshgrid(np.linspace(1e-3, 15, 1500), np.linspace(-9, 9, 1000), indexing="ij")
    logits = (size * w)[..., None] * x
    log_joint = np.sum(np.where(y == 1, logits, 0) - np.logaddexp(0, logits), -1)
    log_joint += stats.gamma.logpdf(size, 3, scale=0.5) + stats.norm.logpdf(w, 0.3, 1.2)
    log_evidence = special.logsumexp(log_joint) + np.log(15 / 1500) + np.log(18 / 999)
    surrogate = partial(surrogate_targets, likelihood="bernoulli")
    model = repriorise(regression, readout="w", features="features", targets="y", surrogate=surrogate)
    return Known(model, (x, jnp.asarray(y)), log_evidence)
