"""How much a planner tries, and how much better a change has to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WORTH_CHANGING: Final = 1.02
"""The factor by which unequal shares of the batch, or another order of the ranks than the given
one, must make training faster: predictions are hardly nearer to the truth."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The limits of a search. The usual ones were found on random cases: more takes longer and
    gains less than a thousandth in the mean (``benchmarks/planner.py``).

    Args:
        few_ranks: up to this many ranks all groupings are tried, each in its best orders.
        groupings_simulated: how many groupings are tried on the simulator; of many ranks fewer.
        groupings_finished: for how many of these the cuts are found with care, likewise.
        orders: if stages have at most this many orders (those of five), all are tried; otherwise as
            many swaps of two stages.
        orders_cut: for how many of the best orders of few ranks the cuts are found with care.
        orders_compressed: for how many of them the handling of saved tensors is planned.
        actions_simulated: up to this product of virtual machines, stages and microbatches, the
            simulator decides about microbatches and shares.
        stages_cut: up to this many stages, cuts are improved on the simulator.
        assignments: how many ways to handle the saved tensors of a cut are tried.
        tensors_assigned: how many tensors these may have together.
    """

    few_ranks: int = 8
    groupings_simulated: int = 18
    groupings_finished: int = 3
    orders: int = 120
    orders_cut: int = 8
    orders_compressed: int = 6
    actions_simulated: int = 1 << 11
    stages_cut: int = 32
    assignments: int = 500
    tensors_assigned: int = 1 << 17

    def trials(self, num_tensors: int) -> int:
        """How many assignments of this many tensors are tried."""
        return min(self.assignments, self.tensors_assigned // max(1, num_tensors))


USUAL: Final = Effort()
"""The effort of a search, unless another one is asked for."""
