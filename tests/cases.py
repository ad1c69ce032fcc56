"""Tests with many cases of one kind run part of them: all would take hours on two cores."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")

ALL_CASES = "PIPESHIFT_ALL_CASES"
"""The environment variable with which tests run all of their cases."""


def some(cases: Iterable[T], number: int) -> list[T]:
    """Cases from all over a sequence, in its order: the first, the last, and some between them. The
    same in every run; all of them where :data:`ALL_CASES` is set.

    Args:
        cases: of one test.
        number: how many, two or more.
    """
    found: Sequence[T] = list(cases)
    if ALL_CASES in os.environ or number >= len(found):
        return list(found)
    # One of each of equal parts, and not every nth: of a product of parameters, that would always
    # take the same of the last one.
    draw, num_parts = random.Random(len(found)), number - 2
    ends = [1 + part * (len(found) - 2) // max(num_parts, 1) for part in range(num_parts + 1)]
    between = [found[draw.randrange(*part)] for part in pairwise(ends)]
    return [found[0], *between, found[-1]]


def by_turns(cases: Iterable[T], turn: int, number: int) -> list[T]:
    """As :func:`some`, of a sequence that begins at another of its cases in each turn.

    Args:
        cases: of several tests.
        turn: the number of the test.
        number: how many, two or more.
    """
    found = list(cases)
    at = turn % len(found)
    return some([*found[at:], *found[:at]], number)
