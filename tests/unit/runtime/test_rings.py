"""Rings: the sums, their bits, their order, and what happens when a member dies."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeshift.runtime.comm.groups import Lanes
from lightning_pipeshift.runtime.gradients.rings import Rings
from lightning_pipeshift.testing.ranks import RanksFailed, run_ranks
from tests.unit.runtime.stages import connect


def values(rank: int, number: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(length, generator=generator).to(dtype)


def make_rings() -> tuple[Rings, int]:
    _, board = connect()
    rank = dist.get_rank()
    groups = Lanes().make(range(dist.get_world_size()), "gradients-0")
    return Rings(lambda _: groups, rank, board.watched), rank


def sums(lengths: list[int], dtype: torch.dtype, late: float = 0.0) -> list[Tensor]:
    rings, rank = make_rings()
    members = list(range(dist.get_world_size()))
    numbers = list(range(len(lengths)))
    # Every rank starts them in another order, and some ranks late.
    random.Random(rank).shuffle(numbers)
    started = {}
    for number in numbers:
        if rank == 0:
            time.sleep(late)
        buffer = values(rank, number, lengths[number], dtype)
        started[number] = (rings.start(number, members, buffer), buffer)
    for ring, _ in started.values():
        ring.wait()
    return [started[number][1] for number in range(len(lengths))]


LENGTHS = [0, 1, 2, 3, 5, 1000, 1 << 20, 2_100_001]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_member_holds_the_sum_in_the_rings_order(world_size: int, dtype: torch.dtype) -> None:
    found = run_ranks(sums, world_size, LENGTHS, dtype)
    for number, length in enumerate(LENGTHS):
        parts = [values(rank, number, length, dtype) for rank in range(world_size)]
        if length > 4:
            exact = torch.stack([part.double() for part in parts]).sum(dim=0)
            tolerance = 0.05 if dtype is torch.bfloat16 else 1e-5
            assert torch.allclose(found[0][number].double(), exact, rtol=tolerance, atol=tolerance)
        for result in found:
            assert torch.equal(result[number], found[0][number])
        if length == 1000:
            chunks = [part.tensor_split(world_size) for part in parts]
            for c in range(world_size):
                total = chunks[c][c]
                for step in range(1, world_size):
                    total = total + chunks[(c + step) % world_size][c]
                assert torch.equal(found[0][number].tensor_split(world_size)[c], total)


def test_every_run_gives_the_same_bits() -> None:
    early, late = (run_ranks(sums, 3, [1000, 70_000, 3], torch.float32, s) for s in (0.0, 0.05))
    assert all(torch.equal(a, b) for a, b in zip(early[1], late[1], strict=True))


def two_rings_of_different_owners() -> dict[int, Tensor]:
    rings, rank = make_rings()
    owners = {0: [0, 2], 1: [1, 2], 2: [3, 0], 3: [1, 3]}
    mine = {n: values(rank, n, 5000) for n, ranks in owners.items() if rank in ranks}
    started = [rings.start(n, owners[n], buffer) for n, buffer in reversed(mine.items())]
    for ring in started:
        ring.wait()
    return mine


def test_a_rank_is_a_member_of_rings_with_different_owners() -> None:
    found = run_ranks(two_rings_of_different_owners, 4)
    for number, ranks in {0: [0, 2], 1: [1, 2], 2: [3, 0], 3: [1, 3]}.items():
        expected = values(ranks[0], number, 5000) + values(ranks[1], number, 5000)
        for rank in ranks:
            assert torch.equal(found[rank][number], expected)


def more_than_anybody_has_threads_for() -> float:
    rings, rank = make_rings()
    numbers = range(200) if rank else reversed(range(200))
    started = [rings.start(n, [0, 1], torch.ones(10)) for n in numbers]
    for ring in started:
        ring.wait()
    return float(len(started))


def test_many_rings_in_opposite_orders() -> None:
    assert run_ranks(more_than_anybody_has_threads_for, 2) == [200.0, 200.0]


class CountsSends:
    """A group that tells all ranks how much this one has posted."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group = group
        self._key = f"sends of {rank}"
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, *args: Any) -> Any:
        work = self._group.send(*args)
        self._store.add(self._key, 1)
        return work


class DiesAtItsSecondSend(CountsSends):
    """A group whose process dies in the middle of a sum, when all others wait for it. (gloo 2.13
    forgets what is posted at the very moment at which a connection breaks.) The sum is of one
    piece: others would go on meanwhile, for as long as the machine takes.
    """

    def send(self, *args: Any) -> Any:
        if self._store.add(self._key, 0) == 1:
            # The first rank has its part of the sum and waits for the last one's, who waits for
            # this one.
            for rank, num_sends in ((0, 3), (2, 2)):
                while self._store.add(f"sends of {rank}", 0) < num_sends:
                    time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().send(*args)


def dies_in_the_middle() -> None:
    rings, rank = make_rings()
    kind = DiesAtItsSecondSend if rank == 1 else CountsSends
    (group,) = rings._groups
    rings._groups = [replace(group, control=kind(group.control, rank))]
    try:
        rings.start(0, [0, 1, 2], torch.ones(100_000)).wait()
    finally:
        # As a run that fails does: who waits for this rank hears of it.
        rings.close()


def test_a_member_that_dies_in_the_middle_of_a_sum() -> None:
    with pytest.raises(RanksFailed, match="Rank 1 ended without an error message") as caught:
        run_ranks(dies_in_the_middle, 3)
    assert not [o for o in caught.value.outcomes if o.error_type == "Killed"]
