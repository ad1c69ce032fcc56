"""Under the schedulers that Lightning knows: ranks, stages and hosts are those of their variables.

The variables are simulated, of two nodes with two processes each. Nodes have a name each where a
scheduler tells nodes apart by their names.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.plugins.environments import KubeflowEnvironment

from lightning_pipeshift.testing.processes import free_port
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import quiet_trainer
from tests.models import LayersOfItsOwn, points

CLONE_NEWUTS = 0x04000000

NODES, PER_NODE = 2, 2
# The first has to be found by its name.
NAMES = ("localhost", "beta")

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


def become_host(name: str) -> None:
    """Gives this process a host name of its own."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(name)


def train_on_node(variables: Sequence[dict[str, str]], is_kubeflow: bool, folder: Path) -> Any:
    """Trains as one of the processes that the scheduler has started."""
    rank = int(os.environ["RANK"])
    schedulers = ("SLURM_", "LSB_", "JSM_", "MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_")
    for name in list(os.environ):
        if name.startswith(schedulers) or name in ("RANK", "NODE_RANK", "WORLD_SIZE"):
            del os.environ[name]
    os.environ.update({**variables[rank], "GLOO_SOCKET_IFNAME": "lo"})
    sys.path.insert(0, str(folder))
    become_host(NAMES[rank // PER_NODE])
    # Kubeflow counts every process as a node, and has to be named.
    trainer = quiet_trainer(
        {"pipeshift": {"partition": [1, 1, 1, 1]}},
        num_nodes=NODES * PER_NODE if is_kubeflow else NODES,
        devices=1 if is_kubeflow else PER_NODE,
        plugins=[KubeflowEnvironment()] if is_kubeflow else [],
        max_epochs=1,
    )
    trainer.fit(LayersOfItsOwn(), points(8))
    strategy: Any = trainer.strategy
    name = type(strategy.cluster_environment).__name__
    return trainer.global_rank, trainer.world_size, strategy.stage, name, strategy.hosts


@pytest.mark.feature("Launch", "two nodes: torchrun's and SLURM's variables")
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
    ranks, port = range(NODES * PER_NODE), free_port()
    of_each = [variables(rank, tmp_path, port) for rank in ranks]
    found = run_ranks(train_on_node, len(ranks), of_each, variables is kubeflow, tmp_path)
    hosts = [NAMES[rank // PER_NODE] for rank in ranks]
    assert found == [(rank, 4, rank, name, hosts) for rank in ranks]
