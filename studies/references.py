"""Reference posteriors of Bayesian networks: members are sampled by two samplers, compared, and stored as functions.

Observables of each sampler are kept in --output, so that a member that was interrupted goes on with the second. What
the chains agree in is the certificate, whose thresholds are in _certificate.py; arrays and a card go to --store whether
or not it is granted, and the card says so. Scores by them: score_references.py.

    python studies/references.py --member yacht
"""

import inspect
import json
import platform
from functools import partial
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.handlers import seed, trace
from tqdm.auto import tqdm

import _certificate
import _common
from _members import MEMBERS, Member, fixed_inputs, rows_of
from _reference_samplers import NUM_CHAINS, by_hand, evaluation, latent, run, with_readout_by_hand, wrapped
from numpyro_wide.mcmc import MicrocanonicalLangevin
from score_references import log_density

STORE = Path(__file__).parent / "references"
NUM_STORED = 2000  # draws, half of them of each sampler
NOT_STORED = (*_certificate.OWN, *_certificate.NOT_LOOKED_AT)
RANKED = 5  # inputs whose function is ranked, of simulation-based calibration
NUM_RANKED, THINNING, NUM_WARMUP = 99, 4, 300  # draws that they are ranked among


def chains(name: str, sampler: str, lengths: tuple[int, int], folder: Path) -> dict[str, np.ndarray]:
    """Run a sampler, or read what it left."""
    path = folder / f"{name}_{sampler.replace(' ', '_')}_{lengths[0]}_{lengths[1]}.npz"
    if not path.exists():
        key = jax.random.key(int(sampler != "microcanonical"))
        found = run(MEMBERS[name], rows_of(name), fixed_inputs(name).inputs, sampler, lengths, key)
        np.savez(path, **found)
    with np.load(path) as file:
        return {key: file[key] for key in file}


def ranks(member: Member, rows, inputs, num_simulations: int) -> np.ndarray:
    """Return ranks of function values and the log density among draws, on data that the model simulates, (n, ranks).

    Chains start at the truth, which is a draw of its posterior: warmup has no way to go, but the step size to find.
    """
    inputs, x = inputs[np.linspace(0, len(inputs) - 1, RANKED).astype(int)], jnp.asarray(rows.x)
    model, evaluate = wrapped(member), evaluation(member.model)
    kernel = MicrocanonicalLangevin(model)

    @jax.jit
    def of_simulation(key):
        keys = jax.random.split(key, 3)
        sites = trace(seed(member.model, keys[0])).get_trace(x)
        y, values = sites["y"]["value"], {name: site["value"] for name, site in sites.items()}
        is_collapsed = model is not member.model
        truth, start = latent(member, rows, values), latent(member, rows, values, *["readout"] * is_collapsed)

        def advance(state, num_steps):
            return jax.lax.fori_loop(0, num_steps, lambda _, state: kernel.sample(state, (x, y), {}), state)

        def thinned(state, _):
            state = advance(state, THINNING)
            return state, state.z

        state = advance(kernel.init(keys[1], NUM_WARMUP, start, (x, y), {}), NUM_WARMUP)
        _, draws = jax.lax.scan(thinned, state, length=NUM_RANKED)
        if is_collapsed:
            draws = with_readout_by_hand(by_hand(member.model, x, y)[1], draws, keys[2])
        exact = evaluate(jax.tree.map(lambda value: value[None], truth), inputs, x, y)
        ours = evaluate(draws, inputs, x, y)
        return jnp.concatenate([jnp.sum(ours[of] < exact[of], 0).ravel() for of in ("function", "log_density")])

    keys = tqdm(jax.random.split(jax.random.key(1000), num_simulations), desc="simulations")
    return np.array([of_simulation(key) for key in keys])


def calibration(name: str, num_simulations: int, folder: Path) -> float:
    """Return the least p-value of uniform ranks, times their number, of a calibration that is run, or read."""
    path = folder / f"{name}_ranks_{num_simulations}.npy"
    if not path.exists():
        np.save(path, ranks(MEMBERS[name], rows_of(name), fixed_inputs(name).inputs, num_simulations))
    return _certificate.p_value(np.load(path), NUM_RANKED)


def stored(name: str, runs: dict[str, dict]) -> dict[str, np.ndarray]:
    """Return the arrays of a member: data, fixed inputs, draws in random order, and moments of all draws."""
    inputs, rows = fixed_inputs(name), rows_of(name)
    half = min(NUM_STORED // 2, *(values["gradients"].size for values in runs.values()))
    order = np.random.default_rng(0).permutation(2 * half)
    arrays = {"x": rows.x, "y": rows.y, **inputs._asdict(), "sampler": (order >= half).astype(np.int8)}
    first = next(iter(runs.values()))
    shared = set.intersection(*map(set, runs.values())) - set(NOT_STORED)
    for key in (key for key in first if key in shared and not _certificate.is_constant(first[key])):
        thin = [_certificate.thinned(values[key], half) for values in runs.values()]
        arrays[key] = np.concatenate(thin)[order].reshape(-1, *first[key].shape[2:])
    if extra := MEMBERS[name].extra:
        arrays[extra] = arrays[extra][:, inputs.kind == 2].astype(np.float16)
    if "noise" in first:
        arrays.setdefault("noise", np.repeat(first["noise"].ravel()[:1], 2 * half))
    pooled = np.concatenate([values["function"].reshape(-1, *first["function"].shape[2:]) for values in runs.values()])
    arrays |= {"mean": pooled.mean(0), "deviation": pooled.std(0)}
    draws, noise = np.asarray(arrays["function"], float), arrays.get("noise")
    arrays["log_density_test"] = log_density(arrays, draws, noise, MEMBERS[name].likelihood)
    return {key: value.astype(np.float32) if value.dtype == float else value for key, value in arrays.items()}


def card(name: str, runs: dict[str, dict], lengths: list[tuple[int, int]], diagnostics: dict[str, float]) -> dict:
    """Describe a member as posteriordb does, with its certificate."""
    member, rows = MEMBERS[name], rows_of(name)
    sites = trace(seed(member.model, 0)).get_trace(jnp.asarray(rows.x))
    shapes = {key: site["value"].size for key, site in sites.items() if site["type"] == "sample" and key != "y"}
    model = member.model.func if isinstance(member.model, partial) else member.model
    options = member.model.keywords if isinstance(member.model, partial) else {}
    inference = [
        {
            "method": sampler,
            "chains": NUM_CHAINS,
            "warmup": length[0],
            "draws": length[1],
            "seed": number,
            "gradients_a_draw": round(float(np.mean(found["gradients"])), 1),
            "acceptance": round(float(np.mean(found["accepts"])), 3),
            "processor_seconds": round(float(found["seconds"])),
        }
        for number, ((sampler, found), length) in enumerate(zip(runs.items(), lengths, strict=True))
    ]
    return {
        "name": name,
        "title": member.title,
        "keywords": ["bayesian neural network", member.likelihood],
        "model_name": model.__name__,
        "model_options": options,
        "code": inspect.getsource(model),
        "helpers": "studies/_members.py",
        "reference_posterior_name": f"{name}.npz",
        "references": list(member.references),
        "data_name": member.data,
        "data_licence": member.licence,
        "rows": len(rows.y),
        "columns": rows.x.shape[1],
        "likelihood": member.likelihood,
        "dimensions": {key: int(size) for key, size in shapes.items()},
        "inference": inference,
        "diagnostics": {key: round(value, 4) for key, value in diagnostics.items()},
        "thresholds": {key: value for key, value in vars(_certificate).items() if key in _certificate.THRESHOLDS},
        **_certificate.verdict(diagnostics),
        "versions": {"python": platform.python_version()}
        | {of: version(of) for of in ("jax", "numpyro", "numpyro_wide")},
    }


def main(options):
    """Sample members, and store them."""
    options.store.mkdir(parents=True, exist_ok=True)
    for name in options.member:
        member = MEMBERS[name]
        lengths = [tuple(options.first or member.first), tuple(options.second or member.second)]
        runs = {
            sampler: chains(name, sampler, length, options.output)
            for sampler, length in zip(("microcanonical", member.sampler), lengths, strict=True)
        }
        diagnostics = _certificate.certify(*runs.values())
        if options.simulations:
            p_value = calibration(name, options.simulations, options.output)
            diagnostics |= {"calibration_p": p_value, "simulations": options.simulations}
        np.savez_compressed(options.store / f"{name}.npz", **stored(name, runs))
        described = card(name, runs, lengths, diagnostics)
        (options.store / f"{name}.json").write_text(
            json.dumps(described, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        print(f"{name}: {'certified' if described['certified'] else 'open'}, {described['diagnostics']}", flush=True)


if __name__ == "__main__":
    numpyro.enable_x64()
    length = {"type": int, "nargs": 2, "metavar": ("WARMUP", "DRAWS"), "help": "of each chain; the member's by default"}
    main(
        _common.arguments(
            __doc__,
            member={"nargs": "+", "default": list(MEMBERS), "choices": list(MEMBERS)},
            first=length,
            second=length,
            simulations=(0, "of simulation-based calibration"),
            store={"type": Path, "default": STORE, "help": "folder for arrays and cards"},
        )
    )
