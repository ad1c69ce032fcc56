"""Host memory: pinned, for copies that run beside the compute, and in large pages."""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_pipeshift.devices import streams

_HUGE_PAGE = 2 << 20
# Constants of Linux; Python has them only on systems that define them.
_LET_GO = getattr(mmap, "MADV_DONTNEED", 4)
_HUGE = getattr(mmap, "MADV_HUGEPAGE", 14)


def pinned_like(tensor: Tensor) -> Tensor:
    """An uninitialised tensor in pinned memory, with a tensor's shape, type and layout. Torch
    reuses its memory when no copy uses it any more.
    """
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def pinned_buffer(num_bytes: int, device: torch.device, finish: Callable[[], None]) -> Tensor:
    """Allocates exactly ``num_bytes`` of pinned memory, as a vector of bytes.

    Torch's own allocator rounds pinned memory up to powers of two, and keeps it to the end of the
    process: a budget of 9 GB would take 16.

    The memory stays pinned for as long as any tensor refers to it, be it a view of this one.

    Args:
        num_bytes: how many, at least 1.
        device: copies from it and to it.
        finish: called before the memory is freed; returns when no copy uses it.

    Raises:
        RuntimeError: so much memory cannot be pinned.
    """
    # Whole pages, as no page can be pinned twice.
    is_linux = sys.platform == "linux"
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if is_linux else {}
    mapped = mmap.mmap(-1, num_bytes, **flags)
    # Torch's storage refers to this object; the tensor that is returned may be gone before.
    owner = memoryview(mapped)
    buffer = torch.frombuffer(owner, dtype=torch.uint8)
    ask_for_large_pages(buffer)
    unpin = streams.pin(buffer, device)
    weakref.finalize(owner, _release, finish, unpin, mapped).atexit = False
    return buffer


def _release(finish: Callable[[], None], unpin: Callable[[], None], _: mmap.mmap) -> None:
    """Called with the memory itself, which is unmapped when this has returned."""
    finish()
    unpin()


def let_go(tensor: Tensor) -> None:
    """Frees the pages of a mapped tensor; they are read again at the next access."""
    _advise(tensor, mmap.PAGESIZE, _LET_GO)


def ask_for_large_pages(tensor: Tensor) -> None:
    """Requests large pages for a tensor that has not been written to yet. The system allocates new
    memory page by page at the first access, which takes longer than copying.
    """
    _advise(tensor, _HUGE_PAGE, _HUGE)


def _advise(tensor: Tensor, page: int, advice: int) -> None:
    """Gives advice on the whole pages of a tensor. Ignoring it does no harm."""
    begin = -(-tensor.data_ptr() // page) * page
    size = (tensor.data_ptr() + tensor.nbytes) // page * page - begin
    if size > 0 and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice)
