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
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]
import torch

from lightning_pipeshift.devices.properties import empty_cache, memory_of, unique_id
from lightning_pipeshift.devices.streams import record_event
from lightning_pipeshift.errors import some_of
from lightning_pipeshift.host import boot_id, host_names
from lightning_pipeshift.plan.inputs.cluster import FREE, Cluster, Device, Link
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.process_groups import Purpose

SAME_SPEED: Final = 0.75
"""Devices of one kind whose rate is at least this fraction of the fastest's count as equally fast.
"""

SAME_BANDWIDTH: Final = 1 / 1.5
SAME_LATENCY: Final = 1 / 3
"""The same for links. Measurements of two processes on one busy host vary by nearly that much."""

UNSTEADY: Final = 3.0
"""A median of at least this many times the best means that another program ran."""

SLOW: Final = 0.5
"""A device below this fraction of its kind's median rate is reported."""

_SLICES_SECONDS = 0.06
_FEWEST_SLICES, _MOST_SLICES = 3, 64
# A product takes 1 to 2 ms on a CPU core of today, and about as long on a GPU. All devices of a
# type use the same size, as larger sizes give higher rates.
_CPU_SIZE, _GPU_SIZE = 448, 2048

_ALL_PAIRS_RANKS = 8
# From device to device a few megabytes take hardly longer than one byte.
_FIRST_BYTES, _MOST_BYTES, _MOST_DEVICE_BYTES = 1 << 16, 1 << 22, 1 << 26
_TRANSFER_SECONDS, _MOST_TRANSFER_SECONDS = 0.02, 0.2
_REPORT_SECONDS = 1.0

Pair = tuple[int, int]
"""Two ranks, the lower first."""


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
        rates: floating-point operations per second, by rank; an estimate until layers have been
            measured. Equal for devices of equal kind and speed.
        seconds: of the median slice, by rank.
        notes: observations that a user may want to look into, in words.
    """

    cluster: Cluster
    rates: tuple[float, ...]
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
    _together(world)
    mine = found_here(device, here, slices)
    # For ranks that share a device, the memory of the other ranks' computation is free, too.
    _together(world)
    memory_bytes, free_bytes = _memory(device)
    mine = replace(mine, memory_bytes=memory_bytes, free_bytes=free_bytes)
    found: list[Found] = _gather(world, mine)
    links: dict[Pair, Link] = {}
    rounds = rounds_of([each.device.host for each in found])
    with world.links(pair for pairs in rounds for pair in pairs):
        mine_of_them = _measure_links(world, rounds, report)
    for measured in _gather(world, mine_of_them):
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
    processors = _ranks_by([each.processor for each in found])
    kinds = _ranks_by([each.device.kind for each in found])
    rates = _rates(found, processors)
    notes = tuple(_notes(found, rates, processors, kinds))
    rates, speeds = _levels(rates, kinds)
    pools = _ranks_by([each.pool for each in found])
    devices = []
    for each, speed in zip(found, speeds, strict=True):
        sharers = pools[each.pool]
        # The minimum: ranks that share a pool see slightly different sizes, as they measure at
        # different times.
        memory_bytes = min(found[rank].memory_bytes for rank in sharers) // len(sharers)
        free_bytes = min(found[rank].free_bytes for rank in sharers) // len(sharers)
        devices.append(
            # 0 free bytes would mean that the memory is unknown.
            replace(
                each.device,
                speed=speed,
                memory_bytes=memory_bytes,
                free_bytes=max(free_bytes, 1) if memory_bytes else 0,
            )
        )
    seconds = tuple(each.median_seconds for each in found)
    return ProbeResult(_cluster(tuple(devices), links), tuple(rates), seconds, notes)


def with_speeds(found: Sequence[Found]) -> list[Device]:
    """The devices by rank, each with its speed relative to the fastest of its kind."""
    rates = _rates(found, _ranks_by([each.processor for each in found]))
    _, speeds = _levels(rates, _ranks_by([each.device.kind for each in found]))
    return [replace(each.device, speed=speed) for each, speed in zip(found, speeds, strict=True)]


def _rates(found: Sequence[Found], processors: Mapping[str, Sequence[int]]) -> list[float]:
    """The rate of each rank: the best of those that share its processor."""
    rates = [0.0] * len(found)
    for ranks in processors.values():
        for rank in ranks:
            rates[rank] = max(found[one].rate for one in ranks)
    return rates


def _levels(
    rates: Sequence[float], kinds: Mapping[str, Sequence[int]]
) -> tuple[list[float], list[float]]:
    """The rates, similar ones of a kind made equal, and the speeds relative to the kind's best."""
    levelled_rates, speeds = list(rates), [1.0] * len(rates)
    for ranks in kinds.values():
        levels = levelled([rates[rank] for rank in ranks], SAME_SPEED)
        for rank, level in zip(ranks, levels, strict=True):
            levelled_rates[rank], speeds[rank] = level, level / max(levels)
    return levelled_rates, speeds


def _ranks_by(names: Sequence[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    return ranks


def levelled(values: Sequence[float], ratio: float) -> list[float]:
    """Replaces each value by the highest of its level. A level reaches from the highest value that
    has no level yet down to ``ratio`` of it: interruptions can only lower a value.
    """
    level: dict[float, float] = {}
    top = 0.0
    for value in sorted(values, reverse=True):
        if not level or value < ratio * top:
            top = value
        level[value] = top
    return [level[value] for value in values]


def _cluster(devices: tuple[Device, ...], measured: Mapping[Pair, Link]) -> Cluster:
    """Returns a cluster that lists only the links that differ from the usual ones."""
    hosts = host_names([device.host for device in devices])
    devices = tuple(replace(device, host=host) for device, host in zip(devices, hosts, strict=True))
    links: dict[Pair, Link] = {}
    usual: dict[bool, Link] = {}
    for is_inside in (True, False):
        pairs = [pair for pair in measured if (hosts[pair[0]] == hosts[pair[1]]) is is_inside]
        bandwidths = levelled([measured[pair].bandwidth for pair in pairs], SAME_BANDWIDTH)
        quickness = levelled(
            [1 / max(measured[pair].latency_seconds, 1e-9) for pair in pairs], SAME_LATENCY
        )
        for pair, bandwidth, quick in zip(pairs, bandwidths, quickness, strict=True):
            links[pair] = Link(1 / quick, bandwidth)
        usual[is_inside] = statistics.mode(links[pair] for pair in pairs) if pairs else FREE
    inside, outside = usual[True], usual[False]

    between: dict[tuple[str, str], list[Link]] = {}
    for (one, other), link in links.items():
        a, b = hosts[one], hosts[other]
        between.setdefault((b, a) if (b, a) in between else (a, b), []).append(link)
    of_hosts = {
        (a, b): link
        for (a, b), some in between.items()
        if (link := statistics.mode(some)) != (inside if a == b else outside)
    }
    cluster = Cluster(devices, inside, outside, of_hosts)
    of_ranks = {pair: link for pair, link in links.items() if link != cluster.link(*pair)}
    return replace(cluster, ranks=of_ranks)


def _notes(
    found: Sequence[Found],
    rates: Sequence[float],
    processors: Mapping[str, Sequence[int]],
    kinds: Mapping[str, Sequence[int]],
) -> Iterator[str]:
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
        terms.append(_OWN_CGROUPS.read_text())
    with suppress(AttributeError, OSError):  # not every system has these
        terms += map(str, sorted(os.sched_getaffinity(0)))
        terms.append(f"nice {os.getpriority(os.PRIO_PROCESS, 0)}")
    return " ".join(terms)


def _pool(device: torch.device, host: str) -> str:
    return host if device.type == "cpu" else f"{host} {unique_id(device)}"


def _memory(device: torch.device) -> tuple[int, int]:
    """The size of the memory that this rank uses, and its free part, in bytes."""
    return host_memory() if device.type == "cpu" else memory_of(device)


_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def host_memory(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> tuple[int, int]:
    """The memory of this host, or of this container, and its free part, in bytes.

    Args:
        cgroups: where control groups are mounted.
        own: the file that names the control groups of this process.
    """
    seen = psutil.virtual_memory()
    total, free = int(seen.total), int(seen.available)
    for limit, used in memory_limits(cgroups, own):
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return total, free


def memory_limits(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> Iterator[tuple[int, int]]:
    """Yields the memory limits of the control groups of this process, each with the used part, in
    bytes. All of these limits apply. Yields nothing where there are no control groups.

    Source: the Linux kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    # In a container, the mount is often the container's own group, whatever the file contains.
    groups = {cgroups: _VERSION_2, cgroups / "memory": _VERSION_1}
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            version = None if controllers else _VERSION_2
            mount = cgroups
            if "memory" in controllers.split(","):
                version, mount = _VERSION_1, cgroups / "memory"
            if version is None:
                continue
            group = mount / path.lstrip("/")
            # The limits of a group's ancestors apply as well: a batch system limits the whole job.
            while group != mount and group != group.parent:
                groups[group] = version
                group = group.parent
    for group, (limit_name, used_name, cache_name) in groups.items():
        with suppress(OSError, ValueError):  # no such file, or "max": no limit
            limit, used = int((group / limit_name).read_text()), 0
            with suppress(OSError, ValueError):
                used = int((group / used_name).read_text())
                stat = dict(
                    line.split() for line in (group / "memory.stat").read_text().splitlines()
                )
                # Cached files that are not in use are evicted at once when memory is needed.
                used = max(used - int(stat.get(cache_name, 0)), 0)
            yield limit, used


# The names of the limit, of the used bytes, and of inactive cached files in memory.stat.
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


# --- links ---


def rounds_of(hosts: Sequence[str]) -> list[list[Pair]]:
    """The pairs of ranks to measure, in rounds: in one round no host has two pairs, so that no pair
    shares a NIC with another.

    One pair for each pair of hosts, and one inside each host, as all pairs inside a host use the
    same path, through memory. With few ranks, all pairs between hosts, as each rank may have its
    own NIC.

    Args:
        hosts: by rank.
    """
    members = _ranks_by(hosts)
    pairs = [(ranks[0], ranks[1]) for ranks in members.values() if len(ranks) > 1]
    if len(hosts) <= _ALL_PAIRS_RANKS:
        pairs += [
            pair for pair in combinations(range(len(hosts)), 2) if hosts[pair[0]] != hosts[pair[1]]
        ]
    else:
        pairs += combinations((ranks[0] for ranks in members.values()), 2)
    # A round-robin tournament: where a + b is the same, modulo the number of hosts, the b's of any
    # two a's differ. A pair of hosts with several pairs of ranks plays that often.
    number = {host: n for n, host in enumerate(members)}
    played: dict[Pair, int] = {}
    rounds: dict[Pair, list[Pair]] = {}
    for one, other in pairs:
        a, b = sorted((number[hosts[one]], number[hosts[other]]))
        turn = played[a, b] = played.get((a, b), -1) + 1
        rounds.setdefault((turn, (a + b) % len(members)), []).append((one, other))
    return [rounds[key] for key in sorted(rounds)]


def _measure_links(
    world: Channels, rounds: Sequence[Sequence[Pair]], report: Callable[[str], None] | None
) -> dict[Pair, Link]:
    """Measures this rank's links; returns those of which it is the lower rank."""
    found: dict[Pair, Link] = {}
    total, done = sum(map(len, rounds)), 0
    reported = time.monotonic()
    for pairs in rounds:
        _together(world)
        for one, other in pairs:
            if world.stage == one:
                found[one, other] = _measure_link(world, other)
            elif world.stage == other:
                _echo(world, one)
        done += len(pairs)
        if report is not None and time.monotonic() > reported + _REPORT_SECONDS:
            report(f"measuring links: {done} of {total}")
            reported = time.monotonic()
    return found


def _measure_link(world: Channels, other: int) -> Link:
    """Measures a link while the other rank runs :func:`_echo`: half of the round-trip time, as a
    payload uses one direction and its gradient the other.
    """

    def one_way(num_bytes: int, times: int) -> list[float]:
        world.send_object((num_bytes, times), other)
        world.settle()
        tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)
        seconds = []
        for _ in range(times):
            begun = time.perf_counter()
            world.send_on_device(tensor, other, Purpose.LINKS)
            back = world.receive_on_device(tensor, other, Purpose.LINKS)
            if back.device.type != "cpu":
                back[0].item()  # waits for the device
            seconds.append((time.perf_counter() - begun) / 2)
        return seconds

    first = min(one_way(1, 2))
    # The minimum: interruptions can only make it longer.
    latency = min(one_way(1, min(max(int(0.01 / first), 5), 20)))
    # Large enough that the latency, and TCP's slow start with it, hardly count; but a few megabytes
    # over a link around the world are not worth seconds of every start.
    enough = min(max(_TRANSFER_SECONDS, 10 * latency), _MOST_TRANSFER_SECONDS)
    is_direct = world.is_direct(other)
    most_bytes = _MOST_DEVICE_BYTES if is_direct else _MOST_BYTES
    num_bytes = _FIRST_BYTES
    # Between devices the first message of a size also makes, and opens, the buffer for it.
    times = 2 if is_direct else 1
    seconds = min(one_way(num_bytes, times))
    while seconds < enough and num_bytes < most_bytes:
        growth = min(max(enough / seconds, 2), 16)
        num_bytes = min(int(num_bytes * growth), most_bytes)
        # Over a fast link the transfer is so short that one interruption doubles its time.
        seconds = min(one_way(num_bytes, 4 if num_bytes == most_bytes else times))
    world.send_object(None, other)
    world.settle()
    # By noise, the measured latency may exceed the whole time.
    return Link(latency, num_bytes / max(seconds - latency, seconds / 10))


def _echo(world: Channels, other: int) -> None:
    """Sends back whatever :func:`_measure_link` sends."""
    while (asked := world.receive_object(other)) is not None:
        num_bytes, times = asked
        like = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        for _ in range(times):
            received = world.receive_on_device(like, other, Purpose.LINKS)
            world.send_on_device(received, other, Purpose.LINKS)


# --- communication ---


def _together(world: Channels) -> None:
    """Waits until every rank has called this."""
    world.sum(torch.zeros(1))


def _gather(world: Channels, mine: Any) -> list[Any]:
    """Returns the value that each rank passed, in the order of ranks. Every rank calls this."""
    everything = world.gather_objects(mine)
    world.settle()
    found: list[Any] = world.share_object(everything, 0)
    return found


def _size(device: torch.device) -> int:
    return _CPU_SIZE if device.type == "cpu" else _GPU_SIZE
