"""Runs in a process of its own, on as many devices as its environment says, and prints what it found as JSON.

python worker.py [PROCESS_ID NUM_PROCESSES PORT]
"""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.util import log_density

from numpyro_wide import collapse_readout, repriorise, shard_rows
from numpyro_wide.mcmc import (
    PreconditionedCrankNicolson,
    PreconditionedCrankNicolsonLangevin,
    SplitHMC,
    UnderdampedLangevin,
)
from numpyro_wide.nn import FCN, bnn

NUM_ROWS, WIDTH = 64, 12
KERNELS = {
    "SplitHMC": lambda model: SplitHMC(model, step_size=0.02, num_steps=2, find_heuristic_step_size=False),
    "UnderdampedLangevin": lambda model: UnderdampedLangevin(model, step_size=0.02),
    "PreconditionedCrankNicolson": lambda model: PreconditionedCrankNicolson(model, step_size=0.01),
    "PreconditionedCrankNicolsonLangevin": lambda model: PreconditionedCrankNicolsonLangevin(model, step_size=0.01),
}


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 3))
    return x, np.sin(2 * x[:, :2]) + 0.3


def models():
    plain = bnn(FCN(1, WIDTH, "erf"), 2, 0.3)
    return {
        "collapsed": collapse_readout(plain, readout="readout", features="features", observed="y"),
        "repriorised": repriorise(plain, readout="readout", features="features", targets="y", noise_scale=0.3),
    }


def density_and_gradient(model, inputs, with_collectives):
    """The log density, its gradient as a list, and the results of the compiled program's collectives."""
    values = {
        "hidden.hidden_0.kernel": jax.random.normal(jax.random.key(0), (3, WIDTH)),
        "readout_base": jax.random.normal(jax.random.key(1), (WIDTH, 2)),
    }
    if model is MODELS["collapsed"]:
        del values["readout_base"]
    function = jax.jit(jax.value_and_grad(lambda values, x, y: log_density(model, (x, y), {}, values)[0]))
    compiled = function.lower(values, *inputs).compile()
    value, gradient = compiled(values, *inputs)
    found = {"value": float(value), "gradient": np.concatenate([np.ravel(g) for g in gradient.values()]).tolist()}
    if with_collectives:
        pattern = r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
        operations = re.findall(pattern, compiled.as_text())
        found["collectives"] = [(kind, re.findall(r"\[([\d,]*)\]", shapes)) for shapes, kind in operations]
    return found


def step(kernel, inputs):
    """How far one step of a kernel, without adaptation, moves the hidden weights."""
    start = kernel.init(jax.random.key(3), 0, None, inputs, {})
    end = jax.jit(kernel.sample)(start, inputs, {})
    return (np.asarray(end.z["hidden.hidden_0.kernel"]) - np.asarray(start.z["hidden.hidden_0.kernel"])).tolist()


MODELS = models()


def main():
    x, y = data()
    distributed = list(map(int, sys.argv[1:]))
    if distributed:
        process_id, num_processes, port = distributed
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, process_id)
        share = slice(process_id * NUM_ROWS // num_processes, (process_id + 1) * NUM_ROWS // num_processes)
        x, y = x[share], y[share]
    sharded = shard_rows(x, y)
    placements = {"sharded": tuple(sharded)} | ({} if distributed else {"single": (jnp.asarray(x), jnp.asarray(y))})
    found = {"num_devices": len(jax.devices())}
    for placement, inputs in placements.items():
        # Programs are compiled for minutes of CI: two processes show one gradient, and a step of the other model.
        names = ["collapsed"] if distributed else MODELS
        here = found[placement] = {
            name: density_and_gradient(MODELS[name], inputs, placement == "sharded") for name in names
        }
        steps = {} if distributed else {name: step(make(MODELS["collapsed"]), inputs) for name, make in KERNELS.items()}
        here["steps"] = steps | {
            "repriorised": step(UnderdampedLangevin(MODELS["repriorised"], step_size=0.02), inputs)
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
