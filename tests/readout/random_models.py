"""Models with a Gaussian readout drawn at random, and a dense float64 oracle of their joint density in NumPy."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from hypothesis import strategies as st
from scipy.stats import lognorm, multivariate_normal, norm

NOISES = ("number", "by row", "by output", "full", "latent first", "latent last")
PRIOR_SHAPES = ("number", "by unit", "full")
READOUT_FORMS = ("event", "plates", "mixed")
OFFSET_SIZES = (0.0, 1.0, 1e3, 1e6)
CALLBACKS = (None, "features", "factor")
ROW_FORMS = ("event", "plate", "both")


@dataclass(frozen=True)
class Spec:
    """What a model is made of.

    Attributes:
        num_rows, width, num_outputs: of the data and the network; no outputs for vectors.
        seed: of all its numbers.
        noise: one of NOISES.
        prior_loc, prior_scale: one of PRIOR_SHAPES each.
        readout: how its prior is declared, one of READOUT_FORMS.
        rows: how the observed site is declared, one of ROW_FORMS.
        readout_first: whether the readout comes before the features.
        has_bias, has_other: a column of ones; another site and likelihood.
        offset_size: of a term of the mean without the readout, and of the observations.
        has_second, has_factor: a second likelihood of the hidden layer; a factor of it, beside a large constant.
        callback: what NumPy computes, one of CALLBACKS.
    """

    num_rows: int
    width: int
    num_outputs: int | None
    seed: int
    noise: str
    prior_loc: str
    prior_scale: str
    readout: str
    rows: str
    readout_first: bool
    has_bias: bool
    offset_size: float
    has_other: bool
    has_second: bool
    has_factor: bool
    callback: str | None

    @property
    def num_features(self):
        return self.width + self.has_bias

    @property
    def columns(self):
        return () if self.num_outputs is None else (self.num_outputs,)

    @property
    def readout_shape(self):
        return (self.num_features, *self.columns)

    def numbers(self):
        """Everything about the model that is a number, drawn once."""
        rng = np.random.default_rng(self.seed)
        n, readout_shape = self.num_rows, self.readout_shape
        by_row = (n, *(1 for _ in self.columns))
        noise_shape = {"by row": by_row, "by output": self.columns, "full": (n, *self.columns)}.get(self.noise, ())
        prior_shapes = {"number": (), "by unit": (readout_shape[0], *(1 for _ in self.columns)), "full": readout_shape}
        x, residual, offset = (rng.normal(size=(n, *shape)) for shape in ((2,), self.columns, self.columns))
        offset = self.offset_size * offset
        return {
            "x": x,
            "y": residual + 0.7 + offset,
            "offset": offset,
            "noise": rng.uniform(0.3, 0.9, noise_shape),
            "prior_loc": rng.normal(size=prior_shapes[self.prior_loc]),
            "prior_scale": rng.uniform(0.5, 1.5, prior_shapes[self.prior_scale]),
            "hidden": rng.normal(size=(2, self.width)),
            "other": rng.normal(),
            "base": rng.normal(size=readout_shape),
            "second": rng.normal(size=n),
        }


SPECS = st.builds(
    Spec,
    num_rows=st.sampled_from((1, 3, 5)),
    width=st.sampled_from((1, 2, 4)),
    num_outputs=st.sampled_from((None, 1, 2)),
    seed=st.integers(0, 2**16),
    noise=st.sampled_from(NOISES),
    prior_loc=st.sampled_from(PRIOR_SHAPES),
    prior_scale=st.sampled_from(PRIOR_SHAPES),
    readout=st.sampled_from(READOUT_FORMS),
    rows=st.sampled_from(ROW_FORMS),
    readout_first=st.booleans(),
    has_bias=st.booleans(),
    offset_size=st.sampled_from(OFFSET_SIZES),
    has_other=st.booleans(),
    has_second=st.booleans(),
    has_factor=st.booleans(),
    callback=st.sampled_from(CALLBACKS),
)


# What a collapsed model must not do with its readout w; each gives the mean, the noise, the observations or a site.
MEANS = {
    "twice": lambda mean, features, w: mean + features @ w,
    "squared": lambda mean, features, w: mean + (features @ w) ** 2,
    "of the readout alone": lambda mean, features, w: mean + jnp.tanh(w[0]),
    "one row": lambda mean, features, w: mean.at[0].add(features[0] @ w),
    "rounded": lambda mean, features, w: mean + features @ jax.lax.stop_gradient(jnp.round(w) - w),
}
SITES = {
    "factor": lambda features, w, y: numpyro.factor("violation", -jnp.sum(w**2)),
    "small share of a factor": lambda features, w, y: numpyro.factor("violation", 0.1 * w.sum() - 1e5),
    "second likelihood": lambda features, w, y: numpyro.sample("violation", dist.Normal(features @ w, 1.0), obs=y),
    "soft constraint": lambda features, w, y: numpyro.sample("violation", dist.Normal(0.0, 0.1), obs=w.sum()),
    "latent": lambda features, w, y: numpyro.sample("violation", dist.Normal(w.sum(), 1.0)),
}
VIOLATIONS = (*MEANS, *SITES, "noise", "observations")


def by_numpy(function, shape, x):
    """A function of NumPy in a model."""
    return jax.pure_callback(lambda x: function(np.asarray(x)), shape, x, vmap_method="sequential")


def penalty(hidden):
    return -0.1 * np.sum(hidden**2)


def build(spec, violation=None):
    """The NumPyro model ``model(x, y=None)`` of a specification, with one of VIOLATIONS."""
    numbers = spec.numbers()

    def sample_readout():
        prior = dist.Normal(numbers["prior_loc"], numbers["prior_scale"]).expand(spec.readout_shape)
        if spec.readout == "event":
            return numpyro.sample("w", prior.to_event(len(spec.readout_shape)))
        if spec.readout == "mixed" and spec.columns:
            with numpyro.plate("units", spec.num_features):
                return numpyro.sample("w", prior.to_event(1))
        with numpyro.plate("units", spec.num_features, dim=-len(spec.readout_shape)):
            if not spec.columns:
                return numpyro.sample("w", prior)
            with numpyro.plate("outputs", *spec.columns, dim=-1):
                return numpyro.sample("w", prior)

    def sample_noise():
        return numpyro.sample("sigma", dist.LogNormal(-0.7, 0.3)) if spec.noise.startswith("latent") else None

    def model(x, y=None):
        sigma = sample_noise() if spec.noise == "latent first" else None
        w = sample_readout() if spec.readout_first else None
        hidden = numpyro.sample("hidden", dist.Normal(0, 1.3).expand([2, spec.width]).to_event(2))
        units = by_numpy(np.tanh, x @ hidden, x @ hidden) if spec.callback == "features" else jnp.tanh(x @ hidden)
        columns = [jnp.ones_like(x[:, :1]), units] if spec.has_bias else [units]
        features = numpyro.deterministic("features", jnp.concatenate(columns, axis=1))
        sigma = sample_noise() if spec.noise == "latent last" else sigma
        w = sample_readout() if w is None else w
        if spec.has_other:
            other = numpyro.sample("other", dist.Normal(0.2, 2.0))
            numpyro.sample("seen", dist.Normal(other, 0.5), obs=0.4)
        if spec.has_second:
            numpyro.sample("second", dist.Normal(units.sum(1), 0.8).to_event(1), obs=numbers["second"])
        if spec.has_factor:
            numpyro.factor("constraint", 0.3 * hidden.sum() - 1e3)
        if spec.callback == "factor":
            numpyro.factor("penalty", by_numpy(penalty, hidden[0, 0], hidden))
        mean = features @ w + numbers["offset"]
        noise = numbers["noise"] if sigma is None else sigma
        if violation in MEANS:
            mean = MEANS[violation](mean, features, w)
        elif violation == "noise":
            noise = noise * jnp.exp(0.1 * w.sum())
        elif violation == "observations":
            y = y - jnp.tanh(w[0])
        likelihood = dist.Normal(mean, noise)
        if spec.rows == "event":
            numpyro.sample("y", likelihood.to_event(1 + len(spec.columns)), obs=y)
        elif spec.rows == "plate" or not spec.columns:
            with numpyro.plate("rows", x.shape[0]):
                numpyro.sample("y", likelihood.to_event(len(spec.columns)), obs=y)
        else:
            with numpyro.plate("rows", x.shape[0], dim=-2), numpyro.plate("columns", *spec.columns, dim=-1):
                numpyro.sample("y", likelihood, obs=y)
        if violation in SITES:
            SITES[violation](features, w, y)

    return model


@dataclass(frozen=True)
class Oracle:
    """Densities at ``numbers()``, dense and in float64, one output at a time."""

    spec: Spec
    sigma: float = 0.45
    is_mapped: bool = False  # with the targets that the map of repriorisation takes, offsets included

    def outputs(self):
        """Features (n, d), centred targets (n,), variances (n,), prior mean (d,) and variances (d,) of each output."""
        spec, numbers = self.spec, self.spec.numbers()
        units = np.tanh(numbers["x"] @ numbers["hidden"])
        features = np.concatenate([np.ones((spec.num_rows, 1)), units], axis=1) if spec.has_bias else units
        noise = self.sigma if spec.noise.startswith("latent") else numbers["noise"]
        as_matrix = lambda value, shape: np.broadcast_to(value, shape).reshape(shape[0], -1)  # noqa: E731
        rows = (spec.num_rows, *spec.columns)
        targets = as_matrix(numbers["y"] - (not self.is_mapped) * numbers["offset"], rows)
        variances = as_matrix(noise, rows) ** 2
        loc, scale = (as_matrix(numbers[f"prior_{part}"], spec.readout_shape) for part in ("loc", "scale"))
        for column in zip(targets.T, variances.T, loc.T, scale.T**2, strict=True):
            yield features, *column

    def log_evidence(self):
        """Of the observations, the readout integrated out."""
        return sum(
            multivariate_normal.logpdf(y, features @ loc, (features * prior) @ features.T + np.diag(noise))
            for features, y, noise, loc, prior in self.outputs()
        )

    def posterior(self, factor=1.0):
        """Mean and covariance of each output's readout, with the noise variances times ``factor``."""
        for features, y, noise, loc, prior in self.outputs():
            covariance = np.linalg.inv(np.diag(1 / prior) + (features.T / (factor * noise)) @ features)
            yield covariance @ (loc / prior + features.T @ (y / (factor * noise))), covariance

    def log_likelihood_and_prior(self, readout):
        """Of observations and readout together."""
        readout = np.asarray(readout).reshape(self.spec.num_features, -1)
        return sum(
            norm.logpdf(y, features @ w, np.sqrt(noise)).sum() + norm.logpdf(w, loc, np.sqrt(prior)).sum()
            for (features, y, noise, loc, prior), w in zip(self.outputs(), readout.T, strict=True)
        )

    def log_density_of_others(self):
        """Of all sites but readout and observations."""
        spec, numbers = self.spec, self.spec.numbers()
        total = norm.logpdf(numbers["hidden"], 0, 1.3).sum()
        if spec.noise.startswith("latent"):
            total += lognorm.logpdf(self.sigma, 0.3, scale=np.exp(-0.7))
        if spec.has_other:
            total += norm.logpdf(numbers["other"], 0.2, 2.0) + norm.logpdf(0.4, numbers["other"], 0.5)
        if spec.has_second:
            units = np.tanh(numbers["x"] @ numbers["hidden"])
            total += norm.logpdf(numbers["second"], units.sum(1), 0.8).sum()
        if spec.has_factor:
            total += 0.3 * numbers["hidden"].sum() - 1e3
        if spec.callback == "factor":
            total += penalty(numbers["hidden"])
        return total

    def values(self):
        """Of the latent sites, readout apart."""
        numbers = self.spec.numbers()
        latent = {"hidden": numbers["hidden"]}
        if self.spec.noise.startswith("latent"):
            latent["sigma"] = np.asarray(self.sigma)
        return {**latent, "other": np.asarray(numbers["other"])} if self.spec.has_other else latent
