"""Estimators with scikit-learn's interface, which they need, chosen by leave-one-out log densities, with a report."""

from numpyro_wide.estimators._classifier import WideBNNClassifier as WideBNNClassifier
from numpyro_wide.estimators._regressor import WideBNNRegressor as WideBNNRegressor

__all__ = ["WideBNNClassifier", "WideBNNRegressor"]
