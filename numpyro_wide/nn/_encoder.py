"""A network that summarises data for an amortised guide."""

import jax.numpy as jnp
from flax import linen
from jax import Array

from numpyro_wide._checks import as_floats, whole_number


class ResidualEncoder(linen.Module):
    """Fully connected residual network of GELU units, from data to features, with flax's own parametrisation.

    The data are among the features, so that what is linear in them need not be learnt by units.

    Attributes:
        width: number of units in each layer.
        depth: number of hidden layers.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.nn import ResidualEncoder
        >>> encoder = ResidualEncoder(width=100)
        >>> encoder.apply(encoder.init(jax.random.key(0), jnp.ones((1, 3))), jnp.ones((5, 3))).shape
        (5, 103)
    """

    width: int = 256
    depth: int = 3

    @linen.compact
    def __call__(self, x: Array) -> Array:
        """Return features (n, width + d) of data (n, ...), d numbers a row."""
        whole_number("width", self.width)
        whole_number("depth", self.depth)
        (x,) = as_floats(x, names=("x",))
        x = x.reshape(len(x), -1)
        dense = [linen.Dense(self.width, param_dtype=x.dtype, name=f"hidden_{i}") for i in range(self.depth)]
        features = linen.gelu(dense[0](x))
        for layer in dense[1:]:
            features = features + linen.gelu(layer(features))
        return jnp.concatenate([features, x], axis=1)
