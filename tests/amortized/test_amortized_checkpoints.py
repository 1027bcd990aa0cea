"""A checkpoint is resumed by its own run alone, and one that cannot be read says so."""

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.contrib.module import flax_module

from numpyro_wide import AmortizedForwardKL, _resume, natural
from numpyro_wide import _compile as _programs
from studies._scaled_relu import ScaledReLU, inverse_time_schedule

ROOT = Path(__file__).parents[2]
KEY = jax.random.key(3)
MIDDLE = np.array([0.5, -0.5], np.float32)
positive = dist.constraints.positive


def squashed_with(slope):
    """A function with a derivative of its own making."""

    @jax.custom_jvp
    def squashed(x):
        return jnp.tanh(x)

    squashed.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), slope * tangents[0]))
    return squashed


squashed = squashed_with(0.5)


def model_of(scale=1.0, middle=MIDDLE):
    def model(shift, num_rows=2):
        theta = numpyro.sample("theta", dist.Normal(jnp.asarray(middle) + shift, scale).to_event(1))
        with numpyro.plate("rows", num_rows):
            numpyro.sample("x", dist.Normal(theta, 0.5).to_event(1))

    return model


def guide_of(squash=squashed, support=positive):
    def guide(observed_values, shift, num_rows=2):
        encoder = flax_module("encoder", ScaledReLU(4, 2), input_shape=(2,))
        scale = numpyro.param("scale", 1.0, constraint=support)
        loc = squash(encoder(observed_values["x"].mean(0)))
        numpyro.sample("theta", dist.Normal(loc, scale).to_event(1))

    return guide


def run(path, num_steps=2, *, scale=1.0, middle=MIDDLE, squash=squashed, support=positive, rate=0.01, **options):
    """A run of a model and guide that are written anew at every call."""
    optim = options.pop("optim", optax.adam(inverse_time_schedule(rate)))
    trainer = AmortizedForwardKL(model_of(scale, middle), guide_of(squash, support), optim, observed="x", batch_size=3)
    shift = options.pop("shift", jnp.array(0.25))
    return trainer.run(KEY, num_steps, shift, checkpoint=path, progress_bar=False, **options)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "run.npz"
    run(path)
    return path


def test_the_same_code_goes_on(checkpoint):
    again = run(checkpoint)
    assert int(again.state.step) == len(again.losses) == 2


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"scale": 1.1}, "model"),
        ({"middle": np.array([0.5, -0.6], np.float32)}, "model"),
        ({"squash": squashed_with(0.6)}, "guide"),  # of equal values, but another derivative
        ({"support": dist.constraints.softplus_positive}, "guide"),
        ({"rate": 0.02}, "optimiser"),
        ({"optim": optax.adam(0.01)}, "optimiser"),  # as the one before, but for its schedule
        ({"optim": optax.inject_hyperparams(optax.adam)(learning_rate=0.01)}, "optimiser"),
        ({"optim": numpyro.optim.Adam(0.01)}, "optimiser"),
        ({"shift": jnp.array(0.5)}, "arguments"),
        ({"num_rows": 3}, "arguments"),
        ({"held_out": 5}, "held_out"),
    ],
    ids=[
        "scale",
        "middle",
        "squash",
        "support",
        "rate",
        "schedule",
        "injected",
        "library",
        "shift",
        "num_rows",
        "held_out",
    ],
)
def test_another_run_is_refused(checkpoint, change, what):
    before = checkpoint.read_bytes()
    with pytest.raises(ValueError, match=rf"run\.npz is of a run with another {what}; pass the same.* another path"):
        run(checkpoint, 4, **change)
    assert checkpoint.read_bytes() == before


def test_a_setting_that_an_optimiser_keeps_in_its_state_counts(tmp_path):
    path, injected = tmp_path / "run.npz", optax.inject_hyperparams(optax.sgd)
    run(path, optim=injected(learning_rate=0.01))
    with pytest.raises(ValueError, match="another optimiser"):
        run(path, optim=injected(learning_rate=0.02))


def test_where_libraries_have_changed_programs_are_not_compared(checkpoint, tmp_path, monkeypatch):
    path = tmp_path / "run.npz"
    path.write_bytes(checkpoint.read_bytes())
    monkeypatch.setattr(_resume, "_version", lambda name: "99")
    with pytest.warns(UserWarning, match=r"other versions .*its model cannot be compared.*make sure") as caught:
        assert int(run(path, 4, scale=1.1).state.step) == 4
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match="another arguments"):
        run(path, 4, shift=jnp.array(0.5))


IN_ANOTHER_PROCESS = """
import sys
from tests.amortized.test_amortized_checkpoints import checks_of_a_process
checks_of_a_process(sys.argv[1])
"""


def checks_of_a_process(path):
    """Go on from what another process began, and refuse it where something is not the same."""
    result = run(Path(path), 4)
    with pytest.raises(ValueError, match="another optimiser"):
        run(Path(path), 4, rate=0.02)
    print(result.losses.tolist())


def test_another_process_goes_on_to_the_last_bit(checkpoint, tmp_path):
    path = tmp_path / "run.npz"
    path.write_bytes(checkpoint.read_bytes())
    # Names are hashed in another order there, and everything lies at other addresses.
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-W", "ignore", "-c", IN_ANOTHER_PROCESS, str(path)]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == str(run(tmp_path / "uninterrupted.npz", 4).losses.tolist())


def saved(function, *args, **kwargs):
    file = io.BytesIO()
    function(file, *args, **kwargs)
    return file.getvalue()


def archive(file):
    with zipfile.ZipFile(file, "w") as written:
        written.writestr("notes.txt", "not an array")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data[:300] + bytes([data[300] ^ 1]) + data[301:],
        lambda data: b"no archive",
        lambda data: saved(np.save, np.ones(3)),
        lambda data: saved(np.savez, x=np.ones(3)),
        lambda data: saved(np.savez, x=np.array([{}], object)),
        lambda data: saved(archive),
    ],
    ids=["empty", "half", "one byte short", "one bit flipped", "text", "npy", "other npz", "objects", "other zip"],
)
def test_what_is_no_checkpoint_is_refused(checkpoint, tmp_path, damage):
    path = tmp_path / "damaged.npz"
    path.write_bytes(damage(checkpoint.read_bytes()))
    with pytest.raises(ValueError, match=r"damaged\.npz is no checkpoint, or a damaged one.*delete it") as caught:
        run(path)
    assert "pickle" not in str(caught.value) and caught.value.__context__ is None


def test_a_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=rf"{tmp_path.name} is a folder; pass the path of a file, such as .*run\.npz"):
        run(tmp_path)


def test_programs_of_natural_families_with_control_flow_have_a_digest():
    """Loops, branches and constants inside of programs count, addresses and the order of names do not."""

    def program(bound, constant):
        def function(x):
            loop = jax.lax.fori_loop(0, bound, lambda i, y: jnp.where(y > 0, squashed(y), y - constant), x)
            return jax.lax.cond(x[0] > 0, lambda: natural.VonMises(loop).log_prob(0.1), lambda: jnp.sum(loop))

        return function

    x, constant = jnp.ones(2), np.array([1.0, 2.0], np.float32)
    same = _programs.program_digest(program(3, constant), x)
    assert same == _programs.program_digest(program(3, constant.copy()), x)
    others = [program(4, constant), program(3, constant + 1e-6)]
    assert len({same, *(_programs.program_digest(other, x) for other in others)}) == 3
    assert _programs.digest({"a": 1, "b": {"x", "y"}}) == _programs.digest({"b": {"y", "x"}, "a": 1})
    assert _programs.digest(object(), lambda: 1) == _programs.digest(object(), lambda: 2)  # at other addresses
    assert _programs.digest(jax.random.key(0)) != _programs.digest(jax.random.key(1))
