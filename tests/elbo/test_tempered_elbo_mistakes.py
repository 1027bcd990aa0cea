"""What the tempered ELBO refuses."""

import jax
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

from numpyro_wide.elbo import TemperedTraceMeanFieldELBO


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "num_neurons"),
        ({"tau": 2.0}, "num_neurons"),
        ({"eta": 0.0}, "eta must be positive"),
        ({"eta": -1.0}, "eta must be positive"),
        ({"eta": float("nan")}, "eta must be positive"),
        ({"eta": float("inf")}, "eta must be one finite number"),
        ({"eta": 1j}, "eta must be one finite number"),
        ({"eta": 0.5, "num_particles": 0}, "num_particles must be a whole number of at least 1, but got 0"),
        ({"eta": [0.5, 0.5]}, "eta must be one finite number"),
        ({"eta": {"w": -1.0}}, "'w'"),
        ({"tau": -1.0, "num_neurons": 10}, "tau"),
        ({"num_neurons": 0}, "num_neurons"),
        ({"num_neurons": 5, "num_observations": -3}, "num_observations"),
        ({"eta": 0.5, "num_neurons": 10}, "got both"),
        ({"eta": 0.5, "tau": 0.1}, "got both"),
    ],
)
def test_mistakes_in_the_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        TemperedTraceMeanFieldELBO(**arguments)


def test_mistakes_that_show_in_the_model():
    def bare(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("w", dist.Normal(0, 1)), 1.0), obs=y)

    guide = AutoNormal(bare)
    svi = SVI(bare, guide, numpyro.optim.Adam(0.01), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(jax.random.key(1), 1.0))
    args = jax.random.key(0), params, bare, guide, 1.0
    with pytest.raises(ValueError, match="num_observations="):
        TemperedTraceMeanFieldELBO(num_neurons=10).loss(*args)
    with pytest.raises(ValueError, match="observes nothing with these arguments; pass the observations.*'w', 'y'"):
        TemperedTraceMeanFieldELBO(num_neurons=10).loss(*args[:-1], None)
    with pytest.raises(ValueError, match="eta names the latent site 'u', .* its latent sites are 'w'"):
        TemperedTraceMeanFieldELBO(eta={"u": 0.1}).loss(*args)
    with pytest.raises(ValueError, match="'w' must be positive"):
        TemperedTraceMeanFieldELBO(eta=lambda site: 0.0).loss(*args)
