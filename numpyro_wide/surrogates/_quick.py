"""Quick surrogates, of the observations alone, and the basis in which softmax has no superfluous direction."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_wide._checks import as_floats, check_no_nan, check_one_of, check_positive
from numpyro_wide.readout.internal import Surrogate
from numpyro_wide.surrogates._likelihoods import LIKELIHOODS, logit_basis


def surrogate_targets(
    observations: ArrayLike,
    likelihood: Literal["categorical", "bernoulli", "poisson"],
    *,
    num_classes: int | None = None,
    contrasts: bool = False,
    noise_scale: ArrayLike | None = None,
) -> Surrogate:
    r"""Make a quick Gaussian surrogate, targets and noise, of classes or counts, for ``repriorise``.

    The repriorisation map is a bijection, whatever targets and noise it is built from: the posterior stays exact
    (Hron 2022, App. F), and a good choice makes $\phi$ close to N(0, I). This one takes the likelihood of the function
    value $f$ for a Gaussian $N(t; f, s^2)$ with the same first and second derivative:

    - "categorical", softmax of $k$ logits, at $f = 0$, where the classes are alike: $s^2 = k$ and
      $t = k\,(\text{one-hot} - 1/k)$, the one-hot code minus its mean, in units of the logits;
    - "bernoulli", one logit, at $f = 0$: $s^2 = 4$ and $t = 4\,(y - \tfrac12)$;
    - "poisson", the log of the rate, near its mode at $f = \log(y + \tfrac12)$: $s^2 = 1/(y + \tfrac12)$, one
      for each observation, and $t = f - s^2/2$.

    It needs the observations alone. :func:`fitted_surrogate`, fitted before the chain to the infinite-width posterior,
    costs no more in a gradient, and predictions of classifiers mix faster with it.

    A bare one-hot code minus its mean with a small noise treats the labels as far more informative than they are, and
    can mix more slowly than the plain model.

    Softmax does not change when all logits move together, which a Gaussian for all $k$ of them does not know. A model
    whose readout gives the $k - 1$ coordinates of the logits in the basis of
    :func:`~numpyro_wide.surrogates.class_contrasts` leaves that direction out, has the same distribution over class
    probabilities, and suits the map better: use ``contrasts=True`` for it.

    Args:
        observations: class labels (n,), from 0; outcomes 0 or 1, (n,) or (n, k); counts (n,) or (n, k).
        likelihood: name of the likelihood, whose logits or log rates must be ``features @ readout`` up to terms without
            the readout, which should be subtracted from the targets if they are known.
        num_classes: number of classes $k$ of a categorical.
        contrasts: whether ``features @ readout`` are a categorical's logits in the basis of
            :func:`~numpyro_wide.surrogates.class_contrasts`.
        noise_scale: standard deviation $s$ instead of the above, a number or an array that broadcasts against the
            targets; those of a categorical or Bernoulli scale with its square.

    Returns:
        ``(targets, noise_scale)``: targets (n, k) for a categorical, or (n, k - 1) with contrasts, else of the shape of
        the observations; a number for the noise scale, and for counts one each.

    Raises:
        TypeError: for observations or a noise scale that are not real numbers.
        ValueError: for an unknown likelihood, without ``num_classes`` where it is needed, for observations that the
            likelihood cannot give, or a noise scale that is not positive or does not fit.

    Example:
        >>> from functools import partial
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_wide import repriorise, surrogate_targets
        >>> def model(x, labels=None):
        ...     hidden = numpyro.sample("hidden", dist.Normal(0, 1).expand([1, 50]).to_event(2))
        ...     features = numpyro.deterministic("features", jnp.tanh(x @ hidden) / 50**0.5)
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([50, 3]).to_event(2))
        ...     numpyro.sample("label", dist.Categorical(logits=features @ w).to_event(1), obs=labels)
        >>> surrogate = partial(surrogate_targets, likelihood="categorical", num_classes=3)
        >>> wrapped = repriorise(model, readout="w", features="features", targets="labels", surrogate=surrogate)
        >>> targets, noise_scale = surrogate_targets(jnp.array([2, 0]), "categorical", num_classes=3)
        >>> targets.tolist(), round(float(noise_scale) ** 2)
        ([[-1.0, -1.0, 2.0], [2.0, -1.0, -1.0]], 3)
    """
    quick: dict[str, Any] = {name: kind.quick for name, kind in LIKELIHOODS.items() if kind.quick}
    check_one_of("likelihood", likelihood, quick)
    if (num_classes is None) == (likelihood == "categorical"):
        raise ValueError(f"num_classes belongs to a categorical likelihood, but is {num_classes!r} for {likelihood!r}.")
    if contrasts and likelihood != "categorical":
        raise ValueError(f"contrasts belong to a categorical likelihood, but it is {likelihood!r}; drop them.")
    kind, values = LIKELIHOODS[likelihood], jnp.asarray(observations)
    check_no_nan("observations", values)
    parameters: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    kind.check_parameters(parameters)
    kind.check_observed(values, parameters)
    if likelihood != "categorical":
        (values,) = as_floats(values)
    if contrasts and num_classes is not None:
        parameters["basis"] = class_contrasts(num_classes)
    if noise_scale is not None:
        check_no_nan("noise_scale", noise_scale)
        check_positive("noise_scale", noise_scale)
        shape = values.shape if num_classes is None else (len(values), num_classes - contrasts)
        _check_fits(np.shape(noise_scale), shape)
    return Surrogate(*quick[likelihood](values, noise_scale, **parameters))


def _check_fits(given: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Refuse a noise scale that does not broadcast against the targets, or has more entries than these."""
    try:
        fits = np.broadcast_shapes(given, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"noise_scale must be a number or broadcast against the targets, {shape}, but has {given}.")


def class_contrasts(num_classes: int) -> Array:
    r"""Return an orthonormal basis of the logits that sum to 0: Helmert's contrasts.

    With a readout of shape (d, k - 1) and its prior N(0, I), ``features @ readout @ class_contrasts(k).T`` are logits
    that give the same distribution over class probabilities as those of a readout of shape (d, k).

    Args:
        num_classes: number of classes $k$, at least 2.

    Returns:
        matrix (k, k - 1), whose columns are orthonormal and each sum to 0.

    Raises:
        ValueError: if there are fewer than two classes.

    Example:
        >>> from numpyro_wide.surrogates import class_contrasts
        >>> class_contrasts(2).tolist()
        [[0.71], [-0.71]]
    """
    if num_classes < 2:
        raise ValueError(f"contrasts need at least two classes, but num_classes is {num_classes}.")
    return jnp.asarray(logit_basis(num_classes, contrasts=True), jnp.result_type(float))
