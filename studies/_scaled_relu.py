"""The encoder and the learning rate of globally convergent amortised inference (McNamara et al. 2025)."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen
from jax import Array
from jax.core import Tracer


class ScaledReLU(linen.Module):
    r"""Two-layer network in the NTK parametrisation whose output starts at zero (their Appendix C).

    $f_i(x) = p^{-1/2} \sum_{j \le p} a_{ij} \max(0, x^\top w_j)$ with $w_j \sim N(0, I)$ and a = 0 at the start, both
    trained. As the width p grows, its tangent kernel at the start tends to
    $\delta_{kl} E[\max(0, x^\top w) \max(0, x'^\top w)]$ (their Lemma 9), and stays there during training. No biases:
    append a constant to x for one.
    """

    width: int
    num_outputs: int

    def setup(self) -> None:
        """Make the two layers."""
        self.hidden = linen.Dense(self.width, use_bias=False, kernel_init=linen.initializers.normal(1.0))
        self.readout = linen.Dense(self.num_outputs, use_bias=False, kernel_init=linen.initializers.zeros)

    def __call__(self, x: Array) -> Array:
        """Return outputs (..., num_outputs) for inputs (..., d)."""
        return self.readout(linen.relu(self.hidden(x)) * self.width**-0.5)

    @linen.nowrap
    def linearize(self, params0: Any) -> Callable[[Any, Array], Array]:
        """Return the encoder linearised in its parameters around ``params0``, linear(params, x) (their Section 5).

        The same function as ``wide_limit.linearize(encoder.apply, params0)``, at less than half of its cost: where
        the readout of ``params0`` is zero, as at the start, the hidden weights have no first-order effect, and what is
        left is the linear model of the readout on fixed random features.
        """
        hidden0, readout0 = _weights(params0)
        is_at_start = not isinstance(readout0, Tracer) and not np.asarray(readout0).any()

        def linear(params: Any, x: Array) -> Array:
            hidden, readout = _weights(params)
            preactivations = x @ hidden0
            outputs = linen.relu(preactivations) @ readout
            if not is_at_start:
                outputs += jnp.where(preactivations > 0, x @ (hidden - hidden0), 0) @ readout0
            return outputs * self.width**-0.5

        return linear


def _weights(params: Any) -> tuple[Array, Array]:
    """Return the hidden weights (d, p) and the readout's (p, num_outputs)."""
    return params["params"]["hidden"]["kernel"], params["params"]["readout"]["kernel"]


def inverse_time_schedule(init_value: float, slowdown: float = 10.0) -> Callable[[Array], Array]:
    """Return the optax schedule 1 / (1/r₀ + t / slowdown) at step t, with r₀ = ``init_value`` (their Appendix E)."""
    return lambda count: init_value / (1 + jnp.asarray(count, float) * (init_value / slowdown))
