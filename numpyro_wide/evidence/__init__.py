"""Evidence of a model: how probable the data are under it, with all weights integrated out."""

from numpyro_wide.evidence._methods import Evidence as Evidence
from numpyro_wide.evidence._model_evidence import model_evidence

__all__ = ["model_evidence"]
