"""Private names of torchmetrics. Checked with torchmetrics 1.9.

What a metric has counted and computed can be read publicly, but not set.
"""

from __future__ import annotations

from typing import Any

from torchmetrics import Metric


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
