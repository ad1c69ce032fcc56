"""Chooses the number of microbatches of a batch.

With more of them, stages are busy for more of the step, and each takes less memory; but each adds
the time of an action outside its layers, and a message's latency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.arrange.evaluator import Candidate, Evaluator, num_slices
from lightning_pipeshift.plan.arrange.groupings import Groups
from lightning_pipeshift.plan.arrange.request import PlanRequest
from lightning_pipeshift.plan.cost.pace import Objective


def slices(placer: Evaluator, ranks: Groups, shares: Sequence[float] | None) -> dict[int, float]:
    """Returns numbers of microbatches, each with the steps per second if all stages took equal
    time.

    Args:
        placer: has the model, the machines and the request.
        ranks: of each virtual machine.
        shares: how the global batch is divided; ``None``: equally.
    """
    profile, cluster = placer.profile, placer.cluster
    sizes = placer.sizes(len(ranks), shares)
    payloads = [layer.payload_bytes for layer in profile.layers[:-1]]
    usual = median(payloads) if payloads else 0
    machines = []
    # Equal virtual machines are computed once.
    for machine, size in zip(ranks, sizes, strict=True):
        power = sum(placer.powers[rank] for rank in machine) * profile.samples
        links = frozenset(cluster.link(*ends) for ends in pairwise(machine))
        times = profile.times_on(cluster.devices[machine[0]])
        extra = times.action_forward + times.action_backward
        machines.append((len(machine), size, power, extra, links))
    rates = {}
    for number in numbers_of_slices(placer.request, max(map(len, ranks))):
        seconds = profile.step_seconds
        for num_stages, size, power, extra, links in set(machines):
            count = num_slices(size, number)
            messages = [link.seconds(size / count / profile.samples * usual) for link in links]
            pace = max([size / count / power + extra, *messages])
            objective = Objective.of(placer.request.schedule, count)
            seconds = max(seconds, objective.seconds(num_stages * pace, pace))
        rates[number] = 1 / seconds if seconds else math.inf
    return rates


def numbers_of_slices(request: PlanRequest, num_stages: int) -> list[int]:
    """The numbers to try: powers of two, and those times the number of stages; or the requested
    number.

    Args:
        request: the request, which has the number of samples of a batch.
        num_stages: of the deepest pipeline.
    """
    if isinstance(request.microbatches, int):
        return [request.microbatches]
    most = max(1, int(request.step_samples or request.batch_samples))
    powers = [1 << exponent for exponent in range(most.bit_length())]
    counts = {most, *powers, *(num_stages * power for power in powers)}
    return sorted(
        count
        for count in counts
        if count == 1 or (count <= most and count * num_stages <= request.effort.actions)
    )


def resliced(placer: Evaluator, placed: Candidate) -> Candidate:
    """Returns the choice with the best number of microbatches by the simulator."""
    rates = slices(placer, placed.ranks, placed.batch_shares)
    if len(rates) == 1:
        return placed
    found: dict[int, float] = {}
    effort = placer.request.effort
    best = sorted(rates, key=rates.__getitem__)[-effort.microbatches_tried :]
    for count in {placed.microbatches, *best}:
        # The best number in closed form may not fit.
        with suppress(PlanError):
            sliced = placer.placed(placed.ranks, count, placed.batch_shares)
            cuts = placer.cuts(sliced)
            found[count] = placer.rate(sliced, cuts, placer.simulator)
    return placer.placed(placed.ranks, fewest(found, effort.worth_changing), placed.batch_shares)


def fewest(rates: Mapping[int, float], worth: float) -> int:
    """The smallest number with at least the highest rate divided by ``worth``."""
    limit = max(rates.values()) / worth
    return min(count for count, rate in rates.items() if rate >= limit)
