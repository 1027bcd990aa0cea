"""Division of the suite into the four steps of CI, each of which runs the cases that no other runs.

``make test`` runs what bears none of the three marks given here; CI runs the rest, too.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Rooms in which rounding decides: their cases are compiled as users compile.
NUMERICS = (
    *("tests/distributions", "tests/elbo", "tests/evidence", "tests/linear_gaussian", "tests/machine", "tests/mcmc"),
    *("tests/natural", "tests/readout", "tests/surrogates", "tests/wide_limit"),
)
# Of these rooms the plumbing, which is the same however it is compiled.
PLUMBING = ("test_*errors.py", "test_*mistakes.py", "test_compiled_once.py", "test_conjugacy.py")
# Of these rooms the files of many models, each of which compiles programs of its own: they ask what is computed, or
# whether a chain goes where it should, and not to which digit. Compiled quickly they take half the time.
LONG = (
    *("tests/diagnostics", "tests/elbo", "tests/estimators", "tests/evidence/test_density.py"),
    *("tests/evidence/test_model_evidence.py", "tests/machine", "tests/mcmc/test_peer_targets.py"),
    *("tests/mcmc/test_protocol.py", "tests/nn", "tests/readout/test_as_it_is_now.py"),
    *("tests/readout/test_handlers.py", "tests/readout/test_log_density.py", "tests/readout/test_one_predictive.py"),
    *("tests/readout/test_random_models.py", "tests/runs", "tests/surrogates/test_fitted_posteriors.py"),
)
# What is shown to users, with a process or a chain of its own: pages, notebook, examples, studies.
SHOWN = ("docs", "tests/test_examples.py", "tests/test_studies.py")
# Of a test of numerics over several cases, `make test` runs one in so many.
STRIDE = 4

MARKS = (
    "numerics: compiled as users compile, by make test-numerics alone",
    "long: many models and their chains, compiled quickly, by make test-long alone",
    "shown: pages, examples, studies and the notebook, run by make test-shown alone",
    "slow: long chains and several processes, never among the cases that make test takes of the numerics",
)


def step_of(item: pytest.Item) -> str | None:
    """Return the mark of the step that runs a test, or None for ``make test``."""
    path = item.path.relative_to(ROOT)
    if any(path.is_relative_to(part) for part in SHOWN):
        return "shown"
    left_out = "long" if any(path.is_relative_to(part) for part in LONG) else "numerics"
    if item.get_closest_marker("slow") is not None:
        return left_out
    if not any(path.is_relative_to(room) for room in NUMERICS) or any(path.match(name) for name in PLUMBING):
        return None
    return None if is_sample(item) else left_out


def is_sample(item: pytest.Item) -> bool:
    """Return whether a case is one of those that ``make test`` takes of a test of numerics.

    The places of its parameters in their lists decide, so that a case is in the same step whatever else is selected,
    and every value of a parameter has its turn in a table of several.
    """
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return False
    places = dict(callspec.indices)
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        for name in names[1:]:  # which has the place of the first
            places.pop(name.strip())
    return sum(places.values()) % STRIDE == 1
