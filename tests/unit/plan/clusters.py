"""Machines and models, in numbers, for tests of the planner."""

import itertools
import random

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.search.evaluator import Evaluator
from lightning_pipeshift.plan.search.request import PlanRequest

# Bytes per second of 200 and of 50 Mbit/s.
WIDE, NARROW = Link(1e-4, 25e6), Link(1e-4, 6.25e6)


def devices(text, **kwargs):
    """``"a:X a:X b:Y"``: the host and the kind of each rank."""
    return tuple(Device(*word.split(":"), **kwargs) for word in text.split())


def profile(
    num_layers, kinds="X", *, gradient=0, payload=0, saved=0, static=0, seconds=1.0, **kwargs
):
    """Equal layers, ``seconds`` forward and twice that backward on the first of the kinds, and n
    times that on the n-th.
    """
    layers = tuple(
        LayerProfile(
            f"l{n}",
            parameter_bytes=static,
            gradient_bytes=gradient,
            payload_bytes=payload,
            payload_gradient_bytes=payload,
            saved_bytes=saved,
        )
        for n in range(num_layers)
    )
    times = {
        kind: KindProfile((factor * seconds,) * num_layers, (2 * factor * seconds,) * num_layers)
        for factor, kind in enumerate(kinds, 1)
    }
    return Profile(layers, times, **kwargs)


def unlike(seed, num_ranks=4, num_layers=8, room=None):
    """A model of unequal layers, and a device on each host: fast ones and slow ones, each two
    with a wide link or a narrow one, and room for about ``room`` of the model, if that is given.
    """
    chance = random.Random(seed)
    forward = [chance.uniform(1e-3, 3e-3) for _ in range(num_layers)]
    slow = chance.choice([1.5, 2, 4])
    kinds = {
        kind: KindProfile(
            tuple(factor * f for f in forward),
            tuple(2 * factor * f for f in forward),
            action_forward=2e-4,
            action_backward=2e-4,
        )
        for kind, factor in (("fast", 1), ("slow", slow))
    }
    layers = []
    for n in range(num_layers):
        size = chance.choice([10_000, 100_000, 400_000])
        payload = chance.choice([1_000, 10_000, 50_000])
        layers.append(LayerProfile(f"l{n}", size, size, 2 * size, payload, payload, 100_000))
    total = sum(layer.static_bytes for layer in layers)
    machines = tuple(
        Device(
            f"h{rank}",
            chance.choice(["fast", "slow"]),
            memory_bytes=round(total * room * chance.uniform(0.8, 1.3)) if room else 0,
        )
        for rank in range(num_ranks)
    )
    hosts = {
        (f"h{a}", f"h{b}"): chance.choice([WIDE, NARROW])
        for a, b in itertools.combinations(range(num_ranks), 2)
    }
    request = PlanRequest(batch_samples=16.0, microbatches=chance.choice([2, 4, 8]))
    return Profile(tuple(layers), kinds, step_seconds=1e-3), Cluster(machines, hosts=hosts), request


def every_arrangement(profile, cluster, request):
    """All groupings in all orders, cut with care, with equal shares or such in proportion to the
    compute power, whichever is better: brute force, for a few devices.
    """
    placer = Evaluator(profile, cluster, request)
    for groups in partitions(list(range(cluster.num_ranks))):
        if request.num_virtual_machines not in (None, len(groups)):
            continue
        cycles = [groups]
        if len(groups) > 3:
            cycles = [[groups[0], *rest] for rest in itertools.permutations(groups[1:])]
        for cycle in cycles:
            for ranks in itertools.product(*map(itertools.permutations, cycle)):
                powers = [sum(placer.powers[rank] for rank in machine) for machine in ranks]
                found = []
                for shares in (None, powers) if len(ranks) > 1 else (None,):
                    placed = placer.placed(ranks, request.microbatches, shares)
                    try:
                        cuts = placer.cuts(placed)
                    except PlanError:
                        continue
                    found.append(placer.arrangement(placed, cuts))
                if found:
                    yield max(found, key=lambda one: one.samples_per_second)


def partitions(ranks):
    """All ways to make groups of them."""
    if not ranks:
        yield []
        return
    for groups in partitions(ranks[:-1]):
        yield [*groups, [ranks[-1]]]
        for place, group in enumerate(groups):
            yield [*groups[:place], [*group, ranks[-1]], *groups[place + 1 :]]
