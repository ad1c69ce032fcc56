"""A rank that is gone, on hosts of their own: all processes end, and say which rank it is.

How soon is measured by ``python -m benchmarks.liveness``, which has these runs under torchrun.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import CARD, Hosts, hosts, why_not
from benchmarks.liveness import NAMES, PER_HOST, on_rank, set_link
from lightning_pipeshift.testing.ranks import TIMEOUT_SECONDS
from tests import ROOT
from tests.end_to_end.test_environments import become_host

# Four stages until the other host is gone, then two.
SCRIPT = """
import os, sys, time
from pathlib import Path
# A host that comes late finds the other one alone, and both start anew.
while os.environ["WORLD_SIZE"] == "2" and not Path("now").exists():
    time.sleep(0.05)
import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.features_models import QUIET
from tests.models import LayersOfItsOwn, points

def say(what):
    # One write, so that the ranks' lines do not mix.
    sys.stdout.write(f"{what} at {trainer.global_step} of {trainer.world_size}\\n")

class Model(LayersOfItsOwn):
    def on_train_batch_end(self, *_):
        if self.trainer.global_step == 3 and self.trainer.world_size == 4:
            Path("now").touch()
            while not Path("done").exists():
                pass

    def on_train_start(self):
        say("begins")

torch.set_num_threads(1)
L.seed_everything(1)
keeps = ModelCheckpoint("kept", every_n_train_steps=2, save_last=True)
trainer = L.Trainer(
    accelerator="cpu", devices=2, num_nodes=2, max_steps=5, strategy="pipeshift",
    callbacks=[keeps], **{**QUIET, "enable_checkpointing": True},
)
trainer.fit(Model(), points(64), ckpt_path="last")
say("ends")
"""


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with hosts(2) as made:
        yield made


def on_named_host(*args: Any) -> None:
    become_host(NAMES[int(os.environ["GROUP_RANK"])])
    on_rank(*args)


@pytest.mark.parametrize(
    ("moment", "fault"),
    [("start", "out"), ("async save", "cable"), ("rings", "stopped"), ("validation", "stuck")],
)
def test_all_processes_end_and_name_the_rank_that_is_gone(
    moment: str, fault: str, two_hosts: Hosts, tmp_path: Path
) -> None:
    ended = threading.Event()

    def happens() -> None:
        while not (tmp_path / "now").exists():
            if ended.wait(0.02):
                return
        set_link(two_hosts, fault, is_up=False)
        (tmp_path / "done").touch()

    happening = threading.Thread(target=happens)
    happening.start()
    try:
        outcomes = two_hosts.run(
            on_named_host, tmp_path, moment, fault, per_host=PER_HOST, expect_failure=True
        )
    finally:
        ended.set()
        happening.join()
        set_link(two_hosts, fault, is_up=True)
    struck = int((tmp_path / "now").read_text())
    for rank, outcome in enumerate(outcomes):
        if fault in ("out", "cable"):
            gone = rf"\(rank \d on {NAMES[rank < PER_HOST]}\)"
        elif rank != struck:
            gone = rf"\(rank {struck} on {NAMES[1]}\)"
        else:
            assert outcome.error_type != "Killed", "its neighbour has ended it, or it has by itself"
            continue
        assert outcome.error_type == "StageFailedError", str(outcome)
        assert re.search(gone, outcome.message), str(outcome)


def test_the_other_host_goes_on_alone(two_hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    output = tmp_path / "output"
    agents = []
    for host in range(2):
        address = two_hosts.address(host)
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2"),
            *("--max-restarts=3", "--rdzv-backend=c10d", f"--local-addr={address}"),
            f"--rdzv-endpoint={two_hosts.address(0)}:{two_hosts.port}",
            f"--rdzv-conf=is_host={int(host == 0)},last_call_timeout=5",
            str(script),
        ]
        with (output if host == 0 else tmp_path / "other").open("w") as file:
            agents.append(
                subprocess.Popen(
                    two_hosts.command(host, torchrun),
                    cwd=tmp_path,
                    env={**os.environ, "GLOO_SOCKET_IFNAME": CARD, "PYTHONPATH": str(ROOT)},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    try:
        begun = time.monotonic()
        while not (tmp_path / "now").exists():
            assert all(agent.poll() is None for agent in agents), output.read_text()
            assert time.monotonic() - begun < TIMEOUT_SECONDS, output.read_text()
            time.sleep(0.1)
        two_hosts.set_cable(1, False)
        (tmp_path / "done").touch()
        assert agents[0].wait(TIMEOUT_SECONDS) == 0, output.read_text()
    finally:
        two_hosts.set_cable(1, True)
        for agent in agents:
            with suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
        subprocess.run(["pkill", "-9", "-f", str(script)], check=False)
    told = output.read_text()
    assert "begins at 0 of 4" in told, told
    assert "begins at 2 of 2" in told, told
    assert told.count("ends at 5 of 2") == 2, told
