"""The closed-form kernels against references, quadrature and their own blocks and derivatives."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.special

from numpyro_wide.wide_limit import fcn_kernel
from tests.marks import parametrize

ACTIVATIONS = ("erf", "gelu", "identity", "relu")
REFERENCE = Path(__file__).parents[1] / "data" / "nt_reference.npz"
SCALES = {"w_std": 1.3, "b_std": 0.4, "readout_w_std": 0.7, "readout_b_std": 0.3}


def inputs(num: int = 5, dim: int = 3, seed: int = 0, dtype: type = np.float64) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.3, 1.0, (num, dim)).astype(dtype)


@pytest.mark.fault("wide_limit/_duals.py", "(4 / jnp.pi) / root", "(2 / jnp.pi) / root")
@pytest.mark.fault("wide_limit/_duals.py", "(ratio + cotangent * (c * S))", "(ratio - cotangent * (c * S))")
@pytest.mark.fault("wide_limit/_duals.py", "/ (2 * jnp.pi) + slope * c, slope", "/ (2 * jnp.pi), slope")
@pytest.mark.fault("wide_limit/_layer_kernels.py", "tangent=covariance + w_var *", "tangent=w_var *")
@pytest.mark.fault("wide_limit/_layer_kernels.py", "product=w_var * product + b_var", "product=w_var * product")
@parametrize("activation", ["erf", "gelu", "relu"], rest="slow")
@parametrize("depth", [1, 3], rest="slow")
@parametrize("second", ["none", "same"], rest="slow")
def test_agrees_with_the_reference_file(x64, activation, depth, second):
    reference = np.load(REFERENCE)
    x = reference["X"]
    kernel = fcn_kernel(depth, activation, w_std=2**0.5, b_std=0.1, readout_w_std=1.0, readout_b_std=0.1)
    nngp, ntk = kernel(x) if second == "none" else kernel(x, x.copy())
    np.testing.assert_allclose(nngp, reference[f"nngp_{activation}_{depth}"], rtol=0, atol=1e-9)
    np.testing.assert_allclose(ntk, reference[f"ntk_{activation}_{depth}"], rtol=0, atol=1e-9)


def smooth_expectation(function, a, b, c):
    """E[f(u) f(v)] by a product of two Gauss-Hermite rules."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    u = np.sqrt(a) * nodes[:, None] + 0 * nodes[None, :]
    v = c / np.sqrt(a) * nodes[:, None] + np.sqrt(max(b - c**2 / a, 0)) * nodes[None, :]
    return np.einsum("i,j,ij->", weights, weights, function(u) * function(v)) / (2 * np.pi)


def homogeneous_expectation(function, degree, a, b, c):
    """E[f(u) f(v)] for f(ru) = r^degree f(u), as an integral over the angle: the radius has E[r²] = 2."""
    rest = np.sqrt(max(b - c**2 / a, 0))
    second = lambda t: c / np.sqrt(a) * np.cos(t) + rest * np.sin(t)  # noqa: E731
    integrand = lambda t: function(np.sqrt(a) * np.cos(t)) * function(second(t))  # noqa: E731
    kinks = [*(np.pi * np.array([0.5, 1.5])), *(np.arctan2(-c / np.sqrt(a), rest) % np.pi + [0, np.pi])]
    integral, _ = scipy.integrate.quad(integrand, 0, 2 * np.pi, points=kinks, epsabs=1e-12)
    return integral * (2 if degree else 1) / (2 * np.pi)


def normal_cdf_and_density(u):
    return scipy.special.ndtr(u), np.exp(-(u**2) / 2) / np.sqrt(2 * np.pi)


def expectations(activation, a, b, c):
    """E[φφ] and E[φ'φ'] by quadrature."""
    if activation == "relu":
        pairs = (lambda u: np.maximum(u, 0), 1), (lambda u: (u > 0) * 1.0, 0)
        return [homogeneous_expectation(*pair, a, b, c) for pair in pairs]
    functions = {
        "erf": (scipy.special.erf, lambda u: 2 / np.sqrt(np.pi) * np.exp(-(u**2))),
        "gelu": (
            lambda u: u * normal_cdf_and_density(u)[0],
            lambda u: normal_cdf_and_density(u)[0] + u * normal_cdf_and_density(u)[1],
        ),
        "identity": (lambda u: u, np.ones_like),
    }
    return [smooth_expectation(function, a, b, c) for function in functions[activation]]


def kernels_by_quadrature(activation, x1, x2, w_std, b_std, readout_w_std, readout_b_std):
    """Both kernels of two single inputs, the expectations of each layer by quadrature."""
    a, b, c = (w_std[0] ** 2 * np.mean(u * v) + b_std[0] ** 2 for u, v in ((x1, x1), (x2, x2), (x1, x2)))
    tangent = c
    for w, s in zip([*w_std[1:], readout_w_std], [*b_std[1:], readout_b_std], strict=True):
        product, slope = expectations(activation, a, b, c)
        a, b = (w**2 * expectations(activation, v, v, v)[0] + s**2 for v in (a, b))
        tangent = w**2 * product + s**2 + w**2 * slope * tangent
        c = w**2 * product + s**2
    return c, tangent


@parametrize("activation", ACTIVATIONS, rest="slow")
def test_agrees_with_quadrature_when_all_scales_differ(x64, activation):
    x1, x2 = inputs(2)
    x2 = -1.5 * x2  # another norm, and a negative inner product
    scales = {"w_std": [1.3, 0.6], "b_std": [0.4, 0.9], "readout_w_std": 0.7, "readout_b_std": 0.3}
    expected = kernels_by_quadrature(activation, x1, x2, **scales)
    actual = fcn_kernel(2, activation, **scales)(x1[None], x2[None])
    np.testing.assert_allclose(np.squeeze(actual), expected, rtol=1e-9)


def test_identity_is_linear_regression_with_a_prior_of_products(x64):
    x1, x2 = inputs(4), inputs(3, seed=1)
    nngp, ntk = fcn_kernel(2, "identity", w_std=2.0, b_std=0.5, readout_w_std=3.0, readout_b_std=0.1)(x1, x2)
    first = 4 * x1 @ x2.T / 3 + 0.25
    second = 4 * first + 0.25
    last = 9 * second + 0.01
    np.testing.assert_allclose(nngp, last, rtol=1e-12)
    np.testing.assert_allclose(ntk, last + 9 * (second + 4 * first), rtol=1e-12)


def test_depth_0_is_the_readout_alone(x64):
    x = inputs(4)
    nngp, ntk = fcn_kernel(0, "relu", w_std=2.0, b_std=0.5, readout_w_std=3.0, readout_b_std=0.1)(x)
    np.testing.assert_allclose(nngp, 9 * x @ x.T / 3 + 0.01, rtol=1e-12)
    np.testing.assert_allclose(ntk, nngp, rtol=1e-14)


def test_scales_by_layer_are_broadcast(x64):
    x = inputs()
    by_layer = fcn_kernel(3, "erf", w_std=jnp.full(3, 1.3), b_std=[0.4, 0.4, 0.4])(x)
    np.testing.assert_allclose(by_layer, fcn_kernel(3, "erf", w_std=1.3, b_std=0.4)(x), rtol=1e-14)


def test_blocks_equal_the_whole(x64):
    x1, x2 = inputs(7), inputs(4, seed=1)
    whole, blocks = (fcn_kernel(1, "relu", block_size=size, **SCALES) for size in (None, 3))
    for args in ((x1,), (x1, x2)):
        np.testing.assert_allclose(blocks(*args), whole(*args), rtol=1e-13, atol=1e-14)
    loss = lambda x, kernel: jnp.sum(kernel(x, x2)[1] ** 2)  # noqa: E731
    gradients = [jax.jit(jax.grad(loss), static_argnums=1)(x1, kernel) for kernel in (whole, blocks)]
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=1e-11)


@pytest.mark.as_compiled
def test_blocks_bound_the_memory():
    x = jax.ShapeDtypeStruct((10_000, 3), jnp.float32)

    def temporaries(block_size):
        kernel = fcn_kernel(1, "relu", block_size=block_size, **SCALES)
        loss = jax.grad(lambda x: jnp.sum(kernel(x)[1]))
        compiled = [jax.jit(function).lower(x).compile() for function in (kernel, loss)]
        return [executable.memory_analysis().temp_size_in_bytes for executable in compiled]

    matrix = 4 * 10_000**2
    forward, backward = temporaries(50)
    assert forward < 0.5 * matrix
    assert backward < 3 * matrix  # the two results and a cotangent, no temporaries of the layers
    assert temporaries(None)[1] > 3.5 * matrix


@parametrize("dtype", [np.float32, np.float64], rest="slow")
@parametrize("activation", ACTIVATIONS, rest="slow")
def test_derivatives_at_equal_and_zero_inputs_are_finite(x64, activation, dtype):
    x = inputs(4, dtype=dtype)
    x[1], x[2] = x[0], 0
    copy = jnp.asarray(x.copy())

    def totals(x1, scales, x2):
        return jnp.stack([jnp.sum(kernel) for kernel in fcn_kernel(1, activation, **scales)(x1, x2)])

    derivatives = jax.jit(jax.jacrev(totals, argnums=(0, 1)))
    for scales in (SCALES, SCALES | {"b_std": 0.0}, SCALES | {"w_std": 0.0, "b_std": 0.0}):
        for x2 in (None, copy, -copy):
            for leaf in jax.tree.leaves(derivatives(jnp.asarray(x), scales, x2)):
                assert np.all(np.isfinite(leaf))
                assert np.max(np.abs(leaf)) < 1e3  # a missed 0/0 shows as a huge number as often as a NaN


@parametrize("activation", ["erf", "gelu", "relu"], rest="slow")
def test_second_derivatives_at_equal_inputs(x64, activation):
    x, direction, step = jnp.asarray(inputs(4)), jnp.asarray(inputs(4, seed=2)), 1e-5
    kernel = fcn_kernel(1, activation, **SCALES)
    along = lambda s: jnp.stack([*kernel(x + s * direction), *kernel(x + s * direction, x)])  # noqa: E731
    first = jax.jit(jax.jacfwd(along))
    second = jax.jit(jax.jacfwd(jax.jacfwd(along)))(0.0)
    assert np.all(np.isfinite(second))
    if activation != "relu":  # which has none
        np.testing.assert_allclose(second, (first(step) - first(-step)) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.as_compiled
@parametrize("activation", ACTIVATIONS, rest="slow")
def test_derivatives_at_equal_inputs_are_right(x64, activation):
    x, direction, step = jnp.asarray(inputs(3)), jnp.asarray(inputs(3, seed=2)), 1e-5
    smooth = slice(0, 1) if activation == "relu" else slice(0, 2)  # its tangent kernel has a cusp: see below

    @jax.jit
    def along(s):
        kernel = fcn_kernel(2, activation, **SCALES)
        both, one = kernel(x + s * direction), kernel(x + s * direction, x)[smooth]
        scaled = fcn_kernel(2, activation, w_std=1.2 + s, b_std=0.6 + 0.5 * s, readout_w_std=1.2 + s)(x)
        return jnp.stack([jnp.diagonal(matrix) for matrix in (*both, *one)]), jnp.stack(scaled)

    for actual, up, down in zip(jax.jit(jax.jacfwd(along))(0.0), along(step), along(-step), strict=True):
        np.testing.assert_allclose(actual, (up - down) / (2 * step), rtol=2e-5, atol=1e-8)


def test_the_cusp_of_the_relu_has_the_mean_slope(x64):
    x, direction, step = inputs(1), inputs(1, seed=2), 1e-5
    kernel = fcn_kernel(1, "relu", w_std=1.0, b_std=0.0)
    sides = [kernel(x + s * direction, x)[1][0, 0] for s in (step, -step)]
    expected = (sides[0] - sides[1]) / (2 * step)
    actual = jax.jvp(lambda at: kernel(at, x)[1][0, 0], (jnp.asarray(x),), (jnp.asarray(direction),))[1]
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


@pytest.mark.as_compiled
@parametrize("activation", ACTIVATIONS, rest="slow")
@parametrize("scale", [1e-3, 1.0, 1e3], rest="slow")
def test_float32_is_accurate_for_small_and_large_inputs(x64, activation, scale):
    x = scale * inputs(20, dim=200)
    kernel = fcn_kernel(3, activation, w_std=1.5, b_std=0.1)
    exact, single = kernel(x), kernel(x.astype(np.float32))
    for matrix, rounded in zip(exact, single, strict=True):
        assert rounded.dtype == jnp.float32
        np.testing.assert_allclose(rounded, matrix, rtol=2e-4)
        # of large variances; were the diagonal rounded as the rest is, it would be off by percents
        np.testing.assert_allclose(np.diag(rounded), np.diag(matrix), rtol=1e-5)


@pytest.mark.as_compiled
@parametrize("activation", ["erf", "gelu"], rest="slow")
@parametrize("scale", [101.0, 4001.0], rest="slow")
def test_float32_keeps_its_digits_for_opposite_inputs(x64, activation, scale):
    x = scale * np.array([[1.0], [-1.0]])  # the inner products are exact in float32, but 0.01 added to them is lost
    kernel = fcn_kernel(1, activation, w_std=1.0, b_std=0.1)
    exact, single = kernel(x), kernel(x.astype(np.float32))
    np.testing.assert_allclose(single[1], exact[1], rtol=1e-5)
    size = np.sqrt(np.diag(exact[0]))  # beside which the GELU's covariance of opposite inputs vanishes
    np.testing.assert_allclose(single[0] / np.outer(size, size), exact[0] / np.outer(size, size), atol=1e-6)


@pytest.mark.as_compiled
@parametrize("activation", ACTIVATIONS, rest="slow")
def test_float32_holds_huge_inputs(x64, activation):
    """Products of two variances, here of 1e20, are beyond the range."""
    x = 1e10 * inputs(4)
    kernel = fcn_kernel(2, activation, w_std=1.0, b_std=0.1)
    for matrix, rounded in zip(kernel(x), kernel(x.astype(np.float32)), strict=True):
        np.testing.assert_allclose(rounded, matrix, rtol=1e-4)


@parametrize("activation", ["erf", "gelu"], rest="slow")
def test_second_derivatives_at_orthogonal_inputs_are_right(x64, activation):
    """Where the covariance is 0, and its size has a kink."""
    x1, x2, direction, step = jnp.eye(2)[:1], jnp.eye(2)[1:], jnp.array([[0.3, -0.7]]), 1e-5
    kernel = fcn_kernel(1, activation, w_std=1.3, b_std=0.0)
    first = jax.jit(jax.jacfwd(lambda s: jnp.stack(kernel(x1 + s * direction, x2))))
    second = jax.jit(jax.jacfwd(first))(0.0)
    np.testing.assert_allclose(second, (first(step) - first(-step)) / (2 * step), rtol=1e-6)


def test_works_under_jit_and_vmap(x64):
    x = jnp.asarray(inputs(6).reshape(2, 3, 3))
    scales = jnp.array([0.5, 1.5])
    kernels = lambda x, w_std: fcn_kernel(2, "gelu", w_std=w_std, b_std=0.3)(x)  # noqa: E731
    expected = [jnp.stack(kernels(*pair)) for pair in zip(x, scales, strict=True)]
    actual = jnp.stack(jax.jit(jax.vmap(kernels))(x, scales), axis=1)
    np.testing.assert_allclose(actual, jnp.stack(expected), rtol=1e-12)


def test_the_inputs_set_the_dtype(x64):
    kernel = fcn_kernel(1, "relu", w_std=jnp.array(1.0, jnp.float64), b_std=np.float64(0.1))
    assert kernel(inputs(dtype=np.float32))[0].dtype == jnp.float32
    assert kernel(np.arange(6).reshape(2, 3))[0].dtype == jnp.float64


@parametrize("integer", [np.int64, np.uint8, jnp.int32], rest="slow")
def test_integers_of_any_kind_count_layers_and_rows(integer):
    expected = fcn_kernel(2, "erf", w_std=[1.0, 2.0], b_std=0.1, block_size=2)(inputs())
    actual = fcn_kernel(integer(2), "erf", w_std=[1.0, 2.0], b_std=0.1, block_size=integer(2))(inputs())
    np.testing.assert_array_equal(actual, expected)


@parametrize("activation", ["erf", "gelu"], rest="slow")
def test_the_program_does_not_grow_with_the_depth(activation):
    def square_roots(depth):
        kernel = fcn_kernel(depth, activation, w_std=1.3, b_std=0.4)
        return jax.jit(kernel).lower(jnp.ones((4, 3))).as_text().count("sqrt")

    assert square_roots(40) == square_roots(10) > 0


def test_a_deep_network_is_the_composition_of_its_layers(x64):
    """Where layers run in a loop: by blocks and whole, with scales by layer, against one layer at a time."""
    x, w_std, b_std = inputs(4), np.linspace(0.8, 1.4, 7), np.linspace(0.1, 0.7, 7)
    norms, product = np.mean(x**2, axis=1), x @ x.T / 3
    slope = ntk = 0.0
    for w, b in zip([*w_std, 0.7], [*b_std, 0.3], strict=True):
        nngp, variances = w**2 * product + b**2, w**2 * norms + b**2
        ntk = nngp + w**2 * slope * ntk
        root = np.sqrt((1 + 2 * variances)[:, None] * (1 + 2 * variances))
        product = (2 / np.pi) * np.arcsin(2 * nngp / root)
        norms = (2 / np.pi) * np.arcsin(2 * variances / (1 + 2 * variances))
        slope = 4 / np.pi / np.sqrt(root**2 - 4 * nngp**2)
    scales = {"w_std": w_std, "b_std": b_std, "readout_w_std": 0.7, "readout_b_std": 0.3}
    for options in ({}, {"block_size": 3}):
        kernel = fcn_kernel(7, "erf", **scales, **options)
        np.testing.assert_allclose(kernel(x), (nngp, ntk), rtol=1e-10)
        np.testing.assert_allclose(kernel(x, x.copy()), (nngp, ntk), rtol=1e-10)


@pytest.mark.slow
def test_derivatives_of_a_deep_network_are_right(x64):
    x, direction, step = jnp.asarray(inputs(3)), jnp.asarray(inputs(3, seed=2)), 1e-5

    @jax.jit
    def along(s):
        kernel = fcn_kernel(6, "erf", w_std=1.2 + s, b_std=0.6 + 0.5 * s, readout_w_std=1.2 + s)
        return jnp.stack([*kernel(x + s * direction), *kernel(x + s * direction, x)])

    expected = (along(step) - along(-step)) / (2 * step)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(along))(0.0), expected, rtol=2e-5, atol=1e-8)
    np.testing.assert_allclose(jax.jit(jax.jacrev(along))(0.0), expected, rtol=2e-5, atol=1e-8)


def test_a_negative_scale_under_jit_gives_nan_and_not_its_mirror_image():
    def nngp(scale, name):
        return fcn_kernel(1, "erf", **(SCALES | {name: scale}))(jnp.ones((2, 3)))[0]

    with jax.debug_nans(False):
        for name in SCALES:
            assert jnp.isnan(jax.jit(nngp, static_argnums=1)(-0.5, name)).all()


@parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32], rest="slow")
def test_inputs_of_any_type_will_do(dtype):
    x = jnp.arange(6, dtype=dtype).reshape(2, 3)
    nngp, _ = fcn_kernel(1, "erf", w_std=1.0, b_std=0.1)(x)
    assert nngp.dtype == jnp.float32
    np.testing.assert_array_equal(nngp, fcn_kernel(1, "erf", w_std=1.0, b_std=0.1)([[0, 1, 2], [3, 4, 5]])[0])
