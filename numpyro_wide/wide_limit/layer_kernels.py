"""Kernels of a wide network's units, and what each kind of layer makes of them."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import as_not_negative, check_input_scale
from numpyro_wide.wide_limit._activation import Activation, activation_dual
from numpyro_wide.wide_limit._convolution import mean_over_filter
from numpyro_wide.wide_limit._dual import reduced_determinant


class AllPairsNeededError(Exception):
    """A mean over pixels was asked of covariances of each pixel with itself alone."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerKernels:
    r"""Kernels of a layer's units for two sets of inputs, as the layers before it become infinitely wide.

    Units are independent, identically distributed over channels, so a covariance of one channel is that of all. Of
    images, a covariance is one of two pixels: of each pixel with the same of the other image, (n1, n2, h, w), which is
    all that a network needs up to "flatten"; or of all pairs, (n1, n2, h, w, h, w), for a mean over pixels. A rule of
    :func:`~numpyro_wide.wide_limit.register_kernel` makes them from :class:`Inputs`, and every method returns new ones.

    Attributes:
        square1: mean squares at single inputs of the first set, (n1,) or (n1, h, w).
        square2: mean squares at those of the second.
        product: covariances of units at two inputs, (n1, n2, ...).
        tangent: inner products of the units' gradients by the parameters of all layers so far, (n1, n2, ...).
        affine: variances (w, b) of weights and biases that squares and product are still to be multiplied by and
            increased by, the tangent not; None for no such.
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
        """Number of pixels that a covariance is about: 0, 1 or 2."""
        return (self.product.ndim - 2) // 2

    def dense(self, w_std: ArrayLike, b_std: ArrayLike) -> "LayerKernels":
        r"""Return the kernels after an affine layer, or a 1 × 1 convolution: $K = \sigma_w^2 \kappa + \sigma_b^2$.

        The tangent is $\Theta = K + \sigma_w^2 \dot\Theta$ (Jacot 2018, Theorem 1; Mathematics, :eq:`kernels`).

        Args:
            w_std: standard deviation $\sigma_w$ of the weights.
            b_std: standard deviation $\sigma_b$ of the biases.
        """
        units = self.settled()
        w_var, b_var = self._number("w_std", w_std) ** 2, self._number("b_std", b_std) ** 2
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
        r"""Return the kernels after a convolution: a mean over the filter, then a dense layer (:eq:`convolution`).

        Args:
            w_std: standard deviation $\sigma_w$ of the weights, all of a filter's together.
            b_std: standard deviation $\sigma_b$ of the biases.
            kernel_size: height and width of the filter.
            strides: steps along height and width.
            padding: "CIRCULAR", "SAME" or "VALID", as in :class:`~numpyro_wide.nn.NTKConv`.
        """
        units = self.settled()
        if not units.num_pixels:
            raise ValueError("a convolution needs images; these kernels are of units without pixels.")
        mean = lambda values, num: mean_over_filter(values, kernel_size, strides, padding, num_pixels=num)  # noqa: E731
        return replace(
            units,
            square1=mean(units.square1, 1),
            square2=mean(units.square2, 1),
            product=mean(units.product, units.num_pixels),
            tangent=mean(units.tangent, units.num_pixels),
        ).dense(w_std, b_std)

    def activate(self, activation: Activation) -> "LayerKernels":
        r"""Return the kernels of activated units: $E[\varphi(u) \varphi(v)]$ and $E[\varphi'(u) \varphi'(v)] \Theta$.

        Args:
            activation: name of an activation, or a function of arrays.
        """
        dual: Any = activation_dual(activation)
        w_var, b_var = self.affine or (jnp.ones_like(self.error), jnp.zeros_like(self.error))
        one, other = (dual.moments(w_var * square + b_var) for square in (self.square1, self.square2))
        left, right = jax.tree.map(self._of_rows, one), jax.tree.map(self._of_columns, other)
        determinant = reduced_determinant(
            self._of_rows(self.square1), self._of_columns(self.square2), self.product, w_var, b_var
        )
        product, slope = dual.pairs(left, right, w_var * self.product + b_var, determinant)
        if self.same is not None:
            # Variances and covariance are rounded each in its own way. Here they must be the same number, for
            # an angle near 0 is off by √ε where its cosine is off by ε.
            same = self._same_unit(self.same)
            product, slope = jnp.where(same, left.product, product), jnp.where(same, left.slope, slope)
        error = jnp.maximum(self.error, jnp.maximum(one.error, other.error))
        return LayerKernels(one.product, other.product, product, slope * self.tangent, None, self.same, error)

    def normalise(self) -> "LayerKernels":
        """Return the kernels after layer normalisation over channels, whose mean tends to zero: units of variance 1."""
        from numpyro_wide.nn.internal import LAYER_NORM_EPSILON  # with flax, which is not loaded with the package

        units = self.settled()
        scale1, scale2 = (1 / jnp.sqrt(square + LAYER_NORM_EPSILON) for square in (units.square1, units.square2))
        scale = self._of_rows(scale1) * self._of_columns(scale2)
        return replace(
            units,
            square1=units.square1 * scale1**2,
            square2=units.square2 * scale2**2,
            product=units.product * scale,
            tangent=units.tangent * scale,
        )

    def plus(self, other: "LayerKernels", weight: ArrayLike = 1.0, other_weight: ArrayLike = 1.0) -> "LayerKernels":
        """Return the kernels of a weighted sum of these units and others, whose last weights are their own.

        Args:
            other: kernels of the other units, such as those of a residual branch.
            weight: factor of these units.
            other_weight: factor of the others.
        """
        one, two = self.settled(), other.settled()
        if one.product.shape != two.product.shape:
            raise ValueError(
                f"a sum needs units at the same pixels, but the kernels have shapes {one.product.shape} and "
                f"{two.product.shape}."
            )
        a, b = self._number("weight", weight) ** 2, self._number("other_weight", other_weight) ** 2
        names = ("square1", "square2", "product", "tangent")
        sums = {name: a * getattr(one, name) + b * getattr(two, name) for name in names}
        return replace(one, **sums, error=jnp.maximum(one.error, two.error))

    def flatten(self) -> "LayerKernels":
        """Return the kernels of the units of all pixels taken together: means over each pixel with itself."""
        units = self.settled()
        if not units.num_pixels:
            return units
        return replace(
            units,
            square1=jnp.mean(units.square1, axis=(-2, -1)),
            square2=jnp.mean(units.square2, axis=(-2, -1)),
            product=jnp.mean(units.each_pixel(units.product), axis=(-2, -1)),
            tangent=jnp.mean(units.each_pixel(units.tangent), axis=(-2, -1)),
        )

    def features(self, pooling: str, w_std: ArrayLike, b_std: ArrayLike) -> "LayerKernels":
        """Return the kernels of the features that the readout's N(0, 1) weights multiply, with which a rule ends.

        Mathematics, :eq:`pooling`.

        Args:
            pooling: "flatten", for the units of all pixels, or "mean", for their average over pixels.
            w_std: standard deviation of the readout's weights.
            b_std: standard deviation of the readout's bias.
        """
        units = self.settled()
        if pooling == "flatten" or not units.num_pixels:
            units = units.flatten()
            product, tangent = units.product, units.tangent
        elif units.num_pixels == 1:
            raise AllPairsNeededError
        else:
            product, tangent = (jnp.mean(part, axis=(-4, -3, -2, -1)) for part in (units.product, units.tangent))
        w_var, b_var = self._number("w_std", w_std) ** 2, self._number("b_std", b_std) ** 2
        return replace(units, product=w_var * product + b_var, tangent=w_var * tangent)

    def settled(self) -> "LayerKernels":
        """Return the same kernels with ``affine`` applied."""
        if self.affine is None:
            return self
        w_var, b_var = self.affine
        squares = {name: w_var * getattr(self, name) + b_var for name in ("square1", "square2", "product")}
        return replace(self, **squares, affine=None)

    def each_pixel(self, covariances: Array) -> Array:
        """Return the covariances of each pixel with the same of the other image, (n1, n2, h, w)."""
        if self.num_pixels < 2:
            return covariances
        return jnp.einsum("...hwhw->...hw", covariances)

    def _number(self, name: str, value: ArrayLike) -> Array:
        """Return a scale in the type of the kernels, which the inputs set."""
        return as_not_negative(name, value, dtype=self.product.dtype)

    def _of_rows(self, values: Array) -> Array:
        """Return what single inputs of the first set have, (..., n1, h, w), to broadcast against the covariances."""
        if not values.ndim:
            return values
        return jnp.expand_dims(values, ((-1,), (-3,), (-5, -2, -1))[self.num_pixels])

    def _of_columns(self, values: Array) -> Array:
        if not values.ndim:
            return values
        return jnp.expand_dims(values, ((-2,), (-4,), (-6, -4, -3))[self.num_pixels])

    def _same_unit(self, same: Array) -> Array:
        """Return which covariances are those of one pixel of one image with itself, as a shape that broadcasts."""
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
        x2: inputs, (n2, ...).
        same: which pairs are one and the same input, (n1, n2), or None if none is.
        all_pairs: whether images begin with the covariances of all pairs of pixels, as a mean over pixels needs.
    """

    x1: Array
    x2: Array
    same: Array | None
    all_pairs: bool = False

    def vectors(self, input_scale: ArrayLike | None = None) -> LayerKernels:
        """Return the kernels of inputs as vectors, flattened if they are images.

        Args:
            input_scale: factor of the inputs, a number or one for each column, or None.
        """
        x1, x2 = (scaled_inputs(x.reshape(x.shape[0], -1), input_scale) for x in (self.x1, self.x2))
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


def scaled_inputs(x: Array, input_scale: Any) -> Array:
    """Return the inputs (n, d_in) in the units that the network sees."""
    if input_scale is None:
        return x
    scale = as_not_negative("input_scale", input_scale, dtype=x.dtype)
    check_input_scale(scale, x.shape[1])
    return x * jnp.broadcast_to(scale, x.shape)
