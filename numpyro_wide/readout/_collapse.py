"""A whole model with its readout integrated out."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, overload

import jax
import numpy as np
from jax import Array
from numpyro.handlers import seed, trace

from numpyro_wide._checks import is_known, is_tracing, listing
from numpyro_wide._traces import sample_sites
from numpyro_wide.readout._conjugacy import check_conjugacy
from numpyro_wide.readout._conjugate import check_options
from numpyro_wide.readout._given import only_given_values, refuse_draws_without_readout, refuse_given_collapsed
from numpyro_wide.readout._marginal import ReadoutMarginal
from numpyro_wide.readout._sites import ReadoutSites, SiteNames
from numpyro_wide.readout._wrapped import Model, adopt_signature


@dataclass(eq=False)
class CollapsedModel:
    """A model with its readout integrated out, by :func:`~numpyro_wide.collapse_readout` with these arguments."""

    fn: Model
    readout: str
    features: str
    observed: str
    variant: str
    # By shapes of the arguments, and whether they were traced: the deterministic sites that move with the readout.
    _checked: dict[tuple, frozenset[str]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        adopt_signature(self, self.fn)

    @property
    def names(self) -> SiteNames:
        """The sites that it is about."""
        return SiteNames(self.readout, self.features, self.observed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, collapsed if its observed site is observed."""
        is_observed = _is_observed(self.fn, args, kwargs)
        if self.observed not in is_observed:
            raise ValueError(
                f"observed names the sample site {self.observed!r}, which the model does not have; "
                f"its sample sites are {listing(is_observed)}."
            )
        if not is_observed[self.observed]:
            refuse_draws_without_readout(self.readout, [site for site, seen in is_observed.items() if not seen])
            return self.fn(*args, **kwargs)
        refuse_given_collapsed(self.readout)
        sites = _Marginalise(self.names, self.variant, hidden=self._moving_sites(args, kwargs))
        with sites:
            result = self.fn(*args, **kwargs)
        sites.read_off()
        return result

    def _moving_sites(self, args: tuple, kwargs: dict[str, Any]) -> frozenset[str]:
        """The deterministic sites that move with the readout, after a check of the model at every new shape."""
        shapes = _shapes_of((args, kwargs))
        known, traced = (False, shapes), (True, shapes)
        if known in self._checked:  # with numbers, it said more
            return self._checked[known]
        key = traced if is_tracing() else known
        if key not in self._checked:
            found = check_conjugacy(self.fn, self.names, args, kwargs)
            self._checked[key] = found.moving_sites
            _warn_of_lost_noise(self.observed, found.noise_margin)
        return self._checked[key]


@overload
def collapse_readout(
    fn: Model, *, readout: str, features: str, observed: str, variant: str = ...
) -> CollapsedModel: ...


@overload
def collapse_readout(
    fn: None = ..., *, readout: str, features: str, observed: str, variant: str = ...
) -> Callable[[Model], CollapsedModel]: ...


def collapse_readout(
    fn: Model | None = None, *, readout: str, features: str, observed: str, variant: str = "auto"
) -> CollapsedModel | Callable[[Model], CollapsedModel]:
    r"""Integrate the readout out of a model with a Gaussian likelihood, exactly.

    The wrapped model has no readout site; its observed site follows the marginal
    $N(\text{loc}, \Psi \Psi^\top + \sigma^2 I)$, whose log density is the evidence (Hron 2022, eq. 5; Mathematics,
    :eq:`evidence`), the likelihood of the hidden weights (:eq:`identity`), and all other sites are as they were. Loc
    and noise are read off the model's own Normal, so offsets, heteroscedastic and latent noise need no further
    argument. Where the observed site is not observed, the wrapped model is the model as it was.

    Get readouts and predictions from :class:`~numpyro_wide.ReadoutPredictive`: draws of a collapsed model hold no
    readout, and ``Predictive``, which would draw it from its prior, is refused. With
    ``{**draws, readout: predictive.readout(key)}`` they are draws of the plain model, for ``Predictive``,
    ``log_likelihood`` by observation and ``arviz.loo``, none of which a joint marginal can give.

    NumPyro's ``log_likelihood`` of the *wrapped* model is one number a draw: the joint density of all rows that it is
    given, the readout coming from its prior. At test rows that is not their predictive density, since what the
    readout has learnt from the rows of the fit has no part in it; take
    :meth:`ReadoutPredictive.log_density <numpyro_wide.ReadoutPredictive.log_density>`. It cannot be refused: a
    sampler that evaluates its target runs the model in the same way.

    The mean of the observed site must be ``features @ readout`` plus terms without the readout, and the readout may
    be used in no other distribution. Both are checked with two runs of the model the first time that it is called
    outside of JAX's transformations; deterministic sites that move with the readout are not recorded.

    Args:
        fn: the model. Without it, ``collapse_readout`` gives a decorator.
        readout: name of the readout's sample site, of shape (d,) or (d, k), with a Normal prior.
        features: name of the site, ``numpyro.deterministic`` say, that holds what the readout multiplies, (n, d).
        observed: name of the observed site, of shape (n,) or (n, k), with a Normal distribution.
        variant: "feature" works with d × d matrices, "data" and "data-cholesky" with n × n ones, through eigenvectors
            and Cholesky factors; "auto" takes the smaller.

    Returns:
        The wrapped model.

    Warns:
        UserWarning: when the model is first run with data of some shape, if its noise is given, not drawn, and so small
            that the log density is NaN in the precision at hand.

    Raises:
        TypeError: if ``fn`` is not callable, or a name is not a string.
        ValueError: here for an unknown variant; when the model runs, if a site is missing or comes too late, prior or
            likelihood is not Normal, the likelihood is scaled, masked or subsampled, the readout is observed, shapes do
            not fit, data hold NaN, or the model is not linear in the readout as described.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_wide import ReadoutPredictive, collapse_readout
        >>> def model(x, y=None):
        ...     hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 50]).to_event(2))
        ...     features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / 50**0.5)
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([50]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(features @ w, 0.1).to_event(1), obs=y)
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> y = jnp.sin(x[:, 0])
        >>> wrapped = collapse_readout(model, readout="w", features="features", observed="y")
        >>> mcmc = MCMC(NUTS(wrapped), num_warmup=10, num_samples=10, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), x, y)
        >>> sorted(mcmc.get_samples())
        ['hidden']
        >>> predictive = ReadoutPredictive(wrapped, mcmc.get_samples(), (x, y))
        >>> predictive.readout(jax.random.key(1)).shape
        (10, 50)
    """
    check_options(fn, variant, readout=readout, features=features, observed=observed)

    def wrap(model: Model) -> CollapsedModel:
        return CollapsedModel(model, readout, features, observed, variant)

    return wrap if fn is None else wrap(fn)


class _Marginalise(ReadoutSites):
    """Puts the marginal in the place of the observed site's Normal."""

    def __init__(self, names: SiteNames, variant: str, hidden: frozenset[str]):
        super().__init__(names, hidden=hidden)
        self.variant = variant

    def process_message(self, msg: dict) -> None:
        super().process_message(msg)
        if msg["type"] == "sample" and msg["name"] == self.names.observed:
            run = self.read_off()
            msg["fn"] = ReadoutMarginal(
                run.features,
                run.loc,
                run.noise_scale,
                run.prior_scale,
                variant=self.variant,
                readout=(f"readout {self.names.readout!r}", run.prior_loc.shape),
            )
            # The rows are no longer independent, whatever plates surround them.
            msg["cond_indep_stack"] = []


def _warn_of_lost_noise(observed: str, margin: Array | None) -> None:
    """Says so while the reason can be told: a sampler that starts at NaN gives none, or goes nowhere without a word."""
    if margin is not None and is_known(margin) and float(margin) < 1:
        warnings.warn(
            f"the noise of observed site {observed!r} is too small for {margin.dtype}: its variance is "
            f"{float(margin):.2g} times the least that the rounding of products of the features leaves a trace of, at "
            "weights drawn from the prior. There the log density is NaN. Run in float64 "
            "(jax.config.update('jax_enable_x64', True)), or use a larger noise.",
            UserWarning,
            stacklevel=4,  # whoever runs the model
        )


def _is_observed(fn: Model, args: tuple, kwargs: dict) -> dict[str, bool]:
    """The sample sites of a call of the model and whether each is observed, found by an abstract run.

    Of the handlers around the call, those that set values count; the run is hidden from all others.
    """
    is_observed: dict[str, bool] = {}

    def run() -> None:
        sites = trace(seed(fn, jax.random.key(0))).get_trace(*args, **kwargs)
        is_observed.update({name: site["is_observed"] for name, site in sample_sites(sites).items()})

    with only_given_values():
        jax.eval_shape(run)
    return is_observed


def _shapes_of(arguments: Any) -> tuple:
    """What tells calls apart that trace to different programs."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple(
        (np.shape(leaf), str(leaf.dtype)) if hasattr(leaf, "dtype") else (type(leaf), repr(leaf)) for leaf in leaves
    )
