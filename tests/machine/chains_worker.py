"""Chains by rows over the devices of one or two processes; prints their draws and what they exchange as JSON.

python chains_worker.py [PROCESS_ID NUM_PROCESSES PORT]
"""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpyro.infer import MCMC
from numpyro.infer.util import log_density

from numpyro_wide import collapse_readout, shard_rows
from numpyro_wide.mcmc import SplitHMC
from numpyro_wide.nn import FCN, bnn

NUM_ROWS, WIDTH, NUM_CHAINS, SITE = 64, 12, 4, "hidden.hidden_0.kernel"
MODEL = collapse_readout(bnn(FCN(1, WIDTH, "erf"), None, 0.3), readout="readout", features="features", observed="y")


def collectives(starts, inputs):
    """Kinds and shapes of what the compiled gradient of all chains exchanges between devices."""
    value_and_grad = jax.value_and_grad(lambda values, x, y: log_density(MODEL, (x, y), {}, values)[0])
    compiled = jax.jit(jax.vmap(value_and_grad, (0, None, None))).lower({SITE: starts}, *inputs).compile()
    pattern = r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    return [(kind, re.findall(r"\[([\d,]*)\]", shapes)) for shapes, kind in re.findall(pattern, compiled.as_text())]


def draws(inputs):
    """Draws of a few steps of all chains, adaptation included, and shape of a device's part of the last position."""
    kernel = SplitHMC(MODEL, step_size=0.02, num_steps=2, find_heuristic_step_size=False)
    options = {"num_chains": NUM_CHAINS, "chain_method": "vectorized", "progress_bar": False, "jit_model_args": True}
    mcmc = MCMC(kernel, num_warmup=5, num_samples=5, **options)
    mcmc.run(jax.random.key(0), *inputs)
    found = np.asarray(mcmc.get_samples(group_by_chain=True)[SITE]).tolist()
    return found, mcmc.last_state.z[SITE].addressable_shards[0].data.shape


def main():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 3))
    y = np.sin(2 * x[:, 0])
    share = slice(None)
    distributed = list(map(int, sys.argv[1:]))
    if distributed:
        process_id, num_processes, port = distributed
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, process_id)
        share = slice(process_id * NUM_ROWS // num_processes, (process_id + 1) * NUM_ROWS // num_processes)
    inputs = shard_rows(x[share], y[share], num_chains=NUM_CHAINS)
    mesh = inputs[0].sharding.mesh
    over_chains = NamedSharding(mesh, PartitionSpec("chains"))
    found = {"mesh": dict(mesh.shape)} | dict(zip(("sharded", "placed"), draws(inputs), strict=True))
    if not distributed:
        starts = jax.random.normal(jax.random.key(1), (NUM_CHAINS, 3, WIDTH))
        found["collectives"] = collectives(jax.device_put(starts, over_chains), inputs)
        found["single"], _ = draws((jnp.asarray(x), jnp.asarray(y)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
