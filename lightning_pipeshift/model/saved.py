"""How many bytes a layer's forward keeps for its backward: what a microbatch in flight costs.

Counted where autograd saves them, by storage: a tensor and its views are held once. Parameters and
buffers are there anyway and are left out, and so are the layer's inputs that the layer before it
saved: they are counted there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.model.gate import Gate
from lightning_pipeshift.model.placeholder import Placeholder
from lightning_pipeshift.model.recompute import Saved, address_of
from lightning_pipeshift.model.trees import leaves_of


class SavedBytes:
    """Counts one microbatch's saved tensors, layer by layer."""

    def __init__(self) -> None:
        self.of_layers: dict[int, int] = {}
        self.of_inputs: dict[int, int] = {}
        self._known: set[int] = set()
        # Storages that were freed could come again under the same address.
        self._held: list[Tensor] = []

    def run(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a layer, and counts what it saves."""
        resident = {address_of(t) for t in [*gate.layer.parameters(), *gate.layer.buffers()]}
        self.of_inputs[gate.index] = bytes_of(leaves_of((args, kwargs)))

        def pack(tensor: Tensor) -> Saved:
            address = address_of(tensor)
            if address not in resident and address not in self._known:
                self._known.add(address)
                self._held.append(tensor.detach())
                size = bytes_of([tensor])
                if tensor.layout is torch.strided:
                    size = tensor.untyped_storage().nbytes()
                self.of_layers[gate.index] = self.of_layers.get(gate.index, 0) + size
            return Saved(tensor, None)

        self.of_layers.setdefault(gate.index, 0)
        with torch.autograd.graph.saved_tensors_hooks(pack, Saved.get):
            return gate.original(*args, **kwargs)

    def end(self) -> None:
        """The microbatch is over."""
        self._held.clear()
        self._known.clear()


def bytes_of(tensors: Iterable[Any]) -> int:
    """What the tensors among some values take, each by itself; placeholders take nothing."""
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in tensors
        if isinstance(tensor, Tensor) and not isinstance(tensor, Placeholder)
    )
