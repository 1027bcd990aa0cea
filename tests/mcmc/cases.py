"""The kernels, models and runs that the tests of this folder share."""

from collections.abc import Callable
from typing import Any

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import NUTS

from numpyro_wide.mcmc import (
    MicrocanonicalLangevin,
    PreconditionedCrankNicolson,
    PreconditionedCrankNicolsonLangevin,
    SplitHMC,
    UnderdampedLangevin,
)

ADJUSTED: dict[str, Callable[..., Any]] = {
    "split": SplitHMC,
    "langevin": lambda *args, **kw: UnderdampedLangevin(*args, **{"damping": 0.2, **kw}),
    "pcn": PreconditionedCrankNicolson,
    "pcnl": PreconditionedCrankNicolsonLangevin,
    "split-persistent": lambda *args, **kw: SplitHMC(*args, **{"num_steps": 3, "persistence": 0.7, **kw}),
    "split-whole": lambda *args, **kw: SplitHMC(*args, **{"persistence": 0.0, **kw}),
    "microcanonical": MicrocanonicalLangevin,
}
KERNELS = {
    **ADJUSTED,
    "unadjusted": lambda *args, **kw: UnderdampedLangevin(*args, **{"adjusted": False, **kw}),
    "microcanonical-unadjusted": lambda *args, **kw: MicrocanonicalLangevin(*args, **{"adjusted": False, **kw}),
}
UNADJUSTED = [name for name in KERNELS if name not in ADJUSTED]
# One of each class, and NUTS, for the protocol; of the microcanonical one both forms, whose states differ.
WITH_NUTS = {
    **{name: KERNELS[name] for name in ("split", "langevin", "pcn", "pcnl")},
    "split-whole": KERNELS["split-whole"],
    **{name: KERNELS[name] for name in ("microcanonical", "microcanonical-unadjusted")},
    "nuts": NUTS,
}


def regression(x, y=None):
    """A nonlinear regression with N(0, I) weights and latent noise."""
    weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.4))
    numpyro.deterministic("double_noise", 2 * noise)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.tanh(x @ weights), noise), obs=y)


def regression_data(seed=0):
    key_x, key_y = jax.random.split(jax.random.key(seed))
    return jax.random.normal(key_x, (6, 2)), jax.random.normal(key_y, (6,))


def chain(kernel, state, num_steps, *model_args, keep=lambda state: state):
    """Take steps outside MCMC and stack what ``keep`` takes from each state."""

    def step(state, _):
        state = kernel.sample(state, model_args, {})
        return state, keep(state)

    return jax.jit(lambda state: jax.lax.scan(step, state, length=num_steps))(state)


def check(draws, truth, label):
    """Compare a mean with the truth, in units of its Monte Carlo error; ``draws`` is (chain, draw)."""
    draws = np.asarray(draws, dtype=float)
    ess = float(arviz.ess(draws, method="mean"))
    assert ess > 200, label
    assert abs(draws.mean() - truth) < 4.5 * draws.std() / np.sqrt(ess), label


def set_in_turns(monkeypatch, in_turns):
    """Make chains take turns, or move all at once, whatever the machine."""
    for module in ("_compile", "mcmc._kernel"):
        monkeypatch.setattr(f"numpyro_wide.{module}.is_sequential", lambda: in_turns)
