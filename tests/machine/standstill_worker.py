"""Runs in a process of its own, which was given few cores, and prints a line after every round.

python standstill_worker.py NUM_ROUNDS
"""

import sys

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_wide import ReadoutPredictive, collapse_readout
from numpyro_wide.diagnostics import to_arviz


@jax.jit
def factorise_four_batches(matrices):
    """The smallest program that stands still on jaxlib 0.10: batched factorisations which need not wait for another."""
    return sum(jnp.linalg.cholesky(matrices + jitter * jnp.eye(64)).sum() for jitter in (1.0, 2.0, 3.0, 4.0))


def network(x, y=None, width=200):
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, width]).to_event(2))
    inputs = jnp.stack([3 * x, jnp.ones_like(x)], axis=1)
    features = numpyro.deterministic("features", jnp.tanh(inputs @ hidden) / width**0.5)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(features @ readout, 0.1), obs=y)


def main():
    num_rounds = int(sys.argv[1])
    half = jax.random.normal(jax.random.key(0), (800, 64, 64))
    matrices = half @ half.mT
    for number in range(num_rounds // 10):
        factorise_four_batches(matrices).block_until_ready()
        print("factorised", number, flush=True)

    x, x_new = jnp.linspace(-1, 1, 20), jnp.linspace(-1.5, 1.5, 50)
    arguments = (x, jnp.sin(4 * x))
    model = collapse_readout(network, readout="readout", features="features", observed="y")
    kernel = NUTS(model, max_tree_depth=4)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=50, num_chains=8, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(1), *arguments)
    print("sampled", flush=True)
    predictive = ReadoutPredictive(model, mcmc.get_samples(), arguments)
    for number in range(num_rounds):
        key = jax.random.key(number)
        jax.block_until_ready(predictive(key, x_new))
        predictive.readout(key).block_until_ready()
        to_arviz(mcmc, model, *arguments, rng_key=key)
        print("round", number, flush=True)


if __name__ == "__main__":
    main()
