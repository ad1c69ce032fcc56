"""Makes every figure that the README and the pages in ``docs`` quote.

    python -m benchmarks.all
    python -m benchmarks.all --only throughput rings
    python -m benchmarks.all --list

Runs the benchmarks one after the other, each with the command that stands here and nowhere else:
the pages take it from the results. The sweeps over other people's models run only where ``--only``
names them. Afterwards ``python -m benchmarks.figures`` writes the figures
into the pages. A benchmark that fails is named at the end, and its old result stays.

Needs root for those with a network between hosts, takes a few hours on two cores, and should be the
only thing that runs there.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# Parts of the package, for what is measured of them.
PACKAGE = "lightning_pipeshift"
STEP = (
    *(f"{PACKAGE}/{room}" for room in ("model", "runtime", "step", "values")),
    f"{PACKAGE}/lightning/loop_gradients.py",
    f"{PACKAGE}/lightning/training.py",
)
PLANNING = (f"{PACKAGE}/plan",)
RINGS = (
    f"{PACKAGE}/runtime/gradients",
    *(f"{PACKAGE}/runtime/comm/{name}.py" for name in ("groups", "lane", "channels", "waits")),
)
CHECKPOINTS = (
    f"{PACKAGE}/lightning/checkpoints.py",
    f"{PACKAGE}/checkpoint",
)


@dataclass(frozen=True)
class Run:
    """One benchmark, and how it is called for the pages.

    Args:
        result: its file in ``benchmarks/results``, without ``.json``.
        words: the benchmark's module and its arguments.
        measures: files and folders whose changes may change the figures, beside its own module.
        is_sweep: takes many hours, and has a page of its own: ``python -m benchmarks.zoo_page``.
            Runs only where ``--only`` names it.
    """

    result: str
    words: str
    measures: tuple[str, ...]
    is_sweep: bool = False

    @property
    def command(self) -> str:
        """For a shell."""
        return f"python -m benchmarks.{self.words}"

    @property
    def paths(self) -> tuple[str, ...]:
        """All that the figures depend on: what is measured, and what measures."""
        return (*self.measures, f"benchmarks/{self.words.split()[0]}.py")


RUNS = (
    Run("memory", "memory", STEP),
    Run("skip_cost", "skip_cost --num-rounds 3", STEP),
    Run("example", "example", (*STEP, "examples/train_gpt.py")),
    Run("big_models", "big_models", (*STEP, *CHECKPOINTS, f"{PACKAGE}/checkpoint/pretrained.py")),
    Run("watching", "watching", STEP),
    Run("recomputation", "recomputation", STEP),
    Run("sleeping_stages", "sleeping_stages --num-rounds 8", STEP),
    Run("asynchronous", "asynchronous --num-rounds 3", STEP),
    Run("asynchronous_moves", "asynchronous --moves --num-moves 4", STEP),
    Run("sleeping_stages_eager", "sleeping_stages --schedule eager_1f1b --num-rounds 8", STEP),
    Run("schedules", "schedules --num-rounds 6", STEP),
    Run("throughput", "throughput --num-rounds 12 --num-steps 2", STEP),
    Run(
        "throughput_eager",
        "throughput --schedule eager_1f1b --num-rounds 12 --num-steps 2",
        STEP,
    ),
    Run("rings_mtu1500", "rings --first-in-line --parts bound --mtu 1500", RINGS),
    Run("rings", "rings --first-in-line", RINGS),
    Run("exposed", "exposed --num-steps 8", (*STEP, *RINGS)),
    Run("checkpoints", "checkpoints --depth 32 --num-rounds 3", CHECKPOINTS),
    Run("unequal_devices", "unequal_devices --num-rounds 4", (*PLANNING, *STEP)),
    Run("simulator", "simulator --stages 4 --num-rounds 3", (*PLANNING, *STEP)),
    Run("planner", "planner --num-cases 300 --num-large 50", PLANNING),
    Run("planner_memory", "planner_memory", PLANNING),
    Run("planner_before", "planner_before", PLANNING),
    Run("planner_effort", "planner_effort --num-groups 20 --num-memory 12", PLANNING),
    Run(
        "memory_predictions_sleep",
        "memory_predictions --models sleep --num-runs 3 --num-steps 3",
        (*PLANNING, *STEP),
    ),
    Run(
        "memory_predictions_real",
        "memory_predictions --models gpt2 vit --num-runs 2 --num-steps 3",
        (*PLANNING, *STEP),
    ),
    Run("planned_gpt2", "planned_gpt2", PLANNING),
    Run("host_time", "host_time", STEP),
    Run("memory_peaks", "memory_peaks --models mlp vit gpt2 vocabulary", (*PLANNING, *STEP)),
    Run("waiting_weights", "waiting_weights --num-rounds 2", STEP),
    Run("slow_network", "slow_network", (*PLANNING, "examples/plan_a_cluster.py")),
    Run(
        "compression",
        "compression --layer-mb 8 64 --microbatches 8 --num-rounds 3 --num-steps 1",
        (*PLANNING, *STEP, f"{PACKAGE}/lightning/precision"),
    ),
    Run("stage_orders", "stage_orders --num-rounds 3 --num-steps 2", (*PLANNING, *STEP)),
    Run("slow_links", "slow_links", (*PLANNING, *STEP, f"{PACKAGE}/lightning/callbacks")),
    Run("network_orders", "network_orders --num-rounds 2 --num-steps 2", (*PLANNING, *RINGS)),
    Run("moves", "migration --only gap --num-moves 4", (*STEP, f"{PACKAGE}/lightning/callbacks")),
    Run(
        "migration",
        "migration --only reaction --num-rounds 2 --num-steps 12 --num-static-steps 3",
        (*PLANNING, *STEP, f"{PACKAGE}/lightning/callbacks"),
    ),
    Run(
        "slow_hosts",
        "slow_hosts --only stop --jobs 4",
        (*PLANNING, *STEP, f"{PACKAGE}/lightning/callbacks"),
    ),
    Run(
        "slow_hosts_quota",
        "slow_hosts --only quota",
        (*PLANNING, *STEP, f"{PACKAGE}/lightning/callbacks"),
    ),
    Run(
        "slow_hosts_loaded",
        "slow_hosts --only loaded",
        (*PLANNING, *STEP, f"{PACKAGE}/lightning/callbacks"),
    ),
    Run(
        "timeline_cost",
        "timeline_cost",
        (
            f"{PACKAGE}/runtime/recording",
            *(f"{PACKAGE}/step/{name}.py" for name in ("action_notes", "engine", "suspendable")),
        ),
    ),
    Run("lanes", "lanes", (*RINGS, f"{PACKAGE}/commands/lanes.py")),
    Run("overlap", "overlap --num-rounds 3", (*RINGS, *STEP)),
    Run(
        "overlap_jobs",
        "overlap --num-rounds 3 --num-jobs 2 --num-layers 12 --forward 0.04 --backward 0.08"
        " --contenders 'one lane' 'urgent first' lanes",
        (*RINGS, *STEP),
    ),
    Run(
        "overlap_fast",
        "overlap --num-rounds 3 --megabits 10000 --contenders 'one lane' lanes",
        (*RINGS, *STEP),
    ),
    Run(
        "lane_moves", "lane_moves --num-rounds 1 --num-after 7 --schedules 1f1b:4", (*RINGS, *STEP)
    ),
    Run(
        "migration_async",
        "migration --only reaction --schedule async --num-rounds 2 --seconds 0.032 --at 16"
        " --num-steps 60 --num-static-steps 12 --patience 6",
        (*PLANNING, *STEP, f"{PACKAGE}/lightning/callbacks"),
    ),
    Run(
        "migration_async_short",
        "migration --only reaction --schedule async --num-rounds 2 --at 24 --num-steps 100"
        " --num-static-steps 20 --patience 6",
        (*PLANNING, *STEP, f"{PACKAGE}/lightning/callbacks"),
    ),
    Run("convergence", "convergence", (*STEP, f"{PACKAGE}/lightning/asynchronous.py")),
    *(
        Run(f"zoo_{library}", f"zoo --library {library} --steps 2", (PACKAGE,), is_sweep=True)
        for library in ("timm", "torchvision", "transformers")
    ),
)


def make(run: Run, folder: Path) -> bool:
    """Runs a benchmark; whether it has written its figures."""
    path = folder / f"{run.result}.json"
    before = path.stat().st_mtime_ns if path.exists() else None
    words = [sys.executable, *shlex.split(run.command)[1:], "--json", str(path)]
    begin = time.perf_counter()
    print(f"::: {run.command}", flush=True)
    ended = subprocess.run(words, cwd=ROOT, check=False).returncode
    # A benchmark that cannot run here says why, and writes nothing.
    is_made = ended == 0 and path.exists() and path.stat().st_mtime_ns != before
    how = "made" if is_made else "NOT MADE"
    print(f"::: {run.result}: {how} in {time.perf_counter() - begin:.0f} s", flush=True)
    return is_made


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [run.result for run in RUNS]
    usual = [run.result for run in RUNS if not run.is_sweep]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=usual)
    parser.add_argument("--json-folder", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true", help="show the commands, and run none")
    options = parser.parse_args(given)
    chosen = [run for run in RUNS if run.result in options.only]
    if options.list:
        for run in chosen:
            print(f"{run.result}: {run.command}")
        return 0
    folder = options.json_folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    missing = [run.result for run in chosen if not make(run, folder)]
    if missing:
        print(f"::: not made: {', '.join(missing)}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
