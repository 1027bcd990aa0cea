"""Lint of the documentation's numbers (``make lint``): prose, tables and summaries show what runs have written.

If one fails, a page and a file of docs/figures differ: write in the page what the file has, or run the study that
writes the file (docs/gallery names it) and keep both.
"""

import itertools
import re
from pathlib import Path

import pandas
import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FIGURES = DOCS / "figures"
NOT_PROSE = re.compile(
    r"^```.*?^```$|^<!--.*?^-->$|^\|.*?$|^!\[.*?$|`[^`\n]+`|\]\([^)]*\)|^#.*?$", re.MULTILINE | re.DOTALL
)
NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*(?:\.\d+)?(?![\w]|\.\d)")

# A section, or a page (None), the tables that its results are in, and its other numbers: what was run, and what rows
# give together.
SECTIONS = {
    ("gallery/classes.md", None): (
        "classes fashion_scores fashion_costs",
        # Rows, units, steps and draws; of the table of costs.
        "1000 2000 128 100 400 500 256 2022,",
    ),
    ("gallery/sbibm.md", "By hand"): ("sbibm_by_hand_summary", ""),
    ("gallery/any_size.md", None): ("any_size", ""),
    ("how_wide.md", "One hidden layer"): (
        "how_wide_gradients how_wide_seconds",
        "1000 1024 17 12 1.4 2.4 2.2",
    ),  # ratios
    ("how_wide.md", "Narrow networks predict better"): ("how_wide_scores", ""),
    ("benchmark.md", "The estimator"): (
        "estimator_summary",
        "2019 90 85 58 80 19 132 60",  # of all gaps and fits; what was run
    ),
    ("benchmark.md", "A duel"): ("duel_summary duel", "1202 301 13,903 3476 2025"),  # rows
}


def section(page, heading):
    """Return the text under a heading, up to the next of its rank, or of the whole page."""
    text = (DOCS / page).read_text()
    if heading is None:
        return text
    start = text.index(f"\n## {heading}\n") + 4
    return text[start : text.find("\n## ", start) if "\n## " in text[start:] else len(text)]


def as_number(text):
    return float(text.replace("−", "-").replace(",", ""))


def numbers_of(files):
    """Return all numbers that stand in the cells and headings of some tables."""
    tables = [pandas.read_csv(FIGURES / f"{name}.csv", dtype=str, keep_default_na=False) for name in files.split()]
    cells = itertools.chain.from_iterable([*table.columns, *table.to_numpy().ravel()] for table in tables)
    return {abs(as_number(found)) for cell in cells for found in re.findall(r"\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?", cell)}


def is_rounded(found, values):
    """Whether a number of the prose is one of the values, to as many digits as it has."""
    unit = 10.0 ** -len(found.partition(".")[2])
    return any(abs(value - abs(as_number(found))) <= 0.501 * unit for value in values)


@pytest.mark.fault("../docs/gallery/classes.md", "took 173, 494, 283 and 1231", "took 173, 494, 283 and 1331")
@pytest.mark.parametrize("place", SECTIONS, ids=lambda place: " ".join(filter(None, place)))
def test_numbers_in_prose_are_in_the_tables_of_their_figures(place):
    files, others = SECTIONS[place]
    values = numbers_of(files)
    shown = [text for text in NUMBER.findall(NOT_PROSE.sub(" ", section(*place))) if len(text) > 1]
    assert len(shown) > 5
    wrong = [text for text in shown if text not in others.split() and not is_rounded(text, values)]
    assert not wrong, f"docs/{place[0]}: {wrong} are not in {files}; if they are no results, add them to SECTIONS"


def rows_of(page, heading):
    """Return the cells of the Markdown table whose heading begins so, by the first of its row."""
    lines = (DOCS / page).read_text().replace("−", "-").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(heading)) + 2
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    cells = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    return {name: values for name, *values in cells}


def assert_shown(cell, value, error=None):
    """Hold a cell such as "0.5 ± 0.1" to a value and its error, each to a unit of its last digit."""
    found = re.findall(r"-?\d[\d.]*", cell)
    for text, expected in zip(found, (value, error), strict=False):
        assert abs(float(text) - expected) <= 1.01 * 10.0 ** -len(text.partition(".")[2]), (cell, value, error)


@pytest.mark.fault("../docs/guides/evidence.md", "| 4.22 ± 0.22 |", "| 4.62 ± 0.22 |")
@pytest.mark.parametrize(
    ("heading", "column", "error"),
    [("| | evidence, width 8", "log_evidence", "error"), ("| | further rows", "conditional", "conditional_error")],
)
def test_evidences_by_width_are_those_that_were_found(heading, column, error):
    found = pandas.read_csv(FIGURES / "evidence.csv")
    found = found[found["depth"] == 1].set_index(["name", "scales", "width"])
    shown = rows_of("guides/evidence.md", heading)
    assert len(shown) == 6
    for name, cells in shown.items():
        known = "parity" if name == "even digits" else name.partition(",")[0]
        limit, *others = (
            found.loc[known, "latent" if "latent" in name else "fixed", width] for width in (0, 8, 64, 512, 4096)
        )
        for cell, row in zip(cells, others, strict=True):
            assert_shown(cell, row[column] - limit[column], (row[error] ** 2 + limit[error] ** 2) ** 0.5)
            assert ("not trusted" in cell) <= (not row["is_trusted"])


@pytest.mark.fault("../docs/gallery/features_learnt.md", "| 0.066 | 0.049 |", "| 0.076 | 0.049 |")
@pytest.mark.parametrize("function", ["Rosenbrock", "Sobol g"])
def test_what_networks_learnt_is_what_was_found(function):
    runs = pandas.read_csv(FIGURES / "features_learnt.csv").query("function == @function")
    runs = runs.sort_values(["network", "width", "steps"], ascending=[False, True, True])
    shown = rows_of("gallery/features_learnt.md", f"| {function} |")
    columns = ["rrmse", "noise_scale", "log_evidence", "rhat", "rhat_effects"]
    for cells, (_, run) in zip(shown.values(), runs.iterrows(), strict=True):
        for cell, value in zip(cells, run[columns], strict=True):
            assert bool(cell) == pandas.notna(value)
            assert_shown(cell, value)


def test_evidences_at_infinite_width_are_those_that_were_found():
    found = pandas.read_csv(FIGURES / "evidence.csv").query("width == 0 and scales == 'fixed'")
    found = found.set_index(["name", "depth"])
    for name, cells in rows_of("guides/evidence.md", "| | depth 1").items():
        for cell, depth in zip(cells, (1, 2, 4), strict=True):
            row = found.loc["parity" if name == "even digits" else name, depth]
            assert_shown(cell, row["log_evidence"], row["conditional"])


def test_the_term_of_order_one_over_the_width_is_that_of_the_chains():
    found = pandas.read_csv(FIGURES / "finite_width.csv").set_index("width")
    (cells,) = (
        cells
        for name, cells in rows_of("gallery/one_over_width.md", "| width | 16 | 64 |").items()
        if "evidence" in name
    )
    limits = []  # of the evidence, which every width must lead to
    for cell, width in zip(cells, (16, 64, 256, 1024), strict=True):
        term, error = map(float, cell.split(" ± "))
        assert error == pytest.approx(width * found.loc[width, "error"], abs=0.051)
        limits.append(found.loc[width, "log_evidence"] - term / width)
    assert limits == pytest.approx([limits[-1]] * 4, abs=0.004)


def test_intervals_that_hold_the_exact_evidence_are_those_that_were_found():
    found = pandas.read_csv(FIGURES / "exact_laws.csv")
    found["score"] = (found["log_evidence"] - found["exact"]) / found["standard_error"]
    cells = (DOCS / "guides" / "exact_laws.md").read_text().partition("| form | layers x units | method")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in cells.splitlines()[2:6]]
    for form, size, method, trusted, held, mean, spread, error in rows:
        depth, width = map(int, size.split(" x "))
        kind = (found["form"] == form) & (found["depth"] == depth) & (found["width"] == width)
        of_kind = found[kind & (found["method"] == method)]
        good = of_kind[of_kind["is_trusted"] == 1]
        assert trusted == f"{len(good)} of {len(of_kind)}"
        within = good["score"].abs() < 1.96
        assert held in (f"{100 * within.mean():.1f} %", f"{within.sum()} of {len(good)}")
        assert_shown(f"{mean} ± {error}", good["score"].mean(), good["standard_error"].median())
        assert_shown(spread, good["score"].std(ddof=0))


def test_tables_of_pages_are_those_of_the_files():
    """They stand in the page as text, for those who read it without the build."""
    pages = "".join((DOCS / page).read_text() for page in ("benchmark.md", "guides/samplers.md", "gallery/speed.md"))
    named = re.findall(r"^<!--- (figures/\S+) -->\n\n((?:\|.*\n)+)", pages, re.MULTILINE)
    assert len(named) == 6
    for file, text in named:
        head, _, *rows = [re.split(r" *\| *", line)[1:-1] for line in text.splitlines()]
        table = pandas.read_csv(DOCS / file, dtype=str, keep_default_na=False)
        assert head == list(table.columns) and rows == table.to_numpy().tolist(), file


@pytest.mark.fault("../docs/figures/wrap_sample_predict.csv", 'collapsed",459,', 'collapsed",469,')
def test_the_first_pages_show_what_the_demo_wrote():
    rows = pandas.read_csv(FIGURES / "wrap_sample_predict.csv").query("width == 800").set_index("run")
    function, weights = rows["function / s"], rows["weights / s"]
    assert list(rows.index) == ["SplitHMC, collapsed", "SplitHMC, unwrapped", "NUTS, unwrapped"]
    for page in (ROOT / "README.md", DOCS / "index.md"):
        caption = page.read_text().partition("by width](")[2].split("\n\n")[1]
        numbers = [number.rstrip(",") for number in NUMBER.findall(caption)]
        written = [f"{number:.0f}" for number in (*function, *weights)]
        assert numbers[numbers.index(written[0]) :][:6] == written
    collapsed, unwrapped, nuts = rows.drop(columns="width").to_numpy()
    # The first two columns are of the function, per second and per 1000 gradients, the next two of the weights.
    gains = [*(collapsed / nuts)[[0, 2]], *(unwrapped / nuts)[[0, 2]], *(collapsed / unwrapped)[[0, 2, 1, 3]]]
    paragraph = (DOCS / "gallery" / "speed.md").read_text().split("\n\n")[1]
    shown = [number for number in NUMBER.findall(paragraph) if number != "800"]
    assert [float(number) for number in shown] == [float(f"{gain:.2g}") for gain in gains]


def test_the_benchmark_shows_the_rows_that_were_run():
    rows = pandas.read_csv(FIGURES / "uci.csv")
    shown = pandas.read_csv(FIGURES / "uci_summary.csv")
    found = rows.groupby(["name", "model"], sort=False)
    assert len(found) == len(shown)
    for (name, model), group in found:
        line = shown[(shown["set"] == name) & (shown["model"].str.rstrip("*") == model)].iloc[0]
        assert line["splits"] == len(group) == group["split"].nunique()
        assert line["model"].endswith("*") == bool((group["rhat"] > 1.05).any())
        for column, shown_as in (("rmse", "RMSE"), ("log_density", "log density")):
            assert str(line[shown_as]).split(" ±")[0] == f"{group[column].mean():.3g}"


def test_the_classes_of_the_gallery_are_the_rows_that_were_run():
    rows = pandas.read_csv(FIGURES / "fashion.csv")
    shown = pandas.read_csv(FIGURES / "fashion_scores.csv")
    assert sorted(rows["model"]) == sorted(shown["model"])
    assert sorted(round(value, 3) for value in rows["accuracy"]) == sorted(shown["accuracy"])
    chains = pandas.read_csv(FIGURES / "fashion_costs.csv")
    assert sorted(chains["model"]) == sorted(rows["model"][rows["draws"] > 0])


def test_the_estimator_shows_the_rows_that_were_run():
    rows = pandas.read_csv(FIGURES / "estimator.csv").groupby(["name", "kind"], sort=False)
    shown = pandas.read_csv(FIGURES / "estimator_summary.csv")
    assert len(rows) == len(shown)
    by_hand = pandas.read_csv(FIGURES / "uci.csv").query("model == '1 x 50, collapsed'")
    by_hand = by_hand.set_index(["name", "split"])["log_density"]
    for ((name, kind), group), line in zip(rows, shown.to_dict("records"), strict=True):
        assert (line["set"], line["splits"]) == (name, f"{len(group)} {kind}") and group["split"].is_unique
        for column, shown_as in (("rmse", "RMSE"), ("log_density", "log density")):
            assert str(line[shown_as]).split(" ±")[0] == f"{group[column].mean():.3g}"
        assert line["90 % interval holds"] == pytest.approx(group["coverage_90"].mean(), abs=0.0051)
        if kind == "random":
            gains = group["log_density"].to_numpy() - by_hand[name].loc[group["split"]].to_numpy()
            assert line["over 1 x 50, collapsed"].split(" ±")[0] == f"{gains.mean():+.2g}"


def test_the_duel_shows_the_rows_that_were_run():
    rows = pandas.read_csv(FIGURES / "duel.csv").groupby(["set", "model"])
    shown = pandas.read_csv(FIGURES / "duel_summary.csv").set_index(["set", "model"])
    shown = shown[~shown.index.get_level_values("model").str.endswith("published")]
    assert set(rows.groups) == set(shown.index)
    for place, group in rows:
        assert shown.loc[place, "seeds"] == len(group) == group["seed"].nunique()
        for column, shown_as in (("rmse", "RMSE"), ("nll", "NLL")):
            assert float(str(shown.loc[place, shown_as]).split(" ±")[0]) == float(f"{group[column].mean():.4f}")


def test_the_emulators_show_the_fits_that_were_run():
    rows = pandas.read_csv(FIGURES / "emulators.csv").groupby(["function", "inputs", "ratio", "model"])
    shown = pandas.read_csv(FIGURES / "emulators_summary.csv")
    shown["ratio"] = shown["rows"] // shown["inputs"]
    shown = shown.set_index(["function", "inputs", "ratio", "model"])
    assert set(rows.groups) == set(shown.index)
    for place, group in rows:
        line = shown.loc[place]
        assert line["sets"] == len(group) == group["set"].nunique()
        for column, shown_as in (("rrmse", "RRMSE"), ("interval_score", "interval score")):
            assert line[shown_as] == pytest.approx(group[column].median(), abs=6e-4)


@pytest.mark.parametrize("name", ["sbibm", "sbibm_by_hand"])
def test_the_public_benchmark_shows_the_rows_that_were_run(name):
    rows = pandas.read_csv(FIGURES / f"{name}.csv").groupby(["task", "budget", "family"])
    shown = pandas.read_csv(FIGURES / f"{name}_summary.csv").set_index(["task", "simulations", "family"])
    for (task, budget, family), group in rows:
        line = shown.loc[task, budget, family]
        assert line["seeds"] == len(group)
        scores = group.filter(like="c2st")
        assert line["observations"] == scores.iloc[0].count()
        assert str(line["C2ST"]).split(" ±")[0] == f"{scores.mean(axis=1).mean():.3g}"
        if group["corrected"].notna().any():
            line = shown.loc[task, budget, f"{family}, importance-corrected"]
            assert str(line["C2ST"]).split(" ±")[0] == f"{group['corrected'].mean():.3g}"


def test_the_parametrisations_show_the_rows_that_were_run():
    rows = pandas.read_csv(FIGURES / "parametrisations.csv")
    shown = pandas.read_csv(FIGURES / "parametrisations_summary.csv").set_index(["parametrisation", "width"])
    means = rows.groupby(["form", "width", "learning_rate"])["held_out"].agg(["mean", "count"]).reset_index()
    best = means.loc[means.groupby(["form", "width"])["mean"].idxmin()].set_index(["form", "width"])
    assert set(best.index) == set(shown.index)
    for place, line in shown.iterrows():
        assert (line["learning rate"], line["seeds"]) == (best.loc[place, "learning_rate"], best.loc[place, "count"])
        assert float(line["held-out loss"].split(" ±")[0]) == float(f"{best.loc[place, 'mean']:.3g}")


@pytest.mark.fault("../docs/figures/as_users_summary.csv", "169 / 56.1 / 19.3", "196 / 56.1 / 19.3")
def test_the_models_of_users_show_the_rows_that_were_run():
    rows = pandas.read_csv(FIGURES / "as_users.csv", na_values="inf").set_index(["model", "sampler"])
    shown = pandas.read_csv(FIGURES / "as_users_summary.csv").set_index("model")
    samplers = ("SplitHMC", "SplitHMC, unwrapped", "NUTS", "NUTS, unwrapped")
    assert len(rows) == 4 * len(shown) == 48 and rows.index.is_unique
    for (model, column), cells in shown.stack().items():
        values = [rows.loc[(model.split(":")[0], name), column] for name in samplers]
        found = [float(cell.replace("–", "nan")) for cell in cells.split(" / ")]
        assert found == pytest.approx(values, rel=0.0051, nan_ok=True), (model, column)


@pytest.mark.fault("../docs/figures/how_wide_seconds.csv", "1 x 64,collapsed,75 / 14,", "1 x 64,collapsed,95 / 14,")
@pytest.mark.parametrize(("cost", "unit"), [("gradients", 1000), ("seconds", 1)])
def test_the_tables_of_widths_show_the_rows_that_were_run(cost, unit):
    rows = pandas.read_csv(FIGURES / "how_wide.csv").dropna()
    rows = {(f"{row.depth} x {row.width}", row.form, row.kernel): row for row in rows.itertuples()}
    table = pandas.read_csv(FIGURES / f"how_wide_{cost}.csv", index_col=["network", "form"]).stack()
    shown = {(*place, kernel): cell for (*place, kernel), cell in table.items() if isinstance(cell, str)}
    assert shown.keys() == rows.keys()
    for key, row in rows.items():
        expected = [unit * draws / getattr(row, cost) for draws in (row.ess_function, row.ess_weights)]
        found = [float(value) for value in shown[key].rstrip("*").split(" / ")]
        assert found == [float(f"{value:.2g}") for value in expected], key
        assert shown[key].endswith("*") == (row.rhat > 1.05), key


def test_the_table_of_scores_by_width_shows_the_rows_that_were_run():
    rows = pandas.read_csv(FIGURES / "how_wide.csv").dropna().query("form == 'collapsed'")
    rows = {(f"{row.depth} x {row.width}", row.kernel): row for row in rows.itertuples()}
    scores = pandas.read_csv(FIGURES / "how_wide_scores.csv", index_col="network").stack()
    shown = {place: cell for place, cell in scores.items() if isinstance(cell, str)}
    assert shown.keys() == rows.keys()
    for place, cell in shown.items():
        expected = f"{rows[place].rmse:.2f} / {rows[place].log_density:.2f}"
        assert cell.replace("−", "-") == expected, place


@pytest.mark.fault("../docs/figures/published_log_density.csv", "−0.70 ± 0.03", "−0.60 ± 0.03")
def test_published_figures_stand_beside_the_rows_that_were_run():
    by_hand = pandas.read_csv(FIGURES / "uci_summary.csv")
    by_hand = by_hand[(by_hand["model"].str.rstrip("*") == "1 x 50, collapsed") & (by_hand["splits"] == 20)]
    estimator = pandas.read_csv(FIGURES / "estimator_summary.csv")
    estimator = estimator[estimator["splits"].str.endswith("random")]
    for score in ("RMSE", "log density"):
        shown = pandas.read_csv(FIGURES / f"published_{score.lower().replace(' ', '_')}.csv").set_index("set")
        for rows, column in ((by_hand, "1 x 50, here"), (estimator, "estimator, here")):
            found = rows.set_index("set")[score]
            assert set(shown.index) == set(found.index)
            for name, ours in shown[column].items():
                assert ours.replace("−", "-") == " ± ".join(f"{float(value):.2f}" for value in found[name].split(" ± "))
