"""Chains of finite networks of classes: as they are, repriorised, on one-hot codes; and what their draws cost."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import NUTS, Gibbs

import _chains
import _common
from _fashion_baselines import scales_by_evidence
from _fashion_data import shares_of_largest
from _sampling import first_states, stretch_of
from numpyro_wide import collapse_readout, fitted_surrogate, mean_kernel, repriorise, wide_limit
from numpyro_wide.linear_gaussian import readout_posterior
from numpyro_wide.mcmc import MicrocanonicalLangevin, SplitHMC
from numpyro_wide.nn import FCN, random_network
from numpyro_wide.readout import site_function
from numpyro_wide.surrogates import class_contrasts

NUM_CHAINS = 2
BLOCK = 256  # rows of a kernel at a time
STRETCH = 25  # draws that are compiled as one
NAMES = {"readout": "readout", "features": "features"}


class Way(NamedTuple):
    """A way to sample.

    Attributes:
        kernel: function from a model to a kernel.
        thinning: number of its steps that make a draw.
        warmup: multiple of the option's draws of warmup that it takes: few where draws are dear.
        surrogate: surrogate with which the readout is repriorised, or "": "limit", fitted at the wide limit; "by
            class", the same with a weight for each class of a row; "pilot", fitted to the mean kernel of a pilot run.
        is_cold: whether the likelihood is taken to a power.
    """

    kernel: Callable
    thinning: int
    warmup: float = 1.0
    surrogate: str = ""
    is_cold: bool = False


def _microcanonical(model):
    return MicrocanonicalLangevin(model, adjusted=False)


def _whole(model):
    return SplitHMC(model, persistence=0.0)


def _by_blocks(model):
    """Sample the hidden weights, then the readout given the features, with smaller steps at a lower price."""
    options = {"find_heuristic_step_size": False}  # a block may not look for one
    weights = SplitHMC(model, num_steps=6, persistence=0.8, **options)
    readout = SplitHMC(model, num_steps=16, persistence=0.5, **options)
    return Gibbs([(weights, None), (readout, ["readout"])])  # None: all other sites


MICROCANONICAL = Way(_microcanonical, 10)
WAYS = {
    "microcanonical": MICROCANONICAL,
    "cold": MICROCANONICAL._replace(is_cold=True),
    "persistent": Way(SplitHMC, 4, 0.2),
    "blocks": Way(_by_blocks, 1, 2.0),
    "surrogate": Way(SplitHMC, 4, 0.2, surrogate="limit"),
    "surrogate by class": Way(SplitHMC, 4, 0.2, surrogate="by class"),
    "surrogate of a pilot": Way(SplitHMC, 4, 0.2, surrogate="pilot"),
    "whole trajectories": Way(_whole, 1, 0.2),
    "NUTS": Way(NUTS, 1, 0.2),
}
CODES = Way(SplitHMC, 1, 0.2)


@dataclass(frozen=True, eq=False)
class Task:
    """Options of the command line, hashable for what is cached."""

    options: argparse.Namespace


def limit_kernel(network):
    """Return both kernels of a flax network that is infinitely wide, computed by blocks, as a function of inputs."""
    return wide_limit.kernel(network, block_size=BLOCK)


def kernel_of(network, *x):
    """Return the covariance of the function values of an output."""
    return np.asarray(limit_kernel(network)(*x)[0])


def times(network, scale):
    """Multiply the readout's scales of a network, which it must state, by a number."""
    return network.clone(readout_w_std=scale * network.readout_w_std, readout_b_std=scale * network.readout_b_std)


def with_readout_scale(scale):
    """Return one GELU layer whose prior function values have a standard deviation of about this."""
    return times(FCN(1, 1, "gelu", **FCN(1, 1, "gelu", b_std=0.5).scales()), scale)


class Cost(NamedTuple):
    """What the draws of the chains tell and cost.

    Attributes:
        rhat: largest R-hat of the predicted probabilities.
        ess: ArviZ's effective draws of 100 projections of the function at test rows, their mean.
        worst_ess: the least of them.
        gradients: gradients of all chains after warmup.
        seconds: seconds of a core after warmup.
        total: seconds of a core, compilation, warmup and predictions included.
    """

    rhat: float
    ess: float
    worst_ess: float
    gradients: float
    seconds: float
    total: float


def _features(network, x):
    """Sample the hidden weights, and record the scaled features (n, d)."""
    return numpyro.deterministic("features", random_network("hidden", network, x)(x))


def on_classes(x, labels=None, *, network, num_classes, power=1.0):
    """Sample a network of classes: one logit, or contrasts of several; the likelihood to a power."""
    features = _features(network, x)
    shape = (features.shape[1],) if num_classes == 2 else (features.shape[1], num_classes - 1)
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand(shape).to_event(len(shape)))
    function = numpyro.deterministic("function", features @ readout)
    with numpyro.plate("rows", len(x)), numpyro.handlers.scale(scale=power):
        numpyro.sample("label", _likelihood(function), obs=labels)


def on_codes(x, codes=None, *, network, num_classes, noise):
    """Sample a network that regresses on one-hot codes."""
    features = _features(network, x)
    prior = dist.Normal(0, 1).expand((features.shape[1], num_classes))
    function = features @ numpyro.sample("readout", prior.to_event(2))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("codes", dist.Normal(function, noise).to_event(1), obs=codes)


def _likelihood(function):
    if function.ndim == 1:
        return dist.Bernoulli(logits=function)
    return dist.Categorical(logits=function @ class_contrasts(function.shape[1] + 1).T)


def probabilities(function):
    """Return probabilities of classes, (..., n, classes), of function values (..., n) or contrasts of logits."""
    if function.ndim == 1:
        one = jax.nn.sigmoid(function)
        return jnp.stack([1 - one, one], axis=-1)
    return jax.nn.softmax(function @ class_contrasts(function.shape[-1] + 1).T)


def of_network(table, network, way, options):
    """Sample the network in a way: probabilities of the test rows, (n, classes), and the cost."""
    start = time.process_time()
    finite = {"network": network.clone(width=options.width), "num_classes": table.num_classes}
    plain = model = partial(on_classes, **finite, power=options.power if way.is_cold else 1.0)
    if way.surrogate:
        kernel = _pilot_kernel(plain, table, options) if way.surrogate == "pilot" else kernel_of(network, table.x)
        surrogate = surrogate_of(kernel, table)
        if way.surrogate == "by class":
            surrogate = _by_class(surrogate, kernel, table)
        model = repriorise(plain, **NAMES, targets="labels", surrogate=surrogate)
    kernel, function = way.kernel(model), site_function(plain, "function", table.x_test)

    def predict(draw):
        sites = kernel.postprocess_fn((table.x, table.labels), {})(draw) if way.surrogate else draw
        found = function({name: sites[name] for name in sites if name == "readout" or name.startswith("hidden")})
        return found, probabilities(found)

    return _run(kernel, (table.x, table.labels), predict, way, options, start)


def surrogate_of(kernel, table):
    """Fit a surrogate to the covariance of function values."""
    if table.num_classes == 2:
        return fitted_surrogate(table.labels, "bernoulli", kernel)
    return fitted_surrogate(table.labels, "categorical", kernel, num_classes=table.num_classes, contrasts=True)


def _pilot_kernel(plain, table, options):
    """Return the mean kernel of the features over unadjusted microcanonical chains, those of the other ways' warmup."""
    args = jnp.asarray(table.x), jnp.asarray(table.labels)
    pilot, num_warm = MICROCANONICAL.kernel(plain), max(1, options.num_warmup // STRETCH)
    state = first_states(pilot, args, NUM_CHAINS, num_warm * STRETCH * MICROCANONICAL.thinning)
    stretch = stretch_of(pilot, args, STRETCH, MICROCANONICAL.thinning)
    for _ in range(num_warm + 1):
        state, (positions, _) = stretch(state)
    draws = {name: values.reshape(-1, *values.shape[2:]) for name, values in positions.items()}
    hidden = {name: values for name, values in draws.items() if name.startswith("hidden")}
    return mean_kernel(jax.random.key(4), plain, "features", table.x, samples=hidden)


def _by_class(surrogate, kernel, table):
    """Give each class of a row a weight of its own: Laplace's, at the mean of the surrogate's posterior."""
    if table.num_classes == 2:
        return surrogate  # one logit
    noise = np.broadcast_to(np.asarray(surrogate.noise_scale, float).reshape(-1, 1), (len(table.x), 1))
    mean = kernel @ np.linalg.solve(kernel + np.diag(noise[:, 0] ** 2), np.asarray(surrogate.targets, float))
    contrasts = np.asarray(class_contrasts(table.num_classes), float)
    probs = np.asarray(jax.nn.softmax(mean @ contrasts.T))
    slopes = (np.eye(table.num_classes)[table.labels] - probs) @ contrasts
    weights = probs @ contrasts**2 - (probs @ contrasts) ** 2
    weights = np.maximum(weights, 1 / np.max(noise) ** 2)  # no less than the least of the rows'
    return surrogate._replace(targets=np.float32(mean + slopes / weights), noise_scale=np.float32(weights**-0.5))


def of_codes(table, network, options, way=CODES, least_noise=0.0):
    """Sample the network on one-hot codes, the readout integrated out; scale and noise by the limit's evidence."""
    start = time.process_time()
    scale, noise = scales_by_evidence(kernel_of(network, table.x), table.labels, least_noise)
    finite = {"network": times(network, scale).clone(width=options.width), "num_classes": table.num_classes}
    plain = partial(on_codes, **finite, noise=noise)
    codes = np.float32(_common.centred_codes(table.labels, table.num_classes))
    features = [site_function(plain, "features", x) for x in (table.x, table.x_test)]

    def predict(draw):
        known, new = (of_rows(draw) for of_rows in features)
        mean, covariance = readout_posterior(known, codes, noise)
        variance = jnp.sum((new @ covariance) * new, axis=1)
        return new @ mean, shares_of_largest(new @ mean, variance + noise**2)

    model = collapse_readout(plain, **NAMES, observed="codes")
    return _run(way.kernel(model), (table.x, codes), predict, way, options, start)


def _run(kernel, args, predict, way, options, start):
    """Run the chains: probabilities averaged over their draws, and what they cost."""
    args = tuple(map(jnp.asarray, args))
    counts = way.warmup * options.num_warmup, options.num_samples
    num_warm, num_kept = (max(1, round(count / STRETCH)) for count in counts)
    num_steps = num_warm * STRETCH * way.thinning
    state = first_states(kernel, args, NUM_CHAINS, num_steps)
    stretch = stretch_of(kernel, args, STRETCH, way.thinning)
    predicted = jax.jit(partial(jax.lax.map, partial(jax.lax.map, predict)))
    found, gradients, seconds = [], 0, 0.0
    for i in range(num_warm + num_kept):
        before = time.process_time()
        state, (positions, (costs, _)) = jax.block_until_ready(stretch(state))
        if i >= num_warm:
            seconds += time.process_time() - before
            gradients += int(np.sum(costs))
            found.append(predicted(positions))
    function, probs = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    ess = _chains.bulk_ess(_chains.projected({"function": function}, jax.random.key(2)))
    moves = probs.std(axis=(0, 1)) > 1e-6  # what is as good as certain in all draws has no R-hat
    rhat = np.max(_chains.rhat(probs[:, :, moves]), initial=1.0)
    total = time.process_time() - start
    return probs.mean(axis=(0, 1)), Cost(rhat, ess.mean(), ess.min(), gradients, seconds, total)
