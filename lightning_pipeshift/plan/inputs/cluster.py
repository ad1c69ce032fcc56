"""The machines: the properties of each rank's device, and of the links between devices.

This generalises the heterogeneous cluster of NUDT's "distributed parallel training method and
system for heterogeneous computing clusters": kinds, speeds and links are given per device, so
counts need not be equal, and all devices may differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_pipeshift.errors import PlanError


@dataclass(frozen=True, slots=True)
class Device:
    """The properties of one rank's device.

    Args:
        host: identifies the operating system; devices with the same one share a NIC.
        kind: the model of the device; devices of one kind take equal time at equal ``speed``.
        speed: relative to others of its kind: 0.5 takes twice the time.
        memory_bytes: its memory; 0 if not known, which counts as unlimited.
        free_bytes: the part of ``memory_bytes`` that was free when it was measured.
        host_bytes: the memory of its host that it may take for swapped tensors.
        host_bandwidth: the bandwidth to the host and back, in bytes per second; 0: no swaps.
        copy_seconds: what each copy of a tensor to the host or back takes from the compute: the
            seconds of the processor that computes, or launches what is computed; 0 if it was not
            measured.
        copy_seconds_per_byte: likewise, for each byte.
    """

    host: str
    kind: str
    speed: float = 1.0
    memory_bytes: int = 0
    free_bytes: int = 0
    host_bytes: int = 0
    host_bandwidth: float = 0.0
    copy_seconds: float = 0.0
    copy_seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise PlanError(
                f"a device of kind {self.kind!r} on host {self.host!r} with speed {self.speed}; a"
                " speed is finite and above 0 (omit a device that computes nothing)"
            )
        for name in (
            "memory_bytes",
            "free_bytes",
            "host_bytes",
            "host_bandwidth",
            "copy_seconds",
            "copy_seconds_per_byte",
        ):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise PlanError(
                    f"a device of kind {self.kind!r} on host {self.host!r} with {name}"
                    f" {getattr(self, name)}; it is at least 0 (0: not known)"
                )

    @property
    def usable_bytes(self) -> float:
        """The memory that a plan may use: the free or else the whole memory, or infinity."""
        return float(self.free_bytes or self.memory_bytes or math.inf)


@dataclass(frozen=True, slots=True)
class Link:
    """The link from one device to another, in one direction.

    Args:
        latency_seconds: until the first byte arrives.
        bandwidth: bytes per second.
    """

    latency_seconds: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_seconds) and self.latency_seconds >= 0):
            raise PlanError(
                f"a link with a latency of {self.latency_seconds} s; it is finite and at least 0"
            )
        if math.isnan(self.bandwidth) or self.bandwidth <= 0:
            raise PlanError(f"a link of {self.bandwidth} bytes/s; a bandwidth is above 0")

    def seconds(self, num_bytes: float) -> float:
        """The duration of a message; 0 for 0 bytes."""
        return self.latency_seconds + num_bytes / self.bandwidth if num_bytes else 0.0


FREE: Link = Link()
"""A link with unknown properties: transfers count as taking no time."""


@dataclass(frozen=True)
class Cluster:
    """The devices, one for each rank, and the links between them.

    Args:
        devices: by rank.
        inside: between devices of one host.
        outside: between devices of different hosts.
        hosts: between two hosts (either order), or inside of one (``(a, a)``), if it differs.
        ranks: between two ranks (the lower first), if it was measured; takes precedence.
    """

    devices: tuple[Device, ...]
    inside: Link = FREE
    outside: Link = FREE
    hosts: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    ranks: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.devices:
            raise PlanError("a cluster of no device; it needs at least 1")

    @property
    def num_ranks(self) -> int:
        return len(self.devices)

    def link(self, one: int, other: int) -> Link:
        """The link between two ranks' devices; free between a rank and itself."""
        if one == other:
            return FREE
        found = self.ranks.get((min(one, other), max(one, other)))
        if found is not None:
            return found
        a, b = self.devices[one].host, self.devices[other].host
        found = self.hosts.get((a, b)) or self.hosts.get((b, a))
        return found or (self.inside if a == b else self.outside)

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds of devices, in the order of the ranks."""
        return tuple(dict.fromkeys(device.kind for device in self.devices))
