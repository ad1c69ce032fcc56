"""Where ranks find each other at the start of a job: torch's store at the first rank's address.

Until every two ranks are connected, no heartbeat tells that one is gone. A rank that has come shows
in the store that it is alive, and one whose sign stops has failed: all end at once. A rank that has
not come yet may be late, so the others wait for it, say so, and end at the timeout. Every wait is
made of short ones, so that signals are handled.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Final

import torch.distributed as dist

from lightning_pipeshift.errors import ConfigurationError, StageFailedError
from lightning_pipeshift.runtime.comm.sockets import give_up_after, open_sockets
from lightning_pipeshift.text import print_at_once

GONE_SECONDS: Final = 10.0
"""After how many seconds without an answer a rank that has already come is gone."""

LAUNCHER: Final = "PIPESHIFT_LAUNCHER"
"""The environment variable with the number of the rank's process that has started this one."""

_FAILED: Final = "failed"
_ANSWER_SECONDS: Final = 5.0
_SAYS_AFTER_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.02


class Waiting:
    """A wait for ranks that may be late: says once whom it waits for.

    Args:
        timeout: in seconds.
        where: where the ranks are to meet.
    """

    def __init__(self, timeout: float, where: str) -> None:
        self._timeout, self._where = timeout, where
        self._began = time.monotonic()
        self._has_said = False

    def pause(self, who: str, why: str = "", is_said: bool = True) -> None:
        """Waits for a moment. Raises StageFailedError at the timeout.

        Args:
            who: waits for whom.
            why: what is known about them.
            is_said: whether to say so after a while.
        """
        launcher = os.environ.get(LAUNCHER)
        if launcher is not None and os.name == "posix" and os.getppid() != int(launcher):
            raise StageFailedError("The rank that has started this one has ended.")
        seconds = time.monotonic() - self._began
        if seconds > self._timeout:
            raise StageFailedError(
                f"{who} did not connect at {self._where} within {self._timeout:g} s{why}. Look at"
                " what these processes printed; every rank needs the same MASTER_ADDR and"
                " MASTER_PORT."
            )
        if seconds > _SAYS_AFTER_SECONDS and is_said and not self._has_said:
            self._has_said = True
            print_at_once(
                f"{who} has not connected at {self._where} for {seconds:.0f} s{why}. The others"
                f" wait, {self._timeout:g} s at most (`Communication(timeout=...)`)."
            )
        time.sleep(_POLL_SECONDS)


def store_of_this_start(
    rank: int, world_size: int, address: str, port: int, timeout: timedelta
) -> dist.Store:
    """Waits until all ranks have come, and returns a store without entries of earlier starts.

    Under torchrun the agent gives the same store to the ranks of every restart, and without
    torchrun a process that starts a second run, after one has failed, finds its first store. Old
    entries in it (addresses, a failure's reason) would look like those of living ranks.

    Args:
        rank: that of this process.
        world_size: the number of ranks.
        address: that of the store.
        port: likewise.
        timeout: how long to wait for the other ranks.

    Raises:
        ConfigurationError: another program uses the port, or the address is not the first rank's.
        StageFailedError: a rank has failed, or has not come.
    """
    where = f"{address}, port {port}"
    waiting = Waiting(timeout.total_seconds(), where)
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    troubled_since: float | None = None
    while True:
        began = time.monotonic()
        if not is_master:
            _await_listener(address, port, waiting, troubled_since)
            began = time.monotonic()
        before = open_sockets()
        try:
            store = _connected(
                partial(
                    dist.TCPStore,
                    "localhost" if is_master else address,
                    port,
                    world_size,
                    is_master=is_master,
                    timeout=min(timeout, timedelta(seconds=_ANSWER_SECONDS)),
                    wait_for_workers=False,
                    multi_tenant=True,
                )
            )
            give_up_after(open_sockets() - before, _ANSWER_SECONDS)
            if is_master:
                _await_listener(address, port, waiting, began)
            store.set_timeout(timeout)
            name = agreed_name(store, rank, world_size, waiting)
            return dist.PrefixStore(f"pipeshift/{name}", store)
        except dist.DistError as error:
            if is_master and "EADDRINUSE" in str(error):
                raise ConfigurationError(
                    f"The ranks are to meet at {where}, but another program uses that port. Set the"
                    " environment variable MASTER_PORT to a free one, the same for all ranks."
                ) from None
            # This store may be that of an earlier start of rank 0, which has just ended.
            troubled_since = began if troubled_since is None else troubled_since
            # Before the check: the last attempt begins in time.
            time.sleep(0.1)
            if time.monotonic() - troubled_since >= GONE_SECONDS:
                raise _no_store(where, error) from None


def _connected(make: Callable[[], dist.Store]) -> dist.Store:
    """Calls a function that connects to a store, and returns the store. It is called in a thread,
    as torch waits for ever for a program that listens and does not answer.

    Raises:
        DistNetworkError: it has not returned in time.
    """
    made: Future[dist.Store] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=run, name="store", daemon=True).start()
    try:
        return made.result(GONE_SECONDS)
    except FutureTimeout:
        raise dist.DistNetworkError("it does not answer as a store does") from None


def _no_store(where: str, error: Exception | str) -> StageFailedError:
    return StageFailedError(
        f"Rank 0 does not answer at {where} ({str(error).splitlines()[0]}). Look"
        " at what rank 0 has printed; MASTER_ADDR has to be an address of its host, and MASTER_PORT"
        " a port that no other program uses."
    )


def _await_listener(
    address: str, port: int, waiting: Waiting, troubled_since: float | None
) -> None:
    """Waits until the first rank listens. A store that is refused pauses for several hundred
    milliseconds before it tries again, and ranks that start together often come before the first.
    A first rank whose host refuses, or is not known yet, is late; one whose host does not answer
    has failed.

    Args:
        address: where it listens.
        port: likewise.
        waiting: the wait.
        troubled_since: since when a first rank that had come has not answered.
    """
    while True:
        began = time.monotonic()
        try:
            socket.create_connection((address, port), timeout=_ANSWER_SECONDS).close()
            return
        except OSError as error:
            # A name may be made known only when its host starts.
            is_late = isinstance(error, ConnectionRefusedError | socket.gaierror)
            if troubled_since is None and not is_late:
                troubled_since = began
            if troubled_since is not None and time.monotonic() - troubled_since > GONE_SECONDS:
                raise _no_store(f"{address}, port {port}", error) from None
            waiting.pause("Rank 0", f" ({error})")


def agreed_name(store: dist.Store, rank: int, world_size: int, waiting: Waiting) -> str:
    """Returns a new name from rank 0, when all ranks have it. Rank 0 answers every request for the
    name, and waits until every rank has acknowledged it; old requests of dead ranks are never
    acknowledged.
    """
    own = uuid.uuid4().hex
    if not rank:
        with telling(dist.PrefixStore(f"pipeshift/{own}", store)) as here:
            _gather(store, here, own, world_size, waiting)
        return own
    store.set(f"pipeshift/asks/{rank}", own)
    while not store.check([f"pipeshift/answer/{own}"]):
        waiting.pause("Rank 0")
    answer: str = store.get(f"pipeshift/answer/{own}").decode()
    store.set(f"pipeshift/taken/{own}/{answer}", "0")
    with telling(dist.PrefixStore(f"pipeshift/{answer}", store)) as here:
        signed_at = time.monotonic()
        while not is_there(here, "complete"):
            if time.monotonic() - signed_at > 1.0:
                signed_at = time.monotonic()
                store.set(f"pipeshift/taken/{own}/{answer}", str(signed_at))
            waiting.pause("Another rank", is_said=False)  # rank 0 says which
    return answer


def _gather(
    store: dist.Store, here: dist.Store, own: str, world_size: int, waiting: Waiting
) -> None:
    """Waits on rank 0 until all ranks have acknowledged the name, and are still there."""
    signs: dict[int, tuple[bytes, float]] = {}
    while missing := [other for other in range(1, world_size) if other not in signs]:
        for other in range(1, world_size):
            if not store.check([f"pipeshift/asks/{other}"]):
                continue
            asks = store.get(f"pipeshift/asks/{other}").decode()
            store.set(f"pipeshift/answer/{asks}", own)
            if not store.check([f"pipeshift/taken/{asks}/{own}"]):
                continue
            sign = store.get(f"pipeshift/taken/{asks}/{own}")
            if other not in signs or signs[other][0] != sign:
                signs[other] = sign, time.monotonic()
            elif time.monotonic() - signs[other][1] > GONE_SECONDS:
                raise StageFailedError(
                    f"Rank {other} ended, or stopped, before all ranks were connected"
                    f" ({_listed(missing)} had not come yet). Look at what it has printed."
                )
        is_there(here, "complete")
        waiting.pause(_listed(missing))
    here.set("complete", "")


def _listed(ranks: Sequence[int]) -> str:
    return f"Rank(s) {', '.join(map(str, ranks))}"


@contextmanager
def telling(store: dist.Store) -> Iterator[dist.Store]:
    """Context of a rank that other ranks wait for: its error ends their waits, too.

    Args:
        store: of this start; returned.
    """
    try:
        yield store
    except BaseException as error:
        with suppress(RuntimeError):
            if not store.check([_FAILED]):
                store.set(_FAILED, str(error) or type(error).__name__)
        raise


def is_there(store: dist.Store, key: str) -> bool:
    """Whether a key is in the store. Raises StageFailedError if a rank has failed."""
    if store.check([_FAILED]):
        raise StageFailedError(store.get(_FAILED).decode())
    return bool(store.check([key]))


def read_when_there(store: dist.Store, key: str, whose: int) -> str:
    """A value that another rank, which has come, sets soon. Raises StageFailedError if it does not,
    or if a rank has failed.

    Args:
        store: of this start.
        key: the value's.
        whose: the rank.
    """
    deadline = time.monotonic() + GONE_SECONDS
    while not is_there(store, key):
        if time.monotonic() > deadline:
            raise StageFailedError(
                f"Rank {whose} ended, or stopped, while the ranks connected. Look at what it has"
                " printed."
            )
        time.sleep(_POLL_SECONDS)
    return str(store.get(key).decode())
