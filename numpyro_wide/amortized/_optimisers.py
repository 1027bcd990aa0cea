"""Optimisers of NumPyro, optax and JAX as optimisers of NumPyro."""

from typing import Any

from jax.example_libraries import optimizers
from numpyro.optim import Minimize, _NumPyroOptim, optax_to_numpyro


def as_numpyro_optim(optim: Any) -> _NumPyroOptim:
    """Return the optimiser as one of ``numpyro.optim``.

    Raises:
        TypeError: if it is not an optimiser, or one that needs a loss without noise.
    """
    if isinstance(optim, Minimize):
        raise TypeError("Minimize needs a loss that is not random; pass a stochastic optimiser, such as optim.Adam.")
    if isinstance(optim, _NumPyroOptim):
        return optim
    if isinstance(optim, optimizers.Optimizer):
        return _NumPyroOptim(lambda *functions: functions, *optim)
    import optax  # NumPyro runs without it

    if isinstance(optim, optax.GradientTransformation):
        return optax_to_numpyro(optim)
    raise TypeError(f"optim must be an optimiser of numpyro.optim or optax, got {type(optim).__name__}.")
