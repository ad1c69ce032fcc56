"""How long a rank that waits goes on after a signal, by a clock of the test's own."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pipeshift.runtime.comm.mesh import Mesh
from lightning_pipeshift.runtime.liveness import failure
from lightning_pipeshift.runtime.liveness.failure import FailureBoard

# Heartbeats tell what another rank has completed, this many seconds later at most.
NEWS_SECONDS = 1.0


class Ended(BaseException):
    """The process has ended."""


class Simulated:
    """A rank that waits for another one, and what its thread for the heartbeats does.

    Args:
        patch: replaces the clock, and the connection to the other rank.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.answers: dict[int, str] = {}
        self.counts = {1: 0}
        self.interval = 1.0
        self.ended_at: float | None = None
        self.interrupted_at: float | None = None
        self.layer: Callable[[], str | None] = lambda: None
        patch.setattr(failure, "time", SimpleNamespace(monotonic=lambda: self.now))
        patch.setattr(failure, "Peers", self._connect)
        patch.setattr("os._exit", self._end)
        patch.setattr(failure, "print_at_once", lambda _: None)
        ours, _ = socket.socketpair()
        self.board = FailureBoard(0, Mesh({1: ours}, {}))
        self.board.interrupt = self._interrupt
        self.board.watch_for_stalls(int, 0.0, None)
        ours.close()

    def _connect(self, mesh: Any, timeout: float, *called: Any) -> Any:
        *_, self._tick, self._hear_signal = called
        return self

    def _end(self, code: int) -> None:
        self.ended_at = self.now
        raise Ended

    def _interrupt(self) -> None:
        self.interrupted_at = self.interrupted_at or self.now

    def ask(self) -> None:
        doing: dict[str, Any] = {"waits": None, "at": None, "purpose": None}
        doing |= {"action": "the forward of microbatch 0", "layer": self.layer()}
        self.answers = {1: json.dumps(doing)}

    def announce(self, entry: Any) -> None:
        """The other rank would be told."""

    def runs(self, seconds: float) -> None:
        """Lets the thread run for some seconds."""
        end = self.now + seconds
        while self.now < end:
            self.now += self.interval
            self._tick(self)

    def sends(self, number: int) -> None:
        """Sends a signal, when the other rank has just completed something."""
        self._hear_signal(number)
        self.runs(NEWS_SECONDS)
        self.counts = {1: self.counts[1] + 1}

    def waits(self, number: int) -> BaseException:
        """Sends a signal while this rank waits in code that does not return. Returns the error that
        the wait raises if it does.
        """
        at = self.now
        try:
            with self.board.watched(1):
                self.sends(number)
                with pytest.raises(Ended):
                    self.runs(600.0)
                raise RuntimeError("the connection broke")
        except (SystemExit, KeyboardInterrupt) as error:
            assert self.interrupted_at is not None
            assert self.ended_at is not None
            assert at < self.interrupted_at < self.ended_at <= at + 5.0
            return error


@pytest.mark.parametrize("pause", [0.0, 600.0])
def test_a_wait_ends_within_5_s_of_a_signal(pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a first batch that has taken minutes."""
    for number in (signal.SIGTERM, signal.SIGINT):
        simulated = Simulated(monkeypatch)
        with simulated.board.watched(1):
            simulated.runs(pause)
            simulated.counts = {1: 1}
            simulated.runs(1.0)
        error = simulated.waits(number)
        if number == signal.SIGTERM:
            assert isinstance(error, SystemExit)
            assert error.code == 143
        else:
            assert isinstance(error, KeyboardInterrupt)


def test_without_a_signal_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = Simulated(monkeypatch)
    with simulated.board.watched(1):
        simulated.runs(3600.0)
    assert simulated.interrupted_at is None


def test_a_long_action_goes_from_layer_to_layer_and_the_run_ends_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated = Simulated(monkeypatch)
    simulated.layer = lambda: f"layers.{simulated.now // 1.5}"
    with simulated.board.watched(1):
        simulated.sends(signal.SIGTERM)
        simulated.runs(60.0)
        assert simulated.interrupted_at is None
        simulated.layer = lambda: "layers.7"
        with pytest.raises(Ended):
            simulated.runs(60.0)


def test_a_checkpoint_at_the_end_may_take_long_and_ctrl_c_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When all ranks know of the end, they wait for the one that writes; a launcher may send its
    signal again.
    """
    simulated = Simulated(monkeypatch)
    simulated.sends(signal.SIGTERM)
    simulated.board.end_in_order()
    with simulated.board.watched(1):
        simulated.runs(600.0)
        simulated.sends(signal.SIGTERM)
        simulated.runs(600.0)
    assert simulated.interrupted_at is None
    simulated.waits(signal.SIGINT)


def test_the_other_ranks_are_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = Simulated(monkeypatch)
    told: list[Any] = []
    monkeypatch.setattr(simulated, "announce", told.append)
    simulated.layer = lambda: "head"
    simulated.waits(signal.SIGTERM)
    (entry,) = told
    assert entry["reason"].startswith("Rank 0 got SIGTERM, and ends its wait, as no rank has")
    assert (
        "Rank 1 is waited for; it is at the forward of microbatch 0, in the layer 'head'"
        in (entry["reason"])
    )
    assert "Rank 0 waits for rank 1" in entry["reason"]
