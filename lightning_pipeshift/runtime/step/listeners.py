"""An interface for those who take an interest in the actions of a stage."""

from __future__ import annotations

from lightning_pipeshift.plan.schedule.actions import Action, Row


class ActionListener:
    """Is told of the actions of a stage, in the steps for which it is registered. A step without
    listeners calls none.
    """

    def begin_step(self, row: Row) -> None:
        """The stage begins a row.

        Args:
            row: its actions; in an asynchronous pipeline also those of the next rows, until the
                backwards of all microbatches that are in flight after it.
        """

    def begin_action(self, place: int, action: Action) -> None:
        """An action begins.

        Args:
            place: its index in the row.
            action: the action.
        """

    def end_action(self, action: Action) -> None:
        """An action is over."""
