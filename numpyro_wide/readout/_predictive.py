"""Predictions from draws of a wrapped model, whatever they come from."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_wide._checks import check_key, check_known, check_levels, check_one_of, is_known, kind_of, whole_number
from numpyro_wide.readout._fit import Fit
from numpyro_wide.readout._model import Draws, ReadoutModel, check_wrapped
from numpyro_wide.readout._prediction_programs import INTEGRATED, Quantity
from numpyro_wide.readout._prediction_runs import CHOICES, PredictionRuns, kept_draws
from numpyro_wide.readout._summary import PredictiveSummary, summarise
from numpyro_wide.readout._through_weights import THROUGH_WEIGHTS

_ORDER = "the order is ReadoutPredictive(model, draws, (x, y))"


class ReadoutPredictive:
    r"""Predictions from draws of a wrapped model: of a chain, of a guide, or of the wide limit.

    Given the hidden weights, and with a Normal likelihood, the readout is Gaussian (Hron 2022, eq. 2; Mathematics,
    :eq:`posterior`): its draws are independent and exact, and predictions integrate over it in closed form
    (Rao-Blackwell; :eq:`predictive`), one Gaussian for each draw of the hidden weights. That holds for collapsed
    models, and for repriorised ones whose own likelihood is Normal with a mean linear in the readout. For all others,
    such as classes and counts, predictions go through draws of all weights.

    It is a snapshot: draws belong to the model that they were drawn from, so the model is looked at here, and
    predictions are refused once a global, a closure, a default or an attribute that the model reads has changed.
    Arrays are copied. Programs are compiled at the first call for some shapes of inputs and draws; further calls, and
    other draws, use them again.

    ``{**draws, <readout>: predictive.readout(key)}`` can be used wherever samples of the unwrapped model can.

    Args:
        model: result of :func:`~numpyro_wide.collapse_readout` or :func:`~numpyro_wide.repriorise`.
        draws: draws of all its latent sites, each with a leading axis for the draws. A repriorised model's may hold its
            base site, the readout, or both. Memory-mapped ones, as of :func:`~numpyro_wide.runs.run_in_pieces`, are
            read in blocks; results are NumPy arrays then.
        model_args: arguments that the model was fitted with, observations included.
        model_kwargs: keyword arguments that the model was fitted with.
        params: values of the model's param sites, as NumPyro's ``Predictive`` takes them.
        batch_size: number of draws that are worked on at once; by default as many as keep the features of a batch, at
            the inputs of the fit and at those predicted for, within a million numbers each, 64 million off the CPU.
        on_nonfinite: what to do about draws of the hidden weights whose results are not finite, as where the noise is
            lost in rounding: "raise" an error that names them, or "drop" them with a warning that does. Results then
            have as many draws as are left, and are biased towards weights that float32 is enough for. Under ``jit``,
            where nothing is known, "raise" passes NaN on, and "drop" is refused.
        progress_bar: whether to show a bar while features are summed over by blocks of rows. That is done once, at the
            first call, for all draws whose d × d matrices are within a gigabyte; predictions read no row again.

    Raises:
        TypeError: if the model is no wrapped one, the draws not a dictionary, ``model_args`` not a tuple, or not what
            the model can be called with.
        ValueError: if there are no draws, a latent site has none, their numbers differ, nothing is observed, the
            observed site has a name that predictions are given under, or ``on_nonfinite`` is unknown.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide import ReadoutPredictive, collapse_readout, nn, wide_limit_draws
        >>> model = nn.bnn(nn.FCN(depth=1, width=50), num_outputs=None, noise=0.1)
        >>> wrapped = collapse_readout(model, readout="readout", features="features", observed="y")
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> y = jnp.sin(x[:, 0])
        >>> draws = wide_limit_draws(jax.random.key(0), wrapped, 20, x, y)
        >>> predictive = ReadoutPredictive(wrapped, draws, (x, y))
        >>> found = predictive(jax.random.key(1), jnp.zeros((3, 1)))
        >>> {name: values.shape for name, values in sorted(found.items())}
        {'mean': (20, 3), 'noise_scale': (20, 3), 'predictive_variance': (20, 3), 'variance': (20, 3), 'y': (20, 3)}
        >>> predictive.log_density(jnp.zeros((3, 1)), jnp.zeros(3)).shape
        (3,)
    """

    def __init__(
        self,
        model: ReadoutModel,
        draws: Mapping[str, Any],
        model_args: tuple = (),
        model_kwargs: dict[str, Any] | None = None,
        *,
        params: dict[str, Any] | None = None,
        batch_size: int | None = None,
        on_nonfinite: str = "raise",
        progress_bar: bool = False,
    ):
        check_wrapped(
            model, "predict from others, such as one that uses ReprioriseReadout itself, with numpyro's Predictive"
        )
        if not isinstance(draws, Mapping):
            raise TypeError(
                f"draws must be a dictionary of draws, such as mcmc.get_samples(), but got {kind_of(draws)}; {_ORDER}."
            )
        if not isinstance(model_args, tuple | list):
            raise TypeError(
                "draws must be a dictionary of draws, and model_args a tuple, but got a "
                f"{type(draws).__name__} and {kind_of(model_args)}; {_ORDER}."
            )
        check_one_of("on_nonfinite", on_nonfinite, CHOICES)
        self.on_nonfinite = on_nonfinite
        self.batch_size = None if batch_size is None else whole_number("batch_size", batch_size)
        self._fit = Fit(model, draws, tuple(model_args), dict(model_kwargs or {}), dict(params or {}))
        self._quantities = INTEGRATED if self._fit.is_integrated else THROUGH_WEIGHTS
        self._run = PredictionRuns(self._fit, self.batch_size, self._quantities.posteriors, progress_bar)

    @property
    def model(self) -> ReadoutModel:
        """The wrapped model."""
        return self._fit.model

    @property
    def draws(self) -> Draws:
        """The draws that predictions are made from, each with a leading axis."""
        return self._fit.draws

    @property
    def is_integrated(self) -> bool:
        """Whether the readout is integrated out: the model's likelihood is Normal, and linear in it."""
        return self._quantities.is_integrated

    def readout(self, rng_key: Array) -> Array:
        """Draw the readout from its posterior, once for each draw of the other sites.

        Where it cannot be integrated out, return the draws' own.

        Args:
            rng_key: a PRNG key.

        Returns:
            Readouts, (draws, d) or (draws, d, k).

        Raises:
            FloatingPointError: if a draw is not finite: the noise is too small for the features in this precision.
            ValueError: under ``jit``, if such draws are to be dropped; if the model has changed.

        Warns:
            RuntimeWarning: if such draws are dropped.
        """
        check_key("rng_key", rng_key, "predictive.readout(rng_key)")
        quantity = self._quantities.readouts
        found, is_finite = self._run(quantity, rng_key)
        kept = kept_draws(quantity.what, is_finite, self.on_nonfinite)
        return found if kept is None else found[kept]

    def __call__(self, rng_key: Array, *args: Any, **kwargs: Any) -> Draws:
        """Predict at other inputs.

        Args:
            rng_key: a PRNG key.
            *args: arguments of the model without observations.
            **kwargs: keyword arguments of the model without observations.

        Returns:
            "mean" and "variance" of the noise-free function given each draw of the hidden weights, (draws, m) or
            (draws, m, k); "noise_scale", the noise's standard deviation at every entry; "predictive_variance", that of
            an observation, noise included; and under the observed site's name draws with noise. All have the same
            shape. Where the readout is not integrated out: "mean" and "predictive_variance" of the observed
            distribution at each draw; for classes "probs", (draws, m, classes), or of a Bernoulli (draws, m); and
            draws.

        Raises:
            ValueError: if there are observations among the arguments, the inputs give features that do not fit those of
                the fit, or the noise is by row, and not passed anew for other rows; under ``jit``, if draws are to be
                dropped; if the model has changed.
            FloatingPointError: if a prediction is not finite.

        Warns:
            RuntimeWarning: if draws are dropped whose predictions are not finite.
        """
        check_key("rng_key", rng_key, "predictive(rng_key, x_new)")
        quantity = self._quantities.predictions
        found, is_finite = self._run.elsewhere(quantity, rng_key, (args, kwargs))
        kept = kept_draws(quantity.what, is_finite, self.on_nonfinite)
        return found if kept is None else {name: values[kept] for name, values in found.items()}

    def summary(
        self,
        *args: Any,
        quantiles: float | Sequence[float] = (0.05, 0.5, 0.95),
        rng_key: Array | None = None,
        **kwargs: Any,
    ) -> PredictiveSummary:
        """Summarise predictions at other inputs: the mixture over draws, noise included, as a table.

        Args:
            *args: arguments of the model without observations.
            quantiles: level of a quantile, or several, between 0 and 1.
            rng_key: a PRNG key, which matters where quantiles are those of draws; ``jax.random.key(0)`` by default.
            **kwargs: keyword arguments of the model without observations.

        Returns:
            Mean, standard deviation and quantiles by row, or the probabilities of classes; to print. With a Normal
            likelihood quantiles are exact, those of a mixture of Gaussians; else they are those of draws.

        Raises:
            ValueError: for levels outside of (0, 1), and as :meth:`__call__`.
            TypeError: under ``jit``, where numbers are not known.
        """
        levels = (quantiles,) if isinstance(quantiles, float) else tuple(quantiles)
        check_levels("quantiles", levels)
        if any(isinstance(arg, Array) and jnp.issubdtype(arg.dtype, jax.dtypes.prng_key) for arg in args):
            raise TypeError("summary(x_new) takes the rows to predict; a PRNG key goes by name, rng_key=key.")
        found = self(jax.random.key(0) if rng_key is None else rng_key, *args, **kwargs)
        check_known("a summary holds numbers", *found.values())
        return summarise(found, self._fit.names.observed, levels)

    def log_density(self, *args: Any, **kwargs: Any) -> Array:
        r"""Return the log predictive density of observations, row by row, under the average over draws.

        $\log \frac{1}{S} \sum_s \prod_k N(y_k; \text{mean}_{sk}, \text{variance}_{sk} + \text{noise\_scale}_{sk}^2)$
        with the moments of :eq:`predictive`: the readout is integrated over, outputs of one row are independent given
        the hidden weights, and what correlates them is in the average. Where the readout is not integrated out, the
        terms are the likelihood at each draw of all weights. Rows are taken one by one: their sum is the log score of a
        test set, not the density of all of it together.

        Args:
            *args: arguments of the model, observations included, such as ``(x_test, y_test)``.
            **kwargs: keyword arguments of the model, observations included.

        Returns:
            Log densities, (m,), in the units of the observations; minus infinity where a density underflows.

        Raises:
            ValueError: if there are no observations among the arguments, they hold NaN, or what predictions refuse.
            FloatingPointError: if means or variances are not finite.

        Warns:
            RuntimeWarning: if draws are dropped whose means or variances are not finite.
        """
        return self._log_average(self._quantities.log_densities, (args, kwargs))

    def joint_log_density(self, *args: Any, **kwargs: Any) -> Array:
        r"""Return the log predictive density of all rows together: the conditional log evidence $\log p(D_2 | D_1)$.

        $D_1$ is what the model was fitted on, $D_2$ the observations of these rows; $\log \frac{1}{S} \sum_s
        p(D_2 | D_1, \text{hidden}_s)$, each term a Gaussian whose covariance over rows is that of :eq:`predictive`. A
        model that learns fast from little data is ranked higher by it than by the evidence, and it is closer to how
        well the model will predict (Lotfi et al. 2022). The average over draws given $D_1$ is dominated by those under
        which $D_2$ is likely. With many rows these are few, and the estimate is then too low.

        Args:
            *args: arguments of the model, observations included, such as ``(x_2, y_2)``.
            **kwargs: keyword arguments of the model, observations included.

        Returns:
            A scalar, in nats; minus infinity where a density underflows.

        Raises:
            ValueError: as :meth:`log_density`.
            FloatingPointError: if means or covariances are not finite.

        Warns:
            RuntimeWarning: if draws are dropped whose means or covariances are not finite.
        """
        return self._log_average(self._quantities.joint_log_densities, (args, kwargs))[0]

    def log_evidence(self) -> Array:
        r"""Return the log evidence of the fit's observations at each draw of the other sites.

        $\log N(Y; \text{loc}, \Psi \Psi^\top + \sigma^2 I)$ (Mathematics, :eq:`evidence`). It is the weight of draws
        from the prior; its differences between draws are nats.

        Returns:
            Log evidences, (draws,).

        Raises:
            ValueError: if the readout is not integrated out: the model's likelihood is not Normal.
            FloatingPointError: if one is not finite.

        Warns:
            RuntimeWarning: if such draws are dropped.
        """
        quantity = self._quantities.log_evidences
        if quantity is None:
            raise ValueError(
                "the readout is not integrated out of this model, whose likelihood is not Normal, so that its evidence "
                "is not known; estimate it with numpyro_wide.model_evidence."
            )
        found, is_finite = self._run(quantity, None)
        kept = kept_draws(quantity.what, is_finite, self.on_nonfinite)
        return found if kept is None else found[kept]

    def _log_average(self, quantity: Quantity, test: tuple[tuple, dict]) -> Array:
        """Return log densities, NaN under a transformation where a draw is not finite; without NaN elsewhere."""
        found, is_finite = self._run.elsewhere(quantity, None, test)
        kept_draws(quantity.what, is_finite, self.on_nonfinite, stacklevel=4)
        if not is_known(found):
            # Draws that are not finite cannot be told of here, and must not go unnoticed.
            return jnp.where(is_finite.all(), found, jnp.nan)
        if np.isnan(found).any():
            rows = np.flatnonzero(np.isnan(found))
            which = (
                f"{len(rows)} of {len(found)} rows do, the first being row {rows[0]}" if len(found) > 1 else "some do"
            )
            raise ValueError(
                f"the observations of site {self._fit.names.observed!r} must not contain NaN, but {which}; drop or "
                "impute the missing ones."
            )
        return found
