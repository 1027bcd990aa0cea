"""Identity of a run: what decides where it goes and what is stored of it, since no other run may take up its state."""

import copy
import functools
import json
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel

from numpyro_wide import _resume
from numpyro_wide._checks import kind_of
from numpyro_wide._programs import digest, partition, program_digest

# Entries of the identity that are digests of programs, which other versions of libraries write in other ways.
PROGRAMS = ("model or kernel", "choice of what is stored")
_PLAIN = (str, bytes, bool, int, float, complex, np.generic, np.ndarray, Array)


class Call(NamedTuple):
    """Arguments of a run, as ``MCMC.run`` takes them.

    Attributes:
        rng_key: the PRNG key of the whole run.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        extra_fields: names of fields of the state that are stored with the draws.
        init_params: first position, or None.
    """

    rng_key: Array
    args: tuple
    kwargs: dict[str, Any]
    extra_fields: tuple[str, ...]
    init_params: Any


class Identity(NamedTuple):
    """Knowledge of a run before its first step.

    Attributes:
        state: a state like those of the run.
        text: digests of what decides where the run goes, in JSON.
        num_bytes: bytes of what is stored of one draw of all chains.
    """

    state: Any
    text: str
    num_bytes: int


def identify(mcmc: MCMC, call: Call) -> Identity:
    """Look at a run before it is begun or taken up.

    Args:
        mcmc: the chains.
        call: the arguments of the run.

    Raises:
        TypeError: if what is to be stored is not an array of numbers.
        ValueError: if positions are not a dictionary of sites.
    """
    # NumPyro's kernels may be initialised once for vectorised chains, and MCMC does that to its own.
    sampler = copy.deepcopy(mcmc.sampler)
    state = _first_state(mcmc, sampler, call)
    is_batched = mcmc.num_chains > 1 and mcmc.chain_method != "vectorized"
    one = jax.tree.map(lambda leaf: leaf[0], state) if is_batched else state
    position = operator.attrgetter(sampler.sample_field)(state)
    if mcmc.num_chains > 1:
        position = jax.tree.map(lambda leaf: leaf[0], position)
    to_sites = mcmc.postprocess_fn or sampler.postprocess_fn(call.args, call.kwargs)
    sites = jax.eval_shape(to_sites, position)
    num_bytes = mcmc.num_chains * _bytes_of_sites(sites) + _bytes_of_fields(sampler, state, call.extra_fields)

    def step(state: Any) -> Any:
        # Data are known, as in MCMC: models may look at them for example to know how many groups there are.
        return sampler.sample(state, call.args, call.kwargs)

    arrays, rest = partition((call.args, call.kwargs))
    model_or_kernel, stored = PROGRAMS
    text = json.dumps(
        {
            "rng_key": digest(call.rng_key),
            "num_warmup, num_chains, thinning or init_params": digest(
                mcmc.num_warmup, mcmc.num_chains, mcmc.thinning, jax.tree.leaves(call.init_params)
            ),
            "data or other arguments": digest(rest.leaves, str(rest.structure), arrays),
            model_or_kernel: program_digest(step, one),
            stored: program_digest(to_sites, position) + digest(sorted(sites), call.extra_fields),
            "setting of the kernel": digest(_settings(sampler)),
            "versions": _resume.versions(),
        }
    )
    return Identity(state, text, num_bytes)


def _first_state(mcmc: MCMC, sampler: MCMCKernel, call: Call) -> Any:
    """Return a state like those of the run."""
    is_single, is_vectorised = mcmc.num_chains == 1, mcmc.chain_method == "vectorized"
    keys = call.rng_key if is_single else jax.random.split(call.rng_key, mcmc.num_chains)
    if is_single or is_vectorised:
        return sampler.init(keys, mcmc.num_warmup, call.init_params, call.args, call.kwargs)
    first = jax.tree.map(lambda leaf: leaf[0], call.init_params)
    state = sampler.init(keys[0], mcmc.num_warmup, first, call.args, call.kwargs)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (mcmc.num_chains, *jnp.shape(leaf))), state)


def _settings(kernel: MCMCKernel) -> dict[str, Any]:
    """Return what a kernel keeps of its arguments, functions apart.

    A step size or a mass that is not adapted is a number of the state, and so not seen in the program of a step.
    """
    found: dict[str, Any] = {}
    for name, value in vars(kernel).items():
        kept = (value.args, value.keywords) if isinstance(value, functools.partial) else value
        leaves, structure = jax.tree.flatten(kept)
        if isinstance(value, MCMCKernel):
            found[name] = _settings(value)
        elif all(isinstance(leaf, _PLAIN) for leaf in leaves):
            found[name] = leaves, str(structure)
    return found


def _bytes_of_sites(sites: Any) -> int:
    """Return the bytes of one draw of one chain."""
    if not isinstance(sites, dict):
        raise ValueError(f"positions must be a dictionary of sites, but are {kind_of(sites)}.")
    return sum(_bytes_of_array(f"site {name!r}", leaf) for name, leaf in sites.items())


def _bytes_of_fields(sampler: MCMCKernel, state: Any, extra_fields: tuple[str, ...]) -> int:
    """Return the bytes of the fields of one draw of all chains."""
    size = 0
    for name in {*sampler.default_fields, *extra_fields}:
        if name.lstrip("~").split(".")[0] == sampler.sample_field:
            continue
        value = operator.attrgetter(name)(state)
        if not isinstance(value, Array):
            raise TypeError(
                f"extra fields must be arrays, but {name!r} is {kind_of(value)}; name one of its parts, "
                f"such as '{name}.step_size'."
            )
        size += _bytes_of_array(f"extra field {name!r}", value)
    return size


def _bytes_of_array(what: str, array: Any) -> int:
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(
            f"{what} has the type {array.dtype}, which no file of numbers holds; leave it out, or store "
            "jax.random.key_data of it."
        )
    return array.size * array.dtype.itemsize
