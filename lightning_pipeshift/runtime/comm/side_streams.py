"""Streams beside that of the compute, one for each kind of work.

Torch hands out 32 streams of a GPU in turn: whoever takes a new one for each plan or each copy soon
has one that other work waits on.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def side_stream(device: torch.device, work: str) -> Any:
    """The stream of a GPU for a kind of work; always the same one in a process.

    Args:
        device: the GPU.
        work: the name of the kind.
    """
    return torch.cuda.Stream(device)
