import json
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from pydantic import Field

from lightning_pipeshift.documents import Document, as_json
from lightning_pipeshift.errors import PlanError


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outer:
    inner: tuple[Inner, ...]
    seconds: float = 0.0
    flag: bool = False
    rows: tuple[tuple[int, ...], ...] = ()
    named: dict[str, Inner] | None = None
    few: Annotated[int, Field(lt=4)] = 0

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise PlanError("negative seconds")


def read(value: Any) -> Outer:
    return Document(Outer, "the file", "make it again", 1).read(value)


def outer(**fields: Any) -> dict[str, Any]:
    return {"version": 1, "inner": [], **fields}


def test_what_it_reads() -> None:
    value = outer(
        inner=[{"name": "a"}, {"name": "b", "sizes": [1, 2]}],
        seconds=3,
        flag=True,
        rows=[[1], []],
        named={"x": {"name": "c"}},
    )
    assert read(value) == Outer(
        (Inner("a"), Inner("b", (1, 2))), 3.0, True, ((1,), ()), {"x": Inner("c")}
    )
    assert type(read(value).seconds) is float


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "the file is [1]; it must be an object"),
        ({"inner": []}, "field 'version' is null; this PipeShift reads version 1: make it again"),
        ({"version": 2, "x": 1}, "reads version 1: make it again, or use the version that made it"),
        ({"version": 1}, "the file has no field 'inner'; add it, or make it again"),
        (outer(x=1), "the file has an unknown field 'x'; remove it"),
        (outer(**{"y" * 999: 1}), "the file has an unknown field 'yyyy"),
        (outer(inner={}), "the file: field 'inner' is {}; it must be a list"),
        (outer(inner=None), "the file: field 'inner' is null; it must be a list"),
        (outer(inner=[{}]), "the file: inner[0] has no field 'name'; add it"),
        (outer(inner=[{"name": 3}]), "the file: inner[0]: field 'name' is 3; it must be a text"),
        (outer(inner=["a"]), 'the file: inner[0] is "a"; it must be an object'),
        (
            outer(inner=[{"name": "a", "sizes": [1, True]}]),
            "the file: inner[0]: field 'sizes[1]' is true; it must be a whole number",
        ),
        (outer(seconds="3"), "field 'seconds' is \"3\"; it must be a number"),
        (outer(seconds=True), "field 'seconds' is true; it must be a number"),
        (outer(seconds=10**400), "it must be a number that is finite"),
        (outer(seconds=-1), "the file: negative seconds"),
        (outer(flag=1), "field 'flag' is 1; it must be true or false"),
        (outer(rows=[1]), "field 'rows[0]' is 1; it must be a list"),
        (outer(rows=[[], [0, 1.5]]), "field 'rows[1][1]' is 1.5; it must be a whole number"),
        (outer(few=4), "the file: field 'few' is 4; it must be less than 4"),
        (outer(named=[]), "the file: field 'named' is []; it must be an object"),
        (outer(named={"x": 1}), "the file: named.x is 1; it must be an object"),
        (outer(named={"a b": {}}), "the file: named['a b'] has no field 'name'"),
        (outer(inner=list(range(1000))), "the file: inner[0] is 0; it must be an object"),
    ],
)
def test_what_is_wrong_is_named(value: Any, message: str) -> None:
    with pytest.raises(PlanError) as error:
        read(value)
    assert message in str(error.value)
    assert len(str(error.value)) < 400


def test_a_written_value_has_what_is_no_default() -> None:
    document = Document(Outer, "the file", "make it again", 1)
    value = Outer((Inner("a"), Inner("b", (1,))), rows=((1,), ()), named={"x": Inner("c", (2,))})
    entries = document.entries(value)
    assert document.read(json.loads(json.dumps(entries))) == value
    assert "seconds" not in entries
    assert entries["inner"][0] == {"name": "a"}


def test_a_written_document_has_an_entry_on_each_line() -> None:
    value = {"a": [1, 2], "b": [{"c": [1]}, {}], "d": {"e": 1, "b": {"f": [3]}}, "g": []}
    text = as_json(value, ("b", "d", "g"))
    assert json.loads(text) == value
    assert text.splitlines() == [
        "{",
        '  "a": [1, 2],',
        '  "b": [',
        '    {"c": [1]},',
        "    {}",
        "  ],",
        '  "d": {',
        '    "e": 1,',
        '    "b": {',
        '      "f": [3]',
        "    }",
        "  },",
        '  "g": []',
        "}",
    ]
