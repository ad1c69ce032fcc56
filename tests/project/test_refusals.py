"""The table of refusals in `docs/your_code.md`: each has the words of an error of the package."""

from __future__ import annotations

import ast
import re

import pytest

from tests import ROOT
from tests.project.texts import texts_in


def _rows() -> list[str]:
    """The first column of the table."""
    page = (ROOT / "docs" / "your_code.md").read_text()
    table = page.partition("| the error says |")[2].partition("\n\n")[0]
    return [line.split("|")[1] for line in table.splitlines()[2:]]


@pytest.fixture(scope="module", name="texts")
def _texts() -> str:
    """All texts of the package but docstrings."""
    paths = (ROOT / "lightning_pipeshift").rglob("*.py")
    return "\n".join(text for path in paths for text in texts_in(ast.parse(path.read_text())))


def test_there_is_a_table() -> None:
    assert len(_rows()) > 10


@pytest.mark.parametrize("row", _rows())
def test_an_error_has_these_words(row: str, texts: str) -> None:
    words = re.findall(r'"([^"]+)"', row)
    assert words
    for each in words:
        assert each in texts
