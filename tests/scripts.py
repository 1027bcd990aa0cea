"""Scripts of studies and examples in processes of their own."""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
# Scripts begin as copies of a process that has imported what most of them import.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([__name__, "numpyro_wide.estimators", "arviz", "matplotlib.pyplot"])


def script(path, arguments, folder, files):
    """Run a script in a folder as Python does, what it prints in files."""
    os.chdir(folder)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.argv, sys.path[:0] = [str(path), *map(str, arguments)], [str(path.parent)]
    runpy.run_path(str(path), run_name="__main__")


def run(path, *arguments, folder):
    """What a script printed, and its bars and errors."""
    with TemporaryDirectory() as name:
        files = [Path(name, stream) for stream in ("stdout", "stderr")]
        process = SERVER.Process(target=script, args=(path, arguments, folder, files), daemon=True)
        process.start()
        process.join(600)
        printed, errors = (file.read_text() for file in files)
    assert process.exitcode == 0, errors[-3000:]
    return printed, errors
