"""Versions, devices and precision, and a check of a few seconds: ``python -m numpyro_wide``."""

import sys
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np

import numpyro_wide


def main() -> None:
    """Print what is installed; compare a log evidence with NumPy's, and exit with 1 if they differ."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("numpyro", "jax", "jaxlib", "arviz", "flax"))
    print(f"numpyro_wide {numpyro_wide.__version__}, Python {sys.version.split()[0]}, {versions}")
    print(f"devices: {', '.join(map(str, jax.devices()))}; numbers are {jnp.result_type(float)} by default")
    random = np.random.default_rng(0)
    features, targets, noise_scale = random.normal(size=(30, 5)), random.normal(size=30), 0.5
    covariance = features @ features.T + noise_scale**2 * np.eye(30)
    distance = targets @ np.linalg.solve(covariance, targets)
    expected = -0.5 * (distance + np.linalg.slogdet(2 * np.pi * covariance)[1])
    log_evidence = float(numpyro_wide.linear_gaussian.log_evidence(features, targets, noise_scale))
    is_right = abs(log_evidence - expected) < 1e-4 * abs(expected)
    verdict = "works" if is_right else "WRONG"
    print(f"log evidence of a regression: {log_evidence:.4f}, by NumPy {expected:.4f}: {verdict}")
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
