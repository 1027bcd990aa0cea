"""Estimators with scikit-learn's interface: from arrays to predictions with their uncertainty in three lines.

Leave-one-out log densities decide which posterior predicts: the closed form of the infinitely wide network, weighted
draws of its prior, or chains. ``report_`` gives the numbers behind each decision. scikit-learn is imported with this
package, and no earlier.
"""

from importlib.util import find_spec

if find_spec("sklearn") is None:
    raise ImportError("numpyro_wide.estimators needs scikit-learn; pip install 'numpyro_wide[estimators]'.")

from numpyro_wide.estimators._classifier import WideBNNClassifier as WideBNNClassifier
from numpyro_wide.estimators._regressor import WideBNNRegressor as WideBNNRegressor

__all__ = ["WideBNNClassifier", "WideBNNRegressor"]
