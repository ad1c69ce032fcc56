"""Small trainings whose bits must not depend on how they are spread: what the GPU script runs.

A :class:`Case` says how a small decoder is trained; :func:`train` is one rank's part of it. The
same case on one rank of its own is what all others are compared with, bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu.rehearsal import VARIABLE
from benchmarks.gpu.running import Run, sizes
from lightning_pipeshift import (
    Communication,
    LayerMigration,
    MemoryCompression,
    Move,
    PipeShiftStrategy,
    RecomputeAll,
    SwapAll,
)
from lightning_pipeshift.devices import streams
from lightning_pipeshift.lightning import connection
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS
from tests.features_models import QUIET, OverflowingOnOneStage
from tests.models import points

VOCABULARY, WIDTH, LENGTH, BATCH_SIZE = 64, 32, 12, 8

POLICIES: dict[str, Callable[[], Any]] = {
    "swap": lambda: SwapAll(min_bytes=1),
    "swap to a device": lambda: SwapAll("device", min_bytes=1),
    "recompute": RecomputeAll,
}

Backend = Literal["nccl", "gloo"] | None

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
            for _ in range(sizes().decoder[0])
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
        backend: of the payloads, even if ranks share a GPU; ``None``: the package's own choice.
        shares: whether all ranks use the first GPU.
        sleeps: ``"side"``: side streams sleep before each of their uses; ``"compute"``: the compute
            stream sleeps before each layer. A missing wait then shows as a wrong number.
        raises_on: the rank that raises after the second step; -1: none.
        resumes: whether a new Trainer goes on from a checkpoint, between epochs.
        overflows: with float16, behind which layer of another model (1 or 2) a gradient overflows
            in the third step; 0: nowhere.
        least_epochs: how many epochs there are at least.
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
    backend: Backend = None
    shares: bool = True
    sleeps: str | None = None
    raises_on: int = -1
    resumes: bool = False
    overflows: int = 0
    least_epochs: int = 1

    @property
    def alone(self) -> Case:
        """The same on one stage of each virtual machine, with nothing that must not matter. How old
        an asynchronous pipeline's weights are depends on the number of stages: it stays the same.
        """
        is_asynchronous = self.schedule in ASYNCHRONOUS
        return replace(
            self,
            stages=self.stages if is_asynchronous else 1,
            policy=None,
            compression=None,
            moves=False,
            backend=None,
            shares=True,
            sleeps=None,
            schedule=self.schedule if is_asynchronous else "1f1b",
            raises_on=-1,
            resumes=False,
            least_epochs=self.num_epochs,
        )

    @property
    def num_epochs(self) -> int:
        """How many epochs: what happens at a late step, or between epochs, needs two."""
        late = self.moves or self.resumes
        return max(self.least_epochs, sizes().decoder[2], 2 if late else 1)

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
    indices = [0 if case.shares else other for other in range(case.world_size)]
    devices = [torch.device("cuda", index) for index in indices]
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
                communication=Communication(process_group_backend=case.backend),
                parallel_devices=devices,
            ),
            accelerator="gpu",
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
    with payloads_over(case.backend, case.shares, rank), _sleeping(case, module):
        trainer = trainer_to(1 if case.resumes else case.num_epochs)
        trainer.fit(module, _data(case))
        if case.resumes:
            trainer.save_checkpoint("half.ckpt")
            module = _module(case)
            trainer_to(case.num_epochs).fit(module, _data(case), ckpt_path="half.ckpt")
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
    num_batches = sizes().decoder[1] * case.virtual_machines
    if not case.overflows:
        return tokens(num_batches)
    loader = points(num_batches)
    loader.dataset.tensors[0][2 * BATCH_SIZE + 5, 0] = 1000.0  # type: ignore[attr-defined]
    return loader


def nccl() -> Backend:
    """The backend of sums between GPUs: without a GPU, there is only gloo."""
    return "gloo" if VARIABLE in os.environ else "nccl"


@contextlib.contextmanager
def payloads_over(backend: Backend, is_shared: bool, rank: int) -> Iterator[None]:
    """Context in which payloads go over a backend even if ranks share a GPU, whose memory they
    would otherwise go through.

    NCCL refuses two ranks of one host on one GPU: to NCCL, each rank is a host of its own.

    Args:
        backend: ``None``: the package's own choice.
        is_shared: whether the ranks share a GPU.
        rank: this one.
    """
    if backend is None or not is_shared:
        yield
        return
    hosts = {"NCCL_HOSTID": f"host{rank}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    with (
        mock.patch.dict(os.environ, hosts),
        mock.patch.object(connection, "backend_of_sums", return_value=backend),
        mock.patch.object(connection, "payload_address", return_value=None),
    ):
        yield


@contextlib.contextmanager
def _sleeping(case: Case, module: nn.Module) -> Iterator[None]:
    """Context in which streams sleep, as the case says.

    Raises:
        RuntimeError: the compute stream has not slept in a forward, or not in a backward.
    """
    if case.sleeps is None:
        yield
        return
    if case.sleeps == "compute":
        slept = Counter[str]()
        for layer in _layers(module):
            layer.register_forward_pre_hook(lambda *_: _sleep(slept, "forward"))
            layer.register_forward_hook(lambda _, __, found: _before_backward(slept, found))
        yield
        if len(slept) < 2:
            raise RuntimeError(f"the compute stream has slept only in {dict(slept)}")
        return
    with mock.patch.object(streams, "stream_beside", _late(streams.stream_beside)):
        yield


def _late(entered: Callable[..., Any]) -> Callable[..., Any]:
    """The context of a side stream which sleeps before each of its uses."""

    @contextlib.contextmanager
    def late(device: Any, work: str) -> Iterator[None]:
        with entered(device, work):
            torch.cuda._sleep(_SLEEP_CYCLES)
            yield

    return late


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that are called: a list of modules is not."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield child


def _before_backward(slept: Counter[str], found: Tensor) -> None:
    """Lets the compute stream sleep before a layer's backward: when the gradient of its result is
    there. A hook on the module would need an input with a gradient, which an embedding has not.
    """
    if found.requires_grad:
        found.register_hook(lambda _: _sleep(slept, "backward"))


def _sleep(slept: Counter[str], where: str) -> None:
    slept[where] += 1
    torch.cuda._sleep(_SLEEP_CYCLES)


class Compared:
    """Runs cases, each of the plain ones they are compared with once.

    Args:
        run: the part's.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._alone: dict[Case, dict[str, Tensor]] = {}
        self._running: defaultdict[Case, threading.Lock] = defaultdict(threading.Lock)

    def differing(self, case: Case) -> list[str]:
        """The parameters that come out differently on any rank; empty if none does."""
        alone = case.alone
        with self._running[alone]:
            if alone not in self._alone:
                self._alone[alone] = self._run.ranks(train, alone.world_size, alone)[0]
        expected = self._alone[alone]
        found = self._run.ranks(train, case.world_size, case)
        return sorted(
            {
                name
                for mine in found
                for name, value in expected.items()
                # A run that overflowed without a scaler ends in NaN, everywhere.
                if not torch.allclose(mine[name], value, rtol=0, atol=0, equal_nan=True)
            }
        )
