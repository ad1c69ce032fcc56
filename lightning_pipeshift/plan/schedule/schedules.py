"""Schedules: the compute actions of each stage, in order.

A schedule is a pure function of the numbers of stages and of microbatches. It has compute actions
only: the sends and receives follow from them (``communication``), and the times from the costs
(``simulator``).

In every schedule a stage runs its backwards, and what they have left for later, in ASCENDING
microbatch order. Gradients accumulate in the order of the backwards, and float addition is not
associative: one order everywhere is what makes the schedules bitwise equal to each other, and to
one device that runs the microbatches one after another.
"""

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Final

from lightning_pipeshift.errors import ScheduleError
from lightning_pipeshift.files import shortened
from lightning_pipeshift.plan.schedule.actions import Action, Kind, Row, Schedule

_FEWEST_SIMULATED: Final = 8
"""Of an asynchronous pipeline's minibatches: enough for a drawing."""

NUM_CHUNKS: Final = 2
"""Of layers on each stage of an interleaved schedule: with more of them, messages cost more than
what is gained."""

MOST_MICROBATCHES: Final = 10_000
"""More than any batch is split into; the cost of a simulation grows with their number."""


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019).

    ::

        stage 0   F0 F1 F2 B0 B1 B2
        stage 1   F0 F1 F2 B0 B1 B2

    GPipe itself runs the backwards last microbatch first, see above why we don't. It costs no time:
    the bubble is as large, since the backward of microbatch 0 is ready on the last stage as soon as
    that of any other.
    """
    _require_counts(num_stages, num_microbatches)
    row = _actions(Kind.FORWARD, num_microbatches) + _actions(Kind.BACKWARD, num_microbatches)
    return (row,) * num_stages


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> Schedule:
    """Fill the pipeline, then one backward, one forward in turn.

    Narayanan et al., PipeDream, SOSP 2019; here it is flushed at the end of each step.

    ::

        stage 0   F0 F1 F2 B0 F3 B1 B2 B3
        stage 1   F0 F1 B0 F2 B1 F3 B2 B3
        stage 2   F0 B0 F1 B1 F2 B2 F3 B3

    Stage s has at most ``num_stages - s`` microbatches in flight, regardless of their number: this
    is the purpose of the schedule.
    """
    return _in_turn(num_stages, num_microbatches, lambda stages_left: stages_left)


def eager_one_forward_one_backward(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B whose forwards run ahead, so that no stage waits for a message in transit.

    Zhuang et al., On Optimizing the Communication of Model Parallelism, MLSys 2023, section 4.

    ::

        stage 0   F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5
        stage 1   F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
        stage 2   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    In 1F1B a stage starts the forward that its successor waits for when the backward that the
    successor has just sent arrives: the stage waits for the transit time of every message, and for
    every delay of a neighbour. Here, one more forward is in flight for each boundary after a stage.
    The price is memory: stage s has up to ``2 (num_stages - s) - 1`` microbatches in flight.
    """
    return _in_turn(num_stages, num_microbatches, lambda stages_left: 2 * stages_left - 1)


def zero_bubble_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B whose backwards leave the gradients of the weights for later, when a stage would wait.

    Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.1, ZB-H1.

    ::

        stage 0   F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3
        stage 1   F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        stage 2   F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    Stage s leaves those of s microbatches: with its forwards in flight, it holds tensors of as many
    microbatches as stage 0. A stage that would wait computes them earlier.
    """
    rows = []
    for stage, row in enumerate(one_forward_one_backward(num_stages, num_microbatches)):
        new: list[Action] = []
        for action in row:
            new.append(action)
            if action.kind is Kind.BACKWARD and action.microbatch >= stage:
                new.append(Action(Kind.WEIGHTS, action.microbatch - stage))
        left = range(max(0, num_microbatches - stage), num_microbatches)
        rows.append((*new, *(Action(Kind.WEIGHTS, microbatch) for microbatch in left)))
    return tuple(rows)


def interleaved_one_forward_one_backward(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B on stages that have several chunks of layers each: the pipeline is full sooner.

    Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021,
    section 2.2; here for any number of microbatches.

    ::

        stage 0   F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3
        stage 1   F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3

    The layers of chunk 1 follow those of chunk 0 of all stages. Stage s holds tensors of up to
    ``3 num_stages - 2 s - 1`` forwards of a chunk: the price is memory, and more messages.
    """
    _require_counts(num_stages, num_microbatches)
    if num_stages == 1:
        return one_forward_one_backward(num_stages, num_microbatches)
    chunks = range(NUM_CHUNKS)
    # Whole groups of microbatches, of which some may be none.
    groups = [range(first, first + num_stages) for first in range(0, num_microbatches, num_stages)]
    forwards, backwards = (
        [Action(kind, number, chunk) for group in groups for chunk in order for number in group]
        for kind, order in ((Kind.FORWARD, chunks), (Kind.BACKWARD, chunks[::-1]))
    )
    rows = []
    for stage in range(num_stages):
        num_warm_up = 2 * (num_stages - stage - 1) + (NUM_CHUNKS - 1) * num_stages + 1
        row = _alternating(forwards, backwards, num_warm_up)
        rows.append(tuple(action for action in row if action.microbatch < num_microbatches))
    return tuple(rows)


def _in_turn(num_stages: int, num_microbatches: int, in_flight: Callable[[int], int]) -> Schedule:
    """Fill the pipeline with ``in_flight(num_stages - stage)`` forwards, then take turns."""
    _require_counts(num_stages, num_microbatches)
    forwards = _actions(Kind.FORWARD, num_microbatches)
    backwards = _actions(Kind.BACKWARD, num_microbatches)
    rows = []
    for stage in range(num_stages):
        rows.append(tuple(_alternating(forwards, backwards, in_flight(num_stages - stage))))
    return tuple(rows)


def _alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], num_warm_up: int
) -> list[Action]:
    """Some forwards, and then a backward and a forward in turn."""
    row = list(forwards[:num_warm_up])
    for backward, forward in zip_longest(backwards, forwards[num_warm_up:]):
        row += [backward] if forward is None else [backward, forward]
    return row


def with_recomputation(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """The schedule with an ``R`` before each backward of ``stages``.

    ::

        stage 0   F0 F1 R0 B0 R1 B1
        stage 1   F0 B0 F1 B1

    The recomputation runs while the stage waits for the gradient, and costs nothing if that takes
    at least as long (NUDT, "distributed parallel training method and system for heterogeneous
    computing clusters": recomputation in idle time). A backward directly after its own forward has
    none: it would not shorten the time for which memory is held.
    """
    return tuple(
        row_with_recomputation(row) if stage in stages else row
        for stage, row in enumerate(schedule)
    )


def row_with_recomputation(row: Row) -> Row:
    """The row of a stage that recomputes: see :func:`with_recomputation`."""
    recomputing: list[Action] = []
    for action in row:
        forward = Action(Kind.FORWARD, action.microbatch)
        if action.kind is Kind.BACKWARD and recomputing[-1:] != [forward]:
            recomputing.append(Action(Kind.RECOMPUTE, action.microbatch))
        recomputing.append(action)
    return tuple(recomputing)


@lru_cache(maxsize=256)
def recomputing_stages(name: str, num_stages: int, num_microbatches: int) -> frozenset[int]:
    """The stages of a schedule on which dropping saved tensors frees memory: those that do not run
    each backward directly after its forward.
    """
    if name in ASYNCHRONOUS:
        return frozenset(range(num_stages - 1))
    if num_chunks(name, num_stages) > 1:
        # Backwards run layers again in their middle.
        return frozenset()
    schedule = schedule_named(name)(num_stages, num_microbatches)
    everywhere = with_recomputation(schedule, range(num_stages))
    return frozenset(
        stage
        for stage, row in enumerate(everywhere)
        if any(action.kind is Kind.RECOMPUTE for action in row)
    )


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """For validation, test and prediction.

    ::

        stage 0   F0 F1 F2
        stage 1   F0 F1 F2
    """
    _require_counts(num_stages, num_microbatches)
    return (_actions(Kind.FORWARD, num_microbatches),) * num_stages


def num_chunks(name: str, num_stages: int) -> int:
    """How many chunks of layers each of several stages has in a schedule."""
    return NUM_CHUNKS if name in INTERLEAVED and num_stages > 1 else 1


def in_chunks(ranks: Sequence[int], name: str) -> tuple[int, ...]:
    """The ranks of a virtual machine's stages, once for each chunk of layers, as costs are."""
    return (*ranks,) * num_chunks(name, len(ranks))


ScheduleFunction = Callable[[int, int], Schedule]

SYNCHRONOUS: Final[dict[str, ScheduleFunction]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "eager_1f1b": eager_one_forward_one_backward,
    "zb-h1": zero_bubble_h1,
    "interleaved_1f1b": interleaved_one_forward_one_backward,
}
"""The schedules of one step, which ends with the optimizer's. All have the same result."""

INTERLEAVED: Final = frozenset({"interleaved_1f1b"})
"""Those in which a stage has several chunks of layers."""

ASYNCHRONOUS: Final[dict[str, ScheduleFunction]] = {
    "async": one_forward_one_backward,
    "async-2bw": one_forward_one_backward,
}
"""The schedules of all minibatches between two drains of the pipeline (``asynchronous``): their
microbatches are minibatches."""

SCHEDULES: Final[dict[str, ScheduleFunction]] = SYNCHRONOUS | ASYNCHRONOUS
"""The schedules that a user can name."""


def schedule_named(name: str) -> ScheduleFunction:
    """The schedule that a user named. Raises ScheduleError for an unknown name."""
    if name not in SCHEDULES:
        known = ", ".join(map(repr, SCHEDULES))
        found = shortened(repr(name))
        raise ScheduleError(f"unknown schedule {found}; choose one of {known}")
    return SCHEDULES[name]


def simulated_rows(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """The rows from which a schedule's time and memory are predicted: those of a step, or of
    enough minibatches to fill an asynchronous pipeline, keep it full and drain it.

    Args:
        name: of the schedule.
        num_stages: a stage with several chunks of layers counts once for each.
        num_microbatches: of a step.
    """
    if name in ASYNCHRONOUS:
        num_microbatches = max(_FEWEST_SIMULATED, 3 * num_stages)
    return schedule_named(name)(num_stages // num_chunks(name, num_stages), num_microbatches)


def _actions(kind: Kind, num_microbatches: int) -> Row:
    return tuple(Action(kind, microbatch) for microbatch in range(num_microbatches))


def _require_counts(num_stages: int, num_microbatches: int) -> None:
    for found, what in ((num_stages, "stages"), (num_microbatches, "microbatches")):
        if found < 1:
            raise ScheduleError(f"a schedule for {found} {what}; it needs at least 1")
