"""Sets JAX up for the whole suite, and runs the code blocks of README and documentation, each file in one namespace."""

import os
from importlib.metadata import version
from pathlib import Path

import jax
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

# The suite compiles some thousand programs and runs most of them once. Without its fusion emitters XLA compiles them in
# less than half the time; `XLA_FLAGS= make test` compiles as for users. A jaxlib that does not know the flag aborts.
if version("jaxlib").startswith("0.10."):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")

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
