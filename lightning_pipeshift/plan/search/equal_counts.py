"""Equal numbers of layers on all stages."""

from collections.abc import Collection
from itertools import pairwise

import numpy as np

from lightning_pipeshift.errors import PartitionError
from lightning_pipeshift.plan.search.ranges import least_chain


def uniform(
    num_layers: int,
    num_stages: int,
    possible: Collection[int] | None = None,
    idle: Collection[int] = (),
) -> tuple[int, ...]:
    """Counts as equal as possible; if they cannot be equal, the first stages take one more.

    The first and not the last, because the last stage also runs the code after the last layer, such
    as the loss and the metrics; and because array libraries split in this way. With fewer layers
    than stages, the last stages remain empty.

    Args:
        num_layers: how many layers there are.
        num_stages: how many stages share them.
        possible: the boundaries that may be cut; ``None``: all.
        idle: layers that do not count; each is placed with the one before it.
    """
    if num_stages < 1:
        raise PartitionError(f"{num_stages} stages; there is at least 1")
    working = [layer for layer in range(num_layers) if layer not in idle]
    if possible is not None:
        return _between(working, num_layers, num_stages, possible)
    share, extra = divmod(len(working), num_stages)
    counts, num_placed, num_begun = [], 0, 0
    for stage in range(num_stages):
        num_begun += share + (stage < extra)
        end = working[num_begun] if num_begun < len(working) else num_layers
        counts.append(end - num_placed)
        num_placed = end
    return tuple(counts)


def _between(
    working: Collection[int], num_layers: int, num_stages: int, possible: Collection[int]
) -> tuple[int, ...]:
    """The counts with the least sum of squares: dynamic programming over (stage, boundary)."""
    points = [0, *sorted(b for b in possible if 0 < b < num_layers), num_layers]
    before = np.array([sum(layer < point for layer in working) for point in points])
    squares = (before[None, :] - before[:, None]).astype(float) ** 2
    squares[np.tril_indices(len(points), -1)] = np.inf
    # From the last stage on, reversed: of equally good solutions, more layers on earlier stages.
    mirrored = squares[::-1, ::-1].T
    _, counts = least_chain((num_stages, len(points)), lambda _, before: before + mirrored)
    ends = np.cumsum([0, *counts[::-1]])
    return tuple(points[end] - points[begin] for begin, end in pairwise(ends.tolist()))
