"""Contenders that take turns, inside one `Trainer.fit`.

Two runs one after the other compare two moments of a machine rather than two programs. So a fit's
own steps and those of its competitors alternate, in the same processes, round by round.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from benchmarks.measuring import busy_seconds, put_session_first, ratios
from lightning_pipeshift import PipeShiftStrategy

PIPESHIFT = "PipeShift, in Trainer.fit"
TORCH = "torch Schedule1F1B, bare loop"

BURSTS_HELP = "on a machine that others use: each round first in line, then a rest (needs root)"

# Runs so many of a contender's steps on this rank.
Contender = Callable[[int], None]

# Of this process. PipeShift takes a module that a callback keeps, and that looks like the model,
# for an average or a copy of it, and each rank then holds a part of its values only: a competitor
# that is kept there would compute next to nothing.
_contenders: dict[str, Contender] = {}


@dataclass(frozen=True)
class Round:
    """One contender's turn, as one rank saw it.

    Args:
        contender: its name.
        num_steps: how many steps it made.
        seconds: what they took, from one barrier to the next.
        own_cpu_seconds: this process's processor time in it.
        machine_cpu_seconds: that of all processes of the machine.
    """

    contender: str
    num_steps: int
    seconds: float
    own_cpu_seconds: float
    machine_cpu_seconds: float


@dataclass(frozen=True)
class Series:
    """One contender's rounds.

    Args:
        step_seconds: the seconds of a step in each round.
        cpu_seconds: each rank's processor time for a step, the median of the rounds.
        others: which part of the machine other processes used in each round, 0 to 1.
    """

    step_seconds: list[float]
    cpu_seconds: list[float]
    others: list[float]

    @property
    def median(self) -> float:
        """The seconds of a step."""
        return median(self.step_seconds)

    def times_as_fast(self, other: Series) -> list[float]:
        """How many times as fast as ``other`` this was, in each round."""
        return ratios(other.step_seconds, self.step_seconds)


class Alternation(L.Callback):
    """Lets others run between the rounds of a fit's steps, and times everybody.

    A step of the fit is what lies between two ``on_train_batch_start``: the data, the step, the
    optimizer, the log and the Trainer's own work.

    Args:
        make_contenders: called once the ranks are connected; returns the others by name.
        steps: how many steps a contender makes in a round. The fit is called ``PIPESHIFT``.
        num_rounds: how often everybody's turn comes.
        num_warm_up_steps: of each, not timed.
        bursts: on a machine that others use too, run every round at the highest priority, each
            rank on a core of its own if there are enough, and rest after it for as long as it took.
            Needs to be root, and ranks that lead a session each.
    """

    def __init__(
        self,
        make_contenders: Callable[[], Mapping[str, Contender]],
        steps: Mapping[str, int],
        num_rounds: int,
        num_warm_up_steps: int = 2,
        bursts: bool = False,
    ) -> None:
        self.rounds: list[Round] = []
        self._make_contenders = make_contenders
        self._steps = steps
        self._num_rounds = num_rounds
        self._num_warm_up_steps = num_warm_up_steps
        self._bursts = bursts
        self._begun: tuple[float, float, float] | None = None

    @property
    def num_fit_steps(self) -> int:
        """``max_steps`` for the Trainer: the beginning of a last step ends the last round."""
        return self._num_warm_up_steps + self._num_rounds * self._steps[PIPESHIFT] + 1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        _contenders.update(self._make_contenders())
        cores = sorted(os.sched_getaffinity(0))
        if self._bursts and trainer.world_size <= len(cores):
            # Two ranks that are first in line would at times stand in one line.
            os.sched_setaffinity(0, {cores[trainer.global_rank]})

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        done = trainer.global_step - self._num_warm_up_steps
        if done < 0 or done % self._steps[PIPESHIFT]:
            return
        if self._begun is not None:
            self._end(PIPESHIFT)
        number = done // self._steps[PIPESHIFT]
        if number == self._num_rounds:
            return
        if number == 0:
            for run in _contenders.values():
                run(self._num_warm_up_steps)
        # Nobody always goes first.
        names = list(_contenders)
        turn = number % len(names) if names else 0
        for name in names[turn:] + names[:turn]:
            self._begin()
            _contenders[name](self._steps[name])
            self._end(name)
        self._begin()

    def _begin(self) -> None:
        if self._bursts:
            put_session_first(True)
        dist.barrier()
        self._begun = _clocks()

    def _end(self, contender: str) -> None:
        assert self._begun is not None
        dist.barrier()
        spans = [end - begun for begun, end in zip(self._begun, _clocks(), strict=True)]
        self.rounds.append(Round(contender, self._steps[contender], *spans))
        self._begun = None
        if self._bursts:
            put_session_first(False)
            time.sleep(self.rounds[-1].seconds)


def _clocks() -> tuple[float, float, float]:
    return time.perf_counter(), time.process_time(), busy_seconds()


def fit_beside(
    module: L.LightningModule,
    dataset: Dataset[Any],
    batch_size: int,
    strategy: PipeShiftStrategy,
    alternation: Alternation,
    num_stages: int,
) -> list[Round]:
    """Trains as a user would, without a progress bar, and returns this rank's rounds."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_stages,
        strategy=strategy,
        callbacks=[alternation],
        logger=CSVLogger("."),
        max_steps=alternation.num_fit_steps,
        max_epochs=-1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    # A few threads of worker processes would be one more thing to compete for two cores.
    trainer.fit(module, DataLoader(dataset, batch_size=batch_size, num_workers=0))
    return alternation.rounds


def series(ranks: Sequence[Sequence[Round]], num_cores: int) -> dict[str, Series]:
    """Each contender's rounds, from what every rank saw."""
    result = {}
    for name in dict.fromkeys(round.contender for round in ranks[0]):
        turns = [[round for round in rank if round.contender == name] for rank in ranks]
        result[name] = Series(
            step_seconds=[round.seconds / round.num_steps for round in turns[0]],
            cpu_seconds=[
                median(round.own_cpu_seconds / round.num_steps for round in rank) for rank in turns
            ],
            others=[
                max(0.0, here[0].machine_cpu_seconds - sum(round.own_cpu_seconds for round in here))
                / (here[0].seconds * num_cores)
                for here in zip(*turns, strict=True)
            ],
        )
    return result


class TorchPipeline:
    """The peer: one stage of ``torch.distributed.pipelining`` in a loop without anything else.

    Args:
        chunks: this stage's layers; of several chunks where the schedule is interleaved.
        num_microbatches: slices of a batch.
        loss_function: of the last stage's output and the target.
        make_optimizer: of this stage's parameters.
        batches: what to train on, over and over: input and target.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        num_microbatches: int,
        loss_function: Callable[[Tensor, Tensor], Tensor],
        make_optimizer: Callable[[Any], Optimizer],
        batches: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        rank, num_stages = dist.get_rank(), dist.get_world_size()
        group = dist.new_group(backend="gloo")
        stages: list[Any] = [
            PipelineStage(
                layers,
                rank + at * num_stages,
                len(chunks) * num_stages,
                torch.device("cpu"),
                group=group,
            )
            for at, layers in enumerate(chunks)
        ]
        if len(chunks) == 1:
            self._schedule: Any = Schedule1F1B(stages[0], num_microbatches, loss_function)
        else:
            self._schedule = ScheduleInterleaved1F1B(stages, num_microbatches, loss_function)
        self._is_first = rank == 0
        self._is_last = rank == num_stages - 1
        self._optimizer = make_optimizer(nn.ModuleList(chunks).parameters())
        self._batches = batches
        self._num_done = 0
        self.losses: list[float] = []

    def __call__(self, num_steps: int) -> None:
        for _ in range(num_steps):
            inputs, target = self._batches[self._num_done % len(self._batches)]
            self._num_done += 1
            self._optimizer.zero_grad()
            losses: list[Tensor] = []
            self._schedule.step(
                *([inputs] if self._is_first else []),
                target=target if self._is_last else None,
                losses=losses if self._is_last else None,
                return_outputs=False,
            )
            self._optimizer.step()
            if losses:
                self.losses.append(torch.stack(losses).mean().item())
