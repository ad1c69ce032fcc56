import pytest

from lightning_pipeshift.errors import ScheduleError
from lightning_pipeshift.plan.schedule.actions import Action, Kind, format_row, parse_row

TEXTS = {
    "F3": Action(Kind.FORWARD, 3),
    "B3": Action(Kind.BACKWARD, 3),
    "R3": Action(Kind.RECOMPUTE, 3),
    "W3": Action(Kind.WEIGHTS, 3),
    ">F3": Action(Kind.RECEIVE_PAYLOAD, 3),
    "F3>": Action(Kind.SEND_PAYLOAD, 3),
    ">B3": Action(Kind.RECEIVE_GRADIENT, 3),
    "B12>": Action(Kind.SEND_GRADIENT, 12),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_form_and_its_inverse(text):
    assert str(TEXTS[text]) == text
    assert Action.parse(text) == TEXTS[text]


def test_every_kind_has_a_text_form():
    assert {action.kind for action in TEXTS.values()} == set(Kind)


@pytest.mark.parametrize("text", ["", "F", "3", "X3", ">F3>", "F-1", "f3", "F3 ", "F3.1.2", "F٣"])
def test_nonsense_is_no_action(text):
    with pytest.raises(ScheduleError, match=r"is no action.*F3 B3 W3 R3 >F3 F3> >B3 B3>"):
        Action.parse(text)


def test_a_microbatch_is_not_negative():
    with pytest.raises(ScheduleError, match=r"microbatch -1.*from 0"):
        Action(Kind.FORWARD, -1)


def test_rows():
    row = parse_row("F0 F0> F1 >B0 B0")
    assert [str(action) for action in row] == ["F0", "F0>", "F1", ">B0", "B0"]
    assert format_row(row) == "F0 F0> F1 >B0 B0"
    assert parse_row("") == ()


@pytest.mark.parametrize("text", ["F3>", ">F3", "B3>", ">B3"])
def test_send_and_receive_pair(text):
    action = Action.parse(text)
    there = action.counterpart(1, 3)
    assert there is not None
    assert there[0] in (0, 2)
    assert action.kind.is_send is there[1].kind.is_receive
    assert there[1].counterpart(there[0], 3) == (1, action)


@pytest.mark.parametrize(
    ("text", "stage", "there"),
    [
        ("F3>", 0, (1, ">F3")),
        ("F3>", 1, (2, ">F3")),
        ("F3>", 2, None),
        (">F3", 0, None),
        (">B3", 1, (2, "B3>")),
        (">B3", 2, None),
        ("B3>", 0, None),
    ],
)
def test_the_other_end_is_a_neighbour(text, stage, there):
    found = Action.parse(text).counterpart(stage, 3)
    assert found == (there and (there[0], Action.parse(there[1])))


@pytest.mark.parametrize(
    ("text", "stage", "needs", "causes"),
    [
        ("F3", 0, None, "F3>"),
        ("F3", 1, ">F3", "F3>"),
        ("F3", 2, ">F3", None),
        ("B3", 0, ">B3", None),
        ("B3", 1, ">B3", "B3>"),
        ("B3", 2, None, "B3>"),
        ("F3>", 1, None, None),
    ],
)
def test_what_communicates_at_the_ends_and_between(text, stage, needs, causes):
    action = Action.parse(text)
    assert action.receive_needed(stage, 3) == (needs and Action.parse(needs))
    assert action.send_caused(stage, 3) == (causes and Action.parse(causes))
