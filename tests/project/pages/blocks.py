"""The fenced blocks of a page.

Python and shell blocks run. A block with a title (```` ```yaml title="cluster.yaml" ````) is a file
that the reader writes. A comment in front of a block, which no reader sees, says why it is not run:

    <!-- not run: needs root -->
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^( *)(```+)(\w*)(?: +(.*))?$")
_REASON = re.compile(r"<!-- (?:not run: (.+?)|(ci: test)) -->")
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        language: behind the fence.
        text: without the indentation of the list that it may stand in.
        line: of its first line in the page, from 1.
        title: the name of the file that it is, if it is one.
        reason: why it is not run, if it is not.
    """

    language: str
    text: str
    line: int
    title: str | None = None
    reason: str | None = None


def blocks_of(path: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    lines = path.read_text().split("\n")
    number = 0
    while number < len(lines):
        found = _FENCE.match(lines[number])
        number += 1
        if found is None:
            continue
        indent, fence, language, options = found.groups()
        end = next(n for n in range(number, len(lines)) if lines[n] == indent + fence)
        before = next((line for line in reversed(lines[: number - 1]) if line.strip()), "")
        reason = _REASON.search(before)
        title = _TITLE.search(options or "")
        yield Block(
            language,
            textwrap.dedent("\n".join(lines[number:end])) + "\n",
            number + 1,
            title and title[1],
            reason and (reason[1] or "it is what CI runs"),
        )
        number = end + 1
