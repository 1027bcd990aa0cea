"""The eight tasks of a public benchmark of simulation-based inference, as NumPyro models, and their references.

Lueckmann, Boelts, Greenberg, Gonçalves and Macke, "Benchmarking simulation-based inference", AISTATS, gives the
definitions. Latents of interest are the site "theta", data the site "x".
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas
from numpyro.infer import Predictive

NUM_OBSERVATIONS = 5
BATCH_SIZE = 256


class Task(NamedTuple):
    """A task, and whether draws are weighted as well."""

    model: Callable
    is_corrected: bool = False


class Reference(NamedTuple):
    """Observations (5, dim x), and draws of their posteriors (5, draws, dim θ)."""

    observation: np.ndarray
    draws: np.ndarray


def gaussian_linear():
    """Sample the mean of a normal distribution of variance 0.1, and a point."""
    theta = numpyro.sample("theta", dist.Normal(0, 0.1**0.5).expand([10]).to_event(1))
    numpyro.sample("x", dist.Normal(theta, 0.1**0.5).to_event(1))


def gaussian_linear_uniform():
    """The same, with a uniform prior."""
    theta = numpyro.sample("theta", dist.Uniform(-1, 1).expand([10]).to_event(1))
    numpyro.sample("x", dist.Normal(theta, 0.1**0.5).to_event(1))


def gaussian_mixture():
    """Sample a point whose distribution around the mean is wide or narrow."""
    theta = numpyro.sample("theta", dist.Uniform(-10, 10).expand([2]).to_event(1))
    is_narrow = numpyro.sample("is_narrow", dist.Bernoulli(0.5))
    numpyro.sample("x", dist.Normal(theta, jnp.where(is_narrow == 1, 0.1, 1.0)).to_event(1))


def two_moons():
    """Sample a point on a half circle, moved by two functions of the parameters."""
    theta = numpyro.sample("theta", dist.Uniform(-1, 1).expand([2]).to_event(1))
    angle = numpyro.sample("angle", dist.Uniform(-jnp.pi / 2, jnp.pi / 2))
    radius = numpyro.sample("radius", dist.Normal(0.1, 0.01))
    moved = jnp.stack([0.25 - jnp.abs(theta[0] + theta[1]) / 2**0.5, (theta[1] - theta[0]) / 2**0.5])
    numpyro.deterministic("x", radius * jnp.stack([jnp.cos(angle), jnp.sin(angle)]) + moved)


def slcp():
    """Sample four points of a plane, whose mean and covariance five parameters give."""
    theta = numpyro.sample("theta", dist.Uniform(-3, 3).expand([5]).to_event(1))
    scales, correlation = theta[2:4] ** 2, jnp.tanh(theta[4])
    covariance = scales[:, None] * scales * jnp.array([[1, 0], [0, 1]]) + 1e-6 * jnp.eye(2)
    covariance += scales[0] * scales[1] * correlation * jnp.array([[0, 1], [1, 0]])
    points = dist.MultivariateNormal(theta[:2], covariance).expand([4]).to_event(1)
    numpyro.deterministic("x", numpyro.sample("points", points).reshape(8))


def bernoulli_glm(design_matrix):
    """Return the task of a design (100, 10): spikes of a neuron, by their sufficient statistics."""
    second = np.eye(9) - np.eye(9, k=-1)
    differences = second @ second + np.diag(np.sqrt(np.arange(9) / 9))
    precision = np.zeros((10, 10))
    precision[0, 0], precision[1:, 1:] = 0.5, differences.T @ differences
    design_matrix = jnp.asarray(design_matrix, jnp.float32)

    def model():
        prior = dist.MultivariateNormal(jnp.zeros(10), precision_matrix=jnp.asarray(precision, jnp.float32))
        theta = numpyro.sample("theta", prior)
        spikes = numpyro.sample("spikes", dist.Bernoulli(logits=design_matrix @ theta).to_event(1))
        numpyro.deterministic("x", design_matrix.T @ spikes.astype(jnp.float32))

    return model


def runge_kutta(slope, start, step, num_steps, num_records):
    """Solve an equation with steps of one length; states (num_records, ...), the first the start."""

    def take(state, _):
        first = slope(state)
        second = slope(state + step / 2 * first)
        third = slope(state + step / 2 * second)
        last = slope(state + step * third)
        return state + step / 6 * (first + 2 * second + 2 * third + last), None

    def record(state, _):
        return jax.lax.scan(take, state, length=num_steps)[0], state

    return jax.lax.scan(record, start, length=num_records)[1]


def sir():
    """Sample counts of infected among 1000 of a million people, on ten days."""
    theta = numpyro.sample("theta", dist.LogNormal(jnp.log(jnp.array([0.4, 0.125])), jnp.array([0.5, 0.2])).to_event(1))
    people = 1e6

    def slope(state):
        infections = theta[0] * state[0] * state[1] / people
        return jnp.stack([-infections, infections - theta[1] * state[1]])

    infected = runge_kutta(slope, jnp.array([people - 1, 1.0]), 17 / 68, 68, 10)[:, 1]
    numpyro.sample("x", dist.Binomial(1000, jnp.clip(infected / people, 0, 1)).to_event(1))


def lotka_volterra():
    """Sample noisy numbers of prey, and then of predators, at ten times."""
    loc = jnp.array([-0.125, -3.0, -0.125, -3.0])
    theta = numpyro.sample("theta", dist.LogNormal(loc, 0.5).to_event(1))

    def slope(state):
        meals = state[0] * state[1]
        return jnp.stack([theta[0] * state[0] - theta[1] * meals, theta[3] * meals - theta[2] * state[1]])

    states = runge_kutta(slope, jnp.array([30.0, 1.0]), 2.1 / 50, 50, 10)
    numpyro.sample("x", dist.LogNormal(jnp.log(jnp.clip(states.T.reshape(20), 1e-10, 1e4)), 0.1).to_event(1))


TASKS = {
    "gaussian_linear": Task(gaussian_linear),
    "gaussian_linear_uniform": Task(gaussian_linear_uniform),
    "gaussian_mixture": Task(gaussian_mixture),
    "two_moons": Task(two_moons),
    "slcp": Task(slcp),
    "bernoulli_glm": Task(bernoulli_glm),
    "sir": Task(sir, is_corrected=True),
    "lotka_volterra": Task(lotka_volterra, is_corrected=True),
}


def load(name: str, folder: Path | None) -> tuple[Callable, Reference]:
    """Return a task's model and references; without a folder those of "gaussian_linear", made here in closed form."""
    model = TASKS[name].model
    if folder is None:
        if name != "gaussian_linear":
            raise SystemExit(f"{name} needs the folder of published references, --data")
        rng = np.random.default_rng(0)
        observation = 0.2**0.5 * rng.normal(size=(NUM_OBSERVATIONS, 10))
        draws = observation[:, None] / 2 + 0.05**0.5 * rng.normal(size=(NUM_OBSERVATIONS, 10_000, 10))
        return model, Reference(observation, draws)
    with np.load(folder / f"{name}.npz") as file:
        if name == "bernoulli_glm":
            model = bernoulli_glm(file["design_matrix"])
        return model, Reference(file["observation"], file["reference"])


def simulations_of(model, budget: int, seed: int) -> dict[str, np.ndarray]:
    """Simulate a budget; NumPy arrays of "theta" and "x"."""
    single = Predictive(model, num_samples=1, return_sites=["theta", "x"])
    keys = jax.random.split(jax.random.key(1000 + seed), budget)
    draws = jax.jit(lambda keys: jax.lax.map(single, keys, batch_size=min(budget, 1000)))(keys)
    return {name: np.asarray(values)[:, 0] for name, values in draws.items()}


def lengths_of(budget: int, num_epochs: int) -> tuple[int, int, int]:
    """Return the numbers of simulations held out and of a batch, and of steps."""
    held_out = budget // 10
    batch_size = min(BATCH_SIZE, (budget - held_out) // 4)
    return held_out, batch_size, num_epochs * ((budget - held_out) // batch_size)


def published(folder: Path | None) -> dict[tuple[str, int, str], float]:
    """Return the published scores by task, number of simulations and algorithm."""
    if folder is None:
        return {}
    table = pandas.read_csv(folder / "published.csv")
    rerun = table["task"].str.contains("rerun")
    table = table[(table["task"] != "gaussian_mixture") | rerun]
    names = table["task"].str.replace(" (rerun)", "", regex=False)
    keys = zip(names, table["num_simulations"], table["algorithm"], strict=True)
    return dict(zip(keys, table["c2st_mean"], strict=True))
