"""What the package promises as a whole: its names, its version, what importing it brings, what CI runs."""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import numpyro_wide
from numpyro_wide import __main__

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


def test_citation_file_is_complete():
    import yaml

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "license", "references"} <= set(citation)
    assert len(citation["references"]) == 5
    for reference in citation["references"]:
        assert {"type", "title", "authors", "year"} <= set(reference)
