"""Guides on atoms and planes, and amortised ones."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoContinuous, AutoDelta
from numpyro.infer.initialization import init_to_sample, init_to_uniform

from numpyro_wide._checks import check_positive, listing, whole_number
from numpyro_wide.amortized._guide import AutoAmortized as AutoAmortized
from numpyro_wide.amortized._guide import Typicality as Typicality
from numpyro_wide.distributions._singular import BernoulliDropout, DegenerateNormal

__all__ = ["AutoAmortized", "AutoDegenerateNormal", "AutoDropout"]


class AutoDropout(AutoDelta):
    """Bernoulli dropout as a guide (Hron 2018, section 4.1), for the loss ``TraceQKL``.

    Rows of a weight site (R, D) are kept or dropped; other sites are point estimates. Parameters are
    ``<site>_auto_rows``, ``<site>_auto_rate`` and ``<site>_auto_loc``.

    Args:
        model: NumPyro model, with weight rows inside the event, as by ``.to_event(2)``.
        rate: probability of dropping a row, in (0, 1), or a mapping by site.
        sites: names of sites with rows to drop; by default real sites with an event and two axes.
        learn_rate: whether one rate by site is learnt, from ``rate``.
        temperature: temperature of the relaxation; lower is less biased.
        prefix: prefix of parameter names.
        init_loc_fn: NumPyro's strategy for initial weights.
        create_plates: function of the plates of subsampled models.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import SVI
        >>> from numpyro_wide.autoguide import AutoDropout
        >>> from numpyro_wide.elbo import TraceQKL
        >>> def model(x, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 2]).to_event(2))
        ...     numpyro.sample("y", dist.Normal(x @ w, 1.0).to_event(2), obs=y)
        >>> guide = AutoDropout(model, rate=0.2)
        >>> svi = SVI(model, guide, numpyro.optim.Adam(0.01), TraceQKL())
        >>> fit = svi.run(jax.random.key(0), 10, jnp.ones((5, 3)), jnp.ones((5, 2)), progress_bar=False)
        >>> guide.sample_posterior(jax.random.key(1), fit.params, sample_shape=(4,))["w"].shape
        (4, 3, 2)
    """

    def __init__(
        self,
        model: Callable,
        *,
        rate: float | Mapping[str, float],
        sites: Sequence[str] | None = None,
        learn_rate: bool = False,
        temperature: float = 0.1,
        prefix: str = "auto",
        init_loc_fn: Callable = init_to_sample,
        create_plates: Callable | None = None,
    ):
        for value in rate.values() if isinstance(rate, Mapping) else [rate]:
            if not 0 < value < 1:
                raise ValueError(f"rate must be a probability of dropping a row, in (0, 1), got {value!r}.")
        check_positive("temperature", temperature)
        self.rate, self.sites, self.learn_rate, self.temperature = rate, sites, learn_rate, temperature
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn, create_plates=create_plates)

    def _setup_prototype(self, *args: object, **kwargs: object) -> None:
        super()._setup_prototype(*args, **kwargs)
        latent = {name: self.prototype_trace[name] for name in self._init_locs}
        suitable = [name for name, site in latent.items() if _has_rows(site)]
        self._dropped = suitable if self.sites is None else list(self.sites)
        if not self._dropped or not set(self._dropped) <= set(suitable):
            raise ValueError(
                f"AutoDropout drops rows of real sites with at least two axes, the last in the event, got "
                f"sites={self.sites}; suitable are {listing(suitable)}, other latent sites are "
                f"{listing(sorted(set(latent) - set(suitable)))}. Declare a weight matrix with .to_event(2)."
            )

    def _site_distribution(self, name: str, site: dict, init_loc: Array) -> dist.Distribution:
        event_dim = self._event_dims[name]
        if name not in self._dropped:
            loc = numpyro.param(
                f"{name}_{self.prefix}_loc", init_loc, constraint=site["fn"].support, event_dim=event_dim
            )
            return dist.Delta(loc).to_event(event_dim)
        rate = self.rate[name] if isinstance(self.rate, Mapping) else self.rate
        if self.learn_rate:
            rate = numpyro.param(f"{name}_{self.prefix}_rate", rate, constraint=constraints.unit_interval)
        rows = numpyro.param(f"{name}_{self.prefix}_rows", init_loc, event_dim=event_dim)
        temperature = self.temperature if self.learn_rate else None
        return BernoulliDropout(rows, rate, temperature=temperature).to_event(event_dim - 1)

    def __call__(self, *args: object, **kwargs: object) -> dict[str, Array]:
        """Draw every site, given the model's arguments."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        result = {}
        for name, init_loc in self._init_locs.items():
            site = self.prototype_trace[name]
            with ExitStack() as stack:
                for frame in site["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                result[name] = numpyro.sample(name, self._site_distribution(name, site, init_loc))
        return result

    def sample_posterior(
        self, rng_key: Array, params: dict, *args: object, sample_shape: tuple[int, ...] = (), **kwargs: object
    ) -> dict[str, Array]:
        """Draw from the fitted guide, with leading axes ``sample_shape``."""
        draws = {}
        for name, key in zip(self._init_locs, jax.random.split(rng_key, len(self._init_locs)), strict=True):
            with handlers.substitute(data=params):
                site_distribution = self._site_distribution(name, self.prototype_trace[name], self._init_locs[name])
            draws[name] = site_distribution.sample(key, sample_shape)
        return draws

    def median(self, params: dict) -> dict[str, Array]:
        """Refuse: two atoms have no middle."""
        raise NotImplementedError("A dropout guide has atoms and no useful median; use sample_posterior.")


def _has_rows(site: dict) -> bool:
    is_real_event = getattr(site["fn"].support, "base_constraint", None) is constraints.real
    return is_real_event and jnp.ndim(site["value"]) >= 2


class AutoDegenerateNormal(AutoContinuous):
    """Normal guide on a plane through the space of all weights, for the loss ``TraceQKL``.

    Flattened sites are ``DegenerateNormal(loc, basis, scale)``; the optimum for a Gaussian posterior is its principal
    components (Hron 2018, Prop. 6; Mathematics, :eq:`degenerate`). Parameters are ``auto_loc``, ``auto_scale`` and
    ``auto_basis``.

    Args:
        model: NumPyro model.
        rank: dimension of the plane, from 1 to the number of weights.
        prefix: prefix of parameter names.
        init_loc_fn: NumPyro's strategy for the initial mean.
        init_scale: initial standard deviation by direction.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import SVI
        >>> from numpyro_wide.autoguide import AutoDegenerateNormal
        >>> from numpyro_wide.elbo import TraceQKL
        >>> def model():
        ...     numpyro.sample("w", dist.Normal(0, 1).expand([5]).to_event(1))
        >>> guide = AutoDegenerateNormal(model, rank=2)
        >>> svi = SVI(model, guide, numpyro.optim.Adam(0.01), TraceQKL())
        >>> fit = svi.run(jax.random.key(0), 10, progress_bar=False)
        >>> guide.get_posterior(fit.params).basis.shape
        (5, 2)
    """

    def __init__(
        self,
        model: Callable,
        *,
        rank: int,
        prefix: str = "auto",
        init_loc_fn: Callable = init_to_uniform,
        init_scale: float = 0.1,
    ):
        check_positive("init_scale", init_scale)
        self.rank, self._init_scale = whole_number("rank", rank), init_scale
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)

    def _setup_prototype(self, *args: object, **kwargs: object) -> None:
        super()._setup_prototype(*args, **kwargs)
        if self.rank > self.latent_dim:
            raise ValueError(f"rank must be at most the number of weights, {self.latent_dim}, got {self.rank}.")

    def _get_posterior(self) -> DegenerateNormal:
        shape = (int(self.latent_dim), self.rank)
        loc = numpyro.param(f"{self.prefix}_loc", self._init_latent)
        columns = numpyro.param(f"{self.prefix}_basis", lambda key: jax.random.normal(key, shape, loc.dtype))
        scale = numpyro.param(
            f"{self.prefix}_scale",
            jnp.full(self.rank, self._init_scale, loc.dtype),
            constraint=constraints.softplus_positive,
        )
        return DegenerateNormal(loc, jnp.linalg.qr(columns)[0], scale)

    def get_posterior(self, params: dict) -> DegenerateNormal:
        """Return the distribution of the flattened weights."""
        return handlers.substitute(self._get_posterior, params)()

    def median(self, params: dict) -> dict[str, Array]:
        """Return the sites at the mean, by name."""
        return self._unpack_and_constrain(params[f"{self.prefix}_loc"], params)

    def quantiles(self, params: dict, quantiles: ArrayLike | Sequence[float]) -> dict[str, Array]:
        """Return marginal quantiles by site, with a leading axis over ``quantiles``."""
        posterior = self.get_posterior(params)
        levels = jnp.asarray(quantiles)[..., None]
        flat = dist.Normal(posterior.mean, jnp.sqrt(posterior.variance)).icdf(levels)
        return self._unpack_and_constrain(flat, params)
