"""Measures the links between ranks at the start of a run, by a few messages over each.

Short measurements are noisy, and the order and grouping of devices depend on them; so similar
values are made equal, and two equal links don't look different because one was interrupted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final

import torch

from lightning_pipeshift.host import host_names
from lightning_pipeshift.plan.inputs.cluster import FREE, Cluster, Device, Link
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.mailbox import Mailbox

_SAME_BANDWIDTH: Final = 1 / 1.5
_SAME_LATENCY: Final = 1 / 3
"""Links whose bandwidth, or the inverse of their latency, is at least this fraction of the best
count as equal. Measurements of two processes on one busy host vary by nearly that much.
"""

_ALL_PAIRS_RANKS = 8
# From device to device a few megabytes take hardly longer than one byte.
_FIRST_BYTES, _MOST_BYTES, _MOST_DEVICE_BYTES = 1 << 16, 1 << 22, 1 << 26
_TRANSFER_SECONDS, _MOST_TRANSFER_SECONDS = 0.02, 0.2
_REPORT_SECONDS = 1.0
_LABEL = "the measurement of a link"

Pair = tuple[int, int]
"""Two ranks, the lower first."""


def rounds_of(hosts: Sequence[str]) -> list[list[Pair]]:
    """The pairs of ranks to measure, in rounds: in one round no host has two pairs, so that no pair
    shares a NIC with another.

    One pair for each pair of hosts, and one inside each host, as all pairs inside a host use the
    same path, through memory. With few ranks, all pairs between hosts, as each rank may have its
    own NIC.

    Args:
        hosts: by rank.
    """
    members = ranks_by(hosts)
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


def measure_links(
    world: Channels, rounds: Sequence[Sequence[Pair]], report: Callable[[str], None] | None
) -> dict[Pair, Link]:
    """Measures this rank's links; returns those of which it is the lower rank. Every rank calls
    this. The messages are those that values travel in.
    """
    found: dict[Pair, Link] = {}
    if not rounds:
        return found
    mine = [pair for pairs in rounds for pair in pairs if world.stage in pair]
    mailbox = world.mailbox({rank for pair in mine for rank in pair})
    total, done = sum(map(len, rounds)), 0
    reported = time.monotonic()
    for pairs in rounds:
        together(world)
        for one, other in pairs:
            if world.stage == one:
                found[one, other] = _measure_link(world, mailbox, other)
            elif world.stage == other:
                _echo(world, mailbox, one)
        done += len(pairs)
        if report is not None and time.monotonic() > reported + _REPORT_SECONDS:
            report(f"measuring links: {done} of {total}")
            reported = time.monotonic()
    mailbox.close()
    return found


def _measure_link(world: Channels, mailbox: Mailbox, other: int) -> Link:
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
            mailbox.send_labelled(other, _LABEL, tensor)
            message = mailbox.take_labelled(other, _LABEL)
            back = message.tensor(torch.uint8, (num_bytes,), world.device)
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
    is_direct = world.ranks[other] in world.shares_memory_with
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


def _echo(world: Channels, mailbox: Mailbox, other: int) -> None:
    """Sends back whatever :func:`_measure_link` sends."""
    while (asked := world.receive_object(other)) is not None:
        num_bytes, times = asked
        for _ in range(times):
            message = mailbox.take_labelled(other, _LABEL)
            received = message.tensor(torch.uint8, (num_bytes,), world.device)
            mailbox.send_labelled(other, _LABEL, received)
        mailbox.flush()


def cluster_of(devices: tuple[Device, ...], measured: Mapping[Pair, Link]) -> Cluster:
    """Returns a cluster that lists only the links that differ from the usual ones."""
    hosts = host_names([device.host for device in devices])
    devices = tuple(replace(device, host=host) for device, host in zip(devices, hosts, strict=True))
    links: dict[Pair, Link] = {}
    usual: dict[bool, Link] = {}
    for is_inside in (True, False):
        pairs = [pair for pair in measured if (hosts[pair[0]] == hosts[pair[1]]) is is_inside]
        bandwidths = levelled([measured[pair].bandwidth for pair in pairs], _SAME_BANDWIDTH)
        quickness = levelled(
            [1 / max(measured[pair].latency_seconds, 1e-9) for pair in pairs], _SAME_LATENCY
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


def ranks_by(names: Sequence[str]) -> dict[str, list[int]]:
    """The ranks that have each of some names.

    Args:
        names: by rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    return ranks


def together(world: Channels) -> None:
    """Waits until every rank has called this."""
    world.sum(torch.zeros(1))
