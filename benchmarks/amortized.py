"""Steps of the amortised trainer against plain JAX and optax loops: the rotation study, and an automatic guide."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from jax import Array, random
from jax.scipy.special import i0e
from numpyro.contrib.module import flax_module

from numpyro_wide import AmortizedForwardKL
from numpyro_wide.autoguide import AutoAmortized
from numpyro_wide.nn import ResidualEncoder
from studies._scaled_relu import ScaledReLU, inverse_time_schedule
from studies._von_mises import VonMises

WIDTH = 1024
BATCH_SIZE = 16
NUM_STEPS = 10_000
ROUNDS = 15
NUM_LATENTS, NUM_DATA, AUTO_BATCH_SIZE, AUTO_NUM_STEPS = 4, 20, 256, 400


def rotation() -> None:
    """Sample a rotation by a wanted angle and by a perturbation that is not (McNamara 2025, Section 5)."""
    theta = numpyro.sample("theta", dist.Uniform(0, 2 * jnp.pi))
    z = numpyro.sample("z", dist.Normal(0, 0.5))
    numpyro.deterministic("x", jnp.stack([jnp.cos(theta + z), jnp.sin(theta + z)]))


def guide(observed_values: dict) -> None:
    """Sample a von Mises distribution in natural parameters."""
    encoder = flax_module("encoder", ScaledReLU(WIDTH, 2), input_shape=(2,))
    numpyro.sample("theta", VonMises(encoder(observed_values["x"]) + 1e-4))


def optimiser() -> optax.GradientTransformation:
    return optax.adam(inverse_time_schedule(1e-4))


def trainer() -> AmortizedForwardKL:
    return AmortizedForwardKL(rotation, guide, optimiser(), observed="x", batch_size=BATCH_SIZE)


def plain_loss(params: dict, theta: Array, x: Array) -> Array:
    """Compute the objective of the trainer, written out."""
    eta = jax.nn.relu(x @ params["hidden"]) @ params["readout"] * WIDTH**-0.5 + 1e-4
    kappa = jnp.linalg.norm(eta, axis=1)
    log_q = eta[:, 0] * jnp.cos(theta) + eta[:, 1] * jnp.sin(theta) - jnp.log(2 * jnp.pi * i0e(kappa)) - kappa
    return -jnp.mean(log_q)


def plain_step(carry: tuple, _: None) -> tuple[tuple, Array]:
    """Take one step of the loop that one would write by hand."""
    params, opt_state, key = carry
    key, theta_key, z_key = random.split(key, 3)
    theta = random.uniform(theta_key, (BATCH_SIZE,), maxval=2 * jnp.pi)
    angle = theta + 0.5 * random.normal(z_key, (BATCH_SIZE,))
    x = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    loss, gradient = jax.value_and_grad(plain_loss)(params, theta, x)
    updates, opt_state = optimiser().update(gradient, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state, key), loss


def plain_loop() -> Callable[[], Array]:
    params = {"hidden": random.normal(random.key(0), (2, WIDTH)), "readout": jnp.zeros((WIDTH, 2))}
    start = params, optimiser().init(params), random.key(1)
    return partial(jax.jit(partial(jax.lax.scan, plain_step, length=NUM_STEPS)), start)


def seconds(functions: dict[str, Callable]) -> dict[str, list[float]]:
    """Measure seconds of each run, in rounds in which all take their turn, after one run that compiles."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        jax.block_until_ready(function())
    for _ in range(ROUNDS):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            taken[name].append(time.perf_counter() - start)
    return taken


def noisy_sums() -> None:
    """Sample sums of latents with noise."""
    theta = numpyro.sample("theta", dist.Normal(0, 1).expand([NUM_LATENTS]).to_event(1))
    slopes = random.normal(random.key(0), (NUM_LATENTS, NUM_DATA))
    numpyro.sample("x", dist.Normal(theta @ slopes, 1).to_event(1))


def auto_trainer() -> Callable[[], Array]:
    """Return a run of the trainer with an automatic guide, on given simulations."""
    auto = AutoAmortized(noisy_sums, observed="x")
    training = AmortizedForwardKL(noisy_sums, auto, optax.adam(1e-3), observed="x", batch_size=AUTO_BATCH_SIZE)
    given = training.simulate(random.key(1), 10_000)
    state = training.init(random.key(0), simulations=given)
    options = {"init_state": state, "simulations": given, "progress_bar": False}
    return lambda: training.run(random.key(0), AUTO_NUM_STEPS, **options).losses


def network_alone() -> Callable[[], Array]:
    """Return as many steps of the automatic guide's encoder and linear layer, on one batch and its mean square."""
    encoder, optim = ResidualEncoder(), optax.adam(1e-3)
    x = random.normal(random.key(0), (AUTO_BATCH_SIZE, NUM_DATA))
    num_outputs = 1 + 2 * NUM_LATENTS + NUM_LATENTS * (NUM_LATENTS - 1) // 2
    variables = encoder.init(random.key(1), x)
    head = jnp.ones((encoder.apply(variables, x).shape[1], num_outputs))
    params = variables, head

    def loss(params: tuple) -> Array:
        return jnp.mean(jnp.square(encoder.apply(params[0], x) @ params[1]))

    def step(carry: tuple, _: None) -> tuple[tuple, Array]:
        params, opt_state = carry
        value, gradient = jax.value_and_grad(loss)(params)
        updates, opt_state = optim.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return partial(jax.jit(partial(jax.lax.scan, step, length=AUTO_NUM_STEPS)), (params, optim.init(params)))


def auto_table() -> None:
    """Measure steps a second of an automatic guide, and the share of a step that is not its network."""
    taken = seconds({"network alone": network_alone(), "trainer": auto_trainer()})
    print(f"\n## AutoAmortized, encoder of width 256, batch {AUTO_BATCH_SIZE}, given simulations, float32\n")
    print("| | steps a second | share that is not the network |")
    print("|---|---|---|")
    for name in taken:
        share = statistics.median(1 - n / t for n, t in zip(taken["network alone"], taken[name], strict=True))
        print(f"| {name} | {AUTO_NUM_STEPS / statistics.median(taken[name]):.0f} | {share:.0%} |")


def compiled_cost() -> None:
    """Return what the compiler counts in one step of each."""
    training = trainer()
    state = training.init(random.key(0))
    params = training.optim.get_params(state.optim_state)["encoder$params"]
    params = {name: layer["kernel"] for name, layer in params.items()}
    start = params, optimiser().init(params), random.key(1)
    steps = {
        "plain scan": jax.jit(partial(plain_step, _=None)).lower(start),
        "trainer": jax.jit(training.stable_update).lower(state),
    }
    print("\n| one compiled step | floating-point operations | bytes accessed |")
    print("|---|---|---|")
    for name, step in steps.items():
        cost = step.compile().cost_analysis()
        print(f"| {name} | {cost['flops']:.0f} | {cost['bytes accessed']:.0f} |")


def tables() -> None:
    """Measure steps a second, with the progress bar and without."""
    training = trainer()
    state = training.init(random.key(0))
    run = partial(training.run, random.key(0), NUM_STEPS, init_state=state)
    taken = seconds(
        {
            "plain scan": plain_loop(),
            "trainer": partial(run, progress_bar=False),
            "trainer, progress bar": partial(run, progress_bar=True),
        }
    )
    print(f"\n## Amortised training, rotation, width {WIDTH}, batch {BATCH_SIZE}, {NUM_STEPS} steps a run, float32\n")
    print("| | steps a second | over the plain scan | goal |")
    print("|---|---|---|---|")
    for name, goal in [("plain scan", ""), ("trainer", "at least 0.9"), ("trainer, progress bar", "at least 0.8")]:
        ratio = statistics.median(p / t for p, t in zip(taken["plain scan"], taken[name], strict=True))
        print(f"| {name} | {NUM_STEPS / statistics.median(taken[name]):.0f} | {ratio:.2f} | {goal} |")
    compiled_cost()
    auto_table()
