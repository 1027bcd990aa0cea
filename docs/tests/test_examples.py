"""Every script in examples/, and the notebook, run at a tiny size, and draw their figures."""

import json
import re

import pytest

from tests.scripts import ROOT, run

# What is made smaller in the text of an example, which has no options.
SMALLER = {
    "wrap_sample_predict.py": {
        "num_warmup=300": "num_warmup=10",
        "collapsed, 1000": "collapsed, 40",
        "bnn, 2000": "bnn, 40",
        "bnn, 300": "bnn, 10",
        "(50, 200, 800)": "(4, 800)",
    },
    "wide_mean_field.py": {"width=1000": "width=10", "num_steps=2000": "num_steps=20"},
    "amortise.py": {"num_steps=5000": "num_steps=20", 'num_simulations": 500': 'num_simulations": 30'},
}


def test_none_is_forgotten():
    others = {"botorch_surrogate.py"}  # test_botorch.py, where PyTorch is installed
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(SMALLER) | others


@pytest.mark.parametrize("name", SMALLER)
def test_example_runs(name, tmp_path):
    text = (ROOT / "examples" / name).read_text()
    assert text.count("\n") <= 90
    for full, tiny in SMALLER[name].items():
        assert full in text
        text = text.replace(full, tiny)
    (tmp_path / name).write_text(text)
    printed, _ = run(tmp_path / name, folder=tmp_path)
    figure = tmp_path / name.replace(".py", ".png")
    assert figure.stat().st_size > 5000
    assert printed.splitlines()[-1] == f"Figure: {figure.name}"


def test_notebook_runs_and_holds_its_outputs(tmp_path):
    path = ROOT / "docs" / "notebooks" / "wide_bnn.ipynb"
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    text = "\n".join("".join(cell["source"]) for cell in cells)
    text, count = re.subn(r"^(WIDTH, .* =) .*$", r"\1 4, 5, 8, 2, 5", text, flags=re.MULTILINE)
    assert count == 1
    (tmp_path / "notebook.py").write_text(text)
    run(tmp_path / "notebook.py", folder=tmp_path)
    shown = {
        kind for cell in cells for output in cell["outputs"] for kind in output.get("data", [output["output_type"]])
    }
    assert {"image/png", "text/html", "stream"} <= shown
    assert all(output.get("name") != "stderr" for cell in cells for output in cell["outputs"])
    assert path.stat().st_size < 400_000
