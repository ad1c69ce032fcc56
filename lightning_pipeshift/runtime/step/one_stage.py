"""The steps of a single device: the user's own, run where Lightning runs them.

There is nothing to send, to split or to merge. So the forward runs in Lightning's ``training_step``
and the backward in its ``backward``, with everything that belongs to these: the values that
``training_step`` logs and returns, an overridden ``backward``, an optimizer that calls its closure
several times. Only two parts of a pipeline remain: the random streams of the layers, and the order
in which gradients of shared parameters are summed. With them, the results equal those on any number
of stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_pipeshift.model.execution.stage_pass import StagePass
from lightning_pipeshift.model.gates.gate import CurrentPass
from lightning_pipeshift.model.user_state.random_streams import RandomStreams
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.step.trace_cache import Key
from lightning_pipeshift.runtime.step.training_batch import UserStep


class OneStage:
    """Runs steps of a model that is whole on one device.

    Args:
        root: the LightningModule.
        current_pass: that of the gates.
        streams: the random generators.
        device: the one device.
    """

    def __init__(
        self,
        root: nn.Module,
        current_pass: CurrentPass,
        streams: RandomStreams,
        device: torch.device,
    ) -> None:
        self._root = root
        self._current_pass = current_pass
        self._streams = streams
        self._device = device
        self._pass: StagePass | None = None
        """The forward whose backward has not run yet."""

    @property
    def awaits_backward(self) -> bool:
        """Whether a training step's forward has run, and its backward has not yet."""
        return self._pass is not None

    def forward(
        self, step: UserStep, batch: Any, key: Key, holdings: Holdings, num_layers: int
    ) -> tuple[Any, list[int]]:
        """Runs the user's step.

        Args:
            step: runs it on a module and the batch.
            batch: the whole batch, or the arguments that Lightning passes to the step instead.
            key: determines the step's random streams.
            holdings: the model's parameters.
            num_layers: how many layers the model has.

        Returns:
            what the step returned, and the layers in the order in which it called them.
        """
        holdings.shared.begin_step()
        current = StagePass(
            trace=None,
            layers=range(num_layers),
            is_last=True,
            received={},
            device=self._device,
            streams=self._streams,
            key=key,
            shared=holdings.shared,
        )
        self._current_pass.value = current
        try:
            with self._streams.switched(*key):
                current.run(lambda: step(self._root, batch))
        finally:
            self._current_pass.value = None
        result, current.result = current.result, None
        self._pass = current if torch.is_grad_enabled() else None
        return result, current.order

    @contextmanager
    def backward(self, holdings: Holdings) -> Iterator[None]:
        """Context in which user code or Lightning runs the backward of the last forward. Its
        gradients are added to the existing ones.
        """
        current, self._pass = self._pass, None
        if current is None:
            yield  # a second backward of an earlier step
            return
        sums_apart = holdings.shared.was_handed_out
        if sums_apart:
            holdings.set_gradients_aside(keep=True)
        self._current_pass.value = current
        try:
            # Layers that run again, as the model uses activation checkpointing, draw the same
            # random numbers as before.
            with self._streams.switched(*current.key):
                yield
        finally:
            self._current_pass.value = None
            current.end_backward()
        if sums_apart:
            holdings.collect_gradients(1.0, None, joins=False)
            holdings.hand_gradients_over()
