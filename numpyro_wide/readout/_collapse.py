"""Whole models with their readout integrated out."""

import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, MaskedDistribution, constraints
from numpyro.distributions.util import validate_sample
from numpyro.primitives import apply_stack

from numpyro_wide._checks import FELT_ERROR, IN_FLOAT64, are_known, check_names_known, is_known, refuse_frames
from numpyro_wide._compile import run_program
from numpyro_wide._traces import TOO_LARGE, prior_sizes, warn_of_prior_sizes
from numpyro_wide.linear_gaussian._problem import ReadoutProblem
from numpyro_wide.linear_gaussian._row_blocks import map_rows
from numpyro_wide.readout._assumptions import Findings, ReadoutProgram, nan_unless, refuse
from numpyro_wide.readout._model import (
    Model,
    ReadoutModel,
    ReadoutRun,
    ReadoutSites,
    only_value_handlers,
    refuse_given_readout,
    refuse_prior_readout,
    refuse_scaled,
)


class ReadoutMarginal(Distribution):
    r"""Marginal of Gaussian observations over a Gaussian readout.

    $N(\text{loc}, \Psi \operatorname{diag}(\text{prior\_scale}^2) \Psi^\top + \text{noise\_scale}^2)$, independent over
    outputs: what :func:`~numpyro_wide.collapse_readout` puts in the place of the model's Normal. Its log density is
    :func:`~numpyro_wide.linear_gaussian.log_evidence` (Hron 2022, eq. 5; Mathematics, :eq:`evidence`).

    Args:
        problem: the readout's features, noise and prior; its targets give shape and type.
        loc: mean of the observations at the prior mean of the readout, shape (n,) or (n, k); zero by default, and NaN
            where the readout cannot be integrated out.
        validate_args: whether to check values, as in every NumPyro distribution.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_wide.linear_gaussian import ReadoutProblem
        >>> from numpyro_wide.readout import ReadoutMarginal
        >>> marginal = ReadoutMarginal(ReadoutProblem.of(jnp.ones((3, 2)), jnp.zeros(3), noise_scale=1.0))
        >>> marginal.event_shape, marginal.variance.tolist()
        ((3,), [3.0, 3.0, 3.0])
    """

    # Not validated: NaN where the readout cannot be integrated out.
    arg_constraints = {"loc": constraints.dependent}  # noqa: RUF012
    reparametrized_params = ["loc"]  # noqa: RUF012
    pytree_data_fields = ("problem", "loc")

    def __init__(
        self,
        problem: ReadoutProblem,
        loc: ArrayLike | None = None,
        *,
        validate_args: bool | None = None,
    ):
        self.problem = problem
        zero = jnp.zeros_like(problem.targets)
        self.loc = zero if loc is None else jnp.broadcast_to(jnp.asarray(loc, zero.dtype), zero.shape)
        super().__init__((), zero.shape, validate_args=validate_args)

    @property
    def support(self) -> constraints.Constraint:
        """Real vectors or matrices."""
        return constraints.independent(constraints.real, self.event_dim)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw a readout from its prior, then observations given it."""
        readout_key, noise_key = random.split(key)
        problem, dtype = self.problem, self.loc.dtype
        readout = problem.prior_scale * random.normal(readout_key, (*sample_shape, *problem.readout_shape), dtype)
        # One product with the features, which may come by blocks of rows.
        axis = len(sample_shape)
        columns = jnp.moveaxis(readout, axis, 0)
        signal = problem.features @ columns.reshape(len(columns), -1)
        signal = jnp.moveaxis(signal.reshape(-1, *columns.shape[1:]), 0, axis)
        noise = problem.noise_scale * random.normal(noise_key, (*sample_shape, *self.event_shape), dtype)
        return self.loc + signal + noise

    @validate_sample
    def log_prob(self, value: Array, intermediates: object = None) -> Array:
        """Return the log evidence of ``value``, one number for each leading index."""

        def single(value: Array) -> Array:
            return self.problem.with_targets(value - self.loc).log_evidence()

        for _ in range(jnp.ndim(value) - self.event_dim):
            single = jax.vmap(single)
        return single(value)

    @property
    def mean(self) -> Array:
        """Marginal means, the shape of ``loc``."""
        return self.loc

    @property
    def variance(self) -> Array:
        """Marginal variances, the shape of ``loc``."""
        problem = self.problem
        prior_variance = jnp.broadcast_to(problem.prior_scale**2, problem.readout_shape)
        signal = map_rows(problem.features, lambda rows: rows**2 @ prior_variance)
        return signal + jnp.broadcast_to(problem.noise_scale**2, self.event_shape)


class CollapsedModel(ReadoutModel):
    """A model with its readout integrated out, by :func:`~numpyro_wide.collapse_readout` with these arguments."""

    is_collapsed = True

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the model, collapsed if its observed site is observed."""
        refuse_frames(args, kwargs)
        program = ReadoutProgram(self, args, kwargs, outside=only_value_handlers())
        is_observed = program.is_observed
        check_names_known("observed", self.observed, is_observed, kind="sample site")
        if not is_observed[self.observed]:
            refuse_prior_readout(self.readout, [site for site, has_data in is_observed.items() if not has_data])
            return self.fn(*args, **kwargs)
        refuse_given_readout(self.readout, "it is integrated out; use the unwrapped model")
        sites = _WithoutObserved(self, hidden=program.moving_sites)
        with sites:
            result = self.fn(*args, **kwargs)
        run, (program, values) = sites.read_off(), program.at(sites)
        if are_known((args, kwargs, sites.values, run)):
            self._check(program, values, args, kwargs)
        else:
            run = nan_unless(program.findings(run, values), run)
        problem = replace(run, observations=None).problem()  # the density subtracts the mean
        sites.observe(ReadoutMarginal(problem, run.loc))
        return result

    def _check(self, program: ReadoutProgram, values: list[Array], args: tuple, kwargs: dict[str, object]) -> None:
        """Raise or warn of what is wrong with the model or its rounding, where numbers are known."""

        def read(values: list[Array]) -> tuple[ReadoutRun, Findings]:
            run = program.run(values)
            return run, program.findings(run, values)

        run, findings = run_program(read, values, quick=True)
        refuse(findings, self)
        problem = run.problem()
        if float(run.prior_size()) >= TOO_LARGE * np.sqrt(np.mean(np.square(run.residual))):  # of one draw
            sizes = run_program(lambda key: prior_sizes(key, self.fn, args, kwargs), random.key(0), quick=True)
            warn_of_prior_sizes(sizes)
        error = problem.evidence_error()
        if np.isnan(error) or float(error) < FELT_ERROR or program.has_free_noise():
            return
        if np.isinf(error):
            message = (
                f"the noise of observed site {self.observed!r} is too small for {error.dtype}: its variance is lost in "
                "rounding, and the log density is NaN."
            )
        else:
            message = (
                f"the log density of observed site {self.observed!r} loses its digits in {error.dtype}: rounding moves "
                f"it by about {float(error):.2g} nats. Centre and standardise the targets, with the readout's prior to "
                "go with them."
            )
        warnings.warn(
            f"{message} Run {IN_FLOAT64}, or use a larger noise.",
            UserWarning,
            stacklevel=3,  # whoever runs the model
        )


def collapse_readout(fn: Model, *, readout: str, features: str, observed: str, variant: str = "auto") -> CollapsedModel:
    r"""Integrate the readout out of a model with a Gaussian likelihood, exactly.

    The wrapped model has no readout site. Its observed site follows the marginal
    $N(\text{loc}, \Psi \Psi^\top + \sigma^2 I)$, whose log density is the evidence (Hron 2022, eq. 5; Mathematics,
    :eq:`evidence`, :eq:`identity`). All other sites are as they were. Loc and noise are read off the model's own
    Normal. Without observations the wrapped model is the unwrapped model.

    Draws of a collapsed model do not contain the readout: get readouts and predictions from
    :class:`~numpyro_wide.ReadoutPredictive`. NumPyro's ``log_likelihood`` of the wrapped model is the joint density of
    all rows under the readout's prior, not their predictive density.

    The mean of the observed site must be ``features @ readout`` plus terms without the readout, and the readout may
    reach nothing else. Every evaluation checks that: elsewhere the density is NaN, and an error at the start of a chain
    says why. Deterministic sites that depend on the readout are not recorded.

    Args:
        fn: the model.
        readout: name of the readout's sample site, of shape (d,) or (d, k), with a Normal prior.
        features: name of the site that holds what the readout multiplies, (n, d), such as a ``numpyro.deterministic``.
        observed: name of the observed site, of shape (n,) or (n, k), with a Normal distribution.
        variant: as of :class:`~numpyro_wide.ReprioriseReadout`.

    Returns:
        The wrapped model.

    Warns:
        UserWarning: when the model runs, if its noise is given and so small that rounding moves the log density by more
            than a sampler bears.

    Raises:
        ValueError: when the model runs, if a site is missing or comes too late, prior or likelihood is not Normal
            itself, the likelihood is scaled, masked or subsampled, shapes do not fit, data hold NaN, or the model is
            not linear in the readout as described.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_wide import collapse_readout, nn
        >>> model = nn.bnn(nn.FCN(depth=1, width=50), num_outputs=None, noise=0.1)
        >>> x = jnp.linspace(-1, 1, 5)[:, None]
        >>> collapsed = collapse_readout(model, readout="readout", features="features", observed="y")
        >>> mcmc = MCMC(NUTS(collapsed), num_warmup=10, num_samples=10, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), x, jnp.sin(x[:, 0]))
        >>> sorted(mcmc.get_samples())
        ['hidden.hidden_0.kernel']
    """
    return CollapsedModel(fn, readout, features, variant, observed)


class _WithoutObserved(ReadoutSites):
    """Handler that hides the observed site, too, until its marginal is known."""

    def process_message(self, msg: dict) -> None:
        super().process_message(msg)
        if msg["type"] == "sample" and msg["name"] == self.model.observed:
            self._message = dict(msg)
            if msg["value"] is None:
                with only_value_handlers():
                    msg["value"] = apply_stack(dict(msg))["value"]
            msg["is_observed"] = msg["stop"] = True

    def observe(self, marginal: ReadoutMarginal) -> None:
        """Show the observed site to the handlers around the wrapped model."""
        # The rows are dependent, whatever plates surround them.
        msg = apply_stack({**self._message, "fn": marginal, "cond_indep_stack": []})
        if not (is_known(msg["scale"]) and np.all(np.asarray(msg["scale"]) == 1)):
            refuse_scaled(self.model.observed, msg)
        if isinstance(msg["fn"], MaskedDistribution) and jnp.ndim(msg["fn"]._mask):  # not of all or nothing
            raise ValueError(
                f"the observed site {self.model.observed!r} is masked by a handler around the model, entry by entry, "
                "but with the readout integrated out its rows have one joint density; leave out the masked rows, or "
                "use the unwrapped model."
            )
