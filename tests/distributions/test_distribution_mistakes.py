"""Arguments that a distribution or a divergence cannot be made of are refused with what was expected and what came."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_wide import log_uniform_kl, natural, quasi_kl
from numpyro_wide.distributions import BernoulliDropout, DegenerateNormal, GaussianDropout

HEAVY, LAPLACE = dist.StudentT(3.0).expand([2]), dist.Laplace()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quasi_kl(1.0, LAPLACE), TypeError, r"q must be a NumPyro distribution, but is a float; the order"),
        (lambda: quasi_kl(HEAVY, None), TypeError, "p must be a NumPyro distribution, but is a NoneType"),
        (lambda: quasi_kl(HEAVY, LAPLACE, num_samples=0), ValueError, "num_samples must be a whole number of at least"),
        (lambda: quasi_kl(HEAVY, LAPLACE, rng_key=3), TypeError, "rng_key must be a PRNG key"),
        (lambda: log_uniform_kl(1.0, -1.0), ValueError, "scale must be positive everywhere, but got -1.0"),
        (lambda: log_uniform_kl(1.0, 0.0), ValueError, "scale must be positive everywhere"),
        (lambda: log_uniform_kl(1j, 1.0), TypeError, "must hold real numbers"),
        (lambda: BernoulliDropout(jnp.ones((2, 2)), 0.1, temperature=-1.0), ValueError, "temperature must be positive"),
        (lambda: GaussianDropout(np.ones(2) * 1j, 1.0), TypeError, "must hold real numbers"),
        (
            lambda: DegenerateNormal(jnp.zeros((3, 2)), jnp.ones((4, 2, 1)), jnp.ones(1)),
            ValueError,
            r"batch axes .*that broadcast, got .*\(3,\).*\(4,\).*insert axes of length 1",
        ),
        (
            lambda: natural.Normal(jnp.array([1.0, -1.0]), shift=jnp.ones(3)),
            ValueError,
            r"`shift` .*broadcast against their shape \(2,\), but has shape \(3,\)",
        ),
        (lambda: natural.domain(["Normal"]), ValueError, "takes a constructor of numpyro_wide.natural, one of"),
    ],
)
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_scales_that_are_traced_are_let_through():
    np.testing.assert_allclose(jax.jit(log_uniform_kl)(0.0, 2.0), log_uniform_kl(0.0, 2.0), rtol=1e-6)
    kl = jax.jit(lambda key: quasi_kl(HEAVY, LAPLACE, rng_key=key, num_samples=10))
    assert kl(jax.random.key(0)).shape == (2,)
