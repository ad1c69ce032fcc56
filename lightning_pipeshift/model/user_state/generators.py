"""Generators of random numbers that user code keeps: their states as plain values, which can be
compared and sent.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class _Array(NamedTuple):
    """An array, or a tensor of bytes."""

    kind: str
    values: bytes


def random_state(value: Any) -> Any:
    """The state of a generator; ``None`` for any other value."""
    access = _access(value)
    return None if access is None else _plain(access[0]())


def set_random_state(value: Any, state: Any) -> None:
    """Gives a generator the state of another one of its kind.

    Args:
        value: the generator.
        state: from :func:`random_state`.
    """
    access = _access(value)
    assert access is not None, value
    access[1](_as_it_was(state))


def _access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Functions that read and write a generator's state."""
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if isinstance(value, np.random.RandomState | torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    return None


def _plain(state: Any) -> Any:
    if isinstance(state, Tensor):
        return _Array("", state.numpy().tobytes())
    if isinstance(state, np.ndarray):
        return _Array(state.dtype.str, state.tobytes())
    if isinstance(state, dict):
        return {key: _plain(entry) for key, entry in state.items()}
    return tuple(map(_plain, state)) if isinstance(state, tuple) else state


def _as_it_was(state: Any) -> Any:
    if isinstance(state, _Array):
        # A copy, which may be written to.
        values = np.frombuffer(state.values, state.kind or np.uint8).copy()
        return values if state.kind else torch.from_numpy(values)
    if isinstance(state, dict):
        return {key: _as_it_was(entry) for key, entry in state.items()}
    return tuple(map(_as_it_was, state)) if isinstance(state, tuple) else state
