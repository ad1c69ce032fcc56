"""Tables of the ranges of layers that stages can have, at ``[stage, begin, end]``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from lightning_pipeshift.plan.cost.workload import Counts, Numbers


@dataclass(frozen=True, slots=True, order=True)
class Solution:
    """A cut and its estimate.

    Args:
        seconds: of a step.
        counts: the layers per stage.
        pace: the seconds of the slowest stage or link, for a microbatch.
        sum: the seconds of all stages and links, for a microbatch.
    """

    seconds: float
    counts: Counts
    pace: float = field(compare=False)
    sum: float = field(compare=False)


def with_drained(table: Numbers, drained: frozenset[int]) -> Numbers:
    """The table with infinity where a stage of ``drained`` owns a layer, or another owns none."""
    empty = np.eye(table.shape[1], dtype=bool)
    is_drained = np.array([stage in drained for stage in range(len(table))])
    found: Numbers = np.where(empty == is_drained[:, None, None], table, math.inf)
    return found


def narrowest(table: Numbers) -> tuple[float, Counts]:
    """The cut whose largest entry is the smallest, and that entry.

    Args:
        table: (S, L + 1, L + 1), of stage s with the layers from b to e, at ``[s, b, e]``; infinite
            if that is not possible.
    """
    best = [table[0, 0]]
    for stage in table[1:]:
        best.append(np.maximum(best[-1][:, None], stage).min(axis=0))
    bounds = [table.shape[1] - 1]
    for before, stage in zip(best[-2::-1], table[:0:-1], strict=True):
        bounds.insert(0, int(np.maximum(before, stage[:, bounds[0]]).argmin()))
    bounds.insert(0, 0)
    return float(best[-1][-1]), counts_of(bounds)


def counts_of(bounds: Sequence[int]) -> Counts:
    """The layers per stage between these boundaries."""
    return tuple(end - begin for begin, end in pairwise(bounds))
