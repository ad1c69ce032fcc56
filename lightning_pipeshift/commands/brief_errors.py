"""How commands print errors: the message of a PipeShiftError, without a traceback."""

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
    """Context in which PipeShift's own errors are printed without a traceback, by the first rank,
    and end the process with exit code 2. With the argument ``--debug``, which is removed from the
    arguments, every rank prints the full error.

    Args:
        is_first: returns whether this is the first rank.
    """
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        # Also for the processes that Lightning launches.
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
    """The message of an error. If it is another rank's PipeShiftError, without the traceback that
    the message contains.
    """
    text = str(error)
    found = re.search(r" failed first: (\w+): ", text)
    is_ours = found is not None and hasattr(errors, found[1])
    return text.partition("\n\nTraceback")[0] if is_ours else text
