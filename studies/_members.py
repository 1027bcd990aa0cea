"""Members of the reference posteriors: twelve small Bayesian neural networks.

Each is a NumPyro model of inputs (n, d) and targets (n,), of NumPyro's own pieces alone. Weights are N(0, 1):
layers are scaled by the root of their inputs, and scales and noise are images of sites named "..._base". Deterministic
sites are the features that the readout multiplies, the function, the noise, and scales.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import sklearn.datasets

import _common
import _data
from _linear_networks import NOISE_SCALE, draw_data
from numpyro_wide import datasets

TABLES = Path(__file__).parent / "references" / "data"
NUM_VALUES = 200  # of the function that are stored of a draw, in all outputs
MOST_ROWS = 80  # of training, and of test rows, among the inputs of these
UCI = "CC BY 4.0, UCI Machine Learning Repository"


def normal(name: str, *shape: int) -> Any:
    """Sample independent N(0, 1) variables."""
    return numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event(len(shape)))


def log_normal(name: str, median: float, spread: float = 1.0) -> Any:
    """Sample a positive number whose logarithm is N(log median, spread²)."""
    return numpyro.deterministic(name, median * jnp.exp(spread * normal(f"{name}_base")))


def noise_by_precision(name: str) -> Any:
    """Sample a noise whose precision is Gamma(6, 6), as Hernández-Lobato's, to 2 % (cube of Wilson and Hilferty)."""
    return numpyro.deterministic(name, jnp.abs(1 - 1 / 54 + normal(f"{name}_base") / 54**0.5) ** -1.5)


def layer(name: str, x: Any, width: int) -> Any:
    """Sample a linear layer with biases, its outputs of the size of its inputs."""
    x = jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1)
    return x @ normal(name, x.shape[1], width) / x.shape[1] ** 0.5


def read_out(hidden: Any, scale: Any = 1.0, num_outputs: int | None = None) -> Any:
    """Sample a readout with a bias of hidden units, the function (n,), or (n, num_outputs)."""
    hidden = jnp.concatenate([hidden, jnp.ones_like(hidden[:, :1])], axis=1)
    features = numpyro.deterministic("features", scale * hidden / hidden.shape[1] ** 0.5)
    outputs = () if num_outputs is None else (num_outputs,)
    return numpyro.deterministic("function", features @ normal("readout", features.shape[1], *outputs))


def observe(function: Any, noise: Any, y: Any) -> None:
    """Observe a function with Gaussian noise."""
    with numpyro.plate("rows", function.shape[0]):
        numpyro.sample("y", dist.Normal(function, noise), obs=y)


def linear(x: Any, y: Any = None) -> None:
    """50 linear units without biases, whose law is known."""
    hidden = x @ normal("hidden", x.shape[1], 50) / x.shape[1] ** 0.5
    features = numpyro.deterministic("features", hidden / 50**0.5)
    function = numpyro.deterministic("function", features @ normal("readout", 50))
    observe(function, numpyro.deterministic("noise", NOISE_SCALE), y)


def tanh_units(x: Any, y: Any = None) -> None:
    """50 tanh units."""
    observe(read_out(jnp.tanh(3 * layer("hidden", x, 50))), log_normal("noise", 0.1, 0.5), y)


def relu_units(x: Any, y: Any = None, *, depth: int = 1, width: int = 50) -> None:
    """ReLU units in layers of one width; scales and noise are learnt."""
    noise, hidden = noise_by_precision("noise"), x
    for number in range(1, depth + 1):
        scale = log_normal(f"weight_scale_{number}", 1.0, 0.5)
        hidden = jax.nn.relu(scale * layer(f"hidden_{number}", hidden, width))
    observe(read_out(hidden, log_normal("readout_scale", 1.0, 0.5)), noise, y)


def noise_by_row(x: Any, y: Any = None) -> None:
    """50 tanh units, and a noise whose logarithm is a network of 16 of them."""
    function = read_out(jnp.tanh(3 * layer("hidden", x, 50)))
    units = jnp.tanh(layer("noise_hidden", x, 16))
    log_noise = layer("noise_readout", units, 1)[:, 0]
    observe(function, numpyro.deterministic("noise", log_normal("noise_level", 0.3) * jnp.exp(log_noise)), y)


def two_classes(x: Any, y: Any = None) -> None:
    """Two layers of 32 tanh units, whose output is the logit of a one."""
    hidden = jnp.tanh(layer("hidden_2", jnp.tanh(layer("hidden_1", x, 32)), 32))
    logits = read_out(hidden, log_normal("readout_scale", 3.0, 0.5))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def ten_classes(x: Any, y: Any = None) -> None:
    """10 tanh units, whose ten outputs are logits."""
    scale = log_normal("weight_scale", 1.0, 0.5)
    logits = read_out(jnp.tanh(scale * layer("hidden", x, 10)), log_normal("readout_scale", 3.0, 0.5), 10)
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def scaled_by_size(x: Any, y: Any = None) -> None:
    """10 tanh units, nine outputs beside a constant one, whose variances have priors of Lampinen and Vehtari."""
    width, num_classes = 10, 10

    def scale(name: str, size: int) -> Any:
        base = numpyro.sample(f"{name}_base", dist.InverseGamma(0.25, 0.25))
        return numpyro.deterministic(name, 0.05 / size**2 * jnp.sqrt(base))

    weights = scale("weight_scale", x.shape[1]) * normal("hidden", x.shape[1], width)
    hidden = scale("readout_scale", width) * jnp.tanh(x @ weights + normal("biases", width))
    features = numpyro.deterministic("features", jnp.concatenate([jnp.ones_like(hidden[:, :1]), hidden], axis=1))
    logits = features @ normal("readout", width + 1, num_classes - 1)
    logits = jnp.concatenate([jnp.ones_like(hidden[:, :1]), logits], axis=1)
    logits = numpyro.deterministic("function", logits - logits.mean(1, keepdims=True))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def additive(x: Any, y: Any = None, *, law: Any) -> None:
    """8 tanh units of each input, less their means over the rows of a table, so that effects are identified."""
    noise, width = log_normal("noise", 0.3), 8
    weights, biases = normal("weights", x.shape[1], width), normal("biases", x.shape[1], width)
    scale = log_normal("weight_scale", 1.0, 0.5)

    def units(x: Any) -> Any:
        return jnp.tanh(scale * (x[:, :, None] * weights + biases))

    centred = (units(x) - units(law).mean(0)) / width**0.5  # (n, d, width)
    constant = jnp.ones_like(x[:, :1])
    effect_scale = log_normal("effect_scale", 0.5, 0.5)
    features = jnp.concatenate([effect_scale * centred.reshape(len(x), -1), constant], axis=1)
    readout = normal("readout", features.shape[1])
    by_input = effect_scale * centred * readout[:-1].reshape(x.shape[1], width)
    numpyro.deterministic("effects", by_input.sum(2))
    features = numpyro.deterministic("features", features)
    observe(numpyro.deterministic("function", features @ readout), noise, y)


def deep(x: Any, y: Any = None) -> None:
    """Four layers of 16 tanh units."""
    noise, hidden = noise_by_precision("noise"), x
    for number in range(1, 5):
        hidden = jnp.tanh(1.5 * layer(f"hidden_{number}", hidden, 16))
    observe(read_out(hidden, log_normal("readout_scale", 1.0, 0.5)), noise, y)


class Rows(NamedTuple):
    """Inputs (n, d) and targets (n,) of training and test rows, standardised by the former."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def standardised(train: Any, test: Any, *, is_labels: bool = False) -> Rows:
    """Standardise rows by those to learn from; labels stay."""
    if is_labels:
        scale = _data.Standardiser.fit(train.inputs)
        return Rows(scale(train.inputs), train.targets, scale(test.inputs), test.targets)
    return Rows(*(part for pair in _common.standardised_by(train, test, float)[:2] for part in pair))


def simulated_line() -> Rows:
    """Draw a noisy linear function of four inputs, 10 rows to learn from."""
    return Rows(*draw_data(0, num_new=40))


def simulated_wave() -> Rows:
    """Draw a noisy wave, 20 rows to learn from."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-1.5, 1.5, 20), np.linspace(-1.5, 1.5, 40)])[:, None]
    y = np.sin(3 * x[:, 0]) + 0.1 * rng.normal(size=len(x))
    return Rows(x[:20], y[:20], x[20:], y[20:])


def uci(name: str) -> Rows:
    """Read the first split of a table (Hernández-Lobato & Adams 2015)."""
    return standardised(*_data.uci(TABLES, name))


def diabetes() -> Rows:
    """Split scikit-learn's diabetes patients, 362 rows to learn from."""
    return standardised(*_data.split(_data.diabetes(), 362, 80, seed=0))


def marathon() -> Rows:
    """Take the Olympic marathon's winning paces, all but every fifth to learn from."""
    games = datasets.marathon()
    is_test = np.arange(len(games.targets)) % 5 == 2
    return standardised(*(_data.Dataset(games.inputs[of], games.targets[of]) for of in (~is_test, is_test)))


def cancer() -> Rows:
    """Split scikit-learn's breast cancers, 200 rows to learn from."""
    bunch = sklearn.datasets.load_breast_cancer()
    return standardised(*_data.split(_data.Dataset(bunch.data, bunch.target), 200, 80, seed=0), is_labels=True)


def digits() -> Rows:
    """Take 100 of scikit-learn's digits to learn from, pixels in one unit."""
    train, test = _common.digits(100, 80)
    return Rows(train.inputs, train.targets, test.inputs, test.targets)


def mnist() -> Rows:
    """Read posteriordb's 100 images to learn from, pixels in 0, ..., 255, and 100 others."""
    with np.load(TABLES / "mnist_100.npz") as file:
        return Rows(*(file[name].astype(float if name.startswith("x") else int) for name in Rows._fields))


def additive_to_diabetes(x: Any, y: Any = None) -> None:
    """Run the additive network with means over the diabetes patients."""
    additive(x, y, law=jnp.asarray(diabetes().x))


@dataclass(frozen=True)
class Member:
    """A model, its data, and how long its chains are: warmup and draws of each of four, of both samplers.

    Attributes:
        title: what it is.
        model: NumPyro model of inputs and targets.
        read: reader of the rows.
        data: name of the data, and where they are from.
        licence: terms of the data.
        likelihood: "normal", "bernoulli" or "categorical".
        first: lengths of the first sampler, which is of this package.
        second: lengths of the second.
        sampler: the second, "NUTS" of all weights, "NUTS by hand" of the hidden ones, or "exact law".
        extra: further deterministic site by input, stored at the grid alone, in half precision.
        references: papers that the network or the data are from.
    """

    title: str
    model: Callable[..., None]
    read: Callable[[], Rows]
    data: str
    licence: str
    likelihood: str = "normal"
    first: tuple[int, int] = (500, 1000)
    second: tuple[int, int] = (500, 1000)
    sampler: str = "NUTS by hand"
    extra: str | None = None
    references: tuple[str, ...] = ()


HERNANDEZ_LOBATO = "Hernández-Lobato, Adams. Probabilistic backpropagation for scalable learning. 2015"
EFRON = "Efron, Hastie, Johnstone, Tibshirani. Least angle regression. 2004"
GERRITSMA = "Gerritsma, Onnink, Versluis. Geometry, resistance and stability of the Delft systematic yacht hulls. 1981"
one_hidden_layer = partial(Member, "1 × 50 ReLU, scales and noise latent", relu_units)
LONG: dict[str, Any] = {"first": (500, 2000), "second": (1000, 2000)}
MEMBERS = {
    "linear": Member(
        "1 × 50 linear, whose law is known",
        linear,
        simulated_line,
        "simulated",
        "none needed",
        sampler="exact law",
        references=("Hanin, Zlokapa. Bayesian interpolation with deep linear networks. 2023",),
        **LONG,
    ),
    "wave": Member(
        "1 × 50 tanh, 20 points", tanh_units, simulated_wave, "simulated", "none needed", sampler="NUTS", **LONG
    ),
    "marathon": Member(
        "1 × 50 tanh, noise by row", noise_by_row, marathon, "Olympic marathon, winning paces", "public facts"
    ),
    "yacht": one_hidden_layer(
        partial(uci, "yacht"),
        "UCI yacht",
        UCI,
        references=(HERNANDEZ_LOBATO, GERRITSMA),
    ),
    "diabetes": Member(
        "2 × 64 ReLU",
        partial(relu_units, depth=2, width=64),
        diabetes,
        "diabetes, of scikit-learn",
        "BSD 3-Clause, as of scikit-learn",
        references=(EFRON,),
    ),
    "additive": Member(
        "additive, 8 tanh units an input",
        additive_to_diabetes,
        diabetes,
        "diabetes, of scikit-learn",
        "BSD 3-Clause, as of scikit-learn",
        extra="effects",
        references=(
            "Agarwal et al. Neural additive models: interpretable machine learning with neural nets. 2021",
            EFRON,
        ),
    ),
    "boston": one_hidden_layer(
        partial(uci, "boston"),
        "Boston housing, StatLib",
        "none stated by StatLib",
        first=(500, 1500),
        second=(500, 1500),
        references=(
            HERNANDEZ_LOBATO,
            "Harrison, Rubinfeld. Hedonic housing prices and the demand for clean air. 1978",
        ),
    ),
    "concrete": one_hidden_layer(
        partial(uci, "concrete"),
        "UCI concrete",
        UCI,
        first=(500, 1500),
        second=(300, 300),
        references=(
            HERNANDEZ_LOBATO,
            "Yeh. Modeling of strength of high-performance concrete using artificial neural networks. 1998",
        ),
    ),
    "cancer": Member(
        "2 × 32 tanh, two classes",
        two_classes,
        cancer,
        "UCI breast cancer Wisconsin (diagnostic)",
        UCI,
        "bernoulli",
        sampler="NUTS",
        references=("Street, Wolberg, Mangasarian. Nuclear feature extraction for breast tumor diagnosis. 1993",),
    ),
    "digits": Member(
        "1 × 10 tanh, ten classes",
        ten_classes,
        digits,
        "UCI optical digits, of scikit-learn",
        UCI,
        "categorical",
        sampler="NUTS",
        references=("Alpaydin, Kaynak. Cascading classifiers. 1998",),
    ),
    "mnist": Member(
        "1 × 10 tanh, posteriordb's nn_rbm1bJ10",
        scaled_by_size,
        mnist,
        "MNIST, posteriordb's mnist_100",
        "CC BY-SA 3.0, LeCun and Cortes",
        "categorical",
        sampler="NUTS",
        references=(
            "Lampinen, Vehtari. Bayesian approach for neural networks. 2001",
            "Magnusson et al. posteriordb: testing, benchmarking and developing Bayesian inference algorithms. 2024",
        ),
    ),
    "deep": Member("4 × 16 tanh", deep, partial(uci, "yacht"), "UCI yacht", UCI, references=(GERRITSMA,)),
}


class Inputs(NamedTuple):
    """Fixed inputs (m, d) at which functions are stored; their kind, 0 training, 1 test, 2 grid; targets, NaN of 2."""

    inputs: np.ndarray
    kind: np.ndarray
    targets: np.ndarray


@cache
def rows_of(name: str) -> Rows:
    """Read the rows of a member, once."""
    return MEMBERS[name].read()


def fixed_inputs(name: str) -> Inputs:
    """Choose training and test rows, and points on the first principal direction of the inputs, or of all columns."""
    rows, outputs = rows_of(name), 10 if MEMBERS[name].likelihood == "categorical" else 1
    most, total = MOST_ROWS // outputs, NUM_VALUES // outputs
    train, test = (slice(0, min(most, len(y))) for y in (rows.y, rows.y_test))
    chosen = [rows.x[train], rows.x_test[test]]
    num_grid = total - sum(map(len, chosen))
    if MEMBERS[name].extra:
        direction = np.ones(rows.x.shape[1])
    else:
        _, sizes, directions = np.linalg.svd(rows.x, full_matrices=False)
        direction = directions[0] * sizes[0] / len(rows.x) ** 0.5
    grid = np.linspace(-2.5, 2.5, num_grid)[:, None] * direction
    kind = np.repeat([0, 1, 2], [*map(len, chosen), num_grid]).astype(np.int8)
    targets = np.concatenate([rows.y[train], rows.y_test[test], np.full(num_grid, np.nan)])
    return Inputs(np.concatenate([*chosen, grid]).astype(float), kind, targets.astype(float))
