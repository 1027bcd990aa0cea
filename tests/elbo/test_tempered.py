"""The tempered ELBO against NumPyro's, and what tempering is for."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import linen, nnx
from numpyro.contrib.module import random_flax_module, random_nnx_module
from numpyro.distributions.kl import kl_divergence
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoNormal
from sklearn.datasets import load_diabetes, load_digits

from numpyro_wide.elbo import TemperedTraceMeanFieldELBO
from tests.marks import parametrize

X = jnp.asarray(np.random.default_rng(0).normal(size=(12, 2)), "f")
Y = jnp.sin(X[:, 0]) + 0.1


def model(x, y=None, batch=None):
    w = numpyro.sample("w", dist.Normal(0.2, 1.5).expand([2, 8]).to_event(2))
    # No analytic KL between these two: the Monte Carlo fallback.
    v = numpyro.sample("v", dist.StudentT(5.0, 0.0, 1.0).expand([8]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=batch) as index:
        mean = jnp.tanh(x[index] @ w) @ v / 8
        numpyro.sample("y", dist.Normal(mean, 0.3), obs=None if y is None else y[index])


def written_guide(x, y=None, batch=None):
    loc = numpyro.param("loc", jnp.full((2, 8), 0.3))
    numpyro.sample("w", dist.Normal(loc, 0.4).to_event(2))
    numpyro.sample("v", dist.Normal(numpyro.param("v_loc", jnp.full(8, -0.2)), 0.5).to_event(1))


def net_model(x, y=None, batch=None):
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(1)(jnp.tanh(linen.Dense(4)(x)))

    net = random_flax_module("net", Net(), prior=dist.Normal(0, 1), input_shape=(1, 2))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(net(x)[:, 0], 0.3), obs=y)


def nnx_model(x, y=None, batch=None):
    net = random_nnx_module("net", nnx.Linear(2, 1, rngs=nnx.Rngs(0)), prior=dist.Normal(0, 1))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(net(x)[:, 0], 0.3), obs=y)


def counting_model(x, y=None, batch=None):
    calls = numpyro.primitives.mutable("calls", {"count": jnp.array(0.0)})
    calls["count"] += 1
    model(x, y, batch)


def prepared(model, guide, loss=None, *args):
    svi = SVI(model, guide, numpyro.optim.Adam(0.01), loss or TraceMeanField_ELBO())
    state = svi.init(jax.random.key(1), *(args or (X, Y)))
    return svi, {**svi.get_params(state), **(state.mutable_state or {})}


@functools.cache
def with_guide(model, auto_guide):
    guide = auto_guide(model)
    return model, guide, prepared(model, guide)[1]


GUIDES = {
    "written": lambda: (model, written_guide, prepared(model, written_guide)[1]),
    "AutoDiagonalNormal": lambda: with_guide(model, AutoDiagonalNormal),
    "flax": lambda: with_guide(net_model, AutoNormal),
    "nnx": lambda: with_guide(nnx_model, AutoNormal),
}


@parametrize(
    "options",
    [{}, {"num_particles": 3}, {"num_particles": 3, "vectorize_particles": False, "sum_sites": False}],
    rest="slow",
)
@parametrize("kind", GUIDES, rest="slow")
def test_is_numpyros_program_at_eta_one(kind, options):
    """The same operations in the same order, so the same bits wherever it is compiled."""
    model, guide, params = GUIDES[kind]()

    def program(elbo):
        text = str(jax.make_jaxpr(lambda p: elbo.loss(jax.random.key(2), p, model, guide, X, Y))(params))
        return re.sub(r"0x[0-9a-f]+", "", text)

    expected = program(TraceMeanField_ELBO(**options))
    assert program(TemperedTraceMeanFieldELBO(eta=1.0, **options)) == expected
    assert program(TemperedTraceMeanFieldELBO(eta=0.5, **options)) != expected
    # η = τ p/N = 8 · 12/96.
    given = TemperedTraceMeanFieldELBO(8.0, num_neurons=96, num_observations=12, **options)
    assert program(given) == expected


@parametrize("options", [{}, {"num_particles": 3}], rest="slow")
def test_is_numpyros_bit_for_bit_at_eta_one(options):
    model, guide, params = GUIDES["written"]()

    def evaluate(elbo):
        return jax.jit(jax.value_and_grad(lambda p: elbo.loss(jax.random.key(2), p, model, guide, X, Y)))(params)

    # p = 12 from the plate.
    ours = evaluate(TemperedTraceMeanFieldELBO(8.0, num_neurons=96, **options))
    jax.tree.map(np.testing.assert_array_equal, ours, evaluate(TraceMeanField_ELBO(**options)))


@pytest.mark.fault("elbo/_tempered.py", "self.tau * p / self.num_neurons", "self.tau / self.num_neurons")
@pytest.mark.fault("elbo/_tempered.py", '"is_observed"] and not self.is_guide', '"is_observed"] or self.is_guide')
@parametrize("options", [{}, {"num_particles": 4}], rest="slow")
def test_only_the_kl_is_tempered(options):
    _, params = prepared(model, written_guide)
    args = jax.random.key(2), params, model, written_guide, X, Y
    cases = [
        (TemperedTraceMeanFieldELBO(eta=0.3, sum_sites=False, **options), {"w": 0.3, "v": 0.3}),
        (TemperedTraceMeanFieldELBO(eta={"w": 0.3}, sum_sites=False, **options), {"w": 0.3, "v": 1.0}),
        (
            TemperedTraceMeanFieldELBO(eta=lambda s: 0.2 if s == "w" else 2.0, sum_sites=False, **options),
            {"w": 0.2, "v": 2.0},
        ),
        (
            TemperedTraceMeanFieldELBO(2.0, num_observations=5, num_neurons=40, sum_sites=False, **options),
            {"w": 0.25, "v": 0.25},
        ),
        (TemperedTraceMeanFieldELBO(num_neurons=24, sum_sites=False, **options), {"w": 0.5, "v": 0.5}),
    ]
    elbos = [TraceMeanField_ELBO(sum_sites=False, **options), *(elbo for elbo, _ in cases)]
    plain, *all_tempered = jax.jit(lambda: [elbo.loss(*args) for elbo in elbos])()
    for tempered, (_, eta) in zip(all_tempered, cases, strict=True):
        assert tempered.keys() == plain.keys() == {"w", "v", "y"}
        for name, value in tempered.items():
            np.testing.assert_allclose(value, eta.get(name, 1.0) * plain[name], rtol=1e-5)
    kl = kl_divergence(dist.Normal(params["loc"], 0.4), dist.Normal(0.2, 1.5)).sum()
    np.testing.assert_allclose(all_tempered[0]["w"], 0.3 * kl, rtol=1e-5)


@pytest.mark.as_compiled
def test_joint_guide_is_tempered_as_a_whole():
    _, guide, params = GUIDES["AutoDiagonalNormal"]()
    args = jax.random.key(2), params, model, guide, X, Y
    plain = TraceMeanField_ELBO(sum_sites=False).loss(*args)
    tempered = TemperedTraceMeanFieldELBO(eta=0.25, sum_sites=False).loss(*args)
    for name, value in plain.items():
        np.testing.assert_allclose(tempered[name], (1.0 if name == "y" else 0.25) * value, rtol=1e-5)
    with pytest.raises(ValueError, match="one by one"):
        TemperedTraceMeanFieldELBO(eta={"w": 0.5}).loss(*args)


@pytest.mark.slow
def test_flax_sites_by_name_and_training():
    _, guide, params = GUIDES["flax"]()
    loss = TemperedTraceMeanFieldELBO(eta=lambda site: 0.1 if "Dense_0" in site else 1.0)
    svi = SVI(net_model, guide, numpyro.optim.Adam(0.01), loss)
    args = jax.random.key(2), params, net_model, guide, X, Y
    plain = TraceMeanField_ELBO(sum_sites=False).loss(*args)
    loss.sum_sites = False
    tempered = loss.loss(*args)
    changed = {name for name in plain if tempered[name] != plain[name]}
    assert changed == {"net/Dense_0.kernel", "net/Dense_0.bias"}
    loss.sum_sites = True
    fit = svi.run(jax.random.key(0), 30, X, Y, progress_bar=False)
    assert fit.losses[-1] < fit.losses[0]


@pytest.mark.slow
def test_mutable_state_is_carried():
    loss = TemperedTraceMeanFieldELBO(eta=0.5)
    svi = SVI(counting_model, written_guide, numpyro.optim.Adam(0.01), loss)
    state = svi.init(jax.random.key(1), X, Y)
    start = state.mutable_state["calls"]["count"]
    for _ in range(3):
        state, _ = svi.update(state, X, Y)
    assert state.mutable_state["calls"]["count"] == start + 3
    # Reading p off the plates runs the model once more, and must leave no mark.
    svi.loss = TemperedTraceMeanFieldELBO(num_neurons=10)
    state, _ = svi.update(state, X, Y)
    assert state.mutable_state["calls"]["count"] == start + 4


@pytest.mark.slow
def test_minibatch_gradients_average_to_the_full_one(x64):
    x, y = jnp.asarray(X, float), jnp.asarray(Y, float)

    def fixed_guide(x, y=None, batch=None):
        # Noise that is the same for every batch, shifted by the parameters.
        loc, v_loc = numpyro.param("loc", jnp.zeros((2, 8))), numpyro.param("v_loc", jnp.zeros(8))
        numpyro.sample("w", dist.Normal(loc, 0.4).to_event(2), rng_key=jax.random.key(5))
        numpyro.sample("v", dist.Normal(v_loc, 0.5).to_event(1), rng_key=jax.random.key(6))

    params = {"loc": jnp.linspace(-1, 1, 16).reshape(2, 8), "v_loc": jnp.linspace(0.5, -0.2, 8)}
    loss = TemperedTraceMeanFieldELBO(0.7, num_neurons=8)
    full = jax.jit(jax.grad(lambda p: loss.loss(jax.random.key(0), p, model, fixed_guide, x, y)))(params)

    def batched(p, index):
        fixed = numpyro.handlers.substitute(model, data={"data": index})
        return loss.loss(jax.random.key(0), p, fixed, fixed_guide, x, y, 3)

    batches = jnp.arange(12).reshape(4, 3)
    each = jax.jit(jax.vmap(jax.grad(batched), (None, 0)))(params, batches)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a.mean(0), b, rtol=1e-9), each, full)
    assert float(jnp.std(each["loc"], 0).max()) > 1e-3


@parametrize("dataset", ["digits", "diabetes"], rest="slow")
def test_balance_of_the_two_terms_against_width(dataset):
    """Huix 2022, Figures 5 and 6: untrained ReLU network, prior variance 1/5, guide scale 1e-3."""
    x, y = (load_digits if dataset == "digits" else load_diabetes)(return_X_y=True)
    x, y = x[:100] / (16.0 if dataset == "digits" else np.abs(x).max()), y[:100]
    if dataset == "diabetes":
        y = (y - y.mean()) / y.std()
    outputs = 10 if dataset == "digits" else 1

    def network(width):
        def model(x, y):
            prior = dist.Normal(0.0, np.sqrt(0.2))
            b = numpyro.sample("b", prior.expand([x.shape[1], width]).to_event(2))
            a = numpyro.sample("a", prior.expand([width, outputs]).to_event(2))
            with numpyro.plate("data", len(x)):
                f = jax.nn.relu(x @ b) @ a / width
                numpyro.sample("y", dist.Categorical(logits=f) if outputs > 1 else dist.Normal(f[:, 0], 1.0), obs=y)

        return model

    def guide(width):
        def guide(x, y):
            for name, shape in (("b", (x.shape[1], width)), ("a", (width, outputs))):
                numpyro.sample(name, dist.Normal(numpyro.param(name + "_loc", jnp.zeros(shape)), 1e-3).to_event(2))

        return guide

    widths = [50, 400]

    def ratio(elbo, width):
        sites = elbo.loss(jax.random.key(0), {}, network(width), guide(width), x, y)
        return sites["y"] / (sites["a"] + sites["b"])

    def both(n):
        losses = TemperedTraceMeanFieldELBO(0.1, num_neurons=n), TemperedTraceMeanFieldELBO(eta=1.0)
        for elbo in losses:
            elbo.sum_sites = False
        return jax.jit(lambda: [ratio(elbo, n) for elbo in losses])()

    tempered, plain = np.array([both(n) for n in widths]).T
    print(f"\n{dataset}: likelihood / KL at widths {widths}: tau p/N {tempered}, eta = 1 {plain}")
    np.testing.assert_allclose(tempered, tempered[0], rtol=0.01)
    np.testing.assert_allclose(plain * np.array(widths), plain[0] * widths[0], rtol=0.01)


def test_number_of_observations_from_plates():
    def two_groups(y, z):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", 6):
            numpyro.sample("y", dist.Normal(w, 1.0), obs=y)
            numpyro.sample("y2", dist.Normal(w, 2.0), obs=y)
        with numpyro.plate("others", 4):
            numpyro.sample("z", dist.Normal(w, 1.0), obs=z)
        numpyro.factor("extra", -w)

    guide = AutoNormal(two_groups)
    _, params = prepared(two_groups, guide, None, jnp.ones(6), jnp.ones(4))
    args = jax.random.key(0), params, two_groups, guide, jnp.ones(6), jnp.ones(4)
    by_plates = TemperedTraceMeanFieldELBO(num_neurons=50).loss(*args)
    given = TemperedTraceMeanFieldELBO(num_neurons=50, num_observations=10).loss(*args)
    assert by_plates == given != TemperedTraceMeanFieldELBO(num_neurons=50, num_observations=16).loss(*args)


def test_eta_may_be_traced():
    _, params = prepared(model, written_guide)
    args = jax.random.key(2), params, model, written_guide, X, Y
    annealed = jax.jit(lambda eta: TemperedTraceMeanFieldELBO(eta=eta).loss(*args))(0.4)
    np.testing.assert_allclose(annealed, TemperedTraceMeanFieldELBO(eta=0.4).loss(*args), rtol=1e-5)


# What the tempered ELBO refuses ---------------------------------------------------------------------------------------


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
