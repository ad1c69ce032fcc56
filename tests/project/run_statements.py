"""Notes which statements of some files run, in each of the processes of a program.

Each statement first sets a byte of its file's own, in memory that all processes share: nothing is
lost when one is killed, and code of other files runs as fast as ever.
"""

from __future__ import annotations

import ast
import mmap
import re
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

# By the file's name: the bytes of its statements. Noted modules know them by the other name.
HELD: dict[str, mmap.mmap] = {}
_BYTES = "__run_statements__"


def _statements(tree: ast.Module) -> Iterator[tuple[list[Any], Any]]:
    """Each statement that does something, with its block."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block: Any = getattr(node, name, None)
            # That of a lambda is an expression.
            for one in block if isinstance(block, list) else ():
                is_text = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
                is_future = isinstance(one, ast.ImportFrom) and one.module == "__future__"
                if not is_text and not is_future:
                    yield block, one


def note(folder: Path, bytes_folder: Path) -> None:
    """From now on, notes the statements of modules that this process imports from a folder, and
    those that it forks.

    Args:
        folder: theirs.
        bytes_folder: for files with the bytes.
    """
    get_code = SourceFileLoader.get_code

    def noting(loader: SourceFileLoader, name: str) -> Any:
        path = Path(loader.get_filename(name))
        if path.parent != folder:
            return get_code(loader, name)
        tree = ast.parse(path.read_text())
        found = [*_statements(tree)]
        if found:
            # Modules that are imported twice have the same bytes.
            with (bytes_folder / path.name).open("a+b") as file:
                file.truncate(len(found))
                HELD[path.name] = mmap.mmap(file.fileno(), len(found))
        for number, (block, statement) in enumerate(found):
            added = [f"{_BYTES}[{number}] = 1"]
            if not number:
                added.insert(0, f"from {__name__} import HELD as {_BYTES}")
                added.insert(1, f"{_BYTES} = {_BYTES}[{path.name!r}]")
            place = block.index(statement)
            block[place:place] = ast.parse("\n".join(added)).body
        return compile(tree, str(path), "exec", dont_inherit=True)

    loader_class: Any = SourceFileLoader
    loader_class.get_code = noting


def not_run(path: Path, bytes_folder: Path, excluded: Sequence[str]) -> list[str]:
    """The lines of a file that have not run: of each statement its first.

    Args:
        path: the file.
        bytes_folder: see :func:`note`.
        excluded: patterns of lines that need not run; of a line with a ``:``, its block.
    """
    lines, tree = path.read_text().splitlines(), ast.parse(path.read_text())
    need_not = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt | ast.ExceptHandler)
        and any(re.search(pattern, lines[node.lineno - 1]) for pattern in excluded)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    found = [statement.lineno for _, statement in _statements(tree)]
    noted = bytes_folder / path.name
    run = noted.read_bytes() if noted.exists() else bytes(len(found))
    missing = {line for line, is_run in zip(found, run, strict=True) if not is_run} - need_not
    return [f"{line}: {lines[line - 1].strip()}" for line in sorted(missing)]
