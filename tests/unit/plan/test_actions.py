import pytest

from lightning_pipeshift.errors import ScheduleError
from lightning_pipeshift.plan.schedule.actions import Action, Kind, format_row, parse_row
from lightning_pipeshift.plan.schedule.route import Place, Route

TEXTS = {
    "F3": Action(Kind.FORWARD, 3),
    "B3": Action(Kind.BACKWARD, 3),
    "R3": Action(Kind.RECOMPUTE, 3),
    ">F3": Action(Kind.RECEIVE_PAYLOAD, 3),
    "F3>": Action(Kind.SEND_PAYLOAD, 3),
    ">B3": Action(Kind.RECEIVE_GRADIENT, 3),
    "B12>": Action(Kind.SEND_GRADIENT, 12),
    "F3.1": Action(Kind.FORWARD, 3, 1),
    ">B0.12": Action(Kind.RECEIVE_GRADIENT, 0, 12),
    "F10.2>": Action(Kind.SEND_PAYLOAD, 10, 2),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_form_and_its_inverse(text):
    assert str(TEXTS[text]) == text
    assert Action.parse(text) == TEXTS[text]


def test_every_kind_has_a_text_form():
    assert {action.kind for action in TEXTS.values()} == set(Kind)


@pytest.mark.parametrize(
    "text", ["", "F", "3", "X3", ">F3>", "F-1", "f3", "F3 ", "F3.0", "F3.", "F.1", "F3.01", "F٣"]
)
def test_nonsense_is_no_action(text):
    with pytest.raises(ScheduleError, match=r"is no action.*F3 B3 R3 >F3 F3> >B3 B3>"):
        Action.parse(text)


def test_a_microbatch_is_not_negative():
    with pytest.raises(ScheduleError, match=r"microbatch -1.*from 0"):
        Action(Kind.FORWARD, -1)
    with pytest.raises(ScheduleError, match=r"chunk -1 of microbatch 0.*from 0"):
        Action(Kind.FORWARD, 0, -1)


def test_rows():
    row = parse_row("F0 F0> F1 >B0 B0")
    assert [str(action) for action in row] == ["F0", "F0>", "F1", ">B0", "B0"]
    assert format_row(row) == "F0 F0> F1 >B0 B0"
    assert parse_row("") == ()


@pytest.mark.parametrize("text", ["F3>", ">F3", "B3>", ">B3"])
def test_send_and_receive_pair(text):
    action, route = Action.parse(text), Route(3)
    there = action.counterpart(1, route)
    assert there is not None
    assert there[0] in (0, 2)
    assert action.kind.is_send is there[1].kind.is_receive
    assert there[1].counterpart(there[0], route) == (1, action)


@pytest.mark.parametrize(
    ("text", "stage", "there"),
    [
        ("F3>", 0, (1, ">F3")),
        ("F3>", 1, (2, ">F3")),
        ("F3>", 2, (0, ">F3.1")),
        ("F3.1>", 0, (1, ">F3.1")),
        ("F3.1>", 2, None),
        (">F3", 0, None),
        (">F3.1", 0, (2, "F3>")),
        ("B3.1>", 0, (2, ">B3")),
        (">B3", 2, (0, "B3.1>")),
        (">B3.1", 2, None),
        ("B3>", 0, None),
    ],
)
def test_with_two_chunks_the_last_stage_sends_to_the_first(text, stage, there):
    found = Action.parse(text).counterpart(stage, Route(3, 2))
    assert found == (there and (there[0], Action.parse(there[1])))


def test_a_stage_sends_nothing_to_itself():
    assert Action.parse("F3>").counterpart(0, Route(1, 2)) is None
    assert Action.parse("F3.1").receive_needed(0, Route(1, 2)) is None


def test_a_route_goes_through_all_stages_for_each_chunk():
    route = Route(2, 3)
    way = [Place(0)]
    while (following := route.neighbour(way[-1], 1)) is not None:
        way.append(following)
    assert way == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert [route.index(place) for place in way] == list(range(route.num_places))
    assert [route.neighbour(place, -1) for place in way] == [None, *way[:-1]]


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
    assert action.receive_needed(stage, Route(3)) == (needs and Action.parse(needs))
    assert action.send_caused(stage, Route(3)) == (causes and Action.parse(causes))
