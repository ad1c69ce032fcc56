"""What the devices and the links between them can do, measured as a run starts.

Nobody has to describe the machines in hand: a fraction of a second of matrix products, a look at
the memory and a few megabytes over each link give a cluster to plan for. Short measurements are
noisy, and the order and grouping of devices depend on what they give; so figures that are close
become the same figure, and two like machines don't look different because one was interrupted.
"""

from __future__ import annotations

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

from lightning_pipeshift.errors import some_of
from lightning_pipeshift.plan.cluster import FREE, Cluster, Device, Link
from lightning_pipeshift.runtime.channels import Channels

_SLICES_SECONDS = 0.06
_FEWEST_SLICES, _MOST_SLICES = 3, 64
# A product takes 1 to 2 ms on a CPU core of today, and about as long on a GPU. One size for all
# devices of a type: a larger one gives a higher rate.
_CPU_SIZE, _GPU_SIZE = 448, 2048

_ALL_PAIRS_RANKS = 8
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 22
_TRANSFER_SECONDS, _MOST_TRANSFER_SECONDS = 0.02, 0.2
_REPORT_SECONDS = 1.0

def time_slices(device: torch.device) -> list[float]:
    """Seconds of each slice of a short computation, always the same: a product of two matrices.

    On a GPU the kernel alone is timed, on a CPU the call. Draws no random numbers.
    """
    size = _size(device)
    matrix = torch.full((size, size), 0.5, dtype=torch.float32, device=device)
    product = torch.empty_like(matrix)
    found: list[float] = []
    deadline = time.perf_counter() + _SLICES_SECONDS
    with torch.no_grad():
        torch.mm(matrix, matrix, out=product)  # the first one loads libraries
        while len(found) < _FEWEST_SLICES or (
            len(found) < _MOST_SLICES and time.perf_counter() < deadline
        ):
            if device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                stream = torch.cuda.current_stream(device)
                start.record(stream)
                torch.mm(matrix, matrix, out=product)
                end.record(stream)
                end.synchronize()
                found.append(start.elapsed_time(end) / 1000)
            else:
                begun = time.perf_counter()
                torch.mm(matrix, matrix, out=product)
                product[0, 0].item()  # waits for devices that compute behind the program's back
                found.append(time.perf_counter() - begun)
    return found


def probe(
    world: Channels,
    device: torch.device,
    here: Device,
    report: Callable[[str], None] | None = None,
    slices: Callable[[torch.device], Sequence[float]] = time_slices,
) -> Measured:
    """Measures the devices and the links between them. Every rank calls this; every rank gets the
    same.

    All devices compute at the same time, as in training: ranks that share a host's cores are as
    slow here as they will be there. Tensors travel as :meth:`Channels.send_tensor` sends them, by
    way of the CPU.

    Args:
        world: connections between all ranks; nothing else is under way in them.
        device: this rank's.
        here: its host and kind.
        report: is told, in words, how far this is, where it takes longer than a second.
        slices: times a computation on the device; for tests.
    """
    _together(world)
    seconds = sorted(slices(device))
    memory_bytes, free_bytes = _memory(device)
    mine = Found(
        device=here,
        processor=_processor(device, here.host),
        operations=2.0 * _size(device) ** 3,
        # No clock is so fine that a slice took nothing.
        best_seconds=max(seconds[0], 1e-9),
        median_seconds=max(statistics.median(seconds), 1e-9),
        pool=_pool(device, here.host),
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
    )
    found: list[Found] = _gather(world, mine)
    links: dict[Pair, Link] = {}
    rounds = rounds_of([each.device.host for each in found])
    for measured in _gather(world, _measure_links(world, rounds, report)):
        links.update(measured)
    world.settle()
    return assess(found, links)


# --- what a rank computes on, and its memory ---


def _processor(device: torch.device, host: str) -> str:
    """The same for ranks that compute on the same GPU, or that the operating system gives any of
    the same cores, on equal terms.
    """
    if device.type != "cpu":
        return _pool(device, host)
    terms = [host, str(torch.get_num_threads())]
    with suppress(OSError):
        # Containers are hosts of their own and may have their cores in common.
        terms[0] = Path("/proc/sys/kernel/random/boot_id").read_text()
        terms.append(_OWN_CGROUPS.read_text())
    with suppress(AttributeError, OSError):  # not every system has these
        terms += map(str, sorted(os.sched_getaffinity(0)))
        terms.append(f"nice {os.getpriority(os.PRIO_PROCESS, 0)}")
    return " ".join(terms)


def _pool(device: torch.device, host: str) -> str:
    if device.type != "cuda":
        return host
    return f"{host} {getattr(torch.cuda.get_device_properties(device), 'uuid', device)}"


def _memory(device: torch.device) -> tuple[int, int]:
    """What the memory that this rank draws on has, and what is free of it, in bytes."""
    if device.type != "cuda":
        return host_memory()
    free, total = torch.cuda.mem_get_info(device)
    return total, free


# --- links ---


def rounds_of(hosts: Sequence[str]) -> list[list[Pair]]:
    """Which pairs of ranks are measured, in rounds: in one round no host has two pairs, so that no
    pair shares a NIC with another.

    One pair of each pair of hosts, and one inside each host, where all go the same way, through
    memory. Between hosts all pairs for few ranks, which may each have a NIC of their own.

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
    """The links of which this rank is the lower end."""
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
    """Measures with the help of :func:`_echo` on the other side: both directions in turn, as a
    payload takes the one and its gradient the other, and half of that.
    """

    def one_way(num_bytes: int, times: int) -> list[float]:
        world.send_object((num_bytes, times), other)
        world.settle()
        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        seconds = []
        for _ in range(times):
            begun = time.perf_counter()
            world.send_tensor(tensor, other)
            world.receive_tensor(tensor, other)
            seconds.append((time.perf_counter() - begun) / 2)
        return seconds

    first = min(one_way(1, 2))
    latency = statistics.median(one_way(1, min(max(int(0.01 / first), 5), 20)))
    # Large enough that the latency, and TCP's slow start with it, hardly count; but a few megabytes
    # over a link around the world are not worth seconds of every start.
    enough = min(max(_TRANSFER_SECONDS, 10 * latency), _MOST_TRANSFER_SECONDS)
    num_bytes = _FIRST_BYTES
    seconds = min(one_way(num_bytes, 1))
    while seconds < enough and num_bytes < _MOST_BYTES:
        growth = min(max(enough / seconds, 2), 16)
        num_bytes = min(int(num_bytes * growth), _MOST_BYTES)
        # What goes over a fast link takes so little that one interruption doubles it.
        seconds = min(one_way(num_bytes, 4 if num_bytes == _MOST_BYTES else 1))
    world.send_object(None, other)
    world.settle()
    # The latency, too, is no more than measured.
    return Link(latency, num_bytes / max(seconds - latency, seconds / 10))


def _echo(world: Channels, other: int) -> None:
    """Sends back whatever :func:`_measure_link` sends."""
    while (asked := world.receive_object(other)) is not None:
        num_bytes, times = asked
        like = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        for _ in range(times):
            world.send_tensor(world.receive_tensor(like, other), other)


# --- talk ---


def _together(world: Channels) -> None:
    """Returns when every rank is here."""
    world.sum(torch.zeros(1))


def _gather(world: Channels, mine: Any) -> list[Any]:
    """What each rank passed, in their order. Every rank calls this."""
    everything = None
    if world.stage == 0:
        everything = [mine, *(world.receive_object(rank) for rank in range(1, world.num_stages))]
    else:
        world.send_object(mine, 0)
        world.settle()
    found: list[Any] = world.share_object(everything, 0)
    return found


def _size(device: torch.device) -> int:
    return _CPU_SIZE if device.type == "cpu" else _GPU_SIZE
