"""Data sharded over devices: the same numbers as on one, and no more communication than the Gram matrix."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_wide import shard_rows
from tests.marks import parametrize

WORKER = Path(__file__).with_name("sharding_worker.py")
WIDTH, NUM_ROWS = 12, 64


def start(num_devices, *arguments, worker=WORKER):
    command = [sys.executable, "-W", "ignore", str(worker), *map(str, arguments)]
    settings = {
        "PYTHONPATH": str(WORKER.parents[2]),
        "OPENBLAS_NUM_THREADS": "1",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_devices}",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    return subprocess.Popen(
        command, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def results(*processes):
    """What each of the processes found; if one fails, the others, which may wait for it, are ended."""
    found = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors[-3000:]
            found.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return found


@pytest.fixture(scope="module")
def on_eight():
    return results(start(8))[0]


@pytest.mark.as_compiled
@parametrize("model", ["collapsed", "repriorised"], rest="slow")
def test_density_and_gradient_on_eight_devices_are_those_on_one(on_eight, model):
    assert on_eight["num_devices"] == 8
    sharded, single = on_eight["sharded"][model], on_eight["single"][model]
    assert sharded["value"] == pytest.approx(single["value"], rel=1e-12)
    np.testing.assert_allclose(sharded["gradient"], single["gradient"], rtol=1e-9, atol=1e-11)


@pytest.mark.as_compiled
@parametrize("model", ["collapsed", "repriorised"], rest="slow")
def test_only_sums_of_small_matrices_are_exchanged(on_eight, model):
    collectives = on_eight["sharded"][model]["collectives"]
    shapes = [tuple(map(int, filter(None, shape.split(",")))) for _, shapes in collectives for shape in shapes]
    assert {kind for kind, _ in collectives} == {"all-reduce"}
    assert (WIDTH, WIDTH) in shapes  # the Gram matrix
    assert max(map(np.prod, shapes)) == WIDTH**2
    assert not any(NUM_ROWS in shape or NUM_ROWS // 8 in shape for shape in shapes)


@pytest.mark.slow
def test_every_kernel_steps_on_eight_devices_as_on_one(on_eight):
    sharded, single = on_eight["sharded"]["steps"], on_eight["single"]["steps"]
    assert len(sharded) == 5
    for name, step in single.items():
        assert np.abs(step).max() > 1e-4, f"{name} rejected its proposal, which shows nothing"
        np.testing.assert_allclose(sharded[name], step, atol=1e-9, err_msg=name)


@pytest.mark.slow
def test_two_processes_give_what_one_gives(on_eight):
    port = free_port()
    single = on_eight["single"]
    for found in results(*[start(1, process, 2, port) for process in range(2)]):
        assert found["num_devices"] == 2
        assert found["sharded"]["collapsed"]["value"] == pytest.approx(single["collapsed"]["value"], rel=1e-12)
        gradient = found["sharded"]["collapsed"]["gradient"]
        np.testing.assert_allclose(gradient, single["collapsed"]["gradient"], rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(found["sharded"]["steps"]["repriorised"], single["steps"]["repriorised"], atol=1e-9)


def test_rows_on_one_device():
    x, y = shard_rows(np.arange(6.0).reshape(3, 2), jnp.arange(3))
    np.testing.assert_array_equal(x, np.arange(6.0).reshape(3, 2))
    assert x.sharding.is_equivalent_to(jax.sharding.SingleDeviceSharding(jax.devices()[0]), 2)
    assert y.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("arrays", "devices", "message"),
    [
        ((np.ones((4, 2)), np.ones(3)), None, r"same number of rows, at least one, but .* are \[\(4, 2\), \(3,\)\]"),
        ((np.ones(()),), None, r"same number of rows, at least one, but their shapes are \[\(\)\]"),
        ((np.ones((0, 2)), np.ones(0)), None, r"at least one, but their shapes are \[\(0, 2\), \(0,\)\]"),
        ((np.ones((5, 2)),), ["a", "b"], "5 rows cannot be shared out evenly to 2 devices"),
    ],
)
def test_what_sharding_refuses(arrays, devices, message):
    with pytest.raises(ValueError, match=message):
        shard_rows(*arrays, devices=devices)
