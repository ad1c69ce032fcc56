"""Ends the run on every rank when one fails, with the first failure's reason.

The failing rank writes its reason on a board that all ranks can read, and closes its connections. A
rank that waits on one of these gets an error at once, reads the board, and raises an error with
that reason instead of the broken connection.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_pipeshift.errors import StageFailedError

_KEY = "first"
_READ = "read"
# How long a rank whose connection broke waits for the reason.
_PATIENCE_SECONDS = 3.0
# How long it waits where it does not know whose connection broke: who knows may be busy, hears of
# it late, and is patient then. So long does a rank that fails wait for its readers, too, who may be
# busy as well.
_LONG_PATIENCE_SECONDS = 15.0


class FailureBoard:
    """Where the first failure of a run is written.

    Args:
        store: the process group's key-value store.
        rank: this rank.
        world_size: how many ranks read the board.
        run: counts the runs in these processes.
        name_of: a rank's place in words.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        run: int,
        name_of: Callable[[int], str] = "rank {}".format,
    ) -> None:
        self.name_of = name_of
        # On rank 0 this object holds the board itself, which ends with it.
        self._server = store
        # A clone, because all stores built on one store share its timeout.
        self._store = dist.PrefixStore(f"pipeshift/failure/{run}", store.clone())
        self._store.set_timeout(timedelta(seconds=_PATIENCE_SECONDS))
        self._rank = rank
        self._has_signed = False
        self._world_size = world_size
        # The error that ended this rank, if it was raised in a thread.
        self._failure: BaseException | None = None

    @property
    def own_name(self) -> str:
        """This rank's place, at the beginning of a sentence."""
        return _capitalised(self.name_of(self._rank))

    def publish(self, where: str, error: BaseException) -> bool:
        """Writes down a failure, unless another came first; returns whether it was the first."""
        text = "".join(traceback.format_exception(error))
        reason = f"{where} failed first: {type(error).__name__}: {error}\n\n{text[-6000:]}"
        return self._write(reason, self._rank)

    def publish_beside(self, error: BaseException) -> None:
        """:meth:`publish` for a thread. This rank's next communication raises the error."""
        self._failure = error
        self.publish(self.own_name, error)

    def is_first(self, error: BaseException) -> bool:
        """Whether a thread has published it already."""
        return error is self._failure

    def _write(self, reason: str, failed: int | None) -> bool:
        entry = json.dumps({"rank": failed, "reason": reason})
        try:
            written = self._store.compare_set(_KEY, "", entry).decode()
            if written != entry:
                # This rank ends for a reason of its own, and will not read the board.
                self._sign()
        except Exception:
            # The store is gone, and with it the rank that kept it. The other ranks notice that by
            # themselves.
            return False
        return bool(written == entry)

    def _sign(self) -> None:
        """Notes, once, that this rank no longer needs the board."""
        if not self._has_signed:
            self._has_signed = True
            self._store.add(_READ, 1)

    def _sign_for_the_dead(self) -> None:
        with suppress(Exception):
            self._store.add(_READ, 1)

    def wait_for_readers(self) -> None:
        """Gives the other ranks time to read, as the board may end with this process."""
        deadline = time.monotonic() + _LONG_PATIENCE_SECONDS
        while time.monotonic() < deadline:
            try:
                if self._store.add(_READ, 0) >= self._world_size - 1:
                    return
            except Exception:
                return
            time.sleep(0.02)

    def read(self, patience: float = _PATIENCE_SECONDS) -> str | None:
        """The first failure's reason, if it was another rank's.

        Args:
            patience: how many seconds to wait for it.
        """
        try:
            deadline = time.monotonic() + patience
            while not self._store.check([_KEY]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.02)
            entry: dict[str, Any] = json.loads(self._store.get(_KEY))
            self._sign()
        except Exception:
            # Rank 0 keeps the board, and waits for its readers before it ends: it must have died.
            return self._ended_without_a_word(0)
        return None if entry["rank"] == self._rank else str(entry["reason"])

    def _ended_without_a_word(self, rank: int | None) -> str:
        name = "Another rank" if rank is None else _capitalised(self.name_of(rank))
        return (
            f"{name} ended without a word (killed, out of memory, or its host is gone): its"
            " connection closed. Look at the end of that rank's own output."
        )

    @contextmanager
    def watched(self, peer: int | None = None) -> Iterator[None]:
        """Context for communication alone, in which a broken connection is replaced by its reason.

        Args:
            peer: the rank at the other end; ``None`` where there are several.

        Raises:
            StageFailedError: another rank failed, or ended without a word.
            BaseException: what a thread of this rank has failed with.
        """
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except RuntimeError as error:
            if self._failure is not None:
                raise self._failure from None
            # A rank that knows which connection broke publishes that before this wait is over.
            reason = self.read(_LONG_PATIENCE_SECONDS if peer is None else _PATIENCE_SECONDS)
            if reason is not None:
                raise StageFailedError(reason) from None
            reason = self._ended_without_a_word(peer)
            # For ranks that wait for this one, and cannot know which rank it has waited for.
            if self._write(reason, peer) and peer is not None:
                self._sign_for_the_dead()
            raise StageFailedError(reason) from error


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
