"""Sums over ranges of layers, from one boundary to another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
LongNumbers = NDArray[np.longdouble]


def running_sums(table: Numbers) -> LongNumbers:
    """Cumulative sums before each boundary: (..., L) as (..., L + 1).

    In long doubles, so that differences of two of them are nearly exact: equal layers make equal
    stages.
    """
    sums = np.zeros((*table.shape[:-1], table.shape[-1] + 1), dtype=np.longdouble)
    np.cumsum(table, axis=-1, dtype=np.longdouble, out=sums[..., 1:])
    return sums


def sums_of_ranges(table: Numbers) -> Numbers:
    """(..., L) as (..., L + 1, L + 1): the sum from layer b to layer e, at ``[..., b, e]``.

    Negative, or undefined, if e is less than b."""
    sums = running_sums(table)
    ranges: Numbers = np.asarray(sums[..., None, :] - sums[..., :, None], float)
    return ranges
