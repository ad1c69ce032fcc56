"""One virtual machine's part of each global batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TypeVar

from lightning_pipeshift.plan.inputs.shares import shared_out

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """One virtual machine's part of each global batch.

    Args:
        vm: index of the virtual machine.
        shares: one positive number for each virtual machine.
        size: how many items a global batch has; at least one for each virtual machine.
        pads: whether a global batch at the end that has fewer items than there are virtual machines
            is padded with the first items, so that all have the same number of batches.
        drops_last: whether a partial global batch at the end is dropped.
    """

    vm: int
    shares: tuple[float, ...]
    size: int
    pads: bool
    drops_last: bool = False

    @property
    def num_items(self) -> int:
        """The number of this virtual machine's items in a full global batch."""
        return shared_out(self.size, self.shares)[self.vm]

    def num_batches(self, num_items: int) -> int:
        """How many batches this virtual machine gets out of ``num_items``."""
        num_whole, rest = divmod(num_items, self.size)
        return num_whole + self._takes_of(rest)

    def batches(self, items: Iterable[T], num_items: int | None = None) -> Iterator[list[T]]:
        """This virtual machine's batches.

        Args:
            items: all of them, in the order that all virtual machines have in common.
            num_items: how many there are, if known.
        """
        order = iter(items)
        first: list[T] = []
        ahead: list[T] = []
        while group := ahead or list(islice(order, self.size)):
            ahead = []
            first = first or group[: len(self.shares)]
            batch = self._taken(group, first)
            if not batch:
                return
            if num_items is not None:
                num_items -= len(group)
                is_rest_ahead = 0 < num_items < self.size and not self.drops_last
                if is_rest_ahead and not self._takes_of(num_items):
                    # With a known length, no item after this batch is read. The other virtual
                    # machines read further, and this may draw random numbers: so this one has to
                    # read further too.
                    ahead = list(islice(order, self.size))
            yield batch

    def _takes_of(self, rest: int) -> bool:
        """Whether this virtual machine gets items of a last, partial global batch."""
        if rest == 0 or self.drops_last:
            return False
        return self.pads or shared_out(rest, self.shares)[self.vm] > 0

    def _taken(self, group: list[T], first: list[T]) -> list[T]:
        if len(group) < self.size:
            if self.drops_last:
                return []
            if self.pads:
                group = group + list(islice(cycle(first), max(0, len(self.shares) - len(group))))
        counts = shared_out(len(group), self.shares)
        start = sum(counts[: self.vm])
        return group[start : start + counts[self.vm]]
