"""Chooses which stages lend memory to which: the mapping search of CN114880130B, after MPress (HPCA
2023), step 3.

Mappings of the stages that lack memory to those with spare memory are enumerated, and scored by how
well they fill spare memory and links.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from lightning_pipeshift.plan.cost.memory_timeline import Links

_MOST_LENDERS: Final = 3
"""The largest number of lenders for one stage."""

_MOST_ASKED: Final = 6
"""A stage's lenders are chosen among this many stages, those with the most spare memory."""

_MOST_MAPPINGS: Final = 64
_BEST_MAPPINGS: Final = 3
"""How many mappings are extended from stage to stage, and how many are returned."""

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
    needs: Mapping[int, float], spare: Sequence[float], links: Links
) -> list[dict[int, Lenders]]:
    """Mappings of stages to lenders, the best first.

    Args:
        needs: bytes that stages lack.
        spare: bytes that each stage has left; negative values count as 0.
        links: between the stages.
    """
    return [mapping.lenders for mapping in _best(needs, spare, links)[:_BEST_MAPPINGS]]


def mapping_score(
    needs: Mapping[int, float], spare: Sequence[float], links: Links
) -> tuple[float, float]:
    """How well the best of these mappings fills spare memory and links, lower is better: the bytes
    that fit on no stage, and the seconds that the slowest link needs for the rest.
    """
    return _best(needs, spare, links)[0].score(spare)


def _best(needs: Mapping[int, float], spare: Sequence[float], links: Links) -> list[_Mapping]:
    best = [_Mapping({}, (0.0,) * len(spare))]
    # The stages with the largest needs first: only the best mappings of the first ones are kept.
    for stage in sorted(needs, key=lambda stage: (-needs[stage], stage)):
        has_room = [s for s, left in enumerate(spare) if left > 0 and links.rate(stage, s)]
        longer = []
        for mapping in best:
            emptiest = sorted(has_room, key=lambda s: mapping.taken[s] - spare[s])[:_MOST_ASKED]
            for count in range(_MOST_LENDERS + 1):
                for lenders in itertools.combinations(sorted(emptiest), count):
                    longer.append(mapping.plus(stage, needs[stage], lenders, links))
        longer.sort(key=lambda mapping: mapping.score(spare))
        best = longer[:_MOST_MAPPINGS]
    return best


def shares_of(stage: int, lenders: Lenders, links: Links) -> tuple[float, ...]:
    """Blocks in proportion to the bandwidth of the links."""
    rates = [links.rate(stage, lender) for lender in lenders]
    if not all(map(math.isfinite, rates)):
        return (1.0,) * len(lenders)
    return tuple(rate / min(rates) for rate in rates)
