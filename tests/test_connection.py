"""How ranks find each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_pipeshift.connection import _agreed_name
from lightning_pipeshift.errors import StageFailedError

SOON = timedelta(seconds=20)


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
    with pytest.raises(StageFailedError, match=r"Rank\(s\) 1 did not come within 0\.5 s"):
        _agreed_name(store, 0, 2, timedelta(seconds=0.5))
    assert len(agree(store, 2)) == 1
