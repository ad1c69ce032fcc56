"""The gain of live migration when a device slows down, and how long training waits for it.

    python -m benchmarks.migration
    python -m benchmarks.migration --only reaction --schedule async

Reaction: 24 sleeping layers on 4 stages; the last stage gets half as fast in the middle of the run.
With ``LayerMigration()`` against the split that stays (6 layers each), in turns, both under the
slow stage; and after how many steps the layers had moved. 24 layers on speeds 1, 1, 1 and 0.5: at
best 7, 7, 7 and 3, where a slot takes 7 instead of 12. In an asynchronous pipeline a step is a
minibatch, which then takes as long as its slowest stage: the pace after the move is compared with
that of the best split.

Gap: layers with real weights and Adam's state go back and forth between stages. How long the move
holds the stage up that it holds up longest, and by how much the longest step around it is longer
than the median step; against a blocking send and receive of as many bytes, tensor by tensor, with a
barrier behind it; and against a checkpoint, a new process and a resume. All in one run (the
restart begins where it ends).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader

from benchmarks.measuring import arguments, interval, print_table, save, shown
from benchmarks.placements import Repeated
from lightning_pipeshift import LayerMigration, PipeShiftStrategy
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS, SCHEDULES
from lightning_pipeshift.testing.ranks import launch_torchrun, run_ranks
from lightning_pipeshift.testing.sleeping import Sleeper, SleepingLayer, slow_down
from tests.features_models import quiet_trainer

NUM_LAYERS, NUM_STAGES = 24, 4
EVEN = (6, 6, 6, 6)
OPTIMUM = 12 / 7

# --- the reaction ---


class SlowsDown(L.Callback):
    """The last stage gets half as fast after some steps; all step times from there on.

    Args:
        at: after how many steps.
        num_steps: how many come after it.
    """

    def __init__(self, at: int, num_steps: int) -> None:
        self.seconds: list[float] = []
        self.counts: list[tuple[int, ...]] = []
        self._at, self._num_steps = at, num_steps
        self._begun = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int
    ) -> None:
        """One step ends, the next one begins."""
        now, strategy = time.perf_counter(), trainer.strategy
        if batch_idx > self._at:
            self.seconds.append(now - self._begun)
        if batch_idx == self._at and int(os.environ["RANK"]) == NUM_STAGES - 1:
            slow_down(2.0)
        self._begun = now
        assert isinstance(strategy, PipeShiftStrategy)
        if batch_idx > self._at:
            self.counts.append(strategy.plan.placement.counts[0])
        # The same on every rank.
        trainer.should_stop = batch_idx == self._at + self._num_steps


def react(
    watches: bool,
    schedule: str,
    microbatches: int,
    seconds: float,
    at: int,
    num_steps: int,
    patience: int,
) -> Any:
    """Runs on every rank: the steps from the slow-down on."""
    L.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    slow_down(1.0)
    slows = SlowsDown(at, num_steps)
    callbacks: list[Any] = [LayerMigration(patience=patience)] if watches else []
    strategy = PipeShiftStrategy(schedule=schedule, microbatches=microbatches, partition=list(EVEN))
    trainer = quiet_trainer(
        {"devices": NUM_STAGES, "strategy": strategy},
        max_epochs=-1,
        callbacks=[*callbacks, slows],
    )
    module = Sleeper(NUM_LAYERS, 64, seconds, 2 * seconds)
    data = Repeated((torch.randn(64), torch.randn(64)))
    trainer.fit(module, DataLoader(data, batch_size=microbatches))
    return slows.seconds, slows.counts


def reaction(options: Any) -> dict[str, Any]:
    """Both runs, in turns, as often as asked for."""
    gains, steps, found, static_seconds, moved_seconds, reached = [], [], [], [], [], []
    is_async = options.schedule in ASYNCHRONOUS
    microbatches = 1 if is_async else options.microbatches
    given = (options.schedule, microbatches, options.seconds, options.at)
    # Nothing moves, so fewer steps say as much.
    given_static = (*given, options.num_static_steps, 0)
    given_moving = (*given, options.num_steps, options.patience)
    best_seconds = max(EVEN) * 2 * 3 * options.seconds / OPTIMUM
    for _ in range(options.num_rounds):
        stays, _ = run_ranks(react, NUM_STAGES, False, *given_static, timeout=1200)[0]
        moves, counts = run_ranks(react, NUM_STAGES, True, *given_moving, timeout=1200)[0]
        # What is there in the end has been there for a while.
        last = counts[-1]
        reacted = next(i for i in range(len(counts)) if set(counts[i:]) == {last})
        # The pipeline is full of minibatches under the old split.
        after = moves[reacted + (2 * NUM_STAGES if is_async else 1) :]
        static_seconds.append(median(stays))
        moved_seconds.append(median(after))
        gains.append(static_seconds[-1] / moved_seconds[-1])
        reached.append(best_seconds / mean(after))
        steps.append(reacted)
        found.append(list(last))
    return {
        "gain": interval(gains),
        "gains": gains,
        "num_steps_after": len(after),
        "steps_until_moved": steps,
        "counts": found,
        "static_seconds": interval(static_seconds),
        "moved_seconds": interval(moved_seconds),
        "optimum": OPTIMUM,
        **({"of_best_pace": interval(reached)} if is_async else {}),
    }


# --- the gap ---

WIDTH, NUM_WEIGHTS = 64, 1024**2
SLOT = (0.020, 0.040)  # seconds a layer, about what a core takes for 500 tokens
PLACEMENTS = ((9, 3, 9, 3), (3, 9, 3, 9))
CHECKPOINT = "resume.ckpt"


class _Use(torch.autograd.Function):
    """Uses a weight, and gives it a gradient, at next to no cost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, has_gradient: bool) -> Tensor:
        ctx.like = weight if has_gradient else None
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        fresh = None if ctx.like is None else torch.full_like(ctx.like, 0.01)
        return gradients[0], fresh, None


class HeavyLayer(nn.Module):
    """Sleeps, and has many weights, of which a step makes a gradient once: two cores that compute
    for four stages would show nothing but their own noise.

    Args:
        microbatches: of a step.
    """

    def __init__(self, microbatches: int) -> None:
        super().__init__()
        self.sleeps = SleepingLayer(WIDTH, *SLOT)
        self.weight = nn.Parameter(torch.randn(NUM_WEIGHTS))
        self._microbatches = microbatches
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        slept: Tensor = self.sleeps(x)
        used: Tensor = _Use.apply(slept, self.weight, self._calls % self._microbatches == 0)
        return used


class Heavy(Sleeper):
    """Layers with weights, and an optimizer with a state.

    Args:
        microbatches: of a step.
    """

    def __init__(self, microbatches: int) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(HeavyLayer(microbatches) for _ in range(NUM_LAYERS))

    def configure_layers(self) -> list[nn.Module]:
        """The layers that move as one."""
        return list(self.layers)

    def configure_optimizers(self) -> Optimizer:
        """Two numbers for each weight."""
        return Adam(self.parameters(), lr=1e-4)


def data(microbatches: int) -> DataLoader[Any]:
    """One row for each microbatch."""
    sample = (torch.randn(WIDTH), torch.randn(WIDTH))
    return DataLoader(Repeated(sample), batch_size=microbatches)


class BackAndForth(L.Callback):
    """Live moves and blocking transfers of the same layers, in turn, some steps apart.

    Args:
        num_rounds: how many of each.
        between: steps from one to the next.
    """

    def __init__(self, num_rounds: int, between: int) -> None:
        # Of each step; the first steps under a new plan; and of each transfer.
        self.steps: dict[int, float] = {}
        self.live: list[int] = []
        self.blocking: list[float] = []
        self.held_up: list[float] = []
        self.save_seconds = 0.0
        self._num_rounds, self._between = num_rounds, between
        self._begun: float | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Times the step before."""
        now = time.perf_counter()
        if self._begun is not None:
            self.steps[batch_idx - 1] = now - self._begun
        self._begun = now

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Moves, or transfers, or lets the run end."""
        strategy: Any = trainer.strategy
        if self.live and batch_idx == self.live[-1]:
            self.held_up.append(strategy.move_seconds)
        turn, rest = divmod(batch_idx, self._between)
        if rest or not turn:
            return
        if turn > 2 * self._num_rounds:
            trainer.should_stop = True
        elif turn % 2:
            now = strategy.plan.placement.counts[0]
            other = PLACEMENTS[PLACEMENTS.index(now) ^ 1]
            strategy.adopt(strategy.plan.with_placement(Placement((other,))), at_once=True)
            # The next step prepares it.
            self.live.append(batch_idx + 2)
        else:
            self.blocking.append(transfer(trainer, module))
            # It has taken its time out of no step.
            self._begun = None

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        """Saves the state from which a restart would start."""
        begin = time.perf_counter()
        trainer.save_checkpoint(CHECKPOINT)
        self.save_seconds = time.perf_counter() - begin


def transfer(trainer: L.Trainer, module: Any) -> float:
    """As many bytes as the layers that would move have, sent and received tensor by tensor; the
    seconds from when all ranks are ready until all have done."""
    strategy: Any = trainer.strategy
    now = strategy.plan.placement
    other = Placement((PLACEMENTS[PLACEMENTS.index(now.counts[0]) ^ 1],))
    # A rank that used the parameters alone would run another program than the others.
    rank, tensor = trainer.global_rank, torch.empty(NUM_WEIGHTS)
    dist.barrier()
    begin = time.perf_counter()
    for index in range(len(module.layers)):
        source, to = now.stage_of(0, index), other.stage_of(0, index)
        if source == to or rank not in (source, to):
            continue
        # The weight, and the optimizer's two moments.
        for _ in range(3):
            if rank == source:
                dist.send(tensor, to)
            else:
                dist.recv(tensor, source)
    dist.barrier()
    return time.perf_counter() - begin


def gaps(microbatches: int, num_rounds: int, between: int, folder: str) -> BackAndForth:
    """Runs on every rank."""
    L.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    os.chdir(folder)
    moves = BackAndForth(num_rounds, between)
    strategy = PipeShiftStrategy(microbatches=microbatches, partition=list(PLACEMENTS[0]))
    trainer = quiet_trainer(
        {"devices": NUM_STAGES, "strategy": strategy}, max_epochs=-1, callbacks=[moves]
    )
    trainer.fit(Heavy(microbatches), data(microbatches))
    return moves


RESUMES = """
import sys
sys.path[:0] = {paths!r}
import lightning as L
from benchmarks.migration import Heavy, PLACEMENTS, data
from lightning_pipeshift import PipeShiftStrategy
from tests.features_models import quiet_trainer

class OneStep(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = True

L.seed_everything(0, verbose=False)
strategy = PipeShiftStrategy(microbatches={microbatches}, partition={partition})
trainer = quiet_trainer(
    {{"devices": {devices}, "strategy": strategy}}, max_epochs=-1, callbacks=[OneStep()]
)
trainer.fit(Heavy({microbatches}), data({microbatches}), ckpt_path={checkpoint!r})
"""


def restart(folder: Path, microbatches: int) -> float:
    """The seconds from a new start until one step has been trained on the other split."""
    script = RESUMES.format(
        paths=[str(Path(__file__).parent.parent)],
        microbatches=microbatches,
        partition=list(PLACEMENTS[1]),
        devices=NUM_STAGES,
        checkpoint=str(folder / CHECKPOINT),
    )
    begin = time.perf_counter()
    launch_torchrun(script, NUM_STAGES, timeout=300)
    return time.perf_counter() - begin


def gap(options: Any, folder: Path) -> dict[str, Any]:
    """All three ways."""
    given = (options.gap_microbatches, options.num_moves, options.between, str(folder))
    ranks = run_ranks(gaps, NUM_STAGES, *given, timeout=1200)
    found = ranks[0]
    # What held the stage up that it held up longest.
    held_up = [max(stages) for stages in zip(*(rank.held_up for rank in ranks), strict=True)]
    near = {step + offset for step in found.live for offset in (-1, 0, 1)}
    apart = [seconds for step, seconds in found.steps.items() if step > 1 and step not in near]
    usual = median(apart)
    around = [longest(found.steps, step) - usual for step in found.live]
    undisturbed = [max(three) - usual for three in zip(apart, apart[1:], apart[2:], strict=False)]
    restarted = found.save_seconds + restart(folder, options.gap_microbatches) - usual
    layers = sum(
        Placement((PLACEMENTS[0],)).stage_of(0, i) != Placement((PLACEMENTS[1],)).stage_of(0, i)
        for i in range(NUM_LAYERS)
    )
    live = median(held_up)
    return {
        "moved_layers": layers,
        "moved_megabytes": layers * 3 * 4 * NUM_WEIGHTS / 1e6,
        "median_step_seconds": usual,
        "slot_seconds": max(PLACEMENTS[0]) * sum(SLOT),
        "held_up_seconds": interval(held_up),
        "worst_held_up_seconds": max(held_up),
        "gap_seconds": interval(around),
        "worst_gap_seconds": max(around),
        "undisturbed_gap_seconds": interval(undisturbed),
        "step_of_the_move_seconds": median(found.steps[step] for step in found.live),
        "blocking_seconds": interval(found.blocking),
        "restart_seconds": restarted,
        "blocking_over_live": median(found.blocking) / live,
        "restart_over_live": restarted / live,
    }


def longest(steps: dict[int, float], at: int) -> float:
    """The longest of the steps around one."""
    return max(steps[step] for step in (at - 1, at, at + 1) if step in steps)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of the reaction")
    parser.add_argument("--microbatches", type=int, default=32, help="of a synchronous schedule")
    parser.add_argument("--seconds", type=float, default=0.008, help="of a layer's forward")
    parser.add_argument("--at", type=int, default=4)
    parser.add_argument("--num-steps", type=int, default=16)
    parser.add_argument("--num-static-steps", type=int, default=5)
    parser.add_argument("--num-rounds", type=int, default=3)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--gap-microbatches", type=int, default=4)
    parser.add_argument("--num-moves", type=int, default=8)
    parser.add_argument("--between", type=int, default=4)
    parser.add_argument("--only", choices=("reaction", "gap"))
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    options = parser.parse_args()

    figures: dict[str, Any] = {}
    if options.only != "gap":
        found = figures["reaction"] = reaction(options)
        rows = [
            ["the split that stays", str(list(EVEN)), shown(found["static_seconds"]), "1"],
            [
                "LayerMigration",
                str(found["counts"][-1]),
                shown(found["moved_seconds"]),
                shown(found["gain"]),
            ],
        ]
        title = f"One of {NUM_STAGES} stages gets half as fast, {options.schedule}"
        print_table(title, ["", "layers", "s a step", "times as fast"], rows)
        steps = found["steps_until_moved"]
        print(f"\n{OPTIMUM:.2f} is the optimum; moved after {steps} steps")
        if "of_best_pace" in found:
            print(f"{shown(found['of_best_pace'])} of the pace of the best split")
    if options.only != "reaction":
        found = figures["gap"] = gap(options, options.folder)
        live, blocking = found["held_up_seconds"], found["blocking_seconds"]
        held_up_rows = [
            ["live move", live["median"], 1.0],
            ["blocking transfer", blocking["median"], found["blocking_over_live"]],
            ["checkpoint and restart", found["restart_seconds"], found["restart_over_live"]],
        ]
        title = (
            f"How long training is held up for {found['moved_layers']} layers"
            f" ({found['moved_megabytes']:.0f} MB), the median of {options.num_moves}"
        )
        print_table(title, ["", "s", "times the live move"], held_up_rows)
        print(
            f"\nthe worst live move: {found['worst_held_up_seconds']:.3f} s\n"
            f"the longest of three steps around a move, beyond the median step of"
            f" {found['median_step_seconds']:.3f} s: {shown(found['gap_seconds'])} s, at worst"
            f" {found['worst_gap_seconds']:.3f} s\n"
            f"where nothing moves: {shown(found['undisturbed_gap_seconds'])} s; a slot is"
            f" {found['slot_seconds']:.3f} s"
        )
    save(options.json, figures)


if __name__ == "__main__":
    main()
