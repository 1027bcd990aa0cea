"""Sets JAX up for the whole suite, and runs the code blocks of README and documentation, each file in one namespace."""

import os
from importlib.metadata import version
from pathlib import Path

import jax
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

# jaxlib's batched Cholesky holds a thread of XLA's pool while it waits for others of the same pool: on two cores, two
# at once wait for ever. A larger pool has threads left.
os.environ.setdefault("NPROC", "8")
# The suite compiles some thousand programs and runs most of them once, so they are compiled quickly, in a third of the
# time; `XLA_FLAGS= JAX_DISABLE_MOST_OPTIMIZATIONS=0 make test` compiles as for users. Without the fusion emitters and
# without optimisations, code that is generated in parallel parts has come out wrong, hence the single part.
if version("jaxlib").startswith("0.10."):  # another may not know the flags, and abort
    quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ.setdefault("XLA_FLAGS", quick)
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for the processes that tests start
    jax.config.update("jax_disable_most_optimizations", True)

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()], patterns=["README.md", "docs/*.md", "docs/*/*.md"]
).pytest()

MAPS = Path("/proc/self/maps")
MAX_MAPS = 20_000


def pytest_runtest_teardown(item, nextitem):
    """Forget compiled programs between files: Linux allows 65,530 memory maps, and past them XLA crashes."""
    if nextitem is not None and nextitem.path == item.path:
        return
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MAX_MAPS:
        jax.clear_caches()
