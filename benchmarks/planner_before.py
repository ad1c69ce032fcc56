"""The planner of today beside the one before it was one search over one clock: commit 8dc99199.

    python -m benchmarks.planner_before

Both plan the same 60 problems, each in a process of its own for each kind, and both are judged by
the simulator, which is the same:

* groups: the devices of `benchmarks/planner_effort.py`, with all to be chosen.
* memory: one virtual machine whose saved tensors do not all fit, of the same file.
* large: 64 layers of 8 tensors on 8 unlike devices with little memory.

A row has the earlier seconds per sample over today's, in the mean and at worst (above 1: today's
plan is faster), and the processor time of the searches. Then 1,024 devices of three kinds, with
each schedule: the processor seconds until there is a plan, and its samples per second.

The earlier planner comes from the repository's history, so a shallow clone is not enough.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import Any, Final

from benchmarks.measuring import arguments, print_table, save

COMMIT: Final = "8dc99199"
ROOT: Final = Path(__file__).resolve().parents[1]
SELF: Final = "benchmarks/planner_before.py"
CASES: Final = {"groups": range(200_000, 200_030), "memory": range(200_000, 200_020)}
LARGE: Final = range(100_001, 100_011)
SCHEDULES: Final = ("1f1b", "gpipe", "eager_1f1b", "async", "async-2bw")


def _arrange(*case: Any) -> tuple[float, float]:
    """Samples per second, 0 if nothing fits, and the processor seconds of the search."""
    from lightning_pipeshift.errors import BudgetError, PlanError

    try:
        planner = import_module("lightning_pipeshift.plan.search.planner")
    except ImportError:
        # Where it was before.
        planner = import_module("lightning_pipeshift.plan.arrange.planner")
    begin = time.process_time()
    try:
        rate = planner.arrange(*case).samples_per_second
    except (BudgetError, PlanError):
        rate = 0.0
    return rate, time.process_time() - begin


def small(kind: str, first: int, end: int) -> list[tuple[float, float]]:
    """The plans of the problems of `benchmarks/planner_effort.py`."""
    from benchmarks.planner_effort import little_room, unlike_hosts

    case = unlike_hosts if kind == "groups" else little_room
    return [_arrange(*case(seed)) for seed in range(first, end)]


def large(first: int, end: int) -> list[tuple[float, float]]:
    """The plans of 64 layers on 8 devices."""
    from tests.unit.plan.swapping import little_memory

    return [_arrange(*little_memory(seed, 8, 64, 8)) for seed in range(first, end)]


def many(schedule: str) -> tuple[float, float]:
    """The plan of 128 hosts of 8 devices of three kinds."""
    from tests.unit.plan import clusters, test_planner

    try:
        found = import_module("lightning_pipeshift.plan.search.request")
    except ImportError:
        found = import_module("lightning_pipeshift.plan.arrange.request")

    profile = clusters.profile(
        96,
        "XYZ",
        seconds=2e-3,
        static=4 * 10**7,
        gradient=10**7,
        payload=10**6,
        saved=10**7,
        step_seconds=1e-2,
    )
    cluster = test_planner.thousand("XYZ", (4 if schedule == "async" else 2) * 10**9)
    request = found.PlanRequest(batch_samples=32, schedule=schedule)
    return _arrange(profile, cluster, request)


def run(folder: Path, call: str) -> Any:
    """Calls a function of this file with the package of a folder."""
    code = f"import json; from benchmarks.planner_before import *; print(json.dumps({call}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def compared(calls: str, folders: dict[str, Path]) -> dict[str, float]:
    """The plans of both planners, of the cases in which one of them has a plan."""
    found = {name: run(folder, calls) for name, folder in folders.items()}
    pairs = [
        (now[0] / before[0] if before[0] else math.inf)
        for now, before in zip(found["now"], found["before"], strict=True)
        if now[0] or before[0]
    ]
    return {
        "cases": len(pairs),
        "mean": mean(pairs),
        "worst": min(pairs),
        **{f"{name}_s": sum(seconds for _, seconds in each) for name, each in found.items()},
        "longest_s": max(seconds for _, seconds in found["now"]),
    }


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        before = Path(scratch) / "before"
        subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, before], check=True)
        subprocess.run(["git", "checkout", "--quiet", COMMIT], cwd=before, check=True)
        shutil.copy(ROOT / SELF, before / SELF)
        folders = {"now": ROOT, "before": before}
        kinds = {
            kind: compared(f"small({kind!r}, {seeds.start}, {seeds.stop})", folders)
            for kind, seeds in CASES.items()
        }
        kinds["large"] = compared(f"large({LARGE.start}, {LARGE.stop})", folders)
        thousand = {
            schedule: {name: run(folder, f"many({schedule!r})") for name, folder in folders.items()}
            for schedule in SCHEDULES
        }
    print_table(
        f"Samples per second now over those at {COMMIT}, and processor seconds of all searches",
        ["", *kinds["large"]],
        [[kind, *figures.values()] for kind, figures in kinds.items()],
    )
    print_table(
        "1,024 devices: processor seconds of the search, and samples per second",
        ["schedule", "now s", "before s", "now", "before"],
        [
            [schedule, *(found[name][at] for at in (1, 0) for name in folders)]
            for schedule, found in thousand.items()
        ],
    )
    save(options.json, {"kinds": kinds, "thousand": thousand})


if __name__ == "__main__":
    main()
