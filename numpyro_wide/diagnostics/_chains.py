"""Effective sample size and R-hat as Hron 2022 defines them, over any number of dimensions."""

import numpy as np
from jax.typing import ArrayLike
from scipy import fft

from numpyro_wide._checks import whole_number

_BLOCK = 2**22  # numbers transformed at once: keeps the memory beside the draws bounded


def effective_sample_size(draws: ArrayLike, *, per_step: bool = False, num_grad: ArrayLike | None = None) -> np.ndarray:
    r"""Estimate the effective sample size of every dimension (Hron 2022, equation 7; Mathematics, :eq:`ess`).

    With $M$ chains of $S$ draws and the autocorrelations $\hat\rho_k$ about the mean of all chains,

    .. math:: \mathrm{ESS} = \frac{M S}{1 + 2\sum_{k=1}^{S-1} (1 - k/S)\, \hat\rho_k}

    where the sum stops before the first negative $\hat\rho_k$, as TensorFlow Probability's does. Chains that
    disagree about the mean show up as autocorrelation at every lag. ArviZ's ``ess`` sums pairs of autocorrelations
    and splits every chain; the two agree within Monte Carlo error for chains that mix and have no negative
    autocorrelations, which only ArviZ's counts as a gain.

    Args:
        draws: draws of chains, (chain, draw, ...), at least two draws.
        per_step: whether to divide by the number of draws, $M S$; for thinned draws, divide by ``thinning`` too.
        num_grad: number of gradients that the draws took, to give the effective sample size of one gradient: their
            total, or an array that is summed, such as the extra field ``num_grad`` of this package's kernels, and
            ``num_steps`` of NUTS. With thinning, the extra fields hold only the kept steps.

    Returns:
        The size, of shape (...), from 1 / (number of lags) of a chain that hardly moves to $M S$; NaN where all draws
        are equal.

    Raises:
        ValueError: if the draws do not have axes for chains and draws, or both normalisations are asked for.

    Example:
        >>> import jax
        >>> from numpyro_wide.diagnostics import effective_sample_size
        >>> independent = jax.random.normal(jax.random.key(0), (2, 500, 3))
        >>> effective_sample_size(independent).shape
        (3,)
        >>> bool(effective_sample_size(independent, num_grad=4000).max() < 0.3)
        True
    """
    if per_step and num_grad is not None:
        raise ValueError("effective_sample_size is given per_step or per gradient, not both; drop one of the two.")
    array = _checked(draws)
    flat = array.reshape(*array.shape[:2], -1)
    num_chains, num_draws, num_columns = flat.shape
    if num_columns == 0:
        return np.empty(array.shape[2:])
    block = max(1, _BLOCK // (num_chains * num_draws))
    columns = [slice(start, start + block) for start in range(0, num_columns, block)]
    total = num_chains * num_draws
    ess = np.concatenate([total / _autocorrelation_time(flat[..., column]) for column in columns])
    if per_step:
        ess = ess / total
    elif num_grad is not None:
        ess = ess / np.sum(np.asarray(num_grad, dtype=float))
    return ess.reshape(array.shape[2:])


def rhat_squared(draws: ArrayLike) -> np.ndarray:
    r"""Compute $\hat R^2$ of every dimension (Hron 2022, equation 6): all variance over the mean within chains.

    1 where the chains agree; the variances are those of the given draws, without a correction for their number
    (Mathematics, :eq:`ess`). With $M$ chains of $S$ draws, the classical $\hat R$ (ArviZ's
    ``rhat(method="identity")``) is related to it by
    $\hat R^2_{(6)} - 1 = \frac{M-1}{M} \frac{S}{S-1} (\hat R^2 - \frac{S-1}{S})$.

    Args:
        draws: draws of chains, (chain, draw, ...), at least two draws.

    Returns:
        The ratio, of shape (...): NaN where all draws are equal, inf where chains differ that do not move.

    Raises:
        ValueError: if the draws do not have axes for chains and draws.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics import rhat_squared
        >>> chain = np.array([-1.0, 1.0, -1.0, 1.0])
        >>> float(rhat_squared(np.stack([chain, chain + 2])))  # 1 within the chains, 1 between their means
        2.0
    """
    array = _checked(draws)
    # The variance of a constant is rounding, where it must come out as 0; a NaN must stay one.
    within = np.where(np.ptp(array, axis=1) == 0, 0.0, array.var(axis=1, dtype=float)).mean(axis=0)
    between = np.where(np.ptp(array, axis=(0, 1)) == 0, 0.0, array.mean(axis=1, dtype=float).var(axis=0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(1.0 + between / within)


def autocorrelation(draws: ArrayLike, *, max_lag: int | None = None) -> np.ndarray:
    r"""Estimate the autocorrelations $\hat\rho_k$ of every dimension, pooled over chains (Hron 2022, above equation 7).

    Products of deviations from the mean of all chains, averaged over the $M (S - k)$ pairs at lag $k$ and divided by
    the variance of all draws.

    Args:
        draws: draws of chains, (chain, draw, ...), at least two draws.
        max_lag: largest lag; by default the number of draws less one.

    Returns:
        The autocorrelations, (max_lag + 1, ...), 1 at lag 0; NaN where all draws are equal.

    Raises:
        ValueError: if the draws do not have axes for chains and draws, or ``max_lag`` is negative.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide.diagnostics.internal import autocorrelation
        >>> autocorrelation(np.array([[-1.0, 1.0, -1.0, 1.0]])).tolist()
        [1.0, -1.0, 1.0, -1.0]
    """
    array = _checked(draws)
    num_lags = array.shape[1] if max_lag is None else min(whole_number("max_lag", max_lag, 0) + 1, array.shape[1])
    deviations = array.astype(float)
    deviations -= deviations.mean(axis=(0, 1))
    num_draws = deviations.shape[1]
    # Padded with as many zeros, the circular correlation is the plain one.
    spectrum = fft.rfft(deviations, fft.next_fast_len(2 * num_draws, real=True), axis=1)
    power = np.sum(spectrum.real**2 + spectrum.imag**2, axis=0)
    sums = fft.irfft(power, fft.next_fast_len(2 * num_draws, real=True), axis=0)[:num_lags]
    num_pairs = np.arange(num_draws, num_draws - num_lags, -1).reshape(-1, *[1] * (array.ndim - 2))
    # Rounding leaves a residue in the transform of a constant: it must come out as 0/0.
    variance = np.where(np.ptp(array, axis=(0, 1)) > 0, sums[0] / num_draws, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(variance > 0, sums / num_pairs / variance, np.nan)


def _autocorrelation_time(draws: np.ndarray) -> np.ndarray:
    """Compute the denominator of equation 7, of each column of (chain, draw, column)."""
    correlation = autocorrelation(draws)[1:]
    num_draws = draws.shape[1]
    weights = 1.0 - np.arange(1, num_draws)[:, None] / num_draws
    kept = np.cumsum(correlation < 0, axis=0) == 0
    return 1.0 + 2.0 * np.sum(np.where(kept, weights * correlation, 0.0), axis=0)


def _checked(draws: ArrayLike) -> np.ndarray:
    array = np.asarray(draws)
    if array.ndim < 2 or array.shape[1] < 2 or array.shape[0] < 1:
        raise ValueError(
            f"draws must have shape (chain, draw, ...) with at least two draws, but got {array.shape}; "
            "use mcmc.get_samples(group_by_chain=True), and draws[None] for a single chain."
        )
    # Differences of draws are not defined for booleans, and wrap around for small integers.
    return array if np.issubdtype(array.dtype, np.floating) else array.astype(float)
