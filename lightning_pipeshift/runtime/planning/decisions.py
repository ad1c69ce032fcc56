"""Keeps each decision until its plan is in force or refused: only then is it announced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.runtime.planning.move_decision import Decision
from lightning_pipeshift.timeline.outcomes import REFUSED, Change


class Decisions:
    """The decisions of a run, on one rank. All ranks have the same ones, with the first rank's
    figures.

    Args:
        say: shows a message to the user after the step.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._accepted: Decision | None = None
        self._reasons: set[str] = set()
        self.step = 0
        """The number of the current step, from 0."""
        self.changes: list[Change] = []
        """The automatic changes, in the order in which they came into force or were refused."""

    def accept(self, found: Decision) -> None:
        """Takes a decision of the first rank. If it changes the plan, :meth:`came_into_force` or
        :meth:`refuse` follows.
        """
        if found.judged is not None and self.changes:
            self.changes[-1] = replace(found.judged, step=self.changes[-1].step)
            self._say(f"{self.changes[-1]}.")
        if found.is_new:
            self._accepted = found
        elif found.message:
            self._say(found.message)

    def came_into_force(self, plan: Plan, is_last: bool) -> None:
        """Called when a plan has come into force, whoever has asked for it.

        Args:
            plan: the plan.
            is_last: whether no other plan is to follow it.
        """
        found = self._accepted
        if found is None or not is_last:
            return
        if not Plan.from_json(found.plan).is_like(plan):
            self.refuse("other moves were asked for meanwhile")
            return
        self._accepted = None
        self._say(found.message)
        if found.change is not None:
            self.changes.append(replace(found.change, step=self.step))

    def refuse(self, reason: str) -> None:
        """Called when a plan that was asked for does not come into force.

        Args:
            reason: why, as a sentence. Plans may be refused for the same one again and again: that
                is said once.
        """
        found, self._accepted = self._accepted, None
        if reason in self._reasons:
            return
        self._reasons.add(reason)
        reason = reason.rstrip(".")
        if found is None or found.change is None:
            self._say(f"the plan stays: {reason}.")
            return
        self.changes.append(replace(found.change, step=self.step, verdict=REFUSED, reason=reason))
        self._say(f"the plan stays; {self.changes[-1]}.")
