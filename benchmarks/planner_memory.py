"""How good plans with a memory budget are, and how long they take.

    python -m benchmarks.planner_memory

* Four GPUs of one host, with 20 GB/s to its memory and 200 GB/s between them, and layers that save
  tensors of 512 MiB. The first stage lacks memory and the last one has it. The step by the
  simulator, relative to one with all tensors kept, for `MemoryCompression`'s own policy and
  for recomputation of everything.
* A layer of which some tensors are next to free to compute and others are not: the step with layers
  that recompute the former and hold or swap the latter, relative to the better of all-or-nothing
  recomputation and swaps alone (infinite if that does not fit).
* 1,024 devices with a policy and a budget: how long the plan takes, in one process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.measuring import arguments, print_table, save
from lightning_pipeshift.errors import BudgetError, PlanError
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.policies import Planned, RecomputeAll
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.inputs.saved_tensors import SavedTensor
from lightning_pipeshift.plan.search.planner import arrange
from lightning_pipeshift.plan.search.request import PlanRequest

MIB = 1 << 20
GIB = 1 << 30


def model(num_layers: int, tensors: tuple[SavedTensor, ...], seconds: float) -> Profile:
    """Equal layers whose backward takes twice the time of their forward."""
    layers = tuple(
        LayerProfile(
            f"l{number}",
            parameter_bytes=MIB,
            gradient_bytes=MIB,
            payload_bytes=MIB,
            payload_gradient_bytes=MIB,
            saved_bytes=sum(tensor.num_bytes for tensor in tensors),
            input_bytes=MIB,
            tensors=tensors,
        )
        for number in range(num_layers)
    )
    times = KindProfile((seconds,) * num_layers, (2 * seconds,) * num_layers)
    return Profile(layers, {"gpu": times})


def seconds_of(profile: Profile, cluster: Cluster, request: PlanRequest) -> float:
    """The step by the simulator; infinite if nothing fits."""
    try:
        return arrange(profile, cluster, request).prediction.step_seconds
    except (BudgetError, PlanError):
        return math.inf


def four_gpus() -> dict[str, float]:
    """Steps relative to one with all tensors kept."""
    profile = model(8, (SavedTensor(0, 512 * MIB),), 0.01)
    links = Link(5e-6, 200e9)

    def cluster(memory_bytes: int) -> Cluster:
        gpu = Device("host", "gpu", memory_bytes=memory_bytes, host_bytes=256 * GIB)
        return Cluster((replace(gpu, host_bandwidth=20e9),) * 4, inside=links)

    request = PlanRequest(virtual_machines=1, microbatches=8, batch_samples=8.0, policy=Planned())
    kept, tight = seconds_of(profile, cluster(100 * GIB), request), cluster(round(3.25 * GIB))
    return {
        name: seconds_of(profile, tight, replace(request, policy=policy)) / kept
        for name, policy in (("planned", Planned()), ("recomputed", RecomputeAll()))
    }


def mixed(num_stages: int, room_bytes: int) -> dict[str, float]:
    """The seconds of a step in three ways."""
    tensors = SavedTensor(0, 30 * MIB), SavedTensor(1, 10 * MIB, spares=0.9)
    profile = model(2 * num_stages, tensors, 0.01)
    whole = model(2 * num_stages, (tensors[0], replace(tensors[1], spares=0.0)), 0.01)
    one = Device("a", "gpu", memory_bytes=room_bytes, host_bytes=GIB, host_bandwidth=2e9)
    cluster = Cluster((one,) * num_stages, inside=Link(0.0, 1e9))
    request = PlanRequest(
        virtual_machines=1, microbatches=4, batch_samples=4.0, policy=Planned(), caution=1.0
    )
    return {
        "mixed": seconds_of(profile, cluster, request),
        "all or nothing": seconds_of(whole, cluster, request),
        "swaps alone": seconds_of(profile, cluster, replace(request, recompute="none")),
    }


def many_devices(budgets_gib: Sequence[int] = (1, 2, 4)) -> dict[str, Any]:
    """The plan of 1,024 devices on hosts of 8."""
    tensors = tuple(SavedTensor(number, 2 * MIB, spares=0.1) for number in range(5))
    profile = model(96, tensors, 2e-3)
    layers = tuple(replace(layer, optimizer_bytes=40 * MIB) for layer in profile.layers)
    profile = replace(profile, layers=layers, step_seconds=1e-2)
    found: dict[str, Any] = {}
    for budget_bytes in (number * GIB for number in budgets_gib):
        cluster = Cluster(
            tuple(
                Device(
                    f"h{number // 8}",
                    "gpu",
                    memory_bytes=budget_bytes,
                    host_bytes=32 * GIB,
                    host_bandwidth=2e10,
                )
                for number in range(1024)
            ),
            inside=Link(5e-6, 2e10),
            outside=Link(5e-5, 1.25e9),
        )
        begin = time.perf_counter()
        arranged = arrange(profile, cluster, PlanRequest(batch_samples=32, policy=Planned()))
        found[f"{budget_bytes / GIB:g} GiB"] = {
            "seconds": time.perf_counter() - begin,
            "deepest": max(map(len, arranged.ranks)),
            "samples_per_second": arranged.samples_per_second,
        }
    return found


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    gpus = four_gpus()
    print_table("Four GPUs: the step relative to everything kept", [*gpus], [[*gpus.values()]])
    cases = {
        "1 stage": mixed(1, round(70e6)),
        "2 stages": mixed(2, round(96e6)),
    }
    print_table(
        "Layers that hold some tensors and recompute the rest: seconds of a step",
        ["", *cases["1 stage"]],
        [[name, *found.values()] for name, found in cases.items()],
    )
    many = many_devices()
    print_table(
        "1,024 devices with a policy",
        ["budget", "seconds to plan", "deepest pipeline", "samples/s"],
        [[name, *found.values()] for name, found in many.items()],
    )
    save(options.json, {"four_gpus": gpus, "mixed": cases, "many_devices": many})


if __name__ == "__main__":
    main()
