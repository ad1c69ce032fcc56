import itertools
from dataclasses import replace

import pytest

from lightning_pipeshift.plan.cost.prediction import Prediction
from lightning_pipeshift.plan.cost.simulator import Costs
from lightning_pipeshift.plan.document.plan import LayerRecord, Plan
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.inputs.saved_tensors import Swap
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS, SYNCHRONOUS

TWO_STAGES = """
PipeShift plan: 14 layers, schedule 1f1b, 8 microbatches
predicted step: 756 ms (a backward as 2 forwards, transfers as free)

── virtual machine 0 (one replica of the pipeline) ─────────────────────────────────────────────────
stage  layers                                           parameters  forward time       payload out
    0  model.wte … model.h.5 (7 layers)                   196.0 MB  ██████        50%       6.3 MB
    1  model.h.6 … model.lm_head (7 layers)               196.0 MB  ██████        50%            -

    0 │0──1──······0━━━━━2──1━━━━━3──2━━━━━4──3━━━━━5──4━━━━━6──5━━━━━7──6━━━━━···7━━━━━│  11% idle
    1 │···0──0━━━━━1──1━━━━━2──2━━━━━3──3━━━━━4──4━━━━━5──5━━━━━6──6━━━━━7──7━━━━━······│  11% idle

       2──  forward of microbatch 2    2━━  its backward    ···  idle    time runs right
"""


ASYNCHRONOUS_PLAN = """
PipeShift plan: 14 layers, schedule async, minibatches not split
predicted pace: 84 ms a minibatch (a backward as 2 forwards, transfers as free)

── virtual machine 0 (one replica of the pipeline) ─────────────────────────────────────────────────
stage  layers                                           parameters  forward time       payload out
    0  model.wte … model.h.5 (7 layers)                   196.0 MB  ██████        50%       6.3 MB
    1  model.h.6 … model.lm_head (7 layers)               196.0 MB  ██████        50%            -

    0 │0──1──······0━━━━━2──1━━━━━3──2━━━━━4──3━━━━━5──4━━━━━6──5━━━━━7──6━━━━━···7━━━━━│   0% idle
    1 │···0──0━━━━━1──1━━━━━2──2━━━━━3──3━━━━━4──4━━━━━5──5━━━━━6──6━━━━━7──7━━━━━······│   0% idle

       2──  forward of minibatch 2    2━━  its backward    ···  idle    time runs right
"""


def gpt(num_blocks=12, seconds=0.004, prefix="model."):
    names = ["wte", *(f"h.{i}" for i in range(num_blocks)), "lm_head"]
    return tuple(LayerRecord(prefix + name, 28_000_000, seconds, 6_291_456) for name in names)


def test_two_stages():
    drawing = str(Plan(gpt(), Placement(((7, 7),)), "1f1b", 8))
    assert drawing == TWO_STAGES.strip("\n")


def test_an_asynchronous_pipeline():
    """Idle time is that of a full pipeline: it fills once, and not for every batch."""
    drawing = str(Plan(gpt(), Placement(((7, 7),)), "async", 1))
    assert drawing == ASYNCHRONOUS_PLAN.strip("\n")
    unlike = str(Plan(gpt(), Placement(((9, 5),)), "async", 1, recompute=((0, 1),)))
    assert [line.rsplit("│")[-1].strip() for line in unlike.splitlines() if "% idle" in line] == [
        "0% idle",
        "44% idle",
    ]
    assert "2~~  forward of minibatch 2 run again" in unlike
    # Of the faster virtual machine, what comes after the minibatches that are drawn is not idle.
    two = str(Plan(gpt(), Placement(((7, 7), (14, 0))), "async", 1)).splitlines()
    rows = [line.split("│") for line in two if "% idle" in line]
    assert [row[-1].strip() for row in rows] == ["50% idle", "50% idle", "0% idle", "100% idle"]
    assert rows[0][1].endswith("7━━━")


def test_a_drained_stage():
    lines = str(Plan(gpt(), Placement(((4, 5, 0, 5),)), "1f1b", 4)).splitlines()
    assert any("2  (none: passes the payload on)" in line and "0%" in line for line in lines)
    (row,) = (line for line in lines if line.startswith("    2 │"))
    assert set(row.split("│")[1]) == {"·"}
    assert row.endswith("100% idle")


def test_equal_virtual_machines_are_drawn_once():
    placement = Placement(((7, 7), (7, 7), (7, 7), (4, 5, 5)))
    drawing = str(Plan(gpt(), placement, "gpipe", 4))
    assert "── virtual machines 0 to 2 (replicas of the pipeline) ──" in drawing
    assert "── virtual machine 3 ──" in drawing
    assert drawing.count("stage  layers") == 2


def test_swaps():
    swaps = (
        Swap(0, (0, 2), (1,)),
        Swap(1, (0, 2), (1,)),
        Swap(1, (3,)),
        Swap(9, (1,), (0, 2), (1.0, 2.0)),
        Swap(9, (4,), (0, 2), (1.0, 2.0)),
    )
    plan = Plan(gpt(), Placement(((7, 5, 2), (7, 5, 2))), "1f1b", 8, swaps=(swaps, ()))
    drawing = str(plan)
    assert (
        "    0  swaps 4 tensors of 2 layers to stage 1; 1 tensor of 1 layer to the host" in drawing
    )
    assert "    1  swaps 2 tensors of 1 layer to stages 0 and 2" in drawing
    # The other one swaps nothing, and is drawn for itself.
    assert drawing.count("swaps") == 2
    assert "── virtual machine 1 ──" in drawing


def test_not_measured():
    drawing = str(Plan(gpt(seconds=0.0), Placement(((7, 7),)), "1f1b", 8))
    assert "no layer is measured yet" in drawing
    assert "predicted" not in drawing
    assert drawing.count(" 50%") == 2


def test_not_measured_and_predicted():
    """All time that was measured is that of code between layers."""
    plan = Plan(gpt(seconds=0.0), Placement(((7, 7),)), "1f1b", 8)
    costs = Costs((0.0, 0.0), (0.0, 0.0), (0.0,), (0.0,))
    predicted = replace(plan, prediction=Prediction((costs,), 0.1, 0.0, ((0.0, 0.0),)))
    assert str(predicted) == str(plan)


def test_many_microbatches_leave_out_the_middle():
    drawing = str(Plan(gpt(), Placement(((7, 7),)), "1f1b", 500))
    assert "│0───1───" in drawing
    assert " ⋯ " in drawing
    assert "499━" in drawing


def test_a_number_is_never_cut():
    fast_and_slow = (*gpt(1, 0.001), LayerRecord("slow", 0, 0.1, 0))
    drawing = str(Plan(fast_and_slow, Placement(((3, 1),)), "gpipe", 20))
    (row,) = (line.split("│")[1] for line in drawing.splitlines() if line.startswith("    0 │"))
    numbers = "".join(c if c.isdigit() else " " for c in row).split()
    assert all(int(number) < 20 for number in numbers)


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [*itertools.product(SYNCHRONOUS, [1, 2, 7, 120]), *((name, 1) for name in ASYNCHRONOUS)],
)
@pytest.mark.parametrize("num_stages", [1, 2, 16])
@pytest.mark.parametrize("prefix", ["", "a.very.long.prefix.of.an.encoder.decoder.layers.module."])
def test_no_line_is_wider_than_100_columns(schedule, num_stages, microbatches, prefix):
    layers = gpt(30, prefix=prefix)
    counts = (2,) * (num_stages - 1)
    placement = Placement(((*counts, 32 - sum(counts)), (32, *[0] * (num_stages - 1))))
    drawing = str(Plan(layers, placement, schedule, microbatches))
    assert max(map(len, drawing.splitlines())) <= 100


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_layers_that_moved_to_any_stage_are_drawn(schedule):
    layers = gpt(5)
    owners = [at % 2 for at in range(len(layers))]
    plan = Plan(layers, Placement.of([owners], [2]), schedule, 4)
    assert not plan.is_foreseen
    assert "layers, schedule" in str(plan)


def test_many_unequal_machines_stay_narrow():
    counts = [(6, 8), (7, 7)] * 40
    assert max(map(len, str(Plan(gpt(), Placement(tuple(counts)), "1f1b", 2)).splitlines())) <= 100


def test_sizes_and_names():
    layers = (
        LayerRecord("x" * 80, 12_345, 1e-6, 0),
        LayerRecord("big", 50_000_000_000, 3e-6, 4_096),
        LayerRecord("head", 0, 1e-6, 0),
    )
    drawing = str(Plan(layers, Placement(((1, 1, 1),)), "gpipe", 1))
    assert "12.3 kB" in drawing
    assert "50.0 GB" in drawing
    assert "4.1 kB" in drawing
    assert "…xxxx" in drawing
    assert "predicted step: 15 µs" in drawing
