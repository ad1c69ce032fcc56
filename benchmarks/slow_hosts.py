"""What `LayerMigration` does about a host that is stopped now and then, as by a CPU quota.

    python -m benchmarks.slow_hosts --jobs 3 --json slow_hosts.json
    python -m benchmarks.all --only slow_hosts slow_hosts_quota
    python -m benchmarks.slow_hosts --only stop --pauses 0.1 --stopped 0.5 --layers 0.004
    python -m benchmarks.slow_hosts --only loaded

Two stages share 12 layers. After some steps the second one is held back, later not any more:

- ``stop``: another process stops it (SIGSTOP) and lets it go on (SIGCONT), in turn. The layers
  sleep in slices of a millisecond, each of which has to pass while the process runs: a stop
  prolongs them, and what else runs on the machine hardly does. The probe sleeps alike. So several
  of these cases run at once with ``--jobs``. Layers take 4 ms (their backward twice that) with all
  pauses, and 1, 10 and 50 ms with the usual ones of a container: 50 of each 100 ms are taken.
- ``quota``: its control group has a CPU quota (root, cgroups of version 1). The layers compute for
  2 ms, and other programs on the machine count: the figures say something on an idle one only.
- ``loaded``: nothing is held back, while other processes keep all cores busy: nothing should move.

Printed is after how many steps of the fault layers moved first, the share of the new optimum (the
better of two fixed splits under the same fault in runs of their own, that by the speeds and the
even one: where pauses are longer than a step, all wait for them whatever the split is; over the
steps at the end of the fault), the time of a step at the end over that before the fault, and how
many times the plan changed before, during and after the fault. The parameters are compared with a
run in which nothing moves, bit by bit. The file of ``--json`` has the figures of all cases so far.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from functools import cache, partial
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.measuring import arguments, print_table, save
from benchmarks.placements import Repeated
from benchmarks.unequal_devices import CGROUP
from lightning_pipeshift import LayerMigration, PipeShiftStrategy
from lightning_pipeshift.runtime.planning import probe, replanning, slow_rank
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.testing.sleeping import Sleeper
from tests.features_models import parameters_of, quiet_trainer

NUM_LAYERS, MICROBATCHES, WIDTH = 12, 4, 64
EVEN = (6, 6)
SLICE = 0.001
PAUSES, STOPPED = (0.005, 0.01, 0.05, 0.1, 0.5), (0.25, 0.5, 0.75)
LAYERS, OF_QUOTAS, SHORT = (0.004, 0.001, 0.01, 0.05), 0.002, 0.005
USUAL = 0.1, 0.5


class Case(NamedTuple):
    """How the second stage is held back.

    Args:
        kind: ``"stop"``, ``"quota"`` or ``"loaded"``.
        pause: seconds of a pause; with a quota, of its period.
        stopped: the part of the time that is taken from it.
        layer: seconds of a layer's forward.
    """

    kind: str
    pause: float
    stopped: float
    layer: float

    def __str__(self) -> str:
        held = f"{self.kind} {1000 * self.pause:g} ms {self.stopped:.0%}"
        return f"{held}, layers of {1000 * self.layer:g} ms"


class Phases(NamedTuple):
    """How many steps there are before, during and after the fault, and how many count at the end of
    each of them.
    """

    before: int
    during: int
    after: int
    counted: int


def run_seconds(seconds: float) -> None:
    """Sleeps so long while this process runs. A slice that takes longer was interrupted."""
    done = 0.0
    while done < seconds:
        begin = time.perf_counter()
        time.sleep(SLICE)
        done += min(time.perf_counter() - begin, 2 * SLICE)


def compute_seconds(seconds: float) -> None:
    """Computes for so long, by the processor time of this thread."""
    end, matrix = time.thread_time() + seconds, torch.ones(96, 96)
    while time.thread_time() < end:
        torch.mm(matrix, matrix)


WORK: dict[str, Callable[[float], None]] = {"now": run_seconds}


def slices(device: torch.device, seconds: float | None = None) -> list[float]:
    """Stands in for the probe's computation: slices of the same kind of work as the layers'."""
    found: list[float] = []
    while sum(found) < (seconds or 0.06):
        begin = time.perf_counter()
        WORK["now"](0.002)
        found.append(time.perf_counter() - begin)
    return found


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        WORK["now"](seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        WORK["now"](2 * ctx.seconds)
        return gradients[0], None


class WorkingLayer(nn.Module):
    """A linear layer that takes time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Work.apply(self.dropout(self.linear(x)), self.seconds)
        return found


class Worker(Sleeper):
    """Layers that take time, one after the other."""

    def __init__(self, seconds: float) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(WorkingLayer(seconds) for _ in range(NUM_LAYERS))


STOPS = """
import os, select, signal, sys, time
pid, pause, runs = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
sys.stdin.readline()
at = time.monotonic()
while not select.select([sys.stdin], [], [], 0)[0]:
    for number, seconds in ((signal.SIGSTOP, pause), (signal.SIGCONT, runs)):
        os.kill(pid, number)
        at += seconds
        time.sleep(max(0.0, at - time.monotonic()))
"""


class Fault:
    """Holds this process back."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._group = CGROUP / f"pipeshift-{os.getpid()}"
        self._stops: subprocess.Popen[bytes] | None = None
        if case.kind == "stop":
            runs = case.pause * (1 - case.stopped) / case.stopped
            command = [sys.executable, "-c", STOPS, *map(str, (os.getpid(), case.pause, runs))]
            self._stops = subprocess.Popen(command, stdin=subprocess.PIPE)

    def begin(self) -> None:
        """From here on."""
        if self._stops is not None:
            assert self._stops.stdin is not None
            self._stops.stdin.write(b"begin\n")
            self._stops.stdin.flush()
        elif self._case.kind == "quota":
            microseconds = round(1e6 * self._case.pause)
            self._group.mkdir()
            (self._group / "cpu.cfs_period_us").write_text(str(microseconds))
            part = round(microseconds * (1 - self._case.stopped))
            (self._group / "cpu.cfs_quota_us").write_text(str(part))
            (self._group / "cgroup.procs").write_text(str(os.getpid()))

    def end(self) -> None:
        """Until here; does nothing the second time."""
        if self._stops is not None:
            assert self._stops.stdin is not None
            # It ends while this process runs.
            with suppress(BrokenPipeError):
                self._stops.stdin.close()
            self._stops.wait()
        elif self._group.exists():
            (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
            self._group.rmdir()


class Watches(L.Callback):
    """Begins and ends the fault, and notes what every step took, and under which split.

    Args:
        fault: of this rank.
        phases: of the run.
    """

    def __init__(self, fault: Fault | None, phases: Phases) -> None:
        self.seconds: list[float] = []
        self.counts: list[tuple[int, ...]] = []
        self._fault, self._phases = fault, phases
        self._begun = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Begins a step."""
        if self._fault is not None and batch_idx == self._phases.before:
            self._fault.begin()
        if self._fault is not None and batch_idx == self._phases.before + self._phases.during:
            self._fault.end()
        now = time.perf_counter()
        if batch_idx:
            self.seconds.append(now - self._begun)
        self._begun = now
        self.counts.append(trainer.strategy.plan.placement.counts[0] if batch_idx else EVEN)


class Ran(NamedTuple):
    """A run on one rank."""

    seconds: list[float]
    counts: list[tuple[int, ...]]
    parameters: dict[str, Tensor]
    changes: list[dict[str, Any]]


def train(case: Case, phases: Phases, counts: tuple[int, ...], moves: bool, patience: int) -> Ran:
    """Runs on every rank."""
    L.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    WORK["now"] = compute_seconds if case.kind == "quota" else run_seconds
    slow_rank.time_slices = slices  # type: ignore[attr-defined]
    replanning.probe = partial(probe.probe, slices=slices)  # type: ignore[attr-defined]
    fault = Fault(case) if os.environ["RANK"] == "1" else None
    watches = Watches(fault, phases)
    with ExitStack() as stack:
        if fault is not None:
            stack.callback(fault.end)
        strategy = PipeShiftStrategy(microbatches=MICROBATCHES, partition=list(counts))
        trainer = quiet_trainer(
            {"devices": 2, "strategy": strategy},
            max_steps=sum(phases[:3]),
            max_epochs=-1,
            callbacks=[*([LayerMigration(patience=patience)] if moves else []), watches],
        )
        module = Worker(case.layer)
        data = Repeated((torch.randn(WIDTH), torch.randn(WIDTH)))
        trainer.fit(module, DataLoader(data, batch_size=MICROBATCHES))
    changes = strategy.decisions
    return Ran(watches.seconds, watches.counts, parameters_of(module), changes)


def split_for(speed: float) -> tuple[int, int]:
    """The best split by the time of a step, ``(microbatches - 1) * pace + both stages``."""

    def step(first: int) -> float:
        stages = first, (NUM_LAYERS - first) / speed
        return (MICROBATCHES - 1) * max(stages) + sum(stages)

    best = min(range(1, NUM_LAYERS), key=step)
    return best, NUM_LAYERS - best


def burn() -> None:
    """Keeps a core busy."""
    while True:
        sum(range(10_000))


@cache
def reference(num_steps: int) -> list[Ran]:
    """A run in which nothing moves, and no layer takes time."""
    given = Case("none", 0.0, 0.0, 0.0), Phases(0, num_steps, 0, 0), EVEN, False, 0
    return run_ranks(train, 2, *given, timeout=600)


def measure(case: Case, options: Any) -> dict[str, Any]:
    """All runs of a case."""
    phases = Phases(options.before, options.during, options.after, options.counted)
    if case.layer > SHORT:
        # A return takes some windows of steps, however long these are.
        phases = Phases(*(number // 2 for number in phases))._replace(after=phases.after)
    busy = []
    if case.kind == "loaded":
        phases = Phases(0, options.loaded_steps, 0, options.counted)
        busy = [
            multiprocessing.Process(target=burn, daemon=True) for _ in range(os.cpu_count() or 1)
        ]
    for process in busy:
        process.start()
    try:
        ranks = run_ranks(train, 2, case, phases, EVEN, True, options.patience, timeout=2400)
    finally:
        for process in busy:
            process.kill()
    moved = ranks[0]
    same = all(
        torch.equal(one.parameters[name], other.parameters[name])
        for one, other in zip(ranks, reference(sum(phases[:3])), strict=True)
        for name in other.parameters
        if not other.parameters[name].is_meta and not one.parameters[name].is_meta
    )
    first, last = phases.before, phases.before + phases.during
    # A change may come into force in parts; its step is that of the last one.
    moves = [each["step"] for each in moved.changes if each.get("verdict") != "refused"]
    found: dict[str, Any] = {
        "bitwise_equal": same,
        "counts": [list(moved.counts[at]) for at in (max(first - 1, 0), last - 1, -1)],
        "parts": [[n, *b] for n, (a, b) in enumerate(pairwise(moved.counts), 1) if a != b],
        "moves_before": sum(step < first for step in moves),
        "moves_during": sum(first <= step < last for step in moves),
        "moves_after": sum(step >= last for step in moves),
        "steps_until_moved": next((step - first for step in moves if step >= first), None),
        "changes": moved.changes,
        "seconds": [round(each, 4) for each in moved.seconds],
    }
    if case.kind == "loaded":
        return found
    count = phases.counted
    before, during, after = (
        fmean(moved.seconds[max(0, end - count) : end])
        for end in (first - 1, last - 1, len(moved.seconds))
    )
    best = split_for(1 - case.stopped)
    short, fixed = Phases(1, count + 3, 0, count), {}
    for counts in {best, EVEN}:
        ran: Ran = run_ranks(train, 2, case, short, counts, False, 0, timeout=1200)[0]
        fixed[counts] = fmean(ran.seconds[-count:])
    optimum = min(fixed.values())
    return {
        **found,
        "step_before": before,
        "step_during": during,
        "step_after": after,
        "fixed_splits": {str(counts): each for counts, each in fixed.items()},
        "of_the_optimum": optimum / during,
        "after_over_before": after / before,
    }


def cases_of(options: Any) -> list[Case]:
    """Those that are asked for, the longest first."""
    found = [
        Case("stop", pause, stopped, layer)
        for layer in sorted(options.layers, reverse=True)
        for pause in options.pauses
        for stopped in options.stopped
        if layer == LAYERS[0] or (pause, stopped) == USUAL
    ]
    found += [
        Case("quota", pause, stopped, OF_QUOTAS)
        for pause in options.pauses
        for stopped in options.stopped
        if pause in (0.01, 0.1)  # the kernel's quota has periods of a second at most
    ]
    found.append(Case("loaded", 0.0, 0.0, LAYERS[0]))
    return [case for case in found if options.only in (None, case.kind)]


def measured(cases: list[Case], options: Any) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Each case with its figures, as they come: those that sleep side by side."""
    sleeping = [case for case in cases if case.kind == "stop"]
    context = multiprocessing.get_context("spawn")
    # Each job starts its ranks from a process of its own.
    with ProcessPoolExecutor(options.jobs, context) as pool:
        futures = {pool.submit(measure, case, options): case for case in sleeping}
        for future in as_completed(futures):
            yield futures[future], future.result()
    for case in cases:
        if case not in sleeping:
            yield case, measure(case, options)


def main() -> None:
    """Runs the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=("stop", "quota", "loaded"))
    parser.add_argument("--pauses", type=float, nargs="+", default=PAUSES)
    parser.add_argument("--stopped", type=float, nargs="+", default=STOPPED)
    parser.add_argument("--layers", type=float, nargs="+", default=LAYERS, help="of stop cases, s")
    parser.add_argument("--jobs", type=int, default=1, help="stop cases at once")
    parser.add_argument("--patience", type=int, default=10)
    parser.add_argument("--before", type=int, default=40)
    parser.add_argument("--during", type=int, default=140)
    parser.add_argument("--after", type=int, default=100)
    parser.add_argument("--counted", type=int, default=30)
    parser.add_argument("--loaded-steps", type=int, default=500)
    options = parser.parse_args()
    rows, figures = [], {}
    for case, found in measured(cases_of(options), options):
        figures[str(case)] = found
        rows.append(
            [
                str(case),
                " ".join(map(str, found["counts"])),
                str(found["steps_until_moved"]),
                found.get("of_the_optimum", "-"),
                found.get("after_over_before", "-"),
                f"{found['moves_before']} {found['moves_during']} {found['moves_after']}",
                found["bitwise_equal"],
            ]
        )
        print(*rows[-1], flush=True)
        save(options.json, figures, says_so=False)
    header = ["held back", "layers before, during, after", "steps until the move"]
    header += ["of the optimum", "after / before", "moves before, during, after", "same bits"]
    print_table("A stage that is held back for some time", header, rows)
    print(
        "\nWith the fault it is to reach 0.90 of the optimum, after it at most 1.05 of the time"
        " before, with no more than two changes of the plan for each, and none without a fault."
    )


if __name__ == "__main__":
    main()
