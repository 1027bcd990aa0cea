"""Nothing waits for ever on a machine with few cores, with nothing set in the environment."""

import os
import select
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from numpyro_wide._machine import ENOUGH_THREADS, standstill_warning

WORKER = Path(__file__).with_name("standstill_worker.py")
ROOT = WORKER.parents[2]
NUM_ROUNDS = 30
PATIENCE = 180  # seconds without a line; the longest step, which compiles, takes ten on a quiet machine
SET_BY_USERS = ("NPROC", "XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "OPENBLAS_NUM_THREADS")
AVAILABLE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
STANDS_STILL = ["0.10.0", "0.10.1", "0.10.2", "0.11.0"]  # as seen on two cores, and these came back there:
COMES_BACK = ["0.7.0", "0.7.2", "0.8.3", "0.9.0.1", "0.9.2", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1"]


def environment(**settings):
    kept = {name: value for name, value in os.environ.items() if name not in SET_BY_USERS}
    return {**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **settings}


def start_on(num_cores, command):
    """Start a process on some cores; JAX counts them when it starts."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:num_cores])  # of this thread, from which the process inherits it
    try:
        return subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    finally:
        os.sched_setaffinity(0, allowed)


def lines_of(process, patience):
    """What a process prints until its end, or until it has been silent for some seconds; then all of it is ended."""
    printed = b""
    try:
        while select.select([process.stdout], [], [], patience)[0]:
            read = os.read(process.stdout.fileno(), 4096)
            if not read:
                break
            printed += read
        else:
            printed += f"\nnothing for {patience} seconds".encode()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return printed.decode().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("num_cores", [1, 2, 4])
def test_predicting_and_converting_in_a_loop_comes_back(num_cores):
    if num_cores > AVAILABLE:
        pytest.skip(f"this machine lets a process choose among {AVAILABLE} cores")
    lines = lines_of(start_on(num_cores, [sys.executable, "-W", "ignore", WORKER, str(NUM_ROUNDS)]), PATIENCE)
    assert lines[-1] == f"round {NUM_ROUNDS - 1}", "\n".join(lines[-15:])


@pytest.mark.parametrize("version", STANDS_STILL)
def test_a_jaxlib_that_stands_still_is_told_of_where_threads_are_few(version):
    for num_threads in (1, 2, 4, ENOUGH_THREADS - 1):
        message = standstill_warning(version, num_threads)
        assert f"jaxlib {version} can stand still" in message and f"NPROC={ENOUGH_THREADS}" in message
    assert standstill_warning(version, ENOUGH_THREADS) is None


@pytest.mark.parametrize("version", COMES_BACK)
def test_a_jaxlib_that_comes_back_is_not_told_of(version):
    assert standstill_warning(version, 1) is None


@pytest.mark.parametrize("package", ["jax", "jaxlib"])
def test_what_is_told_of_is_what_the_installation_excludes(package):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = [r for r in map(Requirement, project["dependencies"]) if r.name == package]
    assert [v for v in STANDS_STILL + COMES_BACK if v not in needed.specifier] == STANDS_STILL
    message = standstill_warning("0.10.2", 2)
    for excluded in needed.specifier:
        assert excluded.operator != "!=" or str(excluded) in message


@pytest.mark.skipif(not AVAILABLE, reason="this system cannot restrict a process to some cores")
@pytest.mark.parametrize(("settings", "is_told"), [({}, True), ({"NPROC": "32"}, False)])
def test_importing_the_package_tells_once_and_tells_the_importer(settings, is_told):
    program = (
        "import importlib, os, warnings, jax, jaxlib\n"
        "os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])\n"
        "jaxlib.__version__ = '0.10.2'\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    import numpyro_wide, numpyro_wide.readout, numpyro_wide.mcmc\n"
        "    importlib.import_module('numpyro_wide')\n"
        "print([warning.filename for warning in caught if 'stand still' in str(warning.message)])"
    )
    command = [sys.executable, "-W", "ignore::FutureWarning", "-c", program]
    found = subprocess.run(command, env=environment(**settings), capture_output=True, text=True, timeout=300)
    assert found.stdout.strip() == ("['<string>']" if is_told else "[]"), found.stderr
