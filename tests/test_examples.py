"""Every script in examples/ runs at a tiny size, and draws its figures."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = {
    "repriorised_bnn.py": "--width 8 --other-widths --num-train 20 --num-test 30 --num-warmup 8 --budget 40",
    "marathon.py": "--widths 4 8 --num-warmup 5 --num-samples 5",
}
FIGURES = {
    "repriorised_bnn.py": {"ess_by_width.png", "calibration.png"},
    "marathon.py": {"marathon.png"},
}


def test_no_example_is_forgotten():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(TINY) == set(FIGURES)


@pytest.mark.parametrize("name", TINY)
def test_example_runs(name, tmp_path):
    command = [sys.executable, str(EXAMPLES / name), *TINY[name].split(), "--output", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert {path.name for path in tmp_path.iterdir()} == FIGURES[name]
    assert all(path.stat().st_size > 5000 for path in tmp_path.iterdir())
