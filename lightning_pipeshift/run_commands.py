"""``pipeshift status`` and ``pipeshift move``: for a run that is under way elsewhere."""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_pipeshift.errors import ConfigurationError
from lightning_pipeshift.plan.moves import Move
from lightning_pipeshift.runtime.outside import FOLDER, STATUS, ask
from lightning_pipeshift.runtime.status import shown


def folder_of(run: Path) -> Path:
    """The folder in which a run takes requests.

    Args:
        run: the run's own folder, or one above it.

    Raises:
        ConfigurationError: there is none, or several runs are under way.
    """
    if (run / FOLDER / STATUS).is_file():
        return run / FOLDER
    found = sorted(path.parent for path in run.glob(f"**/{FOLDER}/{STATUS}"))
    if not found:
        raise ConfigurationError(
            f"No run has written `{FOLDER}/{STATUS}` under {str(run)!r}. Pass the folder that the"
            " run named as it began (its logger's, or the Trainer's `default_root_dir`); it writes"
            " there if it has a `LayerMigration()` callback."
        )
    running = [folder for folder in found if not _status(folder)["is_over"]] or found
    if len(running) > 1:
        names = ", ".join(str(folder.parent) for folder in running)
        raise ConfigurationError(f"There are several runs under {str(run)!r}; pass one of {names}.")
    return running[0]


def _status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / STATUS).read_text())
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


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"pipeshift {name}", description=description)
    parser.add_argument(
        "--run",
        type=Path,
        required=True,
        metavar="DIR",
        help="the run's folder, which it named as it began, or one above it",
    )
    return parser


def status(arguments: Sequence[str] | None = None) -> None:
    """Runs ``pipeshift status``."""
    parser = _parser("status", "Says who owns which layers in a run, and how fast is who.")
    folder = folder_of(parser.parse_args(arguments).run)
    found = _status(folder)
    print(shown(found, _is_alive(found)))


def move(arguments: Sequence[str] | None = None) -> None:
    """Runs ``pipeshift move``. Raises SystemExit where nothing moves, or there is no answer."""
    parser = _parser("move", "Lets layers of a run change their owners, all of them at once.")
    parser.add_argument(
        "moves",
        nargs="+",
        metavar="LAYER STAGE",
        help="a layer's name as `pipeshift status` shows it, and its new stage; and so on",
    )
    parser.add_argument(
        "--virtual-machine",
        type=int,
        metavar="N",
        help="in which one; by default in all",
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
    folder = folder_of(options.run)
    found = _status(folder)
    if found["is_over"]:
        raise SystemExit("nothing moves: the run has ended")
    if not _is_alive(found):
        raise SystemExit(
            f"nothing moves: the run's process {found['process']} is gone without a word"
        )
    answer = ask(folder, moves, options.timeout)
    if answer is None:
        raise SystemExit(
            f"no answer within {options.timeout:g} s: the run will do it at the end of its next"
            " training step, if that ever comes"
        )
    if not answer.is_done:
        raise SystemExit(answer.text)
    print(answer.text)
