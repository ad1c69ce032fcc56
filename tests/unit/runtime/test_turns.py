"""Which block is sent next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from lightning_pipeshift.runtime.comm import turns as turns_module
from lightning_pipeshift.runtime.comm.turns import BACKGROUND, Turns, Urgency

PEER, OTHER = 1, 2
WINDOW = 1 << 20


class Blocks:
    """Blocks that threads want to send; a block leaves when the test says so."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.begun: list[str] = []
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def want(self, name: str, urgency: Urgency, num_bytes: int = WINDOW, peer: int = PEER) -> None:
        """Wants to send a block, which waits or begins before this returns."""

        def run() -> None:
            self.turns.take(peer, urgency, num_bytes)
            with self._changed:
                self.begun.append(name)
                self._changed.notify_all()

        thread = threading.Thread(target=run, daemon=True)
        known = self._num_waiting(peer)
        thread.start()
        self._threads.append(thread)
        self._until(lambda: name in self.begun or self._num_waiting(peer) == known + 1)

    def _num_waiting(self, peer: int) -> int:
        return len(self.turns._queues[peer].waiting) if peer in self.turns._queues else 0

    def _until(self, is_so: Callable[[], bool]) -> None:
        with self._changed:
            while not is_so():
                self._changed.wait(0.01)

    def leave(self, urgency: Urgency, then: str | None, num_bytes: int = WINDOW) -> None:
        """A block has left; after it, another one begins."""
        self.turns.end(PEER, urgency, num_bytes)
        if then is not None:
            self._until(lambda: then in self.begun)


@pytest.fixture(autouse=True)
def a_window_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "_MEASURED_SECONDS", float("inf"))


def test_within_a_lane_the_most_urgent_block_is_next() -> None:
    blocks = Blocks()
    blocks.want("sent", Urgency(1, 7))
    for name, order in (("last", 9), ("first", 2), ("middle", 5), ("same", 5)):
        blocks.want(name, Urgency(1, order))
    assert blocks.begun == ["sent"]
    blocks.leave(Urgency(1, 7), "first")
    blocks.leave(Urgency(1, 2), "middle")
    # Of two that are as urgent, the one that came first.
    blocks.leave(Urgency(1, 5), "same")
    blocks.leave(Urgency(1, 5), "last")
    assert blocks.begun == ["sent", "first", "middle", "same", "last"]


def test_a_block_does_not_wait_for_what_less_urgent_lanes_have_sent() -> None:
    blocks = Blocks()
    blocks.want("bulk", Urgency(2, 0))
    blocks.want("urgent", Urgency(0, 0))
    assert blocks.begun == ["bulk", "urgent"]
    # But they wait for it.
    blocks.want("more bulk", Urgency(2, 0))
    blocks.leave(Urgency(2, 0), None)
    assert blocks.begun == ["bulk", "urgent"]
    blocks.leave(Urgency(0, 0), "more bulk")


def test_each_rank_has_its_own_blocks_on_their_way() -> None:
    blocks = Blocks()
    blocks.want("to one", Urgency())
    blocks.want("to the other", Urgency(), peer=OTHER)
    assert blocks.begun == ["to one", "to the other"]


def test_as_many_bytes_as_the_window_holds_are_on_their_way_and_one_block_always() -> None:
    blocks = Blocks()
    half = WINDOW // 2
    blocks.want("half", Urgency(), half)
    blocks.want("other half", Urgency(), half)
    blocks.want("third", Urgency(), 1)
    assert blocks.begun == ["half", "other half"]
    blocks.leave(Urgency(), "third", half)
    blocks.leave(Urgency(), None, 1)
    blocks.leave(Urgency(), None, half)
    blocks.want("large", Urgency(), 5 * WINDOW)
    assert blocks.begun[-1] == "large"


def test_a_block_that_does_not_want_to_wait_leaves_nothing_behind() -> None:
    turns = Turns()
    assert turns.take(PEER, Urgency(), WINDOW, waits=False)
    assert not turns.take(PEER, Urgency(), WINDOW, waits=False)
    turns.end(PEER, Urgency(), WINDOW)
    assert turns.take(PEER, Urgency(), WINDOW, waits=False)


def test_the_window_follows_the_fastest_of_the_last_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(turns_module, "_MEASURED_SECONDS", 0.02)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    turns = Turns()

    def send(seconds: float) -> None:
        nonlocal now
        turns.take(PEER, Urgency(), WINDOW)
        now += seconds
        turns.end(PEER, Urgency(), WINDOW)

    def window() -> float:
        return turns._queues[PEER]._window / turns_module._WINDOW_SECONDS

    send(0.03)
    assert window() == pytest.approx(WINDOW / 0.03, rel=1e-3)
    send(0.02)
    assert window() == pytest.approx(WINDOW / 0.02, rel=1e-3)
    # A receiver that was not ready says nothing of the link.
    send(3.0)
    assert window() == pytest.approx(WINDOW / 0.02, rel=1e-3)
    for _ in range(turns_module._NUM_MEASURED):
        send(0.025)
    assert window() == pytest.approx(WINDOW / 0.025, rel=1e-3)
    # Never less than this, however slow the link.
    for _ in range(turns_module._NUM_MEASURED):
        send(3.0)
    assert turns._queues[PEER]._window == turns_module._LEAST_WINDOW_BYTES
    traffic = turns.traffic[0]
    assert traffic.num_bytes == (3 + 2 * turns_module._NUM_MEASURED) * WINDOW
    assert traffic.sending_seconds == pytest.approx(now)


def test_the_background_waits_while_anything_else_is_sent_to_any_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns_module, "_FLOOR", 1e-12)
    blocks = Blocks()
    blocks.want("urgent", Urgency(3, 0), peer=OTHER)
    assert not blocks.turns.take(PEER, BACKGROUND, WINDOW, waits=False)
    thread = threading.Thread(target=blocks.turns.take, args=(PEER, BACKGROUND, WINDOW))
    thread.start()
    # Another one comes before the first has left: the background goes on waiting.
    blocks.want("second", Urgency(4, 0), peer=OTHER)
    blocks.turns.end(OTHER, Urgency(3, 0), WINDOW)
    blocks._until(lambda: "second" in blocks.begun)
    assert BACKGROUND.lane not in blocks.turns.traffic
    assert thread.is_alive()
    blocks.turns.end(OTHER, Urgency(4, 0), WINDOW)
    thread.join()
    assert BACKGROUND.lane in blocks.turns.traffic
    # It does not keep others back.
    assert blocks.turns.take(PEER, Urgency(0, 0), WINDOW, waits=False)


def test_the_background_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "_FLOOR", float("inf"))
    turns = Turns()
    assert turns.take(OTHER, Urgency(3, 0), WINDOW, waits=False)
    # However much of the link others take, it has its part.
    assert turns.take(PEER, BACKGROUND, WINDOW)
