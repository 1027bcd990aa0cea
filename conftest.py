"""Runs the code blocks of README and documentation as tests, each file from top to bottom in a namespace of its own."""

import jax
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser


def compile_quickly(_: dict) -> None:
    """What the documentation runs is so small that compiling it takes longer."""
    jax.config.update("jax_disable_most_optimizations", True)


def compile_well(_: dict) -> None:
    """As before."""
    jax.config.update("jax_disable_most_optimizations", False)


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["README.md", "docs/*.md", "docs/*/*.md"],
    setup=compile_quickly,
    teardown=compile_well,
).pytest()
