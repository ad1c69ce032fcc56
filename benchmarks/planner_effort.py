"""The effect of each limit of the planner's search: the step time of plans, and the search's time.

    python -m benchmarks.planner_effort

Each field of `Effort` takes other values, one after the other, in random cases of three kinds:

* cuts: pipelines of 4 to 8 stages with 10 to 40 layers, with memory that may bind: `best_cut`.
* groups: 2 to 16 devices of up to three speeds on one to four hosts, most with more memory than
  they need: `arrange`, which also chooses virtual machines, orders, microbatches and shares.
* memory: one virtual machine of 2 to 8 stages whose saved tensors do not all fit: `arrange`.

A row has the seconds per sample relative to the usual value's, by the simulator: in the mean, at
worst and at best; how many plans differ; and the search's processor time relative to the usual
one's. A value that changes nothing but the time is there for the time alone.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from benchmarks.measuring import arguments, print_table, save
from lightning_pipeshift.errors import BudgetError, PlanError
from lightning_pipeshift.plan.cost.workload import Workload
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device, Link
from lightning_pipeshift.plan.inputs.effort import USUAL, Effort
from lightning_pipeshift.plan.inputs.profile import KindProfile, LayerProfile, Profile
from lightning_pipeshift.plan.search.planner import arrange
from lightning_pipeshift.plan.search.request import PlanRequest
from lightning_pipeshift.plan.search.stages import best_cut
from tests.unit.plan.swapping import little_memory
from tests.unit.plan.workloads import random_workload

Case = tuple[Profile, Cluster, PlanRequest]

# Other seeds than the tests'.
FIRST_SEED: Final = 200_000

VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "few_ranks": (4, 8, 12, 16),
    "groupings_each": (2, 24),
    "groupings_improved": (6, 24),
    "groupings_finished": (1, 6),
    "orders": (24, 720),
    "orders_cut": (1, 3, 20),
    "orders_kept": (6, 60),
    "orders_compressed": (1, 3, 12),
    "actions": (1 << 10, 1 << 16),
    "stages": (4, 8),
    "stages_cut": (2, 8),
    "cuts_improved": (1, 2, 8),
    "cuts_moved": (1, 2, 64),
    "saved_parts": ((1.0,), (0.0, 1.0), (0.0, 0.25, 0.5, 0.75, 1.0)),
    "assignments": (100, 2000),
    "tensors_assigned": (1 << 12, 1 << 20),
    "actions_assigned": (1 << 14, 1 << 22),
    "smallest_bytes": (0, 1 << 21),
    "promising": (0.7, 0.97),
    "worth_changing": (1.0, 1.01, 1.05),
    "worth_inside": (1.0, 1.3),
    "alike": (1.005, 1.1),
    "close": (1.0, 1.01),
    "work_weight": (1e-5, 1e-2),
}
"""The values to try, for each field."""


def cuts(num_cases: int) -> Iterator[Callable[[Effort], float]]:
    """Functions that return a step's seconds with an effort."""
    sizes = ((4, 10), (5, 20), (8, 40))
    for seed in range(FIRST_SEED, FIRST_SEED + num_cases):
        num_stages, num_layers = sizes[seed % 3]
        given = random_workload(
            seed, num_stages=num_stages, num_layers=num_layers, tight=bool(seed % 2)
        )
        yield partial(_cut_seconds, given)


def _cut_seconds(workload: Workload, effort: Effort) -> float:
    return float(workload.step_seconds([best_cut(workload, effort=effort)])[0])


def unlike_hosts(seed: int) -> Case:
    """Devices of up to three speeds, with gradients and payloads that take from 1 % of the compute
    to as long as it.
    """
    draw = random.Random(seed)
    num_layers = draw.choice([8, 12, 24])
    forward = [draw.lognormvariate(-4.0, 0.4) for _ in range(num_layers)]
    factors = {"a": 1.0, "b": draw.choice([1.3, 2.0, 3.0]), "c": 5.0}
    kinds = {
        kind: KindProfile(
            tuple(factor * seconds for seconds in forward),
            tuple(2 * factor * seconds for seconds in forward),
            action_forward=1e-4,
            action_backward=1e-4,
        )
        for kind, factor in factors.items()
    }
    rate = draw.choice([1e8, 1e9, 1e10])
    layer_bytes = rate * math.fsum(forward) / num_layers
    gradient = int(layer_bytes * draw.choice([0.05, 0.3, 1.0]))
    payload = int(layer_bytes * draw.choice([0.01, 0.1, 0.5]))
    layers = tuple(
        LayerProfile(
            f"l{number}",
            parameter_bytes=int(gradient * draw.uniform(0.5, 2)),
            gradient_bytes=gradient,
            optimizer_bytes=2 * gradient,
            payload_bytes=payload,
            payload_gradient_bytes=payload,
            saved_bytes=4 * payload,
        )
        for number in range(num_layers)
    )
    held = sum(layer.static_bytes + 8 * layer.saved_bytes for layer in layers)
    room = draw.choice([0.0, 0.0, 0.6, 1.2])
    devices: list[Device] = []
    for host in range(draw.choice([1, 2, 3, 4])):
        usual = draw.choice("abc")
        for _ in range(draw.choice([1, 2, 4])):
            kind = usual if draw.random() < 0.8 else draw.choice("ab")
            devices.append(Device(f"h{host}", kind, memory_bytes=int(held * room)))
    cluster = Cluster(
        tuple(devices if len(devices) > 1 else devices * 3),
        inside=Link(1e-5, rate * draw.choice([1, 10])),
        outside=Link(1e-4, rate * draw.choice([0.2, 1.0])),
    )
    request = PlanRequest(
        batch_samples=float(draw.choice([8, 16, 32])),
        microbatches=draw.choice(["auto", 4, 8]),
        schedule=draw.choice(["1f1b", "gpipe"]),
    )
    return Profile(layers, kinds, step_seconds=1e-3), cluster, request


def little_room(seed: int) -> Case:
    """One virtual machine that lacks memory."""
    sizes = ((2, 4, 1), (2, 6, 3), (3, 9, 2), (4, 12, 2), (6, 18, 2), (8, 24, 2))
    return little_memory(seed, *sizes[seed % 6], spares=bool(seed % 2))


def arranged(case: Callable[[int], Case], num_cases: int) -> Iterator[Callable[[Effort], float]]:
    """Functions that return the seconds per sample with an effort."""
    for seed in range(FIRST_SEED, FIRST_SEED + num_cases):
        yield partial(_sample_seconds, case(seed))


def _sample_seconds(case: Case, effort: Effort) -> float:
    profile, cluster, request = case
    return 1 / arrange(profile, cluster, replace(request, effort=effort)).samples_per_second


def tried(cases: list[Callable[[Effort], float]], effort: Effort) -> tuple[list[float], float]:
    """The seconds of each case, infinite if nothing fits, and the processor time of all."""
    found = []
    begin = time.process_time()
    for case in cases:
        try:
            found.append(case(effort))
        except (BudgetError, PlanError):
            found.append(math.inf)
    return found, time.process_time() - begin


def compared(usual: list[float], other: list[float]) -> dict[str, float]:
    """The figures of one row, but for the time."""
    pairs = list(zip(usual, other, strict=True))
    ratios = [b / a for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    return {
        "mean": math.exp(math.fsum(map(math.log, ratios)) / len(ratios)),
        "worst": max(ratios),
        "best": min(ratios),
        "differ": sum(a != b for a, b in pairs),
        "lost": sum(math.isfinite(a) and not math.isfinite(b) for a, b in pairs),
        "gained": sum(math.isfinite(b) and not math.isfinite(a) for a, b in pairs),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--num-cuts", type=int, default=90, help="cases")
    parser.add_argument("--num-groups", type=int, default=48, help="cases")
    parser.add_argument("--num-memory", type=int, default=24, help="cases")
    parser.add_argument("--only", nargs="+", choices=list(VALUES), metavar="FIELD")
    options = parser.parse_args()
    kinds = {
        "cuts": list(cuts(options.num_cuts)),
        "groups": list(arranged(unlike_hosts, options.num_groups)),
        "memory": list(arranged(little_room, options.num_memory)),
    }
    tried(kinds["cuts"][:3], USUAL)
    usual = {name: tried(cases, USUAL) for name, cases in kinds.items()}
    sizes = {name: len(cases) for name, cases in kinds.items()}
    figures: dict[str, Any] = {"cases": sizes, "fields": {}}
    rows = []
    for field in options.only or VALUES:
        for value in VALUES[field]:
            effort = replace(USUAL, **{field: value})
            for name, cases in kinds.items():
                found, seconds = tried(cases, effort)
                row = compared(usual[name][0], found)
                row["time"] = seconds / usual[name][1]
                figures["fields"].setdefault(field, {}).setdefault(str(value), {})[name] = row
                if row["differ"] or abs(row["time"] - 1) > 0.1:
                    changes = [f"{100 * (row[key] - 1):+.2f}" for key in ("mean", "worst", "best")]
                    counts = [int(row[key]) for key in ("differ", "lost", "gained")]
                    usual_value = str(getattr(USUAL, field))
                    rows.append(
                        [field, usual_value, str(value), name, *changes, *counts, row["time"]]
                    )
    shown = ", ".join(f"{count} of {name}" for name, count in sizes.items())
    print_table(
        f"Seconds per sample relative to the usual value, in percent, of {shown}; rows in which no"
        " plan and hardly the time differs are left out",
        ["field", "usual", "tried", "cases", "mean %", "worst %", "best %"]
        + ["differ", "lost", "gained", "time"],
        rows,
    )
    save(options.json, figures)


if __name__ == "__main__":
    main()
