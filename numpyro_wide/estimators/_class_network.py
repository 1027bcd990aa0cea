"""Classifiers of a finite width: model, chains, and the posterior that predicts."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.infer import MCMC

from numpyro_wide import ReadoutPredictive, _arviz, repriorise
from numpyro_wide.estimators._chains import (
    MOST_CHECKED,
    ONE_CHAIN,
    Convergence,
    effective_draws,
    gradient_seconds,
    run_chains,
)
from numpyro_wide.estimators._clock import Clock
from numpyro_wide.estimators._leave_one_out import LeaveOneOut, averaged
from numpyro_wide.estimators._posteriors import padded_blocks
from numpyro_wide.estimators._report import Report
from numpyro_wide.machine import double_precision, precision
from numpyro_wide.nn import FCN, random_network
from numpyro_wide.readout.internal import Surrogate
from numpyro_wide.wide_limit import WideLimitFit

_LARGEST_RHAT = 1.05  # of chains that have settled


class ClassNetwork(NamedTuple):
    """A network of classes.

    Attributes:
        limit: infinitely wide network, with architecture, scales and the likelihood of its labels.
        width: number of hidden units in each layer.
    """

    limit: WideLimitFit
    width: int

    @property
    def num_logits(self) -> tuple[int, ...]:
        """Shape of a row's logits, () of two classes."""
        return () if self.limit.likelihood == "bernoulli" else (int(self.limit.parameters["num_classes"]),)


class ClassChains(NamedTuple):
    """Outcome of chains of a network of classes.

    Attributes:
        posterior: the posterior that predicts.
        mcmc: the chains.
        num_steps: number of steps of each chain, warmup included.
    """

    posterior: "DrawnClasses"
    mcmc: MCMC
    num_steps: int


def run_network(network: ClassNetwork, x: Array, labels: Array | None = None) -> None:
    """Run the model of a network of classes: weights N(0, 1), logits linear in the readout.

    Args:
        network: the network.
        x: inputs, (n, d).
        labels: numbers of the classes, (n,); None to predict.
    """
    limit, num_logits = network.limit, network.num_logits
    module = FCN(limit.depth, network.width, limit.activation, **limit.scales)
    features = numpyro.deterministic("features", random_network("hidden", module, x)(x))
    prior = dist.Normal(0, 1).expand((features.shape[1], *num_logits))
    logits = features @ numpyro.sample("readout", prior.to_event(1 + len(num_logits)))
    with numpyro.plate("rows", x.shape[0]):
        likelihood = dist.Categorical(logits=logits) if num_logits else dist.Bernoulli(logits=logits)
        numpyro.sample("label", likelihood, obs=labels)


class DrawnClasses:
    """Draws of the weights of a finite network of classes. Predicts in float64.

    Args:
        network: the network.
        surrogate: the limit's surrogate, which the readout is repriorised with.
        draws: draws of the repriorised model's sites, each with a leading axis.
    """

    def __init__(self, network: ClassNetwork, surrogate: Surrogate, draws: dict[str, Any]):
        self.network, self.surrogate = network, surrogate
        self.draws = {name: np.asarray(values, float) for name, values in draws.items()}
        self._predictive: ReadoutPredictive | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_predictive": None}  # compiled programs stay behind

    @property
    def labels(self) -> np.ndarray:
        """Numbers of the classes of the fit, (n,)."""
        return self.network.limit.targets.astype(int)

    @property
    def predictive(self) -> ReadoutPredictive:
        """The predictive of the repriorised model, to be called in double precision."""
        if self._predictive is None:
            with double_precision():
                draws = {name: jnp.asarray(values) for name, values in self.draws.items()}
                args = jnp.asarray(self.network.limit.inputs), jnp.asarray(self.labels)
                self._predictive = ReadoutPredictive(repriorised(self.network, self.surrogate), draws, args)
        return self._predictive

    def by_draw(self, x: np.ndarray) -> np.ndarray:
        """Return probabilities of the classes by draw, (draws, m, classes).

        Args:
            x: standardised inputs, (m, d).
        """
        blocks = []
        for padded, num_rows in padded_blocks(x):
            with double_precision():
                found = np.asarray(self.predictive(jax.random.key(0), jnp.asarray(padded))["probs"], float)
            blocks.append(found[:, :num_rows])
        found = np.concatenate(blocks, axis=1)
        return found if found.ndim == 3 else np.stack([1 - found, found], axis=-1)

    def probabilities(self, x: np.ndarray) -> np.ndarray:
        """Return probabilities of the classes, averaged over the draws, (m, classes).

        Args:
            x: standardised inputs, (m, d).
        """
        found = self.by_draw(x).mean(axis=0)
        return found / found.sum(axis=1, keepdims=True)

    def leave_one_out(self) -> LeaveOneOut:
        """Score the labels of the fit, each given all others."""
        return averaged(np.log(np.maximum(self._own(slice(None)), 1e-300)))

    def convergence(self, num_chains: int) -> Convergence:
        """Judge chains by R-hat and effective draws of the labels' probabilities at rows of the fit.

        Args:
            num_chains: number of chains that the draws are of.
        """
        own = self._own(slice(None, None, -(-len(self.labels) // MOST_CHECKED)))
        moves = own.std(axis=0) > 0
        lines = [] if moves.all() else [f"{np.sum(~moves)} rows have the same probability in all draws, and no R-hat"]
        by_chain = own[:, moves].reshape(num_chains, -1, np.sum(moves))
        sizes = _arviz.effective_sample_size(by_chain)
        lines.append(effective_draws("probabilities", sizes))
        if num_chains == 1:
            return Convergence(True, (*lines, ONE_CHAIN))
        rhats = _arviz.rhat(by_chain)
        lines.append(f"R-hat of probabilities: median {np.nanmedian(rhats):.3f}, largest {np.nanmax(rhats):.3f}")
        return Convergence(bool(np.nanmax(rhats) <= _LARGEST_RHAT), tuple(lines))

    def _own(self, rows: slice) -> np.ndarray:
        """Return the probabilities of rows' own labels by draw, (draws, rows)."""
        labels = self.labels[rows]
        return self.by_draw(self.network.limit.inputs[rows])[:, np.arange(len(labels)), labels]


def repriorised(network: ClassNetwork, surrogate: Surrogate) -> Any:
    """Return the model ``(x, labels)`` with the readout repriorised by the limit's surrogate.

    Args:
        network: the network.
        surrogate: the surrogate of its limit, fitted to these rows.
    """
    here = Surrogate(*map(jnp.asarray, surrogate))
    model = partial(run_network, network)
    return repriorise(model, readout="readout", features="features", targets="labels", surrogate=here)


def sample(network: ClassNetwork, num_chains: int, clock: Clock, key: Any, report: Report) -> ClassChains | None:
    """Run chains of a network of classes; None if the budget does not pay for them.

    Args:
        network: the network.
        num_chains: number of chains.
        clock: clock of the whole fit.
        key: a PRNG key.
        report: report, to which lines are added.
    """

    def judge(draws: dict[str, Any]) -> Convergence:
        return DrawnClasses(network, surrogate, draws).convergence(num_chains)

    clock.begin("surrogate of the likelihood")
    with precision(False):
        surrogate = network.limit.surrogate()
        args = jnp.asarray(network.limit.inputs, float), jnp.asarray(network.limit.targets.astype(int))
        model = repriorised(network, surrogate)
        seconds = gradient_seconds(len(args[1]), network.limit.depth, network.width)
        run = run_chains(model, args, num_chains, clock, key, report, gradient_seconds=seconds, hold=None, judge=judge)
        if run is None:
            return None
    return ClassChains(DrawnClasses(network, surrogate, run.draws), run.mcmc, run.num_steps)
