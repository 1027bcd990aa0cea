"""The mean kernel of draws, against closed forms; and a second fit at the draws of a pilot run."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_wide import fitted_surrogate, mean_kernel, repriorise, surrogate_targets, wide_limit
from numpyro_wide.nn import CNN, FCN, bnn

X = np.random.default_rng(0).normal(size=(6, 3)).astype("f")
KEY = jax.random.key(0)


PRIOR = dist.Normal(0.3, 1.0)
LAPLACE = dist.Laplace(0.0, 1.0)


def model(x, counts=None, *, width=5, prior=PRIOR):
    """Counts of a linear function with a latent scale."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([3, width]).to_event(2))
    features = numpyro.deterministic("features", scale * x @ hidden / width**0.5)
    w = numpyro.sample("w", prior.expand([width]).to_event(1))
    numpyro.sample("y", dist.Poisson(jnp.exp(features @ w)).to_event(1), obs=counts)


@pytest.mark.fault("surrogates.py", "kernel + psi @ psi.T / count", "kernel + psi @ psi.T")
def test_it_tends_to_the_kernel_in_closed_form():
    options = {"w_std": 1.3, "b_std": 0.4}
    network = bnn(FCN(depth=1, width=400, activation="erf", readout_w_std=1.0, **options), num_outputs=None, noise=0.1)
    found = mean_kernel(KEY, network, "features", X, num_draws=200)
    expected = wide_limit.fcn_kernel(1, "erf", readout_w_std=1.0, **options)(X)[0]
    assert found.dtype == float and found.shape == (6, 6)
    # 80,000 units of variance below one: standard errors of 0.004 at most.
    np.testing.assert_allclose(found, expected, atol=0.016)


@pytest.mark.slow
def test_that_of_a_convolutional_network_serves_as_its_limit_does():
    """Surrogates fitted with the mean kernel of draws and with the limit's are nearly the same."""
    x, labels = X.reshape(6, 3, 1, 1), np.array([0, 1, 1, 0, 1, 0])
    network = CNN(1, 300, "relu", padding="SAME", b_std=0.4, pooling="mean")
    gram = wide_limit.kernel(network)(x)[0]
    found = mean_kernel(KEY, bnn(network, None, 0.1), "features", x, num_draws=200)
    np.testing.assert_allclose(found, gram, atol=0.03 * float(gram.max()))
    fits = [fitted_surrogate(labels, "bernoulli", kernel) for kernel in (found, gram)]
    np.testing.assert_allclose(fits[0].targets, fits[1].targets, rtol=0.03)
    np.testing.assert_allclose(fits[0].noise_scale, fits[1].noise_scale, rtol=0.03)


def test_every_draw_counts_the_same_and_prior_scales_are_multiplied_in():
    scales = np.array([1.0, 2.0, 0.5, 1.0, 3.0], "f")
    samples = {"scale": np.array([1.0, 2.0]), "hidden": np.random.default_rng(1).normal(size=(2, 3, 5)).astype("f")}
    psi = samples["scale"][:, None, None] * X @ samples["hidden"] / 5**0.5
    get = partial(mean_kernel, KEY, partial(model, prior=dist.Normal(0.3, scales)), "features", X, samples=samples)
    np.testing.assert_allclose(get(), np.mean(psi @ psi.transpose(0, 2, 1), axis=0), rtol=1e-5)
    scaled = psi * scales
    np.testing.assert_allclose(get(readout="w"), np.mean(scaled @ scaled.transpose(0, 2, 1), axis=0), rtol=1e-5)
    # One of two draws is the first.
    np.testing.assert_allclose(get(num_draws=1), psi[0] @ psi[0].T, rtol=1e-5)


@pytest.mark.fault("surrogates.py", "jnp.sqrt(jnp.mean(full**2, axis=1))", "jnp.mean(full, axis=1)")
def test_variances_that_differ_over_outputs_are_averaged():
    def two(x):
        features = numpyro.deterministic("features", jnp.asarray(x))
        w = numpyro.sample("w", dist.Normal(0, jnp.array([1.0, 3.0])).expand([3, 2]).to_event(2))
        numpyro.sample("y", dist.Bernoulli(logits=features @ w).to_event(2))

    np.testing.assert_allclose(mean_kernel(KEY, two, "features", X, readout="w", num_draws=2), 5 * X @ X.T, rtol=1e-5)


def test_sites_that_are_not_among_the_samples_come_from_the_prior():
    samples = {"scale": np.full(4000, 2.0)}
    found = mean_kernel(KEY, partial(model, width=50), "features", X, samples=samples, num_draws=400)
    np.testing.assert_allclose(found, 4 * X @ X.T, rtol=0.1, atol=0.5)


@pytest.mark.slow
def test_a_second_fit_after_a_pilot_run_takes_the_repriorised_model_and_its_draws():
    counts = np.array([0, 2, 1, 5, 0, 3])
    quick = partial(surrogate_targets, likelihood="poisson")
    wrapped = repriorise(model, readout="w", features="features", targets="counts", surrogate=quick)
    samples = {
        "scale": np.full(3, 0.7),
        "hidden": np.ones((3, 3, 5)),
        "w_base": np.zeros((3, 5)),
        "w": np.zeros((3, 5)),
    }
    kernel = mean_kernel(KEY, wrapped, "features", X, counts, samples=samples)
    np.testing.assert_allclose(kernel, 0.49 * np.outer(X.sum(1), X.sum(1)), rtol=1e-5, atol=1e-6)
    assert np.isfinite(fitted_surrogate(counts, "poisson", kernel).targets).all()


def test_it_follows_the_model_as_it_is_at_the_call():
    """What a model takes from outside, a loop's variable or an object's attribute, is no part of its name."""
    config = {"width": 1}

    def of_config(x):
        numpyro.deterministic("features", jnp.full((len(x), config["width"]), config["value"]))

    found = {}
    for width in (1, 30):
        for value in (1.0, 2.0):
            config.update(width=width, value=value)
            found[width, value] = mean_kernel(KEY, of_config, "features", X, num_draws=2)[0, 0]
    assert found == {(1, 1.0): 1, (1, 2.0): 4, (30, 1.0): 30, (30, 2.0): 120}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((model, "psi", X), {}, "features names the site 'psi', .* its sites are 'scale', 'hidden'"),
        ((model, "w", X), {}, r"the features 'w' must have shape \(n, d\), but have \(5,\)"),
        ((model, "features", X), {"readout": "y"}, "the readout 'y' must have 5 rows"),
        (
            (model, "features", X),
            {"readout": "v"},
            "readout names the latent site 'v', which .* latent sites are .* 'hidden', 'w'",
        ),
        ((partial(model, prior=LAPLACE), "features", X), {"readout": "w"}, "must have a Normal distribution"),
        ((model, "features", np.full_like(X, np.inf)), {}, "the features 'features' must be finite"),
        ((model, "features", X), {"num_draws": 0}, "num_draws must be a whole number of at least 1"),
        ((model, "features", X), {"samples": {}}, "samples must hold arrays"),
        ((model, "features", X), {"samples": {"scale": 1.0}}, "samples must hold arrays"),
        ((model, "features", X), {"samples": {"scale": np.ones(2), "w": np.ones((3, 5))}}, "of the same length"),
    ],
)
def test_what_gives_no_kernel_is_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        mean_kernel(KEY, *arguments, **options)


def test_a_part_of_the_rows_is_refused():
    def some(x):
        with numpyro.plate("rows", 6, subsample_size=3) as rows:
            numpyro.deterministic("features", jnp.asarray(x)[rows])

    with pytest.raises(ValueError, match="'rows' takes 3 of 6 rows, but the kernel is that of all of them; drop"):
        mean_kernel(KEY, some, "features", X)


def test_no_key_and_no_numbers():
    with pytest.raises(TypeError, match=r"rng_key must be a PRNG key, .* mean_kernel\(rng_key, model, features, x\)"):
        mean_kernel(0, model, "features", X)
    with pytest.raises(TypeError, match="not known under jit"):
        jax.jit(lambda x: mean_kernel(KEY, model, "features", x))(X)
