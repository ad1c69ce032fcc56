"""Whether another rank is alive, in one process: each "rank" is an object with its own thread."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import pytest
import torch.distributed as dist

from lightning_pipeshift.errors import StageFailedError
from lightning_pipeshift.runtime.comm import mesh
from lightning_pipeshift.runtime.comm.mesh import Mesh, connect_all
from lightning_pipeshift.runtime.liveness.failure import FailureBoard
from lightning_pipeshift.runtime.liveness.peers import Peers

# Events are waited for; a test that fails takes this long.
PATIENCE = 60.0
# Nobody is lost by chance.
FOR_EVER = 1e6


class Rank:
    """The messages that one rank gets from others.

    Args:
        ends: its ends of the connections, by rank.
        timeout: see :class:`Peers`.
    """

    def __init__(self, ends: dict[int, socket.socket], timeout: float) -> None:
        self.failures: list[dict[str, Any]] = []
        self.lost: list[tuple[list[int], str]] = []
        self.is_told = threading.Event()
        self.peers = Peers(
            Mesh(ends, {}), timeout, self.hear, self.lose, lambda: "sleeps", lambda: 7
        )

    def hear(self, entry: dict[str, Any]) -> None:
        self.failures.append(entry)
        self.is_told.set()

    def lose(self, ranks: list[int], how: str) -> None:
        self.lost.append((ranks, how))
        self.is_told.set()


def ends_of(num_ranks: int) -> list[dict[int, socket.socket]]:
    ends: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
    for one, other in combinations(range(num_ranks), 2):
        ends[one][other], ends[other][one] = socket.socketpair()
    return ends


@contextmanager
def ranks(num_ranks: int, timeout: float = FOR_EVER) -> Iterator[list[Rank]]:
    made = [Rank(ends, timeout) for ends in ends_of(num_ranks)]
    try:
        yield made
    finally:
        for rank in made:
            rank.peers.close()


def test_a_failure_is_heard_by_all() -> None:
    with ranks(3) as (first, second, third):
        second.peers.announce({"reason": "no more"})
        for rank in (first, third):
            assert rank.is_told.wait(PATIENCE)
            assert rank.failures == [{"reason": "no more"}]
        assert not second.is_told.is_set()


def test_a_process_that_ends_without_a_word_is_lost_at_once() -> None:
    """Its kernel closes its connections."""
    ends = ends_of(3)
    for end in ends[2].values():
        end.close()
    made = [Rank(ends[0], FOR_EVER), Rank(ends[1], FOR_EVER)]
    for rank in made:
        assert rank.is_told.wait(PATIENCE)
        assert [lost for lost, _ in rank.lost] == [[2]]
        assert "ended without an error message" in rank.lost[0][1]
        rank.peers.close()


def test_what_is_announced_comes_before_the_end_of_the_connection() -> None:
    with ranks(2) as (first, second):
        second.peers.announce({"reason": "x" * 100_000})
        second.peers.close()
        assert first.is_told.wait(PATIENCE)
        assert [len(entry["reason"]) for entry in first.failures] == [100_000]
        assert not first.lost


def test_a_process_that_ends_after_its_run_is_not_lost() -> None:
    with ranks(3) as (first, second, third):
        second.peers.close()
        third.peers.announce({})
        assert first.is_told.wait(PATIENCE)
        # Closed, and not only said to be.
        while 1 in first.peers.counts:
            assert not first.lost
        assert not first.lost


@pytest.mark.parametrize("ends_first", [True, False])
def test_a_process_that_ends_between_two_runs_is_lost_to_the_next_run(ends_first: bool) -> None:
    with ranks(2) as (first, second):
        first.peers.pause()
        if ends_first:
            second.peers.close()
            while 1 in first.peers.counts:
                pass
            assert not first.lost
        first.peers.resume()
        if not ends_first:
            second.peers.close()
        assert first.is_told.wait(PATIENCE)
        assert first.lost[0][0] == [1]
        assert "ended between two runs" in first.lost[0][1]


def test_a_process_that_ends_after_its_last_run_is_not_lost_to_those_still_in_it() -> None:
    with ranks(3) as (first, second, third):
        for rank in (first, second):
            rank.peers.pause()
            rank.peers.resume()
        second.peers.close()
        while 1 in first.peers.counts:
            pass
        third.peers.announce({})
        assert first.is_told.wait(PATIENCE)
        assert not first.lost


def test_a_silent_rank_is_lost() -> None:
    """Stopped, or on a host that cannot be reached: nothing comes, and nothing closes."""
    ends = ends_of(2)
    rank = Rank(ends[0], 1.0)
    assert rank.is_told.wait(PATIENCE)
    assert rank.lost[0][0] == [1]
    assert "nothing was heard for" in rank.lost[0][1]
    assert "`heartbeat_timeout` is 1 s" in rank.lost[0][1]
    rank.peers.close()


def test_ranks_that_are_silent_together_are_lost_together() -> None:
    ends = ends_of(4)
    alive = [Rank(ends[0], 1.0), Rank(ends[1], 1.0)]
    assert alive[0].is_told.wait(PATIENCE)
    assert alive[0].lost[0][0] == [2, 3]
    for rank in alive:
        rank.peers.close()


def test_packets_that_are_lost_on_one_way_only() -> None:
    """The other rank speaks, and says that it does not hear this one."""
    ends = ends_of(2)
    rank = Rank(ends[0], 2.0)
    stop = threading.Event()

    def speak() -> None:
        seconds = 0.0
        while not stop.wait(0.1):
            seconds += 0.5
            ends[1][0].sendall(struct.pack("!BIdQ", 0, 16, seconds, 3))

    speaker = threading.Thread(target=speak)
    speaker.start()
    try:
        assert rank.is_told.wait(PATIENCE)
    finally:
        stop.set()
        speaker.join()
        rank.peers.close()
    assert rank.lost[0][0] == [1]


def test_what_the_others_do_can_be_asked() -> None:
    with ranks(3) as (first, *_):
        first.peers.ask()
        while len(first.peers.answers) < 2 or set(first.peers.counts.values()) != {7}:
            assert not first.is_told.wait(0.01)
        assert first.peers.answers == {1: "sleeps", 2: "sleeps"}


def test_a_forked_process_does_not_keep_a_connection_open() -> None:
    """A DataLoader's worker, say, which lives on for some seconds when its rank is killed."""
    with ranks(2) as (first, _):
        child = os.fork()
        if child == 0:
            is_open = any(p.connection.fileno() >= 0 for p in first.peers._peers.values())
            os._exit(int(is_open))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert all(peer.connection.fileno() >= 0 for peer in first.peers._peers.values())


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="handles of processes are Linux's")
def test_closing_ends_processes_that_do_not_end_by_themselves() -> None:
    program = "import sys; sys.stdin.read(1)"
    waiting, ending = (
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) for _ in range(2)
    )
    handles = {1: os.pidfd_open(waiting.pid), 2: os.pidfd_open(ending.pid)}
    ends = ends_of(3)
    peers = Peers(Mesh(ends[0], handles), FOR_EVER, print, print)
    peers.end_processes([1], patience=0.0)
    peers.end_processes([2, 7], patience=FOR_EVER)
    ending.communicate(b"x")
    peers.close()
    assert (waiting.wait(), ending.wait()) == (-signal.SIGKILL, 0)
    waiting.communicate()


def test_strangers_and_missing_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may connect to the port; a rank that does not come is named."""
    monkeypatch.setattr(mesh, "GONE_SECONDS", 0.5)
    store: Any = dist.HashStore()

    def knock() -> None:
        store.wait(["at/0"])
        address, port = json.loads(store.get("at/0"))[:2]
        with socket.create_connection((address, port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + b" " * 40)

    stranger = threading.Thread(target=knock)
    stranger.start()
    with pytest.raises(StageFailedError, match=r"Rank\(s\) 1, 2 did not connect to rank 0"):
        connect_all(store, 0, 3, "127.0.0.1", 1)
    stranger.join()


def test_connections_between_all_ranks() -> None:
    store: Any = dist.HashStore()
    found: dict[int, dict[int, socket.socket]] = {}

    def connect(rank: int) -> None:
        found[rank] = connect_all(store, rank, 3, "127.0.0.1", 1).connections

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in combinations(range(3), 2):
        found[one][other].sendall(bytes([10 * one + other]))
        assert found[other][one].recv(1) == bytes([10 * one + other])
    for ends in found.values():
        for end in ends.values():
            end.close()


def test_the_reason_names_all_that_are_gone() -> None:
    board = FailureBoard(0, Mesh({}, {}))
    board.name_of = "stage 3 (rank {})".format
    board._lose([1, 2], "gone: nothing was heard for 10 s")
    assert board._entry is not None
    assert board._entry["reason"].startswith("Stage 3 (rank 1) and stage 3 (rank 2) are gone: noth")


def test_a_process_that_was_stopped_does_not_take_the_others_for_lost() -> None:
    """It hears that they have not heard it, and then why the run has failed."""
    ends = ends_of(2)
    for seconds in (9.0, 11.0):
        ends[1][0].sendall(struct.pack("!BIdQ", 0, 16, seconds, 3))
    entry = json.dumps({"reason": "it was silent"}).encode()
    rank = Rank(ends[0], 10.0)
    ends[1][0].sendall(struct.pack("!BI", 1, len(entry)) + entry)
    assert rank.is_told.wait(PATIENCE)
    rank.peers.close()
    assert not rank.lost
    assert rank.failures == [{"reason": "it was silent"}]
