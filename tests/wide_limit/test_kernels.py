"""Kernels of convolutional, residual and normalised networks: references, finite networks, quadrature, derivatives."""

import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import linen

from numpyro_wide import ReadoutPredictive, _checks, repriorise, wide_limit, wide_limit_draws
from numpyro_wide.nn import CNN, FCN, NTKConv, WideResNet, bnn
from numpyro_wide.wide_limit import _layer_kernels as _rules
from tests.marks import parametrize

REFERENCE = Path(__file__).parents[1] / "data" / "nt_conv.npz"
SCALES = {"w_std": 1.3, "b_std": 0.2, "readout_w_std": 0.9, "readout_b_std": 0.15}
# Functions that the package does not know by name, and so takes by their series.
UNNAMED = {"erf": lambda u: jax.lax.erf(u), "gelu": lambda u: jax.nn.gelu(u, approximate=False)}


def network_of(case, activation=None):
    kind, name, depth, padding, pooling = case.split("_")
    options = {"padding": padding, "pooling": pooling, **SCALES}
    if kind == "resnet":
        return WideResNet(int(depth), 4, activation or name, c=2.0, **options)
    return CNN(int(depth), 4, activation or name, layer_norm=kind == "cnnln", **options)


def assert_agrees(network, case, tolerance):
    """Hold the kernels of X and X2 together against those of X, X and X2, relative to the largest entry."""
    reference = np.load(REFERENCE)
    both = np.concatenate([reference["X"], reference["X2"]])
    for found, name in zip(wide_limit.kernel(network)(both), ("nngp", "ntk"), strict=True):
        own, cross = (reference[f"{name}_{case}{suffix}"] for suffix in ("", "_cross"))
        np.testing.assert_allclose(found[:5, :5], own, rtol=0, atol=tolerance * np.abs(own).max())
        np.testing.assert_allclose(found[:5, 5:], cross, rtol=0, atol=tolerance * np.abs(own).max())


@pytest.mark.fault(
    "wide_limit/_layer_kernels.py",
    "a, b = self._squares(weight=weight, other_weight=other_weight)",
    "a, b = weight, other_weight",
)
@pytest.mark.fault("wide_limit/_layer_kernels.py", "tangent=units.tangent * scale,", "tangent=units.tangent,")
@parametrize(
    "case",
    [
        *("cnn_relu_1_CIRCULAR_flatten", "cnn_erf_3_CIRCULAR_mean", "cnn_gelu_3_SAME_flatten", "cnn_erf_3_SAME_mean"),
        *("cnn_relu_3_VALID_flatten", "cnn_gelu_3_VALID_mean", "cnn_identity_3_SAME_mean"),
        *("cnnln_erf_3_CIRCULAR_flatten", "cnnln_relu_3_CIRCULAR_flatten"),
        *("resnet_erf_1_SAME_flatten", "resnet_relu_1_SAME_mean", "resnet_identity_1_SAME_flatten"),
    ],
    rest="slow",
)
def test_closed_forms_agree_with_neural_tangents(x64, case):
    # The file rounds the angle of equal inputs, on which the rectifier's derivative depends: 1.3e-9 on the diagonal.
    assert_agrees(network_of(case), case, 2e-9 if "relu" in case else 1e-13)


@pytest.mark.fault("wide_limit/_duals.py", "* value, value + cosine * derivative", "* value, cosine * derivative")
@parametrize("case", ["cnn_erf_3_VALID_flatten", "cnn_gelu_3_CIRCULAR_mean", "resnet_gelu_1_SAME_flatten"], rest="slow")
def test_series_agree_with_neural_tangents(x64, case):
    network = network_of(case, UNNAMED[case.split("_")[1]])
    assert_agrees(network, case, 1e-6)
    assert float(wide_limit.kernel(network).truncation_error(np.load(REFERENCE)["X"])) < 1e-6


def images(num=3, size=(5, 6), channels=2, seed=0):
    return np.random.default_rng(seed).normal(0.2, 1.0, (num, *size, channels))


@pytest.mark.fault("wide_limit/_layer_kernels.py", 'if padding != "CIRCULAR"', 'if padding != "CIRCULAR" or stride > 1')
@parametrize("padding", ["CIRCULAR", "SAME", "VALID"], rest="slow")
@parametrize("size, stride", [(3, 1), (3, 2), (2, 2), (1, 2)], rest="slow")
def test_a_convolution_is_that_of_the_layer(padding, size, stride):
    """Exactly: outputs are linear in N(0, 1) parameters, so the covariance is the sum over products of derivatives."""
    x1, x2 = (jnp.asarray(images(2, seed=seed), jnp.float32) for seed in (0, 1))
    options = {"kernel_size": (size, size), "strides": (stride, stride), "padding": padding}
    layer = NTKConv(1, w_std=1.3, b_std=0.2, **options)
    params = layer.init(jax.random.key(0), x1)

    def derivatives(x):
        leaves = jax.tree.leaves(jax.jacrev(lambda params: layer.apply(params, x)[..., 0])(params))
        return np.concatenate([leaf.reshape(*leaf.shape[:3], -1) for leaf in leaves], axis=-1)

    expected = np.einsum("iyxp,jvup->ijyxvu", derivatives(x1), derivatives(x2))
    for all_pairs in (True, False):
        found = wide_limit.Inputs(x1, x2, None, all_pairs).images().convolution(1.3, 0.2, **options).settled().product
        own = expected if all_pairs else np.einsum("ijyxyx->ijyx", expected)
        np.testing.assert_allclose(found, own, rtol=1e-5, atol=1e-5)


def draws_of_kernels(network, x, num_draws):
    """Both kernels of finite networks, (draws, 2, n, n): inner products of features, and of gradients."""

    def draw(key):
        key_network, key_readout = jax.random.split(key)
        params = network.init(key_network, x)
        features = network.apply(params, x)
        readout = jax.random.normal(key_readout, features.shape[1:])
        hidden = jax.jacrev(lambda params: network.apply(params, x) @ readout)(params)
        rows = [leaf.reshape(len(x), -1) for leaf in jax.tree.leaves(hidden)]
        nngp = features @ features.T
        return jnp.stack([nngp, nngp + sum(row @ row.T for row in rows)])

    # One after the other: a convolution over a batch of filters is slow.
    return jax.jit(lambda keys: jax.lax.map(draw, keys))(jax.random.split(jax.random.key(0), num_draws))


@pytest.mark.slow
def test_linear_residual_networks_have_the_mean_kernels_at_any_width():
    """With strides and circular padding, for which there is no file."""
    x = jnp.asarray(images(2, channels=1), jnp.float32)
    network = WideResNet(1, 3, "identity", c=2.0, padding="CIRCULAR", pooling="mean", **SCALES)
    drawn = np.asarray(draws_of_kernels(network, x, 1000))
    errors = (drawn.mean(0) - np.stack(wide_limit.kernel(network)(x))) / (drawn.std(0) / 1000**0.5)
    assert np.abs(errors).max() < 4.5


@pytest.mark.slow
@pytest.mark.parametrize("network", [FCN(2, 1, "tanh", b_std=0.5, layer_norm=True), CNN(1, 1, "relu", layer_norm=True)])
def test_normalised_networks_tend_to_their_kernels(network):
    x = jnp.asarray(images(2, (3, 3)), jnp.float32) * jnp.array([1.0, 5.0])[:, None, None, None]
    limit = np.stack(wide_limit.kernel(network)(x))
    errors = [
        np.sqrt(np.mean((np.asarray(draws_of_kernels(network.clone(width=width), x, 80)) - limit) ** 2, axis=0))
        for width in (8, 128)
    ]
    ratios = errors[0] / errors[1]  # 4 at the rate 1/√width
    assert np.all(ratios > 2.5), ratios


@pytest.mark.fault("wide_limit/_duals.py", "coefficients = coefficients.at[0].add(at_zero)", "pass")
def test_the_series_is_quadrature(x64):
    """Of a function that is neither odd nor even, with variances that differ, and one that is zero."""
    x1, x2 = np.array([[1.0, 2.0], [0.0, 0.0]]), np.array([[-3.0, 0.5]])
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    u, v = np.meshgrid(nodes, nodes, indexing="ij")
    weights = np.outer(weights, weights) / (2 * np.pi)
    sigmoid = lambda u: 1 / (1 + np.exp(-u))  # noqa: E731
    nngp, ntk = wide_limit.fcn_kernel(1, jax.nn.sigmoid, w_std=1.2, b_std=0.0)(x1, x2)
    for row in range(2):
        a, b, c = (1.44 * np.mean(p * q) for p, q in ((x1[row],) * 2, (x2[0],) * 2, (x1[row], x2[0])))
        one = np.sqrt(a) * u
        other = c / np.sqrt(max(a, 1e-30)) * u + np.sqrt(b - c**2 / max(a, 1e-30)) * v
        product = np.sum(weights * sigmoid(one) * sigmoid(other))
        slope = np.sum(weights * sigmoid(one) * (1 - sigmoid(one)) * sigmoid(other) * (1 - sigmoid(other)))
        np.testing.assert_allclose([nngp[row, 0], ntk[row, 0]], [product, product + slope * c], rtol=1e-9)


@pytest.mark.as_compiled
@parametrize("network", [FCN(2, 1, "tanh"), CNN(1, 1, "tanh", pooling="mean")], rest="slow")
def test_derivatives_are_finite_differences(x64, network):
    """By scales and inputs, two of which are equal and one zero."""
    x = jnp.asarray(images(4, (3, 3)))
    x = x.at[1].set(x[0]).at[2].set(0.0)
    direction, step = jnp.asarray(images(4, (3, 3), seed=1)).at[2].set(0.0), 1e-5

    @jax.jit
    def along(s):
        scaled = network.clone(w_std=1.1 + s, b_std=0.3 + s, readout_w_std=1.2 - s, readout_b_std=0.1 + s)
        return jnp.stack(wide_limit.kernel(scaled)(x + s * direction))

    expected = (along(step) - along(-step)) / (2 * step)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(along))(0.0), expected, rtol=1e-6, atol=1e-8)
    weights = jnp.asarray(np.random.default_rng(2).normal(size=expected.shape))
    reverse = jax.jit(jax.grad(lambda s: jnp.sum(weights * along(s))))(0.0)
    np.testing.assert_allclose(reverse, jnp.sum(weights * expected), rtol=1e-6, atol=1e-8)


@pytest.mark.as_compiled
@parametrize("b_std", [0.0, 0.3], rest="slow")
def test_no_derivative_is_nan_where_images_are_equal_or_black(b_std):
    x = jnp.asarray(images(3, (3, 3)), jnp.float32).at[1].set(0.0)

    def total(x, scales):
        network = CNN(2, 1, "tanh", padding="SAME", **scales)
        return sum(jnp.sum(part) for pair in ((x,), (x, x)) for part in wide_limit.kernel(network)(*pair))

    scales = {"w_std": 1.2, "b_std": b_std, "readout_w_std": 1.0}
    for leaf in jax.tree.leaves(jax.jit(jax.grad(total, argnums=(0, 1)))(x, scales)):
        assert np.all(np.isfinite(leaf)) and np.abs(leaf).max() < 1e3


def test_a_kink_is_told_and_a_smooth_function_not():
    x = images(2).reshape(2, -1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wide_limit.fcn_kernel(1, "tanh", w_std=1.0, b_std=0.3)(x)
        wide_limit.fcn_kernel(1, jax.nn.relu, w_std=1.0, b_std=0.3)(x)  # known to be "relu"
    with pytest.warns(UserWarning, match="Hermite series leaves out up to"):
        wide_limit.fcn_kernel(1, jnp.abs, w_std=1.0, b_std=0.3)(x)
    with pytest.warns(UserWarning, match="Hermite series leaves out up to"):
        wide_limit.kernel(FCN(1, 1, "tanh", w_std=50.0))(x)


@pytest.mark.as_compiled
@pytest.mark.fault("wide_limit/_kernels.py", "np.asarray(block).T", "np.asarray(block)")
@parametrize("network", [CNN(2, 1, "erf", padding="SAME", pooling="mean"), FCN(1, 1, "tanh", b_std=0.3)], rest="slow")
def test_blocks_equal_the_whole(network):
    x1, x2 = images(7, (4, 3)).astype(np.float32), images(4, (4, 3), seed=1).astype(np.float32)
    whole, blocks = wide_limit.kernel(network), wide_limit.kernel(network, block_size=3)
    for args in ((x1,), (x1, x2)):
        expected = np.stack(whole(*args))
        np.testing.assert_allclose(blocks(*args), expected, rtol=1e-5)
        np.testing.assert_allclose(jax.jit(blocks)(*args), expected, rtol=1e-5)
        for alone in (blocks.nngp, jax.jit(blocks.nngp)):
            np.testing.assert_allclose(alone(*args), expected[0], rtol=1e-5)


def test_fcn_kernel_is_that_of_an_fcn():
    network, x = FCN(2, 1, "tanh", b_std=0.4, input_scale=np.array([0.5, 2.0])), images(3, (1, 1)).reshape(3, 2)
    expected = wide_limit.fcn_kernel(2, "tanh", **network.scales())(x)
    np.testing.assert_allclose(wide_limit.kernel(network)(x), expected, rtol=1e-6)


@pytest.mark.as_compiled
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_float32_holds_a_thousand_layers(x64, activation):
    x = np.random.default_rng(0).normal(size=(4, 10))
    # These scales of the rectifier keep the variance at one.
    network = FCN(1000, 1, activation, w_std=1.82**0.5, b_std=0.3, layer_norm=activation == "tanh")
    for exact, single in zip(
        *(wide_limit.kernel(network)(x.astype(kind)) for kind in (float, np.float32)), strict=True
    ):
        np.testing.assert_allclose(single, exact, rtol=2e-3)


@pytest.mark.slow
def test_fit_finds_the_scales_of_networks_of_images():
    """The evidence is the dense one at what it found, and less wherever a scale is moved; predictions are the GP's."""
    x = images(24, (4, 4), 1)
    y = np.mean(x[:, ::2], axis=(1, 2, 3)) + 0.05 * np.random.default_rng(1).normal(size=24)
    networks = CNN(1, 8, "erf", pooling="mean"), FCN(1, 8, "tanh")
    found = wide_limit.fit(x[:20], y[:20], network=networks, num_restarts=1)
    assert len(found.table) == 2 and found.scales.keys() == {"w_std", "b_std", "readout_w_std"}
    gram = np.asarray(wide_limit.kernel(found.network)(x)[0], float)
    noisy = gram[:20, :20] + found.noise_scale**2 * np.eye(20)
    evidence = scipy.stats.multivariate_normal(np.zeros(20), noisy).logpdf(y[:20])
    np.testing.assert_allclose(found.log_evidence, evidence, rtol=1e-3)
    mean, variance = found.predict(x[20:])
    explained = gram[20:, :20] @ np.linalg.solve(noisy, gram[:20, 20:])
    np.testing.assert_allclose(mean, gram[20:, :20] @ np.linalg.solve(noisy, y[:20]), rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(variance, np.diag(gram[20:, 20:] - explained), rtol=1e-2, atol=1e-4)


@pytest.mark.slow
def test_repriorised_draws_of_a_cnn_tend_to_the_posterior_of_its_kernel():
    """Hron 2022, Proposition 2.2, by the wide-limit draws: the predictive mean, which nears as the network widens."""
    x, noise_scale = jnp.asarray(images(12, (4, 4), 1), jnp.float32), 0.2
    y = jnp.mean(x, axis=(1, 2, 3))
    network = CNN(1, 1, "relu", padding="SAME", b_std=0.3)
    gram = np.asarray(wide_limit.kernel(network)(x)[0])
    expected = gram[8:, :8] @ np.linalg.solve(gram[:8, :8] + noise_scale**2 * np.eye(8), y[:8])

    def error(width):
        model = bnn(network.clone(width=width), None, noise_scale)
        wrapped = repriorise(model, readout="readout", features="features", targets="y", noise_scale=noise_scale)
        draws = wide_limit_draws(jax.random.key(0), wrapped, 100, x[:8], y[:8])
        means = ReadoutPredictive(wrapped, draws, (x[:8], y[:8]))(jax.random.key(1), x[8:])["mean"]
        return np.sqrt(np.mean((np.asarray(means).reshape(100, -1) - expected) ** 2))

    assert error(256) < 0.4 * error(8)  # 0.18 at the rate 1/√width


@pytest.mark.as_compiled
def test_no_sum_over_filters_is_taken_while_compiling():
    """The inputs' own tangent kernel is a constant, and XLA would compute what convolutions make of it, slowly."""
    network = CNN(2, 1, "relu", padding="SAME")
    x = jnp.ones((20, 8, 8, 1), jnp.float32)
    text = jax.jit(lambda x: wide_limit.kernel(network)(x)).lower(x).compile().as_text()
    # Of the kernel, the tangent kernel and the variances, in two layers, along two directions.
    assert text.count(" reduce-window(") == 3 * 2 * 2


# Rules of a user's own, refusals of networks without one, and the progress bar of long work ---------------------------

X = np.random.default_rng(0).normal(size=(5, 4, 4, 2)).astype("f")


class Branches(linen.Module):
    """A rectified convolution beside a linear one."""

    width: int = 200

    @linen.compact
    def __call__(self, x):
        one, other = (NTKConv(self.width, padding="SAME")(x) for _ in range(2))
        return ((jnp.maximum(one, 0) + other) / (16 * self.width) ** 0.5).reshape(len(x), -1)


def branches_rule(_, inputs):
    layer = inputs.images().convolution(1.0, 0.0, padding="SAME")
    return layer.activate("relu").plus(layer).features("flatten", 1.0, 0.0)


@pytest.fixture
def own_rules(monkeypatch):
    monkeypatch.setattr(_rules, "_RULES", dict(_rules._RULES))


def test_a_rule_of_ones_own(own_rules):
    """The sum of the kernels of two CNNs, subclasses included."""
    wide_limit.register_kernel(Branches, branches_rule)
    options = {"w_std": 1.0, "readout_w_std": 1.0, "padding": "SAME"}
    parts = [wide_limit.kernel(CNN(1, 1, name, **options))(X) for name in ("relu", "identity")]
    subclass = type("Narrow", (Branches,), {})
    for network in (Branches(), subclass()):
        np.testing.assert_allclose(wide_limit.kernel(network)(X), np.add(*map(np.stack, parts)), rtol=1e-5)


def test_networks_without_a_rule_are_refused_with_the_names_of_those_that_have_one(own_rules):
    with pytest.raises(TypeError, match=r"Branches has no rule .* those that have one are .*FCN.*CNN.*WideResNet"):
        wide_limit.kernel(Branches())
    wide_limit.register_kernel(Branches, branches_rule)
    with pytest.raises(TypeError, match=r"Dense has no rule .* are .*WideResNet.*Branches"):
        wide_limit.kernel(linen.Dense(3))
    with pytest.raises(TypeError, match="not the class Dense itself"):
        wide_limit.kernel(linen.Dense)


def test_long_work_shows_a_bar(bars, monkeypatch, capsys):
    kernel = wide_limit.kernel(CNN(1, 1, "relu"), block_size=2)
    kernel(X)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(_checks, "_PATIENCE", 0)
    kernel(X)
    assert "rows of blocks" in (shown := capsys.readouterr().err) and "0/3" in shown
