"""The order in which steps call layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise


def call_order(calls: Iterable[int], num_layers: int) -> list[int]:
    """The order in which ``num_layers`` layers (numbered as found in the module tree) are called
    first. A layer that is not called remains after its predecessor in the module tree.

    Args:
        calls: the layer of each call.
        num_layers: how many layers there are.
    """
    order = list(dict.fromkeys(calls))
    for layer in range(num_layers):
        if layer not in order:
            order.insert(order.index(layer - 1) + 1 if layer - 1 in order else 0, layer)
    return order


def merged_order(calls: Sequence[Sequence[int]]) -> list[int]:
    """Each layer that any of several steps calls, once, in an order that agrees with all of them;
    otherwise undetermined positions are in the order of the indices.

    Steps that skip layers at random call only some of them each time. If no order agrees with all
    steps, the order is that of the first one.

    Args:
        calls: the layers that each step calls.
    """
    after: dict[int, set[int]] = {}
    for layers in calls:
        for layer in layers:
            after.setdefault(layer, set())
        for before, layer in pairwise(layers):
            if before != layer:
                after[before].add(layer)
    num_before = dict.fromkeys(after, 0)
    for later in after.values():
        for layer in later:
            num_before[layer] += 1
    ready = [layer for layer, count in num_before.items() if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heappop(ready))
        for layer in after[order[-1]]:
            num_before[layer] -= 1
            if not num_before[layer]:
                heappush(ready, layer)
    return order if len(order) == len(after) else list(dict.fromkeys(calls[0]))
