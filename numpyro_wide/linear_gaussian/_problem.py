"""Linear Gaussian problem of a readout, and its array functions."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from numpyro_wide._checks import as_floats, check_one_of, check_positive, is_known
from numpyro_wide.linear_gaussian._evidence import (
    Standardised,
    as_matrix,
    broadcastable_matrix,
    evidence_rounding,
    function_moments,
    joint_function_moments,
    left_out_moments,
    log_evidence_of,
    posterior_moments,
)
from numpyro_wide.linear_gaussian._linalg import full_precision
from numpyro_wide.linear_gaussian._roots import ROOTS

if TYPE_CHECKING:
    from numpyro_wide.linear_gaussian._row_blocks import RowFeatures

VARIANTS = ("auto", *ROOTS)
STATIC = {"static": True}  # metadata of a field outside the tree


def check_variant(variant: str) -> None:
    """Refuse an unknown variant."""
    check_one_of("variant", variant, VARIANTS)


def check_data(features: "Array | RowFeatures", targets: Array) -> None:
    """Refuse features and targets of unfit shapes."""
    if features.ndim != 2:
        raise ValueError(
            f"features must have shape (n, d), but got {features.shape}; name what multiplies the readout, not the "
            "mean, flatten trailing axes, or use vmap."
        )
    if targets.ndim not in (1, 2) or targets.shape[0] != features.shape[0]:
        raise ValueError(
            f"targets must have shape ({features.shape[0]},) or ({features.shape[0]}, k), like the "
            f"features {features.shape}, but got {targets.shape}; are these features what multiplies the readout?"
        )


def as_scale(
    name: str, value: ArrayLike, shape: tuple[int, ...], dtype: DTypeLike, hint: str = ""
) -> Array | np.ndarray:
    """Return positive numbers of a broadcastable shape; others are refused, or NaN under jit."""
    check_positive(name, value)
    array = as_number(name, value, shape, dtype, hint)
    # Squared, -σ would pass for σ.
    return array if is_known(value) else jnp.where(array > 0, array, jnp.nan)


def as_number(
    name: str, value: ArrayLike, shape: tuple[int, ...], dtype: DTypeLike, hint: str = ""
) -> Array | np.ndarray:
    """Return numbers of a broadcastable shape; known ones stay NumPy's, so that a zero is known under jit."""
    is_plain = isinstance(value, int | float | np.ndarray | np.generic)
    array = np.asarray(value, dtype) if is_plain else as_floats(value, dtype=dtype, names=(name,))[0]
    if not broadcasts(array.shape, shape):
        raise ValueError(f"{name} must broadcast against shape {shape}, but got {array.shape}{hint}.")
    return array


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a shape broadcasts to another."""
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def as_test_features(test_features: ArrayLike, features: Array) -> Array:
    """Return new rows of features, (m, d), in the problem's type."""
    (test_features,) = as_floats(jnp.asarray(test_features), dtype=features.dtype, names=("test_features",))
    if test_features.ndim != 2 or test_features.shape[1] != features.shape[1]:
        raise ValueError(
            f"test_features must have shape (m, {features.shape[1]}), one column for each of features "
            f"{features.shape}, but got {test_features.shape}."
        )
    return test_features


class ReadoutShapes:
    """Shapes and checks that dense and blocked problems share."""

    features: "Array | RowFeatures"
    targets: Array

    @property
    def readout_shape(self) -> tuple[int, ...]:
        """Shape of the readout, (d,) or (d, k)."""
        return (self.features.shape[1], *self.targets.shape[1:])

    def with_targets(self, targets: Array) -> Self:
        """Return the problem for other targets of the same shape."""
        problem: Any = self
        return replace(problem, targets=targets.astype(self.targets.dtype))

    def check_readout(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a readout of another shape than :attr:`readout_shape`."""
        if tuple(shape) == self.readout_shape:
            return
        is_one_column = len(shape) == 1 and self.targets.shape[1:] == (1,)
        remedy = f"give targets of shape ({len(self.targets)},)" if is_one_column else "give both the same columns"
        raise ValueError(
            f"{name} must have shape {self.readout_shape} to go with features {self.features.shape} and targets "
            f"{self.targets.shape}, but got {tuple(shape)}; {remedy}, or change the readout."
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReadoutProblem(ReadoutShapes):
    """Readout problem: features, likelihood and prior, of one floating-point type; a tree of arrays for JAX.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.linear_gaussian import ReadoutProblem
        >>> problem = ReadoutProblem.of(jnp.eye(2), jnp.ones(2), noise_scale=1.0)
        >>> mean, variance, _ = problem.predict(jnp.ones((1, 2)))
        >>> print(mean, variance, problem.log_evidence().round(3))
        [1.] [1.] -3.031
    """

    features: Array
    targets: Array
    noise_scale: Array | np.ndarray
    regulariser: Array | np.ndarray | None
    prior_loc: Array | np.ndarray
    prior_scale: Array | np.ndarray
    variant: str = field(metadata=STATIC)

    @classmethod
    def of(
        cls,
        features: ArrayLike,
        targets: ArrayLike,
        noise_scale: ArrayLike,
        regulariser: ArrayLike | None = None,
        variant: str = "auto",
        *,
        prior_loc: ArrayLike = 0.0,
        prior_scale: ArrayLike = 1.0,
        same_type: tuple[ArrayLike, ...] = (),
    ) -> "ReadoutProblem":
        r"""Cast to one floating-point type, and check.

        Args:
            features: $\Psi$, (n, d).
            targets: $Y$, (n,) or (n, k).
            noise_scale: $\sigma$, positive; broadcast against the targets.
            regulariser: $\lambda$, positive; broadcast against the targets; None for $\sigma^2$.
            variant: "feature" (Cholesky factor, (d, d); :eq:`feature`), "data-cholesky" (Cholesky factor, (n, n);
                :eq:`data-cholesky`), "data" (eigenvectors, (n, n), first derivatives only; :eq:`data`), or "auto" for
                "feature" if d ≤ n, else "data-cholesky".
            prior_loc: prior mean, broadcast against (d,) or (d, k).
            prior_scale: prior standard deviation, positive, broadcast likewise.
            same_type: further arrays of the common type.
        """
        check_variant(variant)
        features, targets, *_ = as_floats(features, targets, *same_type, names=("features", "targets"))
        check_data(features, targets)
        num_rows, num_features = features.shape
        if variant == "auto":
            variant = "feature" if num_features <= num_rows else "data-cholesky"
        dtype, readout_shape = targets.dtype, (num_features, *targets.shape[1:])
        hint = f"; the readout has one row for each of the {num_features} columns of the features"
        return cls(
            features,
            targets,
            as_scale("noise_scale", noise_scale, targets.shape, dtype),
            None if regulariser is None else as_scale("regulariser", regulariser, targets.shape, dtype),
            as_number("prior_loc", prior_loc, readout_shape, dtype, hint),
            as_scale("prior_scale", prior_scale, readout_shape, dtype, hint),
            variant,
        )

    def exact(self) -> "ReadoutProblem":
        """Return the problem at λ = σ²."""
        return replace(self, regulariser=None)

    def evidence_error(self) -> Array:
        """Estimate the rounding error of :meth:`log_evidence` in nats; infinite where that is NaN."""
        return self.exact()._standardised().sum_over_outputs(evidence_rounding, self._factorised)

    def map(self, phi: ArrayLike) -> tuple[Array, Array]:
        r"""Return the readout of $\phi$ and the log-determinant; see :func:`readout_map`."""
        return self._mapped(self._standardised().representable(), self._as_readout("phi", phi))

    def inverse_map(self, readout: ArrayLike) -> Array:
        r"""Return the repriorised readout $\phi$ of a readout; see :func:`readout_inverse_map`."""
        readout = self._as_readout("readout", readout)

        def core(features: Array, targets: Array, regulariser: Array, readout: Array) -> tuple[Array, tuple[()]]:
            return ROOTS[self.variant].of(features, regulariser).inverse(targets, readout), ()

        whitened = (readout - self._prior_loc()) / self._prior_scale()
        phi, _ = self._standardised().representable().for_each_output(core, as_matrix(whitened))
        return phi.reshape(readout.shape)

    def draw(self, phi: ArrayLike) -> Array:
        r"""Return a posterior draw for $\phi \sim N(0, I)$, (d,) or (d, k); NaN for noise below rounding."""
        return self._mapped(self.exact()._standardised().resolved(), self._as_readout("phi", phi))[0]

    def posterior(self) -> tuple[Array, Array]:
        """Return the readout's posterior mean and covariance; see :func:`readout_posterior`."""
        standard = self.exact()._standardised().resolved()
        mean, covariance = standard.for_each_output(posterior_moments)
        mean = self._prior_loc() + self._prior_scale() * mean.reshape(self.readout_shape)
        # Outputs with one covariance have one row of scales.
        scale = as_matrix(self._prior_scale()).T[: covariance.shape[0]]
        covariance = scale[:, :, None] * covariance * scale[:, None, :]
        return mean, covariance[0] if standard.is_shared else covariance

    def solved(self) -> "ReadoutProblem":
        """Return itself, which draws and predicts."""
        return self

    def log_evidence(self) -> Array:
        """Return the log evidence of the targets; see :func:`log_evidence`."""
        standard = self.exact()._standardised()
        return standard.sum_over_outputs(log_evidence_of, self._factorised) - standard.log_scale

    @full_precision
    def predict(
        self, test_features: ArrayLike, phi: ArrayLike | None = None, residuals: ArrayLike | None = None
    ) -> tuple[Array, Array, Array]:
        r"""Return the function's moments at new rows, and a draw by Matheron's rule (Mathematics, :eq:`predictive`).

        Args:
            test_features: $\Psi_*$, (m, d).
            phi: standard normal numbers of the readout's shape; zeros by default.
            residuals: standard normal numbers of the targets' shape; zeros by default.

        Returns:
            Mean, variance and draw of the noise-free function, (m,) or (m, k) each.
        """
        test_features = as_test_features(test_features, self.features)
        phi = jnp.zeros(self.readout_shape, self.targets.dtype) if phi is None else self._as_readout("phi", phi)
        shape, dtype = self.targets.shape, self.targets.dtype
        residuals = as_number("residuals", 0.0 if residuals is None else residuals, shape, dtype)

        core = partial(function_moments, test_features)
        columns = (as_matrix(column) for column in (self._prior_scale(), phi, jnp.broadcast_to(residuals, shape)))
        (mean, deviation), spread = self.exact()._standardised().resolved().for_each_output(core, *columns)
        shape = (test_features.shape[0], *self.targets.shape[1:])
        mean = mean.reshape(shape) + test_features @ self._prior_loc()
        # Outputs with one covariance have one row of variances.
        variance = jnp.broadcast_to(spread.T, as_matrix(mean).shape).reshape(shape)
        return mean, variance, mean + deviation.reshape(shape)

    def leave_one_out(self) -> tuple[Array, Array]:
        """Return mean and variance of each row's targets given all others, noise included, in the targets' shape."""
        standard = self.exact()._standardised().resolved()
        mean, spread = standard.for_each_output(left_out_moments)
        noise_scale = broadcastable_matrix(self.noise_scale, self.targets.ndim == 1)
        unit = noise_scale if noise_scale.shape[0] > 1 else jnp.ones((1, 1), mean.dtype)  # of standardised rows
        mean = as_matrix(self.targets) - unit * (standard.targets - mean)
        variance = jnp.broadcast_to(unit**2 * spread.T, mean.shape)
        return mean.reshape(self.targets.shape), variance.reshape(self.targets.shape)

    @full_precision
    def predict_jointly(self, test_features: ArrayLike) -> tuple[Array, Array]:
        """Return the function's mean at new rows, (m, k), and covariance, (1 or k, m, m)."""
        test_features = as_test_features(test_features, self.features)

        core = partial(joint_function_moments, test_features)
        standard = self.exact()._standardised().resolved()
        mean, covariance = standard.for_each_output(core, as_matrix(self._prior_scale()))
        return mean + as_matrix(test_features @ self._prior_loc()), covariance

    def _standardised(self) -> Standardised:
        regulariser = self.noise_scale**2 if self.regulariser is None else self.regulariser
        return Standardised.of(self.features, self.targets, regulariser, self.prior_loc, self.prior_scale)

    def _mapped(self, standard: Standardised, phi: Array) -> tuple[Array, Array]:
        def core(features: Array, targets: Array, regulariser: Array, phi: Array) -> tuple[Array, Array]:
            readout, log_abs_det = ROOTS[self.variant].of(features, regulariser).forward(targets, phi)
            return readout, log_abs_det * targets.shape[1]

        whitened, log_abs_det = standard.for_each_output(core, as_matrix(phi))
        scale = self._prior_scale()
        return self._prior_loc() + scale * whitened.reshape(phi.shape), log_abs_det.sum() + jnp.log(scale).sum()

    @property
    def _factorised(self) -> str:
        """Variant of the evidence, never by eigenvectors: a noise variance is lost in their rounding."""
        return "data-cholesky" if self.variant == "data" else self.variant

    def _prior_loc(self) -> Array:
        return jnp.broadcast_to(jnp.asarray(self.prior_loc), self.readout_shape)

    def _prior_scale(self) -> Array:
        return jnp.broadcast_to(jnp.asarray(self.prior_scale), self.readout_shape)

    def _as_readout(self, name: str, value: ArrayLike) -> Array:
        self.check_readout(name, np.shape(value))
        return as_floats(value, dtype=self.targets.dtype)[0]


def readout_map(
    features: ArrayLike,
    targets: ArrayLike,
    phi: ArrayLike,
    noise_scale: ArrayLike,
    regulariser: ArrayLike | None = None,
    variant: str = "auto",
    *,
    prior_loc: ArrayLike = 0.0,
    prior_scale: ArrayLike = 1.0,
) -> tuple[Array, Array]:
    r"""Map a repriorised readout to readout weights.

    $W = \text{loc} + \text{scale} \circ (\mu + A \phi)$ with $A A^\top = \Sigma = (I + \lambda^{-1} \Psi^\top
    \Psi)^{-1}$ and $\mu = \lambda^{-1} \Sigma \Psi^\top Y$ (Hron 2022, eqs. 2 and 3; Mathematics, :eq:`map`). At
    $\lambda = \sigma^2$, $\phi \sim N(0, I)$ gives a posterior draw. $\lambda$ is at least $\epsilon \|\Psi\|_F^2$.

    ``phi`` is $\phi$, (d,) or (d, k); other arguments are those of :meth:`ReadoutProblem.of`.

    Returns:
        Readout, of the shape of ``phi``, and $\log|\det \partial W / \partial \phi|$, a scalar.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import linear_gaussian
        >>> features, targets = jnp.array([[1.0, 0.0], [0.0, 2.0]]), jnp.array([1.0, -1.0])
        >>> readout, log_abs_det = linear_gaussian.readout_map(features, targets, jnp.zeros(2), noise_scale=1.0)
        >>> print(readout, log_abs_det.round(3))  # with φ = 0 the readout is the posterior mean
        [ 0.5 -0.4] -1.151
    """
    prior = {"prior_loc": prior_loc, "prior_scale": prior_scale}
    return ReadoutProblem.of(features, targets, noise_scale, regulariser, variant, **prior, same_type=(phi,)).map(phi)


def readout_inverse_map(
    features: ArrayLike,
    targets: ArrayLike,
    readout: ArrayLike,
    noise_scale: ArrayLike,
    regulariser: ArrayLike | None = None,
    variant: str = "auto",
    *,
    prior_loc: ArrayLike = 0.0,
    prior_scale: ArrayLike = 1.0,
) -> Array:
    r"""Return $\phi$ of a readout $W$, (d,) or (d, k): the inverse of :func:`readout_map`, with its arguments."""
    prior = {"prior_loc": prior_loc, "prior_scale": prior_scale}
    problem = ReadoutProblem.of(features, targets, noise_scale, regulariser, variant, **prior, same_type=(readout,))
    return problem.inverse_map(readout)


def log_evidence(
    features: ArrayLike,
    targets: ArrayLike,
    noise_scale: ArrayLike,
    variant: str = "auto",
    *,
    prior_loc: ArrayLike = 0.0,
    prior_scale: ArrayLike = 1.0,
) -> Array:
    r"""Return the log density of the targets with the readout integrated out, summed over outputs.

    $\log N(Y; \Psi\,\text{loc}, \Psi \operatorname{diag}(\text{scale}^2) \Psi^\top + \sigma^2 I)$ (Hron 2022, eq. 5;
    Mathematics, :eq:`evidence`), with its derivative in closed form (:eq:`gradient`). Arguments are those of
    :meth:`ReadoutProblem.of`.

    Returns:
        Log evidence, a scalar; NaN for noise below rounding, $\sigma^2 < 0.1\, \epsilon \|\Psi\|_F^2$, or ten times
            that by a data variant of more rows than columns; these need float64.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import linear_gaussian
        >>> linear_gaussian.log_evidence(jnp.zeros((2, 3)), jnp.zeros(2), noise_scale=1.0).round(4)  # -log(2π)
        Array(-1.8379, dtype=float32)
    """
    problem = ReadoutProblem.of(
        features, targets, noise_scale, variant=variant, prior_loc=prior_loc, prior_scale=prior_scale
    )
    return problem.log_evidence()


def readout_posterior(
    features: ArrayLike,
    targets: ArrayLike,
    noise_scale: ArrayLike,
    *,
    prior_loc: ArrayLike = 0.0,
    prior_scale: ArrayLike = 1.0,
) -> tuple[Array, Array]:
    r"""Return mean and covariance of the readout given features and targets.

    $\Sigma = (I + \sigma^{-2} \Psi^\top \Psi)^{-1}$ and $\mu = \sigma^{-2} \Sigma \Psi^\top Y$ (Hron 2022, eq. 2;
    Mathematics, :eq:`posterior`) for a standard normal prior. Arguments are those of :meth:`ReadoutProblem.of`.

    Returns:
        Mean, (d,) or (d, k), and covariance of an output's weights, (d, d); (k, d, d) where noise or prior scale vary
        over outputs. NaN for noise below rounding, $\sigma^2 < \epsilon \|\Psi\|_F^2$, which needs float64.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide import linear_gaussian
        >>> features, targets = jnp.array([[1.0, 0.0], [0.0, 2.0]]), jnp.array([1.0, -1.0])
        >>> mean, covariance = linear_gaussian.readout_posterior(features, targets, noise_scale=1.0)
        >>> print(mean, jnp.diagonal(covariance))
        [ 0.5 -0.4] [0.5 0.2]
    """
    return ReadoutProblem.of(features, targets, noise_scale, prior_loc=prior_loc, prior_scale=prior_scale).posterior()
