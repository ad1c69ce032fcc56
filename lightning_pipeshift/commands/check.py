"""``pipeshift check``: checks that a configuration trains to the same bits on one stage and on
several.
"""

from __future__ import annotations

import argparse
import pydoc
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningCLI

from lightning_pipeshift.errors import ConfigurationError, PipeShiftError
from lightning_pipeshift.lightning.strategy import PipeShiftStrategy
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.testing.checking import LIMIT_SECONDS, check, splits_of
from lightning_pipeshift.testing.splits import CUTS
from lightning_pipeshift.testing.training import Parts

_MICROBATCHES = 4
_SEED = 1

# Replaces a configuration's settings for the run's length, evaluation, callbacks and loggers.
_LEFT_OUT: dict[str, Any] = {
    "profiler": None,
    "fast_dev_run": False,
    "barebones": False,
    "overfit_batches": 0.0,
    "limit_train_batches": None,
    "val_check_interval": None,
    "check_val_every_n_epoch": 1,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "reload_dataloaders_every_n_epochs": 0,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pipeshift check",
        description="Trains a model for some steps on one stage and on several, in processes of "
        "its own on the CPU, and compares losses, logged values, parameters, buffers and the "
        "optimizer's state to the bit. Reports the layers, payloads and code between layers that "
        "it has found, refusals with their reasons, and differences. Takes the arguments of "
        "`pipeshift fit` (--config ..., --model..., --data...), and every run trains on the same "
        "batches, the first ones of the training data. It ignores these parts of the "
        "configuration: callbacks, loggers, checkpoints, validation, devices, and several "
        "virtual machines (replicas of the pipeline).",
        epilog="The exit code is 0 if all is equal, 1 if something differs, fails or is refused, "
        "2 if the command or the configuration is invalid.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--stages", type=int, nargs="+", default=[2, 3], metavar="N", help="numbers of stages (2 3)"
    )
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="how many batches (3)")
    parser.add_argument(
        "--cuts",
        nargs="+",
        choices=CUTS,
        default=["measured", "random"],
        help="where to cut the model (measured random); and as in the configuration, if that has "
        "the number of layers of each stage",
    )
    parser.add_argument(
        "--schedules",
        nargs="+",
        metavar="NAME",
        help="schedules, which take turns (the configuration's, 1f1b)",
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        metavar="N",
        help=f"slices of a batch (the configuration's; {_MICROBATCHES} if that is auto)",
    )
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=LIMIT_SECONDS,
        metavar="S",
        help=f"a longer run counts as hung ({LIMIT_SECONDS:g})",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the report to this file"
    )
    return parser


def main(arguments: Sequence[str]) -> None:
    """Runs ``pipeshift check``. Raises SystemExit with the exit code."""
    parser = _parser()
    if {"-h", "--help"} & set(arguments):
        parser.print_help()
        return
    options, rest = parser.parse_known_args(list(arguments))
    try:
        if options.json is not None and not options.json.absolute().parent.is_dir():
            raise ConfigurationError(
                f"--json {options.json}: there is no folder {str(options.json.parent)!r}. Create "
                "it, or use another folder."
            )
        config = _read(rest)
        wanted = _Wanted.of(config)
        seed = config.seed_everything
        recipe = Configured(tuple(rest), _SEED if isinstance(seed, bool) else int(seed))
        report = check(
            recipe,
            splits_of(
                options.stages,
                [*options.cuts, *wanted.cuts],
                options.schedules or [wanted.schedule],
            ),
            options.steps,
            wanted.microbatches if options.microbatches is None else options.microbatches,
            options.limit_seconds,
            Path.cwd(),
        )
    except PipeShiftError as error:
        parser.error(str(error))
    print(report)
    if options.json is not None:
        options.json.write_text(report.to_json() + "\n")
        print(f"\nwritten to {options.json}")
    raise SystemExit(0 if report.ok else 1)


# --- the configuration ---


class _ReadError(Exception):
    """Ends a LightningCLI that has read its configuration, and contains the configuration."""

    def __init__(self, config: Namespace) -> None:
        self.config = config
        super().__init__()


def _cli() -> type[LightningCLI]:
    # The command's module imports this one.
    from lightning_pipeshift.commands.cli import PipeShiftCLI

    return PipeShiftCLI


def _read(arguments: Sequence[str]) -> Namespace:
    """The configuration of ``pipeshift fit``. If it cannot be read, the parser prints the reason
    and raises SystemExit(2).
    """

    class ReadingCLI(_cli()):  # type: ignore[misc]
        def before_instantiate_classes(self) -> None:
            raise _ReadError(self.config[self.subcommand])

    try:
        _run(ReadingCLI, arguments)
    except _ReadError as read:
        return read.config
    raise AssertionError("a LightningCLI instantiates its classes")


def _run(kind: type[LightningCLI], arguments: Sequence[str]) -> LightningCLI:
    with warnings.catch_warnings():
        # The words after `pipeshift` are not those of `fit`.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
        return kind(
            args=["fit", *arguments], save_config_callback=None, seed_everything_default=_SEED
        )


def _strategy_of(config: Namespace) -> tuple[str, dict[str, Any]]:
    """The path of the strategy's class, and its arguments.

    Raises:
        ConfigurationError: it is another strategy.
    """
    strategy = config.trainer.strategy
    if strategy == "pipeshift":
        return f"{PipeShiftStrategy.__module__}.{PipeShiftStrategy.__qualname__}", {}
    path = strategy.class_path if isinstance(strategy, Namespace) else ""
    kind = pydoc.locate(path)
    if not (isinstance(kind, type) and issubclass(kind, PipeShiftStrategy)):
        raise ConfigurationError(
            "`pipeshift check` compares runs of the PipeShift strategy, but the configuration "
            f"has `{path or strategy}`. Set `trainer.strategy: pipeshift`, or remove it."
        )
    return path, dict(vars(strategy.get("init_args") or Namespace()))


@dataclass(frozen=True)
class _Wanted:
    """The strategy's arguments in a configuration.

    Args:
        microbatches: the number of slices of a batch.
        schedule: by its name.
        cuts: the number of layers of each stage, if it is given, for each virtual machine.
    """

    microbatches: int
    schedule: str
    cuts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, config: Namespace) -> _Wanted:
        _, arguments = _strategy_of(config)
        if arguments.get("plan") is not None:
            plan = Plan.load(arguments["plan"])
            return cls(plan.microbatches, plan.schedule, _several(plan.placement.counts))
        partition = arguments.get("partition", "auto")
        cuts = [] if isinstance(partition, str) else partition
        if cuts and not isinstance(cuts[0], list | tuple):
            cuts = [cuts]
        microbatches = arguments.get("microbatches")
        return cls(
            microbatches if isinstance(microbatches, int) else _MICROBATCHES,
            arguments.get("schedule", "1f1b"),
            _several(cuts),
        )


def _several(cuts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Each distinct cut into several stages."""
    return tuple(dict.fromkeys(tuple(cut) for cut in cuts if len(cut) > 1))


@dataclass(frozen=True)
class Configured:
    """A recipe (see :class:`~lightning_pipeshift.testing.training.Recipe`) from a configuration.

    Args:
        arguments: of ``pipeshift fit``.
        seed: of all random numbers.
    """

    arguments: tuple[str, ...]
    seed: int

    def build(self, trainer: dict[str, Any], strategy: dict[str, Any]) -> Parts:
        """Creates the same objects as ``fit``, without callbacks and loggers."""

        class BuildingCLI(_cli()):  # type: ignore[misc]
            def before_instantiate_classes(self) -> None:
                wanted = self.config[self.subcommand].trainer
                path, arguments = _strategy_of(self.config[self.subcommand])
                given = {**arguments, **strategy}
                # Only the backend differs from the configuration's.
                usual = vars(arguments.get("communication") or given["communication"])
                backend = given["communication"].process_group_backend
                given["communication"] = Namespace(**{**usual, "process_group_backend": backend})
                wanted.strategy = Namespace(class_path=path, init_args=Namespace(**given))
                # A logger may connect to its server as soon as it is created.
                wanted.callbacks, wanted.logger = None, False
                for name, value in _LEFT_OUT.items():
                    wanted[name] = value

            def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
                made: pl.Trainer = super().instantiate_trainer(**kwargs, **trainer)
                return made

            def fit(self, **_: Any) -> None:
                """Does nothing: the caller trains."""

        cli = _run(BuildingCLI, [*self.arguments, "--seed_everything", str(self.seed)])
        return Parts(cli.model, cli.datamodule, cli.trainer)
