"""Measures how much a move of 100 MB delays training over a slow link.

    python -m benchmarks.lane_moves

Two hosts with 200 Mbit/s between them that honour the lanes (needs root), and a stage of sleeping
layers on each. Layers of 100 MB together, which take next to no time, move from the first stage to
the second, by hand. How much longer do all steps from the request on take together than the median
step before it: in seconds, and as a part of the time that the transfer takes alone? With the lanes'
marks, and without; in parts, a layer in each step, and at once; with a synchronous and an
asynchronous pipeline.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import lightning.pytorch as L
import pytest
import torch

import lightning_pipeshift.runtime.planning.move_parts as move_parts
from benchmarks.hosts import Link, hosts, why_not
from benchmarks.lanes import MEGABITS, honour
from benchmarks.measuring import arguments, interval, print_table, save, shown
from benchmarks.overlap import Clock
from lightning_pipeshift import Communication, Move, PipeShiftStrategy
from lightning_pipeshift.testing.sleeping import Sleeper

NUM_LAYERS, NUM_MOVED, WIDTH = 12, 4, 2500
MOVED_BYTES = NUM_MOVED * WIDTH * WIDTH * 4
FORWARD, BACKWARD = 0.020, 0.040
_WARM_UP, _BEFORE = 3, 10
PARTS, UNMARKED, AT_ONCE = "in parts", "in parts, without marks", "at once"


class Mover(Clock):
    """Asks for the move, and notes when steps begin."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        super().on_train_batch_start(trainer)
        if len(self.begins) == _WARM_UP + _BEFORE + 1:
            names = trainer.strategy.layer_names[NUM_LAYERS - NUM_MOVED - 2 : NUM_LAYERS - 2]
            trainer.strategy.migrate(*(Move(layer=name, stage=1) for name in names))


def step_seconds(schedule: str, microbatches: int, contender: str, num_after: int) -> list[float]:
    """The seconds of each step after the warm-up."""
    with pytest.MonkeyPatch.context() as patch:
        if contender == AT_ONCE:
            patch.setattr(move_parts, "_UNMEASURED_BYTES", float("inf"))
        return _step_seconds(schedule, microbatches, contender != UNMARKED, num_after)


def _step_seconds(schedule: str, microbatches: int, has_marks: bool, num_after: int) -> list[float]:
    torch.set_num_threads(1)
    clock = Mover()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=PipeShiftStrategy(
            schedule=schedule,
            microbatches=microbatches,
            partition=[NUM_LAYERS - 2, 2],
            profile_steps=0,
            communication=Communication(lane_marks=has_marks),
        ),
        callbacks=[clock],
        max_steps=_WARM_UP + _BEFORE + num_after,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2 if schedule == "async-2bw" else 1,
    )
    num_batches = (_WARM_UP + _BEFORE + num_after) * trainer.accumulate_grad_batches
    rows = torch.zeros(8 * num_batches, WIDTH)
    data = torch.utils.data.TensorDataset(rows, rows)
    module = Sleeper(NUM_LAYERS, WIDTH, FORWARD, BACKWARD)
    for layer in module.layers[NUM_LAYERS - NUM_MOVED - 2 : NUM_LAYERS - 2]:
        # So that a step is as long after the move as before it.
        layer.seconds = (0.0, 0.0)  # type: ignore[assignment]
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    assert trainer.strategy.plan.placement.counts == ((6, 6),)  # type: ignore[attr-defined]
    return [b - a for a, b in pairwise(clock.begins[_WARM_UP:])]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--num-rounds", type=int, default=3)
    parser.add_argument("--num-after", type=int, default=15, help="steps after the request")
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=["1f1b:4", "1f1b:8", "async-2bw:1"],
        help="name:microbatches",
    )
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"Skipped: {reason}.")
        return
    alone = MOVED_BYTES * 8 / (0.97 * MEGABITS * 1e6)
    found: dict[str, Any] = {}
    rows = []
    with hosts(2, Link(megabits=MEGABITS)) as made:
        honour(made)
        for schedule in options.schedules:
            extra: dict[str, list[float]] = {PARTS: [], UNMARKED: [], AT_ONCE: []}
            given, _, microbatches = schedule.partition(":")
            steps: list[float] = []
            for _ in range(options.num_rounds):
                for name in extra:
                    seconds = made.run(
                        step_seconds, given, int(microbatches), name, options.num_after
                    )[1]
                    usual = statistics.median(seconds[:_BEFORE])
                    steps.append(usual)
                    extra[name].append(sum(x - usual for x in seconds[_BEFORE:]))
            for name, seconds in extra.items():
                rows.append(
                    [
                        schedule,
                        name,
                        f"{1e3 * statistics.median(steps):.0f}",
                        shown(interval(seconds), ".2f"),
                        shown(interval([x / alone for x in seconds]), ".2f"),
                    ]
                )
            found[schedule] = {
                "step_seconds": interval(steps),
                "extra_seconds": {name: interval(x) for name, x in extra.items()},
            }
    print_table(
        f"A move of {MOVED_BYTES / 1e6:.0f} MB, which takes {alone:.1f} s alone",
        ["schedule", "", "a step, ms", "extra time of all steps, s", "of the move's time"],
        rows,
    )
    save(options.json, {"moved_bytes": MOVED_BYTES, "alone_seconds": alone, **found})


if __name__ == "__main__":
    main()
