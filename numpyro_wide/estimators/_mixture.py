"""Mixtures of Gaussians with equal weights, one for each entry that is predicted, in NumPy's float64."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import logsumexp

from numpyro_wide.readout.internal import summarise

_BLOCK = 500  # rows whose quantiles are found together


@dataclass(frozen=True)
class Mixture:
    """Predictions by draw.

    Attributes:
        mean: means of the components, (draws, m, k).
        variance: variances of the components, noise included, (draws, m, k).
    """

    mean: np.ndarray
    variance: np.ndarray

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance of the mixture, (m, k) each."""
        return self.mean.mean(axis=0), self.variance.mean(axis=0) + self.mean.var(axis=0)

    def quantiles(self, levels: Sequence[float]) -> np.ndarray:
        """Return the numbers that the mixture is below with given probabilities, (levels, m, k).

        Args:
            levels: probabilities, between 0 and 1.
        """
        blocks = []
        for start in range(0, self.mean.shape[1], _BLOCK):
            rows = slice(start, start + _BLOCK)
            found: dict[str, Any] = {
                "mean": self.mean[:, rows],
                "predictive_variance": self.variance[:, rows],
                "variance": self.variance[:, rows],
            }
            by_level = summarise(found, "", tuple(levels)).quantiles
            blocks.append(np.stack([by_level[level] for level in levels]))
        return np.concatenate(blocks, axis=1)

    def log_density(self, y: np.ndarray) -> np.ndarray:
        """Return the log density of each row's outputs together, which are independent given the draw, (m,).

        Args:
            y: observations, (m, k).
        """
        return logsumexp(self.by_draw(y), axis=0) - np.log(len(self.mean))

    def sample(self, random: np.random.RandomState, places: np.ndarray) -> np.ndarray:
        """Draw observations, all rows of one sample from the same draw, (samples, m, k).

        Args:
            random: generator.
            places: where in the list of the draws the one of each sample is, as a share of it, (samples,).
        """
        chosen = (places * len(self.mean)).astype(int)
        noise = random.standard_normal((len(places), *self.mean.shape[1:]))
        return self.mean[chosen] + np.sqrt(self.variance[chosen]) * noise

    def by_draw(self, y: np.ndarray) -> np.ndarray:
        """Return the log density of each row's outputs together by component, (draws, m).

        Args:
            y: observations, (m, k).
        """
        square = (y - self.mean) ** 2 / self.variance
        return -0.5 * np.sum(square + np.log(2 * np.pi * self.variance), axis=-1)
