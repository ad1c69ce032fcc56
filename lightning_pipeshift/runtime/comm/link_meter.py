"""How fast the links between stages are while training runs, by the payloads that they carry.

No message is sent for it: the system counts, for each TCP connection, the bytes that the other end
has acknowledged, and how long there were bytes to send (``struct tcp_info`` in the Linux kernel's
include/uapi/linux/tcp.h: ``tcpi_bytes_acked``, ``tcpi_busy_time``, ``tcpi_rwnd_limited``). That a
stage waits for a slow neighbour is not in it: then there is nothing to send.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final, NamedTuple

from lightning_pipeshift.plan.inputs.cluster import Cluster, Link
from lightning_pipeshift.runtime.comm.sockets import Opened, open_sockets
from lightning_pipeshift.text import bytes_text

_NUM_BYTES: Final = 256
_BYTES_ACKED: Final = 120
_BUSY_AND_RWND_LIMITED: Final = 168

_FEWEST_SECONDS: Final = 0.04
"""The system counts in clock ticks of up to 10 ms: shorter times say nothing."""

_LATE_ANSWER_SECONDS: Final = 0.04
"""How long the system may wait before it acknowledges the end of a message that nothing follows
(``TCP_DELACK_MIN`` in the Linux kernel's include/net/tcp.h): until then there are bytes to send."""

_SAME_BANDWIDTH: Final = 1.5
"""Bandwidths that differ by a smaller factor count as equal, as those of the probe do."""

Address = tuple[Any, ...]


class Carried(NamedTuple):
    """What one end of a connection has sent.

    Args:
        here: this end's address.
        there: the other end's.
        num_bytes: that the other end has acknowledged.
        seconds: during which there were bytes to send, and the other end could take some.
    """

    here: Address
    there: Address
    num_bytes: int
    seconds: float


def carried(connection: socket.socket) -> Carried | None:
    """What a connection has carried since it was opened; ``None`` where the system does not say."""
    try:
        here, there = connection.getsockname(), connection.getpeername()
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _NUM_BYTES)
        (num_bytes,) = struct.unpack_from("Q", info, _BYTES_ACKED)
        busy, closed = struct.unpack_from("QQ", info, _BUSY_AND_RWND_LIMITED)
    except (AttributeError, OSError, struct.error):
        return None
    return Carried(_plain(here), _plain(there), num_bytes, max(busy - closed, 0) / 1e6)


def _plain(address: Address) -> Address:
    """The address and the port, without the prefix of IPv4 in IPv6."""
    return str(address[0]).removeprefix("::ffff:"), address[1]


class LinkMeter:
    """Measures what this rank sends to other stages.

    Args:
        sockets: the connections that payloads and their gradients travel on.
    """

    def __init__(self, sockets: Opened) -> None:
        self._sockets = sockets
        self._start: dict[tuple[Address, Address], Carried] = {}

    def begin(self) -> None:
        """Begins to measure anew."""
        self._start = {(each.here, each.there): each for each in self._now()}

    def since(self) -> tuple[Carried, ...]:
        """What has been sent since :meth:`begin`."""
        found = []
        for each in self._now():
            before = self._start.get((each.here, each.there))
            if before is not None:
                num_bytes = each.num_bytes - before.num_bytes
                found.append(
                    each._replace(num_bytes=num_bytes, seconds=each.seconds - before.seconds)
                )
        return tuple(found)

    def _now(self) -> list[Carried]:
        found = []
        for descriptor, _ in self._sockets & open_sockets():
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(descriptor)) as connection,
            ):
                found.append(carried(connection))
        return [each for each in found if each is not None]


@dataclass(frozen=True)
class LinkChange:
    """A link that carries other than it did.

    Args:
        ranks: its ends, the lower first.
        before: bytes per second, as known so far.
        now: bytes per second, as measured.
    """

    ranks: tuple[int, int]
    before: float
    now: float

    def __str__(self) -> str:
        one, other = self.ranks
        now, before = (bytes_text(round(rate)) for rate in (self.now, self.before))
        return f"The link between ranks {one} and {other} carries {now}/s now, {before}/s before"


def measured_links(
    cluster: Cluster, figures: Sequence[Sequence[Carried]], num_messages: float
) -> tuple[Cluster, list[LinkChange]]:
    """The machines with the links as training has found them, and the links that have changed.

    A link whose payloads are as fast as known keeps its bandwidth, and so does one that carried too
    little to tell. Links between the same two hosts that carried nothing change in proportion.

    Args:
        cluster: the machines as known so far.
        figures: what each rank has sent, by rank.
        num_messages: how many payloads, and as many gradients, have crossed each link, about: each
            takes the time of a message to the other end and back, besides that of its bytes.
    """
    owner = {(each.here, each.there): rank for rank, mine in enumerate(figures) for each in mine}
    totals: dict[tuple[int, int], tuple[int, float]] = {}
    for rank, mine in enumerate(figures):
        for each in mine:
            other = owner.get((each.there, each.here))
            if other is None or other == rank:
                continue
            ends = min(rank, other), max(rank, other)
            num_bytes, seconds = totals.get(ends, (0, 0.0))
            totals[ends] = num_bytes + each.num_bytes, seconds + each.seconds
    changes: dict[tuple[int, int], LinkChange] = {}
    for ends, (num_bytes, seconds) in totals.items():
        link = cluster.link(*ends)
        without = seconds - 2 * num_messages * 2 * link.latency_seconds
        # A shorter time than can be measured shows that the link is at least so fast.
        now = num_bytes / max(without, seconds / 10, _FEWEST_SECONDS)
        # Small messages take longer to be acknowledged than to be sent: that says nothing.
        surely = without - 2 * num_messages * _LATE_ANSWER_SECONDS
        is_slower = surely >= max(_FEWEST_SECONDS, _SAME_BANDWIDTH * num_bytes / link.bandwidth)
        if is_slower or now > _SAME_BANDWIDTH * link.bandwidth:
            changes[ends] = LinkChange(ends, link.bandwidth, now)
    return _with(cluster, changes, totals.keys()), list(changes.values())


def _hosts(cluster: Cluster, ends: tuple[int, int]) -> frozenset[str]:
    return frozenset(cluster.devices[rank].host for rank in ends)


def _with(
    cluster: Cluster,
    changes: Mapping[tuple[int, int], LinkChange],
    measured: Collection[tuple[int, int]],
) -> Cluster:
    """The machines with other links.

    Args:
        cluster: the machines.
        changes: the links that have changed.
        measured: the links that have carried anything.
    """
    parts: dict[frozenset[str], float] = {}
    for ends, change in changes.items():
        hosts = _hosts(cluster, ends)
        parts[hosts] = max(parts.get(hosts, 0.0), change.now / change.before)
    if not changes:
        return cluster
    links = dict(cluster.ranks)
    for ends in combinations(range(cluster.num_ranks), 2):
        hosts, link = _hosts(cluster, ends), cluster.link(*ends)
        if ends in changes:
            links[ends] = Link(link.latency_seconds, changes[ends].now)
        elif ends not in measured and hosts in parts:
            links[ends] = Link(link.latency_seconds, link.bandwidth * parts[hosts])
    return replace(cluster, ranks=links)
