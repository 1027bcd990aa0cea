"""Sets JAX up for the whole suite, and runs the code blocks of README and documentation, each file in one namespace."""

import os
from importlib.metadata import version
from pathlib import Path

import jax
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

# The suite compiles some thousand programs and runs most of them once, so it leaves out what makes compiled code fast.
# `XLA_FLAGS= JAX_DISABLE_MOST_OPTIMIZATIONS=0 make test` compiles as for users, which takes about three times as long.
XLA_FLAGS = ["--xla_cpu_multi_thread_eigen=false"]  # two tests at a time share two cores
if version("jaxlib").startswith("0.10."):
    XLA_FLAGS += ["--xla_cpu_use_fusion_emitters=false"]  # a version that does not know it aborts
os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))
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
