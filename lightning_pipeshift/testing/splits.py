"""The splits of a model for a comparison: the number of stages, the cut, and the schedule.

A fault may occur with one cut only, so the cuts vary: the strategy's own, and random ones, which
are the same each time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

CUTS = ("measured", "random", "uniform")
"""The named cuts: by the measured time of each layer, and chosen again after the first step;
random; equal numbers of layers on each stage.
"""


class Split(NamedTuple):
    """A split of a model.

    Args:
        stages: how many.
        cut: one of :data:`CUTS`, or the number of layers of each stage.
        schedule: by its name.
    """

    stages: int
    cut: str | tuple[int, ...]
    schedule: str

    def __str__(self) -> str:
        if self.stages == 1:
            return "1 stage"
        cut = f"{self.cut} cut" if isinstance(self.cut, str) else f"layers {list(self.cut)}"
        return f"{self.stages} stages, {cut}, {self.schedule}"


def some_splits(
    stages: Sequence[int], cuts: Sequence[str], schedules: Sequence[str]
) -> list[Split]:
    """Every pair of values at least once, with fewer splits than all combinations: four of eight,
    for two values each.
    """
    return [
        Split(num_stages, cut, schedules[(i + j) % len(schedules)])
        for i, num_stages in enumerate(stages)
        for j, cut in enumerate(cuts)
    ]


def random_cut(seed: str, num_layers: int, num_stages: int) -> list[int]:
    """The number of layers of each stage: at least one, if there are enough. The same seed gives
    the same cut.

    Args:
        seed: decides the cut.
        num_layers: how many layers there are.
        num_stages: how many stages.
    """
    dice = random.Random(seed)
    inner = range(1, num_layers)
    cuts = sorted(dice.sample(inner, min(len(inner), num_stages - 1)))
    # If there are too few, the last stages have none.
    cuts += [num_layers] * (num_stages - 1 - len(cuts))
    return [end - begin for begin, end in zip([0, *cuts], [*cuts, num_layers], strict=True)]
