"""Measures what the code around layers takes for a moment, while a microbatch is trained: the
results of a loss and the gradients of its backward, say.

A layer runs by itself before training, and is measured there (see :mod:`.measure`). The code around
it cannot be run by itself, so it is watched in a real microbatch: its operations in the forward,
and in the backward the nodes of its graph, which are found from the tensors that it has passed on.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import OperationMode
from lightning_pipeshift.model.measuring.live_bytes import LiveBytes
from lightning_pipeshift.model.saved.observer import Observer
from lightning_pipeshift.model.saved.saved_tensors import SavedTable
from lightning_pipeshift.model.tensors.trees import address_of, leaves_of, tensors_here


class CodeBytes(OperationMode):
    """Watches the code around the layers of one microbatch while it is entered: the forward. The
    backward is watched by hooks, which know nothing of the graph that they are part of.

    Args:
        device: whose tensors count.
        observer: has a record of the tensors that are saved.
        table: of the microbatch.
        left_out: addresses of memory that is counted elsewhere: the model's own, and what the stage
            has received, also later.
    """

    def __init__(
        self, device: torch.device, observer: Observer, table: SavedTable, left_out: Set[int]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._observer = observer
        self._table = table
        self._left_out = left_out
        self._layer = 0
        self._live: LiveBytes | None = None
        self._saved_before: dict[int, Any] = {}
        self._bytes_before = 0
        self._nodes: set[Any] = set()
        """Those that results of layers come from, and those that have been found."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if self._live is not None:
            values = leaves_of((args, kwargs, results))
            self._live.note(x for x in values if not self._is_counted_elsewhere(x))
        return results

    def _is_counted_elsewhere(self, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return True
        if self._table.is_there_anyway(value, self._left_out):
            return True
        address = address_of(value)
        # The same memory, and not other memory at the same address.
        before = self._saved_before.get(address)
        return before is not None and self._observer.known.get(address) is before

    def begin(self, layer: int) -> None:
        """Called when code around a layer starts to run."""
        self._layer = layer
        self._live = LiveBytes(self._device)
        self._saved_before = dict(self._observer.known)
        self._bytes_before = self._observer.num_bytes

    def end(self, passed_on: Iterable[Any]) -> None:
        """Called when it has run.

        Args:
            passed_on: the arguments of the layer that runs next, or the results of the step.
        """
        if self._live is None:
            return
        saved = self._observer.num_bytes - self._bytes_before
        self._observer.note_code(self._layer, self._live.peak_bytes - saved)
        self._live = None
        self._watch(self._layer, passed_on)

    def results(self, leaves: Iterable[Any]) -> None:
        """Called with the results of a layer, where the graph of the code behind it begins."""
        self._nodes.update(x.grad_fn for x in tensors_here(leaves) if x.grad_fn is not None)

    def _watch(self, layer: int, passed_on: Iterable[Any]) -> None:
        live = LiveBytes(self._device)
        note = partial(_note, live, self._observer, layer)
        found = [x.grad_fn for x in passed_on if isinstance(x, Tensor)]
        while found:
            node = found.pop()
            # A parameter's node only adds up, and lives longer than the graph.
            if node is None or node in self._nodes or hasattr(node, "variable"):
                continue
            self._nodes.add(node)
            node.register_hook(note)
            found += [following for following, _ in node.next_functions]


def _note(live: LiveBytes, observer: Observer, layer: int, made: Any, given: Any) -> None:
    """Called when a node has run, with the gradients that it has made and those that it got."""
    live.note([*made, *given])
    observer.note_code(layer, live.peak_bytes)
