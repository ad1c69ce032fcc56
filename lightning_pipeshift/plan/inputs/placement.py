"""The owners of layers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_pipeshift.errors import PartitionError


@dataclass(frozen=True, slots=True)
class Placement:
    """The number of layers of each stage, for every virtual machine.

    A stage's layers are contiguous, in the order in which they are called. Zero is legal: a drained
    stage, which only forwards the payload. Raises PartitionError for an impossible placement.

    Args:
        counts: the numbers.
        owners: the stage of each layer, for every virtual machine, where the layers of a stage are
            not contiguous; empty where all are.
    """

    counts: tuple[tuple[int, ...], ...]
    owners: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.counts:
            raise PartitionError("a placement of no virtual machine; it needs at least 1")
        for vm, counts in enumerate(self.counts):
            if not counts:
                raise PartitionError(f"virtual machine {vm} has no stage; it needs at least 1")
            for stage, count in enumerate(counts):
                if type(count) is not int or count < 0:
                    raise PartitionError(
                        f"virtual machine {vm} places {count!r} layers on stage {stage}; "
                        "a count is a whole number, 0 or more"
                    )
            if sum(counts) != sum(self.counts[0]):
                raise PartitionError(
                    f"virtual machine {vm} places {sum(counts)} layers {counts}, virtual machine 0 "
                    f"{sum(self.counts[0])} {self.counts[0]}; each holds the whole model, so make "
                    "them add up to the same number"
                )
        if sum(self.counts[0]) < 1:
            raise PartitionError("a placement of 0 layers; it needs at least 1")
        depths = tuple(map(len, self.counts))
        if self.owners and (
            len(self.owners) != len(depths)
            or _counts_of(self.owners, depths) != self.counts
            or _are_contiguous(self.owners)
        ):
            raise PartitionError(
                f"a placement whose layers are on the stages {self.owners}, and that counts"
                f" {self.counts} layers of each stage; make them agree, or omit the stages if the"
                " layers of each are contiguous"
            )

    @classmethod
    def of(cls, owners: Sequence[Sequence[int]], depths: Sequence[int]) -> Placement:
        """A placement by the stage of each layer.

        Args:
            owners: for every virtual machine, the stages.
            depths: the number of stages of each.
        """
        owners = owners[: len(depths)]
        scattered = () if _are_contiguous(owners) else tuple(map(tuple, owners))
        return cls(_counts_of(owners, depths), scattered)

    @classmethod
    def interleaved(cls, counts: Sequence[Sequence[int]], depths: Sequence[int]) -> Placement:
        """A placement on stages that have several chunks of layers each.

        Args:
            counts: for every virtual machine the layers of each stage in chunk 0, then in chunk 1,
                and so on.
            depths: the number of stages of each.
        """
        owners = [
            [at % depth for at, count in enumerate(row) for _ in range(count)]
            for row, depth in zip(counts, depths, strict=True)
        ]
        return cls.of(owners, depths)

    def chunk_counts(self, vm: int, num_chunks: int) -> tuple[int, ...] | None:
        """The inverse of :meth:`interleaved` for one virtual machine; ``None`` where a stage has
        more chunks of layers.
        """
        num_stages, at = self.num_stages(vm), 0
        if not self.owners:
            return self.counts[vm] + (0,) * (num_stages * (num_chunks - 1))
        counts = [0] * (num_stages * num_chunks)
        for stage in self.stages(vm):
            at += (stage - at) % num_stages
            if at >= len(counts):
                return None
            counts[at] += 1
        return tuple(counts)

    @property
    def num_virtual_machines(self) -> int:
        return len(self.counts)

    @property
    def num_layers(self) -> int:
        return sum(self.counts[0])

    def num_stages(self, vm: int) -> int:
        return len(self.counts[vm])

    def bounds(self, vm: int) -> tuple[int, ...]:
        """The first layer of every stage; an empty stage has that of the next."""
        return tuple(accumulate(self.counts[vm][:-1], initial=0))

    def stage_of(self, vm: int, layer: int) -> int:
        """The stage that owns a layer."""
        if not 0 <= layer < self.num_layers:
            raise PartitionError(
                f"layer {layer} of a placement with {self.num_layers} layers; "
                f"they are 0 to {self.num_layers - 1}"
            )
        if self.owners:
            return self.owners[vm][layer]
        # Of stages that begin at one layer, all but the last are empty: hence the rightmost.
        return bisect_right(self.bounds(vm), layer) - 1

    def stages(self, vm: int) -> list[int]:
        """The stage that owns each layer."""
        if self.owners:
            return list(self.owners[vm])
        return [stage for stage, count in enumerate(self.counts[vm]) for _ in range(count)]

    def layers_of(self, vm: int, stage: int) -> Sequence[int]:
        """The layers that a stage owns."""
        if self.owners:
            return [layer for layer, owner in enumerate(self.owners[vm]) if owner == stage]
        first = self.bounds(vm)[stage]
        return range(first, first + self.counts[vm][stage])


def _counts_of(
    owners: Sequence[Sequence[int]], depths: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(list(stages).count(stage) for stage in range(depth))
        for stages, depth in zip(owners, depths, strict=False)
    )


def _are_contiguous(owners: Sequence[Sequence[int]]) -> bool:
    """Whether the layers of each stage follow each other, in the order of the stages."""
    return all(list(stages) == sorted(stages) for stages in owners)
