"""The same state of user code on every stage of a virtual machine after each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_pipeshift.model.trace.trace import LAST_STAGE
from lightning_pipeshift.model.user_state.metrics import BatchMetrics
from lightning_pipeshift.model.user_state.module_state import ModuleState, Path
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.step.listeners import StepListener, Traces
from lightning_pipeshift.runtime.step.step_report import Report
from lightning_pipeshift.runtime.step.training_batch import TrainingBatch


class UserState(StepListener):
    """State that user code keeps on the modules outside of layers. The last stage runs all of the
    user code, and the others take its changes from its report.

    Args:
        root: the LightningModule.
        modules: those outside of layers, by qualified name.
        ignored: names of attributes that belong to the framework.
        channels: connect the stages.
        owner: returns the stage that owns a layer.
    """

    def __init__(
        self,
        root: nn.Module,
        modules: Mapping[str, nn.Module],
        ignored: frozenset[str],
        channels: Channels,
        owner: Callable[[int], int],
    ) -> None:
        self._root = root
        self._tail = ModuleState(dict(modules), ignored)
        self._metrics = BatchMetrics(root)
        self._channels = channels
        self._owner = owner
        self._last_stage = channels.num_stages - 1

    @property
    def _is_last(self) -> bool:
        return self._channels.stage == self._last_stage

    def before_step(self, given: TrainingBatch, traces: Traces) -> None:
        """See :class:`StepListener`."""
        self.remember()
        if self._is_last and len(traces) > 1:
            self._metrics.begin()

    def end_forwards(self, num_microbatches: int) -> None:
        """Called on the last stage when all forwards of a step have run."""
        if num_microbatches > 1:
            self._metrics.end()

    def after_step(self, given: TrainingBatch, traces: Traces, report: Report) -> None:
        """See :class:`StepListener`."""
        self.share(traces, report)

    def remember(self) -> None:
        """Records the present state: changes are found by comparison with it."""
        if self._last_stage:
            self._tail.remember()

    def changes(self) -> dict[Path, Any]:
        """The changes of user code on the last stage since the last call."""
        changes = self._tail.changes() if self._last_stage else {}
        self.remember()
        return changes

    def apply(self, report: Report, but: Mapping[Path, Any] | None = None) -> None:
        """Repeats the changes of the last stage on the others.

        Args:
            report: that of the last stage.
            but: the attributes that stay as they are.
        """
        if self._is_last:
            return
        for changes in report.changes:
            new = {path: change for path, change in changes.items() if path not in (but or {})}
            self._tail.apply(new, self._channels.device)

    def share(self, traces: Traces, report: Report) -> None:
        """Gives all stages the state of the last one; and, for tensors into which user code has
        written another stage's values, that stage's values. Every stage calls this.

        Args:
            traces: say which tensors these are.
            report: that of the last stage.
        """
        written: dict[Path, int] = {}
        for trace in traces:
            if trace is not None:
                written |= trace.state
        self.apply(report, but=written)
        channels = self._channels
        for (module_name, name), layer in sorted(written.items()):
            source = self._last_stage if layer == LAST_STAGE else self._owner(layer)
            tensor: Any = getattr(self._root.get_submodule(module_name), name)
            if channels.stage == source:
                for to in range(channels.num_stages):
                    if to != source:
                        channels.send_tensor(tensor.detach(), to)
            else:
                values = channels.receive_tensor(tensor, source)
                with torch.no_grad():
                    tensor.copy_(values)

    def resolve(self, value_of: Callable[[Any], Any]) -> None:
        """Replaces placeholders that user code has kept: see :meth:`ModuleState.resolve`."""
        self._tail.resolve(value_of)
