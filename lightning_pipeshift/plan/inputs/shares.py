"""Divides the samples of a global batch among virtual machines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TypeVar

from lightning_pipeshift.errors import ConfigurationError

T = TypeVar("T")


def check_shares(shares: Sequence[float] | None, num_virtual_machines: int | None) -> None:
    """Raises ConfigurationError for impossible shares.

    Args:
        shares: one number for each virtual machine, or ``None`` for equal ones.
        num_virtual_machines: how many there are, ``None`` if not known yet.
    """
    if shares is None:
        return
    wrong = isinstance(shares, str) or not isinstance(shares, Sequence)
    if wrong or any(isinstance(s, bool) or not isinstance(s, int | float) for s in shares):
        raise ConfigurationError(
            f"batch_shares={shares!r}: give one number for each virtual machine, as in [3, 1]."
        )
    for vm, share in enumerate(shares):
        if not (share > 0 and math.isfinite(share)):
            raise ConfigurationError(
                f"batch_shares={list(shares)} gives virtual machine {vm} the share {share!r}. Every"
                " virtual machine needs a share above 0; or remove the machine from the run."
            )
    if num_virtual_machines is not None and len(shares) != num_virtual_machines:
        raise ConfigurationError(
            f"batch_shares={list(shares)} has {len(shares)} entries; there are"
            f" {num_virtual_machines} virtual machines. Give one for each."
        )


def shared_out(size: int, shares: Sequence[float]) -> list[int]:
    """The number of ``size`` samples for each virtual machine: integers that add up to it, as near
    to the shares as possible (largest remainders first, then the lower index), and at least 1 if
    there are enough.
    """
    total = math.fsum(shares)
    exact = [size * share / total for share in shares]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda vm: (counts[vm] - exact[vm], vm))
    for vm in by_remainder[: size - sum(counts)]:
        counts[vm] += 1
    while size >= len(shares) and min(counts) == 0:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return counts


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
