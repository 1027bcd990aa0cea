"""Variational inference: a step with the tempered ELBO over one with NumPyro's, and the collapsed mean-field fit."""

import time
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_mean

from benchmarks.gradients import digits
from benchmarks.timing import interleaved, median_ratio, milliseconds
from numpyro_wide import TemperedTraceMeanFieldELBO, collapse_readout

NOISE_SCALE = 0.1


def relu_network(x: np.ndarray, y: np.ndarray | None = None, *, width: int) -> None:
    """Sample a ReLU layer, its output divided by the width, prior variance 1/5."""
    prior = dist.Normal(0, 0.2**0.5)
    hidden = numpyro.sample("hidden", prior.expand([x.shape[1], width]).to_event(2))
    readout = numpyro.sample("readout", prior.expand([width, 10]).to_event(2))
    with numpyro.plate("rows", x.shape[0]):
        mean = jax.nn.relu(x @ hidden) @ readout / width
        numpyro.sample("y", dist.Normal(mean, NOISE_SCALE).to_event(1), obs=y)


def erf_network(x: np.ndarray, y: np.ndarray | None = None, *, width: int) -> None:
    """Sample an erf layer in NTK parametrisation, prior variance 2."""
    weights = numpyro.sample("weights", dist.Normal(0, 1).expand([1, width]).to_event(2))
    bias = numpyro.sample("bias", dist.Normal(0, 1).expand([width]).to_event(1))
    hidden = jax.lax.erf(2**0.5 * (x @ weights + bias))
    features = numpyro.deterministic("features", (2 / width) ** 0.5 * hidden)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width]).to_event(1))
    numpyro.sample("y", dist.Normal(features @ readout, NOISE_SCALE).to_event(1), obs=y)


def step(loss: TraceMeanField_ELBO, model: Callable, x: np.ndarray, y: np.ndarray) -> Callable:
    """Compile a step of SVI, without arguments."""
    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.01), loss)
    return partial(jax.jit(svi.update), svi.init(jax.random.key(0), x, y), x, y)


def tempered_over_plain() -> None:
    """Measure one step with either loss."""
    print(
        "\n## One step of SVI, one ReLU layer, digits, n = 256: TemperedTraceMeanFieldELBO over TraceMeanField_ELBO\n"
    )
    print("| width | particles | TraceMeanField_ELBO | tempered / plain | goal |")
    print("|---|---|---|---|---|")
    data = digits(256)
    for width, num_particles in [(128, 1), (512, 1), (512, 8)]:
        model = partial(relu_network, width=width)
        losses = {
            "plain": TraceMeanField_ELBO(num_particles=num_particles),
            "tempered": TemperedTraceMeanFieldELBO(num_neurons=width, num_particles=num_particles),
        }
        seconds = interleaved({name: step(loss, model, *data) for name, loss in losses.items()}, num_rounds=25)
        ratio = median_ratio(seconds, "tempered", "plain")
        print(f"| {width} | {num_particles} | {milliseconds(seconds['plain'])} | {ratio:.2f} | at most 1.05 |")


def collapsed_fit() -> None:
    """Measure the seconds of a whole fit, compilation included."""
    print(
        "\n## Mean-field fit of the collapsed model, 20 points of a noisy sine, width 2000, 3000 steps of 8 particles\n"
    )
    print("| seconds | goal |")
    print("|---|---|")
    x = np.linspace(-1.7, 1.7, 20, dtype=np.float32)
    y = (2**0.5 * np.sin(2.7 * x) + NOISE_SCALE * np.random.default_rng(0).normal(size=20)).astype(np.float32)
    model = collapse_readout(partial(erf_network, width=2000), readout="readout", features="features", observed="y")
    guide = AutoNormal(model, init_loc_fn=init_to_mean, init_scale=1.0)
    start = time.perf_counter()
    svi = SVI(model, guide, numpyro.optim.Adam(0.01), TraceMeanField_ELBO(num_particles=8))
    jax.block_until_ready(svi.run(jax.random.key(0), 3000, x[:, None], y, progress_bar=False).losses)
    print(f"| {time.perf_counter() - start:.0f} | less than 60 |")


def tables() -> None:
    """Make every table of this file."""
    tempered_over_plain()
    collapsed_fit()
