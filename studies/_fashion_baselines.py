"""Rivals of networks on Fashion-MNIST: logistic regression, infinitely wide networks, a deep ensemble."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

import _class_rivals
import _common
from _fashion_data import NUM_CLASSES, shares_of_largest
from numpyro_wide.surrogates import class_contrasts
from numpyro_wide.wide_limit import gp_posterior

BATCH = 100


def logistic_regression(images):
    """Return probabilities at test and at shifted images; the penalty is chosen by cross-validation."""
    model = _class_rivals.logistic_regression(images.x, images.labels)
    return model.predict_proba(images.x_test), model.predict_proba(images.x_shifted)


def scales_by_evidence(kernel, labels, least_noise=0.0):
    """Find the scales of a kernel (n, n) and of the noise that make codes most probable, by a grid of their ratios.

    Args:
        kernel: kernel of the rows.
        labels: their classes.
        least_noise: what the noise is at least.
    """
    values, vectors = np.linalg.eigh(np.asarray(kernel, float))
    squares = (vectors.T @ _common.centred_codes(labels, int(np.max(labels)) + 1)) ** 2

    def evidence(ratio):
        spectrum = np.maximum(values, 0) + ratio
        scale = np.mean(squares / spectrum[:, None])  # the best one for this ratio
        return -np.sum(np.log(scale * spectrum)), scale, ratio

    found = [evidence(ratio) for ratio in np.mean(values) * np.logspace(-5, 1, 25)]
    _, scale, ratio = max(of_ratio for of_ratio in found if of_ratio[1] * of_ratio[2] >= least_noise**2)
    return scale**0.5, (scale * ratio) ** 0.5


def infinite_regression(kernel, scale, noise, x, labels, *elsewhere):
    """Predict by the infinitely wide network on one-hot codes."""
    targets = _common.centred_codes(labels, NUM_CLASSES)

    def probabilities(x_new):
        parts = (scale**2 * kernel(*pair)[0] for pair in ((x,), (x_new, x), (x_new,)))
        mean, covariance = gp_posterior(*parts, targets, noise)
        return shares_of_largest(mean, jnp.diag(covariance) + noise**2)

    return tuple(map(probabilities, elsewhere))


def infinite_softmax(kernel, surrogate, x, *elsewhere):
    """Predict by the variational posterior of the infinitely wide classifier: that of its surrogate."""
    train = kernel(x)[0]
    normals = np.random.default_rng(0).normal(size=(500, NUM_CLASSES - 1))

    def probabilities(x_new):
        noise = surrogate.noise_scale[:, 0]
        mean, covariance = gp_posterior(train, kernel(x_new, x)[0], kernel(x_new)[0], surrogate.targets, noise)
        sd = jnp.sqrt(jnp.diag(covariance))[:, None]
        logits = (mean + sd * z for z in np.concatenate([normals, -normals]))
        return sum(jax.nn.softmax(f @ class_contrasts(NUM_CLASSES).T) for f in logits) / (2 * len(normals))

    return tuple(map(probabilities, elsewhere))


class Network(linen.Module):
    """The network of the study with flax's initial weights, for an optimiser."""

    depth: int
    width: int

    @linen.compact
    def __call__(self, x):
        """Return logits (n, classes)."""
        for _ in range(self.depth):
            x = linen.gelu(linen.Dense(self.width)(x), approximate=False)
        return linen.Dense(NUM_CLASSES)(x)


class ConvolutionalNetwork(linen.Module):
    """ReLU layers of 3 x 3 filters with flax's initial weights, for an optimiser."""

    depth: int
    width: int

    @linen.compact
    def __call__(self, x):
        """Return logits (n, classes) of images (n, height, width, 1)."""
        for _ in range(self.depth):
            x = linen.relu(linen.Conv(self.width, (3, 3))(x))
        return linen.Dense(NUM_CLASSES)(x.reshape(len(x), -1))


def ensemble(network, x, labels, *elsewhere, num_members=5, num_epochs=60):
    """Average probabilities of networks trained by AdamW; a tenth of the rows chooses when each stops."""
    optimiser = optax.adamw(1e-3, weight_decay=1e-2)
    epoch = _epoch(network, optimiser)
    probs = []
    for seed in range(num_members):
        order = np.random.default_rng(seed).permutation(len(x))
        held_out, rows = ((x[part], labels[part]) for part in np.split(order, [len(order) // 10]))
        params = network.init(jax.random.key(seed), x[:1])
        state, best = optimiser.init(params), (np.inf, params)
        for key in jax.random.split(jax.random.key(seed + 100), num_epochs):
            params, state, loss = epoch(params, state, key, rows, held_out)
            best = min(best, (float(loss), params), key=lambda pair: pair[0])
        probs.append([jax.nn.softmax(network.apply(best[1], x_new)) for x_new in elsewhere])
    return tuple(sum(parts) / num_members for parts in zip(*probs, strict=True))


def _epoch(network, optimiser):
    """Compile a pass over shuffled rows, and the loss on others."""

    def loss(params, x, labels):
        return optax.softmax_cross_entropy_with_integer_labels(network.apply(params, x), labels).mean()

    @jax.jit
    def step(params, state, *batch):
        updates, state = optimiser.update(jax.grad(loss)(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    held_out_loss = jax.jit(loss)

    def epoch(params, state, key, rows, held_out):
        num_rows = len(rows[1])
        batch = min(BATCH, num_rows)
        order = np.asarray(jax.random.permutation(key, num_rows))
        # Not a loop of XLA's, in which flax's convolutions are slow on a CPU.
        for first in range(0, num_rows - num_rows % batch, batch):
            params, state = step(params, state, *(part[order[first : first + batch]] for part in rows))
        return params, state, held_out_loss(params, *held_out)

    return epoch
