"""Starting points for chains, by an optimiser."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from numpyro.distributions import biject_to
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import init_to_uniform
from numpyro.infer.util import potential_energy

from numpyro_wide._checks import (
    check_key,
    check_names_known,
    check_one_of,
    check_positive,
    listing,
    progress,
    whole_number,
)
from numpyro_wide._compile import over_chains, run_program, split
from numpyro_wide._traces import Sites, latent_sites, unwrap

_NUM_UPDATES = 50  # of the progress bar


def init_to_optimum(
    rng_key: Array,
    model: Callable[..., object],
    *model_args: object,
    num_chains: int = 1,
    num_steps: int = 1500,
    step_size: float = 0.02,
    hold: Mapping[str, ArrayLike] | str | None = None,
    init_strategy: Callable = init_to_uniform,
    progress_bar: bool = True,
    **model_kwargs: object,
) -> dict[str, Array]:
    """Find starting points for the chains of any kernel, by Adam, each from a start of its own.

    Hold the noise: at the optimum of a large network it goes to zero.

    Args:
        rng_key: a PRNG key.
        model: a NumPyro model; of a wide network, the collapsed or repriorised one.
        *model_args: arguments of the model, observations included; JAX arrays are traced.
        num_chains: number of starts.
        num_steps: number of Adam's steps in unconstrained coordinates.
        step_size: size of Adam's first step, decayed along a cosine.
        hold: "scales" for the latent noise and scales of :func:`~numpyro_wide.nn.bnn` at their prior medians, weights
            of a :class:`~numpyro_wide.nn.NoiseNetwork` at zero; or constrained values by latent site.
        init_strategy: NumPyro's strategy for the first position.
        progress_bar: whether to show a bar with the range of potential energies.
        **model_kwargs: keyword arguments.

    Returns:
        Unconstrained values by site at the least potential energy, with an axis of several chains in front:
        ``init_params`` of ``MCMC.run``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_wide import collapse_readout
        >>> from numpyro_wide.runs import init_to_optimum
        >>> from numpyro_wide.nn import FCN, bnn
        >>> plain = bnn(FCN(depth=2, width=8), num_outputs=None, noise=0.1)
        >>> model = collapse_readout(plain, readout="readout", features="features", observed="y")
        >>> x = jnp.linspace(-1, 1, 20)[:, None]
        >>> start = init_to_optimum(jax.random.key(0), model, x, jnp.sin(3 * x[:, 0]), num_steps=50, num_chains=2)
        >>> start["hidden.hidden_0.kernel"].shape
        (2, 1, 8)
    """
    check_key("rng_key", rng_key, "init_to_optimum(rng_key, model, x, y)")
    whole_number("num_chains", num_chains)
    whole_number("num_steps", num_steps)
    check_positive("step_size", step_size)
    hold = hold or {}
    data, arguments = split((model_args, model_kwargs), Array)

    def start(rng_key: Array, data: list[Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the free and the held values of a first position."""
        fixed = {} if isinstance(hold, str) else {name: jnp.asarray(value, float) for name, value in hold.items()}

        def initial_value(site: dict) -> Array | None:
            name, shape = site["name"], site["fn"].shape() if site["type"] == "sample" else ()
            if name in fixed and fixed[name].shape != shape:
                raise ValueError(f"hold[{name!r}] must be of the site's shape, {shape}, but is of {fixed[name].shape}.")
            return fixed[name] if name in fixed else init_strategy(site)

        args, kwargs = arguments(data)
        sites = trace(substitute(seed(model, rng_key), substitute_fn=initial_value)).get_trace(*args, **kwargs)
        held = _medians(sites, hold) if isinstance(hold, str) else fixed
        check_names_known("hold", held, latent_sites(sites), kind="latent site")
        z = {
            name: biject_to(site["fn"].support).inv(held.get(name, site["value"]))
            for name, site in latent_sites(sites).items()
        }
        return {name: z[name] for name in z if name not in held}, {name: z[name] for name in held}

    def potential(free: dict[str, Array], held: dict[str, Array], data: list[Array]) -> Array:
        return potential_energy(seed(model, 0), *arguments(data), {**free, **held})

    keys = jax.random.split(rng_key, num_chains)
    free, held = run_program(lambda keys, data: jax.lax.map(lambda key: start(key, data), keys), keys, data, quick=True)
    if not free:
        raise ValueError("hold names every latent site, so that there is nothing to optimise.")
    positions = {**_descend(potential, free, (held, data), num_steps, step_size, progress_bar), **held}
    return positions if num_chains > 1 else {name: value[0] for name, value in positions.items()}


def _medians(sites: Sites, hold: str) -> dict[str, Array]:
    """Return the prior medians of all sites of a latent noise and scales."""
    check_one_of("hold", hold, ["scales"], also="or values by the name of the site")
    images = {name for name, site in sites.items() if site["type"] == "deterministic"}
    scales = {
        name: site["fn"].mean
        for name, site in latent_sites(sites).items()
        # The base of a repriorised readout is not Normal.
        if isinstance(unwrap(site["fn"]), dist.Normal)
        and (name.removesuffix("_base") in images or name.startswith("noise."))
    }
    if not scales:
        raise ValueError(
            'hold="scales" is for the latent noise and scales of nn.bnn, "noise_base" and so on, but the model has '
            f"none; its latent sites are {listing(latent_sites(sites))}."
        )
    return scales


def _descend(
    potential: Callable,
    free: dict[str, Array],
    arguments: tuple[dict[str, Array], list[Array]],
    num_steps: int,
    step_size: float,
    progress_bar: bool,
) -> dict[str, Array]:
    """Return the best position of each chain."""
    import optax  # optional

    adam = optax.adam(optax.cosine_decay_schedule(step_size, num_steps))
    # Vectors: a program with operations of their own for all sites takes longer to compile.
    unravel = ravel_pytree({name: np.zeros(values.shape[1:], values.dtype) for name, values in free.items()})[1]

    def begin(free: dict[str, Array]) -> tuple:
        position = ravel_pytree(free)[0]
        return position, adam.init(position), position, jnp.array(jnp.inf, position.dtype)

    def step(state: tuple, held: dict[str, Array], data: list[Array]) -> tuple:
        position, adam_state, best, least = state
        energy, slope = jax.value_and_grad(lambda z: potential(unravel(z), held, data))(position)
        is_best = energy < least  # false for NaN
        update, adam_state = adam.update(jnp.where(jnp.isfinite(slope), slope, 0), adam_state)
        # Towards the origin until the energy is finite.
        is_lost = ~(jnp.isfinite(energy) | jnp.isfinite(least))
        update = jnp.where(is_lost, -0.1 * position, update)
        best, least = jnp.where(is_best, position, best), jnp.where(is_best, energy, least)
        return position + update, adam_state, best, least

    def take_steps(states: tuple, held: dict[str, Array], data: list[Array], length: Array) -> tuple:
        def descend(state: tuple, held: dict[str, Array]) -> tuple:
            return jax.lax.fori_loop(0, length, lambda _, state: step(state, held, data), state)

        return over_chains(descend)(states, held)

    states = run_program(jax.vmap(begin), free, quick=True)
    lengths = np.diff(np.linspace(0, num_steps, min(num_steps, _NUM_UPDATES) + 1).astype(np.int32))
    with progress(total=num_steps, desc="optimise", shown=progress_bar) as bar:
        for length in lengths:
            states = run_program(take_steps, states, *arguments, length)
            bar.set_postfix_str(f"U from {np.min(states[3]):.4g} to {np.max(states[3]):.4g}", refresh=False)
            bar.update(length)
    lost = np.flatnonzero(~np.isfinite(states[3]))
    if lost.size:
        raise ValueError(
            f"the potential energy of chains {lost.tolist()} was not finite at any step; hold values inside of the "
            "sites' supports, and a larger noise (or jax.config.update('jax_enable_x64', True))."
        )
    return run_program(jax.vmap(unravel), states[2], quick=True)
