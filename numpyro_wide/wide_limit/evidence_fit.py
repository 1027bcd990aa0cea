"""Scales of a network and of its noise by the evidence of its infinitely wide limit."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from numpyro_wide._checks import check_finite, check_known, check_one_of, listing, whole_number
from numpyro_wide.machine import double_precision
from numpyro_wide.surrogates.internal import Observations
from numpyro_wide.wide_limit._activation import Activation
from numpyro_wide.wide_limit._objectives import Bound, Evidence, Objective
from numpyro_wide.wide_limit._rules import rule_of
from numpyro_wide.wide_limit._scale_problem import ScaleProblem
from numpyro_wide.wide_limit._scale_search import FittedScales, ScaleSearch
from numpyro_wide.wide_limit._shapes import check_matrix, check_targets
from numpyro_wide.wide_limit._suspect_rows import warn_of_copies, warn_of_far_rows
from numpyro_wide.wide_limit.fitted_limit import WideLimitFit

Name = Literal["normal", "bernoulli", "binomial", "categorical", "negative_binomial", "poisson", "student_t"]


class _Data(NamedTuple):
    """Targets of a fit and their likelihood.

    Attributes:
        targets: targets, (n,) or (n, k).
        likelihood: name of the likelihood.
        parameters: its parameters that were given, by name.
        offset: what the function values have besides the network's.
    """

    targets: np.ndarray
    likelihood: str
    parameters: dict[str, Any]
    offset: Any

    @classmethod
    def of(cls, y: ArrayLike, num_rows: int, likelihood: str, given: dict[str, Any], offset: ArrayLike) -> "_Data":
        """Check targets and what is known of their likelihood."""
        check_one_of("likelihood", likelihood, get_args(Name))
        check_finite("y", y)
        targets = np.array(y, float)
        check_targets(jnp.asarray(targets), num_rows)
        parameters = {name: value for name, value in given.items() if value is not None}
        if likelihood == "normal":
            if parameters or np.any(np.asarray(offset) != 0):
                foreign = listing([*parameters, *["offset"] * bool(np.any(np.asarray(offset) != 0))])
                raise ValueError(f"{foreign} must not be given where the likelihood is 'normal'; drop it.")
            return cls(targets, likelihood, parameters, offset)
        if likelihood == "categorical" and "num_classes" not in parameters:
            parameters["num_classes"] = _num_classes(targets)
        return cls(targets, likelihood, parameters, offset)

    @property
    def observations(self) -> Observations:
        """Targets and their likelihood, other than the normal."""
        return Observations.of(self.targets, self.likelihood, self.parameters, self.offset)

    @property
    def size(self) -> float:
        """Standard deviation of the function values that is expected."""
        if self.likelihood == "normal":
            return float(np.sqrt(np.mean(self.targets**2))) or 1.0
        return self.observations.size

    def objective(self, problem: ScaleProblem) -> Objective:
        """Return minus the log posterior of a problem's scales."""
        return Evidence(problem, self.targets) if self.likelihood == "normal" else Bound(problem, self.observations)


def _num_classes(labels: np.ndarray) -> int:
    """Return the number of classes of labels that have all of them."""
    present = np.unique(labels)
    if len(present) < 2 or not np.array_equal(present, np.arange(len(present))):
        raise ValueError(
            f"labels of a categorical must be 0, 1, ... up to the number of classes, of which there are two at least, "
            f"but y holds {listing(f'{label:g}' for label in present[:10])}; pass num_classes if a class is missing "
            "from y, or number them by numpy.unique(labels, return_inverse=True)."
        )
    return len(present)


def fit(
    x: ArrayLike,
    y: ArrayLike,
    *,
    likelihood: Name | str = "normal",
    num_classes: int | None = None,
    total_count: ArrayLike | None = None,
    concentration: ArrayLike | None = None,
    df: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    offset: ArrayLike = 0.0,
    network: Any = None,
    activation: Activation | Sequence[Activation] = "erf",
    depth: int | Sequence[int] = 1,
    input_scale: bool | Sequence[bool] = False,
    num_restarts: int = 4,
    num_rows: int = 300,
    seed: int = 0,
) -> WideLimitFit:
    r"""Fit a network's scales and its noise by the evidence of the infinitely wide network.

    The largest log evidence $\log N(y; 0, K + \sigma^2 I)$ of the NNGP kernel (Mathematics, :eq:`kernels`) plus a
    log-normal prior of every scale, within four of its standard deviations, by SciPy's L-BFGS-B, in double precision
    whatever JAX is set to. The prior keeps scales from the ends where the network is a step function or a constant; its
    medians are the scales of :class:`~numpyro_wide.nn.FCN`, ``b_std`` 0.5, and a noise of 0.3 times the targets' root
    mean square. A few starts are tried on some of the rows, and the best one continues with all of them.

    Of another likelihood it is the variational bound on the log evidence that the largest Gaussian gives (Mathematics,
    :eq:`bound-slope`), with function values of the size of the observations a priori, of 10 for the logits of classes
    and 3 for those of a binomial. There is no noise. The bound of "bernoulli" and "categorical" prefers logits that are
    far too small: the readout's scale is chosen in the end by the log probability of labels left out, in three folds of
    ``num_rows`` rows, and has no standard error. Architectures are compared by that, too.

    Standardise inputs and targets, and look at skewed columns first. The scales go into
    ``bnn(FCN(fit.depth, width, fit.activation), None, fit.noise_scale, scales=fit.scales)``, or as medians of their
    priors there; ``fit.network``, of a fit of networks, has them already.

    Rows that stand in a table more than once pass for measurements without noise. Where they may have decided, a
    warning says so; then fit to distinct rows. The noise is Gaussian: a target that is far from what the others predict
    takes the noise and the scales along. A warning says so where one row, or one in fifty, holds more than half of the
    sum of squared residuals, each from a prediction by all other rows, and lies out by twenty of their robust standard
    deviations and five of the other targets'.

    Args:
        x: inputs, (n, d_in), or images for a network that takes them.
        y: targets, (n,), or (n, k) for outputs that share all scales; labels of classes, (n,), from 0.
        likelihood: "normal", with a noise that is fitted; "bernoulli" or "categorical", for classes; "binomial",
            "poisson", "negative_binomial" or "student_t", as in :func:`~numpyro_wide.fitted_surrogate`.
        num_classes: number of classes of a categorical; None for one more than the largest label.
        total_count: number of trials of a binomial; broadcasts against the targets, like those below.
        concentration: concentration of a negative binomial.
        df: degrees of freedom of Student's t.
        scale: scale of Student's t.
        offset: what is added to the function values of a likelihood that is not normal, such as the logarithm of an
            exposure, or of the mean count.
        network: network whose ``w_std``, ``b_std`` and ``readout_w_std`` are fitted, a :class:`~numpyro_wide.nn.CNN`,
            :class:`~numpyro_wide.nn.WideResNet`, :class:`~numpyro_wide.nn.FCN` or one of a registered kernel, or
            several to compare, instead of ``activation`` and ``depth``; what else it holds stays.
        activation: "erf", "gelu", "identity", "relu", "tanh" or a function of arrays, or several to compare.
        depth: number of hidden layers, at least 1, or several to compare.
        input_scale: whether each column of the inputs has a scale of its own (automatic relevance determination), or
            both to compare, ``(False, True)``: decisive on some tables, and on others only more numbers to learn.
        num_restarts: number of starts for each architecture.
        num_rows: number of rows that the starts see.
        seed: seed of the starts and of the choice of rows.

    Returns:
        fit of the best architecture, a :class:`~numpyro_wide.wide_limit.WideLimitFit`, with the table of
        all.

    Raises:
        TypeError: under a transformation of JAX, where numbers are not known, or for what does not hold real numbers.
        ValueError: for data that are not matrices of as many rows, or hold NaN or infinities; an unknown activation, a
            bad depth or ``input_scale``; or if no start has a finite evidence.

    Warns:
        UserWarning: if copied rows, or a single far one, may have decided.

    Example:
        >>> import numpy as np
        >>> from numpyro_wide import wide_limit
        >>> x = np.linspace(-2, 2, 30)[:, None]
        >>> fit = wide_limit.fit(x, np.sin(3 * x[:, 0]), activation=("erf", "relu"), num_restarts=1)
        >>> fit.activation, sorted(fit.scales)
        ('erf', ['b_std', 'readout_w_std', 'w_std'])
        >>> mean, variance = fit.predict(np.zeros((1, 1)))
    """
    check_known("wide_limit.fit chooses by numbers")
    check_finite("x", x)
    inputs = np.array(x, float)
    networks = [] if network is None else [network] if callable(network) else list(network)
    if not networks:
        check_matrix("x", inputs)
    given = {"num_classes": num_classes, "total_count": total_count, "concentration": concentration}
    data = _Data.of(y, len(inputs), likelihood, {**given, "df": df, "scale": scale}, offset)
    by_column = _several(input_scale)
    if not all(isinstance(choice, bool | np.bool_) for choice in by_column):
        raise ValueError(
            "input_scale must be True or False, whether each column of x has a scale that is fitted, or both to "
            f"compare, (False, True), but got {input_scale!r}."
        )
    _check_networks(networks, by_column)
    num_restarts = whole_number("num_restarts", num_restarts)
    num_rows = min(whole_number("num_rows", num_rows), len(inputs))
    architectures = [
        (name, whole_number("depth", layers), bool(choice))
        for name, layers, choice in itertools.product(_several(activation), _several(depth), by_column)
    ]
    if not architectures or (network is not None and not networks):
        raise ValueError("there is no architecture to fit; give at least one activation, depth and input_scale.")
    random = np.random.default_rng(seed)
    rows = np.sort(random.choice(len(inputs), num_rows, replace=False))
    by_noise: dict[str, Any] = {"size": data.size, "has_noise": likelihood == "normal"}
    with double_precision():
        if networks:
            pairs = itertools.product(networks, by_column)
            problems = [
                ScaleProblem.of_network(one, inputs, by_input=bool(choice), **by_noise) for one, choice in pairs
            ]
        else:
            problems = [ScaleProblem.of(*one[:2], inputs, by_input=one[2], **by_noise) for one in architectures]
        searches = [ScaleSearch(data.objective(problem)) for problem in problems]
        fits = sorted((search.fit(rows, num_restarts, random) for search in searches), key=lambda f: -f.score)
    best = _as_fit(fits, inputs, data)
    if likelihood == "normal":
        warn_of_copies(best)
        warn_of_far_rows(best)
    return best


def _check_networks(networks: Sequence[Any], by_column: Iterable[Any]) -> None:
    """Refuse networks whose scales cannot be fitted."""
    for network in networks:
        rule_of(network)
        names = ["w_std", "b_std", "readout_w_std", *["input_scale"] * any(by_column)]
        if missing := [name for name in names if not hasattr(network, name)]:
            raise ValueError(
                f"the scales {listing(names)} are fitted, but the {type(network).__name__} has no {listing(missing)}; "
                "leave input_scale out, or give the module the attributes that its rule reads."
            )


def _as_fit(fits: list[FittedScales], inputs: np.ndarray, data: _Data) -> WideLimitFit:
    """Return the first of the fits, with a table of all."""
    shown = ("activation", "depth", "log_evidence", "log_marginal", "noise_scale", "held_out")
    best = fits[0]._asdict()
    del best["log_marginal"], best["held_out"]
    if best["network"] is not None:
        best["network"] = best["network"].clone(**best["scales"])
    table = [
        {name: getattr(found, name) for name in shown if getattr(found, name) is not None}
        | {"input_scale": "input_scale" in found.scales}
        for found in fits
    ]
    return WideLimitFit(**best, table=table, inputs=inputs, **data._asdict())


def _several(given: Any) -> Iterable[Any]:
    """Return one or several choices as several."""
    if isinstance(given, str | int | np.integer | np.bool_) or callable(given):
        return [given]
    if not isinstance(given, Sequence) and not isinstance(given, np.ndarray):
        raise ValueError(f"activation, depth and input_scale must be one or several, but got {listing([str(given)])}.")
    return given
