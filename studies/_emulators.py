"""Simulators of a public benchmark of emulators (2606.01427): functions on boxes, Sobol inputs, noise, sets of rows."""

from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.stats import qmc

from _data import Dataset

NUM_SETS, NUM_TEST = 20, 5000
_BUCKLING_LEVELS = ((73.1, 200.0), (0.5, 0.7, 1.0, 2.0), (9.49, 12.1, 29.5))  # moduli, fixities, moments of inertia
_WING_BOX = (
    *((150, 200), (220, 300), (6, 10), (-10, 10), (16, 45)),
    *((0.5, 1), (0.08, 0.18), (2.5, 6), (1700, 2500), (0.025, 0.08)),
)


def ackley(x):
    """Return Ackley's function of inputs (n, d)."""
    distance, waves = np.sqrt(np.mean(x**2, axis=1)), np.mean(np.cos(2 * np.pi * x), axis=1)
    return 20 - 20 * np.exp(-0.2 * distance) + np.e - np.exp(waves)


def dixon_price(x):
    """Return Dixon and Price's function of inputs (n, d)."""
    weights = np.arange(2, x.shape[1] + 1)
    return (x[:, 0] - 1) ** 2 + (2 * x[:, 1:] ** 2 - x[:, :-1]) ** 2 @ weights


def griewank(x):
    """Return Griewank's function of inputs (n, d)."""
    waves = np.cos(x / np.sqrt(np.arange(1, x.shape[1] + 1)))
    return np.sum(x**2, axis=1) / 4000 - np.prod(waves, axis=1) + 1


def rosenbrock(x):
    """Return Rosenbrock's function of inputs (n, d)."""
    return np.sum(100 * (x[:, 1:] - x[:, :-1] ** 2) ** 2 + (1 - x[:, :-1]) ** 2, axis=1)


def wing_weight(x):
    """Return the weight of a light aircraft's wing of inputs (n, 10)."""
    area, fuel, aspect, sweep, pressure, taper, thickness, load, gross, paint = x.T
    cosine = np.cos(np.deg2rad(sweep))
    shape = (aspect / cosine**2) ** 0.6 * pressure**0.006 * taper**0.04 * (100 * thickness / cosine) ** -0.3
    return 0.036 * area**0.758 * fuel**0.0035 * shape * (load * gross) ** 0.49 + area * paint


def buckling(x):
    """Return the load under which a beam buckles, of its length and of places in the lists of three levels (n, 4)."""
    modulus, fixity, inertia = (
        np.take(levels, places.astype(int)) for levels, places in zip(_BUCKLING_LEVELS, x[:, 1:].T, strict=True)
    )
    return np.pi * modulus * inertia / (x[:, 0] * fixity) ** 2


def sobol_g(x):
    """Return Sobol's function g of inputs in the unit cube, (n, 8), with its usual constants."""
    constants = np.array([0.0, 1.0, 4.5, 9.0, 99.0, 99.0, 99.0, 99.0])
    return np.prod((np.abs(4 * x - 2) + constants) / (1 + constants), axis=1)


FUNCTIONS = {  # with the box of their inputs
    "wing weight": (wing_weight, _WING_BOX),
    "buckling": (buckling, ((0.5, 1.5), (0, 2), (0, 4), (0, 3))),
    "Ackley": (ackley, (-5, 10)),
    "Dixon–Price": (dixon_price, (-10, 10)),
    "Griewank": (griewank, (-600, 600)),
    "Rosenbrock": (rosenbrock, (-5, 10)),
    "Sobol g": (sobol_g, (0, 1)),  # not of the benchmark
}


class Simulations(NamedTuple):
    """Disjoint sets of rows to learn from, and rows to test."""

    train: list[Dataset]
    test: Dataset


@cache
def simulations(name, num_inputs, num_rows, noise):
    """Return all sets, cut at random from one Sobol sequence; noise is a share of the deviation of the function."""
    function, box = FUNCTIONS[name]
    lower, upper = np.broadcast_to(box, (num_inputs, 2)).T
    total = NUM_SETS * num_rows + NUM_TEST
    cube = qmc.Sobol(num_inputs, seed=0).random_base2(int(np.ceil(np.log2(total))))[:total]
    sets = [*np.split(np.arange(total - NUM_TEST), NUM_SETS), np.arange(total - NUM_TEST, total)]
    random = np.random.default_rng(0)
    shuffled = np.concatenate([random.permutation(total - NUM_TEST), sets[-1]])
    x = lower + (upper - lower) * cube[shuffled]
    if name == "buckling":
        for rows in sets:  # each level as often as the others
            even = [random.permutation(np.arange(len(rows)) % len(levels)) for levels in _BUCKLING_LEVELS]
            x[rows, 1:] = np.stack(even, axis=1)
    clean = function(x)
    y = clean + noise * np.std(clean[sets[-1]]) * random.normal(size=total)
    *train, test = [Dataset(x[rows], y[rows]) for rows in sets]
    return Simulations(train, test)
