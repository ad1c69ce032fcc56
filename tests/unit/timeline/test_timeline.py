"""Timelines of a step: clocks, shares of the time, and the file for Perfetto."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.cost.prediction import Prediction
from lightning_pipeshift.plan.cost.simulator import Costs
from lightning_pipeshift.plan.document.plan import LayerRecord, Plan
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.schedule.actions import Action
from lightning_pipeshift.timeline.chrome_trace import chrome_trace
from lightning_pipeshift.timeline.clocks import Offset, Ping, offset_of
from lightning_pipeshift.timeline.compared import Compared
from lightning_pipeshift.timeline.expected import expected
from lightning_pipeshift.timeline.metrics import metrics_of
from lightning_pipeshift.timeline.recording import FIELD, Mark, Memory, RankRecord, Recording, What
from lightning_pipeshift.timeline.shares import Shares, mean, shares_of
from lightning_pipeshift.timeline.slow_ranks import SlowRanks
from lightning_pipeshift.timeline.text import draw


def pings(offset: float, delays: list[tuple[float, float]]) -> list[Ping]:
    """Messages to a clock that shows ``offset`` less, given how long each takes there and back."""
    found, now = [], 100.0
    for there, back in delays:
        found.append(Ping(now, now + there - offset, now + there + back))
        now += there + back + 0.01
    return found


def test_an_offset_is_as_exact_as_it_says() -> None:
    draw = random.Random(3)
    for _ in range(200):
        offset = draw.uniform(-1e5, 1e5)
        delays = [(draw.expovariate(1e3), draw.expovariate(1e3)) for _ in range(24)]
        found = offset_of(pings(offset, delays))
        assert abs(found.seconds - offset) <= found.error_seconds + 1e-9
        # At least as narrow as the quickest message by itself.
        assert found.error_seconds <= min(map(sum, delays)) / 2 + 1e-9


def test_messages_that_are_slow_in_one_direction_each_bound_the_offset_together() -> None:
    found = offset_of(pings(7.0, [(1e-4, 0.2), (0.2, 1e-4)]))
    assert found.seconds == pytest.approx(7.0, abs=1e-9)
    assert found.error_seconds == pytest.approx(1e-4)


def test_processes_of_one_host_share_a_clock_unless_the_messages_say_otherwise() -> None:
    uneven = [(0.003, 0.001)] * 3
    assert offset_of(pings(0.0, uneven), is_same_host=True) == Offset()
    assert offset_of(pings(0.0, uneven)).seconds == pytest.approx(-0.001)
    assert offset_of(pings(5.0, uneven), is_same_host=True).seconds == pytest.approx(4.999)


def test_a_clock_that_is_set_between_the_messages_leaves_the_quickest_one() -> None:
    one, other = pings(0.0, [(0.001, 0.001)]), pings(9.0, [(0.1, 0.1)])
    assert offset_of([*one, *other]) == pytest.approx(offset_of(one))


def rank(stage: int, text: str, **others: Any) -> RankRecord:
    """A record from a drawing: ``F0:0-2`` an action, ``wF0:0-2`` a wait."""
    marks = []
    for word in text.split():
        name, _, times = word.partition(":")
        begin, _, end = times.partition("-")
        what = What.WAIT if name.startswith("w") else What.ACTION
        marks.append(Mark(what, name.removeprefix("w"), float(begin), float(end)))
    given = {"begin": 0.0, "end": 10.0, **others}
    return RankRecord(stage, 0, stage, "one", "cpu", marks=tuple(marks), **given)


def test_a_wait_is_a_bubble_until_the_other_stage_has_sent() -> None:
    first = rank(0, "F0:0-2 F0>:2-2 wB0:2-7 B0:7-10")
    last = rank(1, "wF0:0-3 F0:3-4 B0:4-6 B0>:6-6.5 wreport:6.5-7", end=9.0)
    found = shares_of(Recording(5, 1, (first, last)))
    # Sent at 6, there at 7.
    assert found[0] == pytest.approx(Shares(0.2, 0.3, 0.0, 0.4, 0.1, 0.0))
    # Sent at 2, there at 3; half a second of sending; the report; and one second of nothing else
    # while the first stage is not done. From 7 to 9 something else.
    assert found[1] == pytest.approx(Shares(0.1, 0.2, 0.0, 0.2 + 0.05 + 0.1, 0.15, 0.2))
    assert mean(found).bubble == pytest.approx(0.375)
    assert str(found[0]) == "40% bubble, 10% exposed communication, 0% recomputation"


def test_a_wait_for_sums_inside_of_a_forward_is_no_compute() -> None:
    sums = Mark(What.SUMS, "sums", 1.0, 2.0)
    record = rank(0, "F0:0-4 R0:4-5 B0:5-8")
    record = RankRecord(**{**fields_of(record), "marks": (*record.marks, sums)})
    (found,) = shares_of(Recording(0, 1, (record,)))
    assert found == pytest.approx(Shares(0.3, 0.3, 0.1, 0.0, 0.1, 0.2))
    assert record.compute_seconds == pytest.approx(7.0)


def fields_of(record: RankRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in RankRecord.__dataclass_fields__}


PLAN = Plan(
    tuple(LayerRecord(f"layer {n}", 8, 1.0, 8) for n in range(4)),
    Placement(((2, 2),)),
    "1f1b",
    4,
    prediction=Prediction(
        (Costs((2.0, 2.0), (4.0, 4.0), (0.5,), (0.5,), (1.0, 0.0)),), 35.0, memory_bytes=((1, 1),)
    ),
)


def test_what_a_plan_expects_is_a_recording_with_the_simulators_times() -> None:
    found, timeline = expected(PLAN), PLAN.timeline()
    assert found is not None
    assert found.seconds == timeline.step_seconds
    for record, row in zip(found.ranks, timeline.rows, strict=True):
        assert record.spans == row
    for share, idle in zip(shares_of(found), timeline.idle_seconds, strict=True):
        assert share.bubble + share.exposed == pytest.approx(idle / timeline.step_seconds)
        assert share.other == pytest.approx(0.0)
    # The transfers of half a second are behind no compute while the pipeline fills.
    assert all(share.exposed > 0 for share in shares_of(found))


def test_an_asynchronous_plan_is_drawn_where_it_is_full_under_the_numbers_of_the_record() -> None:
    asynchronous = Plan(PLAN.layers, PLAN.placement, "async", 1)
    found = expected(asynchronous, step=100, num_steps=3)
    assert found is not None
    names = [[str(span.action) for span in record.spans] for record in found.ranks]
    assert {"F100", "F101", "F102"} <= set(names[0])
    assert found.seconds == pytest.approx(3 * asynchronous.timeline().step_seconds)
    assert mean(shares_of(found)).bubble < 0.01


def test_a_timeline_is_read_back_from_its_file(tmp_path: Path) -> None:
    found = expected(PLAN)
    assert found is not None
    first = RankRecord(**{**fields_of(found.ranks[0]), "memory": (Memory(0.5, 3 << 20),)})
    found = Recording(7, 1, (first, *found.ranks[1:]), PLAN.to_json())
    path = tmp_path / "timeline.json"
    path.write_text(chrome_trace(found))
    assert Recording.load(path) == found
    assert Plan.from_json(Recording.load(path).plan).layers == PLAN.layers
    path.write_text("{}")
    with pytest.raises(PlanError, match="`PipelineTimeline` has written"):
        Recording.load(path)
    damaged = json.loads(chrome_trace(found))[FIELD]
    damaged["ranks"][0]["marks"][0]["what"] = "tea"
    with pytest.raises(PlanError, match="of kind 'tea'"):
        Recording.from_entries(damaged)


def test_slices_do_not_overlap_and_arrows_lie_in_the_slices_that_they_join() -> None:
    found = expected(PLAN)
    assert found is not None
    events = json.loads(chrome_trace(found))["traceEvents"]
    check_trace(events)
    arrows = [event for event in events if event["ph"] == "s"]
    # Payloads and gradients of four microbatches.
    assert len(arrows) == 8


def recorded(*stages: str, step: int = 4, **others: Any) -> Recording:
    return Recording(step, 1, tuple(rank(n, text) for n, text in enumerate(stages)), **others)


def test_a_step_is_drawn_below_what_its_plan_expects() -> None:
    plan = Plan(PLAN.layers, Placement(((2, 2),)), "1f1b", 1)
    measured = recorded("F0:0-2 F0>:2-2 wB0:2-6 B0:6-10", "wF0:0-2 F0:2-4 B0:4-6 B0>:6-6")
    assert draw(measured).splitlines()[0].startswith("step 4: 10 s (no layer is measured")
    text = draw(replace(measured, plan=plan.to_json())).splitlines()
    assert text[0] == "step 4: 10 s, and 12 s predicted for a step"
    rows = [line for line in text if "│" in line]
    assert [line.split("│")[1] for line in rows] == [
        "0─────··················0━━━━━━━━━━━",
        "······0─────0━━━━━━━━━━━············",
        "0─────············0━━━━━━━━━━━",
        "······0─────0━━━━━············",
    ]
    assert rows[2].endswith("40% bubble   0% exposed   0% again")
    assert "predicted: 50% bubble" in "\n".join(text)


def test_minibatches_are_counted_from_0_in_drawings() -> None:
    plan = Plan(PLAN.layers, PLAN.placement, "async", 1)
    measured = recorded("F100:0-2 B99:2-6 F101:6-8", "B98:0-1 F99:1-3", step=7, plan=plan.to_json())
    compared = Compared.of(measured)
    assert [str(span.action) for span in compared.measured.ranks[0].spans] == ["F2", "B1", "F3"]
    assert compared.expected is not None
    assert any(span.action == Action.parse("F2") for span in compared.expected.ranks[0].spans)


def test_figures_for_loggers() -> None:
    first = RankRecord(**{**fields_of(rank(0, "F0:0-2 B0:7-10")), "memory": (Memory(1.0, 70),)})
    found = metrics_of(Recording(3, 1, (first, rank(1, "F0:3-4 B0:4-6"))))
    assert found["pipeshift/step_seconds"] == 10.0
    assert found["pipeshift/stage_seconds/0.0"] == pytest.approx(5.0)
    assert found["pipeshift/stage_seconds/0.1"] == pytest.approx(3.0)
    assert found["pipeshift/memory/0.0"] == 70.0
    assert "pipeshift/memory/0.1" not in found
    assert {"pipeshift/bubble", "pipeshift/exposed_comm", "pipeshift/recompute"} <= found.keys()


def test_a_slow_rank_is_named_once_until_it_has_recovered() -> None:
    """Slow is slower than the plan expects, and than the others are; for three records."""
    usual = recorded("F0:0-1", "F0:0-2")
    slow, all_slow = recorded("F0:0-1", "F0:0-3"), recorded("F0:0-2", "F0:0-4")
    watch = SlowRanks()
    said = [
        watch.look(each, usual)
        for each in (slow, slow, usual, slow, slow, slow, slow, all_slow, slow, slow, slow)
    ]
    assert [len(messages) for messages in said] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    (message,) = said[5]
    assert "rank 1 (stage 1 of virtual machine 0, host one) is 1.5 times as slow" in message
    assert "3 s in a step instead of 2 s" in message
    assert watch.look(slow, None) == []


def check_trace(events: list[dict[str, Any]]) -> None:
    """What Perfetto needs of a file: slices nest, and both ends of an arrow are in a slice."""
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for each in slices.values():
        open_ends: list[float] = []
        for begin, end in sorted(each, key=lambda pair: (pair[0], -pair[1])):
            while open_ends and open_ends[-1] <= begin + 1e-6:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.11, "slices overlap"
            open_ends.append(end)
    ends = {
        way: {event["id"]: event for event in events if event["ph"] == way} for way in ("s", "f")
    }
    assert ends["s"].keys() == ends["f"].keys()
    for number, source in ends["s"].items():
        target = ends["f"][number]
        assert (source["name"], source["cat"]) == (target["name"], target["cat"])
        assert source["pid"] != target["pid"]
        assert source["ts"] <= target["ts"]
        for end in (source, target):
            around = slices[end["pid"], end["tid"]]
            assert any(begin <= end["ts"] <= stop for begin, stop in around)
    begun = {event["id2"]["local"] for event in events if event["ph"] == "b"}
    assert begun == {event["id2"]["local"] for event in events if event["ph"] == "e"}
