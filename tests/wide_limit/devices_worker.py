"""Kernels by blocks on all devices and on one, with what each device computed, for test_devices.py."""

import json
import sys
import tempfile
from collections import Counter

import jax
import numpy as np

from numpyro_wide import wide_limit
from numpyro_wide._compile import TracedProgram
from numpyro_wide.nn import CNN

devices = jax.devices()
computed = Counter()
call = TracedProgram.__call__


def counted(self, *arrays):
    found = call(self, *arrays)
    computed.update(str(device) for device in found[0].devices())
    return found


TracedProgram.__call__ = counted
rng = np.random.default_rng(0)
x1, x2 = (rng.normal(size=(num, 4, 4, 2)) for num in (16, 8))
network = CNN(2, 1, "erf", padding="SAME", pooling="mean")
shared = wide_limit.kernel(network, block_size=2, devices=devices)
found, by_device = {}, {}
for name, inputs in (("one set", (x1,)), ("two sets", (x1, x2))):
    computed.clear()
    found[name] = np.stack(shared(*inputs))
    by_device[name] = dict(computed)
    with tempfile.TemporaryDirectory() as folder:
        found[f"{name}, files"] = np.stack(shared.to_disk(folder, *inputs))
TracedProgram.__call__ = call
differences = {}
for name, numbers in found.items():
    inputs = (x1,) if name.startswith("one") else (x1, x2)
    differences[name] = float(np.abs(numbers - np.stack(wide_limit.kernel(network)(*inputs))).max())
json.dump({"by_device": by_device, "differences": differences}, sys.stdout)
print()
