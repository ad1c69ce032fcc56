"""The planner of today beside the one before it searched per tensor: commit 76b5764.

    python -m benchmarks.planner_before

Both plan the same problems, one after the other and each in a process of its own, with a policy of
`MemoryCompression` that chooses for each saved tensor:

* Four GPUs of one host, as in `benchmarks/planner_memory.py`: the step relative to one in which all
  tensors are kept, by the simulator of each planner.
* 64 layers of 8 tensors on 8 devices with little memory: the processor time of the search.
* 1,024 devices on hosts of 8, with a budget: the seconds until there is a plan.

The earlier planner comes from the repository's history, so a shallow clone is not enough. What it
does not know (part of a layer is recomputed at less cost, caution with memory) is left out of its
problems.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from benchmarks.measuring import arguments, interval, print_table, save

COMMIT: Final = "76b5764c"
ROOT: Final = Path(__file__).resolve().parents[1]
# Those that make the problems, for both.
SHARED: Final = (
    "tests/unit/plan/swapping.py",
    "benchmarks/planner_memory.py",
    "benchmarks/planner_before.py",
)
FIRST_SEED: Final = 100_000


def _forgiving(kind: type) -> Callable[..., Any]:
    """Makes values of a class, without the fields that it does not have."""
    known = {field.name for field in fields(kind)}
    return lambda *values, **named: kind(
        *values, **{name: value for name, value in named.items() if name in known}
    )


def _prepare() -> Callable[..., Any]:
    """The planner of the package that is imported here, whichever it is."""
    from lightning_pipeshift.plan.arrange import planner, request
    from lightning_pipeshift.plan.inputs import saved_tensors

    if not hasattr(planner, "arrange"):
        # A module that is no longer there.
        compressing = import_module("lightning_pipeshift.plan.offload.arrange")
        planner.arrange = compressing.arrange_compressed
        # What these have was in one module.
        workload = import_module("lightning_pipeshift.plan.cost.workload")
        for name in ("cut", "measured_workload"):
            sys.modules[f"lightning_pipeshift.plan.cost.{name}"] = workload
        for module, name in ((request, "PlanRequest"), (saved_tensors, "SavedTensor")):
            setattr(module, name, _forgiving(getattr(module, name)))
    found: Callable[..., Any] = planner.arrange
    return found


def four_gpus() -> Any:
    """The step relative to one in which all tensors are kept."""
    _prepare()
    from benchmarks import planner_memory

    return planner_memory.four_gpus()["planned"]


def large(seed: int) -> Any:
    """The processor seconds of a search; ``None`` where nothing fits."""
    arrange = _prepare()
    from lightning_pipeshift.errors import BudgetError, PlanError
    from tests.unit.plan import swapping

    problem = swapping.little_memory(seed, 8, 64, 8)
    begin = time.process_time()
    try:
        arrange(*problem)
    except (BudgetError, PlanError):
        return None
    return time.process_time() - begin


def many_devices(budget_gib: int) -> Any:
    """The seconds until there is a plan."""
    _prepare()
    from benchmarks import planner_memory

    return planner_memory.many_devices((budget_gib,))[f"{budget_gib} GiB"]["seconds"]


def run(folder: Path, name: str, *values: int, limit: float) -> Any:
    """Calls a function of this file with the package of a folder; infinite after ``limit`` s."""
    call = f"json.dumps({name}(*{values}))"
    code = f"import json; from benchmarks.planner_before import *; print({call})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
            capture_output=True,
            timeout=limit,
            check=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return math.inf
    except subprocess.CalledProcessError as error:
        raise RuntimeError(error.stderr) from error
    return json.loads(done.stdout.splitlines()[-1])


def checked_out(folder: Path) -> Path:
    """The earlier package, with today's problems."""
    before = folder / "before"
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, before], check=True)
    subprocess.run(["git", "checkout", "--quiet", COMMIT], cwd=before, check=True)
    for name in SHARED:
        shutil.copy(ROOT / name, before / name)
    return before


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--num-large", type=int, default=5, help="problems of 64 layers")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one plan")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = {"now": ROOT, "before": checked_out(Path(scratch))}
        steps = {
            name: run(folder, "four_gpus", limit=options.limit) for name, folder in folders.items()
        }
        taken: dict[str, list[float]] = {name: [] for name in folders}
        seed = FIRST_SEED
        while len(taken["now"]) < options.num_large:
            seed += 1
            found = {n: run(f, "large", seed, limit=options.limit) for n, f in folders.items()}
            if None not in found.values():
                for name, seconds in found.items():
                    taken[name].append(seconds)
        many = {
            f"{budget} GiB": {
                name: run(folder, "many_devices", budget, limit=options.limit)
                for name, folder in folders.items()
            }
            for budget in (1, 2, 4)
        }
    print_table(
        f"The planner now, and at {COMMIT}",
        ["", *folders],
        [
            ["four GPUs: step, relative to all kept", *steps.values()],
            ["64 layers x 8 devices: median s", *(interval(x)["median"] for x in taken.values())],
            ["64 layers x 8 devices: longest s", *map(max, taken.values())],
            *([f"1,024 devices, {name}: s", *found.values()] for name, found in many.items()),
        ],
    )
    figures = {"four_gpus": steps, "many_devices": many}
    figures |= {
        f"large_{name}": {"median": interval(x)["median"], "longest": max(x), "each": x}
        for name, x in taken.items()
    }
    save(options.json, figures)


if __name__ == "__main__":
    main()
