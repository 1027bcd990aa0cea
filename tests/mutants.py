"""Faults that are put into copies of the package, each alone, and the test that must notice.

``make mutants`` runs them all, ``make mutants ONLY=pCN`` those that hold "pCN". Whoever changes a formula adds a line:
a test that no fault fails tests nothing. ``test_mutants.py`` holds that each old text still occurs once.
"""

import os
import queue
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NOT_COPIED = (".git", ".venv*", "__pycache__", "*.egg-info", "_build", "dist", ".*_cache", ".hypothesis")
PATIENCE = 1200  # seconds that a test may take


class Mutant(NamedTuple):
    """One fault.

    Attributes:
        fault: what it breaks.
        path: file that it is in, from the root.
        old: text that is there once.
        new: text in its place.
        test: test that fails then, ``tests/`` left out.
    """

    fault: str
    path: str
    old: str
    new: str
    test: str


ORACLE = "linear_gaussian/test_against_oracle.py"
LIKE_DRAWS = "evidence/test_model_evidence.py::test_both_methods_on_a_conjugate_model_compiled_once"
INTEGRATORS = "mcmc/test_integrators.py"
LIMIT = "wide_limit/test_limit_kernels.py::test_agrees_with_the_reference_file"
NETWORK_KERNEL = "wide_limit/test_network_kernels.py"
REGRESSION = "diagnostics/test_regression.py"

# By file of the package (elsewhere from the root): fault, old text, new text, test.
FAULTS: dict[str, list[tuple[str, str, str, str]]] = {
    "estimators/_base.py": [
        (
            "estimators: squares of large numbers",
            "shares = values / size",
            "shares, size = values, 1.0",
            "estimators/test_estimator_errors.py::test_numbers_whose_squares_are_out_of_range",
        ),
    ],
    "estimators/_chains.py": [
        (
            "chains: noise that varies from the start",
            "target._replace(used=held)",
            "target",
            "estimators/test_chains.py::test_noise_by_row_is_constant_at_first",
        ),
        (
            "chains: noise that starts where its prior has it",
            "held[None] * ",
            "",
            "estimators/test_chains.py::test_noise_by_row_is_constant_at_first",
        ),
        (
            "chains: the vector of a position in another order",
            "parts = jnp.split(z, ends[:-1])",
            "parts = jnp.split(z[::-1], ends[:-1])",
            "estimators/test_chains.py::test_a_vector_has_the_density_of_the_collapsed_model_up_to_a_constant",
        ),
        (
            "chains: a density without the prior",
            "0.5 * jnp.sum(z**2) - log_evidence",
            "-log_evidence",
            "estimators/test_chains.py::test_a_vector_has_the_density_of_the_collapsed_model_up_to_a_constant",
        ),
        (
            "estimators: all chains start near one optimum",
            "optima[chain % len(optima)]",
            "optima[0]",
            "estimators/test_chains.py::test_chains_start_near_the_optima_in_turn",
        ),
        (
            "estimators: Adam spends a budget that pays for no chains",
            "    if affordable >= _FEWEST_STEPS:",
            "    if True:",
            "estimators/test_chains.py::test_a_budget_that_pays_for_no_warmup_is_not_spent_on_adam",
        ),
        (
            "estimators: chains that have not settled end",
            "if is_settled or affordable",
            "if lines or affordable",
            "estimators/test_chains.py::test_chains_that_have_not_settled_go_on_for_twice_as_many_steps",
        ),
        (
            "estimators: chains go on without looking at the clock",
            "affordable <= num_samples:",
            "num_steps > 1000:",
            "estimators/test_chains.py::test_chains_that_never_settle_end_with_the_budget",
        ),
        (
            "estimators: seconds after the first look are left",
            "num_samples >= 3 * _NUM_SAMPLES",
            "num_samples >= _NUM_SAMPLES",
            "estimators/test_chains.py::test_the_first_look_is_the_last_where_the_budget_pays_for_no_second",
        ),
        (
            "estimators: seconds that pay for a longer look are left",
            "affordable if affordable < 6 * num_samples else 2 * num_samples",
            "2 * num_samples",
            "estimators/test_chains.py"
            "::test_chains_go_on_to_the_end_of_the_budget_where_no_run_twice_as_long_could_follow",
        ),
        (
            "estimators: draws that are not finite stay",
            "for chain in chains])\n    num_lost",
            "for chain in chains]) * 0 + np.arange(is_finite.size)\n    num_lost",
            "estimators/test_chains.py::test_draws_that_are_not_finite_are_left_out_and_counted",
        ),
        (
            "estimators: chains that still move called settled",
            "if not found.unsettled:",
            "if found.largest > 0:",
            "estimators/test_chains.py::test_judgement_of_chains",
        ),
        (
            "estimators: all chains have the same weight",
            "round(len(moments[0]) * np.cumsum(weights))",
            "round(len(moments[0]) * np.cumsum(0 * weights + 1 / num_chains))",
            "estimators/test_chains.py::test_chains_that_predict_rows_left_out_better_have_more_draws",
        ),
    ],
    "estimators/_race.py": [
        (
            "race: a slow machine has long chains, too",
            "max(1.0, clock.pace) * long_run",
            "long_run",
            "estimators/test_race.py::test_chains_are_long_where_the_budget_pays_for_them",
        ),
        (
            "race: long chains take the fewest layers, too",
            "(max if prefers_depth else min)",
            "(min)",
            "estimators/test_race.py::test_long_chains_take_layers_that_lose_less_than_a_standard_error",
        ),
        (
            "race: kernels in the places of each other",
            "kernels[layer] for layer in range(depth)",
            "kernels[-1 - layer] for layer in range(depth)",
            "estimators/test_race.py::test_the_network_is_that_of_the_chains",
        ),
        (
            "race: rows learnt from are those that score",
            "order[num_learnt : num_learnt + num_held])",
            "order[:num_held])",
            "estimators/test_race.py::test_rows_left_out_are_not_learnt_from",
        ),
        (
            "race: layers above the depth take part",
            "index < entry.depth",
            "index < 9",
            "estimators/test_race.py::test_the_network_is_that_of_the_chains",
        ),
        (
            "race: an optimum that is not finite wins",
            "    if not is_finite.any():",
            "    if False:",
            "estimators/test_race.py::test_what_diverges_is_left_out",
        ),
        (
            "race: the limit does not take part",
            "np.sqrt(np.mean(of_limit**2)) < best.noise_scale:",
            "np.sqrt(np.mean(of_limit**2)) < 0:",
            "estimators/test_race.py::test_the_limit_takes_part_with_its_own_error",
        ),
        (
            "race: no look at the clock",
            "if raced_depths and clock.seconds > most",
            "if not clock and clock.seconds > most",
            "estimators/test_race.py::test_a_race_ends_with_its_share_of_the_budget",
        ),
        (
            "race: no part is left out but the first",
            "if 2 * clock.seconds - before > most",
            "if clock.seconds >= 0 * most",
            "estimators/test_race.py::test_parts_are_left_out_in_turn_while_the_budget_lasts",
        ),
    ],
    "estimators/_policy.py": [
        (
            "estimators: copies of rows pass for measurements",
            "if differ and may_agree:",
            "if True:",
            "estimators/test_estimator_errors.py::test_copies_of_rows_do_not_decide_the_noise",
        ),
        (
            "estimators: labels that were measured twice pass for copies",
            "4 * len(by_target) < len(x) or (",
            "(",
            "estimators/test_classifier.py::test_labels_that_were_measured_twice_are_no_copies",
        ),
        (
            "estimators: a network that is too dear for the seconds left stays",
            "* _FEWEST_STEPS < clock.left",
            "* 0 < clock.left",
            "estimators/test_race.py::test_what_is_too_dear_gives_way_to_what_is_cheaper",
        ),
        (
            "estimators: chains start from the limit's scales in the winner's place",
            'known = {**chosen.scales, "noise": chosen.noise_scale}',
            'known = {**fit.scales, "noise": fit.noise_scale}',
            "estimators/test_race.py::test_chains_start_with_the_winner",
        ),
        (
            "estimators: features that hide the noise",
            "noise_scale**2 < rounding",
            "noise_scale**2 < 0",
            "estimators/test_chains.py::test_precision_is_double_where_features_hide_the_noise",
        ),
        (
            "estimators: weighted draws have no clock",
            "(clock.left - _COMPILING_WEIGHTED) / (_GRADIENTS_A_DRAW * gradient)",
            "500",
            "estimators/test_regressor.py::test_weighted_draws_are_as_many_as_the_budget_pays_for",
        ),
        (
            "estimators: scales of the columns are tried with one activation",
            "activation=_ACTIVATIONS, depth=first.depth, input_scale=True",
            "activation=first.activation, depth=first.depth, input_scale=True",
            "estimators/test_regressor.py::test_scales_of_the_columns_are_tried_with_every_activation",
        ),
    ],
    "estimators/_targets.py": [
        (
            "estimators: a density without the slope of its map",
            "slope = slope - np.log(y)",
            "slope = slope + 0",
            "estimators/test_targets.py::test_the_density_integrates_to_one",
        ),
        (
            "estimators: a map of the targets whose means are worse",
            "is_clear and scores",
            "is_clear or scores",
            "estimators/test_targets.py::test_a_better_density_does_not_pay_for_worse_means",
        ),
    ],
    "estimators/_classifier.py": [
        (
            "estimators: a classifier's chains calibrated by rows that they have seen",
            "some = replace(limit, inputs=limit.inputs[others], targets=labels[others])",
            "some = limit",
            "estimators/test_classifier.py::test_rows_that_calibrate_are_not_seen_by_the_chains",
        ),
        (
            "estimators: draws and limit with the weights of each other",
            "self.weight * probs + (1 - self.weight) * self.limit.fit.predict(x)",
            "(1 - self.weight) * probs + self.weight * self.limit.fit.predict(x)",
            "estimators/test_classifier.py::test_auto_stacks_limit_and_chains",
        ),
        (
            "estimators: the limit judged by labels that it knows",
            "regression = replace(some, targets=codes[others],",
            "regression = replace(limit, targets=codes,",
            "estimators/test_classifier.py::test_the_limit_is_judged_by_rows_that_it_has_not_seen",
        ),
        (
            "estimators: chains calibrated by rows that may be easy by chance",
            "of_all.changed(of_limit, of_chains)",
            "of_chains",
            "estimators/test_classifier.py::test_calibration_of_chains_differs_from_the_limit_as_on_rows_left_out",
        ),
    ],
    "estimators/_regressor.py": [
        (
            "estimators: blocks of rows are scored against the first targets",
            "mixture.log_density(targets[block])",
            "mixture.log_density(targets[: block.stop - block.start][: len(rows) - block.start])",
            "estimators/test_regressor.py::test_blocks_of_rows_are_predicted_as_all_are",
        ),
    ],
    "estimators/_scoring.py": [
        (
            "estimators: the best stacking weight in the place of its mean",
            "softmax(by_weight) @ weights",
            "weights[np.argmax(by_weight)]",
            "estimators/test_classifier.py::test_stacking_weight",
        ),
        (
            "leave-one-out: the row's own observation stays in the mean",
            "Mixture(y - (y - mean) / share,",
            "Mixture(mean,",
            "estimators/test_regressor.py::test_leave_one_out_is_a_fit_without_the_row",
        ),
        (
            "leave-one-out: draws are not weighted against the row that they know",
            "pareto_smoothed(-row)",
            "pareto_smoothed(0 * row)",
            "estimators/test_regressor.py::test_draws_are_averaged_as_left_out_rows_ask_for",
        ),
    ],
    "estimators/_posteriors.py": [
        (
            "estimators: predictions of other rows come from the last",
            "key = sha256(x.tobytes()).digest()",
            "key = bytes(len(x))",
            "estimators/test_regressor.py::test_predictions_of_the_same_rows_are_computed_once",
        ),
        (
            "mixture: log densities averaged in the place of densities",
            "return _mixture.log_average(self.by_draw(y))",
            "return np.mean(self.by_draw(y), axis=0)",
            "estimators/test_regressor.py::test_predictions_are_the_mixture_over_draws",
        ),
        (
            "covariance of draws: without that of their means",
            "[:, :, None] + of_means",
            "[:, :, None] + 0 * of_means",
            "estimators/test_regressor.py::test_covariance_of_draws_has_the_variances_on_its_diagonal",
        ),
        (
            "estimators: a stack's covariance without that between draws and limit",
            "(1 - self.weight) * self.limit.covariance(x) + between",
            "(1 - self.weight) * self.limit.covariance(x)",
            "estimators/test_regressor.py::test_a_stack_is_a_mixture_of_draws_and_limit",
        ),
        (
            "estimators: draws and limit in the shares of each other",
            "num_kept = min(round(self.weight * number), number - 1)",
            "num_kept = round((1 - self.weight) * number)",
            "estimators/test_regressor.py::test_a_stack_is_a_mixture_of_draws_and_limit",
        ),
    ],
    "linear_gaussian/_row_blocks.py": [
        (
            "blocks: rows of the last block counted twice",
            "start + jnp.arange(block_size) >= first",
            "start + jnp.arange(block_size) >= 0",
            "linear_gaussian/test_blocks_of_rows.py::test_value_and_gradient_of_the_dense_form",
        ),
        (
            "blocks: the features' cotangent without the prior's part",
            "return alpha @ sums.mean.T - features @ shared, alpha",
            "return alpha @ sums.mean.T, alpha",
            "linear_gaussian/test_blocks_of_rows.py::test_value_and_gradient_of_the_dense_form",
        ),
        (
            "blocks: the readout's covariance without the noise",
            "jnp.sqrt(variance)[:, None, None] * sums.inverse",
            "sums.inverse",
            "linear_gaussian/test_blocks_of_rows.py::test_posterior_of_the_normal_equations",
        ),
        (
            "blocks: the readout's covariance with its standardised prior",
            "sums.inverse * scale[None, None]",
            "sums.inverse",
            "linear_gaussian/test_blocks_of_rows.py::test_posterior_of_the_normal_equations",
        ),
        (
            "blocks: draws of the readout by the root's transpose",
            "return self.root[0].T @ columns",
            "return self.root[0] @ columns",
            "linear_gaussian/test_blocks_of_rows.py::test_posterior_of_the_normal_equations",
        ),
    ],
    "_random_features.py": [
        (
            "random features: moments of equal weights, whatever they are",
            "_mixture.moments(mean, variance, self.weights)",
            "_mixture.moments(mean, variance)",
            "wide_limit/test_random_features.py::test_predictions_are_the_mixture_of_dense_posteriors",
        ),
        (
            "random features: log density of equal weights, whatever they are",
            "_mixture.log_average(by_row, self.weights)",
            "_mixture.log_average(by_row)",
            "wide_limit/test_random_features.py::test_predictions_are_the_mixture_of_dense_posteriors",
        ),
    ],
    "machine.py": [
        (
            "chains by rows: each process has some of the chains and all rows",
            ".reshape(-1, num_chains).T",
            ".reshape(num_chains, -1)",
            "machine/test_chains_by_rows.py::test_two_processes_of_four_devices_draw_the_same",
        ),
    ],
    "linear_gaussian/_roots.py": [
        (
            "evidence: no step of refinement",
            "return mean + length * step, residual - length * moved",
            "return mean, residual",
            "linear_gaussian/test_evidence_error.py::test_targets_along_the_features_keep_their_digits",
        ),
        (
            "feature map: sign of φ",
            "self._whitened(targets) + scaled, transpose=True",
            "self._whitened(targets) - scaled, transpose=True",
            f"{ORACLE}::test_every_size",
        ),
        (
            "feature map: sign of the log-determinant",
            "transpose=True), -0.5 * self.log_det()",
            "transpose=True), 0.5 * self.log_det()",
            f"{ORACLE}::test_every_size",
        ),
        (
            "data-cholesky map: √λ dropped from L + √λ I",
            "inner = solve_lower(factor, targets) - solve_lower(add_diagonal(factor, scale), features @ phi)",
            "inner = solve_lower(factor, targets) - solve_lower(factor, features @ phi)",
            f"{ORACLE}::test_every_size",
        ),
        (
            "data-cholesky map: trace term of its derivative dropped",
            "log_abs_det_dot = features.shape[0] * scale_dot / scale - diagonal(F).sum()",
            "log_abs_det_dot = features.shape[0] * scale_dot / scale",
            f"{ORACLE}::test_gradients_against_finite_differences",
        ),
        (
            "eigen map: sign of the shrinkage",
            "self.inverse_gram @ targets - self.shrink @",
            "self.inverse_gram @ targets + self.shrink @",
            f"{ORACLE}::test_every_size",
        ),
        (
            "feature map: λ for √λ before φ",
            "scaled = jnp.sqrt(self.regulariser) * phi",
            "scaled = self.regulariser * phi",
            "readout/test_linear_models.py::test_curvature_depends_on_neither_rows_nor_noise",
        ),
    ],
    "linear_gaussian/_linalg.py": [
        (
            "triangular inverse by halves: sign of the lower left block",
            "-lower_right @ (factor",
            "lower_right @ (factor",
            "linear_gaussian/test_products.py::test_evidence_and_gradient_by_halves",
        ),
        (
            "MᵀM by halves: without what the lower half adds to the upper",
            " + below.T @ below",
            "",
            "linear_gaussian/test_products.py::test_evidence_and_gradient_by_halves",
        ),
    ],
    "linear_gaussian/_evidence.py": [
        (
            "accelerators: products of a derivative at their default precision",
            "@log_evidence_of.defjvp\n@full_precision\n",
            "@log_evidence_of.defjvp\n",
            "linear_gaussian/test_full_precision.py::test_dense_algebra",
        ),
        (
            "leave one out: the residual of the fit itself",
            "return targets - residual / share[:, None], variance / share",
            "return targets - residual, variance / share",
            "readout/test_log_density.py::test_leave_one_out_is_the_dense_conditional_of_each_row",
        ),
        (
            "evidence: ‖μ‖² dropped",
            "variance * jnp.sum(alpha**2) + jnp.sum(mean**2)",
            "variance * jnp.sum(alpha**2)",
            f"{ORACLE}::test_every_size",
        ),
        (
            "evidence: log-determinant counted for one output",
            "(quadratic + num_outputs * log_normaliser)",
            "(quadratic + log_normaliser)",
            f"{ORACLE}::test_every_size",
        ),
        (
            "evidence's gradient: K⁻¹Ψ counted for one output",
            "mean.T - num_outputs * solved",
            "mean.T - solved",
            f"{ORACLE}::test_gradients_against_finite_differences",
        ),
        (
            "evidence's gradient: trace term of the noise dropped",
            "(jnp.sum(alpha**2) - num_outputs * trace_inverse)",
            "jnp.sum(alpha**2)",
            f"{ORACLE}::test_gradients_against_finite_differences",
        ),
        (
            "predictive variance: σ²‖c‖² dropped",
            "row_sums_of_squares(remainder) + variance * row_sums_of_squares(weights)",
            "row_sums_of_squares(remainder)",
            f"{ORACLE}::test_every_size",
        ),
        (
            "predictions: residuals left out of the draws",
            "deviation = remainder @ phi - jnp.sqrt(variance) * weights @ residuals",
            "deviation = remainder @ phi",
            "readout/test_predictive.py::test_draws_have_the_exact_moments",
        ),
        (
            "evidence's error: terms of the log-determinant dropped",
            "2 * eps * (by_output + size + of_log_det)",
            "2 * eps * size",
            "linear_gaussian/test_evidence_error.py::test_the_estimate_is_seldom_below_the_error_and_never_far",
        ),
        (
            "moments: the border of the evidence is theirs",
            "above_rounding(self.regulariser, self.rounding)",
            "above_rounding(self.regulariser, 0.1 * self.rounding)",
            "linear_gaussian/test_float32.py::test_noise_that_is_lost_in_rounding_gives_nan_and_no_wrong_number",
        ),
        (
            "evidence: noise lost in rounding let through",
            "jnp.where(variance < least, jnp.nan, variance)",
            "variance",
            "linear_gaussian/test_float32.py::test_noise_that_is_lost_in_rounding_gives_nan_and_no_wrong_number",
        ),
    ],
    "linear_gaussian/_problem.py": [
        (
            "posterior: noise lost in rounding let through",
            "resolved()\n        mean, covariance = standard.for_each_output(posterior_moments)",
            "representable()\n        mean, covariance = standard.for_each_output(posterior_moments)",
            "linear_gaussian/test_float32.py::test_noise_that_is_lost_in_rounding_gives_nan_and_no_wrong_number",
        ),
        (
            "noise of another shape let through",
            "return np.broadcast_shapes(shape, target) == target",
            "return True",
            "nn/test_nn_errors.py::test_mistakes",
        ),
        (
            "noise by rows: sign of Σ log σᵢ",
            "sum_over_outputs(log_evidence_of, self._factorised) - standard",
            "sum_over_outputs(log_evidence_of, self._factorised) + standard",
            f"{ORACLE}::test_noise_and_priors_of_every_shape",
        ),
        (
            "readout map: log-determinant of prior scales dropped",
            "log_abs_det.sum() + jnp.log(scale).sum()",
            "log_abs_det.sum()",
            "test_log_determinants.py::test_log_determinant",
        ),
        (
            "negative scale under jit let through",
            "array if is_known(value) else jnp.where(array > 0, array, jnp.nan)",
            "array",
            "linear_gaussian/test_float32.py::test_negative_scales_under_jit_are_not_their_mirror_image",
        ),
    ],
    "readout/_transform.py": [
        (
            "repriorise: log-determinant of the map dropped",
            "self._over_leading_axes(lambda phi: self._forward(phi)[1], x)",
            "self._over_leading_axes(lambda phi: 0 * self._forward(phi)[1], x)",
            "readout/test_handlers.py::test_joint_density_is_unchanged",
        ),
        (
            "wide_limit_draws: regulariser ignored",
            "return self._inverse(exact(standard_normal))",
            "return standard_normal",
            "readout/test_predictive.py::test_wide_limit_draws_do_not_depend_on_the_regulariser",
        ),
    ],
    "readout/_repriorise.py": [
        (
            "repriorise: noise by row taken for that of as many outputs",
            "if is_by_row and shape[0] in",
            "if is_by_row and shape[0] != shape[1] and shape[0] in",
            "nn/test_noise.py::test_densities_and_gradients_of_both_forms_are_those_of_the_dense_gaussian",
        ),
    ],
    "readout/_model.py": [
        (
            "collapse_readout: prior scale dropped",
            "variant=self.variant, prior_scale=self.prior_scale",
            "variant=self.variant",
            "readout/test_handlers.py::test_joint_density_is_unchanged",
        ),
        (
            "collapse_readout: weights given without observations not refused",
            "if given and not _is_given(site):",
            "if False:",
            "readout/test_readout_errors.py::test_collapsed_weights_without_observations_are_refused",
        ),
    ],
    "readout/_collapse.py": [
        (
            "collapse_readout: what the second run says is not heeded",
            "return jnp.where(self.is_valid, log_evidence, jnp.nan)",
            "return log_evidence",
            "readout/test_assumptions.py::test_another_mean_is_refused_at_every_scale",
        ),
        (
            "scale around a collapsed model let through",
            "            refuse_scaled(self.model.observed, msg)\n",
            "            pass\n",
            "readout/test_assumptions.py::test_handlers_around_a_collapsed_model_are_refused",
        ),
        (
            "rounding of the evidence: no warning",
            "float(error) < FELT_ERROR",
            "float(error) < 1e9",
            "readout/test_lost_noise.py::test_digits_that_are_lost_are_told_before_the_evidence_is_nan",
        ),
        (
            "collapse_readout: plates kept around the marginal",
            '"fn": marginal, "cond_indep_stack": []})',
            '"fn": marginal})',
            "readout/test_handlers.py::test_vector_readout_in_plates",
        ),
    ],
    "readout/_assumptions.py": [
        (
            "the second run: multiples of the features accepted",
            "| ~jnp.isfinite(run.loc + change))",
            "| True)",
            "readout/test_assumptions.py::test_another_mean_is_refused_at_every_scale",
        ),
        (
            "the second run: another noise accepted",
            "_NOISE: run.noise_scale, _OBS",
            "_NOISE: 1.0, _OBS",
            "readout/test_assumptions.py::test_likelihoods_that_the_readout_reaches_otherwise_are_refused",
        ),
        (
            "the second run: other observations accepted",
            "_OBSERVATIONS: sites.observations,",
            "_OBSERVATIONS: 1.0,",
            "readout/test_assumptions.py::test_likelihoods_that_the_readout_reaches_otherwise_are_refused",
        ),
        (
            "the second run: other sites not compared",
            "others = [part for part in self._moving_parts if part != _MEAN]",
            "others = [part for part in self._moving_parts if part[0] < _OTHERS]",
            "readout/test_assumptions.py::test_whatever_else_the_readout_reaches_is_refused",
        ),
        (
            "the second run: features that depend on the readout accepted",
            "found = {_FEATURES: run.features,",
            "found = {_FEATURES: 1.0,",
            "readout/test_assumptions.py::test_features_that_depend_on_the_readout_are_refused",
        ),
        (
            "the second run: keys outside of sites drawn anew",
            'if msg["type"] == "prng_key":  # drawn outside of sites\n            name,',
            'if msg["type"] == "prng_key":\n            return\n            name,',
            "readout/test_assumptions.py::test_keys_that_are_drawn_outside_of_sites_are_the_same_in_both_runs",
        ),
        (
            "the second run: steps without a tangent accepted",
            "(jnp.abs(after - before) <= allowed)",
            "(tangent == tangent)",
            "readout/test_assumptions.py::test_what_hides_behind_large_numbers_and_steps_is_refused",
        ),
        (
            "the second run: slopes beside large numbers accepted",
            "((tangent == 0) | jnp.isinf(before))",
            "(tangent == tangent)",
            "readout/test_assumptions.py::test_what_hides_behind_large_numbers_and_steps_is_refused",
        ),
        (
            "the second run: another mean beside a large offset accepted",
            "jnp.abs(tangent - change) <= allowed",
            "jnp.abs(tangent - change) <= allowed + of_values",
            "readout/test_assumptions.py::test_what_hides_behind_large_numbers_and_steps_is_refused",
        ),
        (
            "the second run: roundings of the readout accepted",
            "has_slope & has_change |",
            "has_slope |",
            "readout/test_assumptions.py::test_what_hides_behind_large_numbers_and_steps_is_refused",
        ),
        (
            "the second run: values of NumPyro's loops not those of the run",
            "self.are_all = False",
            "pass",
            "readout/test_assumptions.py::test_a_loop_of_numpyro_is_looked_at_with_the_values_of_the_run",
        ),
        (
            "the second run: scales of other sites left out",
            "found[_OTHERS, name] = log_prob if scale is None else scale * log_prob",
            "found[_OTHERS, name] = log_prob",
            "readout/test_assumptions.py::test_likelihoods_that_the_readout_reaches_otherwise_are_refused",
        ),
        (
            "deterministic sites: none depends on the readout",
            "frozenset(name for kind, name in moving if kind == _DETERMINISTIC)",
            "frozenset()",
            "readout/test_assumptions.py::test_deterministic_sites_that_move_are_not_recorded",
        ),
    ],
    "readout/_predictions.py": [
        (
            "predictions: what the second run says of the model is not heeded",
            "return jax.tree.map(lambda leaf: _only_if(is_right, leaf), found)",
            "return found",
            "readout/test_predictive.py::test_inputs_at_which_the_mean_is_another_function_are_refused",
        ),
        (
            "predictive variance without the noise",
            '"predictive_variance": variance + noise_scale**2',
            '"predictive_variance": variance',
            "readout/test_one_predictive.py::test_the_same_hidden_weights_give_the_same_numbers_whatever_was_wrapped_and_fitted",
        ),
        (
            "ReadoutPredictive: prior mean of the readout dropped",
            "return fit.prior_loc + self._readout(",
            "return self._readout(",
            "readout/test_predictive.py::test_draws_have_the_exact_moments",
        ),
        (
            "ReadoutPredictive: noise of the draws dropped",
            'new.loc + function + found["noise_scale"] * noise.astype(mean.dtype)',
            "new.loc + function",
            "readout/test_predictive.py::test_draws_have_the_exact_moments",
        ),
        (
            "log_density: noise dropped",
            "variance = variance + new.noise_scale**2",
            "variance = variance + 0 * new.noise_scale**2",
            "readout/test_log_density.py::test_against_ratios_of_dense_densities",
        ),
        (
            "predictions: noise_scale of the fit's rows",
            "variance = variance + new.noise_scale**2",
            "variance = variance + fit.noise_scale**2",
            "readout/test_log_density.py::test_against_ratios_of_dense_densities",
        ),
        (
            "joint_log_density: standard deviation of the noise taken for its variance",
            "jnp.eye(len(mean))[None] * noise_scale[:, None] ** 2",
            "jnp.eye(len(mean))[None] * noise_scale[:, None]",
            "test_exact_laws.py::test_predictions_with_the_readout_integrated_out",
        ),
        (
            "log_density: average over outputs in the place of their sum",
            "by_entry.sum(axis=1)",
            "by_entry.mean(axis=1)",
            "readout/test_log_density.py::test_against_ratios_of_dense_densities",
        ),
        (
            "joint_log_density: no rows have no density",
            "if not new.loc.size:",
            "if False:",
            "readout/test_log_density.py::test_no_rows_have_the_density_one",
        ),
        (
            "densities through the weights: a row's first entry in the place of all",
            "by_observation.sum(axis=tuple(range(1, by_observation.ndim)))",
            "by_observation.reshape(by_observation.shape[0], -1)[:, 0] * 0.5",
            "readout/test_one_predictive.py::test_likelihoods_that_are_not_gaussian_are_predicted_through_the_weights",
        ),
    ],
    "readout/_functions.py": [
        (
            "readout_function: keywords of the fit lost",
            "read_run(form, draw, args, kwargs)",
            "read_run(form, draw, args, {})",
            "runs/test_reduced.py::test_readout_function_is_the_mean_of_readout_predictive",
        ),
    ],
    "readout/_predictive.py": [
        (
            "predictions in the precision of the chains",
            "                with double_precision():\n                    return compute()",
            "                return compute()",
            "readout/test_precision.py::test_a_noise_that_float32_loses",
        ),
        (
            "predictive: arrays of the fit not copied",
            "leaf.copy() if type(leaf) is np.ndarray else leaf",
            "leaf",
            "readout/test_compiled_once.py::test_arrays_are_copied",
        ),
        (
            "sums over rows: not kept",
            "<= _MOST_KEPT",
            "< 0",
            "wide_limit/test_random_features.py::test_rows_are_summed_over_once",
        ),
        (
            "inputs with other columns than the fit's explained by flax",
            "if test is not None:\n                    self._add_hints",
            "if test is None:\n                    self._add_hints",
            "readout/test_readout_errors.py::test_mistakes",
        ),
        (
            "summary: variance between draws dropped",
            "np.sqrt(of_mixture)",
            "np.sqrt(variance.mean(axis=0))",
            "readout/test_one_predictive.py::test_summary_of_a_mixture",
        ),
    ],
    "diagnostics/_effects.py": [
        (
            "effects: draws without noise in Matheron's rule",
            "values = constant + noise + sum(",
            "values = constant + sum(",
            "diagnostics/test_effects.py::test_terms_of_the_limit_are_the_dense_posterior",
        ),
        (
            "effects: the scale of a term squared",
            "basis = scale * _products(",
            "basis = scale**2 * _products(",
            "diagnostics/test_effects.py::test_terms_of_the_limit_are_the_dense_posterior",
        ),
        (
            "effects: variances of units at the rows, not under the law",
            "at_nodes = root[len(points) :]",
            "at_nodes = root[: len(nodes)]",
            "diagnostics/test_effects.py::test_terms_of_the_limit_are_the_dense_posterior",
        ),
        (
            "effects: as many draws at all scales",
            "counts = random.multinomial(num_draws, weights)",
            "counts = random.multinomial(num_draws, np.full(len(weights), 1 / len(weights)))",
            "diagnostics/test_effects.py::test_draws_of_scales_are_averaged",
        ),
        (
            "effects: a normal law for a network's points",
            "return np.take_along_axis(law, (uniform * len(law)).astype(int), axis=0)",
            "return ndtri(uniform)",
            "diagnostics/test_effects.py::test_terms_of_a_network_are_those_of_its_readouts_posterior",
        ),
    ],
    "wide_limit/_scale_draws.py": [
        (
            "scales: weights without the proposal",
            "pareto_smoothed(log_posterior - log_proposal)",
            "pareto_smoothed(log_posterior)",
            "wide_limit/test_scale_draws.py::test_poor_weights_are_mended_by_better_coordinates",
        ),
        (
            "scales: coordinates that stay in place",
            "self.center, self.basis = self.logarithms(mean), self.basis * deviations",
            "self.basis = self.basis * deviations",
            "wide_limit/test_scale_draws.py::test_poor_weights_are_mended_by_better_coordinates",
        ),
        (
            "scales: chains without a prior",
            "return prior - gp_log_evidence(",
            "return -gp_log_evidence(",
            "wide_limit/test_scale_draws.py::test_the_traced_density_is_that_of_numpy",
        ),
        (
            "scales: resampling by equal weights",
            "sums = np.cumsum(weights)",
            "sums = np.cumsum(np.ones(len(weights)))",
            "wide_limit/test_scale_draws.py::test_resampling_keeps_the_weights_to_one_draw",
        ),
    ],
    "wide_limit/_variational.py": [
        (
            "bound of classes: the prior's share of its gradient by the kernel twice",
            "return 0.5 * (state.alpha @ state.alpha.T - state.alpha.shape[1]",
            "return 0.5 * (state.alpha @ state.alpha.T - 2 * state.alpha.shape[1]",
            "wide_limit/test_class_evidence.py::test_the_gradient_is_that_of_differences",
        ),
        (
            "fitted surrogate: marginal variances left multiplied by the weights",
            "np.clip((1 - explained) / weights, 0.0",
            "np.clip(1 - explained, 0.0",
            "surrogates/test_fitted_surrogate.py::test_it_is_the_best_gaussian_of_all",
        ),
        (
            "fitted surrogate: mean taken for target",
            "return state.mean + state.slope / weights[:, None], 1 / weights",
            "return state.mean, 1 / weights",
            "surrogates/test_fitted_surrogate.py::test_it_is_the_best_gaussian_of_all",
        ),
        (
            "fitted surrogate: weights of large counts not held back",
            "weights = np.minimum(state.weights, total_weight / (len(state.weights) * self._prior))",
            "weights = state.weights",
            "surrogates/test_fitted_surrogate.py::test_weights_stay_within_what_single_precision_resolves",
        ),
    ],
    "wide_limit/_likelihoods.py": [
        (
            "fitted surrogate: classes' weight shared by one column too many",
            "np.trace(found.curvature, axis1=1, axis2=2) / self.basis.shape[1]",
            "np.trace(found.curvature, axis1=1, axis2=2) / (self.basis.shape[1] + 1)",
            "surrogates/test_fitted_surrogate.py::test_classes_have_the_best_weights_that_they_can_share",
        ),
        (
            "fitted surrogate: one degree of freedom dropped from the weight of Student's t",
            "weight = (self.df + 1) / (self.df * self.scale**2 + residual**2)",
            "weight = self.df / (self.df * self.scale**2 + residual**2)",
            "surrogates/test_fitted_surrogate.py::test_student_t_is_the_fixed_point_that_the_docstring_says",
        ),
        (
            "classes: probabilities at the mean logit",
            "above = (mean[~narrow, None] - logistics) / wide",
            "above = (mean[~narrow, None] - 0 * logistics) / wide",
            "wide_limit/test_class_evidence.py::test_averages_of_a_logistic_function",
        ),
        (
            "classes: sums broader than their logits and Gumbel variables",
            "height, hazard = _at(np.minimum((best[:, None] - mean) / scale[:, None], _FARTHEST), 1 / scale)",
            "height, hazard = _at(np.minimum((best[:, None] - mean) / scale[:, None], _FARTHEST), 0.9 / scale)",
            "wide_limit/test_class_evidence.py::test_averages_of_a_softmax",
        ),
    ],
    "surrogates.py": [
        (
            "mean_kernel: sum of draws in the place of their mean",
            "kernel + psi @ psi.T / count",
            "kernel + psi @ psi.T",
            "surrogates/test_mean_kernel.py::test_it_tends_to_the_kernel_in_closed_form",
        ),
        (
            "mean_kernel: square of the outputs' mean scale in the place of their mean variance",
            "jnp.sqrt(jnp.mean(full**2, axis=1))",
            "jnp.mean(full, axis=1)",
            "surrogates/test_mean_kernel.py::test_variances_that_differ_over_outputs_are_averaged",
        ),
    ],
    "_compile.py": [
        (
            "programs: unused arguments stay, and tell none apart",
            "dce_jaxpr(whole, [True] * len(whole.outvars))",
            "(whole, [True] * len(whole.invars))",
            "test_compile.py::test_which_argument_is_used_tells_programs_apart",
        ),
        (
            "programs shared whatever they compute",
            "sha256(lowered.as_text().encode()).digest()",
            "0",
            "evidence/test_model_evidence.py::test_programs_are_those_of_a_model_with_the_same_density_and_gradient",
        ),
        (
            "programs: functions in Python tell none apart",
            ", *_host_functions(needed)",
            "",
            "test_compile.py::test_functions_in_python_tell_programs_apart",
        ),
        (
            "programs: devices tell none apart",
            "frozenset(places)",
            "frozenset()",
            "test_compile.py::test_devices_tell_programs_apart",
        ),
        (
            "programs: objects without a hash known by their kind",
            "return _Itself(value)\n    return",
            "return type(value)\n    return",
            "readout/test_compiled_once.py::test_things_among_the_arguments_are_known_by_themselves",
        ),
        (
            "chains: all at once on a processor, at up to five times the cost",
            'return jax.default_backend() == "cpu" and jax.device_count() == 1',
            "return False",
            "mcmc/test_over_chains.py::test_a_step_of_many_chains_has_no_products_of_batches",
        ),
    ],
    "wide_limit/_label_regression.py": [
        (
            "wide_limit.fit: labels left out of logits are known",
            "yield np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)",
            "yield np.flatnonzero(folds >= 0), np.flatnonzero(folds == fold)",
            "wide_limit/test_class_evidence.py::test_labels_left_out_are_as_probable_as_by_refits",
        ),
        (
            "label regression: few labels calibrate scales that they have chosen",
            "if len(labels) <= FEW_LABELS:",
            "if len(labels) <= 0:",
            "wide_limit/test_label_regression.py::test_few_labels_that_say_nothing_are_not_believed",
        ),
        (
            "label regression: noise of some rows kept for all",
            "logarithms = _with_best_noise(score, logarithms, gram)",
            "pass",
            "wide_limit/test_label_regression.py::test_more_rows_than_are_compared",
        ),
        (
            "label regression: the slope at its mode, not averaged",
            "spread = min(prior.spread[0], 1 / np.sqrt(max(curvature, 1e-12)))",
            "spread = 1e-6",
            "wide_limit/test_label_regression.py::test_the_slope_is_averaged_over_its_posterior",
        ),
        (
            "label regression: a prior around a calibration without its shifts",
            "np.append(np.log(self.slope), self.shift)",
            "np.append(np.log(self.slope), 0 * self.shift)",
            "wide_limit/test_label_regression.py::test_a_calibration_is_the_prior_of_another",
        ),
        (
            "label regression: draws of a row weighed alike",
            "residual = np.exp(by_draw - by_row)[..., None] * residual",
            "residual = residual / len(values)",
            "wide_limit/test_label_regression.py::test_the_mode_is_that_of_another_optimiser",
        ),
    ],
    "nn/_additive.py": [
        (
            "additive networks: units centred at the rows that are predicted",
            "tensordot(weights, units(nodes), 1, ",
            "tensordot(jnp.ones(1, x.dtype), units(x).mean(0)[None], 1, ",
            "nn/test_additive_network.py::test_features_are_products_of_centred_units",
        ),
    ],
    "wide_limit/_additive.py": [
        (
            "additive kernels: Newton's identities without their signs",
            "(-1) ** (k - 1) * found",
            "found",
            "wide_limit/test_additive.py::test_kernels_are_sums_over_effects",
        ),
        (
            "additive kernels: the mean over both inputs counted twice",
            "- 0.5 * mean(",
            "- 1.0 * mean(",
            "wide_limit/test_additive.py::test_kernels_are_sums_over_effects",
        ),
        (
            "additive kernels: no tangent kernel of the units",
            "units.product + share * units.tangent",
            "units.product",
            "wide_limit/test_additive.py::test_finite_networks_have_both_kernels_on_average",
        ),
    ],
    "wide_limit/_additive_problem.py": [
        (
            "wide_limit.fit: additive kernels below the diagonal counted once",
            "1 if above == left else 2",
            "1",
            "wide_limit/test_additive.py::test_slopes_of_the_evidence",
        ),
        (
            "wide_limit.fit: means of additive units taken as constants",
            "by_means[left] += of_columns",
            "pass",
            "wide_limit/test_additive.py::test_slopes_of_the_evidence",
        ),
    ],
    "wide_limit/_scale_problem.py": [
        (
            "wide_limit.fit: all rows descend along the axes",
            "vectors * np.sqrt(share / values)",
            "np.eye(len(values))",
            "wide_limit/test_evidence_fit.py::test_few_steps_are_left_for_all_rows",
        ),
        (
            "wide_limit.fit: prior left out",
            "problem.prior(logarithms) - value, logarithms / problem.spreads**2 - pulled",
            "-value, -pulled",
            "wide_limit/test_evidence_fit.py::test_it_is_at_the_mode",
        ),
        (
            "wide_limit.fit: tiles of the kernel below the diagonal counted once",
            "1 if rows == columns else 2",
            "1 if rows == columns else 1",
            "wide_limit/test_evidence_fit.py::test_value_and_gradient_by_tiles",
        ),
        (
            "wide_limit.fit: kernels of two sets below the diagonal alone",
            "*products.shape[: 1 if x2 is None else 2]",
            "products.shape[0]",
            "wide_limit/test_evidence_fit.py::test_kernels_by_tiles_are_those_of_the_network",
        ),
        (
            "wide_limit.fit: mean squares left out of the gradient by the inputs' scales",
            "by_product[rows, rows] += np.diag(square1)",
            "pass",
            "wide_limit/test_evidence_fit.py::test_value_and_gradient_by_tiles",
        ),
    ],
    "wide_limit/_fit.py": [
        (
            "wide_limit.fit: arrays not copied",
            "np.array(x, float), np.array(y, float)",
            "np.asarray(x, float), np.asarray(y, float)",
            "wide_limit/test_evidence_fit.py::test_predictions_stay_when_the_arrays_of_the_fit_are_changed",
        ),
        (
            "wide_limit.fit: the first choice of input_scale taken for all",
            "itertools.product(structures, activations, by_column)",
            "itertools.product(structures, activations, by_column[:1])",
            "wide_limit/test_evidence_fit.py::test_scales_of_the_inputs_are_compared_with_none",
        ),
        (
            "wide_limit.fit: readout of classes by the least probable labels",
            "score = max(tried",
            "score = min(tried",
            "wide_limit/test_class_evidence.py::test_the_choice_predicts_as_well_as_the_best_of_a_grid_of_readouts",
        ),
        (
            "wide_limit.fit: the worse of codes and logits",
            "return max(both",
            "return min(both",
            "wide_limit/test_class_evidence.py::test_codes_or_logits_by_labels_left_out",
        ),
        (
            "outliers: two hide each other",
            "max(1, len(residuals) // _ONE_OF)",
            "1",
            "wide_limit/test_evidence_fit.py::test_two_outliers_do_not_hide_each_other",
        ),
    ],
    "wide_limit/_gp.py": [
        (
            "covariance of the limit: that of the prior",
            "return prior - explained.T @ explained",
            "return prior",
            "estimators/test_regressor.py::test_the_limit_is_the_gaussian_process_that_scikit_learn_computes",
        ),
        (
            "label regression: the row itself not left out",
            "self.targets - self.weights / self.left_out_precision[:, None]",
            "self.targets - self.weights",
            "wide_limit/test_label_regression.py::test_leave_one_out_is_that_of_refitting_without_each_row",
        ),
        (
            "label regression: gradient without that of the precisions",
            "0.5 * (of_weights + of_weights.T) - of_precision",
            "0.5 * (of_weights + of_weights.T)",
            "wide_limit/test_label_regression.py::test_the_gradient_is_that_of_differences",
        ),
        (
            "wide_limit.fit: gradient of the evidence scaled",
            "return 0.5 * (self.weights @",
            "return 0.4 * (self.weights @",
            "wide_limit/test_evidence_fit.py::test_it_is_at_the_mode",
        ),
    ],
    "wide_limit/_limit.py": [
        (
            "scales: one noise for all draws",
            "variances.append(variance[:, None] + (fit.noise_scale**2",
            "variances.append(variance[:, None] + (self.noise_scale**2",
            "wide_limit/test_scale_draws.py::test_the_mixture_is_that_of_the_quadrature",
        ),
        (
            "scales: a kernel at the mode",
            "sum(w * fit.nngp(x1, x2)",
            "sum(w * self.draws[0].nngp(x1, x2)",
            "wide_limit/test_scale_draws.py::test_several_outputs_and_the_kernel_are_mixtures",
        ),
        (
            "wide_limit.fit: noise left out of the variance of an observation",
            "(fit.noise_scale**2 if with_noise else 0.0)",
            "0.0",
            "wide_limit/test_evidence_fit.py::test_predictions_are_the_dense_posterior",
        ),
        (
            "wide_limit.fit: half of the noise left out of predictions",
            "return [Conditioned(gram, columns, self.noise_scale**2)]",
            "return [Conditioned(gram, columns, self.noise_scale**2 / 2)]",
            "wide_limit/test_evidence_fit.py::test_predictions_are_the_dense_posterior",
        ),
    ],
    "wide_limit/_duals.py": [
        ("erf kernel: factor of E[φ'φ'] halved", "(4 / jnp.pi) / root", "(2 / jnp.pi) / root", LIMIT),
        ("GELU kernel: sign of c²S", "(ratio + cotangent * (c * S))", "(ratio - cotangent * (c * S))", LIMIT),
        ("ReLU kernel: (π − θ)c dropped", "/ (2 * jnp.pi) + slope * c, slope", "/ (2 * jnp.pi), slope", LIMIT),
        (
            "angle: steep ones are not brought below π/8",
            "is_steep = low > _EIGHTH * high",
            "is_steep = low > 2 * _EIGHTH * high",
            "wide_limit/test_angles.py::test_angles_are_numpy_s_to_rounding",
        ),
        (
            "series: derivative of an odd function without its first term",
            "cosine * value, value + cosine * derivative",
            "cosine * value, cosine * derivative",
            f"{NETWORK_KERNEL}::test_series_agree_with_neural_tangents",
        ),
        (
            "series: φ(0) left out",
            "coefficients = coefficients.at[0].add(at_zero)",
            "pass",
            f"{NETWORK_KERNEL}::test_the_series_is_quadrature",
        ),
    ],
    "wide_limit/_layer_kernels.py": [
        (
            "tangent kernel: NNGP term dropped",
            "tangent=covariance + w_var * units.tangent",
            "tangent=w_var * units.tangent",
            LIMIT,
        ),
        (
            "NNGP kernel: bias of the readout dropped",
            "product=w_var * product + b_var",
            "product=w_var * product",
            LIMIT,
        ),
        (
            "kernel: residual sum with weights that are not squared",
            "a, b = self._squares(weight=weight, other_weight=other_weight)",
            "a, b = weight, other_weight",
            f"{NETWORK_KERNEL}::test_closed_forms_agree_with_neural_tangents",
        ),
        (
            "kernel: tangent of normalised units left as it was",
            "tangent=units.tangent * scale,",
            "tangent=units.tangent,",
            f"{NETWORK_KERNEL}::test_closed_forms_agree_with_neural_tangents",
        ),
        (
            "kernel: circular padding with strides begins where SAME does",
            'if padding != "CIRCULAR":  # which begins',
            'if padding != "CIRCULAR" or stride > 1:  # which begins',
            f"{NETWORK_KERNEL}::test_a_convolution_is_that_of_the_layer",
        ),
    ],
    "diagnostics/_width.py": [
        (
            "wide_enough: the mean kernel in the place of the limit's own",
            "    if kernel is None:",
            "    if True:",
            "diagnostics/test_width.py::test_the_limit_of_any_network_is_taken_as_it_is",
        ),
        (
            "wide_enough: the limit's evidence beside another likelihood",
            "form is None or observed != {form.observed}",
            "form is None",
            "diagnostics/test_width.py::test_other_observed_sites_and_factors_weigh_as_well",
        ),
    ],
    "wide_limit/_kernels.py": [
        (
            "kernel: tiles below the diagonal not transposed",
            "np.asarray(part).T",
            "np.asarray(part)",
            f"{NETWORK_KERNEL}::test_blocks_equal_the_whole",
        ),
    ],
    "mcmc/langevin.py": [
        (
            "Langevin: momentum left out of the energy error",
            "energy_error += half_square_difference(end_momentum, momentum)",
            "pass",
            "mcmc/test_joint_distribution.py::test_adjusted_kernels_keep_the_joint_law",
        ),
        (
            "Langevin: momentum not turned round on rejection",
            "r_rejected=backwards",
            "r_rejected=momentum",
            "mcmc/test_joint_distribution.py::test_adjusted_kernels_keep_the_joint_law",
        ),
    ],
    "mcmc/split_hmc.py": [
        (
            "split-HMC: velocity that lives on by what the trajectory turned by",
            "jnp.exp(-angle / self._trajectory_angle)",
            "-jnp.expm1(-angle / self._trajectory_angle)",
            "mcmc/test_trajectories.py::test_a_draw_keeps_the_share_of_its_velocity_that_the_angle_leaves",
        ),
        (
            "split-HMC: trajectories of small rotations whole",
            "angle *= jnp.sqrt(jnp.minimum(state.step_size / WHOLE_FROM, 1.0))",
            "angle *= 1.0",
            "mcmc/test_trajectories.py::test_rotations_grow_like_the_root_of_those_of_a_whole_trajectory",
        ),
    ],
    "mcmc/_integrators.py": [
        (
            "pCN: ½‖φ‖² left in the energy difference",
            "end.potential_energy - start.potential_energy - half_square_difference(end.z, start.z)",
            "end.potential_energy - start.potential_energy",
            f"{INTEGRATORS}::test_energy_errors_of_crank_nicolson_are_metropolis_hastings_ratios",
        ),
        (
            "pCN-Langevin: last term of the acceptance ratio dropped",
            " - total(along) - 0.25 * step_size * total(across)",
            " - total(along)",
            f"{INTEGRATORS}::test_energy_errors_of_crank_nicolson_are_metropolis_hastings_ratios",
        ),
        (
            "split-HMC: sign of the rotation",
            "cos * v - sin * x",
            "cos * v + sin * x",
            f"{INTEGRATORS}::test_steps_retrace_their_way_when_the_momentum_is_turned_round",
        ),
        (
            "split-HMC: first kick and second of a graded trajectory 0.25 and 0.97767",
            "0.2779464851257588, 0.9497268599869967,",
            "0.25, 0.97767,",
            f"{INTEGRATORS}::test_mean_energy_error_in_a_stiff_direction_is_of_eighth_order",
        ),
        (
            "isokinetic kick: d in the place of d − 1 in the stretched volume",
            "(size - 1) * _log_cosh_plus",
            "size * _log_cosh_plus",
            "mcmc/test_isokinetic.py::test_a_kick_tells_how_it_stretches_the_sphere",
        ),
        (
            "isokinetic kick: sign of the turn",
            "downhill = -gradient /",
            "downhill = gradient /",
            "mcmc/test_isokinetic.py::test_a_kick_solves_its_differential_equation",
        ),
        (
            "isokinetic step: last kick halved",
            "OUTER_KICK * step_size)\n    # The two energies",
            "0.5 * OUTER_KICK * step_size)\n    # The two energies",
            "mcmc/test_isokinetic.py::test_a_step_retraces_its_way_when_the_direction_is_turned_round",
        ),
        (
            "isokinetic step: mass left out of the drift",
            "half * (scale * direction)",
            "half * direction",
            "mcmc/test_isokinetic.py::test_a_mass_is_a_change_of_units",
        ),
    ],
    "mcmc/_adaptation.py": [
        (
            "unadjusted kernels: gross energy errors taken in warmup",
            "~is_adapting | (energy_error < gross)",
            "~is_adapting | (energy_error < jnp.inf)",
            "mcmc/test_adaptation.py::test_unadjusted_samplers_survive_a_first_step_that_is_far_too_large",
        ),
        (
            "warmup: rounding that the energy does not show taken for errors of the step",
            "(state.probe_error < MOST_ROUNDING)",
            "(state.probe_error < 0)",
            "mcmc/test_rounding.py::test_warmup_arrives_where_no_energy_shows_how_much_of_it_is_rounded",
        ),
    ],
    "mcmc/_whitening.py": [
        (
            "momentum length: all the way to the measured one",
            "jnp.sqrt(self.length * per_autocorrelation * draw_length * time)",
            "per_autocorrelation * draw_length * time",
            "mcmc/test_whitening.py::test_a_window_learns_the_momentum_length_once_the_scales_are_known",
        ),
    ],
    "mcmc/_reference.py": [
        (
            "reference Gaussian: log-determinant counted for one unit",
            "_rows(leaf).shape[1] * jnp.sum(jnp.log(scale))",
            "jnp.sum(jnp.log(scale))",
            "mcmc/test_reference.py::test_relative_log_density_is_that_of_dense_gaussians",
        ),
    ],
    "mcmc/microcanonical.py": [
        (
            "adjusted trajectories: direction forgotten over their length, not twice of it",
            "ADJUSTED_FORGETTING if adjusted else 1.0",
            "1.0",
            "mcmc/test_whitening.py::test_adjusted_trajectories_forget_their_direction_over_twice_their_length",
        ),
    ],
    "mcmc/_kernel.py": [
        (
            "kernels: velocities that live on while a chain falls",
            "is_warming_up & (adapted.max_steps < num_steps)",
            "is_warming_up & False",
            "mcmc/test_trajectories.py::test_a_chain_that_falls_in_warmup_keeps_no_velocity",
        ),
        (
            "kernels: what a chain fell by in warmup decides on draws after it",
            "is_warming_up & (adapted.max_steps < num_steps)",
            "adapted.max_steps < num_steps",
            "mcmc/test_trajectories.py::test_a_chain_that_falls_in_warmup_keeps_no_velocity",
        ),
        (
            "unadjusted kernels: twice the bias tolerated",
            "4 * tolerance**3",
            "4 * (2 * tolerance) ** 3",
            "mcmc/test_adaptation.py::test_warmup_reaches_the_energy_error_of_the_tolerance_and_then_stops",
        ),
        (
            "compiled_once: the first of each thinned group kept",
            "rest == thinning - 1",
            "rest == 0",
            "mcmc/test_compiled_once.py::test_the_draws_are_those_of_the_vectorised_loop",
        ),
        (
            "compiled_once: data are constants of the program",
            "return run_program(loop, *given)",
            "return jax.jit(loop)(*given)",
            "mcmc/test_compiled_once.py::test_other_data_and_medians_of_the_same_shape_find_the_programs",
        ),
        (
            "compiled_once: a run on other arrays given the program of the one before",
            "kernel._loop.form != form or not all(map(is_, kernel._loop.leaves, leaves))",
            "kernel._loop.form != form",
            "mcmc/test_compiled_once.py::test_a_run_that_goes_on_with_the_same_arrays_traces_nothing",
        ),
        (
            "blocks of `Gibbs`: values of sites taken for positions",
            "biject_to(supports[name]).inv(value)",
            "value",
            "mcmc/test_gibbs.py::test_blocks_start_where_the_prior_is",
        ),
        (
            "blocks of `Gibbs`: other blocks given positions for values",
            "biject_to(supports[name])(value)",
            "value",
            "mcmc/test_gibbs.py::test_kernels_are_blocks_of_gibbs",
        ),
        (
            "chains by rows: all chains on every device",
            "out_shardings=place",
            "out_shardings=None",
            "machine/test_chains_by_rows.py::test_four_chains_of_two_shares_draw_what_one_device_draws",
        ),
        (
            "all kernels: nothing recomputed when a neighbouring block of `Gibbs` has moved",
            "return state._replace(potential_energy=point.potential_energy, z_grad=point.z_grad)",
            "return state",
            "mcmc/test_gibbs.py::test_kernels_are_blocks_of_gibbs",
        ),
    ],
    "evidence/_density.py": [
        (
            "evidence: Jacobians of constrained sites dropped",
            "self.log_dets[name] = jnp.sum(",
            "self.log_dets[name] = 0 * jnp.sum(",
            "evidence/test_density.py::test_both_parts_make_the_potential_energy",
        ),
        (
            "evidence: prior of a repriorised readout's base counted twice",
            "if name not in bases",
            "if True",
            "evidence/test_density.py::test_both_parts_make_the_potential_energy",
        ),
    ],
    "evidence/_chains.py": [
        (
            "evidence: prior against N(0, I) left out of the bridge",
            "found.weight + found.start - reference",
            "found.weight - reference",
            LIKE_DRAWS,
        ),
        (
            "evidence: chains of all temperatures at the posterior",
            "- beta * found.weight",
            "- found.weight",
            LIKE_DRAWS,
        ),
    ],
    "evidence/_methods.py": [
        (
            "bridge: unequal numbers of draws taken for equal",
            "share = num_upper / (num_lower + num_upper)",
            "share = 0.5",
            "evidence/test_overlap.py::test_bridge_of_two_gaussians",
        ),
        (
            "evidence: autocorrelation left out of the error",
            "np.var(terms, ddof=1) / size)",
            "np.var(terms, ddof=1) / terms.size)",
            "evidence/test_overlap.py::test_errors_count_the_autocorrelation_of_chains",
        ),
        (
            "stepping stones: step returned for the next temperature",
            "beta + float(np.exp(low))",
            "float(np.exp(low))",
            "evidence/test_overlap.py::test_next_temperature_of_gaussian_log_weights",
        ),
        (
            "stepping stones: sign of what draws tell of the bridge below them",
            "influence[k + 1] -= pair.upper",
            "influence[k + 1] += pair.upper",
            "evidence/test_overlap.py::test_error_of_a_sum_counts_draws_that_serve_two_bridges",
        ),
    ],
    "elbo/_tempered.py": [
        (
            "tempered ELBO: p dropped from η",
            "self.tau * p / self.num_neurons",
            "self.tau / self.num_neurons",
            "elbo/test_tempered_elbo.py::test_only_the_kl_is_tempered",
        ),
        (
            "tempered ELBO: guide's density not tempered",
            'msg["is_observed"] and not self.is_guide',
            'msg["is_observed"] or self.is_guide',
            "elbo/test_tempered_elbo.py::test_only_the_kl_is_tempered",
        ),
    ],
    "distributions/_quasi_kl.py": [
        (
            "quasi-KL: variance of q dropped",
            "0.5 * q.variance / jnp.square(p.scale) - p.log_prob(q.mean)",
            "-p.log_prob(q.mean)",
            "distributions/test_quasi_kl.py::test_theorem_4_blurred_atoms",
        ),
        (
            "quasi-KL of a degenerate Gaussian: its variances dropped",
            "0.5 * trace - p.log_prob(q.mean)",
            "-p.log_prob(q.mean)",
            "distributions/test_quasi_kl.py::test_proposition_7_blurred_lines_tend_to_the_best_one",
        ),
        (
            "quasi-KL: rate dropped from the second atom",
            "(1.0 - q.rate) * at_row",
            "at_row",
            "distributions/test_quasi_kl.py::test_closed_forms_against_draws",
        ),
    ],
    "distributions/_singular.py": [
        (
            "dropout: the row's own term dropped from the entropy",
            "-xlogy(self.rate, self.rate) - xlog1py(1.0 - self.rate, -self.rate)",
            "-xlogy(self.rate, self.rate)",
            "distributions/test_quasi_kl.py::test_theorem_4_discretised",
        ),
    ],
    "distributions/_log_uniform.py": [
        (
            "log-uniform KL: its logarithm at large ratios without the series",
            "0.5 * jnp.log(2.0 * high) - polynomial(tail, 0.5 / high)",
            "0.5 * jnp.log(2.0 * high)",
            "distributions/test_log_uniform.py::test_value_and_gradient_in_float64",
        ),
    ],
    "nn/_networks.py": [
        (
            "residual network: k not counted on",
            "k += 1",
            "k = 1",
            "nn/test_networks.py::test_residual_sums_are_scaled_by_their_index",
        ),
        (
            "FCN: first layer scaled as if an activation preceded it",
            'preceding = ["identity", *[self.activation] * (self.depth - 1)][: self.depth]',
            "preceding = [self.activation] * self.depth",
            "nn/test_networks.py::test_variance_of_the_fcn_is_one",
        ),
        (
            "FCN: a scale in an array of JAX's is a constant of the program",
            "is_data=isinstance(self.w_std, Array)",
            "is_data=False",
            "nn/test_networks.py::test_a_scale_in_an_array_of_jax_is_data_of_the_program",
        ),
    ],
    "nn/_layers.py": [
        (
            "bias of scale zero as a number of NumPy's made a parameter",
            "if is_zero(layer.b_std):",
            "if isinstance(layer.b_std, int | float) and layer.b_std == 0:",
            "nn/test_scales.py::test_a_bias_of_scale_zero_is_no_parameter",
        ),
        (
            "NTKConv: filter size left out of the scale",
            "(height * width * num_channels) ** 0.5",
            "num_channels**0.5",
            "nn/test_networks.py::test_convolution_against_a_sum_over_offsets",
        ),
        (
            "NTKConv: steps of height and width exchanged",
            "i : i + spans[0] : strides[0], j : j + spans[1] : strides[1]",
            "i : i + spans[0] : strides[1], j : j + spans[1] : strides[0]",
            "nn/test_networks.py::test_convolution_is_that_of_flax_with_its_gradients",
        ),
    ],
    "nn/_random.py": [
        (
            "random_network: parameters put back in another order",
            "return network(jax.tree.unflatten(jax.tree.structure(shapes), values))",
            "return network(jax.tree.unflatten(jax.tree.structure(shapes), values[::-1]))",
            "nn/test_models.py::test_every_parameter_is_a_site_of_its_own",
        ),
    ],
    "nn/_models.py": [
        (
            "noise by row: no amplitude",
            "jnp.exp(amplitude * (features @ readout))",
            "jnp.exp(features @ readout)",
            "nn/test_noise.py::test_densities_and_gradients_of_both_forms_are_those_of_the_dense_gaussian",
        ),
        (
            "prior variance of a network without scales not warned of",
            "LEAST_VARIANCE <= variance <= LARGEST_VARIANCE",
            "LEAST_VARIANCE <= variance <= 1e3 * LARGEST_VARIANCE",
            "nn/test_nn_errors.py::test_a_prior_far_from_the_targets_is_warned_of",
        ),
        (
            "targets far beyond the prior not warned of",
            "size > LARGEST_VARIANCE",
            "size > 1e9 * LARGEST_VARIANCE",
            "nn/test_nn_errors.py::test_targets_far_from_the_prior_are_warned_of",
        ),
        (
            "outputs far beyond the targets not warned of",
            'warn_of_prior_sizes({"y": (np.sqrt(variance), np.sqrt(size))})',
            'warn_of_prior_sizes({"y": (variance / size, np.sqrt(size))})',
            "mcmc/test_prior_sizes.py::test_features_that_grow_with_the_width_are_told",
        ),
        (
            "bnn: scale of the readout's prior dropped",
            "dist.Normal(0, readout_scale)",
            "dist.Normal(0, 1)",
            "nn/test_models.py::test_standard_parametrisation_gives_the_same_under_every_handler",
        ),
        (
            "prior of a scale that reaches below zero let through",
            "not np.all(np.asarray(inner.low) >= 0)",
            "not np.all(np.asarray(inner.low) >= -1)",
            "nn/test_nn_errors.py::test_mistakes",
        ),
    ],
    "runs/_optimum.py": [
        (
            "init_to_optimum: the noise's own network let loose",
            'name.startswith("noise.")',
            "False",
            "runs/test_optimum.py::test_scales_are_held_at_their_medians_in_a_word",
        ),
    ],
    "amortized/_families.py": [
        (
            "auto guide: components without their weights",
            "return logsumexp(by_component + jnp.broadcast_to(weights, by_component.shape), axis=-1)",
            "return logsumexp(by_component, axis=-1)",
            "amortized/test_auto_amortized.py::test_density_is_that_of_normals_in_unconstrained_coordinates",
        ),
        (
            "auto guide: covariance's factor with the mean as a regression's constant",
            'return logits, jnp.einsum("kij,kj->ki", factor, loc), factor',
            "return logits, loc, factor",
            "amortized/test_auto_amortized.py::test_density_is_that_of_normals_in_unconstrained_coordinates",
        ),
    ],
    "amortized/_guide.py": [
        (
            "auto guide: a density without the scale of its coordinates",
            "AffineTransform(self.loc, self.scale)",
            "AffineTransform(self.loc, 1 + 0 * self.scale)",
            "amortized/test_auto_amortized.py::test_density_is_that_of_normals_in_unconstrained_coordinates",
        ),
        (
            "auto guide: sites that do not see those before them",
            "shift = target[:, first:end] - jnp",
            "shift = target[:, first:end] - 0 * jnp",
            "amortized/test_auto_amortized.py::test_density_is_that_of_normals_in_unconstrained_coordinates",
        ),
        (
            "auto guide: small values of positive data without their digits",
            "low, 0.1 * least)",
            "low, low)",
            "amortized/test_auto_amortized.py::test_data_over_orders_of_magnitude_enter_by_their_logarithm",
        ),
    ],
    "amortized/_joined.py": [
        (
            "joined guides: a mixture's density without its weights",
            "return logsumexp(log_probs) - jnp.log(len(log_probs))",
            "return logsumexp(log_probs)",
            "amortized/test_fit.py::test_a_mixture_of_guides_has_the_mean_of_their_densities",
        ),
        (
            "joined guides: draws of the first guide alone",
            "random.randint(member_key, (), 0, len(jax.tree.leaves(members)[0]))",
            "0",
            "amortized/test_fit.py::test_a_mixture_of_guides_has_the_mean_of_their_densities",
        ),
        (
            "joined guides: the sum of what networks compute",
            'head["kernel"]) / len(by_member)',
            'head["kernel"])',
            "amortized/test_fit.py::test_the_mean_of_guides_with_one_encoder_has_the_mean_of_their_heads",
        ),
    ],
    "amortized/_fit.py": [
        (
            "fit: settings that are not halved",
            "[: max(1, len(settings) // 2)]",
            "",
            "amortized/test_fit.py::test_the_posterior_of_a_conjugate_model_and_the_same_bits_for_the_same_key",
        ),
    ],
    "amortized/_given.py": [
        (
            "given simulations: the same order in every epoch",
            "random.fold_in(shuffle_key, first // length)",
            "shuffle_key",
            "amortized/test_given_simulations.py::test_an_epoch_has_every_simulation_once_in_a_new_order",
        ),
    ],
    "amortized/_trainer.py": [
        (
            "a continued run: the best held-out loss of other arguments",
            "best = best._replace(best_loss=loss)",
            "best = best._replace(best_loss=best.best_loss)",
            "amortized/test_amortized_trainer.py::"
            "test_a_run_with_other_arguments_compares_by_its_own_held_out_simulations",
        ),
        (
            "held-out loss: NaN with one failed simulation",
            ", where=jnp.stack(is_finite).all(axis=0))",
            ")",
            "amortized/test_amortized_trainer.py::test_held_out_simulations_that_fail_are_left_out",
        ),
        (
            "amortised training: a block of simulations drawn from where the run begins",
            "draw(state.step - state.step % length)",
            "draw(state.step)",
            "amortized/test_amortized_trainer.py::test_run_goes_on_as_one_longer_run",
        ),
    ],
    "amortized/_simulation.py": [
        (
            "parameters that a guide would start from taken, where a flax module lacks its state",
            'refuse_missing("params", recorder.values, params, kind, mend)',
            "pass",
            "amortized/test_amortized_importance.py::test_parameters_that_the_guide_would_start_from_are_refused",
        ),
    ],
    "_mixture.py": [
        (
            "CRPS: ½ of the pairs of draws dropped",
            "return total / (2 * len(mean) ** 2)",
            "return total / len(mean) ** 2",
            f"{REGRESSION}::test_crps_against_quadrature",
        ),
        (
            "CRPS: pairs counted once",
            "2 * pairs.sum(axis=0)",
            "pairs.sum(axis=0)",
            f"{REGRESSION}::test_crps_against_quadrature",
        ),
        (
            "CRPS: step of the integral seven times as long",
            "np.ceil(2 * (high - low)",
            "np.ceil(2 / 7 * (high - low)",
            f"{REGRESSION}::test_pairs_and_integral_agree",
        ),
        (
            "log predictive density: weights of the draws dropped",
            "logsumexp(log_values, axis=0) - np.log(len(log_values))",
            "logsumexp(log_values, axis=0)",
            f"{REGRESSION}::test_scores_of_one_gaussian",
        ),
    ],
    "diagnostics/_scores.py": [
        (
            "scores: ½ of the delta method dropped",
            "_standard_error(squared_error) / (2 * root)",
            "_standard_error(squared_error) / root",
            f"{REGRESSION}::test_standard_errors_are_the_deviations_over_samples",
        ),
        (
            "scores: sign of log scale",
            " - np.log(units)",
            " + np.log(units)",
            f"{REGRESSION}::test_scale_gives_the_scores_of_rescaled_numbers",
        ),
        (
            "scores: outputs counted as rows",
            "by_entry.reshape(len(by_entry), -1).mean(axis=1)",
            "by_entry.reshape(-1)",
            f"{REGRESSION}::test_outputs_of_a_row_count_once",
        ),
        (
            "classification scores: calibration's error without its sign",
            "gap * (members @ np.sign(gap @ members))",
            "np.abs(gap)",
            "diagnostics/test_classification.py::test_all_scores_and_their_errors_by_hand",
        ),
    ],
    "plots.py": [
        (
            "reliability: both tails of the binomial interval on one side",
            "proportion_ci(level)",
            "proportion_ci(2 * level - 1)",
            "plots/test_reliability.py::test_points_and_intervals_against_scipy",
        ),
    ],
    "../studies/_data.py": [
        (
            "UCI sets: test rows left among the training rows",
            "Dataset(inputs[~test], targets[~test])",
            "Dataset(inputs, targets)",
            "test_study_data.py::test_splits",
        ),
        (
            "CIFAR-10: rows and channels mixed up",
            ".transpose(0, 2, 3, 1)",
            ".transpose(0, 3, 2, 1)",
            "test_study_data.py::test_cifar10",
        ),
        (
            "Standardiser: mean not subtracted",
            "(np.asarray(values, np.float64) - self.loc) / self.scale",
            "np.asarray(values, np.float64) / self.scale",
            "test_study_data.py::test_standardiser_uses_the_training_rows_alone",
        ),
    ],
    "../docs/figures/published_log_density.csv": [
        (
            "benchmark: a figure beside the published ones that no run gave",
            "−0.70 ± 0.03",
            "−0.60 ± 0.03",
            "test_docs.py::test_published_figures_stand_beside_the_rows_that_were_run",
        ),
    ],
    "../docs/figures/as_users_summary.csv": [
        (
            "as users: a speed that no run had",
            "854 / 115 / 76.1",
            "954 / 115 / 76.1",
            "test_docs.py::test_the_models_of_users_show_the_rows_that_were_run",
        ),
    ],
    "../docs/figures/how_wide_seconds.csv": [
        (
            "how wide: a speed that no run had",
            "1 x 64,collapsed,75 / 14,",
            "1 x 64,collapsed,95 / 14,",
            "test_docs.py::test_the_tables_of_widths_show_the_rows_that_were_run",
        ),
    ],
    "../docs/gallery/classes.md": [
        (
            "gallery: a score that no run had",
            "took 173, 494, 283 and 1231",
            "took 173, 494, 283 and 1331",
            "test_prose.py::test_numbers_in_prose_are_in_the_tables_of_their_figures",
        ),
    ],
    "../docs/guides/evidence.md": [
        (
            "evidence: a difference that no run had",
            "| 4.22 ± 0.22 |",
            "| 4.62 ± 0.22 |",
            "test_prose.py::test_evidences_by_width_are_those_that_were_found",
        ),
    ],
    "../docs/mathematics.md": [
        (
            "mathematics: an equation's label changed",
            "$$ (evidence)",
            "$$ (proof)",
            "test_docs.py::test_docstrings_cite_every_equation_and_no_other",
        ),
    ],
    "natural.py": [
        (
            "truncated normal: a rule's nodes over all of a long interval",
            "ends = jnp.maximum(begin, -reach), jnp.minimum(end, reach)",
            "ends = begin, end",
            "natural/test_natural_families.py::test_an_interval_against_adaptive_quadrature",
        ),
        (
            "truncated normal: derivatives by the ends, which cancel",
            "mode = stop_gradient(jnp.clip(loc, low, high))",
            "mode = jnp.clip(loc, low, high)",
            "natural/test_natural_families.py::test_an_interval_against_adaptive_quadrature",
        ),
        (
            "truncated normal: draws without derivatives",
            "found -= step - stop_gradient(step)",
            "found -= 0 * step",
            "natural/test_natural_families.py::test_quantiles_of_an_interval_and_their_slopes",
        ),
    ],
    "calibration.py": [
        (
            "two-sample test: samples that are not standardised",
            "features = (np.concatenate([first, second]) - loc) / scale",
            "features = np.concatenate([first, second]) + 0 * (loc + scale)",
            "calibration/test_c2st.py::test_accuracy_is_that_of_the_best_classifier",
        ),
        (
            "simulations: arrays not copied",
            "array = np.array(values)",
            "array = np.asarray(values)",
            "calibration/test_ranks_and_coverage.py::test_simulations_hold_copies_of_real_numbers",
        ),
    ],
    "elbo/_certificate.py": [
        (
            "bound of mean field: an array of scales let through",
            "    if jnp.ndim(scale):",
            "    if jnp.ndim(scale) > 1:",
            "elbo/test_terms_and_certificate.py::test_the_bound_takes_one_scale_at_a_time",
        ),
    ],
    "wide_limit/_surrogates.py": [
        (
            "fitted surrogate: curvature of a distribution's columns added, not averaged",
            ")) / num_columns",
            "))",
            "surrogates/test_fitted_surrogate.py::test_what_a_classifier_holds_says_the_same_as_its_name",
        ),
    ],
    "diagnostics/_summary.py": [
        (
            "summary: the verdict is by single weights as well",
            "or not site.is_exchangeable",
            "or name",
            "diagnostics/test_summary.py::test_units_may_trade_places_and_what_is_outside_of_the_features_may_not",
        ),
        (
            "summary: R-hat between 1.01 and 1.05 called converged",
            "if worst.rhat > _LARGEST_RHAT or least.ess < _LEAST_ESS:",
            "if least.ess < _LEAST_ESS:",
            "diagnostics/test_summary.py::test_chains_that_agree_may_be_too_short_for_intervals",
        ),
        (
            "summary: mean of the observed site dropped from the function",
            "jnp.ravel(fit.loc + mean)",
            "jnp.ravel(mean)",
            "diagnostics/test_summary.py::test_the_function_is_that_with_the_readout_integrated_out",
        ),
        (
            "summary: rounding is looked at where the chains begin",
            "errors[:, -1]",
            "errors[:, 0]",
            "diagnostics/test_summary.py::test_a_sampled_noise_that_single_precision_does_not_resolve_is_told",
        ),
        (
            "summary: an energy that drifts",
            "_LARGEST_DRIFT = 3.0",
            "_LARGEST_DRIFT = 300.0",
            "diagnostics/test_summary.py::test_an_energy_that_drifts_is_told",
        ),
    ],
    "diagnostics/_to_arviz.py": [
        (
            "summary: the last block of draws counts draws twice",
            "new=start - first",
            "new=0",
            "diagnostics/test_summary.py::test_without_recorded_features_the_function_is_that_of_the_weights",
        ),
        (
            "summary: sites outside of the features let through as units that trade places",
            "self._latent.keys() - hidden if",
            "set() if",
            "diagnostics/test_summary.py::test_units_may_trade_places_and_what_is_outside_of_the_features_may_not",
        ),
    ],
    "_checks.py": [
        (
            "chains that do not move: all chains counted as one",
            "num_distinct < 0.2",
            "num_distinct.sum() < 0.2",
            "diagnostics/test_summary.py::test_chains_that_do_not_move_are_warned_of",
        ),
    ],
    "runs/_pieces.py": [
        (
            "run_in_pieces: the state of an interrupted run left for the next",
            "mcmc.post_warmup_state = None",
            "pass",
            "runs/test_folders.py::test_an_interrupted_run_leaves_the_next_one_its_warmup",
        ),
        (
            "run_in_pieces: settings that are not adapted left out of a run's identity",
            "_hash(sampler)",
            '""',
            "runs/test_folders.py::test_settings_that_are_not_adapted_belong_to_the_run",
        ),
        (
            "run_in_pieces: computation of what is stored left out of a run's identity",
            "(stored.as_text(), extra_fields)",
            "(str(stored.out_info), extra_fields)",
            "runs/test_pieces.py::test_values_of_the_same_shape_computed_otherwise_are_not_mixed",
        ),
        (
            "run_in_pieces: no lock",
            '"run.lock"',
            'f"{os.getpid()}.lock"',
            "runs/test_folders.py::test_a_second_process_is_refused",
        ),
        (
            "run_in_pieces: a piece counted for one draw more than it has",
            "ends.append(ends[-1] + size)",
            "ends.append(ends[-1] + size + 1)",
            "runs/test_pieces.py::test_pieces_are_the_run_in_one",
        ),
    ],
    "readout/_draws.py": [
        (
            "wide_limit_draws: other likelihoods of hidden weights ignored",
            "weighted = bool(learns) if weighted is None else weighted",
            "weighted = 'noise' in learns",
            "readout/test_wide_limit_draws.py::test_another_likelihood_of_hidden_weights_has_its_part",
        ),
        (
            "wide_limit_draws: weights of the readout do not choose it",
            "is_joint = weighted and any(learns.values())",
            "is_joint = False",
            "readout/test_wide_limit_draws.py::test_what_observes_the_readout_beside_its_likelihood_has_its_part",
        ),
        (
            "log weight: scale of the likelihood dropped",
            'log_prob if site["scale"] is None else site["scale"] * log_prob',
            "log_prob",
            "evidence/test_density.py::test_both_parts_make_the_potential_energy",
        ),
    ],
}
MUTANTS = [
    Mutant(fault, os.path.normpath(f"numpyro_wide/{path}"), old, new, test)
    for path, faults in FAULTS.items()
    for fault, old, new, test in faults
]


def run(copy: Path, *tests: str, patience: float | None) -> tuple[int, str]:
    """Run tests in a copy of the tree up to the first that fails, and return pytest's status and what it printed."""
    options = ("-x", "-p", "no:xdist", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
    # Nothing compiled by Python is kept: of two faults of one length, put in within a second, it would know one.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    finished = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=patience, check=False
    )
    return finished.returncode, finished.stdout[-2000:] + finished.stderr[-2000:]


def try_out(mutant: Mutant, copy: Path) -> str | None:
    """Run a mutant's test in a copy that has its fault, and put the copy right.

    Returns:
        What is wrong; None if the test failed, as it must.
    """
    path = copy / mutant.path
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return f"the text {mutant.old!r} must occur once, but occurs {text.count(mutant.old)} times"
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        status, printed = run(copy, mutant.test, patience=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"the test was not through after {PATIENCE} seconds"
    finally:
        path.write_text(text, encoding="utf-8")
    # 1 says that tests failed; others that there are none of this name, that they cannot be imported, and so on.
    return {0: "no test failed", 1: None}.get(status, f"pytest ended with {status}: {printed}")


def main(only: str = "") -> None:
    """Put in the faults whose words hold a text, two at a time, each in a copy of the tree."""
    chosen = [mutant for mutant in MUTANTS if any(only in part for part in (mutant.fault, mutant.path, mutant.test))]
    if not chosen:
        sys.exit(f"none of {len(MUTANTS)} faults holds {only!r}")
    copies: queue.Queue[Path] = queue.Queue()

    def tried(mutant: Mutant) -> str | None:
        copy = copies.get()
        try:
            return try_out(mutant, copy)
        finally:
            copies.put(copy)

    num_survivors = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        for number in range(2):
            copies.put(Path(shutil.copytree(ROOT, f"{folder}/{number}", ignore=shutil.ignore_patterns(*NOT_COPIED))))
        # What fails without a fault tells nothing of one.
        status, printed = run(Path(folder) / "0", *sorted({mutant.test for mutant in chosen}), patience=None)
        if status:
            sys.exit(f"tests fail without any fault:\n{printed}")
        for mutant, wrong in zip(chosen, pool.map(tried, chosen), strict=True):
            num_survivors += wrong is not None
            print(
                "noticed" if wrong is None else f"NOT NOTICED ({wrong})", f"{mutant.path}: {mutant.fault}", flush=True
            )
    print(f"{len(chosen) - num_survivors} of {len(chosen)} faults were noticed")
    sys.exit(num_survivors > 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
