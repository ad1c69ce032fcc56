"""The clocks of ranks and the network between them: for ``pipeshift doctor`` under torchrun."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Final

import torch
import torch.distributed as dist

from lightning_pipeshift.commands.host_findings import Finding
from lightning_pipeshift.text import bytes_text, seconds_text
from lightning_pipeshift.timeline.clocks import Offset, Ping, offset_of

_ALL_PAIRS_RANKS: Final = 8
_NUM_PINGS: Final = 24
_NUM_BYTES: Final = 8 << 20
_CLOCKS_APART_SECONDS: Final = 1.0
_SLOW_BYTES_PER_SECOND: Final = 100e6


def link_findings(hosts: list[str]) -> list[Finding]:
    """Measures between ranks; every rank calls this, and the first one gets the findings of all.

    Args:
        hosts: the name of each rank's host.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    ranks = range(count)
    pairs = list(combinations(ranks, 2) if count <= _ALL_PAIRS_RANKS else pairwise(ranks))
    mine: list[Finding] = []
    for one, other in pairs:
        # One pair after the other: they would share the network.
        if rank == one:
            mine += _measured(other, hosts[one], hosts[other], rank)
        elif rank == other:
            _answer(one)
        dist.barrier()
    found: list[list[Finding] | None] = [None] * count
    dist.all_gather_object(found, mine)
    return [each for part in found for each in part or []]


def _measured(peer: int, here: str, there: str, rank: int) -> Iterator[Finding]:
    pings, times = [], torch.zeros(1, dtype=torch.float64)
    best = float("inf")
    for _ in range(_NUM_PINGS):
        sent = time.time()
        dist.send(times, peer)
        dist.recv(times, peer)
        back = time.time()
        pings.append(Ping(sent, float(times), back))
        best = min(best, back - sent)
    data = torch.zeros(_NUM_BYTES, dtype=torch.uint8)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        dist.send(data, peer)
        dist.recv(times, peer)
        seconds.append(time.perf_counter() - begin)
    rate = _NUM_BYTES / max(min(seconds) - best, 1e-9)
    slow = rate < _SLOW_BYTES_PER_SECOND
    advice = "`pipeshift plan` says whether the model can be trained over it; look for a faster one"
    yield Finding(
        f"ranks {rank} and {peer}",
        f"{bytes_text(rate)}/s, {seconds_text(best / 2)} each way ({here} to {there})",
        advice if slow else "",
    )
    if here != there:
        yield clocks(offset_of(pings), here, there)


def clocks(offset: Offset, here: str, there: str) -> Finding:
    """The finding of two hosts' clocks.

    Args:
        offset: of the second one's.
        here: the first host.
        there: the second one.
    """
    apart = seconds_text(abs(offset.seconds))
    found = f"{apart} apart (to within {seconds_text(offset.error_seconds)})"
    far = abs(offset.seconds) > _CLOCKS_APART_SECONDS + offset.error_seconds
    advice = "run `chronyd` or `timesyncd` on both: logs and checkpoints of the hosts disagree"
    return Finding(f"clocks of {here} and {there}", found, advice if far else "")


def _answer(peer: int) -> None:
    times = torch.zeros(1, dtype=torch.float64)
    for _ in range(_NUM_PINGS):
        dist.recv(times, peer)
        dist.send(torch.tensor([time.time()], dtype=torch.float64), peer)
    data = torch.empty(_NUM_BYTES, dtype=torch.uint8)
    for _ in range(3):
        dist.recv(data, peer)
        dist.send(times, peer)
