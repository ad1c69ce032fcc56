"""Decides when a rank that got a signal stops waiting.

Python's handler runs only when the wait is over, and after a SIGTERM the run is to end in order,
after a step that may never be complete.
"""

from __future__ import annotations

import atexit
import gc
import json
import signal
from collections.abc import Callable, Mapping
from typing import Any, Final

from lightning_pipeshift.runtime.liveness.stalls import standstill_text
from lightning_pipeshift.text import capitalised

LOOKS_EVERY_SECONDS: Final = 0.25
"""How often to look after a signal."""

# How long after a signal this rank may still wait without a sign that the run continues. With the
# respite after an error, a waiting rank ends within 5 s, whatever it waits for.
_SIGNAL_SECONDS: Final[dict[int, float]] = {signal.SIGINT: 0.5, signal.SIGTERM: 2.0}


class SignalWatch:
    """Detects that nothing goes on after a signal.

    Args:
        rank: this one.
    """

    def __init__(self, rank: int) -> None:
        self.number: int | None = None
        """The signal that this rank got, if it may still have to end a wait for it."""
        self._rank = rank
        self._ends_in_order = False
        # What each rank does, the last sign of progress, and when it was seen.
        self._found: dict[int, Any] = {}
        self._sign: Any = None
        self._moved_at = 0.0

    def begin(self) -> None:
        """Begins another run."""
        self.number, self._ends_in_order = None, False

    def end_in_order(self) -> None:
        """Called when all ranks know that the run ends because of a SIGTERM."""
        # In this order: another signal may be heard meanwhile.
        self._ends_in_order = True
        self.number = None

    def hear(self, number: int, now: float) -> bool:
        """Notes a signal; returns whether it is one to look after, and the first.

        Args:
            number: of the signal.
            now: the time.
        """
        is_known = self.number is not None or (self._ends_in_order and number == signal.SIGTERM)
        if number not in _SIGNAL_SECONDS or is_known:
            return False
        self.number, self._moved_at = number, now
        # Python's last search for garbage takes longer than all else of an end.
        atexit.register(gc.freeze)
        return True

    def look(
        self,
        waits: tuple[int | None, float] | None,
        mine: Mapping[str, Any],
        answers: Mapping[int, str],
        num_done: int,
        name_of: Callable[[int], str],
        now: float,
    ) -> tuple[str, BaseException] | None:
        """Returns why this rank ends its wait, and what the wait raises then; ``None`` if it goes
        on. Called again and again after a signal.

        Args:
            waits: the rank that this rank waits for (``None``: several), and since when.
            mine: this rank's activity, see :meth:`FailureBoard.activity`.
            answers: those of the other ranks, as JSON.
            num_done: how many actions all ranks have completed.
            name_of: a rank's name in words.
            now: the time.
        """
        number = self.number
        self._found |= {rank: json.loads(text) for rank, text in answers.items() if text}
        self._found[self._rank] = mine
        # In waits for several ranks, the time changes without progress. A long action of another
        # rank goes from layer to layer.
        known = waits if waits is not None and waits[0] is not None else None
        layers = {rank: (one["action"], one["layer"]) for rank, one in self._found.items()}
        sign = num_done, known, layers
        if waits is None or sign != self._sign:
            self._sign, self._moved_at = sign, now
        seconds = now - self._moved_at
        if number is None or seconds < _SIGNAL_SECONDS[number]:
            return None
        is_term = number == signal.SIGTERM
        error = SystemExit(128 + number) if is_term else KeyboardInterrupt()
        reason = (
            f"{capitalised(name_of(self._rank))} got {signal.Signals(number).name}, and ends its"
            f" wait, as no rank has completed anything for {seconds:.1f} s."
            f" {standstill_text(self._found, name_of)}"
        )
        return reason, error
