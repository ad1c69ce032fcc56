"""Each name of ``compat.torchmetrics_private`` exists, and does what the package relies on."""

import torch
from torchmetrics import MeanMetric

from lightning_pipeshift.compat import torchmetrics_private as compat


def test_the_last_value_is_that_of_the_last_call() -> None:
    metric = MeanMetric()
    assert compat.last_value(metric) is None
    metric(torch.tensor([1.0, 3.0]))
    metric(torch.tensor([5.0]))
    assert compat.last_value(metric) == 5.0
    metric.update(torch.tensor([7.0]))
    assert compat.last_value(metric) == 5.0


def test_setting_the_last_value_drops_what_was_computed() -> None:
    metric = MeanMetric()
    metric.update(torch.tensor([1.0]))
    assert metric.compute() == 1.0
    metric.mean_value, metric.weight = torch.tensor(8.0), torch.tensor(2.0)
    assert metric.compute() == 1.0, "torchmetrics keeps the value"
    compat.set_last_value(metric, torch.tensor(3.0))
    assert compat.last_value(metric) == 3.0
    assert metric.compute() == 4.0


def test_the_number_of_updates_is_set() -> None:
    metric = MeanMetric()
    metric.update(torch.tensor([1.0]))
    assert metric.update_count == 1
    compat.set_update_count(metric, 5)
    assert metric.update_count == 5
    metric.update(torch.tensor([1.0]))
    assert metric.update_count == 6


def test_what_is_read_publicly() -> None:
    metric = MeanMetric()
    assert metric.metric_state.keys() == {"mean_value", "weight"}
    assert not (metric + metric).metric_state, "a composition has no states of its own"
