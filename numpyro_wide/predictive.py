"""Exact readout draws and predictions after the readout has been integrated out."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random
from numpyro.handlers import block, seed, substitute, trace

from numpyro_wide._conjugate import listing
from numpyro_wide._readout_sites import ReadoutSites
from numpyro_wide._wrapped_models import CollapsedModel
from numpyro_wide.linear_gaussian import readout_draw, readout_predictive

Samples = dict[str, Array]


class ReadoutPredictive:
    r"""Exact readout draws and predictions from draws of a collapsed model.

    Given the hidden weights, the readout is Gaussian (Hron 2022, eq. 2; Mathematics, :eq:`posterior`): its draws are
    independent and exact, and predictions integrate over it in closed form (Rao-Blackwell; :eq:`predictive`), one
    Gaussian for each draw of the hidden weights.

    For all else that a plain model's draws serve, ``{**posterior_samples, <readout>: predictive.readout(key)}`` are
    draws of the plain model.

    Args:
        collapsed_model: what :func:`~numpyro_wide.collapse_readout` gave.
        posterior_samples: draws of all its latent sites, each with a leading axis for the draws.
        model_args: what the model was fitted on, observations included.
        model_kwargs: likewise.
        params: values of the model's param sites, as NumPyro's ``Predictive`` takes them.
        batch_size: number of draws that are worked on at once; by default as many as keep the features of a batch,
            at the inputs of the fit and at those predicted for, within 64 million numbers each.

    Raises:
        TypeError: if the model is not a collapsed one, the samples not a dictionary, ``model_args`` not a tuple, or not
            what the model can be called with.
        ValueError: if a latent site has no draws, their numbers differ, or nothing is observed.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_wide import ReadoutPredictive, collapse_readout
        >>> def model(x, y=None):
        ...     hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 50]).to_event(2))
        ...     features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / 50**0.5)
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([50]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(features @ w, 0.1).to_event(1), obs=y)
        >>> wrapped = collapse_readout(model, readout="w", features="features", observed="y")
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> hidden = jax.random.normal(jax.random.key(0), (20, 1, 50))
        >>> predictive = ReadoutPredictive(wrapped, {"hidden": hidden}, (x, jnp.sin(x[:, 0])))
        >>> predictions = predictive(jax.random.key(1), jnp.zeros((3, 1)))
        >>> {name: draws.shape for name, draws in predictions.items()}
        {'mean': (20, 3), 'variance': (20, 3), 'y': (20, 3)}
    """

    def __init__(
        self,
        collapsed_model: CollapsedModel,
        posterior_samples: Samples,
        model_args: tuple = (),
        model_kwargs: dict[str, Any] | None = None,
        *,
        params: dict[str, Any] | None = None,
        batch_size: int | None = None,
    ):
        if not isinstance(collapsed_model, CollapsedModel):
            raise TypeError(
                "collapsed_model must come from collapse_readout, "
                f"but is a {type(collapsed_model).__name__}; predict from other models with numpyro's Predictive."
            )
        if not isinstance(posterior_samples, Mapping) or not isinstance(model_args, tuple | list):
            raise TypeError(
                "posterior_samples must be a dictionary of draws, such as mcmc.get_samples(), and model_args a tuple, "
                f"but got a {type(posterior_samples).__name__} and a {type(model_args).__name__}."
            )
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be positive, but got {batch_size}.")
        self.model = collapsed_model
        self.params = dict(params or {})
        self.model_args = tuple(model_args)
        self.model_kwargs = dict(model_kwargs or {})
        self.samples = {name: jnp.asarray(draws) for name, draws in posterior_samples.items()}
        self.num_draws = _num_draws(self.samples)
        try:
            self._shapes = self._check_training_run()
        except TypeError as error:
            mismatch = _call_mismatch(collapsed_model.fn, self.model_args, self.model_kwargs)
            if mismatch is None:
                raise
            raise TypeError(
                f"the model cannot be called with these model_args and model_kwargs: {mismatch}. Pass what it was "
                "fitted on, observations included, such as model_args=(x, y)."
            ) from error
        self.batch_size = batch_size
        self._num_features = self._shapes.features.size

    def readout(self, rng_key: Array) -> Array:
        """Draw the readout from its posterior, once for each draw of the other sites.

        Args:
            rng_key: a PRNG key.

        Returns:
            Readouts, (draws, d) or (draws, d, k).

        Raises:
            FloatingPointError: if a draw is not finite: the noise is too small for the features in this precision.
        """

        def single(key_and_draw: tuple[Array, Samples]) -> Array:
            key, draw = key_and_draw
            fit = self._fit(draw)
            return fit.prior_loc + self._deviation(key, fit)

        return _finite("readouts", self._map(single, rng_key, self._num_features))

    def __call__(self, rng_key: Array, *args: Any, **kwargs: Any) -> Samples:
        """Predict at other inputs.

        Args:
            rng_key: a PRNG key.
            *args: arguments of the model without observations.
            **kwargs: likewise.

        Returns:
            "mean" and "variance" of the noise-free function given each draw of the hidden weights, (draws, m) or
            (draws, m, k), and under the observed site's name draws with noise. The three have the same shape.

        Raises:
            ValueError: if the inputs give features that do not fit those of the fit, or the noise is by row, and not
                passed anew for other rows.
            FloatingPointError: if a prediction is not finite.
        """

        def single(key_and_draw: tuple[Array, Samples]) -> Samples:
            key, draw = key_and_draw
            readout_key, noise_key = random.split(key)
            fit = self._fit(draw)
            test = self._run(draw, args, kwargs)
            if test.features.shape[1] != fit.features.shape[1]:
                raise ValueError(
                    f"the inputs give features with {test.features.shape[1]} columns, but the model was fitted with "
                    f"{fit.features.shape[1]}."
                )
            mean, variance = readout_predictive(
                test.features, fit.features, fit.residual, fit.noise_scale, prior_scale=fit.prior_scale
            )
            noise = test.noise_scale * random.normal(noise_key, test.loc.shape)
            observed = test.loc + test.features @ self._deviation(readout_key, fit) + noise
            return {"mean": test.loc + mean, "variance": variance, self.model.observed: observed}

        first = {name: draws[0] for name, draws in self.samples.items()}
        sites = ReadoutSites(self.model)
        try:
            shapes = jax.eval_shape(lambda: run_at_draw(self.model, {**self.params, **first}, args, kwargs, sites))
        except ValueError as error:
            self._refuse_noise_of_other_rows(sites, error)
            raise
        return _finite("predictions", self._map(single, rng_key, max(shapes.features.size, self._num_features)))

    def _refuse_noise_of_other_rows(self, sites: ReadoutSites, error: ValueError) -> None:
        """Say what the model's own broadcasting error does not, if it got as far as other features than the fit's."""
        noise, loc = self._shapes.noise_scale.shape, self._shapes.loc.shape
        is_by_row = len(noise) == len(loc) and noise[0] == loc[0] > 1
        features = getattr(sites, "features_value", None)
        if is_by_row and features is not None and features.shape[0] != loc[0]:
            raise ValueError(
                f"the noise of observed site {self.model.observed!r} is by row, for the {loc[0]} rows of the fit, and "
                f"the model fails at the {features.shape[0]} rows to predict; pass the noise of the new rows as an "
                "argument of the model: a default value, or an array from outside of it, is the fit's."
            ) from error

    def _deviation(self, key: Array, fit: "ReadoutRun") -> Array:
        """A draw of the readout less its prior mean."""
        phi = random.normal(key, fit.prior_loc.shape, fit.features.dtype)
        return readout_draw(
            fit.features, fit.residual, phi, fit.noise_scale, self.model.variant, prior_scale=fit.prior_scale
        )

    def _fit(self, draw: Samples) -> "ReadoutRun":
        return self._run(draw, self.model_args, self.model_kwargs)

    def _run(self, draw: Samples, args: tuple, kwargs: dict) -> "ReadoutRun":
        return run_at_draw(self.model, {**self.params, **draw}, args, kwargs)

    def _check_training_run(self) -> "ReadoutRun":
        draw = {name: draws[0] for name, draws in self.samples.items()}
        latent: dict[str, tuple[int, ...]] = {}
        is_observed: list[bool] = []
        param_sites: list[str] = []

        def run(known: dict[str, Any]) -> None:
            sites = ReadoutSites(self.model)
            with block(), trace() as others, seed(rng_seed=random.key(0)), substitute(data=known), sites:
                self.model.fn(*self.model_args, **self.model_kwargs)
            latent.update(
                {k: s["fn"].shape() for k, s in others.items() if s["type"] == "sample" and not s["is_observed"]}
            )
            param_sites.extend(name for name, site in others.items() if site["type"] == "param")
            is_observed.append(sites.value is not None)

        try:
            jax.eval_shape(lambda: run(self.params))
        except NotImplementedError:  # a prior that cannot be sampled, such as ImproperUniform
            jax.eval_shape(lambda: run({**self.params, **draw}))
        if not is_observed[0]:
            raise ValueError(
                f"the observed site {self.model.observed!r} is not observed with these model_args and model_kwargs; "
                "pass those that the model was fitted on, observations included."
            )
        missing = [name for name in latent if name not in self.samples]
        if missing:
            raise ValueError(
                f"posterior_samples must have draws of every latent site, but {listing(missing)} is missing; "
                f"it has {listing(self.samples)}."
            )
        # The parameters of a random flax module are replaced by its sample sites.
        modules = {name.split("/")[0] + "$params" for name in latent}
        unset = [name for name in param_sites if name not in modules | self.params.keys() | self.samples.keys()]
        if unset:
            raise ValueError(f"the model has the param sites {listing(unset)}; pass their values as params.")
        for name, shape in latent.items():
            if draw[name].shape != shape:
                raise ValueError(
                    f"posterior_samples[{name!r}] must have shape (draws, *{shape}), but has "
                    f"{self.samples[name].shape}; flatten chains, as mcmc.get_samples() does."
                )
        return jax.eval_shape(lambda: self._fit(draw))

    def _map(self, single: Callable, rng_key: Array, num_features: int) -> Any:
        keys = random.split(rng_key, self.num_draws)
        batch_size = self.batch_size or max(1, min(self.num_draws, 2**26 // max(1, num_features)))
        return jax.jit(lambda *xs: jax.lax.map(single, xs, batch_size=batch_size))(keys, self.samples)


class ReadoutRun(NamedTuple):
    """What a run of a collapsed model at a draw gives, the readout at its prior mean."""

    features: Array
    loc: Array
    residual: Array
    noise_scale: Array
    prior_loc: Array
    prior_scale: Array


def run_at_draw(
    model: CollapsedModel, values: Mapping[str, Array], args: tuple, kwargs: dict, sites: ReadoutSites | None = None
) -> ReadoutRun:
    """Run a collapsed model at values of its other sites and parameters, the readout at its prior mean.

    A caller's own ``sites`` tell it more: whether there were observations, and how far a run came that failed.
    """
    sites = ReadoutSites(model) if sites is None else sites
    # Nothing random is left in what is read off, yet plates and networks may ask for a key.
    with block(), seed(rng_seed=random.key(0)), substitute(data=dict(values)), sites:
        model.fn(*args, **kwargs)
    sites.check_complete()
    residual = sites.loc if sites.value is None else sites.value - sites.loc
    prior_loc = jnp.broadcast_to(sites.prior_loc, sites.readout_shape)
    return ReadoutRun(sites.features_value, sites.loc, residual, sites.noise_scale, prior_loc, sites.prior_scale)


def _call_mismatch(model: Callable, args: tuple, kwargs: dict) -> str | None:
    """Why a model cannot be called with these arguments; None if it can, or there is no telling."""
    try:
        signature = inspect.signature(model)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def _num_draws(samples: Samples) -> int:
    lengths = {name: draws.shape[0] if draws.ndim else None for name, draws in samples.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        raise ValueError(
            "posterior_samples must hold arrays with one leading axis for the draws, of the same length, "
            f"but the lengths are {lengths}."
        )
    return next(length for length in lengths.values() if length is not None)


def _finite(what: str, draws: Any) -> Any:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(draws)):
        return draws
    if not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(draws)):
        raise FloatingPointError(
            f"{what} are not all finite: the noise is too small against the features for this precision, or a draw is "
            "not finite itself. Run in float64 (jax.config.update('jax_enable_x64', True))."
        )
    return draws
