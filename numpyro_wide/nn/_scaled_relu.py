"""The amortised encoder of the paper, with the network that is linear in the same parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import is_known, whole_number


class ScaledReLU(linen.Module):
    r"""Two-layer network in the NTK parametrisation whose output starts at zero (McNamara 2025, Appendix C).

    $f_i(x) = p^{-1/2} \sum_{j \le p} a_{ij} \max(0, x^\top w_j)$ with $w_j \sim N(0, I)$ and a = 0 at the
    start, both trained (Mathematics, :eq:`encoder`). As the width p grows, its tangent kernel at the start tends to
    $\delta_{kl} E[\max(0, x^\top w) \max(0, x'^\top w)]$ (their Lemma 9), and stays there during training. No
    biases: append a constant to x for one.

    Attributes:
        width: p, the number of hidden units.
        num_outputs: number of outputs, the natural parameters of a guide.

    Raises:
        ValueError: at ``init`` or ``apply``, if one of them is not a positive whole number.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide import nn
        >>> encoder = nn.ScaledReLU(width=64, num_outputs=2)
        >>> params = encoder.init(jax.random.key(0), jnp.ones((1, 3)))
        >>> encoder.apply(params, jnp.ones((5, 3))).shape
        (5, 2)
        >>> encoder.apply(params, jnp.ones((5, 3)), method="features").shape
        (5, 64)
    """

    width: int
    num_outputs: int

    def setup(self) -> None:
        """Make the two layers."""
        for name in ("width", "num_outputs"):
            whole_number(name, getattr(self, name))
        self.hidden = linen.Dense(self.width, use_bias=False, kernel_init=linen.initializers.normal(1.0))
        self.readout = linen.Dense(self.num_outputs, use_bias=False, kernel_init=linen.initializers.zeros)

    def features(self, x: Array) -> Array:
        """Return what the readout multiplies, p^(-1/2) max(0, x·w), (..., p), for inputs (..., d)."""
        return linen.relu(self.hidden(x)) * self.width**-0.5

    def __call__(self, x: Array) -> Array:
        """Return outputs (..., num_outputs) for inputs (..., d)."""
        return self.readout(self.features(x))

    @linen.nowrap
    def linearize(self, params0: Any) -> Callable[[Any, ArrayLike], Array]:
        """Linearise the encoder in its parameters around ``params0`` (McNamara 2025, Section 5).

        The same function as ``wide_limit.linearize(encoder.apply, params0)``, at less than half of its cost: where
        the readout of ``params0`` is zero, as at the start, the hidden weights have no first-order effect, and what is
        left is the linear model of the readout on fixed random features.

        Args:
            params0: parameters, those that ``encoder.init`` returned or later ones.

        Returns:
            A function ``linear(params, x)`` with ``params`` of the structure of ``params0``, whose outputs have the
            shape of those of ``encoder.apply``.

        Raises:
            ValueError: if ``params0``, or later ``params``, are not the encoder's parameters.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from numpyro_wide import nn
            >>> encoder = nn.ScaledReLU(width=64, num_outputs=2)
            >>> params0 = encoder.init(jax.random.key(0), jnp.ones((1, 3)))
            >>> encoder.linearize(params0)(params0, jnp.ones((5, 3))).shape
            (5, 2)
        """
        hidden0, readout0 = _weights(self, params0)
        # in NumPy, for a known array of jax.numpy becomes an unknown one by any operation under jit
        is_at_start = is_known(readout0) and not np.asarray(readout0).any()

        def linear(params: Any, x: ArrayLike) -> Array:
            """Evaluate the linearised network."""
            hidden, readout = _weights(self, params)
            preactivations = x @ hidden0
            outputs = linen.relu(preactivations) @ readout
            if not is_at_start:
                outputs += jnp.where(preactivations > 0, x @ (hidden - hidden0), 0) @ readout0
            return outputs * self.width**-0.5

        return linear


def _weights(encoder: ScaledReLU, params: Any) -> tuple[Array, Array]:
    """Return the hidden weights (d, p) and the readout's (p, num_outputs)."""
    try:
        layers = params["params"]
        hidden, readout = layers["hidden"]["kernel"], layers["readout"]["kernel"]
        shapes = hidden.shape[1:], readout.shape
    except (KeyError, TypeError, IndexError, AttributeError):
        shapes = None
    expected = (encoder.width,), (encoder.width, encoder.num_outputs)
    if shapes != expected:
        raise ValueError(
            f"expected what {encoder!r}.init returns, {{'params': {{'hidden': {{'kernel': (d, {encoder.width})}}, "
            f"'readout': {{'kernel': {expected[1]}}}}}}}, but got {jax.tree.map(jnp.shape, params)}."
        )
    return hidden, readout
