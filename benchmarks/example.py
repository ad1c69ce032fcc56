"""The output of the examples on the pages: a plan, what was learned, and the report of a check.

    python -m benchmarks.example

Runs ``examples/train_gpt.py``, and ``pipeshift check`` for the same model, as a reader would, and
takes the figures out of what they print. The text that it trains on is Python's own standard
library, so another version of Python gives other figures.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measuring import arguments, print_table, save

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "train_gpt.py"
CHECK = ("check", "--config", str(ROOT / "examples" / "gpt.yaml"), "--stages", "2", "--steps", "2")


def printed(*words: str, folder: str) -> str:
    """Runs Python with some arguments in a folder, and returns its output."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{words} has failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


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


def report_of(text: str) -> str:
    """A check's report: from its title to the code between layers."""
    found = re.search(
        r"^PipeShift check of .*^Code between layers.*?(?=\n\n|\Z)", text, re.M | re.S
    )
    if found is None:
        raise ValueError(f"`pipeshift check` has printed no report:\n{text[-2000:]}")
    return found[0].rstrip()


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trained = printed(str(SCRIPT), folder=folder)
        checked = printed("-m", "lightning_pipeshift", *CHECK, folder=folder)
    losses = {
        "validation_nats": nats("validation loss", trained),
        "frequency_nats": nats("byte-frequency model", trained),
    }
    plan, report = plan_of(trained), report_of(checked)
    print(plan, report, sep="\n\n")
    print_table("What it learned", list(losses), [list(losses.values())])
    save(options.json, losses | {"plan": plan, "check": report})


if __name__ == "__main__":
    main()
