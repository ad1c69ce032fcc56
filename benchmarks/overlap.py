"""Measures steps that begin before all gradients of the last one are summed, with the most urgent
gradients sent first.

    python -m benchmarks.overlap                # one job
    python -m benchmarks.overlap --num-jobs 2   # two jobs that share the link
    python -m benchmarks.overlap --megabits 10000 --contenders "one lane" lanes   # a fast link

Two hosts with 200 Mbit/s between them that honour the lanes (as in `benchmarks/lanes.py`; needs
root), with two ranks each: four virtual machines of one device. Layers sleep, and their gradients
take about as long on the link as forward and backward together. The time of a step:

- one lane: all layers are updated when all gradients are summed, and gradients are sent in the
  order in which they are ready (in the chunks of a ring);
- split: each sum is split into a reduce-scatter, behind the backward, and an all-gather, behind the
  next forward, in the order of the layers (as DeAR does, ICDCS 2023);
- urgent first: layers are updated one by one, and the most urgent gradient is sent next, decided by
  each sender; the network does not know;
- lanes: the same, and the network carries the more urgent lanes first, too.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, pairwise
from typing import Any

import lightning.pytorch as L
import pytest
import torch

import lightning_pipeshift.runtime.gradients.lanes as lanes_module
import lightning_pipeshift.runtime.gradients.rings as rings_module
from benchmarks.hosts import Hosts, Link, hosts, why_not
from benchmarks.lanes import MEGABITS, honour
from benchmarks.measuring import arguments, interval, print_table, save, shown
from lightning_pipeshift import Communication, PipeShiftStrategy
from lightning_pipeshift.runtime.comm.blocks import send_blocks
from lightning_pipeshift.runtime.comm.turns import Urgency
from lightning_pipeshift.runtime.gradients.rings import Rings
from lightning_pipeshift.testing.sleeping import Sleeper

ONE, SPLIT, FIRST, LANES = "one lane", "split", "urgent first", "lanes"
CONTENDERS = (ONE, SPLIT, FIRST, LANES)
NUM_MACHINES = 4
_WARM_UP = 3


@contextmanager
def contending(name: str, num_layers: int) -> Iterator[None]:
    """Context of a run as one of the contenders."""
    arrivals = count()
    start = Rings.start

    def by_arrival(self: Rings, number: int, members: Any, buffer: Any, _: Any) -> Any:
        return start(self, number, members, buffer, ((1.0, Urgency(0, next(arrivals))),))

    with pytest.MonkeyPatch.context() as patch:
        if name != LANES:
            patch.setattr(lanes_module, "NUM_GRADIENT_CLASSES", 1)
        if name in (ONE, SPLIT):
            patch.setattr(Rings, "start", by_arrival)
        if name == SPLIT:
            patch.setattr(rings_module, "send_blocks", _Split(num_layers).send)
        yield


class _Split:
    """Makes rings begin their all-gathers when all rings of a step are reduce-scattered here."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        # By thread: a ring runs in one.
        self._num_sent: Counter[int] = Counter()
        self._num_scattered = 0
        self._changed = threading.Condition()

    def send(
        self, chunk: Any, post: Any, turns: Any, to: int, urgency: Urgency, watched: Any
    ) -> None:
        """In place of :func:`send_blocks`."""
        thread = threading.get_ident()
        place = self._num_sent[thread] % (2 * (NUM_MACHINES - 1))
        self._num_sent[thread] += 1
        if place >= NUM_MACHINES - 1:
            self._await(urgency.order // self._num_layers, place == NUM_MACHINES - 1)
            # The first layer's sum was the last to begin.
            urgency = Urgency(0, -urgency.order)
        send_blocks(chunk, post, turns, to, urgency, watched)

    def _await(self, step: int, is_first: bool) -> None:
        with self._changed:
            self._num_scattered += is_first
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_scattered >= (step + 1) * self._num_layers)


class Clock(L.Callback):
    """The moments at which steps begin."""

    def __init__(self) -> None:
        self.begins: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.begins.append(time.monotonic())


def step_seconds(
    names: Sequence[str], num_layers: int, width: int, seconds: tuple[float, float], num_steps: int
) -> dict[str, list[float]]:
    """The seconds of each step, by contender."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        with contending(name, num_layers):
            clock = Clock()
            strategy = PipeShiftStrategy(
                virtual_machines=NUM_MACHINES,
                microbatches=1,
                partition="uniform",
                profile_steps=0,
                communication=Communication(overlap_updates=name != ONE, lane_marks=name == LANES),
            )
            trainer = L.Trainer(
                accelerator="cpu",
                devices=2,
                num_nodes=2,
                strategy=strategy,
                callbacks=[clock],
                max_steps=num_steps + _WARM_UP,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            rows = torch.zeros(4 * NUM_MACHINES * (num_steps + _WARM_UP), width)
            data = torch.utils.data.TensorDataset(rows, rows)
            trainer.fit(
                Sleeper(num_layers, width, *seconds),
                torch.utils.data.DataLoader(data, batch_size=4),
            )
            found[name] = [b - a for a, b in pairwise(clock.begins[_WARM_UP:])]
    return found


def report(options: Any, made: Hosts, names: Sequence[str], seconds: tuple[float, float]) -> Any:
    """Measures the contenders in turns, prints the times, and returns the figures."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.num_rounds):
        order = list(names) if number % 2 == 0 else list(reversed(names))
        jobs = made.run_jobs(
            options.num_jobs,
            step_seconds,
            order,
            options.num_layers,
            options.width,
            seconds,
            options.num_steps,
            per_host=2,
        )
        for name in names:
            # The first rank of each job; the job's steps are those of all its ranks.
            found[name].append(statistics.mean(statistics.median(job[0][name]) for job in jobs))
    against = {
        other: {
            name: interval([b / a for a, b in zip(found[name], found[other], strict=True)])
            for name in names
        }
        for other in names[:-1]
    }
    rows = [
        [name, shown(interval([1e3 * x for x in found[name]]), ".0f")]
        + [shown(against[other][name]) for other in against]
        for name in names
    ]
    print_table(
        f"A step of {options.num_jobs} jobs, in ms, over {options.num_rounds} rounds",
        ["", "step", *(f"times as fast as {other}" for other in against)],
        rows,
    )
    return {"seconds": found, "times_as_fast_as": against}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--num-rounds", type=int, default=4)
    parser.add_argument("--num-steps", type=int, default=6)
    parser.add_argument("--num-layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=480)
    parser.add_argument("--forward", type=float, default=0.020, help="seconds of a layer")
    parser.add_argument("--backward", type=float, default=0.040, help="seconds of a layer")
    parser.add_argument("--num-jobs", type=int, default=1)
    parser.add_argument("--megabits", type=float, default=MEGABITS, help="of the link, per second")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"Skipped: {reason}.")
        return
    with hosts(2, Link(megabits=options.megabits)) as made:
        honour(made, options.megabits)
        found = report(options, made, options.contenders, (options.forward, options.backward))
    given = {name: value for name, value in vars(options).items() if name != "json"}
    save(options.json, {"options": given, **found})


if __name__ == "__main__":
    main()
