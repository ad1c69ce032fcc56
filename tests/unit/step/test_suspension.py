"""A step that is suspended finds its thread as it left it, and the others do not see its state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from greenlet import getcurrent, greenlet
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pipeshift.step.suspension import ThreadState, kept, seed_generators

CPU = torch.device("cpu")


class Functions(TorchFunctionMode):
    """Counts functions."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def seen() -> tuple[Any, ...]:
    """What code in this thread sees."""
    product = torch.ones(2, 2) @ torch.ones(2, 2)
    return (
        torch.is_grad_enabled(),
        product.dtype,
        torch.get_default_dtype(),
        torch.rand(1).item(),
        random.random(),
        np.random.rand(),
    )


def suspended() -> None:
    """Waits for another step."""
    state = ThreadState(CPU)
    getcurrent().parent.switch()  # type: ignore[union-attr]
    state.restore()


def step(number: int, log: list[Any], waits: bool) -> None:
    """Sets all there is to set, and waits in the middle."""
    seed_generators(CPU, "a", number)
    saved: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(number)
        return x

    functions, operations = Functions(), Operations()
    grad = torch.no_grad() if number else torch.enable_grad()
    with (
        functions,
        operations,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=number > 0),
        grad,
    ):
        log.append((number, seen()))
        if waits:
            suspended()
        before = functions.count, operations.count
        (torch.ones(2, requires_grad=True) * 2).exp()
        log.append((number, seen(), functions.count > before[0], operations.count > before[1]))
        log.append((number, list(saved)))


def test_steps_that_take_turns_see_what_they_see_alone() -> None:
    alone: list[Any] = []
    with kept(CPU):
        step(0, alone, waits=False)
        step(1, alone, waits=False)
    together: list[Any] = []
    outside = seen()
    with kept(CPU):
        before = seen()
        first, second = (
            greenlet(lambda number=number: step(number, together, waits=True)) for number in (0, 1)
        )
        first.switch()
        second.switch()
        first.switch()
        second.switch()
        assert first.dead
        assert second.dead
        assert torch.is_grad_enabled() == before[0]
    assert sorted(together, key=str) == sorted(alone, key=str)
    # The generators go on where they were, and nothing of the steps is left.
    assert seen() == before
    assert outside[:3] == before[:3]


def test_modes_around_a_run_are_there_once_behind_it() -> None:
    with Functions() as functions:
        with kept(CPU):
            ThreadState(CPU).restore()
        before = functions.count
        torch.ones(2).sin()
        once = functions.count - before
    torch.ones(2).sin()
    assert functions.count == before + once
    assert once == 2


def test_without_the_state_a_step_would_see_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadState, "__init__", lambda *_: None)
    monkeypatch.setattr(ThreadState, "restore", lambda _: None)
    with pytest.raises(AssertionError):
        test_steps_that_take_turns_see_what_they_see_alone()
