"""Gaussian stand-ins for other likelihoods, by which a readout can be repriorised."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from scipy.linalg import helmert

from numpyro_wide._checks import as_floats


class Surrogate(NamedTuple):
    """Targets and noise scale of the Gaussian likelihood that stands in for another one.

    Attributes:
        targets: (n,) or (n, k).
        noise_scale: a scalar, of the shape of ``targets``, or (n, 1) where a row's outputs share it.
    """

    targets: Array
    noise_scale: Array


def surrogate_targets(
    observations: ArrayLike,
    likelihood: Literal["categorical", "bernoulli", "poisson"],
    *,
    num_classes: int | None = None,
    contrasts: bool = False,
    noise_scale: ArrayLike | None = None,
) -> Surrogate:
    r"""Gaussian targets and noise to repriorise a readout by, where the likelihood is not Gaussian.

    The repriorisation map is a bijection, whatever targets and noise it is built from: the posterior stays exact
    (Hron 2022, App. F), and a good choice makes $\phi$ close to N(0, I). This one takes the likelihood of the function
    value $f$ for a Gaussian $N(t; f, s^2)$ with the same first and second derivative:

    - "categorical", softmax of $k$ logits, at $f = 0$, where the classes are alike: $s^2 = k$ and
      $t = k\,(\text{one-hot} - 1/k)$, the one-hot code minus its mean, in units of the logits;
    - "bernoulli", one logit, at $f = 0$: $s^2 = 4$ and $t = 4\,(y - \tfrac12)$;
    - "poisson", the log of the rate, near its mode at $f = \log(y + \tfrac12)$: $s^2 = 1/(y + \tfrac12)$, one
      for each observation, and $t = f - s^2/2$.

    This is the quick one, which needs the observations alone. :func:`fitted_surrogate`, fitted before the chain to
    where the data take the function, costs no more in a gradient, and gave classifiers thrice the effective draws.

    A bare one-hot code minus its mean with a small noise treats the labels as far more informative than they are, and
    can mix more slowly than the plain model.

    Softmax does not change when all logits move together, which a Gaussian for all $k$ of them does not know. A model
    whose readout gives the $k - 1$ coordinates of the logits in the basis of :func:`class_contrasts` leaves that
    direction out, has the same distribution over class probabilities, and suits the map better: use
    ``contrasts=True`` for it.

    Args:
        observations: class labels (n,), from 0; outcomes 0 or 1, (n,) or (n, k); counts (n,) or (n, k).
        likelihood: of what; the logits or log rates must be ``features @ readout`` up to terms without the readout,
            which it is well to subtract from the targets if they are known.
        num_classes: number of classes $k$ of a categorical.
        contrasts: whether ``features @ readout`` are a categorical's logits in the basis of :func:`class_contrasts`.
        noise_scale: $s$ instead of the above; targets of a categorical or Bernoulli scale with its square.

    Returns:
        ``(targets, noise_scale)``: (n, k) for a categorical, or (n, k - 1) with contrasts, else of the shape of the
        observations.

    Raises:
        ValueError: for an unknown likelihood, without ``num_classes`` where it is needed, or for observations that the
            likelihood cannot give.

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
    if likelihood not in ("categorical", "bernoulli", "poisson"):
        raise ValueError(
            f"likelihood must be 'categorical', 'bernoulli' or 'poisson', but got {likelihood!r}; any other likelihood "
            "takes targets and a noise scale that you choose."
        )
    if (num_classes is None) == (likelihood == "categorical"):
        raise ValueError(f"num_classes belongs to a categorical likelihood, but is {num_classes!r} for {likelihood!r}.")
    values = jnp.asarray(observations)
    check_range(values, likelihood, {"categorical": (num_classes or 1) - 1, "bernoulli": 1}.get(likelihood, np.inf))
    if likelihood != "categorical":
        (values,) = as_floats(values)
    if likelihood == "poisson":
        log_rate = jnp.log(values + 0.5)
        scale = jnp.exp(-0.5 * log_rate)
        return Surrogate(log_rate - 0.5 * scale**2, scale if noise_scale is None else jnp.asarray(noise_scale))
    if num_classes is None:
        deviation, default = values - 0.5, 2.0
    else:
        deviation, default = jax.nn.one_hot(values, num_classes) - 1.0 / num_classes, np.sqrt(num_classes)
        if contrasts:
            deviation = deviation @ class_contrasts(num_classes)
    scale = jnp.asarray(default if noise_scale is None else noise_scale, deviation.dtype)
    # The gradient of the log-likelihood at f = 0 is the deviation, that of the Gaussian t / s².
    return Surrogate(scale**2 * deviation, scale)


def class_contrasts(num_classes: int) -> Array:
    r"""An orthonormal basis of the logits that sum to 0: Helmert's contrasts.

    With a readout of shape (d, k - 1) and its prior N(0, I), ``features @ readout @ class_contrasts(k).T`` are logits
    that give the same distribution over class probabilities as those of a readout of shape (d, k).

    Args:
        num_classes: number of classes $k$, at least 2.

    Returns:
        Shape (k, k - 1); its columns are orthonormal and each sums to 0.

    Raises:
        ValueError: if there are fewer than two classes.

    Example:
        >>> from numpyro_wide import class_contrasts
        >>> class_contrasts(2).tolist()
        [[0.71], [-0.71]]
    """
    if num_classes < 2:
        raise ValueError(f"contrasts need at least two classes, but num_classes is {num_classes}.")
    return jnp.asarray(helmert(num_classes).T, jnp.result_type(float))


def check_range(values: Array | np.ndarray, likelihood: str, largest: ArrayLike) -> None:
    """Refuses observations that the likelihood cannot give, where the numbers are known already."""
    if likelihood == "categorical" and values.ndim != 1:
        # The argmax of a column would make every label 0.
        mend = "take labels[:, 0]" if values.ndim == 2 and values.shape[1] == 1 else "take argmax(-1) of codes"
        raise ValueError(f"class labels must have shape (n,), but got {values.shape}; {mend}.")
    if isinstance(values, jax.core.Tracer):
        return
    array = np.asarray(values)
    if not np.all((array >= 0) & (array <= largest) & (array == np.round(array))):
        most = largest if np.ndim(largest) == 0 else f"total_count, at most {np.max(largest)}"
        raise ValueError(
            f"observations of a {likelihood} likelihood must be whole numbers from 0 to {most}, but they range from "
            f"{array.min()} to {array.max()}, or are not whole."
        )
