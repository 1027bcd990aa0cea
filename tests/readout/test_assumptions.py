"""What collapse_readout accepts and refuses, at any scale and under JAX's transformations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.nn import softplus
from numpyro.contrib.control_flow import scan
from numpyro.handlers import mask, scale, scope, seed, substitute, trace
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density
from scipy.stats import multivariate_normal, norm

from numpyro_wide import collapse_readout
from numpyro_wide.mcmc import SplitHMC
from tests.marks import parametrize

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


@pytest.mark.fault("readout/_collapse.py", "nan_unless(program.findings(run, values), run)", "run")
@pytest.mark.fault("readout/_assumptions.py", "| ~jnp.isfinite(run.loc + change))", "| True)")
@parametrize("scale", [1.0, 1e-8, 1e8], rest="as_compiled")
@pytest.mark.parametrize("mean", BROKEN)
def test_another_mean_is_refused_at_every_scale(mean, scale):
    message = "mean of observed site 'y' must be features @ readout plus terms without"
    check_refused(observed_as(BROKEN[mean]), np.float32(scale) * PSI, Y, match=message)


@pytest.mark.fault("readout/_assumptions.py", "max(64 * of_mean", "max(64e9 * of_mean")
def test_the_bound_of_another_mean_is_of_its_own_precision(x64):
    message = "mean of observed site 'y' must be features @ readout plus terms without"
    model = observed_as(lambda psi, w: psi @ w + 1e-9 * w[0])
    check_refused(model, np.float64(PSI), np.float64(Y), match=message)
    run(observed_as(RIGHT["column by column"]), np.float64(PSI), np.float64(Y))


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


@pytest.mark.fault("readout/_assumptions.py", "if name != _MEAN", "if name[0] < _OTHER")
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


@pytest.mark.fault("readout/_assumptions.py", "_NOISE: run.noise_scale, _OBS", "_NOISE: 1.0, _OBS")
@pytest.mark.fault("readout/_assumptions.py", "_OBSERVATIONS: sites.observations,", "_OBSERVATIONS: 1.0,")
@pytest.mark.fault("readout/_assumptions.py", "log_prob if scale is None else scale * log_prob,", "log_prob,")
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


@pytest.mark.fault("readout/_assumptions.py", "quantities = {_FEATURES: run.features,", "quantities = {_FEATURES: 1.0,")
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


@pytest.mark.fault("readout/_programs.py", '"prng_key":  # drawn outside of sites', '"prng_key":\n            return')
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
    """A density of minus infinity does not move."""

    def after(features, w, y):
        numpyro.factor("far", -jnp.inf)

    sites = run(observed_as(RIGHT["product"], after), PSI, Y)
    assert np.isfinite(sites["y"]["fn"].log_prob(Y))


@pytest.mark.fault("readout/_assumptions.py", "name for order, name in dependence if order == _DETERMINISTIC)", ")")
def test_deterministic_sites_that_move_are_not_recorded():
    def after(features, w, y):
        numpyro.deterministic("moves", w.sum())
        numpyro.deterministic("moves in a loop", jax.lax.map(lambda row: row @ w, features))
        numpyro.deterministic("stays", features.sum())

    sites = run(observed_as(RIGHT["product"], after), PSI, Y)
    assert "stays" in sites and not any("moves" in name for name in sites)


@pytest.mark.fault("readout/_collapse.py", "            refuse_scaled(self.model.observed, msg)", "            pass")
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


# What moves little beside large numbers, only in steps, or to where it is not defined. Of the likelihood of `linear`,
# (features, w, y) -> the model's further statements; every one is wrong in some nats, and looked right to a tolerance.
OFFSET = np.array([1e6] + [0.0] * 7, "f")


def observe(features, w, y, *, mean=None, noise=0.5):
    numpyro.sample("y", dist.Normal(features @ w if mean is None else mean, noise).to_event(1), obs=y)


def beside(site):
    """The likelihood as it should be, and another site."""
    return lambda features, w, y: (observe(features, w, y), site(w))


def by_loop(features, w, y):
    """A network in a loop that carries the readout along, and a likelihood of it."""
    (hidden, _), _ = jax.lax.scan(
        lambda carry, _: ((jnp.tanh(carry[0]), carry[1]), None), (features, w), None, length=2
    )
    numpyro.sample("c", dist.Normal(hidden.sum(), 1.0), obs=0.3)
    observe(features, w, y)


def by_long_loop(features, w, y):
    """The same, in a loop of unknown length."""
    _, hidden, _ = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.tanh(c[1]), c[2]), (0, features, w))
    numpyro.sample("c", dist.Normal(hidden.sum(), 1.0), obs=0.3)
    observe(features, w, y)


def with_value_inside(features, w, y):
    with substitute(data={"z": 3 * w[0]}):
        z = numpyro.sample("z", dist.Normal(0, 1))
    observe(features, w, y, mean=features @ w + z)


@jax.custom_vjp
def tanh(x):
    """With a derivative in reverse alone."""
    return jnp.tanh(x)


tanh.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), lambda result, cotangent: ((1 - result**2) * cotangent,))


def twice(x):
    return jax.pure_callback(lambda x: 2 * np.asarray(x), x, x)


def rounded(w):
    """In steps, with the derivative of a straight line."""
    return w + jax.lax.stop_gradient(jnp.round(w) - w)


@jax.custom_jvp
def clipped(w):
    """With the derivative of a straight line."""
    return jnp.clip(w, -50, 50)


clipped.defjvp(lambda primals, tangents: (clipped(*primals), *tangents))


@jax.custom_jvp
def product(a, b):
    """With the derivative that it has."""
    return a @ b


product.defjvp(lambda primals, tangents: (product(*primals), tangents[0] @ primals[1] + primals[0] @ tangents[1]))


def largest(w):
    """The sum of the largest of neighbours, whose slope is where they are."""
    return jax.lax.reduce_window(w, -jnp.inf, jax.lax.max, (2,), (2,), "VALID").sum()


def stepping(w, row):
    """A turn of a loop that enters no step until it has gone on far."""
    return w, row @ w + (w[0] > 50)


SUBTLE = {
    "outside of a support": beside(lambda w: numpyro.sample("c", dist.Gamma(2.0, 1.0), obs=0.3 + w[4])),
    "negative rate": beside(lambda w: numpyro.sample("c", dist.Poisson(0.3 + w[4]), obs=2)),
    "root in the mean": lambda f, w, y: observe(f, w, y, mean=f @ w + jnp.sqrt(0.3 + w[4])),
    "root in the noise": lambda f, w, y: observe(f, w, y, noise=0.3 * jnp.sqrt(1 + 3 * w[4])),
    "many latent": beside(lambda w: numpyro.sample("z", dist.Normal(0.01 * w[0], 1).expand([20000]).to_event(1))),
    "factor": beside(lambda w: numpyro.factor("p", 5 * w[0] - 1e5)),
    "offset of one row": lambda f, w, y: observe(f, w, y + OFFSET, mean=OFFSET + 3 * (f @ w)),
    "pressures": lambda f, w, y: observe(f, w, y + 101325, mean=101325 + 1.7 * (f @ w)),
    "quantised": lambda f, w, y: observe(f, w, y, mean=f @ rounded(w)),
    "factor without gradient": beside(lambda w: numpyro.factor("p", jax.lax.stop_gradient(w.sum()))),
    "step": beside(lambda w: numpyro.factor("p", jnp.where(w[3] > 0, -3.0, 0.0) - 1e3)),
    "step beside a print": beside(
        lambda w: (jax.debug.callback(np.size, w), numpyro.factor("p", jnp.where(w[3] > 0, -3.0, 0.0)))
    ),
    "counts": beside(lambda w: numpyro.sample("c", dist.Bernoulli(0.3).expand([5]).to_event(1), obs=(w > 0) * 1)),
    "callback": lambda f, w, y: observe(f, w, y, mean=f @ twice(w)),
    "step far away": lambda f, w, y: observe(f, w, y, noise=jnp.where(w[0] < 50, 0.5, 0.6)),
    "rectified without gradient": beside(lambda w: numpyro.factor("p", jax.lax.stop_gradient(jax.nn.relu(w[0] - 5)))),
    "value set inside": with_value_inside,
    "noise rectified far away": lambda f, w, y: observe(f, w, y, noise=0.3 + jax.nn.relu(w[0] - 50)),
    "factor of another branch": beside(lambda w: numpyro.factor("p", jnp.where(w[0] < 50, -1.0, w[1]))),
    "rectified far below": lambda f, w, y: observe(f, w, y + 100, mean=jax.nn.relu(100 + f @ w)),
    "another branch far away": lambda f, w, y: observe(f, w, y, mean=jnp.where(w[0] < 50, f @ w, 2 * (f @ w))),
    "derivative of its own": lambda f, w, y: observe(f, w, y, mean=f @ tanh(w)),
    "derivative of another": lambda f, w, y: observe(f, w, y, mean=f @ clipped(w)),
    "step beside a slope": lambda f, w, y: observe(f, w, y + 1e5, mean=1e5 + f @ w + (w[0] > 0)),
    "step far away beside a slope": lambda f, w, y: observe(f, w, y, mean=f @ w + (w[0] > 50)),
    "remainder": lambda f, w, y: observe(f, w, y, mean=f @ jax.lax.rem(w, 50.0)),
    "order of others": lambda f, w, y: observe(f, w, y, mean=f @ w + jax.lax.sort_key_val(w, jnp.arange(5.0))[1][0]),
    "place of the largest": lambda f, w, y: observe(f, w, y, mean=f @ w + jax.grad(largest)(w).sum()),
    "noise, one row more": lambda f, w, y: observe(f, w, y, noise=jnp.exp(0.3 * (f @ w)).at[0].add(0.1)),
    "observations, one row more": lambda f, w, y: observe(f, w, (y - jnp.tanh(f @ w)).at[0].add(0.1), mean=f @ w),
    "factor, one weight more": beside(lambda w: numpyro.factor("p", -jnp.sum(w.at[0].multiply(2.0) ** 2))),
    "step in a loop": lambda f, w, y: observe(f, w, y, mean=jax.lax.scan(stepping, w, f)[1]),
    "step that a loop passes on": lambda f, w, y: observe(
        f,
        w,
        y,
        mean=f @ w
        + jax.lax.fori_loop(0, 9, lambda _, carry: (carry[1], jnp.floor(w)), (jnp.zeros(5), jnp.zeros(5)))[0].sum(),
    ),
    "step in a branch": lambda f, w, y: observe(
        f, w, y, mean=f @ w + jax.lax.cond(f[0, 0] > 9, jnp.floor, jnp.zeros_like, w).sum()
    ),
    "turns of a loop": lambda f, w, y: observe(
        f, w, y, mean=jax.lax.while_loop(lambda mean: mean[0] > 50, jnp.negative, f @ w)
    ),
    "bounds of an improper prior": beside(
        lambda w: numpyro.sample(
            "z", dist.ImproperUniform(dist.constraints.interval(-9, 9 + w[0]), (), (), validate_args=False)
        )
    ),
}
# What is right, and may not look so: the function of the features, the likelihood, and the log density of the others.
SAFE = {
    "offset of one row": (lambda f: f, lambda f, w, y: observe(f, w, y + OFFSET, mean=OFFSET + f @ w), 0.0),
    "pressures": (lambda f: f, lambda f, w, y: observe(f, w, y + 128, mean=128 + f @ w), 0.0),
    "rows chosen": (lambda f: f, lambda f, w, y: observe(f, w, y, mean=jnp.where(f[:, 0] > 0, f @ w, w @ f.T)), 0.0),
    "zero times": (lambda f: f, beside(lambda w: numpyro.factor("p", 0 * w[0] - 3.0)), -3.0),
    "out of a support": (lambda f: f, beside(lambda w: numpyro.factor("p", 0 * w[0] - jnp.inf)), -np.inf),
    "loop": (lambda f: f, by_loop, lambda f: norm(np.tanh(np.tanh(f)).sum(), 1).logpdf(0.3)),
    "loop of unknown length": (lambda f: f, by_long_loop, lambda f: norm(np.tanh(np.tanh(f)).sum(), 1).logpdf(0.3)),
    "debugging": (lambda f: f, lambda f, w, y: (jax.debug.callback(np.size, w > 0), observe(f, w, y)), 0.0),
    "one row more": (lambda f: f, lambda f, w, y: observe(f, w, y, mean=(f @ w).at[0].add(0.0)), 0.0),
    "counts": (jnp.round, lambda f, w, y: observe(f.astype(int), w, y), 0.0),
    "derivative as it is": (lambda f: f, lambda f, w, y: observe(f, w, y, mean=product(f, w)), 0.0),
    "derivative of its own": (tanh, observe, 0.0),
    "callback": (twice, observe, 0.0),
}
ROWS = np.random.default_rng(3).normal(size=(8, 5)).astype("f") / 2
TARGETS = np.random.default_rng(4).normal(size=8).astype("f")


def linear(likelihood, features=lambda rows: rows):
    def model(rows, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([5]).to_event(1))
        likelihood(numpyro.deterministic("features", features(rows)), w, y)

    return collapse_readout(model, **SITES)


def joint(model, *args, values=None):
    return log_density(seed(model, jax.random.key(0)), args, {}, values or {})[0]


@pytest.mark.fault("readout/_assumptions.py", "jnp.all(leaf == 0)", "jnp.all(leaf == leaf)")
@pytest.mark.fault("readout/_assumptions.py", "<= tolerance) |", "<= tolerance + 1e-4 * jnp.abs(run.loc)) |")
@pytest.mark.fault("readout/_assumptions.py", "name: is_straight[name] & jnp", "name: jnp")
@pytest.mark.fault("readout/_assumptions.py", ", *inside]", "]")
@pytest.mark.fault("readout/_programs.py", "names = {name, *(", "names = {*(")
@pytest.mark.fault("readout/_programs.py", "if is_float and", "if")
@pytest.mark.fault("readout/_programs.py", "max(outside, *of_result)", "max(of_result)")
@pytest.mark.fault("readout/_programs.py", "if carried != inputs[start:end]:", "if False:")
@pytest.mark.fault("readout/_programs.py", "if eqn.primitive is custom_jvp_call_p:", "if False:")
@pytest.mark.fault("readout/_programs.py", 'if msg["_is_set_inside"] and', "if False and")
@pytest.mark.fault("readout/_assumptions.py", "(self._moving[name], by_place[name], by", "(SMOOTH, by_place[name], by")
@pytest.mark.fault(
    "readout/_assumptions.py", "(self._moving[name], by_place[name], by", "(self._moving[name], FREE, by"
)
@pytest.mark.fault("readout/_assumptions.py", "is_straight.get(_MEAN, True) & is_linear", "is_linear")
@pytest.mark.parametrize("case", SUBTLE)
def test_what_hides_behind_large_numbers_and_steps_is_refused(case):
    model = linear(SUBTLE[case])
    sizes = {"many latent": 20000, "bounds of an improper prior": ()}  # of another latent site
    values = {"z": np.zeros(sizes[case], "f")} if case in sizes else {}
    assert np.isnan(jax.jit(partial(joint, model))(ROWS, TARGETS, values=values))
    with pytest.raises(ValueError, match="depend|must be features @ readout|without a forward derivative"):
        joint(model, ROWS, TARGETS, values=values)


@parametrize("dtype", ["float32", "float64"], rest="as_compiled")
@pytest.mark.parametrize("case", SAFE)
def test_what_looks_alike_and_is_right_has_the_dense_density(case, dtype):
    of_features, likelihood, others = SAFE[case]
    with jax.enable_x64(dtype == "float64"):
        rows, y = jnp.asarray(ROWS, dtype), jnp.asarray(TARGETS, dtype)
        features = np.asarray(of_features(rows), float)
        # Observations beside an offset are rounded to its digits.
        offset = {"offset of one row": OFFSET.astype(dtype), "pressures": np.full(8, 128, dtype)}.get(case, 0.0)
        residual = (np.asarray(y) + offset).astype(float) - offset
        expected = multivariate_normal(np.zeros(8), features @ features.T + 0.25 * np.eye(8)).logpdf(residual)
        expected += others(features) if callable(others) else others
        for call in (
            jax.jit(partial(joint, linear(likelihood, of_features))),
            partial(joint, linear(likelihood, of_features)),
        ):
            np.testing.assert_allclose(call(rows, y), expected, rtol=1e-5 if dtype == "float32" else 1e-10)


@pytest.mark.fault("readout/_assumptions.py", "4 * of_features", "640 * of_features")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_features_of_half_precision(dtype):
    rows = jnp.asarray(ROWS, dtype)
    for factor, is_right in ((1.0, True), (1.3, False)):
        model = linear(lambda f, w, y, factor=factor: observe(f, w, y, mean=factor * (f @ w.astype(dtype))))
        assert np.isfinite(jax.jit(partial(joint, model))(rows, TARGETS)) == is_right


def test_a_prior_scale_whose_square_is_lost():
    def model(y, tau):
        features = numpyro.deterministic("features", ROWS / tau)
        w = numpyro.sample("w", dist.Normal(0, tau).expand([5]).to_event(1))
        observe(features, w, y)

    wrapped = collapse_readout(model, **SITES)
    for tau in (1e-25, 1.0, 1e25):
        np.testing.assert_allclose(
            jax.jit(partial(joint, wrapped))(TARGETS, tau), joint(linear(observe), ROWS, TARGETS), rtol=1e-4
        )


@pytest.mark.fault("readout/_programs.py", "        if any(inputs):", "        if True:")
def test_a_loop_or_a_print_of_the_features_hides_nothing():
    def features(rows):
        jax.debug.callback(np.size, rows)
        return jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, rows))[1]

    run(linear(observe, features), ROWS, TARGETS)
    rectified = linear(lambda f, w, y: observe(f, w, y + 100, mean=jax.nn.relu(100 + f @ w)), features)
    assert np.isnan(jax.jit(partial(joint, rectified))(ROWS, TARGETS))
    with pytest.raises(ValueError, match="must be features @ readout"):
        joint(rectified, ROWS, TARGETS)


@pytest.mark.as_compiled
def test_keys_in_a_loop_of_numpyro():
    def features(rows):
        def layer(hidden, _):
            return hidden + 0 * jax.random.normal(numpyro.prng_key(), hidden.shape), None

        return scan(layer, rows, None, length=2)[0]

    expected = density(linear(observe), ROWS, TARGETS)
    for call in (density, *TRACED.values()):
        np.testing.assert_allclose(call(linear(observe, features), ROWS, TARGETS), expected, rtol=1e-5)


def test_a_position_that_is_not_finite_has_a_density_that_is_not():
    """And no error in a compiled program: chains propose such."""

    def model(x, y=None):
        hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([2, 4]).to_event(2))
        features = numpyro.deterministic("features", jnp.exp(x @ hidden))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, 0.3).to_event(1), obs=y)

    wrapped, x = collapse_readout(model, **SITES), np.ones((3, 2), "f")
    for value in (np.nan, 1e3):
        hidden = {"hidden": jnp.full((2, 4), value)}
        assert not np.isfinite(jax.jit(lambda values: joint(wrapped, x, np.ones(3, "f"), values=values))(hidden))


def test_the_model_runs_twice_in_a_traced_step():
    """In a start as often as in NumPyro's trace and in the energy."""
    runs = []

    def model(x, y=None):
        runs.append(1)
        hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 5]).to_event(2))
        features = numpyro.deterministic("features", jnp.tanh(x @ hidden))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([5]).to_event(1))
        numpyro.sample("y", dist.Normal(features @ w, sigma).to_event(1), obs=y)
        numpyro.sample("z", dist.Normal(sigma, 1.0))

    wrapped, (x, y) = collapse_readout(model, **SITES), (np.ones((4, 1), "f"), np.arange(4.0, dtype="f"))
    kernel = SplitHMC(wrapped)
    state = kernel.init(jax.random.key(0), 1, None, (x, y), {})
    assert len(runs) == 4
    jax.make_jaxpr(jax.grad(kernel.get_potential_fn((x, y), {})))(state.z)
    assert len(runs) == 6
    jax.make_jaxpr(lambda key: trace(seed(wrapped, key)).get_trace(x, y)["sigma"]["value"])(jax.random.key(1))
    assert len(runs) == 8


@pytest.mark.fault("readout/_programs.py", "self.are_all_arguments = False", "pass")
def test_a_loop_of_numpyro_is_looked_at_with_the_values_of_the_run():
    """Its sites come when they have been used, so that the model runs once more."""

    def model(y, factor):
        def layer(carry, _):
            return jnp.tanh(carry @ numpyro.sample("hidden", dist.Normal(0, 1).expand([4, 4]).to_event(2))), None

        features = numpyro.deterministic("features", scan(layer, jnp.asarray(PSI), None, length=2)[0])
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
        numpyro.sample("y", dist.Normal(factor * (features @ w), 0.3).to_event(1), obs=y)

    hidden = np.random.default_rng(0).normal(size=(2, 4, 4)).astype("f")
    features = np.tanh(np.tanh(PSI @ hidden[0]) @ hidden[1]).astype(float)
    expected = multivariate_normal(np.zeros(6), features @ features.T + 0.09 * np.eye(6)).logpdf(Y[:, 0])
    expected += norm.logpdf(hidden).sum()
    wrapped = collapse_readout(model, **SITES)
    call = jax.jit(lambda values, factor: joint(wrapped, Y[:, 0], factor, values=values))
    np.testing.assert_allclose(call({"hidden": hidden}, 1.0), expected, rtol=1e-5)
    assert np.isnan(call({"hidden": hidden}, 1.5))

    @jax.jit
    def at_a_draw(key):
        """The density at values that the loop draws, which no handler gives to both runs."""
        return trace(seed(wrapped, key)).get_trace(Y[:, 0], 1.0)["y"]["fn"].log_prob(Y[:, 0])

    assert np.isfinite(at_a_draw(jax.random.key(1)))
