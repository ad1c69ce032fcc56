"""A recording: what every rank did in a step, in seconds on one clock. A value; JSON on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from lightning_pipeshift.documents import Document, read_document
from lightning_pipeshift.errors import PlanError, ScheduleError
from lightning_pipeshift.plan.cost.simulator import Span
from lightning_pipeshift.plan.schedule.actions import Action, Kind


class What:
    """The kinds of :class:`Mark`."""

    ACTION: Final = "action"
    """An action of the stage, by its text (``F3``), without the wait before it; sends too."""
    WAIT: Final = "wait"
    """A wait for other stages: for what the action of this text needs, or ``report``."""
    SUMS: Final = "sums"
    """A wait for sums of gradients over the virtual machines."""
    MOVES: Final = "moves"
    """A wait for layers that change their owners."""
    SECTION: Final = "section"
    """Other work of the step, by its name."""
    BLOCK: Final = "block"
    """A block of a lane, by the lane's name: from when it is ready until it has left."""
    RING: Final = "ring"
    """A sum of gradients over the virtual machines, by its layer's name."""
    SWAP: Final = "swap"
    """A saved tensor on its way out of the device's memory or back."""
    MOVE: Final = "move"
    """A layer that changes its owner in this step."""


REPORT: Final = "report"
"""The name of a wait for the last stage's report of a step."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One thing that took some time.

    Args:
        what: a value of :class:`What`.
        name: see there.
        begin: in seconds.
        end: likewise.
        peer: the rank at the other end; -1 for none.
        num_bytes: 0 if that is not known.
    """

    what: str
    name: str
    begin: float
    end: float
    peer: int = -1
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin

    @property
    def action(self) -> Action | None:
        """The action that it is; ``None`` for other marks."""
        return Action.parse(self.name) if self.what == What.ACTION else None


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes of a device that were in use at a time."""

    at: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The record of one rank.

    Args:
        rank: its number.
        vm: its virtual machine.
        stage: its stage.
        host: its host's name.
        device: its device's type.
        begin: when its step began, in seconds.
        end: when it ended.
        marks: in the order in which they were noted.
        memory: readings, in the same order.
        clock_error_seconds: by how much all its times may be wrong, compared with the first rank's.
        num_dropped: how many marks did not fit into the record.
    """

    rank: int
    vm: int
    stage: int
    host: str
    device: str
    begin: float
    end: float
    marks: tuple[Mark, ...]
    memory: tuple[Memory, ...] = ()
    clock_error_seconds: float = 0.0
    num_dropped: int = 0

    def later(self, seconds: float) -> RankRecord:
        """The same record with all times increased."""
        return replace(
            self,
            begin=self.begin + seconds,
            end=self.end + seconds,
            marks=tuple(
                replace(mark, begin=mark.begin + seconds, end=mark.end + seconds)
                for mark in self.marks
            ),
            memory=tuple(replace(each, at=each.at + seconds) for each in self.memory),
        )

    def of(self, *kinds: str) -> Iterator[Mark]:
        """The marks of some kinds."""
        return (mark for mark in self.marks if mark.what in kinds)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The compute actions, in order."""
        found = ((mark, mark.action) for mark in self.of(What.ACTION))
        return tuple(
            Span(action, mark.begin, mark.end)
            for mark, action in found
            if action is not None and action.kind.is_compute
        )

    @property
    def compute_seconds(self) -> float:
        """How long the compute actions took, without waits for sums inside of them."""
        return sum(span.end - span.start for span in self.spans) - self.inner_seconds

    @property
    def inner_seconds(self) -> float:
        """How long compute actions waited for sums of gradients and for layers that move."""
        return sum(
            max(0.0, min(mark.end, span.end) - max(mark.begin, span.start))
            for mark in self.of(What.SUMS, What.MOVES)
            for span in self.spans
        )

    @property
    def peak_bytes(self) -> int:
        """The largest of the memory's readings; 0 if there are none."""
        return max((each.num_bytes for each in self.memory), default=0)


@dataclass(frozen=True, slots=True)
class Recording:
    """One step, or some consecutive minibatches of an asynchronous pipeline.

    Args:
        step: the number of the first batch since the start of the run.
        num_steps: how many batches.
        ranks: in the order of virtual machines and stages.
        plan: the plan in force, as :meth:`Plan.to_json` writes it; empty if it is not known.
    """

    step: int
    num_steps: int
    ranks: tuple[RankRecord, ...]
    plan: str = ""

    def __post_init__(self) -> None:
        if not self.ranks or self.num_steps < 1:
            raise PlanError("a recording of no rank or of no step")
        for record in self.ranks:
            for mark in record.marks:
                if mark.what not in _KINDS:
                    raise PlanError(f"a mark of kind {mark.what!r}; there are {sorted(_KINDS)}")
                try:
                    _ = mark.action
                except ScheduleError as error:
                    raise PlanError(str(error)) from error

    @property
    def begin(self) -> float:
        """When the first rank began."""
        return min(record.begin for record in self.ranks)

    @property
    def end(self) -> float:
        """When the last rank ended."""
        return max(record.end for record in self.ranks)

    @property
    def seconds(self) -> float:
        """How long the step, or all of the minibatches, took."""
        return self.end - self.begin

    def from_zero(self) -> Recording:
        """The same recording with a clock that starts when the first rank begins."""
        begin = self.begin
        return replace(self, ranks=tuple(record.later(-begin) for record in self.ranks))

    def to_entries(self) -> dict[str, Any]:
        """The recording as objects and lists for JSON, times in seconds with 100 ns."""
        return {"version": VERSION, **_entries(self)}

    @classmethod
    def from_entries(cls, entries: object) -> Recording:
        """The inverse of :meth:`to_entries`. Raises PlanError if the entries are damaged."""
        return _DOCUMENT.read(entries)

    @classmethod
    def load(cls, path: Any) -> Recording:
        """Reads the recording from a timeline's file. Raises PlanError, naming the file."""
        try:
            found = _DOCUMENT.parse(read_document(path, "the timeline"))
            if not isinstance(found, Mapping) or FIELD not in found:
                raise PlanError(
                    f"there is no field {FIELD!r}: pass a file that `PipelineTimeline` has written"
                )
            return cls.from_entries(found[FIELD])
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error


FIELD: Final = "pipeshift"
"""The field of a timeline's file in which the recording stands, next to the events for Perfetto."""

VERSION: Final = 1
_KINDS: Final = frozenset(value for name, value in vars(What).items() if name.isupper())
_DOCUMENT: Final = Document(Recording, "the timeline", "record it again", VERSION)


def _entries(value: Any) -> Any:
    """A value of this module as objects and lists, without fields that have their default."""
    if isinstance(value, tuple):
        return [_entries(each) for each in value]
    if isinstance(value, float):
        return round(value, 7)
    if isinstance(value, int | str):
        return value
    found = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
    return {name: _entries(each) for name, (each, default) in found.items() if each != default}


def sender_of(waited_for: Action) -> Action:
    """The send, on the neighbouring stage, of what a forward or backward waits for."""
    kind = Kind.SEND_PAYLOAD if waited_for.kind is Kind.FORWARD else Kind.SEND_GRADIENT
    return replace(waited_for, kind=kind)
