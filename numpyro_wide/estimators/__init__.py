"""Estimators with scikit-learn's interface, chosen by leave-one-out log densities, with a report."""

from importlib.util import find_spec

if find_spec("sklearn") is None:
    raise ImportError("numpyro_wide.estimators needs scikit-learn; pip install 'numpyro_wide[estimators]'.")

from numpyro_wide.estimators._classifier import WideBNNClassifier as WideBNNClassifier
from numpyro_wide.estimators._regressor import WideBNNRegressor as WideBNNRegressor

__all__ = ["WideBNNClassifier", "WideBNNRegressor"]
