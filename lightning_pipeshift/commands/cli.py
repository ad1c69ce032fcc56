"""The ``pipeshift`` command: a LightningCLI with the PipeShift strategy, which is the default."""

from __future__ import annotations

import os
import sys
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_pipeshift.checkpoint import export
from lightning_pipeshift.commands import check as check_command
from lightning_pipeshift.commands import doctor as doctor_command
from lightning_pipeshift.commands import measuring as measuring_command
from lightning_pipeshift.commands.brief_errors import brief_errors
from lightning_pipeshift.lightning.strategy import PipeShiftStrategy


class PipeShiftCLI(LightningCLI):
    """A LightningCLI whose Trainer uses a ``PipeShiftStrategy`` unless another strategy is set: its
    arguments can be given as ``--trainer.strategy.microbatches 8``, and ``--help`` shows them.

    Takes the arguments of ``LightningCLI``. The model and the data come from the configuration
    (``class_path`` and ``init_args``) unless classes are passed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        strategy = {"class_path": "lightning_pipeshift.PipeShiftStrategy"}
        defaults = {"strategy": strategy, **(kwargs.pop("trainer_defaults", None) or {})}
        kwargs.setdefault("save_config_kwargs", {"overwrite": True})
        kwargs["trainer_defaults"] = defaults
        super().__init__(*args, **kwargs)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Makes a parser whose help ends with the strategy's arguments. A mistake is answered by
        its message alone, without all of the options, and a checkpoint of a LightningCLI that is
        made for one class of models is taken for one of the class that is configured.
        """
        parser: LightningArgumentParser = super().init_parser(**kwargs)
        formatted = parser.format_help

        def format_help(*given: Any) -> str:
            return f"{formatted(*given)}\n{_strategy_help()}"

        parser.format_help = format_help  # type: ignore[assignment]
        parser.print_usage = lambda *_: None  # type: ignore[method-assign]
        parsed = parser.parse_object

        def parse_object(given: Any, base: Any = None, *rest: Any, **options: Any) -> Any:
            for command, entries in given.items() if base is not None else ():
                model = entries.get("model") if isinstance(entries, dict) else None
                configured = getattr(base.get(command), "model", None) or Namespace()
                if model and "class_path" not in model and "class_path" in configured:
                    entries["model"] = {"class_path": configured.class_path, "init_args": model}
            return parsed(given, base, *rest, **options)

        parser.parse_object = parse_object
        return parser


def _strategy_help() -> str:
    parser = ArgumentParser(add_help=False)
    parser.add_class_arguments(PipeShiftStrategy, "trainer.strategy")
    _, _, arguments = parser.format_help().partition("\n\n")
    return str(arguments)


def main() -> None:
    """Runs the parts of the ``pipeshift`` command that need torch: ``fit`` and the other commands
    of a LightningCLI, ``check``, ``doctor``, ``plan`` and ``export``.

    PipeShift's own errors are printed by
    :func:`~lightning_pipeshift.commands.brief_errors.brief_errors`.
    """
    with brief_errors(lambda: rank_zero_only.rank == 0):  # type: ignore[attr-defined]
        _run()


def _run() -> None:
    if sys.argv[1:2] == ["export"]:
        export.main(sys.argv[2:])
        return
    # A configuration names classes by their path from the working directory, as in `python
    # script.py`.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    configured = {
        "check": check_command.main,
        "doctor": doctor_command.main,
        "plan": measuring_command.main,
    }
    if sys.argv[1:2] and sys.argv[1] in configured:
        configured[sys.argv[1]](sys.argv[2:])
        return
    PipeShiftCLI()
