"""Chooses which stages lend memory to which: the mapping search of CN114880130B, after MPress (HPCA
2023), step 3.

Mappings of the stages that lack memory to those with spare memory are enumerated, and scored by how
well they fill spare memory and links.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_pipeshift.plan.cost.memory_timeline import Links
from lightning_pipeshift.plan.inputs.effort import USUAL, Effort

Lenders = tuple[int, ...]
"""Stages that take tensors of another one."""


class _Mapping(NamedTuple):
    """A mapping of stages to lenders, and its result.

    Args:
        lenders: of each stage that lacks memory.
        taken: the bytes that each stage takes.
        left_out: the bytes that no stage takes.
        seconds: how long the slowest link needs for its part.
    """

    lenders: dict[int, Lenders]
    taken: tuple[float, ...]
    left_out: float = 0.0
    seconds: float = 0.0

    def score(self, spare: Sequence[float]) -> tuple[float, float]:
        """The bytes that do not fit, and the seconds of transferring the rest."""
        over = sum(
            max(0.0, size - max(0.0, left)) for size, left in zip(self.taken, spare, strict=True)
        )
        return self.left_out + over, self.seconds

    def plus(self, stage: int, need: float, lenders: Lenders, links: Links) -> _Mapping:
        """The same, with lenders for one more stage, in proportion to the links."""
        mapping = {**self.lenders, stage: lenders}
        if not lenders:
            return self._replace(lenders=mapping, left_out=self.left_out + need)
        taken, seconds = list(self.taken), self.seconds
        shares = shares_of(stage, lenders, links)
        for lender, share in zip(lenders, shares, strict=True):
            size = need * share / sum(shares)
            taken[lender] += size
            seconds = max(seconds, links.seconds(stage, lender, size))
        return _Mapping(mapping, tuple(taken), self.left_out, seconds)


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
    return _best(needs, spare, links, effort)[0].score(spare)


def _best(
    needs: Mapping[int, float], spare: Sequence[float], links: Links, effort: Effort
) -> list[_Mapping]:
    best = [_Mapping({}, (0.0,) * len(spare))]
    # The stages with the largest needs first: only the best mappings of the first ones are kept.
    for stage in sorted(needs, key=lambda stage: (-needs[stage], stage)):
        has_room = [s for s, left in enumerate(spare) if left > 0 and links.rate(stage, s)]
        longer = []
        for mapping in best:
            emptiest = sorted(has_room, key=lambda s: mapping.taken[s] - spare[s])
            asked = sorted(emptiest[: 2 * effort.lenders])
            for count in range(effort.lenders + 1):
                for lenders in itertools.combinations(asked, count):
                    longer.append(mapping.plus(stage, needs[stage], lenders, links))
        longer.sort(key=lambda mapping: mapping.score(spare))
        best = longer[: effort.mappings]
    return best


def shares_of(stage: int, lenders: Lenders, links: Links) -> tuple[float, ...]:
    """Blocks in proportion to the bandwidth of the links."""
    rates = [links.rate(stage, lender) for lender in lenders]
    if not all(map(math.isfinite, rates)):
        return (1.0,) * len(lenders)
    return tuple(rate / min(rates) for rate in rates)
