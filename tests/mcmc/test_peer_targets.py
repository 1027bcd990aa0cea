"""The targets of NumPyro's and BlackJAX's published tests of their samplers, for every kernel of the package.

Targets and truths are those of `test_mcmc.py` of NumPyro and `test_sampling.py` of BlackJAX; tolerances come from the
effective sample size that was reached. Left out of them:

- change point: its density jumps along one coordinate, where no gradient tells; NUTS finds its mode by chance of seed;
- diverging transitions, tree depths, dense mass matrices, proposals of SA: internals of other samplers;
- a uniform scaled by a uniform, with 1000 rows: the posterior sits on the edge of its support, so that one of the two
  latents has no moments to compare with;
- forward mode, several paths through one model, chains inside jit: of NumPyro's MCMC, not of a kernel. What MCMC asks
  of a kernel is in `test_kernel.py`, the binomial of five million trials in `test_split_hmc.py`;
- pCN on three thousand rows, and on what is far from N(0, I) in its scale (`FAR`): it needs a posterior near N(0, I).
"""

from typing import Any, NamedTuple

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC
from numpyro.infer.reparam import LocScaleReparam

from tests.conftest import enable_x64
from tests.marks import parametrize
from tests.mcmc.cases import KERNELS

NUM_CHAINS = 4
FAR = {"correlated", "wide and narrow", "logistic", "linear", "improper"}


class Target(NamedTuple):
    """A model, its arguments, and expectations: a function of the draws, its truth, and how exactly that is known."""

    model: Any
    args: tuple
    truths: list[tuple[Any, Any, float]]


def normal():
    return Target(
        lambda: numpyro.sample("x", dist.Normal(1.0, 0.5).expand([2])),
        (),
        [(lambda s: s["x"], 1.0, 0.0), (lambda s: (s["x"] - 1.0) ** 2, 0.25, 0.0)],
    )


def correlated():
    rng = np.random.default_rng(0)
    root = np.tril(0.5 * np.fliplr(np.eye(5)) + 0.1 * np.exp(rng.normal(size=(5, 5)))).astype("f")
    covariance = root @ root.T + 1e-2 * np.eye(5, dtype="f")
    return Target(
        lambda: numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(5), covariance_matrix=covariance)),
        (),
        [(lambda s: s["x"], 0.0, 0.0), (lambda s: s["x"] ** 2, np.diag(covariance), 0.0)],
    )


def wide_and_narrow():
    covariance = np.array([[10.0, -0.7], [-0.7, 0.1]], "f")
    return Target(
        lambda: numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(2), covariance_matrix=covariance)),
        (),
        [(lambda s: s["x"], 0.0, 0.0), (lambda s: s["x"][..., 0] * s["x"][..., 1], -0.7, 0.0)],
    )


def beta_bernoulli():
    data = np.random.default_rng(1).random((1000, 2)) < np.array([0.9, 0.1])
    total = data.sum(axis=0)

    def model(data):
        p = numpyro.sample("p", dist.Beta(1.1, 1.1).expand([2]))
        numpyro.sample("obs", dist.Bernoulli(p), obs=data)

    return Target(model, (jnp.asarray(data, "f"),), [(lambda s: s["p"], (1.1 + total) / 1002.2, 0.0)])


def dirichlet_categorical():
    data = np.random.default_rng(2).choice(3, p=[0.1, 0.6, 0.3], size=2000)

    def model(data):
        p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
        numpyro.sample("obs", dist.Categorical(p), obs=data)

    return Target(model, (jnp.asarray(data),), [(lambda s: s["p"], (1 + np.bincount(data)) / 2003, 0.0)])


def logistic():
    """NumPyro's coefficients, of which their data know the first digit."""
    data = jax.random.normal(jax.random.key(0), (3000, 3))
    labels = dist.Bernoulli(logits=data @ jnp.array([1.0, 2.0, 3.0])).sample(jax.random.key(1))

    def model(data, labels):
        coefs = numpyro.sample("coefs", dist.Normal(jnp.zeros(3), 1.0))
        numpyro.sample("obs", dist.Bernoulli(logits=data @ coefs), obs=labels)

    return Target(model, (data, labels), [(lambda s: s["coefs"], np.array([1.0, 2.0, 3.0]), 0.35)])


def linear():
    """BlackJAX's regression of a thousand rows: a slope of 3 and a noise of 1."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=1000).astype("f")
    y = (3 * x + rng.normal(size=1000)).astype("f")

    def model(x, y):
        slope = numpyro.sample("slope", dist.Normal(0.0, 5.0))
        numpyro.sample("obs", dist.Normal(slope * x, numpyro.sample("noise", dist.Exponential(1.0))), obs=y)

    return Target(model, (x, y), [(lambda s: s["slope"], 3.0, 0.1), (lambda s: s["noise"], 1.0, 0.1)])


def improper():
    data = np.random.default_rng(4).normal(1.0, 2.0, 2000).astype("f")

    def model(data):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0).mask(False))
        scale = numpyro.sample("scale", dist.ImproperUniform(dist.constraints.positive, (), ()))
        numpyro.sample("obs", dist.Normal(mean, scale), obs=data)

    return Target(model, (data,), [(lambda s: s["mean"], data.mean(), 0.0), (lambda s: s["scale"], data.std(), 0.005)])


def under_handlers():
    """Two normal means, decentred, of ten rows: three masked, all of half weight, and one given by name."""
    data = np.random.default_rng(5).normal(1.0, 1.0, (10, 2)).astype("f")
    used = np.arange(10) > 2

    def plain(data):
        mean = numpyro.sample("mean", dist.Normal(0.5, 2.0).expand([2]))
        numpyro.sample("first", dist.Normal(mean, 1.0))
        with numpyro.plate("rows", 10), handlers.scale(scale=0.5), handlers.mask(mask=used):
            numpyro.sample("obs", dist.Normal(mean, 1.0).to_event(1), obs=data)

    first = np.array([2.0, -1.0], "f")
    model = handlers.reparam(handlers.condition(plain, {"first": first}), config={"mean": LocScaleReparam(0.0)})
    precision = 1 / 2.0**2 + 1 + 0.5 * used.sum()
    mean = (0.5 / 2.0**2 + first + 0.5 * data[used].sum(axis=0)) / precision
    return Target(
        lambda data: model(data),
        (data,),
        [(lambda s: s["mean"], mean, 0.0), (lambda s: (s["mean"] - mean) ** 2, 1 / precision, 0.0)],
    )


TARGETS = {
    "normal": normal,
    "correlated": correlated,
    "wide and narrow": wide_and_narrow,
    "beta": beta_bernoulli,
    "dirichlet": dirichlet_categorical,
    "logistic": logistic,
    "linear": linear,
    "improper": improper,
    "under handlers": under_handlers,
}
# Kept in every run of the tests: one kernel on every target; the others, and float64, once. Of SplitHMC's whole
# trajectories only what is far, in float32: near N(0, I) draws by default are whole as well.
# In float64 every kernel on two targets, and one kernel on all but handlers: they change what the model's sites are,
# not how a kernel rounds.
CASES = [
    pytest.param(kernel, target, x64, marks=[] if kernel == "split" and not x64 else pytest.mark.slow)
    for kernel in KERNELS
    for target in TARGETS
    for x64 in (False, True)
    if not (kernel == "pcn" and target in FAR)
    and not (kernel == "split-whole" and (x64 or target not in FAR))
    and not (x64 and target == "under handlers")
    and not (x64 and kernel != "split" and target not in ("beta", "linear"))
]


@parametrize(("kernel", "target", "x64"), CASES, rest="slow")
def test_targets_of_peers(kernel, target, x64):
    one_gradient = kernel in ("langevin", "pcn", "pcnl", "unadjusted")
    num_warmup, num_samples = (400, 1000) if not one_gradient else (3000, 20000) if target in FAR else (1500, 8000)
    if target == "logistic":  # of thousands of rows, and known to a digit
        num_samples = min(num_samples, 2000)
    with enable_x64(x64):
        model, args, truths = TARGETS[target]()
        mcmc = MCMC(
            KERNELS[kernel](model),
            num_warmup=num_warmup,
            num_samples=num_samples,
            num_chains=NUM_CHAINS,
            chain_method="vectorized",
        )
        mcmc.run(jax.random.key(0), *args)
        draws = {name: np.asarray(values) for name, values in mcmc.get_samples(group_by_chain=True).items()}
        assert all(leaf.dtype == (np.float64 if x64 else np.float32) for leaf in draws.values())
    for function, truth, known_to in truths:
        values = np.asarray(function(draws), float).reshape(NUM_CHAINS, num_samples, -1)
        for k, expected in enumerate(np.broadcast_to(truth, values.shape[2:])):
            ess = float(arviz.ess(values[..., k], method="mean"))
            assert ess > 100
            # Uncorrected, a share of the standard deviation of draws is bias.
            bias = 0.1 * values[..., k].std() if "unadjusted" in kernel else 0.0
            tolerance = known_to + bias + 4.5 * values[..., k].std() / np.sqrt(ess)
            assert abs(values[..., k].mean() - expected) < tolerance
