"""Under the schedulers that Lightning knows: ranks, stages and hosts are those of their variables.

The variables are simulated, of two nodes with two processes each. Nodes have a name each where a
scheduler tells nodes apart by their names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_pipeshift.testing.ranks import TIMEOUT_SECONDS
from lightning_pipeshift.testing.workers import free_port
from tests import ROOT

NODES, PER_NODE = 2, 2
# The first has to be found by its name.
NAMES = ("localhost", "beta")

SCRIPT = """
import socket, sys
import lightning.pytorch as L
import torch
from lightning.pytorch.plugins.environments import KubeflowEnvironment
from lightning_pipeshift import PipeShiftStrategy
from tests.models import LayersOfItsOwn, points

torch.set_num_threads(1)
L.seed_everything(1)
plugins = [KubeflowEnvironment()] if "kubeflow" in sys.argv else []
trainer = L.Trainer(
    accelerator="cpu", num_nodes=int(sys.argv[1]), devices=int(sys.argv[2]), max_epochs=1,
    strategy=PipeShiftStrategy(partition=[1, 1, 1, 1]), plugins=plugins, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
model = LayersOfItsOwn()
trainer.fit(model, points(8))
strategy = trainer.strategy
values = trainer.callback_metrics
print("found", trainer.global_rank, trainer.world_size, strategy.stage, strategy.cluster_environment
      .__class__.__name__, strategy.hosts, sep="|")
"""

# Stands in for mpi4py, with files in place of messages.
MPI = """
import os, pickle, time
from pathlib import Path

class Comm:
    COUNT = 0

    def __init__(self, rank, size, folder):
        self.rank, self.size, self.folder = rank, size, Path(folder)

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def _put(self, name, value):
        part = self.folder / f".{name}"
        part.write_bytes(pickle.dumps(value))
        part.rename(self.folder / name)

    def _take(self, name):
        while not (self.folder / name).exists():
            time.sleep(0.01)
        return pickle.loads((self.folder / name).read_bytes())

    def gather(self, value, root):
        Comm.COUNT += 1
        self._put(f"{Comm.COUNT}-{self.rank}", value)
        if self.rank == root:
            return [self._take(f"{Comm.COUNT}-{rank}") for rank in range(self.size)]

    def bcast(self, value, root):
        Comm.COUNT += 1
        if self.rank == root:
            self._put(f"{Comm.COUNT}-{root}", value)
        return self._take(f"{Comm.COUNT}-{root}")

    def Split(self, color):
        per_node = int(os.environ["FAKE_PER_NODE"])
        return Comm(self.rank % per_node, per_node, self.folder)

class MPI:
    COMM_WORLD = Comm(
        int(os.environ["FAKE_RANK"]), int(os.environ["FAKE_SIZE"]), os.environ["FAKE_FOLDER"]
    )
"""


def slurm(rank: int, folder: Path, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": str(NODES * PER_NODE),
        "SLURM_NTASKS_PER_NODE": str(PER_NODE),
        "SLURM_NNODES": str(NODES),
        "SLURM_NODELIST": "127.0.0.1,127.0.0.2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % PER_NODE),
        "SLURM_NODEID": str(rank // PER_NODE),
        "MASTER_PORT": str(port),
    }


def lsf(rank: int, folder: Path, port: int) -> dict[str, str]:
    ranks = folder / "ranks"
    ranks.write_text("\n".join(["launch", *(name for name in NAMES for _ in range(PER_NODE))]))
    return {
        "LSB_JOBID": "77",
        "LSB_DJOB_RANKFILE": str(ranks),
        "JSM_NAMESPACE_LOCAL_RANK": str(rank % PER_NODE),
        "JSM_NAMESPACE_SIZE": str(NODES * PER_NODE),
        "JSM_NAMESPACE_RANK": str(rank),
        "MASTER_PORT": str(port),
    }


def mpi(rank: int, folder: Path, port: int) -> dict[str, str]:
    (folder / "mpi4py").mkdir(exist_ok=True)
    (folder / "mpi4py" / "__init__.py").write_text(MPI)
    return {
        "FAKE_RANK": str(rank),
        "FAKE_SIZE": str(NODES * PER_NODE),
        "FAKE_PER_NODE": str(PER_NODE),
        "FAKE_FOLDER": str(folder),
    }


def kubeflow(rank: int, folder: Path, port: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(NODES * PER_NODE),
        "RANK": str(rank),
    }


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        (slurm, "SLURMEnvironment"),
        (lsf, "LSFEnvironment"),
        (mpi, "MPIEnvironment"),
        (kubeflow, "KubeflowEnvironment"),
    ],
)
def test_four_stages_on_two_nodes(
    variables: Callable[[int, Path, int], dict[str, str]], name: str, tmp_path: Path
) -> None:
    if os.geteuid():
        pytest.skip("only root can give processes a host name")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    is_kubeflow = variables is kubeflow
    # Kubeflow counts every process as a node.
    shape = ["4", "1", "kubeflow"] if is_kubeflow else [str(NODES), str(PER_NODE)]
    port = free_port()
    plain = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "LSB_", "JSM_", "MASTER_")) and key not in ("RANK",)
    }
    running = []
    for rank in range(NODES * PER_NODE):
        host = NAMES[rank // PER_NODE]
        command = f'hostname {host} && exec "$0" "$@"'
        running.append(
            subprocess.Popen(
                ["unshare", "--uts", "sh", "-c", command, sys.executable, str(script), *shape],
                env={
                    **plain,
                    **variables(rank, tmp_path, port),
                    "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
                    "GLOO_SOCKET_IFNAME": "lo",
                },
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    hosts = [NAMES[rank // PER_NODE] for rank in range(NODES * PER_NODE)]
    for rank, output in enumerate(outputs):
        assert f"found|{rank}|4|{rank}|{name}|{hosts}" in output, "\n=====\n".join(outputs)
