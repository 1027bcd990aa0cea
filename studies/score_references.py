"""Scores of an approximation by a stored reference posterior, with NumPy alone: the same functions at the same inputs.

An approximation is a file of numpy.savez: "function", draws of the function at the reference's "inputs" (draws, m), of
ten logits (draws, m, 10), and, where the likelihood is Normal, "noise" (draws,) or (draws, m). What to fit are the
reference's "x" and "y"; the model is in the card beside it. Without --draws one half of each reference is scored by the
other: the scores of an exact method with half of the draws.

    python studies/score_references.py --member yacht --draws mine.npz
"""

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "references"
COLUMNS = ("mean_error", "deviation_error", "coverage_90", "c2st", "log_density_gap")
NUM_DIRECTIONS, NUM_UNITS, NUM_FOLDS = 10, 200, 5  # of the classifier
RIDGE = 1.0
FEWEST_DRAWS = 100  # of fewer a classifier tells by chance


def load(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """Read a reference: its arrays by name, and its card."""
    with np.load(folder / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file}
    return {**arrays, "card": json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))}


def scores(reference: dict[str, Any], function: Any, noise: Any = None) -> dict[str, float]:
    """Score draws of the function, (draws, m) or (draws, m, k), by those of a reference.

    Args:
        reference: arrays of :func:`load`; draws of its own beside "likelihood", or its card, "kind" and "targets".
        function: draws at the reference's inputs.
        noise: standard deviations that belong to the draws, where the likelihood is Normal.

    Returns:
        Root mean squares over inputs of the errors of mean and standard deviation, in the reference's deviations; the
        share of the reference in central intervals of 90 %; the accuracy of a classifier, 0.5 where it can tell
        nothing, and less for copies of the reference's own draws; and the mean log density of the test rows less the
        reference's, in nats a row.

    Raises:
        ValueError: of fewer than a hundred draws, other shapes, numbers that are not finite, or a noise that is not
            positive.
    """
    likelihood = reference["card"]["likelihood"]
    exact, draws = (centred(np.asarray(part, float), likelihood) for part in (reference["function"], function))
    if draws.shape[1:] != exact.shape[1:] or len(draws) < FEWEST_DRAWS:
        expected = ", ".join(map(str, ["draws", *exact.shape[1:]]))
        raise ValueError(
            f"function must have shape ({expected}) with {FEWEST_DRAWS} draws at least, not {draws.shape}."
        )
    if not np.isfinite(draws).all():
        raise ValueError(f"function must be finite, but {np.sum(~np.isfinite(draws))} of its numbers are not.")
    deviation = exact.std(0)
    low, high = np.quantile(draws, (0.05, 0.95), axis=0)
    ours = log_density(reference, draws, noise, likelihood)
    theirs = log_density(reference, exact, reference.get("noise"), likelihood)
    return {
        "mean_error": rms((draws.mean(0) - exact.mean(0)) / deviation),
        "deviation_error": rms(draws.std(0) / deviation - 1),
        "coverage_90": float(np.mean((low <= exact) & (exact <= high))),
        "c2st": c2st(draws.reshape(len(draws), -1), exact.reshape(len(exact), -1)),
        "log_density_gap": float(np.mean(ours - theirs)),
    }


def rms(values: np.ndarray) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.square(values))))


def centred(function: np.ndarray, likelihood: str) -> np.ndarray:
    """Leave out of several logits what all share, which no data see."""
    return function - function.mean(-1, keepdims=True) if likelihood == "categorical" else function


def log_density(reference: dict[str, Any], function: np.ndarray, noise: Any, likelihood: str) -> np.ndarray:
    """Return the log density of the test rows under the mixture over draws, NaN without a noise that is needed."""
    is_test = reference["kind"] == 1
    function, targets = function[:, is_test], reference["targets"][is_test]
    if likelihood == "bernoulli":
        terms = -np.logaddexp(0, np.where(targets == 1, -function, function))
    elif likelihood == "categorical":
        log_probs = function - np.logaddexp.reduce(function, axis=-1, keepdims=True)
        terms = np.take_along_axis(log_probs, targets.astype(int)[None, :, None], -1)[..., 0]
    elif noise is None:
        return np.full(len(targets), np.nan)
    else:
        noise = np.asarray(noise, float)
        if noise.shape not in ((len(function),), (len(function), len(is_test))) or not (noise > 0).all():
            raise ValueError(
                f"noise must be positive, of shape ({len(function)},) or ({len(function)}, {len(is_test)}), but has "
                f"shape {noise.shape} and least value {noise.min(initial=np.inf):.3g}."
            )
        noise = noise[:, is_test] if noise.ndim == 2 else noise[:, None]
        terms = -0.5 * ((targets - function) / noise) ** 2 - np.log(noise) - 0.5 * np.log(2 * np.pi)
    return np.logaddexp.reduce(terms, axis=0) - np.log(len(terms))


def c2st(draws: np.ndarray, reference: np.ndarray, seed: int = 0) -> float:
    """Tell draws (n, p) from a reference's by a classifier, and return its accuracy on rows left out.

    Draws are seen in the ten leading principal directions of both together, whitened: those of one alone would be where
    it happens to vary most, which tells equal laws apart. The classifier is linear, by ridge regression, in these,
    their products and 200 random tanh units of them.
    """
    rng = np.random.default_rng(seed)
    count = min(len(draws), len(reference))
    draws, reference = (part[rng.permutation(len(part))[:count]] for part in (draws, reference))
    pooled = np.concatenate([draws, reference])
    scale = pooled.std(0)
    standardised = (pooled - pooled.mean(0)) / np.where(scale > 0, scale, 1.0)
    left, sizes, _ = np.linalg.svd(standardised, full_matrices=False)
    z = left[:, (sizes > 1e-6 * sizes[0]) & (np.arange(len(sizes)) < NUM_DIRECTIONS)] * len(pooled) ** 0.5
    first, second = np.triu_indices(z.shape[1])
    units = np.tanh(z @ rng.normal(size=(z.shape[1], NUM_UNITS)) / z.shape[1] ** 0.5 + rng.normal(size=NUM_UNITS))
    features = np.concatenate([np.ones((len(z), 1)), z, z[:, first] * z[:, second], units], axis=1)
    labels, fold = np.repeat([-1.0, 1.0], count), rng.permutation(2 * count) % NUM_FOLDS
    right = 0
    for number in range(NUM_FOLDS):
        seen, out = features[fold != number], features[fold == number]
        gram = seen.T @ seen + RIDGE * np.eye(seen.shape[1])
        right += np.sum(
            (out @ np.linalg.solve(gram, seen.T @ labels[fold != number]) > 0) == (labels[fold == number] > 0)
        )
    return float(right / (2 * count))


def halves(reference: dict[str, Any]) -> dict[str, float]:
    """Score the first half of a reference's draws by the second."""
    of_draws = [name for name in ("function", "noise") if name in reference]
    half = len(reference["function"]) // 2
    exact = {**reference, **{name: reference[name][half:] for name in of_draws}}
    return scores(exact, *(reference[name][:half] for name in of_draws))


def main() -> None:
    """Score a file, or the halves of all references."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--member", nargs="+", help="names of references; all by default")
    parser.add_argument("--draws", type=Path, help="file of numpy.savez with the approximation to one member")
    parser.add_argument("--references", type=Path, default=FOLDER, help="folder of the references")
    parser.add_argument("--output", type=Path, default=Path("figures"), help="folder for the table")
    options = parser.parse_args()
    if options.draws and len(options.member or ()) != 1:
        parser.error("--draws needs the one --member that it approximates.")
    rows, names = [], sorted(path.stem for path in options.references.glob("*.npz"))
    if unknown := sorted({*(options.member or ())}.difference(names)):
        parser.error(f"--member has {', '.join(unknown)}, but the references are {', '.join(names)}.")
    for name in options.member or names:
        reference = load(name, options.references)
        if options.draws:
            with np.load(options.draws) as file:
                if "function" not in file:
                    parser.error(f"--draws needs an array 'function', but has {', '.join(file)}.")
                found = scores(reference, file["function"], file.get("noise"))
        else:
            found = halves(reference)
        rows.append({"member": name, **{column: f"{found[column]:.4g}" for column in COLUMNS}})
        print(", ".join(f"{column} {value}" for column, value in rows[-1].items()), flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / "score_references.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ("member", *COLUMNS))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
