"""The last stage's report of a step, and how the virtual machines merge their reports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_pipeshift.errors import BatchError
from lightning_pipeshift.model.tensors.microbatch import weighted_mean
from lightning_pipeshift.model.user_state.logs import LoggedValue, merge_logs


@dataclass
class Report:
    """The last stage's report of a step, for every rank.

    Args:
        result: the step's result.
        logs: the values that it logged.
        is_last_batch: whether the epoch ends with this step.
        loss: the batch's loss, ``None`` if no microbatch returned one.
        counted: the total weight of the losses: see
            :meth:`~lightning_pipeshift.step.losses.Losses.counted`.
        divided: the denominator by which they have been divided.
        size: how many samples the batch had.
        asks_to_end: whether a stage asks for the end of the run.
        stops: whether user code has asked the Trainer to stop.
        metrics: in an asynchronous schedule, the values of the module's metrics.
        digest: likewise, of what the step has logged and returned.
    """

    result: Any
    logs: list[LoggedValue]
    is_last_batch: bool = False
    loss: Tensor | None = None
    counted: float = 0.0
    divided: float = 1.0
    size: int = 0
    asks_to_end: bool = False
    stops: bool = False
    metrics: Any = None
    digest: int = 0

    @property
    def correction(self) -> float:
        """The factor still missing in the gradients; 0 if the step has no weight."""
        return self.divided / self.counted if self.counted else 0.0


def merge_reports(reports: list[Report], vm: int) -> Report:
    """A virtual machine's report, with the loss and the logs of all of them.

    Args:
        reports: one for each virtual machine.
        vm: the virtual machine whose result is used.
    """
    mine = reports[vm]
    if len(reports) == 1:
        return mine
    ends = {report.is_last_batch for report in reports}
    if len(ends) > 1:
        raise BatchError(
            "The virtual machines see different numbers of batches: for virtual machine "
            f"{[report.is_last_batch for report in reports].index(True)} the epoch ends, and for "
            "others it continues. Give all of them the same number of batches."
        )
    sizes, counted = [r.size for r in reports], [r.counted for r in reports]
    losses = [(r.loss, r.counted) for r in reports if r.loss is not None]
    loss = None
    if losses:
        loss = weighted_mean([x for x, _ in losses], [w for _, w in losses])
    return replace(
        mine,
        logs=merge_logs([report.logs for report in reports], sizes, counted),
        loss=loss,
        counted=sum(counted),
        asks_to_end=any(report.asks_to_end for report in reports),
        stops=any(report.stops for report in reports),
        # A virtual machine that had a loss knows the denominator by which it was divided.
        divided=next((r.divided for r in reports if r.counted), mine.divided),
    )
