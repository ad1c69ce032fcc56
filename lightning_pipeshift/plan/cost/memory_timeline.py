"""Bytes over time: the memory of a step's saved tensors on each stage, and the transfers on each
link.

The simulator gives the times of all actions; inside of an action, each layer takes its part of the
time. A saved tensor is held from the start of its layer's forward to the end of its layer's
backward. A swapped tensor is sent as soon as it is computed and the link is free, and is fetched as
late as possible: this gives the least memory. (The runtime prefetches tensors earlier if memory is
free.)
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from lightning_pipeshift.plan.cost.simulator import TimedRow
from lightning_pipeshift.plan.cost.sums import Numbers

Part = tuple[int, float]
"""A stage and the part of a tensor that it takes."""

HOST: Final = -1
"""The number of the host among stages."""

HOST_LATENCY: Final = 5e-5
"""The seconds until a thread has woken up, or a stream has started."""

Changes = tuple[Numbers, Numbers]
"""Times in seconds, and the change of the held bytes at each of them."""

Link = tuple[int, int]
"""From a stage to another, or to its host."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Tensors of a layer that are swapped together.

    Args:
        num_bytes: of a microbatch.
        parts: the stages that take them, with their parts.
    """

    num_bytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """A layer's use of its stage's memory, per microbatch.

    Args:
        layer: the layer.
        forward_seconds: its forward.
        backward_seconds: its backward.
        kept_bytes: saved tensors that are kept.
        again_bytes: saved tensors that are dropped and recomputed.
        input_bytes: inputs held for the recomputation.
        moved: saved tensors that are swapped.
        sent_bytes: the part of its output that is sent to the next stage, and held until the
            backward of its own stage starts.
    """

    layer: int
    forward_seconds: float
    backward_seconds: float
    kept_bytes: int = 0
    again_bytes: int = 0
    input_bytes: int = 0
    moved: tuple[Moved, ...] = ()
    sent_bytes: int = 0


@dataclass(frozen=True)
class Links:
    """The speed of swaps.

    Args:
        between: two stages, in one direction: (seconds until the first byte arrives, bytes per
            second).
        to_host: from each stage to its host, or back: bytes per second; 0 if there is no
            connection.
        copying: what a copy between each stage and its host takes from the compute: (seconds for
            each tensor, seconds for each byte).
    """

    between: Mapping[Link, tuple[float, float]] = field(default_factory=dict)
    to_host: tuple[float, ...] = ()
    copying: tuple[tuple[float, float], ...] = ()

    @property
    def key(self) -> Hashable:
        """Equal for equal links."""
        return tuple(sorted(self.between.items())), self.to_host, self.copying

    def rate(self, stage: int, place: int) -> float:
        """Bytes per second from a stage to another one, or to the host; 0 if there is no
        connection.
        """
        if place == HOST:
            return self.to_host[stage] if stage < len(self.to_host) else 0.0
        return self.between.get((stage, place), (0.0, 0.0))[1]

    def slowed(self, factor: float) -> Links:
        """Returns links that take ``factor`` times as long."""
        return Links(
            {ends: (latency, rate / factor) for ends, (latency, rate) in self.between.items()},
            tuple(rate / factor for rate in self.to_host),
            self.copying,
        )

    def compute_seconds(self, stage: int, num_tensors: int, num_bytes: float) -> float:
        """The seconds that copying tensors to the host, or back, takes from the stage's compute."""
        per_tensor, per_byte = self.copying[stage] if self.copying else (0.0, 0.0)
        return num_tensors * per_tensor + num_bytes * per_byte

    def seconds(self, stage: int, place: int, num_bytes: float) -> float:
        """The seconds of a tensor's transfer from a stage to another or to the host, or back."""
        rate = self.rate(stage, place)
        latency, _ = self.between.get((stage, place), (HOST_LATENCY, rate))
        return latency + num_bytes / rate if rate else math.inf


@dataclass(frozen=True, eq=False)
class StageTrace:
    """One stage's memory for saved tensors during a step.

    Args:
        times: when the amount changes, in seconds since the step started, ascending.
        held_bytes: the bytes held from each of these times on, including those for other stages.
        lent_bytes: the peak of the bytes held for other stages.
        host_bytes: the peak of the bytes held on the host.
        late_seconds: the delay of the slowest transfer: the time by which a fetch would have to
            start before the tensor has been sent.
    """

    times: Numbers
    held_bytes: Numbers
    lent_bytes: float = 0.0
    host_bytes: float = 0.0
    late_seconds: float = 0.0

    @cached_property
    def peak_bytes(self) -> float:
        """The peak memory."""
        return _most(self.held_bytes)


@dataclass(frozen=True, eq=False)
class Effects:
    """How one stage's saved tensors change the memory of this and other stages.

    Args:
        here: on the stage itself.
        lent: on the stages that keep tensors for it.
        host_bytes: see :class:`StageTrace`.
        late_seconds: see :class:`StageTrace`.
    """

    here: Changes
    lent: Mapping[int, Changes]
    host_bytes: float
    late_seconds: float

    def trace(self, lent: Sequence[Changes] = ()) -> StageTrace:
        """The stage's memory, including the tensors held for other stages."""
        if not lent:
            return self._alone
        times, held = _summed([self.here, *lent])
        return replace(
            self._alone, times=times, held_bytes=held, lent_bytes=_most(_summed(lent)[1])
        )

    @cached_property
    def _alone(self) -> StageTrace:
        times, held = _summed([self.here])
        return StageTrace(times, held, host_bytes=self.host_bytes, late_seconds=self.late_seconds)


class Moments(NamedTuple):
    """The times at which saved tensors are allocated and freed, in seconds since the step started:
    (layers, microbatches that have a backward) each.
    """

    begun: Numbers
    """A layer's forward starts: from now on they are held."""
    made: Numbers
    """Its forward ends: they may be sent."""
    used: Numbers
    """Its backward starts: they have to be present."""
    freed: Numbers
    """Its backward ends: they are freed."""
    rerun: Numbers
    """The stage recomputes them, in an action of its own or at the start of the backward."""
    sizes: Numbers
    """(microbatches,): how large each is, relative to the mean."""


def effects(stage: int, moments: Moments, loads: Sequence[LayerLoad], links: Links) -> Effects:
    """The effects of one stage's saved tensors, which depend on no other stage.

    Args:
        stage: the stage.
        moments: of the stage, see :func:`moments_of`.
        loads: its layers, in call order.
        links: the links for swapped tensors.
    """
    begun, made, used, freed, rerun, sizes = moments
    here, host = _Sum(sizes), _Sum(sizes)

    table = [
        (load.kept_bytes, load.again_bytes, load.input_bytes, load.sent_bytes) for load in loads
    ]
    kept, again, inputs, sent = np.array(table, dtype=np.float64).reshape(-1, 4).T
    here.add(begun, freed, kept + inputs * (again > 0))
    here.add(made, used, sent)
    here.add(begun, made, again)
    here.add(rerun, freed, again)
    # What a recomputation uses has to be present when it starts.
    used = np.where((again > 0)[:, None], rerun, used)
    transfers: dict[int, list[tuple[float, int]]] = {}
    for index, load in enumerate(loads):
        for moved in load.moved:
            for to, part in moved.parts:
                transfers.setdefault(to, []).append((moved.num_bytes * part, index))
    late = 0.0
    lent: dict[int, Changes] = {}
    for to, members in transfers.items():
        moving, owners = np.array([size for size, _ in members]), [index for _, index in members]
        each, which = np.unique(np.outer(moving, sizes), return_inverse=True)
        known = np.array([links.seconds(stage, to, size) for size in each.tolist()])
        seconds = known[which].reshape(len(moving), len(sizes))
        out_end = _first_come_first_served(made[owners], seconds)
        # The fetches are the same in reversed time: as late as possible.
        back_begin = -_first_come_first_served(-used[owners], seconds)
        late = max(late, float((out_end - back_begin).max(initial=0.0)))
        begin = out_end - seconds if np.isfinite(seconds).all() else made[owners]
        there = host if to == HOST else _Sum(sizes)
        here.add(begun[owners], freed[owners], moving)
        # Held until the send is complete, and again from the start of the fetch.
        here.add(np.maximum(back_begin, out_end), out_end, moving)
        there.add(begin, np.maximum(used[owners], begin), moving)
        if to != HOST:
            lent[to] = there.changes()
    return Effects(here.changes(), lent, _most(_summed([host.changes()])[1]), late)


def traces(
    found: Sequence[Effects], known: MutableMapping[Hashable, StageTrace] | None = None
) -> list[StageTrace]:
    """Every stage's memory during a step.

    Args:
        found: the effects of each stage.
        known: those of earlier calls, as a cache.
    """
    cache = {} if known is None else known
    made = []
    for stage, own in enumerate(found):
        borrowers = [other for other in found if stage in other.lent]
        key = (stage, own, *borrowers)
        if key not in cache:
            cache[key] = own.trace([other.lent[stage] for other in borrowers])
        made.append(cache[key])
    return made


class _Sum:
    """Collects changes of microbatches with given relative sizes."""

    def __init__(self, sizes: Numbers) -> None:
        self._sizes = sizes
        self._comes: list[tuple[Numbers, Numbers]] = []
        self._goes: list[tuple[Numbers, Numbers]] = []

    def add(self, begin: Numbers, end: Numbers, num_bytes: Numbers) -> None:
        """Adds bytes that are held from ``begin`` to ``end``.

        Args:
            begin: (tensors, microbatches).
            end: likewise.
            num_bytes: (tensors,), of a microbatch of mean size.
        """
        held = num_bytes > 0
        if held.any() and begin.size:
            sizes = np.outer(num_bytes[held], self._sizes).ravel()
            self._comes.append((begin[held].ravel(), sizes))
            self._goes.append((end[held].ravel(), -sizes))

    def changes(self) -> Changes:
        """All changes."""
        found = self._goes + self._comes
        if not found:
            return np.zeros(0), np.zeros(0)
        moments, sizes = zip(*found, strict=True)
        return np.concatenate(moments), np.concatenate(sizes)


def moments_of(
    row: TimedRow, loads: Sequence[LayerLoad], sizes: Sequence[float] = (1.0,)
) -> Moments:
    """The times at which each layer's saved tensors are allocated and freed.

    Args:
        row: the stage's compute actions.
        loads: its layers, in call order.
        sizes: of all microbatches, relative to the mean; one entry if all are equal.
    """
    forwards, backwards, again, numbers = row.actions.held
    start, end = row.starts[forwards], row.ends[forwards]
    back_start, back_end = row.starts[backwards], row.ends[backwards]
    rerun = np.where(again < 0, math.inf, row.starts[again])
    forward_ends = np.array(_ends([load.forward_seconds for load in loads]))
    backward_ends = np.array(_ends([load.backward_seconds for load in reversed(loads)])[::-1])
    length, back_length = end - start, back_end - back_start
    made = start + forward_ends[:, None] * length
    freed = back_start + backward_ends[:, None] * back_length
    begun = np.concatenate([start[None], made[:-1]])
    used = np.concatenate([freed[1:], back_start[None]])
    held_sizes = np.array(sizes)[numbers % len(sizes)]
    return Moments(begun, made, used, freed, np.minimum(used, rerun), held_sizes)


def _ends(seconds: Sequence[float]) -> list[float]:
    """The end of each part of an action, from 0 to 1."""
    total = math.fsum(seconds)
    if not total:
        return [(index + 1) / len(seconds) for index in range(len(seconds))]
    return [min(1.0, end / total) for end in accumulate(seconds)]


def _first_come_first_served(ready: Numbers, seconds: Numbers) -> Numbers:
    """The end of each transfer on a link that carries one after another.

    Args:
        ready: of each tensor and microbatch, when it may start; (tensors, microbatches).
        seconds: the duration of each transfer; likewise.
    """
    order = np.argsort(ready, axis=None, kind="stable")
    # In a loop and not by cumulative sums, so that equal times remain exactly equal.
    free = -math.inf
    ends = []
    takes = seconds.ravel()[order].tolist()
    for moment, taken in zip(ready.ravel()[order].tolist(), takes, strict=True):
        free = (free if free > moment else moment) + taken
        ends.append(free)
    found = np.empty(ready.size)
    found[order] = ends
    return found.reshape(ready.shape)


def _summed(found: Sequence[Changes]) -> Changes:
    """The times of changes, and the sum from each of them on."""
    moments, sizes = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    if not moments.size:
        return moments, sizes
    order = np.argsort(moments, kind="stable")
    moments, held = moments[order], np.cumsum(sizes[order])
    # At equal times, releases come before allocations: only the last sum of a time counts.
    last = np.append(moments[1:] != moments[:-1], True)
    return moments[last], held[last]


def _most(held: Numbers) -> float:
    return float(held.max()) if held.size else 0.0
