"""Layers change their owners: no bit of what is trained changes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeshift import LayerMigration, Move, PlanError
from lightning_pipeshift.testing.ranks import run_ranks
from tests.cases import some
from tests.end_to_end.test_changing_plans import Trains, go_by_sleep
from tests.end_to_end.test_layer_migration import train
from tests.features_models import (
    AwaitsPlanning,
    built,
    differences,
    parameters_of,
    plain,
    quiet_trainer,
)
from tests.models import NUM_CLASSES, NUM_FEATURES, points

NUM_STEPS = 8
Moves = Mapping[int, Sequence[Move]]
"""By the batch after which they are wanted."""


class Replaces(nn.Module):
    """Replaces a buffer, writes to another one, and keeps results in a list."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("count", torch.zeros(()))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.count += 1
        self.kept = [*self.kept[-1:], x.detach().mean()]
        found: Tensor = self.linear(x - self.mean) / self.count.clone() + sum(self.kept)
        return found


class Recurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.cells(x.view(-1, 4, 4))
        return x + found.reshape(-1, 16)


class Convolves(nn.Module):
    """Its weight is in another layout than usual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.conv(x.view(-1, 4, 2, 2))).reshape(-1, 16)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), norm

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x))


class Keeps(pl.LightningModule):
    """Layers with state of all kinds; the step keeps values of one step for the next, and uses a
    layer's weight, and another one's buffer, itself.
    """

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16)
        self.inputs = nn.Linear(NUM_FEATURES, 16)
        self.blocks = nn.ModuleList([Replaces(), Recurs(), Convolves(), Normed(norm), Normed(norm)])
        self.head = nn.Linear(16, NUM_CLASSES)
        self.queue: list[Tensor] = []

    def configure_layers(self) -> list[nn.Module]:
        return [self.inputs, *self.blocks, self.head]

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        if self.queue:
            x = x + 0.1 * self.queue[0].mean(0)
        self.queue = [*self.queue[-2:], x.detach()]
        blocks: Any = self.blocks
        x = x + blocks[3].linear.weight.mean() + blocks[0].count
        return F.cross_entropy(self.head(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, amsgrad=True)


class Switches(pl.Callback):
    """Freezes layers, evaluates others, and averages all weights."""

    def __init__(self) -> None:
        self.averages: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        module.inputs.requires_grad_(number % 3 != 1)
        module.blocks[number % 3].train(number % 2 == 0)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            found = parameter.detach()
            before = self.averages.get(name)
            self.averages[name] = found.clone() if before is None else before * 0.9 + found * 0.1
        if trainer.global_step == NUM_STEPS:
            for name, parameter in module.named_parameters():
                parameter.data.copy_(self.averages[name])


class Manual(pl.LightningModule):
    """Two optimizers, one of which steps in every other step only, with gradients of both."""

    def __init__(self, ties: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.inputs = nn.Linear(NUM_FEATURES, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, NUM_CLASSES)
        if ties:
            last: Any = self.blocks[2]
            last.weight = self.blocks[0].weight

    def training_step(self, batch: Any, number: int) -> None:
        x, y = batch
        one, other = self.optimizers()  # type: ignore[attr-defined]
        x = self.inputs(x)
        for block in self.blocks:
            x = x + F.relu(block(x))
        self.manual_backward(F.cross_entropy(self.head(x), y))
        one.step()
        one.zero_grad()
        if number % 2:
            other.step()
            other.zero_grad()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW([*self.inputs.parameters(), *self.head.parameters()], lr=0.02),
            torch.optim.AdamW(self.blocks.parameters(), lr=0.02),
        ]


MODELS: dict[str, Callable[[], Any]] = {
    "trains": lambda: Trains("adam"),
    "keeps": Keeps,
    "manual": Manual,
    "ties": lambda: Manual(ties=True),
}


class Moving(pl.Callback):
    """Asks for moves; remembers who owned which layer in each step, and what was refused."""

    def __init__(self, moves: Moves | int, shuffles: bool = False) -> None:
        self.moves, self.owners, self.refused = moves, list[list[int]](), list[str]()
        self.shuffles, self.orders = shuffles, list[Any]()

    def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
        strategy = trainer.strategy
        if isinstance(self.moves, int):
            depths = strategy.topology.stages_per_vm
            self.moves = drawn(strategy.layer_names, depths, self.moves)
        self.owners.append(strategy.plan.placement.stages(strategy.virtual_machine))
        try:
            strategy.migrate(*self.moves.get(others[2], ()))
        except PlanError as error:
            self.refused.append(str(error))
        self.orders.append(strategy.topology.ranks)
        if self.shuffles and others[2] < NUM_STEPS - 2:
            draw, plan = random.Random(others[2]), strategy.pipeline.coming_plan
            ranks = tuple(tuple(draw.sample(machine, len(machine))) for machine in plan.ranks)
            strategy.adopt(replace(plan, ranks=ranks), at_once=True)


def drawn(names: Sequence[str], depths: Sequence[int], seed: int) -> dict[int, list[Move]]:
    """Moves of random layers to random stages, in most steps."""
    draw = random.Random(seed)
    return {
        step: [
            Move(layer=name, stage=draw.randrange(depth), virtual_machine=vm)
            for vm, depth in enumerate(depths)
            for name in draw.sample(names, 3)
        ]
        for step in range(NUM_STEPS - 2)
    }


def fit(
    name: str,
    moves: Moves | int,
    accumulate: int = 1,
    folder: str | None = None,
    resume: str | None = None,
    shuffles: bool = False,
    **options: Any,
) -> Any:
    """Trains on all ranks.

    Args:
        name: of the model.
        moves: of layers; or a seed of moves of all kinds.
        accumulate: how many batches make an update.
        folder: for checkpoints.
        resume: a checkpoint to go on from.
        shuffles: whether ranks change their places, too.
        options: of the strategy.
    """
    pl.seed_everything(5, verbose=False)
    module = built(MODELS[name])
    is_manual = not module.automatic_optimization
    options = {"partition": "uniform", **options}
    moving = Moving(moves, shuffles)
    callbacks: list[pl.Callback] = [moving, *([Switches()] if name == "keeps" else [])]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, filename="last"))
    trainer = quiet_trainer(
        {
            "devices": int(os.environ["WORLD_SIZE"]),
            "pipeshift": {"microbatches": 4, **options},
        },
        max_epochs=2 if resume else 1,
        callbacks=callbacks,
        enable_checkpointing=folder is not None,
        **{} if is_manual else {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5},
    )
    num_batches = NUM_STEPS * len(options.get("virtual_machines", [0]))
    trainer.fit(module, DataLoader(points(num_batches).dataset, batch_size=8), ckpt_path=resume)
    return plain(
        {
            "parameters": parameters_of(module),
            "owners": moving.owners,
            "orders": moving.orders,
            "refused": moving.refused,
        }
    )


def require_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert not differences(one["parameters"], other["parameters"], 0, 0)
        assert not one["refused"]


CASES: list[tuple[str, list[list[int]], dict[str, Any]]] = [
    # Tied and loose parameters, dropout, running statistics, AdamW, clipping.
    ("trains", [[0, 1]], {"schedule": "gpipe"}),
    ("trains", [[0, 1, 2]], {"accumulate": 3}),
    ("trains", [[0, 2], [3, 1]], {"schedule": "eager_1f1b", "accumulate": 2}),
    ("trains", [[0, 1, 2], [3]], {}),
    ("keeps", [[0, 1]], {"accumulate": 2}),
    ("keeps", [[0, 1, 2]], {"schedule": "gpipe"}),
    ("manual", [[0, 1, 2]], {}),
]


@pytest.mark.parametrize(("name", "machines", "how"), some(CASES, 4))
def test_random_moves_change_no_bit(
    name: str, machines: list[list[int]], how: dict[str, Any]
) -> None:
    num_ranks = sum(map(len, machines))
    given = {"virtual_machines": machines, **how}
    stays = run_ranks(fit, num_ranks, name, {}, **given)
    moves = run_ranks(fit, num_ranks, name, 11, **given)
    require_same(moves, stays)
    owners = moves[0]["owners"]
    assert len(set(map(tuple, owners))) > 4
    assert any(list(each) != sorted(each) for each in owners), "stages that are not contiguous"


def test_a_run_goes_on_from_a_checkpoint_on_another_split(tmp_path: Path) -> None:
    found = []
    for name, seed in (("stays", {}), ("moves", 12)):
        folder = tmp_path / name
        run_ranks(fit, 3, "trains", seed, accumulate=3, folder=str(folder))
        found.append(torch.load(folder / "last.ckpt"))
    for key in ("state_dict", "optimizer_states", "pipeshift"):
        assert not differences(found[1][key], found[0][key], 0, 0), key
    saved = str(tmp_path / "moves" / "last.ckpt")
    stays = run_ranks(fit, 2, "trains", {}, resume=saved)
    moves = run_ranks(fit, 2, "trains", 13, resume=saved)
    require_same(moves, stays)
    assert len(set(map(tuple, moves[0]["owners"]))) > 4


@pytest.mark.parametrize("name", ["keeps", "manual"])
def test_ranks_that_change_places_change_no_bit(name: str) -> None:
    stays = run_ranks(fit, 3, name, {})
    places = run_ranks(fit, 3, name, 14, shuffles=True)
    require_same(places, stays)
    assert len(set(places[0]["orders"])) > 3


def test_moves_of_what_one_stage_has_the_optimizers_state_of_are_refused() -> None:
    moves = {1: [Move(layer="blocks.0", stage=1)], 2: [Move(layer="inputs", stage=1)]}
    for found in run_ranks(fit, 2, "ties", moves):
        (said,) = found["refused"]
        assert "manual optimization, layers that share weights cannot move" in said
        assert len(set(map(tuple, found["owners"]))) == 2


def slow(watches: bool) -> Any:
    go_by_sleep()
    callbacks = [LayerMigration(patience=2, watches=watches), AwaitsPlanning()]
    return train(callbacks, 20, slows_down=True)


def test_layers_leave_a_stage_that_gets_slow() -> None:
    moves, stays = run_ranks(slow, 2, True), run_ranks(slow, 2, False)
    assert moves[0]["counts"][-1][0] >= 6
    for one, other in zip(moves, stays, strict=True):
        assert not differences(one["parameters"], other["parameters"], 0, 0)
    change = moves[0]["decisions"][0]
    assert change["verdict"] == "kept"
    assert change["after_seconds"] < change["before_seconds"]
