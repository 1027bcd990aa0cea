"""Sets JAX up for the whole suite, and runs the code blocks of README and documentation, each file in one namespace."""

import gc
import os
import sys
from contextlib import redirect_stdout
from functools import partial
from importlib.metadata import version
from io import StringIO
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "Agg")  # figures are drawn to files, never to a window
os.environ["CI"] = "1"  # no progress bars

# Workers with two threads of SciPy's BLAS each would wait for one another on two cores. Read at its import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Positions of source lines, which no test reads, are not written into programs.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# Workers with a core each: XLA's threads of both on all cores would take turns, for a tenth more time. Read at JAX's
# import.
if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == int(os.environ["PYTEST_XDIST_WORKER_COUNT"]):
        os.sched_setaffinity(0, cores[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) :][:1])

import jax
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

# Tracing makes millions of objects: at Python's own thresholds a tenth of the time is spent looking for cycles.
gc.set_threshold(50_000, 20, 50)

# `make test` compiles quickly: some thousand programs that run once or twice each take three quarters of the time
# without optimisations. Tests marked `as_compiled` are compiled with them, as users compile. Code is generated
# in one part: two workers keep two cores busy, and parts generated in parallel have come out wrong where neither fusion
# emitters nor optimisations were left.
if version("jaxlib").startswith("0.9."):  # others may not know the flags
    flags = "--xla_cpu_parallel_codegen_split_count=1"
    if os.environ.get("QUICK_COMPILE") == "1":
        flags += " --xla_cpu_use_fusion_emitters=false"
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for the processes that tests start
        jax.config.update("jax_disable_most_optimizations", True)
    os.environ.setdefault("XLA_FLAGS", flags)

# They need what builds the documentation, which tests do not.
collect_ignore = list(Path(__file__).parent.glob("docs/*.py"))


def blocks_of_page(document):
    """Find the code blocks of a page; none may print that its chains have not converged."""
    for region in PythonCodeBlockParser()(document):
        region.evaluator = partial(evaluate, region.evaluator)
        yield region


def evaluate(evaluator, example):
    """Run a block, and read what it prints.

    Chains differ between processors: one that is long enough here may just be "too short for intervals" there.
    """
    with redirect_stdout(StringIO()) as printed:
        result = evaluator(example)
    print(text := printed.getvalue())
    refused = [line for line in text.splitlines() if line.startswith("not converged")]
    assert not refused, f"the page shows a run that its own verdict refuses: {refused}"
    return result


pytest_collect_file = Sybil(parsers=[blocks_of_page], patterns=["README.md", "docs/*.md", "docs/*/*.md"]).pytest()


LONGEST = {"amortise.md", "classes.md", "images.md", "ignores_the_data.md"}  # 45 seconds of processor time and more


def pytest_collection_modifyitems(items):
    """Run pages of the gallery, of a study each, and the longest guides nightly; `make docs` runs all pages."""
    for item in items:
        if item.path.match("docs/gallery/*.md") or item.path.name in LONGEST:
            item.add_marker("slow")


MAPS = Path("/proc/self/maps")
MAX_MAPS = 20_000


def pytest_runtest_teardown(item, nextitem):
    """Between files close figures, which pages leave open for a notebook to show, and forget compiled programs.

    Linux allows 65,530 memory maps, and past them XLA crashes: a file of many programs is relieved between its tests.
    """
    ends_file = nextitem is None or nextitem.path != item.path
    if ends_file and "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > (MAX_MAPS if ends_file else 2 * MAX_MAPS):
        jax.clear_caches()
        gc.collect()
