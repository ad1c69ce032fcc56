"""Notices a rank that has become slower than its plan expects, while the others have not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Final

from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.schedule.actions import Kind
from lightning_pipeshift.text import seconds_text
from lightning_pipeshift.timeline.recording import RankRecord, Recording

_FACTOR: Final = 1.3
"""So many times as long as expected is slow, if the others are not as slow themselves."""
_PATIENCE: Final = 3
"""For how many recorded steps in a row a rank has to be slow before it is reported."""


class SlowRanks:
    """Compares recorded steps with what was expected of them."""

    def __init__(self) -> None:
        self._num_slow: dict[int, int] = {}

    def look(self, measured: Recording, expected: Recording | None) -> list[str]:
        """Returns a message for each rank that is found to be slow now. It is reported again only
        when it has been as fast as expected meanwhile.

        Args:
            measured: a step.
            expected: the same step by the plan; ``None`` if it predicts nothing.
        """
        if expected is None:
            return []
        by_place = {(each.vm, each.stage): each.compute_seconds for each in expected.ranks}
        ratios: dict[int, float] = {}
        for record in measured.ranks:
            seconds = by_place.get((record.vm, record.stage), 0.0)
            if seconds:
                ratios[record.rank] = record.compute_seconds / seconds
        messages = []
        for record in measured.ranks:
            ratio = ratios.get(record.rank)
            if ratio is None:
                continue
            others = [other for rank, other in ratios.items() if rank != record.rank]
            is_slow = ratio > _FACTOR * max(1.0, median(others) if others else 1.0)
            count = self._num_slow[record.rank] = (
                self._num_slow.get(record.rank, 0) + 1 if is_slow else 0
            )
            if count == _PATIENCE:
                messages.append(
                    _message(record, ratio, by_place[record.vm, record.stage], measured)
                )
        return messages


def slow_rank(recordings: Sequence[Recording]) -> str:
    """Names the rank that has delivered least in all recorded steps, by the work of its forwards as
    the plan has it; empty if none is slow, or no layer's time is known.
    """
    took: defaultdict[tuple[int, str], float] = defaultdict(float)
    work = took.copy()
    for recording in recordings:
        plan = Plan.from_json(recording.plan) if recording.plan else None
        for record in recording.ranks if plan is not None else ():
            assert plan is not None
            own = plan.placement.layers_of(record.vm, record.stage)
            forwards = [each for each in record.spans if each.action.kind is Kind.FORWARD]
            took[record.rank, record.host] += sum(each.end - each.start for each in forwards)
            seconds = sum(plan.layers[layer].forward_seconds for layer in own)
            work[record.rank, record.host] += len(forwards) * seconds
    rates = {place: work[place] / took[place] for place in took if work[place] and took[place]}
    if not rates or max(rates.values()) < _FACTOR * min(rates.values()):
        return ""
    rank, host = min(rates, key=lambda place: rates[place])
    part = rates[rank, host] / max(rates.values())
    return (
        f"Rank {rank} on {host} is slow: in one second it delivers what the fastest rank does in"
        f" {seconds_text(part)}."
    )


def _message(record: RankRecord, ratio: float, expected: float, measured: Recording) -> str:
    number = measured.num_steps
    took, should = (seconds_text(each / number) for each in (record.compute_seconds, expected))
    return (
        f"rank {record.rank} (stage {record.stage} of virtual machine {record.vm}, host"
        f" {record.host}) is {ratio:.1f} times as slow as its plan expects: it computes for {took}"
        f" in a step instead of {should}, and so delivers {1 / ratio:.2f} s of work in a second."
        " Look for another job there, or let"
        " `LayerMigration()` move layers away from it"
    )
