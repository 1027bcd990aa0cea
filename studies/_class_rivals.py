"""What scikit-learn has for classes: logistic regression, networks, boosted trees, a tuned Gaussian process."""

import warnings

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPClassifier

NUM_MEMBERS = 5
MOST_TUNED = 500  # rows that the scales of a Gaussian process are fitted to


def logistic_regression(x, labels):
    """Fit, the penalty chosen by cross-validation."""
    penalties = {"C": np.logspace(-4, 1, 6)}
    model = GridSearchCV(LogisticRegression(max_iter=1000), penalties, scoring="neg_log_loss", cv=3)
    return model.fit(x, labels)


def boosting(x, labels):
    """Fit boosted trees with small steps; a tenth of the rows chooses when to stop."""
    options = {"learning_rate": 0.05, "max_iter": 500, "early_stopping": True, "random_state": 0}
    return HistGradientBoostingClassifier(**options).fit(x, labels)


def ensemble(table):
    """Average probabilities of networks with scikit-learn's defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        members = [MLPClassifier(random_state=i).fit(table.x, table.labels) for i in range(NUM_MEMBERS)]
    return np.mean([member.predict_proba(table.x_test) for member in members], axis=0)


def gaussian_process(table):
    """Predict by one Gaussian process a class against the rest, each with its scales by Laplace's evidence."""
    some = np.random.default_rng(0).permutation(len(table.x))[:MOST_TUNED]
    start = ConstantKernel(10.0, (1e-2, 1e5)) * RBF(table.x.shape[1] ** 0.5, (1e-2, 1e3))

    def of_class(label):
        is_class = table.labels == label
        tuned = GaussianProcessClassifier(start).fit(table.x[some], is_class[some])
        fitted = GaussianProcessClassifier(tuned.kernel_, optimizer=None).fit(table.x, is_class)
        return fitted.predict_proba(table.x_test)[:, 1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        if table.num_classes == 2:
            found = of_class(1)
            return np.stack([1 - found, found], axis=1)
        shares = np.stack([of_class(label) for label in range(table.num_classes)], axis=1)
    return shares / shares.sum(axis=1, keepdims=True)
