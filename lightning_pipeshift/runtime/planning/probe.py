"""Measures devices, and the links between them, at the start of a run.

Users need not describe their machines: a fraction of a second of matrix products, the size of the
memory and a few megabytes over each link give a cluster to plan for. Short measurements are noisy,
and the order and grouping of devices depend on them; so similar values are made equal, and two
equal machines don't look different because one of them was interrupted.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import torch

from lightning_pipeshift.devices.properties import empty_cache, memory_of, unique_id
from lightning_pipeshift.devices.streams import record_event
from lightning_pipeshift.errors import some_of
from lightning_pipeshift.host import boot_id
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.planning.host_memory import OWN_CGROUPS, host_memory
from lightning_pipeshift.runtime.planning.link_probe import (
    Pair,
    cluster_of,
    levelled,
    measure_links,
    ranks_by,
    rounds_of,
    together,
)

SAME_SPEED: Final = 0.75
"""Devices of one kind whose rate is at least this fraction of the fastest's count as equally fast.
"""

UNSTEADY: Final = 3.0
"""A median of at least this many times the best means that another program ran."""

SLOW: Final = 0.5
"""A device below this fraction of its kind's median rate is reported."""

_SLICES_SECONDS = 0.06
_FEWEST_SLICES, _MOST_SLICES = 3, 64
# A product takes 1 to 2 ms on a CPU core of today, and about as long on a GPU. All devices of a
# type use the same size, as larger sizes give higher rates.
_CPU_SIZE, _GPU_SIZE = 448, 2048


@dataclass(frozen=True, slots=True)
class Found:
    """One rank's measurements of its own device.

    Args:
        device: its host and kind.
        processor: identifies the processor. Ranks with the same one count as equally fast, even if
            their short measurements differ.
        operations: floating-point operations in a slice.
        best_seconds: seconds of the fastest slice.
        median_seconds: seconds of the median slice.
        pool: identifies the memory that the device uses. Ranks with the same one share it.
        memory_bytes: the size of the pool.
        free_bytes: the free part of it.
    """

    device: Device
    processor: str
    operations: float
    best_seconds: float
    median_seconds: float
    pool: str
    memory_bytes: int
    free_bytes: int

    @property
    def rate(self) -> float:
        """Floating-point operations per second, undisturbed."""
        return self.operations / self.best_seconds


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The measurements of all ranks.

    Args:
        cluster: the devices and their links. A device's speed is relative to the fastest of its
            kind: kinds are compared by the layers' own times, measured on each.
        seconds: of the median slice, by rank.
        notes: observations that a user may want to look into, in words.
    """

    cluster: Cluster
    seconds: tuple[float, ...]
    notes: tuple[str, ...]


def time_slices(device: torch.device, seconds: float | None = None) -> list[float]:
    """Seconds of each slice of a short computation, always the same: a product of two matrices.

    On a GPU the kernel alone is timed, on a CPU the call. Draws no random numbers.

    Args:
        device: this rank's.
        seconds: how long to compute; ``None``: as at the start of a run.
    """
    size = _size(device)
    matrix = torch.full((size, size), 0.5, dtype=torch.float32, device=device)
    product = torch.empty_like(matrix)
    found: list[float] = []
    most = _MOST_SLICES if seconds is None else math.inf
    seconds = _SLICES_SECONDS if seconds is None else seconds
    deadline = time.perf_counter() + seconds
    with torch.no_grad():
        torch.mm(matrix, matrix, out=product)  # the first one loads libraries
        while len(found) < _FEWEST_SLICES or (len(found) < most and time.perf_counter() < deadline):
            begun = record_event(device, is_timed=True)
            torch.mm(matrix, matrix, out=product)
            ended = record_event(device, is_timed=True)
            ended.synchronize()
            found.append(begun.elapsed_time(ended) / 1000)
    return found


def found_here(
    device: torch.device,
    here: Device,
    slices: Callable[[torch.device], Sequence[float]] = time_slices,
) -> Found:
    """Measures this rank's device.

    Args:
        device: this rank's.
        here: its host and kind.
        slices: times a computation on the device; for tests.
    """
    seconds = sorted(slices(device))
    # The computation's memory in torch's cache is free.
    empty_cache(device)
    memory_bytes, free_bytes = _memory(device)
    return Found(
        device=here,
        processor=_processor(device, here),
        operations=2.0 * _size(device) ** 3,
        # A coarse clock may measure 0 seconds.
        best_seconds=max(seconds[0], 1e-9),
        median_seconds=max(statistics.median(seconds), 1e-9),
        pool=_pool(device, here.host),
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
    )


def probe(
    world: Channels,
    device: torch.device,
    here: Device,
    report: Callable[[str], None] | None = None,
    slices: Callable[[torch.device], Sequence[float]] = time_slices,
) -> ProbeResult:
    """Measures the devices and the links between them. Every rank calls this; every rank gets the
    same.

    All devices compute at the same time, as in training: ranks that share a host's cores are as
    slow here as in training. Tensors travel between the devices as payloads do.

    Args:
        world: connections between all ranks; no other operation is in progress on them.
        device: this rank's.
        here: its host and kind.
        report: called with messages about the progress, if it takes longer than a second.
        slices: times a computation on the device; for tests.
    """
    together(world)
    mine = found_here(device, here, slices)
    # For ranks that share a device, the memory of the other ranks' computation is free, too.
    together(world)
    memory_bytes, free_bytes = _memory(device)
    mine = replace(mine, memory_bytes=memory_bytes, free_bytes=free_bytes)
    found: list[Found] = world.gather(mine)
    links: dict[Pair, Link] = {}
    rounds = rounds_of([each.device.host for each in found])
    for measured in world.gather(measure_links(world, rounds, report)):
        links.update(measured)
    world.settle()
    return assess(found, links)


# --- conclusions from the measurements ---


def assess(found: Sequence[Found], links: Mapping[Pair, Link]) -> ProbeResult:
    """Combines the measurements of all ranks.

    Args:
        found: by rank.
        links: the pairs that were measured.
    """
    pools = ranks_by([each.pool for each in found])
    devices = []
    for device, each in zip(with_speeds(found), found, strict=True):
        sharers = pools[each.pool]
        # The minimum: ranks that share a pool see slightly different sizes, as they measure at
        # different times.
        memory_bytes = min(found[rank].memory_bytes for rank in sharers) // len(sharers)
        free_bytes = min(found[rank].free_bytes for rank in sharers) // len(sharers)
        # 0 free bytes would mean that the memory is unknown.
        free_bytes = max(free_bytes, 1) if memory_bytes else 0
        devices.append(replace(device, memory_bytes=memory_bytes, free_bytes=free_bytes))
    seconds = tuple(each.median_seconds for each in found)
    return ProbeResult(cluster_of(tuple(devices), links), seconds, tuple(_notes(found)))


def with_speeds(found: Sequence[Found]) -> list[Device]:
    """The devices by rank, each with its speed relative to the fastest of its kind; similar speeds
    are made equal.
    """
    rates, devices = _rates(found), [each.device for each in found]
    for ranks in ranks_by([device.kind for device in devices]).values():
        levels = levelled([rates[rank] for rank in ranks], SAME_SPEED)
        for rank, level in zip(ranks, levels, strict=True):
            devices[rank] = replace(devices[rank], speed=level / max(levels))
    return devices


def _rates(found: Sequence[Found]) -> list[float]:
    """The rate of each rank: the best of those that share its processor."""
    best: dict[str, float] = {}
    for each in found:
        best[each.processor] = max(best.get(each.processor, 0.0), each.rate)
    return [best[each.processor] for each in found]


def _notes(found: Sequence[Found]) -> Iterator[str]:
    rates, kinds = _rates(found), ranks_by([each.device.kind for each in found])
    processors = ranks_by([each.processor for each in found])
    for ranks in processors.values():
        device = found[ranks[0]].device
        # The rest of the host's name distinguishes containers and clones, and means nothing to
        # users.
        name = f"{'ranks' if len(ranks) > 1 else 'rank'} {some_of([str(rank) for rank in ranks])}"
        name += f" on host {device.host.partition('/')[0]} ({device.kind})"
        best = min(found[rank].best_seconds for rank in ranks)
        median = statistics.median(found[rank].median_seconds for rank in ranks)
        if median > UNSTEADY * best:
            yield (
                f"{name}: the same computation took {1e3 * best:.2f} ms at best and"
                f" {1e3 * median:.2f} ms in the median; another job may run there, or more ranks"
                " than it has cores"
            )
        usual = statistics.median_high(rates[rank] for rank in kinds[device.kind])
        if rates[ranks[0]] < SLOW * usual:
            yield (
                f"{name}: computes at {rates[ranks[0]] / usual:.0%} of the median of its kind;"
                " another job may run there, it may be throttled (heat, power), or it has fewer"
                " cores than the others"
            )


# --- the processor and the memory of a rank ---


def _processor(device: torch.device, here: Device) -> str:
    """Identifies a rank's processor: the same for ranks on the same GPU, and for ranks that the
    operating system may run on the same set of cores with equal priority.
    """
    if device.type != "cpu":
        return _pool(device, here.host)
    terms = [here.host, here.kind, f"{torch.get_num_threads()} threads"]
    with suppress(OSError):
        # Containers count as different hosts, and may share their cores.
        terms[0] = boot_id()
        terms.append(OWN_CGROUPS.read_text())
    with suppress(AttributeError, OSError):  # not every system has these
        terms += map(str, sorted(os.sched_getaffinity(0)))
        terms.append(f"nice {os.getpriority(os.PRIO_PROCESS, 0)}")
    return " ".join(terms)


def _pool(device: torch.device, host: str) -> str:
    return host if device.type == "cpu" else f"{host} {unique_id(device)}"


def _memory(device: torch.device) -> tuple[int, int]:
    """The size of the memory that this rank uses, and its free part, in bytes."""
    return host_memory() if device.type == "cpu" else memory_of(device)


def _size(device: torch.device) -> int:
    return _CPU_SIZE if device.type == "cpu" else _GPU_SIZE
