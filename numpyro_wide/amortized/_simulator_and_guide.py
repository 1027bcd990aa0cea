"""A simulator with an amortised guide, trained or not: simulations, their scores, and weighted draws."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import Array, random

from numpyro_wide._checks import whole_number
from numpyro_wide.amortized._importance import ImportanceSample, check_observed_values, importance_sample
from numpyro_wide.amortized._pair import ModelAndGuide
from numpyro_wide.amortized._simulation import Draws, site_names
from numpyro_wide.amortized._state import AmortizedState


class SimulatorAndGuide:
    """A model that simulates and a guide that scores: what a trainer has before and after it trains.

    Args:
        model: ``model(*args, **kwargs)``.
        guide: ``guide(observed_values, *args, **kwargs)`` for one data set.
        observed: name, or names, of the sites that are data to the guide.

    Raises:
        TypeError: if ``observed`` is not made of names, or model or guide not callable.
        ValueError: if ``observed`` is empty.
    """

    def __init__(self, model: Callable, guide: Callable, observed: str | Sequence[str]):
        if not callable(model) or not callable(guide):
            raise TypeError(
                f"model and guide must be functions, got {type(model).__name__}, {type(guide).__name__}; the order is "
                "AmortizedForwardKL(model, guide, optim, observed=...)."
            )
        self.model, self.guide, self.observed = model, guide, site_names(observed)
        self._pair = ModelAndGuide(self.model, self.guide, self.observed)

    def simulate(self, rng_key: Array, num_samples: int, *args: Any, **kwargs: Any) -> Draws:
        """Simulate data sets with their latents.

        Args:
            rng_key: a PRNG key.
            num_samples: number of simulations.
            *args: arguments of the model.
            **kwargs: keyword arguments of the model.

        Returns:
            Values of all sample sites and of the observed ones, with a leading axis (num_samples,).
        """
        return self._pair.simulate(random.split(rng_key, whole_number("num_samples", num_samples)), args, kwargs)

    def held_out_simulations(self, state: AmortizedState, num_simulations: int, *args: Any, **kwargs: Any) -> Draws:
        """Simulate what :meth:`run` with ``held_out=num_simulations`` evaluates, and never trains on.

        Args:
            state: any state of the run, whose key decides the simulations.
            num_simulations: number of simulations.
            *args: arguments of the model.
            **kwargs: keyword arguments of the model.

        Returns:
            Values of all sample sites and of the observed ones, with a leading axis (num_simulations,).
        """
        num_simulations = whole_number("num_simulations", num_simulations)
        return self._pair.held_out(state.rng_key, num_simulations, args, kwargs)[0]

    def guide_log_prob(self, params: Mapping[str, Any], draws: Draws, *args: Any, **kwargs: Any) -> Array:
        """Score simulations; minus the mean over many is the negative log-likelihood of McNamara 2025, Figure 1.

        Args:
            params: values of the guide's param and mutable sites, as :meth:`get_params` or :meth:`run` gave them.
            draws: values of all sample and observed sites, with a leading axis (num_samples,), as :meth:`simulate`
                gave them.
            *args: arguments of the guide.
            **kwargs: keyword arguments of the guide.

        Returns:
            Log density under the guide of the latents that it covers, given the observed values, (num_samples,).

        Raises:
            ValueError: if ``params`` lacks values of the guide's param sites.
        """
        num_samples = len(draws[self.observed[0]])
        keys = random.split(random.key(0), num_samples)
        self._pair.check_params(params, draws, args, kwargs)
        return self._pair.log_prob(params, draws, keys, args, kwargs)[0]

    def importance_sample(
        self,
        rng_key: Array,
        num_samples: int,
        params: Mapping[str, Any],
        observed_values: Draws,
        *args: Any,
        **kwargs: Any,
    ) -> ImportanceSample:
        """Draw from the guide given one observation, and weigh the draws to the posterior.

        This is :func:`numpyro_wide.amortized.importance_sample` of the trainer's model and guide.

        Args:
            rng_key: a PRNG key.
            num_samples: number of draws.
            params: values of the guide's param and mutable sites, as :meth:`get_params` or :meth:`run` gave them.
            observed_values: values of the observed sites of one data set, by name.
            *args: arguments of model and guide.
            **kwargs: keyword arguments of model and guide.

        Returns:
            Draws, log weights, the Pareto shape of the weights, and their effective sample size.

        Raises:
            ValueError: if ``observed_values`` has other keys than ``observed``, or as the function does.
        """
        check_observed_values(observed_values, self.observed)
        return importance_sample(rng_key, num_samples, self.model, self.guide, params, observed_values, *args, **kwargs)
