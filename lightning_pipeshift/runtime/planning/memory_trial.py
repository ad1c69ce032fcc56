"""Compares a memory plan, as measured, with recomputing everything.

A plan that moves saved tensors, or recomputes parts of layers, is chosen by predictions, and these
do not know all that it costs on a device: host time between kernels, links that others use, memory
that is allocated again. Recomputing whole layers is slower by the layers' forwards and little else.
So a plan whose first steps take longer than that is expected to is replaced by it. That is measured
likewise, and the faster of the two stays.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.text import seconds_text

NUM_STEPS: Final = 3
"""How many steps are measured, after the first ones under a plan."""

MARGIN: Final = 1.05
"""A plan is replaced if its step takes more than this many times the expected one."""


class Verdict(enum.Enum):
    """The judgement of a plan by its measured steps."""

    KEEP = "keep"
    """It is fast enough."""
    TRY = "try"
    """Everything is recomputed from now on, and measured."""
    STAY = "stay"
    """Recomputing everything has been faster: it stays."""
    RETURN = "return"
    """It has been slower: the plan before is in force again."""


class MemoryTrial:
    """Judges the plans of one run. Every rank has one, and all are in the same state; only that of
    the first rank judges.

    Args:
        is_on: whether plans are judged: not those that a user has chosen.
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._kept: Plan | None = None
        self._tried: Plan | None = None
        # On the first rank: the plan that was replaced, and the seconds of its step.
        self._before: tuple[Plan, float] | None = None

    def is_due(self, plan: Plan) -> bool:
        """Whether a plan in force is to be judged after :data:`NUM_STEPS`."""
        if not self._is_on:
            return False
        if self._tried is not None:
            return plan.is_like(self._tried)
        is_judged = self._kept is not None and plan.is_like(self._kept)
        return _moves(plan) and not is_judged

    def judge(
        self, plan: Plan, took: float, recomputing: Callable[[], Plan | None]
    ) -> tuple[Verdict, Plan, str]:
        """Judges a plan by its measured steps, on the first rank.

        Args:
            plan: the plan in force, for which this :meth:`is_due`.
            took: the seconds of a step.
            recomputing: makes the plan that recomputes everything, with its prediction; returns
                ``None`` if none fits.

        Returns:
            the verdict; the plan that follows from it; a message to the user, or an empty one.
        """
        # A verdict may have been discarded: a user's move came first.
        is_tried = self._tried is not None and plan.is_like(self._tried)
        if self._before is not None and is_tried:
            before, seconds = self._before
            both = (
                f"recomputing all layers takes {seconds_text(took)} a step, and the plan before"
                f" took {seconds_text(seconds)}"
            )
            if took <= seconds:
                return Verdict.STAY, plan, f"{both}: all layers are recomputed from now on."
            return Verdict.RETURN, before, f"{both}: that one is in force again."
        other = recomputing()
        if other is None or other.prediction is None or other.is_like(plan):
            return Verdict.KEEP, plan, ""
        expected = other.prediction.step_seconds
        if took <= MARGIN * expected:
            return Verdict.KEEP, plan, ""
        self._before = plan, took
        predicted = ""
        if plan.prediction is not None:
            predicted = f", {seconds_text(plan.prediction.step_seconds)} had been predicted"
        message = (
            "the plan of `MemoryCompression` is slower than recomputing all layers: a step took"
            f" {seconds_text(took)}{predicted}, and {seconds_text(expected)} are expected if all"
            " layers are recomputed. That is done from this step on, and the faster plan stays."
        )
        return Verdict.TRY, other, message

    def take(self, verdict: Verdict, plan: Plan) -> None:
        """Takes a verdict of the first rank. Every rank calls this.

        Args:
            verdict: the verdict.
            plan: the plan that follows from it.
        """
        if verdict is Verdict.KEEP:
            self._kept = plan
        elif verdict is Verdict.TRY:
            self._tried = plan
        else:
            self._is_on = False


def _moves(plan: Plan) -> bool:
    """Whether a plan moves anything, or holds a part of what its recomputed layers save."""
    return any(map(any, (plan.swaps, plan.optimizer_on_host, plan.weights_on_host)))
