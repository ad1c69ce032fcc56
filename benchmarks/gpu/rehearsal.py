"""A GPU for the rehearsal of the GPU script: simulated, for code that asks ``torch.cuda`` for it.

Lightning, PipeShift and the script itself find one GPU here, ``cuda:0``. Its tensors are those of
:class:`~tests.simulated.device.SimulatedDevice`, which computes on the CPU and
raises an error where nothing orders two operations that use the same memory. So the script needs
no branch for a machine without a GPU: every line that runs on a GPU runs in the rehearsal too.

What is not simulated: autocast changes no types, attention has only torch's kernels for CPUs, and
NCCL is gloo. The functions of ``torch.cuda`` that are missing here fail as on any CPU.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad

from lightning_pipeshift.compat.torch_private import make_wrapper_subclass
from lightning_pipeshift.devices import shared_memory
from lightning_pipeshift.values import value
from lightning_pipeshift.values.microbatch import Microbatch
from tests.simulated.device import SimulatedDevice

GPU = torch.device("cuda", 0)
NAME = "the simulated device (a rehearsal)"
VARIABLE = "PIPESHIFT_GPU_REHEARSAL"
"""Set in the environment of a rehearsal's processes."""

_TOTAL_BYTES = 1 << 30


def gpu() -> AbstractContextManager[object]:
    """Context in which there is a GPU: this machine's own, or the simulated one."""
    return rehearsed() if VARIABLE in os.environ else nullcontext()


class RehearsedGPU(SimulatedDevice):
    """The simulated device, with what the script asks of ``torch.cuda``."""

    def __init__(self) -> None:
        super().__init__(device=GPU)
        self.peak_bytes = 0
        self._warns = False

    def has(self, tensor: Any) -> bool:
        """See :class:`SimulatedDevice`. Values say so, and have no memory."""
        return isinstance(tensor, value.Value) or super().has(tensor)

    def note(self, what: str, num_behind: int = 0) -> None:
        """Warns of a wait as CUDA does, if that is wanted."""
        if self._warns:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    def collect_freed(self) -> None:
        """Looks at the peak, too."""
        super().collect_freed()
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def allocated(self, *_: Any) -> int:
        """``memory_allocated``: the bytes of the tensors on the device."""
        self.collect_freed()
        return self.allocated_bytes

    def peak(self, *_: Any) -> int:
        """``max_memory_allocated``."""
        self.allocated()
        return self.peak_bytes

    def forget_peak(self, *_: Any) -> None:
        """``reset_peak_memory_stats``."""
        self.peak_bytes = 0

    def warn_of_waits(self, mode: str) -> None:
        """``set_sync_debug_mode``."""
        self._warns = mode == "warn"

    def functions(self) -> dict[str, Any]:
        """What takes the place of functions and attributes of ``torch.cuda``."""
        properties = SimpleNamespace(
            name=NAME, total_memory=_TOTAL_BYTES, uuid="simulated", major=9, minor=0
        )
        return {
            "is_available": lambda: True,
            "is_bf16_supported": lambda *_: True,
            "init": lambda: None,
            "set_device": lambda _: None,
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "can_device_access_peer": lambda *_: False,
            "get_device_name": lambda *_: NAME,
            "get_device_capability": lambda *_: (9, 0),
            "get_device_properties": lambda *_: properties,
            "default_generators": (torch.default_generator,),
            "mem_get_info": lambda *_: (_TOTAL_BYTES - self.allocated(), _TOTAL_BYTES),
            "empty_cache": lambda: None,
            "memory_allocated": self.allocated,
            "max_memory_allocated": self.peak,
            "reset_peak_memory_stats": self.forget_peak,
            "set_sync_debug_mode": self.warn_of_waits,
            "_sleep": lambda _: None,
        }


@contextmanager
def rehearsed() -> Iterator[RehearsedGPU]:
    """Context in which torch has one GPU, which is simulated."""
    device = RehearsedGPU()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **device.functions()))
        for owner, name, value in _others(device):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(device)
        yield device


def _others(device: RehearsedGPU) -> Iterator[tuple[Any, str, Any]]:
    """What else asks for devices in C++, where nothing can be simulated: owner, name, value."""
    from benchmarks.gpu import one_rank, profile

    yield torch.cuda.nccl, "version", lambda: (0, 0, 0)
    group = clip_grad._group_tensors_by_device_and_dtype
    yield clip_grad, "_group_tensors_by_device_and_dtype", _renamed(group)
    yield value, "make_wrapper_subclass", _on_cpu(make_wrapper_subclass)
    # It is called by a function of torch, in which function modes are off.
    yield Microbatch, "operation", device.inside(Microbatch.operation)
    # Torch switches function modes off in hooks, and with them what tensors say of their device.
    hooks = torch.autograd.graph.saved_tensors_hooks
    yield torch.autograd.graph, "saved_tensors_hooks", _hooks_inside(hooks, device)
    run_backward = torch.autograd._engine_run_backward
    yield torch.autograd, "_engine_run_backward", device.inside(run_backward)
    attention = functional.scaled_dot_product_attention
    yield functional, "scaled_dot_product_attention", _masked(attention)
    yield one_rank, "sdpa_kernel", lambda _: nullcontext()
    yield shared_memory, "exported", _exported
    yield shared_memory, "imported", partial(_imported, device)
    yield profile, "KERNELS", torch.profiler.ProfilerActivity.CPU


def _renamed(group: Callable[..., Any]) -> Callable[..., Any]:
    return lambda lists: {(GPU, kind): value for (_, kind), value in group(lists).items()}


def _hooks_inside(hooks: Callable[..., Any], device: RehearsedGPU) -> Callable[..., Any]:
    return lambda pack, unpack: hooks(device.inside(pack), device.inside(unpack))


def _masked(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Attention that is causal by a mask of its caller's: its own one is made in C++."""

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **how: Any,
    ) -> Any:
        if is_causal:
            size = (query.shape[-2], key.shape[-2])
            attn_mask = query.new_full(size, float("-inf")).triu(1)
        return attention(query, key, value, attn_mask, dropout_p, **how)

    return call


def _exported(memory: Tensor) -> Any:
    """Moves the device's memory to a file in memory, which other processes can map."""
    file, num_bytes = memory.untyped_storage()._share_fd_cpu_()
    return os.getpid(), file, num_bytes


def _imported(device: RehearsedGPU, handle: Any, _: torch.device) -> Tensor:
    process, file, num_bytes = handle
    path = f"/proc/{process}/fd/{file}"
    memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    device.take(memory)
    return memory


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """Placeholders have no memory, but autograd switches to their device."""
    return lambda *args, device, **how: make(*args, device=torch.device("cpu"), **how)
