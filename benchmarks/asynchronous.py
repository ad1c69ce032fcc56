"""The asynchronous pipeline against a synchronous one: throughput, and how busy its stages are.

    python -m benchmarks.asynchronous
    python -m benchmarks.asynchronous --moves

Layers that sleep instead of computing let two cores carry four stages: one layer on each stage
sleeps in its forward, and twice as long in its backward. A step of 1F1B with n stages and m
microbatches takes m + n - 1 times as long as both; a minibatch of the asynchronous pipeline takes
the time of one microbatch, as it never drains. So with minibatches as large as microbatches its
throughput should be (m + n - 1) / m times as high. Both schedules run in the same processes in
turn. A stage's utilisation is the time in which its layers sleep over the time that passes. Beside
it stands that of Lightning's loop without PipeShift, which runs on each stage, too: each process
trains one such layer alone, all at the same time.

With ``--moves``, a layer changes its owner again and again while the pipeline runs, between stages
that are not the slowest, so the pace should stay as it is. From the announcement of a move until
its new owner makes its own updates, the time of a minibatch is compared with that of all others.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measuring import arguments, interval, print_table, ratios, save, shown
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.testing.sleeping import Sleeper
from lightning_pipeshift.testing.training import QUIET

WIDTH, MOVED_WIDTH = 64, 1024
SYNCHRONOUS, ASYNCHRONOUS, PLAIN = "1f1b", "async", "plain Lightning"


class Times(pl.Callback):
    """The times at which batches ended on this rank."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Notes the time."""
        self.ends.append(time.perf_counter())


def fit(model: pl.LightningModule, loader: Any, callback: pl.Callback, **options: Any) -> None:
    """Trains for an epoch on a stage for each entry of ``partition``.

    Args:
        model: the model.
        loader: of its data.
        callback: notes what is measured.
        options: the strategy's; without any, this process trains alone, by Lightning's own.
    """
    how: dict[str, Any] = {"devices": 1, "strategy": SingleDeviceStrategy("cpu")}
    if options:
        how["devices"] = len(options["partition"])
        how["strategy"] = PipeShiftStrategy(profile_steps=0, **options)
    trainer = pl.Trainer(
        accelerator="cpu",
        **how,
        callbacks=[callback],
        max_epochs=1,
        **QUIET,
    )
    trainer.fit(model, loader)


def seconds_per_batch(
    schedule: str, num_stages: int, num_microbatches: int, num_batches: int, seconds: float
) -> float:
    """How long a batch takes on this rank, when the pipeline has its pace."""
    is_step = schedule == SYNCHRONOUS
    size = num_microbatches if is_step else 1
    warm_up = 2 if is_step else 2 * num_stages
    data = TensorDataset(*(torch.randn((num_batches + warm_up + 1) * size, WIDTH),) * 2)
    times = Times()
    model = Sleeper(1 if schedule == PLAIN else num_stages, WIDTH, seconds, 2 * seconds)
    options: dict[str, Any] = {}
    if schedule != PLAIN:
        options = {"schedule": schedule, "microbatches": size, "partition": [1] * num_stages}
    fit(model, DataLoader(data, batch_size=size), times, **options)
    return (times.ends[warm_up + num_batches - 1] - times.ends[warm_up - 1]) / num_batches


def measure(
    num_stages: int, num_microbatches: int, num_rounds: int, num_batches: int, seconds: float
) -> dict[str, list[float]]:
    """Runs on every rank."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {SYNCHRONOUS: [], ASYNCHRONOUS: [], PLAIN: []}
    for _ in range(num_rounds):
        for schedule, number in (
            (SYNCHRONOUS, max(2, num_batches // (2 * num_microbatches))),
            (ASYNCHRONOUS, num_batches),
            (PLAIN, num_batches),
        ):
            found[schedule].append(
                seconds_per_batch(schedule, num_stages, num_microbatches, number, seconds)
            )
    return found


class Moves(Times):
    """Moves a layer to and fro, and notes what each move has cost."""

    def __init__(self, placements: Sequence[tuple[int, ...]], every: int) -> None:
        super().__init__()
        self.placements = itertools.cycle(placements)
        self.every = every
        self.moves: list[dict[str, float]] = []
        self._noted: Any = None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Notes the time; asks for a move, and notes what the last one has cost."""
        super().on_train_batch_end()
        pipeline, number = trainer.strategy.pipeline, len(self.ends)
        if number % self.every:
            return
        done = pipeline.changes.migration
        if done is not None and done is not self._noted:
            self._noted = done
            self.moves.append(
                {
                    "begin": done.begin,
                    "sent_bytes": done.sent_bytes,
                    "transfer_seconds": done.transfer_seconds,
                    "exposed_seconds": done.exposed_seconds,
                }
            )
        placement = Placement((next(self.placements),))
        trainer.strategy.adopt(pipeline.coming_plan.with_placement(placement))


def measure_moves(
    placements: Sequence[tuple[int, ...]], num_moves: int, every: int, seconds: float
) -> tuple[list[float], list[dict[str, float]]]:
    """When batches ended on this rank, and what moves have cost."""
    torch.set_num_threads(1)
    num_layers = sum(placements[0])
    data = TensorDataset(*(torch.randn((num_moves + 2) * every, MOVED_WIDTH),) * 2)
    moves = Moves([*placements[1:], placements[0]], every)
    model = Sleeper(num_layers, MOVED_WIDTH, seconds, 2 * seconds)
    loader = DataLoader(data, batch_size=1)
    fit(model, loader, moves, schedule=ASYNCHRONOUS, partition=list(placements[0]))
    return moves.ends, moves.moves


def with_moves(num_moves: int, path: Path | None) -> None:
    """Prints what moves cost, and whether they disturb the pace."""
    rows, figures = [], {}
    num_stages, every, layer_bytes = 4, 24, MOVED_WIDTH**2 * 4
    cases = {
        "downstream, to the next": [(3, 2, 2, 2), (3, 1, 3, 2)],
        "upstream, to the one before": [(3, 1, 3, 2), (3, 2, 2, 2)],
        "three layers, over three boundaries": [(3, 2, 2, 2), (2, 2, 2, 3)],
    }
    for name, placements in cases.items():
        ranks = run_ranks(measure_moves, num_stages, placements, num_moves, every, 0.020)
        ends = ranks[0][0]
        durations = [b - a for a, b in itertools.pairwise(ends)]
        begun = [int(move["begin"]) for move in ranks[0][1]]
        near = {k for begin in begun for k in range(begin - 3, begin + 2 * num_stages)}
        during = [durations[k - 1] for k in sorted(near) if 0 < k <= len(durations)]
        steady = [
            duration
            for k, duration in enumerate(durations, start=1)
            if k not in near and k > 2 * num_stages and k < len(durations) - num_stages
        ]
        sums = [
            {
                what: sum(rank[1][place][what] for rank in ranks)
                for what in ("sent_bytes", "transfer_seconds", "exposed_seconds")
            }
            for place in range(len(begun))
        ]
        # The first move of each two is the one that the case is named after.
        versions = [one["sent_bytes"] / layer_bytes for one in sums]
        overlap = [1 - one["exposed_seconds"] / one["transfer_seconds"] for one in sums]
        ratio = (sum(steady) / len(steady)) / (sum(during) / len(during))
        rows.append([name, ratio, min(overlap), shown(interval(overlap)), str(versions[:2])])
        figures[name] = {
            "throughput_during_over_steady": ratio,
            "overlap": interval(overlap),
            "versions_sent": versions,
        }
    print_table(
        f"{num_moves} moves of layers of {layer_bytes / 1e6:.1f} MB, one in {every} minibatches",
        ["move", "throughput during / steady", "least overlap", "overlap", "versions sent"],
        rows,
    )
    save(path, figures)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--moves", action="store_true", help="what moves of layers cost")
    parser.add_argument("--num-moves", type=int, default=8)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4, help="of 1f1b")
    parser.add_argument("--num-rounds", type=int, default=6)
    parser.add_argument("--num-batches", type=int, default=60, help="minibatches in a round")
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.020, 0.005])
    options = parser.parse_args()
    if options.moves:
        with_moves(options.num_moves, options.json)
        return

    n, m = options.stages, options.microbatches
    promised = (m + n - 1) / m
    rows, figures = [], {}
    for seconds in options.seconds:
        ranks = run_ranks(
            measure, n, n, m, options.num_rounds, options.num_batches, seconds, timeout=900
        )
        # The slowest rank of each round.
        slowest = {
            schedule: [max(rank[schedule][i] for rank in ranks) for i in range(options.num_rounds)]
            for schedule in (SYNCHRONOUS, ASYNCHRONOUS, PLAIN)
        }
        of_sample = [step / m for step in slowest[SYNCHRONOUS]]
        gains = ratios(of_sample, slowest[ASYNCHRONOUS])
        gain = interval(gains)
        reached = interval([value / promised for value in gains])
        busy = interval([3 * seconds / pace for pace in slowest[ASYNCHRONOUS]])
        bound = interval([3 * seconds / pace for pace in slowest[PLAIN]])
        figures_of_row = promised, shown(gain), shown(reached), shown(busy), shown(bound)
        rows.append([f"{seconds * 1000:g} ms", *figures_of_row])
        figures[f"{seconds * 1000:g} ms"] = {
            "promised": promised,
            "async_over_1f1b": gain,
            "of_promised": reached,
            "utilisation": busy,
            "plain_utilisation": bound,
            "seconds": slowest,
        }
    print_table(
        f"{n} stages, {m} microbatches, {len(os.sched_getaffinity(0))} cores",
        [
            "forward",
            "promised",
            "async over 1f1b",
            "of what is promised",
            "utilisation",
            "of plain Lightning",
        ],
        rows,
    )
    save(options.json, figures)


if __name__ == "__main__":
    main()
