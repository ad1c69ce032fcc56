"""Private names of torchmetrics. Checked with torchmetrics 1.9.

What a metric has counted and computed can be read publicly, but not set.
"""

from __future__ import annotations

from typing import Any

from torchmetrics import Metric


def can_merge(metric: Metric) -> bool:
    """Whether states of batches can be merged to that of all of them, as ``forward`` does."""
    is_merged = metric.full_state_update is False and not metric.dist_sync_on_step
    lists = {name for name, x in metric._defaults.items() if isinstance(x, list)}
    known = all(how is not None or name in lists for name, how in metric._reductions.items())
    return is_merged and known and bool(metric.metric_state)


def is_in_forward(metric: Metric) -> bool:
    """Whether the metric computes the value of a batch for its ``forward``."""
    return bool(metric._enable_grad)


def last_value(metric: Metric) -> Any:
    """The value that the metric's last ``forward`` returned; ``None`` if there is none. Lightning
    reads it where a metric is logged.
    """
    return metric._forward_cache


def set_last_value(metric: Metric, value: Any) -> None:
    """Sets what :func:`last_value` returns, and drops the value that ``compute`` has cached."""
    metric._computed = None
    metric._forward_cache = value


def set_update_count(metric: Metric, count: int) -> None:
    """Sets ``metric.update_count``."""
    metric._update_count = count
