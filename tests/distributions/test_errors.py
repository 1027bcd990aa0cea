"""Arguments that a distribution or a divergence cannot be made of are refused with what was expected and what came."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_wide import log_uniform_kl, natural, quasi_kl
from numpyro_wide.distributions import BernoulliDropout, DegenerateNormal, GaussianDropout


def rows():
    return BernoulliDropout(np.ones((2, 3)), 0.5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: DegenerateNormal(0.0, np.eye(3, 2), 1.0), ValueError, "shape"),
        (lambda: DegenerateNormal(np.ones(2), np.eye(3, 2), 1.0), ValueError, "basis"),
        (lambda: DegenerateNormal(np.ones(3), np.ones(3), 1.0), ValueError, "direction"),
        (lambda: DegenerateNormal(np.ones(1), np.ones((1, 2)), 1.0), ValueError, "K ≤ D"),
        (lambda: DegenerateNormal(np.ones(3), np.eye(3, 2), -1.0, validate_args=True), ValueError, "scale"),
        (lambda: BernoulliDropout(np.ones((2, 3)), 1.5, validate_args=True), ValueError, "rate"),
        (lambda: GaussianDropout(np.ones((2, 3)), -1.0, validate_args=True), ValueError, "alpha"),
        (lambda: quasi_kl(rows(), dist.Normal(0, 1).expand([2, 3]).to_event(2)), ValueError, "to_event"),
        (lambda: quasi_kl(rows(), dist.Normal(0, 1).expand([2]).to_event(1)), ValueError, "equal event shapes"),
        (lambda: log_uniform_kl(1.0, -1.0), ValueError, "scale must be positive everywhere, but got -1.0"),
        (lambda: log_uniform_kl(1.0, 0.0), ValueError, "scale must be positive everywhere"),
        (lambda: log_uniform_kl(1j, 1.0), TypeError, "must hold real numbers"),
        (lambda: BernoulliDropout(jnp.ones((2, 2)), 0.1, temperature=-1.0), ValueError, "temperature must be positive"),
        (lambda: GaussianDropout(np.ones(2) * 1j, 1.0), TypeError, "must hold real numbers"),
        (lambda: natural.Normal(jnp.array([1.0, -1.0]), shift=jnp.ones(3)), ValueError, "broadcast"),
    ],
)
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_scales_that_are_traced_are_let_through():
    np.testing.assert_allclose(jax.jit(log_uniform_kl)(0.0, 2.0), log_uniform_kl(0.0, 2.0), rtol=1e-6)
    heavy, laplace = dist.StudentT(3.0).expand([2]), dist.Laplace()
    kl = jax.jit(lambda key: quasi_kl(heavy, laplace, rng_key=key, num_samples=10))
    assert kl(jax.random.key(0)).shape == (2,)
