"""The model for BoTorch of examples/botorch_surrogate.py, against the fit's own predictions and finite differences."""

import importlib.util

import numpy as np
import pytest

from tests.scripts import ROOT

torch = pytest.importorskip("torch")
pytest.importorskip("botorch")

ROWS, CAPACITY = 30, 40


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("botorch_surrogate", ROOT / "examples" / "botorch_surrogate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ridge(x):
    """One direction of three inputs, for a dense network."""
    return torch.erf(3 * (x.sum(1, keepdim=True) - 1.5))


def sums(x):
    """Effects of single inputs, for an additive one."""
    return (4 * x[:, :1] - 2) ** 2 + torch.sin(6 * x[:, 1:2])


@pytest.fixture(scope="module", params=[ridge, sums], ids=["dense", "additive"])
def model(example, request):
    x = torch.rand(ROWS, 3, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    fitted = example.WideLimit(x, request.param(x), CAPACITY)
    assert (fitted.fit.network is None) == (request.param is ridge)
    return fitted


def points(*shape):
    return torch.rand(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(1))


def test_the_posterior_is_that_of_the_fit(example, model):
    x = points(40, 1, 3)  # more than a block, and a part of one
    posterior = model.posterior(x)
    mean, variance = model.fit.predict(example.standardised(x[:, 0].numpy()))
    np.testing.assert_allclose(posterior.mean[:, 0, 0], model.shift + model.size * mean, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(posterior.variance[:, 0, 0], model.size**2 * variance, rtol=1e-4, atol=1e-6)


def test_points_together_have_the_variances_of_points_alone_and_covariances(model):
    x = points(2, 4, 3)
    together = model.posterior(x)
    assert together.mean.shape == (2, 4, 1) and together.rsample(torch.Size([5])).shape == (5, 2, 4, 1)
    alone = model.posterior(x.reshape(8, 1, 3)).variance.reshape(2, 4, 1)
    np.testing.assert_allclose(together.variance, alone, rtol=1e-4, atol=1e-6)  # jitter
    noisy = model.posterior(x, observation_noise=True).variance - together.variance
    np.testing.assert_allclose(noisy, (model.size * model.fit.noise_scale) ** 2, rtol=1e-6)
    twice = model.posterior(x[:, [0, 0]]).distribution.covariance_matrix
    np.testing.assert_allclose(twice[:, 0, 1], twice[:, 0, 0], rtol=1e-4, atol=1e-6)


def test_gradients_are_finite_differences(model):
    x = points(3, 2, 3).requires_grad_()

    def value(x):
        posterior = model.posterior(x)
        return (posterior.mean * torch.arange(1.0, 3.0)[:, None]).sum() + posterior.distribution.covariance_matrix.sum()

    (slope,) = torch.autograd.grad(value(x), x)
    step = 1e-5
    for place in ((0, 0, 0), (1, 1, 2), (2, 0, 1)):
        change = torch.zeros_like(x)
        change[place] = step
        with torch.no_grad():
            expected = (value(x + change) - value(x - change)) / (2 * step)
        np.testing.assert_allclose(slope[place], expected, rtol=1e-5, atol=1e-6)


def test_a_search_compiles_one_program_for_each_network(example):
    example.programs.cache_clear()
    x = points(6, 2)
    found, values, _ = example.minimise(
        lambda x: sums(x)[:, 0], x, 3, lambda x, y: example.WideLimit(x, y, capacity=len(points(6, 2)) + 3)
    )
    assert found.shape == (9, 2) and values.shape == (9, 1) and values.min() <= values[:6].min()
    assert example.programs.cache_info().currsize <= 2
