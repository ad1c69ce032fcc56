"""Small clusters with little memory, and the best of all their plans with swaps: brute force over
the orders of the stages, the cuts, and what becomes of each saved tensor.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.cost.measured_workload import workload_of
from lightning_pipeshift.plan.cost.memory_model import Footprints, links_of
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.policies import Planned
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.inputs.saved_tensors import SavedTensor, Swap
from lightning_pipeshift.plan.search.request import PlanRequest
from tests.unit.plan.workloads import all_counts

MB = 10**6
ROUNDING = 1 + 1e-9


def little_memory(
    seed: int, num_stages: int, num_layers: int, num_tensors: int = 1, spares: bool = False
) -> tuple[Profile, Cluster, PlanRequest]:
    """Unlike layers, each of so many equal tensors, unlike devices and links; some devices have no
    way to the host, and what is asked for is one virtual machine. With ``spares``, a recomputation
    leaves out a part of its layer for each tensor that is not dropped.
    """
    draw = np.random.default_rng(seed)
    forward = 0.01 * np.exp(0.5 * draw.normal(size=num_layers))
    saved = [num_tensors * MB * int(size) for size in draw.integers(1, 9, num_layers)]
    parts = [[0.0] * num_tensors] * num_layers
    if spares:
        rows = np.random.default_rng(seed).dirichlet([0.7] * (num_tensors + 1), num_layers)
        parts = rows[:, 1:].tolist()
    layers = tuple(
        LayerProfile(
            f"l{index}",
            parameter_bytes=MB * int(draw.integers(0, 5)),
            payload_bytes=10**5 * int(draw.integers(1, 5)),
            payload_gradient_bytes=10**5 * int(draw.integers(1, 5)),
            saved_bytes=size,
            input_bytes=min(size, MB * int(draw.integers(0, 3))),
            tensors=tuple(
                SavedTensor(n, size // num_tensors, spares=part)
                for n, part in enumerate(parts[index])
            ),
        )
        for index, size in enumerate(saved)
    )
    kinds = {
        kind: KindProfile(tuple(factor * forward), tuple(2 * factor * forward))
        for kind, factor in (("fast", 1), ("slow", 2))
    }
    rate = sum(saved) / num_layers / float(forward.mean())
    held = sum(layer.static_bytes for layer in layers) + num_stages * sum(saved) / 2
    room = held / num_stages * draw.uniform(0.7, 1.8)
    devices = tuple(
        Device(
            f"h{stage}",
            str(draw.choice(["fast", "slow"])),
            memory_bytes=int(room * draw.uniform(0.7, 1.4)),
            host_bytes=int(draw.choice([0, 10**12])),
            host_bandwidth=rate / float(draw.choice([0.1, 0.5, 1, 3])),
        )
        for stage in range(num_stages)
    )
    hosts = {
        (f"h{a}", f"h{b}"): Link(1e-4, rate / float(draw.choice([0.05, 0.3, 1])))
        for a, b in itertools.combinations(range(num_stages), 2)
    }
    microbatches = int(draw.choice([2, 4, 8]))
    request = PlanRequest(
        virtual_machines=1,
        microbatches=microbatches,
        batch_samples=float(microbatches),
        policy=Planned(),
        caution=1.0,
    )
    return Profile(layers, kinds), Cluster(devices, hosts=hosts), request


def least_seconds(profile: Profile, cluster: Cluster, request: PlanRequest) -> float:
    """The shortest step of all plans; infinite if none fits."""
    best = math.inf
    keys = [(i, t.number) for i, layer in enumerate(profile.layers) for t in layer.tensors]
    stages = range(cluster.num_ranks)
    assert isinstance(request.microbatches, int)
    for order in itertools.permutations(stages):
        workload = workload_of(profile, cluster, order, request.schedule, request.microbatches, 1.0)
        footprints = Footprints(profile, workload, links_of(cluster, order))
        devices = [cluster.devices[rank] for rank in order]
        every = list(all_counts(workload))
        # Swaps and recomputation only make a step longer.
        bounds = workload.step_seconds([Cut(counts) for counts in every])
        for bound, counts in sorted(zip(bounds, every, strict=True)):
            if bound >= best:
                break
            owners = [stage for stage in stages for _ in range(counts[stage])]
            ways = [
                [
                    None,
                    "recompute",
                    *[(other,) for other in stages if other != owner],
                    *([()] if devices[owner].host_bytes else []),
                ]
                for owner in (owners[layer] for layer, _ in keys)
            ]
            for chosen in itertools.product(*ways):
                handled = list(zip(keys, chosen, strict=True))
                again = {layer for (layer, _), way in handled if way == "recompute"}
                swaps = [
                    Swap(layer, (number,), way or (), stays=way is None)
                    for (layer, number), way in handled
                    if isinstance(way, tuple) or (way is None and layer in again)
                ]
                found = footprints.of(Cut(counts, frozenset(again)), swaps)
                seconds = found.timeline.step_seconds + found.late_seconds
                fits = all(
                    peak <= device.usable_bytes * ROUNDING
                    and trace.host_bytes <= device.host_bytes * ROUNDING
                    for peak, trace, device in zip(
                        found.peak_bytes, found.traces, devices, strict=True
                    )
                )
                if fits:
                    best = min(best, seconds)
    return best
