"""What networks, models of networks and their scales refuse, and what users are told."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pandas
import pytest
from flax import linen, nnx
from numpyro.handlers import seed, trace

from numpyro_wide.nn import (
    CNN,
    FCN,
    AdditiveNetwork,
    NoiseNetwork,
    NTKConv,
    NTKDense,
    WideResNet,
    bnn,
    by_row_blocks,
    network_parameters,
    random_network,
)
from numpyro_wide.wide_limit import fcn_kernel
from tests.mistakes import Case

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 3)).astype("f")
Y = (np.sin(2 * X[:, :2]) + 0.4).astype("f")
NETWORK = FCN(2, 9, "erf", b_std=0.3, readout_b_std=0.2)
NOISE = 0.3


class WithBatchNorm(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=True)(x)


def run(model, *args):
    return trace(seed(model, jax.random.key(0))).get_trace(*args)


CASES = [
    Case(
        lambda: jax.eval_shape(FCN(2, 3, "swish").init, jax.random.key(0), np.ones((2, 3))),
        "activation must be one of 'erf', 'gelu'.* but got 'swish'",
    ),
    Case(
        lambda: jax.eval_shape(FCN(-1, 3).init, jax.random.key(0), np.ones((2, 3))),
        "depth must be a whole number of at least 0, but got -1",
    ),
    Case(
        lambda: jax.eval_shape(FCN(1, 0).init, jax.random.key(0), np.ones((2, 3))),
        "width must be a whole number of at least 1, but got 0",
    ),
    Case(
        lambda: jax.eval_shape(FCN(2, 3, w_std=(1.0,) * 3).init, jax.random.key(0), np.ones((2, 3))),
        r"w_std must be a number or have shape \(2,\)",
    ),
    Case(
        lambda: jax.eval_shape(FCN(2, 3, w_std=-1.0).init, jax.random.key(0), np.ones((2, 3))),
        "w_std must not be negative",
    ),
    Case(
        lambda: jax.eval_shape(FCN(2, 3, b_std=1.5).init, jax.random.key(0), np.ones((2, 3))),
        "b_std must be at least 0 and below 1",
    ),
    Case(
        lambda: jax.eval_shape(NTKDense(2.5).init, jax.random.key(0), np.ones((2, 3))),
        "features must be a whole number",
    ),
    Case(
        lambda: jax.eval_shape(NTKConv(2, padding="ZERO").init, jax.random.key(0), np.ones((1, 4, 4, 1))),
        "padding must be one of 'CIRCULAR', 'SAME', 'VALID'",
    ),
    Case(
        lambda: jax.eval_shape(CNN(1, 2).init, jax.random.key(0), np.ones((4, 28, 28))),
        r"images \(n, height, width, channels\), but got shape \(4, 28, 28\)",
    ),
    Case(
        lambda: jax.eval_shape(CNN(1, 2, pooling="max").init, jax.random.key(0), np.ones((1, 4, 4, 1))),
        "pooling must be one of 'flatten', 'mean', but got 'max'",
    ),
    Case(
        lambda: jax.eval_shape(WideResNet(1, 2, c=-1.0).init, jax.random.key(0), np.ones((1, 4, 4, 1))),
        "c must not be negative",
    ),
    Case(
        lambda: jax.eval_shape(WideResNet(0, 2).init, jax.random.key(0), np.ones((1, 4, 4, 1))),
        "num_blocks must be a whole number",
    ),
    Case(lambda: FCN(1, 4, readout_w_std=np.ones(4)).init(jax.random.key(0), X), "readout_w_std must be a number"),
    Case(lambda: FCN(1, 4, w_std=dist.LogNormal(0, 1)).init(jax.random.key(0), X), "give its prior to bnn", TypeError),
    Case(lambda: fcn_kernel(1, "erf", w_std=1.0, b_std=0.0, input_scale=np.ones(2))(X), "input_scale"),
    Case(lambda: fcn_kernel(1, "erf", w_std=1.0, b_std=0.0, input_scale=-1.0)(X), "input_scale"),
    Case(
        lambda: random_network("net", "FCN", X),
        "module must be a flax.linen or flax.nnx module, but is a str",
        TypeError,
    ),
    Case(lambda: random_network("net", WithBatchNorm(), X), "has state besides its parameters, batch_stats"),
    Case(
        lambda: random_network("net", nnx.BatchNorm(3, rngs=nnx.Rngs(0)), X),
        "BatchNorm has state besides its parameters, BatchStat",
    ),
    Case(
        lambda: network_parameters({"hidden.kernel": jnp.ones((3, 2))}, "net", linen.Dense(2), X),
        "name names the site 'net.bias', 'net.kernel', .* its sites are 'hidden.kernel'. Pass the name",
    ),
    Case(
        lambda: bnn(NETWORK, 2, NOISE)(pandas.DataFrame(X), Y),
        r"must be arrays, but x is a DataFrame; pass its numbers, .to_numpy\(\)",
        TypeError,
    ),
    Case(lambda: bnn(NETWORK, 0, NOISE), "num_outputs must be a whole number of at least 1"),
    Case(lambda: bnn(NETWORK, 2, 0.0), "noise must be positive"),
    Case(lambda: bnn(NETWORK, 2, NOISE, readout_scale=-1), "readout_scale must be positive"),
    Case(lambda: bnn(NETWORK, None, NOISE)(X, Y), r"y must have shape \(12,\) .* num_outputs=None"),
    Case(lambda: bnn(NETWORK, 2, np.inf), "noise must be finite"),
    Case(lambda: bnn(NETWORK, 2, dist.Uniform(-1, 1)), "prior of noise must be one of positive numbers"),
    Case(lambda: bnn(NETWORK, 2, NOISE)(X + 1j, Y), "must hold real numbers, .* complex", TypeError),
    Case(
        lambda: bnn(NETWORK, 2, NOISE)(X / 0, Y),
        "x must be finite, but 36 of its entries are infinite, the first in row 0",
    ),
    Case(
        lambda: bnn(NETWORK, 2, NOISE, block_size=3)(X[:0], Y[:0]),
        r"x must have a row and a column at least, but has shape \(0, ",
    ),
    Case(lambda: bnn(NETWORK, 2, NOISE)(X, np.full_like(Y, np.nan)), "y must not contain NaN"),
    Case(lambda: bnn(NTKConv(2), 2, NOISE)(X[:, None, None]), r"must be a matrix \(n, d\)"),
    Case(lambda: run(bnn(FCN(2, 7), None, 0.1, scales={"depth": 3}), X, Y[:, 0]), "scales must be among 'w_std'"),
    Case(
        lambda: run(bnn(FCN(2, 7), None, 0.1, scales={"w_std": dist.Normal(0, 1)}), X, Y[:, 0]),
        "prior of w_std must be one of",
    ),
    Case(lambda: run(bnn(FCN(2, 7), None, 0.1, scales={"w_std": dist.Gamma(2.0, 1.0)}), X, Y[:, 0]), "but got 'Gamma'"),
    Case(lambda: run(bnn(FCN(2, 7), None, 0.1, scales={"b_std": dist.HalfNormal(1.0)}), X, Y[:, 0]), "give w_std too"),
    Case(
        lambda: run(bnn(FCN(2, 7), None, 0.1, scales={"w_std": dist.LogNormal(0, 1).expand([3])}), X, Y[:, 0]),
        "must be a number or have shape",
    ),
    Case(lambda: run(bnn(FCN(2, 7), None, 0.1, scales={"input_scale": np.ones(2)}), X, Y[:, 0]), "one for each column"),
    Case(lambda: run(bnn(FCN(2, 7), None, 0.1, scales={"w_std": np.inf}), X, Y[:, 0]), "w_std must be finite"),
    Case(lambda: run(bnn(FCN(2, 7), None, 0.1, scales={"w_std": -1.0}), X, Y[:, 0]), "w_std must not be negative"),
    Case(
        lambda: run(bnn(FCN(2, 7), None, 0.1, scales={"w_std": dist.Uniform(-1, 1)}), X, Y[:, 0]),
        "prior of w_std must be one of positive numbers, but is uniform from -1",
    ),
    Case(lambda: bnn(FCN(2, 7), None, 0.1, scales={"w_std": "1"}), "w_std must hold real numbers", TypeError),
    Case(lambda: bnn(FCN(2, 7), None, "0.1"), "noise must hold real numbers", TypeError),
    Case(
        lambda: bnn(FCN(2, 7), None, 0.1, readout_scale=dist.HalfNormal(1.0)),
        "readout_scale must hold real numbers",
        TypeError,
    ),
    Case(lambda: bnn(jnp.tanh, None, 0.1, scales={"w_std": 1.0}), "FCN, CNN, WideResNet or AdditiveNetwork", TypeError),
    Case(lambda: AdditiveNetwork(4).terms(3), "order must be at most the number of columns, 3, but is 4"),
    Case(lambda: AdditiveNetwork(which=[(0, 5)]).terms(3), r"which must list different effects.* from 0 to 2"),
    Case(lambda: AdditiveNetwork(1, which=[(0, 1)]).terms(3), "raise order, 1"),
    Case(
        lambda: jax.eval_shape(AdditiveNetwork(law=np.ones((4, 2))).init, jax.random.key(0), X),
        r"law must be .*rows of inputs with 3 columns",
    ),
    Case(
        lambda: jax.eval_shape(AdditiveNetwork(relevance=np.ones(2)).init, jax.random.key(0), X),
        r"relevance must be a number or have shape \(3,\)",
    ),
    Case(
        lambda: bnn(AdditiveNetwork(), None, 0.1, scales={"readout_w_std": 1.0}),
        "scales must be among 'w_std'.* of AdditiveNetwork",
    ),
    Case(lambda: run(bnn(FCN(1, 4), None, np.full((6, 1), 0.5)), X[:6]), "noise must broadcast"),
    Case(lambda: run(bnn(FCN(1, 4), 1, np.full(3, 0.5)), X[:6]), "noise must broadcast"),
    Case(lambda: run(bnn(FCN(1, 4), None, np.full(4, 0.5)), X[:6]), "noise must broadcast"),
    Case(lambda: NoiseNetwork(-0.1), "level of the noise must be positive"),
    Case(lambda: NoiseNetwork("fit"), "level of the noise must hold real numbers", TypeError),
    Case(lambda: bnn(FCN(1, 4), None, NoiseNetwork), "noise must hold real numbers", TypeError),
    Case(lambda: NoiseNetwork(dist.HalfNormal(np.ones(2))), r"level of the noise must be one number, .* shape \(2,\)"),
    Case(lambda: NoiseNetwork(0.1, dist.Normal()), "the prior of amplitude of the noise must be one of"),
    Case(lambda: NoiseNetwork(0.1, depth=-1)(X), "depth must be a whole number"),
    Case(lambda: NoiseNetwork(0.1, activation="sine")(X), "activation must be one of"),
    Case(lambda: by_row_blocks(jnp.tanh, 0), "block_size must be a whole number of at least 1"),
    Case(lambda: by_row_blocks(jnp.tanh, "all"), "block_size must be a whole number of at least 1, but got 'all'"),
    Case(lambda: bnn(NETWORK, 2, 0.3, block_size=2.5), "block_size must be a whole number"),
    Case(lambda: bnn(jnp.tanh, 2, 0.3, block_size=5), "use by_row_blocks inside of a function of your own", TypeError),
]


@pytest.mark.fault("linear_gaussian/_problem.py", "return np.broadcast_shapes(shape, target) == target", "return True")
@pytest.mark.fault("nn/_models.py", "not np.all(np.asarray(inner.low) >= 0)", "not np.all(np.asarray(inner.low) >= -1)")
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("case", CASES, ids=Case.id_of)
def test_mistakes(case):
    with seed(rng_seed=0):
        case.check()


class Unscaled(linen.Module):
    factor: float = 1.0

    @linen.compact
    def __call__(self, x):
        hidden = linen.relu(linen.Dense(60)(linen.relu(linen.Dense(60)(x))))
        return self.factor * hidden


@pytest.mark.fault("nn/_models.py", "<= variance <= LARGEST_VARIANCE", "<= variance <= 1e3 * LARGEST_VARIANCE")
@pytest.mark.parametrize("factor", [1.0, 1e-5])
def test_a_prior_far_from_the_targets_is_warned_of(factor):
    model = bnn(Unscaled(factor), None, NOISE)
    with pytest.warns(UserWarning, match="prior variance of the network's output .* far from the one"):
        features = run(model, X)["features"]["value"]
    variance = np.mean(np.sum(np.square(features), axis=1))
    assert variance > 1e3 or variance < 1e-4
    run(bnn(Unscaled(factor * variance**-0.5), None, NOISE), X)  # one, which is nothing to warn of
    run(bnn(FCN(1, 9), None, NOISE), np.zeros((3, 2)))  # zero at the origin, whatever the scales
    jax.eval_shape(lambda x: run(model, x)["y"]["value"], X)  # numbers that are not known


@pytest.mark.fault("nn/_models.py", "size > LARGEST_VARIANCE", "size > 1e9 * LARGEST_VARIANCE")
@pytest.mark.parametrize(("size", "noise", "is_far"), [(100.0, 0.1, True), (100.0, 20.0, False), (1.0, 1e-3, False)])
def test_targets_far_from_the_prior_are_warned_of(size, noise, is_far):
    model, targets = bnn(FCN(1, 200, b_std=0.5), None, noise), size * np.ones(len(X), "f")
    message = "mean square of the targets is 1e.04, far above .* Standardise the targets"
    with pytest.warns(UserWarning, match=message) if is_far else nullcontext():
        run(model, X, targets)
    jax.eval_shape(lambda y: run(model, X, y)["features"]["value"], targets)  # numbers that are not known
    run(bnn(FCN(1, 200), None, noise, scales={"w_std": dist.LogNormal(0, 1)}), X, targets)  # scales that are latent


def test_a_last_layer_left_in_is_warned_of():
    last = linen.Sequential([NTKDense(20), linen.tanh, NTKDense(1)])
    for block_size in (None, 5):
        with pytest.warns(UserWarning, match="a single feature, .* leave out a module's last layer"):
            run(bnn(last, None, 0.1, block_size=block_size), X, np.ones(len(X), "f"))
    run(bnn(lambda x: x[:, :1], None, 0.1), X, np.ones(len(X), "f"))  # a function may mean it
