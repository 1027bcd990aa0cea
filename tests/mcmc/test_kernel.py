"""What NumPyro's MCMC may ask of a kernel, asked of every kernel and of NUTS."""

import pickle
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import MCMC
from numpyro.infer.util import potential_energy

from numpyro_wide.mcmc import SplitHMC
from tests.compilations import kept_programs
from tests.marks import parametrize
from tests.mcmc.cases import KERNELS, WITH_NUTS, chain, regression, regression_data

FIELDS = ("accept_prob", "potential_energy", "energy_error", "num_grad", "num_nonfinite", "step_size")
# Of a short run, and of the long one that it and its resumption make: the resumption takes as many steps as warmup and
# draws together, and keeps one in three, so that both are one program, which JAX's cache compiles once.
WARMUP, DRAWS = 16, 8
THINNING, RESUMED = 3, WARMUP + DRAWS
LONG = DRAWS + RESUMED


def build(name, **settings):
    settings = {"num_warmup": WARMUP, "num_samples": DRAWS, "progress_bar": False, **settings}
    return MCMC(WITH_NUTS[name](regression), **settings)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Keep compiled programs: NumPyro makes one anew at every run, of the same text where sizes are the same."""
    with kept_programs(tmp_path_factory.mktemp("programs")):
        yield


MARKS = {"split": [], "microcanonical": pytest.mark.as_compiled, "nuts": pytest.mark.as_compiled}  # the others are slow


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in WITH_NUTS]
)
def runs(request, programs):
    """Two long runs of one MCMC object, one program, on two data sets."""
    name = request.param
    mcmc = build(name, jit_model_args=True, num_samples=LONG)
    fields = FIELDS if name in KERNELS else ("accept_prob", "potential_energy")
    outcome = SimpleNamespace(name=name, mcmc=mcmc, draws=[], fields=[])
    for seed in (0, 1):
        x, y = regression_data(seed)
        mcmc.run(jax.random.key(1), x, y=y, extra_fields=fields)
        outcome.draws.append(mcmc.get_samples())
        outcome.fields.append(mcmc.get_extra_fields())
    return outcome


def gradients_of(name, fields):
    if name.startswith("split"):  # a warmup too short for several trajectories a draw
        angle = 2.0 if name == "split-whole" else 2.0 * np.sqrt(np.minimum(fields["step_size"] / 0.3, 1.0))
        return np.round(angle / fields["step_size"])
    if name == "microcanonical":  # a whole number of steps with two each, the same for all trajectories
        return 2 * max(1, int(fields["num_grad"][0]) // 2)
    return 2 if name == "microcanonical-unadjusted" else 1


@pytest.mark.as_compiled
@pytest.mark.parametrize("run", [0, 1])
def test_samples_are_constrained_and_fields_are_as_named(runs, run):
    name, draws, fields = runs.name, runs.draws[run], runs.fields[run]
    assert draws["weights"].shape == (LONG, 2)
    assert_same(draws["double_noise"], 2 * draws["noise"])
    x, y = regression_data(run)
    z = {"weights": draws["weights"], "noise": jnp.log(draws["noise"])}
    energies = jax.vmap(lambda z: potential_energy(regression, (x,), {"y": y}, z))(z)
    np.testing.assert_allclose(fields["potential_energy"], energies, rtol=1e-5)
    assert jnp.all((fields["accept_prob"] >= 0) & (fields["accept_prob"] <= 1))
    if name in KERNELS:
        error = np.asarray(fields["energy_error"], dtype=float)
        np.testing.assert_allclose(fields["accept_prob"], np.minimum(1, np.exp(-error)), rtol=1e-5, atol=1e-30)
        assert jnp.all(jnp.diff(fields["num_nonfinite"]) >= 0)
        assert len(set(fields["step_size"].tolist())) == 1
        assert_same(fields["num_grad"], np.full(LONG, gradients_of(name, fields)))


@parametrize("name", KERNELS, rest="slow")
def test_progress_bar_shows_step_size_and_acceptance(name):
    kernel = KERNELS[name](potential_fn=lambda z: jnp.sum(z**2))
    state = kernel.init(jax.random.key(0), 5, jnp.ones(2))
    state = state._replace(step_size=jnp.array(0.0123), mean_accept_prob=jnp.array(0.876))
    shown = kernel.get_diagnostics_str(state)
    assert "1.23e-02" in shown and "0.88" in shown


@parametrize("name", KERNELS, rest="slow")
def test_empty_arrays_in_a_position(name):
    kernel = KERNELS[name](potential_fn=lambda z: 0.5 * jnp.sum(z["b"] ** 2))
    first = {"a": jnp.zeros((0,)), "b": jnp.ones(2), "c": jnp.zeros((3, 0))}
    last, draws = chain(kernel, kernel.init(jax.random.key(0), 25, first), 30, keep=lambda state: state.z["b"])
    assert last.z["a"].shape == (0,) and last.z["c"].shape == (3, 0)
    assert len(np.unique(draws)) > 10


@parametrize("name", ["split", "split-persistent", "split-whole"], rest="slow")
def test_a_velocity_is_stored_where_a_part_of_it_may_live_on(name):
    kernels = {**KERNELS, "split-whole": partial(SplitHMC, persistence=0.0)}
    state = kernels[name](potential_fn=lambda z: jnp.sum(z**2)).init(jax.random.key(0), 5, jnp.ones(2))
    assert (state.r is None) == (name == "split-whole")


def test_a_second_run_is_fresh_and_a_resumed_one_continues_bit_for_bit(runs):
    name, long = runs.name, runs.mcmc
    x, y = regression_data(1)
    short = build(name, jit_model_args=True)
    short.run(jax.random.key(1), x, y=y)
    # The compiled code of the first data set has run on the second one, as if it had never seen the first.
    assert_same(short.get_samples(), jax.tree.map(lambda a: a[:DRAWS], runs.draws[1]))
    assert not np.allclose(runs.draws[0]["weights"], runs.draws[1]["weights"], rtol=1e-2)
    # A copy that went through a pickle takes the rest, thinned, under another warmup setting.
    resumed = pickle.loads(pickle.dumps(short))
    assert_same(resumed.get_samples(), short.get_samples())
    resumed.num_samples, resumed.thinning = RESUMED, THINNING
    resumed.num_warmup = WARMUP if name == "nuts" else 1000
    resumed.post_warmup_state = short.last_state
    resumed.run(short.last_state.rng_key, x, y=y)
    assert_same(resumed.get_samples(), jax.tree.map(lambda a: a[DRAWS + THINNING - 1 :: THINNING], runs.draws[1]))
    for field in ("z", "potential_energy", "mean_accept_prob", "i"):
        assert_same(getattr(resumed.last_state, field), getattr(long.last_state, field))


def test_vectorized_chains_are_the_chains_of_their_keys(runs):
    x, y = regression_data(0)
    mcmc = build(runs.name, num_chains=2, chain_method="vectorized")
    mcmc.run(jnp.stack([jax.random.key(1), jax.random.key(2)]), x, y)
    draws = mcmc.get_samples(group_by_chain=True)
    assert draws["weights"].shape == (2, DRAWS, 2)
    assert not np.allclose(draws["weights"][0], draws["weights"][1])
    single = jax.tree.map(lambda a: a[:DRAWS], runs.draws[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, rtol=5e-3, atol=5e-4), draws, single)


@pytest.mark.filterwarnings("ignore:There are not enough devices")  # for parallel chains, which then run in turns
@parametrize("method", ["sequential", "parallel", jax.vmap], rest="slow")
@parametrize("name", ["langevin", "split", "microcanonical"], rest="slow")
def test_other_chain_methods(name, method):
    x, y = regression_data(0)
    mcmc = build(name, num_chains=2, chain_method=method, num_warmup=4, num_samples=4)
    mcmc.run(jax.random.key(0), x, y)
    draws = mcmc.get_samples(group_by_chain=True)["weights"]
    assert draws.shape == (2, 4, 2)
    assert not np.allclose(draws[0], draws[1])


@jax.custom_jvp
def half_square(x):
    return 0.5 * x**2


@half_square.defjvp
def _(primals, tangents):
    """The right gradient below 0.5 and NaN above, where the value is still finite."""
    x, t = primals[0], tangents[0]
    return half_square(x), jnp.where(x > 0.5, jnp.nan, x) * t


def treacherous(z):
    """N(0, I) with an energy that is NaN or −inf, or a gradient that is NaN, where an entry exceeds 0.5."""
    energy = 0.5 * z[0] ** 2 + 0.5 * z[1] ** 2 + half_square(z[2])
    return jnp.where(z[0] > 0.5, jnp.nan, jnp.where(z[1] > 0.5, -jnp.inf, energy))


@pytest.mark.as_compiled
@parametrize("name", KERNELS, rest="slow")
def test_proposals_that_are_not_finite_are_rejected_and_counted(name):
    kernel = KERNELS[name](potential_fn=treacherous, step_size=0.3, adapt_step_size=False)
    state = kernel.init(jax.random.key(0), 0, jnp.full(3, -0.5))
    last, states = chain(kernel, state, 1000)
    entries = [0, 1] if name == "pcn" else [0, 1, 2]  # pCN takes no gradient
    largest = jnp.max(states.z[:, entries], axis=0)
    assert jnp.all((largest <= 0.5) & (largest > 0.2))  # came close to every edge and never crossed it
    assert jnp.all(jnp.isfinite(states.potential_energy))
    refused = states.energy_error == jnp.inf
    assert 50 < last.num_nonfinite < 950
    np.testing.assert_array_equal(states.num_nonfinite, jnp.cumsum(refused))
    assert jnp.all(states.accept_prob[refused] == 0)
    stays = jnp.all(jnp.diff(states.z, axis=0) == 0, axis=1)
    assert jnp.all(stays[refused[1:]])
    assert jnp.sum(~stays) > 50
