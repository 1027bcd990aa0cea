"""Division of the suite into four parts, each of which has the cases that no other has.

``make test`` runs what bears none of the three marks given here; CI runs the rest, too, but for half of large tables.
"""

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Rooms in which rounding decides: their cases are compiled as users compile.
NUMERICS = (
    *("tests/distributions", "tests/elbo", "tests/evidence", "tests/linear_gaussian", "tests/machine", "tests/mcmc"),
    *("tests/natural", "tests/readout", "tests/surrogates", "tests/wide_limit"),
)
# Of these rooms the plumbing, which is the same however it is compiled.
PLUMBING = ("test_*errors.py", "test_*mistakes.py", "test_assumptions.py")
# Rooms and files of many models, each of which compiles programs of its own: they ask what is computed, or whether a
# chain goes where it should, and not to which digit. Compiled quickly they take half the time.
LONG = (
    *("tests/amortized", "tests/calibration", "tests/diagnostics", "tests/elbo", "tests/estimators"),
    "tests/evidence/test_density.py",
    *("tests/evidence/test_model_evidence.py", "tests/machine", "tests/mcmc/test_peer_targets.py", "tests/nn"),
    *("tests/readout/test_handlers.py", "tests/readout/test_log_density.py", "tests/readout/test_one_predictive.py"),
    *("tests/readout/test_random_models.py", "tests/surrogates/test_fitted_posteriors.py"),
)
# Files whose cases are whole runs, of chains, trainings or compilations: `make test` runs none of them.
WHOLE_RUNS = (
    *("tests/amortized/test_amortized_posteriors.py", "tests/amortized/test_amortized_trainer.py"),
    *("tests/diagnostics/test_summary.py", "tests/diagnostics/test_width.py", "tests/mcmc/test_compiled_once.py"),
    *("tests/mcmc/test_over_chains.py", "tests/mcmc/test_prior_sizes.py", "tests/mcmc/test_protocol.py"),
    *("tests/readout/test_compiled_once.py", "tests/readout/test_wide_limit_draws.py", "tests/runs"),
    "tests/test_autoguide.py",
)
# Of these rooms those whose time is that of many compilations, which takes half to a third of it if done quickly: one
# test or case in `STRIDE` is compiled as users compile, to see that XLA's optimisations change nothing.
MANY_PROGRAMS = (
    *("tests/evidence/test_wide_networks.py", "tests/linear_gaussian/test_against_oracle.py"),
    *("tests/mcmc/test_adaptation.py", "tests/mcmc/test_gibbs.py", "tests/mcmc/test_joint_distribution.py"),
    *("tests/mcmc/test_joint_network.py", "tests/mcmc/test_moments.py", "tests/mcmc/test_reference.py"),
    *("tests/mcmc/test_rounding.py", "tests/mcmc/test_trajectories.py", "tests/mcmc/test_whitening.py"),
    *("tests/readout", "tests/surrogates", "tests/test_exact_laws.py", "tests/wide_limit"),
)
# What is shown to users, with a process or a chain of its own: pages, notebook, docstrings, examples, studies.
SHOWN = ("docs", "numpyro_wide", "tests/test_examples.py", "tests/test_studies.py")
# Minutes each, in one worker: they start first, so that the workers end together.
LONGEST = ("tests/test_studies.py", "tests/mcmc/test_peer_targets.py", "tests/readout/test_random_models.py")
# Of a test of these rooms over several cases, `make test` runs one in so many.
STRIDE = 6
# Of a test over so many cases or more CI runs every other one.
LARGE = 4

MARKS = (
    "numerics: compiled as users compile, by make test-numerics",
    "long: many models and their chains, compiled quickly, by make test-long",
    "shown: pages, docstrings, examples, studies and the notebook, run by make test-shown",
    "slow: long chains, several processes, many programs: never among the cases of make test",
)


@cache
def is_in(path: Path, parts: tuple[str, ...]) -> bool:
    """Tell whether a file is one of some, or in one of some folders."""
    return any(path.is_relative_to(part) for part in parts)


def part_of(item: pytest.Item) -> str | None:
    """Return the mark of the part that runs a test, or None for ``make test``."""
    path = item.path.relative_to(ROOT)
    if is_in(path, SHOWN):
        return "shown"
    if is_in(path, WHOLE_RUNS):
        return "long"
    turn = turn_of(item)
    is_long = is_in(path, LONG)
    place = len(item.name) if turn is None else turn
    is_alike = is_in(path, MANY_PROGRAMS) and place % STRIDE != STRIDE // 2
    left_out = "long" if is_long or is_alike else "numerics"
    if item.get_closest_marker("slow") is not None:
        return left_out
    if any(path.match(name) for name in PLUMBING):
        return None
    if is_in(path, NUMERICS):
        return None if turn == 1 else left_out
    return "long" if is_long and turn not in (None, 1) else None


def every_other(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return half of the cases of numerical and long tests over `LARGE` or more, none of them of ``make test``."""
    tables = Counter(item.nodeid.split("[")[0] for item in items)
    return [
        item
        for item in items
        if part_of(item) in ("numerics", "long")
        and tables[item.nodeid.split("[")[0]] >= LARGE
        and turn_of(item) in range(0, STRIDE, 2)
    ]


def turn_of(item: pytest.Item) -> int | None:
    """Return which of `STRIDE` groups a case of a test is in; None for a test of one case.

    ``make test`` takes the group 1. The places of its parameters in their lists decide, so that a case is in the same
    part whatever else is selected, and every value of a parameter has its turn in a table of several.
    """
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return None
    places = dict(callspec.indices)
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        for name in names[1:]:  # which has the place of the first
            places.pop(name.strip())
    return sum(places.values()) % STRIDE
