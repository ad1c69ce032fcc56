"""Evaluation steps on one stage: several are under way at a time."""

from __future__ import annotations

from lightning_pipeshift.model.execution.transfer import Fetch, to_host
from lightning_pipeshift.model.user_state.logs import merge_logs
from lightning_pipeshift.plan.schedule.actions import Row
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.lane import Sent
from lightning_pipeshift.runtime.step.losses import MicrobatchOutcome
from lightning_pipeshift.runtime.step.stage import Stage, Step
from lightning_pipeshift.runtime.step.step_report import Report
from lightning_pipeshift.runtime.step.user_state import UserState

# How many batches a stage may run ahead of the next stage.
_AHEAD = 4


class Evaluations:
    """Runs evaluation steps on one stage. It does not wait for the later stages: while they work on
    one batch it goes on with the next.

    Args:
        stage: runs the actions.
        channels: connect the stages.
        user_state: whose changes are part of the reports.
    """

    def __init__(self, stage: Stage, channels: Channels, user_state: UserState) -> None:
        self._stage = stage
        self._channels = channels
        self._user_state = user_state
        # The outcomes and sizes of the batches whose reports have not been fetched yet.
        self._pending: list[tuple[list[MicrobatchOutcome], int]] = []
        self._result_under_way = Fetch(None)
        self._sends: list[Sent] = []

    @property
    def num_pending(self) -> int:
        """The number of steps whose reports have not been fetched."""
        return len(self._pending)

    def run(self, row: Row, step: Step, size: int, wants_result: bool) -> None:
        """Runs this stage's part of a step.

        Args:
            row: its actions.
            step: of one microbatch, without a backward.
            size: the number of samples.
            wants_result: whether to keep the result of the user's step, in host memory, until the
                reports are fetched.
        """
        if not self._pending:
            self._user_state.remember()
        self._stage.run(row, step)
        outcomes = step.losses.outcomes
        for outcome in outcomes:
            earlier = self._result_under_way
            outcome.result = self._result_under_way = Fetch(
                outcome.result if wants_result else None
            )
            # Results of many batches would take much pinned memory. This batch keeps the device
            # busy while the earlier one's arrives.
            earlier.wait()
        self._pending.append((outcomes, size))
        self._sends.extend(self._stage.take_sends())
        while len(self._sends) > _AHEAD:
            self._sends.pop(0).wait()

    def fetch_reports(self) -> list[Report]:
        """Returns the reports of all steps since the last call, on every stage; waits for the last
        stage.
        """
        pending, self._pending = self._pending, []
        self._result_under_way = Fetch(None)
        source = self._channels.num_stages - 1
        reports: list[Report] | None = None
        if self._channels.stage == source:
            logs = [merge_logs([one.logs], [size], [float(size)]) for (one,), size in pending]
            logs, changes = to_host((logs, self._user_state.changes() if pending else {}))
            reports = [
                Report(outcome.result.wait(), logged, [])
                for ((outcome,), _), logged in zip(pending, logs, strict=True)
            ]
            for report in reports[-1:]:
                report.changes.append(changes)
        reports = self._channels.share_object(reports, source)
        assert reports is not None
        for sent in self._sends:
            sent.wait()
        self._sends.clear()
        for report in reports:
            self._user_state.apply(report)
        return reports
