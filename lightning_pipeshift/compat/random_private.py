"""Private names and memory layouts of NumPy's and Python's random generators.

To get the whole state of a generator for each layer would take longer than many layers take to run.
So the position of a generator in its own memory is read: whether it has moved says whether anything
was drawn. Checked with NumPy 2.4 and CPython 3.11.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any, Final

import numpy as np

NUM_WORDS: Final = 624
"""The words of a Mersenne Twister's state: its position before the first draw after a seed."""


def _python_words() -> Any:
    """The memory of Python's own generator: its position, and behind it the 624 words of the state,
    as in CPython's ``_randommodule.c``. ``None`` if that differs from ``random.getstate``.
    """
    shared: Any = getattr(random, "_inst", None)
    if type(shared) is not random.Random:
        return None
    for generator in (random.Random(0), shared):
        words = (ctypes.c_uint32 * (1 + NUM_WORDS)).from_address(
            id(generator) + object.__basicsize__
        )
        for _ in range(3 if generator is not shared else 1):
            if (*words[1:], words[0]) != generator.getstate()[1]:
                return None
            if generator is not shared:
                generator.random()
    return words


_words = _python_words()
# NumPy's global generator, and its memory: 624 words, and behind them the position.
_numpy: tuple[Any, Any] = (None, None)


def host_mark() -> Any:
    """Returns a mark of NumPy's and Python's global generators: every draw changes it. It consists
    of the positions in their states, and of a word of each, since a position comes again after 624
    words.
    """
    global _numpy
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if generator is not _numpy[0]:
        memory = None
        if isinstance(generator, np.random.MT19937):
            address = generator.ctypes.state_address
            memory = (ctypes.c_uint32 * (NUM_WORDS + 1)).from_address(address)
        _numpy = generator, memory
    words = _numpy[1]
    if words is None or _words is None:
        return object()
    return generator, words[NUM_WORDS], words[1], _words[0], _words[2]
