r"""Exponential families in natural parameters, as NumPyro distributions.

With a guide $q(\theta; \eta) = h(\theta) \exp(\eta^\top T(\theta) - A(\eta))$ in its natural parameters η
(Mathematics, :eq:`family`) the expected forward KL divergence is strictly convex in the function $x \mapsto \eta(x)$
(McNamara 2025, Lemma 1), which no parametrisation by means and scales gives. Every constructor takes one array whose
*last axis* holds η in the order of T, the other axes being the batch, and a ``shift`` that is added to it: the paper
takes ``shift=1e-4`` for networks whose output starts at zero; where zero lies outside the family's space, the shift
moves the start into it.

Write ``shift=natural.parameters(dist.Normal(0.0, 1.0))`` to start at a given distribution, and
``biject_to(natural.domain(natural.Normal))`` for a smooth map from unconstrained numbers into the space of natural
parameters where an encoder might leave it (the objective is then no longer convex in the encoder's output).
"""

from numpyro_wide.natural._discrete import Bernoulli as Bernoulli
from numpyro_wide.natural._discrete import Categorical as Categorical
from numpyro_wide.natural._discrete import Poisson as Poisson
from numpyro_wide.natural._domain import domain as domain
from numpyro_wide.natural._normal import LogNormal as LogNormal
from numpyro_wide.natural._normal import MultivariateNormal as MultivariateNormal
from numpyro_wide.natural._normal import Normal as Normal
from numpyro_wide.natural._parameters import parameters as parameters
from numpyro_wide.natural._positive import Beta as Beta
from numpyro_wide.natural._positive import Dirichlet as Dirichlet
from numpyro_wide.natural._positive import Exponential as Exponential
from numpyro_wide.natural._positive import Gamma as Gamma
from numpyro_wide.natural._von_mises import VonMises as VonMises

__all__ = [
    "Bernoulli",
    "Beta",
    "Categorical",
    "Dirichlet",
    "Exponential",
    "Gamma",
    "LogNormal",
    "MultivariateNormal",
    "Normal",
    "Poisson",
    "VonMises",
    "domain",
    "parameters",
]
