"""One gradient of the potential: collapsed, repriorised and plain, and the paper's formula written naively."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.infer.util import initialize_model
from sklearn.datasets import load_digits

from benchmarks.timing import interleaved, median_ratio, milliseconds
from numpyro_wide import collapse_readout, linear_gaussian, repriorise

NOISE_SCALE = 0.1


def digits(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return standardised pixels and centred one-hot labels."""
    pixels, labels = load_digits(return_X_y=True)
    inputs = (pixels - pixels.mean()) / pixels.std()
    return inputs[:num_rows].astype("f"), (np.eye(10)[labels[:num_rows]] - 0.1).astype("f")


def network(x: np.ndarray, y: np.ndarray | None = None, *, depth: int, width: int) -> None:
    """Sample a GELU network in NTK parametrisation, weight variance 2."""
    hidden = x
    for layer in range(depth):
        weights = numpyro.sample(f"w{layer}", dist.Normal(0, 1).expand([hidden.shape[1], width]).to_event(2))
        hidden = jax.nn.gelu((2 / hidden.shape[1]) ** 0.5 * hidden @ weights, approximate=False)
    features = numpyro.deterministic("features", (2 / width) ** 0.5 * hidden)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width, 10]).to_event(2))
    numpyro.sample("y", dist.Normal(features @ readout, NOISE_SCALE).to_event(2), obs=y)


def naive(x: np.ndarray, y: np.ndarray, *, depth: int, width: int) -> None:
    """Write the paper's recipe by the letter: feature Cholesky, autodiff, prior + likelihood + log-determinant."""
    hidden = x
    for layer in range(depth):
        weights = numpyro.sample(f"w{layer}", dist.Normal(0, 1).expand([hidden.shape[1], width]).to_event(2))
        hidden = jax.nn.gelu((2 / hidden.shape[1]) ** 0.5 * hidden @ weights, approximate=False)
    features = (2 / width) ** 0.5 * hidden
    phi = numpyro.sample("phi", dist.Normal(0, 1).expand([width, 10]).to_event(2).mask(False))
    upper = jnp.linalg.cholesky(NOISE_SCALE**2 * jnp.eye(width) + features.T @ features).T
    whitened = jax.scipy.linalg.solve_triangular(upper.T, features.T @ y, lower=True)
    readout = jax.scipy.linalg.solve_triangular(upper, whitened + NOISE_SCALE * phi)
    numpyro.factor("prior", dist.Normal(0, 1).log_prob(readout).sum())
    numpyro.factor("log_abs_det", -10 * jnp.log(jnp.diagonal(upper)).sum())
    numpyro.sample("y", dist.Normal(features @ readout, NOISE_SCALE).to_event(2), obs=y)


def one_layer(x: Array, y: Array | None = None, *, width: int) -> None:
    """Sample the README's network: one tanh layer, one output."""
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, width]).to_event(2))
    inputs = jnp.stack([3 * x, jnp.ones_like(x)], axis=1)
    features = numpyro.deterministic("features", jnp.tanh(inputs @ hidden) / width**0.5)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([width]).to_event(1))
    numpyro.sample("y", dist.Normal(features @ readout, NOISE_SCALE).to_event(1), obs=y)


def potential_gradient(
    model: Callable, *data: np.ndarray | Array, num_chains: int | None = None, in_turns: bool = False
) -> Callable:
    """Compile a gradient of the model's potential at a draw, or of chains, at once or in turns, without arguments."""
    key = jax.random.key(0)
    info = initialize_model(key if num_chains is None else jax.random.split(key, num_chains), model, model_args=data)
    return compiled(jax.value_and_grad(info.potential_fn), info.param_info.z, num_chains, in_turns)


def compiled(function: Callable, value: Any, num_chains: int | None, in_turns: bool) -> Callable:
    """Compile a function of a value, or of one a chain, as a function without arguments."""
    if num_chains is not None:
        function = partial(jax.lax.map, function) if in_turns else jax.vmap(function)
    return partial(jax.jit(function), value)


def evidence_floor(num_rows: int, width: int, num_chains: int | None = None, in_turns: bool = False) -> Callable:
    """Compile what a gradient of the evidence needs besides the network's: a Gram matrix, its factor, a product."""

    def floor(features: Array) -> Array:
        gram = features @ features.T + jnp.eye(num_rows)
        return (gram + jnp.linalg.cholesky(gram)) @ features

    shape = (num_rows, width) if num_chains is None else (num_chains, num_rows, width)
    return compiled(floor, jax.random.normal(jax.random.key(0), shape), num_chains, in_turns)


def wrapped(depth: int, width: int) -> dict[str, Callable]:
    """Return the three forms of the network."""
    return forms(partial(network, depth=depth, width=width))


def forms(model: Callable) -> dict[str, Callable]:
    """Return a network with this noise as it stands, repriorised, and with its readout integrated out."""
    return {
        "plain": model,
        "repriorised": repriorise(model, readout="readout", features="features", targets="y", noise_scale=NOISE_SCALE),
        "collapsed": collapse_readout(model, readout="readout", features="features", observed="y"),
    }


def against_plain() -> None:
    """Measure collapsed and repriorised gradients over the plain one, three hidden layers."""
    print("\n## One gradient, three hidden layers, digits, 10 outputs, float32\n")
    print("| n | width | plain | collapsed / plain | repriorised / plain | goal for collapsed |")
    print("|---|---|---|---|---|---|")
    for num_rows, width, goal in [(256, 128, 1.6), (256, 512, 1.6), (1024, 512, 1.8)]:
        data = digits(num_rows)
        models = wrapped(3, width)
        seconds = interleaved({name: potential_gradient(model, *data) for name, model in models.items()})
        ratios = [median_ratio(seconds, name, "plain") for name in ("collapsed", "repriorised")]
        plain = milliseconds(seconds["plain"])
        print(f"| {num_rows} | {width} | {plain} | {ratios[0]:.2f} | {ratios[1]:.2f} | at most {goal} |")


def one_layer_against_plain() -> None:
    """Measure the same for one hidden layer, where the readout is most of the network: two chains, both ways, and one.

    Our kernels run chains in turns on a CPU; NumPyro's run them at once, as goals have it. "floor / plain" is what a
    collapsed gradient could at best have: the plain one, a Gram matrix, its Cholesky factor and a product with it.
    """
    print("\n## One gradient, one hidden layer, one output, float32, processor seconds\n")
    heads = "collapsed / plain", "floor / plain", "repriorised / plain", "repriorised / collapsed"
    print(f"| n | width | chains | plain | {' | '.join(heads)} | goals |")
    print("|---|---|---|---|---|---|---|---|---|")
    for num_rows, width, goal in [(20, 200, 3), (200, 256, 5.5), (200, 1024, 4)]:
        x = jnp.linspace(-1, 1, num_rows)
        models = forms(partial(one_layer, width=width))
        ways = {
            "2, in turns": ({"num_chains": 2, "in_turns": True}, ""),
            "2, at once": ({"num_chains": 2}, f"at most {goal} and 1.25"),
            "1": ({}, ""),
        }
        for chains, (way, goals) in ways.items():
            runs = {name: potential_gradient(m, x, jnp.sin(4 * x), **way) for name, m in models.items()}
            runs["floor"] = evidence_floor(num_rows, width, **way)
            seconds = interleaved(runs, clock=time.process_time)
            ratios = {head: median_ratio(seconds, *head.split(" / ")) for head in heads}
            ratios["floor / plain"] += 1  # the plain gradient itself
            found = " | ".join(f"{ratio:.2f}" for ratio in ratios.values())
            print(f"| {num_rows} | {width} | {chains} | {milliseconds(seconds['plain'])} | {found} | {goals} |")


def against_naive() -> None:
    """Measure the naive form over the collapsed one, one hidden layer."""
    print(
        "\n## One gradient, one hidden layer, n = 256: the paper's formula written naively over the collapsed model\n"
    )
    print("| width | collapsed | naive / collapsed | goal |")
    print("|---|---|---|---|")
    for width, goal in [(1024, 10), (2048, 25)]:
        data = digits(256)
        models = {"collapsed": wrapped(1, width)["collapsed"], "naive": partial(naive, depth=1, width=width)}
        seconds = interleaved({name: potential_gradient(model, *data) for name, model in models.items()}, num_rounds=7)
        ratio = median_ratio(seconds, "naive", "collapsed")
        print(f"| {width} | {milliseconds(seconds['collapsed'])} | {ratio:.1f} | at least {goal} |")


def between_variants() -> None:
    """Measure the eigen form over the Cholesky form of the data-space map."""
    print('\n## The data-space maps, n = 512, d = 1024, value and gradient: "data" over "data-cholesky"\n')
    print("| data-cholesky | data / data-cholesky | goal |")
    print("|---|---|---|")
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.normal(size=(512, 1024)) / 32, jnp.float32)
    targets, phi = jnp.asarray(rng.normal(size=(512, 10)), "f"), jnp.asarray(rng.normal(size=(1024, 10)), "f")

    def gradient(variant: str) -> Callable:
        def scalar(features: Array, phi: Array) -> Array:
            readout, log_abs_det = linear_gaussian.readout_map(features, targets, phi, NOISE_SCALE, variant=variant)
            return 0.5 * jnp.sum(readout**2) - log_abs_det

        return partial(jax.jit(jax.value_and_grad(scalar, (0, 1))), features, phi)

    seconds = interleaved({name: gradient(name) for name in ("data", "data-cholesky")}, num_rounds=7)
    ratio = median_ratio(seconds, "data", "data-cholesky")
    print(f"| {milliseconds(seconds['data-cholesky'])} | {ratio:.2f} | at least 3 |")


def tables() -> None:
    """Make every table of this file."""
    against_plain()
    one_layer_against_plain()
    against_naive()
    between_variants()
