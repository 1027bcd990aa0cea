"""Repriorisation of a readout: of one site, and of a whole model."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro.handlers import reparam
from numpyro.infer.reparam import Reparam
from numpyro.primitives import _PYRO_STACK

from numpyro_wide._checks import check_names_known, check_no_nan, kind_of, refuse_frames
from numpyro_wide._traces import refuse_subsampled
from numpyro_wide.linear_gaussian._problem import ReadoutProblem, check_variant
from numpyro_wide.linear_gaussian._surrogate import Surrogate
from numpyro_wide.readout._model import (
    Model,
    ReadoutModel,
    SiteRecorder,
    base_name,
    normal_parameters,
    refuse_given_readout,
    refuse_other_readout,
    refuse_prior_readout,
)
from numpyro_wide.readout._transform import ReadoutTransform

SurrogateLike: TypeAlias = Surrogate | Callable[[Array], tuple[ArrayLike, ArrayLike]]
Regulariser: TypeAlias = ArrayLike | Callable[[ArrayLike], ArrayLike] | None


class ReprioriseReadout(Reparam):
    r"""Reparametrisation of a readout by $\phi$, whose posterior tends to N(0, I) as the network widens.

    The readout $W$ becomes a deterministic function of the new site ``<name>_base`` and of all that the features
    depend on, $W = \mu + A \phi$ (Hron 2022, eq. 3; Mathematics, :eq:`map`). The new site's distribution is the
    readout's prior pulled back through the map (:eq:`joint`), so the model's joint distribution is unchanged, whatever
    its likelihood.

    The readout's prior must not be in a ``scale`` handler, nor the rows in a subsampled plate, which
    :func:`~numpyro_wide.repriorise` checks. Start chains with NumPyro's default, ``init_to_uniform``: a draw of the
    prior lies so far out in the coordinates $\phi$ that float32 loses the energy's digits.

    With ``targets=None``, the readout is left alone, so that one model serves for fitting and for prediction. Predict
    with draws of the readout site itself and without targets.

    Args:
        features: $\Psi$, shape (n, d): what the readout multiplies, scaled as in the model, bias column included.
        targets: $Y$, shape (n,) or (n, k), or None.
        noise_scale: $\sigma$, a number or array that broadcasts against ``targets``; may be the value of a site.
        regulariser: $\lambda$, a number or array that broadcasts against ``targets``, or a function of
            ``noise_scale``. $\sigma^2$ by default; $\lambda \to \infty$ is no reparametrisation.
        variant: "feature" (Cholesky of a d × d matrix), "data-cholesky" (of an n × n matrix), "data" (eigenvectors of
            an n × n matrix), or "auto", the cheaper of the first two.

    Raises:
        ValueError: when the model runs, if shapes do not fit, the prior is not Normal, the noise is not positive, data
            contain NaN, or the readout is given a value.

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
        regulariser: Regulariser = None,
        variant: str = "auto",
    ):
        check_variant(variant)
        self.features = features
        self.targets = targets
        self.noise_scale = noise_scale
        self.regulariser = regulariser(noise_scale) if callable(regulariser) else regulariser
        self.variant = variant

    def __call__(self, name: str, fn: dist.Distribution, obs: Array | None) -> tuple[Any, Array | None]:
        """Replace the readout site; see NumPyro's ``Reparam``."""
        if self.targets is None:
            return fn, obs
        base = base_name(name)
        if obs is not None:
            raise ValueError(f"the readout {name!r} is observed; a repriorised readout must be latent.")
        remedy = "to linear_gaussian.readout_inverse_map(features, targets, readout, noise_scale)"
        refuse_given_readout(name, f"it is the image of {base!r}; set that {remedy}, or use the unwrapped model", base)
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
        plates = [handler for handler in _PYRO_STACK if isinstance(handler, numpyro.plate)]
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


@dataclass(eq=False, kw_only=True)
class RepriorisedModel(ReadoutModel):
    """A model with its readout repriorised, by :func:`~numpyro_wide.repriorise` with these arguments."""

    targets: str
    noise_scale: str | ArrayLike | None
    surrogate: SurrogateLike | None
    regulariser: Regulariser

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the model, repriorised if it is given targets."""
        refuse_frames(args, kwargs)
        signature = inspect.signature(self.fn)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = {**bound.arguments, **kwargs}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
            remedy = "Make the targets an argument, or repriorise the readout inside the model with ReprioriseReadout."
            check_names_known("targets", self.targets, arguments, kind="argument", remedy=remedy)
        if arguments.get(self.targets) is None:
            refuse_prior_readout(self.readout, [self.base])
            return self.fn(*args, **kwargs)

        sites = _WholeData(hidden=self.features, base=self.base)
        with sites, reparam(config=partial(self._reparam, arguments, sites)):
            result = self.fn(*args, **kwargs)
        if self.base not in sites.values:
            refuse_other_readout(self.readout, sites.values)
        return result

    def _reparam(self, arguments: Mapping[str, Any], sites: "_WholeData", msg: dict) -> ReprioriseReadout | None:
        if msg["name"] != self.readout:
            return None
        targets = arguments[self.targets]
        noise_scale: Any = self.noise_scale
        if isinstance(self.surrogate, Surrogate):
            num_fitted, shape = len(self.surrogate.targets), np.shape(targets)
            if shape[:1] != (num_fitted,):
                raise ValueError(
                    f"the surrogate was fitted to {num_fitted} rows, but {self.targets!r} has the shape {shape}; fit "
                    "it to these observations, and predict with the unwrapped model."
                )
            targets, noise_scale = self.surrogate
        elif self.surrogate is not None:
            targets, noise_scale = self.surrogate(targets)
        elif isinstance(noise_scale, str):
            argument = arguments.get(noise_scale)
            noise_scale = self._noise_before(sites, targets) if argument is None else argument
        return ReprioriseReadout(
            self._value_before(sites, "features"),
            targets,
            noise_scale,
            regulariser=self.regulariser,
            variant=self.variant,
        )

    def _value_before(self, sites: "_WholeData", role: str) -> Any:
        return sites.value_before(role, getattr(self, role), f"the readout {self.readout!r}")

    def _noise_before(self, sites: "_WholeData", targets: ArrayLike) -> ArrayLike:
        """Return the value of the noise's site; by row, (n, 1), where it is a vector in a plate of the rows."""
        noise_scale, shape = self._value_before(sites, "noise_scale"), np.shape(targets)
        is_by_row = len(shape) == 2 and np.shape(noise_scale) == shape[:1]
        return noise_scale[:, None] if is_by_row and shape[0] in sites.plate_sizes[self.noise_scale] else noise_scale


def repriorise(
    fn: Model,
    *,
    readout: str,
    features: str,
    targets: str,
    noise_scale: str | ArrayLike | None = None,
    surrogate: SurrogateLike | None = None,
    regulariser: Regulariser = None,
    variant: str = "auto",
) -> RepriorisedModel:
    r"""Repriorise the readout of a model: its posterior tends to N(0, I) as the network widens (Hron 2022, equation 3).

    The wrapped model samples the site ``<readout>_base``, $\phi$, and keeps ``readout``, its image under the map
    (Mathematics, :eq:`map`), as a deterministic site. The posterior is that of the unwrapped model (:eq:`joint`). The
    features site is not recorded. Without targets the wrapped model is the unwrapped model.

    Predict with :class:`~numpyro_wide.ReadoutPredictive`, or with the *unwrapped* model and draws of the readout site:
    given targets, a wrapped model would recompute the readout from the new inputs. Draws from a guide hold $\phi$ and
    not the readout: see :func:`~numpyro_wide.guide_draws`.

    The map needs all rows: subsampled ones are refused. Features, targets or noise that are not those of the likelihood
    leave the posterior as it is, but the gain is lost.

    Args:
        fn: the model.
        readout: as of :func:`~numpyro_wide.collapse_readout`.
        features: likewise.
        targets: name of the model's argument that holds the targets, (n,) or (n, k).
        noise_scale: the likelihood's standard deviation: a number, an array that broadcasts against the targets, or
            the name of an argument or of a site that precedes the readout. Beside targets (n, k) a vector is by output;
            that of a site in a plate of n rows, such as of :class:`~numpyro_wide.nn.NoiseNetwork`, is by row.
        surrogate: instead of a noise scale where the likelihood is not Gaussian: what
            :func:`~numpyro_wide.fitted_surrogate` gave for the observations; or a function from the argument that
            ``targets`` names, such as labels, to targets and a noise scale, such as
            ``functools.partial(surrogate_targets, likelihood="categorical", num_classes=10)``.
        regulariser: as of :class:`~numpyro_wide.ReprioriseReadout`.
        variant: likewise.

    Raises:
        TypeError: if there is neither a noise scale nor a surrogate.
        ValueError: if there are both; when the model runs, if an argument or site is missing or comes too late, a plate
            is subsampled, the readout's prior is scaled, and as :class:`~numpyro_wide.ReprioriseReadout` does.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_wide import nn, repriorise
        >>> model = nn.bnn(nn.FCN(depth=1, width=50), num_outputs=None, noise=0.1)
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> wrapped = repriorise(model, readout="readout", features="features", targets="y", noise_scale=0.1)
        >>> mcmc = MCMC(NUTS(wrapped), num_warmup=10, num_samples=10, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), x, jnp.sin(x[:, 0]))
        >>> mcmc.get_samples()["readout"].shape
        (10, 50)
    """
    if surrogate is not None and not callable(surrogate) and not isinstance(surrogate, Surrogate):
        raise TypeError(
            "surrogate must be a function of the observations, or the result of fitted_surrogate for them, but got "
            f"{kind_of(surrogate)}."
        )
    if noise_scale is None and surrogate is None:
        raise TypeError(
            "noise_scale must be a number or an array, but got None; give that, or its name in the model, or for a "
            "likelihood that is not Gaussian a surrogate."
        )
    if noise_scale is not None and surrogate is not None:
        raise ValueError("a surrogate brings its own noise scale; drop noise_scale, or the surrogate.")
    options: dict[str, Any] = {"noise_scale": noise_scale, "surrogate": surrogate, "regulariser": regulariser}
    return RepriorisedModel(fn, readout, features, variant, targets=targets, **options)


class _WholeData(SiteRecorder):
    """Handler that keeps the values of all sites, hides the features from outer handlers, and refuses minibatches."""

    def __init__(self, hidden: str, base: str):
        super().__init__({hidden})
        self.base = base
        self.plate_sizes: dict[Any, set[int]] = {}  # of the plates that each site stands in

    def postprocess_message(self, msg: dict) -> None:
        self.plate_sizes[self.open_sites[-1]] = {frame.size for frame in msg.get("cond_indep_stack", [])}
        super().postprocess_message(msg)

    def process_message(self, msg: dict) -> None:
        super().process_message(msg)
        if msg["type"] == "plate":
            refuse_subsampled(
                msg,
                "a repriorised readout would be another one for each minibatch, for which use the unwrapped model",
            )
        if msg.get("name") == self.base and msg["scale"] is not None:
            raise ValueError(
                f"the prior of the readout that {self.base!r} stands for is scaled inside the model; take the readout "
                "out of the scale handler."
            )
