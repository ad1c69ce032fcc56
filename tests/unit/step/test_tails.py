"""Steps that run ahead of a read find what a plain loop would find, or end with an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_pipeshift.plan.schedule.schedules import schedule_named
from lightning_pipeshift.step.engine import Engine
from lightning_pipeshift.step.suspension import seed_generators
from lightning_pipeshift.step.tails import Tails
from lightning_pipeshift.values.core import Core
from tests.unit.step.together import StageError, Stages

CPU = torch.device("cpu")
MICROBATCHES, STEPS, ORDERS = 4, 6, 2
LATE = 3 * MICROBATCHES - 1
"""From the first microbatch of a step on, which the others of the step run ahead of."""


class Scaled(nn.Linear):
    """A layer with a setting."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, 4)`` -> the same."""
        return super().forward(x) * self.scale


class Base(nn.Module):
    """Three layers, and notes of what the steps found."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Scaled(4, 4) for _ in range(3))
        self.first: Any = self.layers[0]
        self.count, self.noted = 0, list[Any]()
        self.items: list[Any] = []
        self.register_buffer("mean", torch.ones(()))
        self.generator = np.random.default_rng(1)

    def net(self, x: Tensor) -> Tensor:
        """The loss."""
        for layer in self.layers:
            x = layer(x).tanh()
        return x.pow(2).sum()

    def step(self, x: Tensor, number: int) -> Any:
        """The step of a microbatch; ``number`` counts them over all steps."""
        raise NotImplementedError


class Length(Base):
    """A list's length in front, and an element in the line of the read."""

    def step(self, x: Tensor, number: int) -> Any:
        length = len(self.items)
        loss = self.net(x)
        self.items.append(loss.item())
        self.noted.append((number, length))
        return loss


class Alias(Base):
    """An object is got in front, and changed behind under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = SimpleNamespace(n=0)
        self.both = {"meter": self.meter}

    def step(self, x: Tensor, number: int) -> Any:
        meter, found = self.meter, self.both["meter"].n
        loss = self.net(x)
        meter.n += int(loss.item() > 0)
        self.noted.append((number, found))
        return loss


class Mean(Base):
    """A buffer of the module, changed in place."""

    mean: Tensor

    def step(self, x: Tensor, number: int) -> Any:
        loss = self.net(x * self.mean.clone())
        self.mean.mul_(0.9).add_(0.1 * loss.item())
        return loss


class Centers(Base):
    """A buffer of the module that has become a value, written to by index behind a read."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(2))

    def step(self, x: Tensor, number: int) -> Any:
        for layer in self.layers:
            x = layer(x).tanh()
        factor = self.mean.sum()
        at = int(x.mean().item() > 0)
        self.mean[at] = 0.9 * self.mean[at] + 0.1 * x.detach().mean()
        return (x * factor).pow(2).sum()


class Draws(Base):
    """A generator of the module."""

    def step(self, x: Tensor, number: int) -> Any:
        factor = self.generator.random()
        loss = self.net(x * factor)
        loss.item()
        self.noted.append((number, factor, self.generator.random()))
        return loss


class InFunctions(Base):
    """State that only functions in attributes refer to."""

    def __init__(self) -> None:
        super().__init__()
        counts = [0]
        self.size, self.add = lambda: len(counts), counts.append

    def step(self, x: Tensor, number: int) -> Any:
        size = self.size()
        loss = self.net(x)
        self.add(int(loss.item() > 0))
        self.noted.append((number, size))
        return loss


class Appends(Base):
    """A list grows from some step on only."""

    def step(self, x: Tensor, number: int) -> Any:
        length = len(self.items)
        loss = self.net(x)
        if loss.item() > 0 and number > LATE:
            self.items.append(number)
        self.noted.append((number, length))
        return loss


class Metrics(Base):
    """A metric is computed in front and updated behind."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def step(self, x: Tensor, number: int) -> Any:
        mean = float(self.metric.compute()) if number else 0.0
        loss = self.net(x)
        self.metric.update(loss.item())
        self.noted.append((number, mean))
        return loss


class Several(Base):
    """Another number of reads for each microbatch, and none; an attribute comes and goes."""

    def step(self, x: Tensor, number: int) -> Any:
        found = self.count, hasattr(self, "flag")
        loss = self.net(x)
        if number % 3 == 1:
            self.count += 10
            return None
        if loss.item() and number % 2:
            self.count += int((2 * loss).item() > 0)
            self.flag = number
        elif hasattr(self, "flag"):
            del self.flag
        self.noted.append((number, found))
        return loss


class Middle(Base):
    """Reads a value of the middle stage, too."""

    def step(self, x: Tensor, number: int) -> Any:
        found = self.count
        y = self.layers[1](self.layers[0](x).tanh()).tanh()
        factor = 1.1 if y.sum().item() > 0 else 1.0
        self.count += 1
        loss = self.layers[2](y * factor).pow(2).sum()
        self.noted.append((number, found, loss.item(), self.count))
        return loss


class ManyReads(Base):
    """More parts than are told apart."""

    def step(self, x: Tensor, number: int) -> Any:
        y = self.layers[1](self.layers[0](x).tanh()).tanh()
        for at in range(33):
            self.count = self.count // 2 + int(100 * y.flatten()[at % 12].item())
        loss = self.layers[2](y).pow(2).sum()
        self.noted.append((number, loss.item(), self.count))
        return loss


class SetsLayer(Base):
    """An attribute of a layer is set behind the read."""

    def step(self, x: Tensor, number: int) -> Any:
        loss = self.net(x)
        self.first.scale = 1 + 0.1 * (loss.item() % 1)
        return loss


class Evaluates(Base):
    """The modules' mode changes behind the layers, and back behind the read."""

    def step(self, x: Tensor, number: int) -> Any:
        loss = self.net(x)
        self.eval()
        with torch.no_grad():
            self.noted.append((number, self.net(x).item()))
        self.train()
        return loss


class Hooks(Base):
    """A hook for one call of a layer, which is called behind the read, too."""

    def hooked(self) -> nn.Module:
        """What has the hook."""
        return self.layers[0]

    def step(self, x: Tensor, number: int) -> Any:
        taken: list[Tensor] = []
        late = self.layers[2](x).tanh()
        handle = self.hooked().register_forward_hook(lambda *found: taken.append(found[-1]))
        loss = self.hooked()(late).pow(2).sum()
        handle.remove()
        if self.layers[1](x).mean().item() > -100:
            loss = loss + self.hooked()(x).pow(2).sum()
        self.noted.append((number, len(taken)))
        return loss + taken[0].sum()


class HooksAround(Hooks):
    """As Hooks, with a hook on a module around a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.around = Around(self.layers[0])

    def hooked(self) -> nn.Module:
        return self.around


class Around(nn.Module):
    """Calls a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        """``(batch, 4)`` -> the same."""
        return self.layer(x)


RIGHT = [
    Length,
    Alias,
    Mean,
    Centers,
    Draws,
    InFunctions,
    Appends,
    Metrics,
    Several,
    Middle,
    ManyReads,
]
# In these no step may run ahead.
IN_TURN = [SetsLayer, Evaluates, Hooks, HooksAround]


class SetsLayerLate(Base):
    """As SetsLayer, from some step on only."""

    def step(self, x: Tensor, number: int) -> Any:
        loss = self.net(x)
        if loss.item() > 0 and number > LATE:
            self.first.scale = 1.1
        return loss


class WritesLate(Base):
    """A parameter is written to behind the read, from some step on only."""

    def step(self, x: Tensor, number: int) -> Any:
        loss = self.net(x)
        if loss.item() > 0 and number > LATE:
            with torch.no_grad():
                self.first.bias.mul_(0.9)
        return loss


class SetsLate(Base):
    """What the next step's begin uses is set in a way that nothing tells before."""

    def step(self, x: Tensor, number: int) -> Any:
        loss = self.net(x * (1 + self.count))
        if loss.item() > 0 and number > LATE:
            setattr(self, "cou" + "nt", number)
        return loss


def batches() -> list[list[Tensor]]:
    """Of all steps."""
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(3, 4, generator=generator) for _ in range(MICROBATCHES)] for _ in range(STEPS)
    ]


def end_step(parameters: Any) -> None:
    """Updates parameters."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
            parameter.grad = None


def plainly(kind: type[Base]) -> Base:
    """Trains in a plain loop."""
    module = kind()
    for step, microbatches in enumerate(batches()):
        for turn, batch in enumerate(microbatches):
            seed_generators(CPU, "step", 0, step, turn)
            loss = module.step(batch, step * MICROBATCHES + turn)
            if loss is not None:
                (loss / MICROBATCHES).backward()
        end_step(module.parameters())
    return module


def on_stages(
    kind: type[Base], order: int, schedule: str = "1f1b"
) -> tuple[list[Base], dict[str, Tensor], int]:
    """Trains on three stages, or on two of which the first has two chunks of layers; returns the
    modules, the parameters, and how many runs of the first stage were allowed to run ahead.
    """
    count = 3 if schedule == "1f1b" else 2
    stages = Stages(count, order)
    modules = [kind() for _ in range(count)]
    cores = [
        Core(module, list(module.layers), lambda at, _: at % count, mailbox, CPU)
        for module, mailbox in zip(modules, stages.mailboxes, strict=True)
    ]
    ahead = [0] * count

    def work(stage: int) -> dict[str, Tensor]:
        core, module = cores[stage], modules[stage]
        tails = Tails(core, lambda _: None)
        engine = Engine(core, tails)
        row = schedule_named(schedule)(count, MICROBATCHES)[stage]
        for step, microbatches in enumerate(batches()):

            def run(batch: Tensor, turn: int, step: int = step) -> Any:
                ahead[stage] += tails.may_run_ahead
                return module.step(batch, step * MICROBATCHES + turn)

            engine.run(step, microbatches, run, row)
            end_step(core.held().values())
        return {name: x.detach().clone() for name, x in core.held().items()}

    held = stages.run_on(cores, work)
    return modules, {name: x for each in held for name, x in each.items()}, ahead[0]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("kind", [*RIGHT, *IN_TURN])
def test_a_step_finds_what_it_would_find_in_a_plain_loop(kind: type[Base], schedule: str) -> None:
    expected = plainly(kind)
    for order in range(ORDERS):
        modules, parameters, ahead = on_stages(kind, order, schedule)
        for name, parameter in expected.named_parameters():
            assert torch.equal(parameters[name], parameter), name
        assert all(module.noted == expected.noted for module in modules)
        assert bool(ahead) is (kind not in IN_TURN)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("kind", [SetsLayerLate, WritesLate, SetsLate])
def test_what_no_step_has_done_before_is_an_error(kind: type[Base], schedule: str) -> None:
    expected, said = plainly(kind), []
    for order in range(4):
        try:
            _, parameters, _ = on_stages(kind, order, schedule)
        except StageError as error:
            said.append(str(error))
        else:
            # No step was ahead.
            for name, parameter in expected.named_parameters():
                assert torch.equal(parameters[name], parameter), name
    assert any("No step has done so" in each for each in said)
