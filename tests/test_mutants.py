"""The faults of ``mutants.py`` can be put in, and their tests exist; ``make mutants`` puts them in."""

import re

import pytest

from tests.mutants import MUTANTS, ROOT


def test_every_fault_is_another():
    assert len(MUTANTS) > 90
    assert len({mutant.fault for mutant in MUTANTS}) == len({mutant[1:4] for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_its_text_occurs_once_and_its_test_exists(mutant):
    assert mutant.old != mutant.new
    assert (ROOT / mutant.path).read_text(encoding="utf-8").count(mutant.old) == 1
    file, _, name = mutant.test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.M)
