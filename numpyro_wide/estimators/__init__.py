"""Estimators with scikit-learn's interface, from arrays to predictions with their uncertainty in three lines.

They compose what the other rooms hold and decide by leave-one-out log densities what to run: the closed form of the
infinitely wide network, draws of its prior by their evidence, or chains. ``report_`` says what was decided from which
numbers. scikit-learn is imported with this room, and no earlier.
"""

from importlib.util import find_spec

if find_spec("sklearn") is None:
    raise ImportError("numpyro_wide.estimators needs scikit-learn; pip install 'numpyro_wide[estimators]'.")

from numpyro_wide.estimators._classifier import WideBNNClassifier as WideBNNClassifier
from numpyro_wide.estimators._regressor import WideBNNRegressor as WideBNNRegressor

__all__ = ["WideBNNClassifier", "WideBNNRegressor"]
