"""Guesses for conditions on values that this stage does not have, while a step is traced."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from lightning_pipeshift.files import PACKAGE

# How often a step is traced at most to find answers with which it does not fail.
_MOST_TRIES = 64


class Guesses:
    """The guessed conditions on placeholders, by the line of code that evaluates them."""

    def __init__(self) -> None:
        self._answers: dict[Any, bool] = {}
        self._certain: set[Any] = set()
        self._num_tries = 0

    def condition(self) -> tuple[bool, bool]:
        """The guess for the calling line of code, and whether the opposite ends in an exception."""
        place = _calling_line()
        return self._answers.setdefault(place, False), place in self._certain

    def revise(self) -> bool:
        """After an exception: changes the last answer that can be changed. Returns whether there
        was such an answer.
        """
        self._num_tries += 1
        for place in reversed(self._answers):
            if not self._answers[place] and self._num_tries < _MOST_TRIES:
                self._answers[place] = True
                self._certain.add(place)
                return True
        return False

    def unsure(self) -> list[Any]:
        """The lines of code whose opposite answer has not been tried."""
        places = [place for place in self._answers if place not in self._certain]
        return places[:_MOST_TRIES]

    def with_other(self, place: Any) -> Guesses:
        """The same guesses with the opposite answer at one line of code."""
        other = self.copy()
        other._answers[place] = not self._answers[place]
        return other

    def copy(self) -> Guesses:
        """The same guesses."""
        other = Guesses()
        other._answers, other._certain = dict(self._answers), set(self._certain)
        return other

    def settle(self, place: Any) -> None:
        """Records that the opposite answer at a line of code raises an exception."""
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
