"""Interfaces for those who take an interest in training steps, and in the actions of a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_pipeshift.model.execution.timing import Timer
from lightning_pipeshift.model.trace.trace import Trace
from lightning_pipeshift.plan.schedule.actions import Action, Row
from lightning_pipeshift.runtime.step.step_report import Report
from lightning_pipeshift.runtime.step.training_batch import TrainingBatch

Traces = Sequence[Trace | None]
"""One for each microbatch of a step; ``None`` where the step was not traced."""


class StepListener:
    """Is told of the training steps of a rank. Either method may wait for other ranks, since all
    ranks have the same listeners in the same order.
    """

    def before_step(self, given: TrainingBatch, traces: Traces) -> None:
        """The microbatches have been traced, and this stage has not begun with them.

        Args:
            given: the batch.
            traces: those of the microbatches.
        """

    def after_step(self, given: TrainingBatch, traces: Traces, report: Report) -> None:
        """The step's gradients are complete.

        Args:
            given: the batch.
            traces: those of the microbatches.
            report: that of the last stage.
        """


class ActionListener:
    """Is told of the actions of a stage, in the steps for which it is registered. A step without
    listeners calls none.
    """

    def begin_step(self, row: Row) -> None:
        """The stage begins a row.

        Args:
            row: its actions; in an asynchronous pipeline also those of the next rows, until the
                backwards of all microbatches that are in flight after it.
        """

    def begin_action(self, place: int, action: Action) -> None:
        """An action begins.

        Args:
            place: its index in the row.
            action: the action.
        """

    def received(self, action: Action) -> None:
        """The action has received what other stages send for it, and begins its own work."""

    def end_action(self, action: Action) -> None:
        """An action is over."""


class ActionTimes(ActionListener):
    """Times the actions of some microbatches, without the time in which they wait for others.

    Args:
        timers: by microbatch.
    """

    def __init__(self, timers: Mapping[int, Timer]) -> None:
        self._timers = timers
        self._begin: Any = None

    def begin_action(self, place: int, action: Action) -> None:
        """See :class:`ActionListener`."""
        self.received(action)

    def received(self, action: Action) -> None:
        """See :class:`ActionListener`."""
        timer = self._timers.get(action.microbatch)
        if timer is not None:
            self._begin = timer.now()

    def end_action(self, action: Action) -> None:
        """See :class:`ActionListener`."""
        timer = self._timers.get(action.microbatch)
        if timer is not None:
            timer.add(action.kind.name, -1, self._begin, timer.now(), is_around=True)
