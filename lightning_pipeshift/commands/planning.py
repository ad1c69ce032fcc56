"""``pipeshift plan``: measures, plans and prints, without training.

Settings that change no bit of a run's results (the owners of layers, the recomputation) are chosen
while it runs. Settings that do (the numbers of virtual machines and microbatches, the shares of the
batch) are chosen here and saved, so that the run can be repeated.
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    ModelSummary,
    ProgressBar,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_pipeshift.errors import BudgetError, ConfigurationError, PlanError
from lightning_pipeshift.lightning.precision.memory_compression import MemoryCompression
from lightning_pipeshift.lightning.strategy import PipeShiftStrategy
from lightning_pipeshift.plan.arrange.measurements import plan_of_arrangement
from lightning_pipeshift.plan.arrange.planner import arrange, compressed, evaluate
from lightning_pipeshift.plan.arrange.request import Arrangement, PlanRequest
from lightning_pipeshift.plan.cost.workload import Cut
from lightning_pipeshift.plan.document.files import (
    load_cluster,
    load_profile,
    save_cluster,
    save_profile,
)
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster
from lightning_pipeshift.plan.inputs.known_kinds import completed
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.partition.equal_counts import uniform
from lightning_pipeshift.plan.partition.integer_programming import MOST_PLACES
from lightning_pipeshift.runtime.offload.stage_memory import MemoryRequest
from lightning_pipeshift.text import bytes_text, count_text

_ENOUGH_STEPS: Final = 100_000
_SHOWN_EVERY: Final = 5
_MOST_SHOWN: Final = 4

Made = tuple[Plan, Arrangement, Arrangement | None]
"""A plan, its arrangement, and the uniform split for comparison, if that is possible."""


def make(profile: Profile, cluster: Cluster, request: PlanRequest) -> Made:
    """Returns the best plan for a model on some machines, and the uniform split of the same virtual
    machines.

    Raises:
        PlanError: no allowed plan fits in memory.
        BudgetError: no plan with swaps of saved tensors fits either.
    """
    best = arrange(profile, cluster, request)
    possible = profile.possible_cuts
    cuts = [Cut(uniform(profile.num_layers, len(ranks), possible)) for ranks in best.ranks]
    even: Arrangement | None
    even = evaluate(profile, cluster, request, best.ranks, cuts, best.microbatches)
    if request.policy is not None:
        try:
            even = compressed(profile, cluster, request, even)
        except BudgetError:
            even = None
    return plan_of_arrangement(best, profile, cluster), best, even


def _save_and_show(made: Made, cluster: Cluster, out: Path) -> None:
    plan, best, even = made
    plan.save(out)
    # As it will be read from the file, where the prediction is rounded.
    print(report((Plan.load(out), best, even), cluster))


def report(made: Made, cluster: Cluster) -> str:
    """The command's output: a drawing of the plan, and a table that compares it with the uniform
    split.
    """
    plan, best, even = made
    columns = [("this plan", best)] + ([("uniform split", even)] if even is not None else [])
    rows = [
        ("", [name for name, _ in columns]),
        (
            "a minibatch" if plan.is_asynchronous else "a step",
            [f"{a.prediction.step_seconds:.4g} s" for _, a in columns],
        ),
        ("samples per second", [f"{a.samples_per_second:.4g}" for _, a in columns]),
        (
            "gradients waited for",
            [f"{a.prediction.exposed_seconds:.3g} s" for _, a in columns],
        ),
        ("largest peak of memory", [_peak(a) for _, a in columns]),
        ("least memory left", [_room(a, cluster) for _, a in columns]),
    ]
    lines = [str(plan), ""]
    lines += [f"{name:<24}" + "".join(f"{cell:>21}" for cell in cells) for name, cells in rows]
    if best.tried:
        lines.append(f"\n{_why(best)}")
    if even is not None:
        lines.append(
            f"\n{best.samples_per_second / even.samples_per_second:.2f} times the uniform"
            " split's samples per second, by the simulator"
        )
    else:
        lines.append("\nthe uniform split would exceed the budget, with any swaps")
    return "\n".join(lines)


def _why(best: Arrangement) -> str:
    """The best of each pipeline depth that was tried, and what limits it."""
    depth = max(map(len, best.ranks))
    fits = [one for one in best.tried if one.samples_per_second]
    shown = [one for one in fits if one.num_stages == depth]
    shown += [one for one in fits if one.num_stages != depth][: _MOST_SHOWN - len(shown)]
    parts = [
        f"{count_text(one.num_stages, 'stage')}{' (chosen)' if one.num_stages == depth else ''}"
        f" {one.samples_per_second:.4g}, {one.limit}"
        for one in shown
    ]
    if small := [one.num_stages for one in best.tried if not one.samples_per_second]:
        counts = ", ".join(map(str, sorted(small)))
        parts.append(f"{counts} stage{'s' if counts != '1' else ''}: does not fit in memory")
    text = "samples per second by the pipelines' depth, before tensors are swapped: "
    return textwrap.fill(text + "; ".join(parts), 100)


def _peak(arrangement: Arrangement) -> str:
    peaks = [peak for peaks in arrangement.prediction.memory_bytes for peak in peaks]
    return bytes_text(max(peaks))


def _room(arrangement: Arrangement, cluster: Cluster) -> str:
    left = min(
        cluster.devices[rank].usable_bytes - peak
        for ranks, peaks in zip(arrangement.ranks, arrangement.prediction.memory_bytes, strict=True)
        for rank, peak in zip(ranks, peaks, strict=True)
    )
    if left == float("inf"):
        return "not known"
    return bytes_text(left) if left >= 0 else f"{bytes_text(-left)} too little"


# --- machines that aren't available ---


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pipeshift plan",
        description="Plans a run and prints the plan, without training. With --config (and other "
        "arguments of `pipeshift fit`) the model is measured on the present machines for some "
        "steps; with --cluster and --profile it is planned for machines that need not be present.",
    )
    parser.add_argument("--cluster", metavar="YAML", help="the machines")
    parser.add_argument("--profile", metavar="JSON", help="the measured model")
    parser.add_argument(
        "--out", metavar="JSON", default="plan.json", help="the file for the plan (plan.json)"
    )
    parser.add_argument(
        "--virtual-machines", type=_number_or_auto, default="auto", metavar="N|auto"
    )
    parser.add_argument("--microbatches", type=_number_or_auto, default="auto", metavar="N|auto")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--recompute", choices=("auto", "full", "none"), default="auto")
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="samples of a virtual machine's batch"
    )
    _add_solver(parser)
    add_budgets(parser)
    return parser


def _add_solver(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--solver",
        choices=("search", "milp"),
        default="search",
        help="of the final cuts: a fast search, or the exact integer programme for at most"
        f" {MOST_PLACES} layers times stages (search)",
    )


def add_budgets(parser: argparse.ArgumentParser) -> None:
    """The options of a command that makes a plan for ``MemoryCompression``."""
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="of each device, for a run with MemoryCompression: 20GB, 512MiB, or auto for the "
        "free memory",
    )
    parser.add_argument(
        "--host-budget",
        metavar="SIZE",
        default="auto",
        help="of the host's memory, for each rank (auto)",
    )


def plugin_of(options: argparse.Namespace) -> MemoryCompression | None:
    """The plugin for the options of :func:`add_budgets`.

    Raises ConfigurationError for a meaningless combination."""
    if options.budget is None and options.host_budget != "auto":
        raise ConfigurationError(
            f"`--host-budget {options.host_budget}` needs `--budget`, which is missing. Add "
            "`--budget auto` for the devices' free memory."
        )
    if options.budget is None:
        return None
    return MemoryCompression(budget=options.budget, host_budget=options.host_budget)


def _number_or_auto(text: str) -> Any:
    return text if text == "auto" else int(text)


def main(arguments: Sequence[str]) -> None:
    """Runs ``pipeshift plan``."""
    given = list(arguments)
    if not any(word.split("=")[0] in ("--cluster", "--profile", "-h", "--help") for word in given):
        options, rest = _measuring_parser().parse_known_args(given)
        _measure_and_plan(rest, Path(options.out), plugin_of(options), options.solver)
        return
    options = _parser().parse_args(given)
    if options.cluster is None or options.profile is None:
        raise PlanError(
            "`pipeshift plan` was given --cluster or --profile alone; it needs both, or --config "
            "to measure the present machines"
        )
    profile, cluster, estimates = completed(
        load_profile(options.profile), load_cluster(options.cluster)
    )
    for estimate in estimates:
        print(f"{estimate}\n")
    plugin = plugin_of(options)
    if plugin is not None:
        cluster = _within(cluster, plugin.memory_request)
    request = PlanRequest(
        virtual_machines=options.virtual_machines,
        microbatches=options.microbatches,
        schedule=options.schedule,
        recompute=options.recompute,
        solver=options.solver,
        batch_samples=float(options.batch_size or profile.samples * profile.microbatches),
        policy=plugin.memory_request.policy if plugin is not None else None,
    )
    _save_and_show(make(profile, cluster, request), cluster, options.out)
    print(f"\nwritten to {options.out}")


def _measuring_parser() -> argparse.ArgumentParser:
    """The parser of options that are not for Lightning's parser."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", default="plan.json")
    _add_solver(parser)
    add_budgets(parser)
    return parser


def _within(cluster: Cluster, request: MemoryRequest) -> Cluster:
    """The machines, with the budgets if there are any.

    Raises PlanError if a device's memory, or the bandwidth to its host, is unknown."""
    devices = []
    for device in cluster.devices:
        changed = device
        if request.budget_bytes is not None:
            changed = replace(changed, memory_bytes=int(request.budget_bytes), free_bytes=0)
        if request.host_bytes is not None:
            changed = replace(changed, host_bytes=int(request.host_bytes))
        if not math.isfinite(changed.usable_bytes):
            raise PlanError(
                f"`--budget auto` is the memory of a device, which is unknown for"
                f" {device.kind!r} on host {device.host!r}. Give it a `memory` in the cluster's"
                " file, or a budget."
            )
        if request.host_bytes and not device.host_bandwidth:
            raise PlanError(
                f"`--host-budget {request.host_bytes:.0f}` has no effect for {device.kind!r} on"
                f" host {device.host!r}, as the bandwidth to its host is unknown. Give the device"
                " a `host_bandwidth` in the cluster's file, or omit the option."
            )
        devices.append(changed)
    return replace(cluster, devices=tuple(devices))


# --- the present machines ---


class Measuring(Callback):
    """Ends a run as soon as its steps have been measured, and shows the progress."""

    def __init__(self) -> None:
        self._shown = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Ends the run if enough has been measured."""
        strategy = trainer.strategy
        assert isinstance(strategy, PipeShiftStrategy)
        if strategy.is_measured:
            trainer.should_stop = True
        if trainer.is_global_zero:
            self._show(trainer.global_step, strategy.steps_to_measure, trainer.should_stop)

    def _show(self, step: int, total: int, is_over: bool) -> None:
        # The plan is made in a thread, during a few more steps.
        step = min(step, total)
        if sys.stderr.isatty():
            begin, end = "\r", "\n" if is_over else ""
        elif step != self._shown and (is_over or step == 1 or not step % _SHOWN_EVERY):
            begin, end = "", "\n"
        else:
            return
        self._shown = step
        print(
            f"{begin}PipeShift measures: step {step} of {total}",
            end=end,
            file=sys.stderr,
            flush=True,
        )


def _measuring_cli(
    base: type[LightningCLI], command: str, memory: MemoryCompression | None
) -> type[LightningCLI]:
    class MeasuringCLI(base):  # type: ignore[valid-type, misc]
        """Creates the same objects as ``fit``, without loggers and checkpoints."""

        def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
            config = self.config_init
            wanted = config.get(str(self.subcommand), config).get("trainer", {})
            callbacks = [
                callback
                for callback in _listed(wanted.get("callbacks"))
                if not isinstance(callback, Checkpoint | EarlyStopping | ModelSummary | ProgressBar)
            ]
            plugins = _listed(wanted.get("plugins"))
            if memory is not None and not any(isinstance(p, MemoryCompression) for p in plugins):
                kwargs["plugins"] = [*plugins, memory]
            trainer: pl.Trainer = super().instantiate_trainer(
                **kwargs,
                callbacks=[*callbacks, Measuring()],
                # Some callbacks require a logger.
                logger=DummyLogger(),
                enable_checkpointing=False,
                # The number of steps is set, not that of epochs.
                enable_progress_bar=False,
                enable_model_summary=False,
                limit_val_batches=0,
                num_sanity_val_steps=0,
                # Enough to measure, and finite: schedulers ask for the number of steps.
                max_epochs=-1,
                max_steps=max(_ENOUGH_STEPS, wanted.get("max_steps") or 0),
                max_time=None,
                min_epochs=None,
                min_steps=None,
            )
            if not isinstance(trainer.strategy, PipeShiftStrategy):
                raise ConfigurationError(
                    f"`pipeshift {command}` measures runs of the PipeShift strategy, but the "
                    f"configuration has `{type(trainer.strategy).__name__}`. Set "
                    "`trainer.strategy: pipeshift`, or remove it."
                )
            trainer.strategy.only_measures()
            return trainer

    return MeasuringCLI


def _listed(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def measured_strategy(
    arguments: Sequence[str], command: str, memory: MemoryCompression | None = None
) -> PipeShiftStrategy:
    """Runs the same training as ``pipeshift fit`` until its steps have been measured; returns the
    strategy.

    Args:
        arguments: of ``pipeshift fit``.
        command: the command, for messages.
        memory: keeps a budget, unless the configuration has its own.
    """
    from lightning_pipeshift.commands.cli import PipeShiftCLI

    make = _measuring_cli(PipeShiftCLI, command, memory)
    with warnings.catch_warnings():
        # The command-line arguments are not those of `fit`, and ranks that Lightning launches need
        # them unchanged.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
        strategy = make(args=["fit", *arguments], save_config_callback=None).trainer.strategy
    assert isinstance(strategy, PipeShiftStrategy)
    return strategy


def _measure_and_plan(
    arguments: Sequence[str], out: Path, memory: MemoryCompression | None, solver: Any
) -> None:
    strategy = measured_strategy(arguments, "plan", memory)
    if not strategy.is_measured:
        raise PlanError(
            "The data ended before enough steps had been measured. Use more data, or fewer"
            " `profile_steps` in the strategy's arguments."
        )
    found = strategy.measured
    if found is None:
        return
    profile, cluster, request = found
    request = replace(request, solver=solver)
    _save_and_show(make(profile, cluster, request), cluster, out)
    of_model = out.with_name(f"{out.stem}.profile.json")
    of_machines = out.with_name(f"{out.stem}.cluster.yaml")
    save_profile(profile, of_model)
    save_cluster(cluster, of_machines)
    print(f"\nwritten to {out}; the measurements are in {of_model} and {of_machines}")
