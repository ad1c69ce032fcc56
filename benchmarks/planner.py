"""How near the planner's cuts come to the best ones, and how long it takes to find them.

    python -m benchmarks.planner

Five tables:

* Small random models under a memory budget: brute force over orders, cuts and the handling of each
  saved tensor, against the planner's.
* Large ones (64 layers of 8 tensors on 8 devices): how long the search takes for one order of the
  devices, and with the search for the order.
* Random small workloads (2 to 4 stages of speeds 1, 0.5 and 0.25, up to 8 layers, links from free
  to slower than a stage, three schedules): `best_cut` against brute force over all cuts and all
  choices of what to recompute, both judged by the simulator. The ratio of their step times is 1
  where the planner finds the best. Cases of which nothing fits in memory are left out.
* Random large workloads (64 layers on 8 stages, 32 microbatches): how long `best_cut` takes, in the
  first call of a fresh process, which also works out the schedule, and in later ones, each for a
  workload of its own. With memory that binds, it also chooses what is recomputed. `fits` says for
  how many of them something fits; for the others it says why not, which is not timed.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.measuring import arguments, print_table, save
from lightning_pipeshift.errors import BudgetError, PlanError
from lightning_pipeshift.plan.cost.measured_workload import workload_of
from lightning_pipeshift.plan.inputs.policies import Planned
from lightning_pipeshift.plan.search.cut_search import best_split
from lightning_pipeshift.plan.search.planner import arrange
from lightning_pipeshift.plan.search.problem import Problem
from lightning_pipeshift.plan.search.stages import best_cut
from tests.unit.plan.swapping import least_seconds, little_memory
from tests.unit.plan.workloads import all_cuts, random_workload

# Other seeds than the tests'.
FIRST_SEED = 100_000

# Brute force tries every choice of layers to recompute: with fewer of them.
MOST_LAYERS = {False: 8, True: 6}

NUM_STAGES, NUM_LAYERS, NUM_MICROBATCHES = 8, 64, 32

KINDS = {False: "not binding", True: "may bind"}


def ratios(num_cases: int, tight: bool) -> list[float]:
    """Of the step time of brute force's cut to that of the planner's, by case."""
    found: list[float] = []
    seed = FIRST_SEED
    while len(found) < num_cases:
        seed += 1
        num_layers = 2 + seed % (MOST_LAYERS[tight] - 1)
        workload = random_workload(seed, num_layers=num_layers, tight=tight)
        if cuts := all_cuts(workload):
            best = min(workload.step_seconds(cuts))
            found.append(best / workload.step_seconds([best_cut(workload)])[0])
    return found


def seconds(seeds: range, tight: bool) -> list[float]:
    """The seconds of `best_cut` for each large workload that fits."""
    found = []
    for seed in seeds:
        workload = random_workload(
            seed,
            num_stages=NUM_STAGES,
            num_layers=NUM_LAYERS,
            microbatches=NUM_MICROBATCHES,
            tight=tight,
        )
        begin = time.perf_counter()
        try:
            best_cut(workload)
        except PlanError:
            continue
        found.append(time.perf_counter() - begin)
    return found


def first_seconds(tight: bool, num_processes: int) -> list[float]:
    """Likewise, each in the first call of a process."""
    found: list[float] = []
    seed = FIRST_SEED
    while len(found) < num_processes:
        code = (
            f"from benchmarks.planner import *; print(seconds(range({seed}, {seed + 1}), {tight}))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        found += json.loads(done.stdout)
        seed += 1
    return found


def budget_ratios(num_cases: int) -> list[float]:
    """Of the step time of brute force's plan to that of the planner's, 0 if it finds none."""
    found: list[float] = []
    seed = FIRST_SEED
    while len(found) < num_cases:
        seed += 1
        size = ((3, 3, 1), (2, 4, 1), (2, 2, 2))[seed % 3]
        profile, cluster, request = little_memory(seed, *size, spares=True)
        best = least_seconds(profile, cluster, request)
        if math.isfinite(best):
            try:
                arranged = arrange(profile, cluster, request)
                found.append(best / arranged.prediction.step_seconds)
            except (BudgetError, PlanError):
                found.append(0.0)
    return found


def budget_seconds(num_cases: int) -> tuple[list[float], list[float]]:
    """For large problems, the processor seconds of the search, and the step time relative to one
    without memory limits; only of those that fit.
    """
    taken: list[float] = []
    ratio: list[float] = []
    seed = FIRST_SEED
    while len(taken) < num_cases:
        seed += 1
        profile, cluster, request = little_memory(seed, NUM_STAGES, NUM_LAYERS, 8)
        ranks = range(NUM_STAGES)
        workload = workload_of(profile, cluster, ranks, request.schedule, NUM_MICROBATCHES, 1.0)
        problem = Problem.of(profile, workload, cluster, ranks, Planned())
        begin = time.process_time()
        try:
            found = best_split(problem)
        except (BudgetError, PlanError):
            continue
        taken.append(time.process_time() - begin)
        boundless = replace(workload, usable_bytes=np.full(NUM_STAGES, np.inf))
        least = workload.step_seconds([best_cut(boundless)])[0]
        ratio.append(found.seconds / least)
    return taken, ratio


def order_seconds(num_cases: int) -> list[float]:
    """For large problems of unlike devices and links, the processor seconds until there is a plan,
    with the order of the devices; only of those that fit.
    """
    taken: list[float] = []
    seed = FIRST_SEED
    while len(taken) < num_cases:
        seed += 1
        problem = little_memory(seed, NUM_STAGES, NUM_LAYERS, 8)
        begin = time.process_time()
        try:
            arrange(*problem)
        except (BudgetError, PlanError):
            continue
        taken.append(time.process_time() - begin)
    return taken


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--num-cases", type=int, default=1000, help="small ones, of each kind")
    parser.add_argument("--num-large", type=int, default=100, help="large ones, of each kind")
    parser.add_argument("--num-processes", type=int, default=5, help="fresh ones, of each kind")
    parser.add_argument("--num-budget-cases", type=int, default=60, help="small ones")
    parser.add_argument("--num-large-budgets", type=int, default=20, help="large ones")
    options = parser.parse_args()

    small = budget_ratios(options.num_budget_cases)
    print_table(
        "With a memory budget: step time of brute force over the planner's, by the simulator",
        ["cases", "worst", "mean", "below 0.99"],
        [[len(small), min(small), mean(small), sum(ratio < 0.99 for ratio in small)]],
    )
    taken, longer = budget_seconds(options.num_large_budgets)
    print_table(
        f"With a memory budget: {NUM_LAYERS} layers of 8 tensors, {NUM_STAGES} stages,"
        f" {NUM_MICROBATCHES} microbatches",
        ["workloads", "median s", "longest s", "median step", "longest step"],
        [[len(taken), median(taken), max(taken), median(longer), max(longer)]],
    )

    ordered = order_seconds(options.num_large_budgets)
    print_table(
        "Likewise, with the order of the devices",
        ["workloads", "median s", "longest s"],
        [[len(ordered), median(ordered), max(ordered)]],
    )

    near: dict[bool, list[float]] = {
        tight: ratios(options.num_cases, tight) for tight in (False, True)
    }
    print_table(
        "Step time of brute force over the planner's, by the simulator",
        ["memory", "cases", "layers", "worst", "mean", "below 0.99", "below 0.9999"],
        [
            [
                KINDS[tight],
                len(found),
                f"2 to {MOST_LAYERS[tight]}",
                min(found),
                mean(found),
                sum(ratio < 0.99 for ratio in found),
                sum(ratio < 0.9999 for ratio in found),
            ]
            for tight, found in near.items()
        ],
    )

    seeds = range(FIRST_SEED, FIRST_SEED + options.num_large)
    timed: dict[bool, dict[str, Any]] = {}
    for tight in (False, True):
        first = first_seconds(tight, options.num_processes)
        seconds(range(FIRST_SEED - 10, FIRST_SEED), tight)
        later = seconds(seeds, tight)
        timed[tight] = {
            "first_ms": 1e3 * median(first),
            "median_ms": 1e3 * median(later),
            "p90_ms": 1e3 * sorted(later)[int(0.9 * len(later))],
            "fits": len(later),
        }
    print_table(
        f"Milliseconds of best_cut: {NUM_LAYERS} layers, {NUM_STAGES} stages,"
        f" {NUM_MICROBATCHES} microbatches, {options.num_large} workloads",
        ["memory", "first call", "median of others", "90 of 100 within", "fits"],
        [[KINDS[tight], *figures.values()] for tight, figures in timed.items()],
    )
    save(
        options.json,
        {
            "ratio_to_brute_force": {
                KINDS[tight]: {
                    "cases": len(found),
                    "worst": min(found),
                    "mean": mean(found),
                    "below_0.99": sum(ratio < 0.99 for ratio in found),
                }
                for tight, found in near.items()
            },
            "with_a_budget": {
                "cases": len(small),
                "worst": min(small),
                "mean": mean(small),
                "below_0.99": sum(ratio < 0.99 for ratio in small),
                "median_s": median(taken),
                "longest_s": max(taken),
                "median_step": median(longer),
                "longest_step": max(longer),
            },
            "with_a_budget_and_orders": {
                "cases": len(ordered),
                "median_s": median(ordered),
                "longest_s": max(ordered),
            },
            "best_cut": {KINDS[tight]: figures for tight, figures in timed.items()},
        },
    )


if __name__ == "__main__":
    main()
