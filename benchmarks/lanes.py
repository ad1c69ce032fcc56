"""What lanes are worth on a network that honours them.

    python -m benchmarks.lanes

Two hosts with 200 Mbit/s between them (network namespaces: `benchmarks/hosts.py`; needs root), set
up by `pipeshift lanes --apply`. Each question is asked with and without the lanes' marks, in turns;
without them all traffic is one class, first come, first served.

Flows: one rank sends on the lane `pipeline` and on `bulk` at the same time, as fast as it can. What
part of the link does each get, of what `pipeline` gets alone?

Move: two stages train, a rank on each host, with payloads of 2 MB each way for each microbatch. A
layer of 100 MB goes to the other stage and back while they train. How much longer is a step while
it travels?
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.hosts import CARD, Hosts, Link, hosts, why_not
from benchmarks.measuring import arguments, interval, print_table, save, shown
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.runtime.comm.groups import Lanes
from lightning_pipeshift.testing.sleeping import Sleeper
from lightning_pipeshift.testing.training import QUIET
from tests.unit.runtime.stages import connect

MEGABITS = 200.0
FLOOR = 0.02
LANES, NONE = "lanes", "no marks"
CONTENDERS = (LANES, NONE)
# Of a flow's messages.
_CHUNK_BYTES = 512 * 1024
_NUM_POSTED = 4
WIDTH, ROWS, MICROBATCHES = 256, 2048, 4
PLACEMENTS = ([3, 2], [2, 3])
_MOVED = 2


def honour(made: Hosts) -> None:
    """Makes all hosts honour the lanes."""
    code = "import pipeshift_command; pipeshift_command.main()"
    for host in range(len(made.namespaces)):
        # A little below the link's rate, so that packets wait where their order is decided.
        rate = f"{0.97 * MEGABITS:.0f}mbit"
        options = ["lanes", "--dev", CARD, "--rate", rate, "--floor", str(FLOOR), "--apply"]
        subprocess.run(
            made.command(host, [sys.executable, "-c", code, *options]),
            check=True,
            capture_output=True,
        )


# --- two flows ---


def flow(lanes: Sequence[str], has_marks: bool, num_bytes: int) -> dict[str, float]:
    """Sends from rank 0 to rank 1, as many bytes on each lane; returns the bytes per second that
    arrive on each while the first one has some left.
    """
    connect()
    maker = Lanes(marks={} if has_marks else None)
    groups = [maker.make(range(2), lane).control for lane in lanes]
    dist.barrier()
    begin = time.monotonic()
    ends: dict[str, list[float]] = {}

    def run(lane: str, group: Any) -> None:
        transfer = group.send if dist.get_rank() == 0 else group.recv
        buffers = [torch.zeros(_CHUNK_BYTES, dtype=torch.uint8) for _ in range(_NUM_POSTED)]
        posted: deque[Any] = deque()
        ends[lane] = []
        for number in range(num_bytes // _CHUNK_BYTES):
            if len(posted) == _NUM_POSTED:
                posted.popleft().wait()
                ends[lane].append(time.monotonic())
            posted.append(transfer([buffers[number % _NUM_POSTED]], 1 - dist.get_rank(), 0))
        for work in posted:
            work.wait()
            ends[lane].append(time.monotonic())

    threads = [threading.Thread(target=run, args=one) for one in zip(lanes, groups, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = ends[lanes[0]][-1]
    return {
        lane: sum(end <= last for end in ends[lane]) * _CHUNK_BYTES / (last - begin)
        for lane in lanes
    }


def report_flows(made: Hosts, num_rounds: int, num_bytes: int) -> dict[str, Any]:
    """Measures two flows, and prints what each gets."""
    shares: dict[str, dict[str, list[float]]] = {
        name: {"pipeline": [], "bulk": []} for name in CONTENDERS
    }
    for _ in range(num_rounds):
        alone = made.run(flow, ["pipeline"], True, num_bytes)[1]["pipeline"]
        for name in CONTENDERS:
            found = made.run(flow, ["pipeline", "bulk"], name == LANES, num_bytes)[1]
            for lane, rate in found.items():
                shares[name][lane].append(rate / alone)
    rows = [
        [name, *(shown(interval(shares[name][lane])) for lane in ("pipeline", "bulk"))]
        for name in CONTENDERS
    ]
    header = ["", "pipeline, of what it gets alone", "bulk"]
    print_table(f"Two flows through one link; the floor is {FLOOR:g}", header, rows)
    return {name: {k: interval(v) for k, v in found.items()} for name, found in shares.items()}


# --- a move ---


class Carrier(Sleeper):
    """Sleeping layers, one of which has a large weight that is not trained."""

    def __init__(self, megabytes: float) -> None:
        super().__init__(sum(PLACEMENTS[0]), WIDTH, 0.02, 0.04)
        ballast = torch.zeros(round(megabytes * 1e6) // 4)
        self.layers[_MOVED].ballast = nn.Parameter(ballast, requires_grad=False)


class Moves(pl.Callback):
    """Moves the layer there and back; times of steps, and whether it travelled meanwhile."""

    def __init__(self, every: int) -> None:
        self.steps: list[tuple[float, bool]] = []
        self._every = every
        self._begun = 0.0
        self._count = self._number = 0

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        self._count += 1
        now = time.perf_counter()
        strategy = trainer.strategy
        coming, plan = strategy.pipeline.coming_plan, strategy.pipeline.plan
        if self._count > 3:
            self.steps.append((now - self._begun, coming is not plan))
        self._begun = now
        if coming is plan and self._count > self._every * (self._number + 1):
            self._number += 1
            placement = Placement((tuple(PLACEMENTS[self._number % 2]),))
            strategy.adopt(plan.with_placement(placement))


def train(
    has_marks: bool, num_steps: int, every: int, megabytes: float
) -> list[tuple[float, bool]]:
    """Trains on one rank, and returns the times of steps."""
    torch.set_num_threads(1)
    data = TensorDataset(*(torch.randn(ROWS * MICROBATCHES, WIDTH),) * 2)
    moves = Moves(every)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=PipeShiftStrategy(
            microbatches=MICROBATCHES,
            partition=PLACEMENTS[0],
            profile_steps=0,
            lane_marks=has_marks,
        ),
        callbacks=[moves],
        max_steps=num_steps,
        max_epochs=-1,
        **QUIET,
    )
    trainer.fit(Carrier(megabytes), DataLoader(data, batch_size=ROWS * MICROBATCHES))
    return moves.steps


def report_move(made: Hosts, num_rounds: int, num_steps: int, megabytes: float) -> dict[str, Any]:
    """Measures moves, and prints by how much steps are longer."""
    growth: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    lengths: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(num_rounds):
        for name in CONTENDERS:
            steps = made.run(train, name == LANES, num_steps, num_steps // 4, megabytes)[0]
            during = [seconds for seconds, moves in steps if moves]
            steady = median(seconds for seconds, moves in steps if not moves)
            growth[name].append(sum(during) / len(during) / steady - 1)
            lengths[name].append(float(len(during)))
    rows = [
        [name, shown(interval(growth[name]), "+.1%"), shown(interval(lengths[name]), ".0f")]
        for name in CONTENDERS
    ]
    print_table(
        f"A layer of {megabytes:g} MB moves while two stages train",
        ["", "steps are longer by", "steps that it takes"],
        rows,
    )
    return {
        name: {"growth": interval(growth[name]), "steps": interval(lengths[name])}
        for name in CONTENDERS
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", default=["flows", "move"])
    parser.add_argument("--num-rounds", type=int, default=3)
    parser.add_argument("--flow-megabytes", type=float, default=100.0, help="of each flow")
    parser.add_argument("--num-steps", type=int, default=60, help="in which the layer moves")
    parser.add_argument("--megabytes", type=float, default=100.0, help="of the layer that moves")
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"Skipped: {reason}.")
        return
    figures: dict[str, Any] = {"megabits": MEGABITS, "floor": FLOOR}
    with hosts(2, Link(megabits=MEGABITS)) as made:
        honour(made)
        if "flows" in options.parts:
            figures["flows"] = report_flows(
                made, options.num_rounds, round(options.flow_megabytes * 1e6)
            )
        if "move" in options.parts:
            figures["move"] = report_move(
                made, options.num_rounds, options.num_steps, options.megabytes
            )
    save(options.json, figures)


if __name__ == "__main__":
    main()
