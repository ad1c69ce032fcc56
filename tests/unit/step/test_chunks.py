"""Stages with several chunks of layers: steps pass waits for values, and backwards run in parts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipeshift.plan.schedule.actions import Action
from lightning_pipeshift.plan.schedule.schedules import schedule_named
from lightning_pipeshift.step.engine import Engine
from lightning_pipeshift.step.tails import Tails
from lightning_pipeshift.values.core import Core
from tests.unit.step.together import Stages

CPU = torch.device("cpu")
STAGES, MICROBATCHES, STEPS, SECONDS = 2, 4, 5, 30


# What the second layer waits for, and whether it came.
_AWAITED: list[threading.Event] = []
_CAME: list[bool] = []


class Waits(nn.Linear):
    """A layer that may wait until another stage has begun the next microbatch.

    Args:
        waits: whether it does.
    """

    def __init__(self, waits: bool) -> None:
        super().__init__(4, 4)
        self.waits = waits

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, 4)`` -> the same."""
        if self.waits and _AWAITED:
            _CAME.append(_AWAITED[0].wait(SECONDS))
        return super().forward(x).tanh()


class Chain(nn.Module):
    """Four layers, one after the other: chunks 0 and 1 of two stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Waits(at == 1) for at in range(2 * STAGES))

    def step(self, x: Tensor, _: int) -> Tensor:
        """The loss."""
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).sum()


class Residual(Chain):
    """What the first layer has returned is used behind the last one. Its gradient travels through
    the second stage, where it connects both chunks.
    """

    def step(self, x: Tensor, _: int) -> Tensor:
        """The loss."""
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return (self.layers[2](x) + first).pow(2).sum()


class Tied(Chain):
    """The layers of both chunks of the first stage have one weight."""

    def __init__(self) -> None:
        super().__init__()
        first: Any = self.layers[0]
        self.layers[2].weight = first.weight


class Hooked(Chain):
    """A hook on a gradient sees the microbatches in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def step(self, x: Tensor, _: int) -> Tensor:
        """The loss."""
        x = self.layers[0](x)
        x.register_hook(lambda gradient: self.norms.append(float(gradient.norm())))
        for layer in self.layers[1:]:
            x = layer(x)
        return x.pow(2).sum()


def batches() -> list[list[Tensor]]:
    """Of each step, one for each microbatch."""
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(3, 4, generator=generator) for _ in range(MICROBATCHES)] for _ in range(STEPS)
    ]


def plainly(kind: type[Chain]) -> tuple[Chain, list[dict[str, Tensor]]]:
    """Trains in a plain loop; returns the module, and the gradients of each step."""
    module, found = kind(), []
    for microbatches in batches():
        for batch in microbatches:
            (module.step(batch, 0) / MICROBATCHES).backward()
        found.append(taken(dict(module.named_parameters())))
    return module, found


def taken(parameters: dict[str, Any]) -> dict[str, Tensor]:
    """The gradients of parameters, which are updated."""
    found = {name: x.grad.clone() for name, x in parameters.items() if x.grad is not None}
    with torch.no_grad():
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
            parameter.grad = None
    return found


class Run:
    """A run on two stages by the interleaved schedule."""

    def __init__(self, kind: type[Chain], waits: bool = False) -> None:
        self.stages = Stages(STAGES, 0)
        self.modules = [kind() for _ in range(STAGES)]
        self.waits, self.has_begun = waits, threading.Event()
        self.actions: list[list[list[str]]] = [[] for _ in range(STAGES)]
        self.cores = [
            Core(module, list(module.layers), lambda at, _: at % STAGES, mailbox, CPU)
            for module, mailbox in zip(self.modules, self.stages.mailboxes, strict=True)
        ]
        self.gradients = self.stages.run_on(self.cores, self.work)

    def work(self, stage: int) -> list[dict[str, Tensor]]:
        """Trains on one stage; returns the gradients of each step."""
        core, module = self.cores[stage], self.modules[stage]

        @contextmanager
        def around(action: Action) -> Iterator[None]:
            self.actions[stage][-1].append(str(action))
            if stage == 0 and str(action) == "F1" and len(self.actions[stage]) == STEPS:
                self.has_begun.set()
            yield

        engine = Engine(core, Tails(core, lambda _: None), around)
        row = schedule_named("interleaved_1f1b")(STAGES, MICROBATCHES)[stage]
        found = []
        for step, microbatches in enumerate(batches()):
            self.actions[stage].append([])
            if self.waits and stage == 1 and step == STEPS - 1:
                _AWAITED.append(self.has_begun)
            engine.run(step, microbatches, module.step, row)
            found.append(taken(core.held()))
        return found


@pytest.mark.parametrize("kind", [Chain, Residual, Tied, Hooked])
def test_gradients_are_those_of_a_plain_loop(kind: type[Chain]) -> None:
    plain, expected = plainly(kind)
    run = Run(kind)
    for step, theirs in enumerate(expected):
        found = {name: x for stage in run.gradients for name, x in stage[step].items()}
        assert found.keys() == theirs.keys()
        assert all(torch.equal(found[name], x) for name, x in theirs.items())
    if isinstance(plain, Hooked):
        first: Any = run.modules[0]
        assert first.norms == plain.norms


def test_a_stage_begins_the_next_microbatch_while_it_waits_for_a_value() -> None:
    try:
        Run(Chain, waits=True)
        assert _CAME == [True] * MICROBATCHES
    finally:
        _AWAITED.clear()
        _CAME.clear()


@pytest.mark.parametrize(
    ("kind", "num_parts"), [(Chain, (2, 2)), (Residual, (2, 1)), (Tied, (1, 2)), (Hooked, (1, 1))]
)
def test_backwards_run_in_parts_where_no_gradient_connects_them(
    kind: type[Chain], num_parts: tuple[int, int]
) -> None:
    run = Run(kind)
    for stage, count in enumerate(num_parts):
        own = [action for action in run.actions[stage][-1] if action.startswith("B")]
        assert len(own) == count * MICROBATCHES
