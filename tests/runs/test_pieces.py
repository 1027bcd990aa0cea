"""Runs in pieces against runs in one, killed or not."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS

from numpyro_wide import ReadoutPredictive, collapse_readout
from numpyro_wide._blocks import blocks_of
from numpyro_wide.diagnostics import _to_arviz as _stored
from numpyro_wide.diagnostics import to_arviz
from numpyro_wide.mcmc import SplitHMC
from numpyro_wide.readout import _predictive as _prediction_runs
from numpyro_wide.runs import StoredDraws, reduced, run_in_pieces
from tests.marks import parametrize

X = jnp.linspace(-1, 1, 6)[:, None]
Y = jnp.sin(3 * X[:, 0])
FIELDS = ("potential_energy", "accept_prob")
SUM = {"sum": lambda sites: sites["net/hidden"].sum()}


def network(x, y=None):
    hidden = numpyro.sample("net/hidden", dist.Normal(0, 1).expand([1, 5]).to_event(2))
    features = numpyro.deterministic("features", jnp.tanh(x @ hidden))
    readout = numpyro.sample("readout", dist.Normal(0, 1).expand([5]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(features @ readout, 0.3), obs=y)


COLLAPSED = collapse_readout(network, readout="readout", features="features", observed="y")


def chains(kernel=SplitHMC, piece=10, **options):
    options = {"num_chains": 2, "chain_method": "vectorized", "num_warmup": 20} | options
    return MCMC(kernel(COLLAPSED), num_samples=piece, **options)


def pieces(folder, mcmc=None, num_samples=20, key=0, x=X, y=Y, **options):
    options = {"extra_fields": FIELDS, "progress_bar": False} | options
    return run_in_pieces(mcmc or chains(), folder, jax.random.key(key), x, y, num_samples=num_samples, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of 20 draws."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    pieces(folder)
    return folder


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.as_compiled
@pytest.mark.fault("runs/_pieces.py", "ends.append(ends[-1] + size)", "ends.append(ends[-1] + size + 1)")
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (SplitHMC, {}),
        pytest.param(NUTS, {}, marks=pytest.mark.slow),
        pytest.param(SplitHMC, {"chain_method": "sequential", "thinning": 2}, marks=pytest.mark.slow),
    ],
    ids=["split", "nuts", "one chain after the other"],
)
def test_pieces_are_the_run_in_one(tmp_path, kernel, options):
    found = pieces(tmp_path, chains(kernel, **options))
    whole = chains(kernel, piece=20, **options)
    whole.warmup(jax.random.key(0), X, Y)
    whole.run(whole.post_warmup_state.rng_key, X, Y, extra_fields=FIELDS)
    for group_by_chain in (True, False):
        equal(found.get_samples(group_by_chain), whole.get_samples(group_by_chain))
        fields = whole.get_extra_fields(group_by_chain)
        equal(found.get_extra_fields(group_by_chain), {name: fields[name] for name in (*FIELDS,)} | fields)


@pytest.mark.as_compiled
def test_a_finished_run_goes_on_and_only_then(tmp_path, monkeypatch, finished):
    whole = StoredDraws(finished)
    assert pieces(tmp_path, num_samples=10).num_samples == 10
    equal(pieces(tmp_path).get_samples(), whole.get_samples())
    monkeypatch.setattr(MCMC, "run", None)  # nothing is left to run
    equal(pieces(tmp_path).get_samples(), whole.get_samples())


@pytest.mark.as_compiled
@parametrize(
    ("change", "what"),
    [
        ({"key": 1}, "rng_key"),
        ({"y": Y + 1}, "data or other arguments"),
        ({"mcmc": chains(NUTS)}, "model or kernel"),
        ({"mcmc": chains(lambda model: SplitHMC(model, target_accept_prob=0.7))}, "model or kernel"),
        ({"mcmc": chains(num_warmup=10)}, "num_warmup, num_chains"),
        ({"extra_fields": ()}, "choice or computation of what is stored"),
        ({"mcmc": chains(lambda model: reduced(SplitHMC(model), drop="net/hidden", functions=SUM))}, "choice or comp"),
    ],
    rest="as_compiled",
)
def test_another_run_is_refused(finished, change, what):
    with pytest.raises(ValueError, match=f"is of a run with another {what}.*another folder"):
        pieces(finished, **change)


def with_ratio(ratio):
    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        numpyro.deterministic("ratio", np.float32(ratio))
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    return NUTS(model)


@pytest.mark.as_compiled
@pytest.mark.fault("runs/_pieces.py", "(stored.as_text(), extra_fields)", "(str(stored.out_info), extra_fields)")
@parametrize(
    "kernel",
    [
        with_ratio,
        lambda ratio: reduced(with_ratio(1), drop="ratio", functions={"r": lambda draw: ratio * draw["mean"]}),
    ],
    rest="slow",
    ids=["deterministic site", "function"],
)
def test_values_of_the_same_shape_computed_otherwise_are_not_mixed(tmp_path, kernel):
    def run(ratio, num_samples):
        mcmc = MCMC(kernel(ratio), num_warmup=5, num_samples=10)
        return run_in_pieces(mcmc, tmp_path, jax.random.key(0), 0.3, num_samples=num_samples, progress_bar=False)

    run(1, 10)
    with pytest.raises(ValueError, match="another choice or computation of what is stored.*mixture; pass the same"):
        run(7, 20)
    assert run(1, 20).num_samples == 20


@pytest.mark.as_compiled
def test_errors(tmp_path, finished):
    with pytest.raises(ValueError, match=r"multiple of the piece's size, mcmc.num_samples=10.*but is 25"):
        pieces(tmp_path, num_samples=25)
    with pytest.raises(TypeError, match="must be a numpyro.infer.MCMC"):
        pieces(tmp_path, SplitHMC(COLLAPSED))
    with pytest.raises(TypeError, match="but 'adapt_state' is an AdaptState.*adapt_state.step_size"):
        pieces(tmp_path, extra_fields=("adapt_state",))
    with pytest.raises(FileNotFoundError, match="there are no draws in"):
        StoredDraws(tmp_path / "nowhere")
    assert not list(tmp_path.iterdir())  # nothing was run before the arguments were looked at
    with pytest.raises(ValueError, match=r"pieces of 15 do not lead from the 20 draws in .* to 30"):
        pieces(finished, chains(piece=15), num_samples=30)


def potential(z):
    return 0.5 * jnp.sum(z["z"] ** 2)


def test_a_potential_function_goes_on_with_another_kernel_object(tmp_path):
    def run(num_samples):
        kernel = SplitHMC(potential_fn=potential)
        mcmc = MCMC(kernel, num_warmup=5, num_samples=5)
        start = {"z": jnp.array([0.3, -1.0])}
        return run_in_pieces(
            mcmc, tmp_path, jax.random.key(0), num_samples=num_samples, init_params=start, progress_bar=False
        )

    first = np.array(run(5).get_samples()["z"])
    np.testing.assert_array_equal(run(10).get_samples()["z"][:5], first)


@pytest.mark.slow
def test_predictions_and_arviz_read_the_folder(monkeypatch, finished):
    stored = StoredDraws(finished)
    assert all(isinstance(draws, np.memmap) for draws in stored.get_samples().values())
    copies = {name: jnp.asarray(draws) for name, draws in stored.get_samples().items()}
    in_memory = ReadoutPredictive(COLLAPSED, copies, (X, Y))
    monkeypatch.setattr(_prediction_runs, "blocks_of", partial(blocks_of, block_bytes=300))  # 40 draws of 20 bytes
    on_disk = ReadoutPredictive(COLLAPSED, stored.get_samples(), (X, Y))
    x_new = jnp.array([[0.3], [2.0]])
    found, expected = (predictive(jax.random.key(1), x_new) for predictive in (on_disk, in_memory))
    for name in ("mean", "variance"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)
    assert len(np.unique(found["y"][:, 0])) == 40  # every block has a key of its own
    densities = [predictive.log_density(x_new, jnp.zeros(2)) for predictive in (on_disk, in_memory)]
    np.testing.assert_allclose(*densities, rtol=1e-5)
    assert on_disk.readout(jax.random.key(2)).shape == (40, 5)
    data = to_arviz(StoredDraws(finished), COLLAPSED, X, Y)
    assert data["posterior"]["net.hidden"].shape == (2, 20, 1, 5)
    assert data["log_likelihood"]["y"].shape == (2, 20, 6)


@pytest.mark.slow
def test_arviz_gets_log_likelihoods_and_predictions_a_block_at_a_time(monkeypatch, finished):
    run = StoredDraws(finished)
    options = {"posterior_predictive": True, "include": ["features"]}
    whole = to_arviz(run, COLLAPSED, X, Y, **options)
    sizes = []

    def counted(draws, axis):
        for start, block in blocks_of(draws, axis=axis, block_bytes=300):  # 40 draws of 5 weights and 5 readouts
            sizes.append({values.shape[:2] for values in block.values()})
            yield start, block

    monkeypatch.setattr(_stored, "blocks_of", counted)
    blocks = to_arviz(run, COLLAPSED, X, Y, **options)
    assert {(2, 3)} in sizes and all(size in ({(2, 3)}, {(2, 2)}) for size in sizes)
    np.testing.assert_allclose(blocks["log_likelihood"]["y"], whole["log_likelihood"]["y"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(blocks["posterior"]["features"], whole["posterior"]["features"], rtol=1e-4, atol=1e-5)
    drawn = blocks["posterior_predictive"]["y"].values
    assert drawn.shape == (2, 20, 6) and len(np.unique(drawn[..., 0])) == 40  # every block has a key of its own
