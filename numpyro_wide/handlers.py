"""Handlers around a whole model: repriorise its readout, or integrate it out."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax.typing import ArrayLike

from numpyro_wide._wrapped_models import CollapsedModel, Model, RepriorisedModel
from numpyro_wide.linear_gaussian import check_variant


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


def _check_options(fn: Any, variant: str, **names: Any) -> None:
    if fn is not None and not callable(fn):
        raise TypeError(f"fn must be a model, a callable, but got {fn!r}.")
    for role, name in names.items():
        if not isinstance(name, str):
            raise TypeError(f"{role} must be a name, a string, but got a {type(name).__name__}.")
    check_variant(variant)
