"""Lint of the documentation's text (``make lint``): each check's docstring says what to do if it fails."""

import ast
import re
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import numpyro_wide

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PARTS = [name for name in numpyro_wide.__all__ if isinstance(getattr(numpyro_wide, name), ModuleType)]
# Hron 2022, Hron et al. (2022), Meng and Wong 1996, Cotter, Roberts, Stuart, White 2013
CITATION = re.compile(
    r"\b([A-Z][\w-]+)(?: et al\.|(?:, [A-Z][\w-]+(?: [A-Z][\w-]+)?)*(?: (?:and|&) [A-Z][\w-]+)?) \(?((?:19|20)\d\d)\b"
)
NO_NAMES = {"With", "At", "March", "May", "November", "Olympic"}
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: (\S+)\n(?:\n?   :members:(.*)\n)?(   :inherited-members:)?", re.MULTILINE)
MEMBERS = (FunctionType, classmethod, staticmethod, property, cached_property)
# Neither code nor comments, tables and formulas.
NO_WORDS = r"^```.*?^```$|^<!--.*?^-->$|^\|.*?$|^\$\$.*?^\$\$(?: \([\w-]+\))?|\$[^$\n]+\$"
MOST_WORDS, MOST_OF_README = 20_000, 650


def public_names(module):
    """Names in ``__all__``, or what a module without one defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and name[0] != "_"
    ]


def members_of(value, is_inherited=True):
    """Public methods and properties of a class by name, also of our classes that it inherits from."""
    ours = [base for base in value.__mro__ if base.__module__.startswith("numpyro_wide")]
    of_others = {name for base in value.__mro__ if base not in ours for name in vars(base)}
    members = {}
    for base in reversed(ours if is_inherited else [value]):
        names = {name for name, member in vars(base).items() if isinstance(member, MEMBERS) and name[0] != "_"}
        members |= {name: vars(base)[name] for name in (names if base is value else names - of_others)}
    return members


def documented():
    """Identities of all objects that autodoc is asked for, and of classes what members it leaves out."""
    found, wanted = set(), {}
    for page in (DOCS / "api").glob("*.md"):
        for kind, target, members, inherited in (match.groups() for match in DIRECTIVE.finditer(page.read_text())):
            if kind == "module":
                module = import_module(target)
                listed = [] if members is None else [name.strip() for name in members.split(",") if name.strip()]
                names = public_names(module) if members is not None and not listed else listed
                found |= {id(getattr(module, name)) for name in names}
            else:
                module_name, _, name = target.rpartition(".")
                value = getattr(import_module(module_name), name)
                found.add(id(value))
                if isinstance(value, type):
                    wanted[target] = members_of(value)
                    shown = {} if members is None else members_of(value, bool(inherited or members.strip()))
                    listed = set(re.findall(r"\w+", members or "")) or shown
                    found |= {id(member) for name, member in shown.items() if name in listed}
    left_out = {
        target: {name for name, member in members.items() if id(member) not in found}
        for target, members in wanted.items()
    }
    return found, left_out


@pytest.mark.parametrize("part", [None, *PARTS])
def test_every_public_name_is_on_the_api_pages(part):
    """Add the name to a page of docs/api, or take it out of ``__all__``."""
    module = numpyro_wide if part is None else getattr(numpyro_wide, part)
    names = [name for name in public_names(module) if not isinstance(getattr(module, name), ModuleType)]
    found, _ = documented()
    assert [name for name in names if id(getattr(module, name)) not in found] == []


def test_every_method_and_property_of_a_class_is_on_the_api_pages():
    """Add the members to ``:members:`` of the class in docs/api, or let their names begin with an underscore."""
    _, left_out = documented()
    assert {target: names for target, names in left_out.items() if names} == {}


def test_every_example_and_study_is_in_the_gallery():
    """Show the command that runs it, ``python studies/<name>.py``, on a page of docs/gallery."""
    gallery = "".join(page.read_text() for page in [DOCS / "gallery.md", *DOCS.glob("gallery/*.md")])
    scripts = [*ROOT.glob("examples/*.py"), *ROOT.glob("studies/[!_]*.py")]
    assert [path.name for path in scripts if f"python {path.parent.name}/{path.name}" not in gallery] == []


def docstrings():
    for path in [*(ROOT / "numpyro_wide").rglob("*.py"), *(ROOT / "studies").glob("_*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield ast.get_docstring(node) or ""


def pages():
    return [*DOCS.glob("*.md"), *DOCS.glob("*/*.md")]


@pytest.mark.fault("../docs/mathematics.md", "$$ (evidence)", "$$ (proof)")
def test_docstrings_cite_every_equation_and_no_other():
    """Cite the label of docs/mathematics.md as ``:eq:`label` `` where it is computed, or take its label off."""
    labels = set(re.findall(r"^\$\$ \(([\w-]+)\)$", (DOCS / "mathematics.md").read_text(), re.MULTILINE))
    cited = {label for text in docstrings() for label in re.findall(r":eq:`([^`]*)`", text)}
    assert labels and cited == labels, f"cited nowhere: {labels - cited}; no equation: {cited - labels}"


def test_what_is_cited_is_in_the_bibliography_and_nothing_else():
    """Add what is cited ("Hron 2022") to docs/references.bib; take out entries that nothing cites."""
    prose = (re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S) for page in pages())
    cited = {match.groups() for text in [*prose, *docstrings()] for match in CITATION.finditer(" ".join(text.split()))}
    entries = re.findall(r"author = \{([^,]+),.*?year = \{(\d+)\}", (DOCS / "references.bib").read_text(), re.S)
    cited = {(name, year) for name, year in cited if name not in NO_NAMES}
    assert cited == set(entries), f"without entry: {cited - set(entries)}; cited nowhere: {set(entries) - cited}"


def test_code_fits_its_column():
    """Break lines of the page's code at 88 characters, which fit its column."""
    for page in pages():
        for block in re.findall(r"^```(?:python|py|sh|text)\n(.*?)^```", page.read_text(), re.M | re.S):
            assert [line for line in block.splitlines() if len(line) > 88] == [], page.name


def test_figures_are_small():
    """Draw the figure with fewer points, or fewer dots an inch: at most 200 kB."""
    assert [path.name for path in (DOCS / "figures").glob("*") if path.stat().st_size > 200_000] == []


def test_every_name_that_pages_refer_to_exists():
    """Mend the reference ``{py:func}`numpyro_wide.name` `` of the page: the name is gone or has moved."""
    targets = {name for page in pages() for name in re.findall(r"\{py:\w+\}`~?(numpyro_wide[\w.]*)`", page.read_text())}
    assert targets
    for target in targets:
        module, _, name = target.rpartition(".")
        assert hasattr(import_module(module), name), target


def test_every_page_that_is_referred_to_exists():
    """Mend the link: the file is gone or has moved."""
    for page in [ROOT / "README.md", *pages()]:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} refers to {link}"


def test_what_the_paper_map_names_exists():
    """Write in docs/paper_map.md where the file, test or name is now."""
    text = (DOCS / "paper_map.md").read_text()
    named = re.findall(r"`((?:tests|studies|benchmarks|examples)/[\w/.]*)`", text)
    assert len(named) > 30 and [path for path in named if not (ROOT / path).exists()] == []
    files = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("studies/tests/test_*.py")]
    tests = {name for path in files for name in re.findall(r"^def (\w+)", path.read_text(), re.M)}
    named = re.findall(r"`(test_\w+)`", text)
    assert len(named) > 10 and [name for name in named if name not in tests] == []
    named = [(part, name) for part, name in re.findall(r"`(\w+)\.(\w+)\b", text) if name not in ("png", "py")]
    assert len(named) > 20
    assert [f"{part}.{name}" for part, name in named if not hasattr(getattr(numpyro_wide, part, None), name)] == []


def test_the_documentation_is_short():
    """Take as many words out of any page as the change brings."""
    words = 0
    for page in [ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("*/*.md")]:
        text = re.sub(NO_WORDS, " ", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        words += sum(any(map(str.isalnum, word)) for word in text.split())
    assert words <= MOST_WORDS, f"README and docs have {words} words: take {words - MOST_WORDS} out of any page"
    readme = len((ROOT / "README.md").read_text().split())
    assert readme <= MOST_OF_README, f"README.md has {readme} words: take {readme - MOST_OF_README} out"
