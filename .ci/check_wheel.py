"""Installs a wheel in a clean environment and runs the README's first example and the notebook's code there.

python .ci/check_wheel.py dist/numpyro_wide-*.whl
"""

import json
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
NOTEBOOK = README.parent / "docs" / "notebooks" / "wide_bnn.ipynb"
CARRIED = ("numpyro_wide/py.typed", "numpyro_wide/olympic_marathon_men.csv", "licenses/LICENSE")
CHECK = """
import importlib.metadata
import numpyro_wide
from numpyro_wide import datasets
assert "site-packages" in numpyro_wide.__file__, numpyro_wide.__file__
assert importlib.metadata.version("numpyro_wide") == numpyro_wide.__version__
assert datasets.marathon().targets.size == 27
assert predictions["y"].shape == (400, 50)
print("numpyro_wide", numpyro_wide.__version__, "works as installed from its wheel")
"""


def main() -> None:
    """Check the wheel named on the command line."""
    (wheel,) = map(Path, sys.argv[1:])
    names = zipfile.ZipFile(wheel).namelist()
    lacking = [name for name in CARRIED if not any(member.endswith(name) for member in names)]
    foreign = [name for name in names if not re.match(r"numpyro_wide(/|-[^/]*\.dist-info/)", name)]
    if lacking or foreign:
        sys.exit(f"{wheel} lacks {lacking} and holds {foreign}, which does not belong in it")
    example = re.search(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    if example is None:
        sys.exit(f"{README} has no example")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    notebook = "\n".join("".join(cell["source"]) for cell in cells)
    notebook = re.sub(r"^(WIDTH, .* =) .*$", r"\1 10, 20, 20, 2, 50", notebook, flags=re.M)  # in a minute
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", wheel.resolve()], check=True)
        # In a folder of its own and isolated (-I), so that nothing of this checkout is imported.
        for code in (example[1] + CHECK, notebook):
            subprocess.run([python, "-I", "-c", code], cwd=folder, check=True)


if __name__ == "__main__":
    main()
