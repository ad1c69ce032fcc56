"""Keeps each decision until its plan is in force or refused: only then is it announced, and only
of a plan in force is the gain measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.runtime.planning.move_decision import Decision
from lightning_pipeshift.timeline.outcomes import Outcome


class _InForce(NamedTuple):
    """A plan whose gain is to be measured, and the seconds of a step before it."""

    before: float
    expected_gain: float


class Decisions:
    """The decisions of a run, on one rank.

    Args:
        say: shows a message to the user after the step.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._accepted: Decision | None = None
        self._in_force: _InForce | None = None
        self._reasons: set[str] = set()
        self.step = 0
        """The number of the current step, from 0."""
        self.outcomes: list[Outcome] = []
        """In the order in which they became known."""

    def accept(self, found: Decision) -> None:
        """Takes a decision of the first rank. If it changes the plan, :meth:`came_into_force` or
        :meth:`refuse` follows.
        """
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
        # Measurements of the plan before do not count for this one.
        self._in_force = None
        if found is None or not is_last:
            return
        if not Plan.from_json(found.plan).is_like(plan):
            self.refuse("other moves were asked for meanwhile")
            return
        self._accepted = None
        self._say(found.message)
        if found.took is not None:
            self._in_force = _InForce(found.took, found.expected_gain)
            self._note(found.took, expected_gain=found.expected_gain)

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
        although = ""
        if found is not None and found.took is not None:
            although = (
                f", although a step was expected to become {found.expected_gain:.2f} times as fast"
            )
            self._note(found.took, refused_gain=found.expected_gain, reason=reason)
        self._say(f"the plan stays{although}: {reason.rstrip('.')}.")

    @property
    def awaits_gain(self) -> bool:
        """Whether the gain of the plan in force is still to be measured."""
        return self._in_force is not None

    def measured(self, took: float | None) -> None:
        """Takes the seconds of a step under the plan in force; ``None``: they are not known."""
        found, self._in_force = self._in_force, None
        if found is None or took is None:
            return
        gain = found.before / took
        self._note(took, measured_gain=gain)
        self._say(
            f"a step takes {took:.3g} s since the layers have changed their owners, and took"
            f" {found.before:.3g} s before: {gain:.2f} times as fast,"
            f" {found.expected_gain:.2f} times was expected."
        )

    def _note(self, seconds: float, reason: str = "", **gain: float) -> None:
        self.outcomes.append(Outcome(self.step, seconds, reason=reason, **gain))
