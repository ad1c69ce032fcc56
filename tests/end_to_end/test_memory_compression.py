"""``MemoryCompression``, as a user meets it: budgets are kept, nothing that is computed changes,
and what cannot be is said.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeshift import (
    BudgetError,
    Choice,
    ConfigurationError,
    KeepAll,
    MemoryCompression,
    Move,
    PipeShiftStrategy,
    RecomputeAll,
    SwapAll,
    TensorRecord,
)
from lightning_pipeshift.plan.inputs.saved_tensors import BEHIND
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.text import bytes_of_text
from tests.cases import by_turns
from tests.features_models import AwaitsPlanning, built, quiet_trainer
from tests.living_bytes import room_bytes

WIDTH, SAMPLES = 64, 128
NUM_BLOCKS = 6


class Doubled(torch.autograd.Function):
    """Saves tensors as users do, an input, an output and one of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = x > 0
        y = torch.where(mask, 2 * x, x)
        ctx.save_for_backward(x, y, mask)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, y, mask = ctx.saved_tensors
        # All three have a part in it.
        return torch.where(mask, 2 + (y - 2 * x), 1 + (y - x)) * gradients[0]


class Block(nn.Module):
    """Residual, with dropout and a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = Doubled.apply(self.up(self.norm(x)))
        return x + self.dropout(self.down(F.gelu(inner)))


class Trains(L.LightningModule):
    """Blocks and a head."""

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
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Between(Trains):
    """Has code of its own between the layers, which saves what layers do not."""

    transforms = False

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        x = torch.sigmoid(x) * x
        for block in self.blocks:
            # What the one saves the next layer saves too; the other saves what nobody else does.
            x = torch.tanh(Doubled.apply(block(x)))
        if self.transforms:
            x = x + torch.func.grad(lambda at: at.pow(3).sum())(x)
        logits = self.head(x) * torch.exp(self.head(x.detach()))
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss)
        return loss


class Transforms(Between):
    """Uses ``torch.func`` there, which refuses hooks on what is saved."""

    transforms = True


class MovesALayer(L.Callback):
    """Moves a layer back and forth while its tensors are swapped."""

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        if others[-1] in (1, 4):
            trainer.strategy.migrate(Move(layer="blocks.2", stage=int(others[-1] == 1)))


def train(
    compression: dict[str, Any] | None,
    precision: Any = None,
    inner: Any = None,
    moves: bool = False,
    batch_sizes: Sequence[int] = (SAMPLES,) * 6,
    module: type[L.LightningModule] = Trains,
    **how: Any,
) -> dict[str, Any]:
    """Trains on all ranks; what is left behind."""
    L.seed_everything(3, verbose=False)
    generator = torch.Generator().manual_seed(1)
    batches: Any = [
        (torch.randn(n, WIDTH, generator=generator), torch.randint(4, (n,), generator=generator))
        for n in batch_sizes
    ]
    plugins = []
    if compression is not None:
        plugins.append(MemoryCompression(inner, **compression))
    elif inner is not None:
        plugins.append(inner)
    how = {"microbatches": 8, "partition": "uniform", "profile_steps": 0, **how}
    model = built(module)
    trainer = quiet_trainer(
        {"devices": int(os.environ["WORLD_SIZE"]), "strategy": PipeShiftStrategy(**how)},
        max_epochs=1,
        callbacks=[MovesALayer()] if moves else [AwaitsPlanning()] if how["profile_steps"] else [],
        plugins=plugins,
        precision=precision,
    )
    trainer.fit(model, DataLoader(batches, batch_size=None))
    strategy: Any = trainer.strategy
    plan = strategy.plan
    return {
        "state": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "loss": float(trainer.callback_metrics["loss"]),
        "figures": strategy.memory_figures,
        "room": room_bytes(strategy) if compression is not None else 0,
        "plan": plan.to_json(),
        "is_mixed": isinstance(trainer.precision_plugin, MixedPrecision),
        "is_mine": isinstance(trainer.precision_plugin, MemoryCompression),
    }


def same_bits(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(torch.equal(found["state"][n], v) for n, v in expected["state"].items()) and (
        found["loss"] == expected["loss"]
    )


# --- nothing that is computed changes ---


class OfEach:
    """Of each layer, recomputes every third tensor from the others, which are kept or swapped."""

    def choose(self, record: TensorRecord) -> Choice:
        return (Choice.RECOMPUTE, Choice.HOST, Choice.KEEP)[record.number % 3]


POLICIES = {
    "host": {"policy": SwapAll(min_bytes=1)},
    "device": {"policy": SwapAll("device", min_bytes=1)},
    "again": {"policy": RecomputeAll()},
    "lossless": {"policy": SwapAll(min_bytes=1), "compression": "lossless"},
    "of each": {"policy": OfEach()},
}

SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    # What code between layers saves is known when steps have been measured; planned for soon after.
    "gpipe, between": (
        2,
        {
            "schedule": "gpipe",
            "module": Between,
            "profile_steps": 2,
            "batch_sizes": (SAMPLES,) * 10,
        },
    ),
    "eager, moving": (3, {"schedule": "eager_1f1b", "moves": True}),
    "bf16": (2, {"precision": "bf16-mixed", "batch_sizes": (SAMPLES,) * 3}),
    "double": (2, {"inner": DoublePrecision(), "batch_sizes": (SAMPLES,) * 3}),
    "two virtual machines": (4, {"virtual_machines": 2, "batch_sizes": (SAMPLES,) * 3}),
    "one device": (1, {"batch_sizes": (96, 128, 40)}),
}


def train_with_each(
    compressions: Sequence[dict[str, Any] | None], how: dict[str, Any]
) -> list[dict[str, Any]]:
    return [train(compression, **how) for compression in compressions]


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_policy_changes_a_bit(setting: str) -> None:
    ranks, how = SETTINGS[setting]
    names = by_turns(POLICIES, list(SETTINGS).index(setting), 3)
    of_ranks = run_ranks(train_with_each, ranks, [None, *map(POLICIES.get, names)], how)
    plain, *compressed = zip(*of_ranks, strict=True)
    for name, found in zip(names, compressed, strict=True):
        for mine, theirs in zip(found, plain, strict=True):
            assert same_bits(mine, theirs), name
            assert mine["is_mine"]
            assert mine["is_mixed"] == theirs["is_mixed"]
        moved = sum(mine["figures"]["moved_bytes"] for mine in found)
        # One device has nobody to lend it room.
        moves = name != "again" and not (name == "device" and ranks == 1)
        assert bool(moved) == moves, name
        if name == "of each":
            document = json.loads(found[0]["plan"])
            again = {layer for layers in document["recompute"] for layer in layers}
            held = [swap for swaps in document["swaps"] for swap in swaps if swap["layer"] in again]
            assert any(swap.get("stays") for swap in held)
            assert not all(swap.get("stays") for swap in held)
        if name == "host" and "module" in how:
            swaps = json.loads(found[0]["plan"])["swaps"][0]
            numbers = {number for swap in swaps for number in swap["tensors"]}
            # It counts for the layer before it.
            assert {BEHIND, BEHIND + 1} <= numbers


def saved_and_counted(module: type[L.LightningModule]) -> tuple[int, int]:
    """The bytes that torch saves for a batch, and the bytes that the store counts."""
    found = train({"policy": KeepAll()}, module=module, microbatches=1, batch_sizes=(SAMPLES,))
    model: Any = built(module)
    model.log = lambda *_: None
    batch = torch.randn(SAMPLES, WIDTH), torch.randint(4, (SAMPLES,))
    there = {t.untyped_storage().data_ptr() for t in [*batch, *model.parameters()]}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.training_step(batch)
    num_bytes = sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in there)
    del loss
    return num_bytes, found["figures"]["peak_bytes"]


@pytest.mark.parametrize("module", [Trains, Between])
def test_every_byte_that_autograd_saves_is_counted(module: type[L.LightningModule]) -> None:
    ((saved, counted),) = run_ranks(saved_and_counted, 1, module)
    assert saved == counted


def test_eight_bits_are_nearly_the_same_and_said_to_be_not_lossless() -> None:
    plain = run_ranks(train, 2, None)[0]
    policy = {"policy": SwapAll(min_bytes=1), "compression": "8bit"}
    found = run_ranks(train, 2, policy)[0]
    assert not same_bits(found, plain)
    assert found["loss"] == pytest.approx(plain["loss"], rel=0.02)


class Own:
    """Masks go to the host; the second block runs again; the rest is the planner's."""

    def __init__(self) -> None:
        self.seen: list[TensorRecord] = []

    def choose(self, record: TensorRecord) -> Choice | None:
        self.seen.append(record)
        if record.layer == "blocks.1":
            return Choice.RECOMPUTE
        return Choice.HOST if record.dtype == "bool" and record.stage == 0 else None


def test_a_policy_of_ones_own() -> None:
    plain = run_ranks(train, 2, None)[0]
    found = run_ranks(train, 2, {"policy": Own()})[0]
    assert same_bits(found, plain)
    assert '"recompute": [[1]]' in found["plan"]
    assert '"swaps": [[{"layer": 0, "tensors": [' in found["plan"]
    assert found["figures"]["moved_bytes"] > 0


# --- budgets ---

# What the first of three stages holds besides: weights, gradients and Adam's state of its blocks.
BESIDES = (7 // 3 + 1) * 4 * sum(p.numel() * 4 for p in Block().parameters())


def test_what_passes_between_stages_is_part_of_what_they_hold() -> None:
    wish = {"budget": 1e8, "policy": KeepAll()}
    found = run_ranks(train, 3, wish, partition=[3, 2, 2], profile_steps=2)
    block, head = (
        sum(p.numel() * 4 for p in module.parameters()) for module in (Block(), nn.Linear(WIDTH, 4))
    )
    payload = SAMPLES // 8 * WIDTH * 4
    # One that comes, the next one's gradient and that of the backward that runs, and gradients of
    # two that are being sent.
    passing = [2 * payload, 3 * payload + 2 * payload, 3 * payload]
    for mine, weights, passes in zip(
        found, (3 * block, 2 * block, block + head), passing, strict=True
    ):
        # Adam counts its steps, too, in a number for each parameter.
        static = 1e8 - mine["figures"]["budget_bytes"] - passes - mine["room"]
        assert 4 * weights <= static <= 4 * weights + 4 * 8 * 3


def test_a_budget_is_kept_on_every_stage_and_costs_no_bit() -> None:
    plain = run_ranks(train, 3, {"policy": KeepAll()})
    held = plain[0]["figures"]["peak_bytes"]
    for host_budget in ("auto", 0):
        wish = {"budget": 0.6 * held + BESIDES + plain[0]["room"], "host_budget": host_budget}
        found = run_ranks(train, 3, wish)
        for mine, theirs in zip(found, plain, strict=True):
            assert same_bits(mine, theirs)
            figures = mine["figures"]
            assert 0 < figures["peak_bytes"] <= figures["budget_bytes"]
        # On the host there is room for optimizer state, too.
        for_saved = found[0]["figures"]["budget_bytes"]
        assert for_saved >= 0.95 * 0.6 * held
        if not host_budget:
            assert for_saved == pytest.approx(0.6 * held, rel=0.05)
            assert all(mine["figures"]["host_peak_bytes"] == 0 for mine in found)


def test_a_longer_batch_than_planned_for_makes_room_on_the_host() -> None:
    sizes = (SAMPLES, SAMPLES, 2 * SAMPLES)
    plain = run_ranks(train, 2, {"policy": KeepAll()}, batch_sizes=sizes)
    # The longest batch has made twice what the others do.
    usual = plain[0]["figures"]["peak_bytes"] / 2
    wish = {"budget": 1.2 * usual + 4 / 3 * BESIDES + plain[0]["room"]}
    found = run_ranks(train, 2, wish, batch_sizes=sizes)
    assert same_bits(found[0], plain[0])
    figures = found[0]["figures"]
    assert figures["peak_bytes"] <= figures["budget_bytes"] < 1.3 * usual
    assert figures["num_evicted"] > 0
    # Without room on the host the message says who, where, and what would have helped.
    wish["host_budget"] = 0
    message = (
        r"on stage 0 of virtual machine 0 \(.*\) is .*, and the layer 'blocks\.\d' would exceed"
        r" it by .* A budget that is .* larger would have been enough"
    )
    outcomes = run_ranks(train, 2, wish, batch_sizes=sizes, recompute="none", expect_failure=True)
    assert outcomes[0].error_type == "BudgetError"
    assert re.search(message, outcomes[0].message), outcomes[0].message


class RunsOut(nn.Module):
    """As a GPU does that has nothing left."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def fail(_: Tensor) -> None:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 ..."
            )

        y: Tensor = self.linear(x)
        if y.requires_grad and y.shape[0] == SAMPLES // 8:
            y.register_hook(fail)
        return y


class RunsOutOfMemory(Trains):
    """The fourth layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3] = RunsOut()


def test_a_device_that_runs_out_of_memory_names_layer_stage_and_budget() -> None:
    outcomes = run_ranks(train, 2, {"budget": "24GB"}, module=RunsOutOfMemory, expect_failure=True)
    (first,) = [outcome for outcome in outcomes if outcome.error_type == "BudgetError"]
    assert "stage 0 has run out of memory in the layer 'blocks.3' (action B0)" in first.message
    assert "MemoryCompression(budget=21.64e9)` instead of 24.00e9" in first.message


def test_a_budget_that_nothing_can_meet_says_what_would() -> None:
    outcomes = run_ranks(train, 2, {"budget": "100kB"}, expect_failure=True)
    first = next(outcome for outcome in outcomes if outcome.error_type == "BudgetError")
    assert "stage 0 has 100.00 kB" in first.message
    assert "a budget of" in first.message
    assert "so would more stages" in first.message


class Keeps(nn.Module):
    """Returns what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sigmoid()


class WritesToWhatWasSaved(L.LightningModule):
    """The code between the layers modifies what the first one needs for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeps() for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
            x += 1.0
        loss = F.cross_entropy(self.head(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("name", ["host", "device", "again"])
def test_what_is_modified_after_it_was_saved_is_still_torchs_error(name: str) -> None:
    outcomes = run_ranks(
        train,
        2,
        POLICIES[name],
        module=WritesToWhatWasSaved,
        expect_failure=True,
    )
    assert any("modified by an inplace operation" in outcome.message for outcome in outcomes), [
        str(outcome) for outcome in outcomes
    ]


# --- arguments and other plugins ---


@pytest.mark.parametrize(
    ("size", "expected"),
    [("20GB", 2e10), ("1.5 MiB", 1.5 * 2**20), (4096, 4096.0), ("512", 512.0), ("auto", None)],
)
def test_sizes(size: Any, expected: float | None) -> None:
    assert bytes_of_text("budget", size) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": "lots"}, r"budget='lots'.*'20GB'"),
        ({"budget": 0}, r"budget=0.*at least 1"),
        ({"budget": True}, r"budget=True"),
        ({"host_budget": -1}, r"host_budget=-1.*at least 0"),
        ({"policy": object()}, r"a method `choose`"),
        ({"compression": "zip"}, r"compression='zip'.*'lossless', '8bit' and None"),
        ({"precision": "16-mixed"}, r"pass a precision plugin"),
    ],
)
def test_arguments_that_mean_nothing(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MemoryCompression(**arguments)


def test_it_needs_the_strategy() -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        plugins=[MemoryCompression()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=1,
    )
    data = TensorDataset(torch.randn(8, WIDTH), torch.zeros(8, dtype=torch.long))
    with pytest.raises(ConfigurationError, match=r"Trainer\(strategy='pipeshift'\)"):
        trainer.fit(Trains(), DataLoader(data, batch_size=4))


def test_a_precision_beside_it_is_wrapped_and_two_others_are_still_lightnings_error() -> None:
    trainer = L.Trainer(
        accelerator="cpu", plugins=[MemoryCompression()], precision="bf16-mixed", logger=False
    )
    plugin = trainer.precision_plugin
    assert isinstance(plugin, MemoryCompression)
    assert isinstance(plugin, MixedPrecision)
    assert plugin.precision == "bf16-mixed"
    # A checkpoint keeps a plugin's state under its class's name.
    assert type(plugin).__qualname__ == "MixedPrecision"
    with pytest.raises(ValueError, match="Received both"):
        L.Trainer(accelerator="cpu", plugins=[DoublePrecision()], precision="bf16-mixed")
    # The one that it wraps is a precision, too.
    with pytest.raises(ValueError, match="Received both"):
        L.Trainer(
            accelerator="cpu", plugins=MemoryCompression(DoublePrecision()), precision="bf16-mixed"
        )


def beside_a_precision(plugin: MemoryCompression) -> Any:
    trainer = L.Trainer(accelerator="cpu", plugins=[plugin], precision="bf16-mixed", logger=False)
    found: Any = trainer.precision_plugin
    return found.precision, found.memory_request.budget_bytes


def test_a_plugin_that_came_by_pickle_is_allowed_beside_a_precision() -> None:
    """In a process that has made none."""
    found = run_ranks(beside_a_precision, 1, MemoryCompression(budget="20GB"))
    assert found == [("bf16-mixed", 20e9)]


class _OtherArguments:
    def _check_config_and_set_final_flags(self, flags: dict[str, Any]) -> None: ...

    def _check_and_init_precision(self) -> None: ...


class _NoPrecision:
    def _check_config_and_set_final_flags(self, plugins: Any, precision: Any) -> None: ...


@pytest.mark.parametrize("connector", [_OtherArguments, _NoPrecision, object])
def test_a_lightning_that_is_not_known_is_left_as_it_is(
    connector: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(vars(connector))
    monkeypatch.setattr("lightning.pytorch.trainer.trainer._AcceleratorConnector", connector)
    with pytest.warns(UserWarning, match=r"MemoryCompression\(MixedPrecision\("):
        MemoryCompression()
    assert dict(vars(connector)) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MemoryCompression(DoublePrecision())


def test_out_of_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        """
trainer:
  accelerator: cpu
  precision: bf16-mixed
  plugins:
    - class_path: lightning_pipeshift.MemoryCompression
      init_args: {budget: 20GB, compression: lossless}
    """
    )
    found = run_ranks(of_configuration, 1, str(tmp_path / "config.yaml"))[0]
    assert found == ("bf16-mixed", 2e10, "lossless")


def of_configuration(path: str) -> tuple[str, float | None, str | None]:
    """Reads it as ``pipeshift fit`` would."""
    from lightning_pipeshift.commands.cli import PipeShiftCLI

    cli = PipeShiftCLI(Trains, args=["--config", path], run=False, save_config_callback=None)
    plugin: Any = cli.trainer.precision_plugin
    request = plugin.memory_request
    return plugin.precision, request.budget_bytes, request.compression


def test_errors_are_of_the_packages_own_kind() -> None:
    assert issubclass(BudgetError, ConfigurationError)
