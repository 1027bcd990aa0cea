"""Models as they are at the call that they are given to, and predictives that refuse one that has changed."""

import logging
import threading
import types
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import mask, scale
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density

from numpyro_wide import ReadoutPredictive, collapse_readout, guide_draws, repriorise, wide_limit_draws
from numpyro_wide._compile import Recent, TracedProgram
from numpyro_wide.readout import _predictive as _prediction_runs
from tests.compilations import compilations

SITES = {"readout": "w", "features": "features"}
KEY = jax.random.key(0)
X = np.linspace(-1, 1, 8, dtype="f")[:, None]
Y = np.sin(3 * X[:, 0])
WIDTH, NOISE = 4, 0.3


def link(values):
    return values


def body(x, y, width, noise):
    hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, width]).to_event(2))
    features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / width**0.5)
    w = numpyro.sample("w", dist.Normal(0, 1).expand([width]).to_event(1))
    numpyro.sample("y", dist.Normal(link(features @ w), noise).to_event(1), obs=y)


def model(x, y=None):
    body(x, y, WIDTH, NOISE)


def by_configuration(x, y=None, cfg=None):
    body(x, y, 4, cfg.noise)


COLLAPSED = collapse_readout(model, observed="y", **SITES)
REPRIORISED = repriorise(model, targets="y", noise_scale=0.3, **SITES)


@pytest.mark.parametrize("wrapped", [COLLAPSED, REPRIORISED], ids=["collapsed", "repriorised"])
def test_draws_follow_a_global(monkeypatch, wrapped):
    shapes = []
    for width in (3, 6):
        monkeypatch.setitem(globals(), "WIDTH", width)
        guide = AutoNormal(wrapped)
        params = SVI(wrapped, guide, numpyro.optim.Adam(0.1), Trace_ELBO()).run(KEY, 1, X, Y, progress_bar=False).params
        limit = wide_limit_draws(KEY, wrapped, 5, X, Y)
        draws = guide_draws(KEY, wrapped, guide, params, 5, X, Y)
        shapes.append((limit["w"].shape, draws["w"].shape))
    assert shapes == [((5, 3), (5, 3)), ((5, 6), (5, 6))]


def test_the_limit_follows_an_attribute_of_an_argument():
    wrapped = collapse_readout(by_configuration, observed="y", **SITES)
    cfg = SimpleNamespace(noise=0.01)
    draws = []
    for noise in (0.01, 10.0, 0.01):
        cfg.noise = noise
        draws.append(wide_limit_draws(KEY, wrapped, 5, X, Y, cfg=cfg)["w"])
    np.testing.assert_array_equal(draws[0], draws[2])
    assert np.abs(draws[0] - draws[1]).max() > 0.1


def test_a_model_made_anew_finds_its_program():
    def make():
        def network(x, y=None):
            body(x, y, 5, 0.3)

        return collapse_readout(network, observed="y", **SITES)

    first = wide_limit_draws(KEY, make(), 5, X, Y)
    with compilations() as compiled:
        second = wide_limit_draws(KEY, make(), 5, X, -Y)
    assert compiled == [] and not np.allclose(first["w"], second["w"])


@pytest.mark.parametrize("form", ["collapsed", "repriorised"])
def test_new_predictives_share_a_trace_where_the_model_does_the_same(form, monkeypatch):
    shifts = {"first": np.linspace(0, 1, 8, dtype="f"), "second": np.linspace(1, 0, 8, dtype="f")}

    def shifted(x, y=None):
        body(x, y, WIDTH, NOISE + shifts["first"][: len(x)])

    wrapped = {
        "collapsed": collapse_readout(shifted, observed="y", **SITES),
        "repriorised": repriorise(shifted, targets="y", noise_scale=0.3, **SITES),
    }[form]
    draws = {"hidden": jax.random.normal(KEY, (5, 1, 4))}
    draws |= {"w_base": jnp.zeros((5, 4))} if form == "repriorised" else {}
    traced = []

    class Counted(TracedProgram):
        def __init__(self, *args):
            traced.append(args)
            super().__init__(*args)

    monkeypatch.setattr(_prediction_runs, "TracedProgram", Counted)

    def predictions():
        return np.asarray(ReadoutPredictive(wrapped, draws, (X, Y))(KEY, X[:3])["y"])

    def known_anew():
        monkeypatch.setattr(_prediction_runs, "_TRACED", Recent(32))
        return predictions()

    before = known_anew()
    np.testing.assert_array_equal(predictions(), before)
    assert len(traced) == 1
    for change in (
        lambda: monkeypatch.setitem(globals(), "NOISE", 0.6),
        lambda: monkeypatch.setitem(globals(), "link", lambda values: values + 1.0),
        lambda: monkeypatch.setitem(shifts, "first", shifts["second"]),
    ):
        change()
        after = predictions()
        assert np.abs(after - before).max() > 1e-3
        np.testing.assert_array_equal(known_anew(), after)
        before = after


def test_the_check_is_made_for_every_program(monkeypatch):
    """After the mean has become a nonlinear function of the readout, the wrapper that was checked before refuses."""
    wrapped = collapse_readout(model, observed="y", **SITES)
    values = {"hidden": jnp.ones((1, 4))}
    before, _ = log_density(wrapped, (X, Y), {}, values)
    monkeypatch.setitem(globals(), "link", jnp.tanh)
    with pytest.raises(ValueError, match="must be features @ readout plus terms without the readout"):
        log_density(wrapped, (X, Y), {}, values)
    monkeypatch.setitem(globals(), "link", lambda values: values + 1.0)
    moved, _ = log_density(wrapped, (X, Y), {}, values)
    assert abs(moved - before) > 0.1


class Owner:
    shared = 0.3

    def __init__(self):
        self._noise = 0.3

    def model(self, x, y=None):
        body(x, y, 4, self._noise)

    def of_class(self, x, y=None):
        body(x, y, 4, self.shared)


class Called:
    def __call__(self, x, y=None):
        body(x, y, 4, self.noise())

    def noise(self):
        return NOISE


class Heir(Called):
    pass


def changes():
    """Models and how each changes: by name, a model, its arguments of the fit, what changes it, what is said of it."""
    owner, cfg, box = Owner(), SimpleNamespace(noise=0.3), {"noise": 0.3}
    shift, large = np.zeros(8, "f"), np.zeros(2**19, "f")
    noise = 0.3

    def closure(x, y=None):
        body(x, y, 4, noise)

    def change_closure():
        nonlocal noise
        noise = 0.5

    def default(x, y=None, noise=0.3):
        body(x, y, 4, noise)

    def of_box(x, y=None):
        body(x, y, 4, box["noise"])

    def of_array(x, y=None):
        body(x, None if y is None else y + shift, 4, 0.3)

    def of_large_array(x, y=None):
        body(x, None if y is None else y + jnp.asarray(large)[:8], 4, 0.3)

    def with_attribute(x, y=None):
        body(x, y, 4, with_attribute.noise)

    with_attribute.noise = 0.3
    settings = types.ModuleType("settings")
    settings.noise = 0.3

    def of_module(x, y=None):
        body(x, y, 4, settings.noise)

    def change_array():
        shift[:] = 2.0

    return {
        "global": (model, (X, Y), lambda: globals().update(NOISE=0.5), "the global 'NOISE'.* was 0.3 and is 0.5"),
        "helper": (model, (X, Y), lambda: globals().update(link=jnp.tanh), "the global 'link'.* is another one"),
        "closure": (closure, (X, Y), change_closure, "the variable 'noise' around it .* was 0.3 and is 0.5"),
        "default": (
            default,
            (X, Y),
            lambda: setattr(default, "__defaults__", (None, 0.5)),
            "default 1 .* was 0.3 and is 0.5",
        ),
        "self": (
            owner.model,
            (X, Y),
            lambda: setattr(owner, "_noise", 0.5),
            "the attribute '_noise' .* was 0.3 and is",
        ),
        "argument": (
            by_configuration,
            (X, Y, cfg),
            lambda: setattr(cfg, "noise", 0.5),
            "the attribute 'noise'.* was 0.3 and is 0.5",
        ),
        "dictionary": (of_box, (X, Y), lambda: box.update(noise=0.5), "the entry 'noise' of .* was 0.3 and is 0.5"),
        "large array": (
            of_large_array,
            (X, Y),
            lambda: large.__setitem__(slice(None), 2.0),
            "the variable 'large' around it .* is another one",
        ),
        "class": (
            owner.of_class,
            (X, Y),
            lambda: setattr(Owner, "shared", 0.5),
            "the attribute 'shared' of the class 'Owner' was 0.3 and is 0.5",
        ),
        "inherited call": (
            Heir(),
            (X, Y),
            lambda: globals().update(NOISE=0.5),
            "the global 'NOISE'.* was 0.3 and is 0.5",
        ),
        "attribute of a function": (
            with_attribute,
            (X, Y),
            lambda: setattr(with_attribute, "noise", 0.5),
            "the attribute 'noise'.* was 0.3 and is 0.5",
        ),
        "module": (
            of_module,
            (X, Y),
            lambda: setattr(settings, "noise", 0.5),
            "the attribute 'noise' of .* was 0.3 and is 0.5",
        ),
        "array": (of_array, (X, Y), change_array, "the variable 'shift' around it .* is another one"),
    }


@pytest.mark.parametrize("case", list(changes()))
@pytest.mark.parametrize("form", ["collapsed", "repriorised"])
def test_a_predictive_refuses_a_model_that_has_changed(case, form, monkeypatch):
    fn, args, change, message = changes()[case]
    monkeypatch.setitem(globals(), "NOISE", 0.3)
    monkeypatch.setitem(globals(), "link", link)
    monkeypatch.setattr(Owner, "shared", 0.3)
    wrapped = (
        collapse_readout(fn, observed="y", **SITES)
        if form == "collapsed"
        else repriorise(fn, targets="y", noise_scale=0.3, **SITES)
    )
    draws = {"hidden": np.ones((2, 1, 4), "f")}
    predictive = ReadoutPredictive(wrapped, draws, args)
    test = (X[:3], None, *args[2:])
    before = predictive(KEY, *test)
    np.testing.assert_array_equal(predictive(KEY, *test)["mean"], before["mean"])
    change()
    for ask in (
        lambda: predictive(KEY, *test),
        lambda: predictive.readout(KEY),
        lambda: predictive.log_density(X[:3], Y[:3], *args[2:]),
        lambda: predictive.summary(*test),
    ):
        with pytest.raises(
            ValueError, match=f"the model has changed since this ReadoutPredictive was made: .*{message}"
        ):
            ask()


class Unreadable(dict):
    def items(self):
        raise OSError("closed")


def test_what_is_no_change_of_the_model_is_not_refused(monkeypatch):
    """Attributes named as a global is, what the model writes itself, loggers, equal values anew, unreadable objects."""
    counts, log, proxy = {"calls": 0}, logging.getLogger("numpyro_wide.tests"), Unreadable()
    nothing, ones = float("nan"), [jnp.ones(8)]

    def busy(x, y=None):
        counts["calls"] += 1
        log.debug("%s %s", x.shape, proxy)
        shift = jax.random.key(0).size - 1 + 0 * ones[0]
        body(x, None if y is None else y + shift + (0 if nothing != nothing else 1), 4, 0.3)

    monkeypatch.setitem(globals(), "key", 1)
    monkeypatch.setitem(globals(), "shape", 1)
    predictive = ReadoutPredictive(
        collapse_readout(busy, observed="y", **SITES), {"hidden": np.ones((2, 1, 4))}, (X, Y)
    )
    first = predictive(KEY, X)["mean"]
    monkeypatch.setitem(globals(), "key", 2)
    monkeypatch.setitem(globals(), "shape", 2)
    logging.getLogger("numpyro_wide.tests.another").isEnabledFor(37)
    ones[0] = jnp.ones(8)
    counts["calls"] += 1
    np.testing.assert_array_equal(predictive(KEY, X)["mean"], first)
    predictive(KEY, X[:3])


def test_arrays_are_copied():
    x, y = X.copy(), Y.copy()
    draws = {"hidden": np.ones((2, 1, 4), "f")}
    predictive = ReadoutPredictive(COLLAPSED, draws, (x, y))
    before = predictive(KEY, X)["mean"]
    x *= 5
    y *= 5
    draws["hidden"] *= 5
    np.testing.assert_array_equal(predictive(KEY, X)["mean"], before)


@pytest.mark.parametrize("handler", [scale(scale=0.5), mask(mask=np.arange(8) < 4)], ids=["scale", "mask"])
def test_handlers_around_a_collapsed_model_are_refused(handler):
    values = {"hidden": jnp.ones((1, 4))}
    with handler, pytest.raises(ValueError, match="the observed site 'y' is (scaled|masked)"):
        log_density(COLLAPSED, (X, Y), {}, values)
    with mask(mask=False):  # all of it: a prior run
        total, _ = log_density(COLLAPSED, (X, Y), {}, values)
    assert total == 0


def test_first_predictions_from_several_threads():
    """NumPyro's stack of handlers is one for all threads."""
    rng = np.random.default_rng(0)
    draws = [{"hidden": rng.normal(size=(3, 1, width)).astype("f")} for width in (4, 5, 6, 7)]
    made = []
    for draw in draws:
        width = draw["hidden"].shape[-1]
        fn = lambda x, y=None, width=width: body(x, y, width, 0.3)  # noqa: E731
        made.append(ReadoutPredictive(collapse_readout(fn, observed="y", **SITES), draw, (X, Y)))
    found: list = [None] * len(made)

    def predict(index):
        try:
            found[index] = made[index](KEY, X)["mean"]
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=predict, args=(index,)) for index in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, predictive in enumerate(made):
        np.testing.assert_allclose(found[index], predictive(KEY, X)["mean"], rtol=1e-6)
