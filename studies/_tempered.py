"""Digits, the network, and its mean-field fits at any temperature, for the studies of cold posteriors."""

from typing import Any, NamedTuple

import jax
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_sample

import _common
import _data
from numpyro_wide import TemperedTraceMeanFieldELBO

PRIOR_SCALE = 0.2**0.5  # every weight N(0, 1/5), as in the paper
CUBIC_NOISE = 0.001**0.5


class Fit(NamedTuple):
    """Draws of the weights by site, (num_draws, ...), and the guide's parameters by name."""

    draws: dict[str, Any]
    params: dict[str, Any]


def digits(num_train):
    """Return digits from 0 to 1 with a column of ones: those to train on, and the others."""
    parts = _data.split(_data.digits(), num_train, 1797 - num_train, seed=0)
    return [part._replace(inputs=_common.with_ones(part.inputs.reshape(-1, 64) / 16)) for part in parts]


def network(x, y=None, *, width, outputs):
    """Sample a ReLU layer, its output divided by the width; classes for several outputs, a regression for one."""
    prior = dist.Normal(0, PRIOR_SCALE)
    hidden = numpyro.sample("hidden", prior.expand([x.shape[1], width]).to_event(2))
    readout = numpyro.sample("readout", prior.expand([width, outputs]).to_event(2))
    function = numpyro.deterministic("function", jax.nn.relu(x @ hidden) @ readout / width)
    with numpyro.plate("rows", x.shape[0]):
        is_class = outputs > 1
        likelihood = dist.Categorical(logits=function) if is_class else dist.Normal(function[:, 0], CUBIC_NOISE)
        numpyro.sample("y", likelihood, obs=y)


def fitter(model, num_steps, num_particles, num_draws):
    """Compile a function from eta and data to a :class:`Fit`."""
    guide = AutoNormal(model, init_loc_fn=init_to_sample, init_scale=0.1 * PRIOR_SCALE)
    optimiser = optax.adam(optax.cosine_decay_schedule(0.03, num_steps))

    @jax.jit
    def fit(eta, x, y):
        svi = SVI(model, guide, optimiser, TemperedTraceMeanFieldELBO(eta=eta, num_particles=num_particles))
        state = svi.init(jax.random.key(0), x, y)
        state, _ = jax.lax.scan(lambda s, _: svi.update(s, x, y), state, length=num_steps)
        params = svi.get_params(state)
        return Fit(guide.sample_posterior(jax.random.key(1), params, sample_shape=(num_draws,)), params)

    return fit


def functions(draws, x, width):
    """Return the network's outputs (num_draws, n, outputs)."""
    return jax.lax.map(lambda draw: jax.nn.relu(x @ draw["hidden"]) @ draw["readout"] / width, draws)
