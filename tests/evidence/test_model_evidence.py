"""The log evidence and its error, against closed forms and quadrature; and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import mask, scale
from numpyro.infer import NUTS
from scipy import stats

from numpyro_wide import model_evidence
from numpyro_wide.evidence import _chains, _methods
from tests.compilations import compilations
from tests.evidence import known
from tests.marks import parametrize

KEY = jax.random.key(0)


def check(found, truth, *, largest_error):
    """Within 4 standard errors, which are not large."""
    assert found.is_trusted
    assert abs(found.log_evidence - truth) < 4 * found.standard_error < 4 * largest_error


@pytest.mark.as_compiled
@pytest.mark.fault("evidence/_chains.py", "density.weight + density.start - reference", "density.weight - reference")
@pytest.mark.fault("evidence/_chains.py", "- beta * density.weight", "- density.weight")
def test_both_methods_on_a_conjugate_model_compiled_once():
    model, args, truth = known.conjugate()
    bridge = model_evidence(KEY, model, *args)
    check(bridge, truth, largest_error=0.02)
    assert bridge.method == "bridge" and bridge.overlap > 0.9
    assert str(bridge).startswith(f"log evidence {bridge.log_evidence:.3f} ± ") and "1 temperature" in str(bridge)
    stones = model_evidence(KEY, model, *args, method="stepping-stone")
    check(stones, truth, largest_error=0.2)
    betas = stones.inverse_temperatures
    assert stones.method == "stepping-stone" and len(betas) > 3 and betas[-1] == 1 and np.all(np.diff(betas) > 0)
    assert 0.3 < stones.overlap < 0.9
    (x, y), key = args, jax.random.key(1)
    with compilations() as again:
        other = model_evidence(key, model, x, y + 1)
        model_evidence(key, model, x, y + 1, method="stepping-stone")
    assert not again
    assert abs(other.log_evidence - bridge.log_evidence) > 1  # of the new data


SMALL = {"num_chains": 4, "num_warmup": 100, "num_samples": 400}
WIDTH = 1


@pytest.mark.fault("_compile.py", "sha256(lowered.as_text().encode()).digest()", "0")
@pytest.mark.slow
def test_programs_are_those_of_a_model_with_the_same_density_and_gradient():
    def compiled(slope, offset=0.0):
        square = jax.custom_jvp(lambda v: v**2 + offset)
        square.defjvp(lambda v, t: (square(v[0]), slope * v[0] * t[0]))

        def model(y):
            mean = numpyro.sample("mean", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(square(mean), 1), obs=y)

        target = _chains.Target(model, (jnp.ones(()),), {})
        positions = _chains.prior_positions(target, jax.random.split(KEY, 2))
        with compilations() as found:
            _chains.start(target, KEY, [1.0], positions, 20)
        return bool(found)

    assert compiled(2.0) and not compiled(2.0)
    assert compiled(3.0) and compiled(2.0, 1.0)


@parametrize("method", ["auto", "stepping-stone"], rest="slow")
@pytest.mark.filterwarnings("ignore:log evidence")
def test_the_prior_is_drawn_once_for_each_purpose_and_no_key_serves_twice(monkeypatch, method):
    model, args, _ = known.conjugate()
    keys, priors = [], []
    for name in ("prior_weights", "start", "gaussian_draws", "resample"):
        of_chains = getattr(_chains, name)

        def recorded(*arguments, of_chains=of_chains, name=name):
            key = arguments[0] if name == "resample" else arguments[1]
            keys.extend(map(tuple, np.atleast_2d(jax.random.key_data(key)).tolist()))
            priors.extend([name] if name == "prior_weights" else [])
            return of_chains(*arguments)

        monkeypatch.setattr(_chains, name, recorded)
    found = model_evidence(KEY, model, *args, method=method, num_chains=8, num_warmup=200, num_samples=400)
    assert len(keys) == len(set(keys))
    assert len(priors) == (1 if found.method == "bridge" else 2)


@pytest.mark.as_compiled
def test_hundreds_of_rows_in_single_precision():
    model, args, truth = known.conjugate(400)
    found = model_evidence(KEY, model, *args, method="bridge")
    assert truth < -250
    check(found, truth, largest_error=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")  # in single precision an acceptance on the edge goes either way
def test_temperatures_that_run_together_are_those_that_run_alone():
    model, args, _ = known.conjugate()
    sizes = {"num_chains": 4, "num_warmup": 20, "num_samples": 100}
    with pytest.warns(RuntimeWarning):
        alone = model_evidence(KEY, model, *args, method="stepping-stone", **sizes)
    with pytest.warns(RuntimeWarning):
        together = model_evidence(KEY, model, *args, method="stepping-stone", batch_size=4, **sizes)
    assert len(alone.inverse_temperatures) % 4  # so that the last group is not full
    np.testing.assert_array_equal(together.inverse_temperatures, alone.inverse_temperatures)
    np.testing.assert_allclose(together.log_evidence, alone.log_evidence, rtol=1e-4)


@pytest.mark.as_compiled
def test_one_unit_by_quadrature():
    model, args, truth = known.one_unit()
    check(model_evidence(KEY, model, *args, method="stepping-stone"), truth, largest_error=0.1)


@pytest.mark.slow
def test_repriorised_classes_with_a_constrained_site_by_quadrature():
    model, args, truth = known.classes()
    check(model_evidence(KEY, model, *args, method="stepping-stone"), truth, largest_error=0.1)


# Of 200 repetitions the intervals of 1.96 standard errors hold 95, 95.5, 92.5 and 95.5 %: conjugate by either method,
# one unit by stepping stones, counts by a bridge.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "method"),
    [
        (known.conjugate, "bridge"),
        (known.conjugate, "stepping-stone"),
        (known.one_unit, "stepping-stone"),
        (known.rotated_counts, "bridge"),
        (known.funnel, "stepping-stone"),
        (known.correlation, "bridge"),
    ],
)
def test_errors_over_repetitions_are_those_that_are_told(monkeypatch, case, method):
    num, (model, args, truth) = 16, case()
    target = _chains.Target(model, args, {})  # whose model is traced once
    monkeypatch.setattr("numpyro_wide.evidence._model_evidence.Target", lambda *_: target)
    found = [model_evidence(jax.random.key(seed), model, *args, method=method) for seed in range(num)]
    errors = np.array([(one.log_evidence - truth) / one.standard_error for one in found])
    low, high = stats.chi2(num).ppf([1e-3, 1 - 1e-3])
    assert low < np.sum(errors**2) < high
    assert abs(errors.mean()) < 3.3 / num**0.5


@pytest.mark.as_compiled
@pytest.mark.fault("evidence/_model_evidence.py", "not evidence.is_trusted):", "evidence.is_trusted):")
def test_a_bridge_without_overlap_is_not_trusted_and_gives_way(monkeypatch):
    model, args, truth = known.conjugate()
    bridge = _methods.by_bridge

    def far(*arguments):
        return bridge(*arguments)._replace(overlap=0.05)

    monkeypatch.setattr("numpyro_wide.evidence._model_evidence.by_bridge", far)
    with pytest.warns(RuntimeWarning, match=r"overlap 0.05.*not to be trusted.*Take method='stepping-stone'"):
        assert model_evidence(KEY, model, *args, method="bridge").method == "bridge"
    check(model_evidence(KEY, model, *args), truth, largest_error=0.2)


@pytest.mark.slow
def test_a_gaussian_with_nothing_in_common(monkeypatch):
    model, args, _ = known.conjugate()
    monkeypatch.setattr("numpyro_wide.evidence._chains.gaussian_draws", lambda *a: np.full(800, -np.inf))
    with pytest.warns(RuntimeWarning, match="overlap 0.00"):
        assert np.isnan(model_evidence(KEY, model, *args, method="bridge").log_evidence)


def test_progress_is_shown_unless_in_ci(bars, monkeypatch, capsys):
    model, args, _ = known.conjugate()
    model_evidence(KEY, model, *args, method="bridge")
    assert "600it" in capsys.readouterr().err
    model_evidence(KEY, model, *args, method="bridge", progress_bar=False)
    monkeypatch.setenv("CI", "1")
    model_evidence(KEY, model, *args, method="bridge")
    assert "it/s" not in capsys.readouterr().err


def observing(prior=None, **likelihood):
    """A model with one latent site of this prior, or without."""

    def model(y=None):
        mean = 0.0 if prior is None else numpyro.sample("mean", prior())
        numpyro.sample("y", dist.Normal(mean, 1.0, **likelihood), obs=y)

    return model


def subsampled(y=None):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("rows", 10, subsample_size=2):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def scaled(y=None):
    with scale(scale=2.0):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def masked(y=None):
    with mask(mask=False):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def scanned(y=None):
    from numpyro.contrib.control_flow import scan

    def step(carry, _):
        carry = numpyro.sample("walk", dist.Normal(carry, 1.0))
        return carry, carry

    end, _ = scan(step, 0.0, jnp.arange(3))
    numpyro.sample("y", dist.Normal(end, 1), obs=y)


def standard():
    return dist.Normal(0, 1)


def improper():
    return dist.ImproperUniform(dist.constraints.real, (), ())


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        (observing(standard), (), "observes nothing with these arguments; pass the observations too.*'mean', 'y'"),
        (observing(), (1.0,), "no latent site.*nothing to integrate over"),
        (observing(lambda: dist.Bernoulli(0.5)), (1.0,), "site 'mean' is discrete; sum it out"),
        (observing(improper), (1.0,), "'mean' has an ImproperUniform prior.*give it a proper prior"),
        (subsampled, (np.zeros(2),), "plate 'rows' takes 2 of 10 rows.*drop subsample_size"),
        (scaled, (1.0,), "latent site 'mean' is scaled or masked.*integrate to one"),
        (masked, (1.0,), "latent site 'mean' is scaled or masked"),
        (scanned, (1.0,), "'walk' is inside of a scan.*Python loop"),
    ],
)
def test_models_without_an_evidence_are_refused(model, args, message):
    with pytest.raises(ValueError, match=message):
        model_evidence(KEY, model, *args)


def test_mistakes_are_refused():
    model = observing(standard)
    with pytest.raises(TypeError, match=r"rng_key must be a PRNG key.*is an int; the order is model_evidence\(rng_key"):
        model_evidence(0, model, 1.0)
    with pytest.raises(TypeError, match="must be callable"):
        model_evidence(KEY, NUTS(model), 1.0)
    with pytest.raises(ValueError, match="method must be one of 'auto', 'bridge', 'stepping-stone', but got 'smc'"):
        model_evidence(KEY, model, 1.0, method="smc")
    with pytest.raises(ValueError, match="num_chains must be a whole number of at least 2, but got 1"):
        model_evidence(KEY, model, 1.0, num_chains=1)
    with pytest.raises(ValueError, match="num_warmup must be a whole number of at least 20, but got 5"):
        model_evidence(KEY, model, 1.0, num_warmup=5)
    with pytest.raises(ValueError, match="num_chains times num_samples must be at least 400.*is 2 times 50; raise"):
        model_evidence(KEY, model, 1.0, num_chains=2, num_samples=50)
    with pytest.raises(TypeError, match="Tracer"):
        jax.jit(lambda key: model_evidence(key, model, 1.0))(KEY)


def test_a_likelihood_that_is_nowhere_finite_is_refused():
    def model(y):
        rate = numpyro.sample("rate", dist.LogNormal(0, 1))
        numpyro.factor("impossible", jnp.where(rate > y, -jnp.inf, -jnp.inf))

    with pytest.raises(ValueError, match="not finite at any of 3200 draws of the prior"):
        model_evidence(KEY, model, jnp.ones(()))
