import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.document.validation import Fields


def fields(value):
    return Fields({"field": value}, "the file", ["field"])


def test_what_it_reads():
    assert fields("a").text("field") == "a"
    assert fields(3).integer("field") == 3
    assert fields(3).number("field") == 3.0
    assert fields(0.5).number("field") == 0.5
    assert fields([1, "a"]).items("field") == [1, "a"]
    assert fields([[1, 2], [3]]).integer_rows("field") == ((1, 2), (3,))


@pytest.mark.parametrize(
    ("read", "value", "allowed"),
    [
        ("text", 3, "a text"),
        ("integer", 3.5, "a whole number"),
        ("integer", True, "a whole number"),
        ("number", "3", "a number"),
        ("number", None, "a number"),
        ("items", {}, "a list"),
        ("integer_rows", [1, 2], "a list of lists of whole numbers"),
        ("integer_rows", [[1.5]], "a list of lists of whole numbers"),
    ],
)
def test_a_wrong_type_is_named(read, value, allowed):
    with pytest.raises(PlanError, match=rf"the file: field 'field' is .*; it must be {allowed}"):
        getattr(fields(value), read)("field")


def test_fields_are_those_that_are_known():
    with pytest.raises(PlanError, match="the file has no field 'b'"):
        Fields({"a": 1}, "the file", ["a", "b"])
    with pytest.raises(PlanError, match="the file has an unknown field 'b'; allowed: a"):
        Fields({"a": 1, "b": 2}, "the file", ["a"])
    with pytest.raises(PlanError, match=r"the file is \[1\]; it must be an object with a"):
        Fields([1], "the file", ["a"])


def test_a_long_value_is_shown_in_part():
    with pytest.raises(PlanError) as error:
        Fields(list(range(1000)), "the file", ["a"])
    assert len(str(error.value)) < 150
