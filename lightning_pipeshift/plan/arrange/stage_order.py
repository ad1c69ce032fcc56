"""Chooses which of a virtual machine's devices is which stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.effort import USUAL
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.partition.orders import Order, distinct_orders, num_orders

Orders = tuple[Order, ...]
"""The orders of all virtual machines."""


def compute_power(profile: Profile, cluster: Cluster, rank: int) -> float:
    """The number of microbatches that a device would train per second, if it had the whole
    model.
    """
    times = profile.times_on(cluster.devices[rank])
    seconds = math.fsum(times.forward) + math.fsum(times.backward)
    return 1 / seconds if seconds else 1.0


def ranked_orders(
    machines: Orders,
    starts: Sequence[Orders],
    alike: Sequence[int],
    step_seconds: Callable[[Orders], float],
    most: int = USUAL.orders,
) -> list[tuple[Orders, float]]:
    """Orders with their step times, the fastest first.

    All orders if there are few distinct ones, and otherwise the starts.

    Args:
        machines: the ranks of each virtual machine, in the preferred order.
        starts: orders of all virtual machines to try in any case.
        alike: for each rank, see :func:`interchangeable`.
        step_seconds: the simulated time of the orders of all virtual machines; infinite if they are
            not possible.
        most: the number of orders up to which all are tried.
    """
    tried: dict[Orders, float] = {}

    def attempt(orders: Orders) -> None:
        if orders not in tried:
            tried[orders] = step_seconds(orders)

    for start in (machines, *starts):
        attempt(start)
    named = [[alike[rank] for rank in machine] for machine in machines]
    if math.prod(map(num_orders, named)) <= most:
        for orders in product(*map(distinct_orders, machines, named)):
            attempt(orders)
    return sorted(tried.items(), key=lambda entry: entry[1])


def best_order(
    ranked: Sequence[tuple[Orders, float]], machines: Orders, worth: float = USUAL.worth_changing
) -> Orders:
    """The fastest order, or of those that are slower by less than the factor ``worth``, the one
    nearest to ``machines``.

    Args:
        ranked: orders with their step times, as of :func:`ranked_orders`.
        machines: the ranks of each virtual machine, in the preferred order.
    """
    limit = worth * min(seconds for _, seconds in ranked)
    within = [entry for entry in ranked if entry[1] <= limit]
    return min(within, key=lambda entry: (_num_out_of_order(entry[0], machines), entry[1]))[0]


def _num_out_of_order(orders: Orders, machines: Orders) -> int:
    """The number of pairs of stages in the opposite order."""
    count = 0
    for order, machine in zip(orders, machines, strict=True):
        place = {rank: number for number, rank in enumerate(machine)}
        count += sum(place[a] > place[b] for i, a in enumerate(order) for b in order[i + 1 :])
    return count
