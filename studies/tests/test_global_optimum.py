"""McNamara 2025, Lemma 3 and Theorem 4: wide encoders reach the best guide there is, and follow the limiting flow.

The rotation of section 5, without its simulations: the expected forward KL is an integral over a circle, which a grid
has to all digits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.special

from studies._scaled_relu import ScaledReLU
from studies._von_mises import VonMises

NOISE = 0.5
ANGLES = np.linspace(0, 2 * np.pi, 48, endpoint=False)
X = np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1)
NODES, MASS = np.polynomial.hermite_e.hermegauss(24)
MASS = MASS / MASS.sum()
STEP = 2.0


def losses(eta):
    """Expected negative log density of the guide at each observation, (48,), natural parameters (48, 2)."""
    values = jnp.asarray(ANGLES[:, None] - NOISE * NODES)  # the angle given the observation, before its perturbation
    return -VonMises(eta[:, None]).log_prob(values) @ MASS


def best():
    """The smallest loss: a concentration whose mean length is that of the posterior, by SciPy."""
    length = np.exp(-(NOISE**2) / 2)
    mean_length = lambda k: scipy.special.i1e(k) / scipy.special.i0e(k)  # noqa: E731
    concentration = scipy.optimize.brentq(lambda k: mean_length(k) - length, 0.1, 100)
    return np.log(2 * np.pi * scipy.special.i0e(concentration)) + concentration * (1 - length)


def slope(eta):
    """Of the mean loss, times the number of observations that the mean is over; (48, 2)."""
    return jax.grad(lambda eta: losses(eta).mean())(eta)


def after_training(width, num_steps, seed):
    """Outputs of an encoder of this width after plain gradient descent from its start, (48, 2)."""
    encoder = ScaledReLU(width=width, num_outputs=2)
    params = encoder.init(jax.random.key(seed), jnp.asarray(X))

    def update(params, _):
        outputs, pull_back = jax.vjp(lambda params: encoder.apply(params, X), params)
        (gradient,) = pull_back(slope(outputs))
        return jax.tree.map(lambda value, change: value - STEP * change, params, gradient), None

    return encoder.apply(jax.lax.scan(update, params, None, length=num_steps)[0], X)


def of_the_limit(num_steps):
    """Outputs after as many steps along the flow of the limiting kernel (their Lemma 9), in closed form for a ReLU."""
    angle = np.arccos(np.clip(X @ X.T, -1, 1))
    kernel = (np.sin(angle) + (np.pi - angle) * np.cos(angle)) / (2 * np.pi)
    update = lambda eta, _: (eta - STEP * kernel @ slope(eta), None)  # noqa: E731
    return jax.lax.scan(update, jnp.zeros((48, 2)), None, length=num_steps)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_wide_encoders_follow_the_limiting_flow():
    """Their kernels differ from the limit's by the root of the width, and so do they after a given time."""
    widths, limit = np.array([64, 512, 4096]), of_the_limit(20)
    distances = []
    for width in map(int, widths):
        found = jax.jit(jax.vmap(lambda seed, width=width: after_training(width, 20, seed)))(jnp.arange(8))
        distances.append(float(jnp.sqrt(jnp.mean((found - limit) ** 2))))
    assert abs(np.polyfit(np.log(widths), np.log(distances), 1)[0] + 0.5) < 0.15
    assert losses(limit).mean() > best() + 0.01  # it is on its way


@pytest.mark.usefixtures("x64")
def test_wide_encoders_reach_the_global_optimum():
    assert 0 <= losses(of_the_limit(400)).mean() - best() < 1e-3  # Lemma 3
    found = losses(jax.jit(lambda: after_training(2048, 400, 0))()).mean()
    assert -1e-12 <= found - best() < 1e-3  # Theorem 4
