"""Caches what is known of calls. Layers of one kind, and calls with similar arguments, share it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_pipeshift.compat.torch_private import without_torch_function_of_subclasses
from lightning_pipeshift.values.contract import Contract
from lightning_pipeshift.values.layer_contracts import (
    fake_copy,
    flagged_in,
    flags_of,
    kind_of,
    set_flags,
)
from lightning_pipeshift.values.layer_state import Attribute, Watch, replaced_parameters
from lightning_pipeshift.values.placed_layer import PlacedLayer

# How many contracts, kinds and fake copies of layers are kept: a layer that counts its calls has
# a contract for each, and a setting that changes in each step makes a kind each.
_MOST_CONTRACTS, _MOST_KINDS = 4096, 64


class KnownCalls:
    """What is known of the calls of layers and operations.

    Args:
        layers: the layers that are placed.
    """

    def __init__(self, layers: Sequence[PlacedLayer]) -> None:
        self._layers = layers
        self.contracts: dict[Any, tuple[Contract | None, str, int]] = {}
        """By a call's key: its contract, its name, and a digest of what else has to be the same on
        all ranks."""
        # What layers of one kind have in common has a number, which is faster to compare.
        self._kinds: dict[Any, int] = {}
        self._num_kinds = 0
        self._fakes: dict[int, nn.Module | None] = {}

    def learn_from(self, other: KnownCalls) -> None:
        """Takes what is known of the calls of the same layers, in any order."""
        self.contracts, self._fakes = other.contracts, other._fakes
        self._kinds, self._num_kinds = other._kinds, other._num_kinds
        by_module = {layer.module: layer for layer in self._layers}
        for layer in other._layers:
            self.add_state(by_module[layer.module], set(layer.state))

    def keep(
        self, key: Any, contract: Contract | None, name: str, what: object
    ) -> tuple[Contract | None, str, int]:
        """Keeps a contract for other calls.

        Args:
            key: of these calls.
            contract: theirs.
            name: theirs.
            what: what has to be the same on all ranks; it follows from the key.
        """
        known = contract, name, zlib.crc32(repr((name, what)).encode())
        _put(self.contracts, key, known, _MOST_CONTRACTS)
        return known

    def find_kind(self, layer: PlacedLayer) -> Watch:
        """Finds the number of a layer's kind again, if the layer's settings have changed; returns
        what watches them.
        """
        watch = layer.watch
        if watch is None or watch.look() or watch.are_parameters_replaced():
            if watch is None:
                watch = layer.watch = layer.watch_of(layer.module)
            if self.add_state(layer, watch.values):
                return self.find_kind(layer)
            layer.find_flagged()
            layer.replaced = tuple(replaced_parameters(layer.module))
            kind = layer.replaced, kind_of(layer.module, layer.own_forward, layer.state)
            if kind not in self._kinds:
                self._num_kinds += 1
                _put(self._kinds, kind, self._num_kinds, _MOST_KINDS)
            layer.kind = self._kinds[kind]
        return watch

    def fake_of(self, layer: PlacedLayer, fake_mode: Any, device: torch.device) -> nn.Module | None:
        """A fake copy of a layer, or of one of its kind; ``None`` if there can be none.

        Args:
            layer: the layer.
            fake_mode: makes fake tensors.
            device: where the layer would compute.
        """
        if layer.kind not in self._fakes:
            fake = fake_copy(layer.module, layer.own_forward, fake_mode, device, layer.state)
            _put(self._fakes, layer.kind, fake, _MOST_KINDS)
        fake = self._fakes[layer.kind]
        if fake is not None:
            with without_torch_function_of_subclasses():
                set_flags(flagged_in(fake), flags_of(layer.flagged))
        return fake

    def add_state(self, layer: PlacedLayer, changed: set[Attribute]) -> bool:
        """Adds to the state of a layer and of those with the same modules; returns whether there
        was anything new.
        """
        new = changed.difference(layer.state)
        if not new:
            return False
        buffers = {id(layer.shared.get(attribute)) for attribute in new}
        for each in self._layers:
            more = {name for name, x in each.shared.items() if id(x) in buffers}
            if each.family == layer.family:
                more |= new
            if more - set(each.state):
                each.state = sorted(more.union(each.state))
                each.watch = None
        return True


def _put(table: dict[Any, Any], key: Any, x: Any, most: int) -> None:
    """Adds to a table of limited size."""
    if len(table) >= most:
        del table[next(iter(table))]
    table[key] = x
