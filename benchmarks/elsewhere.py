"""Runs of a rival's script in an environment of its own."""

import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np


def run_elsewhere(
    python: str, script: str, arrays: dict[str, np.ndarray], *words: str | float
) -> dict[str, np.ndarray]:
    """Run a script of this folder, ``script source.npz target.npz words...``, and return the arrays that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source.npz", Path(folder) / "target.npz"
        np.savez(source, **arrays)  # type: ignore[arg-type]
        # This package's own JAX and its settings are not the other environment's.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "PYTHONPATH"))}
        command = [python, Path(__file__).with_name(script), source, target, *map(str, words)]
        subprocess.run(command, check=True, env=environment)
        return dict(np.load(target))
