"""All that has to be tried on a GPU, in nine minutes.

    python -m benchmarks.gpu.all --json FILE
    python -m benchmarks.gpu.all --only machine nccl
    python -m benchmarks.gpu.all --device cpu        (a rehearsal, without a GPU)

Each part runs in a process of its own with a limit, in the order of what would be missed most; the
file is written after each, so that nothing is lost when time runs out. A part that fails does not
end the others. The exit status says whether any did.

The parts:

- ``machine``: versions, peer access, free memory;
- ``one_rank``: one rank beside plain Lightning: the same bits with ``self.device``, an LSTM,
  channels last with BatchNorm, and each attention kernel; what each step waits for;
- ``tests``: those marked ``cuda``;
- ``two_ranks``: two ranks on one GPU against one: moves, resuming, clipping, accumulation, a fused
  optimizer, float16 with an overflow on one stage;
- ``saved``: each policy and compression, the allocated bytes beside the held ones, with sleeps in
  front of the copies of side streams, and then in the compute stream, which find missing waits;
- ``lending``: tensors that move to another stage's memory;
- ``nccl``: payloads over NCCL: two and three stages, all schedules, few microbatches, tied weights,
  virtual machines with rings, moves; and a rank that raises: how soon the others end;
- ``profile``: microbatches of 10 ms: how busy the GPU is, beside plain Lightning; the processor's
  share of a microbatch, with layers so small that it decides;
- ``memory``: ``benchmarks.gpu.memory_compression``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import Case, Compared, train
from benchmarks.gpu.one_rank import MODELS, compared_with_plain, held_and_allocated
from benchmarks.gpu.profile import processor_share, profiled
from benchmarks.measuring import arguments, machine, print_table, save
from lightning_pipeshift.errors import StageFailedError
from lightning_pipeshift.plan.schedule.schedules import SCHEDULES
from lightning_pipeshift.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent.parent

_LIMIT_SECONDS = 540.0
_ENDS_WITHIN_SECONDS = 30.0

Findings = dict[str, Any]

# Where a part writes what it has found so far, in case that it does not come to its end.
_progress: list[Path] = []


def about_machine(device: str) -> Findings:
    """Versions, devices, and which of them reach each other's memory."""
    found: Findings = {"versions": machine()}
    if device == "cuda":
        count = torch.cuda.device_count()
        found["gpus"] = [
            {
                "name": torch.cuda.get_device_name(index),
                "uuid": str(getattr(torch.cuda.get_device_properties(index), "uuid", "")),
                "free_bytes": torch.cuda.mem_get_info(index)[0],
                "total_bytes": torch.cuda.mem_get_info(index)[1],
                "reaches": [
                    other
                    for other in range(count)
                    if other != index and torch.cuda.can_device_access_peer(index, other)
                ],
            }
            for index in range(count)
        ]
        found["cuda"], found["nccl"] = torch.version.cuda, torch.cuda.nccl.version()
    return found


def one_rank(device: str) -> Findings:
    """Checks that one rank computes the same as plain Lightning."""
    return _each(
        MODELS, lambda name: run_ranks(compared_with_plain, 1, name, device, timeout=60)[0]
    )


def marked_tests(device: str) -> Findings:
    """The tests for GPUs."""
    files = sorted(str(path) for path in (ROOT / "tests").glob("**/test_cuda*.py"))
    words = [sys.executable, "-m", "pytest", "-q", "-x", "--maxfail=20", "-p", "no:cacheprovider"]
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    ended = subprocess.run(
        [*words, *files], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    lines = ended.stdout.splitlines()
    # 5: none was collected to run.
    is_well = ended.returncode in (0, 5) or device == "cpu"
    return {"problems": [] if is_well else lines[-150:], "summary": lines[-1:]}


def two_ranks(device: str) -> Findings:
    """Two ranks on one GPU, through host memory."""
    return _cases(
        device,
        Case(moves=True),
        Case(moves=True, fused=True, tied=True),
        Case(fused=True, resumes=True),
        Case(clip=0.1, accumulate=2, fused=True),
        Case(precision="16-mixed" if device == "cuda" else "32-true", overflows=1, fused=True),
        Case(precision="16-mixed" if device == "cuda" else "32-true", overflows=2),
        Case(precision="bf16-mixed", stages=3, moves=True),
        Case(without_loss=0),
    )


def saved(device: str) -> Findings:
    """Tensors that move or are recomputed."""
    cases = [
        Case(stages=1, policy=policy, compression=compression, sleeps=sleeps, precision=precision)
        for sleeps in ("side", "compute", None)
        for policy in ("swap", "recompute")
        for compression in ((None, "lossless") if policy == "swap" else (None,))
        for precision in ("32-true", "bf16-mixed")
    ]
    cases += [Case(policy="swap", sleeps=sleeps, without_loss=0) for sleeps in ("side", "compute")]
    found = _cases(device, *cases)
    found["bytes"] = {
        str(compression): run_ranks(held_and_allocated, 1, compression, device, timeout=60)[0]
        for compression in (None, "lossless", "8bit")
    }
    return found


def lending(device: str) -> Findings:
    """Tensors that move to another stage's memory, on a GPU that both share."""
    shares = [True, False] if torch.cuda.device_count() > 1 else [True]
    return _cases(
        device,
        *(
            Case(policy="swap to a device", sleeps=sleeps, shares=is_shared)
            for is_shared in shares
            for sleeps in (None, "side", "compute")
        ),
    )


def nccl(device: str) -> Findings:
    """Payloads over NCCL."""
    shares = torch.cuda.device_count() < 4
    backend = "nccl" if device == "cuda" else "gloo"
    plain = Case(backend=backend, shares=shares)
    found = _cases(device, plain)
    if found["problems"] and shares and device == "cuda":
        found["note"] = "NCCL may not let two ranks share a GPU: the rest was left out"
        return found
    cases = [replace(plain, schedule=name) for name in SCHEDULES]
    cases += [replace(plain, stages=3)]
    cases += [replace(plain, microbatches=count) for count in (1, 2)]
    cases += [
        replace(plain, tied=True, fused=True),
        replace(plain, virtual_machines=2),
        replace(plain, virtual_machines=2, tied=True, moves=True),
        replace(plain, moves=True, precision="bf16-mixed"),
        replace(plain, clip=0.1, sleeps="compute"),
    ]
    found = _merged(found, _cases(device, *cases))
    raising = replace(plain, device=device, raises_on=1, stages=3)
    begin = time.perf_counter()
    outcomes = run_ranks(train, 3, raising, expect_failure=True, timeout=90)
    found["seconds_to_the_end_after_an_error"] = max(o.seconds for o in outcomes) - min(
        o.seconds for o in outcomes
    )
    found["seconds_of_the_run_that_fails"] = time.perf_counter() - begin
    kinds = [outcome.error_type for outcome in outcomes]
    if kinds != [StageFailedError.__name__, "ValueError", StageFailedError.__name__]:
        found["problems"].append(f"ranks ended with {kinds}")
    if found["seconds_to_the_end_after_an_error"] > _ENDS_WITHIN_SECONDS:
        found["problems"].append("the others took too long to end")
    return found


def profile(device: str) -> Findings:
    """How busy the GPU is, and what the processor adds."""
    return {
        "busy": run_ranks(profiled, 1, device, timeout=120)[0],
        "processor": run_ranks(processor_share, 1, device, timeout=120)[0],
    }


def memory(device: str) -> Findings:
    """The memory benchmark."""
    if device != "cuda":
        return {"note": "needs a GPU"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.json"
        words = [sys.executable, "-m", "benchmarks.gpu.memory_compression", "--json", str(path)]
        ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        if ended.returncode:
            return {"problems": (ended.stdout + ended.stderr).splitlines()[-60:]}
        return {"figures": json.loads(path.read_text())["figures"]}


@dataclass(frozen=True)
class Part:
    """One part.

    Args:
        run: finds out; called with the kind of device. Its ``"problems"``, if any, are failures.
        limit_seconds: after this it is ended.
    """

    run: Callable[[str], Findings]
    limit_seconds: float


PARTS = {
    "machine": Part(about_machine, 30),
    "one_rank": Part(one_rank, 75),
    "two_ranks": Part(two_ranks, 75),
    "saved": Part(saved, 100),
    "nccl": Part(nccl, 100),
    "lending": Part(lending, 40),
    "tests": Part(marked_tests, 150),
    "profile": Part(profile, 60),
    "memory": Part(memory, 150),
}


def _each(names: Iterable[str], run: Callable[[str], Any]) -> Findings:
    """The findings of each; one that raises counts as a problem, and does not end the others."""
    found: Findings = {"problems": []}
    for name in names:
        try:
            found[name] = run(name)
            found["problems"] += [f"{name}: {one}" for one in found[name].get("problems", ())]
        except Exception as error:
            found["problems"].append(f"{name}: {type(error).__name__}: {str(error)[:3000]}")
        for path in _progress:
            path.write_text(json.dumps(found))
    return found


def _cases(device: str, *cases: Case) -> Findings:
    compared = Compared(device)
    by_name = {_short(case): case for case in cases}

    def run(name: str) -> Findings:
        differing = compared.differing(by_name[name])
        return {"problems": [f"differing: {differing[:5]}"] if differing else []}

    return _each(by_name, run)


def _short(case: Case) -> str:
    """The unusual properties of a case."""
    usual = asdict(Case())
    return ", ".join(f"{k}={v}" for k, v in asdict(case).items() if v != usual[k]) or "as usual"


def _merged(first: Findings, second: Findings) -> Findings:
    return {**first, **second, "problems": first["problems"] + second["problems"]}


def _run_part(name: str, device: str, seconds: float) -> Findings:
    """A part in a process group of its own, which is killed if it takes too long."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        words = [sys.executable, "-m", "benchmarks.gpu.all", "--part", name, "--device", device]
        process = subprocess.Popen([*words, "--json", str(path)], cwd=ROOT, start_new_session=True)
        try:
            process.wait(timeout=seconds)
            problems = [f"ended with {process.returncode}"]
        except subprocess.TimeoutExpired:
            problems = [f"still running after {seconds:.0f} s"]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found = json.loads(path.read_text()) if path.exists() else {"problems": []}
        if not found.pop("is_whole", False):
            found["problems"] += problems
    return {**found, "seconds": round(time.perf_counter() - begin, 1)}


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART")
    parser.add_argument("--limit", type=float, default=_LIMIT_SECONDS, help="seconds for all")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU. `--device cpu` rehearses the script without one.")
    if options.part:
        _progress.append(options.json)
        try:
            found = PARTS[options.part].run(options.device)
        except Exception:
            found = {"problems": traceback.format_exc()[-6000:].splitlines()}
        options.json.write_text(json.dumps({**found, "is_whole": True}))
        return 0

    begin = time.perf_counter()
    all_found: dict[str, Findings] = {}
    for name in options.only or PARTS:
        left = options.limit - (time.perf_counter() - begin)
        if left < 10:
            all_found[name] = {"problems": ["no time was left"], "seconds": 0.0}
            continue
        print(f"::: {name}", flush=True)
        all_found[name] = _run_part(name, options.device, min(left, PARTS[name].limit_seconds))
        for problem in all_found[name].get("problems", ()):
            print(f"    {problem}", flush=True)
        save(options.json, {"device": _device_name(options.device), "parts": all_found}, False)
    print_table(
        f"On {_device_name(options.device)}",
        ["part", "seconds", "problems"],
        [[n, f["seconds"], len(f.get("problems", ()))] for n, f in all_found.items()],
    )
    return int(any(found.get("problems") for found in all_found.values()))


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "the CPU (a rehearsal)"


if __name__ == "__main__":
    sys.exit(main())
