"""Bytes over time: what a step's saved tensors take of each stage's memory, and when each link
carries what.

The simulator says when each action runs; inside of one, layers take their parts of it. A saved
tensor is there from the begin of its layer's forward to the end of its layer's backward. One that
is swapped leaves as soon as it is made, after those before it on the same link, and comes back as
late as it may, before those after it: the least that it can take. (The runtime brings back earlier
what there is room for.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_pipeshift.plan.action import Kind
from lightning_pipeshift.plan.simulator import Span

Numbers = NDArray[np.float64]

Part = tuple[int, float]
"""A stage and the part of a tensor that it takes."""

HOST: Final = -1
"""In the place of a stage."""

HOST_LATENCY: Final = 5e-5
"""Until a thread has woken up, or a stream has begun; seconds."""

Change = tuple[float, float]
"""A moment in seconds, and how many bytes more are held from then on."""

Link = tuple[int, int]
"""From a stage to another, or to its host."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Tensors of a layer that are swapped together.

    Args:
        num_bytes: of a microbatch.
        parts: who takes which part of them.
    """

    num_bytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """What a layer means for the memory of its stage, per microbatch.

    Args:
        layer: which.
        forward_seconds: its forward.
        backward_seconds: its backward.
        kept_bytes: what it saves and keeps.
        again_bytes: what it saves, lets go of and makes again.
        input_bytes: what it holds to do so.
        moved: what is swapped.
    """

    layer: int
    forward_seconds: float
    backward_seconds: float
    kept_bytes: int = 0
    again_bytes: int = 0
    input_bytes: int = 0
    moved: tuple[Moved, ...] = ()


@dataclass(frozen=True)
class Links:
    """How fast tensors are swapped.

    Args:
        between: two stages, in one direction: (seconds until the first byte arrives, bytes per
            second).
        to_host: from each stage to its host, or back: bytes per second; 0 where there is no way.
    """

    between: Mapping[Link, tuple[float, float]] = field(default_factory=dict)
    to_host: tuple[float, ...] = ()

    def rate(self, stage: int, place: int) -> float:
        """Bytes per second from a stage to another one, or to the host; 0 where there is no way."""
        if place == HOST:
            return self.to_host[stage] if stage < len(self.to_host) else 0.0
        return self.between.get((stage, place), (0.0, 0.0))[1]

    def seconds(self, stage: int, place: int, num_bytes: float) -> float:
        """What a tensor takes from a stage to another one, or to the host, or back from there."""
        rate = self.rate(stage, place)
        latency, _ = self.between.get((stage, place), (HOST_LATENCY, rate))
        return latency + num_bytes / rate if rate else math.inf


@dataclass(slots=True)
class _Transfer:
    """A part of a tensor on its way out or back. Seconds since the step began."""

    source: int
    to: int
    num_bytes: float
    begun: float
    made: float
    needed: float
    freed: float
    out_end: float = 0.0
    back_begin: float = 0.0


@dataclass(frozen=True, eq=False)
class StageTrace:
    """One stage's memory for saved tensors during a step.

    Args:
        times: when the amount changes, in seconds since the step began, ascending.
        held_bytes: what is held from each of them on, what is held for other stages among it.
        lent_bytes: what is held for others at the most.
        host_bytes: what is held on the host at the most.
        late_seconds: by how much the worst transfer misses: it would have to be back before it is
            gone.
    """

    times: Numbers
    held_bytes: Numbers
    lent_bytes: float = 0.0
    host_bytes: float = 0.0
    late_seconds: float = 0.0

    @cached_property
    def peak_bytes(self) -> float:
        """The most that is held at any time."""
        return _most(self.held_bytes)


@dataclass(frozen=True, eq=False)
class Effects:
    """What one stage's saved tensors change, as (moment, bytes): here, and elsewhere.

    Args:
        here: on the stage itself.
        lent: on the stages that take tensors of it.
        host: on its host.
        late_seconds: see :class:`StageTrace`.
    """

    here: list[Change]
    lent: dict[int, list[Change]]
    host: list[Change]
    late_seconds: float

    def trace(self, lent: Sequence[Change] = ()) -> StageTrace:
        """The stage's memory, with what is held for others."""
        if not lent:
            return self._alone
        times, held = _summed([*self.here, *lent])
        return replace(
            self._alone, times=times, held_bytes=held, lent_bytes=_most(_summed(lent)[1])
        )

    @cached_property
    def _alone(self) -> StageTrace:
        times, held = _summed(self.here)
        on_host = _most(_summed(self.host)[1])
        return StageTrace(times, held, host_bytes=on_host, late_seconds=self.late_seconds)


def effects(stage: int, row: Sequence[Span], loads: Sequence[LayerLoad], links: Links) -> Effects:
    """What one stage's saved tensors change. It depends on no other stage.

    Args:
        stage: which.
        row: its compute actions.
        loads: its layers, in call order.
        links: what carries swapped tensors.
    """
    here: list[Change] = []
    transfers = _of_stage(stage, row, loads, here)
    late = _scheduled(transfers, links)
    lent: dict[int, list[Change]] = {}
    host: list[Change] = []
    for one in transfers:
        size = one.num_bytes
        here += [(one.begun, size), (one.freed, -size)]
        if one.out_end < one.back_begin:
            # Until it has left, and again from when it begins to come back.
            here += [(one.out_end, -size), (one.back_begin, size)]
        seconds = links.seconds(one.source, one.to, size)
        begin = one.out_end - seconds if math.isfinite(seconds) else one.made
        there = [(begin, size), (max(one.needed, begin), -size)]
        (host if one.to == HOST else lent.setdefault(one.to, [])).extend(there)
    return Effects(here, lent, host, late)


def traces(found: Sequence[Effects]) -> list[StageTrace]:
    """Every stage's memory during a step.

    Args:
        found: the effects of each stage.
    """
    return [
        own.trace([change for other in found for change in other.lent.get(stage, ())])
        for stage, own in enumerate(found)
    ]


def _of_stage(
    stage: int,
    row: Sequence[Span],
    loads: Sequence[LayerLoad],
    changes: list[Change],
) -> list[_Transfer]:
    """What a stage's own tensors change, and those of them that are swapped."""
    backwards = {s.action.microbatch: s for s in row if s.action.kind is Kind.BACKWARD}
    again = {s.action.microbatch: s for s in row if s.action.kind is Kind.RECOMPUTE}
    forward_ends = _ends([load.forward_seconds for load in loads])
    backward_ends = _ends([load.backward_seconds for load in reversed(loads)])[::-1]
    transfers = []
    for span in row:
        if span.action.kind is not Kind.FORWARD:
            continue
        microbatch = span.action.microbatch
        backward = backwards.get(microbatch)
        if backward is None:
            continue
        length = backward.end - backward.start
        for index, load in enumerate(loads):
            begun = span.start
            if index:
                begun += forward_ends[index - 1] * (span.end - span.start)
            made = span.start + forward_ends[index] * (span.end - span.start)
            freed = backward.start + backward_ends[index] * length
            used = backward.start
            if index + 1 < len(loads):
                used += backward_ends[index + 1] * length
            if load.kept_bytes:
                changes += [(begun, load.kept_bytes), (freed, -load.kept_bytes)]
            if load.again_bytes:
                rerun = again.get(microbatch)
                back = min(used, rerun.start) if rerun is not None else used
                changes += [(begun, load.input_bytes), (freed, -load.input_bytes)]
                changes += [(begun, load.again_bytes), (made, -load.again_bytes)]
                changes += [(back, load.again_bytes), (freed, -load.again_bytes)]
            for moved in load.moved:
                transfers += [
                    _Transfer(stage, to, moved.num_bytes * part, begun, made, used, freed)
                    for to, part in moved.parts
                ]
    return transfers


def _ends(seconds: Sequence[float]) -> list[float]:
    """When each part of an action ends, from 0 to 1."""
    total = math.fsum(seconds)
    if not total:
        return [(index + 1) / len(seconds) for index in range(len(seconds))]
    return [min(1.0, end / total) for end in accumulate(seconds)]


def _scheduled(transfers: Sequence[_Transfer], links: Links) -> float:
    """Gives each link its transfers one after the other; returns by how much the worst is late."""
    by_link: dict[Link, list[_Transfer]] = {}
    for one in transfers:
        by_link.setdefault((one.source, one.to), []).append(one)
    late = 0.0
    for (source, to), members in by_link.items():
        free = 0.0
        for one in sorted(members, key=lambda one: one.made):
            free = one.out_end = max(free, one.made) + links.seconds(source, to, one.num_bytes)
        begin = math.inf
        for one in sorted(members, key=lambda one: -one.needed):
            begin = min(begin, one.needed) - links.seconds(source, to, one.num_bytes)
            one.back_begin = begin
            late = max(late, one.out_end - begin)
    return late


def _summed(changes: Sequence[Change]) -> tuple[Numbers, Numbers]:
    """The moments of change, and the sum from each of them on."""
    if not changes:
        return np.zeros(0), np.zeros(0)
    moments, sizes = np.array(changes, dtype=np.float64).T
    # What goes at a moment goes before what comes.
    order = np.lexsort((sizes, moments))
    moments, held = moments[order], np.cumsum(sizes[order])
    # Of those of one moment the last counts.
    last = np.append(moments[1:] != moments[:-1], True)
    return moments[last], held[last]


def _most(held: Numbers) -> float:
    return float(held.max()) if held.size else 0.0
