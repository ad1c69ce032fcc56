"""Times a step under several plans in one run: they take turns, each for some steps at a time.

A plan that another one replaces while training runs is what PipeShift is made for, so nothing has
to be started anew between two of them, and what disturbs the machine disturbs them all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.measuring import interval, ratios
from lightning_pipeshift import PipeShiftStrategy, Plan
from tests.features_models import quiet_trainer

Plans = Mapping[str, Plan]


@dataclass
class Timed:
    """The result of one plan.

    Args:
        plan: the plan.
        counts: layers of each stage, by virtual machine.
        num_steps: how many steps of a turn are timed.
        predicted_seconds: of a step, by the simulator, from the measurements of the first steps.
        step_seconds: measured, of each step but the first two of each turn.
    """

    plan: str
    counts: list[list[int]]
    num_steps: int
    predicted_seconds: float | None = None
    step_seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.step_seconds)

    @property
    def turns(self) -> list[float]:
        """The seconds of a step in each turn: what is compared with others' turns beside it."""
        starts = range(0, len(self.step_seconds), self.num_steps)
        return [median(self.step_seconds[i : i + self.num_steps]) for i in starts]

    def times(self, other: Timed) -> dict[str, float]:
        """How many times as long as ``other`` this takes, as an interval over the turns."""
        return interval(ratios(self.turns, other.turns))


class TakingTurns(L.Callback):
    """Lets plans take turns, once the first steps have been measured.

    Args:
        make_plans: what is compared, made on every rank from the strategy.
        num_rounds: how often each has its turn.
        num_steps: how many steps of a turn are timed; two more come before, which are not.
        enter: called as a plan's turn begins, with its name.
        beside: a plan that has a turn before each other one's: it shows how fast the machine was
            then.
    """

    def __init__(
        self,
        make_plans: Callable[[PipeShiftStrategy], Plans],
        num_rounds: int,
        num_steps: int,
        enter: Callable[[str], None] = lambda name: None,
        beside: str | None = None,
    ) -> None:
        self.found: dict[str, Timed] = {}
        self._make_plans = make_plans
        self._num_rounds = num_rounds
        self._num_steps = num_steps
        self._enter = enter
        self._beside = beside
        self._plans: Plans = {}
        self._turns: list[str] = []
        self._left = 0
        self._begun: float | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        """A step begins, and the one before it is over."""
        now = time.perf_counter()
        if self._begun is not None and self._turns and 0 < self._left <= self._num_steps:
            self.found[self._turns[0]].step_seconds.append(now - self._begun)
        self._begun = now

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Lets the next one have its turn when the time has come."""
        strategy: Any = trainer.strategy
        if not self.found:
            if not strategy.is_measured:
                return
            self._plans = self._make_plans(strategy)
            for name, plan in self._plans.items():
                said = plan.prediction.step_seconds if plan.prediction is not None else None
                counts = [list(row) for row in plan.placement.counts]
                self.found[name] = Timed(str(plan), counts, self._num_steps, said)
            names = [*self._plans]
            if self._beside in names:
                others = [name for name in names if name != self._beside] or names
                names = [each for name in others for each in dict.fromkeys((self._beside, name))]
            self._turns = names * self._num_rounds
            self._begin(strategy)
            return
        # The step that ends here is timed when the next one begins.
        self._left -= 1
        if self._left < 0:
            self._turns.pop(0)
            if not self._turns:
                trainer.should_stop = True
                return
            self._begin(strategy)

    def _begin(self, strategy: Any) -> None:
        name = self._turns[0]
        strategy.adopt(self._plans[name])
        self._enter(name)
        # In the first one it is prepared, in the second one layers move; and what ends here counts
        # as one.
        self._left = self._num_steps + 3
        self._begun = None


def compare(
    module: L.LightningModule,
    dataset: Dataset[Any],
    batch_size: int,
    strategy: PipeShiftStrategy,
    turns: TakingTurns,
) -> dict[str, Timed]:
    """Runs on every rank; what rank 0 timed counts."""
    torch.set_num_threads(1)
    devices = int(os.environ["WORLD_SIZE"])
    trainer = quiet_trainer(
        {"devices": devices, "strategy": strategy}, max_epochs=-1, callbacks=[turns]
    )
    trainer.fit(module, DataLoader(dataset, batch_size=batch_size))
    return turns.found


class Repeated(Dataset[Any]):
    """One sample again and again: as much data as a run asks for.

    Args:
        sample: tensors without a batch dimension.
        length: how often.
    """

    def __init__(self, sample: Any, length: int = 1_000_000) -> None:
        self._sample = sample
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._sample
