"""The gain of choosing the grouping and the order of the stages, on the simulator.

    python -m benchmarks.orders

Devices on hosts of their own, with links of 200 and of 50 Mbit/s between them. A transformer of 12
blocks: each has 3.1 MB of parameters, takes a fast device 10 ms forward and 20 ms backward for a
sample, and passes 131 kB on. Every grouping into virtual machines is simulated in every order of
the stages, each with its best cut and with shares of the batch that suit it; what the planner
chooses is compared with the worst of them, with their mean and with the best. Then the same for
random clusters, and how long it takes to plan for 1,024 devices.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Any

from benchmarks.measuring import arguments, print_table, save
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.search.planner import arrange
from lightning_pipeshift.plan.search.request import Arrangement, PlanRequest
from tests.unit.plan.clusters import NARROW, WIDE, every_arrangement, unlike

NUM_LAYERS = 12
FORWARD_SECONDS = 0.010
NUM_RANDOM = 40


@dataclass(frozen=True)
class Comparison:
    """The gain of the planner's choice, in samples per second."""

    name: str
    virtual_machines: str
    ranks: tuple[tuple[int, ...], ...]
    num_arrangements: int
    chosen: float
    best: float
    mean: float
    worst: float

    @property
    def over_worst(self) -> float:
        return self.chosen / self.worst

    @property
    def over_mean(self) -> float:
        return self.chosen / self.mean


def transformer() -> Profile:
    """The model, for samples one by one; a slow device takes twice as long."""
    layers = tuple(
        LayerProfile(
            f"block{n}",
            parameter_bytes=3_100_000,
            gradient_bytes=3_100_000,
            optimizer_bytes=6_200_000,
            payload_bytes=131_000,
            payload_gradient_bytes=131_000,
            saved_bytes=2_000_000,
            input_bytes=131_000,
        )
        for n in range(NUM_LAYERS)
    )
    kinds = {
        kind: KindProfile(
            (factor * FORWARD_SECONDS,) * NUM_LAYERS,
            (2 * factor * FORWARD_SECONDS,) * NUM_LAYERS,
            action_forward=1e-3,
            action_backward=1e-3,
        )
        for kind, factor in (("fast", 1.0), ("slow", 2.0))
    }
    return Profile(layers, kinds, step_seconds=5e-3)


def four_hosts(kinds: str, wide: str) -> Cluster:
    """A device on each of four hosts, a to d.

    Args:
        kinds: ``f`` or ``s`` for each.
        wide: the pairs with 200 Mbit/s; all others have 50.
    """
    names = {"f": "fast", "s": "slow"}
    return Cluster(
        tuple(Device(host, names[kind]) for host, kind in zip("abcd", kinds, strict=True)),
        outside=NARROW,
        hosts={(pair[0], pair[1]): WIDE for pair in wide.split()},
    )


CLUSTERS = {
    "equal devices, two pairs with a wide link": four_hosts("ffff", "ac bd"),
    "equal devices, a ring of wide links": four_hosts("ffff", "ac cb bd da"),
    "equal devices, one host with narrow links": four_hosts("ffff", "bc cd bd"),
    "two fast, two slow, two pairs with a wide link": four_hosts("fsfs", "ac bd"),
    "two fast, two slow, one wide link": four_hosts("ffss", "ab"),
    "two fast, two slow, all links wide": four_hosts("ffss", "ab ac ad bc bd cd"),
    "one fast, three slow, its links wide": four_hosts("fsss", "ab ac ad"),
}


def compare(name: str, profile: Profile, cluster: Cluster, request: PlanRequest) -> Comparison:
    """The planner's choice beside all there is to choose from."""
    rates = [found.samples_per_second for found in every_arrangement(profile, cluster, request)]
    chosen = arrange(profile, cluster, request)
    return Comparison(
        name,
        str(request.num_virtual_machines or "any"),
        chosen.ranks,
        len(rates),
        chosen.samples_per_second,
        max(rates),
        mean(rates),
        min(rates),
    )


def of_named_clusters() -> list[Comparison]:
    """As two virtual machines of two devices or of one and three; and as is best."""
    request = PlanRequest(batch_samples=32, microbatches=8)
    return [
        compare(name, transformer(), cluster, replace(request, virtual_machines=count))
        for count in (2, "auto")
        for name, cluster in CLUSTERS.items()
    ]


def of_random_clusters() -> list[Comparison]:
    """Unequal layers on four devices of two speeds, with links at random."""
    found = []
    for seed, room in itertools.product(range(NUM_RANDOM), (None, 1.1)):
        case = unlike(seed, room=room)
        found.append(compare(f"seed {seed}, room {room}", *case))
    return found


def thousand(kinds: Sequence[str], memory_bytes: int) -> Cluster:
    """128 hosts of 8 devices, each host of one kind; 10 Gbit/s between hosts."""
    machines = [
        Device(f"h{n // 8}", kinds[n // 8 % len(kinds)], memory_bytes=memory_bytes)
        for n in range(1024)
    ]
    return Cluster(tuple(machines), Link(5e-6, 2e10), Link(5e-5, 1.25e9))


def planning_times() -> list[dict[str, Any]]:
    """How long 1,024 devices take to plan for, with a model of 96 layers and 32 samples."""
    layers = tuple(
        LayerProfile(f"block{n}", 4 * 10**7, 10**7, 8 * 10**7, 10**6, 10**6, 10**7, 10**6)
        for n in range(96)
    )
    kinds = {
        kind: KindProfile((factor * 2e-3,) * 96, (factor * 4e-3,) * 96, 1e-4, 1e-4)
        for factor, kind in enumerate("XYZ", 1)
    }
    profile = Profile(layers, kinds, step_seconds=1e-2)
    found = []
    for which, memory_bytes in itertools.product(("X", "XYZ"), (0, 4 * 10**9, 10**9)):
        begin = time.perf_counter()
        cpu = time.process_time()
        chosen = arrange(profile, thousand(which, memory_bytes), PlanRequest(batch_samples=32))
        found.append(
            {
                "kinds": len(which),
                "memory_gb": memory_bytes / 1e9,
                "seconds": time.perf_counter() - begin,
                "processor_seconds": time.process_time() - cpu,
                **shape(chosen),
            }
        )
    return found


def shape(chosen: Arrangement) -> dict[str, Any]:
    """A short description of an arrangement."""
    return {
        "virtual_machines": len(chosen.ranks),
        "stages": max(map(len, chosen.ranks)),
        "microbatches": chosen.microbatches,
        "samples_per_second": chosen.samples_per_second,
    }


def summary(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Medians and extremes of the ratios."""
    return {
        "median_over_worst": median(one.over_worst for one in comparisons),
        "most_over_worst": max(one.over_worst for one in comparisons),
        "median_over_mean": median(one.over_mean for one in comparisons),
        "most_over_mean": max(one.over_mean for one in comparisons),
        "least_of_best": min(one.chosen / one.best for one in comparisons),
    }


def main() -> None:
    args = arguments(__doc__).parse_args()
    named = of_named_clusters()
    print_table(
        "Samples per second, 4 devices on 4 hosts, links of 200 and 50 Mbit/s (simulated)",
        ["cluster", "vms", "chosen", "of", "chosen/s", "best", "mean", "worst", "/worst", "/mean"],
        [
            [
                one.name,
                one.virtual_machines,
                " ".join("".join(map(str, ranks)) for ranks in one.ranks),
                one.num_arrangements,
                one.chosen,
                one.best,
                one.mean,
                one.worst,
                one.over_worst,
                one.over_mean,
            ]
            for one in named
        ],
    )
    randomly = of_random_clusters()
    both: Mapping[str, dict[str, float]] = {"named": summary(named), "random": summary(randomly)}
    print_table(
        f"Chosen against worst, mean and best: the clusters above, and {len(randomly)} random ones",
        ["clusters", *both["named"]],
        [[name, *figures.values()] for name, figures in both.items()],
    )
    times = planning_times()
    print_table(
        "Planning for 1,024 devices: 128 hosts of 8, a model of 96 layers (seconds)",
        list(times[0]),
        [list(row.values()) for row in times],
    )
    save(
        args.json,
        {
            "named": [
                asdict(one) | {"over_worst": one.over_worst, "over_mean": one.over_mean}
                for one in named
            ],
            "summary": both,
            "planning": times,
        },
    )


if __name__ == "__main__":
    main()
