"""Effects of single inputs and of pairs on the function of an additive network, and Sobol indices, as posteriors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from scipy.linalg import lapack
from scipy.special import ndtri

from numpyro_wide import _mixture
from numpyro_wide._checks import check_finite, check_key, kind_of, whole_number
from numpyro_wide.machine import double_precision, set_blas_threads
from numpyro_wide.readout._functions import site_function
from numpyro_wide.readout._predictive import ReadoutPredictive
from numpyro_wide.wide_limit._limit import WideLimitFit

if TYPE_CHECKING:
    from numpyro_wide.nn._additive import AdditiveNetwork

Term = tuple[int, ...]
Terms = tuple[np.ndarray, np.ndarray, np.ndarray]  # means and deviations, (terms, rows); variances, (draws, terms)
_RANK_TOLERANCE = 1e-10  # of a kernel's remainder, over its largest variance
_NUM_POINTS = 1024  # of the inputs' law, for the variances of a finite network's terms


@dataclass(frozen=True)
class Effects:
    """Posterior of the terms of an additive function, and of their variances: result of :func:`effects`, to print.

    A term has mean zero over each of its inputs, so that under independent inputs the variances of terms sum to that of
    the function, and Sobol indices are their shares.

    Attributes:
        terms: columns of each term, those of one input first.
        x: inputs at which the terms were evaluated, (rows, d).
        mean: posterior means of the terms, (terms, rows).
        sd: posterior standard deviations, (terms, rows).
        variances: draws of the variances of the terms, (draws, terms).
        first: draws of the first-order indices, (draws, d).
        total: draws of the total indices, the shares of all terms that an input is in, (draws, d).
        pairs: draws of the shares of the terms of two inputs, in their order, (draws, pairs).
    """

    terms: list[Term]
    x: np.ndarray
    mean: np.ndarray
    sd: np.ndarray
    variances: np.ndarray
    first: np.ndarray
    total: np.ndarray
    pairs: np.ndarray

    def __str__(self) -> str:
        import pandas  # heavy

        pairs = [term for term in self.terms if len(term) == 2]
        by_name = {"first": self.first, "total": self.total, "pairs": self.pairs}
        names = {"pairs": ["x".join(map(str, pair)) for pair in pairs]}
        table = [
            {"index": index, "inputs": name, "mean": column.mean()}
            | {f"{level:.0%}": np.quantile(column, level) for level in (0.05, 0.95)}
            for index, draws in by_name.items()
            for name, column in zip(names.get(index, range(draws.shape[1])), draws.T, strict=True)
        ]
        return pandas.DataFrame(table).to_string(index=False, float_format="{:.3f}".format)


def effects(
    fit_or_predictive: WideLimitFit | ReadoutPredictive,
    x: ArrayLike,
    *,
    order: int = 2,
    num_draws: int = 200,
    rng_key: Array | None = None,
) -> Effects:
    r"""Compute the effects of single inputs and of pairs, and Sobol indices, with their uncertainty.

    Of an additive limit, a term is a Gaussian process given targets, as in orthogonal additive kernels (Lu 2022):
    its moments are exact, and averaged over draws of scales (Mathematics, :eq:`effect-posterior`). Of a network they
    are those of draws of all weights. Sobol indices are those of drawn functions, for independent inputs with the
    network's law: the inputs' own of ``wide_limit.fit(structure="additive")``.

    Args:
        fit_or_predictive: result of ``wide_limit.fit`` of an additive network with a normal likelihood; or a
            :class:`~numpyro_wide.ReadoutPredictive` of ``nn.bnn`` with an :class:`~numpyro_wide.nn.AdditiveNetwork`.
            One output.
        x: inputs at which to evaluate the terms, such as those of the fit, (rows, d).
        order: largest number of inputs of the terms that are returned, 1 or 2.
        num_draws: number of draws of the indices, at least; of a network a multiple of that of its draws.
        rng_key: a PRNG key; ``jax.random.key(0)`` by default.

    Returns:
        The :class:`Effects`.

    Raises:
        ValueError: of networks that are not additive, or have a dense block, whose terms are not identified.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide import wide_limit
        >>> from numpyro_wide.diagnostics import effects
        >>> x = np.random.default_rng(0).normal(size=(40, 2))
        >>> fit = wide_limit.fit(x, x[:, 0] ** 2 + x[:, 1], structure="additive", num_restarts=1)
        >>> posterior = effects(fit, x[:5], num_draws=20)
        >>> posterior.terms, posterior.mean.shape, posterior.first.shape
        ([(0,), (1,), (0, 1)], (3, 5), (20, 2))
    """
    num_draws = whole_number("num_draws", num_draws)
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    check_key("rng_key", rng_key, "effects(..., rng_key=key)")
    network = _network_of(fit_or_predictive)
    rows = _rows_of(fit_or_predictive, x)
    if whole_number("order", order) > 2:
        raise ValueError(f"order must be 1 or 2, as larger terms have no picture, but is {order}.")
    terms = network.terms(rows.shape[1])
    sizes = np.array([len(term) for term in terms])
    if isinstance(fit_or_predictive, WideLimitFit):
        mean, sd, variances = _limit_terms(fit_or_predictive, rows, terms, num_draws, rng_key)
    else:
        mean, sd, variances = _network_terms(fit_or_predictive, network, rows, terms, num_draws, rng_key)
    shares = variances / variances.sum(axis=1, keepdims=True)
    contains = np.array([[column in term for column in range(rows.shape[1])] for term in terms], float)
    first, total = shares[:, sizes == 1] @ contains[sizes == 1], shares @ contains
    upto = slice(int(np.sum(sizes <= order)))
    pairs = shares[:, upto][:, sizes[upto] == 2]
    return Effects(terms[upto], rows, mean[upto], sd[upto], variances[:, upto], first, total, pairs)


def _network_of(source: object) -> "AdditiveNetwork":
    """Return the additive network behind a fit or predictions."""
    from numpyro_wide.nn._additive import AdditiveNetwork  # with flax, loaded late

    if isinstance(source, WideLimitFit):
        network, is_single = source.network, source.targets.ndim == 1
        remedy = "wide_limit.fit(..., structure='additive')"
        if source.likelihood != "normal":
            raise ValueError(f"effects are of a fit with a normal likelihood, but it is {source.likelihood!r}.")
    elif isinstance(source, ReadoutPredictive):
        arguments: tuple = getattr(source.model.fn, "args", ())  # of nn.bnn
        network, num_outputs = (*arguments, None, None)[:2]
        is_single, remedy = num_outputs is None, "nn.bnn(nn.AdditiveNetwork(...), ...)"
    else:
        raise TypeError(f"effects take a result of wide_limit.fit, or a ReadoutPredictive, but got {kind_of(source)}.")
    if not isinstance(network, AdditiveNetwork):
        raise ValueError(f"effects are of an additive network, but units of this one see all inputs; take {remedy}.")
    if network.dense:
        raise ValueError(f"the network has a dense block, and so its terms are not identified; take {remedy}.")
    if not is_single:
        raise ValueError("effects are of one output, (n,) targets; fit each output alone.")
    return network


def _rows_of(source: WideLimitFit | ReadoutPredictive, x: ArrayLike) -> np.ndarray:
    """Return checked inputs, (rows, d), in float64."""
    if isinstance(source, WideLimitFit):
        return source.checked_rows(x, "x")
    check_finite("x", x)
    rows = np.asarray(x, float)
    if rows.ndim != 2 or not rows.size:
        raise ValueError(f"x must have shape (rows, d), with at least one row, but has {rows.shape}.")
    return rows


def _limit_terms(fit: WideLimitFit, x: np.ndarray, terms: list[Term], num_draws: int, rng_key: Array) -> Terms:
    """Return exact moments, averaged over draws of scales, and variances of drawn terms."""
    random = np.random.default_rng(np.asarray(jax.random.key_data(rng_key)))
    fits = fit.draws or (fit,)
    weights = np.ones(1) if fit.weights is None else fit.weights
    counts = random.multinomial(num_draws, weights)
    with double_precision(), set_blas_threads(1):
        by_fit = [_at_scales(*fit_and_count, x, terms, random) for fit_and_count in zip(fits, counts, strict=True)]
    means, variances, drawn = zip(*by_fit, strict=True)
    mean, variance = _mixture.moments(np.stack(means), np.stack(variances), weights)
    return mean, np.sqrt(variance), np.concatenate(drawn)


def _at_scales(
    fit: WideLimitFit, num_draws: int, x: np.ndarray, terms: list[Term], random: np.random.Generator
) -> Terms:
    """Return the terms' posterior means and variances at the scales of a fit, and variances of drawn terms."""
    from numpyro_wide.nn._additive import unit_scales  # with flax, loaded late

    network, num_rows, (process,) = fit.network, len(fit.inputs), fit.processes
    scales = {name: np.asarray(values) for name, values in unit_scales(network, x.shape[1], float).items()}
    points = np.concatenate([fit.inputs, x])
    units = [_units(network, scales, column, points) for column in range(x.shape[1])]
    bases, means, variances = [], [], []
    for term in terms:
        num_terms = sum(len(other) == len(term) for other in terms)  # of its order
        scale = scales["order_scale"][len(term) - 1] / math.sqrt(num_terms)
        functions, under_law = zip(*(units[column] for column in term), strict=True)
        basis = scale * _products(functions)
        rows, new = basis[:num_rows], basis[num_rows:]
        shared = new @ rows.T  # covariance with the targets
        means.append(shared @ process.weights[:, 0])
        known = np.sum(shared.T * process.solve(shared.T), axis=0)
        variances.append(np.maximum(np.sum(new**2, axis=1) - known, 0.0))
        coefficients = random.normal(size=(num_draws, rows.shape[1]))
        bases.append((rows, scale**2 * _products([variance[None] for variance in under_law])[0], coefficients))
    # Matheron's rule: a draw of the prior moves by what targets differ from its own, with noise.
    constant = float(network.readout_b_std) * random.normal(size=(num_draws, 1))
    noise = fit.noise_scale * random.normal(size=(num_draws, num_rows))
    values = constant + noise + sum(coefficients @ rows.T for rows, _, coefficients in bases)
    moves = process.solve(process.targets - values.T).T
    drawn = [(coefficients + moves @ rows) ** 2 @ under_law for rows, under_law, coefficients in bases]
    return np.stack(means), np.stack(variances), np.stack(drawn, axis=1)


def _units(
    network: "AdditiveNetwork", scales: dict[str, np.ndarray], column: int, points: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return functions of an input, of which its kernel is the sum of squares, and their variances under its law.

    They are uncorrelated under the law; at points (n, d), (n, rank) and (rank,).
    """
    from numpyro_wide.nn._additive import law_nodes  # with flax, loaded late
    from numpyro_wide.nn._additive_problem import AdditiveProblem

    nodes, weights = (np.asarray(array) for array in law_nodes(network.law, points.shape[1]))
    law = network.law if isinstance(network.law, str) else nodes[:, [column]]
    column_scales = {name: scales[name][column] for name in ("w_std", "b_std", "relevance")}
    network_of_column = network.clone(order=1, which=None, law=law, order_scale=1.0, readout_b_std=0.0, **column_scales)
    kernel = AdditiveProblem.nngp_of(network_of_column, np.concatenate([points[:, [column]], nodes[:, [column]]]))
    factor, pivots, rank, _ = lapack.dpstrf(kernel, lower=1, tol=_RANK_TOLERANCE * np.max(np.diagonal(kernel)))
    root = np.empty((len(kernel), rank))
    root[pivots - 1] = np.tril(factor)[:, :rank]
    at_nodes = root[len(points) :]
    variances, vectors = np.linalg.eigh(at_nodes.T @ (weights[:, None] * at_nodes))
    return root[: len(points)] @ vectors, np.maximum(variances, 0.0)


def _products(factors: Sequence[np.ndarray]) -> np.ndarray:
    """Return all products of one entry from each factor, row by row, (n, sizes multiplied)."""
    return reduce(lambda left, right: (left[:, :, None] * right[:, None, :]).reshape(len(left), -1), factors)


def _network_terms(
    predictive: ReadoutPredictive,
    network: "AdditiveNetwork",
    x: np.ndarray,
    terms: list[Term],
    num_draws: int,
    rng_key: Array,
) -> Terms:
    """Return moments of terms of drawn functions, and the terms' variances, on points of the law."""
    model, shape = predictive.model, (len(terms), network.width)
    keys = jax.random.split(rng_key, -(-num_draws // predictive.num_draws))
    readouts = jnp.stack([predictive.readout(key) for key in keys], axis=1)  # (draws, keys, d)
    draws = {name: jnp.asarray(values) for name, values in predictive.draws.items()}
    points = np.concatenate([x, _points(network, x.shape[1])])
    features = site_function(model.fn, model.features, jnp.asarray(points))

    def values_of_draw(draw: dict[str, Array], readouts: Array) -> tuple[Array, Array]:
        by_term = features(draw)[:, : math.prod(shape)].reshape(-1, *shape)
        weights = readouts[:, : math.prod(shape)].reshape(-1, *shape)
        values = jnp.einsum("ntw,ktw->ktn", by_term, weights, precision="highest")
        return values[..., : len(x)], jnp.var(values[..., len(x) :], axis=-1)

    program = jax.jit(lambda *arguments: jax.lax.map(lambda draw: values_of_draw(*draw), arguments))
    values, variances = (np.asarray(array, float) for array in program(draws, readouts))
    return values.mean(axis=(0, 1)), values.std(axis=(0, 1)), variances.reshape(-1, len(terms))


def _points(network: "AdditiveNetwork", num_inputs: int) -> np.ndarray:
    """Return points of the network's law of independent inputs, (points, d), of low discrepancy."""
    from scipy.stats.qmc import Sobol  # slow

    uniform = Sobol(num_inputs, seed=0).random(_NUM_POINTS)
    if isinstance(network.law, str):
        return ndtri(uniform) if network.law == "normal" else 3**0.5 * (2 * uniform - 1)
    law = np.asarray(network.law)
    return np.take_along_axis(law, (uniform * len(law)).astype(int), axis=0)
