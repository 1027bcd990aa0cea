"""Repriorisation of one readout site: a NumPyro reparametriser."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform
from numpyro.infer.reparam import Reparam
from numpyro.primitives import _PYRO_STACK

from numpyro_wide import linear_gaussian
from numpyro_wide._conjugate import check_no_nan, check_readout_shape, normal_parameters, refuse_given_value


class ReadoutTransform(Transform):
    r"""The repriorisation map as a NumPyro transform, from $\phi$ to the readout $W$ (Hron 2022, eq. 3; :eq:`map`).

    Args:
        features: shape (n, d).
        targets: shape (n,) or (n, k).
        noise_scale: broadcasts against ``targets``.
        regulariser: broadcasts against ``targets``, or None for ``noise_scale ** 2``.
        prior_loc: broadcasts against the readout, (d,) or (d, k).
        prior_scale: broadcasts likewise.
        variant: "feature", "data", "data-cholesky" or "auto".
    """

    _last: tuple[Array, tuple[Array, Array]] | None = None
    _leaves = ("features", "targets", "noise_scale", "regulariser", "prior_loc", "prior_scale")

    def __init__(
        self,
        features: Array,
        targets: Array,
        noise_scale: ArrayLike,
        regulariser: ArrayLike | None,
        prior_loc: ArrayLike,
        prior_scale: ArrayLike,
        variant: str,
    ):
        self.features = features
        self.targets = targets
        self.noise_scale = noise_scale
        self.regulariser = regulariser
        self.prior_loc = prior_loc
        self.prior_scale = prior_scale
        self.variant = variant

    @property
    def domain(self) -> Any:
        """Real vectors or matrices."""
        return constraints.independent(constraints.real, jnp.ndim(self.targets))

    codomain = domain

    def __call__(self, x: Array) -> Array:
        """The readout, for a repriorised one with any leading axes."""
        return self._over_leading_axes(lambda phi: self._forward(phi)[0], x)

    def _inverse(self, y: Array) -> Array:
        def single(readout: Array) -> Array:
            return linear_gaussian.readout_inverse_map(
                self.features,
                self.targets,
                readout,
                self.noise_scale,
                self.regulariser,
                self.variant,
                prior_loc=self.prior_loc,
                prior_scale=self.prior_scale,
            )

        return self._over_leading_axes(single, y)

    def log_abs_det_jacobian(self, x: Array, y: Array, intermediates: Any = None) -> Array:
        """Log of |det ∂W/∂φ|, which depends on neither."""
        return self._over_leading_axes(lambda phi: self._forward(phi)[1], x)

    def base_of_posterior_draw(self, standard_normal: Array) -> Array:
        """The repriorised readout whose image is a draw from the readout's posterior given the features."""
        if self.regulariser is None:
            return standard_normal
        exact = ReadoutTransform(
            self.features, self.targets, self.noise_scale, None, self.prior_loc, self.prior_scale, self.variant
        )
        return self._inverse(exact(standard_normal))

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[tuple[str, ...], dict[str, str]]]:
        """Arrays, and the variant."""
        return tuple(getattr(self, name) for name in self._leaves), (self._leaves, {"variant": self.variant})

    def _forward(self, phi: Array) -> tuple[Array, Array]:
        # NumPyro asks for the readout once as a value and once in the density of the base site, whose derivatives
        # the compiler would not merge: the second time, hand out the first result.
        if self._last is None or self._last[0] is not phi:
            self._last = phi, self._evaluate(phi)
        return self._last[1]

    def _evaluate(self, phi: Array) -> tuple[Array, Array]:
        return linear_gaussian.readout_map(
            self.features,
            self.targets,
            phi,
            self.noise_scale,
            self.regulariser,
            self.variant,
            prior_loc=self.prior_loc,
            prior_scale=self.prior_scale,
        )

    def _over_leading_axes(self, single: Callable[[Array], Array], x: Array) -> Array:
        for _ in range(jnp.ndim(x) - jnp.ndim(self.targets)):
            single = jax.vmap(single)
        return single(x)


class ReprioriseReadout(Reparam):
    r"""Repriorise a readout: sample $\phi$ in its place, whose posterior tends to N(0, I) as the network widens.

    The readout $W$ becomes a deterministic function of the new site ``<name>_base`` and of all that the features
    depend on, $W = \mu + A \phi$ (Hron 2022, eq. 3; Mathematics, :eq:`map`). The new site's distribution is the
    readout's prior pulled back through the map (:eq:`joint`), so the model's joint distribution is unchanged, whatever
    its likelihood: a likelihood other than Gaussian with these targets and this noise makes the posterior of $\phi$
    less simple, never wrong.

    The readout's prior must not be in a ``scale`` handler, nor the rows in a subsampled plate: the log-determinant
    would be scaled as well, and the map another one for each minibatch. :func:`~numpyro_wide.repriorise` checks that.

    Start chains with NumPyro's ``init_to_uniform``, its default: a draw from that prior, as of ``init_to_sample``, lies
    so far out in the coordinates $\phi$ that float32 loses the energy's digits there.

    With ``targets=None``, the readout is left alone, so that one model serves for fitting and for prediction. Predict
    with draws of the readout site itself and without targets: shown other inputs *with* targets, the map would
    compute another readout from them.

    Args:
        features: $\Psi$, shape (n, d): what the readout multiplies, scaled as in the model, bias column included.
        targets: $Y$, shape (n,) or (n, k), or None.
        noise_scale: $\sigma$, a number or array that broadcasts against ``targets``; may be the value of a site.
        regulariser: $\lambda$, a number or array that broadcasts against ``targets``, or a function of
            ``noise_scale``. $\sigma^2$ by default; $\lambda \to \infty$ is no reparametrisation.
        variant: "feature" (Cholesky of a d × d matrix), "data-cholesky" (of an n × n matrix), "data" (eigenvectors of
            an n × n matrix), or "auto", the cheaper of the first two.

    Raises:
        ValueError: when the model runs, if shapes do not fit, the prior is not Normal, the noise is not positive,
            targets or features contain NaN, or the readout is observed or conditioned on.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.handlers import reparam, seed, trace
        >>> from numpyro_wide import ReprioriseReadout
        >>> def model(x, y=None):
        ...     hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 50]).to_event(2))
        ...     features = jnp.tanh(x @ hidden) / 50**0.5
        ...     with reparam(config={"w": ReprioriseReadout(features, y, 0.1)}):
        ...         w = numpyro.sample("w", dist.Normal(0, 1).expand([50]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(features @ w, 0.1).to_event(1), obs=y)
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> sites = trace(seed(model, jax.random.key(0))).get_trace(x, jnp.sin(x[:, 0]))
        >>> sites["w_base"]["type"], sites["w"]["type"]
        ('sample', 'deterministic')
    """

    def __init__(
        self,
        features: ArrayLike,
        targets: ArrayLike | None,
        noise_scale: ArrayLike,
        *,
        regulariser: ArrayLike | Callable[[ArrayLike], ArrayLike] | None = None,
        variant: str = "auto",
    ):
        linear_gaussian.check_variant(variant)
        self.features = features
        self.targets = targets
        self.noise_scale = noise_scale
        self.regulariser = regulariser(noise_scale) if callable(regulariser) else regulariser
        self.variant = variant

    def __call__(self, name: str, fn: Any, obs: Array | None) -> tuple[Any, Array | None]:
        """Replace the readout site; see NumPyro's ``Reparam``."""
        if self.targets is None:
            return fn, obs
        base_name = f"{name}_base"
        if obs is not None:
            raise ValueError(f"the readout {name!r} is observed; a repriorised readout must be latent.")
        refuse_given_value(name, base_name)
        features, targets = jnp.asarray(self.features), jnp.asarray(self.targets)
        check_readout_shape(name, fn.shape(), features, targets.shape)
        check_no_nan("features", self.features)
        check_no_nan("targets", self.targets)
        loc, scale = normal_parameters(name, "readout", fn)
        transform = ReadoutTransform(features, targets, self.noise_scale, self.regulariser, loc, scale, self.variant)

        plates = [handler for handler in _PYRO_STACK if isinstance(handler, numpyro.plate)]
        for plate in plates:
            if plate.subsample_size != plate.size:
                raise ValueError(f"the readout {name!r} is in the subsampled plate {plate.name!r}; use the full plate.")
        prior = fn.to_event(targets.ndim - fn.event_dim)
        phi = numpyro.sample(
            base_name,
            dist.TransformedDistribution(prior, transform.inv),
            # The map couples all weights: none of the readout's plates makes them independent any longer.
            infer={"block_plates": [plate.name for plate in plates]},
        )
        return None, transform(phi)
