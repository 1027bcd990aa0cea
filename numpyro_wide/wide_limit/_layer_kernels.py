"""Kernels of layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._activations import LAYER_NORM_EPSILON, PADDINGS, Activation
from numpyro_wide._checks import as_not_negative, check_input_scale, check_no_nan, check_one_of, is_known, listing
from numpyro_wide.wide_limit._duals import activation_dual, reduced_determinant

_SYMMETRY = 1e-4  # largest asymmetry over the largest entry, beyond rounding in single precision
_FIELDS = ("square1", "square2", "product", "tangent")  # of a layer's kernels


def check_shape(name: str, array: Array | np.ndarray, expected: tuple[int, ...], meaning: str) -> None:
    """Refuse an array of another shape."""
    if array.shape != expected:
        hint = " Transpose it." if array.shape == expected[::-1] else ""
        raise ValueError(f"{name} must have shape {meaning} = {expected}, but got {array.shape}.{hint}")


def check_symmetric(name: str, kernel: Array | np.ndarray) -> int:
    """Return the number of rows of a symmetric matrix without NaN."""
    if kernel.ndim != 2 or kernel.shape[0] != kernel.shape[1]:
        raise ValueError(f"{name} must be a square matrix, but got shape {kernel.shape}.")
    check_no_nan(name, kernel)
    if is_known(kernel) and kernel.size:
        values = np.asarray(kernel)
        asymmetry = np.abs(values - values.T).max()
        if asymmetry > _SYMMETRY * np.abs(values).max():
            raise ValueError(
                f"{name} must be symmetric, but differs from its transpose by up to {asymmetry:.3g}, its largest "
                f"entry being {np.abs(values).max():.3g}."
            )
    return kernel.shape[0]


def check_inputs(name: str, x: Array | np.ndarray, *, is_matrix: bool = False) -> None:
    """Refuse inputs without rows or columns, and other than a matrix where one is needed."""
    if x.ndim < 2 or 0 in x.shape or (is_matrix and x.ndim > 2):
        images = "; flatten images" if is_matrix else " or (n, height, width, channels)"
        raise ValueError(
            f"{name} must have at least one row and one column, (n, d_in){images}, but has shape {x.shape}; write a "
            "single input as x[None], a single column as x[:, None]."
        )


def check_targets(targets: Array | np.ndarray, num_train: int) -> None:
    """Refuse targets of another shape, and NaN."""
    if targets.ndim not in (1, 2) or targets.shape[0] != num_train or targets.shape[1:] == (0,):
        raise ValueError(
            f"targets must have shape (n_train,) or (n_train, k), n_train = {num_train}, but got {targets.shape}."
        )
    check_no_nan("targets", targets)


def _mean_along(covariances: Array, axes: Sequence[int], size: int, stride: int, padding: str) -> Array:
    """Return the mean over offsets along one direction, with all of these axes."""
    length = covariances.shape[axes[0]]
    around = [((size - 1) // 2, size // 2)]
    if padding != "CIRCULAR":  # which begins at the same offset, whatever the stride
        around = jax.lax.padtype_to_pads((length,), (size,), (stride,), padding)
    num_steps = (length + sum(around[0]) - size) // stride + 1
    if num_steps < 1:
        raise ValueError(f"a filter of {size} pixels does not fit into {length} with the padding {padding!r}.")
    widths = [(0, 0)] * covariances.ndim
    for axis in axes:
        (widths[axis],) = around
    covariances = jnp.pad(covariances, widths, mode="wrap" if padding == "CIRCULAR" else "constant")
    if len(axes) == 1:
        # Slices would compute their operands anew.
        shape, strides = ([1] * covariances.ndim for _ in range(2))
        shape[axes[0]], strides[axes[0]] = size, stride
        zero = np.zeros((), covariances.dtype)
        # No constant folding, which takes seconds.
        covariances = jax.lax.optimization_barrier(covariances)
        return jax.lax.reduce_window(covariances, zero, jax.lax.add, shape, strides, "VALID") / size
    terms = []
    for offset in range(size):
        places = [slice(None)] * covariances.ndim
        for axis in axes:
            places[axis] = slice(offset, offset + (num_steps - 1) * stride + 1, stride)
        terms.append(covariances[tuple(places)])
    return sum(terms[1:], terms[0]) / size


class AllPairsNeededError(Exception):
    """A mean over pixels needs the covariances of all pairs of pixels."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerKernels:
    """Kernels of a layer's units for two sets of inputs, as the layers before it become infinitely wide.

    Covariances of images are those of each pixel with itself, (n1, n2, h, w), or of all pairs, (n1, n2, h, w, h, w).

    Attributes:
        square1: mean squares at single inputs of the first set, (n1,) or (n1, h, w).
        square2: mean squares at those of the second.
        product: covariances of units at two inputs, (n1, n2, ...).
        tangent: inner products of the units' gradients by the parameters so far, (n1, n2, ...).
        affine: pending variances (w, b) of weights and biases of squares and product, not of the tangent; or None.
        same: which pairs are one and the same input, (n1, n2), or None if none is.
        error: largest share of a moment that a Hermite series has left out so far.
    """

    square1: Array
    square2: Array
    product: Array
    tangent: Array
    affine: tuple[Array, Array] | None
    same: Array | None
    error: Array

    @property
    def num_pixels(self) -> int:
        """Number of pixel axes of a covariance: 0, 1 or 2."""
        return (self.product.ndim - 2) // 2

    def dense(self, w_std: ArrayLike, b_std: ArrayLike) -> "LayerKernels":
        """Return the kernels after a dense layer, or a 1 × 1 convolution (Mathematics, :eq:`kernels`)."""
        units = self.settled()
        w_var, b_var = self._squares(w_std=w_std, b_std=b_std)
        covariance = w_var * units.product + b_var
        return replace(units, tangent=covariance + w_var * units.tangent, affine=(w_var, b_var))

    def convolution(
        self,
        w_std: ArrayLike,
        b_std: ArrayLike,
        *,
        kernel_size: tuple[int, int] = (3, 3),
        strides: tuple[int, int] = (1, 1),
        padding: str = "CIRCULAR",
    ) -> "LayerKernels":
        """Return the kernels after a convolution (:eq:`convolution`), as :class:`~numpyro_wide.nn.NTKConv`.

        ``w_std`` is that of all weights of a filter together; the padding is "CIRCULAR", "SAME" or "VALID".
        """
        if not self.num_pixels:
            raise ValueError("a convolution needs images.")
        check_one_of("padding", padding, PADDINGS)

        def mean(values: Array) -> Array:
            for direction in (0, 1):
                # Of (n1, n2, h, w, h, w): -4 and -2 for the height.
                axes = [direction - 4, direction - 2] if values.ndim == 6 else [direction - 2]
                values = _mean_along(values, axes, kernel_size[direction], strides[direction], padding)
            return values

        return self.settled()._mapped(mean).dense(w_std, b_std)

    def activate(self, activation: Activation, determinant: Array | None = None) -> "LayerKernels":
        """Return the kernels of activated units, with their own :func:`reduced_determinant` if it is given."""
        dual = activation_dual(activation)
        w_var, b_var = self.affine or (jnp.ones_like(self.error), jnp.zeros_like(self.error))
        moments1, moments2 = (dual.moments(w_var * square + b_var) for square in (self.square1, self.square2))
        left, right = jax.tree.map(self._along_rows, moments1), jax.tree.map(self._along_columns, moments2)
        if determinant is None:
            squares = self._along_rows(self.square1), self._along_columns(self.square2)
            determinant = reduced_determinant(*squares, self.product, w_var, b_var)
        product, slope = dual.pairs(left, right, w_var * self.product + b_var, determinant)
        if self.same is not None:
            # An angle near 0 is off by √ε.
            same = self._same_unit(self.same)
            product, slope = jnp.where(same, left.product, product), jnp.where(same, left.slope, slope)
        error = jnp.maximum(self.error, jnp.maximum(moments1.error, moments2.error))
        return LayerKernels(moments1.product, moments2.product, product, slope * self.tangent, None, self.same, error)

    def normalise(self) -> "LayerKernels":
        """Return the kernels after layer normalisation over channels."""
        units = self.settled()
        scale1, scale2 = (1 / jnp.sqrt(square + LAYER_NORM_EPSILON) for square in (units.square1, units.square2))
        scale = self._along_rows(scale1) * self._along_columns(scale2)
        return replace(
            units,
            square1=units.square1 * scale1**2,
            square2=units.square2 * scale2**2,
            product=units.product * scale,
            tangent=units.tangent * scale,
        )

    def plus(self, other: "LayerKernels", weight: ArrayLike = 1.0, other_weight: ArrayLike = 1.0) -> "LayerKernels":
        """Return the kernels of a weighted sum of these units and independent others."""
        left, right = self.settled(), other.settled()
        if left.product.shape != right.product.shape:
            raise ValueError(
                f"a sum needs units at the same pixels, but got shapes {left.product.shape} and {right.product.shape}."
            )
        a, b = self._squares(weight=weight, other_weight=other_weight)
        sums = {name: a * getattr(left, name) + b * getattr(right, name) for name in _FIELDS}
        return replace(left, **sums, error=jnp.maximum(left.error, right.error))

    def flatten(self) -> "LayerKernels":
        """Return the kernels of the units of all pixels together."""
        units = self.settled()
        if not units.num_pixels:
            return units

        def mean(values: Array) -> Array:
            each_pixel = jnp.einsum("...hwhw->...hw", values) if values.ndim == 6 else values
            return jnp.mean(each_pixel, axis=(-2, -1))

        return units._mapped(mean)

    def features(self, pooling: str, w_std: ArrayLike, b_std: ArrayLike) -> "LayerKernels":
        """Return the kernels of the features, with which a rule ends.

        ``pooling`` is "flatten" or "mean" (:eq:`pooling`); both scales are the readout's.
        """
        units = self.settled()
        if pooling == "flatten" or not units.num_pixels:
            units = units.flatten()
            product, tangent = units.product, units.tangent
        elif units.num_pixels == 1:
            raise AllPairsNeededError
        else:
            product, tangent = (jnp.mean(values, axis=(-4, -3, -2, -1)) for values in (units.product, units.tangent))
        w_var, b_var = self._squares(w_std=w_std, b_std=b_std)
        return replace(units, product=w_var * product + b_var, tangent=w_var * tangent)

    def settled(self) -> "LayerKernels":
        """Return the same kernels with ``affine`` applied."""
        if self.affine is None:
            return self
        w_var, b_var = self.affine
        squares = {name: w_var * getattr(self, name) + b_var for name in ("square1", "square2", "product")}
        return replace(self, **squares, affine=None)

    def _mapped(self, function: Callable[[Array], Array]) -> "LayerKernels":
        """Return the kernels with a function of mean squares and covariances."""
        fields: dict[str, Any] = {name: function(getattr(self, name)) for name in _FIELDS}
        return replace(self, **fields)

    def _squares(self, **scales: ArrayLike) -> list[Array]:
        """Return the squares of scales, in the dtype of the inputs."""
        return [as_not_negative(name, value, dtype=self.product.dtype) ** 2 for name, value in scales.items()]

    def _along_rows(self, values: Array) -> Array:
        """Return values of the first set, (..., n1, h, w), to broadcast against the covariances."""
        if not values.ndim:
            return values
        return jnp.expand_dims(values, ((-1,), (-3,), (-5, -2, -1))[self.num_pixels])

    def _along_columns(self, values: Array) -> Array:
        if not values.ndim:
            return values
        return jnp.expand_dims(values, ((-2,), (-4,), (-6, -4, -3))[self.num_pixels])

    def _same_unit(self, same: Array) -> Array:
        """Return which covariances are those of one pixel of one image with itself."""
        same = jnp.expand_dims(same, range(2, self.product.ndim))
        if self.num_pixels < 2:
            return same
        height, width = self.product.shape[2:4]
        return same & jnp.eye(height * width, dtype=bool).reshape(1, 1, height, width, height, width)


@dataclass(frozen=True)
class Inputs:
    """Two sets of inputs, from which a rule begins.

    Attributes:
        x1: inputs, (n1, ...).
        x2: others, (n2, ...).
        same: which pairs are one and the same input, (n1, n2), or None.
        all_pairs: whether images begin with covariances of all pairs of pixels.
    """

    x1: Array
    x2: Array
    same: Array | None
    all_pairs: bool = False

    def vectors(self, input_scale: ArrayLike | None = None) -> LayerKernels:
        """Return the kernels of flattened inputs times ``input_scale``, a number or (d_in,)."""
        x1, x2 = (x.reshape(x.shape[0], -1) for x in (self.x1, self.x2))
        if input_scale is not None:
            check_input_scale(input_scale, x1.shape[1])
            scale = jnp.asarray(input_scale, x1.dtype)
            x1, x2 = (x * jnp.broadcast_to(scale, x.shape) for x in (x1, x2))
        product = jnp.matmul(x1, x2.T, precision="highest") / x1.shape[1]
        return self._begin(x1, x2, product)

    def images(self) -> LayerKernels:
        """Return the kernels of images, (n, height, width, channels)."""
        pairs = "ihwc,jyxc->ijhwyx" if self.all_pairs else "ihwc,jhwc->ijhw"
        product = jnp.einsum(pairs, self.x1, self.x2, precision="highest") / self.x1.shape[-1]
        return self._begin(self.x1, self.x2, product)

    def _begin(self, x1: Array, x2: Array, product: Array) -> LayerKernels:
        square1, square2 = jnp.mean(x1**2, axis=-1), jnp.mean(x2**2, axis=-1)
        error = jnp.zeros((), product.dtype)
        return LayerKernels(square1, square2, product, jnp.zeros_like(product), None, self.same, error)


Rule = Callable[[Any, Inputs], LayerKernels]

_MAX_UNROLLED = 3  # layers, for speed

_RULES: dict[type, Rule] = {}  # those of numpyro_wide.nn come with it


def register_kernel(module_type: type, rule: Rule) -> None:
    """Register the rule by which :func:`kernel` handles a network of your own, and subclasses without a rule.

    A rule follows the forward pass, from ``inputs.vectors()`` or ``inputs.images()`` through the methods of
    :class:`~numpyro_wide.wide_limit.LayerKernels` to ``features(pooling, w_std, b_std)``, the readout's scales.

    Args:
        module_type: the class of the network.
        rule: function of the network and its :class:`~numpyro_wide.wide_limit.Inputs`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import linen
        >>> from numpyro_wide import wide_limit
        >>> from numpyro_wide.nn import NTKDense
        >>> class Sum(linen.Module):  # of a linear and a rectified branch
        ...     @linen.compact
        ...     def __call__(self, x):
        ...         return (NTKDense(500)(x) + jnp.maximum(NTKDense(500)(x), 0)) / 500**0.5
        >>> def rule(network, inputs):
        ...     x = inputs.vectors()
        ...     return x.dense(1.0, 0.0).plus(x.dense(1.0, 0.0).activate("relu")).features("flatten", 1.0, 0.0)
        >>> wide_limit.register_kernel(Sum, rule)
        >>> nngp, ntk = wide_limit.kernel(Sum())(jnp.ones((1, 4)))
        >>> nngp.round(3).tolist()
        [[1.5]]
    """
    _RULES[module_type] = rule


def rule_of(network: object) -> Rule:
    """Return the rule of a network; refuse one that has none."""
    for module_type in type(network).__mro__:
        if module_type in _RULES:
            return _RULES[module_type]
    names = listing(module_type.__name__ for module_type in _RULES)
    if isinstance(network, type):
        raise TypeError(f"network must be a module, not the class {network.__name__} itself; make one of it.")
    raise TypeError(
        f"the {type(network).__name__} has no rule for its infinite width; those that have one are {names}. Give it "
        "one by wide_limit.register_kernel, or take mean_kernel."
    )


def fully_connected(
    units: LayerKernels, depth: int, activation: Activation, scales: Mapping[str, ArrayLike], layer_norm: bool = False
) -> LayerKernels:
    """Return the kernels of an FCN's features, from its scales by name, w_std and b_std numbers or (depth,)."""
    dtype = units.error.dtype
    by_layer = tuple(jnp.broadcast_to(jnp.asarray(scales[name], dtype), (depth,)) for name in ("w_std", "b_std"))

    def layer(units: LayerKernels, scales: tuple[Array, Array]) -> LayerKernels:
        sums = units.dense(*scales)
        return (sums.normalise() if layer_norm else sums).activate(activation)

    hidden = through_layers(layer, units, by_layer, depth)
    return hidden.features("flatten", scales["readout_w_std"], scales["readout_b_std"])


def through_layers(
    layer: Callable[[LayerKernels, Any], LayerKernels], units: LayerKernels, scales: object, num_layers: int
) -> LayerKernels:
    """Carry the kernels through layers of one shape, with scales along leading axes."""
    if num_layers <= _MAX_UNROLLED:
        for i in range(num_layers):
            units = layer(units, jax.tree.map(lambda leaf, i=i: leaf[i], scales))
        return units
    # Gradients recompute a layer's temporaries, to save memory.
    through = jax.checkpoint(lambda units, layer_scales: (layer(units, layer_scales), None))
    return jax.lax.scan(through, units, scales, unroll=2)[0]
