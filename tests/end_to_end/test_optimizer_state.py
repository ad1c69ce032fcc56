"""A model whose optimizer state exceeds the budget, with ``MemoryCompression``: it trains, with the
same bits, and checkpoints and moves of layers know nothing of it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeshift import MemoryCompression, Move, PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import built, quiet_trainer

WIDTH, NUM_BLOCKS = 96, 6


class Block(nn.Module):
    """Weights outweigh what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(F.gelu(self.up(x)))
        return x + self.dropout(hidden)


class Trains(L.LightningModule):
    """Blocks and a head."""

    name = "AdamW"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 4)

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim == 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 2e-3}]
        optimizer = (
            torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
            if self.name == "SGD"
            else torch.optim.AdamW(groups, lr=1e-3, foreach=True)
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Momentum(Trains):
    """With one value of state for each parameter."""

    name = "SGD"


class WithHook(Trains):
    """Has a hook for the optimizer's steps."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer


class Moves(L.Callback):
    """Moves a layer back and forth."""

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        if others[-1] in (1, 3):
            trainer.strategy.migrate(Move(layer="blocks.3", stage=int(others[-1] == 3)))


class Reads(L.Callback):
    """Adds up what the optimizer has, as a logger of moments does."""

    def __init__(self) -> None:
        self.total = 0.0

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        for state in trainer.optimizers[0].state.values():
            self.total += float(state["exp_avg"].sum()) if "exp_avg" in state else 0.0


MODEL_BYTES = sum(p.nbytes for p in Trains().parameters())


def train(
    budget: float | None,
    module: type[Trains] = Trains,
    moves: bool = False,
    average: bool = False,
    num_batches: int = 6,
    save: Path | None = None,
    resume: Path | None = None,
    how: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Trains on all ranks; the results."""
    L.seed_everything(3, verbose=False)
    generator = torch.Generator().manual_seed(1)
    batches: Any = [
        (torch.randn(8, WIDTH, generator=generator), torch.randint(4, (8,), generator=generator))
        for _ in range(num_batches)
    ]
    model, reads = built(module), Reads()
    strategy: Any = PipeShiftStrategy(**{"microbatches": 2, "partition": "uniform", **(how or {})})
    trainer = quiet_trainer(
        {"devices": int(os.environ["WORLD_SIZE"]), "strategy": strategy},
        callbacks=[
            reads,
            *([Moves()] if moves else []),
            *([EMAWeightAveraging(decay=0.8)] if average else []),
        ],
        plugins=[MemoryCompression(budget=budget)] if budget is not None else [],
        **{"max_epochs": 1, **kwargs},
    )
    trainer.fit(model, DataLoader(batches, batch_size=None), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    state: Any = strategy.optimizer_state(trainer.optimizers[0])["state"]
    return {
        "state": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "optimizer": {
            (number, name): value
            for number, entry in state.items()
            for name, value in entry.items()
            if isinstance(value, Tensor)
        },
        "reads": reads.total,
        "figures": strategy.memory_figures,
        "plan": strategy.plan,
    }


def same_bits(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(
        found[what].keys() == expected[what].keys()
        and all(torch.equal(found[what][n], v) for n, v in expected[what].items())
        for what in ("state", "optimizer")
    )


SETTINGS: dict[str, tuple[int, float, dict[str, Any]]] = {
    "clipped and accumulated": (1, 3.5, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    "bf16 and SGD": (1, 2.5, {"precision": "bf16-mixed", "module": Momentum}),
    "moves of layers": (
        2,
        2.2,
        {"moves": True, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "two virtual machines": (2, 2.5, {"how": {"virtual_machines": 2}}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_bits(name: str) -> None:
    num_ranks, budget, how = SETTINGS[name]
    expected = run_ranks(train, num_ranks, None, **how)
    if "moves" in how:
        # The planner's own leaves no room for one more layer.
        plan = expected[0]["plan"]
        everything = (tuple(range(len(plan.layers))),)
        plan = replace(plan, optimizer_on_host=everything, prediction=None)
        how = {**how, "how": {"plan": plan}}
    found = run_ranks(train, num_ranks, budget * MODEL_BYTES, **how)
    for mine, plain in zip(found, expected, strict=True):
        figures = mine["figures"]
        assert same_bits(mine, plain)
        # A layer that has moved is at another rank at the beginning of the second run.
        if "moves" not in how:
            assert mine["reads"] == plain["reads"]
        assert any(mine["plan"].optimizer_on_host)
        assert figures["optimizer_moved_bytes"] > 0


def test_a_checkpoint_goes_on_with_another_split_and_another_budget(tmp_path: Path) -> None:
    expected = run_ranks(train, 1, None, num_batches=3, max_epochs=2)
    path = tmp_path / "half.ckpt"
    run_ranks(train, 1, 3 * MODEL_BYTES, num_batches=3, save=path)
    saved = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
    assert all(torch.isfinite(entry["exp_avg"]).all() for entry in saved.values())
    for num_ranks, budget in ((2, 1.9 * MODEL_BYTES), (1, None)):
        found = run_ranks(train, num_ranks, budget, num_batches=3, max_epochs=2, resume=path)
        assert same_bits(found[0], expected[0])


def test_what_fits_does_not_move_and_what_cannot_move_is_said() -> None:
    (found,) = run_ranks(train, 1, 6 * MODEL_BYTES)
    assert not found["plan"].optimizer_on_host
    assert found["figures"]["optimizer_moved_bytes"] == 0
    with pytest.raises(Exception, match=r"stays on the device: a hook is called"):
        run_ranks(train, 1, 2.5 * MODEL_BYTES, module=WithHook)
