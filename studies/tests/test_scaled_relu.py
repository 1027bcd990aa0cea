"""The scaled ReLU encoder, its limiting tangent kernel and its linearised twin."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from numpyro_wide.wide_limit import empirical_ntk, linearize
from studies._scaled_relu import ScaledReLU, inverse_time_schedule
from tests.marks import parametrize

WIDTHS = (32, 128, 512)
NUM_SEEDS = 48


def inputs(num=4, dim=3):
    return jnp.asarray(np.random.default_rng(0).normal(0.3, 1.0, (num, dim)), jnp.float32)


def trained(encoder, x, seed=1):
    """Parameters away from the start, in all their entries."""
    params0 = encoder.init(jax.random.key(0), x)
    keys = iter(jax.random.split(jax.random.key(seed), 2))
    return params0, jax.tree.map(lambda leaf: leaf + 0.3 * jax.random.normal(next(keys), leaf.shape), params0)


def test_is_the_sum_it_claims_to_be():
    encoder, x = ScaledReLU(width=5, num_outputs=2), inputs()
    params0, params = trained(encoder, x)
    np.testing.assert_array_equal(encoder.apply(params0, x), np.zeros((4, 2)))
    assert params0["params"]["hidden"]["kernel"].shape == (3, 5)
    w, a = (np.asarray(params["params"][layer]["kernel"]) for layer in ("hidden", "readout"))
    expected = [[sum(max(w[:, j] @ row, 0) * a[j, i] for j in range(5)) / 5**0.5 for i in range(2)] for row in x]
    np.testing.assert_allclose(encoder.apply(params, x), expected, rtol=1e-5)
    np.testing.assert_allclose(encoder.apply(params, x[0]), expected[0], rtol=1e-5)  # a single input
    hidden = ScaledReLU(width=4000, num_outputs=1).init(jax.random.key(2), x)["params"]["hidden"]["kernel"]
    np.testing.assert_allclose(np.cov(hidden), np.eye(3), atol=4 * (2 / 4000) ** 0.5)


def arc_cosine(x):
    """E[max(0, x·w) max(0, x'·w)] for w ~ N(0, I) (Cho and Saul 2009, order 1, halved)."""
    norms = np.linalg.norm(x, axis=1)
    angle = np.arccos(np.clip(x @ x.T / np.outer(norms, norms), -1, 1))
    return np.outer(norms, norms) * (np.sin(angle) + (np.pi - angle) * np.cos(angle)) / (2 * np.pi)


def test_the_kernel_at_the_start_approaches_its_limit_like_one_over_root_width():
    """McNamara 2025, Lemma 9 at a = 0."""
    x = inputs()
    limit = np.einsum("ij,kl->ijkl", arc_cosine(np.asarray(x, float)), np.eye(2))

    def errors(rng_key, width):
        encoder = ScaledReLU(width, 2)
        return empirical_ntk(encoder.apply, encoder.init(rng_key, x), x) - limit

    keys = jax.random.split(jax.random.key(0), NUM_SEEDS)
    samples = [jax.jit(jax.vmap(lambda key, width=width: errors(key, width)))(keys) for width in WIDTHS]
    for sample in samples:  # unbiased at every width
        spread = np.std(sample, axis=0) / NUM_SEEDS**0.5
        assert np.all(np.abs(np.mean(sample, axis=0)) <= 4.5 * spread)  # 32 means; zero off the diagonal
    log_errors = [0.5 * np.log(np.mean(np.square(sample))) for sample in samples]
    steps = np.log(WIDTHS) - np.mean(np.log(WIDTHS))
    slope = steps @ log_errors / np.sum(steps**2)
    # At worst the entries err together, so that a mean square has the spread of one χ² variable a seed.
    np.testing.assert_allclose(slope, -0.5, atol=4 / np.sqrt(2 * NUM_SEEDS * np.sum(steps**2)))


@parametrize("at", ["the start", "trained parameters", "traced parameters"], rest="slow")
def test_the_twin_is_the_linearised_network(at):
    encoder, x = ScaledReLU(width=16, num_outputs=2), inputs()
    start, params = trained(encoder, x)
    params0 = start if at == "the start" else trained(encoder, x, seed=2)[1]

    def twin_loss(params0, params):
        return jnp.sum(jnp.sin(encoder.linearize(params0)(params, x)))

    def reference_loss(params0, params):
        return jnp.sum(jnp.sin(linearize(encoder.apply, params0)(params, x)))

    evaluate = jax.value_and_grad(twin_loss, argnums=1)
    if at == "traced parameters":
        actual = jax.jit(evaluate)(params0, params)
    else:
        actual = jax.jit(lambda params: evaluate(params0, params))(params)
    expected = jax.jit(jax.value_and_grad(reference_loss, argnums=1))(params0, params)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-5, atol=1e-6), actual, expected)


def test_at_the_start_the_twin_does_no_more_than_regress_on_its_features():
    encoder = ScaledReLU(width=1024, num_outputs=2)
    x = inputs(16, 2)
    params0 = encoder.init(jax.random.key(0), x)

    def flops(apply):
        gradient = jax.jit(jax.grad(lambda params: jnp.sum(jnp.sin(apply(params, x)))))
        return gradient.lower(params0).compile().cost_analysis()["flops"]

    twin, network, general = (
        flops(apply) for apply in (encoder.linearize(params0), encoder.apply, linearize(encoder.apply, params0))
    )
    assert twin < network
    assert twin < 0.5 * general


def test_the_learning_rate_falls_as_in_the_paper():
    rate = inverse_time_schedule(1e-4)
    steps = np.array([0, 1, 5000, 200_000])
    np.testing.assert_allclose(rate(steps), 1 / (1e4 + steps / 10), rtol=1e-6)
    np.testing.assert_allclose(inverse_time_schedule(0.5, slowdown=2.0)(3), 1 / (2 + 1.5), rtol=1e-6)
    optimiser = optax.sgd(inverse_time_schedule(1.0, slowdown=1.0))
    state = optimiser.init(jnp.array(0.0))
    for step in range(3):
        update, state = optimiser.update(jnp.array(1.0), state)
        np.testing.assert_allclose(update, -1 / (1 + step), rtol=1e-6)
