"""Containers of a LightningModule that a step reads in an earlier interval than it changes them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest

from lightning_pipeshift.model.trace.kept_containers import KeptContainers


class Meter:
    """A running mean."""

    def __init__(self) -> None:
        self.sum, self.count, self.seen = 0.0, 0, list[Any]()

    @property
    def average(self) -> float:
        return self.sum / max(1, self.count)

    def update(self, value: float) -> None:
        self.sum, self.count = self.sum + value, self.count + 1


class Module(L.LightningModule):
    """With containers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Any] = [0.5]
        self.counts: dict[str, int] = {"a": 1000}
        self.names = {"one"}
        self.queue: deque[int] = deque(maxlen=2)
        self.files = list(range(20_000))
        self.meter = Meter()
        self.draw = random.Random(1)
        self.numbers = np.random.default_rng(1)

    def last(self) -> Any:
        return self.history[-1]


def stale(*steps: Callable[[Module], Any]) -> frozenset[str]:
    """What is stale for steps, each of which is an interval."""
    module = Module()
    containers = KeptContainers(module)
    with containers.watched():
        for number, step in enumerate(steps):
            if number:
                containers.end_interval()
            step(module)
    return containers.stale


def nothing(_: Module) -> None:
    pass


@pytest.mark.parametrize(
    ("early", "late", "name"),
    [
        (lambda m: len(m.history), lambda m: m.history.append(1), "history"),
        (lambda m: m.last(), lambda m: setattr(m, "history", [*m.history, 1]), "history"),
        (lambda m: m.last(), lambda m: m.history.__setitem__(0, 0.75), "history"),
        (lambda m: m.counts.get("a"), lambda m: m.counts.update(a=1001), "counts"),
        (lambda m: m.counts.get("a"), lambda m: m.counts.update(b=1), "counts"),
        (lambda m: "two" in m.names, lambda m: m.names.add("two"), "names"),
        (lambda m: sum(m.queue), lambda m: m.queue.append(1), "queue"),
        (lambda m: m.draw, lambda m: m.draw.random(), "draw"),
        (lambda m: m.numbers, lambda m: m.numbers.random(), "numbers"),
        (lambda m: m.meter.average, lambda m: m.meter.update(0.5), "meter"),
        (lambda m: m.meter.seen, lambda m: m.meter.seen.append(1), "meter"),
        (lambda m: m.meter, lambda m: setattr(m.meter, "new", 1), "meter"),
        (lambda m: m.meter, lambda m: setattr(m, "meter", None), "meter"),
    ],
)
def test_containers_that_are_read_before_they_change(
    early: Callable[[Module], Any], late: Callable[[Module], Any], name: str
) -> None:
    assert stale(early, nothing, late) == {name}
    assert stale(early, late, nothing) == {name}
    assert stale(nothing, late, early) == frozenset()
    assert stale(nothing, lambda m: (early(m), late(m))) == frozenset()
    assert stale(early, early, nothing) == frozenset()


def test_large_containers_are_not_compared() -> None:
    assert stale(lambda m: m.files[0], lambda m: m.files.append(1)) == frozenset()


def test_an_object_that_computes_the_same_again_has_not_changed() -> None:
    def again(module: Module) -> None:
        module.meter.sum = module.meter.sum * 1.0 + 0.0

    assert stale(lambda m: m.meter.average, again) == frozenset()


def test_the_trainer_is_no_object_of_users() -> None:
    module = Module()
    module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    containers = KeptContainers(module)
    with containers.watched():
        _ = module.trainer.global_step
        containers.end_interval()
        module.trainer.new = 1  # type: ignore[attr-defined]
    assert containers.stale == frozenset()


class ReadsItself(Module):
    """Has its own way to read attributes."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return value.copy() if name == "counts" else value


@pytest.mark.parametrize("kind", [Module, ReadsItself])
def test_the_class_is_as_before(kind: type[Module]) -> None:
    module, other, before = kind(), kind(), dict(vars(kind))
    containers = KeptContainers(module)
    with containers.watched():
        assert type(module) is kind
        assert kind.__subclasses__() == ([ReadsItself] if kind is Module else [])
        assert (module.counts is module.counts) == (kind is Module)
        with pytest.raises(AttributeError, match="absent"):
            _ = module.absent
        len(other.history)
        containers.end_interval()
        module.history.append(1)
    assert containers.stale == frozenset()
    assert dict(vars(kind)) == before
