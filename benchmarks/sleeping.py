"""A layer that sleeps instead of computing, so that two cores carry many stages."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

FORWARD_SECONDS = 0.020
BACKWARD_SECONDS = 0.040


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_SECONDS)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(BACKWARD_SECONDS)
        return gradients[0]


class SleepingLayer(nn.Module):
    """Costs time and next to no processor; has ``width * width`` parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # The linear comes first, so that the backward sleeps on the first stage too.
        slept: Tensor = _Sleep.apply(self.linear(x))
        return slept
