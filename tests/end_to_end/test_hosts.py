"""The benchmarks' hosts: a ring over a network with a rate, and nothing left behind."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.hosts import CARD, Hosts, Link, hosts, why_not
from lightning_pipeshift.runtime.comm.groups import Lanes
from lightning_pipeshift.runtime.gradients.rings import Rings
from tests.unit.runtime.stages import connect

# At 80 Mbit/s a host sends and receives its 2 MB in 0.2 s.
LINK = Link(megabits=80.0)
LENGTH = 500_000


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with hosts(2, LINK) as made:
        yield made


def sum_of_ranks() -> tuple[torch.Tensor, float, float]:
    _, board = connect()
    rings = Rings(lambda _: Lanes().make(range(2), "gradients-0"), dist.get_rank(), board.watched)
    buffer = torch.full((LENGTH,), float(dist.get_rank() + 1))
    rings.start(0, [0, 1], torch.ones(1)).wait()
    begin = time.monotonic()
    rings.start(1, [0, 1], buffer).wait()
    # All hosts have one clock.
    return buffer, begin, time.monotonic()


def test_a_ring_between_two_hosts_sums_at_the_rate_of_their_link(two_hosts: Hosts) -> None:
    buffers, begins, ends = zip(*two_hosts.run(sum_of_ranks), strict=True)
    for buffer in buffers:
        assert torch.equal(buffer, torch.full((LENGTH,), 3.0))
    # A burst, twice, is ahead of the rate.
    least = (buffers[0].nbytes - 2 * LINK.burst_bytes) / LINK.bytes_per_second
    assert max(ends) - min(begins) > least


def test_a_command_runs_on_a_host(two_hosts: Hosts) -> None:
    argv = ["ip", "-brief", "address", "show", "dev", CARD]
    shown = subprocess.run(two_hosts.command(1, argv), capture_output=True, text=True, timeout=60)
    assert f"{two_hosts.address(1)}/24" in shown.stdout


def test_nothing_is_left_behind_even_after_an_error() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    paths: list[Path] = []

    def interrupted() -> None:
        with hosts(2) as made:
            paths.extend(Path("/run/netns", name) for name in [*made.namespaces, made.switch])
            assert all(path.exists() for path in paths)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(paths) == 3
    assert not any(path.exists() for path in paths)
