"""Gaussian surrogates of other likelihoods, fitted at the wide limit."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import check_finite, check_known
from numpyro_wide._traces import unwrap
from numpyro_wide.linear_gaussian._surrogate import Surrogate
from numpyro_wide.wide_limit._layer_kernels import check_shape, check_symmetric
from numpyro_wide.wide_limit._likelihoods import Averages, Derivatives, Likelihood, Nodes
from numpyro_wide.wide_limit._observations import Observations

_NUM_NORMALS = 128
_ROUNDING = 1e-5  # of a kernel over its trace, in single precision


def fitted_surrogate(
    observations: ArrayLike,
    likelihood: str | Callable[[Array], dist.Distribution],
    kernel: ArrayLike,
    *,
    num_classes: int | None = None,
    contrasts: bool = False,
    total_count: ArrayLike | None = None,
    concentration: ArrayLike | None = None,
    df: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    offset: ArrayLike = 0.0,
    progress_bar: bool = True,
) -> Surrogate:
    r"""Fit a Gaussian surrogate likelihood, targets and noise, at the wide limit, for ``repriorise``.

    The Gaussian likelihood of the best Gaussian posterior of the function values $f$ under their prior $N(0, K)$
    (Mathematics, :eq:`sites`), in double precision. The posterior of the repriorised model stays exact. Function
    values are the logit ("bernoulli", "binomial"), the log rate ("poisson"), the log mean
    ("negative_binomial"), the location ("student_t") or $k$ logits with one weight a row ("categorical"). A function to
    a NumPyro distribution, such as ``lambda f: dist.Bernoulli(logits=f)``, gets them in the shape of the observations,
    or (n, k) with ``num_classes``; it must be twice differentiable, and negative curvature counts as zero.

    Args:
        observations: (n,), or (n, k) for independent outputs; class labels from 0, (n,).
        likelihood: a name above, or a function to a distribution.
        kernel: prior covariance $K$ (n, n) of an output's function values, by :func:`~numpyro_wide.mean_kernel` or
            ``wide_limit.fcn_kernel(...)(x)[0]``.
        num_classes: number of classes $k$, or of function values of a row.
        contrasts: whether the logits are in the basis of :func:`~numpyro_wide.surrogates.class_contrasts`.
        total_count: number of trials of a binomial; broadcasts against the observations, like those below.
        concentration: concentration $r$ of a negative binomial, of variance $\mu + \mu^2 / r$.
        df: degrees of freedom $\nu$ of Student's t.
        scale: scale $s$ of Student's t.
        offset: part of the function values besides ``features @ readout``, such as a log exposure; of classes it
            broadcasts against the (n, k) logits.
        progress_bar: whether to show a bar from the fifth second on.

    Returns:
        ``(targets, noise_scale)``, of the shape of the observations; for a categorical (n, k), or (n, k - 1) with
        contrasts, and (n, 1).

    Raises:
        ValueError: for dependent rows, or a kernel that is not positive semidefinite.

    Warns:
        RuntimeWarning: if the fit does not settle.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_wide import fitted_surrogate, mean_kernel, repriorise
        >>> def model(x, counts=None):
        ...     hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 50]).to_event(2))
        ...     features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / 50**0.5)
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([50]).to_event(1))
        ...     numpyro.sample("count", dist.Poisson(jnp.exp(features @ w)).to_event(1), obs=counts)
        >>> x, counts = jnp.array([[-1.0], [0.5], [1.0]]), jnp.array([0, 1, 3])
        >>> kernel = mean_kernel(jax.random.key(0), model, "features", x)
        >>> fitted = fitted_surrogate(counts, "poisson", kernel)
        >>> wrapped = repriorise(model, readout="w", features="features", targets="counts", surrogate=fitted)
        >>> fitted.targets.shape, fitted.noise_scale.shape
        ((3,), (3,))
    """
    remedy = "call it before, outside of the model too: repriorise(..., surrogate=fitted_surrogate(...))"
    check_known("fitted_surrogate fits once, to numbers", observations, kernel, remedy=remedy)
    parameters = {"num_classes": num_classes, "total_count": total_count, "concentration": concentration}
    parameters |= {"df": df, "scale": scale}
    observations_type = FunctionObservations if callable(likelihood) else Observations
    observed = observations_type.of(observations, likelihood, parameters, offset, contrasts)
    covariance = _checked_kernel(kernel, len(observed.values))
    return observed.surrogate(covariance, progress_bar)


def _checked_kernel(kernel: ArrayLike, num_rows: int) -> np.ndarray:
    """Return the symmetric kernel in float64; refuse one not (n, n) and positive semidefinite."""
    check_finite("kernel", kernel)
    matrix = np.asarray(kernel, float)
    check_shape("kernel", matrix, (num_rows, num_rows), "(n, n)")
    check_symmetric("kernel", matrix)
    matrix, diagonal = (matrix + matrix.T) / 2, np.trace(matrix) * np.eye(num_rows)
    try:
        np.linalg.cholesky(matrix + _ROUNDING * diagonal)
    except np.linalg.LinAlgError as error:
        raise ValueError(
            "kernel must be positive semidefinite and not zero; take mean_kernel or wide_limit.kernel."
        ) from error
    # Large weights would bring negative eigenvalues of rounding out.
    is_single = np.asarray(kernel).dtype.itemsize < 8
    return matrix + is_single * np.finfo(np.float32).eps * diagonal


@dataclass(frozen=True)
class FunctionLikelihood(Likelihood):
    """A likelihood known by a function alone, in double precision."""

    log_density: Callable[[Array], Array]  # (n, c) to (n,), row by row
    shape: tuple[int, int]  # (n, c)

    def __post_init__(self) -> None:
        """Refuse a log density with rows that depend on each other."""
        slope = jax.jit(jax.grad(lambda values: jnp.sum(self.log_density(values))))
        values = jnp.zeros(self.shape)
        moved = values.at[1::2].add(0.5)
        slopes, moved_slopes = np.asarray(slope(values))[::2], np.asarray(slope(moved))[::2]
        if not np.allclose(slopes, moved_slopes, rtol=1e-6, atol=1e-9, equal_nan=True):
            raise ValueError(
                "the likelihood of a row must depend on the function value of that row alone; say num_classes where "
                "each row has several function values."
            )

    @property
    def start(self) -> np.ndarray:
        return np.zeros(self.shape)

    def derivatives(self, values: np.ndarray) -> Derivatives:
        value, slope, weight = map(np.asarray, self._at_nodes(values))
        return value, slope, np.maximum(weight, 0.0)

    def expected(self, mean: np.ndarray, variance: np.ndarray) -> Averages:
        return self.averaged(mean, variance, self._nodes)

    @cached_property
    def _nodes(self) -> Nodes | None:
        return normal_pairs(_NUM_NORMALS, self.shape) if self.shape[1] > 1 else None

    @cached_property
    def _at_nodes(self) -> Callable[[np.ndarray], tuple[Array, Array, Array]]:
        def at_node(values: Array) -> tuple[Array, Array, Array]:
            slope_at = jax.grad(lambda values: jnp.sum(self.log_density(values)))

            # By the independence of rows.
            def second(column: int) -> Array:
                return jax.jvp(slope_at, (values,), (jnp.zeros_like(values).at[:, column].set(1.0),))[1][:, column]

            num_columns = self.shape[1]
            weight = -sum((second(column) for column in range(1, num_columns)), start=second(0)) / num_columns
            return self.log_density(values), slope_at(values), weight

        return jax.jit(jax.vmap(at_node))


def normal_pairs(count: int, shape: tuple[int, int]) -> Nodes:
    """Return antithetic normal draws of sample variance one."""
    half = np.random.default_rng(0).normal(size=(-(-count // 2), *shape))
    half /= np.sqrt(np.mean(half**2, axis=0))
    return np.concatenate([half, -half]), np.full(2 * len(half), 0.5 / len(half))


class FunctionObservations(Observations):
    """Observations with a function to a NumPyro distribution."""

    def columns(self) -> list[Likelihood]:
        """Return the likelihoods of separate fits."""
        if "num_classes" in self.parameters:
            across = jnp.asarray(self.basis.T)
            return [self._column(lambda f: f @ across, len(across), self.values.shape[:1], ())]

        def everywhere(place: tuple[int, ...], f: Array) -> Array:
            return jnp.zeros(self.values.shape).at[:, *place].set(f[:, 0])

        return [self._column(partial(everywhere, place), 1, self.values.shape, place) for place in self.places]

    def _column(
        self, argument: Callable[[Array], Array], num_columns: int, shape: tuple[int, ...], place: tuple[int, ...]
    ) -> FunctionLikelihood:
        """Return the likelihood at a place among densities of this shape, by the distribution's argument."""
        shift = jnp.asarray(self.offset)
        values = _checked_values(self.likelihood(shift), self.values, shape)

        def log_density(f: Array) -> Array:
            return unwrap(self.likelihood(argument(f) + shift)).log_prob(values)[:, *place]

        return FunctionLikelihood(log_density, (len(self.values), num_columns))


def _checked_values(distribution: dist.Distribution, observed: np.ndarray, shape: tuple[int, ...]) -> Array:
    """Return the observations in the distribution's dtype, after checks."""
    base = unwrap(distribution)
    support = base.support
    values = jnp.asarray(np.round(observed).astype(int) if support.is_discrete else observed)
    density_shape = jax.eval_shape(base.log_prob, values).shape
    if density_shape != shape:
        raise ValueError(
            f"likelihood(f) must have a log density for each observation, of shape {shape}, but gives {density_shape}; "
            "say num_classes where each row has several function values."
        )
    # Masked rows may hold anything.
    is_masked = isinstance(base, dist.MaskedDistribution)
    if not is_masked and not (np.array_equal(values, observed) and np.all(support(values))):
        raise ValueError(
            f"the observations must be such as the distribution {type(base).__name__} can give, {support}, but they "
            f"range from {observed.min()} to {observed.max()}."
        )
    return values
