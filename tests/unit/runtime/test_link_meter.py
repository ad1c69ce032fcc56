"""How fast links are, by what they carry."""

from __future__ import annotations

import socket
from itertools import pairwise

import pytest

from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.runtime.comm.link_meter import Carried, LinkMeter, carried, measured_links
from lightning_pipeshift.runtime.comm.sockets import open_sockets

KNOWN = Link(1e-3, 100e6)


def cluster(hosts: str) -> Cluster:
    return Cluster(tuple(Device(host, "cpu") for host in hosts), inside=KNOWN, outside=KNOWN)


def chain(*sent: tuple[int, float]) -> list[list[Carried]]:
    """What each rank has sent, where neighbours send each other as much in as much time."""
    figures: list[list[Carried]] = [[] for _ in range(len(sent) + 1)]
    for (one, other), (num_bytes, seconds) in zip(pairwise(range(len(figures))), sent, strict=True):
        here, there = (f"10.0.0.{one}", 1000 + other), (f"10.0.0.{other}", 2000 + one)
        figures[one].append(Carried(here, there, num_bytes, seconds))
        figures[other].append(Carried(there, here, num_bytes, seconds))
    return figures


@pytest.mark.parametrize(
    ("sent", "bandwidth"),
    [
        ((10**8, 1.0), 100e6),  # as known
        ((10**8, 1.4), 100e6),  # nearly
        ((10**8, 2.0), 50e6),
        ((10**9, 1.0), 1e9),
        ((10**6, 0.019), 100e6),  # the time is too short to tell
        ((10**8, 0.0), 5e9),  # it shows that the link is fast
        ((0, 0.0), 100e6),
    ],
)
def test_the_bandwidth_of_a_link(sent: tuple[int, float], bandwidth: float) -> None:
    found, changes = measured_links(cluster("ab"), chain(sent), num_messages=0)
    assert found.link(0, 1).bandwidth == pytest.approx(bandwidth)
    assert found.link(0, 1).latency_seconds == KNOWN.latency_seconds
    assert [(one.ranks, one.before) for one in changes] == [((0, 1), 100e6)] * (bandwidth != 100e6)


def test_each_message_takes_the_way_to_the_other_end_and_back() -> None:
    # 400 messages of 2 ms each, and 10 MB each way that take 0.1 s.
    figures = chain((10**7, 0.5))
    found, changes = measured_links(cluster("ab"), figures, num_messages=200)
    assert found == cluster("ab")
    assert not changes
    found, _ = measured_links(cluster("ab"), figures, num_messages=0)
    assert found.link(0, 1).bandwidth == pytest.approx(20e6)


def test_late_answers_to_small_messages_do_not_make_a_link_slow() -> None:
    # 200 messages of 1 KB each way: the system acknowledges each of them 40 ms after it has come.
    small, large = 200 * 10**3, 200 * 10**6
    found, changes = measured_links(cluster("ab"), chain((small, 200 * 0.042)), num_messages=200)
    assert found == cluster("ab")
    assert not changes
    # Messages of 1 MB take 100 ms over a tenth of the bandwidth, whoever answers late.
    found, _ = measured_links(cluster("ab"), chain((large, 200 * 0.142)), num_messages=200)
    assert found.link(0, 1).bandwidth == pytest.approx(large / (200 * 0.140))


def test_links_of_the_same_hosts_change_together_unless_they_have_carried_something() -> None:
    # Ranks 0 and 2 are on one host, 1 and 3 on another: 0-3 has carried nothing.
    found, changes = measured_links(
        cluster("abab"), chain((10**8, 10.0), (10**8, 1.0), (10**8, 5.0)), num_messages=0
    )
    of = {(a, b): found.link(a, b).bandwidth for a in range(4) for b in range(a + 1, 4)}
    assert of[0, 1] == pytest.approx(10e6)
    assert of[1, 2] == 100e6
    assert of[2, 3] == pytest.approx(20e6)
    assert of[0, 3] == pytest.approx(20e6), "as the better one of those that have changed"
    assert of[0, 2] == of[1, 3] == 100e6, "inside of a host"
    assert [str(change) for change in changes] == [
        "The link between ranks 0 and 1 carries 10.0 MB/s now, 100.0 MB/s before",
        "The link between ranks 2 and 3 carries 20.0 MB/s now, 100.0 MB/s before",
    ]


def test_a_connection_whose_other_end_nobody_knows_tells_nothing() -> None:
    (mine, _) = chain((10**8, 100.0))
    found, changes = measured_links(cluster("ab"), [mine, []], num_messages=0)
    assert found == cluster("ab")
    assert not changes


def test_the_system_counts_bytes() -> None:
    before = open_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with client, other:
        client.sendall(bytes(1000))
        received = 0
        while received < 1000:
            received += len(other.recv(1000))
        meter = LinkMeter(open_sockets() - before)
        assert not meter.since(), "it has not begun"
        first = carried(client)
        while first is None or first.num_bytes < 1000:
            first = carried(client)
        meter.begin()
        client.sendall(bytes(5000))
        while received < 6000:
            received += len(other.recv(5000))
        while True:
            found = {each.here: each for each in meter.since()}
            mine = found[client.getsockname()]
            if mine.num_bytes >= 5000:
                break
        assert mine.num_bytes == 5000
        assert mine.there == other.getsockname()
        assert found[other.getsockname()].num_bytes == 0
        assert mine.seconds >= 0
    assert carried(client) is None, "it is closed"
    assert not meter.since()
