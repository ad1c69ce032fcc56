"""All that has to be tried on a GPU, in nine minutes.

    python -m benchmarks.gpu.all --json FILE
    python -m benchmarks.gpu.all --only machine nccl
    python -m benchmarks.gpu.all --device simulated        (a rehearsal, without a GPU)

First come the parts that need no quiet GPU, side by side, as many ranks at once as the processor
bears; then those that time something, one by one. Each part and each of its runs has a limit; the
file is written whenever there are findings, so that nothing is lost when time runs out. A part that
fails does not end the others. The exit status says whether any did. Timelines are written to a
folder beside the file. The rehearsal runs every line, with smaller models: see ``rehearsal.py``.

On a machine that has torch, Lightning and transformers, but no network, `benchmarks/gpu/run.sh`
installs the packages that are missing from a folder of wheels, and runs this for nine minutes. It
says how to make that folder.

The parts:

- ``machine``: versions, peer access, free memory;
- ``one_rank``: one rank beside plain Lightning: the same bits with ``self.device``, an LSTM,
  channels last with BatchNorm, and each attention kernel; what each step waits for;
- ``two_ranks``: two ranks on one GPU against one: moves, resuming, clipping, accumulation, a fused
  optimizer, float16 with an overflow on one stage;
- ``saved``: each policy and compression, the allocated bytes beside the held ones, with sleeps in
  front of the copies of side streams, and then in the compute stream, which find missing waits;
- ``lending``: tensors that move to another stage's memory;
- ``nccl``: NCCL, which sums gradients over virtual machines: two and three stages, all schedules,
  few microbatches, tied weights, virtual machines with rings, moves; and a rank that raises: how
  soon the others end;
- ``tests``: those marked ``cuda``;
- ``gpt2``: GPT-2 small with a memory budget, and on two stages, beside plain Lightning;
- ``profile``: microbatches of 10 ms: how busy the GPU is, beside plain Lightning; the processor's
  share of a microbatch, with layers so small that it decides;
- ``memory``: ``benchmarks.gpu.memory_compression``.

The results, under ``figures``: ``device``, and in ``parts`` for each part ``seconds``, ``problems``
(in words; empty if all is well), and its findings; of parts with cases, one entry per case with
``is_well``. ``parts.gpt2.rows`` has for each row ``milliseconds_a_step`` (the median of
``num_steps`` steps), ``times_plain``, ``peak_bytes`` of each rank, and what each rank found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu import gpt2, memory_compression
from benchmarks.gpu.cases import Case, Compared, nccl, train
from benchmarks.gpu.one_rank import MODELS, compared_with_plain, gpus, held_and_allocated
from benchmarks.gpu.profile import processor_share, profiled
from benchmarks.gpu.rehearsal import NAME, VARIABLE
from benchmarks.gpu.running import SLOTS, Findings, Run, sizes, text_of
from benchmarks.measuring import arguments, machine, print_table, save
from lightning_pipeshift.errors import StageFailedError
from lightning_pipeshift.plan.schedule.schedules import ASYNCHRONOUS, SCHEDULES
from lightning_pipeshift.testing.ranks import PRELOADED_MODULES, warm_server

ROOT = Path(__file__).resolve().parent.parent.parent

_LIMIT_SECONDS = 540.0
_ENDS_WITHIN_SECONDS = 30.0


def about_machine(run: Run) -> None:
    """Versions, devices, and which of them reach each other's memory."""
    run.add({"versions": machine(), **run.ranks(gpus, 1)[0]})


def one_rank(run: Run) -> None:
    """Checks that one rank computes the same as plain Lightning."""
    run.each(MODELS, lambda name: run.ranks(compared_with_plain, 1, name)[0])


def marked_tests(run: Run) -> None:
    """The tests for GPUs."""
    files = [
        str(path)
        for path in sorted((ROOT / "tests").glob("**/test_*.py"))
        if "mark.cuda" in path.read_text()
    ]
    files = files[: run.sizes.most_test_files]
    words = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-n", str(run.sizes.test_workers)]
    words += ["-p", "no:cacheprovider", "--maxfail=20", *files]
    with SLOTS.taken(2 * run.sizes.test_workers), tempfile.TemporaryFile("w+") as output:
        # In a group of its own, which ends with it.
        process = subprocess.Popen(
            words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=run.seconds_left)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        returned = process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    problems = [f"pytest ended with {returned}", *lines[-150:]] if returned else []
    run.add({"summary": lines[-1:]}, problems)


def two_ranks(run: Run) -> None:
    """Two ranks on one GPU, which share its memory."""
    _cases(
        run,
        Case(moves=True),
        Case(moves=True, fused=True, tied=True),
        Case(fused=True, resumes=True),
        Case(clip=0.1, accumulate=2, fused=True),
        Case(precision="16-mixed", overflows=1, fused=True),
        Case(precision="16-mixed", overflows=2),
        Case(precision="bf16-mixed", stages=3, moves=True),
        Case(without_loss=0),
    )


def saved(run: Run) -> None:
    """Tensors that move or are recomputed."""
    cases = [
        Case(stages=1, policy=policy, compression=compression, sleeps=sleeps, precision=precision)
        for sleeps in ("side", "compute", None)
        for policy in ("swap", "recompute")
        for compression in ((None, "lossless") if policy == "swap" else (None,))
        for precision in ("32-true", "bf16-mixed")
    ]
    cases += [Case(policy="swap", sleeps=sleeps, without_loss=0) for sleeps in ("side", "compute")]
    _cases(run, *cases)
    by_name = {str(compression): compression for compression in (None, "lossless", "8bit")}
    run.each(by_name, lambda name: run.ranks(held_and_allocated, 1, by_name[name])[0])


def lending(run: Run) -> None:
    """Tensors that move to another stage's memory, on a GPU that both share, or on two."""
    shares = [True, False][: torch.cuda.device_count() or 1]
    _cases(
        run,
        *(
            Case(policy="swap to a device", sleeps=sleeps, shares=is_shared)
            for is_shared in shares
            for sleeps in (None, "side", "compute")
        ),
    )


def over_nccl(run: Run) -> None:
    """NCCL as the backend of sums."""
    plain = Case(backend=nccl(), shares=torch.cuda.device_count() < 4)
    _cases(
        run,
        *(
            # Two versions of the weights need as many batches in an update as there are stages.
            replace(plain, schedule=name, microbatches=1, accumulate=2)
            if name in ASYNCHRONOUS
            else replace(plain, schedule=name)
            for name in SCHEDULES
        ),
        replace(plain, stages=3),
        replace(plain, microbatches=1),
        replace(plain, microbatches=2),
        replace(plain, tied=True, fused=True),
        replace(plain, virtual_machines=2),
        replace(plain, virtual_machines=2, tied=True, moves=True),
        replace(plain, moves=True, precision="bf16-mixed"),
        replace(plain, clip=0.1, sleeps="compute"),
    )
    run.each(["a rank raises"], lambda _: _raising(run, replace(plain, raises_on=1, stages=3)))


def _raising(run: Run, case: Case) -> Findings:
    """How soon the others end when a rank raises."""
    outcomes = run.ranks(train, case.world_size, case, expect_failure=True)
    seconds = [outcome.seconds for outcome in outcomes]
    kinds = [outcome.error_type for outcome in outcomes]
    expected = [StageFailedError.__name__, "ValueError", StageFailedError.__name__]
    problems = [f"ranks ended with {kinds}"] if kinds != expected else []
    late = max(seconds) - min(seconds)
    problems += ["the others took too long to end"] if late > _ENDS_WITHIN_SECONDS else []
    return {
        "problems": problems,
        "seconds_to_the_end_after_an_error": late,
        "seconds_of_the_run_that_fails": max(seconds),
    }


def profile(run: Run) -> None:
    """How busy the GPU is, and what the processor adds."""
    run.add({"busy": run.ranks(profiled, 1, *run.sizes.tower)[0]})
    run.add(
        {"processor": run.ranks(processor_share, 1, run.sizes.tower[0], run.sizes.small_steps)[0]}
    )


def memory(run: Run) -> None:
    """The memory benchmark."""
    found = memory_compression.figures(run)
    run.add(found)
    memory_compression.show(found)


def gpt2_rows(run: Run) -> None:
    """The budget and two stages, beside plain Lightning."""
    found, problems = gpt2.figures(run)
    run.add(found, problems)
    gpt2.show(found)


@dataclass(frozen=True)
class Part:
    """One part.

    Args:
        run: finds out, and adds what it finds. Its ``"problems"``, if any, are failures.
        limit_seconds: it has no more.
        is_timed: whether it needs the GPU for itself. The others run first, side by side.
    """

    run: Callable[[Run], None]
    limit_seconds: float
    is_timed: bool = False


PARTS = {
    "machine": Part(about_machine, 60),
    "one_rank": Part(one_rank, 200),
    "two_ranks": Part(two_ranks, 200),
    "saved": Part(saved, 200),
    "lending": Part(lending, 200),
    "nccl": Part(over_nccl, 200),
    "tests": Part(marked_tests, 240),
    "gpt2": Part(gpt2_rows, 200, is_timed=True),
    "profile": Part(profile, 40, is_timed=True),
    "memory": Part(memory, 200, is_timed=True),
}


def _cases(run: Run, *cases: Case) -> None:
    compared = Compared(run)
    chosen = cases if run.sizes.has_all_cases else _fewest(cases)
    by_name = {_short(case): case for case in chosen}

    def one(name: str) -> Findings:
        differing = compared.differing(by_name[name])
        return {"problems": [f"differing: {differing[:5]}"] if differing else []}

    run.each(by_name, one)


def _fewest(cases: Sequence[Case]) -> list[Case]:
    """Cases that together have every property of all: each chosen one has most that are missing."""
    missing = {each for case in cases for each in asdict(case).items()}
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(missing & asdict(case).items()))
        chosen.append(best)
        missing -= asdict(best).items()
    return chosen


def _short(case: Case) -> str:
    """The unusual properties of a case."""
    usual = asdict(Case())
    return ", ".join(f"{k}={v}" for k, v in asdict(case).items() if v != usual[k]) or "as usual"


class Script:
    """One call of the script.

    Args:
        path: of the results, if they are wanted.
        is_rehearsal: whether there is no GPU.
        limit_seconds: for all parts.
    """

    def __init__(self, path: Path | None, is_rehearsal: bool, limit_seconds: float) -> None:
        self.found: dict[str, Findings] = {}
        self.device = NAME if is_rehearsal else torch.cuda.get_device_name()
        self._path = path
        self._ends_at = time.monotonic() + sizes().patience * limit_seconds
        self._changing = threading.Lock()

    def run(self, names: Sequence[str]) -> None:
        """Runs parts: first those that need no quiet GPU."""
        warm_server()
        self.found = {name: {"problems": []} for name in names}
        alone = [name for name in names if PARTS[name].is_timed and sizes().has_quiet_parts]
        beside = [name for name in names if name not in alone]
        with ThreadPoolExecutor(len(PARTS)) as pool:
            for together in (beside, *([name] for name in alone)):
                list(pool.map(self._run, together))

    def _run(self, name: str) -> None:
        part, begin = PARTS[name], time.monotonic()
        ends_at = min(self._ends_at, begin + sizes().patience * part.limit_seconds)
        with tempfile.TemporaryDirectory() as scratch:
            # Timelines are kept beside the results.
            folder = Path(scratch) if self._path is None else self._path.with_suffix("")
            found = self.found[name]
            run = Run(ends_at, folder, self._save, found, self._changing)
            print(f"::: {name}", flush=True)
            try:
                part.run(run)
            except Exception as error:
                run.add({}, [text_of(error)])
            run.add({"seconds": round(time.monotonic() - begin, 1)})
        lines = [f"{name}: {problem}" for problem in found["problems"]]
        print("\n".join([*lines, f"::: {name}: {found['seconds']} s"]), flush=True)

    def _save(self) -> None:
        with self._changing:
            save(self._path, {"device": self.device, "parts": self.found}, False)


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", choices=["cuda", "simulated"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART")
    parser.add_argument("--limit", type=float, default=_LIMIT_SECONDS, help="seconds for all")
    options = parser.parse_args(given)
    is_rehearsal = options.device == "simulated"
    if is_rehearsal:
        os.environ[VARIABLE] = "1"
        PRELOADED_MODULES.append("tests.quick_start")
    if not is_rehearsal and not torch.cuda.is_available():
        sys.exit("torch sees no GPU. `--device simulated` rehearses the script without one.")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    script = Script(options.json, is_rehearsal, options.limit)
    script.run(options.only or list(PARTS))
    print_table(
        f"On {script.device}",
        ["part", "seconds", "problems"],
        [[name, found["seconds"], len(found["problems"])] for name, found in script.found.items()],
    )
    return int(any(found["problems"] for found in script.found.values()))


if __name__ == "__main__":
    sys.exit(main())
