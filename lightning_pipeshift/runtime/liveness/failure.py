"""Ends the run on every rank when one fails, with the first failure's reason.

A rank that fails announces the reason to all others, and the others notice a rank that is gone as
they no longer hear it (see :mod:`~lightning_pipeshift.runtime.liveness.peers`). Either way each
rank shuts down the connections on which its own code may be waiting: that raises an error there at
once, which is replaced by the reason.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from lightning_pipeshift.compat.torch_distributed_private import num_collectives
from lightning_pipeshift.errors import PipeShiftError, StageFailedError
from lightning_pipeshift.runtime.comm.mesh import Mesh
from lightning_pipeshift.runtime.comm.sockets import Opened
from lightning_pipeshift.runtime.comm.waits import interrupt_waits
from lightning_pipeshift.runtime.liveness.lone_collective import LoneCollective
from lightning_pipeshift.runtime.liveness.peers import Peers
from lightning_pipeshift.runtime.liveness.signals import LOOKS_EVERY_SECONDS, SignalWatch
from lightning_pipeshift.runtime.liveness.stalls import StallWatch, activity, write_stacks
from lightning_pipeshift.text import capitalised, print_at_once

HEARTBEAT_SECONDS: Final = 10.0
"""The default number of seconds of silence after which a rank is gone."""

# How long after a failure a rank's own thread may take to notice it, before its process is ended.
_GRACE_SECONDS: Final = 10.0
# How long after another rank's error this rank may continue.
_RESPITE_SECONDS: Final = 1.0
_MOST_CHARACTERS: Final = 6000


class FailureBoard:
    """This rank's knowledge of the first failure.

    Args:
        rank: this rank.
        mesh: connects it with the others, see
            :func:`~lightning_pipeshift.runtime.comm.mesh.connect_all`.
        timeout: after how many seconds of silence a rank is gone.
    """

    def __init__(self, rank: int, mesh: Mesh, timeout: float = HEARTBEAT_SECONDS) -> None:
        self.name_of: Callable[[int], str] = "rank {}".format
        """A rank's name in words."""
        self.waits: tuple[int | None, float] | None = None
        """The rank that this rank's own thread waits for (``None``: several), and since when."""
        self.interrupt: Callable[[], None] = lambda: None
        """Called in a thread when another rank has failed: shuts down the connections on which this
        rank may wait."""
        self.give_up: Callable[[], None] = lambda: None
        """Called in a thread when a rank is gone: shuts down the connections on which only the
        remaining ranks would communicate after a failure."""
        self.trouble: Callable[[], str | None] = lambda: None
        """Called in a thread about every second: describes an error of this rank's connections on
        its device, in words that follow its name; ``None`` if there is none."""
        self.lost_at: float | None = None
        """The time since which any rank has been gone, by ``time.monotonic``."""
        self.is_running = True
        """Whether a run is in progress: outside of runs, the process is not ended."""
        self._rank = rank
        self._timeout = timeout
        self._lock = threading.Lock()
        self._count: Callable[[], int] = int
        self._stalls: StallWatch | None = None
        self._stacks: Path | None = None
        self._owner = threading.get_ident()
        self._entry: dict[str, Any] | None = None
        self._is_known = threading.Event()
        self._known_at = 0.0
        # Whether this rank's own connections have been shut down because of it.
        self._is_over = False
        self._has_noticed = False
        # The error that ended this rank, if it was raised in a thread.
        self._failure: BaseException | None = None
        self._is_closed = False
        self._signals, self._lone = SignalWatch(rank), LoneCollective(rank)
        self._peers: Peers | None = None
        if mesh.connections:
            self._peers = Peers(
                mesh,
                timeout,
                self._hear,
                self._lose,
                self._described,
                lambda: self._count(),
                self._tick,
                self._hear_signal,
            )

    @property
    def own_name(self) -> str:
        """This rank's name, at the beginning of a sentence."""
        return capitalised(self.name_of(self._rank))

    @property
    def is_open(self) -> bool:
        """Whether other ranks can still be heard."""
        return not self._is_closed

    @property
    def sockets(self) -> Opened:
        """Those of the connections to the other ranks."""
        return self._peers.sockets if self._peers is not None else frozenset()

    @property
    def has_failed(self) -> bool:
        """Whether a failure is known."""
        return self._is_known.is_set()

    # --- this rank fails ---

    def publish(self, where: str, error: BaseException) -> bool:
        """Announces a failure, unless another came first; returns whether it was the first."""
        text = "".join(traceback.format_exception(error))
        reason = f"{where} failed first: {type(error).__name__}: {error}\n\n"
        reason += text[-_MOST_CHARACTERS:]
        self._has_noticed = True
        return self._note({"by": self._rank, "reason": reason})

    def publish_from_thread(self, error: BaseException) -> None:
        """As :meth:`publish`, called in a thread. This rank's next communication raises the
        error.
        """
        self._failure = error
        self.publish(self.own_name, error)

    def is_first(self, error: BaseException) -> bool:
        """Whether a thread has published it already."""
        return error is self._failure

    def _note(self, entry: dict[str, Any]) -> bool:
        """Records a failure and sends it to the other ranks, if it is the first."""
        with self._lock:
            if self._entry is not None:
                return False
            self._entry, self._known_at = entry, time.monotonic()
        if self._peers is not None:
            self._peers.announce(entry)
        self._is_known.set()
        return True

    def pause(self) -> None:
        """Ends a run in order: from now on, a rank whose process ends has not failed."""
        self.is_running = False
        if self._peers is not None:
            self._peers.pause()

    def resume(self) -> None:
        """Starts another run of the same ranks."""
        self.is_running = True
        self._owner = threading.get_ident()
        self._signals.begin()
        if self._peers is not None:
            self._peers.resume()
            self._peers.hear_signals()

    def watch_for_stalls(
        self, count: Callable[[], int], timeout: float, stacks: Path | None
    ) -> None:
        """Makes the first rank print which rank the others wait for, when there is no progress.

        Args:
            count: returns how many actions this rank has completed; called in a thread.
            timeout: after how many seconds; 0: never.
            stacks: the folder to which this rank then writes its stacks; ``None``: it does not.
        """
        self._count, self._stacks = count, stacks
        if self._rank == 0:
            self._stalls = StallWatch(timeout, self.name_of, print_at_once)

    def close(self) -> None:
        """Ends the connections, after sending the announcements."""
        self._is_closed = True
        if self._peers is not None:
            self._peers.close()

    # --- another rank fails: called in the peers' thread ---

    def _described(self) -> str:
        if self._stacks is not None:
            with suppress(OSError):
                write_stacks(self._stacks, self._rank)
        # A malformed message must not end the thread: this rank would count as gone.
        with suppress(Exception):
            return json.dumps(self.activity())
        return ""

    def _look_for_stalls(self, peers: Peers) -> None:
        if self._stalls is not None:
            counts = {self._rank: self._count(), **peers.counts}
            self._stalls.look(
                counts,
                lambda: {self._rank: self._described(), **peers.answers},
                peers.ask,
                time.monotonic(),
            )

    def _look_for_trouble(self) -> None:
        if (trouble := self.trouble()) is not None:
            # No rank has failed; but all would wait for ever.
            self._note({"by": None, "reason": f"{self.own_name} {trouble}."})

    def _look_for_lone_collective(self, peers: Peers) -> None:
        mine = self.activity()
        reason = self._lone.look(mine, peers.answers, peers.counts, self.name_of)
        if reason is not None:
            if self._note({"by": None, "reason": reason}):
                print_at_once(reason)
        elif mine["collective"]:
            peers.ask()

    def end_in_order(self) -> None:
        """Called when all ranks know that the run ends because of a SIGTERM: from now on, they may
        wait for a checkpoint on a slow disk, also if a launcher repeats the signal.
        """
        self._signals.end_in_order()

    def _hear_signal(self, number: int) -> None:
        if self._peers is not None and self._signals.hear(number, time.monotonic()):
            self._peers.interval = min(self._peers.interval, LOOKS_EVERY_SECONDS)
            self._peers.ask()

    def _handle_signal(self, peers: Peers) -> None:
        if self._signals.number is None:
            return
        num_done = sum(peers.counts.values()) + self._count()
        ending = self._signals.look(
            self.waits, self.activity(), peers.answers, num_done, self.name_of, time.monotonic()
        )
        peers.ask()
        if ending is None:
            return
        reason, self._failure = ending
        if self._note({"by": self._rank, "reason": reason}):
            print_at_once(reason)
        self._is_over = True
        self._end_waits()

    def _hear(self, entry: dict[str, Any]) -> None:
        # With a delay: if all ranks find the same mistake, each should raise the error itself.
        self._note(entry)

    def _lose(self, ranks: list[int], how: str) -> None:
        names = [self.name_of(rank) for rank in ranks]
        if self._peers is not None:
            # A process that was stopped continues, learns that it counts as gone, and ends in
            # order. One that is stuck does not react to a launcher's SIGTERM either, for which
            # Python has a handler, and a launcher waits longer.
            self._peers.resume_processes(ranks)
            self._peers.end_processes(ranks, _GRACE_SECONDS / 2)
        verb = "" if how.startswith("ended") else "is " if len(ranks) == 1 else "are "
        listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
        reason = f"{capitalised(listed)} {verb}{how}."
        if self.lost_at is None:
            self.lost_at = time.monotonic()
        self.give_up()
        if not self._note({"by": None, "reason": reason}):
            return
        self._is_over = True
        others = self._peers.neighbours - set(ranks) if self._peers is not None else set()
        if self.is_running and all(rank > self._rank for rank in others):
            # Once on each host, and at once: a launcher may end this process before it raises the
            # error.
            print_at_once(reason)
        self._end_waits()

    def _tick(self, peers: Peers) -> None:
        """Ends this process if its own thread does not notice that the run is over: its current
        call may never return.
        """
        if self._is_over:
            # Also of other threads, which may have started to wait since the last time.
            interrupt_waits()
        if not self.is_running or self._has_noticed:
            return
        if not self._is_known.is_set():
            with suppress(Exception):
                self._look_for_stalls(peers)
            with suppress(Exception):
                self._look_for_trouble()
            with suppress(Exception):
                self._look_for_lone_collective(peers)
            with suppress(Exception):
                self._handle_signal(peers)
            return
        since = time.monotonic() - self._known_at
        if not self._is_over and since > _RESPITE_SECONDS:
            self._is_over = True
            self._end_waits()
        grace = _GRACE_SECONDS if self._signals.number is None else _RESPITE_SECONDS
        if since < grace:
            return
        frame = sys._current_frames().get(self._owner)
        stack = "".join(traceback.format_stack(frame)[-6:]) if frame is not None else ""
        assert self._entry is not None
        message = (
            f"{self.own_name} ends its process, as it did not react for"
            f" {grace:g} s to this: {self._entry['reason']}\n\nIt was at\n{stack}"
        )
        print_at_once(message)
        os._exit(1)

    def _end_waits(self) -> None:
        self.interrupt()
        interrupt_waits()

    # --- the reason ---

    def read(self, patience: float | None = None) -> str | None:
        """The first failure's reason, if it was another rank's.

        Args:
            patience: how many seconds to wait for it; by default as long as the heartbeats of all
                ranks may take.
        """
        if self._peers is None:
            return None
        self._is_known.wait(self._timeout * 1.5 if patience is None else patience)
        entry = self._entry
        if entry is None or entry["by"] == self._rank:
            return None
        return str(entry["reason"])

    @contextmanager
    def watched(self, peer: int | None = None) -> Iterator[None]:
        """Context for communication alone, in which a broken connection is replaced by its reason.

        Args:
            peer: the rank at the other end; ``None`` where there are several.

        Raises:
            StageFailedError: another rank failed, or ended without an error message.
            BaseException: the error of a thread of this rank.
        """
        if self._failure is not None:
            self._has_noticed |= threading.get_ident() == self._owner
            raise self._failure
        if self._is_over:
            self._raise(self.read(0.0))
        is_owner = threading.get_ident() == self._owner
        if is_owner:
            self.waits = (peer, time.monotonic())
        try:
            yield
        except RuntimeError as error:
            if self._failure is not None:
                self._has_noticed |= is_owner
                raise self._failure from None
            if isinstance(error, PipeShiftError):
                raise
            self._raise(self.read())
            # It is alive, or has ended in order while this rank still waits for it.
            name = "another rank" if peer is None else self.name_of(peer)
            reason = (
                f"The connection of {self.name_of(self._rank)} to {name} broke, and no rank is"
                f" known to have failed ({error}). Look at what the other ranks have printed."
            )
            self._note({"by": self._rank, "reason": reason})
            raise StageFailedError(reason) from error
        finally:
            if is_owner:
                self.waits = None

    def activity(self) -> dict[str, Any]:
        """The activity of this rank's own thread (see
        :func:`~lightning_pipeshift.runtime.liveness.stalls.activity`), and the rank that it waits
        for: -1 for several, ``None`` if it does not wait.
        """
        waits = self.waits
        whom = None if waits is None else -1 if waits[0] is None else waits[0]
        found = {**activity(self._owner), "waits": whom}
        return {**found, "num_collectives": num_collectives()}

    def _raise(self, reason: str | None) -> None:
        if reason is not None:
            if threading.get_ident() == self._owner:
                self._has_noticed = True
            raise StageFailedError(reason) from None
