from lightning_pipeshift.plan.schedule.actions import parse_row
from lightning_pipeshift.plan.schedule.execution_order import execution_order


def walk(*rows):
    schedule = tuple(map(parse_row, rows))
    return " ".join(
        f"{stage}:{schedule[stage][index]}" for stage, index in execution_order(schedule)
    )


def test_a_compute_action_waits_for_the_neighbours_send():
    assert walk("F0 F0> >B0 B0", ">F0 F0 B0 B0>") == ("0:F0 0:F0> 0:>B0 1:>F0 1:F0 1:B0 1:B0> 0:B0")


def test_it_ends_where_nothing_can_happen():
    assert walk(">B0 B0 F0 F0>", ">F0 F0 B0 B0>") == "0:>B0 1:>F0"


def test_posting_never_blocks():
    assert walk(">B0 >B1", ">F1 >F0") == "0:>B0 0:>B1 1:>F1 1:>F0"
