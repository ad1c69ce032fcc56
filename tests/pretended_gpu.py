"""A GPU that is not there, and every wait for it.

While :class:`PretendedGPU` is on, tensors that it is told of, and all that is computed of them, say
that they are on ``cuda:0``; their memory is the host's, so the numbers are those of a CPU. Each
operation that would make the program wait for a GPU is noted, with the line that asked for it and
with how many operations a GPU would still have to do when the wait is over: 0 means that it runs
dry.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import Metric

from lightning_pipeshift import PipeShiftStrategy

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")

# What reads values of a device to go on.
_READS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::is_nonzero",
    "aten::repeat_interleave",
}


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
        if name == __file__ or "/torch/" in name or "/contextlib.py" in name:
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


class _Stream:
    """A stream of the device: order is all there is."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...


class PretendedGPU:
    """Context in which there is a GPU."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.mixed: list[str] = []
        """Operations that a GPU refuses: on a vector of the host's and one of the device's."""
        self.num_done = 0
        """How many operations the device was given."""
        self._memory: dict[int, StorageWeakRef] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self._stack = ExitStack()

    def __enter__(self) -> PretendedGPU:
        gpu = self

        class Event:
            def __init__(self, *_: Any, **__: Any) -> None:
                self.at = 0

            def record(self, *_: Any) -> None:
                self.at = gpu.num_done

            def query(self) -> bool:
                return True

            def synchronize(self) -> None:
                gpu.note("event", gpu.num_done - self.at)

        for name, value in {
            "Event": Event,
            "Stream": _Stream,
            "current_stream": _Stream,
            "stream": lambda _: contextlib.nullcontext(),
            "synchronize": lambda *_: gpu.note("synchronize"),
        }.items():
            self._stack.enter_context(mock.patch.object(torch.cuda, name, value))
        # Asks for devices in C++, where nothing can be pretended.
        group = clip_grad._group_tensors_by_device_and_dtype
        self._stack.enter_context(
            mock.patch.object(
                clip_grad,
                "_group_tensors_by_device_and_dtype",
                lambda lists: {(GPU, kind): v for (_, kind), v in group(lists).items()},
            )
        )
        self._stack.enter_context(_Operations(self))
        self._stack.enter_context(_Functions(self))
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def note(self, what: str, num_behind: int = 0) -> None:
        """Notes a wait; one of a thread beside the compute holds nobody up."""
        if threading.current_thread() is threading.main_thread():
            self.waits.append(Wait(what, *_asked_by(), num_behind))

    def of(self, whose: str) -> list[Wait]:
        """The waits for which somebody's code has asked."""
        return [wait for wait in self.waits if wait.whose == whose]

    def seen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that a backward calls: torch switches modes like :class:`_Functions` off."""

        def call(*args: Any) -> Any:
            with _Functions(self):
                return function(*args)

        return call

    # --- where a tensor is ---

    def take(self, tensors: Iterable[Any]) -> None:
        """Puts tensors on the device."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._mark(self._memory, tensor)

    def put(self, tensor: Tensor, device: torch.device) -> None:
        """Says where a new tensor is."""
        with contextlib.suppress(NotImplementedError):
            if device.type == "cuda":
                self._mark(self._memory, tensor)
            else:
                self._memory.pop(tensor.untyped_storage()._cdata, None)

    def pin(self, tensor: Tensor) -> None:
        self._mark(self._pinned, tensor)

    def has(self, tensor: Any) -> bool:
        return self._is_marked(self._memory, tensor)

    def is_pinned(self, tensor: Any) -> bool:
        return self._is_marked(self._pinned, tensor)

    @staticmethod
    def _mark(table: dict[int, StorageWeakRef], tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # The reference keeps the address from being another storage's.
        table[storage._cdata] = StorageWeakRef(storage)

    @staticmethod
    def _is_marked(table: dict[int, StorageWeakRef], tensor: Any) -> bool:
        if not isinstance(tensor, Tensor) or not table:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return tensor.untyped_storage()._cdata in table
            except NotImplementedError:  # no storage: sparse, or a functional wrapper
                return False


class _Operations(TorchDispatchMode):
    """Sees what torch's kernels are given, the backward's too."""

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        gpu, kwargs = self._gpu, kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = [x for x in tensors if gpu.has(x)]
        name = function.name().partition(".")[0]
        if name == "aten::copy_":
            to, source = args[:2]
            waits = not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking")
            if gpu.has(source) and not gpu.has(to):
                if waits or not gpu.is_pinned(to):
                    gpu.note("copy to the host")
            elif gpu.has(to) and not gpu.has(source) and waits:
                gpu.note("copy to the device")
            gpu.num_done += bool(there)
            return function(*args, **kwargs)
        if there:
            gpu.num_done += 1
            by_mask = name == "aten::index" and any(
                isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]
            )
            if name in _READS or by_mask:
                gpu.note(name.removeprefix("aten::"))
            if any(x.dim() and not gpu.has(x) and not x.is_meta for x in tensors):
                gpu.mixed.append(f"{name}: {_asked_by()[1]}")
        results = function(*args, **kwargs)
        if there:
            gpu.take(pytree.tree_leaves(results))
        return results


class _Functions(TorchFunctionMode):
    """Sees what asks where a tensor is, and what moves one."""

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        gpu, kwargs = self._gpu, dict(kwargs or {})
        own: Any = args[0] if args else None
        if function in _QUESTIONS:
            return _QUESTIONS[function](gpu, own) if gpu.has(own) else function(*args, **kwargs)
        if function is Tensor.pin_memory:
            pinned = own.clone()
            gpu.put(pinned, CPU)
            gpu.pin(pinned)
            return pinned
        if function is Tensor.is_pinned:
            return gpu.is_pinned(own)
        if function in (Tensor.tolist, Tensor.numpy, Tensor.__array__) and gpu.has(own):
            gpu.note(function.__name__)
        if function is Tensor.cpu:
            return self._moved(own, CPU, waits=True)
        if function is torch._C._nn._parse_to:
            return function(*args, **kwargs)
        if function is Tensor.to:
            return self._to(*args, **kwargs)
        named = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)]
        named += [torch.device(kwargs["device"])] if isinstance(kwargs.get("device"), str) else []
        is_pinned = kwargs.pop("pin_memory", False)
        if not named and not is_pinned:
            return function(*args, **kwargs)
        args = [CPU if isinstance(x, torch.device) else x for x in args]
        if kwargs.get("device") is not None:
            kwargs["device"] = CPU
        if function in (torch.tensor, torch.as_tensor) and named[0].type == "cuda":
            gpu.note("a tensor of numbers")
        result = function(*args, **kwargs)
        if isinstance(result, Tensor) and not result.is_meta:
            if named:
                gpu.put(result, named[0])
            if is_pinned:
                gpu.pin(result)
        return result

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device: torch.device | None = None
        others: list[Any] = []
        for value in args:
            if isinstance(value, str | torch.device):
                device = torch.device(value)
            elif isinstance(value, Tensor):
                device = GPU if self._gpu.has(value) else CPU
                others.append(value.dtype)
            else:
                others.append(value)
        if kwargs.get("device") is not None:
            device = torch.device(kwargs.pop("device"))
        waits = not (kwargs.pop("non_blocking", False) or True in others)
        moved = tensor if device is None else self._moved(tensor, device, waits)
        kwargs.pop("device", None)
        others = [value for value in others if not isinstance(value, bool)]
        to: Any = Tensor.to
        return to(moved, *others, **kwargs) if others or kwargs else moved

    def _moved(self, tensor: Tensor, device: torch.device, waits: bool) -> Tensor:
        gpu = self._gpu
        is_there = gpu.has(tensor)
        if device.type == "meta" or tensor.is_meta or is_there == (device.type == "cuda"):
            return Tensor.to(tensor, device) if device.type == "meta" else tensor
        # To memory that is not pinned, a copy always waits.
        if is_there or waits:
            gpu.note("to the host" if is_there else "to the device")
        moved = tensor.clone()
        gpu.put(moved, device)
        return moved


_QUESTIONS: dict[Any, Callable[[PretendedGPU, Tensor], Any]] = {
    Tensor.device.__get__: lambda gpu, _: GPU,
    Tensor.is_cuda.__get__: lambda gpu, _: True,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda gpu, _: False,  # type: ignore[attr-defined]
    Tensor.get_device: lambda gpu, _: 0,
}


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
            self._gpu.take(_tensors_of_run(trainer, module))
            self._gpu.take(pytree.tree_leaves(batch))
            devices = _devices_of_run(trainer, module, self._gpu, self._is_shared)
            for owner, name, value in devices:
                self._stack.enter_context(mock.patch.object(owner, name, value))
            self._stack.enter_context(self._gpu)
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
    yield pipeline.channels, "_staged", is_shared
    assert pipeline.holdings is not None
    yield pipeline.holdings, "device", GPU
    if pipeline._aggregation is not None:
        if not is_shared:
            # As with NCCL, whose sums are made in the device's memory.
            yield pipeline._aggregation, "_device", GPU
        yield pipeline._aggregation, "notice", gpu.seen(pipeline._aggregation.notice)
        for group in pipeline._aggregation._groups:
            yield group, "_buffers", {}
