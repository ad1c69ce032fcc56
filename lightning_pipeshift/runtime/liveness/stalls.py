"""Reports which rank the others wait for, when there has been no progress for a while.

A rank whose Python runs is alive (see :mod:`~lightning_pipeshift.runtime.liveness.peers`), whatever
its own thread does: an endless loop in user code, a file system that hangs, a batch that takes
minutes to make. This is reported, and nothing is ended. The activity of each rank is read from its
stack, so that the steps themselves have no overhead.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, Literal, TypeVar

import torch

from lightning_pipeshift.files import PACKAGE
from lightning_pipeshift.text import capitalised

F = TypeVar("F", bound=Callable[..., Any])

"""The number of seconds without a completed action on any rank after which a message is printed."""

STACKS: Final = "PIPESHIFT_STACKS"
"""The environment variable that makes every rank write its stacks to a file at a stall."""

# How long the first rank waits for the other ranks' answers.
_PATIENCE_SECONDS: Final = 3.0
_LIBRARIES: Final = tuple(
    {
        os.path.realpath(folder) + os.sep
        for folder in (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), *torch.__path__)
    }
)
_DISTRIBUTED: Final = "torch.distributed.distributed_c10d"
_OURS: Final = str(PACKAGE) + os.sep
# Asked for each frame of a stack, every second: each asks the operating system for each folder.
_real_path = functools.cache(os.path.realpath)


# By the code of a function.
_PURPOSES: dict[CodeType, str] = {}


def purpose(words: str) -> Callable[[F], F]:
    """Decorates a function in which ranks wait for each other.

    Args:
        words: what they wait for, as messages have it.
    """

    def note(function: F) -> F:
        _PURPOSES[function.__code__] = words
        return function

    return note


# By the code of a function: "action" or "layer", and how its variables tell which.
_TELLERS: dict[CodeType, tuple[str, Callable[[Mapping[str, Any]], str | None]]] = {}


def tells(
    what: Literal["action", "layer"], of: Callable[[Mapping[str, Any]], str | None]
) -> Callable[[F], F]:
    """Decorates a function that runs an action or a layer.

    Args:
        what: which of both.
        of: gets the function's variables; returns the words for messages, or ``None``.
    """

    def note(function: F) -> F:
        _TELLERS[function.__code__] = what, of
        return function

    return note


def activity(thread: int) -> dict[str, Any]:
    """The current activity of a thread of this process: the action, the layer, the line of the
    user's code, the :func:`purpose` of waiting, and the function of ``torch.distributed`` that the
    user's code has called, each ``None`` if there is none.

    Args:
        thread: its number.
    """
    told: dict[str, str | None] = {}
    at: str | None = None
    aim: str | None = None
    collective: str | None = None
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        if code in _TELLERS:
            what, of = _TELLERS[code]
            told[what] = told.get(what) or of(frame.f_locals)
        # The outermost: what the user's code has asked for.
        aim = _PURPOSES.get(code, aim)
        name = _real_path(code.co_filename)
        if at is None and collective != "" and frame.f_globals.get("__name__") == _DISTRIBUTED:
            collective = code.co_name
        if at is None and name.startswith(_OURS):
            collective = ""
        if at is None and not name.startswith((*_LIBRARIES, _OURS, "<")):
            at = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return {
        "action": told.get("action"),
        "layer": told.get("layer"),
        "at": at,
        "purpose": aim,
        "collective": collective or None,
    }


def print_stacks_on_a_signal() -> None:
    """Makes this process print the stacks of all threads when it gets SIGUSR2, even while it is
    stuck, unless the user's code handles that signal.
    """
    if hasattr(signal, "SIGUSR2") and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        # If stderr is no file, a signal handler cannot print to it.
        with suppress(AttributeError, OSError, ValueError):
            faulthandler.register(signal.SIGUSR2, all_threads=True)


def write_stacks(folder: Path, rank: int) -> None:
    """Appends the stacks of all threads to this rank's file in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"stacks-rank-{rank}.txt").open("a") as file:
        file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


class StallWatch:
    """Detects on the first rank that no rank completes anything.

    Args:
        timeout: seconds; 0: never.
        name_of: a rank's name in words.
        say: takes the message.
    """

    def __init__(
        self, timeout: float, name_of: Callable[[int], str], say: Callable[[str], None]
    ) -> None:
        self._timeout = timeout
        self._name_of = name_of
        self._say = say
        self._total = -1
        self._since = 0.0
        self._asked_at: float | None = None
        self._has_said = False

    def look(
        self,
        counts: Mapping[int, int],
        answers: Callable[[], Mapping[int, str]],
        ask: Callable[[], None],
        now: float,
    ) -> None:
        """Called about every second.

        Args:
            counts: the completed actions of each rank.
            answers: returns the answers of the ranks, by rank: an :func:`activity` with the rank
                that they wait for, if they wait (``"waits"``), as JSON.
            ask: asks for the answers.
            now: the time.
        """
        total = sum(counts.values())
        if total != self._total:
            if self._has_said:
                self._say(f"progress resumes, after {now - self._since:.0f} s.")
            self._total, self._since = total, now
            self._asked_at, self._has_said = None, False
        elif not self._timeout or self._has_said or now - self._since < self._timeout:
            return
        elif self._asked_at is None:
            self._asked_at = now
            ask()
        else:
            told = answers()
            if len(told) == len(counts) or now - self._asked_at > _PATIENCE_SECONDS:
                self._has_said = True
                found = {rank: json.loads(text) for rank, text in told.items() if text}
                self._say(
                    f"no rank has completed anything for {now - self._since:.0f} s."
                    f" {standstill_text(found, self._name_of)} {_ADVICE}"
                )


def standstill_text(found: Mapping[int, Mapping[str, Any]], name_of: Callable[[int], str]) -> str:
    """Describes what each rank waits for, and names the ranks that all others wait for.

    Args:
        found: an :func:`activity` of each rank, with the rank that it waits for.
        name_of: a rank's name in words.
    """
    waits = "; ".join(
        f"{name_of(rank)} waits for {_waiting_text(one, name_of)}"
        for rank, one in sorted(found.items())
        if one["waits"] is not None
    )
    waited_for = {rank: one for rank, one in found.items() if one["waits"] is None}
    if not waited_for:
        return f"All wait for each other: {waits}."
    text = ""
    for rank, one in sorted(waited_for.items()):
        doing = [one["action"], one["layer"] and f"in the layer {one['layer']!r}", one["at"]]
        where = ", ".join(filter(None, doing)) or "something outside of your code"
        text += f"{capitalised(name_of(rank))} is waited for; it is at {where}. "
    return f"{text}{capitalised(waits)}{'.' if waits else ''}".rstrip()


def _waiting_text(one: Mapping[str, Any], name_of: Callable[[int], str]) -> str:
    """For which rank a rank waits, for what, and the user's line that led there."""
    whom = "several ranks" if one["waits"] < 0 else name_of(one["waits"])
    doing = one["purpose"] if one["action"] is None else one["action"]
    return whom + (f", in {doing}" if doing else "") + (f" ({one['at']})" if one["at"] else "")


_ADVICE: Final = (
    "The run continues as soon as that rank does. With the environment variable "
    "PIPESHIFT_STACKS=1, every rank then writes its stacks to a file, and `kill -USR2` makes a "
    "process print its own; `stall_timeout` is the time until this message, in seconds."
)
