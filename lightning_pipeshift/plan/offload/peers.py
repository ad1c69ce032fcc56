"""Chooses which stages lend memory to which: the mapping search of CN114880130B, after MPress (HPCA
2023), step 3.

Mappings of the stages that lack memory to those with spare memory are enumerated, and scored by how
well they fill spare memory and links.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from heapq import nsmallest
from typing import NamedTuple

from lightning_pipeshift.plan.cost.memory_timeline import Links
from lightning_pipeshift.plan.inputs.effort import USUAL, Effort

Lenders = tuple[int, ...]
"""Stages that take tensors of another one."""


class _Loan(NamedTuple):
    """How lenders take all that a stage lacks, in proportion to the links.

    Args:
        lenders: the stages.
        sizes: the bytes that each of them takes.
        seconds: how long the slowest of the links needs.
        left_out: the bytes that no stage takes, if there are no lenders.
    """

    lenders: Lenders
    sizes: tuple[float, ...]
    seconds: float
    left_out: float

    @classmethod
    def of(cls, stage: int, need: float, lenders: Lenders, links: Links) -> _Loan:
        if not lenders:
            return cls((), (), 0.0, need)
        shares = shares_of(stage, lenders, links)
        total = sum(shares)
        sizes = tuple(need * share / total for share in shares)
        each = (links.seconds(stage, *pair) for pair in zip(lenders, sizes, strict=True))
        return cls(lenders, sizes, max(each), 0.0)


class _Mapping(NamedTuple):
    """A mapping of stages to lenders, and its result.

    Args:
        lenders: of each stage that lacks memory.
        left: the spare bytes of each stage; negative where it takes more than it has.
        over: the bytes that fit on no stage.
        seconds: how long the slowest link needs for its part.
    """

    lenders: dict[int, Lenders]
    left: tuple[float, ...]
    over: float = 0.0
    seconds: float = 0.0

    def score_with(self, loan: _Loan) -> tuple[float, float]:
        """The bytes that do not fit with one more loan, and the seconds of transferring the
        rest.
        """
        over = self.over + loan.left_out
        for lender, size in zip(loan.lenders, loan.sizes, strict=True):
            left = self.left[lender]
            if size > left:
                over += size - left if left > 0 else size
        # Whole bytes: otherwise rounding decides, and not the seconds.
        return round(over), max(self.seconds, loan.seconds)

    def plus(self, stage: int, loan: _Loan) -> _Mapping:
        """The same, with one more loan."""
        left = list(self.left)
        for lender, size in zip(loan.lenders, loan.sizes, strict=True):
            left[lender] -= size
        return _Mapping({**self.lenders, stage: loan.lenders}, tuple(left), *self.score_with(loan))


def mappings(
    needs: Mapping[int, float], spare: Sequence[float], links: Links, effort: Effort = USUAL
) -> list[dict[int, Lenders]]:
    """Mappings of stages to lenders, the best first.

    Args:
        needs: bytes that stages lack.
        spare: bytes that each stage has left; negative values count as 0.
        links: between the stages.
        effort: the limits of the search.
    """
    return [
        mapping.lenders for mapping in _best(needs, spare, links, effort)[: effort.mappings_tried]
    ]


def mapping_score(
    needs: Mapping[int, float], spare: Sequence[float], links: Links, effort: Effort = USUAL
) -> tuple[float, float]:
    """How well the best of these mappings fills spare memory and links, lower is better: the bytes
    that fit on no stage, and the seconds that the slowest link needs for the rest.
    """
    best = _best(needs, spare, links, effort)[0]
    return best.over, best.seconds


def _best(
    needs: Mapping[int, float], spare: Sequence[float], links: Links, effort: Effort
) -> list[_Mapping]:
    best = [_Mapping({}, tuple(max(0.0, left) for left in spare))]
    # The stages with the largest needs first: only the best mappings of the first ones are kept.
    for stage in sorted(needs, key=lambda stage: (-needs[stage], stage)):
        has_room = [s for s, left in enumerate(spare) if left > 0 and links.rate(stage, s)]
        loans: dict[Lenders, _Loan] = {}
        longer = []
        for mapping in best:
            emptiest = sorted(has_room, key=lambda s: -mapping.left[s])
            asked = sorted(emptiest[: 2 * effort.lenders])
            for count in range(effort.lenders + 1):
                for lenders in itertools.combinations(asked, count):
                    if lenders not in loans:
                        loans[lenders] = _Loan.of(stage, needs[stage], lenders, links)
                    longer.append((mapping.score_with(loans[lenders]), mapping, loans[lenders]))
        # As a sort: of equally good ones the first.
        kept = nsmallest(effort.mappings, longer, key=lambda each: each[0])
        best = [mapping.plus(stage, loan) for _, mapping, loan in kept]
    return best


def shares_of(stage: int, lenders: Lenders, links: Links) -> tuple[float, ...]:
    """Blocks in proportion to the bandwidth of the links."""
    rates = [links.rate(stage, lender) for lender in lenders]
    if not all(map(math.isfinite, rates)):
        return (1.0,) * len(lenders)
    return tuple(rate / min(rates) for rate in rates)
