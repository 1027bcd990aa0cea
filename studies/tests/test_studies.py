"""Every script in studies/ begins; nightly each runs at a tiny size, and draws its figures."""

import shlex

import pytest

from tests.scripts import ROOT, run

TINY = {
    "amortized_posterior.py": "--num-steps 5 --num-simulations 20 --num-warmup 5 --num-samples 5",
    "repriorised_bnn.py": "--width 8 --other-widths --num-train 20 --num-test 30 --num-warmup 8 --budget 40",
    "mixing_by_width.py": "--widths 4 8 --num-train 5 9 --kernels pCN --forms collapsed --regularisers 9 --budget 30",
    "mixing_speed.py": "--architecture fcn1 --width 4 --num-train 8 --num-test 5 --kernels Langevin --seconds 0.1",
    "direction.py": "--num-train 20 --widths 4 --num-warmup 20 --num-samples 20",
    "marathon.py": "--widths 4 --num-warmup 5 --num-samples 5",
    "ntk_reparam.py": "--width 8 --num-train 4 --regularisers 1 10 --num-warmup 5 --num-steps 8",
    "rotation.py": "--widths 4 --num-steps 200",
    "softmax_digits.py": "--widths 4 --num-train 20 --num-test 10 --num-warmup 5 --num-samples 5 --methods "
    "'Langevin, plain' 'SplitHMC, fitted'",
    "wide_mean_field.py": "--data points --widths 8 --num-steps 20 --num-draws 20 --num-samples 100",
    "mean_field_classification.py": "--data moons --widths 4 --num-steps 5 --num-draws 5 --num-exact 100",
    "fashion.py": "--sizes 1x4 --models 'NNGP, softmax, variational' 'deep ensemble' 'one-hot codes' 'softmax, fitted' "
    "--num-train 40 --num-test 20 --num-warmup 3 --num-samples 5 --num-epochs 2",
    "cold_posteriors.py": "--width 8 --num-train 1700 --num-taus 2 --cubic-widths 10 --num-steps 20 --num-draws 5",
    "cooling_by_width.py": "--widths 4 --num-train 1700 --taus 0.1 --width 4 --num-steps 20 --num-draws 5",
    "dropout_qkl.py": "--num-starts 1 --num-rates 1 --num-steps 20",
    "bayesian_optimisation.py": "--width 4 --rounds 2 --seeds 1 --num-warmup 3 --num-samples 3",
    "posterior_slices.py": "--widths 4 --num-train 20 --resolution 5 --num-steps 5",
    "evidence.py": "--sets marathon --widths 32 --depths 1 --num-warmup 20 --num-samples 100",
    "collapse.py": "--widths 4 --num-steps 20 --num-draws 20",
    "finite_width.py": "--widths 64 --num-warmup 20 --num-samples 50",
    "exact_laws.py": "--repetitions 2 --networks 1 --kernels pCN --num-chains 4 --num-warmup 20 --num-samples 100",
    "uci.py": "--models NNGP '1 x 50, collapsed' '1 x 50, mean field' --num-chains 2 --num-warmup 5 --num-samples 5 "
    "--num-steps 5",
    "duel.py": "--models 'ours, noise by row, cube roots' GP --num-chains 2 --num-adam 5 --gradients 60 --width 4",
    "estimator.py": "--gaps 1 --time-budget 5",
    "classes.py": "--tables wine --models boosting 'label regression' estimator 'network, microcanonical' "
    "'network, blocks' 'network, surrogate' 'network, surrogate by class' 'network, surrogate of a pilot' "
    "'network, one-hot codes' --budget 5 --most-rows 40 --width 4 --num-warmup 25 --num-samples 25",
    "images.py": "--sizes 20 40 --num-test 20",
    "finite_cnn.py": "--models 'five MLPs' 'five trained' 'codes, limit' codes softmax --widths 2 --num-digits 60 "
    "--num-warmup 25 --num-samples 25 --num-epochs 2 --mlp-width 4",
    "emulators.py": "--functions buckling --ratios 2",
    "features_learnt.py": "--num-rows 50 --num-test 20 --dense 4 --additive 1 --num-adam 5 --steps 60",
    "sbibm.py": "--budgets 200 --num-steps 1100 --num-draws 100 --family normal",
    "any_size.py": "--num-steps 160 --num-draws 48",
    "parametrisations.py": "--num-simulations 200 --num-epochs 1 --widths 4 --learning-rates 1e-3 --seeds 1",
    "references.py": "--member wave --first 30 30 --second 30 30 --simulations 2 --store .",
    "score_references.py": "--member linear",
    "approximations.py": "--member wave --methods 'mean field, collapsed' 'Laplace, linearised' 'ensemble of 10' "
    "'infinitely wide' --num-steps 30",
    "how_wide.py": "--widths 4 --depths 1 --kernels MCLMC --forms collapsed --num-train 30 --gradients 40 --seconds 1",
}
# What is left in the folder, "*" being the name of the study: its figure alone, if nothing is said here.
FIGURES = {
    "repriorised_bnn.py": "calibration.png ess_by_width.png",
    "amortized_posterior.py": "epidemic_calibration.png epidemic_posterior.png",
    "mixing_by_width.py": "*.csv *.png regulariser.png",
    "mixing_speed.py": "*.csv *.png",
    "direction.py": "*.csv *.png",
    "rotation.py": "*_nll.png *_widths.png",
    "fashion.py": "*.csv *.png *_costs.csv *_scores.csv",
    "posterior_slices.py": "linear_regression.png *.png",
    "evidence.py": "*.csv *.png",
    "collapse.py": "*.png prior_by_width.png",
    "finite_width.py": "*.csv *.png",
    "exact_laws.py": "*.csv *.png *_chains.csv",
    "uci.py": "*.csv *.png *_summary.csv",
    "duel.py": "*.csv *.png *_summary.csv",
    "estimator.py": "*.csv *.png *_summary.csv reports",
    "classes.py": "*.csv *.npz *.png",
    "images.py": "*.csv *.png kernels",
    "finite_cnn.py": "*.csv *.png *_scores.csv",
    "emulators.py": "*.csv *.png *_summary.csv",
    "features_learnt.py": "*.csv *.png *_indices.csv",
    "sbibm.py": "*.csv *.png *_summary.csv",
    "any_size.py": "*.csv *.png",
    "parametrisations.py": "*.csv *_summary.csv",
    "references.py": "wave.json wave.npz wave_NUTS_30_30.npz wave_microcanonical_30_30.npz",
    "score_references.py": "*.csv",
    "approximations.py": "*.csv *.png approximations",
    "how_wide.py": "*.csv *_gradients.csv *_gradients.png *_scores.csv *_seconds.csv *_seconds.png",
}
# Where nothing else is printed for minutes.
SILENT_FOR_LONG = (
    *("mixing_by_width.py", "mixing_speed.py", "dropout_qkl.py", "cold_posteriors.py", "cooling_by_width.py"),
    *("wide_mean_field.py", "mean_field_classification.py", "fashion.py", "bayesian_optimisation.py", "collapse.py"),
    *("posterior_slices.py", "classes.py", "how_wide.py", "finite_cnn.py", "estimator.py"),
    *("emulators.py", "features_learnt.py", "sbibm.py", "parametrisations.py"),
)


def test_none_is_forgotten():
    assert {path.name for path in (ROOT / "studies").glob("[!_]*.py")} == set(TINY)


@pytest.mark.parametrize("name", TINY)
def test_study_begins(name, tmp_path):
    """What it imports is there, and so are its options."""
    printed, _ = run(ROOT / "studies" / name, "--help", folder=tmp_path)
    assert "--output" in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_study_runs(name, tmp_path):
    _, errors = run(ROOT / "studies" / name, *shlex.split(TINY[name]), "--output", tmp_path, folder=tmp_path)
    expected = FIGURES.get(name, "*.png").replace("*", name.removesuffix(".py")).split()
    assert {path.name for path in tmp_path.iterdir()} == set(expected)
    assert all(path.stat().st_size > 5000 for path in tmp_path.glob("*.png"))
    if name in SILENT_FOR_LONG:  # a bar from the beginning, also where the output is no terminal
        assert "0/" in errors and "100%" in errors
