"""Layers that sleep instead of computing: many stages on few cores, with times that are known."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

FORWARD_SECONDS = 0.020
BACKWARD_SECONDS = 0.040

_slowness = 1.0


def slow_down(factor: float) -> None:
    """From here on, all sleeping layers of this process take ``factor`` times their time."""
    global _slowness
    _slowness = factor


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        time.sleep(forward_seconds * _slowness)
        # As a layer that computes would: something to hold until the backward.
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds * _slowness)
        return gradients[0], None, None


class SleepingLayer(nn.Module):
    """A linear layer that takes time and next to no processor.

    Args:
        width: the number of features; it has ``width * width`` parameters.
        forward_seconds: how long its forward takes.
        backward_seconds: how long its backward takes.
    """

    def __init__(
        self,
        width: int,
        forward_seconds: float = FORWARD_SECONDS,
        backward_seconds: float = BACKWARD_SECONDS,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.seconds = (forward_seconds, backward_seconds)

    def forward(self, x: Tensor) -> Tensor:
        # The linear comes first, so that the backward sleeps on the first stage too.
        slept: Tensor = _Sleep.apply(self.linear(x), *self.seconds)  # type: ignore[no-untyped-call]
        return slept


class Sleeper(L.LightningModule):
    """Sleeping layers, one after the other.

    Args:
        layers: how many.
        width: of each.
        forward_seconds: what a forward takes.
        backward_seconds: what a backward takes.
    """

    def __init__(
        self,
        layers: int,
        width: int = 64,
        forward_seconds: float = FORWARD_SECONDS,
        backward_seconds: float = BACKWARD_SECONDS,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            SleepingLayer(width, forward_seconds, backward_seconds) for _ in range(layers)
        )

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean squared error."""
        x, target = batch
        for layer in self.layers:
            x = self.run(layer, x)
        loss = F.mse_loss(x, target)
        self.log("train_loss", loss)
        return loss

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Calls a layer."""
        found: Tensor = layer(x)
        return found

    def configure_optimizers(self) -> Optimizer:
        """Plain SGD."""
        return plain_sgd(self.parameters())


def plain_sgd(parameters: Any) -> Optimizer:
    """The optimizer of every contender."""
    return SGD(parameters, lr=0.01)
