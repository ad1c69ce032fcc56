"""The page on Lightning's features: its rows are marks of tests, ``feature(group, name)``.

    python -m tests.project.pages.features      # writes docs/lightning.md

The marks are read from the source, so that no test has to be collected.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from tests import ROOT

PAGE = ROOT / "docs" / "lightning.md"
TESTS = ROOT / "tests" / "end_to_end"
# The order of the page.
GROUPS = (
    "Training",
    "Precision",
    "Optimizers",
    "Callbacks",
    "Tuners",
    "Loggers",
    "Profilers",
    "Data",
    "Evaluation",
    "Checkpoints",
    "Launch",
    "Refused, with advice",
)
_BEGIN, _END = "<!-- features: python -m tests.project.pages.features -->", "<!-- features end -->"
_WRITTEN = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)


class Feature(NamedTuple):
    """A feature, and the test that trains with it."""

    group: str
    name: str
    file: str
    test: str


def features_in(source: str, file: str) -> Iterator[Feature]:
    """The features that the tests of a file name, in their order.

    Raises:
        ValueError: a group that the page does not have.
    """
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.feature":
                group, name = map(ast.literal_eval, mark.args)
                if group not in GROUPS:
                    raise ValueError(f"{file}, {node.name}: {group!r} is none of {GROUPS}")
                yield Feature(group, name, file, node.name)


def features() -> list[Feature]:
    """All features, in the order of the page."""
    found = [
        feature
        for path in sorted(TESTS.glob("test_*.py"))
        for feature in features_in(path.read_text(), path.name)
    ]
    return sorted(found, key=lambda feature: (GROUPS.index(feature.group), feature.name.lower()))


def page(text: str, rows: list[Feature]) -> str:
    """The page with these rows in the place of those that it has."""
    lines = [_BEGIN]
    for group, members in groupby(rows, lambda feature: feature.group):
        lines += ["", f"## {group}", "", "| feature | test |", "| --- | --- |"]
        lines += [f"| {row.name} | `{row.file}::{row.test}` |" for row in members]
    return _WRITTEN.sub(lambda _: "\n".join([*lines, "", _END]), text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), features()))
