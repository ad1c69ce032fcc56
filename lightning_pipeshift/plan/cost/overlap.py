"""Predicts steps that begin before all gradients of the last one are summed.

A layer is updated when its own gradient is summed, before its next forward. So the rings of one
step delay the first forwards of the next one, and only where they are not complete in time. A step
is simulated after others, until the delays repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.simulator import Clock, columns
from lightning_pipeshift.plan.cost.sums import Numbers
from lightning_pipeshift.plan.cost.workload import Workload

_NUM_STEPS: Final = 4
_NUM_MEASURED: Final = 2


def overlapped(
    machines: Sequence[tuple[Workload, Cut]],
    ring_ends: Callable[[Sequence[float]], Sequence[float]],
    seconds_between: float,
) -> float:
    """The seconds from the start of one step to the start of the next, if steps overlap with the
    sums of the steps before.

    Args:
        machines: the workload and the cut of each distinct virtual machine.
        ring_ends: the time at which each layer's sum is complete, given the time at which the last
            virtual machine has its gradient, both in seconds since the first step began.
        seconds_between: from the end of a stage's step to the start of its next one.
    """
    runs = [_Run(workload, cut) for workload, cut in machines]
    updated: Sequence[float] = [0.0] * machines[0][0].num_layers
    ends = []
    for _ in range(_NUM_STEPS):
        for run in runs:
            run.step(updated)
        ends.append(max(max(run.ends) for run in runs))
        updated = ring_ends(np.maximum.reduce([run.ready for run in runs]).tolist())
        for run in runs:
            run.begins = [end + seconds_between for end in run.ends]
    return (ends[-1] - ends[-1 - _NUM_MEASURED]) / _NUM_MEASURED


class _Run:
    """Steps of one virtual machine, one after the other."""

    def __init__(self, workload: Workload, cut: Cut) -> None:
        self._workload = workload
        self._bounds = list(pairwise(cut.bounds))
        self._costs = columns(*workload.costs_by_size(cut))
        self._clock: Clock = workload.clock_for(any(self._costs[-1]))
        self.begins = [0.0] * workload.num_stages
        self.ends = list(self.begins)
        self.ready: Numbers = np.zeros(workload.num_layers)
        """When each layer's gradient is ready."""

    def step(self, updated: Sequence[float]) -> None:
        """Simulates a step.

        Args:
            updated: when each layer's parameters are updated.
        """

        def first_forward(stage: int, start: float) -> float:
            now = start
            begin, end = self._bounds[stage]
            layers = (self._workload.sizes[0] * self._workload.forward[stage, begin:end]).tolist()
            outside: float = self._costs[0][stage] - sum(layers)
            for layer, seconds in enumerate(layers, begin):
                now = max(now, updated[layer]) + seconds
            return now + outside

        computed, _, _ = self._clock.rows_of(self._costs, self.begins, first_forward)
        # A stage's last action is a backward.
        self.ends = [float(row.ends[-1]) for row in computed]
        self.ready = gradients_ready(self._workload, self._bounds, self.ends)


def gradients_ready(
    workload: Workload, bounds: Sequence[tuple[int, int]], ends: Sequence[float]
) -> Numbers:
    """Returns the time at which each layer's gradient is ready: in the middle of the last backward
    of its stage, which passes the later layers first.

    Args:
        workload: the layers' costs.
        bounds: of each stage, its first layer and the one after its last.
        ends: of each stage's last backward.
    """
    ready = np.zeros(workload.num_layers)
    for stage, (moment, (begin, end)) in enumerate(zip(ends, bounds, strict=True)):
        seconds = workload.sizes[-1] * workload.backward[stage, begin:end]
        # Of the stage's layers, the first one's gradient is ready last.
        ready[begin:end] = moment - (np.cumsum(seconds) - seconds)
    return ready
