"""The table of refusals in `docs/your_code.md`: each has the words of an error of the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _rows() -> list[str]:
    """The first column of the table."""
    page = (ROOT / "docs" / "your_code.md").read_text()
    table = page.partition("| the error says |")[2].partition("\n\n")[0]
    return [line.split("|")[1] for line in table.splitlines()[2:]]


def _texts() -> str:
    """All texts of the package; what is put into one is left out."""
    return "\n".join(
        "".join(part.value for part in node.values if isinstance(part, ast.Constant))
        if isinstance(node, ast.JoinedStr)
        else node.value
        for path in (ROOT / "lightning_pipeshift").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    )


@pytest.fixture(scope="module", name="texts")
def _fixture_texts() -> str:
    return _texts()


def test_there_is_a_table() -> None:
    assert len(_rows()) > 10


@pytest.mark.parametrize("row", _rows())
def test_an_error_has_these_words(row: str, texts: str) -> None:
    words = re.findall(r'"([^"]+)"', row)
    assert words
    for each in words:
        assert each in texts
