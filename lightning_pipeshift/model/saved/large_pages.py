"""Advice to the operating system on the memory of tensors."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

_HUGE_PAGE = 2 << 20
# Constants of Linux; Python has them only on systems that define them.
_LET_GO = getattr(mmap, "MADV_DONTNEED", 4)
_HUGE = getattr(mmap, "MADV_HUGEPAGE", 14)


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
