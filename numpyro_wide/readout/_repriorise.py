"""Whole models with their readout repriorised."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, overload

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro.handlers import reparam

from numpyro_wide._checks import check_names_known, refuse_frames
from numpyro_wide._traces import latent_sites, refuse_subsampled, run_model
from numpyro_wide.readout._conjugacy import conjugate_sites
from numpyro_wide.readout._model import (
    Draws,
    Model,
    ReadoutModel,
    adopt_signature,
    bound_arguments,
    check_options,
)
from numpyro_wide.readout._reparam import ReprioriseReadout, image_draws
from numpyro_wide.readout._run import SeenSites, SiteNames, refuse_other_readout
from numpyro_wide.readout._surroundings import refuse_base_without_targets


class Surrogate(NamedTuple):
    """Targets and noise scale of the Gaussian likelihood that stands in for another one.

    Attributes:
        targets: values that the Gaussian takes for observed, (n,) or (n, k).
        noise_scale: standard deviation of the Gaussian: a scalar, of the shape of ``targets``, or (n, 1) where a row's
            outputs share it.
    """

    targets: Array
    noise_scale: Array


SurrogateLike: TypeAlias = Surrogate | Callable[[Any], tuple[ArrayLike, ArrayLike]]
Regulariser: TypeAlias = ArrayLike | Callable[[ArrayLike], ArrayLike] | None


@dataclass(frozen=True, eq=False)
class RepriorisedModel(ReadoutModel):
    """A model with its readout repriorised, by :func:`~numpyro_wide.repriorise` with these arguments."""

    fn: Model
    readout: str
    features: str
    targets: str
    noise_scale: str | ArrayLike | None
    surrogate: SurrogateLike | None
    regulariser: Regulariser
    variant: str

    def __post_init__(self) -> None:
        adopt_signature(self, self.fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, repriorised if it is given targets."""
        refuse_frames(args, kwargs)
        arguments = bound_arguments(self.fn, args, kwargs)
        if not isinstance(arguments, defaultdict):
            remedy = "Make the targets an argument, or repriorise the readout inside the model with ReprioriseReadout."
            check_names_known("targets", self.targets, arguments, kind="argument", remedy=remedy)
        if arguments[self.targets] is None:
            refuse_base_without_targets(self.readout, self.base)
            return self.fn(*args, **kwargs)

        sites = _WholeData(hidden=self.features, base=self.base)
        try:
            with sites, reparam(config=partial(self._reparam, arguments, sites)):
                result = self.fn(*args, **kwargs)
        except AssertionError as error:
            self._explain(error, args, kwargs)
            raise
        check_names_known("readout", self.readout, sites.values)
        if self.base not in sites.values:
            refuse_other_readout(self.readout)
        return result

    def conjugate_sites(self, args: tuple, kwargs: Mapping[str, Any]) -> SiteNames | None:
        """Return the names of the sites with which the readout can be integrated out; None if it cannot be.

        What the readout was repriorised with need not be the likelihood's; so the model's own likelihood is looked at.
        """
        return conjugate_sites(self.fn, self.readout, self.features, args, dict(kwargs))

    def weights(
        self,
        rng_key: Array,
        draws: Draws,
        args: tuple,
        kwargs: Mapping[str, Any],
        params: Mapping[str, Any] | None = None,
    ) -> Draws:
        """Return draws of the unwrapped model: the readout is the image of the base site, if it is not there yet."""
        return dict(draws) if self.readout in draws else image_draws(self, draws, args, dict(kwargs), params)

    def _reparam(self, arguments: dict[str, Any], sites: "_WholeData", msg: dict) -> ReprioriseReadout | None:
        if msg["name"] != self.readout:
            return None
        targets: Any = arguments[self.targets]
        noise_scale: Any = self.noise_scale
        if self.surrogate is not None:
            targets, noise_scale = self._stand_in(targets)
        elif isinstance(noise_scale, str):
            given = arguments.get(noise_scale)
            noise_scale = self._noise_before(sites, targets) if given is None else given
        return ReprioriseReadout(
            self._value_before(sites, "features"),
            targets,
            noise_scale,
            regulariser=self.regulariser,
            variant=self.variant,
        )

    def _value_before(self, sites: "_WholeData", role: str) -> Any:
        return sites.value_before(role, getattr(self, role), f"the readout {self.readout!r}")

    def _noise_before(self, sites: "_WholeData", targets: Any) -> Any:
        """Return the value of the noise's site; by row, (n, 1), where it is a vector in a plate of the rows."""
        noise_scale, shape = self._value_before(sites, "noise_scale"), np.shape(targets)
        is_by_row = len(shape) == 2 and np.shape(noise_scale) == shape[:1]
        # Against (n, k) a vector is the noise of the outputs, unless its plate tells that it is that of the rows.
        return noise_scale[:, None] if is_by_row and shape[0] in sites.plate_sizes[self.noise_scale] else noise_scale

    def _stand_in(self, observations: Any) -> tuple[Any, Any]:
        if not isinstance(self.surrogate, Surrogate):
            return self.surrogate(observations)  # type: ignore[misc]
        fitted, given = np.shape(self.surrogate.targets), np.shape(observations)
        if fitted[:1] != given[:1]:
            raise ValueError(
                f"the surrogate was fitted to {fitted[0]} rows, but {self.targets!r} has the shape {given}; fit it to "
                "these observations, and predict with the unwrapped model."
            )
        return self.surrogate

    def _explain(self, error: AssertionError, args: tuple, kwargs: dict) -> None:
        """Tell what is missing where NumPyro asserts, without a word, that a site has a key to be drawn with."""
        if str(error):
            return
        jax.eval_shape(lambda: latent_sites(run_model(self, args, kwargs)).clear())  # says so if a name is wrong
        raise ValueError(
            "the model was called without a PRNG key to draw its sites with; pass it to MCMC or SVI, or call it inside "
            "of numpyro.handlers.seed."
        ) from error


@overload
def repriorise(
    fn: Model,
    *,
    readout: str,
    features: str,
    targets: str,
    noise_scale: str | ArrayLike | None = ...,
    surrogate: SurrogateLike | None = ...,
    regulariser: Regulariser = ...,
    variant: str = ...,
) -> RepriorisedModel: ...


@overload
def repriorise(
    fn: None = ...,
    *,
    readout: str,
    features: str,
    targets: str,
    noise_scale: str | ArrayLike | None = ...,
    surrogate: SurrogateLike | None = ...,
    regulariser: Regulariser = ...,
    variant: str = ...,
) -> Callable[[Model], RepriorisedModel]: ...


def repriorise(
    fn: Model | None = None,
    *,
    readout: str,
    features: str,
    targets: str,
    noise_scale: str | ArrayLike | None = None,
    surrogate: SurrogateLike | None = None,
    regulariser: Regulariser = None,
    variant: str = "auto",
) -> RepriorisedModel | Callable[[Model], RepriorisedModel]:
    r"""Repriorise the readout of a model: its posterior tends to N(0, I) as the network widens (Hron 2022, equation 3).

    The wrapped model has the site ``<readout>_base``, $\phi$, to sample, and keeps ``readout``, its image under the map
    (Mathematics, :eq:`map`), as a deterministic site, so that its draws are draws of the weights. The posterior is that
    of the unwrapped model (:eq:`joint`). The features site is for the handler alone and is not recorded. Called with
    ``targets=None`` (or without targets, where None is the default) the wrapped model is the unwrapped model.

    Warning:
        Predict with the *unwrapped* model and the draws of the readout site. A wrapped model that is given targets
        computes the readout from the inputs it is given; on other inputs than it was fitted on that is another readout.
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
        features: name of the site that holds what the readout multiplies, (n, d), such as a ``numpyro.deterministic``.
        targets: name of the model's argument that holds the targets, (n,) or (n, k).
        noise_scale: the likelihood's standard deviation: a number, an array that broadcasts against the targets, or
            the name of an argument or of a site that precedes the readout. Beside targets (n, k) a vector is by output;
            that of a site in a plate of n rows, such as of :class:`~numpyro_wide.nn.NoiseNetwork`, is by row.
        surrogate: instead of a noise scale where the likelihood is not Gaussian: what
            :func:`~numpyro_wide.fitted_surrogate` gave for the observations; or a function from the argument that
            ``targets`` names, such as labels, to targets and a noise scale, such as
            ``functools.partial(surrogate_targets, likelihood="categorical", num_classes=10)``.
        regulariser: $\lambda$, a number or array that broadcasts against the targets, or a function of the noise
            scale; its square by default.
        variant: "feature", "data", "data-cholesky" or "auto"; see :class:`~numpyro_wide.ReprioriseReadout`.

    Returns:
        The wrapped model.

    Raises:
        TypeError: if ``fn`` is not callable, ``surrogate`` neither that nor fitted, a name is not a string, or there is
            neither a noise scale nor a surrogate.
        ValueError: here for an unknown variant, or if both are given; when the model runs, if an argument or site is
            missing or comes too late, a plate is subsampled, the readout's prior is scaled, and as
            :class:`~numpyro_wide.ReprioriseReadout` does.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_wide import nn, repriorise
        >>> model = nn.bnn(nn.FCN(depth=1, width=50), num_outputs=None, noise=0.1)
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> wrapped = repriorise(model, readout="readout", features="features", targets="y", noise_scale=0.1)
        >>> mcmc = MCMC(NUTS(wrapped), num_warmup=10, num_samples=10, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), x, jnp.sin(x[:, 0]))
        >>> sorted(mcmc.get_samples())
        ['hidden.hidden_0.kernel', 'readout', 'readout_base']
    """
    check_options(fn, variant, readout=readout, features=features, targets=targets)
    if surrogate is not None and not callable(surrogate) and not isinstance(surrogate, Surrogate):
        raise TypeError(
            "surrogate must be a function of the observations, or the result of fitted_surrogate for them, but got a "
            f"{type(surrogate).__name__}."
        )
    if noise_scale is None and surrogate is None:
        raise TypeError(
            "noise_scale must be a number or an array, but got None; give that, or the name of a site or argument, or "
            "for a likelihood that is not Gaussian a surrogate."
        )
    if noise_scale is not None and surrogate is not None:
        raise ValueError("a surrogate brings its own noise scale; drop noise_scale, or the surrogate.")

    def wrap(model: Model) -> RepriorisedModel:
        return RepriorisedModel(model, readout, features, targets, noise_scale, surrogate, regulariser, variant)

    return wrap if fn is None else wrap(fn)


class _WholeData(SeenSites):
    """Handler that keeps the values of all sites, hides the features from outer handlers, and refuses minibatches."""

    def __init__(self, hidden: str, base: str):
        super().__init__({hidden})
        self.base = base
        self.plate_sizes: dict[Any, set[int]] = {}  # of the plates that each site stands in

    def postprocess_message(self, msg: dict) -> None:
        self.plate_sizes[self.begun[-1]] = {frame.size for frame in msg.get("cond_indep_stack", [])}
        super().postprocess_message(msg)

    def process_message(self, msg: dict) -> None:
        super().process_message(msg)
        if msg["type"] == "plate":
            refuse_subsampled(
                msg,
                "a repriorised readout would be another one for each minibatch (for which use the unwrapped model)",
            )
        if msg.get("name") == self.base and msg["scale"] is not None:
            raise ValueError(
                f"the prior of the readout that {self.base!r} stands for is scaled inside the model, and the map's "
                "log-determinant would be scaled with it; take the readout out of the scale handler."
            )
