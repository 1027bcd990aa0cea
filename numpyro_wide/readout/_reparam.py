"""Repriorisation of one readout site, as a NumPyro reparametriser."""

from collections.abc import Callable, Mapping
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

from numpyro_wide._checks import check_no_nan, listing
from numpyro_wide._programs import combine, partition, run_compiled
from numpyro_wide._traces import Sites, latent_sites, run_model
from numpyro_wide.linear_gaussian import ReadoutProblem
from numpyro_wide.linear_gaussian.internal import check_variant
from numpyro_wide.readout._model import Draws, base_name, readout_of
from numpyro_wide.readout._run import normal_parameters
from numpyro_wide.readout._surroundings import active_plates, refuse_given_value


class ReadoutTransform(Transform):
    r"""The repriorisation map as a NumPyro transform, from $\phi$ to the readout $W$ (Hron 2022, equation 3).

    Args:
        problem: the readout's features, targets, noise, regulariser and prior.
    """

    _last: tuple[Array, tuple[Array, Array]] | None = None

    def __init__(self, problem: ReadoutProblem):
        self.problem = problem

    @property
    def domain(self) -> Any:
        """Real vectors or matrices."""
        return constraints.independent(constraints.real, self._num_axes)

    codomain = domain

    @property
    def _num_axes(self) -> int:
        return len(self.problem.readout_shape)

    def __call__(self, x: Array) -> Array:
        """Return the readout, for a repriorised one with any leading axes."""
        return self._over_leading_axes(lambda phi: self._forward(phi)[0], x)

    def _inverse(self, y: Array) -> Array:
        return self._over_leading_axes(lambda readout: self.problem.inverse_map(readout), y)

    def log_abs_det_jacobian(self, x: Array, y: Array, intermediates: Any = None) -> Array:
        r"""Return the log of $|\det \partial W / \partial \phi|$, which depends on neither."""
        return self._over_leading_axes(lambda phi: self._forward(phi)[1], x)

    def base_of_posterior_draw(self, standard_normal: Array) -> Array:
        """Return the repriorised readout whose image is a draw from the readout's posterior given the features."""
        if self.problem.regulariser is None:
            return standard_normal
        exact = ReadoutTransform(self.problem.exact())
        return self._inverse(exact(standard_normal))

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[tuple[str, ...], dict[str, Any]]]:
        """Return the problem, a tree of arrays itself."""
        return (self.problem,), (("problem",), {})

    def _forward(self, phi: Array) -> tuple[Array, Array]:
        # NumPyro asks for the readout once as a value and once in the density of the base site, whose derivatives
        # the compiler would not merge: the second time, hand out the first result.
        if self._last is None or self._last[0] is not phi:
            self._last = phi, self.problem.map(phi)
        return self._last[1]

    def _over_leading_axes(self, single: Callable[[Array], Array], x: Array) -> Array:
        for _ in range(jnp.ndim(x) - self._num_axes):
            single = jax.vmap(single)
        return single(x)


def base_transforms(sites: Sites) -> dict[str, ReadoutTransform]:
    """Return the maps of the repriorised readouts among a run's sites, by the name of the base site.

    A readout may be repriorised inside of a model, by :class:`ReprioriseReadout`, where nobody knows its name: what
    tells a base site is its distribution, the prior pulled back through the map.
    """
    found = {}
    for name, site in sites.items():
        for transform in getattr(site["fn"], "transforms", []) if site["type"] == "sample" else []:
            if isinstance(transform.inv, ReadoutTransform):
                found[name] = transform.inv
    return found


def weights_of_run(sites: Sites) -> Draws:
    """Return one draw of the plain model from a run with repriorised readouts: latent sites, readouts, other images.

    Raises:
        ValueError: if no readout is repriorised in the run.
    """
    latent = latent_sites(sites)
    bases = base_transforms(latent)
    if not bases:
        raise ValueError(
            "the model has no repriorised readout in this run; pass a model wrapped by repriorise or collapse_readout "
            "(or one that uses ReprioriseReadout), and its targets. Its latent sites are "
            f"{listing(latent)}."
        )
    # Besides readouts there may be other images of base sites, such as the latent scales of nn.bnn.
    images = [readout_of(name) for name in latent if readout_of(name) != name]
    found = [name for name in images if name in sites and name not in latent]
    return {name: sites[name]["value"] for name in [*latent, *found]}


def image_draws(
    model: Callable, draws: Draws, args: tuple, kwargs: dict[str, Any], params: Mapping[str, Any] | None = None
) -> Draws:
    """Return draws of the plain model for draws of a repriorised one.

    Args:
        model: the model, repriorised.
        draws: draws of its latent sites, each with a leading axis.
        args: arguments that it was fitted with, targets included.
        kwargs: keyword arguments that it was fitted with.
        params: values of its param sites.
    """
    arrays, rest = partition((args, kwargs))
    return run_compiled(_image_draws, model, rest, draws, dict(params or {}), arrays)


def _image_draws(model: Callable, rest: Any, draws: Draws, params: dict[str, Any], arrays: list[Array]) -> Draws:
    args, kwargs = combine(arrays, rest)
    return jax.lax.map(lambda draw: weights_of_run(run_model(model, args, kwargs, values={**params, **draw})), draws)


class ReprioriseReadout(Reparam):
    r"""Reparametrisation of a readout by $\phi$, whose posterior tends to N(0, I) as the network widens.

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
        check_variant(variant)
        self.features = features
        self.targets = targets
        self.noise_scale = noise_scale
        self.regulariser = regulariser(noise_scale) if callable(regulariser) else regulariser
        self.variant = variant

    def __call__(self, name: str, fn: Any, obs: Array | None) -> tuple[Any, Array | None]:
        """Replace the readout site; see NumPyro's ``Reparam``."""
        if self.targets is None:
            return fn, obs
        base = base_name(name)
        if obs is not None:
            raise ValueError(f"the readout {name!r} is observed; a repriorised readout must be latent.")
        refuse_given_value(name, base)
        check_no_nan("features", self.features)
        check_no_nan("targets", self.targets)
        loc, scale = normal_parameters(name, "readout", fn)
        problem = ReadoutProblem.of(
            self.features,
            self.targets,
            self.noise_scale,
            self.regulariser,
            self.variant,
            prior_loc=loc,
            prior_scale=scale,
            same_type=(loc, scale),
        )
        problem.check_readout(f"readout {name!r}", tuple(fn.shape()))
        plates = active_plates()
        for plate in plates:
            if plate.subsample_size != plate.size:
                raise ValueError(f"the readout {name!r} is in the subsampled plate {plate.name!r}; use the full plate.")
        transform = ReadoutTransform(problem)
        prior = fn.to_event(len(problem.readout_shape) - fn.event_dim)
        phi = numpyro.sample(
            base,
            dist.TransformedDistribution(prior, transform.inv),
            # The map couples all weights: none of the readout's plates makes them independent any longer.
            infer={"block_plates": [plate.name for plate in plates]},
        )
        return None, transform(phi)
