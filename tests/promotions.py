"""Raises where this package lets JAX promote ranks or types by itself; NumPyro and others may.

JAX has one switch for all code of a process. Who promotes is the nearest caller outside of JAX, so its two places that
notice are wrapped; they are private, and of the release that the suite is developed with.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import jax
import jax._src.dtypes as jax_dtypes
import jax._src.numpy.util as jax_util
from jax._src.config import NumpyDtypePromotion

PACKAGE = "/numpyro_wide/"
# A distribution's parameters broadcast against values of any rank and type, as NumPyro's own do. And where a user's
# model is differentiated, what its operations promote in their derivatives is promoted on that line.
EXEMPT = tuple(f"{PACKAGE}{part}" for part in ("distributions/", "readout/_collapse.py", "readout/_assumptions.py"))
SKIPPED = ("/jax/", "/functools.py", "/contextlib.py", "/weakref.py")

IS_KNOWN = hasattr(jax_util, "_rank_promotion_warning_or_error") and hasattr(jax_dtypes, "_least_upper_bound")


def promoter() -> str:
    """The line that does it, if it is one of this package; else nothing."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and any(part in frame.f_code.co_filename for part in SKIPPED):
        frame = frame.f_back
    name = frame.f_code.co_filename if frame else ""
    is_ours = PACKAGE in name and "/tests/" not in name and not any(part in name for part in EXEMPT)
    return f"{name}:{frame.f_lineno}" if frame and is_ours else ""


@contextmanager
def strict() -> Iterator[None]:
    """No promotion of ranks, and none of types but of Python's numbers, in this package's own lines."""
    if not IS_KNOWN:
        yield
        return
    least_upper_bound = jax_dtypes._least_upper_bound

    def of_ranks(function: str, shapes: Any) -> None:
        if where := promoter():
            raise ValueError(f"{where} leaves it to {function} to promote the ranks of {shapes}.")

    def of_types(mode: Any, x64: bool, *nodes: Any) -> Any:
        try:
            return least_upper_bound(mode, x64, *nodes)
        except jax_dtypes.TypePromotionError as error:
            if where := promoter():
                raise ValueError(f"{where} leaves it to JAX to promote the types {nodes}.") from error
            return least_upper_bound(NumpyDtypePromotion.STANDARD, x64, *nodes)

    with (
        patch.object(jax_util, "_rank_promotion_warning_or_error", of_ranks),
        patch.object(jax_dtypes, "_least_upper_bound", of_types),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
    ):
        yield
