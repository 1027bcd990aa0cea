"""Every second study, and the notebook, at a tiny size; ``test_examples.py`` has the others, and the tables."""

import json
import re

import pytest

from tests.test_examples import ROOT, TINY, check_study, run


@pytest.mark.parametrize("name", list(TINY)[1::2])
def test_study_runs(name, tmp_path):
    check_study(name, tmp_path)


def test_notebook_runs_and_holds_its_outputs(tmp_path):
    path = ROOT / "docs" / "notebooks" / "wide_bnn.ipynb"
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    text = "\n".join("".join(cell["source"]) for cell in cells)
    text, count = re.subn(r"^(WIDTH, .* =) .*$", r"\1 4, 5, 8, 2, 5", text, flags=re.MULTILINE)
    assert count == 1
    (tmp_path / "notebook.py").write_text(text)
    run("notebook.py", folder=tmp_path)
    shown = {
        kind for cell in cells for output in cell["outputs"] for kind in output.get("data", [output["output_type"]])
    }
    assert {"image/png", "text/html", "stream"} <= shown
    assert all(output.get("name") != "stderr" for cell in cells for output in cell["outputs"])
    assert path.stat().st_size < 400_000
