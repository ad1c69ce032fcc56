"""For which links, neighbours and hosts the stages of a run wait, by its measurements.

A stage that is idle cannot tell why a payload is late. So the simulator repeats the measured step
without the time of one link's messages, or with one slow stage as fast as the others usually are:
by as much as the step gets shorter, the others wait for that link or stage. Waits for swapped
tensors are measured, where they happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import Final

from lightning_pipeshift.plan.cost.simulator import Costs, clock, simulate
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.schedule.schedules import in_chunks
from lightning_pipeshift.plan.search.measurements import Measured
from lightning_pipeshift.text import seconds_text

_NOTICEABLE: Final = 0.02
"""The fraction of a step from which on a wait is reported."""

_HELD_BACK: Final = 0.9
"""A process that runs a smaller part of the time in which its layers work is held back: by a CPU
quota, or by other programs.
"""

_MOST_STAGES: Final = 16
"""Deeper pipelines take long to simulate once for each link and stage."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A cause for which stages wait.

    Args:
        what: ``"link"``, ``"stage"`` or ``"host"``.
        ranks: the ends of the link; or the rank of the slow stage, or of the stage that waits for
            its swapped tensors.
        seconds: of a step.
        ran: in which part of its layers' time the slow stage's thread ran; ``None``: not known.
    """

    what: str
    ranks: tuple[int, ...]
    seconds: float
    ran: float | None = None

    def __str__(self) -> str:
        names = {
            "link": "the link between ranks {} and {}",
            "stage": "rank {}, whose layers take longer than those of other stages",
            "host": "tensors that rank {} has swapped out",
        }
        text = f"{seconds_text(self.seconds)} for {names[self.what].format(*self.ranks)}"
        if self.ran is None:
            return text
        text += f" (its process runs {self.ran:.0%} of their time"
        return text + (")" if self.ran > _HELD_BACK else ": held back, or they wait)")


def waits_of(plan: Plan, measured: Measured) -> list[Wait]:
    """The noticeable waits of stages in a step, the longest first.

    Args:
        plan: the one in force.
        measured: under that plan.
    """
    prediction, found = measured.prediction(plan), []
    for machine, costs in zip(measured.ranks_of(plan), prediction.costs, strict=True):
        if costs.num_stages > _MOST_STAGES:
            continue
        ranks = in_chunks(machine, plan.schedule)
        links, stages = saved_seconds(plan.schedule, plan.microbatches, costs)
        found += [Wait("link", (ranks[b], ranks[b + 1]), each) for b, each in enumerate(links)]
        for rank, each in zip(ranks, stages, strict=True):
            found.append(Wait("stage", (rank,), each, measured.ran[rank] if measured.ran else None))
    found += [Wait("host", (rank,), each) for rank, each in enumerate(measured.waited_seconds)]
    least = _NOTICEABLE * prediction.step_seconds
    noticeable = [wait for wait in found if wait.seconds > least]
    return sorted(noticeable, key=lambda wait: -wait.seconds)


def waits_text(waits: Sequence[Wait]) -> str:
    """The waits as a sentence; empty if there are none."""
    return f"Stages wait in each step: {'; '.join(map(str, waits))}." if waits else ""


@lru_cache(maxsize=64)
def saved_seconds(
    schedule: str, microbatches: int, costs: Costs
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """By how much a step would be shorter without the time of each link's messages, and with each
    stage as fast as the median of the others, if it is slower; in seconds.

    Args:
        schedule: by name.
        microbatches: of a step.
        costs: of a virtual machine's stages.
    """

    def seconds(changed: Costs) -> float:
        again = changed.recomputing_stages
        return simulate(
            clock(schedule, changed.num_stages, microbatches, again), changed
        ).step_seconds

    now, links, stages = seconds(costs), [], []
    for link in range(costs.num_stages - 1):
        payloads, gradients = list(costs.payload_seconds), list(costs.gradient_seconds)
        payloads[link] = gradients[link] = 0.0
        free = replace(costs, payload_seconds=tuple(payloads), gradient_seconds=tuple(gradients))
        links.append(max(0.0, now - seconds(free)))
    works = [sum(each) for each in zip(costs.forward_seconds, costs.backward_seconds, strict=True)]
    for stage, work in enumerate(works):
        others = [each for other, each in enumerate(works) if other != stage and each > 0]
        usual = median(others) if others else work
        if work <= usual:
            stages.append(0.0)
            continue
        forward, backward = list(costs.forward_seconds), list(costs.backward_seconds)
        forward[stage] *= usual / work
        backward[stage] *= usual / work
        fast = replace(costs, forward_seconds=tuple(forward), backward_seconds=tuple(backward))
        stages.append(max(0.0, now - seconds(fast)))
    return tuple(links), tuple(stages)
