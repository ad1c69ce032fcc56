"""Hooks of ours, beside code that refuses any."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import top_saved_hooks
from lightning_pipeshift.model.saved.hooks import saving


def cubes(x: Tensor) -> Tensor:
    return (x**3).sum()


def counted(saved: list[Tensor]) -> Any:
    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    return saving(pack, lambda tensor: tensor)


@pytest.mark.parametrize("depth", [1, 3])
def test_torch_func_runs_and_hooks_are_back_behind_it(depth: int) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    saved: list[list[Tensor]] = [[] for _ in range(depth)]

    def inside(level: int) -> Tensor:
        if level < depth:
            with counted(saved[level]):
                return inside(level + 1)
        gradient = torch.func.grad(cubes)(x)
        assert len(saved[-1]) == 0
        # A graph of the outer level goes through it, too.
        return (x.exp() * gradient).sum()

    y = inside(0)
    assert top_saved_hooks() is None
    # The innermost hooks alone are asked: for the exponential, and for both factors.
    assert [len(one) for one in saved] == [0] * (depth - 1) + [3]
    y.backward()
    with torch.no_grad():
        expected = x.exp() * 3 * x**2 + x.exp() * 6 * x
    assert x.grad is not None
    assert torch.allclose(x.grad, expected)


def test_hooks_of_the_users_own_are_still_refused() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    theirs = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with counted([]), theirs, pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(cubes)(x)
    with theirs, counted([]), pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(cubes)(x)
    assert top_saved_hooks() is None


def test_nothing_is_left_behind() -> None:
    before = torch.autograd.graph.disable_saved_tensors_hooks

    def fails() -> None:
        with counted([]), counted([]):
            assert torch.autograd.graph.disable_saved_tensors_hooks is not before
            torch.func.grad(lambda x: x / (1 // 0))(torch.ones(()))

    with pytest.raises(ZeroDivisionError):
        fails()
    assert torch.autograd.graph.disable_saved_tensors_hooks is before
    assert top_saved_hooks() is None


def test_threads_have_hooks_of_their_own() -> None:
    found: list[Any] = []

    def other() -> None:
        x = torch.ones(2, requires_grad=True)
        found.append(top_saved_hooks())
        found.append(torch.func.grad(cubes)(x))
        saved: list[Tensor] = []
        with counted(saved):
            x.exp()
        found.append(len(saved))

    with counted([]):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert top_saved_hooks() is not None
    assert found[0] is None
    assert found[1].tolist() == [3.0, 3.0]
    assert found[2] == 1
