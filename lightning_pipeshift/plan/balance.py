"""Cuts a list of layers into stages: evenly by number, or optimally by time."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from lightning_pipeshift.errors import PartitionError


def uniform(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """As equal counts as possible; where it doesn't come out even, the first take one more.

    The first and not the last, because the last stage also runs what follows the last layer, the
    loss and the metrics; and because every array library splits so. With fewer layers than stages,
    the last stages stay empty.
    """
    _require_stages(num_stages)
    count, extra = divmod(num_layers, num_stages)
    return tuple(count + (stage < extra) for stage in range(num_stages))


def balanced(
    seconds: Sequence[float],
    num_stages: int,
    payload_bytes: Sequence[int] | None = None,
    cuts: frozenset[int] | None = None,
) -> tuple[int, ...]:
    """The counts with the least time on the slowest stage: the pipeline runs at its pace.

    ``seconds[i]`` is what layer i takes, ``payload_bytes[b]`` what crosses boundary b (in front of
    layer b; one more than there are layers). Only boundaries in ``cuts`` are cut (None: any). A
    stage stays empty only where layers or cuts don't suffice, and then it is one of the last.

    Ties go to the smallest sum of payloads over the cuts, then to the most even stages (the least
    sum of squares), then to the one with more layers on earlier stages; so equal layers give what
    ``uniform`` gives.
    """
    _require_stages(num_stages)
    num_layers = len(seconds)
    if payload_bytes is None:
        payload_bytes = [0] * (num_layers + 1)
    if len(payload_bytes) != num_layers + 1:
        raise PartitionError(
            f"{len(payload_bytes)} payloads for {num_layers} layers; "
            f"there are {num_layers + 1} boundaries, with the two ends"
        )
    if not num_layers:
        return (0,) * num_stages
    # Where a stage may begin or end.
    points = [b for b in range(num_layers + 1) if b in (0, num_layers) or cuts is None or b in cuts]
    ticks = list(accumulate(_ticks(seconds), initial=0))
    ends = [ticks[point] for point in points]
    payloads = [payload_bytes[point] for point in points]
    num_filled = min(num_stages, len(points) - 1)
    limit = _slowest_stage(ends, num_filled)
    chosen = [points[place] for place in _best_cuts(ends, payloads, num_filled, limit)]
    counts = [end - begin for begin, end in zip([0, *chosen], [*chosen, num_layers], strict=True)]
    return (*counts, *[0] * (num_stages - num_filled))


def _slowest_stage(ends: Sequence[int], num_stages: int) -> int:
    """The least possible time of the slowest stage.

    ``ends[p]`` is the time of all layers before place p. best[p] is the answer for the layers from
    place p on, on one stage, then on two, and so on: the first of them runs to a place q, and the
    slowest is that one or the slowest of the rest.
    """
    last = len(ends) - 1
    best = [ends[last] - end for end in ends]
    for rest in range(1, num_stages):
        # From place p on, each of the later stages (``rest`` of them) needs a place of its own.
        best = [
            min(max(ends[q] - ends[p], best[q]) for q in range(p + 1, last - rest + 1))
            for p in range(last - rest)
        ]
    return best[0]


def _best_cuts(
    ends: Sequence[int], payloads: Sequence[int], num_stages: int, limit: int
) -> tuple[int, ...]:
    """The places to cut, by the order of preference of ``balanced``, no stage above the limit.

    A second pass, because the first can't break ties: a part that is not the slowest may be worse
    than need be, to save payload. With the limit known what is left is a sum over the stages, for
    which the best whole is made of best parts. Going from the last place to the first makes ties go
    to the latest first cut.
    """
    last = len(ends) - 1
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {
        p: (0, (ends[last] - ends[p]) ** 2, ())
        for p in range(last)
        if ends[last] - ends[p] <= limit
    }
    for _ in range(1, num_stages):
        longer = {}
        for p in range(last):
            options = []
            for q in range(p + 1, last):
                load = ends[q] - ends[p]
                if load > limit:
                    break
                if q in best:
                    payload, squares, cuts = best[q]
                    options.append((payload + payloads[q], squares + load**2, -q, (q, *cuts)))
            if options:
                payload, squares, _, cuts = min(options)
                longer[p] = (payload, squares, cuts)
        best = longer
    return best[0][2]


def _ticks(seconds: Sequence[float]) -> list[int]:
    """The seconds as whole numbers of a common unit.

    Exactly, so that equal stages tie in whatever order they are summed."""
    for value in seconds:
        if not (math.isfinite(value) and value >= 0):
            raise PartitionError(f"a layer of {value} seconds; seconds are finite and at least 0")
    exact = [Fraction(value) for value in seconds]
    unit = math.lcm(*(value.denominator for value in exact))
    return [int(value * unit) for value in exact]


def _require_stages(num_stages: int) -> None:
    if num_stages < 1:
        raise PartitionError(f"{num_stages} stages; there is at least 1")
