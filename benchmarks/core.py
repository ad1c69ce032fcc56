"""What the core costs: stages that sleep, with and without steps that read a value.

    python -m benchmarks.core
    python -m benchmarks.core --stages 4 --microbatches 8 --seconds 0.01

Each stage has one layer, whose forward sleeps for ``--seconds`` and whose backward for twice as
long. The ideal time of a step is that of 1F1B without any cost but the sleeps. Measured are steps
that read nothing; steps that read their loss (``loss.item()``), where the part behind the read runs
later; and the same where the step waits for what it reads. In turns, in one run.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.measuring import arguments, print_table, save
from lightning_pipeshift.plan.schedule.schedules import schedule_named
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.step.engine import Engine
from lightning_pipeshift.step.tails import Tails
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.values.core import Core

WIDTH = 64
ROWS = ("no reads", "reads, behind them later", "reads that are waited for")


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        if x.device.type == "cpu" and type(x) is Tensor:
            time.sleep(seconds)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class SleepingLayer(nn.Module):
    """A linear layer that sleeps."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, width)`` -> the same."""
        return _Sleep.apply(self.linear(x), self.seconds)


def measure(seconds: float, microbatches: int, rounds: int) -> dict[str, list[float]]:
    """Runs on every rank; returns the seconds of each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(*(SleepingLayer(seconds) for _ in range(stages)))
    ranks = list(range(stages))
    mailbox = Mailbox(dist.new_group(backend="gloo"), ranks, ranks, rank, lambda _: nullcontext())
    core = Core(model, list(model), lambda number, _: number, mailbox, torch.device("cpu"))
    row = schedule_named("1f1b")(stages, microbatches)[rank]
    batches = [torch.randn(4, WIDTH) for _ in range(microbatches)]
    read: list[float] = []

    def plain(batch: Tensor, _: int) -> Any:
        return model(batch).pow(2).mean()

    def reads(batch: Tensor, number: int) -> Any:
        loss = plain(batch, number)
        read.append(loss.item())
        return loss

    engines = [(plain, Engine(core)), (reads, Engine(core, Tails(core))), (reads, Engine(core))]
    found: dict[str, list[float]] = {name: [] for name in ROWS}
    with core.placed(), core.seeing_parameters():
        for number in range(rounds + 1):
            for name, (step, engine) in zip(ROWS, engines, strict=True):
                dist.barrier()
                begin = time.perf_counter()
                engine.run(number, batches, step, row)
                dist.barrier()
                if number:
                    found[name].append(time.perf_counter() - begin)
    mailbox.close()
    return found


def main() -> None:
    """Runs the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.02, help="of a layer's forward")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    given = (options.seconds, options.microbatches, options.rounds)
    times = run_ranks(measure, options.stages, *given, timeout=600)[0]
    ideal = 3 * options.seconds * (options.microbatches + options.stages - 1)
    shares = {name: [ideal / each for each in times[name]] for name in ROWS}
    rows = [
        [
            name,
            f"{median(shares[name]):.3f}",
            f"{min(shares[name]):.3f}",
            f"{max(shares[name]):.3f}",
        ]
        for name in ROWS
    ]
    print_table(
        f"{options.stages} stages that sleep, {options.microbatches} microbatches",
        ["step", "share of the ideal (median)", "least", "most"],
        rows,
    )
    save(options.json, {"ideal_seconds": ideal, "seconds": times})


if __name__ == "__main__":
    main()
