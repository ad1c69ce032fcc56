"""A GPU that is not there, and every wait for it.

:class:`PretendedGPU` is a simulated device that notes each operation that would make the program
wait for a GPU, with the line that asked for it and with how many operations a GPU would still have
to do when the wait is over: 0 means that it runs dry.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.compat import torch_private
from lightning_pipeshift.devices import shared_memory
from lightning_pipeshift.runtime.comm import memory_link
from lightning_pipeshift.step import suspension
from lightning_pipeshift.step.pipeline import Pipeline
from lightning_pipeshift.values import gradients
from lightning_pipeshift.values.contract_finder import ContractFinder
from lightning_pipeshift.values.microbatch import Microbatch
from lightning_pipeshift.values.value import run_by
from tests.simulated import device, interception, torch_streams
from tests.simulated.device import SimulatedDevice

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")

_OWN_FILES = (
    __file__,
    device.__file__,
    torch_streams.__file__,
    interception.__file__,
    torch_private.__file__,
)


class Wait(NamedTuple):
    """A wait for the device.

    Args:
        what: the operation.
        whose: ``"pipeshift"``, ``"lightning"``, ``"torchmetrics"`` or ``"user"``: who wrote the
            innermost line that is not torch's.
        line: that line.
        num_behind: how many operations the device has left to do after the point waited for.
    """

    what: str
    whose: str
    line: str
    num_behind: int


def _asked_by() -> tuple[str, str]:
    for frame in reversed(traceback.extract_stack()):
        name = frame.filename
        if name in _OWN_FILES or "/torch/" in name or "/contextlib.py" in name:
            continue
        if "/unittest/" in name or "/lightning_utilities/" in name:
            continue
        if frame.name in ("operation", "__torch_function__"):
            continue  # what user code asks for goes through these
        parts = name.split("/")
        line = f"{'/'.join(parts[-2:])}:{frame.lineno} {frame.line}"
        for package in ("lightning_pipeshift", "torchmetrics", "lightning"):
            if package in parts:
                return package.removeprefix("lightning_"), line
        return "user", line
    return "nobody", ""


class PretendedGPU(SimulatedDevice):
    """Context in which there is a GPU."""

    def __init__(self) -> None:
        super().__init__(device=GPU)
        self.waits: list[Wait] = []
        self.mixed: list[str] = []
        """Operations that a GPU refuses: on tensors of the host's and of the device's."""
        self._patches = ExitStack()

    def __enter__(self) -> PretendedGPU:
        # Asks for devices in C++, where nothing can be pretended.
        group = clip_grad._group_tensors_by_device_and_dtype
        self._patches.enter_context(
            mock.patch.object(
                clip_grad,
                "_group_tensors_by_device_and_dtype",
                lambda lists: {(GPU, kind): v for (_, kind), v in group(lists).items()},
            )
        )
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)

    def note(self, what: str, num_behind: int = 0) -> None:
        """Notes a wait; one of a thread beside the compute holds nobody up."""
        if threading.current_thread() is threading.main_thread():
            self.waits.append(Wait(what, *_asked_by(), num_behind))

    def refuse_mixed(self, name: str) -> None:
        """Notes it: where a run is put on the GPU in its middle, what PipeShift has made before in
        place of a layer's weights, to see what its call would do, stays on the host.
        """
        self.mixed.append(f"{name}: {_asked_by()[1]}")

    def of(self, whose: str) -> list[Wait]:
        """The waits for which somebody's code has asked."""
        return [wait for wait in self.waits if wait.whose == whose]


class OnAPretendedGPU(L.Callback):
    """Puts a run on the pretended GPU from one step on, and notes the waits of each step.

    Args:
        is_shared: whether ranks share the GPU, so that payloads go by way of their host.
        first: that step: by then, what a run does once is done.
    """

    def __init__(self, is_shared: bool = False, first: int = 2) -> None:
        self._is_shared = is_shared
        self._first = first
        self._gpu = PretendedGPU()
        self._stack = ExitStack()
        self.steps: list[list[Wait]] = []
        self.validation: list[Wait] = []
        """Those of a validation at the end of the epoch."""
        self.mixed: list[str] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._first:
            # The tensors themselves, not the values that hooks see.
            with run_by(None):
                self._gpu.take(*_tensors_of_run(trainer, module))
            self._gpu.take(*pytree.tree_leaves(batch))
            # First: a message that another stage has sent already is received meanwhile.
            self._stack.enter_context(self._gpu)
            devices = _devices_of_run(trainer, module, self._gpu, self._is_shared)
            for owner, name, value in devices:
                self._stack.enter_context(mock.patch.object(owner, name, value))
        self._gpu.waits.clear()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx < self._first:
            return
        self.steps.append(list(self._gpu.waits))
        self.mixed = list(self._gpu.mixed)
        self._gpu.waits.clear()

    def on_validation_end(self, *_: Any) -> None:
        self.validation = list(self._gpu.waits)

    def on_train_epoch_end(self, *_: Any) -> None:
        self._stack.close()


def _tensors_of_run(trainer: Any, module: Any) -> Iterator[Any]:
    yield from module.parameters()
    yield from module.buffers()
    yield from (parameter.grad for parameter in module.parameters())
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            yield from (value for name, value in state.items() if name != "step")
    for part in module.modules():
        yield from pytree.tree_leaves(getattr(part, "_defaults", None))
        yield from pytree.tree_leaves([getattr(part, n) for n in getattr(part, "_defaults", ())])
    for metric in (trainer._results or {}).values():
        yield from vars(metric).values()
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        yield from (scaler._scale, scaler._growth_tracker)


def _stand_in_on_host(stand_in: Any) -> Any:
    def on_host(finder: ContractFinder, tensor: Tensor) -> Tensor:
        shape, stride = tuple(tensor.shape), tensor.stride()
        like = torch.empty_strided(shape, stride, dtype=tensor.dtype)
        found: Tensor = stand_in(finder, like.requires_grad_(tensor.requires_grad))
        return found

    return on_host


def _devices_of_run(
    trainer: Any, module: Any, gpu: PretendedGPU, is_shared: bool
) -> Iterator[tuple[Any, str, Any]]:
    """Where a run keeps its device: owner, attribute, value."""
    strategy = trainer.strategy
    yield type(strategy), "root_device", property(lambda _: GPU)
    yield module, "_device", GPU
    for metric in [*module.modules(), *(trainer._results or {}).values()]:
        if isinstance(metric, Metric):
            yield metric, "_device", GPU
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        yield scaler, "_device", "cuda"
    if not isinstance(strategy, PipeShiftStrategy):
        return
    pipeline = strategy.pipeline
    yield pipeline.channels, "device", GPU
    # Memory that ranks share is the device's.
    ends: list[Any] = []
    if isinstance(pipeline, Pipeline):
        assert pipeline.core is not None
        mailbox = pipeline.core.mailbox
        ends += mailbox._buffers._ends.values()
        yield mailbox._inbox, "_device", GPU
        for owner in (pipeline.core, mailbox, mailbox._buffers, mailbox._sends):
            yield owner, "device", GPU
        # Torch has no generator of the device.
        yield suspension, "generators_of", lambda _: [torch.default_generator]
        yield ContractFinder, "_stand_in", _stand_in_on_host(ContractFinder._stand_in)
        # It is called by a function of torch, in which function modes are off.
        yield Microbatch, "operation", gpu.inside(Microbatch.operation)
        for way in (gradients._FromLater, gradients._ToEarlier):
            yield way, "backward", staticmethod(gpu.inside(way.backward))
    for end in ends:
        yield end, "device", GPU
        gpu.take(*pytree.tree_leaves([end._pool._free, end._full]))
        gpu.take(*(opened.memory for opened in end._opened.values()))
    mapped = shared_memory._mapped

    def on_device(*args: Any) -> Tensor:
        memory = mapped(*args)
        gpu.take(memory)
        return memory

    yield shared_memory, "_mapped", on_device
    pool = shared_memory.SharedBufferPool
    yield memory_link, "SharedBufferPool", lambda _: pool(CPU)
    yield memory_link, "opened", lambda handle, _: on_device(*handle)
    assert pipeline.holdings is not None
    yield pipeline.holdings, "device", GPU
    if pipeline._aggregation is not None:
        if not is_shared:
            # As with NCCL, whose sums are made in the device's memory.
            yield pipeline._aggregation, "_device", GPU
            yield pipeline._aggregation, "_agree", pipeline.replicas.world.post_sum
        yield pipeline._aggregation, "notice", gpu.inside(pipeline._aggregation.notice)
        for group in pipeline._aggregation._groups:
            yield group, "_buffers", {}
