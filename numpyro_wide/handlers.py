"""Handlers around a whole model: repriorise its readout, or integrate it out."""

import inspect
from collections import defaultdict
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from jax.typing import ArrayLike
from numpyro.handlers import reparam
from numpyro.primitives import Messenger

from numpyro_wide._conjugate import (
    listing,
    refuse_base_without_targets,
    refuse_draws_without_readout,
    refuse_given_collapsed,
)
from numpyro_wide._readout_sites import ReadoutSites, check_conjugacy, is_tracing, sample_sites
from numpyro_wide.distributions import ReadoutMarginal
from numpyro_wide.linear_gaussian import check_variant
from numpyro_wide.reparam import ReprioriseReadout

Model = Callable[..., Any]


def repriorise(
    fn: Model | None = None,
    *,
    readout: str,
    features: str,
    targets: str,
    noise_scale: str | ArrayLike | None = None,
    surrogate: Callable[[Any], tuple[ArrayLike, ArrayLike]] | None = None,
    regulariser: ArrayLike | Callable[[ArrayLike], ArrayLike] | None = None,
    variant: str = "auto",
) -> Any:
    r"""Repriorise the readout of a model: its posterior tends to N(0, I) as the network widens (Hron 2022, eq. 3).

    The wrapped model has the site ``<readout>_base``, $\phi$, to sample, and keeps ``readout``, its image under the map
    (Mathematics, :eq:`map`), as a deterministic site, so that its draws are draws of the weights. The posterior is that
    of the model as it was (:eq:`joint`). The features site is for the handler alone and is not recorded. Called with
    ``targets=None`` (or without targets, where None is the default) the wrapped model is the model as it was.

    Warning:
        Predict with the *unwrapped* model and the draws of the readout site. A wrapped model that is given targets
        computes the readout from the inputs at hand; on other inputs than it was fitted on that is another readout.
        Draws from a guide hold $\phi$ and not the readout: see :func:`~numpyro_wide.guide_draws`; a wrapped model
        that is given the first without the second, and no targets, refuses to run.

    The map needs all of the data: a repriorised model with subsampled rows, whose base site would mean another readout
    for each minibatch, refuses to run. A ``scale`` handler around the wrapped model scales the density of the new
    coordinates, log-determinant included: that is right where the guide is scaled as well, and no tempered posterior.

    Features, targets or noise that are not those of the likelihood leave the posterior as it is, but not its simple
    form: the gain is lost and nothing is checked. :func:`collapse_readout` does check the features.

    Args:
        fn: the model. Without it, ``repriorise`` gives a decorator.
        readout: name of the readout's sample site, of shape (d,) or (d, k), with a Normal prior.
        features: name of the site, ``numpyro.deterministic`` say, that holds what the readout multiplies, (n, d).
        targets: name of the model's argument that holds the targets, (n,) or (n, k).
        noise_scale: the likelihood's standard deviation: a number, an array that broadcasts against the targets, or
            the name of an argument or of a site that precedes the readout.
        surrogate: instead of a noise scale where the likelihood is not Gaussian: a function from the argument that
            ``targets`` names, labels say, to targets and a noise scale, such as
            ``functools.partial(surrogate_targets, likelihood="categorical", num_classes=10)``.
        regulariser: $\lambda$, a number or array that broadcasts against the targets, or a function of the noise
            scale; its square by default.
        variant: "feature", "data", "data-cholesky" or "auto"; see :class:`~numpyro_wide.ReprioriseReadout`.

    Returns:
        The wrapped model.

    Raises:
        TypeError: if ``fn`` or ``surrogate`` is not callable, a name is not a string, or neither a noise scale nor a
            surrogate is given.
        ValueError: here for an unknown variant, or if both are given; when the model runs, if an argument or site is
            missing or comes too late, a plate is subsampled, the readout's prior is scaled, and as
            :class:`~numpyro_wide.ReprioriseReadout` does.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_wide import repriorise
        >>> def model(x, y=None):
        ...     hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 50]).to_event(2))
        ...     features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / 50**0.5)
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([50]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(features @ w, 0.1).to_event(1), obs=y)
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> wrapped = repriorise(model, readout="w", features="features", targets="y", noise_scale=0.1)
        >>> mcmc = MCMC(NUTS(wrapped), num_warmup=10, num_samples=10, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), x, jnp.sin(x[:, 0]))
        >>> sorted(mcmc.get_samples())
        ['hidden', 'w', 'w_base']
    """
    _check_options(fn, variant, readout=readout, features=features, targets=targets)
    if surrogate is not None and not callable(surrogate):
        raise TypeError(f"surrogate must be a function of the observations, but got a {type(surrogate).__name__}.")
    if noise_scale is None and surrogate is None:
        raise TypeError(
            "noise_scale must be a number or an array, but got None; give that, or the name of a site or argument, or "
            "for a likelihood that is not Gaussian a surrogate."
        )
    if noise_scale is not None and surrogate is not None:
        raise ValueError("a surrogate brings its own noise scale; drop noise_scale, or the surrogate.")
    options: dict[str, Any] = {
        "readout": readout,
        "features": features,
        "targets": targets,
        "noise_scale": noise_scale,
        "surrogate": surrogate,
        "regulariser": regulariser,
        "variant": variant,
    }
    return partial(RepriorisedModel, **options) if fn is None else RepriorisedModel(fn, **options)


def collapse_readout(
    fn: Model | None = None, *, readout: str, features: str, observed: str, variant: str = "auto"
) -> Any:
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
    _check_options(fn, variant, readout=readout, features=features, observed=observed)
    options: dict[str, Any] = {
        "readout": readout,
        "features": features,
        "observed": observed,
        "variant": variant,
    }
    return partial(CollapsedModel, **options) if fn is None else CollapsedModel(fn, **options)


class RepriorisedModel:
    """A model with its readout repriorised: what :func:`repriorise` gives."""

    def __init__(
        self,
        fn: Model,
        *,
        readout: str,
        features: str,
        targets: str,
        noise_scale: str | ArrayLike | None,
        surrogate: Callable[[Any], tuple[ArrayLike, ArrayLike]] | None,
        regulariser: ArrayLike | Callable[[ArrayLike], ArrayLike] | None,
        variant: str,
    ):
        self.fn = fn
        self.readout = readout
        self.features = features
        self.targets = targets
        self.noise_scale = noise_scale
        self.surrogate = surrogate
        self.regulariser = regulariser
        self.variant = variant
        update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, repriorised if it is given targets."""
        arguments = _bound_arguments(self.fn, args, kwargs)
        if self.targets not in arguments and not isinstance(arguments, defaultdict):
            raise ValueError(
                f"targets names the argument {self.targets!r}, which the model does not have; "
                f"its arguments are {listing(arguments)}. Make the targets an argument, or repriorise the readout "
                "inside the model with ReprioriseReadout."
            )
        if arguments[self.targets] is None:
            refuse_base_without_targets(self.readout, f"{self.readout}_base")
            return self.fn(*args, **kwargs)

        sites = _SiteValues(hidden=self.features, base=f"{self.readout}_base")
        with sites, reparam(config=partial(self._reparam, arguments, sites)):
            result = self.fn(*args, **kwargs)
        if self.readout not in sites.values:
            raise ValueError(
                f"readout names the sample site {self.readout!r}, which the model does not have; "
                f"its sites are {listing(sites.values)}."
            )
        if f"{self.readout}_base" not in sites.values:
            raise ValueError(f"the readout {self.readout!r} must be a latent sample site with a Normal prior.")
        return result

    def _reparam(self, arguments: dict[str, Any], sites: "_SiteValues", msg: dict) -> ReprioriseReadout | None:
        if msg["name"] != self.readout:
            return None
        targets: Any = arguments[self.targets]
        noise_scale: Any = self.noise_scale
        if self.surrogate is not None:
            targets, noise_scale = self.surrogate(targets)
        elif isinstance(noise_scale, str):
            given = arguments.get(noise_scale)
            noise_scale = self._preceding(sites, "noise_scale") if given is None else given
        return ReprioriseReadout(
            self._preceding(sites, "features"),
            targets,
            noise_scale,
            regulariser=self.regulariser,
            variant=self.variant,
        )

    def _preceding(self, sites: "_SiteValues", role: str) -> Any:
        name = getattr(self, role)
        if name not in sites.values:
            raise ValueError(
                f"{role} names the site {name!r}, which must come before the readout {self.readout!r} in the model; "
                f"the sites before it are {listing(sites.values)}."
            )
        return sites.values[name]


class CollapsedModel:
    """A model with its readout integrated out: what :func:`collapse_readout` gives."""

    def __init__(self, fn: Model, *, readout: str, features: str, observed: str, variant: str):
        self.fn = fn
        self.readout = readout
        self.features = features
        self.observed = observed
        self.variant = variant
        self._is_checked = False
        self._moves_with_readout: set[str] = set()
        update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, collapsed if its observed site is observed."""
        is_observed = sample_sites(self.fn, args, kwargs)
        if self.observed not in is_observed:
            raise ValueError(
                f"observed names the sample site {self.observed!r}, which the model does not have; "
                f"its sample sites are {listing(is_observed)}."
            )
        if not is_observed[self.observed]:
            refuse_draws_without_readout(self.readout, [site for site, seen in is_observed.items() if not seen])
            return self.fn(*args, **kwargs)
        refuse_given_collapsed(self.readout)
        if not self._is_checked and not is_tracing():
            self._moves_with_readout = check_conjugacy(self, args, kwargs)
            self._is_checked = True

        sites = _Marginalise(self)
        sites.hide(self._moves_with_readout)
        with sites:
            result = self.fn(*args, **kwargs)
        sites.check_complete()
        return result


class _SiteValues(Messenger):
    """Keeps the values of all sites, and ``hidden`` from every handler outside; refuses a part of the data."""

    def __init__(self, hidden: str, base: str):
        self.hidden = hidden
        self.base = base
        self._names: list[str | None] = []  # of the sites at hand, before a handler outside renames them
        self.values: dict[str, Any] = {}
        super().__init__()

    def process_message(self, msg: dict) -> None:
        self._names.append(msg.get("name"))
        if msg["type"] == "plate" and msg["args"][1] not in (None, msg["args"][0]):
            size, subsample_size = msg["args"]
            raise ValueError(
                f"the plate {msg['name']!r} takes {subsample_size} of {size} rows, and a repriorised readout would be "
                "another one for each minibatch; drop subsample_size, or use the model without repriorise."
            )
        if msg.get("name") == self.base and msg["scale"] is not None:
            raise ValueError(
                f"the prior of the readout that {self.base!r} stands for is scaled inside the model, and the map's "
                "log-determinant would be scaled with it; take the readout out of the scale handler."
            )
        if msg["type"] == "deterministic" and msg["name"] == self.hidden:
            msg["stop"] = True

    def postprocess_message(self, msg: dict) -> None:
        name = self._names.pop()
        if name is not None:
            self.values[name] = msg["value"]


class _Marginalise(ReadoutSites):
    """Puts the marginal in the place of the observed site's Normal."""

    def process_message(self, msg: dict) -> None:
        super().process_message(msg)
        if msg["type"] == "sample" and msg["name"] == self.observed:
            msg["fn"] = ReadoutMarginal(
                self.features_value, self.loc, self.noise_scale, self.prior_scale, variant=self.variant
            )
            # The rows are no longer independent, whatever plates surround them.
            msg["cond_indep_stack"] = []


def _bound_arguments(fn: Model, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a call by name, defaults and extra keywords included; a keyword not given is None."""
    signature = inspect.signature(fn)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments: dict[str, Any] = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments = defaultdict(lambda: None, arguments | arguments.pop(name))
    return arguments


def _check_options(fn: Any, variant: str, **names: Any) -> None:
    if fn is not None and not callable(fn):
        raise TypeError(f"fn must be a model, a callable, but got {fn!r}.")
    for role, name in names.items():
        if not isinstance(name, str):
            raise TypeError(f"{role} must be a name, a string, but got a {type(name).__name__}.")
    check_variant(variant)
