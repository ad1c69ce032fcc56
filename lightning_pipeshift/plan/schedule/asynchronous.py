"""The asynchronous pipeline, which does not drain between two minibatches.

PipeDream (Narayanan et al., SOSP 2019, section 3.2; CN115454655A): each batch of the loader is one
minibatch, and one microbatch at once. When minibatch ``k`` arrives, stage ``s`` of ``N`` runs its
forward, then the backward of minibatch ``k - (N - 1 - s)``, and steps its optimizer::

    minibatch   0       1       2       3       4        drain
    stage 0     F0      F1      F2 B0   F3 B1   F4 B2    B3 B4
    stage 1     F0      F1 B0   F2 B1   F3 B2   F4 B3    B4
    stage 2     F0 B0   F1 B1   F2 B2   F3 B3   F4 B4

Over all minibatches between two drains this is 1F1B with that many microbatches, so nothing new has
to be proved of it. What differs is when optimizers step: after each backward, so a forward uses
weights that lack the updates of the minibatches in flight.

PipeDream-2BW (Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021, section
3.1) accumulates the gradients of ``m >= N`` minibatches into one update. Its forwards use the
weights before the last update, on every stage, so two versions suffice, and results do not depend
on the split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from lightning_pipeshift.errors import PlanError, ScheduleError
from lightning_pipeshift.plan.schedule.actions import Action, Kind, Row


def turn(minibatch: int, stage: int, num_stages: int, first: int = 0) -> Row:
    """The actions of a stage when a minibatch arrives.

    Args:
        minibatch: its number.
        stage: the stage.
        num_stages: of the pipeline.
        first: the first minibatch since the pipeline was empty.

    Raises:
        ScheduleError: the minibatch is from before that.
    """
    if not 0 <= first <= minibatch:
        raise ScheduleError(
            f"minibatch {minibatch} of a pipeline that was filled from minibatch {first} on"
        )
    forward = Action(Kind.FORWARD, minibatch)
    due = minibatch - _num_behind(stage, num_stages)
    return (forward, Action(Kind.BACKWARD, due)) if due >= first else (forward,)


def drain(last: int, stage: int, num_stages: int, first: int = 0) -> Row:
    """The actions of a stage after its turn for the last minibatch, which leave the pipeline empty.

    Args:
        last: the last minibatch that was begun.
        stage: the stage.
        num_stages: of the pipeline.
        first: the first minibatch since the pipeline was empty.
    """
    begin = max(first, last - _num_behind(stage, num_stages) + 1)
    return tuple(Action(Kind.BACKWARD, minibatch) for minibatch in range(begin, last + 1))


def ahead(minibatch: int, stage: int, num_stages: int, first: int = 0) -> Row:
    """The actions that follow a stage's turn for a minibatch, until its own backward, if the
    pipeline does not drain before.

    Args:
        minibatch: its number.
        stage: the stage.
        num_stages: of the pipeline.
        first: the first minibatch since the pipeline was empty.
    """
    later = range(minibatch + 1, minibatch + 1 + _num_behind(stage, num_stages))
    return tuple(chain.from_iterable(turn(each, stage, num_stages, first) for each in later))


def _num_behind(stage: int, num_stages: int) -> int:
    """By how many minibatches a stage's backwards follow its forwards."""
    if not 0 <= stage < num_stages:
        raise ScheduleError(f"stage {stage} of a pipeline with the stages 0 to {num_stages - 1}")
    return num_stages - 1 - stage


def weight_versions(schedule: str, num_stages: int, num_accumulated: int = 1) -> tuple[int, ...]:
    """The largest number of versions of its trained weights that each stage holds.

    Args:
        schedule: by name; a synchronous one has one version.
        num_stages: of the pipeline.
        num_accumulated: how many minibatches make an update.
    """
    if schedule == "async":
        behind = (_num_behind(stage, num_stages) for stage in range(num_stages))
        return tuple(1 + -(-each // num_accumulated) for each in behind)
    return (2 if schedule == "async-2bw" else 1,) * num_stages


def shared_copies(
    schedule: str, num_stages: int, num_accumulated: int = 1
) -> tuple[tuple[int, int], ...]:
    """How many copies of a parameter that several stages share each stage holds at most in addition
    to those of its own parameters: if it is the first of these stages, and if it is another one.

    In its backward the first stage has the gradient that it gets from the next one, and the sum
    with its own. In an asynchronous pipeline it alone trains the parameter, and sends its values
    with each minibatch: the others have a copy for each minibatch in flight, and neither old
    versions nor gradients of their own.

    Args:
        schedule: by name.
        num_stages: of the pipeline.
        num_accumulated: how many minibatches make an update.
    """
    if num_stages == 1:
        return ((0, 0),)
    if schedule not in ("async", "async-2bw"):
        return ((2, 0),) * num_stages
    versions = weight_versions(schedule, num_stages, num_accumulated)
    return tuple(
        (2, max(0, num_stages - stage - num_versions + 1))
        for stage, num_versions in enumerate(versions)
    )


def updates_per_backward(schedule: str, num_stages: int, num_accumulated: int = 1) -> float:
    """How often a stage steps its optimizer, relative to its backwards: 0 for a synchronous
    schedule, whose update comes after all of them.
    """
    fewest = {"async": 1, "async-2bw": num_stages}.get(schedule)
    return 1 / max(fewest, num_accumulated) if fewest else 0.0


def require_equal_depths(schedule: str, depths: Iterable[int]) -> None:
    """Raises PlanError for virtual machines of unequal depth where results depend on it.

    Args:
        schedule: by name.
        depths: the number of stages of each virtual machine.
    """
    found = list(depths)
    if schedule == "async" and len(set(found)) > 1:
        raise PlanError(
            f"schedule='async' with virtual machines of {', '.join(map(str, found))} stages: a"
            " deeper pipeline uses older weights, so the gradients of one minibatch would be of"
            " different weights on each virtual machine. Use virtual machines of equal depth, or"
            " schedule='async-2bw', whose weights are equally old in all of them"
        )


def require_deepest_first(depths: Sequence[int]) -> None:
    """Raises PlanError if the first virtual machine has fewer stages than another one.

    Its first rank tells all others of each minibatch before it begins with it itself. In a deeper
    pipeline the gradient of a minibatch is complete only while later ones run, of which the first
    rank has not told yet: it would wait for that gradient for ever.

    Args:
        depths: the number of stages of each virtual machine.
    """
    if depths[0] < max(depths):
        raise PlanError(
            f"An asynchronous pipeline with virtual machines of {', '.join(map(str, depths))}"
            " stages: the first one has to be as deep as any other, as all follow its first rank."
            " Name the deepest one first, with rank 0 as its first stage, for example"
            " virtual_machines=[[0, 1], [2]]"
        )
