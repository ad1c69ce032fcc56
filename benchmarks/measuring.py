"""Common parts of all benchmarks: arguments, tables, and a record of where a benchmark ran."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import lightning
import torch

# What the accounting of processor time counts in.
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take; ``doc`` is the benchmark's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    return parser


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints rows under a header; numbers stand at the right, text at the left."""
    lines = [[_cell(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    is_number = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]
    print(f"\n{title}\n")
    for number, line in enumerate(lines):
        cells = zip(line, widths, is_number, strict=True)
        print("  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in cells).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def interval(values: Sequence[float]) -> dict[str, float]:
    """The median of rounds, and in which range the true median lies with 95 % confidence.

    The range goes from the r-th smallest to the r-th largest round, by the binomial distribution,
    whatever the values are distributed like (Hahn and Meeker, "Statistical Intervals", 1991,
    section 5.2). Fewer than six rounds cannot give 95 %: then it is that of all rounds.
    """
    ordered = sorted(values)
    count = len(ordered)
    left_out, below = 0, 0.5**count
    while below + math.comb(count, left_out + 1) * 0.5**count <= 0.025:
        left_out += 1
        below += math.comb(count, left_out) * 0.5**count
    low, high = ordered[left_out], ordered[count - 1 - left_out]
    return {"median": median(ordered), "low": low, "high": high, "rounds": count}


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratio in each round, of two contenders that took turns."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def shown(found: Mapping[str, float], form: str = ".3f") -> str:
    """An :func:`interval` in words."""
    middle, low, high = (format(found[name], form) for name in ("median", "low", "high"))
    return f"{middle} ({low} to {high})"


def save(path: Path | None, figures: Mapping[str, Any], says_so: bool = True) -> None:
    """Writes the figures, the command that made them and where it ran, if a file was asked for."""
    if path is None:
        return
    record = {
        "command": _command(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "figures": figures,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    if says_so:
        print(f"\nwritten to {path}")


def _command() -> str:
    """The command line, without the output path of the results."""
    words = ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}"]
    rest = iter(sys.argv[1:])
    for word in rest:
        if word == "--json":
            next(rest)
        elif not word.startswith("--json="):
            words.append(word)
    return shlex.join(words)


def commit() -> str:
    """The version of the code, with a plus where files differ from it. Pages and results are no
    code: a benchmark that has just written its own would make all later ones look changed."""
    version = _git("rev-parse", "--short", "HEAD")
    no_code = (":(top,exclude)benchmarks/results", ":(top,exclude)*.md")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", *no_code)
    return f"{version}+" if changed else version or "unknown"


def _git(*words: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """Where and with what the figures were made."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def busy_seconds() -> float:
    """The processor time that all processes of this machine have used since it started."""
    user, nice, system, *rest = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    interrupts = sum(map(int, rest[2:5]))  # after idle and iowait: irq, softirq, steal
    return (int(user) + int(nice) + int(system) + interrupts) / _TICKS_PER_SECOND


def put_session_first(first: bool) -> None:
    """Asks for this session's processes to run before those of others; needs root.

    Linux shares a core among sessions first: a process's own niceness counts inside its own.
    """
    Path("/proc/self/autogroup").write_text("-20" if first else "0")
