"""NumPyro pieces for inference in wide Bayesian neural networks."""

from numpyro_wide._blas import set_blas_threads as set_blas_threads

__version__ = "0.1.0"

__all__ = ["set_blas_threads"]
