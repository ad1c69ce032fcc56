"""What the system is told of the memory of tensors."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

_HUGE_PAGE = 2 << 20
# Of Linux; Python names them where they are known.
_LET_GO = getattr(mmap, "MADV_DONTNEED", 4)
_HUGE = getattr(mmap, "MADV_HUGEPAGE", 14)


def let_go(tensor: Tensor) -> None:
    """Takes the pages of a mapped tensor out of memory; touched again, they are read again."""
    _advise(tensor, mmap.PAGESIZE, _LET_GO)


def ask_for_large_pages(tensor: Tensor) -> None:
    """For a tensor that nobody has written to yet. New memory comes page by page when it is
    touched, and that takes longer than copying.
    """
    _advise(tensor, _HUGE_PAGE, _HUGE)


def _advise(tensor: Tensor, page: int, advice: int) -> None:
    """Gives advice on the whole pages of a tensor. Where it is not taken, nothing is lost."""
    begin = -(-tensor.data_ptr() // page) * page
    size = (tensor.data_ptr() + tensor.nbytes) // page * page - begin
    if size > 0 and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice)
