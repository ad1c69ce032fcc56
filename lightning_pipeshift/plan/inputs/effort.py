"""How much a planner tries, and how much better a change has to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The limits of a search. ``python -m benchmarks.planner_effort`` changes one after the other,
    and shows by how much plans of random cases become worse or better, and the search slower.

    Args:
        few_ranks: up to this many ranks all numbers of virtual machines are tried, each in its
            best orders.
        groupings_each: if there are at most this many groupings into a number of virtual machines,
            all are tried; otherwise those for which there is a reason.
        groupings_improved: of how many groupings orders and cuts are searched; of many ranks fewer.
        groupings_finished: for how many of these all numbers of microbatches are tried.
        orders: if stages have at most this many orders (those of five), all are tried; otherwise
            those with two stages exchanged, or one moved, as long as that helps.
        orders_cut: for how many of the best orders of few ranks the cuts are found with care.
        orders_improved: from how many orders a search goes on to others.
        orders_kept: how many of the best orders a search returns.
        orders_compressed: for how many of them the handling of saved tensors is planned.
        actions: the largest product of stages and microbatches that is chosen, and that is
            simulated to find the best order: the simulator takes a second for it.
        stages: deeper pipelines are not tried: they are mostly idle, and take long to plan. With
            more ranks than this, closed forms decide about most choices.
        stages_cut: up to this many stages, cuts of a step are improved on the simulator.
        cuts_improved: how many cuts are improved together.
        cuts_moved: how many neighbouring cuts move together, at most.
        saved_parts: the fractions of their saved tensors that must fit on stages when cuts are
            looked for, if tensors may move: 0 if all may, 1 if none does.
        assignments: how many ways to handle the saved tensors of a cut are tried.
        tensors_assigned: how many tensors these may have together.
        actions_assigned: how many actions of stages their schedules may have together.
        smallest_bytes: a smaller tensor moves only if nothing else fits.
        promising: groupings that cannot reach this fraction of the best so far are left out.
        worth_changing: the factor by which unequal shares of the batch, more microbatches, or
            another order of the ranks than the given one must make training faster: predictions
            are hardly nearer to the truth.
        worth_inside: the same for a cut inside of a residual block: there are costs that the model
            does not include (more tensors to send, more to clone).
        alike: times whose ratio is less are equal: measurements are hardly nearer to each other.
        close: a plan within this factor of a lower bound is not improved further.
        work_weight: the weight of a second of a link's time, or of recomputation, in seconds of
            the step: of equally fast plans, the one that moves and recomputes less is better.
    """

    few_ranks: int = 12
    groupings_each: int = 8
    groupings_improved: int = 12
    groupings_finished: int = 3
    orders: int = 120
    orders_cut: int = 4
    orders_improved: int = 2
    orders_kept: int = 24
    orders_compressed: int = 6
    actions: int = 1 << 14
    stages: int = 64
    stages_cut: int = 32
    cuts_improved: int = 4
    cuts_moved: int = 8
    saved_parts: tuple[float, ...] = (0.0, 0.5, 1.0)
    assignments: int = 500
    tensors_assigned: int = 1 << 17
    actions_assigned: int = 1 << 19
    smallest_bytes: int = 1 << 16
    promising: float = 0.9
    worth_changing: float = 1.02
    worth_inside: float = 1.1
    alike: float = 1.03
    close: float = 1.001
    work_weight: float = 1e-3

    def trials(self, num_tensors: int, num_actions: int) -> int:
        """How many assignments of this many tensors are tried, for a schedule with this many
        actions of all stages.
        """
        return min(
            self.assignments,
            self.tensors_assigned // max(1, num_tensors),
            self.actions_assigned // max(1, num_actions),
        )


USUAL: Final = Effort()
"""The effort of a search, unless another one is asked for."""
