"""Machines that are taken away: SIGTERM ends a run with a checkpoint, and it goes on from there."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_pipeshift import PipeShiftCheckpointIO
from lightning_pipeshift.errors import StageFailedError
from lightning_pipeshift.testing.processes import free_port
from lightning_pipeshift.testing.ranks import launch_script, launch_torchrun, run_ranks
from tests.features_models import built, on_rank, parameters_of, quiet_trainer
from tests.models import SequentialMLP, points


class TakenAway(L.Callback):
    """One rank gets a SIGTERM while a step runs."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def data() -> DataLoader:
    return DataLoader(points(6).dataset, batch_size=8, shuffle=True)


def run(
    how: Any, folder: str, taken: tuple[int, int] | None, io: dict[str, bool], resumes: bool
) -> Any:
    L.seed_everything(11 if not resumes else 12)
    checkpoints = ModelCheckpoint(folder, save_top_k=0)
    callbacks: list[L.Callback] = [checkpoints]
    if taken is not None:
        callbacks.append(TakenAway(*taken))
    trainer = quiet_trainer(
        how,
        callbacks=callbacks,
        enable_checkpointing=True,
        max_epochs=2,
        plugins=[PipeShiftCheckpointIO(**io)],
    )
    module = built(lambda: SequentialMLP(dropout=0.2))
    code = None
    try:
        trainer.fit(module, data(), ckpt_path="last" if resumes else None)
    except SIGTERMException as error:
        code = error.code
    return code, trainer.global_step, parameters_of(module), torch.rand(3)


ONE_FILE: dict[str, bool] = {}
ASYNCHRONOUS = {"sharded": True, "asynchronous": True}


@pytest.mark.feature("Launch", "SIGTERM, and going on with fewer ranks")
@pytest.mark.parametrize("io", [ONE_FILE, ASYNCHRONOUS], ids=["one file", "asynchronous folder"])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_end_after_the_same_step_and_go_on_with_fewer(
    io: dict[str, bool], rank: int, tmp_path: Path
) -> None:
    """From the end of an epoch on: the shuffle of the next one, too, is that of a whole run."""
    strategy = {"microbatches": 4}
    args: tuple[Any, ...] = (str(tmp_path / "whole"), None, ONE_FILE, False)
    (whole,) = run_ranks(on_rank, 1, run, strategy, args, {})
    # It is told while the fifth step runs, and all know of it after the sixth.
    args = (str(tmp_path / "taken"), (rank, 4), io, False)
    for code, step, _, _ in run_ranks(on_rank, 2, run, strategy, args, {}):
        assert (code, step) == (143, 6)
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["last.ckpt"]
    args = (str(tmp_path / "taken"), None, io, True)
    (found,) = run_ranks(on_rank, 1, run, strategy, args, {})
    assert found[:2] == whole[:2] == (None, 12)
    for name, value in whole[2].items():
        assert torch.equal(found[2][name], value), name
    assert torch.equal(found[3], whole[3])


class SlowDisk(PipeShiftCheckpointIO):
    """Takes longer than a rank waits after a SIGTERM for others that do nothing."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(8.0)
        super().save_checkpoint(*args, **kwargs)


def run_on_a_slow_disk(how: Any, folder: str) -> Any:
    callbacks = [ModelCheckpoint(folder, save_top_k=0), TakenAway(1, 2)]
    trainer = quiet_trainer(
        how, callbacks=callbacks, enable_checkpointing=True, max_epochs=2, plugins=[SlowDisk()]
    )
    with pytest.raises(SIGTERMException) as ended:
        trainer.fit(built(SequentialMLP), data())
    return ended.value.code, trainer.global_step


def test_ranks_wait_for_the_last_checkpoint_however_slow_the_disk_is(tmp_path: Path) -> None:
    """They wait longer for it than for ranks that do nothing after a SIGTERM."""
    found = run_ranks(on_rank, 2, run_on_a_slow_disk, {"microbatches": 4}, (str(tmp_path),), {})
    assert found == [(143, 4)] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


SCRIPT = """
import os, signal, sys
import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_pipeshift import PipeShiftStrategy
from tests.features_models import QUIET, built
from tests.models import SequentialMLP, points

class TakenAway(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and trainer.global_rank == 1 and trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

if __name__ == "__main__":
    L.seed_everything(3)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=PipeShiftStrategy(microbatches=4),
        **{**QUIET, "enable_checkpointing": True}, max_epochs=1,
        callbacks=[TakenAway(), ModelCheckpoint("checkpoints", save_top_k=0)],
    )
    begun = []
    class Counts(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            begun.append(batch_idx)
    trainer.callbacks.append(Counts())
    trainer.fit(built(SequentialMLP), points(6), ckpt_path="last")
    sys.stdout.write(f"DONE {trainer.global_rank} {trainer.global_step} {begun}\\n")
"""


@pytest.mark.feature("Launch", "`torchrun --max-restarts`")
def test_torchrun_restarts_from_the_last_checkpoint() -> None:
    launched = launch_torchrun(SCRIPT, 2, options=["--max-restarts", "1"])
    done = sorted(line for line in launched.output.splitlines() if "DONE" in line)
    assert done == ["DONE 0 6 [3, 4, 5]", "DONE 1 6 [3, 4, 5]"]
    assert "the run was ended by SIGTERM after step 3" in launched.output


def without_a_folder(how: Any) -> Any:
    trainer = quiet_trainer(how, callbacks=[TakenAway(1, 1)], max_epochs=1)
    with pytest.raises(SIGTERMException), pytest.warns(UserWarning, match="no ModelCheckpoint"):
        trainer.fit(built(SequentialMLP), points(6))
    return trainer.global_step


def test_without_a_model_checkpoint_nothing_is_saved_and_said_so() -> None:
    assert run_ranks(on_rank, 2, without_a_folder, {}, (), {}) == [3, 3]


# Two hosts, an agent of torchrun on each; one of them is taken away after some steps.
TWO_HOSTS = """
import signal, subprocess, sys, time
from pathlib import Path

port, script = sys.argv[1:3]
Path("script.py").write_text(script)
agents = []
for node in range(2):
    # The first one keeps the store, whoever comes first: it stays.
    settings = f"last_call_timeout=5,read_timeout=300,is_host={int(node == 0)}"
    agents.append(subprocess.Popen([
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1",
        "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
        "--rdzv-id", "job", "--rdzv-conf", settings, "script.py",
    ]))
while not Path("begun").exists() and all(agent.poll() is None for agent in agents):
    time.sleep(0.05)
agents[1].send_signal(signal.SIGTERM)
agents[1].wait()
sys.exit(agents[0].wait())
"""

ON_EACH_HOST = """
import os, sys, time
from pathlib import Path
import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_pipeshift import PipeShiftStrategy
from tests.features_models import QUIET, built
from tests.models import SequentialMLP, points

class Notes(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.world_size == 2 and batch_idx >= 3:
            Path("begun").touch()
            time.sleep(0.2)
        if trainer.is_global_zero:
            sys.stdout.write(f"STEP {trainer.world_size} {batch_idx}\\n")

if __name__ == "__main__":
    # A host that comes late finds the other one alone, and both start anew.
    while os.environ["WORLD_SIZE"] == "1" and not Path("begun").exists():
        time.sleep(0.05)
    L.seed_everything(3)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=PipeShiftStrategy(microbatches=4), **{**QUIET, "enable_checkpointing": True},
        max_epochs=1, callbacks=[Notes(), ModelCheckpoint("checkpoints", save_top_k=0)],
    )
    trainer.fit(built(SequentialMLP), points(200), ckpt_path="last")
    sys.stdout.write(f"DONE {trainer.world_size} {trainer.global_step}\\n")
"""


def test_a_host_that_is_taken_away_leaves_the_others_to_go_on() -> None:
    output = launch_script(TWO_HOSTS, str(free_port()), ON_EACH_HOST, timeout=540).output
    steps = re.findall(r"STEP (\d) (\d+)", output)
    both = [int(step) for size, step in steps if size == "2"]
    alone = [int(step) for size, step in steps if size == "1"]
    assert both + alone == list(range(200)), "no step is lost, and none is taken twice"
    assert len(both) > 3
    assert alone
    assert "DONE 1 200" in output


class SavesAlone(L.Callback):
    """The first rank saves, and the others go on to the next step: both wait for good. Then one of
    them gets a signal.
    """

    def __init__(self, rank: int, number: int) -> None:
        self.rank, self.number = rank, number

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank:
            threading.Timer(1.0, os.kill, (os.getpid(), self.number)).start()
        if trainer.is_global_zero:
            trainer.save_checkpoint("alone.ckpt")


def wait_for_good(how: Any, rank: int, number: int) -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer = quiet_trainer(how, callbacks=[SavesAlone(rank, number)], max_epochs=1)
    with pytest.raises((SystemExit, StageFailedError)) as caught:
        trainer.fit(built(SequentialMLP), data())
    error = caught.value
    return str(error.code if isinstance(error, SystemExit) else error)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_ends_ranks_that_wait_for_what_never_comes(
    rank: int, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, Python's handlers never run, as both wait in gloo."""
    monkeypatch.chdir(tmp_path)
    strategy = {"microbatches": 4, "partition": "uniform"}
    results = run_ranks(on_rank, 2, wait_for_good, strategy, (rank, int(number)), {})
    assert results[rank] == ("143" if number == signal.SIGTERM else "1")
    # The second rank waits for a vote by then, in short waits, or for a payload.
    reason = rf"got {number.name}, and ends its wait, as (.*)|failed first: KeyboardInterrupt"
    found = re.search(reason, results[1 - rank])
    assert found, results[1 - rank]
    if rank == 0:
        assert "a checkpoint's gathering (" in found[0]
        assert "test_preemption.py:" in found[0]
    assert not any(tmp_path.iterdir())


# Both ranks wait for good; then the launcher is told to end, or all that a terminal would tell.
SIGNALLED = """
import os, signal, subprocess, sys, time
from pathlib import Path

number, *command = sys.argv[1:]
# Shells let what runs in the background ignore it, which processes inherit.
signal.signal(signal.SIGINT, signal.SIG_DFL)
run = subprocess.Popen(
    [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    start_new_session=True,
)
while run.poll() is None and not (Path("waits-0").exists() and Path("waits-1").exists()):
    time.sleep(0.05)
(os.killpg if int(number) == signal.SIGINT else os.kill)(run.pid, int(number))
# Ends when each process has ended, or closed its output.
print(run.communicate()[0])
print("ENDED", run.wait())
"""

WAITS_FOR_GOOD = """
from pathlib import Path
import lightning.pytorch as L
from lightning_pipeshift import PipeShiftStrategy
from tests.features_models import QUIET, built
from tests.models import SequentialMLP, points

class SavesAlone(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        Path(f"waits-{trainer.global_rank}").touch()
        if trainer.is_global_zero:
            trainer.save_checkpoint("alone.ckpt")

if __name__ == "__main__":
    strategy = PipeShiftStrategy(microbatches=4, partition="uniform")
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, **QUIET, callbacks=[SavesAlone()]
    )
    trainer.fit(built(SequentialMLP), points(20))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_a_signal_to_the_launcher_ends_all_processes(
    launcher: str, number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(WAITS_FOR_GOOD)
    command = [str(tmp_path / "train.py")]
    if launcher == "torchrun":
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *where, *command]
    launched = launch_script(SIGNALLED, str(int(number)), *command, cwd=tmp_path)
    assert "ENDED" in launched.output
    assert "ENDED 0" not in launched.output
    assert not (tmp_path / "alone.ckpt").exists()
    if number == signal.SIGTERM:
        # Ctrl-C may come before a rank waits, and then it ends at once.
        found = re.search(r"got SIGTERM, and ends its wait, as (.*)", launched.output)
        assert found, launched.output
        assert "a checkpoint's gathering (" in found[1]
        assert "train.py:12 in on_train_batch_end" in found[1]
