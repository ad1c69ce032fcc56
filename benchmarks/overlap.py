"""What it is worth that the next step begins before all gradients are summed, and that the most
urgent gradients go first.

    python -m benchmarks.overlap

Two hosts with 200 Mbit/s between them that honour the lanes (as in `benchmarks/lanes.py`; needs
root), with two ranks each: a virtual machine of two stages on either host. Layers sleep, and their
gradients take about as long on the link as forward and backward together. The time of a step:

- one lane: all layers are updated when all gradients are summed, and gradients are sent in the
  order in which they are ready (in the chunks of a ring);
- split: as "one lane", but all partial sums go before all complete ones, and the latter in the
  order of the next forward, which begins meanwhile (reduce-scatter behind the backward, all-gather
  behind the forward);
- urgent first: layers are updated one by one, and the most urgent gradient is sent next, decided by
  each sender;
- lanes: the same, with lanes of several priorities, decided by the network, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import lightning.pytorch as L
import pytest
import torch

import lightning_pipeshift.runtime.step.pipeline as pipeline_module
from benchmarks.hosts import Link, hosts, why_not
from benchmarks.lanes import MEGABITS, honour
from benchmarks.measuring import arguments, interval, print_table, save, shown
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.runtime.comm.turns import Turns, Urgency
from lightning_pipeshift.runtime.gradients.rings import Rings
from lightning_pipeshift.testing.sleeping import Sleeper

ONE, SPLIT, FIRST, LANES = "one lane", "split", "urgent first", "lanes"
CONTENDERS = (ONE, SPLIT, FIRST, LANES)
NUM_LAYERS, MICROBATCHES, NUM_STAGES = 8, 2, 2
FORWARD, BACKWARD = 0.010, 0.020
_WARM_UP = 3


@contextmanager
def contending(name: str) -> Iterator[None]:
    """Context of a run as one of the contenders."""
    arrivals = count()
    start, turn = Rings.start, Turns.turn

    def by_arrival(self: Rings, number: int, members: Any, buffer: Any, urgency: Urgency) -> Any:
        return start(self, number, members, buffer, Urgency(0, next(arrivals)))

    with pytest.MonkeyPatch.context() as patch:
        if name != LANES:
            patch.setattr(pipeline_module, "NUM_GRADIENT_CLASSES", 1)
        if name == ONE:
            patch.setattr(Rings, "start", by_arrival)
        yield
    del turn


class Clock(L.Callback):
    """The moments at which steps begin."""

    def __init__(self) -> None:
        self.begins: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.begins.append(time.monotonic())


def step_seconds(names: list[str], width: int, num_steps: int) -> dict[str, list[float]]:
    """The seconds of each step, by contender."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        with contending(name):
            clock = Clock()
            trainer = L.Trainer(
                accelerator="cpu",
                devices=2,
                num_nodes=2,
                strategy=PipeShiftStrategy(
                    virtual_machines=[[0, 1], [2, 3]],
                    microbatches=MICROBATCHES,
                    partition="uniform",
                    profile_steps=0,
                    overlap_updates=name != ONE,
                ),
                callbacks=[clock],
                max_steps=num_steps + _WARM_UP,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            module = Sleeper(NUM_LAYERS, width, FORWARD, BACKWARD)
            data = torch.zeros(8, width)
            rows = torch.utils.data.TensorDataset(data.repeat(num_steps + 8, 1), data.repeat(num_steps + 8, 1))
            trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
            begins = clock.begins[_WARM_UP:]
            found[name] = [b - a for a, b in zip(begins, begins[1:], strict=False)]
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--num-rounds", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=520)
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"Skipped: {reason}.")
        return
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS if name != SPLIT}
    with hosts(2, Link(megabits=MEGABITS)) as made:
        honour(made)
        for _ in range(options.num_rounds):
            ranks = made.run(step_seconds, list(found), options.width, options.num_steps, per_host=2)
            for name in found:
                found[name].append(statistics.median(ranks[0][name]))
    rows = [
        [name, *(f"{1e3 * x:.0f}" for x in seconds), shown(interval([found[ONE][i] / x for i, x in enumerate(seconds)]))]
        for name, seconds in found.items()
    ]
    print_table("A step, in ms", ["", *map(str, range(options.num_rounds)), "times as fast"], rows)
    save(options.json, {"seconds": found})


if __name__ == "__main__":
    main()
