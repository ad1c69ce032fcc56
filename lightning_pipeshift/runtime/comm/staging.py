"""Host memory for copies that are made while training waits."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pipeshift.devices.host_memory import ask_for_large_pages


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised tensor in host memory."""
    tensor = torch.empty(shape, dtype=dtype)
    ask_for_large_pages(tensor)
    return tensor


class Staging:
    """Copies of tensors in host memory; the memory is reused for later copies."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, key: str, tensor: Tensor) -> Tensor:
        """Returns a contiguous copy of a tensor, valid until the next copy with the same key."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[key] = host_buffer(tuple(tensor.shape), tensor.dtype)
        return buffer.copy_(tensor.detach())

    def clear(self) -> None:
        """Releases the memory."""
        self._buffers.clear()
