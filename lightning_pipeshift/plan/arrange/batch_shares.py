"""Shares of the batch with which virtual machines of different speeds take equal time."""

from __future__ import annotations

import math

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.arrange.evaluator import Candidate, CostModel, Cuts, Evaluator


def balanced_shares(
    placer: Evaluator, placed: Candidate, cost: CostModel
) -> tuple[Candidate, Cuts]:
    """Returns the choice with shares under which all virtual machines take equal time, if that
    gains enough.

    A step's time is not proportional to its samples, so this alternates between shares and times:
    each share is corrected by the ratio of its time to the others'. The cuts of equal shares are
    used if they still fit: shares have little effect on the best cuts.

    Args:
        placer: has the model, the machines and the request.
        placed: a choice with any shares; if equal shares do not fit, with ones that do.
        cost: computes the seconds of each virtual machine.
    """
    count = len(placed.ranks)
    if not placer.request.chooses_shares or count == 1:
        return placed, placer.cuts(placed)
    equal = placer.placed(placed.ranks, placed.microbatches)
    try:
        first, cuts = equal, placer.cuts(equal)
    except PlanError:
        first, cuts = placed, placer.cuts(placed)
    # Equal virtual machines are computed once.
    pairs = list(zip(first.workloads, cuts, strict=True))
    same = {pair: vm for vm, pair in enumerate(pairs)}
    stands = [same[pair] for pair in pairs]
    all_sizes = placer.sizes(count, first.batch_shares)
    sizes = {vm: all_sizes[vm] for vm in same.values()}
    effort, before = placer.request.effort, math.inf
    while True:
        times = {
            vm: cost.alone(
                placer.workload(first.links, first.ranks[vm], size, first.microbatches),
                cuts[vm],
            )
            for vm, size in sizes.items()
        }
        shortest, longest = min(times.values()), max(times.values())
        ratio = longest / shortest if shortest else 1.0
        # A difference that remains may be the rounding to whole samples.
        if ratio <= effort.alike or ratio * effort.alike >= before:
            break
        before = ratio
        wanted = {vm: size / times[vm] for vm, size in sizes.items()}
        unit = placer.total(count) / sum(wanted[vm] for vm in stands)
        sizes = {vm: size * unit for vm, size in wanted.items()}
    best, fitting, least = first, cuts, cost.step(first, cuts) / effort.worth_changing
    # If a correction exceeds a device's memory, a part of it is tried.
    is_large = placer.cluster.num_ranks > effort.stages
    for part in (1.0,) if is_large else (1.0, 0.5, 0.25):
        wished = [
            size + part * (sizes[vm] - size) for vm, size in zip(stands, all_sizes, strict=True)
        ]
        shared = placer.placed(first.ranks, first.microbatches, wished)
        try:
            same_fit = all(
                workload.memory.fits(cut)
                for workload, cut in dict.fromkeys(zip(shared.workloads, cuts, strict=True))
            )
            others = cuts if same_fit else placer.cuts(shared)
        except PlanError:
            continue
        if (seconds := cost.step(shared, others)) < least:
            best, fitting, least = shared, others, seconds
        if same_fit:
            break
    return best, fitting
