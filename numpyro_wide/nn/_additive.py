"""Networks of units that see one input, and of products of such units: sums of effects."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from numpyro_wide._checks import as_floats, check_finite, check_one_of, listing, whole_number
from numpyro_wide.nn._layers import (
    Activation,
    Scale,
    activation_function,
    check_scale,
    is_zero,
    scaled_features,
    standard_normal,
)
from numpyro_wide.nn._networks import FCN

ADDITIVE_SCALES = (
    *("w_std", "b_std", "relevance", "order_scale", "readout_b_std"),
    *("dense_w_std", "dense_b_std", "dense_scale", "input_scale"),
)
LAWS = ("normal", "uniform")
_NODES = 32  # of a named law's quadrature


class AdditiveNetwork(linen.Module):
    r"""Additive network with interactions: units of one input each, products of them, and optionally a dense block.

    Units of input i are $g_{iu}(x) = \varphi(\sigma_{w,i} w_{iu} x_i + \sigma_{b,i} b_{iu})$ less their mean over the
    law of $x_i$. An effect of q inputs T, one of $N_q$, has the features (Mathematics, :eq:`effects`)

    $$\frac{a_q}{\sqrt{N_q\, m}} \prod_{i \in T} \rho_i\, g_{iu}(x), \qquad u = 1, \dots, m$$

    Centred units make effects orthogonal under independent inputs, and so identified. Its limit is an additive kernel
    (Duvenaud 2011), orthogonal (Lu 2022); of order 1 it is a neural additive model (Agarwal 2021).

    Attributes:
        order: largest number of inputs of an effect, at most that of columns.
        width: number m of units of each input, and of features of each effect.
        activation: as of :class:`FCN`.
        dense: number of units in each layer of a block that sees all inputs, an :class:`FCN`; 0 for none.
        which: the effects, such as ``[(0,), (0, 3)]``, tuples of columns; None for all up to ``order``.
        law: law of independent inputs for the means: "normal", N(0, 1); "uniform", of mean 0 and variance 1; or rows
            (m, d) of equal weight, such as some of the training inputs, from which it stays at new inputs.
        w_std: $\sigma_w$ of the units, a number or one by column.
        b_std: $\sigma_b$ of the units, a number or one by column; 0 for none.
        relevance: $\rho$, a number or one by column.
        order_scale: prior standard deviation $a$ of the effects, a number or one by order.
        readout_b_std: standard deviation of a constant; 0 for none.
        depth: number of the dense block's hidden layers.
        dense_w_std: its ``w_std``.
        dense_b_std: its ``b_std``.
        dense_scale: its ``readout_w_std``.
        input_scale: its ``input_scale``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide.nn import AdditiveNetwork
        >>> network = AdditiveNetwork(order=2, width=10, activation="erf")
        >>> network.terms(3)
        [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)]
        >>> params = network.init(jax.random.key(0), jnp.ones((1, 3)))
        >>> network.apply(params, jnp.ones((5, 3))).shape
        (5, 60)
    """

    order: int = 2
    width: int = 16
    activation: Activation = "erf"
    dense: int = 0
    which: Sequence[Sequence[int]] | None = None
    law: str | np.ndarray | Array = "normal"
    w_std: Scale | Sequence[float] = 1.0
    b_std: Scale | Sequence[float] = 1.0
    relevance: Scale | Sequence[float] = 1.0
    order_scale: Scale | Sequence[float] = 1.0
    readout_b_std: Scale = 0.0
    depth: int = 1
    dense_w_std: Scale | Sequence[float] | None = None
    dense_b_std: Scale | Sequence[float] = 0.0
    dense_scale: Scale | None = None
    input_scale: Scale | None = None

    @linen.compact
    def __call__(self, x: Array) -> Array:
        """Return features (n, d), effect by effect, the dense block's and the constant's last, for inputs (n, …)."""
        whole_number("width", self.width)
        whole_number("dense", self.dense, 0)
        activate = activation_function(self.activation)
        (x,) = as_floats(x, names=("x",))
        x = x.reshape(x.shape[0], -1)
        num_inputs = x.shape[1]
        terms, scales = self.terms(num_inputs), unit_scales(self, num_inputs, x.dtype)
        nodes, weights = (jnp.asarray(numbers, x.dtype) for numbers in law_nodes(self.law, num_inputs))
        of_units = {"kernel": "w_std"} if is_zero(self.b_std) else {"kernel": "w_std", "bias": "b_std"}
        params = {
            name: scales[scale][None, :, None] * self.param(name, standard_normal, (num_inputs, self.width))[None]
            for name, scale in of_units.items()
        }

        def units(x: Array) -> Array:
            return activate(x[:, :, None] * params["kernel"] + params.get("bias", 0.0))

        centred = units(x) - jnp.tensordot(weights, units(nodes), 1, precision="highest")[None]
        relevant = scales["relevance"][None, :, None] * centred  # (n, d_in, width)
        features = []
        for inputs in by_order(terms):
            products = relevant[:, inputs[:, 0]]
            for column in inputs.T[1:]:
                products = products * relevant[:, column]
            order_scale = scales["order_scale"][inputs.shape[1] - 1]
            features.append(scaled_features(products.reshape(len(x), -1), order_scale, 0.0))
        if self.dense:
            features.append(dense_block(self, name="dense")(x))
        if not is_zero(self.readout_b_std):
            features.append(jnp.full((len(x), 1), self.readout_b_std, x.dtype))
        return jnp.concatenate(features, axis=1)

    def terms(self, num_inputs: int) -> list[tuple[int, ...]]:
        """Return the effects, tuples of columns, in the order of their features; those of one input first."""
        order = whole_number("order", self.order)
        if order > num_inputs:
            raise ValueError(f"order must be at most the number of columns, {num_inputs}, but is {order}.")
        if self.which is None:
            sizes = range(1, order + 1)
            return [term for size in sizes for term in itertools.combinations(range(num_inputs), size)]
        terms = [tuple(sorted(int(column) for column in np.atleast_1d(term))) for term in self.which]
        bad = [term for term in terms if not term or len({*term}) < len(term) or not {*term} <= {*range(num_inputs)}]
        if bad or not terms or len({*terms}) < len(terms):
            raise ValueError(
                f"which must list different effects, each of different columns from 0 to {num_inputs - 1}, such as "
                f"[(0,), (0, 1)], but got {self.which!r}."
            )
        if max(map(len, terms)) > order:
            raise ValueError(f"which has an effect of {max(map(len, terms))} inputs; raise order, {order}, to that.")
        return sorted(terms, key=len)


def unit_scales(network: AdditiveNetwork, num_inputs: int, dtype: DTypeLike) -> dict[str, Array]:
    """Return checked scales of units by column, (d_in,), and of effects by order, (order,)."""
    for name in ADDITIVE_SCALES:
        if (value := getattr(network, name)) is not None:
            check_scale(name, value, is_number=name in ("readout_b_std", "dense_scale"))
    scales = {}
    for name in ("w_std", "b_std", "relevance", "order_scale"):
        shape, value = (network.order if name == "order_scale" else num_inputs,), getattr(network, name)
        if np.shape(value) not in ((), shape):
            raise ValueError(f"{name} must be a number or have shape {shape}, but got {np.shape(value)}.")
        scales[name] = jnp.broadcast_to(jnp.asarray(value, dtype), shape)
    return scales


def dense_block(network: AdditiveNetwork, **options: Any) -> FCN:
    """Return the block that sees all inputs."""
    scales: dict = {"w_std": network.dense_w_std, "b_std": network.dense_b_std, "readout_w_std": network.dense_scale}
    return FCN(network.depth, network.dense, network.activation, **scales, input_scale=network.input_scale, **options)


def by_order(terms: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Return effects sorted by their number q of inputs as arrays of columns, (effects, q)."""
    return [np.array(list(group)) for _, group in itertools.groupby(terms, len)]


def law_nodes(law: str | np.ndarray | Array, num_inputs: int) -> tuple[ArrayLike, ArrayLike]:
    """Return nodes (m, d_in) and weights (m,) of the inputs' law."""
    if isinstance(law, str):
        check_one_of("law", law, LAWS, also="or rows of inputs")
        rule = np.polynomial.hermite_e.hermegauss if law == "normal" else np.polynomial.legendre.leggauss
        nodes, weights = rule(_NODES)
        nodes = nodes if law == "normal" else 3**0.5 * nodes
        return np.repeat(nodes[:, None], num_inputs, axis=1), weights / weights.sum()
    if np.ndim(law) != 2 or np.shape(law)[1] != num_inputs or not len(law):
        raise ValueError(
            f"law must be {listing(LAWS)}, or rows of inputs with {num_inputs} columns, but has shape {np.shape(law)}."
        )
    check_finite("law", law)
    return law, np.full(len(law), 1 / len(law))


def effects_of(network: AdditiveNetwork, num_inputs: int) -> int | tuple[tuple[int, ...], ...]:
    """Return the effects of a network."""
    terms = tuple(network.terms(num_inputs))
    return network.order if network.which is None else terms
