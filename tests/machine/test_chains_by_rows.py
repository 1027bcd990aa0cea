"""Chains by rows on eight devices, and on two processes of four: draws as on one device, and small sums exchanged."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_wide import shard_rows
from numpyro_wide.machine import chains_sharding
from tests.machine.test_sharding import free_port, results, start
from tests.marks import parametrize

WORKER = Path(__file__).with_name("chains_worker.py")
WIDTH, NUM_INPUTS, NUM_CHAINS = 12, 3, 4


@pytest.fixture(scope="module")
def on_eight():
    return results(start(8, worker=WORKER))[0]


@pytest.mark.fault("mcmc/_kernel.py", "out_shardings=sharding", "out_shardings=None")
@pytest.mark.slow
def test_four_chains_of_two_shares_draw_what_one_device_draws(on_eight):
    assert on_eight["mesh"] == {"chains": 4, "rows": 2}
    single = np.array(on_eight["single"])
    assert single.shape[0] == NUM_CHAINS and np.abs(np.diff(single, axis=1)).max() > 1e-3
    np.testing.assert_allclose(on_eight["sharded"], single, atol=1e-9)
    assert on_eight["placed"] == [1, NUM_INPUTS, WIDTH]  # each device has one chain


@pytest.mark.slow
def test_a_gradient_exchanges_the_sums_of_one_chain(on_eight):
    kinds = {kind for kind, _ in on_eight["collectives"]}
    shapes = [shape.split(",") for _, shapes in on_eight["collectives"] for shape in shapes]
    sizes = [int(np.prod([int(n) for n in shape if n])) for shape in shapes]
    assert kinds == {"all-reduce"}
    assert sizes.count(WIDTH**2) == 1  # the Gram matrix of one chain, not of four
    # Besides it the moments of the targets and of the residuals, the gradient of the hidden weights, and numbers, some
    # of them of the comparison of two readouts.
    assert sum(sizes) <= WIDTH**2 + (2 + NUM_INPUTS) * WIDTH + 12


@pytest.mark.fault("machine.py", ".reshape(-1, num_chains).T", ".reshape(num_chains, -1)")
@pytest.mark.slow
def test_two_processes_of_four_devices_draw_the_same(on_eight):
    port = free_port()
    for found in results(*[start(4, process, 2, port, worker=WORKER) for process in range(2)]):
        assert found["mesh"] == {"chains": 4, "rows": 2} and found["placed"] == [1, NUM_INPUTS, WIDTH]
        np.testing.assert_allclose(found["sharded"], on_eight["single"], atol=1e-9)


@parametrize(
    ("num_chains", "devices", "message"),
    [
        (3, list("abcd"), "num_chains must divide a process's number of devices, 4, but is 3"),
        (8, list("abcd"), "num_chains must divide a process's number of devices, 4, but is 8"),
        (2, list("abcd"), "5 rows cannot be shared out evenly to 2 devices"),
        (0, None, "num_chains must be a whole number of at least 1"),
    ],
    rest="slow",
)
def test_grids_that_do_not_fit(num_chains, devices, message):
    with pytest.raises(ValueError, match=message):
        shard_rows(np.ones((5, 2)), devices=devices, num_chains=num_chains)


def test_chains_that_cannot_be_shared_out_are_refused():
    mesh = Mesh(np.array(jax.devices() * 2).reshape(2, 1), ("chains", "rows"))
    x = SimpleNamespace(sharding=NamedSharding(mesh, PartitionSpec("rows")))
    with pytest.raises(ValueError, match="2 groups of chains, but there are 3 chains; run a multiple of 2"):
        chains_sharding(3, (x,))
    assert chains_sharding(4, (np.ones(3), x)).spec == PartitionSpec("chains")
    assert chains_sharding(4, (jnp.ones(3),), None) is None


@pytest.mark.slow
def test_one_group_is_the_plain_mesh():
    x = shard_rows(np.ones((4, 2)), devices=jax.devices()[:1], num_chains=1)
    assert dict(x.sharding.mesh.shape) == {"rows": 1}
