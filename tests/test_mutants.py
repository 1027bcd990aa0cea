"""The faults that tests bear as marks can be put in; ``make mutants`` puts them in."""

from tests.mutants import ROOT, faults, files_of_tests


def test_every_fault_can_be_put_in():
    marks = list(faults())
    texts = [path.read_text(encoding="utf-8") for path in files_of_tests()]
    assert len(marks) == len({mark[:3] for mark in marks}) == sum(text.count("\n@pytest.mark.fault(") for text in texts)
    wrong = [
        f"{path}: {old!r}, quoted at {test}"
        for path, old, new, test in marks
        if old == new or (ROOT / path).read_text(encoding="utf-8").count(old) != 1
    ]
    assert not wrong, "these texts must occur once in the file: mend the mark `fault` of the test\n" + "\n".join(wrong)
