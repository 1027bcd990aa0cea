"""Simulated truths and the posterior draws that are held against them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from numpyro_wide._checks import kind_of


@dataclass(frozen=True)
class Simulations:
    """Latents that made simulated data, and draws from the posterior under test given those data.

    Latents that the posterior does not cover are marginalised: leave them out. A test quantity, such as the log
    likelihood (Modrák 2023), joins as one more name in both dictionaries.

    The arrays are copied: what is done to the caller's later changes nothing here.

    Args:
        truth: latents of each simulation by name, (num_simulations, ...).
        draws: posterior draws for each simulation by name, (num_simulations, num_draws, ...).
        observed: simulated data by name, (num_simulations, ...), if they are to be kept.
        log_density_truth: log density of the posterior under test, up to a constant for each simulation, at the
            truth, (num_simulations,), -inf outside of its support; needed for highest-density regions alone.
        log_density_draws: log density of the posterior under test at the draws, (num_simulations, num_draws).
        ess: effective sample sizes of draws by MCMC, by name, (num_simulations, ...).

    Raises:
        TypeError: if the arrays do not hold real numbers.
        ValueError: if names or shapes do not fit, or a value is NaN.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.calibration import Simulations
        >>> simulations = Simulations({"z": np.zeros((200, 2))}, {"z": np.ones((200, 99, 2))})
        >>> simulations.num_simulations, simulations.num_draws
        (200, 99)
    """

    truth: Mapping[str, ArrayLike]
    draws: Mapping[str, ArrayLike]
    observed: Mapping[str, ArrayLike] = field(default_factory=dict)
    log_density_truth: ArrayLike | None = None
    log_density_draws: ArrayLike | None = None
    ess: Mapping[str, ArrayLike] | None = None

    def __post_init__(self) -> None:
        """Check the arrays, and hold copies."""
        for name in ("truth", "draws", "observed", "ess"):
            group = getattr(self, name)
            if group is not None:
                if not isinstance(group, Mapping):
                    raise TypeError(
                        f"{name} must be a dictionary of arrays by name, but is {kind_of(group)}; write "
                        f"{name}={{'theta': ...}}."
                    )
                object.__setattr__(self, name, {site: real_array(site, values) for site, values in group.items()})
        for name in ("log_density_truth", "log_density_draws"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, real_array(name, getattr(self, name)))
        _check_names_and_shapes(self.truth, self.draws)
        _check_densities(self)

    @property
    def num_simulations(self) -> int:
        """Number of simulated data sets."""
        return len(next(iter(self.truth.values())))  # type: ignore[arg-type]

    @property
    def num_draws(self) -> int:
        """Number of posterior draws for each of them."""
        return next(iter(self.draws.values())).shape[1]  # type: ignore[union-attr]

    def flat(self) -> tuple[np.ndarray, np.ndarray]:
        """Lay all scalar components side by side, truth (num_simulations, P) and draws (num_simulations, num_draws, P).

        Both hold floats, whatever the latents are.
        """
        shape = (self.num_simulations, self.num_draws, -1)
        truth = [np.reshape(self.truth[name], (self.num_simulations, -1)) for name in self.truth]
        draws = [np.reshape(self.draws[name], shape) for name in self.truth]
        return _as_floats(np.concatenate(truth, axis=-1)), _as_floats(np.concatenate(draws, axis=-1))


def check_simulations(value: Any, order: str) -> None:
    """Refuse anything but simulations.

    Args:
        value: argument that came.
        order: order of the arguments, for the message.

    Raises:
        TypeError: if it is something else.
    """
    if not isinstance(value, Simulations):
        raise TypeError(f"simulations must be Simulations, but got {kind_of(value)}; the order is {order}.")


def real_array(name: str, values: ArrayLike) -> np.ndarray:
    """Copy real numbers into a NumPy array.

    Args:
        name: name of the array, for messages.
        values: numbers, truth values, or what NumPy makes an array of them from.

    Raises:
        TypeError: if they are complex, or no numbers.
    """
    array = np.array(values)
    if array.dtype.kind not in "fiub" and not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{name} must hold real numbers, but has the type {array.dtype}; take real parts, or functions."
        )
    return array


def _as_floats(values: np.ndarray) -> np.ndarray:
    return values if np.issubdtype(values.dtype, np.floating) else values.astype(float)


def _check_names_and_shapes(truth: Mapping[str, Any], draws: Mapping[str, Any]) -> None:
    if not truth or set(truth) != set(draws):
        raise ValueError(f"truth and draws must hold the same names, but hold {sorted(truth)} and {sorted(draws)}.")
    sizes = {(values.shape[:1], draws[name].shape[:2]) for name, values in truth.items()}
    for name, values in truth.items():
        expected = (*values.shape[:1], *draws[name].shape[1:2], *values.shape[1:])
        if values.ndim < 1 or draws[name].ndim < 2 or draws[name].shape != expected or len(sizes) != 1:
            raise ValueError(
                "truth must hold arrays (num_simulations, ...) and draws arrays (num_simulations, num_draws, ...) with "
                f"the same numbers for all names, but {name!r} has shapes {values.shape} and {draws[name].shape}."
            )
        for array, group in ((values, "truth"), (draws[name], "draws")):
            if 0 in array.shape or np.isnan(array).any():
                raise ValueError(f"{group}[{name!r}] is empty or holds NaN: leave failed simulations out of both.")


def _check_densities(simulations: Simulations) -> None:
    pair = simulations.log_density_truth, simulations.log_density_draws
    if all(array is None for array in pair):
        return
    expected = (simulations.num_simulations,), (simulations.num_simulations, simulations.num_draws)
    got = tuple(() if array is None else np.shape(array) for array in pair)
    if got != expected:
        raise ValueError(f"log_density_truth and log_density_draws must have shapes {expected}, but got {got}.")
    for name, array in zip(("log_density_truth", "log_density_draws"), pair, strict=True):
        if np.isnan(array).any():  # type: ignore[arg-type]
            raise ValueError(
                f"{name} holds NaN, which has no rank: leave failed simulations out of all arrays, and write -inf "
                "where the density is 0, as outside of its support."
            )
