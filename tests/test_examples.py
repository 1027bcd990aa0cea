"""Every script in examples/ runs at a tiny size, and draws its figures."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = {
    "amortized_posterior.py": "--num-steps 5 --num-simulations 20 --num-warmup 5 --num-samples 5",
    "repriorised_bnn.py": "--width 8 --other-widths --num-train 20 --num-test 30 --num-warmup 8 --budget 40",
    "mixing_speed.py": "--widths 4 8 --num-train 5 9 --kernels SplitHMC --forms collapsed --regularisers 9 --budget 30",
    "marathon.py": "--widths 4 8 --num-warmup 5 --num-samples 5",
    "ntk_reparam.py": "--width 8 --num-train 4 --regularisers 1 10 --num-warmup 5 --num-steps 8",
    "rotation.py": "--widths 4 --num-steps 200",
    "softmax_digits.py": "--widths 4 --num-train 20 --num-test 10 --num-warmup 5 --num-samples 5 --methods "
    "'Langevin, plain' 'SplitHMC, repriorised'",
    "wide_mean_field.py": "--data points --widths 8 --num-steps 20 --num-draws 20",
    "cold_posteriors.py": "--width 8 --num-train 1700 --num-taus 2 --cubic-widths 10 --num-steps 20 --num-draws 5",
    "dropout_qkl.py": "--num-starts 1 --num-rates 1 --num-steps 20",
}
FIGURES = {
    "repriorised_bnn.py": {"ess_by_width.png", "calibration.png"},
    "amortized_posterior.py": {"epidemic_calibration.png", "epidemic_posterior.png"},
    "marathon.py": {"marathon.png"},
    "mixing_speed.py": {"mixing_speed.csv", "mixing_speed.png", "regulariser.png"},
    "ntk_reparam.py": {"ntk_reparam.png"},
    "rotation.py": {"rotation_nll.png", "rotation_widths.png"},
    "softmax_digits.py": {"softmax_digits.png"},
    "wide_mean_field.py": {"wide_mean_field.png"},
    "cold_posteriors.py": {"cold_posteriors.png"},
    "dropout_qkl.py": {"dropout_qkl.png"},
}


def test_no_example_is_forgotten():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(TINY) == set(FIGURES)


@pytest.mark.parametrize("name", TINY)
def test_example_runs(name, tmp_path):
    command = [sys.executable, str(EXAMPLES / name), *shlex.split(TINY[name]), "--output", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert {path.name for path in tmp_path.iterdir()} == FIGURES[name]
    assert all(path.stat().st_size > 5000 for path in tmp_path.glob("*.png"))
