"""Torchmetrics objects that are called for each microbatch and show the whole batch's values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from lightning_pipeshift.compat.torchmetrics_private import (
    can_merge,
    is_in_forward,
    set_last_value,
    set_update_count,
)

State = dict[str, Any]


class BatchMetrics:
    """Makes a torchmetrics object that is called for each microbatch show the value for the whole
    batch: where Lightning logs it for a step, it shows what its last call returned.

    Its state is left alone: in a step ``compute`` gives what it gives in plain Lightning with the
    microbatches as its batches. Metrics whose states cannot be merged (``full_state_update=True``)
    show the last microbatch's value.
    """

    def __init__(self, root: nn.Module) -> None:
        self._metrics = [
            metric for metric in root.modules() if isinstance(metric, Metric) and can_merge(metric)
        ]
        # Of each metric: the state of each microbatch that a call has counted, and what it runs by
        # itself. (A metric's hash changes with its state.)
        self._states: list[list[State]] = []
        self._own: list[Callable[..., Any]] = []

    def begin(self) -> None:
        """From now on, keeps the state of each microbatch."""
        self._leave()
        self._own = [metric.compute for metric in self._metrics]
        self._states = [[] for _ in self._metrics]
        for metric, own, states in zip(self._metrics, self._own, self._states, strict=True):
            # It is no setting of the metric: torchmetrics itself wraps it, and does not pickle it.
            metric.__dict__["compute"] = partial(_computed, metric, own, states)

    def _leave(self) -> None:
        for metric, own in zip(self._metrics, self._own, strict=False):
            metric.__dict__["compute"] = own
        self._own = []

    def end(self) -> None:
        """Computes the batch's values."""
        self._leave()
        for metric, states in zip(self._metrics, self._states, strict=True):
            if len(states) > 1:
                before, count = _state_of(metric), metric.update_count
                merged, *others = states
                for number, state in enumerate(others, 2):
                    _set_state(metric, state)
                    set_update_count(metric, number)
                    with torch.no_grad():
                        metric.merge_state(merged)
                    merged = _state_of(metric)
                set_last_value(metric, None)
                value = metric.compute()
                _set_state(metric, before)
                set_update_count(metric, count)
                set_last_value(metric, value)
        self._states = []


def _computed(
    metric: Metric, own: Callable[..., Any], states: list[State], *args: Any, **kwargs: Any
) -> Any:
    if is_in_forward(metric):
        # It has the state of what it was called with, and is merged with the one before then.
        states.append(_state_of(metric))
    return own(*args, **kwargs)


def _state_of(metric: Metric) -> State:
    """A metric's state: what is counted later replaces its tensors, and appends to its lists."""
    return {name: list(x) if isinstance(x, list) else x for name, x in metric.metric_state.items()}


def _set_state(metric: Metric, state: State) -> None:
    for name, x in state.items():
        setattr(metric, name, x)
