"""Steps of validation, testing and prediction: forwards, whose reports are fetched together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_pipeshift.model.tensors.microbatch import size_or_one
from lightning_pipeshift.model.user_state.logs import LoggedValue, merge_logs
from lightning_pipeshift.plan.schedule.schedules import forward_only
from lightning_pipeshift.runtime.liveness.stalls import purpose
from lightning_pipeshift.step.step_report import Report
from lightning_pipeshift.step.training_batch import UserStep

if TYPE_CHECKING:
    from lightning_pipeshift.step.pipeline import Pipeline

STEPS_AHEAD = 4
"""How many batches of an evaluation a stage may be ahead of another one."""


@dataclass
class _Evaluated:
    """The result and the logs of an evaluation step, which may contain values."""

    result: Any
    logs: list[LoggedValue]
    size: int


class Evaluations:
    """A pipeline's evaluation steps.

    Args:
        pipeline: runs them.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._evaluated: list[_Evaluated] = []

    @purpose("a step of an evaluation")
    def step(
        self,
        batch: Any,
        batch_idx: int,
        step: UserStep,
        kind: str,
        step_number: int,
        wants_result: bool,
    ) -> bool:
        """Runs a forward-only step. Its report is returned by :meth:`fetch_reports`.

        Args:
            batch: the batch.
            batch_idx: its index.
            step: runs the user's step.
            kind: the kind of the user's step, and its dataloader.
            step_number: counts its batches.
            wants_result: whether the step's result is needed.

        Returns:
            whether the step has logged values for the loggers at once.
        """
        pipeline = self._pipeline
        pipeline.meets()
        pipeline.check_batch(batch, batch_idx)
        pipeline.prepare(pipeline.key(kind, step_number), step, batch)
        row = forward_only(pipeline.channels.num_stages, 1)[pipeline.channels.stage]
        function = partial(pipeline.values.logged, step)
        ((result, logs),) = pipeline.run_step(
            kind, step_number, [batch], function, row, num_ahead=STEPS_AHEAD
        )
        evaluated = _Evaluated(result if wants_result else None, logs, size_or_one(batch))
        self._evaluated.append(evaluated)
        return any(log.options.get("on_step") for log in logs)

    def plain_step(self, batch: Any, step: UserStep, kind: str, step_number: int) -> Any:
        """Runs a step on a single device, and returns its result.

        Args:
            batch: as for :meth:`step`, as are the others.
            step: runs the user's step.
            kind: of the user's step, and its dataloader.
            step_number: counts its batches.
        """
        pipeline = self._pipeline
        pipeline.prepare(pipeline.key(kind, step_number), step, batch)
        return pipeline.plain_forward(kind, step_number, step, batch)

    def fetch_reports(self) -> list[Report]:
        """The reports of all evaluation steps since the last call. Every stage calls this."""
        evaluated, self._evaluated = self._evaluated, []
        logs = [merge_logs([one.logs], [one.size], [float(one.size)]) for one in evaluated]
        gathering = self._pipeline.values.gathering
        found = gathering.end(
            *gathering.begin(
                [(one.result, each) for one, each in zip(evaluated, logs, strict=True)]
            )
        )
        return [Report(result, logged) for result, logged in found]

    @property
    def num_pending(self) -> int:
        """The number of evaluation steps whose reports have not been fetched."""
        return len(self._evaluated)
