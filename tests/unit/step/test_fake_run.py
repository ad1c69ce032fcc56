"""The run of a step on values that nobody has."""

from __future__ import annotations

import io
import itertools
import queue
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_pipeshift.model.user_state.effects import EffectError, effects_allowed, no_effects
from lightning_pipeshift.step.fake_run import FakeRun, run_without_values

CPU = torch.device("cpu")
COUNTS = {"steps": 0}


class Model(nn.Module):
    """Its layers are called in another order than they are made in; one is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.idle = nn.Linear(8, 2), nn.Linear(3, 3)
        self.first, self.middle = nn.Linear(4, 8), nn.Linear(8, 8)
        self.seen: list[Any] = []
        self.mean = torch.zeros(4)
        self.total: Any
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return self.last(x + self.middle(x).relu())

    def layers(self) -> list[nn.Module]:
        return [self.last, self.idle, self.first, self.middle]


def run(model: Model, step: Any, batch: Any = None, order: Any = (0, 1, 2, 3)) -> FakeRun:
    batch = torch.rand(5, 4) if batch is None else batch
    layers = [model.layers()[at] for at in order]
    return run_without_values(model, layers, CPU, step, batch)


def test_calls_their_inputs_and_what_crosses_the_boundaries() -> None:
    model = Model()
    found = run(model, lambda x: model(x).mean())
    assert found.end == ""
    assert [call.layer for call in found.calls] == [2, 3, 0]
    assert found.called == {0, 2, 3}
    (batch, *_), (hidden, *_), _ = (call.leaves for call in found.calls)
    assert isinstance(batch, Tensor)
    assert (hidden.shape, hidden.dtype) == ((5, 8), torch.float32)
    in_order = run(model, lambda x: model(x).mean(), order=(2, 3, 0, 1))
    one = 5 * 8 * 4
    # The input of the block goes past it, and no value behind the last layer to an idle one.
    assert in_order.crossings() == [(one, one, True), (one, one, True), (0, 0, True), (0, 0, True)]


def test_no_gradient_comes_back_where_none_is_needed() -> None:
    model = Model()

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = model.first(x)
        return model.last(model.middle(hidden)).sum()

    sizes = run(model, step, order=(2, 3, 0, 1)).crossings()
    assert [crossing.gradient_bytes for crossing in sizes] == [0, 160, 0, 0]


def test_a_value_that_goes_back_forbids_cuts() -> None:
    model = Model()
    found = run(
        model, lambda x: model.last(model.middle(model.middle(model.first(x)))), None, (3, 2, 0, 1)
    )
    assert [crossing.may_be_cut for crossing in found.crossings()] == [False, True, True, True]


class Slots:
    __slots__ = ("__own", "made", "numbers")

    def __init__(self) -> None:
        self.numbers, self.__own = [1], 1

    def change(self) -> None:
        self.numbers.append(2)
        self.numbers, self.__own, self.made = [], 2, True

    def all(self) -> list[Any]:
        return [self.numbers, self.__own, hasattr(self, "made")]


DRAWS: dict[str, tuple[Any, Any]] = {
    "random": (random.Random(1), lambda x: x.random()),
    "NumPy": (np.random.default_rng(1), lambda x: x.random()),
    "NumPy's old one": (np.random.RandomState(1), lambda x: x.randn()),
    "torch": (torch.Generator(), lambda x: torch.rand((), generator=x).item()),
}


@pytest.mark.parametrize("name", DRAWS)
def test_generators_and_objects_with_slots_are_as_before(name: str) -> None:
    generator, draw = DRAWS[name]
    model: Any = Model()
    model.draws, model.slots = generator, Slots()

    def step(batch: Any) -> Any:
        found.append(draw(model.draws))
        model.slots.change()
        return model(batch).mean()

    found: list[Any] = []
    for _ in range(2):
        assert run(model, step).end == ""
    # A list of this test's, and no attribute of the model.
    assert found[0] == found[1] == draw(generator)
    assert model.slots.all() == [[1], 1, False]


def test_everything_is_as_before() -> None:
    model, batch = Model(), {"x": torch.rand(5, 4)}
    given = batch["x"].clone()
    model.idle.requires_grad_(False)

    def step(batch: Any) -> Tensor:
        x = batch.pop("x")
        x += 1.0
        COUNTS["steps"] += 1
        model.seen.append(x)
        model.count = 1  # type: ignore[assignment]
        model.total.add_(1)
        y = model(x)
        model.mean[:2] = 1.0
        model.mean += y.mean()
        model.idle.requires_grad_(True)
        model.first.eval()
        model.total = y.sum()
        return y.mean()

    found = run(model, step, batch)
    assert found.end == ""
    assert torch.equal(batch["x"], given)
    assert COUNTS == {"steps": 0}
    assert model.seen == []
    assert not hasattr(model, "count")
    assert type(model.mean) is Tensor
    assert type(model.total) is Tensor
    assert model.mean.tolist() == [0.0] * 4
    assert model.total.item() == 0.0
    assert not model.idle.weight.requires_grad
    assert model.first.training
    assert type(model.first.weight) is nn.Parameter
    assert model(given).shape == (5, 2)


def test_the_run_ends_where_the_step_needs_values() -> None:
    model = Model()
    caught = []

    def step(x: Tensor) -> Any:
        try:
            return model.last(x[:, :2]) if model.first(x).sum() > 0 else None
        except Exception as error:
            caught.append(error)

    found = run(model, step)
    assert "reads a value" in found.end
    assert found.called == {2}
    assert not caught
    assert "backward" in run(model, lambda x: model(x).sum().backward()).end
    assert all(x.grad is None for x in model.parameters())


def test_an_error_of_the_step_is_left_to_the_step() -> None:
    assert run(Model(), lambda x: x.no_such_thing).end.startswith("AttributeError")


def test_the_run_ends_before_an_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()

    def step(x: Tensor) -> Any:
        x = model.first(x)
        print("in the step")
        return model(x)

    assert "print" in run(model, step).end
    assert run(model, step).called == {2}
    assert capsys.readouterr().out == ""
    model.rounds = itertools.count()  # type: ignore[assignment]
    assert "iterator" in run(model, step).end
    assert next(model.rounds) == 0  # type: ignore[call-overload]


def test_what_is_an_effect(tmp_path: Path) -> None:
    name = str(tmp_path / "file")
    with open(name, "w") as file:
        for effect in (
            lambda: print("text"),
            lambda: file.write("text"),
            lambda: Path(name).write_text("text"),
            lambda: Path(name).unlink(),
            lambda: queue.Queue[int]().put(1),
            lambda: queue.SimpleQueue[int]().put(1),
        ):
            with pytest.raises(EffectError), no_effects():
                effect()
    assert Path(name).read_text() == ""
    with no_effects():
        io.StringIO().write("text")
        with effects_allowed():
            Path(name).write_text("text")
        with pytest.raises(EffectError):
            Path(name).write_text("more")
    assert Path(name).read_text() == "text"
