"""Positions where chains may start, as far up as an optimiser gets in a stated number of steps."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.handlers import seed, trace
from numpyro.infer import init_to_uniform
from numpyro.infer.util import initialize_model, unconstrain_fn
from tqdm.auto import tqdm

from numpyro_wide._checks import (
    check_key,
    check_names_known,
    check_one_of,
    check_positive,
    listing,
    whole_number,
)
from numpyro_wide._compile import TracedProgram, combine, over_chains, partition
from numpyro_wide._traces import Sites, is_bound, is_valid, latent_sites, unwrap

_NUM_STRETCHES = 50  # of the progress bar


def init_to_optimum(
    rng_key: Array,
    model: Callable[..., Any],
    *model_args: Any,
    num_chains: int = 1,
    num_steps: int = 1500,
    step_size: float = 0.02,
    hold: Mapping[str, Any] | str | None = None,
    init_strategy: Callable[..., Any] = init_to_uniform,
    progress_bar: bool = True,
    **model_kwargs: Any,
) -> dict[str, Array]:
    """Find starting points for the chains of any kernel, by Adam, each from a start of its own.

    For posteriors that a chain would need its whole warmup to find, such as that of a narrow, deep network. A start is
    no answer: at the optimum itself the noise of a network that can fit every row goes to zero, and predictions from
    there are worthless. So hold the noise, at least, and let a kernel sample from what this returns.

    Args:
        rng_key: a PRNG key.
        model: a NumPyro model; of a wide network, the collapsed or the repriorised one.
        *model_args: positional arguments that the kernel will be run with, observations included.
        num_chains: number of starts.
        num_steps: number of Adam's steps on the potential energy in unconstrained coordinates, which is what the kernel
            will see.
        step_size: size of Adam's first step; it decays to zero along a cosine.
        hold: "scales" for the latent noise and scales of :func:`~numpyro_wide.nn.bnn`, which stay at the medians of
            their priors, and the weights of its :class:`~numpyro_wide.nn.NoiseNetwork` at zero, where the noise is the
            same in all rows; or values, by the name of the site, of latent sites that are not optimised, in the space
            of the model, such as ``{"noise_base": 0.0}``.
        init_strategy: NumPyro's strategy for the position that the optimiser starts from.
        progress_bar: whether to show a bar, with the lowest and the highest potential energy of the chains.
        **model_kwargs: keyword arguments that the kernel will be run with.

    Returns:
        Unconstrained values by site, with a leading axis for the chains where there are several: ``init_params`` of
        ``MCMC.run``. Of each chain's positions, the one of least potential energy.

    Raises:
        ValueError: if a number is out of its range; ``hold`` names what is no latent site, or all of them, gives one
            another shape than it has, is another word, or is "scales" for a model without any; or a chain's potential
            energy is finite nowhere.
        TypeError: if ``rng_key`` is not a PRNG key.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_wide import collapse_readout
        >>> from numpyro_wide.runs import init_to_optimum
        >>> from numpyro_wide.nn import FCN, bnn
        >>> plain = bnn(FCN(depth=2, width=8), num_outputs=None, noise=0.1)
        >>> model = collapse_readout(plain, readout="readout", features="features", observed="y")
        >>> x = jnp.linspace(-1, 1, 20)[:, None]
        >>> start = init_to_optimum(jax.random.key(0), model, x, jnp.sin(3 * x[:, 0]), num_steps=50, num_chains=2)
        >>> start["hidden.hidden_0.kernel"].shape
        (2, 1, 8)
        >>> mcmc = MCMC(NUTS(model), num_warmup=10, num_samples=10, num_chains=2, chain_method="vectorized")
        >>> mcmc.run(jax.random.key(1), x, jnp.sin(3 * x[:, 0]), init_params=start)
    """
    check_key("rng_key", rng_key, "init_to_optimum(rng_key, model, x, y)")
    whole_number("num_chains", num_chains)
    whole_number("num_steps", num_steps)
    check_positive("step_size", step_size)
    keys = jax.random.split(rng_key, num_chains)
    potential_fn, z = _found(keys, model, model_args, model_kwargs, init_strategy)
    held = {}
    if hold:
        sites = trace(seed(model, keys[0])).get_trace(*model_args, **model_kwargs)
        given = _medians(sites, hold) if isinstance(hold, str) else dict(hold)
        held = _held(model, model_args, model_kwargs, z, sites, given)
    free = {name: value for name, value in z.items() if name not in held}
    arrays, rest = partition((model_args, model_kwargs), Array)

    def potential(free: dict[str, Array], held: dict[str, Array], arrays: list[Any]) -> Array:
        args, kwargs = combine(arrays, rest)
        return potential_fn(*args, **kwargs)({**free, **held})

    if not free:
        raise ValueError("hold names every latent site, so that there is nothing to optimise; hold fewer.")
    found = _descend(potential, free, (held, arrays), num_steps, step_size, progress_bar)
    start = {name: {**found, **held}[name] for name in z}
    return start if num_chains > 1 else {name: value[0] for name, value in start.items()}


def _found(
    keys: Array, model: Callable, args: tuple, kwargs: dict, init_strategy: Callable
) -> tuple[Callable, dict[str, Array]]:
    """Return the potential of the model, a function of its arguments, and NumPyro's first position of each chain."""
    infos: list[Any] = []

    def search(keys: Array) -> tuple[Any, Array]:
        form = {"init_strategy": init_strategy, "dynamic_args": True}
        infos.append(initialize_model(keys, model, model_args=args, model_kwargs=kwargs, **form))
        return infos[-1].param_info, is_valid(infos[-1].model_trace)

    # As one program, which a model that computes the same finds again; unless NumPyro keeps numbers of its trace, or
    # what is wrong is to be told by a run that sees numbers.
    program = TracedProgram(search, keys)
    if not is_bound(infos[0].model_trace):
        found, passes = program(keys)
        if passes and np.all(np.isfinite(found.potential_energy)):
            return infos[0].potential_fn, found.z
    search(keys)
    return infos[-1].potential_fn, infos[-1].param_info.z


def _medians(sites: Sites, hold: str) -> dict[str, Any]:
    """Return the prior medians of all sites of a latent noise and scales."""
    check_one_of("hold", hold, ["scales"], also="or values by the name of the site")
    images = {name for name, site in sites.items() if site["type"] == "deterministic"}
    scales = {
        name: site["fn"].mean
        for name, site in latent_sites(sites).items()
        # A base site that is Normal has a scale for its image; that of a repriorised readout has the pulled-back prior.
        if isinstance(unwrap(site["fn"]), dist.Normal)
        and (name.removesuffix("_base") in images or name.startswith("noise."))
    }
    if not scales:
        raise ValueError(
            'hold="scales" is for the latent noise and scales of nn.bnn, "noise_base" and so on, but the model has '
            f"none; its latent sites are {listing(latent_sites(sites))}. Give the values to hold by name."
        )
    return scales


def _held(
    model: Callable, args: tuple, kwargs: dict, z: dict[str, Array], sites: Sites, hold: dict[str, Any]
) -> dict[str, Array]:
    """Return the values that are held, unconstrained, for each chain."""
    check_names_known("hold", hold, z, kind="latent site")
    for name, value in hold.items():
        shape = jnp.shape(sites[name]["value"])
        if jnp.shape(value) != shape:
            raise ValueError(f"hold[{name!r}] must be of the site's shape, {shape}, but is of {jnp.shape(value)}.")
    values = {name: jnp.asarray(value, jnp.result_type(float)) for name, value in hold.items()}
    found = unconstrain_fn(seed(model, jax.random.key(0)), args, kwargs, values) if values else {}
    return {name: jnp.broadcast_to(value, z[name].shape) for name, value in found.items()}


def _descend(
    potential: Callable, free: Any, rest: tuple[Any, list[Any]], num_steps: int, step_size: float, progress_bar: bool
) -> Any:
    """Return the best position of each chain."""
    import optax  # the package does without it until it is asked to optimise

    adam = optax.adam(optax.cosine_decay_schedule(step_size, num_steps))

    def step(state: tuple, held: Any, arrays: list[Any]) -> tuple:
        position, adam_state, best, least = state
        energy, slope = jax.value_and_grad(potential)(position, held, arrays)
        is_best = energy < least  # false for NaN
        best = jax.tree.map(partial(jnp.where, is_best), position, best)
        usable = jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, jnp.zeros_like(leaf)), slope)
        update, adam_state = adam.update(usable, adam_state)
        return optax.apply_updates(position, update), adam_state, best, jnp.where(is_best, energy, least)

    def stretch(states: tuple, held: Any, arrays: list[Any], length: Array) -> tuple:
        def one(state: tuple, held: Any) -> tuple:
            return jax.lax.fori_loop(0, length, lambda _, state: step(state, held, arrays), state)

        return over_chains(one)(states, held)

    num_chains = jax.tree.leaves(free)[0].shape[0]
    states = (free, jax.vmap(adam.init)(free), free, jnp.full(num_chains, jnp.inf, jnp.result_type(float)))
    program = TracedProgram(stretch, states, *rest, jnp.int32(1))
    lengths = np.diff(np.linspace(0, num_steps, min(num_steps, _NUM_STRETCHES) + 1).astype(int))
    with tqdm(total=num_steps, desc="optimise", disable=not progress_bar) as bar:
        for length in lengths:
            states = program(states, *rest, jnp.int32(length))
            if progress_bar:
                bar.set_postfix_str(f"U from {states[3].min():.4g} to {states[3].max():.4g}", refresh=False)
                bar.update(length)
    lost = np.flatnonzero(~np.isfinite(states[3]))
    if lost.size:
        raise ValueError(
            f"the potential energy of chains {lost.tolist()} was not finite at any step; hold values inside of the "
            "sites' supports, and of the noise one that the current precision can tell from none "
            "(jax.config.update('jax_enable_x64', True) for a smaller one)."
        )
    return states[2]
