"""Approximations of a member's posterior: draws of its function, and of the noise that belongs to them.

Where an approximation needs scales and a noise from elsewhere, the optimum and what is made of it, they are the means
of the collapsed mean field in unconstrained coordinates: what a user has who does not run chains.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import scipy.optimize
from jax.flatten_util import ravel_pytree
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density

from _members import MEMBERS, Rows, fixed_inputs, rows_of
from _reference_samplers import chains_of, latent, left_out, observables, prior_draw, with_readout, wrapped
from numpyro_wide.mcmc import MicrocanonicalLangevin
from numpyro_wide.runs import init_to_optimum
from numpyro_wide.wide_limit import fcn_kernel, gp_log_evidence, gp_posterior

NUM_DRAWS = 2000
NUM_STEPS = 5000  # of the guides' Adam
NUM_MEMBERS = 10
Result = dict[str, np.ndarray]
# Activation and scales by layer, numbers or the names of sites; whether the first has biases.
LIMITS: dict[str, tuple[str, list[Any], bool]] = {
    "linear": ("identity", [1.0], False),
    "wave": ("tanh", [3.0], True),
    "yacht": ("relu", ["weight_scale_1"], True),
    "boston": ("relu", ["weight_scale_1"], True),
    "concrete": ("relu", ["weight_scale_1"], True),
    "diabetes": ("relu", ["weight_scale_1", "weight_scale_2"], True),
    "deep": ("tanh", [1.5] * 4, True),
}


def data_of(rows: Rows) -> tuple[Any, Any]:
    """Return inputs and targets for JAX."""
    return jnp.asarray(rows.x), jnp.asarray(rows.y)


@cache
def guide_of(name: str, is_wrapped: bool, num_steps: int) -> tuple[dict, dict]:
    """Fit a mean-field guide, of hidden weights alone if wrapped, and return draws and its medians."""
    member, rows = MEMBERS[name], rows_of(name)
    model = wrapped(member) if is_wrapped else member.model
    guide = AutoNormal(model, init_scale=0.05)
    svi = SVI(model, guide, numpyro.optim.Adam(0.005), Trace_ELBO())
    fit = svi.run(jax.random.key(0), num_steps, *data_of(rows), progress_bar=False)
    draws = guide.sample_posterior(jax.random.key(1), fit.params, sample_shape=(NUM_DRAWS,))
    medians = latent(member, rows, guide.median(fit.params), "readout")
    return with_readout(member, rows, model, draws, jax.random.key(2)), medians


def mean_field(name: str, options: Any) -> Result:
    """Fit independent Gaussians to all weights."""
    return looked_at(name, guide_of(name, False, options.num_steps)[0])


def collapsed_mean_field(name: str, options: Any) -> Result:
    """Fit independent Gaussians to the hidden weights, the readout integrated out."""
    return looked_at(name, guide_of(name, True, options.num_steps)[0])


def looked_at(name: str, draws: dict[str, Any]) -> Result:
    """Return function and noise at the fixed inputs."""
    found = observables(MEMBERS[name], rows_of(name), fixed_inputs(name).inputs, draws)
    return {key: found[key] for key in ("function", "noise") if key in found}


@cache
def optima(name: str, num_steps: int) -> dict[str, np.ndarray]:
    """Maximise the posterior density of the weights from ten starts, scales and noise held; (10, ...) by site."""
    member, rows = MEMBERS[name], rows_of(name)
    medians = guide_of(name, member.likelihood == "normal", num_steps)[1]
    held = {site: medians[site] for site in medians if is_scale(site)}
    options = {"num_chains": NUM_MEMBERS, "num_steps": num_steps, "hold": held, "progress_bar": False}
    return init_to_optimum(jax.random.key(0), member.model, *data_of(rows), **options)


def is_scale(site: str) -> bool:
    """Whether a latent site is of a scale or the noise."""
    return site.endswith("_base") or site.startswith("noise_")


def ensemble(name: str, options: Any) -> Result:
    """Take ten optima as the posterior, each many times."""
    found = looked_at(name, optima(name, options.num_steps))
    return {key: np.repeat(value, NUM_DRAWS // NUM_MEMBERS, axis=0) for key, value in found.items()}


def laplace(name: str, options: Any) -> Result:
    """Linearise the network at its best optimum: a Gaussian by the generalised Gauss-Newton matrix."""
    member, (x, y), inputs = MEMBERS[name], data_of(rows_of(name)), jnp.asarray(fixed_inputs(name).inputs)
    every = optima(name, options.num_steps)
    each = [{site: value[number] for site, value in every.items()} for number in range(NUM_MEMBERS)]
    best = max(each, key=lambda weights: float(log_density(member.model, (x, y), {}, weights)[0]))
    held = {site: value for site, value in best.items() if is_scale(site)}
    free, unravel = ravel_pytree({site: value for site, value in best.items() if site not in held})

    def site(of: str, free: Any, x: Any) -> Any:
        sites = trace(substitute(seed(member.model, 0), {**held, **unravel(free)})).get_trace(x)
        return sites[of]["value"] if of in sites else None

    function = site("function", free, x)
    root = precision_root(member.likelihood, function, site("noise", free, x))
    seen, new = (jax.jacrev(lambda free, x=x: site("function", free, x))(free) for x in (x, inputs))
    seen = jnp.einsum("nki,nkp->nip", root, seen.reshape(len(x), -1, len(free))).reshape(-1, len(free))
    mean, new = site("function", free, inputs), new.reshape(-1, len(free))
    chol = jnp.linalg.cholesky(jnp.eye(len(seen)) + seen @ seen.T)
    explained = jax.scipy.linalg.solve_triangular(chol, seen @ new.T, lower=True)
    draws = gaussian_draws(mean.ravel(), new @ new.T - explained.T @ explained)
    return with_noise(draws.reshape(NUM_DRAWS, *mean.shape), site("noise", free, inputs))


def precision_root(likelihood: str, function: Any, noise: Any) -> Any:
    """Return a root (n, k, k) of the negative second derivative of the log likelihood by the function."""
    if likelihood == "normal":
        return jnp.broadcast_to(1 / jnp.asarray(noise), function.shape)[:, None, None]
    if likelihood == "bernoulli":
        return jnp.sqrt(jax.nn.sigmoid(function) * jax.nn.sigmoid(-function))[:, None, None]
    probs = jax.nn.softmax(function, axis=-1)
    return jax.vmap(jnp.diag)(jnp.sqrt(probs)) - probs[:, :, None] * jnp.sqrt(probs)[:, None, :]


def gaussian_draws(mean: Any, covariance: Any) -> np.ndarray:
    """Draw from a Gaussian whose covariance (m, m) may be of less than full rank."""
    values, vectors = np.linalg.eigh(np.asarray(covariance, float))
    fresh = np.random.default_rng(0).normal(size=(NUM_DRAWS, len(values)))
    return np.asarray(mean) + fresh * np.sqrt(np.maximum(values, 0)) @ vectors.T


def with_noise(function: np.ndarray, noise: Any) -> Result:
    """Add a known noise, if there is one, to draws of the function."""
    if noise is None:
        return {"function": function}
    return {"function": function, "noise": np.broadcast_to(noise, (NUM_DRAWS, *np.shape(noise)))}


def wide_limit(name: str, options: Any) -> Result:
    """Let the layers become infinitely wide: a Gaussian process, scales and noise at the mode of their posterior."""
    member, (x, y), inputs = MEMBERS[name], data_of(rows_of(name)), jnp.asarray(fixed_inputs(name).inputs)
    activation, scales, has_bias = LIMITS[name]
    latent = {site: value for site, value in prior_draw(member, rows_of(name)).items() if is_scale(site)}
    columns = x.shape[1]
    share = columns / (columns + has_bias)

    def known(z: dict[str, Any]) -> dict[str, Any]:
        sites = trace(substitute(seed(member.model, 0), z)).get_trace(x)
        return {site: value["value"] for site, value in sites.items() if value["type"] == "deterministic"}

    def kernel(z: dict[str, Any]) -> Callable:
        values = known(z)
        by_layer = jnp.array([values[scale] if isinstance(scale, str) else scale for scale in scales])
        w_std = by_layer.at[0].multiply(share**0.5)
        b_std = jnp.zeros(len(scales)).at[0].set(by_layer[0] * (1 - share) ** 0.5)
        readout = values.get("readout_scale", 1.0)
        return fcn_kernel(len(scales), activation, w_std=w_std, b_std=b_std, readout_w_std=readout)

    z, unravel = ravel_pytree({site: jnp.zeros_like(value) for site, value in latent.items()})

    @jax.jit
    def loss(z: Any) -> Any:
        values = unravel(z)
        return 0.5 * jnp.sum(z**2) - gp_log_evidence(kernel(values)(x)[0], y, known(values)["noise"])

    if len(z):
        z = scipy.optimize.minimize(jax.value_and_grad(loss), z, jac=True, method="L-BFGS-B").x
    values = unravel(jnp.asarray(z))
    of, noise = kernel(values), known(values)["noise"]
    draws = gaussian_draws(*gp_posterior(of(x)[0], of(inputs, x)[0], of(inputs)[0], y, noise))
    return with_noise(draws, noise)


def unadjusted(name: str, options: Any) -> Result:
    """Run microcanonical chains without Metropolis' correction, with the gradients of the reference's first sampler."""
    member, rows = MEMBERS[name], rows_of(name)
    model, told = wrapped(member), options.inference[name][0]
    steps = max(1, round(told["gradients_a_draw"] / 2))
    lengths = (told["warmup"], told["draws"])
    kernel = MicrocanonicalLangevin(model, adjusted=False, num_steps=steps)
    mcmc = chains_of(kernel, lengths, jax.random.key(5), *data_of(rows), extra_fields=left_out(member, rows, model))
    return looked_at(name, with_readout(member, rows, model, mcmc.get_samples(), jax.random.key(6)))


METHODS: dict[str, Callable[[str, Any], Result]] = {
    "mean field": mean_field,
    "mean field, collapsed": collapsed_mean_field,
    "Laplace, linearised": laplace,
    "ensemble of 10": ensemble,
    "infinitely wide": wide_limit,
    "unadjusted MCLMC": unadjusted,
}


def applies(method: str, name: str) -> bool:
    """Whether a method is for a member: a readout to integrate out, a kernel in closed form."""
    if method == "infinitely wide":
        return name in LIMITS
    return method != "mean field, collapsed" or MEMBERS[name].likelihood == "normal"
