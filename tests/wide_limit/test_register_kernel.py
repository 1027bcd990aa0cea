"""Rules of a user's own, refusals of networks without one, and the progress bar of long work."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from numpyro_wide import _checks, wide_limit
from numpyro_wide.nn import CNN, NTKConv
from numpyro_wide.wide_limit import _layer_kernels as _rules

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
    monkeypatch.setattr(_rules, "_RULES", {})


@pytest.mark.as_compiled
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


@pytest.mark.as_compiled
def test_long_work_shows_a_bar(bars, monkeypatch, capsys):
    kernel = wide_limit.kernel(CNN(1, 1, "relu"), block_size=2)
    kernel(X)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(_checks, "_PATIENCE", 0)
    kernel(X)
    assert "rows of blocks" in (shown := capsys.readouterr().err) and "0/3" in shown
