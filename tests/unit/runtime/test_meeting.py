"""A rank that fails before all are connected ends the others within 20 s; by a simulated clock."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pipeshift import StageFailedError
from lightning_pipeshift.runtime.comm import meeting
from lightning_pipeshift.runtime.comm.meeting import Waiting, agreed_name, read_when_there


class Store:
    """Torch's store, in this process.

    Args:
        values: by key; shared by stores with prefixes.
        prefix: of all keys.
    """

    def __init__(self, values: dict[str, str] | None = None, prefix: str = "") -> None:
        self.values = {} if values is None else values
        self._prefix = prefix

    def set(self, key: str, value: str) -> None:
        self.values[self._prefix + key] = value

    def get(self, key: str) -> bytes:
        return self.values[self._prefix + key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(self._prefix + key in self.values for key in keys)


class Job:
    """What the other ranks of a job do while one waits.

    Args:
        monkeypatch: lets no real time pass.
        acts: called whenever time has passed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, acts: Callable[[Job], None]) -> None:
        self.now, self.store = 0.0, Store()
        self._acts = acts
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(meeting, "time", clock)
        stores = SimpleNamespace(
            PrefixStore=lambda prefix, store: Store(store.values, f"{prefix}/"), Store=Store
        )
        monkeypatch.setattr(meeting, "dist", stores)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self._acts(self)

    def named(self, rank: int) -> str:
        """Meets two others as this rank does."""
        store: Any = self.store
        return agreed_name(store, rank, 3, Waiting(1800.0, "here"))


def comes(job: Job, rank: int, is_alive: bool = True) -> None:
    """Another rank than the first asks for the name, and acknowledges it again and again."""
    job.store.set(f"pipeshift/asks/{rank}", f"start{rank}")
    answer = job.store.values.get(f"pipeshift/answer/start{rank}")
    if answer is not None and is_alive:
        job.store.set(f"pipeshift/taken/start{rank}/{answer}", str(job.now))


def test_ranks_that_have_come_wait_for_one_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    def acts(job: Job) -> None:
        comes(job, 1)
        if job.now > 600:
            comes(job, 2)

    job = Job(monkeypatch, acts)
    name = job.named(0)
    assert job.now == pytest.approx(600, abs=1)
    assert f"pipeshift/{name}/complete" in job.store.values


def test_a_rank_that_has_come_and_stops_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, lambda job: comes(job, 1, is_alive=job.now < 60))
    with pytest.raises(StageFailedError, match=r"Rank 1 ended, or stopped.*\(Rank\(s\) 2 had not"):
        job.named(0)
    assert 60 < job.now < 80
    (reason,) = (job.store.values[key] for key in job.store.values if key.endswith("/failed"))
    assert "Rank 1 ended, or stopped" in reason, "what ends the other ranks"


def test_the_reason_of_the_first_rank_ends_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def acts(job: Job) -> None:
        own = job.store.values["pipeshift/asks/1"]
        job.store.set(f"pipeshift/answer/{own}", "name")
        if job.now > 60:
            job.store.set("pipeshift/name/failed", "a reason")

    job = Job(monkeypatch, acts)
    with pytest.raises(StageFailedError, match="a reason"):
        job.named(1)
    assert 60 < job.now < 61


def test_a_rank_that_ends_while_all_connect_ends_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, lambda job: None)
    store: Any = job.store
    with pytest.raises(StageFailedError, match="Rank 2 ended, or stopped, while"):
        read_when_there(store, "address", 2)
    assert job.now < 20
