"""Lets a step run without leaving anything behind on the modules."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_DEPTH = 2


@contextmanager
def preserved(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which modules have copies of their attributes; the originals come back after it.

    Copied are tensors that are no parameters, and lists, dicts, sets and deques, so that what is
    appended, counted, cached or written in place is lost. Other objects are shared.
    """
    originals = [(module, dict(module.__dict__)) for module in modules]
    try:
        for module, attributes in originals:
            for name, value in attributes.items():
                module.__dict__[name] = _copied(value, _DEPTH)
        yield
    finally:
        for module, attributes in originals:
            module.__dict__.clear()
            module.__dict__.update(attributes)


def _copied(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else value.detach().clone()
    if type(value) is dict and depth:
        return {key: _copied(entry, depth - 1) for key, entry in value.items()}
    if type(value) in (list, deque) and depth:
        fresh = copy.copy(value)
        for place, entry in enumerate(value):
            fresh[place] = _copied(entry, depth - 1)
        return fresh
    if isinstance(value, dict | list | set | deque):
        return copy.copy(value)
    return value
