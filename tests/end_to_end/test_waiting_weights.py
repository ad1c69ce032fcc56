"""A model whose optimizer state alone exceeds the budget, by more than what is left without it:
weights wait in host memory, too, and no bit changes.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end.test_optimizer_state import (
    MODEL_BYTES,
    NUM_BLOCKS,
    WIDTH,
    Block,
    Momentum,
    Trains,
    WithHook,
    same_bits,
    train,
)

STATE_BYTES = 2 * MODEL_BYTES

# The batch, and the gradients at the block's first layer: of its weight and bias, and, for four
# samples, of what it has been given and has made.
ROOM_BYTES = 8 * (4 * WIDTH + 8) + 4 * (4 * WIDTH * WIDTH + 4 * WIDTH + 4 * (WIDTH + 4 * WIDTH))


class Validates(Trains):
    """Is validated, and changes its weights between two steps."""

    def validation_step(self, batch: Any) -> None:
        self.log("seen", self.training_step(batch), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        cast(Block, self.blocks[1]).up.weight.data.clamp_(-0.09, 0.09)
        with torch.no_grad():
            cast(Block, self.blocks[2]).down.bias.mul_(0.5)


class Gpt2(Trains):
    """Of transformers, with random weights; its head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        sizes = {"n_embd": 64, "n_layer": 8, "n_head": 2, "vocab_size": 64, "n_positions": 16}
        self.net = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

    def training_step(self, batch: Any) -> Tensor:
        numbers, _ = batch
        tokens = (100 * numbers[:, :12].abs()).long() % 64
        loss: Tensor = self.net(input_ids=tokens, labels=tokens).loss
        return loss


class Compiled(Trains):
    """Some of its layers are compiled, in both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = cast(nn.Module, torch.compile(self.blocks[0], backend="eager"))
        self.blocks[1].compile(backend="eager")


def held_bytes(model: L.LightningModule) -> int:
    """The bytes of all tensors that the process can reach; also where a step may not use them."""
    with torch._C.DisableTorchFunctionSubclass():
        return _held_bytes(model)


def _held_bytes(model: L.LightningModule) -> int:
    found = [tensor for tensor in gc.get_objects() if isinstance(tensor, Tensor)]
    # Those that Python has not seen yet.
    found += [p.grad for p in model.parameters() if p.grad is not None]
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in found
        if not tensor.is_meta
    }
    return sum(storages.values())


class Measured(Trains):
    """Notes the most that is held in forwards, in backwards, and when gradients are there."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        for block in self.blocks:
            block.register_forward_hook(lambda *_: self.note())
            cast(Block, block).down.weight.register_hook(lambda _: self.note())

    def note(self) -> None:
        if self._trainer is not None and self.trainer.global_step > 1:
            figures = cast(Any, self.trainer.strategy).memory_figures
            self.most = max(self.most, held_bytes(self) - figures.get("host_bytes", 0))

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.note()

    def on_train_end(self) -> None:
        # Where `train` returns it.
        self.trainer.callbacks[0].total = self.most  # type: ignore[attr-defined]


SETTINGS: dict[str, tuple[int, float, dict[str, Any]]] = {
    "clipped and averaged": (1, 1.9, {"gradient_clip_val": 0.1, "average": True}),
    "accumulated": (1, 2.9, {"accumulate_grad_batches": 2}),
    "bf16 and SGD": (1, 1.6, {"precision": "bf16-mixed", "module": Momentum}),
    "validated and written to": (1, 1.9, {"module": Validates, "val_check_interval": 2}),
    "two stages, one layer moves": (2, 1.8, {"moves": True}),
    "two virtual machines": (2, 1.9, {"how": {"virtual_machines": 2}}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_bits(name: str) -> None:
    num_ranks, budget, how = SETTINGS[name]
    expected = run_ranks(train, num_ranks, None, **how)
    if "moves" in how:
        plan = expected[0]["plan"]
        everything = (tuple(range(len(plan.layers))),)
        plan = replace(
            plan, optimizer_on_host=everything, weights_on_host=everything, prediction=None
        )
        how = {**how, "how": {"plan": plan}}
    found = run_ranks(train, num_ranks, budget * MODEL_BYTES, **how)
    for mine, plain in zip(found, expected, strict=True):
        assert same_bits(mine, plain)
        assert any(mine["plan"].weights_on_host)
        assert mine["figures"]["weights_moved_bytes"] > 0


def test_a_model_with_a_tied_head() -> None:
    size = sum(p.nbytes for p in Gpt2().parameters())
    expected = run_ranks(train, 1, None, module=Gpt2)
    (found,) = run_ranks(train, 1, 1.85 * size, module=Gpt2)
    assert same_bits(found, expected[0])
    names = [layer.name for layer in found["plan"].layers]
    waiting = {names[layer] for layer in found["plan"].weights_on_host[0]}
    assert waiting
    # Embeddings and head are one weight.
    assert waiting <= {f"net.transformer.h.{n}" for n in range(8)} | {"net.transformer.wpe"}


def test_what_is_held_is_within_the_budget() -> None:
    budget = 1.9 * MODEL_BYTES
    assert budget < STATE_BYTES
    (plain,) = run_ranks(train, 1, None, module=Measured)
    (found,) = run_ranks(train, 1, budget, module=Measured)
    assert same_bits(found, plain)
    assert plain["reads"] > 4 * MODEL_BYTES
    assert found["reads"] <= budget


def test_the_weights_of_compiled_layers_stay_and_those_of_others_move() -> None:
    (expected,), (found,) = (
        run_ranks(train, 1, budget, module=Compiled)
        for budget in (None, 1.95 * MODEL_BYTES + ROOM_BYTES)
    )
    assert same_bits(found, expected)
    plan = found["plan"]
    moved = {plan.layers[layer].name for layer in plan.weights_on_host[0]}
    assert moved
    assert moved <= {f"blocks.{number}" for number in range(2, NUM_BLOCKS)}


def test_a_checkpoint_goes_on_with_another_split_and_another_budget(tmp_path: Path) -> None:
    expected = run_ranks(train, 1, None, num_batches=3, max_epochs=2)
    path = tmp_path / "half.ckpt"
    run_ranks(train, 1, 1.9 * MODEL_BYTES, num_batches=3, save=path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert {name: value.shape for name, value in saved.items()} == {
        name: value.shape for name, value in Trains().state_dict().items()
    }
    for num_ranks, budget in ((2, 1.3 * MODEL_BYTES + ROOM_BYTES), (1, None)):
        found = run_ranks(train, num_ranks, budget, num_batches=3, max_epochs=2, resume=path)
        assert same_bits(found[0], expected[0])


def test_no_more_moves_than_is_needed_and_what_cannot_move_is_said() -> None:
    few, many = (run_ranks(train, 1, budget * MODEL_BYTES)[0]["plan"] for budget in (2.25, 1.9))
    assert not any(run_ranks(train, 1, 2.6 * MODEL_BYTES)[0]["plan"].weights_on_host)
    assert 0 < len(few.weights_on_host[0]) < len(many.weights_on_host[0])
    with pytest.raises(Exception, match=r"stays on the device: a hook is called"):
        run_ranks(train, 1, 1.9 * MODEL_BYTES, module=WithHook)
    with pytest.raises(Exception, match=r"needs .* for the weights of two layers at a time"):
        run_ranks(train, 1, 0.9 * MODEL_BYTES)
