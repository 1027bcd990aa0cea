"""Fixtures of the infinite-width tests: strict maths, and a plain network to hold against its limit."""

import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest


@pytest.fixture(autouse=True)
def no_nans() -> Iterator[None]:
    """Make any NaN an error, in the forward or in the backward pass."""
    with jax.debug_nans(True):
        yield


class Network:
    """A fully connected network in the NTK parametrisation, in plain JAX."""

    def __init__(
        self,
        activation: Callable = jax.lax.erf,
        *,
        w_std: float = 1.3,
        b_std: float = 0.4,
        readout_w_std: float = 0.8,
        readout_b_std: float = 0.2,
    ):
        self.activation = activation
        self.hidden, self.readout = (w_std, b_std), (readout_w_std, readout_b_std)

    def init(self, rng_key: jax.Array, sizes: list[int]) -> list[dict[str, jax.Array]]:
        """Draw N(0, 1) parameters for layers of the given sizes, inputs first and outputs last."""
        params = []
        for num_in, num_out in itertools.pairwise(sizes):
            rng_key, key_w, key_b = jax.random.split(rng_key, 3)
            weights = jax.random.normal(key_w, (num_in, num_out))
            params.append({"w": weights, "b": jax.random.normal(key_b, (num_out,))})
        return params

    def hidden_layers(self, params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        """Return the last hidden layer, (n, width)."""
        for layer in params[:-1]:
            x = self.activation(self._affine(layer, x, *self.hidden))
        return x

    def features(self, params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        """Return what the readout weights multiply, its bias column last, (n, width + 1)."""
        last = self.hidden_layers(params, x)
        bias = jnp.full((x.shape[0], 1), self.readout[1], x.dtype)
        return jnp.concatenate([last * (self.readout[0] / last.shape[1] ** 0.5), bias], axis=1)

    def __call__(self, params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        """Return the outputs, (n, k)."""
        return self._affine(params[-1], self.hidden_layers(params, x), *self.readout)

    @staticmethod
    def _affine(layer: dict[str, jax.Array], x: jax.Array, w_std: float, b_std: float) -> jax.Array:
        return x @ layer["w"] * (w_std / x.shape[1] ** 0.5) + b_std * layer["b"][None, :]


@pytest.fixture
def make_network() -> type[Network]:
    return Network
