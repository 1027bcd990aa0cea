"""Every log-determinant that the package reports, against that of an autodiff Jacobian."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.distributions import biject_to

from numpyro_wide import linear_gaussian, natural
from numpyro_wide.distributions import DegenerateNormal
from numpyro_wide.linear_gaussian import ReadoutProblem
from numpyro_wide.readout import ReadoutTransform
from tests.marks import parametrize

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(0)
N, D, K = 5, 4, 2
NOISES = {"number": 0.4, "by row": RNG.uniform(0.3, 0.8, (N, 1)), "by output": RNG.uniform(0.3, 0.8, K)}
DATA = RNG.normal(size=(N, D)), RNG.normal(size=(N, K))
PRIOR = {"prior_loc": RNG.normal(size=(D, K)), "prior_scale": RNG.uniform(0.5, 1.5, (D, K))}


def readout_map(phi, *, variant, noise, factor):
    regulariser = None if factor is None else factor * NOISES[noise] ** 2
    return linear_gaussian.readout_map(*DATA, phi, NOISES[noise], regulariser, variant, **PRIOR)


def readout_inverse_map(readout, *, variant):
    phi = linear_gaussian.readout_inverse_map(*DATA, readout, 0.4, variant=variant, **PRIOR)
    return phi, -linear_gaussian.readout_map(*DATA, phi, 0.4, variant=variant, **PRIOR)[1]


def transform_of(transform, x):
    y = transform(x)
    return y, transform.log_abs_det_jacobian(x, y)


def readout_transform(phi, *, is_inverse):
    transform = ReadoutTransform(ReadoutProblem.of(*DATA, 0.4, 2.0, **PRIOR))
    return transform_of(transform.inv if is_inverse else transform, phi)


def degenerate_normal(noise):
    """The volume of the image of a unit of noise, in the plane that it lies in."""
    columns = DATA[0].T[:, :2]
    plane = DegenerateNormal(jnp.zeros(D), columns, jnp.array([0.5, 2.0]))
    image = plane.loc + plane.basis @ (plane.scale * noise)
    log_standard = -0.5 * jnp.sum(noise**2) - noise.size / 2 * jnp.log(2 * jnp.pi)
    return image, log_standard - plane.log_prob(image)


REGISTRY = {
    **{
        f"readout_map, {variant}, noise {noise}, regulariser {factor}": (
            partial(readout_map, variant=variant, noise=noise, factor=factor),
            (D, K),
        )
        for variant in ("feature", "data", "data-cholesky")
        for noise in NOISES
        for factor in (None, 7.0)
    },
    **{
        f"readout_inverse_map, {variant}": (partial(readout_inverse_map, variant=variant), (D, K))
        for variant in ("feature", "data", "data-cholesky")
    },
    "ReadoutTransform": (partial(readout_transform, is_inverse=False), (D, K)),
    "ReadoutTransform.inv": (partial(readout_transform, is_inverse=True), (D, K)),
    "DegenerateNormal": (degenerate_normal, (2,)),
    **{
        f"natural.{family.__name__}": (
            lambda x, family=family: transform_of(biject_to(natural.domain(family)), x),
            (size,),
        )
        for family, size in {natural.MultivariateNormal: 5, natural.Normal: 2}.items()
    },
}


@pytest.mark.fault("linear_gaussian/_problem.py", "log_abs_det.sum() + jnp.log(scale).sum()", "log_abs_det.sum()")
@parametrize("name", REGISTRY, rest="as_compiled")
def test_log_determinant(name):
    function, shape = REGISTRY[name]
    at = jnp.asarray(np.random.default_rng(1).normal(size=shape))
    found = function(at)[1]
    jacobian = jax.jacobian(lambda x: function(x)[0])(at).reshape(-1, at.size)
    # Where the image has more dimensions, as that of a plane's coordinates, the volume is √det JᵀJ.
    np.testing.assert_allclose(found, 0.5 * jnp.linalg.slogdet(jacobian.T @ jacobian)[1], rtol=1e-9, atol=1e-10)
