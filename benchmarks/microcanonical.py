"""Effective draws per gradient and per core second of the microcanonical kernel and of BlackJAX's two, collapsed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import MCMC
from numpyro.infer.util import initialize_model

from benchmarks.gradients import digits, wrapped
from benchmarks.samplers import Chain
from benchmarks.timing import core_seconds
from numpyro_wide.mcmc import MicrocanonicalLangevin

NUM_ROWS, WIDTH, NUM_GRADIENTS, SEEDS = 32, 64, 16_000, (1, 2)
THINNING = 4  # draws of chains of single steps are kept so many apart


def ours(model: Callable, data: tuple, seed: int, adjusted: bool, **settings: Any) -> Chain:
    """Run this package's kernel, tuned by its warmup."""
    kernel = MicrocanonicalLangevin(model, adjusted=adjusted, num_steps="auto" if adjusted else THINNING, **settings)
    num_samples = NUM_GRADIENTS // (16 if adjusted else 2 * THINNING)
    mcmc = MCMC(kernel, num_warmup=num_samples // 2, num_samples=num_samples, progress_bar=False)
    mcmc.warmup(jax.random.key(seed), *data)

    def body(state: Any, _: None) -> tuple:
        state = kernel.sample(state, data, {})
        return state, (state.z["w0"], state.num_grad, state.accept_prob)

    run = jax.jit(lambda state: jax.lax.scan(body, state, length=num_samples)[1])
    (draws, spent, rates), seconds = core_seconds(run, mcmc.post_warmup_state)
    return Chain(draws, int(jnp.sum(spent)), float(jnp.mean(rates)), seconds)


def blackjax_unadjusted(model: Callable, data: tuple, seed: int, diagonal: bool) -> Chain:
    """Run MCLMC, tuned by BlackJAX's own adaptation."""
    import blackjax

    info = initialize_model(jax.random.key(seed), model, model_args=data)
    key_init, key_tune, key_run = jax.random.split(jax.random.key(seed), 3)

    def log_density(z: dict) -> Array:
        return -info.potential_fn(z)

    num_steps = NUM_GRADIENTS // 2
    state = blackjax.mcmc.mclmc.init(info.param_info.z, log_density, key_init)
    state, tuned, _ = blackjax.mclmc_find_L_and_step_size(
        mclmc_kernel=blackjax.mcmc.mclmc.build_kernel(),
        logdensity_fn=log_density,
        num_steps=num_steps,
        state=state,
        rng_key=key_tune,
        diagonal_preconditioning=diagonal,
    )
    step = blackjax.mclmc(log_density, tuned.L, tuned.step_size, inverse_mass_matrix=tuned.inverse_mass_matrix).step

    def body(state: Any, key: Array) -> tuple:
        state, infos = jax.lax.scan(lambda s, k: step(k, s), state, jax.random.split(key, THINNING))
        return state, (state.position["w0"], jnp.mean(jnp.exp(jnp.minimum(-infos.energy_change, 0.0))))

    run = jax.jit(lambda state, keys: jax.lax.scan(body, state, keys)[1])
    (draws, rates), seconds = core_seconds(run, state, jax.random.split(key_run, num_steps // THINNING))
    return Chain(draws, 2 * num_steps, float(jnp.mean(rates)), seconds)


def blackjax_adjusted(model: Callable, data: tuple, seed: int, num_steps: float) -> Chain:
    """Run adjusted MCLMC with random numbers of steps, tuned by BlackJAX's own adaptation to our acceptance."""
    import blackjax

    info = initialize_model(jax.random.key(seed), model, model_args=data)
    key_init, key_tune, key_run = jax.random.split(jax.random.key(seed), 3)

    def log_density(z: dict) -> Array:
        return -info.potential_fn(z)

    def steps_of(key: Array, average: Array) -> Array:
        return jnp.ceil(jax.random.uniform(key) * 2 * average).astype(int)

    dynamic = blackjax.mcmc.adjusted_mclmc_dynamic
    state, tuned, *_ = blackjax.adjusted_mclmc_find_L_and_step_size(
        mclmc_kernel=dynamic.build_kernel(integration_steps_fn=steps_of),
        logdensity_fn=log_density,
        num_steps=NUM_GRADIENTS // 8,
        state=dynamic.init(info.param_info.z, log_density, key_init),
        rng_key=key_tune,
        target=0.9,
        diagonal_preconditioning=False,
        target_num_integration_steps=num_steps,
    )
    step = blackjax.adjusted_mclmc_dynamic(
        log_density,
        tuned.step_size,
        inverse_mass_matrix=tuned.inverse_mass_matrix,
        integration_steps_fn=steps_of,
        integration_steps_params=(tuned.L / tuned.step_size,),
    ).step

    def body(state: Any, key: Array) -> tuple:
        state, info = step(key, state)
        return state, (state.position["w0"], info.num_integration_steps, info.acceptance_rate)

    length = int(NUM_GRADIENTS / 2 / num_steps)
    run = jax.jit(lambda state, keys: jax.lax.scan(body, state, keys)[1])
    (draws, spent, rates), seconds = core_seconds(run, state, jax.random.split(key_run, length))
    return Chain(draws, 2 * int(jnp.sum(spent)), float(jnp.mean(rates)), seconds)


def tables() -> None:
    """Make the table: every row is the mean over seeds, with its spread."""
    model, data = wrapped(1, WIDTH)["collapsed"], digits(NUM_ROWS)
    adjusted = partial(ours, adjusted=True)
    unadjusted = partial(ours, adjusted=False)
    rows: dict[str, Callable] = {
        "BlackJAX mclmc": partial(blackjax_unadjusted, diagonal=False),
        "BlackJAX adjusted_mclmc, 2 steps": partial(blackjax_adjusted, num_steps=2.0),
        "BlackJAX adjusted_mclmc, 8 steps": partial(blackjax_adjusted, num_steps=8.0),
        "ours, unadjusted, mass": unadjusted,
        "BlackJAX mclmc, mass": partial(blackjax_unadjusted, diagonal=True),
        "ours, adjusted, mass": adjusted,
    }
    print(f"\n## Microcanonical kernels, digits, n = {NUM_ROWS}, one hidden layer of {WIDTH}, collapsed\n")
    print("| sampler | gradients a draw | acceptance | ESS / gradient | squares | ESS / core second | squares |")
    print("|---|---|---|---|---|---|---|")
    for name, run in rows.items():
        chains = [run(model=model, data=data, seed=seed) for seed in SEEDS]
        effective = np.array([[chain.ess(power) for chain in chains] for power in (1, 2)])
        cost = np.mean([chain.num_gradients / len(chain.draws) for chain in chains])
        rate = np.mean([chain.accept_prob for chain in chains])
        shown = [f"{cost:.1f}", f"{rate:.2f}"]
        for spent, digits_shown in (("num_gradients", 4), ("core_seconds", 0)):
            for x in effective / [getattr(chain, spent) for chain in chains]:
                shown.append(f"{np.mean(x):.{digits_shown}f} ± {np.std(x) / len(x) ** 0.5:.{digits_shown}f}")
        print(f"| {name} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    tables()
