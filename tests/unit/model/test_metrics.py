import pytest
import torch
import torchmetrics
from torch import nn
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassConfusionMatrix

from lightning_pipeshift.model.user_state.metrics import BatchMetrics

GENERATOR = torch.Generator().manual_seed(1)
BATCHES = [
    (torch.rand(size, 3, generator=GENERATOR).softmax(-1), torch.arange(size) % 3)
    for size in (7, 5, 8)
]


def classes(batch):
    return batch


def numbers(batch):
    return batch[0][:, 0], batch[1].float()


def one_number(batch):
    return (batch[0][:, 0],)


def binary(batch):
    return batch[0][:, 0], (batch[1] > 0).long()


METRICS = {
    "accuracy": (lambda: MulticlassAccuracy(3), classes),
    "accuracy, micro": (lambda: MulticlassAccuracy(3, average="micro"), classes),
    "confusion": (lambda: MulticlassConfusionMatrix(3), classes),
    "mean": (torchmetrics.MeanMetric, one_number),
    "sum": (torchmetrics.SumMetric, one_number),
    "squared error": (torchmetrics.MeanSquaredError, numbers),
    "list of states": (BinaryAUROC, binary),
}


class Root(nn.Module):
    def __init__(self, metric):
        super().__init__()
        self.metric = metric


def cut(batch, num):
    parts = [torch.tensor_split(tensor, num) for tensor in batch]
    return list(zip(*parts, strict=True))


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
@pytest.mark.parametrize("how", ["forward", "update"])
@pytest.mark.parametrize(("make", "inputs"), METRICS.values(), ids=METRICS)
def test_microbatches_show_what_the_batch_would(make, inputs, how, num_microbatches):
    one_shot, root = make(), Root(make())
    metrics = BatchMetrics(root)
    for batch in BATCHES:
        expected = getattr(one_shot, how)(*inputs(batch))
        metrics.begin()
        for part in cut(batch, num_microbatches):
            getattr(root.metric, how)(*inputs(part))
        metrics.end()
        if how == "forward":
            torch.testing.assert_close(root.metric._forward_cache, expected)
    torch.testing.assert_close(root.metric.compute(), one_shot.compute())
    root.metric.reset()
    assert root.metric.update_count == 0


def test_a_metric_that_a_step_leaves_alone_keeps_its_state():
    root = Root(torchmetrics.MeanMetric())
    root.metric.update(3.0)
    metrics = BatchMetrics(root)
    metrics.begin()
    metrics.end()
    assert root.metric.update_count == 1
    assert root.metric.compute() == 3.0
    root.metric.update(5.0)
    assert root.metric.compute() == 4.0


def test_a_first_batch_without_updates():
    root = Root(MulticlassAccuracy(3))
    metrics = BatchMetrics(root)
    metrics.begin()
    metrics.end()
    assert root.metric.update_count == 0
    metrics.begin()
    root.metric(*BATCHES[0])
    metrics.end()
    one_shot = MulticlassAccuracy(3)
    one_shot(*BATCHES[0])
    torch.testing.assert_close(root.metric.compute(), one_shot.compute())


def test_metrics_of_a_collection():
    make = lambda: torchmetrics.MetricCollection(  # noqa: E731
        {"accuracy": MulticlassAccuracy(3), "confusion": MulticlassConfusionMatrix(3)},
        compute_groups=False,
    )
    one_shot, root = make(), Root(make())
    metrics = BatchMetrics(root)
    for batch in BATCHES:
        one_shot(*batch)
        metrics.begin()
        for part in cut(batch, 2):
            root.metric(*part)
        metrics.end()
    expected = one_shot.compute()
    for name, value in root.metric.compute().items():
        torch.testing.assert_close(value, expected[name])


def test_a_collection_that_shares_states():
    make = lambda: torchmetrics.MetricCollection(  # noqa: E731
        {"micro": MulticlassAccuracy(3, average="micro"), "macro": MulticlassAccuracy(3)}
    )
    one_shot, root = make(), Root(make())
    metrics = BatchMetrics(root)
    for batch in BATCHES:
        one_shot.update(*batch)
        metrics.begin()
        for part in cut(batch, 2):
            root.metric.update(*part)
        metrics.end()
    expected = one_shot.compute()
    for name, value in root.metric.compute().items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("how", ["forward", "update"])
@pytest.mark.parametrize(("make", "inputs"), METRICS.values(), ids=METRICS)
def test_in_a_step_a_metric_computes_what_it_would_with_microbatches_as_batches(make, inputs, how):
    plain, root = make(), Root(make())
    metrics = BatchMetrics(root)
    for batch in BATCHES:
        metrics.begin()
        for part in cut(batch, 3):
            getattr(plain, how)(*inputs(part))
            getattr(root.metric, how)(*inputs(part))
            assert_equal(root.metric.compute(), plain.compute())
        metrics.end()
        assert_equal(root.metric.compute(), plain.compute())
        assert root.metric.update_count == plain.update_count


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Smoothed(torchmetrics.Metric):
    """Depends on the order of its updates."""

    value: torch.Tensor
    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("value", default=torch.zeros(()), dist_reduce_fx="mean")

    def update(self, x):
        self.value = 0.9 * self.value + 0.1 * x.mean()

    def compute(self):
        return self.value


def test_a_metric_that_depends_on_the_order_of_its_updates():
    plain, root = Smoothed(), Root(Smoothed())
    metrics = BatchMetrics(root)
    for batch in BATCHES:
        metrics.begin()
        for (part,) in cut(batch[:1], 3):
            plain.update(part)
            root.metric.update(part)
        metrics.end()
    assert_equal(root.metric.compute(), plain.compute())


class Odd(torchmetrics.Metric):
    total: torch.Tensor
    full_state_update = True

    def __init__(self):
        super().__init__()
        self.add_state("total", default=torch.zeros(()), dist_reduce_fx="sum")

    def update(self, x):
        self.total += x.sum()

    def compute(self):
        return self.total


def test_a_metric_whose_state_cannot_be_merged_is_left_alone():
    root = Root(Odd())
    metrics = BatchMetrics(root)
    for _ in range(2):
        metrics.begin()
        root.metric(torch.ones(3))
        metrics.end()
    assert root.metric.compute() == 6


def test_a_maximum():
    root = Root(torchmetrics.MaxMetric())
    metrics = BatchMetrics(root)
    for values in ([1.0, 5.0], [4.0, 2.0]):
        metrics.begin()
        for value in values:
            root.metric.update(value)
        metrics.end()
    assert root.metric.compute() == 5
