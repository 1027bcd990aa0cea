"""Folders of runs in pieces that are killed, shared, damaged, or full: the draws of a run in one, or an error."""

import os
import shutil
import signal
import socket
import subprocess
import time
from multiprocessing import get_context

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import MCMC, NUTS

from numpyro_wide import _resume
from numpyro_wide.mcmc import MicrocanonicalLangevin, SplitHMC
from numpyro_wide.runs import StoredDraws, run_in_pieces
from numpyro_wide.runs import _pieces as _files
from numpyro_wide.runs import _pieces as _stored_draws
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


@pytest.mark.slow
def test_a_second_process_is_refused_and_told_by_whom(processes, folder):
    is_held = processes.Event()
    process = processes.Process(target=hold, args=(folder, is_held))
    process.start()
    assert is_held.wait(60)
    before = stored(folder).copy()
    with pytest.raises(
        RuntimeError, match=rf"in use by process {process.pid} on {socket.gethostname()} since 2.*another folder"
    ):
        short_run(folder, 40)
    np.testing.assert_array_equal(stored(folder), before)
    os.kill(process.pid, signal.SIGKILL)  # which leaves its name behind, but not the lock
    process.join()
    np.testing.assert_array_equal(short_run(folder, 40).get_samples(group_by_chain=True)["mean"], in_one(40))
    assert not (folder / "run.holder.json").exists()


def test_a_holder_whose_name_is_not_there_yet(folder, processes):
    is_held = processes.Event()
    process = processes.Process(target=hold, args=(folder, is_held))
    process.start()
    assert is_held.wait(60)
    (folder / "run.holder.json").unlink()
    with pytest.raises(RuntimeError, match="in use by another process, which is just beginning or ending"):
        short_run(folder, 40)
    process.kill()
    process.join()


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


def lengthen(path):
    os.truncate(path, path.stat().st_size + 64)


def zero(path):
    content = path.read_bytes()
    path.write_bytes(content[:200] + bytes(len(content) - 200))


def flip(place):
    def damage(path):
        content = bytearray(path.read_bytes())
        content[place] ^= 4
        path.write_bytes(content)

    return damage


def rename(path):
    path.write_text(path.read_text().replace("mean", "lean"))


SAMPLES, INDEX, STATE = "samples_0.npy", "draws.json", "state.npz"


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (SAMPLES, truncate, "cannot be read as an array"),
        (SAMPLES, empty, "cannot be read as an array"),
        (SAMPLES, lengthen, "must have 448 bytes, but has 512"),
        (SAMPLES, zero, "its draws 0 to 4 are not those that were written there"),
        (SAMPLES, flip(-1), "its draws 15 to 19 are not those"),
        (SAMPLES, flip(3), "cannot be read as an array"),
        (SAMPLES, flip(22), "must hold float32 draws.*but is an array of|cannot be read"),
        (SAMPLES, os.remove, "cannot be read as an array"),
        (INDEX, truncate, "is missing or damaged"),
        (INDEX, rename, "another checksum than when it was written"),
        (INDEX, os.remove, "is missing or damaged"),
        (STATE, truncate, "is no checkpoint, or a damaged one"),
        (STATE, empty, "is no checkpoint, or a damaged one"),
    ],
)
def test_damaged_files_are_refused_with_path_and_remedy(folder, file, damage, message):
    damage(folder / file)
    for attempt in (lambda: short_run(folder, 20), lambda: short_run(folder, 40), lambda: stored(folder)):
        with pytest.raises(ValueError, match=rf"{file}.*({message}).*from a copy.*another (folder|path)"):
            attempt()


def test_damaged_fields_are_refused_when_they_are_read(folder):
    flip(-1)(folder / "extra_fields_0.npy")
    draws = StoredDraws(folder)
    assert draws.get_samples()["mean"].shape == (40, 2)
    with pytest.raises(ValueError, match="extra_fields_0.npy is damaged"):
        draws.get_extra_fields()


def test_a_file_with_room_for_fewer_draws_is_refused(folder):
    file = StoredDraws(folder)._index["samples"]["mean"]
    file.create(10)
    with pytest.raises(ValueError, match="must hold 20 draws of each chain, but holds 10"):
        stored(folder)


def test_a_checkpoint_of_something_else_is_told(tmp_path):
    np.savez(tmp_path / STATE, **{"['run']": "{}"})
    with pytest.raises(ValueError, match="it was not written by this version of run_in_pieces.*another folder"):
        StoredDraws(tmp_path)


@pytest.mark.slow
def test_an_interrupted_run_leaves_the_next_one_its_warmup(tmp_path, monkeypatch):
    mcmc, write, calls = chains(5), _stored_draws.Writer.write, []

    def interrupted(writer, groups):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        write(writer, groups)

    monkeypatch.setattr(_stored_draws.Writer, "write", interrupted)
    # A suite that runs in the background of a shell has been told to ignore the key.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_pieces(mcmc, tmp_path, jax.random.key(0), Y, num_samples=20, extra_fields=FIELDS, progress_bar=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert mcmc.post_warmup_state is None
    mcmc.run(jax.random.key(1), Y + 500)
    np.testing.assert_allclose(np.mean(mcmc.get_samples()["mean"][:, 1] ** 2), 500, atol=50)
    assert num_stored(tmp_path) == 5
    np.testing.assert_array_equal(short_run(tmp_path, 20).get_samples(group_by_chain=True)["mean"], in_one(20))


FIXED = {"adapt_step_size": False, "find_heuristic_step_size": False}
STILL = FIXED | {"adapt_mass_matrix": False, "adapt_momentum_length": False}


@pytest.mark.parametrize(
    ("kernel", "first", "second"),
    [
        (SplitHMC, FIXED | {"step_size": 0.1}, FIXED | {"step_size": 0.2}),
        (NUTS, {"adapt_step_size": False, "step_size": 0.1}, {"adapt_step_size": False, "step_size": 0.2}),
        (
            NUTS,
            {"adapt_mass_matrix": False, "inverse_mass_matrix": jnp.array([1.0, 2.0])},
            {"adapt_mass_matrix": False, "inverse_mass_matrix": jnp.array([1.0, 3.0])},
        ),
        (MicrocanonicalLangevin, STILL | {"momentum_length": 1.0}, STILL | {"momentum_length": 2.0}),
        (
            MicrocanonicalLangevin,
            STILL | {"inverse_mass_matrix": jnp.array([1.0, 2.0])},
            STILL | {"inverse_mass_matrix": jnp.array([1.0, 3.0])},
        ),
    ],
)
def test_settings_that_are_not_adapted_belong_to_the_run(tmp_path, kernel, first, second):
    def run(mcmc, num_samples):
        return run_in_pieces(mcmc, tmp_path, jax.random.key(0), Y, num_samples=num_samples, progress_bar=False)

    mcmc, other = (
        MCMC(kernel(normals, **options), num_warmup=2, num_samples=2, progress_bar=False) for options in (first, second)
    )
    run(mcmc, 2)
    with pytest.raises(ValueError, match="is of a run with another setting of the kernel; pass the same one"):
        run(other, 4)
    assert run(mcmc, 4).num_samples == 4  # what a kernel has made for itself is none of its settings


def typed(z):
    return {"z": z["z"], "half": z["z"].astype(jnp.bfloat16), "phase": jnp.exp(1j * z["z"]), "is": z["z"] > 0}


def run_typed(folder, to_sites, **options):
    kernel = SplitHMC(potential_fn=lambda z: 0.5 * jnp.sum(z["z"] ** 2))
    mcmc = MCMC(kernel, num_warmup=2, num_samples=2, postprocess_fn=to_sites, progress_bar=False)
    start = {"z": jnp.array([0.3, -1.0])}
    return run_in_pieces(
        mcmc, folder, jax.random.key(0), num_samples=4, init_params=start, progress_bar=False, **options
    )


def test_every_type_of_number_is_stored_as_it_is(tmp_path):
    found = run_typed(tmp_path, typed).get_samples()
    expected = jax.vmap(typed)({"z": jnp.asarray(found["z"])})
    for name, values in expected.items():
        assert found[name].dtype == values.dtype and isinstance(found[name], np.memmap)
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(values))


def test_what_is_no_number_is_refused_before_the_warmup(tmp_path, monkeypatch):
    monkeypatch.setattr(MCMC, "warmup", None)
    with pytest.raises(TypeError, match=r"site 'key' has the type key<fry>.*store jax.random.key_data"):
        run_typed(tmp_path, lambda z: {"key": jax.random.key(0)})
    with pytest.raises(TypeError, match=r"extra field 'rng_key' has the type key<fry>"):
        run_typed(tmp_path, typed, extra_fields=("rng_key",))


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 60 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None or os.geteuid():
        pytest.skip("only the superuser mounts a disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("disks cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
def test_a_full_disk_is_told_and_once_there_is_room_the_run_goes_on(small_disk, monkeypatch):
    run = small_disk / "run"
    with pytest.raises(OSError, match=r"no room for all draws: they take \d+ bytes, of which \d+ are free.*fewer"):
        short_run(run, 100_000)
    assert not (run / STATE).exists()  # nothing was run
    short_run(run, 10)
    before = stored(run).copy()
    with pytest.raises(OSError, match=r"no room for 5000 draws of shape .* and 2 chains \(No space left"):
        short_run(run, 5000)
    np.testing.assert_array_equal(stored(run), before)
    short_run(run, 20)
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(512))
    with pytest.raises(OSError, match=r"no room for 40 draws.*No space left on device"):
        short_run(run, 40)
    filler.unlink()
    np.testing.assert_array_equal(short_run(run, 40).get_samples(group_by_chain=True)["mean"], in_one(40))
    assert not list(run.glob("*.unfinished"))


def test_a_file_system_that_reserves_nothing_is_filled_with_zeros(tmp_path, monkeypatch):
    def unsupported(*args):
        raise OSError(_files.errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    short_run(tmp_path, 20)
    assert (tmp_path / SAMPLES).stat().st_blocks * 512 >= 2 * 20 * 2 * 4
    np.testing.assert_array_equal(stored(tmp_path), in_one(20))


@pytest.mark.slow
def test_a_disk_that_fills_up_between_two_pieces_loses_the_second_alone(tmp_path, monkeypatch):
    save, calls = _resume.save, []

    def full(*args):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(_files.errno.ENOSPC, "full")
        save(*args)

    monkeypatch.setattr(_resume, "save", full)
    with pytest.raises(OSError, match=r"no room for the state of the chains \(No space left on device\).*call again"):
        short_run(tmp_path, 20)
    assert num_stored(tmp_path) == 5
    np.testing.assert_array_equal(short_run(tmp_path, 20).get_samples(group_by_chain=True)["mean"], in_one(20))
