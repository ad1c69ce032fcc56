"""What every benchmark needs: its arguments, its tables, and a record of where it ran."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
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


def save(path: Path | None, figures: Mapping[str, Any], says_so: bool = True) -> None:
    """Writes the figures, the command that made them and where it ran, if a file was asked for."""
    if path is None:
        return
    module = Path(sys.argv[0]).stem
    record = {
        "command": " ".join(["python -m", f"benchmarks.{module}", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "figures": figures,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    if says_so:
        print(f"\nwritten to {path}")


def commit() -> str:
    """The version of the code, with a plus where files differ from it."""
    folder = Path(__file__).parent
    name = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(name, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


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
