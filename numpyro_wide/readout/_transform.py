"""The repriorisation map, and draws of the unwrapped model from runs of a repriorised one."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform

from numpyro_wide._checks import listing
from numpyro_wide._traces import Sites, latent_sites, sample_sites
from numpyro_wide.linear_gaussian._problem import ReadoutProblem
from numpyro_wide.readout._model import Draws, base_name


class ReadoutTransform(Transform):
    r"""The repriorisation map as a NumPyro transform, from $\phi$ to the readout $W$ (Hron 2022, equation 3).

    Args:
        problem: the readout's features, targets, noise, regulariser and prior.
    """

    _last: tuple[Array, tuple[Array, Array]] | None = None

    def __init__(self, problem: ReadoutProblem):
        self.problem = problem

    @property
    def domain(self) -> constraints.Constraint:
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
        return self._over_leading_axes(self.problem.inverse_map, y)

    def log_abs_det_jacobian(self, x: Array, y: Array, intermediates: object = None) -> Array:
        r"""Return the log of $|\det \partial W / \partial \phi|$, which depends on neither."""
        return self._over_leading_axes(lambda phi: self._forward(phi)[1], x)

    def base_of_posterior_draw(self, standard_normal: Array) -> Array:
        """Return the repriorised readout whose image is a draw from the readout's posterior given the features."""
        if self.problem.regulariser is None:
            return standard_normal
        exact = ReadoutTransform(self.problem.exact())
        return self._inverse(exact(standard_normal))

    def tree_flatten(self) -> tuple[tuple, tuple]:
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
    """Return the maps of the repriorised readouts among a run's sites, by the name of the base site."""
    by_base = {}  # base sites are known by their distributions: a model may repriorise readouts itself
    for name, site in sample_sites(sites).items():
        for transform in getattr(site["fn"], "transforms", []):
            if isinstance(transform.inv, ReadoutTransform):
                by_base[name] = transform.inv
    return by_base


def weights_of_run(sites: Sites) -> Draws:
    """Return one draw of the unwrapped model from a repriorised run: latent sites, readouts, other images."""
    latent = latent_sites(sites)
    bases = base_transforms(latent)
    if not bases:
        raise ValueError(
            "the model has no repriorised readout in this run; pass a model wrapped by repriorise or collapse_readout "
            f"(or one that uses ReprioriseReadout), and its targets. Its latent sites are {listing(latent)}."
        )
    # Besides readouts there may be other images of base sites, such as the latent scales of nn.bnn.
    images = [name for name in sites if base_name(name) in latent and name not in latent]
    return {name: sites[name]["value"] for name in [*latent, *images]}
