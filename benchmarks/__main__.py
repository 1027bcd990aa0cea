"""The command line: every benchmark, or those that are named, and their tables."""

import argparse
import platform

import jax

import numpyro_wide
from benchmarks import (
    amortized,
    as_users,
    convolutions,
    gradients,
    imports,
    limit_kernels,
    many_rows,
    microcanonical,
    predict,
    samplers,
    scale,
    sizes,
    startup,
    surrogates,
    turns,
    vi,
)

TABLES = {
    "amortized": amortized,
    "as_users": as_users,
    "convolutions": convolutions,
    "gradients": gradients,
    "imports": imports,
    "limit_kernels": limit_kernels,
    "many_rows": many_rows,
    "microcanonical": microcanonical,
    "predict": predict,
    "samplers": samplers,
    "scale": scale,
    "sizes": sizes,
    "startup": startup,
    "surrogates": surrogates,
    "turns": turns,
    "vi": vi,
}


def main() -> None:
    """Print all tables that are named on the command line, BLAS held to one thread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(TABLES)}; all by default")
    names = parser.parse_args().names or list(TABLES)
    unknown = sorted(set(names) - set(TABLES))
    if unknown:
        parser.error(f"expected names of {list(TABLES)}, but got {unknown}")
    print(f"jax {jax.__version__}, {platform.machine()}, {jax.devices()[0].platform}, BLAS held to one thread")
    with numpyro_wide.set_blas_threads(1):
        for name in names:
            TABLES[name].tables()


if __name__ == "__main__":
    main()
