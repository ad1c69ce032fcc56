"""The minibatches in flight on one stage, in an asynchronous pipeline."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_pipeshift.plan.schedule.actions import Kind, Row
from lightning_pipeshift.plan.schedule.asynchronous import ahead, drain, turn
from lightning_pipeshift.plan.schedule.cut_over import newest_update
from lightning_pipeshift.runtime.gradients.aggregation import Aggregation
from lightning_pipeshift.runtime.ownership.weight_versions import WeightVersions
from lightning_pipeshift.step.losses import Losses
from lightning_pipeshift.step.step_report import Report


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """One minibatch, from its forward to its backward.

    Args:
        number: counts the minibatches of the run.
        batch: the batch.
        losses: takes its loss.
        batch_idx: its index in the epoch.
        is_last_batch: whether the epoch ends with it.
        stops: tells whether user code has asked the Trainer to stop.
        begins_update: whether it is the first of those whose gradients make one update.
        ends_update: whether it is the last of them.
        sums: sums the update's gradients over the virtual machines.
        tag: what belongs to it for the caller.
    """

    number: int
    batch: Any
    losses: Losses
    batch_idx: int
    is_last_batch: bool
    stops: Callable[[], bool]
    begins_update: bool
    ends_update: bool
    sums: Aggregation | None
    tag: Any


@dataclass(frozen=True)
class Finished:
    """A minibatch whose gradients are there.

    Args:
        minibatch: the minibatch.
        report: the last stage's, on every stage.
    """

    minibatch: Minibatch
    report: Report


class RunsActions(Protocol):
    """Carries out the actions of a stage."""

    def run(self, row: Row, ahead: Row) -> None:
        """Carries out a row's actions in order.

        Args:
            row: the actions.
            ahead: those of the next rows, until the backwards of all minibatches in flight.
        """


class Minibatches:
    """Runs minibatches on one stage: PipeDream's schedule.

    Args:
        stage: runs the actions.
        place: the stage's number.
        num_stages: of the pipeline.
        versions: the weights of the minibatches in flight.
    """

    def __init__(
        self, stage: RunsActions, place: int, num_stages: int, versions: WeightVersions
    ) -> None:
        self._stage = stage
        self._place = place
        self._num_stages = num_stages
        self.versions = versions
        self._in_flight: deque[Minibatch] = deque()
        self._first = 0
        """The first minibatch since the pipeline was empty."""
        self.next = 0
        """The number of the next minibatch."""
        self._ends: list[int] = []
        """The minibatches that end an update, in order."""

    @property
    def are_over(self) -> bool:
        """Whether the pipeline is empty: the same on every stage."""
        return self._first == self.next

    @property
    def in_flight(self) -> list[Minibatch]:
        """Those whose backward has not run, the oldest first."""
        return list(self._in_flight)

    @property
    def oldest(self) -> Minibatch | None:
        """The minibatch whose backward comes next."""
        return self._in_flight[0] if self._in_flight else None

    @property
    def turn_has_backward(self) -> bool:
        """Whether the next turn has a backward."""
        return self.next - self._first >= self._num_stages - 1 - self._place

    def newest_update(self, stage: int, minibatch: int) -> int:
        """How many updates a stage has made before its forward of a minibatch: ``newest_update`` of
        the schedule, in a pipeline that was empty before its first minibatch.
        """
        newest = max(newest_update(minibatch, stage, self._num_stages), self._first - 1)
        return bisect_right(self._ends, newest)

    def begin(self, minibatch: Minibatch) -> Minibatch | None:
        """The stage's turn for the next minibatch: its forward, and the backward that is due.

        Returns:
            the minibatch of that backward, if there is one.
        """
        row = turn(self.next, self._place, self._num_stages, self._first)
        later = ahead(self.next, self._place, self._num_stages, self._first)
        self._in_flight.append(minibatch)
        self.next += 1
        finished = self._run(row, later)
        if minibatch.ends_update:
            self.versions.update += 1
            self._ends.append(self.next - 1)
        return finished

    def end_one(self) -> Minibatch | None:
        """Runs the next backward without a forward, while the pipeline drains; ``None`` when the
        stage is done with all minibatches.
        """
        rest = drain(self.next - 1, self._place, self._num_stages, self._first)
        rest = rest[len(rest) - len(self._in_flight) :]
        if not rest:
            self._first = self.next
            return None
        return self._run(rest[:1], rest[1:])

    def _run(self, row: Row, later: Row) -> Minibatch | None:
        try:
            self._stage.run(row, later)
        except BaseException:
            self.versions.forget()
            raise
        has_backward = any(action.kind is Kind.BACKWARD for action in row)
        return self._in_flight.popleft() if has_backward else None
