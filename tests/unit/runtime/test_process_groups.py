"""The groups of the devices' own backend: which there are, and how they end."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_pipeshift import StageFailedError
from lightning_pipeshift.runtime.comm import process_groups
from lightning_pipeshift.runtime.comm.groups import Lanes, group_timeout
from lightning_pipeshift.runtime.comm.process_groups import ProcessGroups
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.comm.turns import Urgency
from lightning_pipeshift.runtime.gradients.aggregation import AllReduce
from lightning_pipeshift.step import pipeline, suspendable
from lightning_pipeshift.testing.ranks import LIMIT_SECONDS, run_ranks
from tests.end_to_end.test_transparency import (
    MICROBATCHES,
)
from tests.end_to_end.test_unmodified import FewLayers
from tests.features_models import quiet_trainer
from tests.models import points
from tests.unit.runtime.stages import CPU, Kernels, connect, let_gloo_stand_in

HALF_AN_HOUR = timedelta(minutes=30)

# --- which groups there are ---


def change_what_is_wanted() -> tuple[list[str], list[float], int]:
    _, board = connect()
    made: list[str] = []
    new, destroy = dist.new_group, dist.destroy_process_group

    def noting_new(ranks: list[int], **others: Any) -> Any:
        made.append(f"+{ranks}")
        return new(ranks, **others)

    def noting_destroyed(group: Any) -> None:
        (ranks,) = (of for (of, _), known in before.items() if known is group)
        made.append(f"-{list(ranks)}")
        destroy(group)

    groups = ProcessGroups("gloo", CPU, board.watched)
    dist.new_group, dist.destroy_process_group = noting_new, noting_destroyed  # type: ignore[assignment]
    known = len(dist.distributed_c10d._world.pg_names)
    sums = []
    # Every rank gives them in an order of its own.
    for wanted in ([(0, 1), (1, 2)], [(0, 2), (2, 1)], [(0, 2), (2, 1)], []):
        order = wanted if dist.get_rank() else wanted[::-1]
        made.append(f"{len(wanted)}:")
        groups.want(order)
        before = {place: groups.group(*place) for place in groups._groups}
        for ranks in wanted:
            if dist.get_rank() in ranks:
                tensor = torch.tensor([10.0 ** dist.get_rank()])
                dist.all_reduce(tensor, group=groups.group(ranks))
                sums.append(float(tensor))
    return made, sums, len(dist.distributed_c10d._world.pg_names) - known


def test_groups_are_used_again_and_go_in_one_order_on_all_ranks() -> None:
    results = run_ranks(change_what_is_wanted, 3)
    for made, _, left in results:
        if made != results[0][0]:
            # Where a rank is no member, torch has nothing to tell groups apart by.
            assert [entry[0] for entry in made] == [entry[0] for entry in results[0][0]]
        assert left == 0
    expected = "2: +[0, 1] +[1, 2] 2: -[0, 1] +[0, 2] 2: 0: -[0, 2] -[1, 2]"
    assert " ".join(results[0][0]) == expected
    assert [sums for _, sums, _ in results] == [
        [11.0, 101.0, 101.0],
        [11.0, 110.0, 110.0, 110.0],
        [110.0, 101.0, 110.0, 101.0, 110.0],
    ]


def sum_on_two_lanes() -> list[float]:
    """An urgent sum, which one rank begins behind another sum and the other rank before it."""
    _, board = connect()
    groups = ProcessGroups("gloo", CPU, board.watched)
    groups.want([(0, 1)], num_lanes=2)
    sums = AllReduce(groups, board.watched)
    # A plan may name more lanes than there are: the last one carries those, too.
    lanes = {10.0: ((1.0, Urgency(4)),), 1.0: ((0.5, Urgency(0)), (1.0, Urgency(1)))}
    rank = dist.get_rank()
    found = []
    for value in sorted(lanes, reverse=rank == 0):
        vector = torch.tensor([value * (rank + 1)])
        found.append((vector, sums.start(0, [0, 1], vector, lanes[value])))
        if value == 1.0:
            found[-1][1].wait()
    for _, under_way in found:
        under_way.wait()
    return sorted(float(vector) for vector, _ in found)


def test_sums_of_different_lanes_do_not_wait_for_each_other() -> None:
    assert run_ranks(sum_on_two_lanes, 2) == [[3.0, 30.0]] * 2


# --- how they are made ---


class _Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(traffic_class=None)
        self._timeout = timedelta(minutes=10)


@pytest.mark.parametrize("tells_errors", [True, False])
def test_what_nccl_is_told(monkeypatch: pytest.MonkeyPatch, tells_errors: bool) -> None:
    """A stream of another pool than ours, our timeout, and no watchdog that ends the process, if
    torch tells errors otherwise.
    """
    kind = SimpleNamespace(Options=_Options)
    if tells_errors:
        kind.get_error = None
    monkeypatch.setattr(dist, "ProcessGroupNCCL", kind, raising=False)
    found: list[tuple[Any, timedelta, str | None]] = []

    def made(ranks: Any, timeout: timedelta, backend: str, pg_options: Any) -> Any:
        assert (ranks, backend) == ([0, 1], "nccl")
        found.append((pg_options, timeout, os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")))
        return dist.GroupMember.NON_GROUP_MEMBER

    monkeypatch.setattr(dist, "new_group", made)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun sets it
    two_hours = timedelta(hours=2)
    lanes = Lanes(two_hours, marks={})
    groups = ProcessGroups("nccl", torch.device("cuda"), lambda _: nullcontext(), lanes)
    groups.want([(1, 0)], num_lanes=2)
    for options, timeout, handling in found:
        assert options.is_high_priority_stream
        assert options._timeout == timeout == two_hours
        assert handling == ("0" if tells_errors else "1")
    assert [options.config.traffic_class for options, _, _ in found] == [32 << 2, 28 << 2]
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_a_stalled_rank_has_no_less_time_than_with_gloo() -> None:
    assert group_timeout(None) == HALF_AN_HOUR
    assert group_timeout(timedelta(seconds=5)) == HALF_AN_HOUR
    assert group_timeout(timedelta(days=1)) == timedelta(days=1)


# --- a failure ---


def groups_on(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> ProcessGroups:
    monkeypatch.setattr(process_groups, "_abort_of", kernels.abort_of)
    monkeypatch.setattr(process_groups, "nccl_options", lambda *_: None)
    monkeypatch.setattr(process_groups, "keep_for_ever", lambda _: None)
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: object())
    groups = ProcessGroups("nccl", torch.device("cuda"), lambda _: nullcontext())
    groups.want([(0, 1), (1, 2), (0, 2)])
    return groups


def test_who_waits_for_the_device_comes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """All communicators are aborted at the same time: one after the other, the first would wait for
    the kernels of the second.
    """
    kernels = Kernels()
    groups = groups_on(kernels, monkeypatch)
    survivor = threading.Thread(target=kernels.synchronize, daemon=True)
    survivor.start()
    assert survivor.is_alive()
    groups.abort()
    groups.abort()
    survivor.join(LIMIT_SECONDS)
    assert not survivor.is_alive()


def test_the_thread_that_hears_of_a_failure_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has to go on saying that this rank is alive, and to end its process if nothing helps."""
    groups = groups_on(Kernels(), monkeypatch)
    never = threading.Event()
    monkeypatch.setattr(process_groups, "_abort_of", lambda *_: never.wait)
    groups.abort()
    monkeypatch.setattr(process_groups, "_PATIENCE_SECONDS", 0.0)
    with pytest.warns(UserWarning, match="did not abort within 0 s after a failure"):
        groups.end_all()
    never.set()


class Links:
    """A group, and its backend, whose connections break while the ranks are alive."""

    def _get_backend(self, device: torch.device) -> Links:
        return self

    def name(self) -> str:
        return "nccl"

    def get_error(self) -> Any:
        return SimpleNamespace(name="COMM_ERROR")


def a_link_breaks() -> str:
    channels, board = connect()
    if channels.stage == 1:
        groups = ProcessGroups("nccl", CPU, board.watched)
        groups._groups[(1, 2), 0] = Links()
        board.trouble = groups.error
    with pytest.raises(StageFailedError) as caught:
        channels.receive_object((channels.stage + 1) % 3)
    return str(caught.value)


def test_an_error_of_nccl_ends_the_run_though_every_rank_is_alive() -> None:
    for reason in run_ranks(a_link_breaks, 3):
        assert reason.startswith("Rank 1 reports an error of NCCL (COMM_ERROR) between the ranks")
        assert "1, 2, which sum gradients" in reason


def one_rank_fails(where: str) -> tuple[str, bool]:
    """Two virtual machines: their ranks sum gradients in groups of the devices' own backend."""
    kernels = Kernels()
    let_gloo_stand_in()
    process_groups._abort_of = kernels.abort_of
    made: list[Threads] = []

    def noted(*arguments: Any) -> Threads:
        made.append(Threads(*arguments))
        return made[-1]

    # Those of the run, so that one of them can fail.
    vars(pipeline)["Threads"] = noted
    destroy, advance = dist.destroy_process_group, suspendable.SuspendableMicrobatch.advance
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    count, has_kernels = 0, False

    def destroy_when_all_is_done(group: Any = None) -> None:
        kernels.synchronize()
        destroy(group)

    def fail() -> None:
        raise ValueError("the user's own")

    def advance_until_it_waits(microbatch: Any) -> None:
        nonlocal count, has_kernels
        count += 1
        has_kernels |= kernels.are_waiting
        if is_last and count == 2 * MICROBATCHES + 1:
            if where == "main":
                fail()
            made[0].submit(fail)
        if count == 2 * MICROBATCHES + 2 - is_last:
            # As `loss.cpu()` behind a sum whose other rank is gone.
            kernels.synchronize()
        advance(microbatch)

    dist.destroy_process_group = destroy_when_all_is_done
    vars(suspendable)["SuspendableMicrobatch"].advance = advance_until_it_waits
    strategy = {"virtual_machines": 2, "microbatches": MICROBATCHES, "partition": "uniform"}
    trainer = quiet_trainer({"devices": 4, "pipeshift": strategy}, max_epochs=1)
    with pytest.raises((ValueError, StageFailedError)) as caught:
        trainer.fit(FewLayers(), points(8))
    assert not dist.is_initialized()
    return f"{type(caught.value).__name__}: {caught.value}", has_kernels


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_rank_that_fails_ends_those_that_wait_for_their_device(where: str) -> None:
    *survivors, (failed, _) = run_ranks(one_rank_fails, 4, where)
    assert failed == "ValueError: the user's own"
    for reason, has_kernels in survivors:
        assert reason.startswith("StageFailedError: Stage 1 of virtual machine 1")
        assert "failed first: ValueError: the user's own" in reason
        assert has_kernels
