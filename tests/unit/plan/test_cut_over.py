"""No stage sees a minibatch from the cut-over on before it knows of it, and none waits for another
in a circle, in whatever order the stages advance.

The events of a pipeline are nodes of a graph, and whatever makes one wait for another is an edge.
What holds along the paths of the graph holds in every order in which the events can happen.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.schedule.cut_over import backward_before, cut_over, newest_update
from tests.unit.plan.staleness import newest_update_after_move

MOST_STAGES = 8

Event = tuple[str, int, int]
"""``F`` or ``B``, the stage, the minibatch."""


def row(stage: int, num_stages: int, num_minibatches: int) -> Iterator[Event]:
    for minibatch in range(num_minibatches):
        yield "F", stage, minibatch
        due = minibatch - (num_stages - 1 - stage)
        if due >= 0:
            yield "B", stage, due


class Pipeline:
    """What has to happen before each event."""

    def __init__(self, num_stages: int, num_minibatches: int) -> None:
        self.num_stages = num_stages
        self.before: dict[Event, set[Event]] = defaultdict(set)
        for stage in range(num_stages):
            for earlier, later in itertools.pairwise(row(stage, num_stages, num_minibatches)):
                self.before[later].add(earlier)
            for minibatch in range(num_minibatches):
                if stage:
                    self.before["F", stage, minibatch].add(("F", stage - 1, minibatch))
                if stage + 1 < num_stages:
                    self.before["B", stage, minibatch].add(("B", stage + 1, minibatch))

    def past(self, event: Event) -> set[Event]:
        """All that has happened before an event, in any order of events."""
        found: set[Event] = set()
        todo = [event]
        while todo:
            for earlier in self.before.get(todo.pop(), ()):
                if earlier not in found:
                    found.add(earlier)
                    todo.append(earlier)
        return found

    def has_circle(self) -> bool:
        waiting = {event: len(earlier) for event, earlier in self.before.items()}
        later: dict[Event, list[Event]] = defaultdict(list)
        for event, earlier in self.before.items():
            for one in earlier:
                later[one].append(event)
        ready = [event for event in later if not waiting.get(event)]
        while ready:
            for event in later.get(ready.pop(), ()):
                waiting[event] -= 1
                if not waiting[event]:
                    ready.append(event)
        return any(waiting.values())


@cache
def pipeline(num_stages: int) -> Pipeline:
    return Pipeline(num_stages, 4 * num_stages)


def brings(stage: int, announcer: int, current: int, num_stages: int) -> Event:
    """The event with whose payload or gradient an announcement comes to a stage."""
    if stage > announcer:
        return "F", stage - 1, current + 1
    return "B", stage + 1, backward_before(current + 1, announcer, num_stages)


def knows(begin: int, stage: int, announcer: int, current: int, num_stages: int) -> bool:
    """Whether a stage has been told when it begins with a minibatch, in any order of events."""
    if stage == announcer:
        return begin > current
    told = brings(stage, announcer, current, num_stages)
    return told in pipeline(num_stages).past(("F", stage, begin))


PAIRS = [
    (num_stages, source, target)
    for num_stages in range(2, MOST_STAGES + 1)
    for source in range(num_stages)
    for target in range(num_stages)
    if source != target
]


@pytest.mark.parametrize("num_stages", range(2, MOST_STAGES + 1))
def test_all_stages_between_two_owners_know_in_time_and_not_a_minibatch_earlier(
    num_stages: int,
) -> None:
    for of, source, target in PAIRS:
        if of != num_stages:
            continue
        first, last = sorted((source, target))
        for current in range(num_stages, 2 * num_stages):
            begin = cut_over(current, source, first)
            between = range(first, last + 1)
            assert all(knows(begin, s, source, current, num_stages) for s in between)
            assert not all(knows(begin - 1, s, source, current, num_stages) for s in between)


def test_the_numbers_of_the_source_document() -> None:
    """For neighbours: downstream ``k + 1``, upstream ``k + 2``; the target has the layers before
    the backwards of ``k - N + t + 1`` and ``k - N + t + 2``.
    """
    k, num_stages = 20, 6
    for t in range(1, num_stages):
        assert cut_over(k, t - 1, t - 1) == k + 1
        assert backward_before(k + 1, t, num_stages) == k - num_stages + t + 1
    for t in range(num_stages - 1):
        assert cut_over(k, t + 1, t) == k + 2
        assert backward_before(k + 2, t, num_stages) == k - num_stages + t + 2


def test_two_more_would_be_too_late_upstream_over_a_distance() -> None:
    assert not knows(20 + 2, 1, announcer=3, current=20, num_stages=8)
    assert knows(20 + 3, 1, announcer=3, current=20, num_stages=8)


@pytest.mark.parametrize("num_stages", range(2, MOST_STAGES + 1))
def test_a_change_of_several_boundaries_that_any_stage_announces(num_stages: int) -> None:
    current = 2 * num_stages
    for announcer in range(num_stages):
        for first in range(num_stages):
            begin = cut_over(current, announcer, first)
            affected = range(first, num_stages)
            assert all(knows(begin, s, announcer, current, num_stages) for s in affected)


@pytest.mark.parametrize("num_stages", range(2, MOST_STAGES + 1))
def test_no_stage_waits_for_another_in_a_circle(num_stages: int) -> None:
    """A forward of the new owner waits for the update that its weights have to contain; the new
    owner's own updates wait for the last one of the old owner.
    """
    for of, source, target in PAIRS:
        if of == num_stages:
            assert not has_circle(num_stages, source, target), (source, target)


def has_circle(num_stages: int, source: int, target: int) -> bool:
    moved = Pipeline(num_stages, 6 * num_stages)
    current = 2 * num_stages
    begin = cut_over(current, source, min(source, target))
    for minibatch in range(begin, 5 * num_stages):
        update = newest_update_after_move(minibatch, begin, source, target, num_stages)
        owner = source if update < begin else target
        moved.before["F", target, minibatch].add(("B", owner, update))
        if update >= begin:
            moved.before["F", target, minibatch].add(("B", source, begin - 1))
    return moved.has_circle()


def test_the_age_of_weights_across_a_move() -> None:
    """Downstream no forward uses older weights than the one before it. None are older than the
    pipeline is deep, and in the end they have the new owner's age.
    """
    for num_stages, source, target in PAIRS:
        begin = 3 * num_stages
        newest = [newest_update(minibatch, source, num_stages) for minibatch in range(begin)]
        after = range(begin, begin + 3 * num_stages)
        newest += [newest_update_after_move(j, begin, source, target, num_stages) for j in after]
        if source < target:
            assert newest == sorted(newest)
        assert all(0 < j - update <= num_stages for j, update in enumerate(newest))
        assert newest[-1] == newest_update(after[-1], target, num_stages)


def test_a_later_owner_does_not_wait_for_an_earlier_one() -> None:
    """Downstream, the update that a forward needs was made before the old owner's own forward of
    that minibatch, whose payload the new owner waits for anyway.
    """
    for num_stages, source, target in PAIRS:
        if source > target:
            continue
        begin = 2 * num_stages
        for minibatch in range(begin, 3 * num_stages):
            update = newest_update_after_move(minibatch, begin, source, target, num_stages)
            if update < begin:
                past = pipeline(num_stages).past(("F", target, minibatch))
                assert ("B", source, update) in past


@pytest.mark.parametrize("wrong", [(-1, 0, 0), (0, -1, 0), (0, 0, -1)])
def test_what_is_not_there(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(PlanError, match="counted from 0"):
        cut_over(*wrong)
