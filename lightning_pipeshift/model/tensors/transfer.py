"""Moves the tensors of a whole structure between a device and its host.

The CPU queues a GPU's work ahead of time. Each ``.cpu()`` or ``float(tensor)`` ends that: the CPU
waits until the GPU has completed all earlier work, and then the GPU waits for new work. So values
are copied together, and waited for only when they are needed: meanwhile the GPU has later work to
do.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_pipeshift.devices.host_memory import pinned_like
from lightning_pipeshift.devices.streams import record_event
from lightning_pipeshift.model.tensors.trees import flatten, map_leaves

_JOINED_BYTES: Final = 1 << 16
"""Tensors up to this size are joined for the copy."""


class Fetch:
    """Values that are being copied to the host. The constructor does not wait.

    Args:
        tree: a structure; tensors in host memory stay as they are.
        is_kept: whether the values may be kept for long. Then they are copied once more, out of
            pinned memory, which is scarce.
    """

    def __init__(self, tree: Any, is_kept: bool = True) -> None:
        self._is_kept = is_kept
        leaves, self._rebuild = flatten(tree)
        self._leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        # The indices of the leaves that are copied together, and the copies.
        self._copies: list[tuple[list[int], Tensor]] = []
        groups: dict[Hashable, list[int]] = {}
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or leaf.device.type == "cpu":
                continue
            if type(leaf) not in (Tensor, nn.Parameter) or leaf.layout is not torch.strided:
                self._leaves[place] = leaf.detach().cpu()
                continue
            is_joined = leaf.nbytes <= _JOINED_BYTES and leaf.is_contiguous()
            groups.setdefault((leaf.device, leaf.dtype) if is_joined else place, []).append(place)
        with torch.no_grad():
            for places in groups.values():
                there = self._leaves[places[0]]
                if len(places) > 1:
                    there = torch.cat([self._leaves[place].reshape(-1) for place in places])
                copy = pinned_like(there)
                self._copies.append((places, copy.copy_(there, non_blocking=True)))
        devices = {self._leaves[places[0]].device for places, _ in self._copies}
        self._events = [record_event(device) for device in devices]

    def wait(self) -> Any:
        """The structure in host memory, detached."""
        for event in self._events:
            event.synchronize()
        for places, copy in self._copies:
            sizes = [self._leaves[place].numel() for place in places]
            parts = copy.reshape(-1).split(sizes) if len(places) > 1 else [copy]
            for place, part in zip(places, parts, strict=True):
                value = part.clone() if self._is_kept else part
                self._leaves[place] = value.view(self._leaves[place].shape)
        self._events.clear()
        self._copies.clear()
        return self._rebuild(self._leaves)


def to_host(tree: Any) -> Any:
    """A structure with its tensors in host memory, detached: see :class:`Fetch`. Waits at most
    once.
    """
    return Fetch(tree).wait()


def to_device(tree: Any, device: torch.device) -> Any:
    """A structure with its tensors on a device. Does not wait."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if device.type == "cpu" or leaf.device.type != "cpu" or leaf.layout is not torch.strided:
            return leaf.to(device)
        # Torch keeps the pinned memory until the copy is complete.
        return leaf.pin_memory().to(device, non_blocking=True)

    return map_leaves(moved, tree)
