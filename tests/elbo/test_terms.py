"""The terms of the ELBO during training, a mean-field guide's bound, and the warning."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.special
from numpyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO

from numpyro_wide.elbo import ELBOTerms, OnPriorWarning, TemperedTraceMeanFieldELBO, TraceQKL, elbo_terms, run_monitored
from tests.marks import parametrize

X = jnp.linspace(-2.0, 2.0, 10)[:, None]
Y = jnp.array([1.0, -0.5, 2.0, 1.5, 0.3, -1.0, 0.7, 2.2, -0.4, 1.1])


def erf_network(width):
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([1, width]).to_event(2))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([width]).to_event(1))
        v = numpyro.sample("v", dist.Normal(0, width**-0.5).expand([width]).to_event(1))
        mean = numpyro.deterministic("f", jax.scipy.special.erf(x @ w + b) @ v)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    return model


def normal_guide(width):
    def guide(x, y=None):
        for name, shape in (("w", (1, width)), ("b", (width,)), ("v", (width,))):
            loc = numpyro.param(f"{name}_loc", lambda key, shape=shape: 0.3 * jax.random.normal(key, shape))
            scale = numpyro.param(f"{name}_scale", jnp.full(shape, 0.1), constraint=dist.constraints.softplus_positive)
            numpyro.sample(name, dist.Normal(loc, scale).to_event(len(shape)))

    return guide


@pytest.mark.fault("elbo/_terms.py", "log_likelihood = {name: -value", "log_likelihood = {name: value")
@parametrize("loss", [TemperedTraceMeanFieldELBO(eta=0.2, num_particles=2), Trace_ELBO(), TraceQKL()], rest="slow")
def test_terms_add_up_to_the_loss(loss):
    model = erf_network(16)
    svi = SVI(model, normal_guide(16), numpyro.optim.Adam(0.01), loss)
    state = svi.init(jax.random.key(0), X, Y)
    terms, expected = jax.jit(
        lambda s: (elbo_terms(svi, s, X, Y), loss.loss(s.rng_key, svi.get_params(s), svi.model, svi.guide, X, Y))
    )(state)
    assert set(terms.kl) == {"w", "b", "v"} and set(terms.log_likelihood) == {"y"}
    assert terms.num_weights == {"w": 16, "b": 16, "v": 16}
    total = sum(terms.tempered_kl.values()) - sum(terms.log_likelihood.values())
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    eta = 0.2 if isinstance(loss, TemperedTraceMeanFieldELBO) else 1.0
    for name, value in terms.kl.items():
        np.testing.assert_allclose(terms.tempered_kl[name], eta * value, rtol=1e-5)
        np.testing.assert_allclose(
            terms.ratio[name], terms.tempered_kl[name] / abs(terms.log_likelihood["y"]), rtol=1e-5
        )
    np.testing.assert_allclose(terms.total_ratio, sum(terms.ratio.values()), rtol=1e-6)


def test_monitored_run_is_svis_run():
    model = erf_network(16)
    svi = SVI(model, normal_guide(16), numpyro.optim.Adam(0.01), TemperedTraceMeanFieldELBO(num_neurons=16))
    run = run_monitored(svi, jax.random.key(0), 30, X, Y, every=10)
    plain = svi.run(jax.random.key(0), 30, X, Y, progress_bar=False)
    np.testing.assert_allclose(run.losses, plain.losses, rtol=1e-5)
    np.testing.assert_allclose(run.params["w_loc"], plain.params["w_loc"], rtol=1e-4, atol=1e-6)
    assert run.steps.tolist() == [10, 20, 30]
    assert run.terms.ratio["v"].shape == run.terms.total_ratio.shape == (3,)
    with pytest.raises(ValueError, match="num_steps must be a multiple of `every`, but got 25 and every=10"):
        run_monitored(svi, jax.random.key(0), 25, X, Y, every=10)
    with pytest.raises(
        TypeError, match=r"num_steps must be a whole number, but is an? .*Array.*; the order is run_monitored"
    ):
        run_monitored(svi, jax.random.key(0), X, Y, every=10)


def test_terms_need_a_loss_with_sites():
    model = erf_network(4)
    svi = SVI(model, normal_guide(16), numpyro.optim.Adam(0.01), TraceGraph_ELBO())
    with pytest.raises(ValueError, match="TraceGraph_ELBO"):
        elbo_terms(svi, None, X, Y)


def certificate(x, y, x_test, width):
    """Bound the mean of a mean-field guide no worse than its prior (Coker 2021, Theorem 1), with unit scales."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)

    def second_moment(variance):
        return np.sum(weights * scipy.special.erf(np.sqrt(variance) * nodes) ** 2) / np.sqrt(2 * np.pi)

    c = 0.5 * sum(t**2 + second_moment(row @ row + 1) for t, row in zip(y, x, strict=True))
    c_prime = 2 * (x.shape[1] + 1) * c * (np.square(x_test).sum(axis=1) + 1)
    return np.sqrt(2 * c) * np.sqrt(-np.expm1(-4 / np.pi * c_prime / width))


@pytest.mark.as_compiled
def test_a_guide_on_its_prior_obeys_the_bound_and_is_warned_about():
    width = 1000
    model = erf_network(width)
    svi = SVI(model, normal_guide(width), numpyro.optim.Adam(0.05), TraceMeanField_ELBO())
    fit = svi.run(jax.random.key(0), 400, X, Y, progress_bar=False)
    loc, scale = ({name: fit.params[f"{name}_{kind}"] for name in ("w", "b", "v")} for kind in ("loc", "scale"))
    # E erf of a Gaussian pre-activation in closed form (Coker 2021, Lemma 1).
    z, variance = X @ loc["w"] + loc["b"], X**2 @ scale["w"] ** 2 + scale["b"] ** 2
    mean = jax.scipy.special.erf(z / jnp.sqrt(1 + 2 * variance)) @ loc["v"]
    assert np.all(np.abs(mean) <= certificate(*map(np.asarray, (X, Y, X)), width))
    assert np.abs(mean).max() < 0.2 < np.abs(Y).max()
    with pytest.warns(OnPriorWarning, match="sits on its prior"):
        nats = elbo_terms(svi, fit.state, X, Y).warn_if_on_prior(tolerance=0.05)
    assert set(nats) == {"w", "b", "v"}


def test_nats_per_weight():
    kl = {"hidden": jnp.array(40.0), "readout": jnp.array(0.3)}
    terms = ELBOTerms({"y": jnp.array(-5.0)}, kl, kl, kl, jnp.array(1.0), {"hidden": 100, "readout": 10})
    assert terms.warn_if_on_prior()["hidden"] == pytest.approx(0.4)
    with pytest.warns(OnPriorWarning, match=r"at readout \(0.03\), in nats"):
        terms.warn_if_on_prior(tolerance=0.05)
    looks = jax.tree.map(lambda leaf: jnp.stack([10 * jnp.asarray(leaf), jnp.asarray(leaf)]), terms)
    looks = looks._replace(num_weights=jax.tree.map(lambda count: jnp.array([count, count]), terms.num_weights))
    assert looks.warn_if_on_prior() == terms.warn_if_on_prior()  # the last look of a monitored run
    with pytest.raises(ValueError, match="tolerance"):
        terms.warn_if_on_prior(tolerance=0.0)
