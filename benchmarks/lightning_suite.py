"""Lightning's own test suite with PipeShift on one device, beside the plain run of it.

    git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
    python -m benchmarks.lightning_suite --checkout pytorch-lightning
    python -m benchmarks.lightning_suite --checkout pytorch-lightning trainer callbacks -k 'not ddp'

Whatever a test says of hooks, loops, callbacks, logs and checkpoints should hold with this strategy
too. Every test runs twice: as it is, and with `PipeShiftStrategy` wherever the Trainer would have
chosen `SingleDeviceStrategy` by itself. The list is of those that pass plain and fail with ours.
`lightning_suite_excepted.json` names those of them that ask for what PipeShift refuses, or look at
another strategy's insides, by kind. The rest has no excuse. The tests come from the checkout,
Lightning itself is the one that is installed: take the tag that is nearest.
"""

from __future__ import annotations

import json
import os
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

# Kept by hand: for every kind of test that may differ, why, and the tests' names.
EXCEPTED_FILE = Path(__file__).with_name("lightning_suite_excepted.json")


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


def excepted_tests() -> dict[str, str]:
    """The kind of every test that may differ, by its name below ``tests/tests_pytorch``."""
    kinds = json.loads(EXCEPTED_FILE.read_text())
    return {test: kind for kind, entry in kinds.items() for test in entry["tests"]}


def _short(test: str) -> str:
    return test.removeprefix("tests/tests_pytorch/")


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
        plain = {name: Ended(outcome) for outcome, names in earlier.items() for name in names}
    else:
        plain = run_with("plain")
    ours = run_with("pipeshift")
    passing = [name for name, ended in plain.items() if ended.outcome == "passed" and name in ours]
    differing = {name: ours[name] for name in passing if ours[name].outcome != "passed"}
    kinds = excepted_tests()
    excepted: dict[str, list[str]] = {}
    without_excuse = {}
    for name, ended in sorted(differing.items()):
        kind = kinds.get(_short(name))
        if kind is None:
            without_excuse[_short(name)] = ended.reason
        else:
            excepted.setdefault(kind, []).append(_short(name))
    print_table(
        "Pass plain, fail with PipeShift, and are excepted",
        ["kind", "test"],
        [[kind, name] for kind, names in sorted(excepted.items()) for name in names],
    )
    print_table(
        "Differ without an excuse",
        ["test", "reason"],
        [[name, reason[:150]] for name, reason in without_excuse.items()],
    )
    num_excepted = sum(map(len, excepted.values()))
    print(
        f"\n{len(passing)} tests pass plain; {len(passing) - len(differing)} of these pass with"
        f" PipeShift, {num_excepted} are excepted, {len(without_excuse)} differ without an excuse"
    )
    figures = {
        "pass plain": len(passing),
        "pass with PipeShift": len(passing) - len(differing),
        "excepted": excepted,
        "differ without an excuse": without_excuse,
        "plain": _by_outcome(plain),
        "pipeshift": _by_outcome(ours),
    }
    save(options.json, figures)


def _by_outcome(ended: Mapping[str, Ended]) -> dict[str, list[str]]:
    outcomes: dict[str, list[str]] = {}
    for name, each in ended.items():
        outcomes.setdefault(each.outcome, []).append(name)
    return outcomes


def _counts(ended: Mapping[str, Ended]) -> str:
    outcomes = [each.outcome for each in ended.values()]
    return ", ".join(f"{outcomes.count(kind)} {kind}" for kind in sorted(set(outcomes)))


if __name__ == "__main__":
    main()
