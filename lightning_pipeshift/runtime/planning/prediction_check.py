"""Compares the first measured steps with the plan's prediction, and says what differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.search.measurements import Measured
from lightning_pipeshift.runtime.planning.delivered import recent
from lightning_pipeshift.runtime.planning.replanning import Replanning
from lightning_pipeshift.text import seconds_text

_TOLERANCE: Final = 0.2
"""The relative difference from which on it is worth a message."""

_WARM_UP_STEPS, _NUM_STEPS, _MOST_STEPS = 3, 20, 1000


class PredictionCheck:
    """Checks the prediction of the plan of a run's first steps, once.

    Args:
        planning: has the measurements of the run, if it makes any.
        messages: to which the message is added.
    """

    def __init__(self, planning: Replanning, messages: list[str]) -> None:
        self._planning = planning
        self._messages = messages
        self._plan: Plan | None = None
        self._seconds: list[float] = []
        self._is_over = False

    def note(self, plan: Plan | None, step_seconds: float | None) -> None:
        """Called when a step begins.

        Args:
            plan: the one in force; ``None`` before the first step.
            step_seconds: of the step before; ``None`` if there is none.
        """
        if self._is_over or plan is None or step_seconds is None:
            return
        first = self._plan = self._plan or plan
        self._seconds.append(step_seconds)
        planning, seconds = self._planning, self._seconds[_WARM_UP_STEPS:]
        is_enough = planning.is_measured if planning.measures else len(seconds) >= _NUM_STEPS
        self._is_over = is_enough or not plan.is_like(first) or len(seconds) >= _MOST_STEPS
        if seconds and is_enough and plan.is_like(first):
            measured = planning.measured if planning.measures else None
            text = difference(first, recent(seconds, len(seconds)).mean, measured)
            self._messages.extend([text] if text else [])


def difference(plan: Plan, took: float, measured: Measured | None) -> str:
    """Returns a message if steps take longer or shorter than the plan predicted, with the largest
    cause; an empty one if they take about as long, or if nothing was predicted.

    Args:
        plan: with its prediction, if it has one.
        took: the mean seconds of a step under it.
        measured: what has been measured of these steps.
    """
    expected = plan.prediction.step_seconds if plan.prediction is not None else 0.0
    if not expected or abs(took - expected) <= _TOLERANCE * expected:
        return ""
    sign = 1 if took > expected else -1
    cause = "the cause is not known, as the run's `plan` is fixed: `LayerMigration()` measures it"
    if measured is not None:
        cause = "mostly, " + max(_causes(plan, measured), key=lambda each: sign * each[0])[1]
    return (
        f"a step takes {seconds_text(took)}, and the plan predicted {seconds_text(expected)}:"
        f" {cause}."
    )


def _causes(plan: Plan, measured: Measured) -> Iterator[tuple[float, str]]:
    """By how many seconds of a step each part takes longer than predicted, and what to say."""
    assert plan.prediction is not None
    then, now = plan.prediction, measured.prediction(plan)

    def cause(times: int, seconds: Sequence[float], what: str) -> tuple[float, str]:
        expected, found = seconds
        text = f"{what} {seconds_text(found)} and not {seconds_text(expected)}"
        return times * (found - expected), text

    for ranks, *costs in zip(measured.ranks_of(plan), then.costs, now.costs, strict=True):
        for stage, rank in enumerate(ranks):
            works = [each.forward_seconds[stage] + each.backward_seconds[stage] for each in costs]
            yield cause(plan.microbatches, works, f"rank {rank} computes a microbatch in")
        for link, (one, other) in enumerate(pairwise(ranks)):
            sent = [each.payload_seconds[link] + each.gradient_seconds[link] for each in costs]
            what = f"the messages of a microbatch between ranks {one} and {other} take"
            yield cause(plan.microbatches, sent, what)
    outside = []
    for found in (then, now):
        timelines = map(replace(plan, prediction=found).timeline, range(len(found.costs)))
        computed = max(timeline.step_seconds for timeline in timelines)
        outside.append(max(0.0, found.step_seconds - computed))
    what = "what is not computing (data, callbacks, the optimizer, messages on their way) takes"
    yield cause(1, outside, what)
