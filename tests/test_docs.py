"""The documentation names everything that is public, and every example."""

import ast
import itertools
import re
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType

import pandas
import pytest

import numpyro_wide

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PARTS = [name for name in numpyro_wide.__all__ if isinstance(getattr(numpyro_wide, name), ModuleType)]
# Hron 2022, Hron et al. (2022), Meng and Wong 1996, Cotter, Roberts, Stuart, White 2013
CITATION = re.compile(
    r"\b([A-Z][\w-]+)(?: et al\.|(?:, [A-Z][\w-]+(?: [A-Z][\w-]+)?)*(?: (?:and|&) [A-Z][\w-]+)?) \(?((?:19|20)\d\d)\b"
)
NO_NAMES = {"With", "At", "March", "May", "November", "Olympic"}
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: (\S+)\n(?:\n?   :members:(.*)\n)?", re.MULTILINE)
MEMBERS = (FunctionType, classmethod, staticmethod, property, cached_property)


def public_names(module):
    """Names in ``__all__``, or what a module without one defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and name[0] != "_"
    ]


def documented():
    """Identities of all objects that autodoc is asked for, and of classes what members it leaves out."""
    found, left_out = set(), {}
    for page in (DOCS / "api").glob("*.md"):
        for kind, target, members in (match.groups() for match in DIRECTIVE.finditer(page.read_text())):
            if kind == "module":
                module = import_module(target)
                listed = [] if members is None else [name.strip() for name in members.split(",") if name.strip()]
                names = public_names(module) if members is not None and not listed else listed
                found |= {id(getattr(module, name)) for name in names}
            else:
                module_name, _, name = target.rpartition(".")
                value = getattr(import_module(module_name), name)
                found.add(id(value))
                if isinstance(value, type) and (members is None or members.strip()):
                    own = {name for name, member in vars(value).items() if isinstance(member, MEMBERS)}
                    left_out[target] = {name for name in own if name[0] != "_"} - set(re.findall(r"\w+", members or ""))
    return found, left_out


@pytest.mark.parametrize("part", [None, *PARTS])
def test_every_public_name_is_on_the_api_pages(part):
    module = numpyro_wide if part is None else getattr(numpyro_wide, part)
    names = [name for name in public_names(module) if not isinstance(getattr(module, name), ModuleType)]
    found, _ = documented()
    assert [name for name in names if id(getattr(module, name)) not in found] == []


def test_every_method_and_property_of_a_class_is_on_the_api_pages():
    _, left_out = documented()
    assert {target: names for target, names in left_out.items() if names} == {}


def test_every_example_and_study_is_in_the_gallery():
    gallery = "".join(page.read_text() for page in [DOCS / "gallery.md", *DOCS.glob("gallery/*.md")])
    scripts = [*ROOT.glob("examples/*.py"), *ROOT.glob("studies/[!_]*.py")]
    assert [path.name for path in scripts if f"python {path.parent.name}/{path.name}" not in gallery] == []


def test_the_benchmark_shows_the_rows_that_were_run():
    rows = pandas.read_csv(DOCS / "figures" / "uci.csv")
    shown = pandas.read_csv(DOCS / "figures" / "uci_summary.csv")
    found = rows.groupby(["name", "model"], sort=False)
    assert len(found) == len(shown)
    for (name, model), group in found:
        line = shown[(shown["set"] == name) & (shown["model"].str.rstrip("*") == model)].iloc[0]
        assert line["splits"] == len(group) == group["split"].nunique()
        assert line["model"].endswith("*") == bool((group["rhat"] > 1.05).any())
        for column, shown_as in (("rmse", "RMSE"), ("log_density", "log density")):
            assert str(line[shown_as]).split(" ±")[0] == f"{group[column].mean():.3g}"


def test_the_classes_of_the_gallery_are_the_rows_that_were_run():
    rows = pandas.read_csv(DOCS / "figures" / "fashion.csv")
    shown = pandas.read_csv(DOCS / "figures" / "fashion_scores.csv")
    assert sorted(rows["model"]) == sorted(shown["model"])
    assert sorted(round(value, 3) for value in rows["accuracy"]) == sorted(shown["accuracy"])
    chains = pandas.read_csv(DOCS / "figures" / "fashion_costs.csv")
    assert sorted(chains["model"]) == sorted(rows["model"][rows["draws"] > 0])


def test_the_estimator_shows_the_rows_that_were_run():
    rows = pandas.read_csv(DOCS / "figures" / "estimator.csv").groupby(["name", "kind"], sort=False)
    shown = pandas.read_csv(DOCS / "figures" / "estimator_summary.csv")
    assert len(rows) == len(shown)
    by_hand = pandas.read_csv(DOCS / "figures" / "uci.csv").query("model == '1 x 50, collapsed'")
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
    rows = pandas.read_csv(DOCS / "figures" / "duel.csv").groupby(["set", "model"])
    shown = pandas.read_csv(DOCS / "figures" / "duel_summary.csv").set_index(["set", "model"])
    shown = shown[~shown.index.get_level_values("model").str.endswith("published")]
    assert set(rows.groups) == set(shown.index)
    for place, group in rows:
        assert shown.loc[place, "seeds"] == len(group) == group["seed"].nunique()
        for column, shown_as in (("rmse", "RMSE"), ("nll", "NLL")):
            assert float(str(shown.loc[place, shown_as]).split(" ±")[0]) == float(f"{group[column].mean():.4f}")


def test_the_emulators_show_the_fits_that_were_run():
    rows = pandas.read_csv(DOCS / "figures" / "emulators.csv").groupby(["function", "inputs", "ratio", "model"])
    shown = pandas.read_csv(DOCS / "figures" / "emulators_summary.csv")
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
    rows = pandas.read_csv(DOCS / "figures" / f"{name}.csv").groupby(["task", "budget", "family"])
    shown = pandas.read_csv(DOCS / "figures" / f"{name}_summary.csv").set_index(["task", "simulations", "family"])
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
    rows = pandas.read_csv(DOCS / "figures" / "parametrisations.csv")
    shown = pandas.read_csv(DOCS / "figures" / "parametrisations_summary.csv").set_index(["parametrisation", "width"])
    means = rows.groupby(["form", "width", "learning_rate"])["held_out"].agg(["mean", "count"]).reset_index()
    best = means.loc[means.groupby(["form", "width"])["mean"].idxmin()].set_index(["form", "width"])
    assert set(best.index) == set(shown.index)
    for place, line in shown.iterrows():
        assert (line["learning rate"], line["seeds"]) == (best.loc[place, "learning_rate"], best.loc[place, "count"])
        assert float(line["held-out loss"].split(" ±")[0]) == float(f"{best.loc[place, 'mean']:.3g}")


@pytest.mark.fault("../docs/figures/as_users_summary.csv", "854 / 115 / 76.1", "954 / 115 / 76.1")
def test_the_models_of_users_show_the_rows_that_were_run():
    rows = pandas.read_csv(DOCS / "figures" / "as_users.csv", na_values="inf").set_index(["model", "sampler"])
    shown = pandas.read_csv(DOCS / "figures" / "as_users_summary.csv").set_index("model")
    assert len(rows) == 3 * len(shown) == 36 and rows.index.is_unique
    for (model, column), cells in shown.stack().items():
        values = [rows.loc[(model.split(":")[0], name), column] for name in ("SplitHMC", "NUTS", "NUTS, unwrapped")]
        found = [float(cell.replace("–", "nan")) for cell in cells.split(" / ")]
        assert found == pytest.approx(values, rel=0.0051, nan_ok=True), (model, column)


def table(page, heading):
    """Cells of the rows of the Markdown table whose heading begins so, minus signs as Python writes them."""
    lines = (DOCS / page).read_text().replace("−", "-").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(heading)) + 2
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.fault("../docs/figures/how_wide_seconds.csv", "1 x 64,collapsed,75 / 14,", "1 x 64,collapsed,95 / 14,")
@pytest.mark.parametrize(("cost", "unit"), [("gradients", 1000), ("seconds", 1)])
def test_the_tables_of_widths_show_the_rows_that_were_run(cost, unit):
    rows = pandas.read_csv(DOCS / "figures" / "how_wide.csv").dropna()
    rows = {(f"{row.depth} x {row.width}", row.form, row.kernel): row for row in rows.itertuples()}
    table = pandas.read_csv(DOCS / "figures" / f"how_wide_{cost}.csv", index_col=["network", "form"]).stack()
    shown = {(*place, kernel): cell for (*place, kernel), cell in table.items() if isinstance(cell, str)}
    assert shown.keys() == rows.keys()
    for key, row in rows.items():
        expected = [unit * draws / getattr(row, cost) for draws in (row.ess_function, row.ess_weights)]
        found = [float(value) for value in shown[key].rstrip("*").split(" / ")]
        assert found == [float(f"{value:.2g}") for value in expected], key
        assert shown[key].endswith("*") == (row.rhat > 1.1), key


def test_the_table_of_scores_by_width_shows_the_rows_that_were_run():
    rows = pandas.read_csv(DOCS / "figures" / "how_wide.csv").dropna().query("form == 'collapsed'")
    rows = {(f"{row.depth} x {row.width}", row.kernel): row for row in rows.itertuples()}
    scores = pandas.read_csv(DOCS / "figures" / "how_wide_scores.csv", index_col="network").stack()
    shown = {place: cell for place, cell in scores.items() if isinstance(cell, str)}
    assert shown.keys() == rows.keys()
    for place, cell in shown.items():
        expected = f"{rows[place].rmse:.2f} / {rows[place].log_density:.2f}"
        assert cell.replace("−", "-") == expected, place


@pytest.mark.fault("../docs/figures/published_log_density.csv", "−0.70 ± 0.03", "−0.60 ± 0.03")
def test_published_figures_stand_beside_the_rows_that_were_run():
    by_hand = pandas.read_csv(DOCS / "figures" / "uci_summary.csv")
    by_hand = by_hand[(by_hand["model"].str.rstrip("*") == "1 x 50, collapsed") & (by_hand["splits"] == 20)]
    estimator = pandas.read_csv(DOCS / "figures" / "estimator_summary.csv")
    estimator = estimator[estimator["splits"].str.endswith("random")]
    for score in ("RMSE", "log density"):
        shown = pandas.read_csv(DOCS / "figures" / f"published_{score.lower().replace(' ', '_')}.csv").set_index("set")
        for rows, column in ((by_hand, "1 x 50, here"), (estimator, "estimator, here")):
            found = rows.set_index("set")[score]
            assert set(shown.index) == set(found.index)
            for name, ours in shown[column].items():
                assert ours.replace("−", "-") == " ± ".join(f"{float(value):.2f}" for value in found[name].split(" ± "))


def docstrings():
    for path in [*(ROOT / "numpyro_wide").rglob("*.py"), *(ROOT / "studies").glob("_*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield ast.get_docstring(node) or ""


def pages():
    return [*DOCS.glob("*.md"), *DOCS.glob("*/*.md")]


@pytest.mark.fault("../docs/mathematics.md", "$$ (evidence)", "$$ (proof)")
def test_docstrings_cite_every_equation_and_no_other():
    labels = set(re.findall(r"^\$\$ \(([\w-]+)\)$", (DOCS / "mathematics.md").read_text(), re.MULTILINE))
    cited = {label for text in docstrings() for label in re.findall(r":eq:`([^`]*)`", text)}
    assert labels and cited == labels


def test_what_is_cited_is_in_the_bibliography_and_nothing_else():
    prose = (re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S) for page in pages())
    cited = {match.groups() for text in [*prose, *docstrings()] for match in CITATION.finditer(" ".join(text.split()))}
    entries = re.findall(r"author = \{([^,]+),.*?year = \{(\d+)\}", (DOCS / "references.bib").read_text(), re.S)
    assert {(name, year) for name, year in cited if name not in NO_NAMES} == set(entries)


def test_code_fits_its_column():
    for page in pages():
        for block in re.findall(r"^```(?:python|py|sh|text)\n(.*?)^```", page.read_text(), re.M | re.S):
            assert [line for line in block.splitlines() if len(line) > 88] == [], page.name


def test_figures_are_small():
    assert [path.name for path in (DOCS / "figures").glob("*") if path.stat().st_size > 200_000] == []


def test_every_name_that_pages_refer_to_exists():
    targets = {name for page in pages() for name in re.findall(r"\{py:\w+\}`~?(numpyro_wide[\w.]*)`", page.read_text())}
    assert targets
    for target in targets:
        module, _, name = target.rpartition(".")
        assert hasattr(import_module(module), name), target


def test_every_page_that_is_referred_to_exists():
    for page in [ROOT / "README.md", *pages()]:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} refers to {link}"


def test_what_the_paper_map_names_exists():
    text = (DOCS / "paper_map.md").read_text()
    named = re.findall(r"`((?:tests|studies|benchmarks|examples)/[\w/.]*)`", text)
    assert len(named) > 30 and [path for path in named if not (ROOT / path).exists()] == []
    tests = {
        name for path in ROOT.glob("tests/**/test_*.py") for name in re.findall(r"^def (\w+)", path.read_text(), re.M)
    }
    named = re.findall(r"`(test_\w+)`", text)
    assert len(named) > 10 and [name for name in named if name not in tests] == []
    named = [(part, name) for part, name in re.findall(r"`(\w+)\.(\w+)\b", text) if name not in ("png", "py")]
    assert len(named) > 30
    assert [f"{part}.{name}" for part, name in named if not hasattr(getattr(numpyro_wide, part, None), name)] == []
