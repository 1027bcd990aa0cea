"""Effective sample size per gradient: our kernels, NUTS in three coordinates, and BlackJAX on the same log density."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import arviz
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import initialize_model

from benchmarks.gradients import digits, forms, one_layer, wrapped
from benchmarks.timing import interleaved, median_ratio, milliseconds
from numpyro_wide.diagnostics import projected_ess
from numpyro_wide.mcmc import (
    PreconditionedCrankNicolson,
    PreconditionedCrankNicolsonLangevin,
    SplitHMC,
    UnderdampedLangevin,
)
from numpyro_wide.readout import readout_function

NUM_ROWS, WIDTH = 256, 512


class Chain(NamedTuple):
    """Draws of the hidden weights after warmup, (draw, rows, units), and what they cost."""

    draws: Array
    num_gradients: int
    accept_prob: float
    core_seconds: float = math.nan

    def ess(self, power: int = 1) -> float:
        """Return the mean over 100 directions; ``power=2`` is for squared weights, which a reflection repeats."""
        draws = self.draws if power == 1 else (self.draws - jnp.mean(self.draws, axis=0)) ** 2
        return projected_ess({"w": draws[None]}, jax.random.key(0))["mean"]

    def ess_per_gradient(self, power: int = 1) -> float:
        """Return effective draws a gradient, of a random direction or of the squares."""
        return self.ess(power) / self.num_gradients


def numpyro_chain(kernel: Any, data: tuple, num_warmup: int, num_samples: int, thinning: int = 1) -> Chain:
    """Run any kernel of NumPyro's MCMC."""
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, thinning=thinning, progress_bar=False)
    cost = "num_steps" if isinstance(kernel, NUTS) else "num_grad"
    mcmc.run(jax.random.key(1), *data, extra_fields=(cost, "accept_prob"))
    fields = mcmc.get_extra_fields()
    num_gradients = thinning * int(np.sum(fields[cost]))
    return Chain(mcmc.get_samples()["w0"], num_gradients, float(np.mean(fields["accept_prob"])))


def blackjax_chains(model: Callable, data: tuple) -> dict[str, Callable[[], Chain]]:
    """Run NUTS, MALA and adjusted MCLMC, each tuned by BlackJAX's own adaptation where it has one."""
    import blackjax

    info = initialize_model(jax.random.key(0), model, model_args=data)
    position, key = info.param_info.z, jax.random.key(1)

    def log_density(z: dict) -> Array:
        return -info.potential_fn(z)

    def run(step: Callable, state: Any, num_samples: int, cost: Callable, keep: Callable) -> Chain:
        def body(state: Any, key: Array) -> tuple:
            state, info = step(key, state)
            return state, (keep(state), cost(info), info.acceptance_rate)

        state, (draws, spent, rates) = jax.jit(lambda s: jax.lax.scan(body, s, jax.random.split(key, num_samples)))(
            state
        )
        return Chain(draws, int(jnp.sum(spent)), float(jnp.mean(rates)))

    def nuts() -> Chain:
        adaptation = blackjax.window_adaptation(blackjax.nuts, log_density)
        (state, parameters), _ = adaptation.run(key, position, num_steps=200)
        step = blackjax.nuts(log_density, **parameters).step
        return run(step, state, 60, lambda info: info.num_integration_steps, lambda s: s.position["w0"])

    def mala() -> Chain:
        # BlackJAX does not tune MALA: the step is halved or stretched in rounds until about 57 % are accepted.
        state, step_size = blackjax.mala.init(position, log_density), 1e-3
        for _ in range(25):
            step = blackjax.mala(log_density, step_size).step
            tuned = jax.lax.scan(lambda s, k, step=step: step(k, s), state, jax.random.split(key, 40))
            state, rate = tuned[0], float(jnp.mean(tuned[1].acceptance_rate))
            step_size *= 2.0 ** (2 * (rate - 0.574))
        step = blackjax.mala(log_density, step_size).step
        return run(step, state, 3000, lambda info: 1, lambda s: s.position["w0"])

    def adjusted_mclmc() -> Chain:
        def steps_of(key: Array, average: Array) -> Array:
            return jnp.ceil(jax.random.uniform(key) * 2 * average).astype(int)

        build = partial(blackjax.mcmc.adjusted_mclmc_dynamic.build_kernel, integration_steps_fn=steps_of)
        state = blackjax.mcmc.adjusted_mclmc_dynamic.init(position, log_density, key)
        state, parameters, *_ = blackjax.adjusted_mclmc_find_L_and_step_size(
            mclmc_kernel=build(),
            logdensity_fn=log_density,
            num_steps=2000,
            state=state,
            rng_key=key,
            target=0.8,
            diagonal_preconditioning=False,
            target_num_integration_steps=8.0,
        )
        average = parameters.L / parameters.step_size
        step = blackjax.adjusted_mclmc_dynamic(
            log_density, parameters.step_size, integration_steps_fn=steps_of, integration_steps_params=(average,)
        ).step
        # McLachlan's integrator takes two gradients a step.
        return run(step, state, 300, lambda info: 2 * info.num_integration_steps, lambda s: s.position["w0"])

    return {"NUTS": nuts, "MALA": mala, "adjusted MCLMC": adjusted_mclmc}


def chains(models: dict[str, Callable], data: tuple) -> dict[str, Callable[[], Chain]]:
    """Run every chain of the table, by name."""
    collapsed = models["collapsed"]
    kernels: dict[str, tuple[Any, tuple]] = {
        f"NumPyro NUTS, {form}": (NUTS(model), lengths)
        for (form, model), lengths in zip(models.items(), ((300, 300), (200, 200), (200, 200)), strict=True)
    }
    ours = partial(SplitHMC, collapsed)
    kernels["SplitHMC, collapsed"] = ours(), (200, 400)
    kernels["SplitHMC, collapsed, N(0, I) kept"] = ours(adapt_reference=False), (200, 400)
    kernels["SplitHMC, collapsed, 2.5 radians"] = ours(trajectory_angle=2.5), (200, 400)
    longer = ours(trajectory_angle=2.5, target_accept_prob=0.8)
    kernels["SplitHMC, collapsed, 2.5 radians, 80 % accepted"] = longer, (200, 400)
    for kernel in (UnderdampedLangevin, PreconditionedCrankNicolsonLangevin, PreconditionedCrankNicolson):
        one_step = kernel(collapsed)
        kernels[f"{kernel.__name__}, collapsed"] = one_step, (2000, 6000, 10)
    rows = {name: partial(numpyro_chain, kernel, data, *lengths) for name, (kernel, lengths) in kernels.items()}
    try:
        return rows | {f"BlackJAX {name}, collapsed": run for name, run in blackjax_chains(collapsed, data).items()}
    except ImportError:
        print("BlackJAX is not installed; its rows are left out.")
        return rows


def per_gradient() -> None:
    """Measure every sampler on one hidden layer of digits."""
    print(f"\n## ESS per gradient, digits, n = {NUM_ROWS}, one hidden layer of {WIDTH}, noise {0.1}\n")
    print("Bulk ESS of the hidden weights and of their squares, mean over 100 random directions, after warmup.\n")
    print("| sampler | gradients a draw | acceptance | ESS / gradient | squares | over plain NUTS |")
    print("|---|---|---|---|---|---|")
    plain = math.nan
    for name, run in chains(wrapped(1, WIDTH), digits(NUM_ROWS)).items():
        chain = run()
        ess, squares = chain.ess_per_gradient(), chain.ess_per_gradient(2)
        plain = ess if name == "NumPyro NUTS, plain" else plain
        cost = f"{chain.num_gradients / len(chain.draws):.1f} | {chain.accept_prob:.2f}"
        print(f"| {name} | {cost} | {ess:.4f} | {squares:.4f} | {ess / plain:.1f} |", flush=True)


def by_width() -> None:
    """Measure SplitHMC on wider and wider networks."""
    print("\n## SplitHMC on the collapsed model, n = 32, by width\n")
    print("| width | gradients a draw | ESS / gradient |")
    print("|---|---|---|")
    for width in (64, 256, 1024, 4096):
        kernel = SplitHMC(wrapped(1, width)["collapsed"])
        chain = numpyro_chain(kernel, digits(32), 200, 300)
        cost = chain.num_gradients / len(chain.draws)
        print(f"| {width} | {cost:.1f} | {chain.ess_per_gradient():.3f} |", flush=True)


def by_rotations() -> None:
    """Measure what a draw of SplitHMC is worth, by its number of rotations, on the README's network."""
    print("\n## SplitHMC by rotations a draw, the README's network\n")
    print("Bulk ESS of the mean function at 20 points, the readout integrated out: mean and least.\n")
    print("| width | rotations a draw | step size | function / gradient | least | least / draw | weights / gradient |")
    print("|---|---|---|---|---|---|---|")
    x, points = jnp.linspace(-1, 1, 20), jnp.linspace(-1.2, 1.2, 20)
    data, budget = (x, jnp.sin(4 * x)), 6000
    for width in (50, 200, 800):
        model = forms(partial(one_layer, width=width))["collapsed"]
        function = jax.jit(jax.vmap(readout_function(model, data, points)))
        for num_steps in ("auto", 2, 4, 6, 8, 12, 24):
            num_draws = budget // (8 if num_steps == "auto" else num_steps)
            mcmc = MCMC(SplitHMC(model, num_steps=num_steps), num_warmup=300, num_samples=num_draws, progress_bar=False)
            mcmc.run(jax.random.key(0), *data, extra_fields=("num_grad", "step_size"))
            fields, draws = mcmc.get_extra_fields(), mcmc.get_samples()
            values = np.asarray(function(draws))
            ess = np.array([float(arviz.ess(column)) for column in values.T])
            weights = projected_ess({"hidden": draws["hidden"][None]}, jax.random.key(0))["mean"]
            spent, step = int(fields["num_grad"].sum()), float(fields["step_size"][-1])
            cells = f"{ess.mean() / spent:.3f} | {ess.min() / spent:.3f} | {ess.min() / num_draws:.2f}"
            name = f"auto: {spent / num_draws:.0f}" if num_steps == "auto" else num_steps
            print(f"| {width} | {name} | {step:.3f} | {cells} | {weights / spent:.3f} |", flush=True)


def overhead() -> None:
    """Measure what a kernel adds to the gradient, in a compiled loop as a chain runs it."""
    num_steps, key = 24, jax.random.key(0)
    model, data = wrapped(1, WIDTH)["collapsed"], digits(NUM_ROWS)
    info = initialize_model(key, model, model_args=data)
    gradient = jax.value_and_grad(info.potential_fn)

    def descend(carry: tuple, _: None) -> tuple:
        z, _, z_grad = carry
        z = jax.tree.map(lambda a, b: a - 1e-6 * b, z, z_grad)
        return (z, *gradient(z)), None

    def scanned(step: Callable, state: Any, length: int) -> Callable:
        return partial(jax.jit(lambda state: jax.lax.scan(step, state, length=length)[0]), state)

    settings = {"potential_fn": info.potential_fn, "step_size": 0.01, "adapt_step_size": False}
    kernels = {
        "UnderdampedLangevin": UnderdampedLangevin(**settings),
        "PreconditionedCrankNicolsonLangevin": PreconditionedCrankNicolsonLangevin(**settings),
        "SplitHMC, 12 rotations": SplitHMC(num_steps=12, **settings),
    }
    loops = {"gradient": scanned(descend, (info.param_info.z, *gradient(info.param_info.z)), num_steps)}
    for name, kernel in kernels.items():
        state = kernel.init(key, 200, info.param_info.z)
        state = state._replace(i=jnp.array(200))  # warmup is over
        draws = num_steps // 12 if "12" in name else num_steps
        loops[name] = scanned(lambda s, _, kernel=kernel: (kernel.sample(s, (), {}), None), state, draws)
    seconds = interleaved(loops, num_rounds=11)
    print(f"\n## A kernel's step over the gradients in it, n = {NUM_ROWS}, width {WIDTH}, collapsed\n")
    print(f"A gradient takes {milliseconds([s / num_steps for s in seconds['gradient']])}.\n")
    print("| kernel | step / gradients | goal |")
    print("|---|---|---|")
    for name in kernels:
        print(f"| {name} | {median_ratio(seconds, name, 'gradient'):.2f} | at most 1.15 |")


def tables() -> None:
    """Make every table of this file."""
    overhead()
    by_width()
    by_rotations()
    per_gradient()
