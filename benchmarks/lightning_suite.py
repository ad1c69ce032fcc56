"""Lightning's own test suite with PipeShift on one device, beside the plain run of it.

    git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
    python -m benchmarks.lightning_suite --checkout pytorch-lightning
    python -m benchmarks.lightning_suite --checkout pytorch-lightning trainer callbacks -k 'not ddp'

Whatever a test says of hooks, loops, callbacks, logs and checkpoints should hold with this strategy
too. Every test runs twice: as it is, and with `PipeShiftStrategy` wherever the Trainer would have
chosen `SingleDeviceStrategy` by itself. The list is of those that pass plain and fail with ours, by
the first line of the reason. The tests come from the checkout, Lightning itself is the one that is
installed: take the tag that is nearest.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measuring import arguments, print_table, save

ROOT = Path(__file__).resolve().parent.parent
# A test may take the interpreter with it. The rest then runs in a new one.
MOST_CRASHES = 20

# What tests of the suite assert on purpose of other strategies' insides, by what they are about: a
# pattern for the test's name or the reason.
EXPECTED: Mapping[str, str] = {
    "names the strategy's class": r"SingleDeviceStrategy|strategy_name|test_.*strategy",
    "manual optimization": r"automatic_optimization = False|manual_optimization",
    "overrides `backward`": r"overrides `backward`",
    "several optimizers": r"returned \d+ optimizers",
    "a mock's insides": r"<(Mock|MagicMock|ANY)|MagicMock|Mock'",
}


class Ended(NamedTuple):
    """How a test ended.

    Args:
        outcome: ``"passed"``, ``"failed"``, ``"skipped"`` or ``"crashed"``.
        reason: the first line, of a failure.
    """

    outcome: str
    reason: str = ""


def run(checkout: Path, paths: Sequence[str], select: str | None, how: Mapping[str, str]) -> Any:
    """Runs tests of the suite in fresh interpreters, until all have had their turn.

    Args:
        checkout: of Lightning.
        paths: below ``tests/tests_pytorch``.
        select: as pytest's ``-k``.
        how: what the plugin is told.

    Returns:
        how each test ended, by its name.
    """
    ended: dict[str, Ended] = {}
    folder = checkout / "tests" / "tests_pytorch"
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(scratch) / "record"
        record.touch()
        python_path = os.pathsep.join([str(ROOT), str(checkout / "tests"), str(folder.parent)])
        environment = os.environ | {
            **how,
            "PIPESHIFT_SUITE_RECORD": str(record),
            "PYTHONPATH": python_path,
            "OMP_NUM_THREADS": "1",
            "PL_RUN_CUDA_TESTS": "0",
        }
        for _ in range(MOST_CRASHES):
            command = [sys.executable, "-m", "pytest", "-p", "benchmarks.lightning_suite_plugin"]
            command += [
                "-q",
                "--continue-on-collection-errors",
                "--tb=line",
                "-p",
                "no:cacheprovider",
            ]
            command += ["--ignore-glob=**/legacy/**", "-o", "faulthandler_timeout=0"]
            command += [f"--deselect={name}" for name in ended] + (["-k", select] if select else [])
            with (Path(scratch) / "output").open("w+") as output:
                code = subprocess.run(
                    [*command, *paths], cwd=folder, env=environment, stdout=output, stderr=output
                ).returncode
                output.seek(0)
                text = output.read()
            now, open_test = _read(record)
            ended |= now
            if code in (0, 1, 5):
                break
            if open_test is None:
                raise RuntimeError(f"pytest ended with {code}:\n{text[-3000:]}")
            ended[open_test] = Ended("crashed", f"the interpreter ended with {code}")
    return ended


def _read(record: Path) -> tuple[dict[str, Ended], str | None]:
    """How tests ended, and the one that had begun last if it did not end."""
    ended: dict[str, Ended] = {}
    begun = None
    for line in record.read_text().splitlines():
        note = json.loads(line)
        name = note["test"]
        if note.get("begins"):
            begun = name
            continue
        if name in ended and ended[name].outcome == "failed":
            continue
        ended[name] = Ended(note["outcome"], note["reason"])
    return ended, begun if begun not in ended else None


def kind_of(test: str, reason: str) -> str:
    """What a failure is about, where that is expected; else ``""``."""
    for kind, pattern in EXPECTED.items():
        if re.search(pattern, reason) or re.search(pattern, test):
            return kind
    return ""


def _without_numbers(reason: str) -> str:
    reason = re.sub(r"0x[0-9a-f]+|\d+", "N", reason)
    return re.sub(r"/tmp/\S+", "PATH", reason)[:150]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("paths", nargs="*", default=["."], help="below tests/tests_pytorch")
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("-k", dest="select", help="as in pytest")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--limit-seconds", type=float, default=60.0, help="for each test")
    parser.add_argument("--plain-from", type=Path, help="an earlier --json, for the plain run")
    options = parser.parse_args()
    limits = {
        "PIPESHIFT_SUITE_LIMIT_SECONDS": str(options.limit_seconds),
        "PIPESHIFT_SUITE_MICROBATCHES": str(options.microbatches),
    }
    checkout = options.checkout.resolve()

    def run_with(strategy: str) -> dict[str, Ended]:
        how = limits | {"PIPESHIFT_SUITE_STRATEGY": strategy}
        ended: dict[str, Ended] = run(checkout, options.paths, options.select, how)
        print(f"{strategy}: {_counts(ended)}", flush=True)
        return ended

    if options.plain_from is not None:
        earlier = json.loads(options.plain_from.read_text())["figures"]["plain"]
        plain = {name: Ended(*ended) for name, ended in earlier.items()}
    else:
        plain = run_with("plain")
    ours = run_with("pipeshift")
    passing = [name for name, ended in plain.items() if ended.outcome == "passed" and name in ours]
    differing = {name: ours[name] for name in passing if ours[name].outcome != "passed"}
    groups: dict[tuple[str, str], list[str]] = {}
    for name, ended in differing.items():
        kind = kind_of(name, ended.reason)
        groups.setdefault((kind, _without_numbers(ended.reason)), []).append(name)
    rows = sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1])))
    print_table(
        "Pass plain and fail with PipeShift, by the reason",
        ["tests", "expected, as it is about", "reason"],
        [[len(names), kind, reason] for (kind, reason), names in rows],
    )
    print_table(
        "The tests",
        ["test", "reason"],
        [[name, reason] for (_, reason), names in rows for name in names],
    )
    print(
        f"\n{len(passing)} tests pass plain; {len(passing) - len(differing)} of these pass with"
        f" PipeShift, {sum(bool(kind) for (kind, _), names in rows for _ in names)} differ as"
        " expected"
    )
    figures = {"plain": plain, "pipeshift": ours, "differing": differing}
    save(options.json, figures)


def _counts(ended: Mapping[str, Ended]) -> str:
    outcomes = [each.outcome for each in ended.values()]
    return ", ".join(f"{outcomes.count(kind)} {kind}" for kind in sorted(set(outcomes)))


if __name__ == "__main__":
    main()
