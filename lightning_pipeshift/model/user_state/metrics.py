"""Torchmetrics objects that are called for each microbatch and show the whole batch's values."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from lightning_pipeshift.compat.torchmetrics_private import (
    last_value,
    set_last_value,
    set_update_count,
)


class BatchMetrics:
    """Makes a torchmetrics object that is called for each microbatch show the value for the whole
    batch.

    Metrics whose state cannot be merged (``full_state_update=True``) are not changed: their value
    for a step is the last microbatch's.
    """

    def __init__(self, root: nn.Module) -> None:
        self._metrics = [
            metric
            for metric in root.modules()
            if isinstance(metric, Metric)
            and metric.full_state_update is False
            and metric.metric_state
        ]
        self._before: list[tuple[dict[str, Any], int]] = []

    def begin(self) -> None:
        """Saves the states and resets them."""
        self._before = [
            ({k: copy.copy(v) for k, v in metric.metric_state.items()}, metric.update_count)
            for metric in self._metrics
        ]
        for metric in self._metrics:
            metric.reset()

    def end(self) -> None:
        """Computes the batch's values, and merges the saved states."""
        for metric, (state, count) in zip(self._metrics, self._before, strict=True):
            if metric.update_count == 0:
                for name, value in state.items():
                    setattr(metric, name, value)
                set_update_count(metric, count)
                continue
            batch_value = metric.compute() if last_value(metric) is not None else None
            set_update_count(metric, count + 1)
            if count:
                with torch.no_grad():
                    metric.merge_state(state)
            set_last_value(metric, batch_value)
        self._before = []
