"""Tables of the ranges of layers that stages can have, at ``[stage, begin, end]``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_pipeshift.plan.cost.cut import Counts
from lightning_pipeshift.plan.cost.sums import Numbers


def ranges_of(counts: Any) -> tuple[NDArray[np.intp], ...]:
    """The indices of stages' ranges in such a table.

    Args:
        counts: layers per stage, (S,) or (cuts, S).
    """
    counts = np.asarray(counts, dtype=np.intp)
    ends = counts.cumsum(axis=-1)
    return np.arange(counts.shape[-1]), ends - counts, ends


def narrowest(table: Numbers) -> tuple[float, Counts]:
    """The cut whose largest entry is the smallest, and that entry.

    Args:
        table: (S, L + 1, L + 1), of stage s with the layers from b to e, at ``[s, b, e]``; infinite
            if that is not possible.
    """
    return least_chain(table.shape, lambda s, before: np.maximum(before, table[s]))


def least_sum(table: Numbers) -> tuple[float, Counts]:
    """The cut whose entries have the least sum, and that sum; see :func:`narrowest`."""
    return least_chain(table.shape, lambda s, before: before + table[s])


def least_chain(
    shape: Sequence[int], extended: Callable[[int, Numbers], Numbers]
) -> tuple[float, Counts]:
    """The cut with the least total, stage by stage, and that total: dynamic programming over
    (stage, boundary). A smaller total before a stage must never lead to a larger one after it.

    Args:
        shape: the numbers of stages and of boundaries, with both ends.
        extended: called with a stage, and the least totals of the stages before it by the boundary
            at which they end, (ends, 1); returns the totals with this stage at ``[begin, end]``;
            infinite if that is not possible.
    """
    before = np.where(np.arange(shape[1]) == 0, 0.0, math.inf)
    begins = []
    for stage in range(shape[0]):
        totals = extended(stage, before[:, None])
        begins.append(totals.argmin(axis=0))
        before = totals.min(axis=0)
    bounds = [shape[1] - 1]
    for begin in reversed(begins):
        bounds.insert(0, int(begin[bounds[0]]))
    return float(before[-1]), tuple(end - begin for begin, end in pairwise(bounds))
