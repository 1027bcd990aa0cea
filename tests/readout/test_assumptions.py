"""What collapse_readout accepts and refuses, at any scale and under JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.nn import softplus
from numpyro.handlers import mask, scale, scope, seed, trace
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density

from numpyro_wide import collapse_readout

SITES = {"readout": "w", "features": "features", "observed": "y"}
PSI = np.random.default_rng(1).normal(size=(6, 4)).astype("f")
Y = np.ones((6, 2), "f")


def run(model, *args):
    return trace(seed(model, jax.random.key(0))).get_trace(*args)


def density(model, *args):
    return run(model, *args)["y"]["fn"].log_prob(args[1])


def under_vmap(model, *args):
    batch = [jnp.stack([jnp.asarray(arg)] * 2) for arg in args]
    return jax.vmap(lambda *args: density(model, *args))(*batch)[0]


TRACED = {"jit": lambda model, *args: jax.jit(lambda *args: density(model, *args))(*args), "vmap": under_vmap}


def check_refused(model, *args, match):
    """Refused by an error where numbers are known, by NaN where they are not."""
    with pytest.raises(ValueError, match=match):
        run(model, *args)
    for call in TRACED.values():
        assert np.isnan(call(model, *args))


def observed_as(mean_of, after=None, noise=0.3):
    def model(psi, y=None):
        features = numpyro.deterministic("features", psi)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([psi.shape[1], 2]).to_event(2))
        numpyro.sample("y", dist.Normal(mean_of(features, w), noise).to_event(2), obs=y)
        if after is not None:
            after(features, w, y)

    return collapse_readout(model, **SITES)


def second_likelihood(features, w, y):
    numpyro.sample("y2", dist.Normal(features @ w, 0.5).to_event(2), obs=y)


BROKEN = {
    "three times": lambda psi, w: 3 * (psi @ w),
    "half a per cent off": lambda psi, w: 1.005 * (psi @ w),
    "squared": lambda psi, w: (psi @ w) ** 2,
    "a square of the readout added": lambda psi, w: psi @ w + (psi @ w**2),
    "through a jitted function": lambda psi, w: jax.jit(jnp.tanh)(w).sum() * psi[:, :2],
    "one column missing": lambda psi, w: psi[:, :3] @ w[:3],
    "transposed": lambda psi, w: (psi @ w)[::-1],
    "one row constant": lambda psi, w: (psi @ w).at[2].set(psi[2, :2]),
    "one entry off": lambda psi, w: (psi @ w).at[2, 1].mul(1.01),
}
RIGHT = {
    "product": lambda psi, w: psi @ w,
    "offset": lambda psi, w: psi @ w + jnp.sin(psi).sum(1, keepdims=True),
    "einsum": lambda psi, w: jnp.einsum("nd,dk->nk", psi, w) - 2.0,
    "column by column": lambda psi, w: jnp.stack([psi @ w[:, 0], psi @ w[:, 1]], axis=1),
    "in a jitted function": jax.jit(lambda psi, w: softplus(psi[:, :1]) + psi @ w),
}


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("mean", BROKEN)
def test_another_mean_is_refused_at_every_scale(mean, scale):
    message = "mean of observed site 'y' must be features @ readout plus terms without"
    check_refused(observed_as(BROKEN[mean]), np.float32(scale) * PSI, Y, match=message)


@pytest.mark.filterwarnings("ignore:the noise of observed site 'y' is too small")  # at the largest scale
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("mean", RIGHT)
def test_the_mean_is_accepted_at_every_scale(mean, scale):
    model, psi = observed_as(RIGHT[mean]), np.float32(scale) * PSI
    run(model, psi, Y)
    if scale < 1e8:
        for call in TRACED.values():
            assert np.isfinite(call(model, psi, Y))


class Undeclared(dist.Distribution):
    """A distribution with an array that it does not declare."""

    support = dist.constraints.real

    def __init__(self, shift):
        self.shift = shift
        super().__init__()

    def log_prob(self, value):
        return -0.5 * (value - self.shift) ** 2


# What reaches something else than the mean: (features, w, y) -> a site of its own, or the observations.
OTHERS = {
    "a second likelihood": (second_likelihood, "the distribution of site 'y2' depends on the readout 'w'"),
    "a soft constraint": (
        lambda features, w, y: numpyro.sample("total", dist.Normal(0.0, 0.01), obs=w.sum()),
        "the distribution of site 'total' depends",
    ),
    "residuals as observations": (
        lambda features, w, y: numpyro.sample("residual", dist.Normal(0.0, 1.0).expand([6, 2]), obs=y - features @ w),
        "the distribution of site 'residual' depends",
    ),
    "a factor": (
        lambda features, w, y: numpyro.factor("penalty", -(w[0, 0] ** 2)),
        "the distribution of site 'penalty'",
    ),
    "a factor beside a large constant": (
        lambda features, w, y: numpyro.factor("penalty", 1e4 - jnp.sum(w**2)),
        "the distribution of site 'penalty'",
    ),
    "an array that a distribution does not declare": (
        lambda features, w, y: numpyro.sample("other", Undeclared(w.sum()), obs=0.3),
        "the distribution of site 'other' depends",
    ),
    "a latent site": (
        lambda features, w, y: numpyro.sample("z", dist.Normal(w.sum(), 1.0)),
        "the distribution of site 'z' depends",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_whatever_else_the_readout_reaches_is_refused(other):
    after, match = OTHERS[other]
    check_refused(observed_as(RIGHT["product"], after), PSI, Y, match=match)


def scaled_site(w):
    with scale(scale=jnp.exp(w[0, 0])):
        numpyro.sample("other", dist.Normal(0.0, 1.0), obs=0.3)


def with_likelihood(likelihood):
    """A model whose observed site is what the function of features, readout and observations makes of it."""

    def model(psi, y=None):
        features = numpyro.deterministic("features", psi)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4, 2]).to_event(2))
        likelihood(features, w, y)

    return collapse_readout(model, **SITES)


LIKELIHOODS = {
    "own observations": (
        lambda f, w, y: numpyro.sample("y", dist.Normal(f @ w, 0.3).to_event(2), obs=y - jnp.tanh(w[0])),
        "the observations of site 'y' depend",
    ),
    "noise": (
        lambda f, w, y: numpyro.sample("y", dist.Normal(f @ w, 0.3 + w[0, 0] ** 2).to_event(2), obs=y),
        "the noise of observed site 'y' depends",
    ),
    "scale of another site": (
        lambda f, w, y: (numpyro.sample("y", dist.Normal(f @ w, 0.3).to_event(2), obs=y), scaled_site(w)),
        "the distribution of site 'other' depends",
    ),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihoods_that_the_readout_reaches_otherwise_are_refused(name):
    likelihood, match = LIKELIHOODS[name]
    check_refused(with_likelihood(likelihood), PSI, Y, match=match)


class Shifted(dist.Normal):
    """A subclass with a log density of its own."""

    def log_prob(self, value):
        return super().log_prob(value - 1.0)


@pytest.mark.parametrize(("prior", "likelihood"), [(Shifted, dist.Normal), (dist.Normal, Shifted)])
def test_subclasses_of_normal_are_refused(prior, likelihood):
    def model(psi, y=None):
        features = numpyro.deterministic("features", psi)
        w = numpyro.sample("w", prior(0.0, 1.0).expand([4, 2]).to_event(2))
        numpyro.sample("y", likelihood(features @ w, 0.3).to_event(2), obs=y)

    with pytest.raises(ValueError, match="must have a Normal distribution .* is Shifted"):
        run(collapse_readout(model, **SITES), PSI, Y)


def test_features_that_depend_on_the_readout_are_refused():
    def model(psi, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([psi.shape[1], 2]).to_event(2))
        features = numpyro.deterministic("features", psi * jnp.cos(w[0, 0]))
        numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(2), obs=y)

    check_refused(collapse_readout(model, **SITES), PSI, Y, match="the features 'features' depend on the readout 'w'")


def test_every_new_shape_is_looked_at():
    """A model may be right for some shapes alone."""
    model = observed_as(lambda psi, w: psi @ w if psi.shape[0] == 6 else 2 * (psi @ w))
    run(model, PSI, Y)
    with pytest.raises(ValueError, match="mean of observed site"):
        run(model, PSI[:5], Y[:5])


@pytest.mark.parametrize("is_array", [False, True])
def test_a_factor_from_outside_is_looked_at_in_every_call(is_array):
    """Numbers in arrays are no part of a program: 1 is right, and 3 afterwards is not."""
    factor = {"now": 1.0}

    def model(psi, y=None):
        features = numpyro.deterministic("features", psi)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4, 2]).to_event(2))
        by = jnp.asarray(factor["now"]) if is_array else factor["now"]
        numpyro.sample("y", dist.Normal(by * (features @ w), 0.3).to_event(2), obs=y)

    wrapped = collapse_readout(model, **SITES)
    assert np.isfinite(density(wrapped, PSI, Y))
    factor["now"] = 3.0
    check_refused(wrapped, PSI, Y, match="mean of observed site")


def test_a_factor_that_is_mapped_over_is_looked_at():
    def at(factor):
        return density(observed_as(lambda psi, w: factor * (psi @ w)), PSI, Y)

    assert np.isnan(jax.vmap(at)(jnp.array([1.0, 3.0]))).tolist() == [False, True]


def test_rows_that_an_array_switches_off_are_looked_at():
    def model(psi, y=None, is_on=None):
        features = numpyro.deterministic("features", psi)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4, 2]).to_event(2))
        numpyro.sample("y", dist.Normal(jnp.where(is_on[:, None], features @ w, 0.0), 0.3).to_event(2), obs=y)

    wrapped, some = collapse_readout(model, **SITES), np.arange(6) < 4
    call = jax.jit(
        lambda is_on: trace(seed(wrapped, jax.random.key(0))).get_trace(PSI, Y, is_on)["y"]["fn"].log_prob(Y)
    )
    assert np.isfinite(call(np.ones(6, bool))) and np.isnan(call(some))
    with pytest.raises(ValueError, match="mean of observed site"):
        trace(seed(wrapped, jax.random.key(0))).get_trace(PSI, Y, some)


LOOPS = {
    "map": lambda psi, w: jax.lax.map(lambda row: row @ w, psi),
    "scan": lambda psi, w: jax.lax.scan(lambda carry, row: (carry, row @ w), 0.0, psi)[1],
    "fori_loop": lambda psi, w: jax.lax.fori_loop(
        0, psi.shape[1], lambda i, total: total + jnp.outer(jnp.asarray(psi)[:, i], w[i]), jnp.zeros((len(psi), 2))
    ),
    "cond": lambda psi, w: jax.lax.cond(psi[0, 0] > -9, lambda: psi @ w, lambda: psi @ w + 1.0),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_around_the_product_are_right(loop):
    expected = density(observed_as(RIGHT["product"]), PSI, Y)
    wrapped = observed_as(LOOPS[loop])
    for value in (density(wrapped, PSI, Y), *(call(wrapped, PSI, Y) for call in TRACED.values())):
        np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_keys_that_are_drawn_outside_of_sites_are_the_same_in_both_runs():
    """Such as those of dropout that is a part of the network."""

    def model(psi, y=None):
        mask = jax.random.bernoulli(numpyro.prng_key(), 0.5, psi.shape)
        features = numpyro.deterministic("features", psi * mask)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4, 2]).to_event(2))
        numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(2), obs=y)

    wrapped = seed(collapse_readout(model, **SITES), jax.random.key(7))
    for call in (density, TRACED["jit"]):
        assert np.isfinite(call(wrapped, PSI, Y))


def test_sites_that_scope_renames_are_compared():
    for model, is_right in ((observed_as(RIGHT["product"]), True), (observed_as(BROKEN["three times"]), False)):
        scoped = scope(model, prefix="net", divider=".")
        found = jax.jit(lambda y, scoped=scoped: run(scoped, PSI, y)["net.y"]["fn"].log_prob(y))(Y)
        assert np.isfinite(found) == is_right


def test_a_guide_is_told_where_it_starts():
    model = observed_as(RIGHT["product"], OTHERS["a soft constraint"][0])
    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.1), Trace_ELBO())
    with pytest.raises(ValueError, match="the distribution of site 'total' depends"):
        svi.run(jax.random.key(0), 1, PSI, Y, progress_bar=False)


def test_a_chain_is_told_where_it_starts():
    model = observed_as(BROKEN["three times"])
    with pytest.raises(ValueError, match="mean of observed site"):
        MCMC(NUTS(model), num_warmup=1, num_samples=1).run(jax.random.key(0), PSI, Y)


def test_other_sites_may_be_far_out_of_their_support():
    """Two densities of minus infinity do not differ."""

    def after(features, w, y):
        numpyro.factor("far", -jnp.inf)

    sites = run(observed_as(RIGHT["product"], after), PSI, Y)
    assert np.isfinite(sites["y"]["fn"].log_prob(Y))


def test_deterministic_sites_that_move_are_not_recorded():
    def after(features, w, y):
        numpyro.deterministic("moves", w.sum())
        numpyro.deterministic("moves in a loop", jax.lax.map(lambda row: row @ w, features))
        numpyro.deterministic("stays", features.sum())

    sites = run(observed_as(RIGHT["product"], after), PSI, Y)
    assert "stays" in sites and not any("moves" in name for name in sites)


@pytest.mark.parametrize("handler", [scale(scale=0.5), mask(mask=np.arange(6)[:, None] < 4)], ids=["scale", "mask"])
def test_handlers_around_a_collapsed_model_are_refused(handler):
    def model(psi, y=None):
        features = numpyro.deterministic("features", psi)
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4, 2]).to_event(2))
        numpyro.sample("y", dist.Normal(features @ w, 0.3), obs=y)

    wrapped = collapse_readout(model, **SITES)
    with handler, pytest.raises(ValueError, match="the observed site 'y' is (scaled|masked)"):
        run(wrapped, PSI, Y)
    with mask(mask=False):  # all of it: a prior run
        assert log_density(seed(wrapped, jax.random.key(0)), (PSI, Y), {}, {})[0] == 0
