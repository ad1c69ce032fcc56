"""A rank's record of a step: on a device that computes later, and of what threads note."""

from __future__ import annotations

import threading
from contextlib import nullcontext, suppress

import pytest
import torch

from lightning_pipeshift.plan.schedule.actions import Action, parse_row
from lightning_pipeshift.runtime.comm.channels import lane_name
from lightning_pipeshift.runtime.comm.turns import BACKGROUND, Turns, Urgency
from lightning_pipeshift.runtime.recording import recorder as recorder_module
from lightning_pipeshift.runtime.recording.recorder import Recorder
from lightning_pipeshift.timeline.recording import RankRecord, What
from tests.simulated.device import SimulatedDevice

CPU = torch.device("cpu")


def work(operations: int) -> None:
    x = torch.zeros(4, device="cuda:0")
    for _ in range(operations - 1):
        x.add_(1)


def test_on_a_device_the_record_has_the_devices_times_and_nobody_waits_for_it() -> None:
    """Each operation of the simulated device takes a millisecond of its own clock."""
    with SimulatedDevice() as device:
        work(5)
        recorder = Recorder(torch.device("cuda:0"), lambda: 7)
        for action, before, inside in (("F0", 3, 4), ("F0>", 0, 0), ("B0", 2, 6)):
            (parsed,) = parse_row(action)
            if not parsed.kind.is_compute:
                recorder.add(What.ACTION, action, recorder.now(), recorder.now())
                continue
            recorder.begin_action(parsed)
            with recorder.waiting("", False, nullcontext()):
                work(before)
            work(inside)
            recorder.end_action(computes=True)
        recorder.stop()
        work(2)
        record = recorder.record(3, 1, 0, "here")
        assert device.num_done > 0
    found = {(mark.what, mark.name): round(mark.seconds * 1000) for mark in record.marks}
    assert found == {
        (What.WAIT, "F0"): 3,
        (What.ACTION, "F0"): 4,
        (What.ACTION, "F0>"): 0,
        (What.WAIT, "B0"): 2,
        (What.ACTION, "B0"): 6,
    }
    assert round((record.end - record.begin) * 1000) == 15
    assert [each.num_bytes for each in record.memory] == [7, 7]
    assert (record.rank, record.vm, record.device) == (3, 1, "cuda")


def test_what_is_noted_too_late_or_does_not_fit_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder_module, "_MOST_MARKS", 2)
    recorder = Recorder(CPU, lambda: 0)
    for number in range(3):
        recorder.add(What.BLOCK, str(number), 0.0, 1.0)
    recorder.stop()
    recorder.add(What.BLOCK, "late", 0.0, 1.0)
    recorder.begin_action(Action.parse("F0"))
    recorder.end_action(computes=True)
    record = recorder.record(0, 0, 0, "")
    assert [mark.name for mark in record.marks] == ["0", "1"]
    assert record.num_dropped == 1
    assert record.memory == ()


def test_the_record_waits_for_what_outlasts_the_step() -> None:
    recorder = Recorder(CPU, lambda: 0)
    goes_on, late = threading.Event(), threading.Event()

    def last(what: str, name: str) -> None:
        with suppress(OSError), recorder.lasting(what, name, 1, 8):
            goes_on.wait()
            if name == "broken":
                raise OSError

    names = ("ring", "broken")
    threads = [threading.Thread(target=last, args=(What.RING, name)) for name in names]
    for thread in threads:
        thread.start()
    while recorder._num_open < len(names):
        late.wait(0.001)
    recorder.stop()
    with recorder.lasting(What.RING, "begun later", 1, 8):
        pass
    records: list[RankRecord] = []
    reader = threading.Thread(target=lambda: records.append(recorder.record(0, 0, 0, "")))
    reader.start()
    assert not records
    goes_on.set()
    for thread in (*threads, reader):
        thread.join()
    (mark,) = records[0].marks
    assert (mark.name, mark.peer, mark.num_bytes) == ("ring", 1, 8)
    assert mark.begin <= records[0].end <= mark.end


def test_blocks_are_noted_while_there_is_a_recorder_only() -> None:
    turns = Turns()

    def send(urgency: Urgency, num_bytes: int) -> None:
        turns.take(1, urgency, num_bytes)
        turns.end(1, urgency, num_bytes)

    send(Urgency(0), 10)
    recorder = turns.recorder = Recorder(CPU, lambda: 0)
    send(Urgency(1), 20)
    send(BACKGROUND, 30)
    turns.take(1, Urgency(2), 40)
    turns.recorder = None
    turns.end(1, Urgency(2), 40)
    send(Urgency(0), 50)
    recorder.stop()
    marks = recorder.record(0, 0, 0, "").marks
    found = [(lane_name(int(mark.name)), mark.peer, mark.num_bytes) for mark in marks]
    assert found == [("gradients-1", 1, 20), ("bulk", 1, 30)]
