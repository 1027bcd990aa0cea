"""The networks' prior: variance one at every width and depth, and the wide limit's kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from scipy import integrate, stats

from numpyro_wide._compile import run_program
from numpyro_wide.nn import CNN, FCN, NTKConv, WideResNet
from numpyro_wide.nn._layers import unit_scale
from numpyro_wide.wide_limit import fcn_kernel
from tests.compilations import compilations
from tests.marks import parametrize


def unit_inputs(*shape, seed=0):
    """Random inputs whose entries have mean square one in each row."""
    x = np.random.default_rng(seed).normal(0.3, 1, size=shape)
    return (x / np.sqrt((x**2).mean(axis=tuple(range(1, len(shape))), keepdims=True))).astype("f")


def prior_variance(network, x, num_draws):
    """The mean over inputs of the prior predictive variance, by averages over draws, and its standard error."""

    @jax.jit
    def by_draw(keys):
        return jax.lax.map(lambda key: jnp.sum(network.init_with_output(key, x)[0] ** 2, axis=1).mean(), keys)

    draws = np.asarray(by_draw(jax.random.split(jax.random.key(1), num_draws)))
    return draws.mean(), draws.std() / num_draws**0.5


@parametrize(
    ("activation", "function"),
    [
        ("erf", lambda u: 2 * stats.norm.cdf(u * 2**0.5) - 1),
        ("gelu", lambda u: u * stats.norm.cdf(u)),
        ("relu", lambda u: max(u, 0.0)),
        (jnp.tanh, np.tanh),
    ],
    rest="slow",
)
def test_unit_scale_against_quadrature(activation, function):
    second_moment = integrate.quad(lambda u: function(u) ** 2 * stats.norm.pdf(u), -12, 12, points=[0])[0]
    assert unit_scale(activation, b_std=0.3) == pytest.approx(((1 - 0.09) / second_moment) ** 0.5, rel=1e-5)


@parametrize("activation", ["erf", "gelu", "identity", "relu", "tanh", jax.nn.selu, jax.nn.silu], rest="slow")
def test_unit_scale_is_a_number_under_transformations(activation):
    # Of vectorised chains, networks run under vmap; the rectifier comes with a derivative of its own.
    scale = unit_scale(activation)
    for transformed in (jax.vmap, lambda f: jax.jit(jax.vmap(jax.grad(f)))):
        found = transformed(lambda x: x * unit_scale(activation))(jnp.ones(3))
        np.testing.assert_allclose(found, scale, rtol=1e-6)


@pytest.mark.fault(
    "nn/_networks.py",
    'preceding = ["identity", *[self.activation] * (self.depth - 1)][: self.depth]',
    "preceding = [self.activation] * self.depth",
)
@parametrize(("depth", "width"), [(0, 16), (1, 16), (3, 128), (10, 128)], rest="slow")
def test_variance_of_the_fcn_is_one(depth, width):
    # With rectifiers it is one in expectation at any width, not only in the limit.
    variance, error = prior_variance(FCN(depth, width, "relu", b_std=0.3, readout_b_std=0.2), unit_inputs(5, 7), 400)
    assert error < 0.1
    assert abs(variance - 1) < 3.5 * error + 1e-5


@pytest.mark.as_compiled
@parametrize("activation", ["gelu", jnp.tanh], rest="slow")
def test_variance_of_the_fcn_is_near_one_for_other_activations(activation):
    for depth in (1, 6):
        variance, error = prior_variance(FCN(depth, 256, activation, b_std=0.1), unit_inputs(5, 7), 60)
        assert abs(variance - 1) < 0.05 + 3 * error
        assert error < 0.06


@pytest.mark.fault("nn/_networks.py", "is_data=isinstance(self.w_std, Array)", "is_data=False")
def test_a_scale_in_an_array_of_jax_is_data_of_the_program():
    x, params = jnp.ones((3, 2)), FCN(2, 4, "erf").init(jax.random.key(0), jnp.ones((3, 2)))
    found = []
    for scale in (jnp.array([1.0, 2.0]), jnp.array([3.0, 2.0])):
        with compilations() as compiled:
            found.append(run_program(FCN(2, 4, "erf", w_std=scale).apply, params, x))
    assert compiled == []
    np.testing.assert_allclose(found[1], FCN(2, 4, "erf", w_std=[3.0, 2.0]).apply(params, x), rtol=1e-6)
    assert np.abs(found[0] - found[1]).max() > 0.01


@parametrize(("depth", "width"), [(1, 4), (4, 32)], rest="slow")
def test_variance_of_the_cnn_is_one(depth, width):
    network = CNN(depth, width, "relu", b_std=0.3, readout_b_std=0.5)
    variance, error = prior_variance(network, unit_inputs(1, 4, 4, 3), 400)
    assert error < 0.1
    assert abs(variance - 1) < 3.5 * error


@pytest.mark.slow
def test_variance_of_the_residual_network_is_one():
    network = WideResNet(2, 16, "relu", c=0.5, readout_b_std=0.1, pooling="flatten")
    variance, error = prior_variance(network, unit_inputs(1, 2, 2, 3), 400)
    assert error < 0.12
    assert abs(variance - 1) < 3.5 * error


@pytest.mark.slow
def test_variance_of_the_residual_network_with_gelu_on_uniform_images():
    # Where all pixels are equal, averaging over them changes nothing.
    variance, error = prior_variance(WideResNet(1, 16), np.ones((1, 2, 2, 3), "f"), 400)
    assert abs(variance - 1) < 0.05 + 3 * error
    assert error < 0.12


@pytest.mark.slow
def test_features_tend_to_the_kernel_of_the_wide_limit():
    x = unit_inputs(4, 5)
    widths, errors = [64, 256, 1024], []
    for width in widths:
        network = FCN(2, width, "erf", w_std=1.3, b_std=0.2, readout_w_std=0.9, readout_b_std=0.1)
        nngp, _ = fcn_kernel(network.depth, network.activation, **network.scales())(x)

        def error(key, network=network, nngp=nngp):
            features = network.init_with_output(key, x)[0]
            return jnp.mean((features @ features.T - nngp) ** 2)

        draws = jax.jit(lambda keys, error=error: jax.lax.map(error, keys))(jax.random.split(jax.random.key(0), 40))
        errors.append(float(draws.mean()) ** 0.5)
    slope = np.polyfit(np.log(widths), np.log(errors), 1)[0]
    assert abs(slope + 0.5) < 0.1
    assert errors[-1] < 0.03


def test_kernel_of_the_limit_takes_the_scales_that_keep_the_variance():
    network = FCN(4, 10, "gelu", b_std=0.1, readout_b_std=0.3)
    nngp, _ = fcn_kernel(4, "gelu", **network.scales())(unit_inputs(3, 6))
    np.testing.assert_allclose(np.diag(nngp), 1, rtol=1e-5)


@pytest.mark.fault("nn/_layers.py", "(height * width * num_channels) ** 0.5", "num_channels**0.5")
def test_convolution_against_a_sum_over_offsets():
    x, layer = unit_inputs(2, 5, 4, 3), NTKConv(2, kernel_size=(3, 2), w_std=1.7, b_std=0.4)
    rng = np.random.default_rng(2)
    kernel, bias = rng.normal(size=(3, 2, 3, 2)), rng.normal(size=2)
    expected = sum(
        np.roll(x, (1 - row, -column), axis=(1, 2)) @ kernel[row, column] for row in range(3) for column in range(2)
    )
    got = layer.apply({"params": {"kernel": kernel, "bias": bias}}, x)
    np.testing.assert_allclose(got, 1.7 / 18**0.5 * expected + 0.4 * bias, atol=1e-5)


@pytest.mark.fault("nn/_layers.py", "0], j : j + spans[1] : strides[1]", "1], j : j + spans[1] : strides[0]")
@parametrize("padding", ["CIRCULAR", "SAME", "VALID"], rest="slow")
@parametrize(("kernel_size", "strides"), [((3, 3), (1, 1)), ((2, 4), (2, 3)), ((1, 1), (2, 2))], rest="slow")
def test_convolution_is_that_of_flax_with_its_gradients(padding, kernel_size, strides):
    x = unit_inputs(2, 7, 6, 3)
    kernel = np.random.default_rng(2).normal(size=(*kernel_size, 3, 5)).astype("f")
    ours = NTKConv(5, kernel_size, strides, padding)
    theirs = linen.Conv(5, kernel_size, strides, padding, use_bias=False)

    def output_and_slopes(layer, scale):
        apply = lambda kernel, x: layer.apply({"params": {"kernel": scale * kernel}}, x)  # noqa: E731
        output, pull_back = jax.vjp(apply, kernel, x)
        return output, pull_back(jnp.cos(jnp.arange(output.size, dtype=float).reshape(output.shape)))

    found, expected = output_and_slopes(ours, (3 * np.prod(kernel_size)) ** 0.5), output_and_slopes(theirs, 1.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4), found, expected)


def test_a_chain_on_a_cpu_holds_no_convolution():
    """XLA's convolutions are slow inside of loops there, such as those of every kernel."""
    x, network = unit_inputs(2, 5, 4, 3), CNN(2, 4)
    variables = network.init(jax.random.key(0), x)

    def steps(variables):
        slope = jax.grad(lambda variables: jnp.sum(network.apply(variables, x) ** 2))
        return jax.lax.fori_loop(0, 3, lambda _, at: slope(at), variables)

    assert "convolution" not in jax.jit(steps).lower(variables).as_text()


def test_residual_network_is_that_of_the_paper():
    x = np.zeros((1, 8, 8, 3), "f")
    network = WideResNet(3, 128, w_std=2.2**0.5, readout_w_std=1.0, readout_b_std=0.1)
    features, variables = jax.eval_shape(network.init_with_output, jax.random.key(0), x)
    shapes = {name: layer["kernel"].shape for name, layer in variables["params"].items()}
    layers = [name for name in shapes if not name.endswith("skip")]
    assert len(layers) + 1 == 20  # and the readout
    assert features.shape == (1, 4 * 128 + 1)
    assert shapes["group_0_block_2_second"] == (3, 3, 128, 128)
    assert shapes["group_1_block_0_first"] == (3, 3, 128, 256)
    assert shapes["group_2_block_0_skip"] == (1, 1, 256, 512)
    assert sum(name.endswith("skip") for name in shapes) == 2


@pytest.mark.fault("nn/_networks.py", "k += 1", "k = 1")
def test_residual_sums_are_scaled_by_their_index():
    """With residual branches of zero, what is left of the stem is the product of the skips' factors."""
    x, network = unit_inputs(1, 4, 4, 3), WideResNet(1, 2, "identity", c=1.0, readout_w_std=1.0)
    shapes = jax.eval_shape(network.init, jax.random.key(0), x)["params"]
    variables = jax.tree.map(lambda leaf: np.zeros(leaf.shape, "f"), shapes)
    variables["stem"]["kernel"] = np.random.default_rng(0).normal(size=(3, 3, 3, 2))
    for name in ("group_1_block_0_skip", "group_2_block_0_skip"):
        variables[name]["kernel"] = np.eye(*shapes[name]["kernel"].shape[2:])[None, None]
    stem = NTKConv(2).apply({"params": variables["stem"]}, x)
    # 1/2 · 2/3 · 3/4; the projections divide by the roots of their 2 and 4 channels, the readout by that of its 8.
    expected = (1 / 4) ** 0.5 * np.asarray(stem)[:, ::4, ::4].mean((1, 2)) / (2 * 4 * 8) ** 0.5
    np.testing.assert_allclose(network.apply({"params": variables}, x)[:, :2], expected, rtol=1e-5)
