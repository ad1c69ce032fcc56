"""How ranks find each other."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_pipeshift.errors import ConfigurationError, StageFailedError
from lightning_pipeshift.lightning import launcher as launching
from lightning_pipeshift.runtime.comm import meeting
from lightning_pipeshift.runtime.comm.lane import Lane
from lightning_pipeshift.runtime.comm.meeting import Waiting, agreed_name, store_of_this_start
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.testing.ranks import LIMIT_SECONDS, run_ranks
from tests.end_to_end.test_transparency import Pipelined, fit
from tests.end_to_end.test_unmodified import FewLayers, build
from tests.models import points


def agree(store: dist.Store, world_size: int) -> set[str]:
    with ThreadPoolExecutor(world_size) as ranks:
        names = [
            ranks.submit(agreed_name, store, rank, world_size, Waiting(LIMIT_SECONDS, "here"))
            for rank in range(world_size)
        ]
        return {name.result() for name in names}


def test_every_start_has_a_name_of_its_own() -> None:
    """Also after starts with more ranks, and after one that lacked a rank."""
    store = dist.HashStore()
    names = [agree(store, size) for size in (3, 3, 2, 1, 4)]
    assert all(len(of_start) == 1 for of_start in names)
    assert len(set().union(*names)) == 5


def test_what_a_dead_rank_asked_is_not_taken_for_a_living_one() -> None:
    store = dist.HashStore()
    with pytest.raises(StageFailedError, match=r"Rank 0 did not connect at here within 0\.2 s"):
        agreed_name(store, 1, 2, Waiting(0.2, "here"))
    with pytest.raises(StageFailedError, match=r"Rank\(s\) 1 did not connect at here within 0\.5"):
        agreed_name(store, 0, 2, Waiting(0.5, "here"))
    assert len(agree(store, 2)) == 1


def test_a_rank_that_fails_while_others_wait_for_a_late_one_ends_them() -> None:
    """Rank 2 does not come; rank 0 gives up first, and rank 1 hears its reason."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as ranks:
        found = [
            ranks.submit(agreed_name, store, rank, 3, Waiting(limit, "here"))
            for rank, limit in enumerate((0.5, LIMIT_SECONDS))
        ]
        for rank in found:
            with pytest.raises(StageFailedError, match=r"Rank\(s\) 2 did not connect at here"):
                rank.result()


def test_a_rank_that_came_and_vanished_is_told_from_one_that_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "GONE_SECONDS", 0.5)
    store = dist.HashStore()
    store.set("pipeshift/asks/1", "ask")
    with ThreadPoolExecutor(1) as ranks:
        found = ranks.submit(agreed_name, store, 0, 3, Waiting(LIMIT_SECONDS, "here"))
        store.wait(["pipeshift/answer/ask"])
        # It takes its answer, and is never heard again.
        store.set(f"pipeshift/taken/ask/{store.get('pipeshift/answer/ask').decode()}", "0")
        with pytest.raises(StageFailedError, match=r"Rank 1 ended, or stopped,.*Rank\(s\) 2 had"):
            found.result()


@pytest.mark.parametrize(
    ("rank", "error", "words"),
    [
        (0, ConfigurationError, "another program uses that port. Set the environment variable"),
        (1, StageFailedError, "does not answer as a store does"),
    ],
)
def test_another_program_listens_where_the_ranks_are_to_meet(
    rank: int, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "GONE_SECONDS", 0.5)
    with socket.create_server(("", 0)) as listener, pytest.raises(error, match=words):
        store_of_this_start(rank, 2, "127.0.0.1", listener.getsockname()[1], timedelta(hours=1))


class Clock:
    """Stands still but for the waits of the code that is tested, in the place of ``time``."""

    def __init__(self, while_waiting: Callable[[], None] = lambda: None) -> None:
        self.now = 0.0
        self._while_waiting = while_waiting

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._while_waiting()


# Any failure before the ranks are connected ends them all within so many seconds.
MOST_SECONDS = 20.0


@pytest.mark.parametrize("seconds", [0.01, 3.0, 9.85, 9.95, 10.0])
def test_how_long_a_rank_tries_to_talk_to_another_program(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt takes so long, up to the limit of an attempt."""
    clock = Clock()
    monkeypatch.setattr(meeting, "time", clock)

    def fails(_: Any) -> Any:
        clock.sleep(min(seconds, meeting.GONE_SECONDS))
        raise dist.DistNetworkError("it does not answer as a store does")

    monkeypatch.setattr(meeting, "_connected", fails)
    with (
        socket.create_server(("", 0)) as listener,
        pytest.raises(StageFailedError, match="Rank 0 does not answer at"),
    ):
        store_of_this_start(1, 2, "127.0.0.1", listener.getsockname()[1], timedelta(hours=1))
    assert clock.now <= MOST_SECONDS


def test_how_long_a_rank_waits_for_a_host_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(meeting, "time", clock)

    def times_out(*_: Any, timeout: float) -> Any:
        clock.sleep(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", times_out)
    with pytest.raises(StageFailedError, match="Rank 0 does not answer at host, port 1"):
        store_of_this_start(1, 2, "host", 1, timedelta(hours=1))
    assert clock.now <= MOST_SECONDS


def test_how_long_ranks_wait_for_one_that_came_and_vanished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    store.set("pipeshift/asks/1", "ask")

    def takes_its_answer() -> None:
        name = store.get("pipeshift/answer/ask").decode()
        store.set(f"pipeshift/taken/ask/{name}", "0")

    clock = Clock(takes_its_answer)
    monkeypatch.setattr(meeting, "time", clock)
    with pytest.raises(StageFailedError, match="Rank 1 ended, or stopped,"):
        agreed_name(store, 0, 3, Waiting(3600.0, "here"))
    assert clock.now <= MOST_SECONDS
    clock.now = 0.0
    with pytest.raises(StageFailedError, match="Rank 1 ended, or stopped, while the ranks connec"):
        meeting.read_when_there(store, "at/1", 1)
    assert clock.now <= MOST_SECONDS


def test_how_long_the_launcher_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, killed, ends = Clock(), list[int](), list[int]()
    monkeypatch.setattr(launching, "time", clock)

    def end(code: int) -> None:
        ends.append(code)
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", end)
    children: Any = [
        SimpleNamespace(poll=lambda: None, kill=lambda: killed.append(1)),
        SimpleNamespace(poll=lambda: 3, kill=lambda: killed.append(2)),
    ]
    with pytest.raises(SystemExit):
        launching._watch(children, 1, lambda: False)
    assert ends == [1]
    assert killed == [1, 2]
    assert clock.now <= MOST_SECONDS


def train_and_drop() -> None:
    receive_object, make_whole = Lane.receive_object, Holdings.make_whole
    late = 0.0

    def receive_late(self: Lane, source: int) -> Any:
        time.sleep(late)
        return receive_object(self, source)

    def end_late(self: Holdings) -> None:
        nonlocal late
        late = float(dist.get_rank())
        make_whole(self)

    Lane.receive_object, Holdings.make_whole = receive_late, end_late  # type: ignore[method-assign]
    fit(build("FewLayers"), points(3), Pipelined("uniform"))
    # Nothing refers to the strategy any more, nor to what it sent.
    gc.collect()


def test_what_was_sent_last_arrives_though_the_trainer_is_dropped() -> None:
    run_ranks(train_and_drop, 2)


class _Fails(FewLayers):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ValueError("the user's own")


def fail_and_train_again(late_rank: int) -> dict[str, Any]:
    failed = []
    for _ in range(3):
        module = _Fails()
        with pytest.raises((ValueError, StageFailedError)):
            fit(module, points(1), Pipelined("uniform"))
        # Whoever looks into what has failed keeps the first run's store alive.
        failed.append(module)
        if int(os.environ["RANK"]) == late_rank:
            time.sleep(0.5)
    return fit(build("FewLayers"), points(1), Pipelined("uniform")).state


@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_process_starts_again_after_a_run_that_failed(late_rank: int) -> None:
    first, second = run_ranks(fail_and_train_again, 2, late_rank)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
