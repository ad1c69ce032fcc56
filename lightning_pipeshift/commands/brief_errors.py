"""Errors as the command shows them: the message of a PipeShiftError, without a traceback."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_pipeshift import errors
from lightning_pipeshift.errors import PipeShiftError

_DEBUG = "PIPESHIFT_DEBUG"


@contextmanager
def brief_errors(is_first: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Context in which an error of PipeShift's own is printed without a traceback, by the first
    rank, and ends the process with exit code 2. With ``--debug`` among the arguments, which is
    taken out, every rank shows all of it.

    Args:
        is_first: returns whether this is the first rank.
    """
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        # For the processes that Lightning launches, too.
        os.environ[_DEBUG] = "1"
    try:
        yield
    except PipeShiftError as error:
        if os.environ.get(_DEBUG):
            raise
        if is_first():
            print(f"pipeshift: error: {without_traceback(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def without_traceback(error: PipeShiftError) -> str:
    """The message of an error. Where it is another rank's that failed by an error of PipeShift's
    own, without the traceback that it brings along.
    """
    text = str(error)
    found = re.search(r" failed first: (\w+): ", text)
    is_ours = found is not None and hasattr(errors, found[1])
    return text.partition("\n\nTraceback")[0] if is_ours else text
