"""Gathers the records of a step on the first rank, and puts them on its clock.

All of it happens in threads, after the step: the ranks of an asynchronous pipeline are at different
minibatches when they have recorded the same one, and none of them waits for another. What a rank
has to send waits behind everything else that it sends (``bulk``); only the messages that measure
the offset of its clock are small, and go at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch

from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.runtime.comm.channels import Channels, lane_name
from lightning_pipeshift.runtime.comm.lane import Lane, Subject
from lightning_pipeshift.runtime.comm.threads import InOrder
from lightning_pipeshift.runtime.gradients.aggregation import MOST_TYPES
from lightning_pipeshift.runtime.recording.recorder import Recorder
from lightning_pipeshift.timeline.clocks import Ping, offset_of
from lightning_pipeshift.timeline.recording import Mark, RankRecord, Recording, What

_NUM_PINGS: Final = 24


class Place(NamedTuple):
    """A rank's position.

    Args:
        rank: its number.
        vm: its virtual machine.
        stage: its stage.
        host: its host's name.
    """

    rank: int
    vm: int
    stage: int
    host: str


class Taken(NamedTuple):
    """The record of a rank, to be gathered.

    Args:
        recorder: stopped.
        place: of the rank.
        step: the first batch.
        num_steps: how many.
        plan: the plan in force.
        moved: the layers that have changed their owners in it, in words.
    """

    recorder: Recorder
    place: Place
    step: int
    num_steps: int
    plan: Plan
    moved: Sequence[str] = ()


class Gathering:
    """One rank's part in the gathering of records.

    Args:
        world: connections between all ranks, whose stages are the ranks.
        hosts: the name of each rank's host.
        take: given each recording, on the first rank, in a thread.
    """

    def __init__(
        self, world: Channels, hosts: Sequence[str], take: Callable[[Recording], None]
    ) -> None:
        self._hosts = hosts
        self._take = take
        # Lanes of its own: their messages do not mix with those of the steps.
        self._lane = world.bulk(Subject.RECORDS)
        self._pings = Lane(world.ranks, world.stage, world.control, world.watched, Subject.PINGS)
        self._thread = InOrder("timeline")
        self._pending: list[Future[None]] = []

    def submit(self, taken: Taken) -> None:
        """Hands a record over. Every rank calls this for the same steps, in the same order, at
        whatever time.
        """
        self._pending = [each for each in self._pending if not each.done() or each.exception()]
        self._pending.append(self._thread.submit(lambda: self._gather(taken)))

    def finish(self) -> None:
        """Waits until all records are gathered. Every rank calls this.

        Raises:
            StageFailedError: another rank has failed.
        """
        for each in self._pending:
            each.result()
        self._pending = []
        self._thread.close()

    # --- in the thread ---

    def _gather(self, taken: Taken) -> None:
        record = named(taken.recorder.record(*taken.place), taken)
        if taken.place.rank:
            self._send(record)
            return
        records = [record]
        for rank in range(1, self._lane.num_stages):
            theirs = self._receive(rank)
            offset = offset_of(self._measure(rank), self._hosts[rank] == self._hosts[0])
            records.append(
                replace(theirs.later(offset.seconds), clock_error_seconds=offset.error_seconds)
            )
        records.sort(key=lambda each: (each.vm, each.stage))
        found = Recording(taken.step, taken.num_steps, tuple(records), taken.plan.to_json())
        self._take(found.from_zero())

    def _send(self, record: RankRecord) -> None:
        text = json.dumps(Recording(0, 1, (record,)).to_entries()).encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._lane.send_values({"record": data}, 0)
        for _ in range(_NUM_PINGS):
            self._pings.receive_object(0)
            self._pings.send_object(time.perf_counter(), 0)
        self._pings.settle()

    def _receive(self, rank: int) -> RankRecord:
        found: dict[str, Any] = dict(self._lane.receive_values(rank))
        (record,) = Recording.from_entries(json.loads(found["record"].numpy().tobytes())).ranks
        return record

    def _measure(self, rank: int) -> list[Ping]:
        pings = []
        for _ in range(_NUM_PINGS):
            sent = time.perf_counter()
            self._pings.send_object(None, rank)
            there = self._pings.receive_object(rank)
            pings.append(Ping(sent, there, time.perf_counter()))
        self._pings.settle()
        return pings


def named(record: RankRecord, taken: Taken) -> RankRecord:
    """A record with the names of lanes and layers in place of numbers, and with its moves."""
    layers = [layer.name for layer in taken.plan.layers]

    def name_of(mark: Mark) -> str:
        if mark.what == What.BLOCK:
            return lane_name(int(mark.name))
        if mark.what == What.RING:
            number = int(mark.name) // MOST_TYPES
            return layers[number] if number < len(layers) else "shared parameters"
        return mark.name

    moves = [Mark(What.MOVE, text, record.begin, record.end) for text in taken.moved]
    marks = (replace(mark, name=name_of(mark)) for mark in record.marks)
    return replace(record, marks=(*marks, *moves))
