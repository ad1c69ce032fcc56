"""Checkpoints are Lightning's own: plain Lightning and any other split go on from them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeshift import LayerMigration, Move, PipeShiftCheckpointIO, PipeShiftStrategy
from lightning_pipeshift.testing.ranks import run_ranks
from tests.cases import some
from tests.features_models import (
    built,
    compare,
    differences,
    fit,
    on_one_device,
    on_rank,
    parameters_of,
    plain,
    quiet_trainer,
)
from tests.models import (
    NUM_CLASSES,
    NUM_FEATURES,
    ZOO,
    LayersOfItsOwn,
    ParameterGroups,
    SequentialMLP,
    points,
    sentences,
)


class Kept(ParameterGroups):
    """AdamW with three groups, a scheduler, hyperparameters, state of its own in the checkpoint."""

    def __init__(self, width: int = 16, note: str = "a note") -> None:
        super().__init__(width)
        self.save_hyperparameters()
        self.losses: list[Tensor] = []
        self.num_saves = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach())

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["num_saves"] = self.num_saves = self.num_saves + 1

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.num_saves = checkpoint["num_saves"]


def loaded(path: Path | str) -> dict[str, Any]:
    return torch.load(path, weights_only=True, map_location="cpu")


def without_paths(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from run to run (a ModelCheckpoint's state names folders), and without
    what PipeShift alone needs to go on.
    """
    checkpoint = {key: value for key, value in checkpoint.items() if key != "pipeshift"}
    callbacks = {}
    for name, state in checkpoint.get("callbacks", {}).items():
        kept = {
            k: v
            for k, v in state.items()
            if "path" not in k and k not in ("dirpath", "best_k_models")
        }
        callbacks[name] = kept
    return {**checkpoint, "callbacks": callbacks}


def size_without_ours(path: Path) -> int:
    found = loaded(path)
    found.pop("pipeshift", None)
    file = io.BytesIO()
    torch.save(found, file)
    return file.getbuffer().nbytes


def saver(folder: str = "kept", **arguments: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}-{step}", **arguments)


def saving(how: Any, name: str, folder: str, **arguments: Any) -> Any:
    make_module = Kept if name == "kept" else ZOO[name].make_module
    make_loader = points if name == "kept" else ZOO[name].loader
    record, _, _ = fit(
        how,
        make_module,
        make_loader(4),
        make_loader(2),
        callbacks=[saver(folder, every_n_train_steps=2)],
        enable_checkpointing=True,
        max_epochs=2,
        **arguments,
    )
    return record, sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", ["kept", "gpt2", "loose_parameters", "batch_norm", "accuracy"])
def test_a_checkpoint_holds_what_plain_lightning_would_have_saved(
    name: str, stages: int, tmp_path: Path
) -> None:
    strategy = {"microbatches": 1 if name == "batch_norm" else 4}
    _, names = compare(saving, name, "kept", stages=stages, strategy=strategy)
    assert len(names) == 4
    for each in names:
        expected, found = (
            loaded(tmp_path / "kept" / each),
            loaded(tmp_path / "ranks0" / "kept" / each),
        )
        problems = differences(without_paths(found), without_paths(expected), 1e-3, 1e-5, each)
        assert not problems, "\n".join(problems[:20])
        # What load_state_dict migrates old checkpoints by is in the dict's own attribute.
        assert type(found["state_dict"]) is type(expected["state_dict"])
        assert found["state_dict"]._metadata == expected["state_dict"]._metadata
    # Nothing else is stored that plain Lightning would not store: no views of larger tensors, no
    # copies.
    sizes = [size_without_ours(tmp_path / where / "kept" / names[-1]) for where in (".", "ranks0")]
    assert sizes[1] < 1.1 * sizes[0] + 2000


def test_a_checkpoint_of_mixed_precision_holds_the_scaler(tmp_path: Path) -> None:
    run_ranks(on_rank, 2, saving_with_scaler, {"microbatches": 1}, (), {}, cwd=tmp_path / "ranks0")
    on_one_device(saving_with_scaler)
    expected, found = (
        loaded(tmp_path / where / "kept" / "epoch=0-step=4.ckpt") for where in (".", "ranks0")
    )
    assert expected["MixedPrecision"]["scale"] == 2.0**14
    problems = differences(without_paths(found), without_paths(expected), 1e-3, 1e-5)
    assert not problems, "\n".join(problems[:20])


def saving_with_scaler(how: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    return saving(how, "kept", "kept", plugins=MixedPrecision("16-mixed", "cpu", scaler))


# --------------------------------------------------------------------------------------------------
# Into plain PyTorch and plain Lightning
# --------------------------------------------------------------------------------------------------


@pytest.mark.feature("Checkpoints", "files that plain PyTorch and plain Lightning load")
def test_a_checkpoint_loads_in_plain_pytorch_and_plain_lightning(tmp_path: Path) -> None:
    results = run_ranks(on_rank, 2, saving, {}, ("kept", "kept"), {}, cwd=tmp_path)
    trained = results[0][0]["parameters"]
    path = tmp_path / "kept" / "epoch=1-step=8.ckpt"

    module = built(lambda: Kept(width=16), seed=99)
    module.load_state_dict(loaded(path)["state_dict"])
    module_again = Kept.load_from_checkpoint(path)
    assert module_again.hparams == {"width": 16, "note": "a note"}
    for name, value in trained.items():
        assert torch.equal(module.state_dict()[name], value)
        assert torch.equal(module_again.state_dict()[name], value)
        assert type(loaded(path)["state_dict"][name]) is Tensor


class StatefulLoader:
    """Batches in the order of a seeded shuffle; goes on where a checkpoint left it."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(
            len(self), generator=torch.Generator().manual_seed(self.epoch)
        ).tolist()
        while self.position < len(order):
            self.position += 1
            yield self.batches[order[self.position - 1]]
        self.position = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class KeptWithDropout(Kept):
    """Draws in layers and between them."""

    def __init__(self, width: int = 16, dropout: float = 0.3) -> None:
        super().__init__(width)
        self.dropout = dropout

    def forward(self, features: Tensor) -> Tensor:
        features = torch.nn.functional.dropout(features, self.dropout, self.training)
        return super().forward(features)


def training(
    how: Any,
    dropout: float,
    stateful: bool,
    ckpt_path: str | None,
    folder: str,
    steps: int = 9,
    precision: str = "32-true",
    io: dict[str, bool] | None = None,
) -> Any:
    """Nine steps in epochs of four, every one of them saved."""
    L.seed_everything(5)
    train: Any = StatefulLoader(points(4)) if stateful else points(4)
    module = built(lambda: KeptWithDropout(dropout=dropout))
    trainer = quiet_trainer(
        how,
        callbacks=[saver(folder, every_n_train_steps=1)],
        enable_checkpointing=True,
        max_steps=steps,
        max_epochs=10,
        gradient_clip_val=0.5,
        precision=precision,
        plugins=[] if io is None else [PipeShiftCheckpointIO(**io)],
    )
    trainer.fit(module, train, points(2, seed=5), ckpt_path=ckpt_path)
    return plain(module.losses), parameters_of(module), module.num_saves


@pytest.mark.parametrize("step", [3, 4, 6])
@pytest.mark.parametrize("direction", ["to plain", "from plain", "to one stage"])
def test_training_goes_on_where_the_other_stopped(
    direction: str, step: int, tmp_path: Path
) -> None:
    """With the same losses as plain Lightning that goes on from a checkpoint of its own."""
    on_one_device(training, 0.0, True, None, "plain")
    pipeline = tmp_path / "pipeline"
    run_ranks(on_rank, 2, training, {"microbatches": 4}, (0.0, True, None, str(pipeline)), {})

    file = next(path.name for path in pipeline.iterdir() if path.name.endswith(f"step={step}.ckpt"))
    expected = on_one_device(training, 0.0, True, f"plain/{file}", "goes on")
    assert len(expected[0]) == 9 - step
    if direction == "to plain":
        found = [on_one_device(training, 0.0, True, str(pipeline / file), "goes on too")]
    else:
        ckpt = tmp_path / "plain" / file if direction == "from plain" else pipeline / file
        stages = 2 if direction == "from plain" else 1
        args = (0.0, True, str(ckpt), str(tmp_path / "goes on too"))
        found = run_ranks(on_rank, stages, training, {"microbatches": 4}, args, {})
    for mine in found:
        problems = differences(mine, expected, 1e-3, 1e-5)
        assert not problems, "\n".join(problems[:20])


@pytest.mark.feature("Checkpoints", "resuming with DDP")
def test_ddp_goes_on_from_a_pipelines_checkpoint(tmp_path: Path) -> None:
    pipeline = tmp_path / "pipeline"
    run_ranks(on_rank, 2, training, {"microbatches": 4}, (0.0, True, None, str(pipeline)), {})
    file = next(path for path in pipeline.iterdir() if path.name.endswith("step=3.ckpt"))
    expected = on_one_device(training, 0.0, True, str(file), "goes on")
    ddp = {"strategy": "ddp", "devices": 1}
    (found,) = run_ranks(training, 1, ddp, 0.0, True, str(file), str(tmp_path / "ddp"))
    problems = differences(found, expected, 0.0, 0.0)
    assert not problems, "\n".join(problems[:20])


@pytest.mark.feature("Checkpoints", "resuming on another split, with the same bits")
@pytest.mark.parametrize(
    ("partition", "stages", "precision"),
    some(
        [
            (partition, stages, precision)
            for partition, stages in (([1, 2, 1], 3), ([4], 1), ([1, 3], 2), ([0, 4], 2))
            for precision in ("32-true", "bf16-mixed")
        ],
        5,
    ),
)
def test_resumed_on_another_split_every_bit_is_the_same(
    partition: list[int], stages: int, precision: str, tmp_path: Path
) -> None:
    """With dropout, a clipped norm, AdamW, a scheduler; from an epoch's middle, and its end."""
    whole = tmp_path / "whole"
    args: tuple[Any, ...] = (0.3, True, None, str(whole), 9, precision)
    uninterrupted = run_ranks(
        on_rank, 2, training, {"microbatches": 4, "partition": [3, 1]}, args, {}
    )
    for step in (3, 4):
        file = next(path for path in whole.iterdir() if path.name.endswith(f"step={step}.ckpt"))
        folder = tmp_path / f"resumed{step}"
        args = (0.3, True, str(file), str(folder), 9, precision)
        strategy = {"microbatches": 4, "partition": partition}
        for losses, parameters, _ in run_ranks(on_rank, stages, training, strategy, args, {}):
            assert [float(x) for x in losses] == [float(x) for x in uninterrupted[0][0][step:]]
            for name, value in uninterrupted[0][1].items():
                assert torch.equal(parameters[name], value), name
        last = next(path.name for path in whole.iterdir() if path.name.endswith("step=9.ckpt"))
        expected, found = loaded(whole / last), loaded(folder / last)
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
            problems = differences(found[part], expected[part], 0.0, 0.0, part)
            assert not problems, "\n".join(problems[:20])


# --------------------------------------------------------------------------------------------------
# By the user's hand
# --------------------------------------------------------------------------------------------------


class SavesByItself(L.Callback):
    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint("in the middle.ckpt")
            trainer.save_checkpoint("weights.ckpt", weights_only=True)


def saving_by_hand(how: Any) -> Any:
    record, trainer, module = fit(how, Kept, points(4), callbacks=[SavesByItself()], max_epochs=1)
    trainer.save_checkpoint("after.ckpt")
    trainer.save_checkpoint("weights after.ckpt", weights_only=True)
    return record, parameters_of(module)


def test_save_checkpoint_in_the_middle_and_after_the_fit(tmp_path: Path) -> None:
    compare(saving_by_hand)
    for name in ("in the middle", "weights", "after", "weights after"):
        expected, found = (loaded(tmp_path / where / f"{name}.ckpt") for where in (".", "ranks0"))
        problems = differences(without_paths(found), without_paths(expected), 1e-3, 1e-5, name)
        assert not problems, "\n".join(problems[:20])


class Evaluated(SequentialMLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def best_and_last(how: Any) -> Any:
    best = ModelCheckpoint("best", monitor="val_loss", save_last=True, filename="{epoch}")
    record, trainer, module = fit(
        how,
        Evaluated,
        points(2),
        points(4, seed=5),
        callbacks=[best],
        enable_checkpointing=True,
        max_epochs=15,
    )
    seen: list[Any] = [record, Path(best.best_model_path).name]
    seen.append(trainer.test(module, points(2, seed=6), ckpt_path="best", verbose=False))
    seen.append(parameters_of(module))
    seen.append(trainer.validate(module, points(2, seed=6), ckpt_path="last", verbose=False))
    seen.append(parameters_of(module))
    seen.append(trainer.predict(module, points(2, seed=6), ckpt_path=best.best_model_path))
    fresh = quiet_trainer(how)
    seen.append(
        fresh.test(
            built(Evaluated, seed=3), points(2), ckpt_path=best.best_model_path, verbose=False
        )
    )
    return plain(seen)


def test_evaluation_of_the_best_and_the_last_checkpoint() -> None:
    _, best, *_ = compare(best_and_last)
    assert best != "epoch=14.ckpt", "the best should not be the last"


def going_on(how: Any) -> Any:
    """``ckpt_path="last"``, and a fit that goes on for more epochs with the same Trainer."""
    first = fit(
        how,
        Kept,
        points(3),
        callbacks=[ModelCheckpoint("kept", save_last=True)],
        enable_checkpointing=True,
        max_epochs=2,
    )
    module = built(Kept, seed=77)
    trainer = quiet_trainer(
        how,
        callbacks=[ModelCheckpoint("kept", save_last=True)],
        enable_checkpointing=True,
        max_epochs=4,
    )
    trainer.fit(module, points(3), ckpt_path="last")
    return first[0], parameters_of(module), plain(module.losses), trainer.global_step


def test_a_new_trainer_goes_on_from_the_last_checkpoint() -> None:
    *_, steps = compare(going_on)
    assert steps == 12


def tied_weights(how: Any) -> Any:
    record, trainer, _ = fit(how, ZOO["gpt2"].make_module, sentences(3), max_epochs=1)
    trainer.save_checkpoint("tied.ckpt")
    return record


def test_tied_parameters_are_saved_under_both_names_and_stored_once(tmp_path: Path) -> None:
    compare(tied_weights, stages=3)
    expected, found = (
        loaded(tmp_path / where / "tied.ckpt")["state_dict"] for where in (".", "ranks0")
    )
    assert list(found) == list(expected)
    assert torch.equal(found["model.lm_head.weight"], found["model.transformer.wte.weight"])
    module = built(ZOO["gpt2"].make_module, seed=3)
    module.load_state_dict(found)
    loader: DataLoader = sentences(1)
    assert module.training_step(next(iter(loader)), 0).isfinite()


class Remembers(nn.Module):
    """A layer whose buffers are other tensors after every call; one there is only from the first.

    What it adds to a state dict besides is a number that changes too.
    """

    average: Tensor
    last: Tensor | None

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.num_calls = 0
        self.register_buffer("average", torch.zeros(width))
        self.register_buffer("last", None)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.linear(hidden)
        self.average = 0.5 * self.average + 0.5 * hidden.detach().mean(dim=0)
        self.last = hidden.detach()[:2].clone()
        self.num_calls += 1
        return hidden + 0.1 * self.average

    def get_extra_state(self) -> Any:
        return {"num_calls": self.num_calls}

    def set_extra_state(self, state: Any) -> None:
        self.num_calls = state["num_calls"]


class Rememberers(SequentialMLP):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(NUM_FEATURES, 16),
            *(Remembers() for _ in range(3)),
            nn.Linear(16, NUM_CLASSES),
        )


def remembering(how: Any) -> Any:
    record, trainer, module = fit(how, Rememberers, points(3), max_epochs=1)
    trainer.save_checkpoint("kept.ckpt")
    # After the fit the model is whole on every rank.
    return record, {name: plain(value) for name, value in module.state_dict().items()}


def test_buffers_that_a_layer_replaces_are_saved(tmp_path: Path) -> None:
    compare(remembering, strategy={"microbatches": 1})
    expected, found = (loaded(tmp_path / where / "kept.ckpt") for where in (".", "ranks0"))
    assert expected["state_dict"]["model.2._extra_state"] == {"num_calls": 3}
    assert list(found["state_dict"]) == list(expected["state_dict"])
    problems = differences(found["state_dict"], expected["state_dict"], 1e-3, 1e-5)
    assert not problems, "\n".join(problems)


class Adaptive(Evaluated):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


def evaluated_before_it_is_saved(how: Any) -> Any:
    record, trainer, module = fit(how, Adaptive, points(3), max_epochs=1)
    strategy = trainer.strategy
    if isinstance(strategy, PipeShiftStrategy):
        # As if the layers' measured times had been others.
        strategy._options = replace(strategy._options, partition=[4, 1])
    trainer.validate(module, points(2), verbose=False)
    trainer.save_checkpoint("kept.ckpt")
    return record


def test_a_checkpoint_after_an_evaluation_has_the_optimizers_whole_state(tmp_path: Path) -> None:
    compare(evaluated_before_it_is_saved, strategy={"partition": [1, 4]})
    expected, found = (loaded(tmp_path / where / "kept.ckpt") for where in (".", "ranks0"))
    assert len(found["optimizer_states"][0]["state"]) == len(
        expected["optimizer_states"][0]["state"]
    )
    problems = differences(found["optimizer_states"], expected["optimizer_states"], 1e-3, 1e-5)
    assert not problems, "\n".join(problems)


class Fused(LayersOfItsOwn):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


def training_fused(how: Any, folder: str, ckpt_path: str | None, moves: list[Move]) -> Any:
    L.seed_everything(5)
    module = built(Fused)
    trainer = quiet_trainer(
        how,
        callbacks=[
            saver(folder, every_n_train_steps=1),
            LayerMigration(moves=moves, watches=False),
        ],
        enable_checkpointing=True,
        max_steps=6,
        max_epochs=10,
    )
    trainer.fit(module, StatefulLoader(points(4)), ckpt_path=ckpt_path)
    return parameters_of(module)


def test_a_fused_optimizer_goes_on_after_moves_and_checkpoints(tmp_path: Path) -> None:
    def run(stages: int, partition: list[int], moves: list[Move], at: str | None = None) -> Any:
        strategy = {"microbatches": 2, "partition": partition}
        args = str(tmp_path / f"{partition} {at}"), at, moves
        return run_ranks(on_rank, stages, training_fused, strategy, args, {})[0]

    moves = [Move(step=1, layer="third", stage=1), Move(step=3, layer="third", stage=0)]
    expected = run(1, [4], [])
    assert not differences(run(2, [3, 1], moves), expected, 0, 0)
    (file,) = (tmp_path / "[3, 1] None").glob("*step=2.ckpt")
    assert not differences(run(3, [1, 2, 1], [], str(file)), expected, 0, 0)
