"""``pipeshift move``: shows and moves the layers of a run that another process trains.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightning_pipeshift.commands.brief_errors import brief_errors
from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.files import parse_json, printable, read_bytes
from lightning_pipeshift.plan.document.moves import Move
from lightning_pipeshift.step.control_files import FOLDER, STATUS, ask
from lightning_pipeshift.text import layers_text, seconds_text, table
from lightning_pipeshift.timeline.outcomes import Change

_SLOW: Final = 0.9
"""A rank is named that delivers less than this part of the work of the fastest one of its kind."""


def folder_of(run: Path) -> Path:
    """The folder in which a run takes requests.

    Args:
        run: the run's own folder, or one above it.

    Raises:
        ConfigurationError: no run is in progress, or several are.
    """
    if (run / FOLDER / STATUS).is_file():
        return run / FOLDER
    found = sorted(path.parent for path in run.glob(f"**/{FOLDER}/{STATUS}"))
    if not found:
        raise ConfigurationError(
            f"No run is in progress in {str(run)!r}: there is no `{FOLDER}/{STATUS}`. Pass the "
            "folder that the run printed at its start (its logger's, or `lightning_logs`); it "
            "writes there while it trains, if it has a `LayerMigration()` callback."
        )
    running = [folder for folder in found if _is_alive(_status(folder))] or found
    if len(running) > 1:
        names = ", ".join(str(folder.parent) for folder in running)
        raise ConfigurationError(f"There are several runs under {str(run)!r}; pass one of {names}.")
    return running[0]


def _status(folder: Path) -> dict[str, Any]:
    path = folder / STATUS
    try:
        found = parse_json(read_bytes(path))
        if not isinstance(found, dict) or not {"host", "process", "time"} <= found.keys():
            raise ValueError("it has no host, process and time")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is not the status of a run: {error}. Remove it."
        ) from error
    return found


def _is_alive(status: dict[str, Any]) -> bool:
    if status["host"] != socket.gethostname():
        return True  # this cannot be checked from another host
    try:
        os.kill(status["process"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def main() -> None:
    """Runs ``pipeshift move``, by ``sys.argv``."""
    with brief_errors():
        move(sys.argv[2:])


def move(arguments: Sequence[str]) -> None:
    """Runs ``pipeshift move``. Raises SystemExit if nothing moves, or there is no answer."""
    parser = argparse.ArgumentParser(
        prog="pipeshift move",
        description="Moves layers of a run to other stages, all at once. Without layers, shows "
        "which stage owns which, and the speed of the stages.",
    )
    parser.add_argument(
        "moves",
        nargs="*",
        metavar="LAYER STAGE",
        help="a layer's name as this command shows it, and its new stage; may be repeated",
    )
    parser.add_argument(
        "--run",
        type=Path,
        required=True,
        metavar="DIR",
        help="the run's folder, which it printed at its start, or a parent folder",
    )
    parser.add_argument(
        "--virtual-machine",
        type=int,
        metavar="N",
        help="the virtual machine (one replica of the pipeline); by default all",
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="how long to wait for an answer"
    )
    options = parser.parse_args(arguments)
    names, stages = options.moves[::2], options.moves[1::2]
    if len(names) != len(stages) or not all(stage.lstrip("-").isdigit() for stage in stages):
        parser.error(
            f"{' '.join(options.moves)!r}: pass a layer and the number of its new stage, in turn,"
            " such as `model.h.3 1 model.h.4 1`"
        )
    moves = [
        Move(layer=name, stage=int(stage), virtual_machine=options.virtual_machine)
        for name, stage in zip(names, stages, strict=True)
    ]
    print(printable(_moved(options, moves)))


def _moved(options: argparse.Namespace, moves: Sequence[Move]) -> str:
    folder = folder_of(options.run)
    found = _status(folder)
    if not moves:
        return shown(found, _is_alive(found))
    if not _is_alive(found):
        raise SystemExit(
            f"nothing moves: the run's process {found['process']} has ended without an error "
            "message"
        )
    answer = ask(folder, moves, options.timeout)
    if answer is None:
        raise SystemExit(
            f"no answer within {options.timeout:g} s: the run will carry it out at the end of its "
            "next training step"
        )
    if not answer.is_done:
        raise SystemExit(printable(answer.text))
    return answer.text


# --- a status as text ---


def shown(status: Mapping[str, Any], is_alive: bool) -> str:
    """A status as text.

    Args:
        status: the entries of :func:`~lightning_pipeshift.step.status.status_of`, and those
            that the writer of the file adds.
        is_alive: whether the process is known to exist.
    """
    heard = max(0.0, time.time() - status["time"])
    if is_alive and heard < 60:
        state = "is running"
    else:
        state = f"was last seen {heard:.0f} s ago"
    lines = [
        f"The run (process {status['process']} on {status['host']}) {state};"
        f" {status['step']} steps are complete"
        + (f", the last took {status['step_seconds']:.3g} s." if status["step_seconds"] else ".")
    ]
    if not status["virtual_machines"]:
        lines.append("It has not had its first batch yet: there is no plan.")
    header = ["stage", "rank", "host", "device", "forward", "backward", "busy", "delivers"]
    header += ["payload", "layers"]
    for vm, stages in enumerate(status["virtual_machines"]):
        rows = [header]
        for number, stage in enumerate(stages):
            rows.append(
                [
                    str(number),
                    str(stage["rank"]),
                    stage.get("host", "-"),
                    stage.get("kind", "-"),
                    _time(stage.get("forward_seconds")),
                    _time(stage.get("backward_seconds")),
                    f"{stage['busy']:.0%}" if "busy" in stage else "-",
                    f"{stage['delivers']:.2f} s/s" if "delivers" in stage else "-",
                    _time(stage.get("payload_seconds")),
                    layers_text(stage["layers"]),
                ]
            )
        lines += [
            "",
            f"virtual machine {vm} (one replica of the pipeline; seconds per microbatch)",
            *table(rows),
        ]
    lines += [f"\n{line}" for line in _slowest(status["virtual_machines"])]
    if any("busy" not in s for stages in status["virtual_machines"] for s in stages):
        lines.append("\nTheir speed is measured if layers are watched, and takes some steps.")
    if status.get("waits"):
        lines += ["\nStages wait in each step:", *(f"  {wait}" for wait in status["waits"])]
    if status["decisions"]:
        lines.append("\nAutomatic changes of the plan:")
    for entries in status["decisions"]:
        lines.append(f"  step {entries['step']}: {Change(**entries)}.")
    return "\n".join(lines)


def _slowest(machines: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """A sentence about the rank that delivers least, if it is noticeably slower than the others."""
    stages = [stage for stages in machines for stage in stages if "delivers" in stage]
    slowest = min(stages, key=lambda stage: stage["delivers"], default=None)
    if slowest is not None and slowest["delivers"] < _SLOW:
        yield (
            f"Rank {slowest['rank']} on {slowest['host']} is slow: in one second it delivers what"
            f" the fastest rank of its kind ({slowest['kind']}) does in"
            f" {seconds_text(slowest['delivers'])}."
        )


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else seconds_text(seconds)
