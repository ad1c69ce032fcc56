"""Layers whose calls differ from the run on fake tensors, or that write to what is on its way: on
two stages they train the bits of one, or end with an error.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from lightning_pipeshift.plan.schedule.schedules import schedule_named
from lightning_pipeshift.step.engine import Engine
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.value import Value
from tests.unit.step.together import StageError, Stages

SIZE, NUM_STEPS, NUM_MICROBATCHES = 8, 3, 3
outside = {"rate": 0.0}


class Layer(nn.Module):
    linear: Any

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)


class Model(nn.Module):
    """Three layers.

    Args:
        make: makes each.
        owners: their stages, where there are two.
    """

    layers: Any

    def __init__(self, make: Callable[[], nn.Module], owners: tuple[int, ...] = (0, 1, 1)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.owners = owners

    def step(self, x: Tensor, _: int) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()

    def after(self, step: int) -> None:
        """Called between two steps."""


def _owner(owners: tuple[int, ...], number: int, _: int) -> int:
    return owners[number]


def trained(make: Callable[[], Model], num_stages: int, order: int = 0) -> tuple[Any, list[Core]]:
    """The losses, and the gradients of all parameters, of some steps."""
    stages, models, cores = Stages(num_stages, order), [], []
    outside["rate"] = 0.0
    for mailbox in stages.mailboxes:
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        model = make()
        owners = model.owners if num_stages > 1 else (0, 0, 0)
        core = Core(
            model,
            list(model.layers),
            partial(_owner, owners),
            mailbox,
            torch.device("cpu"),
        )
        models.append(model)
        cores.append(core)
    generator = torch.Generator().manual_seed(5)
    batches = [
        [torch.randn(4, SIZE, generator=generator) for _ in range(NUM_MICROBATCHES)]
        for _ in range(NUM_STEPS)
    ]

    def here(x: Tensor, stage: int) -> list[float] | None:
        if isinstance(x, Value):
            return x.account.tensor.tolist() if x.account.owner == stage else None  # type: ignore[union-attr]
        return x.tolist()

    def work(stage: int) -> tuple[list[Any], dict[str, Any]]:
        model, core = models[stage], cores[stage]
        losses, gradients = [], {}
        for step, parts in enumerate(batches):
            row = schedule_named("1f1b")(num_stages, len(parts))[stage]
            found = Engine(core).run(step, parts, model.step, row)
            losses.append([here(x, stage) for x in found])
            for name, parameter in core.held().items():
                gradients[f"{step} {name}"] = (
                    None if parameter.grad is None else parameter.grad.tolist()
                )
            model.zero_grad()
            model.after(step)
        return losses, gradients

    ranks = stages.run_on(cores, work)
    losses = [
        [next(x for x in each if x is not None) for each in zip(*steps, strict=True)]
        for steps in zip(*(losses for losses, _ in ranks), strict=True)
    ]
    return (losses, {name: x for _, found in ranks for name, x in found.items()}), cores


def require_one_program(make: Callable[[], Model], order: int = 0) -> None:
    one, _ = trained(make, 1)
    two, _ = trained(make, 2, order)
    assert two == one


# --- draws that the run on fake tensors does not show ---


class DrawsByItsValues(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(functional.dropout(x, 0.3) if x.sum() > 0 else x)


class InitializesItsCodes(Layer):
    is_ready: Tensor
    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_ready", torch.zeros(1))
        self.register_buffer("codes", torch.zeros(4, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            self.codes.data.copy_(x.detach()[torch.randperm(4)])
            self.is_ready.fill_(1.0)
        return self.linear(x) + self.codes


class DrawsAtRandom(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(functional.dropout(x, 0.3) if random.random() < 0.3 else x)


class AsksAGlobal(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(functional.dropout(x, outside["rate"]))


class RaisesTheRate(Model):
    def after(self, step: int) -> None:
        outside["rate"] = 0.3


@pytest.mark.parametrize(
    "make",
    [
        lambda: Model(DrawsByItsValues),
        lambda: Model(InitializesItsCodes),
        lambda: Model(DrawsAtRandom),
        lambda: RaisesTheRate(AsksAGlobal),
    ],
)
def test_draws_come_from_the_layers_stream(make: Callable[[], Model]) -> None:
    require_one_program(make)


# --- what changes between steps, and recurrent layers ---


class PrunesTheFrozen(Model):
    def after(self, step: int) -> None:
        if not step:
            for layer in self.layers:
                layer.linear.weight.requires_grad_(False)
                prune.l1_unstructured(layer.linear, "weight", 0.3)


class Deepens(Layer):
    more: Any

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.more(self.linear(x))


class DeepensLater(Model):
    def after(self, step: int) -> None:
        for layer in self.layers:
            layer.more = nn.Sequential(nn.Tanh(), nn.Tanh())
            layer.note = 1


@pytest.mark.parametrize("make", [lambda: PrunesTheFrozen(Layer), lambda: DeepensLater(Deepens)])
def test_layers_that_are_changed_between_steps(make: Callable[[], Model]) -> None:
    require_one_program(make)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(SIZE, SIZE, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None])[0][:, 0]


def test_recurrent_layers_have_contracts() -> None:
    def make() -> Model:
        return Model(Recurrent)

    require_one_program(make)
    _, cores = trained(make, 2)
    assert all(contract is not None for contract, *_ in cores[0].known.contracts.values())


# --- writes to what another stage uses ---


class Queue(Layer):
    """Its buffer does not fit into the frame of a message."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(64, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.queue[:4].copy_(x.detach())
            self.queue.mul_(0.9)
        return self.linear(x)


class LooksIntoTheQueue(Model):
    def step(self, x: Tensor, _: int) -> Tensor:
        first, second, third = self.layers
        y = second(x)
        found = (y.detach() @ first.queue.t()).mean()
        return third(y).pow(2).mean() + found + first(x).mean()


@pytest.mark.parametrize("order", range(3))
def test_a_buffer_is_sent_as_it_was(order: int) -> None:
    require_one_program(lambda: LooksIntoTheQueue(Queue), order)


class QueueOfParameters(Queue):
    def __init__(self) -> None:
        super().__init__()
        queue = self.queue
        del self.queue
        self.queue = nn.Parameter(queue)


class UsesItsWeight(Model):
    def step(self, x: Tensor, _: int) -> Tensor:
        first, second, third = self.layers
        y = second(x)
        found = (y.detach() @ first.queue.t()).mean()
        return third(y).pow(2).mean() + found.detach() + first(x).mean()


class UsesPartOfItsWeight(UsesItsWeight):
    def step(self, x: Tensor, number: int) -> Tensor:
        first, second, _ = self.layers
        part = first.queue.detach()[8:]
        found = (second(x).detach() @ part.t()).mean()
        return super().step(x, number) + found


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("model", [UsesItsWeight, UsesPartOfItsWeight])
def test_a_parameter_is_sent_as_it_was(model: Callable[..., Model], order: int) -> None:
    require_one_program(lambda: model(QueueOfParameters), order)


class ReturnsItsBuffer(Layer):
    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(SIZE))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.state.mul_(0.9).add_(x.detach().mean())
        return self.linear(x), self.state


class KeepsTheBuffer(Model):
    def step(self, x: Tensor, _: int) -> Tensor:
        first, second, _third = self.layers
        y, _ = second(x)
        z, state = first(x)
        before = y.detach() * state
        first(x)
        return y.pow(2).mean() + z.mean() + (before + y.detach() * state).sum()


def test_a_tensor_that_its_layer_has_changed_behind_a_send_is_an_error() -> None:
    with pytest.raises(StageError, match="Let the layer return a copy"):
        trained(lambda: KeepsTheBuffer(ReturnsItsBuffer), 2)


class InInferenceMode(Model):
    def step(self, x: Tensor, number: int) -> Tensor:
        with torch.inference_mode():
            seen = super().step(x, number)
        return super().step(x, number) + float(seen)


def test_values_of_inference_mode() -> None:
    require_one_program(lambda: InInferenceMode(Layer))
