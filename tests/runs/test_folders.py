"""Folders of runs in pieces that are killed, shared, damaged, or full: the draws of a run in one, or an error."""

import errno
import os
import shutil
import signal
import subprocess
import time
from multiprocessing import get_context
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS, Gibbs

from numpyro_wide.mcmc import MicrocanonicalLangevin, SplitHMC
from numpyro_wide.runs import StoredDraws, _pieces, run_in_pieces
from tests.marks import parametrize
from tests.runs.worker import FIELDS, Y, chains, hold, normals, run_in_turns, short_run


@pytest.fixture(scope="module")
def processes():
    """A context whose processes begin with everything imported."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.runs.worker"])
    return context


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


def in_one(num_samples, y=Y):
    """The same chains, run at once."""
    mcmc = chains(num_samples)
    mcmc.warmup(jax.random.key(0), y)
    mcmc.run(mcmc.post_warmup_state.rng_key, y)
    return mcmc.get_samples(group_by_chain=True)["mean"]


def num_stored(folder):
    try:
        return StoredDraws(folder).num_samples
    except FileNotFoundError:
        return 0


def written(folder):
    """When a state was last written."""
    state = folder / "state.npz"
    return state.stat().st_mtime_ns if state.exists() else 0


def stored(folder):
    return StoredDraws(folder).get_samples(group_by_chain=True)["mean"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of 20 draws."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    short_run(folder, 20)
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_bit_for_bit(processes, cache, tmp_path):
    folder, capacity = tmp_path / "run", 100_000
    rng, seen = np.random.default_rng(20), []
    short_run(tmp_path / "other", 5, cache=cache)  # so that it is compiled
    for kill in range(20):
        process = processes.Process(target=short_run, args=(folder, capacity), kwargs={"cache": cache})
        process.start()
        if kill % 5 != 4:  # else somewhere on the way to the first new piece
            before, deadline = written(folder), time.monotonic() + 60
            while written(folder) == before and process.is_alive() and time.monotonic() < deadline:
                time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.4))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        seen.append(num_stored(folder))
    assert seen == sorted(seen) and 0 < seen[-1] < capacity
    total = seen[-1] + 10
    found = short_run(folder, total, cache=cache).get_samples(group_by_chain=True)["mean"]
    np.testing.assert_array_equal(found, in_one(total))


@pytest.mark.fault("runs/_pieces.py", '"run.lock"', 'f"{os.getpid()}.lock"')
@pytest.mark.slow
def test_a_second_process_is_refused(processes, folder):
    is_held = processes.Event()
    process = processes.Process(target=hold, args=(folder, is_held), daemon=True)  # ends with a test that fails
    process.start()
    assert is_held.wait(60)
    before = stored(folder).copy()
    with pytest.raises(RuntimeError, match="is in use by another run.*another folder"):
        short_run(folder, 40)
    np.testing.assert_array_equal(stored(folder), before)
    os.kill(process.pid, signal.SIGKILL)  # which leaves the file behind, but not the lock
    process.join()
    np.testing.assert_array_equal(short_run(folder, 40).get_samples(group_by_chain=True)["mean"], in_one(40))


@pytest.mark.slow
def test_processes_that_take_turns_make_one_run(processes, cache, tmp_path):
    folder, refusals = tmp_path / "run", processes.Queue()
    totals = range(20, 101, 20)
    short_run(tmp_path / "other", 5, cache=cache)
    workers = [processes.Process(target=run_in_turns, args=(folder, totals, cache, refusals)) for _ in range(2)]
    for worker in workers:
        worker.start()
    counts = [refusals.get(timeout=400) for _ in workers]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert sum(counts) > 0
    np.testing.assert_array_equal(stored(folder), in_one(100))


def truncate(path):
    os.truncate(path, path.stat().st_size - 30)


def empty(path):
    os.truncate(path, 0)


def zero(path):
    content = path.read_bytes()
    path.write_bytes(content[:200] + bytes(len(content) - 200))


def flip(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"NUMPY") + 150] ^= 4  # among the numbers of the first array
    path.write_bytes(content)


def something_else(path):
    np.save(path.with_suffix(""), np.ones((2, 3)))
    os.replace(path.with_suffix("").with_suffix(".npy"), path)


DRAWS, STATE = "samples%2Fmean.npy", "state.npz"


@pytest.mark.as_compiled
@parametrize("damage", [truncate, empty, zero, flip, something_else, os.remove], rest="slow")
@parametrize("file", [DRAWS, STATE], rest="slow")
def test_damaged_files_are_refused_with_path_and_remedy(folder, file, damage):
    damage(folder / file)
    attempts = [lambda: short_run(folder, 20), lambda: short_run(folder, 40), lambda: stored(folder)]
    is_missing = file == STATE and damage is os.remove  # then the folder is one of a run that has not begun
    for attempt in [] if is_missing else attempts:
        with pytest.raises(ValueError, match=rf"{file} is missing, damaged.*from a copy.*another folder"):
            attempt()


@pytest.mark.slow
def test_draws_are_stored_once(tmp_path):
    first = short_run(tmp_path, 10).get_samples(group_by_chain=True)["mean"]
    files = {path.name: path.stat().st_size for path in tmp_path.glob("*.npy")}
    assert files[DRAWS] == 128 + first.nbytes  # and NumPy's header
    before = set(tmp_path.iterdir())
    StoredDraws(tmp_path).get_samples()
    assert set(tmp_path.iterdir()) == before
    assert Path(first.filename).name == DRAWS  # mapped where it is
    np.testing.assert_array_equal(short_run(tmp_path, 20).get_samples(group_by_chain=True)["mean"], in_one(20))
    np.testing.assert_array_equal(first, in_one(20)[:, :10])  # of a file that has grown since


def test_a_file_of_something_else_is_told(tmp_path):
    np.savez(tmp_path / STATE, ends=np.array([0]))
    with pytest.raises(ValueError, match=rf"{STATE} is .* no file of run_in_pieces.*another folder"):
        short_run(tmp_path, 20)


@pytest.mark.fault("runs/_pieces.py", "mcmc.post_warmup_state = None", "pass")
@pytest.mark.slow
def test_an_interrupted_run_leaves_the_next_one_its_warmup(tmp_path, monkeypatch):
    mcmc, append = chains(5), _pieces._append

    def interrupted(path, draws, start, total):
        if start == 5:
            signal.raise_signal(signal.SIGINT)
        return append(path, draws, start, total)

    monkeypatch.setattr(_pieces, "_append", interrupted)
    # A suite that runs in the background of a shell has been told to ignore the key.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_pieces(mcmc, tmp_path, jax.random.key(0), Y, num_samples=20, extra_fields=FIELDS, progress_bar=False)
    finally:
        signal.signal(signal.SIGINT, before)
        monkeypatch.undo()
    assert mcmc.post_warmup_state is None
    mcmc.run(jax.random.key(1), Y + 500)
    np.testing.assert_allclose(np.mean(mcmc.get_samples()["mean"][:, 1] ** 2), 500, atol=50)
    assert num_stored(tmp_path) == 5
    np.testing.assert_array_equal(short_run(tmp_path, 20).get_samples(group_by_chain=True)["mean"], in_one(20))


FIXED = {"adapt_step_size": False, "find_heuristic_step_size": False}


@pytest.mark.fault("runs/_pieces.py", "_hash(sampler)", '""')
@parametrize(
    ("kernel", "first", "second"),
    [
        (SplitHMC, FIXED | {"step_size": 0.1}, FIXED | {"step_size": 0.2}),
        (MicrocanonicalLangevin, FIXED | {"step_size": 0.1}, FIXED | {"step_size": 0.2}),
        (NUTS, {"adapt_step_size": False, "step_size": 0.1}, {"adapt_step_size": False, "step_size": 0.2}),
        (
            NUTS,
            {"adapt_mass_matrix": False, "inverse_mass_matrix": jnp.array([1.0, 2.0])},
            {"adapt_mass_matrix": False, "inverse_mass_matrix": jnp.array([1.0, 3.0])},
        ),
    ],
    rest="slow",
)
def test_settings_that_are_not_adapted_belong_to_the_run(tmp_path, kernel, first, second):
    def run(mcmc, num_samples):
        return run_in_pieces(mcmc, tmp_path, jax.random.key(0), Y, num_samples=num_samples, progress_bar=False)

    mcmc, other = (MCMC(kernel(normals, **options), num_warmup=2, num_samples=2) for options in (first, second))
    run(mcmc, 2)
    with pytest.raises(ValueError, match="is of a run with another setting of the kernel.*; pass the same one"):
        run(other, 4)
    assert run(mcmc, 4).num_samples == 4  # what a kernel has made for itself is none of its settings


@pytest.mark.as_compiled
def test_settings_of_the_blocks_of_gibbs_belong_to_the_run(tmp_path):
    def model(y):
        a, b = (numpyro.sample(name, dist.Normal(0, 1)) for name in "ab")
        numpyro.sample("y", dist.Normal(a + b**2, 1).expand([3]).to_event(1), obs=y)

    def run(step_size, num_samples):
        kernels = [NUTS(model, step_size=size, adapt_step_size=False) for size in (0.1, step_size)]
        gibbs = Gibbs([(kernels[0], ["a"]), (kernels[1], ["b"])])
        mcmc = MCMC(gibbs, num_warmup=2, num_samples=2)
        return run_in_pieces(mcmc, tmp_path, jax.random.key(0), Y, num_samples=num_samples, progress_bar=False)

    run(0.1, 2)
    with pytest.raises(ValueError, match="is of a run with another setting of the kernel"):
        run(0.2, 4)
    assert run(0.1, 4).num_samples == 4


def typed(z):
    half, nothing = z["z"].astype(jnp.bfloat16), jnp.zeros((0, 3))
    return {"z": z["z"], "half": half, "phase": jnp.exp(1j * z["z"]), "is": z["z"] > 0, "file": nothing}


def run_typed(folder, to_sites, **options):
    kernel = SplitHMC(potential_fn=lambda z: 0.5 * jnp.sum(z["z"] ** 2))
    mcmc = MCMC(kernel, num_warmup=2, num_samples=2, postprocess_fn=to_sites)
    start = {"z": jnp.array([0.3, -1.0])}
    return run_in_pieces(
        mcmc, folder, jax.random.key(0), num_samples=4, init_params=start, progress_bar=False, **options
    )


def test_every_type_of_number_is_stored_as_it_is(tmp_path):
    found = run_typed(tmp_path, typed).get_samples()
    expected = jax.vmap(typed)({"z": jnp.asarray(found["z"])})
    for name, values in expected.items():
        assert found[name].dtype == values.dtype and isinstance(found[name], np.memmap) == (values.size > 0)
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(values))


def test_what_is_no_number_is_refused_before_the_warmup(tmp_path, monkeypatch):
    monkeypatch.setattr(MCMC, "warmup", None)
    with pytest.raises(TypeError, match=r"arrays of numbers, but 'key' is .*store jax.random.key_data"):
        run_typed(tmp_path, lambda z: {"key": jax.random.key(0)})
    with pytest.raises(TypeError, match=r"arrays of numbers, but 'rng_key' is"):
        run_typed(tmp_path, typed, extra_fields=("rng_key",))


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 400 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None or os.geteuid():
        pytest.skip("only the superuser mounts a disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("disks cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
def test_a_full_disk_is_told_and_once_there_is_room_the_run_goes_on(small_disk):
    run = small_disk / "run"
    short_run(run, 10)
    before = np.array(stored(run))
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(512))
    with pytest.raises(OSError, match=r"(?s)No space left on device.*cannot be written.*call again.*reduced"):
        short_run(run, 40)
    assert num_stored(run) == 10 and not list(run.glob("*.unfinished"))
    filler.unlink()
    np.testing.assert_array_equal(stored(run), before)
    np.testing.assert_array_equal(short_run(run, 40).get_samples(group_by_chain=True)["mean"], in_one(40))


@pytest.mark.slow
def test_a_disk_that_fills_up_between_two_pieces_loses_the_second_alone(tmp_path, monkeypatch):
    replace, states = os.replace, []

    def full(source, target):
        if target.name == STATE:
            states.append(target)
            if len(states) == 3:  # warmup, piece, piece
                raise OSError(errno.ENOSPC, "full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"(?s)full.*state.npz cannot be written.*call again"):
        short_run(tmp_path, 20)
    assert num_stored(tmp_path) == 5
    np.testing.assert_array_equal(short_run(tmp_path, 20).get_samples(group_by_chain=True)["mean"], in_one(20))
