"""Detects within seconds that another rank is gone, by heartbeats on a connection between every two
ranks.

The connections that training uses cannot detect it: they are silent while stages compute, and the
kernel takes about 15 minutes to give up a connection to a host that does not answer (tcp(7),
``tcp_retries2``). A thread sends and reads here, so a rank counts as gone if its process has ended,
is stopped, keeps Python's lock for too long, or cannot be reached. A rank whose Python runs but
whose step makes no progress is alive: see :mod:`~lightning_pipeshift.runtime.liveness.stalls`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import selectors
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

from lightning_pipeshift.runtime.comm.mesh import Mesh
from lightning_pipeshift.runtime.comm.sockets import Opened

_HEADER: Final = struct.Struct("!BI")
_BEAT: Final = struct.Struct("!dQ")
_MOST_BYTES: Final = 1 << 20
# A heartbeat is skipped if the connection has not even sent the earlier ones.
_MOST_UNSENT_BYTES: Final = 1 << 12
_POLL_SECONDS: Final = 0.05


class MessageKind(IntEnum):
    """The kind of a message."""

    BEAT = 0
    """The sender is alive."""
    FAILURE = 1
    """The run has failed, and the reason."""
    QUESTION = 2
    """Asks for the receiver's current activity."""
    ANSWER = 3
    """The sender's current activity."""
    PAUSES = 4
    """The sender's run is over: its process may end without having failed."""
    RESUMES = 5
    """The sender starts another run."""


@dataclass
class _Peer:
    rank: int
    connection: socket.socket
    heard_at: float
    unread: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    hears_after: float = 0.0
    """For how long the peer has not heard this rank, according to its last message."""
    count: int = 0
    is_open: bool = True
    is_paused: bool = False
    runs: int = 0
    """How many runs of the peer are over."""
    is_lost: bool = False


class Peers:
    """This rank's connections to all others, and the thread that serves them.

    Args:
        mesh: taken over.
        timeout: after how many seconds of silence a rank is gone.
        on_failure: called in the thread, with another rank's announcement.
        on_lost: called in the thread, with the ranks that are gone and how that was noticed.
        describe: returns this rank's current activity; called in the thread.
        count: returns the number of actions that this rank has completed.
        on_tick: called in the thread every :attr:`interval`, with this object.
        on_signal: called in the thread, with the number of a signal of :meth:`hear_signals`.
    """

    def __init__(
        self,
        mesh: Mesh,
        timeout: float,
        on_failure: Callable[[dict[str, Any]], None],
        on_lost: Callable[[list[int], str], None],
        describe: Callable[[], str] = str,
        count: Callable[[], int] = int,
        on_tick: Callable[[Peers], None] = lambda _: None,
        on_signal: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.timeout = timeout
        self.answers: dict[int, str] = {}
        """The other ranks' answers to :meth:`ask`, by rank."""
        self.interval = min(1.0, timeout / 10)
        """The seconds between two heartbeats, and between two calls of ``on_tick``."""
        self._on_failure, self._on_lost, self._on_tick = on_failure, on_lost, on_tick
        self._describe, self._count, self._on_signal = describe, count, on_signal
        self._hears_signals = False
        now = time.monotonic()
        self._awake_since = now
        self._processes = mesh.processes
        # The time by which the processes of ranks must have ended.
        self._deadlines: dict[int, float] = {}
        self._peers = {
            rank: _Peer(rank, connection, now)
            for rank, connection in sorted(mesh.connections.items())
        }
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._waking = socket.socketpair()
        for each in self._waking:
            each.setblocking(False)
        self._selector.register(self._waking[1], selectors.EVENT_READ)
        for peer in self._peers.values():
            peer.connection.setblocking(False)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._is_closing = threading.Event()
        self._is_paused = False
        self._runs = 0
        self.sockets: Opened = frozenset(
            (each.fileno(), os.fstat(each.fileno()).st_ino)
            for each in (*mesh.connections.values(), *self._waking)
        )
        _ALL.add(self)
        self._thread = threading.Thread(target=self._serve, name="peers", daemon=True)
        self._thread.start()

    # --- for other threads ---

    def announce(self, entry: Mapping[str, Any]) -> None:
        """Tells all other ranks that the run has failed."""
        self._send_to(self._peers.values(), MessageKind.FAILURE, json.dumps(entry).encode())

    def ask(self) -> None:
        """Asks all other ranks for their current activity; the answers arrive in
        :attr:`answers`.
        """
        self.answers.clear()
        self._send_to(self._peers.values(), MessageKind.QUESTION, b"")

    @property
    def counts(self) -> dict[int, int]:
        """The number of actions that each connected rank had completed at its last message."""
        return {peer.rank: peer.count for peer in self._peers.values() if peer.is_open}

    def hear_signals(self) -> None:
        """Makes the thread hear the signals that this process handles in Python, even while its
        main thread, which handles them, waits outside of Python. Only there for the main thread,
        and unless other code (asyncio) listens to them in the same way.
        """
        if threading.current_thread() is threading.main_thread() and not self._hears_signals:
            before = signal.set_wakeup_fd(self._waking[0].fileno(), warn_on_full_buffer=False)
            self._hears_signals = before == -1
            if before != -1:
                signal.set_wakeup_fd(before)

    def _stop_hearing(self) -> None:
        if threading.current_thread() is threading.main_thread() and self._hears_signals:
            self._hears_signals = False
            signal.set_wakeup_fd(-1)

    def pause(self) -> None:
        """Tells the other ranks that this rank's run is over."""
        if not self._is_paused:
            self._is_paused, self._runs = True, self._runs + 1
            self._send_to(self._peers.values(), MessageKind.PAUSES, b"")

    def resume(self) -> None:
        """Tells the other ranks that this rank starts another run."""
        self._is_paused = False
        self._send_to(self._peers.values(), MessageKind.RESUMES, b"")

    @property
    def neighbours(self) -> set[int]:
        """The other ranks on this host."""
        return set(self._processes)

    def close(self, patience: float = 2.0) -> None:
        """Announces that this rank's run is over, and ends the thread, after the processes that
        :meth:`end_processes` had to end.

        Args:
            patience: for how many seconds at most it tries to deliver unsent messages.
        """
        if self._is_closing.is_set():
            return
        self._stop_hearing()
        self.pause()
        deadline = time.monotonic() + patience
        while self._thread.is_alive() and threading.current_thread() is not self._thread:
            with self._lock:
                is_sent = not any(peer.unsent for peer in self._peers.values() if peer.is_open)
            if not self._deadlines and (is_sent or time.monotonic() > deadline):
                break
            time.sleep(_POLL_SECONDS / 5)
        self._is_closing.set()
        self._rouse()
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)
        _ALL.discard(self)

    def resume_processes(self, ranks: Iterable[int]) -> None:
        """Continues stopped processes of those ranks that are on this host."""
        self._signal(ranks, "SIGCONT")

    def end_processes(self, ranks: Iterable[int], patience: float) -> None:
        """Kills the processes of those ranks that are on this host, unless they end by themselves.

        Args:
            ranks: of which the processes are to end.
            patience: for how many seconds at most they may continue.
        """
        deadline = time.monotonic() + patience
        self._deadlines.update((rank, deadline) for rank in self._processes.keys() & set(ranks))

    def _signal(self, ranks: Iterable[int], name: str) -> None:
        # Only Linux has file descriptors of processes, and so knows any.
        for rank in ranks:
            if rank in self._processes:
                with suppress(OSError):
                    signal.pidfd_send_signal(self._processes[rank], getattr(signal, name))

    def forget(self) -> None:
        """Closes all connections: at the end of the thread, and in a forked process, whose copies
        would keep a connection open after its rank has died.
        """
        # Without the lock: the thread that may hold it does not exist in a forked process.
        self._stop_hearing()
        self._selector.close()
        # Python writes signals to that file, if it could not be told to stop.
        waking = () if self._hears_signals else self._waking
        for each in (*(peer.connection for peer in self._peers.values()), *waking):
            each.close()
        for process in self._processes.values():
            os.close(process)
        self._processes = {}

    def _send_to(self, peers: Iterable[_Peer], kind: MessageKind, body: bytes) -> None:
        with self._lock:
            for peer in peers:
                if peer.is_open:
                    peer.unsent += _HEADER.pack(kind, len(body)) + body
        if threading.current_thread() is not self._thread:
            self._rouse()

    def _rouse(self) -> None:
        with suppress(OSError):
            self._waking[0].send(b"\0")

    # --- the thread ---

    def _serve(self) -> None:
        woke = beats_at = time.monotonic()
        try:
            while not self._is_closing.is_set():
                wait = min(max(0.0, beats_at - time.monotonic()), self.interval)
                ready = self._selector.select(wait)
                now = time.monotonic()
                beats_at = min(beats_at, now + self.interval)
                # This process itself was stopped, or was not scheduled: the other ranks were not
                # silent, but this one has not listened.
                was_away = now - woke > self.interval + self.timeout / 3
                woke = now
                for key, events in ready:
                    if key.data is None:
                        with suppress(OSError):
                            for number in filter(None, self._waking[1].recv(4096)):
                                self._on_signal(number)
                    elif events & selectors.EVENT_READ:
                        self._read(key.data, now)
                if was_away:
                    self._awake_since = now
                    for peer in self._peers.values():
                        peer.heard_at = now
                if now >= beats_at:
                    beats_at = now + self.interval
                    self._beat(now)
                    self._on_tick(self)
                for peer in self._peers.values():
                    self._write(peer)
                self._look_for_ended()
                self._look_for_lost(now)
                self._kill_overdue(now)
        finally:
            self.forget()

    def _kill_overdue(self, now: float) -> None:
        for rank, deadline in list(self._deadlines.items()):
            ended = select.poll()
            ended.register(self._processes[rank], select.POLLIN)
            if now >= deadline:
                self._signal([rank], "SIGKILL")
            elif not ended.poll(0):
                continue
            del self._deadlines[rank]

    def _beat(self, now: float) -> None:
        for peer in self._peers.values():
            if peer.is_open and len(peer.unsent) < _MOST_UNSENT_BYTES:
                body = _BEAT.pack(now - peer.heard_at, self._count())
                self._send_to([peer], MessageKind.BEAT, body)

    def _write(self, peer: _Peer) -> None:
        with self._lock:
            if not peer.is_open:
                return
            try:
                while peer.unsent:
                    del peer.unsent[: peer.connection.send(peer.unsent)]
            except BlockingIOError:
                pass
            except OSError:
                # The end of the connection is noticed by reading, after the last message.
                peer.unsent.clear()
            # The rest is sent with the next heartbeat, or at once if the socket's buffer has space.
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
            self._selector.modify(peer.connection, events, peer)

    def _read(self, peer: _Peer, now: float) -> None:
        is_over = False
        try:
            while not is_over:
                received = peer.connection.recv(1 << 16)
                is_over = not received
                peer.unread += received
                peer.heard_at = now
        except BlockingIOError:
            pass
        except OSError:
            is_over = True
        while peer.is_open and len(peer.unread) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(peer.unread)
            if length > _MOST_BYTES:
                is_over = True
                break
            if len(peer.unread) < _HEADER.size + length:
                break
            body = bytes(peer.unread[_HEADER.size : _HEADER.size + length])
            del peer.unread[: _HEADER.size + length]
            self._take(peer, kind, body)
        if is_over and peer.is_open:
            self._shut(peer)

    def _look_for_ended(self) -> None:
        """Marks ranks whose connection is closed as gone, unless their run, and all runs that this
        rank has started, are over for them.
        """
        for peer in self._peers.values():
            if peer.is_open or peer.is_lost:
                continue
            if not peer.is_paused:
                peer.is_lost = True
                self._on_lost([peer.rank], _CLOSED)
            elif not self._is_paused and peer.runs <= self._runs:
                peer.is_lost = True
                self._on_lost([peer.rank], _ENDED)

    def _take(self, peer: _Peer, kind: int, body: bytes) -> None:
        if kind == MessageKind.BEAT:
            peer.hears_after, peer.count = _BEAT.unpack(body)
        elif kind == MessageKind.FAILURE:
            self._on_failure(json.loads(body))
        elif kind == MessageKind.QUESTION:
            self._send_to([peer], MessageKind.ANSWER, self._describe().encode()[:_MOST_BYTES])
        elif kind == MessageKind.ANSWER:
            self.answers[peer.rank] = body.decode(errors="replace")
        elif kind == MessageKind.PAUSES:
            peer.is_paused, peer.runs = True, peer.runs + 1
        elif kind == MessageKind.RESUMES:
            peer.is_paused = False

    def _shut(self, peer: _Peer) -> None:
        with self._lock:
            peer.is_open = False
            self._selector.unregister(peer.connection)
            peer.connection.close()

    def _look_for_lost(self, now: float) -> None:
        """Marks ranks as gone if one direction is silent: if packets are lost in one direction
        only, the rank at the other end still sends, and reports that it does not hear this one.
        """

        # Reports about a time in which this process was stopped are no sign of lost packets.
        listens = now - self._awake_since > self.timeout

        def silence(peer: _Peer) -> float:
            return max(now - peer.heard_at, peer.hears_after if listens else 0.0)

        around = [peer for peer in self._peers.values() if peer.is_open and not peer.is_lost]
        if not any(silence(peer) > self.timeout for peer in around):
            return
        # The ranks of a host become silent together, except for the timing of their heartbeats.
        lost = [peer for peer in around if silence(peer) > self.timeout - 3 * self.interval]
        longest = max(map(silence, lost))
        for peer in lost:
            # It stays connected: announcements reach it if it continues.
            peer.is_lost = True
        self._on_lost([peer.rank for peer in lost], _SILENT.format(longest, self.timeout))


_CLOSED: Final = (
    "ended without an error message (killed, out of memory, or its host is gone): its connection "
    "closed. Look at the end of that rank's own output"
)
_ENDED: Final = "ended between two runs: its connection closed"
_SILENT: Final = (
    "gone: nothing was heard for {:.0f} s (`heartbeat_timeout` is {:g} s). The host cannot be"
    " reached, or the process is stopped, or one call in it keeps Python's lock"
)

# A forked process inherits the connections of all ranks.
_ALL: Final[weakref.WeakSet[Peers]] = weakref.WeakSet()


def _forget_all() -> None:
    for peers in list(_ALL):
        peers.forget()
    _ALL.clear()


def _close_all() -> None:
    for peers in list(_ALL):
        peers.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
# The process ends in order.
atexit.register(_close_all)
