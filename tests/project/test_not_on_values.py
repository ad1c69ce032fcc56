"""The list of the tests that ``core="values"`` cannot run names tests that exist."""

from __future__ import annotations

import re

import pytest

from tests import ROOT
from tests.not_on_values import KINDS, LISTED, entry_of, unused


@pytest.mark.parametrize("entry", LISTED)
def test_an_entry_names_a_test_and_a_kind(entry: str) -> None:
    path, *names = entry.partition("[")[0].split("::")
    text = (ROOT / path).read_text()
    assert all(re.search(rf"(?:def|class) {name}\b", text) for name in names)
    assert LISTED[entry] in KINDS


def test_an_entry_is_a_file_a_test_or_a_case_of_it() -> None:
    listed = dict.fromkeys(("a.py", "b.py::test_x", "b.py::test_y[one]"), "memory")
    assert entry_of("a.py::test_x[two]", listed) == "a.py"
    assert entry_of("b.py::test_x[a::b[c]]", listed) == "b.py::test_x"
    assert entry_of("b.py::test_y[one]", listed) == "b.py::test_y[one]"
    assert entry_of("b.py::test_y[two]", listed) is None
    assert entry_of("b.py::test_xy", listed) is None


def test_an_entry_without_a_test_is_found_where_its_file_was_collected() -> None:
    listed, used = ("a/b.py", "a/c.py::test_x", "d.py::test_x"), {"d.py::test_x"}
    assert (
        unused(listed, used, ["."]) == unused(listed, used, ["a"]) == ["a/b.py", "a/c.py::test_x"]
    )
    assert unused(listed, used, ["a/b.py", "d.py"]) == ["a/b.py"]
    assert unused(listed, set(), ["a/c.py::test_y", "d.py::test_x"]) == []
