"""Lets another process request moves from a run and read the run's status, through files in a
folder.

Files, because they need no port and no password beyond the folder's permissions, and work wherever
the folder is mounted. The first rank reads and writes them, in a thread concurrently with the
steps; the other ranks learn of a request from a sum over all ranks that each step computes anyway.
Whatever is in the folder, the run continues: a request is a small file of the run's own user.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, Final

from pydantic import Field

from lightning_pipeshift.documents import Document
from lightning_pipeshift.errors import PipeShiftError, PlanError, explained
from lightning_pipeshift.files import parse_json, read_text, remove_leftovers, write_text
from lightning_pipeshift.plan.document.moves import Move

FOLDER: Final = "pipeshift"
"""The name of the files' folder, in the run's own folder."""

WITHOUT_LOGGER: Final = "lightning_logs"
"""The run's own folder, in the Trainer's ``default_root_dir``, if it has no logger: where Lightning
itself writes by default."""

STATUS: Final = "status.json"
_REQUEST, _ANSWER = "request", "answer"
_POLL_SECONDS: Final = 0.2
_MOST_BYTES: Final = 64 << 10
_MOST_IDS: Final = 1000
# A run ends even if a file system does not answer.
_CLOSE_SECONDS: Final = 5.0
_STATUS_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Request:
    """A request for moves.

    Args:
        id: identifies the answer.
        moves: carried out together.
    """

    id: str
    moves: tuple[Move, ...]

    def __str__(self) -> str:
        return explained(", ".join(_in_words(move) for move in self.moves))


@dataclass(frozen=True)
class _MoveEntry:
    layer: str
    stage: int
    virtual_machine: int | None = None


@dataclass(frozen=True)
class _RequestEntry:
    moves: Annotated[tuple[_MoveEntry, ...], Field(min_length=1)]


_REQUEST_DOCUMENT: Final = Document(_RequestEntry, "the request")


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    Args:
        is_done: whether the layers move.
        text: a message for the requester.
    """

    is_done: bool
    text: str


def _in_words(move: Move) -> str:
    where = "" if move.virtual_machine is None else f" of virtual machine {move.virtual_machine}"
    return f"the layer {move.layer!r} moves to stage {move.stage}{where}"


# --- on the side of the run ---


class ControlFiles:
    """The run's side; without a folder there are no requests."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._describe: Callable[[], dict[str, Any]] = dict
        self._requests: SimpleQueue[Request] = SimpleQueue()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        # Requests that were read; they are not read again if they could not be removed.
        self._known: set[str] = set()

    def open(self, folder: Path, describe: Callable[[], dict[str, Any]]) -> None:
        """Starts to look for requests, and to write the run's status.

        Args:
            folder: the run's own.
            describe: returns the status; called in a thread.
        """
        self._folder = folder / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._folder)
        # Requests to an earlier run in the same folder are not for this one.
        for kind in (_REQUEST, _ANSWER):
            for path in self._folder.glob(f"{kind}-*.json"):
                with suppress(OSError):
                    path.unlink()
                self._known.add(path.name)
        self._describe = describe
        self._is_over.clear()
        self._write_status()
        self._thread = threading.Thread(target=self._serve, name="outside", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops answering requests, and removes the status."""
        if self._thread is None:
            return
        self._is_over.set()
        self._thread.join(_CLOSE_SECONDS)
        self._thread = None

    @property
    def has_requests(self) -> bool:
        """Whether a request waits for its answer."""
        return not self._requests.empty()

    def take_requests(self) -> list[Request]:
        """Returns the requests that wait for an answer, oldest first."""
        return [self._requests.get() for _ in range(self._requests.qsize())]

    def carry_out(
        self,
        requests: Iterable[Request],
        when: str,
        migrate: Callable[[Iterable[Move]], object],
        messages: list[str],
    ) -> None:
        """Makes the moves that other processes ask for, and answers them.

        Args:
            requests: of the processes.
            when: the step from which they hold, for the answer.
            migrate: makes moves, or raises a PipeShiftError.
            messages: gets what the user is told.
        """
        for request in requests:
            try:
                migrate(request.moves)
                answer = Answer(True, f"{request}, {when} on")
            except PipeShiftError as error:
                answer = Answer(False, f"nothing moves: {error}")
            messages.append(f"asked from outside: {answer.text}.")
            self.answer(request, answer)

    def answer(self, request: Request, answer: Answer) -> None:
        """Writes the answer to a request."""
        # The run must not end because the folder is unavailable for a while, or full.
        with suppress(OSError):
            if self._folder is not None:
                _write(self._folder / f"{_ANSWER}-{request.id}.json", asdict(answer))

    def _serve(self) -> None:
        shown = time.monotonic()
        while not self._is_over.wait(_POLL_SECONDS):
            with suppress(OSError):
                self._read_requests()
                if time.monotonic() - shown > _STATUS_SECONDS:
                    shown = time.monotonic()
                    self._write_status()
        with suppress(OSError):
            # Requests that arrived since then: their senders wait for an answer.
            self._read_requests()
        for request in self.take_requests():
            self.answer(request, Answer(False, "nothing moves: the run has ended"))
        assert self._folder is not None
        with suppress(OSError):
            (self._folder / STATUS).unlink()
            self._folder.rmdir()  # unless an answer is still to be read

    def _read_requests(self) -> None:
        assert self._folder is not None
        for path in sorted(self._folder.glob(f"{_REQUEST}-*.json")):
            if path.name in self._known or len(self._known) > _MOST_IDS:
                continue
            id = path.stem.removeprefix(f"{_REQUEST}-")
            try:
                request = Request(id, moves_of(path))
            except PlanError as error:
                self.answer(Request(id, ()), Answer(False, f"not understood: {error}"))
            else:
                self._requests.put(request)
            try:
                path.unlink(missing_ok=True)
            except OSError:
                self._known.add(path.name)

    def _write_status(self) -> None:
        assert self._folder is not None
        status = {**self._describe(), "host": socket.gethostname(), "process": os.getpid()}
        _write(self._folder / STATUS, {**status, "time": time.time()})


def moves_of(path: Path) -> tuple[Move, ...]:
    try:
        content = parse_json(read_text(path, _MOST_BYTES, only_own=True))
    except FileNotFoundError:
        raise PlanError("it is gone") from None
    except OSError as error:
        raise PlanError(f"it cannot be read: {error}") from None
    except ValueError as error:
        raise PlanError(f"it is not valid JSON: {error}") from None
    moves = _REQUEST_DOCUMENT.read(content).moves
    return tuple(Move(**asdict(move)) for move in moves)


def _write(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content))


# --- on the side of the requester ---


def ask(folder: Path, moves: Iterable[Move], timeout: float) -> Answer | None:
    """Requests moves from a run, and waits for its answer.

    Args:
        folder: the run's :data:`FOLDER`.
        moves: carried out together.
        timeout: how many seconds to wait.

    Returns:
        ``None`` if none came in time: the run will handle the request when its next step ends.
    """
    id = f"{time.time_ns()}-{uuid.uuid4().hex[:8]}"
    entries = []
    for move in moves:
        machine = move.virtual_machine
        where = {} if machine is None else {"virtual_machine": machine}
        entries.append({"layer": move.layer, "stage": move.stage, **where})
    _write(folder / f"{_REQUEST}-{id}.json", {"moves": entries})
    answer = folder / f"{_ANSWER}-{id}.json"
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if answer.exists():
            found = parse_json(read_text(answer, _MOST_BYTES))
            answer.unlink(missing_ok=True)
            return Answer(bool(found["is_done"]), str(found["text"]))
        time.sleep(_POLL_SECONDS / 4)
    return None
