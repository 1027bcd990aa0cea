"""What the package promises as a whole: its names, its version, what importing it brings, what CI runs."""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import numpyro_wide
from numpyro_wide import __main__
from tests import schedule

ROOT = Path(__file__).parents[1]
PACKAGES = ["numpyro_wide"] + [
    f"numpyro_wide.{module.name}" for module in pkgutil.iter_modules(numpyro_wide.__path__) if module.ispkg
]


@pytest.mark.parametrize("name", PACKAGES)
def test_all_lists_what_is_exported(name):
    package = importlib.import_module(name)
    assert package.__doc__
    assert len(package.__all__) == len(set(package.__all__))  # ruff keeps them in order
    assert set(package.__all__) <= set(dir(package))
    for export in package.__all__:
        assert getattr(package, export).__doc__ or export.isupper(), f"{name}.{export} says nothing of itself"
    # Whatever an ``import X as X`` exports is listed, but for the classes of what functions return, for names that
    # the front door lists, and for modules.
    exported = set(re.findall(r"import \(?\s*\w+ as (\w+)", Path(package.__file__).read_text(encoding="utf-8")))
    others = exported - set(package.__all__) - set(numpyro_wide.__all__)
    assert all(isinstance(getattr(package, name), type | ModuleType) for name in others)


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="module 'numpyro_wide' has no attribute 'repriorize'"):
        numpyro_wide.repriorize  # noqa: B018


def test_numpyro_is_whole_where_arviz_comes_first():
    code = "import arviz, numpyro_wide, numpyro; numpyro.distributions.distribution"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT)


def test_importing_the_package_brings_no_library_that_numpyro_has_not_loaded():
    code = """
import json, sys, warnings
warnings.simplefilter("ignore")
import numpyro
before = set(sys.modules)
import numpyro_wide
after = {name for name in sys.modules if not name.startswith("numpyro_wide")} - before
numpyro_wide.nn, numpyro_wide.datasets
print(json.dumps([sorted(after), "flax" in sys.modules, "arviz" in before | after]))
"""
    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    new, lazy_is_loaded, arviz_is_loaded = json.loads(finished.stdout)
    new_libraries = {name.split(".")[0] for name in new} - set(sys.stdlib_module_names)
    assert new_libraries == set(), new
    assert lazy_is_loaded and not arviz_is_loaded


@pytest.mark.fault("__main__.py", " + np.linalg.slogdet(2 * np.pi * covariance)[1]", "")
def test_the_package_says_whether_it_works(capsys, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert not ended.value.code and capsys.readouterr().out.endswith(": works\n")
    monkeypatch.setattr(numpyro_wide.linear_gaussian, "log_evidence", lambda *args: 0.0)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code and capsys.readouterr().out.endswith(": WRONG\n")


def test_version_is_kept_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "numpyro_wide/__init__.py"
    assert (
        re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[1]
        == numpyro_wide.__version__
    )
    assert not re.search(r"^version:", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)


def test_contributing_has_the_commands_that_ci_runs():
    commands = re.findall(r"^ *(make .*)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.M)
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert len(commands) >= 3
    for command in commands:
        assert re.search(rf"^{re.escape(command)}\b", contributing, re.M), f"CONTRIBUTING.md does not show {command!r}"


def test_every_case_is_in_one_part_that_ci_runs_once():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    selections = dict(re.findall(r'^([A-Z]+) := -m "(.*)"$', makefile, re.M))
    others = [mark.split(":")[0] for mark in schedule.MARKS if not mark.startswith("slow")]
    targets = {name: re.findall(rf"^([\w-]+): .*\n.*\$\({name}\)", makefile, re.M) for name in selections}
    run_by_ci = re.findall(r"^make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.M)
    for mark in ("", *others):
        selected = [name for name, marks in selections.items() if eval(marks, {m: m == mark for m in others})]
        assert [name for name in selected if name != "REST"] == [mark.upper() or "QUICK"]
        assert sum(target in run_by_ci for name in selected for target in targets[name]) == 1


def test_ci_runs_every_other_case_of_large_tables():
    def table(path, size):
        return [
            SimpleNamespace(
                nodeid=f"{path}::test[{place}]",
                path=ROOT / path,
                get_closest_marker=lambda _: None,
                callspec=SimpleNamespace(indices={"place": place}),
                iter_markers=lambda _: [],
            )
            for place in range(size)
        ]

    large = table("tests/nn/test_scales.py", 6)
    assert schedule.every_other(large) == large[::2]
    for path, size in (("tests/nn/test_scales.py", 3), ("tests/test_studies.py", 6), ("tests/nn/test_nn_errors.py", 6)):
        assert not schedule.every_other(table(path, size))


def test_the_schedule_names_rooms_and_files_that_exist():
    assert [
        part
        for part in (*schedule.NUMERICS, *schedule.LONG, *schedule.LONGEST, *schedule.SHOWN)
        if not (ROOT / part).exists()
    ] == []
    assert [name for name in schedule.PLUMBING if not list((ROOT / "tests").rglob(name))] == []


def test_citation_file_is_complete():
    import yaml

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "license", "references"} <= set(citation)
    assert len(citation["references"]) == 5
    for reference in citation["references"]:
        assert {"type", "title", "authors", "year"} <= set(reference)
