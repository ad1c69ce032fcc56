"""Follows the user's steps, each kind and shape of them once."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from lightning_pipeshift.errors import LayerError, PipeShiftError
from lightning_pipeshift.model.gate import Gate, Switch
from lightning_pipeshift.model.measure import Stopwatch
from lightning_pipeshift.model.signature import batch_signature
from lightning_pipeshift.model.streams import Streams
from lightning_pipeshift.model.trace import Trace, record
from lightning_pipeshift.plan.flow import call_order
from lightning_pipeshift.runtime.checksum import checksum
from lightning_pipeshift.runtime.step_run import UserStep

log = logging.getLogger(__name__)

_MOST_TRACES = 256

Key = tuple[int | str, ...]


class Follower:
    """The flows of one model's steps.

    Args:
        root: the LightningModule.
        gates: one for each layer, installed.
        switch: the gates' switch.
        streams: the random generators; following draws what running would draw.
        device: the stage's device.
    """

    def __init__(
        self,
        root: nn.Module,
        gates: list[Gate],
        switch: Switch,
        streams: Streams,
        device: torch.device,
    ) -> None:
        self.gates = gates
        # While the whole model is here, code that refuses placeholders is followed on real values.
        self.model_is_whole = True
        self._root = root
        self._switch = switch
        self._streams = streams
        self._device = device
        self._traces: OrderedDict[Hashable, Trace] = OrderedDict()

    def trace(self, key: Key, step: UserStep, batch: Any, state: Hashable) -> tuple[Trace, bool]:
        """The flow of a step on a batch like this one, and whether it is a new one.

        Args:
            key: what the microbatch's random streams depend on; its second entry names the step.
            step: runs the user's step on a module and the batch.
            batch: one microbatch.
            state: the LightningModule's ``module_signature``, the same for a whole step.
        """
        signature: tuple[Hashable, ...] = (key[1], batch_signature(batch), state)
        known = self._traces.get(signature)
        if known is not None and known.is_shaped_by_batch:
            signature = (*signature, checksum(batch))
            known = self._traces.get(signature)
        if known is not None:
            return known, False
        fresh = self.follow(key, step, batch)
        self._traces[signature] = fresh
        if len(self._traces) > _MOST_TRACES:
            self._traces.popitem(last=False)
        return fresh, True

    def traces(self) -> list[Trace]:
        """The flows that are known."""
        return list(self._traces.values())

    def put_in_order(self, key: Key, step: UserStep, batch: Any) -> None:
        """Sorts the gates by when a step calls their layers."""
        flow = self.follow(key, step, batch).flow
        order = call_order([flow], len(self.gates))
        self.gates = [self.gates[index] for index in order]
        for index, gate in enumerate(self.gates):
            gate.index = index
        self._traces.clear()

    def follow(
        self, key: Key, step: UserStep, batch: Any, stopwatch: Stopwatch | None = None
    ) -> Trace:
        """Follows a step on a batch anew."""

        with self._streams.switched(*key):
            try:
                return self._record(step, batch, False, stopwatch)
            except PipeShiftError:
                raise
            except Exception as error:
                if not self.model_is_whole:
                    raise LayerError(
                        "Following the step on a batch of a new shape failed:"
                        f" {type(error).__name__}: {error}. Code between the layers that needs real"
                        " values can be followed only on the first batch of a run. Keep the shapes"
                        " of the batches the same, or move that code into a layer."
                    ) from error
                log.debug("Following on placeholders failed, so on values: %s", error)
        with self._streams.switched(*key):
            return self._record(step, batch, True, None)

    def _record(self, step: UserStep, batch: Any, real: bool, stopwatch: Stopwatch | None) -> Trace:
        def run(root: nn.Module) -> Any:
            return step(root, batch)

        before = self._streams.host_state()
        trace = record(run, self._root, self.gates, self._switch, self._device, real, stopwatch)
        trace.draws_on_host = self._streams.host_state() != before
        return trace
