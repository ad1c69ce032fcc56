"""Private names and memory layouts of NumPy's and Python's random generators.

To get the whole state of a generator for each layer would take longer than many layers take to run.
So the position of a generator in its own memory is read: whether it has moved says whether anything
was drawn. Checked with NumPy 2.4 and CPython 3.11.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any, Final

import numpy as np

NUM_WORDS: Final = 624
"""The words of a Mersenne Twister's state: its position before the first draw after a seed."""


def position_of(generator: np.random.MT19937) -> ctypes.c_int:
    """The position of one of NumPy's Mersenne Twisters, in its own memory: ``value`` is up to date.

    The layout is that of NumPy's ``mt19937.h``: 624 words of 4 bytes, and then the position.
    ``generator.state`` has it, too, and copies 2.5 KB for it.
    """
    return ctypes.c_int.from_address(generator.ctypes.state_address + 4 * NUM_WORDS)


def seed_in_place(generator: np.random.MT19937, seed: int) -> None:
    """Seeds a generator as ``np.random.seed`` does the global one. NumPy has no public way to seed
    an existing generator, and to make one takes several times as long.
    """
    generator._legacy_seeding(seed)


def python_position() -> Callable[[], int]:
    """A function that returns the position of Python's own generator. It reads the generator's
    memory, where CPython's ``_randommodule.c`` has the position in front of the 624 words. If that
    differs from ``random.getstate``, it calls the latter every time.
    """
    generator = random.Random(0)
    place = ctypes.c_int.from_address(id(generator) + object.__basicsize__)
    agrees = True
    for _ in range(3):
        agrees &= place.value == generator.getstate()[1][-1]
        generator.random()
    shared: Any = getattr(random, "_inst", None)
    if not agrees or type(shared) is not random.Random:
        return lambda: random.getstate()[1][-1]
    in_use = ctypes.c_int.from_address(id(shared) + object.__basicsize__)
    return lambda: in_use.value
