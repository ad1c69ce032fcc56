"""Host memory for copies that are made while training stands still."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_ADVICE = 14  # MADV_HUGEPAGE, of Linux


def room_for(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in host memory.

    New memory comes page by page when it is touched, and that takes longer than copying: large
    pages are asked for, where the system has them.
    """
    tensor = torch.empty(shape, dtype=dtype)
    begin = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    size = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE - begin
    if size > 0 and hasattr(mmap, "MADV_DONTNEED"):
        # Advice: where it is not taken, nothing is lost.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _ADVICE)
    return tensor


class Staging:
    """Copies of tensors in host memory, whose room is used again for the next copies."""

    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}

    def copy(self, key: str, tensor: Tensor) -> Tensor:
        """A copy of a tensor, row by row. It holds until the same key is copied again."""
        room = self._rooms.get(key)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            room = self._rooms[key] = room_for(tuple(tensor.shape), tensor.dtype)
        return room.copy_(tensor.detach())

    def clear(self) -> None:
        """Gives the memory back."""
        self._rooms.clear()
