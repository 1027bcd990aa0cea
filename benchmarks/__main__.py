"""Runs every benchmark, or those that are named, and prints their tables."""

import argparse
import platform

import jax

import numpyro_wide
from benchmarks import amortized, gradients, imports, samplers, scale, vi

ROOMS = {
    "amortized": amortized,
    "gradients": gradients,
    "imports": imports,
    "samplers": samplers,
    "scale": scale,
    "vi": vi,
}


def main() -> None:
    """All tables of the rooms named on the command line, BLAS held to one thread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="*", help=f"of {', '.join(ROOMS)}; all by default")
    rooms = parser.parse_args().rooms or list(ROOMS)
    unknown = sorted(set(rooms) - set(ROOMS))
    if unknown:
        parser.error(f"expected names of {list(ROOMS)}, but got {unknown}")
    print(f"jax {jax.__version__}, {platform.machine()}, {jax.devices()[0].platform}, BLAS held to one thread")
    with numpyro_wide.set_blas_threads(1):
        for room in rooms:
            ROOMS[room].tables()


if __name__ == "__main__":
    main()
