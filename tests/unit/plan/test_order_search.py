"""The joint search of a stage order and its cut, against brute force and against the workloads."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.measured_workload import (
    crossing_bytes,
    crossing_seconds,
    workload_of,
)
from lightning_pipeshift.plan.inputs.effort import USUAL
from lightning_pipeshift.plan.partition.best_cut import fixed_cut
from lightning_pipeshift.plan.partition.equal_counts import uniform
from lightning_pipeshift.plan.partition.orders import interchangeable
from lightning_pipeshift.plan.partition.recomputation import Recomputation
from lightning_pipeshift.plan.partition.search import Reordering, Search
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS
from tests.unit.plan.swapping import little_memory
from tests.unit.plan.workloads import all_cuts


def search(seed, num_stages, num_layers, recompute="none", schedule="1f1b", room=2.0, effort=USUAL):
    """A search, the workload of each order, and an order with the even cut."""
    model, cluster, request = little_memory(seed, num_stages, num_layers)
    devices = [
        replace(device, memory_bytes=int(room * device.memory_bytes)) for device in cluster.devices
    ]
    cluster = replace(cluster, devices=tuple(devices))
    machine = tuple(range(num_stages))
    assert isinstance(request.microbatches, int)
    microbatches = 1 if schedule in ASYNCHRONOUS else request.microbatches

    def workload(order):
        return workload_of(model, cluster, order, schedule, microbatches, 1.0)

    found = searching(model, cluster, machine, workload, recompute, effort)
    return found, workload, [(machine, uniform(num_layers, num_stages))]


def searching(model, cluster, machine, workload, recompute="auto", effort=USUAL, samples=1.0):
    links = [[cluster.link(one, other) for other in machine] for one in machine]
    own, *turned = (workload(machine[n:] + machine[:n]) for n in range(len(machine)))
    across = crossing_bytes(model, samples)
    reordering = Reordering(
        turned,
        np.array([[crossing_seconds(across, link) for link in row] for row in links]),
        np.array([[link.latency_seconds for link in row] for row in links]),
        interchangeable(cluster),
    )
    return Search(own, Recomputation(own, recompute), reordering, recompute, effort)


def seconds(workload, found, recompute):
    order, counts = found
    there = workload(order)
    return there.step_seconds([fixed_cut(there, counts, recompute)])[0]


def brute_force(workload, num_stages, recompute="none"):
    """The shortest step of all orders and cuts that fit."""
    best = math.inf
    for order in itertools.permutations(range(num_stages)):
        there = workload(order)
        best = min([best, *there.step_seconds(all_cuts(there, recompute))])
    return best


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(12))
def test_few_orders_are_all_tried(seed, schedule):
    found, workload, start = search(seed, 4, 6, "none", schedule)
    best = brute_force(workload, 4)
    orders = found.best_orders(start)
    if math.isinf(best):
        assert not orders
    else:
        assert seconds(workload, orders[0], "none") <= best * USUAL.alike


@pytest.mark.parametrize("seed", range(5))
def test_near_the_best_of_many_orders(seed):
    # 120 orders are too many for this effort: stages are exchanged.
    found, workload, start = search(seed, 5, 7, effort=replace(USUAL, orders=20))
    best = brute_force(workload, 5)
    assert math.isfinite(best)
    assert seconds(workload, found.best_orders(start)[0], "none") <= best * USUAL.alike


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "async"])
def test_times_are_those_of_the_workloads(schedule, recompute):
    """So the orders come with the fastest first, and there is one of each."""
    num_checked = 0
    for seed in range(6):
        found, workload, start = search(seed, 4, 12, recompute, schedule)
        orders = found.best_orders(start)
        times = [seconds(workload, each, recompute) for each in orders]
        assert times == sorted(times)
        assert len({order for order, _ in orders}) == len(orders)
        assert all(
            workload(order).memory.fits(fixed_cut(workload(order), counts, recompute))
            for order, counts in orders
        )
        num_checked += len(orders)
    assert num_checked > 10


def test_microbatches_of_unequal_sizes_are_timed_as_they_are():
    num_unlike = 0
    for seed in range(4):
        model, cluster, _ = little_memory(seed, 4, 12)
        devices = [replace(device, memory_bytes=0) for device in cluster.devices]
        cluster = replace(cluster, devices=tuple(devices))

        def workload(order, model=model, cluster=cluster):
            return workload_of(model, cluster, order, "1f1b", 4, 2.25)

        machine = (0, 1, 2, 3)
        assert len(workload(machine).sizes) == 4
        found = searching(model, cluster, machine, workload, "none", samples=2.25)
        orders = found.best_orders([(machine, uniform(12, 4))])
        times = [seconds(workload, each, "none") for each in orders]
        assert times == sorted(times)
        num_unlike += len(set(times)) > 1
    assert num_unlike > 2


def test_an_order_that_does_not_fit_leads_to_one_that_does():
    found, workload, _ = search(3, 4, 8, room=1.6)
    even = Cut((2, 2, 2, 2))
    orders = list(itertools.permutations(range(4)))
    unfit = [order for order in orders if not workload(order).memory.fits(even)]
    assert 0 < len(unfit) < len(orders)
    for order in unfit:
        assert found.best_orders([(order, even.counts)])


def test_interchangeable_devices_are_not_exchanged():
    model, cluster, _ = little_memory(5, 6, 12)
    cluster = replace(cluster, devices=(cluster.devices[0],) * 6, hosts={})

    def workload(order):
        return workload_of(model, cluster, order, "1f1b", 4, 1.0)

    machine = tuple(range(6))
    found = searching(model, cluster, machine, workload).best_orders([(machine, uniform(12, 6))])
    assert len(found) == 1
