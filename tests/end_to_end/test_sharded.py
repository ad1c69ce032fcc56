"""Checkpoints that every rank writes its part of."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_pipeshift import CheckpointError, PipeShiftCheckpointIO
from lightning_pipeshift.checkpoint import atomic
from lightning_pipeshift.checkpoint.sharded import Writing
from lightning_pipeshift.testing.ranks import RanksFailed, run_ranks
from tests.end_to_end.test_checkpoint import loaded, training, without_paths
from tests.features_models import built, differences, on_one_device, on_rank, quiet_trainer
from tests.models import SequentialMLP, points

SHARDED = {"sharded": True, "asynchronous": False}
ASYNCHRONOUS = {"sharded": True, "asynchronous": True}
TWO_STAGES = {"microbatches": 4, "partition": [3, 1]}
DROPOUT = 0.3


def at_step(folder: Path, step: int) -> Path:
    return next(path for path in folder.iterdir() if path.name.endswith(f"step={step}.ckpt"))


def train(
    stages: int,
    strategy: dict[str, Any],
    folder: Path,
    ckpt_path: Path | None = None,
    io: dict[str, bool] | None = None,
) -> list[Any]:
    start = None if ckpt_path is None else str(ckpt_path)
    args = (DROPOUT, True, start, str(folder), 9, "32-true", io)
    return run_ranks(on_rank, stages, training, strategy, args, {})


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run on two stages with every step saved in one file, and what came of it."""
    folder = tmp_path_factory.mktemp("one file")
    return folder, train(2, TWO_STAGES, folder)[0]


def assert_same_run(found: Any, expected: Any, step: int) -> None:
    losses, parameters, _ = found
    assert [float(x) for x in losses] == [float(x) for x in expected[0][step:]]
    for name, value in expected[1].items():
        assert torch.equal(parameters[name], value), name


@pytest.mark.parametrize("io", [SHARDED, ASYNCHRONOUS], ids=["synchronous", "asynchronous"])
def test_a_folder_holds_what_a_file_holds(
    io: dict[str, bool], one_file: tuple[Path, Any], tmp_path: Path
) -> None:
    for found in train(2, TWO_STAGES, tmp_path / "sharded", io=io):
        assert_same_run(found, one_file[1], 0)
    for step in (1, 4, 9):
        folder = at_step(tmp_path / "sharded", step)
        assert folder.is_dir()
        found = PipeShiftCheckpointIO().load_checkpoint(folder)
        expected = loaded(at_step(one_file[0], step))
        problems = differences(without_paths(found), without_paths(expected), 0.0, 0.0)
        assert not problems, "\n".join(problems[:20])
        assert list(found["state_dict"]) == list(expected["state_dict"])
        assert type(found["state_dict"]) is type(expected["state_dict"])
        assert found["state_dict"]._metadata == expected["state_dict"]._metadata
    left = [path.name for path in (tmp_path / "sharded").iterdir() if path.name.startswith(".")]
    assert left == []


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, saved in folders."""
    folder = tmp_path_factory.mktemp("folders")
    train(2, TWO_STAGES, folder, io=SHARDED)
    return folder


@pytest.mark.feature("Checkpoints", "sharded folders")
@pytest.mark.parametrize(
    ("stages", "strategy"),
    [(1, {"partition": [4]}), (3, {"partition": [1, 2, 1]}), (2, {"partition": [1, 3]})],
    ids=["one stage", "three", "cut elsewhere"],
)
@pytest.mark.parametrize("step", [3, 4])
def test_a_run_goes_on_from_a_folder_on_another_split(
    stages: int,
    strategy: dict[str, Any],
    step: int,
    folders: Path,
    one_file: tuple[Path, Any],
    tmp_path: Path,
) -> None:
    strategy = {"microbatches": 4, **strategy}
    start = at_step(folders, step)
    for found in train(stages, strategy, tmp_path / "goes on", start, SHARDED):
        assert_same_run(found, one_file[1], step)
    last = PipeShiftCheckpointIO().load_checkpoint(at_step(tmp_path / "goes on", 9))
    expected = loaded(at_step(one_file[0], 9))
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        problems = differences(last[part], expected[part], 0.0, 0.0, part)
        assert not problems, "\n".join(problems[:20])


def test_a_folder_of_two_virtual_machines_goes_on_in_one(
    one_file: tuple[Path, Any], tmp_path: Path
) -> None:
    """Both virtual machines write; what they hold is the same, so each parameter is there once."""
    strategy = {"microbatches": 4, "virtual_machines": 2, "partition": [[3, 1], [1, 3]]}
    ranks = train(4, strategy, tmp_path / "four", io=ASYNCHRONOUS)
    found = PipeShiftCheckpointIO().load_checkpoint(at_step(tmp_path / "four", 9))
    for name, value in ranks[0][1].items():
        assert torch.equal(found["state_dict"][name], value), name
    marker = json.loads((at_step(tmp_path / "four", 9) / "checkpoint.json").read_text())
    assert sum(name.endswith(".distcp") for name in marker["files"]) == 4
    size = sum(file["bytes"] for name, file in marker["files"].items() if name.endswith(".distcp"))
    one = sum(t.numel() * t.element_size() for t in found["state_dict"].values())
    # Parameters and AdamW's two moments, each in an archive of its own.
    assert size < 3 * one + 60 * 2000
    goes_on = train(2, TWO_STAGES, tmp_path / "two", at_step(tmp_path / "four", 4))
    assert len(goes_on[0][0]) == 5


def test_a_file_starts_a_run_that_saves_folders(one_file: tuple[Path, Any], tmp_path: Path) -> None:
    start = at_step(one_file[0], 3)
    for found in train(2, TWO_STAGES, tmp_path / "goes on", start, ASYNCHRONOUS):
        assert_same_run(found, one_file[1], 3)


def test_other_strategies_load_a_folder(folders: Path, one_file: tuple[Path, Any]) -> None:
    """Lightning's own go on from it with the plugin."""
    args = (DROPOUT, True, str(at_step(folders, 4)), "plain", 9, "32-true", {"sharded": False})
    losses, *_ = on_one_device(training, *args)
    assert len(losses) == 5


def wrapped(how: Any, sharded: bool) -> None:
    io = AsyncCheckpointIO(PipeShiftCheckpointIO(sharded=True) if sharded else None)
    trainer = quiet_trainer(
        how,
        callbacks=[ModelCheckpoint("kept", filename="one")],
        enable_checkpointing=True,
        max_epochs=1,
        plugins=[io],
    )
    trainer.fit(built(SequentialMLP), points(2))


@pytest.mark.feature("Checkpoints", "`AsyncCheckpointIO`")
def test_lightnings_own_plugin_writes_files_beside_the_training(tmp_path: Path) -> None:
    run_ranks(on_rank, 2, wrapped, {}, (False,), {}, cwd=tmp_path)
    assert loaded(tmp_path / "kept" / "one.ckpt")["global_step"] == 2
    with pytest.raises(RanksFailed, match="AsyncCheckpointIO removes older checkpoints before"):
        run_ranks(on_rank, 2, wrapped, {}, (True,), {})


# --------------------------------------------------------------------------------------------------
# Bad input
# --------------------------------------------------------------------------------------------------


def without_marker(folder: Path) -> None:
    (folder / "checkpoint.json").unlink()


def damaged_marker(folder: Path) -> None:
    (folder / "checkpoint.json").write_text("{")


def data_file(folder: Path, ending: str) -> Path:
    return max(folder.rglob(f"*{ending}"), key=lambda path: path.stat().st_size)


def truncated(folder: Path) -> None:
    file = data_file(folder, ".distcp")
    file.write_bytes(file.read_bytes()[:-100])


def missing(folder: Path) -> None:
    data_file(folder, ".distcp").unlink()


def one_bit_wrong(folder: Path) -> None:
    """In a tensor's numbers, which is where most bits are."""
    file = data_file(folder, ".distcp")
    content = bytearray(file.read_bytes())
    content[content.index(b"data/0") + 200] ^= 1
    file.write_bytes(content)


def with_marker(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        marker = folder / "checkpoint.json"
        content = json.loads(marker.read_text())
        change(content)
        marker.write_text(json.dumps(content))

    return damage


def one_bit_of(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = data_file(folder, name)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    return damage


def with_index(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Of one who makes the checksums fit."""

    def damage(folder: Path) -> None:
        file = data_file(folder, "index.json")
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))
        atomic.write_marker(folder, file.parent.name)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_marker, "is a folder without checkpoint.json, which is written last"),
        (damaged_marker, "checkpoint.json is damaged"),
        (truncated, r"__\d_0\.distcp has \d+ bytes instead of \d+"),
        (missing, r"__\d_0\.distcp is missing"),
        (one_bit_wrong, "are not those that were written"),
        (one_bit_of(".metadata"), r"\.metadata is damaged: its bytes are not those"),
        (one_bit_of("checkpoint.pt"), r"checkpoint\.pt is damaged: its bytes are not those"),
        (one_bit_of("index.json"), r"index\.json is damaged: its bytes are not those"),
        (with_marker(lambda found: found.update(format="x")), "is not the marker of a checkpoint"),
        (with_marker(lambda found: found.update(version=99)), "is a checkpoint of version 99"),
        (with_marker(lambda found: found.update(data="..")), "'..' is not a plain name"),
        (
            with_marker(lambda found: found["files"].update({"/etc/passwd": {"bytes": 1}})),
            "not a plain name",
        ),
        (with_marker(lambda found: found["files"].clear()), "does not name checkpoint.pt"),
        (with_marker(lambda found: found.update(files=[1])), "checkpoint.json is damaged"),
        (with_index(lambda found: found.update(x=["../index.json", 0, 1])), "'x' is not at"),
        (with_index(lambda found: found.update(x=["__0_0.distcp", 1, 10**12])), "'x' is not at"),
        (with_index(lambda found: found.update(x=3)), r"index\.json is damaged"),
    ],
)
def test_a_damaged_folder_is_not_loaded(
    damage: Callable[[Path], None], message: str, folders: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.ckpt"
    shutil.copytree(at_step(folders, 3), copy)
    damage(copy)
    with pytest.raises(CheckpointError, match=message):
        PipeShiftCheckpointIO().load_checkpoint(copy)


def test_a_damaged_folder_ends_every_rank(folders: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.ckpt"
    shutil.copytree(at_step(folders, 3), copy)
    one_bit_wrong(copy)
    with pytest.raises(RanksFailed, match=r"(?s)CheckpointError: .* are not those that were"):
        train(2, TWO_STAGES, tmp_path / "goes on", copy)


def killed_while_saving(dead: int, folder: Path) -> Any:
    def finish(writing: Writing) -> None:
        if dist.get_rank() == dead and (folder / f"{dead}-first").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / f"{dist.get_rank()}-first").touch()
        original(writing)

    original = Writing.finish
    Writing.finish = finish  # type: ignore[assignment, method-assign]
    args = (DROPOUT, True, None, str(folder / "kept"), 9, "32-true", ASYNCHRONOUS)
    return on_rank(training, TWO_STAGES, args, {})


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_dies_while_a_folder_is_written_beside_the_training(
    dead: int, tmp_path: Path
) -> None:
    outcomes = run_ranks(killed_while_saving, 2, dead, tmp_path, expect_failure=True)
    assert outcomes[1 - dead].error_type == "StageFailedError", outcomes
    complete = [path for path in (tmp_path / "kept").iterdir() if not path.name.startswith(".")]
    assert len(complete) == 1
    assert PipeShiftCheckpointIO().load_checkpoint(complete[0])["global_step"] > 0


def failing_before_the_exchange(folder: Path) -> Any:
    def save(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("not of torch's exchange")
        return original(*args, **kwargs)

    original, dcp.save = dcp.save, save
    args = (DROPOUT, True, None, str(folder / "kept"), 9, "32-true", ASYNCHRONOUS)
    return on_rank(training, TWO_STAGES, args, {})


def test_an_error_of_one_rank_alone_ends_the_others(tmp_path: Path) -> None:
    """They waited for it in `torch.distributed.checkpoint`, and it for them in another exchange."""
    outcomes = run_ranks(failing_before_the_exchange, 2, tmp_path, expect_failure=True)
    assert [outcome.failed for outcome in outcomes] == [True, True]
    assert all("ValueError: not of" in f"{each.output}{each}" for each in outcomes)
