"""Faults put on purpose into copies of the package, each alone: the test that bears the mark must notice.

``@pytest.mark.fault("mcmc/_kernel.py", "old text", "new text")`` stands at that test, with a path from the package and
a text that occurs there once. ``make mutants`` tries all, ``make mutants ONLY=crank`` those that hold "crank" in path,
texts or test.
"""

import ast
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NOT_COPIED = (".git", ".venv*", "__pycache__", "*.egg-info", "_build", "dist", ".*_cache", ".hypothesis")
PATIENCE = 1200  # seconds that a test may take


class Fault(NamedTuple):
    """A text in the place of another, by the test that notices.

    Attributes:
        path: file that it is in, from the root.
        old: text that is there once.
        new: text in its place.
        test: the test's name for pytest.
    """

    path: str
    old: str
    new: str
    test: str


def files_of_tests(root: Path = ROOT) -> list[Path]:
    """Find the tests of the package, of studies and of pages."""
    return sorted(
        path for folder in ("tests", "studies/tests", "docs/tests") for path in (root / folder).rglob("test_*.py")
    )


def faults(root: Path = ROOT) -> Iterator[Fault]:
    """Read the marks from the tests' text, which takes a second, where pytest's collection would import all."""
    for path in files_of_tests(root):
        for function in ast.parse(path.read_text(encoding="utf-8")).body:
            for mark in getattr(function, "decorator_list", []):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    file, old, new = map(ast.literal_eval, mark.args)
                    test = f"{path.relative_to(root).as_posix()}::{function.name}"
                    yield Fault(os.path.normpath(f"numpyro_wide/{file}"), old, new, test)


def run(copy: Path, *tests: str, patience: float | None) -> tuple[int, str]:
    """Run tests in a copy of the tree up to the first that fails, and return pytest's status and what it printed."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", *tests]
    # Nothing compiled by Python is kept: of two faults of one length, put in within a second, it would know one.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    finished = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=patience, check=False
    )
    return finished.returncode, finished.stdout[-2000:] + finished.stderr[-2000:]


def try_out(fault: Fault, copy: Path) -> str | None:
    """Run a fault's test in a copy that has it, and put the copy right; return what is wrong unless the test failed."""
    path = copy / fault.path
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        return f"the text must occur once, but occurs {text.count(fault.old)} times"
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        status, printed = run(copy, fault.test, patience=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"the test was not through after {PATIENCE} seconds"
    finally:
        path.write_text(text, encoding="utf-8")
    # 1 says that tests failed; others that there are none of this name, that they cannot be imported, and so on.
    return {0: "no test failed", 1: None}.get(status, f"pytest ended with {status}: {printed}")


def main(only: str = "") -> None:
    """Put in the faults that hold a text, two at a time, each in a copy of the tree."""
    chosen = [fault for fault in faults() if any(only in part for part in fault)]
    if not chosen:
        sys.exit(f"no fault holds {only!r}")
    copies: queue.Queue[Path] = queue.Queue()

    def tried(fault: Fault) -> str | None:
        copy = copies.get()
        try:
            return try_out(fault, copy)
        finally:
            copies.put(copy)

    num_survivors = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        for number in range(2):
            copies.put(Path(shutil.copytree(ROOT, f"{folder}/{number}", ignore=shutil.ignore_patterns(*NOT_COPIED))))
        # What fails without a fault tells nothing of one.
        status, printed = run(Path(folder) / "0", *sorted({fault.test for fault in chosen}), patience=None)
        if status:
            sys.exit(f"tests fail without any fault:\n{printed}")
        for fault, wrong in zip(chosen, pool.map(tried, chosen), strict=True):
            num_survivors += wrong is not None
            verdict = "noticed" if wrong is None else f"NOT NOTICED ({wrong})"
            print(f"{verdict} {fault.path}: {fault.old!r} -> {fault.new!r} by {fault.test}", flush=True)
    print(f"{len(chosen) - num_survivors} of {len(chosen)} faults were noticed")
    sys.exit(num_survivors > 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
