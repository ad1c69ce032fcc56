"""The orders that are run are all that make a difference, and few others."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from tests.unit.runtime.every_order import Run, Stuck, every_order


def ends(programs: tuple[str, ...]) -> tuple[set[tuple[str, ...]], int]:
    """The ends of programs, each letter of which adds itself to the variable of its name; and in
    how many orders they were run. A capital waits for its small letter.
    """
    found = set()

    def run(order: Run) -> None:
        written: dict[str, str] = {}

        def act(number: int) -> None:
            for letter in programs[number]:
                name = letter.lower()
                if letter.isupper():
                    order.wait_until(partial(written.__contains__, name), letter)
                else:
                    order.point()
                order.touch(name, True)
                written[name] = written.get(name, "") + str(number)

        for number in range(len(programs)):
            order.start(f"task {number}", partial(act, number))
        order.run()
        if not order.is_known:
            found.add(tuple(f"{name}: {written[name]}" for name in sorted(written)))

    return found, every_order(run)


@pytest.mark.parametrize(
    "programs", [("ab", "ba"), ("aab", "ab"), ("abc", "cb", "a"), ("xyx", "yx"), ("ab", "c", "cd")]
)
def test_every_end_is_found(programs: tuple[str, ...]) -> None:
    numbers = [number for number, program in enumerate(programs) for _ in program]
    expected = set()
    for order in set(itertools.permutations(numbers)):
        left = [iter(program) for program in programs]
        written: dict[str, str] = {}
        for number in order:
            name = next(left[number])
            written[name] = written.get(name, "") + str(number)
        expected.add(tuple(f"{name}: {written[name]}" for name in sorted(written)))
    found, num_orders = ends(programs)
    assert found == expected
    # Orders of steps on the same variables are all that makes a difference.
    assert num_orders == len(expected)


def test_what_has_nothing_in_common_is_run_in_one_order() -> None:
    assert ends(("abc", "def", "ghi"))[1] == 1


def test_tasks_that_wait_for_each_other_are_stuck() -> None:
    with pytest.raises(Stuck, match="waits for A"):
        ends(("Ba", "Ab"))
