"""Small trainings whose bits must not depend on how they are spread: what the GPU script runs.

A :class:`Case` says how a small decoder is trained; :func:`train` is one rank's part of it. The
same case on one rank of its own is what all others are compared with, bit for bit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeshift import (
    LayerMigration,
    MemoryCompression,
    Move,
    PipeShiftStrategy,
    RecomputeAll,
    SwapAll,
)
from lightning_pipeshift.devices.streams import Accelerator
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import QUIET, OverflowingOnOneStage
from tests.models import points

VOCABULARY, WIDTH, LENGTH, BATCH_SIZE, NUM_BLOCKS = 64, 32, 12, 8, 4
NUM_BATCHES, NUM_EPOCHS = 4, 2

POLICIES: dict[str, Callable[[], Any]] = {
    "swap": lambda: SwapAll(min_bytes=1),
    "swap to a device": lambda: SwapAll("device", min_bytes=1),
    "recompute": RecomputeAll,
}

# GPU clock cycles, about two milliseconds: longer than any kernel of these models.
_SLEEP_CYCLES = 4_000_000


class Decoder(L.LightningModule):
    """An embedding, blocks of torch's own with dropout, and a head.

    Args:
        tied: whether the head's weights are the embedding's.
        fused: whether the optimizer is a fused one.
        without_loss: microbatches beginning with this token give no loss; -1: none.
    """

    def __init__(self, tied: bool = False, fused: bool = False, without_loss: int = -1) -> None:
        super().__init__()
        self.fused, self.without_loss = fused, without_loss
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, norm_first=True)
            for _ in range(NUM_BLOCKS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def training_step(self, batch: list[Tensor]) -> Tensor | None:
        """Next-token prediction."""
        (tokens,) = batch
        if self.without_loss >= 0 and int(tokens[0, 0]) == self.without_loss:
            return None
        # Made on the device that the module says it is on.
        places = torch.arange(tokens.shape[1] - 1, device=self.device)
        x = self.embedding(tokens[:, :-1]) + places[None, :, None] / LENGTH
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> Optimizer:
        """The usual optimizer of such models."""
        return AdamW(self.parameters(), lr=1e-3, fused=self.fused)


@dataclass(frozen=True)
class Case:
    """How to train.

    Args:
        stages: of each virtual machine.
        virtual_machines: how many.
        microbatches: of each step.
        schedule: by name.
        precision: as the Trainer takes it.
        policy: one of :data:`POLICIES`, or ``None``.
        compression: of tensors that move, or ``None``.
        tied: see :class:`Decoder`.
        fused: likewise.
        without_loss: likewise.
        clip: the largest norm of the gradients, or ``None``.
        accumulate: over how many batches.
        moves: whether layers move after the second step and back after the fourth.
        backend: of the payloads. ``"nccl"`` is used even if ranks share a GPU.
        shares: whether all ranks use the first GPU.
        sleeps: ``"side"``: side streams sleep before each of their uses; ``"compute"``: the compute
            stream sleeps before each layer. A missing wait then shows as a wrong number.
        device: ``"cuda"``, or ``"cpu"`` for a rehearsal.
        raises_on: the rank that raises after the second step; -1: none.
        resumes: whether a new Trainer goes on from a checkpoint, between epochs.
        overflows: with float16, behind which layer of another model (1 or 2) a gradient overflows
            in the third step; 0: nowhere.
    """

    stages: int = 2
    virtual_machines: int = 1
    microbatches: int = 4
    schedule: str = "1f1b"
    precision: Any = "32-true"
    policy: str | None = None
    compression: Any = None
    tied: bool = False
    fused: bool = False
    without_loss: int = -1
    clip: float | None = None
    accumulate: int = 1
    moves: bool = False
    backend: str = "gloo"
    shares: bool = True
    sleeps: str | None = None
    device: str = "cuda"
    raises_on: int = -1
    resumes: bool = False
    overflows: int = 0

    @property
    def alone(self) -> Case:
        """The same on one stage of each virtual machine, with nothing that must not matter."""
        return replace(
            self,
            stages=1,
            policy=None,
            compression=None,
            moves=False,
            backend="gloo",
            shares=True,
            sleeps=None,
            schedule="1f1b",
            raises_on=-1,
            resumes=False,
        )

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return self.stages * self.virtual_machines


class _Raises(L.Callback):
    """An error of user code on one rank."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """A step is over."""
        if trainer.global_step == 2:
            raise ValueError("raised on purpose")


def tokens(num_batches: int, batch_size: int = BATCH_SIZE) -> DataLoader[Any]:
    """Random sentences, the same every time."""
    generator = torch.Generator().manual_seed(3)
    size = (num_batches * batch_size, LENGTH + 1)
    made = torch.randint(1, VOCABULARY, size, generator=generator)
    # The fourth microbatch of two of every second batch.
    made[6 :: 2 * batch_size, 0] = 0
    return DataLoader(TensorDataset(made), batch_size=batch_size)


def train(case: Case) -> dict[str, Tensor]:
    """One rank's part. Returns the parameters, on the CPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    L.seed_everything(7, verbose=False)
    rank = int(os.environ["RANK"])
    if case.device == "cuda":
        indices = [0 if case.shares else other for other in range(case.world_size)]
        devices = [torch.device("cuda", index) for index in indices]
    else:
        devices = [torch.device("cpu")] * case.world_size
    callbacks: list[L.Callback] = []
    if case.moves:
        moves = [
            Move(layer="blocks.1", stage=1, step=2),
            Move(layer="blocks.1", stage=0, step=4),
        ]
        callbacks.append(LayerMigration(moves=moves, watches=False))
    if rank == case.raises_on:
        callbacks.append(_Raises())

    def trainer_to(max_epochs: int) -> L.Trainer:
        return L.Trainer(
            strategy=PipeShiftStrategy(
                virtual_machines=case.virtual_machines,
                microbatches=case.microbatches,
                schedule=case.schedule,
                partition="uniform",
                process_group_backend="nccl" if case.backend == "nccl" else "gloo",
                parallel_devices=devices,
            ),
            accelerator="gpu" if case.device == "cuda" else "cpu",
            devices=case.world_size,
            precision=case.precision,
            plugins=_plugins(case),
            callbacks=callbacks,
            gradient_clip_val=case.clip,
            accumulate_grad_batches=case.accumulate,
            max_epochs=max_epochs,
            **QUIET,  # type: ignore[arg-type]
        )

    module = _module(case)
    with _nccl_on_a_shared_gpu(case, rank), _sleeping(case, module):
        trainer = trainer_to(1 if case.resumes else NUM_EPOCHS)
        trainer.fit(module, _data(case))
        if case.resumes:
            trainer.save_checkpoint("half.ckpt")
            module = _module(case)
            trainer_to(NUM_EPOCHS).fit(module, _data(case), ckpt_path="half.ckpt")
    return {name: value.detach().cpu() for name, value in module.state_dict().items()}


def _plugins(case: Case) -> list[Any] | None:
    if case.policy is None:
        return None
    return [MemoryCompression(policy=POLICIES[case.policy](), compression=case.compression)]


def _module(case: Case) -> L.LightningModule:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(20)
        if case.overflows:
            return OverflowingOnOneStage(case.overflows, case.fused)
        return Decoder(case.tied, case.fused, case.without_loss)


def _data(case: Case) -> DataLoader[Any]:
    num_batches = NUM_BATCHES * case.virtual_machines
    if not case.overflows:
        return tokens(num_batches)
    loader = points(num_batches)
    loader.dataset.tensors[0][2 * BATCH_SIZE + 5, 0] = 1000.0  # type: ignore[attr-defined]
    return loader


@contextlib.contextmanager
def _nccl_on_a_shared_gpu(case: Case, rank: int) -> Iterator[None]:
    """NCCL refuses two ranks of one host on one GPU: to NCCL, each rank is a host of its own."""
    if case.backend != "nccl" or not case.shares:
        yield
        return
    hosts = {"NCCL_HOSTID": f"host{rank}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    with (
        mock.patch.dict(os.environ, hosts),
        mock.patch("lightning_pipeshift.lightning.connection.payload_backend", return_value="nccl"),
    ):
        yield


@contextlib.contextmanager
def _sleeping(case: Case, module: nn.Module) -> Iterator[None]:
    if case.sleeps is None or case.device != "cuda":
        yield
        return
    if case.sleeps == "compute":
        for layer in module.children():
            layer.register_forward_pre_hook(lambda *_: _sleep())
            layer.register_full_backward_pre_hook(lambda *_: _sleep())
        yield
        return
    entered = Accelerator.side_stream

    @contextlib.contextmanager
    def late(device: Accelerator, work: str) -> Iterator[None]:
        with entered(device, work):
            _sleep()
            yield

    with mock.patch.object(Accelerator, "side_stream", late):
        yield


def _sleep() -> None:
    torch.cuda._sleep(_SLEEP_CYCLES)


class Compared:
    """Runs cases, each of the plain ones they are compared with once.

    Args:
        device: of all cases.
        limit_seconds: for each run.
    """

    def __init__(self, device: str, limit_seconds: float = 90.0) -> None:
        self._device = device
        self._limit = limit_seconds
        self._alone: dict[Case, dict[str, Tensor]] = {}

    def differing(self, case: Case) -> list[str]:
        """The parameters that come out differently on any rank; empty if none does."""
        case = replace(case, device=self._device)
        alone = case.alone
        if alone not in self._alone:
            self._alone[alone] = run_ranks(
                train, alone.world_size, alone, timeout=self._limit
            )[0]  # fmt: skip
        expected = self._alone[alone]
        found = run_ranks(train, case.world_size, case, timeout=self._limit)
        return sorted(
            {
                name
                for mine in found
                for name, value in expected.items()
                # A run that overflowed without a scaler ends in NaN, everywhere.
                if not torch.allclose(mine[name], value, rtol=0, atol=0, equal_nan=True)
            }
        )
