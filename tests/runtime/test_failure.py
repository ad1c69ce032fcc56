import os
import signal
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_pipeshift.errors import LayerError, StageFailedError
from lightning_pipeshift.model.placeholder import spec_of
from lightning_pipeshift.runtime import failure as failure_module
from lightning_pipeshift.runtime.channels import Direction
from lightning_pipeshift.runtime.failure import FailureBoard
from tests.harness import run_ranks
from tests.runtime.stages import connect


def wait_for_the_last_stage(way: str, ending: str) -> None:
    """Everybody waits on the last stage, which fails."""
    channels, board = connect()
    spec = spec_of(torch.empty(3))
    last = channels.num_stages - 1
    channels.gather_int(0)
    if channels.stage == last:
        time.sleep(0.3)
        if ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            raise LayerError("the reason")
        except LayerError as error:
            board.publish("stage 2", error)
            channels.close()
            board.wait_for_readers()
            os._exit(7)
    if way == "object":
        channels.receive_object(last)
    elif way == "tensor":
        channels.receive_tensor(torch.empty(3), last)
    elif way == "sum":
        channels.sum(torch.ones(3))
    elif channels.stage == last - 1:
        channels.post_receive([spec], Direction.GRADIENT)[0].wait()
    else:
        channels.receive_object(last)


@pytest.mark.parametrize("way", ["object", "tensor", "payload", "sum"])
def test_the_reason_of_a_stage_that_fails_is_everybodys(way: str) -> None:
    outcomes = run_ranks(wait_for_the_last_stage, 3, way, "raise", expect_failure=True)
    for outcome in outcomes[:-1]:
        assert outcome.error_type == StageFailedError.__name__, outcome
        assert "stage 2 failed first: LayerError: the reason" in outcome.message
        assert "in wait_for_the_last_stage" in outcome.message
    assert outcomes[-1].error_type == "Died"


@pytest.mark.parametrize("way", ["object", "payload"])
def test_a_stage_that_is_killed(way: str) -> None:
    outcomes = run_ranks(wait_for_the_last_stage, 3, way, "kill", expect_failure=True)
    for outcome in outcomes[:-1]:
        assert outcome.error_type == StageFailedError.__name__, outcome
        assert "ended without a word" in outcome.message


def test_who_cannot_know_who_died_waits_for_somebody_who_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that computes, say, and hears of it some seconds later."""
    store: Any = dist.HashStore()
    boards = [FailureBoard(store, rank, 3, 0) for rank in range(2)]
    errors: list[str] = []
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        before, now = now, now + seconds
        if before < 6.0 <= now:
            with pytest.raises(StageFailedError) as caught, boards[0].watched(2):
                raise RuntimeError("closed by peer")
            errors.append(str(caught.value))

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(failure_module, "time", clock)
    with pytest.raises(StageFailedError) as caught, boards[1].watched():
        raise RuntimeError("closed by peer")
    assert str(caught.value).startswith("Rank 2 ended without a word")
    assert errors == [str(caught.value)]


def publish_and_read() -> tuple[bool, object]:
    channels, board = connect()
    first = False
    if channels.stage == 1:
        first = board.publish("stage 1", ValueError("the first"))
        channels.share_object("published", 1)
        channels.settle()
        return first, board.read()
    assert channels.share_object(None, 1) == "published"
    second = board.publish(f"stage {channels.stage}", KeyError("a later one"))
    return second, (board.read() or "").splitlines()[0]


def test_the_first_failure_counts() -> None:
    heard = "stage 1 failed first: ValueError: the first"
    assert run_ranks(publish_and_read, 3) == [(False, heard), (True, None), (False, heard)]


def leave_others_alone() -> str:
    channels, board = connect()
    with board.watched():
        pass
    try:
        with board.watched():
            raise ValueError("the user's own")
    except ValueError as error:
        return str(error)
    return str(channels)


def test_other_errors_go_through() -> None:
    assert run_ranks(leave_others_alone, 2) == ["the user's own"] * 2


def test_the_boards_patience_is_not_that_of_the_whole_job() -> None:
    store: Any = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=90))
    FailureBoard(store, 0, 1, 1).publish("here", ValueError("no"))
    assert store.timeout == timedelta(seconds=90)
