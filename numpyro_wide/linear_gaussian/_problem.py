"""Brings what users pass into the one form that the linear algebra works on, and says what does not fit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import as_floats, check_positive, is_known
from numpyro_wide.linear_gaussian._roots import ROOTS, Root

VARIANTS = ("auto", *ROOTS)

# Core routines map (features (n, d), targets (n, k), regulariser (), *columns (d, k)) to a pair: arrays with a
# trailing axis for the outputs, and anything that is the same for all outputs.
Core: TypeAlias = Callable[..., tuple[Any, Any]]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["features", "targets", "noise_scale", "regulariser", "prior_loc", "prior_scale"],
    meta_fields=["variant"],
)
@dataclass(frozen=True)
class ReadoutProblem:
    r"""A readout with its features, likelihood and prior: cast to one floating-point type, and checked.

    Every function here makes one of what it is given; who uses several of them, such as the handlers of
    :mod:`numpyro_wide.readout`, makes one of its own with :meth:`of` and calls what stands behind the functions.

    Attributes:
        features: $\Psi$, (n, d).
        targets: $Y$, (n,) or (n, k).
        noise_scale: $\sigma$; broadcasts against the targets.
        regulariser: $\lambda$; broadcasts against the targets. None is $\sigma^2$.
        prior_loc: broadcasts against the readout, (d,) or (d, k).
        prior_scale: broadcasts likewise.
        variant: "feature", "data" or "data-cholesky".
    """

    features: Array
    targets: Array
    noise_scale: Array | np.ndarray
    regulariser: Array | np.ndarray | None
    prior_loc: Array | np.ndarray
    prior_scale: Array | np.ndarray
    variant: str

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
        readout: tuple[str, tuple[int, ...]] | None = None,
        same_type: tuple[ArrayLike, ...] = (),
    ) -> "ReadoutProblem":
        """Casts and checks.

        Args:
            features: as the attributes say, like the others.
            targets: likewise.
            noise_scale: likewise.
            regulariser: likewise.
            variant: "auto" takes the smaller Gram matrix's.
            prior_loc: likewise.
            prior_scale: likewise.
            readout: what a readout is called in error messages, and its shape.
            same_type: further arrays that the common floating-point type must hold.

        Raises:
            TypeError: for what is no array of numbers.
            ValueError: if shapes do not fit, a scale is not positive, or the variant is unknown.
        """
        check_variant(variant)
        check_positive("noise_scale", noise_scale)
        check_positive("prior_scale", prior_scale)
        if regulariser is not None:
            check_positive("regulariser", regulariser)
        features, targets, *_ = as_floats(features, targets, *same_type)
        _check_data(features, targets)
        readout_shape = (features.shape[1], *targets.shape[1:])
        if readout is not None:
            _check_readout(*readout, features, targets)

        def cast(name: str, value: ArrayLike, shape: tuple[int, ...], must_be_positive: bool = True) -> Any:
            # What is known stays NumPy's: under jit JAX would trace it, and nobody could tell a prior mean of zero.
            is_plain = isinstance(value, int | float | np.ndarray | np.generic)
            array = np.asarray(value, targets.dtype) if is_plain else as_floats(value, dtype=targets.dtype)[0]
            _check_broadcasts(name, array, shape)
            # What is refused where it is known gives NaN under jit: squared, a negative one would pass for its mirror
            # image.
            return jnp.where(array > 0, array, jnp.nan) if must_be_positive and not is_known(value) else array

        if variant == "auto":
            variant = "feature" if features.shape[1] <= features.shape[0] else "data-cholesky"
        return cls(
            features,
            targets,
            cast("noise_scale", noise_scale, targets.shape),
            None if regulariser is None else cast("regulariser", regulariser, targets.shape),
            cast("prior_loc", prior_loc, readout_shape, must_be_positive=False),
            cast("prior_scale", prior_scale, readout_shape),
            variant,
        )

    @property
    def readout_shape(self) -> tuple[int, ...]:
        """(d,) or (d, k)."""
        return (self.features.shape[1], *self.targets.shape[1:])

    def with_targets(self, targets: Array) -> "ReadoutProblem":
        """The same for other targets of the same shape."""
        return replace(self, targets=targets.astype(self.targets.dtype))

    def exact(self) -> "ReadoutProblem":
        """The same at λ = σ², where the map gives draws of the posterior."""
        return replace(self, regulariser=None)

    def noise_above_rounding(self) -> Array:
        """The noise variance as a multiple of the least that leaves a trace: below one, all is NaN. A scalar."""
        standard = standardise(self.exact())
        return jnp.min(standard.regulariser / _least_variance(_squared_norm(standard)))

    def root(self, features: Array, regulariser: Array) -> Root:
        """The root of the variant, for standardised features."""
        return ROOTS[self.variant].of(features, regulariser)


class Standardised(NamedTuple):
    """A readout with a standard normal prior, and noise that is the same in every row.

    Attributes:
        features: (n, d), or (k, n, d) where each output has its own.
        targets: (n, k).
        regulariser: scalar, or (k,) where each output has its own.
        log_scale: sum over the elements of the targets of the log of what each was divided by.
    """

    features: Array
    targets: Array
    regulariser: Array
    log_scale: Array

    @property
    def is_shared(self) -> bool:
        """Whether one factorisation serves all outputs."""
        return self.features.ndim == 2 and self.regulariser.ndim == 0


def standardise(problem: ReadoutProblem) -> Standardised:
    """Moves the prior's loc and scale, and noise that varies over rows (:eq:`rows`), into features and targets."""
    features, targets = problem.features, as_matrix(problem.targets)
    is_vector = problem.targets.ndim == 1
    regulariser = problem.noise_scale**2 if problem.regulariser is None else problem.regulariser
    variance = broadcastable_matrix(regulariser, is_vector)
    loc = broadcastable_matrix(problem.prior_loc, is_vector)
    scale = broadcastable_matrix(problem.prior_scale, is_vector)

    num_outputs = targets.shape[1]
    if not _is_known_zero(problem.prior_loc):
        targets = targets - features @ jnp.broadcast_to(loc, (features.shape[1], num_outputs))
    features = features * scale.T if scale.shape[1] == 1 else features[None] * scale.T[:, None]

    if variance.shape[0] == 1:
        regulariser = variance[0, 0] if variance.shape[1] == 1 else variance[0]
        return Standardised(features, targets, regulariser, jnp.zeros((), targets.dtype))
    row_scale = jnp.sqrt(variance)
    if variance.shape[1] == 1:
        features = features / row_scale if features.ndim == 2 else features / row_scale[None]
    else:
        features = (features if features.ndim == 3 else features[None]) / row_scale.T[:, :, None]
    log_scale = jnp.log(row_scale).sum() * (num_outputs // variance.shape[1])
    return Standardised(features, targets / row_scale, jnp.ones((), targets.dtype), log_scale)


def resolved(standard: Standardised) -> Standardised:
    """With NaN for a noise variance that is lost in the rounding of the Gram matrix."""
    return standard._replace(regulariser=above_rounding(standard.regulariser, _squared_norm(standard)))


def above_rounding(variance: Array, squared_norm: Array) -> Array:
    r"""The noise variance, or NaN below a tenth of $\epsilon \|\Psi\|_F^2$.

    There the factorisation of a Gram matrix of low rank fails, or gives a finite result that is wrong by many nats.
    """
    return jnp.where(variance < _least_variance(squared_norm), jnp.nan, variance)


def _least_variance(squared_norm: Array) -> Array:
    return 0.1 * jnp.finfo(squared_norm.dtype).eps * squared_norm


def _squared_norm(standard: Standardised) -> Array:
    return jnp.sum(standard.features**2, axis=(-2, -1))


def for_each_output(core: Core, standard: Standardised, *columns: Array) -> tuple[Any, Any]:
    """Runs ``core`` once for all outputs, or once for each where they do not share a factorisation.

    Returns what ``core`` returns; the second part with a leading axis, of length 1 or k.
    """
    features, targets, regulariser, _ = standard
    if standard.is_shared:
        by_output, common = core(features, targets, regulariser, *columns)
        return by_output, jax.tree.map(lambda x: x[None], common)
    in_axes = (0 if features.ndim == 3 else None, 0, 0 if regulariser.ndim else None, *(0 for _ in columns))
    split = [x.T[:, :, None] for x in (targets, *columns)]
    by_output, common = jax.vmap(core, in_axes)(features, split[0], regulariser, *split[1:])
    return jax.tree.map(lambda x: x[:, :, 0].T, by_output), common


def broadcast_like(value: Array | np.ndarray, x: Array) -> Array:
    """``value`` with the shape and type of ``x``."""
    return jnp.broadcast_to(jnp.asarray(value, x.dtype), x.shape)


def as_matrix(x: Array) -> Array:
    """A vector becomes a single column."""
    return x[:, None] if x.ndim == 1 else x


def broadcastable_matrix(value: Array | np.ndarray, is_vector: bool) -> Array:
    """What broadcasts against a vector (m,) or a matrix (m, k), as a matrix (1 or m, 1 or k) that does so too."""
    value = jnp.asarray(value)
    return value.reshape(-1, 1) if is_vector else value.reshape((1,) * (2 - value.ndim) + value.shape)


def check_variant(variant: str) -> None:
    """One of the known variants."""
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(map(repr, VARIANTS))}, but got {variant!r}.")


def _check_data(features: Array, targets: Array) -> None:
    if features.ndim != 2:
        raise ValueError(
            f"features must have shape (n, d), but got {features.shape}; flatten trailing axes, or use vmap."
        )
    if targets.ndim not in (1, 2) or targets.shape[0] != features.shape[0]:
        raise ValueError(
            f"targets must have shape ({features.shape[0]},) or ({features.shape[0]}, k), one row for each row of the "
            f"features {features.shape}, but got {targets.shape}."
        )


def _check_readout(name: str, shape: tuple[int, ...], features: Array, targets: Array) -> None:
    expected = (features.shape[1], *targets.shape[1:])
    if tuple(shape) == expected:
        return
    is_one_column = len(shape) == 1 and targets.shape[1:] == (1,)
    remedy = f"give targets of shape ({targets.shape[0]},)" if is_one_column else "give both the same columns"
    raise ValueError(
        f"{name} must have shape {expected} to go with features {features.shape} and targets {targets.shape}, but got "
        f"{tuple(shape)}; {remedy}, or change the readout."
    )


def _check_broadcasts(name: str, array: Array | np.ndarray, shape: tuple[int, ...]) -> None:
    try:
        fits = jnp.broadcast_shapes(array.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name} must broadcast against shape {shape}, but got {array.shape}.")


def _is_known_zero(value: Array | np.ndarray) -> bool:
    return not isinstance(value, jax.core.Tracer) and not np.any(np.asarray(value))
