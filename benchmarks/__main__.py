"""Runs every benchmark and prints its table."""

import platform

import jax

import numpyro_wide
from benchmarks import gradients


def main() -> None:
    """All tables, BLAS held to one thread."""
    print(f"jax {jax.__version__}, {platform.machine()}, {jax.devices()[0].platform}, BLAS held to one thread")
    with numpyro_wide.set_blas_threads(1):
        gradients.against_plain()
        gradients.against_naive()
        gradients.between_variants()


if __name__ == "__main__":
    main()
