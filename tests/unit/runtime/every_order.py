"""Runs tasks in every order of their steps that can make a difference.

A step is what a task does from one point where another task might go on to the next such point. Two
steps of different tasks are independent if neither writes what the other reads or writes; orders
that differ only in neighbouring independent steps have the same end, and one of them is run. This
is a stateless model checker: each order is a new run, which begins as an earlier one did and then
takes another choice (Flanagan and Godefroid, Dynamic Partial-Order Reduction, POPL 2005; with the
source sets and sleep sets of Abdulla, Aronis, Jonsson and Sagonas, Optimal DPOR, POPL 2014).
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

Touched = dict[Hashable, bool]
"""What a step reads or writes, and whether it writes."""

Clock = dict[str, int]


class Stuck(AssertionError):
    """All tasks wait, for each other or for nothing."""


class _Stopped(BaseException):
    """Ends a task of a run that has failed, or whose end is known."""


class _Task:
    def __init__(self, name: str) -> None:
        self.name = name
        self.go = threading.Semaphore(0)
        self.is_ready: Callable[[], bool] = _always
        self.waits_for = "its turn"
        self.num_made = 0


@dataclass
class _Choice:
    """Where one of several tasks goes on.

    Args:
        ready: the tasks that can.
        asleep: those whose next step need not be run here: orders in which it comes now have been
            run already. With what that step touches.
        chosen: the one that goes on.
    """

    ready: list[str]
    asleep: dict[str, Touched]
    chosen: str
    wanted: set[str] = field(default_factory=set)
    done: dict[str, Touched] = field(default_factory=dict)


@dataclass
class Step:
    """One step of a run.

    Args:
        task: whose.
        number: its place among the steps of this task, from 1 on.
        after: earlier steps without which this one would not have been possible.
        freed_by: steps that ended what kept this one waiting, which could have come first.
        clock: how many steps of each task come before it in every order like this one.
    """

    task: str
    number: int
    touched: Touched = field(default_factory=dict)
    after: list[Step] = field(default_factory=list)
    freed_by: list[Step] = field(default_factory=list)
    clock: Clock = field(default_factory=dict)


def _are_independent(one: Touched, other: Touched) -> bool:
    return not any(name in other and (writes or other[name]) for name, writes in one.items())


def _join(clock: Clock, other: Clock) -> None:
    for task, number in other.items():
        if clock.get(task, 0) < number:
            clock[task] = number


class Run:
    """One order.

    Args:
        choices: those with which it begins; it adds its own.
        draw: chooses among the tasks that can go on; by default the same one goes on while it can.
    """

    def __init__(self, choices: list[_Choice], draw: random.Random | None = None) -> None:
        self._choices = choices
        self._draw = draw
        self.steps: list[Step] = []
        self._tasks: list[_Task] = []
        self._current: _Task | None = None
        self._over = threading.Semaphore(0)
        self._ended = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._is_stopping = False
        self.is_known = False
        """Whether the run was ended, as orders like it have been run before."""
        self.at_end_of_step: Callable[[], None] = lambda: None

    # --- for tasks ---

    @property
    def current(self) -> _Task | None:
        """The task that runs; ``None`` while none does."""
        return self._current

    @property
    def step(self) -> Step:
        """The step that runs."""
        return self.steps[-1]

    def new_name(self, what: str) -> str:
        """A name that is the same in each run that begins as this one."""
        task = self._current
        if task is None:
            return what
        task.num_made += 1
        return f"{what} {task.num_made} of ({task.name})"

    def start(self, name: str, function: Callable[[], Any]) -> None:
        """Adds a task."""
        task = _Task(self.new_name(name))
        starter = self.step if self.steps else None
        self._tasks.append(task)

        def run() -> None:
            task.go.acquire()
            try:
                if not self._is_stopping:
                    if starter is not None:
                        self.step.after.append(starter)
                    function()
                    self._end_step()
            except _Stopped:
                pass
            except BaseException as error:
                self.fail(error)
            self._tasks.remove(task)
            if self._is_stopping or self._error is not None:
                self._stop()
                self._ended.release()
                return
            self._ended.release()
            self._go_on(None)

        threading.Thread(target=run, name=task.name, daemon=True).start()

    def touch(self, name: Hashable, writes: bool) -> None:
        """Notes what the step that runs reads or writes."""
        if self.steps:
            touched = self.step.touched
            touched[name] = writes or touched.get(name, False)

    def wait_until(self, is_ready: Callable[[], bool], what: str) -> None:
        """Ends a step: others may go on. Returns at this task's turn, when a condition holds."""
        if self._is_stopping:
            raise _Stopped
        task = self._current
        assert task is not None
        self._end_step()
        task.is_ready, task.waits_for = is_ready, what
        self._go_on(task)
        if self._is_stopping:
            raise _Stopped

    def point(self) -> None:
        """Ends a step: others may go on."""
        self.wait_until(_always, "its turn")

    def fail(self, error: BaseException) -> None:
        """Ends the run with an error of the current task."""
        if not isinstance(error, _Stopped):
            self._error = self._error or error

    # --- the run ---

    def run(self) -> None:
        """Runs all tasks to their end.

        Raises:
            Stuck: none can go on.
            BaseException: that of a task.
        """
        self._go_on(None)
        self._over.acquire()
        # One after the other, as what they clean up may be shared.
        while self._tasks:
            self._current = self._tasks[0]
            self._tasks[0].go.release()
            while self._current in self._tasks:
                self._ended.acquire()
        if self._error is not None:
            raise self._error

    def _stop(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            self._over.release()

    def _end_step(self) -> None:
        self.at_end_of_step()

    def _go_on(self, task: _Task | None) -> None:
        """Lets the next task run; returns when it is the turn of this one."""
        following = self._next()
        if following is None:
            self._stop()
        elif following is task:
            return
        else:
            self._current = following
            following.go.release()
        if task is not None:
            task.go.acquire()

    def _next(self) -> _Task | None:
        if not self._tasks or self._error is not None:
            return None
        ready = {task.name: task for task in self._tasks if task.is_ready()}
        if not ready:
            lines = [f"{task.name} waits for {task.waits_for}" for task in self._tasks]
            self._error = Stuck("nobody can go on:\n" + "\n".join(lines))
            return None
        place = len(self.steps)
        if place == len(self._choices):
            asleep = self._asleep()
            able = [name for name in ready if name not in asleep]
            if not able:
                self.is_known = True
                return None
            current = self._current.name if self._current is not None else ""
            chosen = current if current in able else able[0]
            if self._draw is not None:
                chosen = self._draw.choice(able)
            self._choices.append(_Choice(list(ready), asleep, chosen, {chosen}))
        chosen = self._choices[place].chosen
        number = sum(step.task == chosen for step in self.steps) + 1
        self.steps.append(Step(chosen, number))
        return ready[chosen]

    def _asleep(self) -> dict[str, Touched]:
        if not self.steps:
            return {}
        before = self._choices[len(self.steps) - 1]
        return {
            task: touched
            for task, touched in (before.asleep | before.done).items()
            if task != before.chosen and _are_independent(touched, self.step.touched)
        }

    # --- after the run ---

    def find_other_orders(self, first: int) -> None:
        """Marks choices that would turn the order of two dependent steps.

        Args:
            first: the place of the first step whose predecessors have not been looked at.
        """
        clocks: defaultdict[str, Clock] = defaultdict(dict)
        writer: dict[Hashable, int] = {}
        readers: defaultdict[Hashable, list[int]] = defaultdict(list)
        steps = self.steps
        for place, step in enumerate(steps):
            clock = dict(clocks[step.task])
            for earlier in step.after:
                _join(clock, earlier.clock)
            others: set[int] = set()
            for name, writes in step.touched.items():
                if name in writer:
                    others.add(writer[name])
                if writes:
                    others.update(readers[name])
                    writer[name], readers[name] = place, []
                else:
                    readers[name].append(place)
            if place >= first:
                for other in sorted(others):
                    before = steps[other]
                    if clock.get(before.task, 0) < before.number:
                        self._turn(other, place, clock)
            for other in others:
                _join(clock, steps[other].clock)
            for earlier in step.freed_by:
                _join(clock, earlier.clock)
            clock[step.task] = step.number
            step.clock = clocks[step.task] = clock

    def _turn(self, one: int, other: int, known: Clock) -> None:
        """Marks the choice of a step, so that another step comes before it."""
        before = self.steps[one]
        between = [
            step
            for step in self.steps[one + 1 : other]
            if step.clock.get(before.task, 0) < before.number
        ]
        first: dict[str, bool] = {}
        for index, step in enumerate(between):
            if step.task not in first:
                first[step.task] = not any(
                    step.clock.get(each.task, 0) >= each.number for each in between[:index]
                )
        last = self.steps[other]
        if last.task not in first:
            first[last.task] = not any(known.get(x.task, 0) >= x.number for x in between)
        able = {task for task, is_first in first.items() if is_first}
        choice = self._choices[one]
        able &= set(choice.ready)
        if not able:
            choice.wanted.update(choice.ready)
        elif not able & (choice.wanted | choice.asleep.keys()):
            choice.wanted.add(last.task if last.task in able else min(able))


def every_order(run: Callable[[Run], Any], limit: int = 100_000) -> int:
    """Runs a function in every order; returns how many there were.

    Args:
        run: starts the tasks of a :class:`Run`, and runs it.
        limit: how many orders there may be at most.
    """
    choices: list[_Choice] = []
    num_orders, num_runs, kept = 0, 0, 0
    while True:
        one = Run(choices)
        run(one)
        num_runs += 1
        num_orders += not one.is_known
        assert num_runs <= limit, f"there are more than {limit} orders"
        for choice, step in zip(choices, one.steps, strict=True):
            choice.done[choice.chosen] = step.touched
        one.find_other_orders(kept)
        while choices:
            last = choices[-1]
            left = last.wanted - last.done.keys() - last.asleep.keys()
            if left:
                last.chosen = min(left)
                kept = len(choices) - 1
                break
            choices.pop()
        else:
            return num_orders


def some_orders(run: Callable[[Run], Any], num_orders: int) -> None:
    """Runs a function in orders that are drawn, where there are too many to run all of them."""
    for seed in range(num_orders):
        run(Run([], random.Random(seed)))


def _always() -> bool:
    return True
