"""By how much an element may be off that ``8bit`` has encoded."""

from __future__ import annotations

import torch
from torch import Tensor


def largest_error(flat: Tensor) -> float:
    """The bound in the docstring of the codec's class, for a block of finite numbers."""
    largest = float(torch.maximum(flat.amax(), flat.amin().neg()))
    wide = torch.finfo(torch.float64 if flat.dtype is torch.float64 else torch.float32)
    kind = torch.finfo(flat.dtype)
    above_zero = kind.smallest_normal * kind.eps
    return largest * (1 / 254 + 3 * wide.eps + kind.eps / 2) + above_zero
