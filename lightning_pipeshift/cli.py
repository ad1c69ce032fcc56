"""The ``pipeshift`` command: a LightningCLI in which the strategy is there, and is the default."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import lightning_pipeshift  # noqa: F401  registers the strategy
from lightning_pipeshift import (
    check_command,
    errors,
    export,
    memory_command,
    planning_command,
    run_commands,
)
from lightning_pipeshift.errors import PipeShiftError

_DEBUG = "PIPESHIFT_DEBUG"


class PipeShiftCLI(LightningCLI):
    """A LightningCLI whose Trainer uses ``strategy="pipeshift"`` unless it is told otherwise.

    Takes what ``LightningCLI`` takes. The model and the data come from the configuration
    (``class_path`` and ``init_args``) unless classes are passed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        defaults = {"strategy": "pipeshift", **(kwargs.pop("trainer_defaults", None) or {})}
        kwargs.setdefault("save_config_kwargs", {"overwrite": True})
        kwargs["trainer_defaults"] = defaults
        super().__init__(*args, **kwargs)


def main() -> None:
    """Runs the ``pipeshift`` command: ``pipeshift fit ...`` and what else a LightningCLI knows,
    ``pipeshift check ...``, ``pipeshift plan ...``, ``pipeshift memory ...``, ``pipeshift export
    CKPT OUT``, and for a run that is under way ``pipeshift status`` and ``pipeshift move``.

    An error of PipeShift's own is printed without a traceback, by the first rank, and the exit code
    is 2; with ``--debug`` every rank shows all of it.
    """
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        # For the processes that Lightning launches, too.
        os.environ[_DEBUG] = "1"
    try:
        _run()
    except PipeShiftError as error:
        if os.environ.get(_DEBUG):
            raise
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            print(f"pipeshift: error: {without_traceback(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def without_traceback(error: PipeShiftError) -> str:
    """The message of an error. Where it is another rank's that failed by an error of PipeShift's
    own, without the traceback that it brings along.
    """
    text = str(error)
    found = re.search(r" failed first: (\w+): ", text)
    is_ours = found is not None and hasattr(errors, found[1])
    return text.partition("\n\nTraceback")[0] if is_ours else text


def _run() -> None:
    others = {"export": export.main, "status": run_commands.status, "move": run_commands.move}
    if sys.argv[1:2] and sys.argv[1] in others:
        others[sys.argv[1]](sys.argv[2:])
        return
    # A configuration names classes by their path from where the user stands, as `python script.py`
    # would find them.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    configured = {
        "check": check_command.main,
        "plan": planning_command.main,
        "memory": memory_command.main,
    }
    if sys.argv[1:2] and sys.argv[1] in configured:
        configured[sys.argv[1]](sys.argv[2:])
        return
    PipeShiftCLI(
        parser_kwargs={
            "epilog": "pipeshift check --config ... says whether a model trains to the same bits on"
            " several stages; pipeshift plan --config ... measures and plans without training;"
            " pipeshift memory --config ... shows where the memory goes;"
            " pipeshift export CKPT OUT makes one file of a checkpoint; pipeshift status --run DIR"
            " shows a run that is under way, pipeshift move --run DIR LAYER STAGE moves a layer of"
            " it. See their --help."
        }
    )
