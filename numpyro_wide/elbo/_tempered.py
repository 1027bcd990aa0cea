"""Tempered ELBO, and runs of a model beside its guide."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.handlers import replay, seed, substitute, trace
from numpyro.infer.elbo import TraceMeanField_ELBO
from numpyro.primitives import Messenger

from numpyro_wide._checks import check_names_known, check_positive, is_known, whole_number
from numpyro_wide._traces import Sites, latent_sites, refuse_unobserved, sample_sites, values_of_type


def check_weight(name: str, value: ArrayLike) -> None:
    """Refuse a known weight other than one positive finite number."""
    check_positive(name, value)
    if is_known(value) and not (np.ndim(value) == 0 and np.isrealobj(value) and np.isfinite(value)):
        raise ValueError(f"{name} must be one finite number, but got {value}.")


def run_pair(
    rng_key: Array, params: dict, model: Callable, guide: Callable, args: tuple, kwargs: dict
) -> tuple[dict, dict]:
    """Return traces of guide and model on the guide's draws, with the keys of NumPyro's losses."""
    model_key, guide_key = random.split(rng_key)
    guide_trace = trace(substitute(seed(guide, guide_key), data=params)).get_trace(*args, **kwargs)
    mutable = values_of_type(guide_trace, "mutable")
    replayed = substitute(replay(seed(model, model_key), guide_trace), data={**params, **mutable})
    return guide_trace, trace(replayed).get_trace(*args, **kwargs)


Eta = float | Array | Mapping[str, Any] | Callable[[str], ArrayLike]


class _Temper(Messenger):
    """Handler that scales by η the log density of latent sites and of the guide's."""

    def __init__(self, fn: Callable, eta: ArrayLike | dict[str, ArrayLike], *, is_guide: bool):
        super().__init__(fn)
        self.eta, self.is_guide = eta, is_guide

    def process_message(self, msg: dict) -> None:
        if msg["type"] != "sample" or (msg["is_observed"] and not self.is_guide):
            return
        eta = self.eta[msg["name"]] if isinstance(self.eta, dict) else self.eta
        # At η = 1 the ELBO is NumPyro's to the last bit.
        if not (is_known(eta) and eta == 1):
            msg["scale"] = eta if msg["scale"] is None else eta * msg["scale"]


class TemperedTraceMeanFieldELBO(TraceMeanField_ELBO):
    r"""NumPyro's mean-field ELBO with the KL divergence tempered (Huix 2022, equation 6 and section 3).

    .. math:: \mathrm{ELBO}_\eta = \sum_{i=1}^p E_q \log L(y_i|x_i, w) - \eta\,\mathrm{KL}(q\|P_0),
              \qquad \eta = \tau\,p/N

    with p observations and N neurons (Mathematics, :eq:`tempered`). At η = 1 a wide network's guide falls back to its
    prior (Coker 2021, Huix 2022, Prop. 1). For η ≠ 1 the spread is no longer the model's uncertainty. With an output
    scaled by 1/√N give ``eta`` by site, for the hidden layers.

    Args:
        tau: temperature τ > 0, for use with ``num_neurons``.
        num_observations: number p of observations; by default the full size of the plates around the observed sites.
        num_neurons: width N.
        eta: η instead of τ p/N: a positive number, a mapping by site (1 for others), or a function of the site name.
        num_particles: as of NumPyro's ``TraceMeanField_ELBO``.
        vectorize_particles: as there.
        sum_sites: as there.

    Example:
        >>> import numpyro
        >>> from numpyro.infer import SVI
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> from numpyro_wide.elbo import TemperedTraceMeanFieldELBO
        >>> from numpyro_wide.nn import FCN, bnn
        >>> model = bnn(FCN(depth=1, width=64), num_outputs=None, noise=0.1)  # with its rows in a plate
        >>> loss = TemperedTraceMeanFieldELBO(num_neurons=64)
        >>> svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.01), loss)
    """

    def __init__(
        self,
        tau: float = 1.0,
        *,
        num_observations: float | None = None,
        num_neurons: float | None = None,
        eta: Eta | None = None,
        num_particles: int = 1,
        vectorize_particles: bool | Callable = True,
        sum_sites: bool = True,
    ):
        if eta is None:
            if num_neurons is None:
                raise ValueError("give num_neurons, the width N of eta = tau * p / N, or eta itself.")
            for name, value in (("tau", tau), ("num_neurons", num_neurons), ("num_observations", num_observations)):
                if value is not None:
                    check_weight(name, value)
        elif num_neurons is not None or num_observations is not None or (is_known(tau) and tau != 1.0):
            raise ValueError("give either eta, or tau, num_observations and num_neurons; got both.")
        elif isinstance(eta, Mapping):
            for name, value in eta.items():
                check_weight(f"eta[{name!r}]", value)
        elif not callable(eta):
            check_weight("eta", eta)
        self.tau, self.num_observations, self.num_neurons, self.eta = tau, num_observations, num_neurons, eta
        super().__init__(whole_number("num_particles", num_particles), vectorize_particles, sum_sites)

    def loss_with_mutable_state(
        self, rng_key: Array, param_map: dict, model: Callable, guide: Callable, *args: object, **kwargs: object
    ) -> dict[str, object]:
        """Return the negative tempered ELBO."""
        pair = rng_key, param_map, model, guide, args, kwargs
        eta: Any = self.eta
        if eta is None and self.num_neurons is not None:
            p = _count_observations(run_pair(*pair)[1]) if self.num_observations is None else self.num_observations
            eta = self.tau * p / self.num_neurons
        if isinstance(eta, Mapping) or callable(eta):
            eta = _by_site(eta, *run_pair(*pair))
        tempered = _Temper(model, eta, is_guide=False), _Temper(guide, eta, is_guide=True)
        return super().loss_with_mutable_state(rng_key, param_map, *tempered, *args, **kwargs)


def _by_site(eta: Mapping | Callable, guide_trace: Sites, model_trace: Sites) -> dict[str, ArrayLike]:
    """Return η by latent site, of a mapping or a function."""
    latent = sample_sites(guide_trace) | latent_sites(model_trace)
    by_name = eta if isinstance(eta, Mapping) else {}
    check_names_known("eta", by_name, latent, kind="latent site")
    etas = {}
    for name, site in latent.items():
        if site["infer"].get("is_auxiliary") and name not in by_name:
            raise ValueError(
                f"eta by site needs a guide that draws sites one by one, such as AutoNormal, but {name!r} holds "
                "several in one density."
            )
        etas[name] = by_name.get(name, 1.0) if isinstance(eta, Mapping) else eta(name)
        check_weight(f"eta at site {name!r}", etas[name])
    return etas


def _count_observations(model_trace: dict) -> int:
    """Multiply the sizes of the plates around observed sites; equal plates count once."""
    reason = "TemperedTraceMeanFieldELBO reads the number of observations off the plates around the observed sites"
    refuse_unobserved(model_trace, reason)
    sizes = {name: site["args"][0] for name, site in model_trace.items() if site["type"] == "plate"}
    observed = [site for site in sample_sites(model_trace).values() if site["is_observed"]]
    groups = {frozenset(frame.name for frame in site["cond_indep_stack"]) for site in observed}
    counts = [int(np.prod([sizes[name] for name in group])) for group in groups if group and group <= sizes.keys()]
    if not counts:
        raise ValueError(
            f"{reason}, and this model has none; pass num_observations=..., or put the observed sites in a "
            "numpyro.plate."
        )
    return sum(counts)
