"""Decides how every saved tensor is handled, so that each stage keeps its budget at the least cost
in step time.

CN114880130B, after MPress (HPCA 2023), steps 2 to 4: device-to-device swaps where the time is
short, host swaps where there is time for them, recomputation where both cost more, and any fitting
alternative if memory or time is missing; the mappings of lenders are enumerated and scored; and the
plan is tried on the simulator and improved until it no longer improves. Here the simulator also
models the stages' idle time, so the search finds that a recomputation in it costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from lightning_pipeshift.errors import BudgetError
from lightning_pipeshift.plan.cost.workload import Cut
from lightning_pipeshift.plan.inputs.policies import TensorRecord
from lightning_pipeshift.plan.inputs.saved_tensors import Choice, Swap
from lightning_pipeshift.plan.offload.assignment_search import (
    ROUNDING,
    Assigned,
    Compressed,
    Problem,
    Search,
)
from lightning_pipeshift.plan.schedule.asynchronous import weight_versions
from lightning_pipeshift.text import ceil_bytes_text

_CAUTION: Final = 2.0
"""The factor for transfer times under which a preferred plan still works. Ranks that share a host
share its memory's bandwidth; and with a plan whose transfers all end just in time, the compute
would wait for most of them."""


def fastest(problem: Problem, cuts: Sequence[Sequence[int]]) -> Compressed:
    """The fastest of some cuts of a virtual machine, with the handling of its saved tensors.

    Args:
        problem: the virtual machine's.
        cuts: layers per stage.

    Raises:
        BudgetError: no cut fits; the message contains a budget for the first.
    """
    for caution in (_CAUTION, 1.0):
        careful = Compression(replace(problem, links=problem.links.slowed(caution)))
        found, errors = [], []
        for counts in cuts:
            try:
                found.append(careful.compressed(counts))
            except BudgetError as error:
                errors.append(error)
        if found:
            return min(found, key=lambda one: one.seconds)
    raise errors[0]


class Compression:
    """Searches for the best assignment for one virtual machine.

    Args:
        problem: the virtual machine's.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._limits = problem.limits

    def compressed(self, counts: Sequence[int]) -> Compressed:
        """The best result for a cut.

        Raises:
            BudgetError: nothing fits; the message contains a budget that would.
        """
        search = Search(self._problem, Cut(tuple(counts)))
        best = search.best()
        if search.score(best).excess_bytes > 0:
            raise self._nothing_fits(search, best)
        return search.result(best)

    def records(self, counts: Sequence[int]) -> Iterator[TensorRecord]:
        """Every saved tensor of a cut, as policies see it."""
        return Search(self._problem, Cut(tuple(counts))).records()

    def follows(self, cut: Cut, swaps: Sequence[Swap]) -> bool:
        """Whether all tensors are handled as the policy chooses.

        Args:
            cut: the owners of the layers, and the recomputed layers.
            swaps: the swapped tensors.
        """
        search = Search(self._problem, Cut(cut.counts))
        ways: dict[tuple[int, int], Choice] = {
            (swap.layer, number): swap.choice for swap in swaps for number in swap.tensors
        }
        ways |= {key: Choice.RECOMPUTE for key in self._problem.sizes if key[0] in cut.recompute}
        return all(ways.get(key, Choice.KEEP) is choice for key, choice in search.asked.items())

    def _nothing_fits(self, search: Search, best: Assigned) -> BudgetError:
        found = search.footprint(best)
        lacking = [
            peak / ROUNDING - limit.budget_bytes
            for peak, limit in zip(found.peak_bytes, self._limits, strict=True)
        ]
        if max(lacking) <= 0:
            return self._host_is_short(search, best)
        stage = max(range(len(lacking)), key=lacking.__getitem__)
        needed = max(found.peak_bytes)
        static, budget = found.static_bytes[stage], self._limits[stage].budget_bytes
        num_versions = self._problem.workload.num_versions[stage]
        weights = f"{num_versions} versions of the weights" if num_versions > 1 else "weights"
        remedies = [f"a budget of {ceil_bytes_text(needed)} would do"]
        fewest = weight_versions("async-2bw", len(lacking))[stage]
        if num_versions > fewest:
            remedies.append(f"so may schedule='async-2bw', which keeps {fewest} versions")
        if static >= budget:
            remedies.append("so would more stages, as weights and the optimizer's state fill it")
        else:
            remedies.append("so may smaller microbatches")
        if any(trace.host_bytes > limit.host_bytes for trace, limit in search.traces(best)) or (
            not any(limit.host_bytes for limit in self._limits)
        ):
            remedies.append("or more host memory (`host_budget`)")
        has, peak, fixed = map(ceil_bytes_text, (budget, found.peak_bytes[stage], static))
        return BudgetError(
            f"No plan keeps the memory budget: stage {stage} has {has}, and needs {peak} in the"
            f" best plan found, {fixed} of it for {weights}, gradients, the optimizer's state and"
            f" messages between stages. What would help: {'; '.join(remedies)}."
        )

    def _host_is_short(self, search: Search, best: Assigned) -> BudgetError:
        stage, (trace, limit) = max(
            enumerate(search.traces(best)),
            key=lambda one: one[1][0].host_bytes - one[1][1].host_bytes,
        )
        has, needs = map(ceil_bytes_text, (limit.host_bytes, trace.host_bytes))
        return BudgetError(
            f"No plan keeps the memory budget: the host of stage {stage} has {has} for swapped"
            f" tensors (`host_budget`), and the best plan found needs {needs}. What would help:"
            f" {needs} there, or a larger budget on the device, so that less has to move."
        )
