"""What conditions on values that are not here are taken to be, while a step is followed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

# How often a step is followed at most to find answers that it can go on with.
_MOST_TRIES = 64


class Guesses:
    """What conditions on placeholders are, by the line of code that asks."""

    def __init__(self) -> None:
        self._answers: dict[Any, bool] = {}
        self._certain: set[Any] = set()
        self._num_tries = 0

    def condition(self) -> tuple[bool, bool]:
        """The answer for the code that asks now, and whether another one ends in an exception."""
        place = _calling_line()
        return self._answers.setdefault(place, False), place in self._certain

    def revise(self) -> bool:
        """Changes the last answer that can be changed, after an exception. Returns whether there
        was one.
        """
        self._num_tries += 1
        for place in reversed(self._answers):
            if not self._answers[place] and self._num_tries < _MOST_TRIES:
                self._answers[place] = True
                self._certain.add(place)
                return True
        return False

    def unsure(self) -> list[Any]:
        """The code whose other answer has not been tried."""
        places = [place for place in self._answers if place not in self._certain]
        return places[:_MOST_TRIES]

    def with_other(self, place: Any) -> Guesses:
        """The same guesses but for one."""
        other = Guesses()
        other._answers = {**self._answers, place: not self._answers[place]}
        other._certain = set(self._certain)
        return other

    def settle(self, place: Any) -> None:
        """The other answer for some code ends in an exception."""
        self._certain.add(place)


_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_DISTRIBUTIONS = str(Path(torch.distributions.__file__).parent)


def _calling_line() -> tuple[str, int]:
    """The nearest line of code that is not ours nor torch's; checks of distributions count."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_DISTRIBUTIONS) or not name.startswith((_OURS, _TORCH)):
            return name, frame.f_lineno
        frame = frame.f_back
    return "", 0
