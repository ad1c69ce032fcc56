"""Models that begin with what somebody else saved, and files for those who go on with them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import pipeshift_command
from lightning_pipeshift import CheckpointError, PipeShiftCheckpointIO, load_pretrained
from lightning_pipeshift.checkpoint.export import export
from lightning_pipeshift.model.parameters.deferred_init import DeferredInit
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import differences, on_rank, quiet_trainer
from tests.models import NUM_TOKENS, sentences


def config() -> GPT2Config:
    return GPT2Config(
        vocab_size=NUM_TOKENS,
        n_positions=32,
        n_embd=16,
        n_layer=3,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


class FineTuned(L.LightningModule):
    """Built as users of Hugging Face build it, and, with ``late``, as big models are."""

    def __init__(self, path: str, late: bool) -> None:
        super().__init__()
        self.path, self.late = path, late
        self.model: Any = None if late else GPT2LMHeadModel.from_pretrained(path)

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPT2LMHeadModel(config())
            load_pretrained(self.model, self.path)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In several safetensors files with an index."""
    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(4)
    GPT2LMHeadModel(config()).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def fine_tuning(how: Any, path: str, late: bool, folder: str) -> None:
    module = FineTuned(path, late)
    callback = ModelCheckpoint(folder, save_top_k=0, save_last=True)
    trainer = quiet_trainer(
        how,
        max_epochs=1,
        callbacks=[callback],
        enable_checkpointing=True,
        plugins=[PipeShiftCheckpointIO(sharded=late)],
    )
    trainer.fit(module, sentences(3))


@pytest.fixture(scope="module")
def fine_tuned(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Checkpoints: a file of one stage that had the whole model, a folder of two that had not."""
    folder = tmp_path_factory.mktemp("fine tuned")
    found = {}
    for late, stages in ((False, 1), (True, 2)):
        path = folder / str(late)
        args = (str(pretrained), late, str(path))
        run_ranks(on_rank, stages, fine_tuning, {"microbatches": 2}, args, {})
        found[late] = path / "last.ckpt"
    return found


def test_each_rank_loads_its_own_and_trains_as_if_it_had_loaded_all(
    fine_tuned: dict[bool, Path],
) -> None:
    io = PipeShiftCheckpointIO()
    whole, parts = io.load_checkpoint(fine_tuned[False]), io.load_checkpoint(fine_tuned[True])
    assert not differences(parts["state_dict"], whole["state_dict"], 0.0, 0.0)
    assert not differences(parts["optimizer_states"], whole["optimizer_states"], 0.0, 0.0)


@pytest.mark.parametrize("late", [False, True])
def test_an_export_is_loaded_by_its_own_library(
    late: bool, fine_tuned: dict[bool, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "model.safetensors"
    monkeypatch.setattr(sys, "argv", ["pipeshift", "export", str(fine_tuned[late]), str(out)])
    pipeshift_command.main()
    config().save_pretrained(tmp_path)
    model = GPT2LMHeadModel.from_pretrained(tmp_path)
    expected = PipeShiftCheckpointIO().load_checkpoint(fine_tuned[True])["state_dict"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[f"model.{name}"]), name
    assert model.lm_head.weight is model.transformer.wte.weight


def test_an_export_to_a_file_is_a_complete_checkpoint(
    fine_tuned: dict[bool, Path], tmp_path: Path
) -> None:
    export(fine_tuned[True], tmp_path / "one.ckpt")
    found = torch.load(tmp_path / "one.ckpt", weights_only=True)
    expected = PipeShiftCheckpointIO().load_checkpoint(fine_tuned[True])
    assert found.keys() == expected.keys()
    assert not differences(found["state_dict"], expected["state_dict"], 0.0, 0.0)
    assert not differences(found["optimizer_states"], expected["optimizer_states"], 0.0, 0.0)


def test_an_unknown_prefix_is_an_error(fine_tuned: dict[bool, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"begins with 'net\.'\. They are: model\.transf"):
        export(fine_tuned[True], tmp_path / "one.safetensors", prefix="net.")
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------
# Where values come from
# --------------------------------------------------------------------------------------------------


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


@pytest.mark.parametrize("kind", ["state dict", "checkpoint"])
def test_files_of_torch_are_loaded_too(kind: str, tmp_path: Path) -> None:
    source, target = small(), small()
    state = source.state_dict()
    torch.save(state if kind == "state dict" else {"state_dict": state}, tmp_path / "a.pt")
    load_pretrained(target, tmp_path / "a.pt")
    assert not differences(dict(target.state_dict()), dict(state), 0.0, 0.0)
    deferred = DeferredInit()
    with deferred.recording():
        late: Any = small()
        load_pretrained(late, tmp_path / "a.pt")
    assert late[0].weight.is_meta
    assert torch.equal(deferred.values(late[0].weight), state["0.weight"])


def test_bad_files(tmp_path: Path, pretrained: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"Not in the file: 0\.weight, .*Not in the model: tr"
    ):
        load_pretrained(small(), pretrained)
    load_pretrained(small(), pretrained, strict=False)
    with pytest.raises(CheckpointError, match=r"There is no file .*model\.safetensors"):
        load_pretrained(small(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(CheckpointError, match="is truncated or damaged"):
        load_pretrained(small(), tmp_path)
    torch.save({"0.weight": torch.zeros(4, 4)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"'0.weight' has the shape \(4, 4\) in"):
        load_pretrained(small(), tmp_path / "a.pt", strict=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"weight_map": {"0.weight": "../model.safetensors"}}', "which is not in the same folder"),
        ('{"weight_map": {"0.weight": "/etc/passwd"}}', "which is not in the same folder"),
        ('{"weight_map": {"0.weight": 3}}', "which is not in the same folder"),
        ('{"weight_map": [3]}', "is damaged"),
        ("[]", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("{", "is damaged"),
    ],
)
def test_an_index_names_files_beside_it(content: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    save_file({"0.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(small(), folder)


def test_an_export_replaces_no_folder(fine_tuned: dict[bool, Path], tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(CheckpointError, match="is a folder, but the output is one file"):
        export(fine_tuned[True], tmp_path)
    assert (tmp_path / "kept").exists()


def test_the_commands_help_names_the_export(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pipeshift", "--help"])
    pipeshift_command.main()
    assert "export     make one file" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["pipeshift", "export", "-h"])
    with pytest.raises(SystemExit):
        pipeshift_command.main()
    assert "--prefix" in capsys.readouterr().out
