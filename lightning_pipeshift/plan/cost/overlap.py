"""Predicts steps that begin before all gradients of the last one are summed.

A layer is updated when its own gradient is summed, before its next forward. So the rings of one
step delay the first forwards of the next one, and only where they are not complete in time. A step
is simulated after others, until the delays repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from lightning_pipeshift.plan.cost.simulator import Clock, columns
from lightning_pipeshift.plan.cost.workload import Cut, Numbers, Workload
from lightning_pipeshift.plan.schedule.actions import Kind

_NUM_STEPS: Final = 4
_NUM_MEASURED: Final = 2


@dataclass(frozen=True)
class Overlapped:
    """The times of steps that overlap with the sums of the steps before.

    Args:
        step_seconds: from the start of one step to the start of the next.
        slack_seconds: for each layer, the time from its gradient to its next forward, if no forward
            waited for a sum.
    """

    step_seconds: float
    slack_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Machine:
    """A virtual machine's part in such steps.

    Args:
        workload: its costs.
        cut: its stages.
    """

    workload: Workload
    cut: Cut


def overlapped(
    machines: Sequence[Machine],
    ring_ends: Callable[[Sequence[float]], Sequence[float]],
    seconds_between: float,
) -> Overlapped:
    """Simulates steps that overlap with the sums of the steps before.

    Args:
        machines: one for each distinct virtual machine.
        ring_ends: the time at which each layer's sum is complete, given the time at which the last
            virtual machine has its gradient, both in seconds since the first step began.
        seconds_between: from the end of a stage's step to the start of its next one.
    """
    runs = [_Run(machine) for machine in machines]
    no_delay = [0.0] * machines[0].workload.num_layers
    updated: Sequence[float] = no_delay
    ends, slack = [], no_delay
    for number in range(_NUM_STEPS):
        for run in runs:
            run.step(updated)
        ends.append(max(max(run.ends) for run in runs))
        ready = np.maximum.reduce([run.ready for run in runs])
        if number == 0:
            # All layers are called as late in the next step as they are in this one.
            length = ends[0] + seconds_between
            needed = length + np.minimum.reduce([run.called for run in runs])
            slack = (needed - ready).tolist()
        updated = ring_ends(ready.tolist())
        for run in runs:
            run.begins = [end + seconds_between for end in run.ends]
    return Overlapped(
        step_seconds=(ends[-1] - ends[-1 - _NUM_MEASURED]) / _NUM_MEASURED,
        slack_seconds=tuple(slack),
    )


class _Run:
    """Steps of one virtual machine, one after the other."""

    def __init__(self, machine: Machine) -> None:
        workload, cut = machine.workload, machine.cut
        self._workload = workload
        self._bounds = list(pairwise(cut.bounds))
        self._costs = columns(workload.costs(cut))
        self._clock: Clock = workload.clock_for(any(self._costs[-1]))
        self.begins = [0.0] * workload.num_stages
        self.ends = list(self.begins)
        self.ready: Numbers = np.zeros(workload.num_layers)
        """When each layer's gradient is ready."""
        self.called: Numbers = np.zeros(workload.num_layers)
        """When each layer's first forward could have begun, but for its update."""

    def step(self, updated: Sequence[float]) -> None:
        """Simulates a step.

        Args:
            updated: when each layer's parameters are updated.
        """

        def first_forward(stage: int, start: float) -> float:
            now = start
            begin, end = self._bounds[stage]
            layers = self._workload.forward[stage, begin:end].tolist()
            outside: float = self._costs[0][stage] - sum(layers)
            for layer, seconds in enumerate(layers, begin):
                self.called[layer] = now
                now = max(now, updated[layer]) + seconds
            return now + outside

        last_backwards = list(self.begins)
        self.ends = list(self.begins)
        for stage, action, _, end, _ in self._clock.run(
            self._costs, max, begins=self.begins, first_forward=first_forward
        ):
            if action.kind.is_compute:
                self.ends[stage] = end
            if action.kind is Kind.BACKWARD:
                last_backwards[stage] = end
        self.ready = gradients_ready(self._workload, self._bounds, last_backwards)


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
        seconds = workload.backward[stage, begin:end]
        # Of the stage's layers, the first one's gradient is ready last.
        ready[begin:end] = moment - (np.cumsum(seconds) - seconds)
    return ready
