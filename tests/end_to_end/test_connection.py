"""How ranks find each other."""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_pipeshift.errors import StageFailedError
from lightning_pipeshift.runtime.comm.backends import _agreed_name
from lightning_pipeshift.runtime.comm.lane import Lane, PostedObject
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.testing.ranks import LIMIT_SECONDS, run_ranks
from tests.end_to_end.test_transparency import Pipelined, fit
from tests.end_to_end.test_unmodified import FewLayers, build
from tests.models import points

SOON = timedelta(seconds=LIMIT_SECONDS)


def agree(store: dist.Store, world_size: int) -> set[str]:
    with ThreadPoolExecutor(world_size) as ranks:
        names = [
            ranks.submit(_agreed_name, store, rank, world_size, SOON) for rank in range(world_size)
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
    with pytest.raises(dist.DistStoreError):
        _agreed_name(store, 1, 2, timedelta(seconds=0.2))
    with pytest.raises(StageFailedError, match=r"Rank\(s\) 1 did not connect within 0\.5 s"):
        _agreed_name(store, 0, 2, timedelta(seconds=0.5))
    assert len(agree(store, 2)) == 1


def train_and_drop() -> None:
    post_object, make_whole = Lane.post_object, Holdings.make_whole
    late = 0.0

    def post_late(self: Lane, source: int) -> PostedObject:
        time.sleep(late)
        return post_object(self, source)

    def end_late(self: Holdings) -> None:
        nonlocal late
        late = float(dist.get_rank())
        make_whole(self)

    Lane.post_object, Holdings.make_whole = post_late, end_late  # type: ignore[method-assign]
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
