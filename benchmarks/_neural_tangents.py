"""Kernels of neural-tangents, run in an environment of their own by benchmarks/limit_kernels.py.

python _neural_tangents.py images.npz kernels.npz depth seconds

The file of kernels gets, by pooling and number of images, both kernels and processor seconds, the mean of some calls.
"""

import sys
import time

import jax
import numpy as np
from neural_tangents import stax

source, target, depth, least = *sys.argv[1:3], int(sys.argv[3]), float(sys.argv[4])
images = np.load(source)
found = {}
for case in images.files:
    pooling = case.split("_")[0]
    layers = [stax.Conv(1, (3, 3), padding="SAME", W_std=2.0**0.5, b_std=0.1), stax.Relu()] * depth
    gather = {"flatten": stax.Flatten, "mean": stax.GlobalAvgPool}[pooling]()
    kernel = jax.jit(stax.serial(*layers, gather, stax.Dense(1, W_std=2.0**0.5))[2], static_argnames="get")
    result = kernel(*images[case], get=("nngp", "ntk"))
    found[f"{case}_kernels"] = np.stack([result.nngp, result.ntk])
    start, calls = time.process_time(), 0
    while calls < 3 or time.process_time() - start < least:
        jax.block_until_ready(kernel(*images[case], get=("nngp", "ntk")))
        calls += 1
    found[f"{case}_seconds"] = np.array((time.process_time() - start) / calls)
np.savez(target, **found)
