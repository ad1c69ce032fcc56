"""``PipelineTimeline``: what ranks did, on one clock, with the same bits as without it."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_pipeshift import (
    ConfigurationError,
    LayerMigration,
    MemoryCompression,
    Move,
    PipelineTimeline,
    SwapAll,
)
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.schedule.actions import Action
from lightning_pipeshift.plan.schedule.asynchronous import turn
from lightning_pipeshift.plan.schedule.schedules import schedule_named
from lightning_pipeshift.runtime.gradients.aggregation import MOST_TYPES
from lightning_pipeshift.runtime.gradients.lanes import MOST_PIECES
from lightning_pipeshift.runtime.gradients.rings import Rings
from lightning_pipeshift.runtime.offload.activation_store import ActivationStore
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.timeline.recording import Mark, Recording, What, sender_of
from tests.end_to_end.test_changing_plans import SLOW, Sleeper, SlowsDown, go_by_sleep
from tests.features_models import AwaitsPlanning, built, parameters_of, quiet_trainer, read_csv
from tests.models import points
from tests.unit.timeline.test_timeline import check_trace

NUM_BATCHES, EVERY = 10, 4
ON_TWO: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b", "microbatches": 4},
    "gpipe": {"schedule": "gpipe", "microbatches": 4, "recompute": "full"},
    "eager_1f1b": {"schedule": "eager_1f1b", "microbatches": 4},
    "zb-h1": {"schedule": "zb-h1", "microbatches": 4},
    "interleaved_1f1b": {
        "schedule": "interleaved_1f1b",
        "microbatches": 4,
        "partition": [2, 2, 2, 2],
    },
    "async": {"schedule": "async"},
    "async-2bw": {"schedule": "async-2bw"},
}
TWO_MACHINES: dict[str, dict[str, Any]] = {
    name: {**how, "virtual_machines": 2, "partition": [[4, 4], [3, 5]]}
    for name, how in (("1f1b", ON_TWO["1f1b"]), ("async", ON_TWO["async"]))
}
LATE = 8
"""The number of a recorded step whose ring of the first layer ends in the next step."""
STRANGE_CLOCK = 12345.0


class HoldsRing(L.Callback):
    """Holds the first layer's ring of a step until the next step begins."""

    def __init__(self) -> None:
        self._step, self._next = -1, threading.Event()

    def setup(self, *_: Any, **__: Any) -> None:
        # One of each step: when it is carried out, the next step may have begun.
        steps: Counter[int] = Counter()

        def go_round(rings: Rings, number: int, *given: Any) -> None:
            if number // MOST_PIECES // MOST_TYPES == 0 and steps[number] == LATE:
                self._next.wait()
            steps[number] += 1
            _GO_ROUND(rings, number, *given)

        Rings._go_round = go_round  # type: ignore[assignment,method-assign]

    def on_train_batch_start(self, *given: Any) -> None:
        self._step = given[-1]
        if self._step > LATE:
            self._next.set()

    def teardown(self, *_: Any, **__: Any) -> None:
        Rings._go_round = _GO_ROUND  # type: ignore[method-assign]


_GO_ROUND = Rings._go_round


def train(how: Mapping[str, Any], num_ranks: int, folder: str | None) -> Any:
    L.seed_everything(7, verbose=False)
    module = built(Sleeper)
    # Of two virtual machines, the second one has layers.3 on its last stage.
    wanted = [Move(step=6, layer=moving(how["schedule"]), stage=0)]
    if "virtual_machines" in how:
        wanted.append(Move(step=6, layer="layers.3", stage=0, virtual_machine=1))
    moves = LayerMigration(wanted, watches=False)
    # An asynchronous pipeline waits for the sums of a minibatch before the next one begins.
    overlaps = "virtual_machines" in how and how["schedule"] == "1f1b"
    holds = [HoldsRing()] if overlaps else []
    timelines = [PipelineTimeline(every_n_steps=EVERY, folder=folder)] if folder else []
    trainer = quiet_trainer(
        {"devices": num_ranks, "pipeshift": {"partition": [4, 4], "profile_steps": 0, **how}},
        callbacks=[*holds, moves, *timelines],
        max_epochs=1,
        limit_train_batches=NUM_BATCHES,
        accumulate_grad_batches=2 if how["schedule"] == "async-2bw" else 1,
    )
    trainer.fit(module, DataLoader(points(NUM_BATCHES * num_ranks).dataset, batch_size=8))
    return parameters_of(module)


def moving(schedule: str) -> str:
    """The layer that moves from the second stage to the first, next to those of this."""
    return "layers.2" if schedule == "interleaved_1f1b" else "layers.4"


def train_all(cases: Mapping[str, Any], num_ranks: int, folder: str) -> Any:
    """Each case with a timeline and without, every rank but the first with a strange clock."""
    real, shift = time.perf_counter, STRANGE_CLOCK * int(os.environ["RANK"])
    time.perf_counter = lambda: real() + shift
    try:
        return {
            name: (train(how, num_ranks, f"{folder}/{name}"), train(how, num_ranks, None))
            for name, how in cases.items()
        }
    finally:
        time.perf_counter = real


def recordings(folder: Path) -> dict[int, Recording]:
    """Those of a run, each with a file that Perfetto can draw."""
    found = {}
    for path in folder.glob("*.json"):
        check_trace(json.loads(path.read_text())["traceEvents"])
        recording = Recording.load(path)
        found[recording.step] = recording
    return found


def require_one_clock(recording: Recording) -> None:
    """The clocks of the ranks are hours apart: corrected, nothing arrives before it was sent."""
    assert recording.begin == 0.0
    assert recording.seconds < STRANGE_CLOCK / 10
    records = {(record.vm, record.stage): record for record in recording.ranks}
    sent = {
        (*place, mark.action): mark.begin
        for place, record in records.items()
        for mark in record.of(What.ACTION)
    }
    num_messages = 0
    for (vm, stage), record in records.items():
        assert record.num_dropped == 0
        assert record.clock_error_seconds < 1
        for mark in record.of(What.ACTION):
            action = mark.action
            assert action is not None
            if not action.kind.is_compute or action.kind.properties.needs is None:
                continue
            there = stage + (-1 if action.kind.value == "F" else 1)
            message = sent.get((vm, there, sender_of(action)))
            if message is not None:
                num_messages += 1
                error = record.clock_error_seconds + records[vm, there].clock_error_seconds
                assert mark.begin + error + 1e-6 >= message
    assert num_messages


def actions(recording: Recording, vm: int = 0) -> list[list[str]]:
    return [
        [str(span.action) for span in record.spans] for record in recording.ranks if record.vm == vm
    ]


def require_same_actions(found: list[list[str]], rows: list[list[str]]) -> None:
    """A backward may overtake forwards whose messages have not come."""
    for kind in "FB":
        assert [[a for a in row if a[0] == kind] for row in found] == [
            [a for a in row if a[0] == kind] for row in rows
        ]


def require_same_bits(ranks: list[Any]) -> None:
    for found in ranks:
        for name, (recorded, other) in found.items():
            assert recorded.keys() == other.keys()
            for key, value in recorded.items():
                assert torch.equal(value, other[key]), (name, key)


def test_all_schedules_are_recorded_and_train_the_same_bits(tmp_path: Path) -> None:
    require_same_bits(run_ranks(train_all, 2, ON_TWO, 2, str(tmp_path)))
    for name in ON_TWO:
        found = recordings(tmp_path / name)
        moves = [
            mark.name for recording in found.values() for mark in recording.ranks[0].of(What.MOVE)
        ]
        assert moves == [f"{moving(name)}: stage 1 to 0"], name
        for recording in found.values():
            require_one_clock(recording)
            assert all(record.peak_bytes for record in recording.ranks)
            if name.startswith("async"):
                assert recording.num_steps == 3
                batches = range(recording.step, recording.step + 3)
                turns = [[str(a) for n in batches for a in turn(n, stage, 2)] for stage in (0, 1)]
                require_same_actions(actions(recording), turns)
            else:
                rows = [[str(a) for a in row] for row in schedule_named(name)(2, 4)]
                ran = actions(recording)
                if name == "interleaved_1f1b":
                    # A stage goes on with the chunk whose input has come.
                    ran, rows = ([sorted(row) for row in each] for each in (ran, rows))
                require_same_actions(ran, rows)
        if name.startswith("async"):
            # The layer begins to move before batch 7; it is recorded once.
            assert sorted(found) == [4, 7]
        else:
            # The layer moves with batch 6, which is recorded for that reason.
            assert sorted(found) == [4, 6, 8]
            before, after = (Plan.from_json(found[n].plan).placement.counts for n in (4, 6))
            assert (before, after) == (((4, 4),), ((5, 3),))
    for recording in recordings(tmp_path / "zb-h1").values():
        later = [[a for a in row if a[0] == "W"] for row in actions(recording)]
        # Nobody waits for the first stage's backwards: they are whole.
        assert later == [[], ["W0", "W1", "W2", "W3"]]
    # Only while a stage waits for gradients, and so perhaps never; else in the backward.
    again = actions(recordings(tmp_path / "gpipe")[4])
    assert sum(action[0] == "R" for row in again for action in row) <= 8


def on_one_device(folder: str) -> None:
    trainer = quiet_trainer(
        {"devices": 1, "pipeshift": {"schedule": "async"}},
        callbacks=[PipelineTimeline(every_n_steps=EVERY, folder=folder)],
        max_epochs=1,
        limit_train_batches=NUM_BATCHES,
    )
    trainer.fit(built(Sleeper), DataLoader(points(NUM_BATCHES).dataset, batch_size=8))


def test_one_device_with_an_asynchronous_schedule_is_recorded(tmp_path: Path) -> None:
    run_ranks(on_one_device, 1, str(tmp_path))
    assert sorted(recordings(tmp_path)) == [4, 8]


def swapping(folder: str) -> Any:
    """A run in which all saved tensors leave the device as soon as that is planned. Without the
    wait, a tensor stays if its copy takes longer than what runs before its backward.
    """
    begin_action = ActivationStore.begin_action

    def begin_when_all_have_left(self: ActivationStore, place: int, action: Action) -> None:
        for move in list(self._leaving):
            move.ticket.wait()
            self._end(move)
        begin_action(self, place, action)

    ActivationStore.begin_action = begin_when_all_have_left  # type: ignore[method-assign]
    L.seed_everything(7, verbose=False)
    trainer = quiet_trainer(
        {"devices": 2, "pipeshift": {"partition": [4, 4], "microbatches": 4, "profile_steps": 2}},
        callbacks=[
            AwaitsPlanning(),
            PipelineTimeline(every_n_steps=NUM_BATCHES - 1, folder=folder),
        ],
        plugins=[MemoryCompression(budget="10MB", policy=SwapAll(min_bytes=1))],
        max_epochs=1,
    )
    trainer.fit(built(Sleeper), DataLoader(points(NUM_BATCHES).dataset, batch_size=8))


def test_tensors_that_are_swapped_are_recorded(tmp_path: Path) -> None:
    """Each leaves behind its microbatch's forward, and comes back for its backward; Perfetto's
    events say the same.
    """
    run_ranks(swapping, 2, str(tmp_path))
    recording = recordings(tmp_path)[NUM_BATCHES - 1]
    events = json.loads((tmp_path / f"timeline-{NUM_BATCHES - 1}.json").read_text())["traceEvents"]
    for record in recording.ranks:
        spans = {str(span.action): span for span in record.spans}
        ways: dict[str, dict[str, Mark]] = {}
        for mark in record.of(What.SWAP):
            way, tensor = mark.name.split(" ", 1)
            ways.setdefault(tensor, {})[way] = mark
        assert {tensor.rsplit(" ", 1)[1] for tensor in ways} == {"0", "1", "2", "3"}
        for tensor, found in ways.items():
            out, back, microbatch = found["out"], found["back"], tensor.rsplit(" ", 1)[1]
            assert out.num_bytes == back.num_bytes > 0
            assert spans[f"F{microbatch}"].start <= out.begin <= out.end <= back.begin
            assert back.begin <= spans[f"B{microbatch}"].end
        drawn = [
            (event["name"], event["args"]["bytes"])
            for event in events
            if (event["pid"], event["ph"], event.get("cat")) == (record.rank, "b", "swap")
        ]
        expected = [(f"swap: {mark.name}", mark.num_bytes) for mark in record.of(What.SWAP)]
        assert drawn == expected


def test_rings_and_lanes_of_several_virtual_machines_are_recorded(tmp_path: Path) -> None:
    require_same_bits(run_ranks(train_all, 4, TWO_MACHINES, 4, str(tmp_path)))
    for name in TWO_MACHINES:
        for recording in recordings(tmp_path / name).values():
            require_one_clock(recording)
            assert [(r.vm, r.stage) for r in recording.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
            layers = {layer.name for layer in Plan.from_json(recording.plan).layers}
            for record in recording.ranks:
                assert {mark.name for mark in record.of(What.RING)} <= layers
                blocks = list(record.of(What.BLOCK))
                assert all(mark.num_bytes and mark.peer != record.rank for mark in blocks)
            rings = [mark for record in recording.ranks for mark in record.of(What.RING)]
            assert {mark.name for mark in rings} >= {"layers.0", "layers.7"}
    # Rings are there to their ends, those too that end in the next step.
    recording = recordings(tmp_path / "1f1b")[LATE]
    for record in recording.ranks[::2]:
        ends = {mark.name: mark.end for mark in record.of(What.RING)}
        assert ends["layers.0"] > record.end
        document = json.loads((tmp_path / "1f1b" / f"timeline-{LATE}.json").read_text())
        own = [event for event in document["traceEvents"] if event["pid"] == record.rank]
        assert min(event["ts"] for event in own if "ts" in event) >= 0
        found = {(event["ph"], event["name"]): event for event in own}
        step, ring = found["X", "step"], found["e", "ring: layers.0"]
        late = (ends["layers.0"] - record.end) * 1e6
        assert ring["ts"] - step["ts"] - step["dur"] == pytest.approx(late, abs=1)


def logged(records: bool, folder: str) -> Any:
    """A run whose user logs and monitors a value, with a logger."""
    os.chdir(folder)
    L.seed_everything(7, verbose=False)
    module, logger = built(Logs), CSVLogger("logs", name=None, version="")
    best = ModelCheckpoint(dirpath=f"best-{records}", monitor="loss", save_last=False)
    trainer = quiet_trainer(
        {"devices": 2, "pipeshift": {"partition": [4, 4], "microbatches": 2, "profile_steps": 0}},
        callbacks=[best, *([PipelineTimeline(every_n_steps=4)] if records else [])],
        enable_checkpointing=True,
        max_epochs=1,
        logger=logger,
    )
    trainer.fit(module, DataLoader(points(NUM_BATCHES).dataset, batch_size=8))
    return {
        "parameters": parameters_of(module),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "best": Path(best.best_model_path).name,
        "score": float(best.best_model_score or 0),
        "states": sorted(torch.load(best.best_model_path, weights_only=False)["callbacks"]),
    }


class Logs(Sleeper):
    """Logs its loss."""

    def training_step(self, batch: Any) -> Any:
        loss = super().training_step(batch)
        self.log("loss", loss)
        return loss


@pytest.mark.feature("Callbacks", "`PipelineTimeline` with `ModelCheckpoint(monitor=...)`")
def test_loggers_get_figures_and_users_values_stay(tmp_path: Path) -> None:
    (plain, _), (found, _) = (
        run_ranks(logged, 2, records, str(tmp_path)) for records in (False, True)
    )
    for name in ("metrics", "best", "score", "states"):
        assert found[name] == plain[name]
    for key, value in found["parameters"].items():
        assert torch.equal(value, plain["parameters"][key])
    folder = tmp_path / "logs" / "pipeshift"
    assert {path.name for path in folder.iterdir()} == {f"timeline-{step}.json" for step in (4, 8)}
    rows = [row for row in read_csv(tmp_path / "logs" / "metrics.csv") if row["pipeshift/bubble"]]
    assert [int(row["step"]) for row in rows] == [4, 8]
    for row in rows:
        assert 0 <= float(row["pipeshift/bubble"]) <= 1
        assert float(row["pipeshift/stage_seconds/0.1"]) > 0
        assert float(row["pipeshift/memory/0.0"]) > 0
        assert float(row["pipeshift/moves"]) == 0


def getting_slow(folder: str) -> list[str]:
    """The warnings of a run whose second rank gets slow, by the clock of the layers' sleep."""
    go_by_sleep()
    SLOW["factor"] = 1.0
    trainer = quiet_trainer(
        {"devices": 2, "pipeshift": {"microbatches": 4, "profile_steps": 0}},
        callbacks=[SlowsDown(), PipelineTimeline(every_n_steps=1, folder=folder)],
        max_epochs=1,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(built(Sleeper), DataLoader(points(NUM_BATCHES).dataset, batch_size=8))
    return [str(each.message) for each in caught if "as slow as its plan" in str(each.message)]


def test_a_rank_that_gets_slow_is_named_in_one_warning(tmp_path: Path) -> None:
    (line,), others = run_ranks(getting_slow, 2, str(tmp_path))
    name = "stage 1 of virtual machine 0 (one replica of the pipeline), host "
    assert line.startswith(f"PipeShift: rank 1 ({name}")
    assert "is 15.0 times as slow as its plan expects" in line
    assert "LayerMigration()" in line
    assert not others, "the first rank speaks for all"


def test_wrong_arguments_and_strategies_are_refused() -> None:
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ConfigurationError, match="whole number of 1 or more"):
            PipelineTimeline(every_n_steps=wrong)  # type: ignore[arg-type]
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[PipelineTimeline()])
    with pytest.raises(ConfigurationError, match="strategy='pipeshift'"):
        trainer.fit(built(Sleeper), points(1))
