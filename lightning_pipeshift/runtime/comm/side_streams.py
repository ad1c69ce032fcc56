"""Streams that run concurrently with the compute stream, one for each kind of work.

Torch hands out the same 32 streams of a GPU in turn: code that takes a new one for each plan or
copy soon gets one on which other work waits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def side_stream(device: torch.device, work: str) -> Any:
    """Returns the stream of a GPU for a kind of work; always the same one in a process.

    Args:
        device: the GPU.
        work: the name of the kind.
    """
    return torch.cuda.Stream(device)
