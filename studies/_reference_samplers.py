"""Samplers of a member's posterior that share no code: microcanonical chains of this package, and NumPyro's NUTS.

The first integrates the readout out by :func:`numpyro_wide.collapse_readout`. NUTS sees all weights, or the density of
the hidden ones by the few lines of plain JAX here. Draws of both are of all weights in the end, and what is looked at
is computed from them by NumPyro. The law of the linear network is known, and drawn from instead of NUTS.
"""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

import _chains
from _linear_networks import NOISE_SCALE, LinearLaw
from _members import Member, Rows
from numpyro_wide import ReadoutPredictive
from numpyro_wide.mcmc import MicrocanonicalLangevin

NUM_CHAINS = 4


def chains_of(kernel: Any, lengths: tuple[int, int], key: Any, *args: Any, **options: Any) -> MCMC:
    """Run chains one after another."""
    num_warmup, num_samples = lengths
    mcmc = MCMC(
        kernel, num_warmup=num_warmup, num_samples=num_samples, num_chains=NUM_CHAINS, chain_method="sequential"
    )
    mcmc.run(key, *args, **options)
    return mcmc


def wrapped(member: Member) -> Callable:
    """Integrate the readout out where the likelihood is Normal."""
    return _chains.collapsed(member.model) if member.likelihood == "normal" else member.model


def microcanonical(member: Member, rows: Rows, lengths: tuple[int, int], key: Any) -> dict[str, np.ndarray]:
    """Sample by adjusted microcanonical dynamics, the readout integrated out where the likelihood is Normal."""
    model, args = wrapped(member), (jnp.asarray(rows.x), jnp.asarray(rows.y))
    fields = ("potential_energy", "num_grad", "accept_prob", *left_out(member, rows, model))
    mcmc = chains_of(MicrocanonicalLangevin(model), lengths, key, *args, extra_fields=fields)
    draws, told = with_readout(member, rows, model, mcmc.get_samples(), key), mcmc.get_extra_fields()
    return {
        **draws,
        "potential": told["potential_energy"],
        "gradients": told["num_grad"],
        "accepts": told["accept_prob"],
    }


def with_readout(member: Member, rows: Rows, model: Callable, draws: dict[str, Any], key: Any) -> dict[str, Any]:
    """Draw the readout where it was integrated out."""
    if model is member.model:
        return draws
    hidden = latent(member, rows, draws, "readout")
    args = jnp.asarray(rows.x), jnp.asarray(rows.y)
    return {**hidden, "readout": ReadoutPredictive(model, hidden, args).readout(jax.random.fold_in(key, 1))}


def no_u_turn(member: Member, rows: Rows, lengths: tuple[int, int], key: Any) -> dict[str, np.ndarray]:
    """Sample all weights by NUTS."""
    args, fields = (jnp.asarray(rows.x), jnp.asarray(rows.y)), (*FIELDS, *left_out(member, rows, member.model))
    mcmc = chains_of(NUTS(member.model), lengths, key, *args, extra_fields=fields)
    return {**mcmc.get_samples(), **costs(mcmc)}


def no_u_turn_by_hand(member: Member, rows: Rows, lengths: tuple[int, int], key: Any) -> dict[str, np.ndarray]:
    """Sample the hidden weights by NUTS, the readout integrated out by hand."""
    potential, readout = by_hand(member.model, jnp.asarray(rows.x), jnp.asarray(rows.y))
    keys = jax.random.split(key, 3)
    start = {
        name: jax.random.uniform(jax.random.fold_in(keys[0], i), (NUM_CHAINS, *np.shape(value)), minval=-2, maxval=2)
        for i, (name, value) in enumerate(prior_draw(member, rows).items())
        if name != "readout"
    }
    mcmc = chains_of(NUTS(potential_fn=potential), lengths, keys[1], init_params=start, extra_fields=FIELDS)
    return {**with_readout_by_hand(readout, mcmc.get_samples(), keys[2]), **costs(mcmc)}


def with_readout_by_hand(readout: Callable, draws: dict[str, Any], key: Any) -> dict[str, Any]:
    """Draw the readout at each draw of the hidden weights, by the sampler of :func:`by_hand`."""
    pairs = jax.random.split(key, len(next(iter(draws.values())))), draws
    return {**draws, "readout": jax.lax.map(lambda pair: readout(*pair), pairs, batch_size=50)}


def costs(mcmc: MCMC) -> dict[str, np.ndarray]:
    """Return the potential energy, the gradients and the acceptance of each draw of NUTS."""
    return dict(zip(("potential", "gradients", "accepts"), map(mcmc.get_extra_fields().get, FIELDS), strict=True))


def law_of_linear(rows: Rows, inputs: np.ndarray, num_samples: int) -> dict[str, np.ndarray]:
    """Draw the function (chain, draw, m) from the known law of the linear network: Gaussian slopes given one number."""
    law, rng, shape = LinearLaw(1, 50, rows.x, rows.y, NOISE_SCALE), np.random.default_rng(0), (NUM_CHAINS, num_samples)
    scales = rng.choice(law.scales, (*shape, 1), p=law.weights / law.weights.sum())
    x, y = law.x / NOISE_SCALE, law.y / NOISE_SCALE
    values, vectors = np.linalg.eigh(x.T @ x)
    variances = 1 / (x.shape[1] / scales + values)
    rotated = variances * (vectors.T @ (x.T @ y)) + np.sqrt(variances) * rng.normal(size=variances.shape)
    return {"function": rotated @ (inputs @ vectors).T, "gradients": np.zeros(shape), "accepts": np.ones(shape)}


SAMPLERS = {"microcanonical": microcanonical, "NUTS": no_u_turn, "NUTS by hand": no_u_turn_by_hand}
FIELDS = ("potential_energy", "num_steps", "accept_prob")  # of NUTS


def by_hand(model: Callable, x: Any, y: Any) -> tuple[Callable, Callable]:
    """Return -log p(hidden | y) up to a constant, all latents N(0, 1), and a sampler of the readout given them."""

    def solved(hidden: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
        sites = trace(substitute(seed(model, 0), hidden)).get_trace(x)
        noise = jnp.broadcast_to(sites["noise"]["value"], y.shape)
        design, targets = sites["features"]["value"] / noise[:, None], y / noise
        root = jnp.linalg.cholesky(jnp.eye(design.shape[1]) + design.T @ design)
        return root, solve_triangular(root, design.T @ targets, lower=True), targets, noise

    def potential(hidden: dict[str, Any]) -> Any:
        root, whitened, targets, noise = solved(hidden)
        log_determinant = jnp.sum(jnp.log(jnp.diagonal(root))) + jnp.sum(jnp.log(noise))
        prior = sum(jnp.sum(jnp.square(value)) for value in hidden.values())
        return log_determinant + 0.5 * (jnp.sum(targets**2) - jnp.sum(whitened**2) + prior)

    def readout(key: Any, hidden: dict[str, Any]) -> Any:
        root, whitened, _, _ = solved(hidden)
        fresh = jax.random.normal(key, whitened.shape)
        return solve_triangular(root.T, whitened + fresh, lower=False)

    return potential, readout


def prior_draw(member: Member, rows: Rows, number: int = 0) -> dict[str, Any]:
    """Draw all latent sites from the prior."""
    sites = trace(seed(member.model, number)).get_trace(jnp.asarray(rows.x))
    return {name: site["value"] for name, site in sites.items() if site["type"] == "sample" and name != "y"}


def left_out(member: Member, rows: Rows, model: Callable) -> tuple[str, ...]:
    """Return what a chain need not store, since weights give it; a collapsed model hides what is large."""
    if model is not member.model:
        return ()
    sites = trace(seed(model, 0)).get_trace(jnp.asarray(rows.x))
    return tuple(f"~z.{name}" for name, site in sites.items() if site["type"] == "deterministic")


def latent(member: Member, rows: Rows, draws: dict[str, Any], *but: str) -> dict[str, Any]:
    """Keep draws of the latent sites."""
    return {name: draws[name] for name in prior_draw(member, rows) if name not in but}


@cache
def evaluation(model: Callable) -> Callable:
    """Compile the deterministic sites at inputs but for the features, and the log density of the data, of each draw."""

    def of_draw(draw: dict[str, Any], inputs: Any, x: Any, y: Any) -> dict[str, Any]:
        sites = trace(substitute(seed(model, 0), draw)).get_trace(inputs)
        values = {name: site["value"] for name, site in sites.items() if site["type"] == "deterministic"}
        del values["features"]
        return {**values, "log_density": log_density(model, (x, y), {}, draw)[0]}

    return jax.jit(lambda draws, *known: jax.lax.map(lambda draw: of_draw(draw, *known), draws, batch_size=100))


def observables(member: Member, rows: Rows, inputs: np.ndarray, draws: dict[str, Any]) -> dict[str, np.ndarray]:
    """Compute what is looked at, (draws, ...): the function and the noise at fixed inputs, scales, log densities."""
    known = map(jnp.asarray, (inputs, rows.x, rows.y))
    found = evaluation(member.model)(latent(member, rows, draws), *known)
    return {name: np.asarray(value) for name, value in found.items()}


def run(member: Member, rows: Rows, inputs: np.ndarray, sampler: str, lengths: tuple[int, int], key: Any) -> dict:
    """Sample, and return observables (chain, draw, ...), with the processor seconds that the chains took."""
    start = time.process_time()
    if sampler == "exact law":
        return {**law_of_linear(rows, inputs, lengths[1]), "seconds": np.array(0.0)}
    draws = SAMPLERS[sampler](member, rows, lengths, key)
    seconds = time.process_time() - start
    found = observables(member, rows, inputs, draws)
    found |= {name: np.asarray(draws[name]) for name in ("potential", "gradients", "accepts")}
    found = {name: value.reshape(NUM_CHAINS, -1, *value.shape[1:]) for name, value in found.items()}
    return {**found, "seconds": np.array(seconds)}
