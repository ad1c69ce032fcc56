"""A cut of a model into stages, with the layers that are recomputed or wait in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

Counts = tuple[int, ...]
"""The number of layers of each stage."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Which layers each stage has, and what of them it does not hold all the time.

    Args:
        counts: the number of layers of each stage.
        recompute: the layers that are recomputed.
        optimizer_on_host: the layers whose optimizer state is in host memory between two steps.
        weights_on_host: the layers whose weights are in host memory while they wait.
        spared: of recomputed layers that do not drop all of their tensors, the layer and the part
            of its forward that does not run again.
    """

    counts: Counts
    recompute: frozenset[int] = frozenset()
    optimizer_on_host: frozenset[int] = frozenset()
    weights_on_host: frozenset[int] = frozenset()
    spared: frozenset[tuple[int, float]] = frozenset()

    @property
    def bounds(self) -> tuple[int, ...]:
        """The stages' ends: stage s has the layers from ``bounds[s]`` to ``bounds[s + 1]``."""
        return tuple(accumulate(self.counts, initial=0))
