"""Files and folders that are whole or not there, whatever happens while they are written."""

from __future__ import annotations

import ctypes
import functools
import http.server
import os
import pickle
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_pipeshift import CheckpointError, ConfigurationError, PipeShiftCheckpointIO
from lightning_pipeshift.files import temporary_next_to, write_text
from lightning_pipeshift.testing.ranks import RanksFailed, run_ranks
from tests.features_models import built, on_rank, quiet_trainer
from tests.models import NUM_CLASSES, LayersOfItsOwn, SequentialMLP, points

# About 4 MB.
LENGTH = 1_000_000


def a_checkpoint(number: int) -> dict[str, Any]:
    state = {f"layer.{i}": torch.full((LENGTH // 4,), float(number)) for i in range(4)}
    return {"number": number, "state_dict": state}


def number_in(path: Path) -> int:
    """Which of the above it is, all of it."""
    found = PipeShiftCheckpointIO().load_checkpoint(path)
    for value in found["state_dict"].values():
        assert bool((value == found["number"]).all())
    return int(found["number"])


def an_io(sharded: bool) -> PipeShiftCheckpointIO:
    io = PipeShiftCheckpointIO(sharded=sharded)
    if sharded:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        io.connect(dist.group.WORLD)
    return io


# --------------------------------------------------------------------------------------------------
# Killed
# --------------------------------------------------------------------------------------------------


def save_again_and_again(path: Path, sharded: bool, started: Path) -> None:
    io = an_io(sharded)
    # A second time, so that one has been replaced by then.
    for number in (1, 2):
        io.save_checkpoint(a_checkpoint(number), path)
    started.touch()
    for number in range(3, 10_000):
        io.save_checkpoint(a_checkpoint(number), path)


def killed_while_saving(path: Path, sharded: bool, kills: int) -> list[int]:
    """Runs as one rank: what is found under the name after each kill."""
    found = []
    chance = random.Random(0)
    for attempt in range(kills):
        started = path.with_name(f"started {attempt}")
        child = os.fork()
        if child == 0:
            try:
                save_again_and_again(path, sharded, started)
            finally:
                os._exit(1)
        while not started.exists():
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found.append(number_in(path))
    an_io(sharded).save_checkpoint(a_checkpoint(0), path)
    return found


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])
def test_a_kill_leaves_a_whole_checkpoint(sharded: bool, tmp_path: Path) -> None:
    path = tmp_path / "kept.ckpt"
    (found,) = run_ranks(killed_while_saving, 1, path, sharded, 12)
    assert all(number >= 2 for number in found)
    assert number_in(path) == 0
    left = [each.name for each in tmp_path.iterdir() if not each.name.startswith("started")]
    assert left == ["kept.ckpt"], "the next save removes what a kill has left"


# --------------------------------------------------------------------------------------------------
# Full
# --------------------------------------------------------------------------------------------------


def mounted(folder: Path) -> None:
    """Puts a small file system over a folder, for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    private, new_namespace = 0x40000 | 0x4000, 0x20000
    for result in (
        libc.unshare(new_namespace),
        libc.mount(b"none", b"/", None, ctypes.c_ulong(private), None),
        libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), b"size=6m"),
    ):
        if result:
            raise OSError(ctypes.get_errno(), "no file system of our own")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a file system is mounted: needs root")


def save_where_there_is_no_room(folder: Path, sharded: bool) -> Any:
    mounted(folder)
    io = an_io(sharded)
    path = folder / "kept.ckpt"
    io.save_checkpoint(a_checkpoint(1), path)
    with pytest.raises(CheckpointError) as caught:
        io.save_checkpoint(a_checkpoint(2), path)
    return str(caught.value), number_in(path), [each.name for each in folder.iterdir()]


@needs_root
@pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])
def test_a_full_disk_leaves_the_old_checkpoint(sharded: bool, tmp_path: Path) -> None:
    ((message, number, names),) = run_ranks(save_where_there_is_no_room, 1, tmp_path, sharded)
    assert "kept.ckpt could not be written" in message
    assert "The earlier content is unchanged" in message
    assert number == 1
    assert names == ["kept.ckpt"]


def save_late(folder: Path) -> Any:
    """The failure of a save beside the training is raised at the next one, or at the end."""
    mounted(folder)
    io = PipeShiftCheckpointIO(asynchronous=True)
    io.save_checkpoint(a_checkpoint(1), folder / "a.ckpt")
    io.save_checkpoint(a_checkpoint(2), folder / "b.ckpt")
    with pytest.raises(CheckpointError, match=r"b\.ckpt could not be written"):
        io.teardown()
    io.teardown()
    return number_in(folder / "a.ckpt")


@needs_root
def test_a_full_disk_beside_the_training(tmp_path: Path) -> None:
    assert run_ranks(save_late, 1, tmp_path) == [1]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One that all ranks see."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path], check=True)
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def train_on_a_full_disk(how: Any, folder: Path, io: dict[str, bool]) -> None:
    callback = ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=1)
    trainer = quiet_trainer(
        how,
        max_epochs=3,
        callbacks=[callback],
        enable_checkpointing=True,
        plugins=[PipeShiftCheckpointIO(**io)],
    )
    trainer.fit(built(lambda: SequentialMLP(width=64)), points(4))


@needs_root
@pytest.mark.parametrize("io", [{}, {"sharded": True}], ids=["file", "folder"])
def test_a_full_disk_ends_the_run_with_its_reason(io: dict[str, bool], small_disk: Path) -> None:
    with pytest.raises(RanksFailed, match=r"CheckpointError: .* could not be written"):
        run_ranks(on_rank, 2, train_on_a_full_disk, {}, (small_disk, io), {})


# --------------------------------------------------------------------------------------------------
# Not everywhere
# --------------------------------------------------------------------------------------------------


def on_hosts_of_their_own(how: Any, folder: Path, loads: bool) -> None:
    trainer = quiet_trainer(
        how,
        max_epochs=1,
        callbacks=[ModelCheckpoint(folder)],
        enable_checkpointing=True,
        plugins=[PipeShiftCheckpointIO(sharded=True)],
    )
    if os.environ["RANK"] == "1":
        mounted(folder)
    start = folder / "start.ckpt" if loads else None
    trainer.fit(built(SequentialMLP), points(2), ckpt_path=start)


@needs_root
def test_a_folder_that_only_some_ranks_see(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"is not the same folder everywhere.*which rank\(s\) 1"):
        run_ranks(on_rank, 2, on_hosts_of_their_own, {}, (tmp_path, False), {})
    assert [path.name for path in tmp_path.iterdir()] == []
    PipeShiftCheckpointIO().save_checkpoint(a_checkpoint(1), tmp_path / "start.ckpt")
    with pytest.raises(RanksFailed, match=r"start\.ckpt: rank\(s\) 1 do not see it"):
        run_ranks(on_rank, 2, on_hosts_of_their_own, {}, (tmp_path, True), {})


# --------------------------------------------------------------------------------------------------
# Damaged, or of something else
# --------------------------------------------------------------------------------------------------


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def empty(content: bytes) -> bytes:
    return b""


def one_bit_wrong(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 4
    return bytes(changed)


def no_checkpoint(content: bytes) -> bytes:
    return b"these are no tensors" * 100


@pytest.mark.parametrize("damage", [truncated, empty, one_bit_wrong, no_checkpoint])
def test_a_damaged_file_is_not_loaded(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "kept.ckpt"
    io = PipeShiftCheckpointIO()
    io.save_checkpoint(a_checkpoint(1), path)
    assert number_in(path) == 1
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"kept\.ckpt (is|holds) .*(damaged|empty|more than)"):
        io.load_checkpoint(path)


def test_the_ranks_share_the_work_of_looking_for_damage(tmp_path: Path) -> None:
    path = tmp_path / "kept.ckpt"
    io = PipeShiftCheckpointIO()
    io.save_checkpoint(a_checkpoint(1), path)
    path.write_bytes(one_bit_wrong(path.read_bytes()))
    found = []
    for turn in range(3):
        try:
            io.open(path, None, lambda _, load: load(), (turn, 3))
        except CheckpointError:
            found.append(turn)
    assert len(found) == 1


class RunsCode:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("it ran"),)


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])
def test_nothing_is_run_unless_asked_for(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "kept.ckpt"
    run_ranks(save_a_trap, 1, path, sharded)
    io = PipeShiftCheckpointIO()
    with pytest.raises(CheckpointError, match="pass `weights_only=False` to `fit`"):
        io.load_checkpoint(path)
    assert not Path("it ran").exists()
    io.load_checkpoint(path, weights_only=False)
    assert Path("it ran").exists()


def save_a_trap(path: Path, sharded: bool) -> None:
    save_one({**a_checkpoint(1), "trap": RunsCode()}, path, sharded)


def save_one(checkpoint: dict[str, Any], path: Path, sharded: bool) -> None:
    an_io(sharded).save_checkpoint(checkpoint, path)


def test_files_of_old_torch_are_loaded(tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    torch.save(a_checkpoint(3), path, _use_new_zipfile_serialization=False)
    assert number_in(path) == 3


class Wider(LayersOfItsOwn):
    """A layer is wider, one is missing, and one is new."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(16, 24)
        self.classify = nn.Linear(24, NUM_CLASSES)
        del self.head

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.classify(self.third(self.second(self.first(features))))


def loading_into_another(how: Any, path: str) -> None:
    quiet_trainer(how, max_epochs=1).fit(built(Wider), points(2), ckpt_path=path)


def test_a_checkpoint_of_another_model_names_the_layers(tmp_path: Path) -> None:
    trainer = L.Trainer(accelerator="cpu", max_epochs=0, logger=False, enable_progress_bar=False)
    trainer.strategy.connect(built(LayersOfItsOwn))
    trainer.save_checkpoint(tmp_path / "kept.ckpt")
    with pytest.raises(
        RanksFailed,
        match=r"CheckpointError: The checkpoint is of another model\. Not in the checkpoint:"
        r" classify\. Not in the model: head\. Of another shape: third\.",
    ):
        run_ranks(on_rank, 2, loading_into_another, {}, (str(tmp_path / "kept.ckpt"),), {})


def test_what_a_checkpoint_io_cannot_do(tmp_path: Path) -> None:
    io = PipeShiftCheckpointIO(sharded=True)
    with pytest.raises(ConfigurationError, match="needs `strategy='pipeshift'`"):
        io.save_checkpoint(a_checkpoint(1), tmp_path / "a.ckpt")
    with pytest.raises(ConfigurationError, match="does not support `storage_options`"):
        io.save_checkpoint(a_checkpoint(1), tmp_path / "a.ckpt", storage_options={})
    with pytest.raises(ConfigurationError, match="needs a local or shared file system"):
        io.save_checkpoint(a_checkpoint(1), "memory://a.ckpt")
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        io.load_checkpoint(tmp_path / "none.ckpt")
    one_file = PipeShiftCheckpointIO()
    one_file.save_checkpoint(a_checkpoint(5), "memory://a.ckpt")
    assert one_file.load_checkpoint("memory://a.ckpt")["number"] == 5
    one_file.remove_checkpoint("memory://a.ckpt")


def test_a_file_and_a_folder_take_each_others_names(tmp_path: Path) -> None:
    path = tmp_path / "kept.ckpt"
    run_ranks(save_one, 1, a_checkpoint(1), path, False)
    link = tmp_path / "last.ckpt"
    link.symlink_to(path)
    run_ranks(save_one, 1, a_checkpoint(2), path, True)
    assert number_in(path) == number_in(link) == 2
    run_ranks(save_one, 1, a_checkpoint(3), link, True)
    assert (number_in(path), number_in(link)) == (2, 3)
    run_ranks(save_one, 1, a_checkpoint(4), path, False)
    assert number_in(path) == 4
    PipeShiftCheckpointIO().remove_checkpoint(path)
    PipeShiftCheckpointIO().remove_checkpoint(link)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------
# A name that something else has
# --------------------------------------------------------------------------------------------------


CHANGES_OF_NAMES = ("rename", "replace", "unlink", "rmdir", "mkdir")


def save_until(change: int, sharded: bool, path: Path) -> bool:
    """Saves in a copy of the process, which dies before it changes the names in a folder for the
    n-th time; whether it lived.
    """
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    try:
        io, left = an_io(sharded), change

        def dying(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if not left:
                    os._exit(1)
                return function(*args, **kwargs)

            return call

        for name in CHANGES_OF_NAMES:
            setattr(os, name, dying(getattr(os, name)))
        io.save_checkpoint(a_checkpoint(2), path)
        os._exit(0)
    finally:
        os._exit(1)


def killed_at_every_moment(path: Path, was_sharded: bool, sharded: bool) -> list[int]:
    """Which checkpoint has the name, after a kill before each change of names."""
    found: list[int] = []
    lives = False
    while not lives:
        child = os.fork()
        if not child:
            an_io(was_sharded).save_checkpoint(a_checkpoint(1), path)
            os._exit(0)
        os.waitpid(child, 0)
        assert number_in(path) == 1
        lives = save_until(len(found) + 1, sharded, path)
        found.append(number_in(path))
    return found


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("was_sharded", [False, True], ids=["was file", "was folder"])
def test_a_kill_while_a_name_changes_hands(
    was_sharded: bool, sharded: bool, tmp_path: Path
) -> None:
    path = tmp_path / "kept.ckpt"
    (found,) = run_ranks(killed_at_every_moment, 1, path, was_sharded, sharded)
    assert set(found) == {1, 2}
    assert found == sorted(found), "it is the old one up to some moment, and the new one from then"
    assert [each.name for each in tmp_path.iterdir()] == ["kept.ckpt"]


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])
def test_other_peoples_folders_are_left_alone(sharded: bool, tmp_path: Path) -> None:
    precious = tmp_path / "results" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    with pytest.raises(RanksFailed, match=r"CheckpointError: .*results is a folder that is not"):
        run_ranks(save_one, 1, a_checkpoint(1), precious.parent, sharded)
    with pytest.raises(CheckpointError, match="neither replaced nor removed"):
        PipeShiftCheckpointIO().remove_checkpoint(precious.parent)
    assert [each.name for each in tmp_path.rglob("*")] == ["results", "thesis.txt"]
    assert precious.read_text() == "years of work"
    empty = tmp_path / "empty"
    empty.mkdir()
    run_ranks(save_one, 1, a_checkpoint(1), empty, sharded)
    assert number_in(empty) == 1


def test_what_lies_in_a_checkpoint_beside_it_stays(tmp_path: Path) -> None:
    path = tmp_path / "kept.ckpt"
    run_ranks(save_one, 1, a_checkpoint(1), path, True)
    (path / "notes.txt").write_text("the best one")
    run_ranks(save_one, 1, a_checkpoint(2), path, True)
    assert number_in(path) == 2
    assert (path / "notes.txt").exists()
    assert len(list(path.iterdir())) == 3, "the old data is gone"


def test_leftovers_go_by_age_and_by_owner(tmp_path: Path) -> None:
    path = tmp_path / "kept.ckpt"
    here, elsewhere = path_of_this_process(path), ".kept.ckpt.00000000-1-00000000.tmp"
    gone = here.replace(f"-{os.getpid()}-", f"-{2**22 + 1}-")
    names = [here, gone, elsewhere, elsewhere.replace("kept", "old"), ".my own.tmp"]
    for name in names:
        (tmp_path / name).touch()
    os.utime(tmp_path / names[3], (0, 0))
    os.utime(tmp_path / names[4], (0, 0))
    if os.geteuid() == 0:
        names.append(gone.replace("kept", "of another"))
        (tmp_path / names[-1]).touch()
        os.chown(tmp_path / names[-1], 12345, -1)
    PipeShiftCheckpointIO().save_checkpoint(a_checkpoint(1), path)
    left = {each.name for each in tmp_path.iterdir()} - {path.name}
    assert left == set(names) - {gone, names[3]}


def path_of_this_process(path: Path) -> str:
    return temporary_next_to(path).name


def test_the_umask_is_honoured(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        PipeShiftCheckpointIO().save_checkpoint(a_checkpoint(1), tmp_path / "a.ckpt")
        write_text(tmp_path / "plan.json", "{}")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


# --------------------------------------------------------------------------------------------------
# From the network
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder, and the address at which its files are."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch home"))
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield folder, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def loading(how: Any, path: str, weights_only: bool | None) -> None:
    quiet_trainer(how, max_epochs=1).fit(
        built(LayersOfItsOwn), points(2), ckpt_path=path, weights_only=weights_only
    )


@pytest.mark.parametrize("plugins", [[], [TorchCheckpointIO()]], ids=["ours", "Lightning's"])
def test_a_checkpoint_from_the_network_runs_nothing(
    plugins: list[Any],
    served: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, address = served
    torch.save({**a_checkpoint(1), "trap": RunsCode()}, folder / "trap.ckpt")
    how = {"pipeshift": {}, "plugins": plugins, "devices": 1}
    with pytest.raises((CheckpointError, pickle.UnpicklingError), match=r"(?i)weights_only"):
        loading(how, f"{address}/trap.ckpt", None)
    assert not Path("it ran").exists()
    with pytest.raises(Exception, match=r"state_dict|version|epoch"):
        loading(how, f"{address}/trap.ckpt", False)  # it is no checkpoint of a Trainer's
    assert Path("it ran").exists()
