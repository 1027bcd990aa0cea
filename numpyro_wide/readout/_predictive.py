"""Exact readout draws and predictions after the readout has been integrated out."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide._checks import check_key, is_known, listing, whole_number
from numpyro_wide._mapped import is_mapped
from numpyro_wide._programs import partition, run_compiled
from numpyro_wide.readout._by_draw import Samples, joint_log_densities, log_densities, predictions, readouts
from numpyro_wide.readout._collapse import CollapsedModel
from numpyro_wide.readout._nonfinite import check_on_nonfinite, kept_draws
from numpyro_wide.readout._on_disk import as_draws, in_blocks
from numpyro_wide.readout._sites import ReadoutRun, StoppedRunError, run_at_draw

_NAMES = ("mean", "variance", "noise_scale")


class ReadoutPredictive:
    r"""Exact readout draws and predictions from draws of a collapsed model.

    Given the hidden weights, the readout is Gaussian (Hron 2022, eq. 2; Mathematics, :eq:`posterior`): its draws are
    independent and exact, and predictions integrate over it in closed form (Rao-Blackwell; :eq:`predictive`), one
    Gaussian for each draw of the hidden weights.

    Programs are compiled at the first call for some shapes of inputs and draws, and kept with the model: further calls,
    and other draws, reuse them.

    For all else that a plain model's draws serve, ``{**posterior_samples, <readout>: predictive.readout(key)}`` are
    draws of the plain model.

    Args:
        collapsed_model: what :func:`~numpyro_wide.collapse_readout` gave.
        posterior_samples: draws of all its latent sites, each with a leading axis for the draws. Memory-mapped ones,
            as of :func:`~numpyro_wide.mcmc.run_in_pieces`, are read in blocks; results are NumPy arrays then.
        model_args: what the model was fitted on, observations included.
        model_kwargs: likewise.
        params: values of the model's param sites, as NumPyro's ``Predictive`` takes them.
        batch_size: number of draws that are worked on at once; by default as many as keep the features of a batch, at
            the inputs of the fit and at those predicted for, within a million numbers each, 64 million off the CPU.
        on_nonfinite: what to do about draws of the hidden weights whose results are not finite, as where the noise is
            lost in rounding: "raise" an error that names them, or "drop" them with a warning that does. Results then
            have as many draws as are left, and are biased towards weights that float32 is enough for. Under ``jit``,
            where nothing is known, "raise" passes NaN on, and "drop" is refused.

    Raises:
        TypeError: if the model is not a collapsed one, the samples not a dictionary, ``model_args`` not a tuple, or not
            what the model can be called with.
        ValueError: if there are no draws, a latent site has none, their numbers differ, nothing is observed, the
            observed site is called "mean", "variance" or "noise_scale", or ``on_nonfinite`` is unknown.

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
        {'mean': (20, 3), 'noise_scale': (20, 3), 'variance': (20, 3), 'y': (20, 3)}
        >>> predictive.log_density(jnp.zeros((3, 1)), jnp.zeros(3)).shape
        (3,)
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
        on_nonfinite: str = "raise",
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
        if collapsed_model.observed in _NAMES:
            raise ValueError(
                f"the observed site is called {collapsed_model.observed!r}, but predictions are given under the names "
                f"{listing(_NAMES)} and that of the site; rename the site."
            )
        check_on_nonfinite(on_nonfinite)
        self.on_nonfinite = on_nonfinite
        self.model = collapsed_model
        self.params = dict(params or {})
        self.model_args = tuple(model_args)
        self.model_kwargs = dict(model_kwargs or {})
        self.samples = {name: as_draws(draws) for name, draws in posterior_samples.items()}
        self.num_draws = _num_draws(self.samples)
        self.batch_size = None if batch_size is None else whole_number("batch_size", batch_size)
        try:
            self._fit_shapes = self._check_training_run()
        except TypeError as error:
            mismatch = _call_mismatch(collapsed_model.fn, self.model_args, self.model_kwargs)
            if mismatch is None:
                raise
            raise TypeError(
                f"the model cannot be called with these model_args and model_kwargs: {mismatch}. Pass what it was "
                "fitted on, observations included, such as model_args=(x, y)."
            ) from error

    def readout(self, rng_key: Array) -> Array:
        """Draw the readout from its posterior, once for each draw of the other sites.

        Args:
            rng_key: a PRNG key.

        Returns:
            Readouts, (draws, d) or (draws, d, k).

        Raises:
            FloatingPointError: if a draw is not finite: the noise is too small for the features in this precision.
            ValueError: under ``jit``, if such draws are to be dropped.

        Warns:
            RuntimeWarning: if such draws are dropped.
        """
        check_key("rng_key", rng_key, "predictive.readout(rng_key)")
        found, is_finite = self._run(readouts, rng_key, ())
        kept = kept_draws("readouts", is_finite, self.on_nonfinite)
        return found if kept is None else found[kept]

    def __call__(self, rng_key: Array, *args: Any, **kwargs: Any) -> Samples:
        """Predict at other inputs.

        Args:
            rng_key: a PRNG key.
            *args: arguments of the model without observations.
            **kwargs: likewise.

        Returns:
            "mean" and "variance" of the noise-free function given each draw of the hidden weights, (draws, m) or
            (draws, m, k); "noise_scale", the noise's standard deviation at every entry; and under the observed site's
            name draws with noise. The four have the same shape.

        Raises:
            ValueError: if there are observations among the arguments, the inputs give features that do not fit those of
                the fit, or the noise is by row, and not passed anew for other rows; under ``jit``, if draws are to be
                dropped.
            FloatingPointError: if a prediction is not finite.

        Warns:
            RuntimeWarning: if draws are dropped whose predictions are not finite.
        """
        check_key("rng_key", rng_key, "predictive(rng_key, x_new)")
        found, is_finite = self._run_elsewhere(predictions, rng_key, (args, kwargs))
        kept = kept_draws("predictions", is_finite, self.on_nonfinite)
        return found if kept is None else {name: draws[kept] for name, draws in found.items()}

    def log_density(self, *args: Any, **kwargs: Any) -> Array:
        r"""Log predictive density of observations, row by row, under the average over draws of the hidden weights.

        $\log \frac{1}{S} \sum_s \prod_k N(y_k; \text{mean}_{sk}, \text{variance}_{sk} + \text{noise\_scale}_{sk}^2)$
        with the moments of :eq:`predictive`: the readout is integrated over, outputs of one row are independent given
        the hidden weights, and what correlates them is in the average. Rows are taken one by one: their sum is the log
        score of a test set, not the density of all of it together.

        Args:
            *args: arguments of the model, observations included, such as ``(x_test, y_test)``.
            **kwargs: likewise.

        Returns:
            Log densities, (m,), in the units of the observations; minus infinity where a density underflows.

        Raises:
            ValueError: if there are no observations among the arguments, they hold NaN, or what predictions refuse.
            FloatingPointError: if means or variances are not finite.

        Warns:
            RuntimeWarning: if draws are dropped whose means or variances are not finite.
        """
        found, is_finite = self._run_elsewhere(log_densities, None, (args, kwargs))
        kept_draws("predictions", is_finite, self.on_nonfinite)
        return self._known_densities(found, is_finite)

    def joint_log_density(self, *args: Any, **kwargs: Any) -> Array:
        r"""Log predictive density of all rows together: the conditional log evidence $\log p(D_2 | D_1)$.

        $D_1$ is what the model was fitted on, $D_2$ the observations of these rows; $\log \frac{1}{S} \sum_s
        p(D_2 | D_1, \text{hidden}_s)$, each term a Gaussian whose covariance over rows is that of :eq:`predictive`. A
        model that learns fast from little data has more of it than of plain evidence, and it is nearer to how the model
        will predict (Lotfi et al. 2022). The average over draws of the posterior given $D_1$ wants draws that some of
        $D_2$ confirm: of many rows few draws do, and the estimate is then too low.

        Args:
            *args: arguments of the model, observations included, such as ``(x_2, y_2)``.
            **kwargs: likewise.

        Returns:
            A scalar, in nats; minus infinity where a density underflows.

        Raises:
            ValueError: as :meth:`log_density`.
            FloatingPointError: if means or covariances are not finite.

        Warns:
            RuntimeWarning: if draws are dropped whose means or covariances are not finite.
        """
        found, is_finite = self._run_elsewhere(joint_log_densities, None, (args, kwargs))
        kept_draws("predictions", is_finite, self.on_nonfinite)
        return self._known_densities(found, is_finite)[0]

    def _known_densities(self, found: Any, is_finite: Any) -> Array:
        """Log densities, NaN under a transformation where a draw is not finite; without NaN elsewhere."""
        if not is_known(found):
            # Draws that are not finite cannot be told of here, and must not go unnoticed.
            return jnp.where(is_finite.all(), found, jnp.nan)
        if np.isnan(found).any():
            rows = np.flatnonzero(np.isnan(found))
            which = (
                f"{len(rows)} of {len(found)} rows do, the first being row {rows[0]}" if len(found) > 1 else "some do"
            )
            raise ValueError(
                f"the observations of site {self.model.observed!r} must not contain NaN, but {which}; drop or impute "
                "the missing ones."
            )
        return found

    def _run_elsewhere(self, body: Callable, rng_key: Array | None, test: tuple[tuple, dict]) -> tuple[Any, Any]:
        """Run at other inputs than those of the fit, with errors that say what is wrong with them."""
        try:
            return self._run(body, rng_key, test)
        except StoppedRunError as error:
            self._refuse_noise_of_other_rows(error)
            raise
        except AssertionError as error:
            if all(np.shape(leaf)[:1] != (0,) for leaf in jax.tree.leaves(test)):
                raise
            raise ValueError("there are no rows to predict for, and a plate of the model must have one.") from error

    def _run(self, body: Callable, rng_key: Array | None, test: tuple) -> tuple[Any, Any]:
        data, rest = partition(((self.model_args, self.model_kwargs), test))

        def run(rng_key: Array | None, samples: Samples, num_draws: int) -> tuple[Any, Array]:
            return run_compiled(
                body, self.model, (self.batch_size, num_draws, rest), rng_key, samples, self.params, data
            )

        if not is_mapped(self.samples):
            return run(rng_key, self.samples, self.num_draws)
        return in_blocks(run, rng_key, self.samples, is_average=body in (log_densities, joint_log_densities))

    def _refuse_noise_of_other_rows(self, error: StoppedRunError) -> None:
        """Say what the model's own broadcasting error does not, if it got as far as other features than the fit's."""
        noise, loc = self._fit_shapes.noise_scale.shape, self._fit_shapes.loc.shape
        is_by_row = len(noise) == len(loc) and noise[0] == loc[0] > 1
        if is_by_row and error.num_rows != loc[0]:
            raise ValueError(
                f"the noise of observed site {self.model.observed!r} is by row, for the {loc[0]} rows of the fit, and "
                f"the model fails at the {error.num_rows} rows to predict; pass the noise of the new rows as an "
                "argument of the model: a default value, or an array from outside of it, is the fit's."
            ) from error

    def _check_training_run(self) -> ReadoutRun:
        draw = {name: draws[0] for name, draws in self.samples.items()}

        def run(values: Mapping[str, Any]) -> ReadoutRun:
            found = run_at_draw(self.model.fn, self.model.names, values, self.model_args, self.model_kwargs)
            found.problem(self.model.readout, self.model.variant)  # which checks it
            return found

        try:
            found = jax.eval_shape(lambda: run(self.params))
        except NotImplementedError:  # a prior that cannot be sampled, such as ImproperUniform
            found = jax.eval_shape(lambda: run({**self.params, **draw}))
        if not found.is_observed:
            raise ValueError(
                f"the observed site {self.model.observed!r} is not observed with these model_args and model_kwargs; "
                "pass those that the model was fitted on, observations included."
            )
        latent = dict(found.latent_shapes)
        missing = [name for name in latent if name not in self.samples]
        if missing:
            raise ValueError(
                f"posterior_samples must have draws of every latent site, but {listing(missing)} is missing; "
                f"it has {listing(self.samples)}."
            )
        # The parameters of a random flax module are replaced by its sample sites.
        modules = {name.split("/")[0] + "$params" for name in latent}
        known = modules | self.params.keys() | self.samples.keys()
        unset = [name for name in found.param_names if name not in known]
        if unset:
            raise ValueError(f"the model has the param sites {listing(unset)}; pass their values as params.")
        for name, shape in latent.items():
            if draw[name].shape != shape:
                raise ValueError(
                    f"posterior_samples[{name!r}] must have shape (draws, *{shape}), but has "
                    f"{self.samples[name].shape}; flatten chains, as mcmc.get_samples() does."
                )
        return found


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
    num_draws = next(length for length in lengths.values() if length is not None)
    if num_draws == 0:
        raise ValueError("posterior_samples must hold at least one draw, but the arrays are empty.")
    return num_draws
