"""What the README's first example prints: its plan, and what it has learned.

    python -m benchmarks.example

Runs ``examples/train_gpt.py`` as a reader would, in a process of its own, and takes the figures out
of what it prints. The text that it trains on is Python's own standard library, so another version
of Python gives other figures.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import arguments, print_table, save

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "train_gpt.py"


def nats(what: str, text: str) -> float:
    """The nats per byte behind a name in what the example has printed."""
    found = re.search(rf"^{what} +([\d.]+) nats per byte$", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{SCRIPT} has printed no {what!r}:\n{text[-2000:]}")
    return float(found[1])


def plan_of(text: str) -> str:
    """The drawing of the plan: from its title to the line that explains its signs."""
    found = re.search(r"^PipeShift plan: .*?time runs right$", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{SCRIPT} has printed no plan:\n{text[-2000:]}")
    return found[0]


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(SCRIPT)], cwd=folder, capture_output=True, text=True, check=False
        )
    seconds = time.perf_counter() - begin
    if done.returncode != 0:
        raise RuntimeError(f"{SCRIPT} has failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    figures = {
        "validation_nats": nats("validation loss", done.stdout),
        "frequency_nats": nats("byte-frequency model", done.stdout),
        "minutes": seconds / 60,
        "plan": plan_of(done.stdout),
    }
    print(figures["plan"])
    print_table("What it learned", list(figures)[:3], [list(figures.values())[:3]])
    save(options.json, figures)


if __name__ == "__main__":
    main()
