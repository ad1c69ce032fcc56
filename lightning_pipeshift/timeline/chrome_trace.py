"""A recording as Chrome trace JSON, which opens in Perfetto (ui.perfetto.dev).

The format is that of Google's "Trace Event Format": a process for each rank, with threads for its
actions and for what runs at the same time. Slices of one thread must not overlap unless they are
nested, so what may overlap (rings, blocks of lanes) is written as nestable asynchronous events. An
arrow (``s`` and ``f``) leads from each send to the action that has received it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any, Final

from lightning_pipeshift.errors import explained
from lightning_pipeshift.plan.inputs.traffic import PIPELINE
from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.timeline.recording import (
    FIELD,
    Mark,
    RankRecord,
    Recording,
    What,
    sender_of,
)

_ACTIONS: Final = 1
# Names of Perfetto's own colours.
_COLOURS: Final = {
    "F": "thread_state_running",
    "B": "rail_animation",
    "R": "thread_state_iowait",
    What.WAIT: "grey",
    What.SUMS: "terrible",
    What.MOVES: "terrible",
}
_WORDS: Final = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.RECOMPUTE: "recompute",
    Kind.WEIGHTS: "weights",
}
_ASIDE: Final = {
    What.BLOCK: "lane",
    What.RING: "ring",
    What.SWAP: "swap",
    What.MOVE: "move",
}


def chrome_trace(recording: Recording) -> str:
    """The JSON text: the events, and the recording itself in the field :data:`FIELD`."""
    recording = recording.from_zero()
    # Rings of the step before may end in this one: no event begins before 0.
    first = min((mark.begin for record in recording.ranks for mark in record.marks), default=0.0)
    shifted = replace(
        recording, ranks=tuple(record.later(-min(first, 0.0)) for record in recording.ranks)
    )
    document = {
        "displayTimeUnit": "ms",
        "traceEvents": list(events_of(shifted)),
        FIELD: recording.to_entries(),
    }
    return json.dumps(document, separators=(",", ":"))


def events_of(recording: Recording) -> Iterator[dict[str, Any]]:
    """The events of a recording whose clock starts at 0."""
    for record in recording.ranks:
        yield from _of_rank(record)
    yield from _arrows(recording)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _of_rank(record: RankRecord) -> Iterator[dict[str, Any]]:
    rank = record.rank
    name = f"virtual machine {record.vm}, stage {record.stage}: rank {rank} on {record.host}"
    name = name if rank else explained(name)
    order = 1000 * record.vm + record.stage
    yield _named("process_name", rank, name=name)
    yield _named("process_sort_index", rank, sort_index=order)
    yield _named("thread_name", rank, name="actions")
    yield {
        **_slice(record.rank, "step", "step", record.begin, record.end),
        "args": {"clock error in µs": _microseconds(record.clock_error_seconds)},
    }
    numbers = count()
    for mark in record.marks:
        if mark.what in _ASIDE:
            yield from _aside(record, mark, next(numbers))
        else:
            yield _on_thread(record, mark)
    for reading in record.memory:
        yield {
            "ph": "C",
            "name": "memory",
            "pid": rank,
            "tid": _ACTIONS,
            "ts": _microseconds(reading.at),
            "args": {"MB": round(reading.num_bytes / 1e6, 3)},
        }


def _named(what: str, rank: int, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": _ACTIONS, "args": values}


def _slice(rank: int, name: str, category: str, begin: float, end: float) -> dict[str, Any]:
    start = _microseconds(begin)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": rank,
        "tid": _ACTIONS,
        "ts": start,
        # Of the rounded ends, so that a slice does not begin before the one before it has ended.
        "dur": round(_microseconds(end) - start, 1),
    }


def _on_thread(record: RankRecord, mark: Mark) -> dict[str, Any]:
    name, kind = mark.name, mark.what
    if mark.what == What.WAIT:
        name = f"wait for {mark.name}"
    elif mark.what == What.ACTION:
        action = Action.parse(mark.name)
        kind = _WORDS.get(action.kind, "send")
    found = _slice(record.rank, name, kind, mark.begin, mark.end)
    colour = _COLOURS.get(mark.what, _COLOURS.get(mark.name[0]))
    return {**found, "cname": colour} if colour else found


def _aside(record: RankRecord, mark: Mark, number: int) -> Iterator[dict[str, Any]]:
    title = f"{_ASIDE[mark.what]}: {mark.name}" if mark.what != What.BLOCK else mark.name
    common = {
        "name": title,
        "cat": mark.name if mark.what == What.BLOCK else _ASIDE[mark.what],
        "pid": record.rank,
        "tid": _ACTIONS,
        "id2": {"local": f"{record.rank}.{number}"},
    }
    details: dict[str, Any] = {}
    if mark.peer >= 0:
        details["to rank"] = mark.peer
    if mark.num_bytes:
        details["bytes"] = mark.num_bytes
    yield {"ph": "b", "ts": _microseconds(mark.begin), "args": details, **common}
    yield {"ph": "e", "ts": _microseconds(mark.end), **common}


def _arrows(recording: Recording) -> Iterator[dict[str, Any]]:
    """From each send to the action that has received it; and the time between as a slice of the
    lane for payloads.
    """
    for number, (source, send, record, mark) in enumerate(_messages(recording), start=1):
        name = send.name.removesuffix(">")
        until = max(mark.begin, send.begin)
        sent = Mark(What.BLOCK, PIPELINE.name, send.begin, until, record.rank, send.num_bytes)
        for event in _aside(source, sent, -number):
            yield {**event, "name": f"{name} to stage {record.stage}"}
        common = {"cat": "message", "name": name, "id": number, "tid": _ACTIONS}
        # Each end lies inside of its slice: that is how it is bound to it.
        out, back = _inside(send), _inside(mark)
        yield {"ph": "s", **common, "pid": source.rank, "ts": out}
        yield {"ph": "f", "bp": "e", **common, "pid": record.rank, "ts": max(back, out)}


def _messages(recording: Recording) -> Iterator[tuple[RankRecord, Mark, RankRecord, Mark]]:
    """Each send with the rank that made it, and the action that needed it with its rank."""
    sends: dict[tuple[int, int, Action], tuple[RankRecord, Mark]] = {}
    for record in recording.ranks:
        for mark in record.of(What.ACTION):
            action = mark.action
            if action is not None and action.kind.is_send:
                place = record.vm, record.stage, action
                # The last of several is awaited longest.
                before = sends[place][1].num_bytes if place in sends else 0
                sends[place] = record, replace(mark, num_bytes=before + mark.num_bytes)
    for record in recording.ranks:
        for mark in record.of(What.ACTION):
            action = mark.action
            if action is None or action.kind not in (Kind.FORWARD, Kind.BACKWARD):
                continue
            there = record.stage + (-1 if action.kind is Kind.FORWARD else 1)
            found = sends.get((record.vm, there, sender_of(action)))
            if found is not None:
                yield (*found, record, mark)


def _inside(mark: Mark) -> float:
    """A time in a slice, in microseconds: near its start."""
    return _microseconds(mark.begin + min(mark.seconds / 2, 1e-6))
