"""Guesses for conditions on values that this stage does not have, while a step is traced."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from lightning_pipeshift.files import PACKAGE

# How often a step is traced at most to find answers with which it does not fail.
_MOST_TRIES = 64
# How often a line is asked with one answer before another answer is tried: the guess does not
# change, so a loop that waits for the other answer never ends.
_MOST_READS = 64


class _EndlessError(Exception):
    """A loop may wait for another answer than the guess."""


class Guesses:
    """The guessed conditions on placeholders, by the line of code that evaluates them."""

    def __init__(self) -> None:
        self._answers: dict[Any, bool] = {}
        self._certain: set[Any] = set()
        self._num_tries = 0
        self._num_reads: Counter[Any] = Counter()
        self._endless: list[Any] = []
        self._loops: dict[Any, set[bool]] = {}
        """By line that was read too often, with which answers. With both: it may go on."""

    def begin(self) -> None:
        """Called before the step is traced, which may be again."""
        self._num_reads.clear()

    def condition(self) -> tuple[bool, bool]:
        """The guess for the calling line of code, and whether the opposite ends in an exception."""
        place = _calling_line()
        answer = self._answers.setdefault(place, False)
        self._num_reads[place] += 1
        if self._num_reads[place] > _MOST_READS and len(self._loops.get(place, ())) < 2:
            self._loops.setdefault(place, set()).add(answer)
            self._endless.append(place)
            raise _EndlessError(f"{place[0]!r}, line {place[1]}, is repeated without end.")
        return answer, place in self._certain

    def revise(self) -> bool:
        """After an exception: changes the last answer that can be changed. Returns whether there
        was such an answer.
        """
        self._num_tries += 1
        if self._endless:
            place = self._endless[-1]
            self._endless.clear()
            self._answers[place] = not self._answers[place]
            return True
        for place in reversed(self._answers):
            if not self._answers[place] and self._num_tries < _MOST_TRIES:
                self._answers[place] = True
                self._certain.add(place)
                return True
        return False

    def unsure(self) -> list[Any]:
        """The lines of code whose opposite answer has not been tried."""
        places = [
            place
            for place in self._answers
            if place not in self._certain and len(self._loops.get(place, ())) != 1
        ]
        return places[:_MOST_TRIES]

    def with_other(self, place: Any) -> Guesses:
        """The same guesses with the opposite answer at one line of code."""
        other = self.copy()
        other._answers[place] = not self._answers[place]
        # What is found of loops counts for these guesses, too.
        other._endless, other._loops = self._endless, self._loops
        self._endless.clear()
        return other

    def copy(self) -> Guesses:
        """The same guesses."""
        other = Guesses()
        other._answers, other._certain = dict(self._answers), set(self._certain)
        other._loops = {place: set(found) for place, found in self._loops.items()}
        return other

    def settle(self, place: Any) -> None:
        """Records that the opposite answer at a line of code raises an exception. A loop that never
        ends with a guess ends with values: that says nothing.
        """
        if not self._endless:
            self._certain.add(place)


_OURS = str(PACKAGE)
_TORCH = str(Path(torch.__file__).parent)
_DISTRIBUTIONS = str(Path(torch.distributions.__file__).parent)


def _calling_line() -> tuple[str, int]:
    """The innermost line of code outside of PipeShift and torch, or in ``torch.distributions``."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_DISTRIBUTIONS) or not name.startswith((_OURS, _TORCH)):
            return name, frame.f_lineno
        frame = frame.f_back
    return "", 0
