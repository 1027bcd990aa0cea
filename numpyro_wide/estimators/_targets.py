"""Scale of the targets: as they are, cube roots or logarithms, standardised; chosen by leave-one-out densities."""

from typing import NamedTuple

import numpy as np

from numpyro_wide.estimators._base import Report, moments
from numpyro_wide.estimators._plan import Plan
from numpyro_wide.estimators._posteriors import LimitPosterior, Mixture
from numpyro_wide.estimators._scoring import is_better
from numpyro_wide.wide_limit._fit import fit
from numpyro_wide.wide_limit._limit import WideLimitFit

_NAMES = {"none": "as they are", "cube_root": "cube roots", "log": "logarithms"}  # in the order of extrapolations
TRANSFORMS = tuple(_NAMES)
_LEAST_RATIO = 3.0  # of the largest target to the least; below, the maps are nearly straight
_LARGEST_ERROR = 1.05  # of means, relative to that of the targets as they are


class TargetScale(NamedTuple):
    """Map z of targets, standardised, elementwise."""

    transform: str
    loc: np.ndarray  # (k,), or () for vector targets
    scale: np.ndarray

    @classmethod
    def of(cls, transform: str, y: np.ndarray) -> "TargetScale":
        """Standardise the map of y (n,) or (n, k); a constant column has the scale one."""
        loc, scale = moments(_mapped(transform, y))
        return cls(transform, loc, np.where(scale > 0, scale, 1.0))

    def forward(self, y: np.ndarray) -> np.ndarray:
        """Return z of y, not finite where there is none."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return (_mapped(self.transform, y) - self.loc) / self.scale

    def inverse(self, z: np.ndarray) -> np.ndarray:
        """Return y of z (..., k)."""
        mapped = z * self.scale + self.loc
        if self.transform == "log":
            return np.exp(mapped)
        return mapped**3 if self.transform == "cube_root" else mapped

    def log_slope(self, y: np.ndarray) -> np.ndarray:
        """Return log dz/dy, summed over outputs, of y (n,) or (n, k): (n,)."""
        slope = -np.log(self.scale) + np.zeros(y.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.transform == "log":
                slope = slope - np.log(y)
            if self.transform == "cube_root":
                slope = slope - np.log(3) - 2 / 3 * np.log(np.abs(y))
        return slope.reshape(len(y), -1).sum(axis=1)

    def moments(self, mixture: Mixture) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and deviation of y, (m, k) each, for mixtures of Gaussian z."""
        if self.transform == "none":
            mean, variance = mixture.moments()
            return self.inverse(mean), np.sqrt(variance) * self.scale
        mean, variance, unit = self._in_units(*mixture)
        mean, variance = Mixture(*_of_map(self.transform, mean, variance)).moments()
        return mean * unit, np.sqrt(variance) * unit

    def correlation(self, mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
        """Return correlations of y, (m, m, k), where z is jointly Gaussian, with means (m, k)."""
        if self.transform == "none":
            found = covariance
        elif self.transform == "log":
            found = np.expm1(covariance * self.scale**2)
        else:  # by Hermite polynomials
            mean, variance, _ = self._in_units(mean, np.einsum("iik->ik", covariance))
            first, second = 3 * (mean**2 + variance), 3 * mean
            found = first[:, None] * first * covariance + 2 * second[:, None] * second * covariance**2
            found = found + 6 * covariance**3
        deviation = np.sqrt(np.einsum("iik->ik", found))
        return found / (deviation[:, None] * deviation)

    def _in_units(self, mean: np.ndarray, variance: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return moments of a map of y / unit, and the unit, which keeps squares in range."""
        if self.transform == "log":
            return mean * self.scale, variance * self.scale**2, np.exp(self.loc)
        return mean + self.loc / self.scale, variance, self.scale**3


def _mapped(transform: str, y: np.ndarray) -> np.ndarray:
    if transform == "log":
        return np.log(y)
    return np.cbrt(y) if transform == "cube_root" else y


def _of_map(transform: str, mean: np.ndarray, variance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and variance of the exponential or the cube of a Gaussian."""
    if transform == "log":
        expected = np.exp(mean + variance / 2)
        return expected, np.expm1(variance) * expected**2
    square = mean**2
    return mean * (square + 3 * variance), variance * (9 * square**2 + 36 * square * variance + 15 * variance**2)


def refuse_not_positive(transform: str, y: np.ndarray) -> None:
    """Refuse targets that a map does not take."""
    if transform != "none" and np.min(y) <= 0:
        raise ValueError(
            f'target_transform="{transform}" needs positive targets, but the least is {np.min(y):.4g}; take "none".'
        )


def choose_scale(
    x: np.ndarray, y: np.ndarray, plan: Plan, random: np.random.RandomState, report: Report
) -> TargetScale:
    """Choose a map of targets y (n,) or (n, k) that are positive, by densities of y in its own units."""
    if plan.target_transform != "auto":
        return TargetScale.of(plan.target_transform, y)
    as_they_are = TargetScale.of("none", y)
    if not plan.transform_rows or np.min(y) <= 0 or np.max(y) < _LEAST_RATIO * np.min(y):
        return as_they_are
    rows = random.permutation(len(y))[: plan.transform_rows]
    known = {name: TargetScale.of(name, y) for name in TRANSFORMS}
    limits = _limits(x[rows], {name: scale.forward(y[rows]) for name, scale in known.items()}, plan)
    structure = limits["none"].table[0]["structure"]
    scores = {name: _left_out(limits[name], y[rows], scale) for name, scale in known.items()}
    unit = np.mean(as_they_are.scale)
    report.add(
        "Targets",
        f"leave-one-out log densities per row, and errors, of an infinitely wide network, {structure}, for {len(rows)} "
        "rows: "
        + ", ".join(
            f"{_NAMES[name]} {found.mean():.3f}, {error / unit:.3f}" for name, (found, error) in scores.items()
        ),
    )
    best = "none"
    for name in TRANSFORMS[1:]:
        is_clear = is_better(scores[name][0], scores[best][0])
        if is_clear and scores[name][1] < _LARGEST_ERROR * scores["none"][1]:
            best = name
    report.add("Targets", f"they are taken {'' if best == 'none' else 'as their '}{_NAMES[best]}")
    return known[best]


def _limits(x: np.ndarray, by_map: dict[str, np.ndarray], plan: Plan) -> dict[str, WideLimitFit]:
    """Fit maps of the targets, of the structure with the larger evidence of the targets as they are.

    Maps of a sum of effects, chosen by a dense limit, are none.
    """
    may_be_sum = "additive" in plan.structures and np.ptp(x, axis=0).all()
    fits = [_limit(x, by_map["none"], structure) for structure in ("dense", "additive")[: 1 + bool(may_be_sum)]]
    best = max(fits, key=lambda one: one.table[0]["log_marginal"])
    others = {name: _limit(x, z, best.table[0]["structure"]) for name, z in by_map.items() if name != "none"}
    return {"none": best} | others


def _limit(x: np.ndarray, z: np.ndarray, structure: str) -> WideLimitFit:
    """Fit a limit; a scale by column of a structured one would take minutes."""
    by_column = x.shape[1] > 1 and structure == "dense"
    return fit(x, z, structure=structure, input_scale=by_column, num_restarts=1, num_rows=len(x), progress_bar=False)


def _left_out(limit: WideLimitFit, y: np.ndarray, scale: TargetScale) -> tuple[np.ndarray, float]:
    """Return leave-one-out log densities (n,) of a limit of targets y, and its root mean square error."""
    left_out = LimitPosterior(limit).left_out(limit.nngp(limit.inputs))
    by_row = left_out.log_density(limit.targets.reshape(len(y), -1)) + scale.log_slope(y)
    errors = scale.moments(left_out)[0] - y.reshape(len(y), -1)
    return by_row, float(np.sqrt(np.mean(errors**2)))
