"""Compiled layers, and functions that torch compiles: the same bits on every split, under every
policy of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeshift import MemoryCompression, PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks
from tests.cases import by_turns
from tests.features_models import built, parameters_of, quiet_trainer
from tests.models import NUM_CLASSES, NUM_FEATURES, Classifier, points

WIDTH = 12
NUM_BLOCKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Chooses(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        chosen: Tensor = torch.cond(
            hidden.sum() > 0,
            lambda given: self.down(given).sin(),
            lambda given: self.down(2 * given).cos(),
            (hidden,),
        )
        return x + chosen


class Network(Classifier):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = self.between(block(hidden))
        out: Tensor = self.head(hidden)
        return out

    def between(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden.tanh(), 0.1, self.training)


class CompilesItsLayers(Network):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager", fullgraph=True)


class WrapsItsLayers(Network):
    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            wrapped: Any = torch.compile(block, backend="aot_eager", fullgraph=True)
            self.blocks[number] = wrapped


class CompilesCodeBetweenLayers(Network):
    def __init__(self) -> None:
        super().__init__()
        self.between = torch.compile(super().between, backend="aot_eager")  # type: ignore[method-assign]


class CompilesAround(Network):
    """What is compiled contains layers."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.Sequential(*self.blocks)
        self.blocks = nn.ModuleList([cast(nn.Module, torch.compile(blocks, backend="aot_eager"))])


class HasConditions(Network):
    def __init__(self) -> None:
        super().__init__(Chooses)


def train(
    make: Callable[[], Any], num_ranks: int, settings: dict[str, Any], budget: float | None
) -> tuple[Any, bool]:
    """The parameters and buffers at the end, and whether anything was moved or recomputed."""
    torch.set_num_threads(1)
    strategy = PipeShiftStrategy(**{"microbatches": 2, "partition": "uniform", **settings})
    plugins = [] if budget is None else [MemoryCompression(budget=budget)]
    trainer = quiet_trainer(
        {"devices": num_ranks, "strategy": strategy}, max_epochs=2, plugins=plugins
    )
    module = built(make)
    trainer.fit(module, points(6))
    plan = strategy.plan
    return parameters_of(module), any(plan.recompute) or any(plan.swaps)


KINDS: list[Callable[[], Any]] = [
    CompilesItsLayers,
    WrapsItsLayers,
    CompilesCodeBetweenLayers,
    CompilesAround,
    HasConditions,
]
WAYS: list[tuple[int, dict[str, Any], float | None]] = [
    (2, {}, None),
    (3, {"schedule": "gpipe", "recompute": "full"}, None),
    (2, {}, 1e9),
]


@pytest.mark.parametrize("make", KINDS)
def test_every_split_and_policy_trains_the_same(make: Callable[[], Any]) -> None:
    ((expected, _),) = run_ranks(train, 1, make, 1, {"profile_steps": 0}, None)
    assert any("running_mean" in name for name in expected)
    for num_ranks, settings, budget in by_turns(WAYS, KINDS.index(make), 2):
        for found, is_changed in run_ranks(train, num_ranks, make, num_ranks, settings, budget):
            assert is_changed == (settings.get("recompute") == "full")
            different = [
                name for name, value in expected.items() if not torch.equal(found[name], value)
            ]
            assert not different, (num_ranks, settings, budget)


class CountsItsGraphs(Network):
    """How often the compiler was asked to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.num_graphs = 0
        for block in self.blocks:
            block.compile(backend=self.note, fullgraph=True)

    def note(self, graph: Any, _: Any) -> Any:
        self.num_graphs += 1
        return graph


def count_graphs(num_ranks: int) -> int:
    torch.set_num_threads(1)
    strategy = PipeShiftStrategy(microbatches=2, partition="uniform")
    trainer = quiet_trainer({"devices": num_ranks, "strategy": strategy}, max_epochs=2)
    module = built(CountsItsGraphs)
    trainer.fit(module, points(6))
    return int(module.num_graphs)


def test_layers_are_compiled_once() -> None:
    """All blocks have the same code, and both stages have some."""
    assert run_ranks(count_graphs, 2, 2) == [1, 1]
