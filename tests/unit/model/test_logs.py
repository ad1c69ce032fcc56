import pytest
import torch
import torchmetrics
from torch import nn

from lightning_pipeshift.model.user_state.logs import LogRecorder, MetricRef, merge_logs, say_again

CPU = torch.device("cpu")


def recorder_of(root):
    return LogRecorder(root, lambda leaf: leaf, lambda: None)


def recorded(*steps):
    """The logs of each microbatch, given a function for each."""
    recorder = recorder_of(nn.Module())
    logged = []
    for step in steps:
        step(recorder)
        logged.append(recorder.take())
    return logged


def values_of(merged):
    return {record.name: float(record.value) for record in merged}


def logs(value, **options):
    return lambda recorder: recorder.log("x", torch.as_tensor(value), **options)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {}, 2.0),  # weights 2 and 1
        ({"reduce_fx": "mean"}, {"reduce_fx": "mean"}, 2.0),
        ({"reduce_fx": torch.mean}, {"reduce_fx": torch.mean}, 2.0),
        ({"reduce_fx": "sum"}, {"reduce_fx": "sum"}, 5.0),
        ({"reduce_fx": torch.sum}, {"reduce_fx": torch.sum}, 5.0),
        ({"reduce_fx": "max"}, {"reduce_fx": "max"}, 4.0),
        ({"reduce_fx": max}, {"reduce_fx": max}, 4.0),
        ({"reduce_fx": "min"}, {"reduce_fx": "min"}, 1.0),
        ({"reduce_fx": torch.min}, {"reduce_fx": torch.min}, 1.0),
        ({"batch_size": 1}, {"batch_size": 3}, 3.25),
    ],
)
def test_the_value_of_the_whole_batch(first, second, expected):
    logged = recorded(logs(1.0, **first), logs(4.0, **second))
    (record,) = merge_logs(logged, [2, 1], [2.0, 1.0])
    assert float(record.value) == pytest.approx(expected)
    assert record.options["batch_size"] == (4 if "batch_size" in first else 3)


def test_weights_that_are_no_sizes():
    logged = recorded(logs(1.0), logs(4.0))
    (record,) = merge_logs(logged, [2, 2], [3.0, 1.0])
    assert float(record.value) == pytest.approx(1.75)
    assert record.options["batch_size"] == 4


def test_numbers_counts_and_conditions():
    def step(number, count, flag):
        def log(recorder):
            recorder.log_dict({"number": number, "count": torch.tensor(count), "flag": flag})

        return log

    merged = merge_logs(recorded(step(1.0, 3, True), step(2, 6, False)), [2, 1], [2.0, 1.0])
    assert values_of(merged) == pytest.approx({"number": 4 / 3, "count": 4.0, "flag": 2 / 3})


def test_a_single_microbatch_keeps_its_bits():
    (record,) = merge_logs(recorded(logs(0.1, on_epoch=True)), [3], [7.0])
    assert torch.equal(record.value, torch.tensor(0.1))
    assert record.options == {"on_epoch": True, "batch_size": 3}


def test_what_only_some_microbatches_log():
    merged = merge_logs(recorded(logs(1.0), lambda _: None, logs(3.0)), [2, 5, 2], [2.0, 5.0, 2.0])
    assert values_of(merged) == {"x": 2.0}
    assert merged[0].options["batch_size"] == 4


def test_one_name_logged_twice_in_a_step():
    def twice(recorder):
        recorder.log("x", 1.0, on_step=True)
        recorder.log("x", 10.0, on_epoch=True)

    merged = merge_logs(recorded(twice, twice), [1, 1], [1.0, 1.0])
    assert [(record.name, record.value) for record in merged] == [("x", 1.0), ("x", 10.0)]
    assert [next(iter(record.options)) for record in merged] == ["on_step", "on_epoch"]


def test_arguments_by_position():
    logged = recorded(lambda r: r.log("x", 1.0, True, False), lambda r: r.log_dict({"y": 2}, True))
    assert logged[0][0].options == {"prog_bar": True, "logger": False}
    assert logged[1][0].options == {"prog_bar": True}


def test_values_are_those_of_the_time_of_logging():
    value = torch.ones(1, requires_grad=True) * 2
    recorder = recorder_of(nn.Module())
    recorder.log("x", value.sum())
    recorder.log("y", value)
    with torch.no_grad():
        value.zero_()
    first, second = recorder.take()
    assert (float(first.value), float(second.value)) == (2.0, 2.0)
    assert not first.value.requires_grad
    assert recorder.take() == []


def test_torchmetrics_objects_are_logged_by_name():
    root = nn.Module()
    root.metrics = nn.ModuleDict({"mean": torchmetrics.MeanMetric()})
    recorder = recorder_of(root)
    for _ in range(2):
        recorder.log("shown", root.metrics["mean"], on_epoch=True)
    logged = [[record] for record in recorder.take()]
    (record,) = merge_logs(logged, [1, 1], [1.0, 1.0])
    assert record.value == MetricRef("metrics.mean")

    said = []
    say_again(
        [record], lambda name, value, **options: said.append((name, value, options)), root, CPU
    )
    assert said[0][0] == "shown"
    assert said[0][1] is root.metrics["mean"]
    assert said[0][2]["metric_attribute"] == "metrics.mean"


def test_saying_again():
    said = []
    merged = merge_logs(recorded(logs(1.0, prog_bar=True), logs(3.0)), [1, 1], [1.0, 1.0])
    say_again(
        merged, lambda name, value, **o: said.append((name, float(value), o)), nn.Module(), CPU
    )
    assert said == [("x", 2.0, {"prog_bar": True, "batch_size": 2})]


def test_a_mean_of_float64_stays_precise():
    exact = [torch.tensor(1 + 1e-12, dtype=torch.float64)] * 2
    (record,) = merge_logs(recorded(*[logs(v) for v in exact]), [1, 1], [1.0, 1.0])
    assert float(record.value) == pytest.approx(1 + 1e-12, abs=1e-15)
