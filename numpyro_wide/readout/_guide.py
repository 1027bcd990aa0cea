"""Draws of guides."""

from collections.abc import Callable, Mapping
from typing import Any

from jax import Array, random
from numpyro.infer import Predictive

from numpyro_wide._checks import check_key, kind_of, listing, whole_number
from numpyro_wide._compile import run_with_arguments
from numpyro_wide._traces import abstract_sites, run_model
from numpyro_wide.readout._limit import show_numbers, weights_of
from numpyro_wide.readout._model import Draws


def guide_draws(
    rng_key: Array,
    model: Callable,
    guide: Callable,
    params: dict[str, Any],
    num_samples: int,
    *model_args: Any,
    **model_kwargs: Any,
) -> Draws:
    r"""Draw from a guide that was fitted to a wrapped model, readout included.

    The guide of a repriorised model knows $\phi$, that of a collapsed one nothing of the readout, which
    ``Predictive(model, guide=guide, params=params)`` would draw from its *prior* at new inputs. Predict with these
    draws instead, by :class:`~numpyro_wide.ReadoutPredictive` or ``Predictive``.

    Args:
        rng_key: a PRNG key.
        model: wrapped model, as of :func:`~numpyro_wide.wide_limit_draws`.
        guide: an autoguide or a guide function.
        params: its fitted parameters, ``svi.run(...).params``.
        num_samples: number of draws.
        *model_args: arguments that the model was fitted with, targets included.
        **model_kwargs: its keyword arguments.

    Returns:
        Draws of all latent sites and of the readout, for ``Predictive(model, draws)`` with the unwrapped model.

    Raises:
        ValueError: if ``params`` lacks one of the guide's, or no readout is repriorised in the run, as without targets.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro
        >>> from numpyro.infer import SVI, Trace_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> from numpyro_wide import guide_draws, nn, repriorise
        >>> model = nn.bnn(nn.FCN(depth=1, width=50), num_outputs=None, noise=0.1)
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> y = jnp.sin(x[:, 0])
        >>> wrapped = repriorise(model, readout="readout", features="features", targets="y", noise_scale=0.1)
        >>> guide = AutoNormal(wrapped)
        >>> fit = SVI(wrapped, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
        >>> params = fit.run(jax.random.key(0), 10, x, y, progress_bar=False).params
        >>> guide_draws(jax.random.key(1), wrapped, guide, params, 20, x, y)["readout"].shape
        (20, 50)
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            f"params must be a dictionary of the guide's parameters, but is {kind_of(params)}; of what svi.run "
            "gave, pass the .params."
        )
    order = "guide_draws(rng_key, model, guide, params, num_samples, x, y)"
    check_key("rng_key", rng_key, order)
    num_samples = whole_number("num_samples", num_samples, order=order)
    _check_params(guide, params, model_args, model_kwargs)
    show_numbers(model, model_args, model_kwargs, params)
    guide_key, readout_key = random.split(rng_key)

    def from_guide(arguments: tuple, rng_key: Array) -> Draws:
        params, args, kwargs = arguments
        return Predictive(guide, params=params, num_samples=num_samples)(rng_key, *args, **kwargs)

    draws = run_with_arguments(from_guide, (dict(params), model_args, model_kwargs), guide_key)
    return weights_of(model, readout_key, draws, model_args, model_kwargs, params)


def _check_params(guide: Callable, params: Mapping, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse parameters that lack some of the guide's: it would silently draw from where it starts."""
    if getattr(guide, "prototype_trace", guide) is None:
        # An automatic guide that was never used sets itself up, which must not happen in an abstract run.
        run_model(guide, args, kwargs, values=params)
    sites = abstract_sites(guide, args, kwargs, params)
    missing = [name for name, site in sites.items() if site["type"] == "param" and name not in params]
    if missing:
        raise ValueError(
            f"params must hold the guide's fitted parameters, but {listing(missing)} is missing; it has "
            f"{listing(params)}. Pass svi.run(...).params."
        )
