"""A short run in pieces, and what other processes do with it: they run it, or hold its folder."""

import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_wide.mcmc import SplitHMC
from numpyro_wide.runs import run_in_pieces
from numpyro_wide.runs._pieces import sole_use

Y = np.array([0.3, -1.2, 2.0], np.float32)  # of NumPy: processes are forked from one in which JAX has done nothing

FIELDS = ("potential_energy",)


def normals(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(mean[0] + mean[1] ** 2, 1).expand([3]).to_event(1), obs=y)


def chains(piece, **options):
    options = {"num_warmup": 20, "num_chains": 2, "chain_method": "vectorized"} | options
    return MCMC(SplitHMC(normals), num_samples=piece, progress_bar=False, **options)


def short_run(folder, num_samples, piece=5, cache=None, y=Y):
    """Go on with the run in this folder; what is compiled is kept in a folder of its own."""
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return run_in_pieces(
        chains(piece), folder, jax.random.key(0), y, num_samples=num_samples, extra_fields=FIELDS, progress_bar=False
    )


def hold(folder, is_held):
    """Hold a folder until somebody ends this process."""
    with sole_use(folder):
        is_held.set()
        time.sleep(600)


def run_in_turns(folder, totals, cache, refusals):
    """Ask for more and more draws, and again where another process is at it."""
    count = 0
    for total in totals:
        while True:
            try:
                short_run(folder, total, cache=cache)
                break
            except RuntimeError as error:
                assert "is in use by" in str(error)
                count += 1
                time.sleep(0.01)
    refusals.put(count)
