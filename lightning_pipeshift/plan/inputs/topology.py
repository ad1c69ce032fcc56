"""The topology: the ranks of every virtual machine, in stage order.

A virtual machine holds one replica of the model. If the counts allow, it has one device of each
kind and speed (NUDT, "distributed parallel training method and system for heterogeneous computing
clusters"), so that all virtual machines are equally fast; and subject to that its devices share a
host, since a payload travels for every microbatch and a gradient once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_pipeshift.errors import ConfigurationError, PartitionError
from lightning_pipeshift.plan.inputs.cluster import Device

VirtualMachinesSpec = int | str | Sequence[Sequence[int]]
"""How many virtual machines; ``"auto"``, for a choice by the planner; or the ranks of each in stage
order.
"""


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of every virtual machine, in stage order; each rank is in exactly one.

    Raises ConfigurationError for a rank that is missing or named twice, and for a virtual machine
    without ranks.
    """

    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        spec = [list(ranks) for ranks in self.ranks]
        named = [rank for ranks in self.ranks for rank in ranks]
        if not self.ranks or not all(self.ranks):
            empty = [vm for vm, ranks in enumerate(self.ranks) if not ranks]
            raise ConfigurationError(
                f"virtual_machines={spec}: virtual machine {empty[0] if empty else 0} has no"
                " device. Give every virtual machine at least one rank."
            )
        twice = sorted({rank for rank in named if named.count(rank) > 1})
        if twice:
            raise ConfigurationError(
                f"virtual_machines={spec} names rank {_listed(twice)} more than once. A rank is one"
                " device, and one stage of one virtual machine: name it once."
            )
        missing = sorted(set(range(len(named))) - set(named))
        if missing:
            raise ConfigurationError(
                f"virtual_machines={spec} names {len(named)} ranks, but not rank {_listed(missing)}"
                f". Name each of the ranks 0 to {len(named) - 1} once."
            )

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.ranks))

    @property
    def num_virtual_machines(self) -> int:
        return len(self.ranks)

    @property
    def stages_per_vm(self) -> tuple[int, ...]:
        """How many stages each virtual machine has."""
        return tuple(map(len, self.ranks))

    def has_machines_of(self, other: Topology) -> bool:
        """Whether both have the same ranks in each virtual machine, in whatever order."""
        return [*map(sorted, self.ranks)] == [*map(sorted, other.ranks)]

    def place_of(self, rank: int) -> tuple[int, int]:
        """The virtual machine and the stage of a rank."""
        for vm, ranks in enumerate(self.ranks):
            if rank in ranks:
                return vm, ranks.index(rank)
        raise ConfigurationError(f"rank {rank}; there are ranks 0 to {self.num_ranks - 1}")

    def name_of(self, rank: int, host: str = "") -> str:
        """A rank's name in words, for messages.

        Args:
            rank: the rank.
            host: the name of its host, if it should be included.
        """
        vm, stage = self.place_of(rank)
        machine = f" of virtual machine {vm}" if self.num_virtual_machines > 1 else ""
        where = f" on {host}" if host else ""
        return f"stage {stage}{machine} (rank {rank}{where})"


def topology_of(
    spec: VirtualMachinesSpec | None,
    devices: Sequence[Device],
    depths: Sequence[int] | None = None,
) -> Topology:
    """The topology that a user asked for.

    Args:
        spec: see :data:`VirtualMachinesSpec`; ``None``, and ``"auto"`` until the planner has
            chosen: one virtual machine, or as many as there are depths.
        devices: one for each rank. Their speeds count if they are known.
        depths: how many stages each virtual machine has, if a partition or a plan determines it.

    Raises:
        ConfigurationError: the existing ranks cannot be arranged in this way.
        PartitionError: the depths need another number of ranks.
    """
    num_ranks = len(devices)
    if not isinstance(spec, int | str | None):
        topology = Topology(tuple(map(tuple, spec)))
        if topology.num_ranks != num_ranks:
            raise ConfigurationError(
                f"virtual_machines={[list(ranks) for ranks in topology.ranks]} names"
                f" {topology.num_ranks} ranks; this run has {num_ranks}. Name each of the ranks 0"
                f" to {num_ranks - 1} once, or change the number of devices."
            )
        return topology
    is_open = spec is None or spec == "auto"
    if is_open and depths is not None and len(depths) > 1 and sum(depths) != num_ranks:
        raise PartitionError(
            f"The partition or the plan is for {len(depths)} virtual machines of"
            f" {_listed(depths)} stages, which are {sum(depths)} ranks; this run has {num_ranks}."
            " Give one list of layers per stage for each virtual machine."
        )
    count = spec if isinstance(spec, int) else (len(depths) if depths is not None else 1)
    if depths is not None and len(depths) == count and sum(depths) == num_ranks:
        return Topology(tuple(map(tuple, filled(devices, depths))))
    if num_ranks % count:
        raise ConfigurationError(
            f"virtual_machines={count}: {num_ranks} ranks cannot be shared out evenly. Allowed are"
            f" numbers that divide {num_ranks}. For virtual machines of different depth, name their"
            f" ranks, as in virtual_machines={_example(num_ranks, count)}."
        )
    return Topology(tuple(map(tuple, filled(devices, [num_ranks // count] * count))))


def host_order(devices: Sequence[Device]) -> tuple[int, ...]:
    """All ranks, those of a host next to each other, regardless of how the launcher numbered
    them.
    """
    hosts: dict[str, int] = {}
    for device in devices:
        hosts.setdefault(device.host, len(hosts))
    return tuple(sorted(range(len(devices)), key=lambda rank: (hosts[devices[rank].host], rank)))


def filled(devices: Sequence[Device], depths: Sequence[int]) -> list[list[int]]:
    """Virtual machines of these depths: equal numbers of each kind in each if that is possible, and
    else one after the other in the order of the hosts.
    """
    in_order = host_order(devices)
    kinds: dict[tuple[str, float], list[int]] = {}
    for rank in in_order:
        kinds.setdefault((devices[rank].kind, devices[rank].speed), []).append(rank)
    count = len(depths)
    if len(set(depths)) == 1 and all(len(ranks) % count == 0 for ranks in kinds.values()):
        # In the pipeline, a host's devices are neighbours: few boundaries lie between hosts.
        place = {rank: number for number, rank in enumerate(in_order)}
        return [
            sorted(
                (
                    rank
                    for ranks in kinds.values()
                    for rank in ranks[vm * len(ranks) // count : (vm + 1) * len(ranks) // count]
                ),
                key=place.__getitem__,
            )
            for vm in range(count)
        ]
    left = iter(in_order)
    return [[next(left) for _ in range(depth)] for depth in depths]


def check_spec(spec: Any) -> None:
    """Raises ConfigurationError for a value that is not a :data:`VirtualMachinesSpec`."""
    is_number = isinstance(spec, int) and not isinstance(spec, bool)
    if spec == "auto" or (is_number and spec >= 1):
        return
    if isinstance(spec, list | tuple):
        if not all(
            isinstance(ranks, list | tuple)
            and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks)
            for ranks in spec
        ):
            raise ConfigurationError(
                f"virtual_machines={spec!r}: give one list of ranks for each virtual machine, as in"
                " [[0, 2], [1, 3]]."
            )
        Topology(tuple(map(tuple, spec)))
        return
    raise ConfigurationError(
        f"virtual_machines={spec!r}: allowed are 'auto', a whole number of 1 or more, or the ranks"
        " of each virtual machine in stage order, as in [[0, 2], [1, 3]]."
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _example(num_ranks: int, count: int) -> list[list[int]]:
    base, larger = divmod(num_ranks, count)
    if not base:
        return [[rank] for rank in range(num_ranks)]
    ranks = iter(range(num_ranks))
    return [[next(ranks) for _ in range(base + (vm < larger))] for vm in range(count)]
