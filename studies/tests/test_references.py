"""The reference posteriors: their certificate and scorer on draws of known laws, and what is stored of each member."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pandas
import pytest
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.util import log_density as numpyro_log_density
from scipy import stats
from scipy.special import logsumexp

import references
from _certificate import LEAST_P, MOST_Z, certify, checks, p_value, verdict
from _linear_networks import NOISE_SCALE, LinearLaw
from _members import MEMBERS, Rows, fixed_inputs, noise_by_precision, rows_of
from _reference_samplers import by_hand, law_of_linear, prior_draw
from score_references import COLUMNS, FOLDER, c2st, halves, load, log_density, main, scores

STORED = sorted(path.stem for path in FOLDER.glob("*.npz"))
RNG = np.random.default_rng(0)
ROOT = RNG.normal(size=(6, 6))  # of a covariance far from diagonal


def draws_of(seed, *, count=1000, shift=0.0, scale=1.0, persistence=0.0):
    """Observables of four chains of a Gaussian law, moved, widened, or with autocorrelated draws."""
    rng = np.random.default_rng(seed)
    fresh, chain = rng.normal(size=(4, count, 8)), np.zeros((4, count, 8))
    chain[:, 0] = fresh[:, 0]
    for i in range(1, count):
        chain[:, i] = persistence * chain[:, i - 1] + (1 - persistence**2) ** 0.5 * fresh[:, i]
    noise, potential = np.exp(0.3 * chain[..., 6]), chain[..., 7]
    function = shift + scale * chain[..., :6] @ ROOT
    return {"function": function, "noise": noise, "log_density": -0.5 * np.sum(chain**2, -1), "potential": potential}


@pytest.mark.fault("../studies/_certificate.py", "variances[0] + variances[1]", "1e4 * variances[0]")
@pytest.mark.fault("../studies/_certificate.py", "<= MOST_RHAT", ">= 0")
@pytest.mark.parametrize(
    ("wrong", "refused"),
    [
        ({}, set()),
        ({"shift": 0.4}, {"z"}),
        ({"scale": 1.1}, {"z"}),
        ({"scale": 1.6}, {"z", "c2st"}),
        ({"persistence": 0.95}, {"rhat", "ess"}),
        ({"persistence": 0.7, "count": 700}, {"ess"}),
    ],
)
def test_certificate_refuses_samplers_that_disagree(wrong, refused):
    found = verdict(certify(draws_of(0), draws_of(1, **wrong)))
    assert {name for name, is_passed in found["checks_made"].items() if not is_passed} >= refused
    assert found["certified"] is (not refused)


def test_certificate_refuses_a_chain_that_is_stuck_elsewhere():
    wrong = draws_of(1)
    wrong["noise"][2] = 2.0 + 1e-3 * wrong["noise"][2]
    assert not checks(certify(draws_of(0), wrong))["rhat"]


def test_draws_of_the_linear_network_have_the_moments_of_its_law():
    rows, inputs = rows_of("linear"), fixed_inputs("linear").inputs[:30]
    draws = law_of_linear(rows, inputs, 1000)["function"]
    mean, covariance = LinearLaw(1, 50, rows.x, rows.y, NOISE_SCALE).predict(inputs)
    deviation = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose((draws.mean((0, 1)) - mean) / deviation, 0, atol=4 / 4000**0.5)
    np.testing.assert_allclose(draws.std((0, 1)) / deviation, 1, atol=4 / 4000**0.5)


@pytest.mark.fault("../studies/_reference_samplers.py", "jnp.sum(targets**2) - ", "0.9 * jnp.sum(targets**2) - ")
@pytest.mark.fault("../studies/_reference_samplers.py", "whitened + fresh", "whitened + 2 * fresh")
@pytest.mark.parametrize("name", ["wave", "marathon", "additive"])
def test_density_by_hand_is_that_of_a_gaussian(name):
    member, rows = MEMBERS[name], Rows(*(part[:20] for part in rows_of(name)))
    with jax.enable_x64(True):
        potential, readout = by_hand(member.model, rows.x.astype(float), rows.y.astype(float))
        values = []
        for number in range(2):
            hidden = prior_draw(member, rows, number)
            del hidden["readout"]
            sites = jax.tree.map(np.asarray, sites_of(member.model, hidden, rows.x.astype(float)))
            features, noise = sites["features"], np.broadcast_to(sites["noise"], rows.y.shape)
            gram = features @ features.T + np.diag(noise**2)
            log_prior = -0.5 * sum(np.sum(np.square(value)) for value in hidden.values())
            exact = stats.multivariate_normal(None, gram).logpdf(rows.y) + log_prior
            values.append(float(potential(hidden)) + exact)
        draws = np.asarray(jax.vmap(lambda key: readout(key, hidden))(jax.random.split(jax.random.key(0), 4000)))
    assert values[0] == pytest.approx(values[1], abs=1e-6)  # up to a constant
    gain = features.T @ np.linalg.inv(gram)
    mean, covariance = gain @ rows.y, np.eye(features.shape[1]) - gain @ features
    direction = features[3]
    spread = (direction @ covariance @ direction) ** 0.5
    assert (draws @ direction).mean() == pytest.approx(mean @ direction, abs=4 * spread / 4000**0.5)
    assert (draws @ direction).std() == pytest.approx(spread, rel=4 / 8000**0.5)


@pytest.mark.fault("../studies/_members.py", "** -1.5)", "** -1.0)")
def test_precision_of_the_noise_is_a_gamma():
    levels = np.array([0.01, 0.1, 0.5, 0.9, 0.99])
    with substitute(data={"noise_base": stats.norm.ppf(levels)}):
        noise = noise_by_precision("noise")
    np.testing.assert_allclose(noise**-2, stats.gamma(6, scale=1 / 6).ppf(levels), rtol=0.02)


@pytest.mark.fault("../studies/_members.py", "0.05 / size**2", "0.05 / size")
def test_density_of_the_network_of_posteriordb_is_that_of_its_formulas(x64):
    """Variances under their inverse gammas, shape 1/4 and scale s²/4, and the first of ten logits 1."""
    member, rows = MEMBERS["mnist"], rows_of("mnist")
    draw = {**prior_draw(member, rows), "weight_scale_base": np.array(4e7), "readout_scale_base": np.array(9e6)}
    x, y = rows.x, rows.y
    sizes, sites = {"weight_scale": 784, "readout_scale": 10}, jax.tree.map(np.asarray, draw)
    scales = {name: 0.05 / size**2 for name, size in sizes.items()}
    variances = {name: scales[name] ** 2 * sites[f"{name}_base"] for name in sizes}
    hidden = np.tanh(x @ (variances["weight_scale"] ** 0.5 * sites["hidden"]) + sites["biases"])
    free = sites["readout"][0] + hidden @ (variances["readout_scale"] ** 0.5 * sites["readout"][1:])
    logits = np.concatenate([np.ones((100, 1)), free], axis=1)
    expected = np.sum(logits[np.arange(100), y] - logsumexp(logits, axis=1))
    for name, variance in variances.items():
        scale = scales[name] ** 2
        expected += stats.invgamma(0.25, scale=scale / 4).logpdf(variance) + np.log(scale)  # of what is sampled
    expected += sum(stats.norm.logpdf(sites[name]).sum() for name in ("hidden", "biases", "readout"))
    assert float(numpyro_log_density(member.model, (x, y), {}, draw)[0]) == pytest.approx(expected, rel=1e-9)


def sites_of(model, hidden, x):
    """Features and noise of given hidden weights."""
    sites = trace(substitute(seed(model, 0), hidden)).get_trace(x)
    return {name: sites[name]["value"] for name in ("features", "noise")}


def reference(count=1000, seed=0, likelihood="normal"):
    """A reference whose law is Gaussian: test rows, others, and their targets."""
    rng = np.random.default_rng(seed)
    function = rng.normal(size=(count, 6)) @ ROOT
    kind, targets = np.array([0, 1, 1, 1, 2, 2]), np.array([0.3, 0.1, -0.5, 1.0, np.nan, np.nan])
    card = {"likelihood": likelihood}
    return {"function": function, "noise": np.full(count, 0.5), "kind": kind, "targets": targets, "card": card}


@pytest.mark.fault("../studies/score_references.py", "draws.std(0) / deviation - 1", "draws.std(0) / deviation")
def test_scores_are_those_of_known_errors():
    exact = reference()
    deviation = exact["function"].std(0)
    moved = scores(exact, exact["function"] + 0.5 * deviation, exact["noise"])
    assert moved["mean_error"] == pytest.approx(0.5) and moved["deviation_error"] == pytest.approx(0, abs=1e-12)
    mean = exact["function"].mean(0)
    narrow = scores(exact, mean + 0.5 * (exact["function"] - mean), exact["noise"])
    assert narrow["deviation_error"] == pytest.approx(0.5) and narrow["mean_error"] == pytest.approx(0, abs=1e-12)
    # a share of a Gaussian within half of its own interval
    assert narrow["coverage_90"] == pytest.approx(2 * stats.norm.cdf(0.5 * stats.norm.ppf(0.95)) - 1, abs=0.02)
    assert narrow["c2st"] > 0.75
    assert np.isnan(scores(exact, exact["function"])["log_density_gap"])


@pytest.mark.fault("../studies/score_references.py", "np.log(noise) - 0.5", "0.5 * np.log(noise) - 0.5")
def test_log_density_is_that_of_the_mixture():
    exact = reference()
    is_test = exact["kind"] == 1
    by_draw = stats.norm(exact["function"][:, is_test], 0.5).pdf(exact["targets"][is_test])
    ours = log_density(exact, exact["function"], exact["noise"], "normal")
    np.testing.assert_allclose(ours, np.log(by_draw.mean(0)))
    labels = {**exact, "targets": np.array([0, 1, 0, 1, np.nan, np.nan])}
    probs = 1 / (1 + np.exp(-exact["function"][:, is_test]))
    expected = np.log(np.array([probs[:, 0], 1 - probs[:, 1], probs[:, 2]]).mean(1))
    np.testing.assert_allclose(log_density(labels, exact["function"], None, "bernoulli"), expected)
    logits = np.stack([np.zeros_like(exact["function"]), exact["function"]], -1)
    np.testing.assert_allclose(log_density(labels, logits, None, "categorical"), expected)
    moved = scores({**labels, "function": logits, "card": {"likelihood": "categorical"}}, logits + 3.0)
    assert moved["mean_error"] == pytest.approx(0, abs=1e-9)  # what logits share no data see


@pytest.mark.fault("../studies/score_references.py", "z, z[:, first] * z[:, second], units]", "z]")
def test_classifier_tells_laws_apart_that_agree_in_every_margin():
    rng = np.random.default_rng(1)
    z = rng.normal(size=(4000, 2))
    other = z[:2000] @ np.array([[1, 0.6], [0, 0.8]])
    assert c2st(z[:2000], z[2000:]) == pytest.approx(0.5, abs=4 * 0.5 / 4000**0.5)
    assert c2st(other, z[2000:]) > 0.6
    same = [c2st(*rng.normal(size=(2, 1000, 50))) for _ in range(5)]
    assert np.mean(same) == pytest.approx(0.5, abs=4 * 0.5 / 10_000**0.5)
    heavy = rng.standard_t(3, size=(2000, 2)) / 3**0.5
    assert c2st(heavy, z[2000:]) > 0.53


ALONE = """import runpy, sys
sys.argv.pop(0)
sys.modules.update(dict.fromkeys(["jax", "numpyro", "scipy", "sklearn", "pandas", "numpyro_wide"]))
runpy.run_path(sys.argv[0], run_name="__main__")"""


def test_scorer_needs_numpy_alone(tmp_path):
    exact = reference()
    (tmp_path / "known.json").write_text(json.dumps(exact.pop("card")))
    np.savez(tmp_path / "known.npz", **exact)
    np.savez(tmp_path / "mine.npz", function=exact["function"][::-1], noise=exact["noise"])
    scorer = Path(__file__).parents[2] / "studies" / "score_references.py"
    options = ["--references", ".", "--member", "known", "--draws", "mine.npz", "--output", "."]
    subprocess.run([sys.executable, "-c", ALONE, scorer, *options], cwd=tmp_path, check=True)
    header, line = (tmp_path / "score_references.csv").read_text().split()
    assert header.split(",") == ["member", *COLUMNS] and float(line.split(",")[1]) < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--member", "unknown"], "--member has unknown, but the references are .*wave"),
        (["--member", "wave", "--draws", "mine.npz"], "needs an array 'function', but has noise"),
    ],
)
def test_mistakes_of_the_scorer(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.savez("mine.npz", noise=np.ones(100))
    monkeypatch.setattr(sys, "argv", ["score_references.py", *options])
    with pytest.raises(SystemExit):
        main()
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("name", sorted({*STORED} - {"mnist"}))  # one of whose chains is where the others are not
def test_stored_halves_score_as_draws_of_one_law(name):
    stored = load(name)
    found, half = halves(stored), len(stored["function"]) // 2
    assert abs(found["c2st"] - 0.5) < 4 * 0.5 / (2 * half) ** 0.5
    assert found["mean_error"] < 4 * (2 / half) ** 0.5 and found["deviation_error"] < 4 / half**0.5
    assert found["coverage_90"] == pytest.approx(0.9, abs=0.03)
    assert abs(found["log_density_gap"]) < 0.05


@pytest.mark.parametrize("name", STORED)
def test_stored_members_are_those_that_the_models_and_cards_describe(name):
    stored, inputs = load(name), fixed_inputs(name)
    card = stored["card"]
    np.testing.assert_allclose(stored["inputs"], inputs.inputs, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(stored["y"], rows_of(name).y, rtol=1e-6, atol=1e-6)
    assert {"name", "keywords", "references", "model_name", "data_name", "reference_posterior_name"} <= card.keys()
    assert card["certified"] is all(card["checks_made"].values()) and card["checks_made"] == checks(card["diagnostics"])
    assert {site: value.size for site, value in prior_draw(MEMBERS[name], rows_of(name), 0).items()} == card[
        "dimensions"
    ]
    assert stored["function"].shape[0] == 2000 and stored["function"][0].size == 200
    np.testing.assert_allclose(
        stored["function"].mean(0), stored["mean"], atol=5 * np.max(stored["deviation"]) / 2000**0.5
    )


def test_stored_linear_network_has_the_moments_of_its_law():
    stored, rows = load("linear"), rows_of("linear")
    mean, covariance = LinearLaw(1, 50, rows.x, rows.y, NOISE_SCALE).predict(fixed_inputs("linear").inputs)
    deviation = np.sqrt(np.diag(covariance))
    assert np.max(np.abs(stored["mean"] - mean) / deviation) < 4 / 1000**0.5
    assert np.max(np.abs(stored["deviation"] / deviation - 1)) < 4 / 2000**0.5


def test_stored_files_are_small():
    sizes = [path.stat().st_size for path in FOLDER.glob("*.npz")]
    assert sum(sizes) < 21e6 and max(sizes, default=0) < 4e6


def rebuild(folder, name, **options):
    """A member as it is rebuilt, and as it is stored."""
    references.main(SimpleNamespace(member=[name], output=folder, store=folder, **options))
    return load(name, folder), load(name)


@pytest.mark.as_compiled
def test_a_member_is_rebuilt_at_reduced_size(tmp_path, x64):
    """In the form of what is stored, with moments of the law."""
    rebuilt, stored = rebuild(tmp_path, "linear", first=(200, 250), second=(0, 250), simulations=20)
    rows = rows_of("linear")
    assert rebuilt.keys() == stored.keys()
    assert rebuilt["card"].keys() == stored["card"].keys()
    assert rebuilt["card"]["diagnostics"].keys() == stored["card"]["diagnostics"].keys()
    mean, covariance = LinearLaw(1, 50, rows.x, rows.y, NOISE_SCALE).predict(fixed_inputs("linear").inputs)
    deviation = np.sqrt(np.diag(covariance))
    assert np.max(np.abs(rebuilt["mean"] - mean) / deviation) < 5 / 1000**0.5
    assert np.max(np.abs(rebuilt["deviation"] / deviation - 1)) < 5 / 2000**0.5


@pytest.mark.as_compiled
@pytest.mark.fault("../studies/_members.py", 'log_normal("noise", 0.1, 0.5)', 'log_normal("noise", 0.3, 0.1)')
def test_a_member_is_rebuilt_by_two_samplers(tmp_path, x64):
    """With the moments of what is stored, to five standard errors of the sampler with fewer effective draws."""
    rebuilt, stored = rebuild(tmp_path, "wave", first=(300, 300), second=(300, 300), simulations=0)
    found = rebuilt["card"]["diagnostics"]
    error = 5 / (2 * min(found["ess_1"], found["ess_2"])) ** 0.5
    assert error < 0.3 and found["z"] < MOST_Z
    assert np.max(np.abs(rebuilt["mean"] - stored["mean"]) / stored["deviation"]) < error
    assert np.max(np.abs(rebuilt["deviation"] / stored["deviation"] - 1)) < error


@pytest.mark.as_compiled
@pytest.mark.fault("../studies/references.py", 'sites["y"]["value"]', '2 * sites["y"]["value"]')
def test_simulation_based_calibration_of_the_linear_network(x64):
    found = references.ranks(MEMBERS["linear"], rows_of("linear"), fixed_inputs("linear").inputs, 100)
    assert p_value(found, references.NUM_RANKED) >= LEAST_P


@pytest.mark.fault("../studies/_certificate.py", "p_values.min() *", "1 *")
def test_ranks_that_are_not_uniform_are_refused():
    uniform = np.random.default_rng(0).integers(0, 100, size=(100, 51))
    assert p_value(uniform, 99) >= LEAST_P
    for wrong in (uniform // 2, np.where(uniform < 50, uniform // 2, 99 - (99 - uniform) // 2)):  # biased, too narrow
        assert p_value(np.concatenate([uniform, wrong[:, :1]], axis=1), 99) < LEAST_P


PAGE = Path(__file__).parents[2] / "docs" / "gallery" / "references.md"


def table(heading):
    """Cells of the page's table whose heading begins so, by the first of its row."""
    lines = PAGE.read_text().replace("−", "-").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(heading)) + 2
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    return {name: cells for name, *cells in ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)}


def test_page_shows_the_members_and_their_certificates():
    shown = table("| member | network | verdict")
    assert list(shown) == list(MEMBERS)
    for name, (title, told, *numbers, seconds, calibration) in shown.items():
        assert title == MEMBERS[name].title
        if name not in STORED:
            assert told == "not run yet" and not any([*numbers, seconds, calibration])
            continue
        card = load(name)["card"]
        found = card["diagnostics"]
        assert told == ("certified" if card["certified"] else "open")
        expected = max(found["rhat_1"], found["rhat_2"]), min(found["ess_1"], found["ess_2"]), found["z"], found["c2st"]
        assert [float(number) for number in numbers] == [
            float(f"{value:.{digits}f}") for value, digits in zip(expected, (3, 0, 1, 4), strict=True)
        ]
        assert int(seconds) == sum(run["processor_seconds"] for run in card["inference"])
        assert calibration == (f"{found['calibration_p']:.2g}" if "calibration_p" in found else "")


@pytest.mark.fault("../docs/figures/approximations.csv", "wave,unadjusted MCLMC,0.0235", "wave,unadjusted MCLMC,0.235")
def test_page_shows_the_scores_that_were_run():
    scored = pandas.read_csv(PAGE.parents[1] / "figures" / "approximations.csv").set_index(["member", "method"])
    members = list(dict.fromkeys(scored.index.get_level_values("member")))
    for method, cells in table("| method | ").items():
        for name, cell in zip(members, cells, strict=True):
            if (name, method) in scored.index:
                expected = scored.loc[(name, method)].drop("coverage_90")
                assert [float(value) for value in cell.split(" / ")] == [float(f"{value:.2g}") for value in expected]
            else:
                assert cell == "–"
