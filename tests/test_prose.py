"""Numbers of the documentation's prose and tables are those of the files behind their figures; its words are few."""

import itertools
import re
from pathlib import Path

import pandas
import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FIGURES = DOCS / "figures"
CODE = re.compile(r"^```.*?^```$|^<!--.*?^-->$", re.MULTILINE | re.DOTALL)
NOT_PROSE = re.compile(rf"{CODE.pattern}|^\|.*?$|^!\[.*?$|`[^`\n]+`|\]\([^)]*\)|^#.*?$", re.MULTILINE | re.DOTALL)
NO_WORDS = rf"{CODE.pattern}|^\|.*?$|^\$\$.*?^\$\$(?: \([\w-]+\))?|\$[^$\n]+\$"  # nor tables and formulas
NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*(?:\.\d+)?(?![\w]|\.\d)")
MOST_WORDS = 20_000

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
    """Tell whether a number of the prose is one of the values, to as many digits as it has."""
    unit = 10.0 ** -len(found.partition(".")[2])
    return any(abs(value - abs(as_number(found))) <= 0.501 * unit for value in values)


@pytest.mark.fault("../docs/gallery/classes.md", "took 173, 494, 283 and 1231", "took 173, 494, 283 and 1331")
@pytest.mark.parametrize("place", SECTIONS, ids=lambda place: " ".join(filter(None, place)))
def test_numbers_in_prose_are_in_the_tables_of_their_figures(place):
    files, others = SECTIONS[place]
    values = numbers_of(files)
    shown = [found for found in NUMBER.findall(NOT_PROSE.sub(" ", section(*place))) if len(found) > 1]
    assert len(shown) > 5
    assert [found for found in shown if found not in others.split() and not is_rounded(found, values)] == []


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


@pytest.mark.fault("../docs/gallery/features_learnt.md", "| 0.128 | 0.064 |", "| 0.118 | 0.064 |")
def test_what_networks_learnt_is_what_was_found():
    runs = pandas.read_csv(FIGURES / "features_learnt.csv")
    runs = runs.sort_values(["network", "width", "steps"], ascending=[False, True, True])
    shown = rows_of("gallery/features_learnt.md", "| network |")
    for cells, (_, run) in zip(shown.values(), runs.iterrows(), strict=True):
        for cell, value in zip(cells, run[["rrmse", "noise_scale", "rhat", "rhat_effects"]], strict=True):
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


def test_tables_of_the_benchmark_are_those_of_the_files():
    """They stand in the page as text, for those who read it without the build."""
    named = re.findall(r"^<!--- (figures/\S+) -->\n\n((?:\|.*\n)+)", (DOCS / "benchmark.md").read_text(), re.MULTILINE)
    assert len(named) == 4
    for file, text in named:
        head, _, *rows = [re.split(r" *\| *", line)[1:-1] for line in text.splitlines()]
        table = pandas.read_csv(DOCS / file, dtype=str, keep_default_na=False)
        assert head == list(table.columns) and rows == table.to_numpy().tolist(), file


def test_the_documentation_is_short():
    words = 0
    for page in [ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("*/*.md")]:
        text = re.sub(NO_WORDS, " ", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        words += sum(any(map(str.isalnum, word)) for word in text.split())
    assert words <= MOST_WORDS
    assert len((ROOT / "README.md").read_text().split()) <= 650
