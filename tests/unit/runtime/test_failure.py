import os
import signal
import time

import pytest
import torch

from lightning_pipeshift.errors import LayerError, StageFailedError
from lightning_pipeshift.testing.ranks import run_ranks
from tests.unit.runtime.stages import connect


def wait_for_the_last_stage(way: str, ending: str) -> None:
    """Everybody waits on the last stage, which fails."""
    channels, board = connect()
    last = channels.num_stages - 1
    channels.gather(None)
    if channels.stage == last:
        time.sleep(0.3)
        if ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            raise LayerError("the reason")
        except LayerError as error:
            board.publish("stage 2", error)
            channels.close()
            board.close()
            os._exit(7)
    if way == "object":
        channels.receive_object(last)
    elif way == "tensor":
        channels.receive_tensor(torch.empty(3), last)
    else:
        channels.sum(torch.ones(3))


@pytest.mark.parametrize("way", ["object", "tensor", "sum"])
def test_the_reason_of_a_stage_that_fails_is_everybodys(way: str) -> None:
    outcomes = run_ranks(wait_for_the_last_stage, 3, way, "raise", expect_failure=True)
    for outcome in outcomes[:-1]:
        assert outcome.error_type == StageFailedError.__name__, outcome
        assert "stage 2 failed first: LayerError: the reason" in outcome.message
        assert "in wait_for_the_last_stage" in outcome.message
    assert outcomes[-1].error_type == "Died"


@pytest.mark.parametrize("way", ["object", "tensor"])
def test_a_stage_that_is_killed(way: str) -> None:
    outcomes = run_ranks(wait_for_the_last_stage, 3, way, "kill", expect_failure=True)
    for outcome in outcomes[:-1]:
        assert outcome.error_type == StageFailedError.__name__, outcome
        assert "ended without an error message" in outcome.message


def die_within_a_message(dead: int) -> None:
    """Stage 0 sends stage 1 a tensor that takes some time, and one of the two dies meanwhile."""
    channels, _ = connect()
    channels.gather(None)
    if channels.stage == 0:
        sent = channels._post_tensor(torch.zeros(40_000_000), 1)
    if channels.stage == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    if channels.stage == 0:
        sent.wait()
    else:
        channels.receive_tensor(torch.zeros(40_000_000), 0)


@pytest.mark.parametrize("dead", [0, 1])
def test_who_waits_for_the_rest_of_a_message_is_told(dead: int) -> None:
    """Gloo does not tell that the rest does not come."""
    for _ in range(3):
        outcomes = run_ranks(die_within_a_message, 2, dead, expect_failure=True)
        assert outcomes[1 - dead].error_type == StageFailedError.__name__, outcomes
        assert "ended without an error message" in outcomes[1 - dead].message


def publish_and_read() -> tuple[bool, object]:
    channels, board = connect()
    first = False
    if channels.stage == 1:
        channels.gather(None)
        first = board.publish("stage 1", ValueError("the first"))
        return first, board.read(0.0)
    channels.gather(None)
    assert board.read(60.0) is not None
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
