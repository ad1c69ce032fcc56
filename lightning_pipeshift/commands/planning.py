"""``pipeshift plan``: plans and prints, without training. Imports neither torch nor Lightning:
what measures the present machines is in :mod:`.measuring`.

Settings that change no bit of a run's results (the owners of layers, the recomputation) are chosen
while it runs. Settings that do (the numbers of virtual machines and microbatches, the shares of the
batch) are chosen here and saved, so that the run can be repeated.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from lightning_pipeshift.commands.brief_errors import brief_errors
from lightning_pipeshift.errors import BudgetError, ConfigurationError, PlanError, some_of
from lightning_pipeshift.plan.cost.cut import Cut
from lightning_pipeshift.plan.document.files import load_cluster, load_profile
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import FREE, Cluster, Link
from lightning_pipeshift.plan.inputs.known_kinds import completed
from lightning_pipeshift.plan.inputs.policies import Planned
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.plan.search.equal_counts import uniform
from lightning_pipeshift.plan.search.measurements import plan_of_arrangement
from lightning_pipeshift.plan.search.planner import arrange, compressed, evaluate
from lightning_pipeshift.plan.search.request import Arrangement, PlanRequest
from lightning_pipeshift.text import bytes_of_text, bytes_text, count_text, table

_MOST_SHOWN: Final = 4
_MOST_ROWS: Final = 16

_ASSUMED_INSIDE: Final = Link(1e-5, 10e9)
_ASSUMED_OUTSIDE: Final = Link(1e-4, 125e6)
"""Links that a cluster's file does not give: 10 GB/s, two thirds of what PCIe 3.0 with 16 lanes can
carry (15.75 GB/s: PCI-SIG), and an office's Ethernet, 1 Gbit/s. Taken for free, they would promise
speed that is not there."""

_LEFT_FREE: Final = 0.1
"""The part of a device's memory that no plan uses: for the driver's context, fragments between
tensors, and the kernels' workspaces. ``MemoryCompression(budget="auto")`` leaves as much."""

Made = tuple[Plan, Arrangement, Arrangement | None]
"""A plan, its arrangement, and the uniform split for comparison, if that fits."""


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
    how = best.ranks, cuts, best.microbatches, request.batch_shares
    even = evaluate(profile, cluster, request, *how)
    if request.policy is not None:
        try:
            even = compressed(profile, cluster, request, even)
        except BudgetError:
            even = None
    elif _room_bytes(even, cluster) < 0:
        even = None
    plan, samples = plan_of_arrangement(best, profile, cluster), request.total_samples(len(cuts))
    return replace(plan, step_samples=samples), best, even


def plan_and_show(profile: Profile, cluster: Cluster, request: PlanRequest, out: Path) -> None:
    """Makes the best plan, writes it to a file, and prints it.

    Raises:
        PlanError, BudgetError: see :func:`make`.
    """
    plan, best, even = make(profile, cluster, request)
    plan.save(out)
    # As it will be read from the file, where the prediction is rounded.
    print(report((Plan.load(out), best, even), cluster))
    print("\n" + textwrap.fill(_samples(best, request), 100))


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
        (
            "largest peak of memory",
            [bytes_text(max(map(max, a.prediction.memory_bytes))) for _, a in columns],
        ),
        ("least memory left", [_room(a, cluster) for _, a in columns]),
    ]
    lines = [str(plan), "", *_devices(plan, best, cluster), ""]
    lines += [f"{name:<24}" + "".join(f"{cell:>21}" for cell in cells) for name, cells in rows]
    if best.tried:
        lines.append(f"\n{_why(best)}")
    if even is not None:
        lines.append(
            f"\n{best.samples_per_second / even.samples_per_second:.2f} times the uniform"
            " split's samples per second, by the simulator"
        )
    else:
        lines.append("\nthe uniform split does not fit in memory")
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
    text = "samples per second by the pipelines' depth, simulated, before tensors are swapped: "
    return textwrap.fill(text + "; ".join(parts), 100)


def _room(arrangement: Arrangement, cluster: Cluster) -> str:
    left = _room_bytes(arrangement, cluster)
    return bytes_text(left) if math.isfinite(left) else "not known"


def _room_bytes(arrangement: Arrangement, cluster: Cluster) -> float:
    """The least memory that is left on any device; negative where the plan does not fit."""
    return min(
        cluster.devices[rank].usable_bytes - peak
        for ranks, peaks in zip(arrangement.ranks, arrangement.prediction.memory_bytes, strict=True)
        for rank, peak in zip(ranks, peaks, strict=True)
    )


def _devices(plan: Plan, best: Arrangement, cluster: Cluster) -> list[str]:
    """A table of the devices of each stage; equal stages of equal virtual machines share a row."""
    rows: dict[tuple[str, ...], list[int]] = {}
    cells: tuple[str, ...]
    shares = best.batch_shares or (1.0,) * len(best.ranks)
    for vm, ranks in enumerate(best.ranks):
        for stage, rank in enumerate(ranks):
            device = cluster.devices[rank]
            speed = f" at {device.speed:.3g}" if device.speed != 1 else ""
            layers = len(plan.placement.layers_of(vm, stage))
            cells = (
                str(stage),
                f"{device.kind or 'as measured'}{speed}",
                count_text(layers, "layer") if layers else "none: idle",
                f"{shares[vm] / math.fsum(shares):.1%}",
            )
            rows.setdefault(cells, []).append(rank)
    header = ("stage", "device", "layers", "part of the samples", "ranks", "hosts")
    found: list[tuple[str, ...]] = [header]
    for cells, members in rows.items():
        hosts = list(dict.fromkeys(cluster.devices[rank].host for rank in members))
        found.append((*cells, some_of([str(rank) for rank in members]), some_of(hosts)))
    more = [f"and {len(found) - _MOST_ROWS} more rows"] if len(found) > _MOST_ROWS else []
    return table(found[:_MOST_ROWS]) + more


def _samples(best: Arrangement, request: PlanRequest) -> str:
    """Returns the number of samples of a step, and the `batch_size` that the data needs for it."""
    count = len(best.ranks)
    total = request.total_samples(count)
    if count == 1:
        return f"a step has {total:g} samples, all in one virtual machine (replica of the pipeline)"
    return (
        f"a step has {total:g} samples, as asked for, in {count} virtual machines (replicas of the"
        f" pipeline): a DataLoader's batch is the part of one of them, so set its `batch_size` to"
        f" {total / count:g}, or fix `virtual_machines: 1` to keep batches as they are"
    )


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
        "--tensors",
        action="store_true",
        help="with --config: instead of a plan, show every tensor that layers save for their "
        "backward, what becomes of it under a budget, and the peak of each stage's memory",
    )
    parser.add_argument(
        "--virtual-machines",
        type=_number_or_auto,
        default="auto",
        metavar="N|auto",
        help="how many virtual machines (replicas of the pipeline) share the devices",
    )
    parser.add_argument(
        "--microbatches",
        type=_number_or_auto,
        default="auto",
        metavar="N|auto",
        help="into how many parts each virtual machine's batch is cut",
    )
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, eager_1f1b, async, ...")
    parser.add_argument(
        "--recompute",
        choices=("auto", "full", "none"),
        default="auto",
        help="which layers drop their saved tensors and run again in the backward",
    )
    parser.add_argument(
        "--batch-size",
        type=_number,
        metavar="N",
        help="samples of a step, however many virtual machines (replicas of the pipeline) share"
        " them; by default those of the profile's batch",
    )
    add_budgets(parser)
    return parser


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


class Budgets(NamedTuple):
    """The memory that tensors may take; ``None`` for ``"auto"``."""

    device_bytes: float | None
    host_bytes: float | None


def budgets_of(options: argparse.Namespace) -> Budgets | None:
    """The values of the options of :func:`add_budgets`; ``None`` without ``--budget``.

    Raises:
        ConfigurationError: a value is no size, or a combination has no meaning.
    """
    if options.budget is None and options.host_budget != "auto":
        raise ConfigurationError(
            f"`--host-budget {options.host_budget}` needs `--budget`, which is missing. Add "
            "`--budget auto` for the devices' free memory."
        )
    if options.budget is None:
        return None
    return Budgets(
        bytes_of_text("budget", options.budget),
        bytes_of_text("host_budget", options.host_budget, least=0.0),
    )


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _number_or_auto(text: str) -> Any:
    return text if text == "auto" else _number(text)


def command() -> None:
    """Runs ``pipeshift plan`` for machines that are described in a file, and its ``--help``."""
    with brief_errors():
        main(sys.argv[2:])


def main(arguments: Sequence[str]) -> None:
    """As :func:`command`, with its arguments; raises PipeShift's own errors."""
    options = _parser().parse_args(list(arguments))
    if options.tensors:
        raise PlanError("`--tensors` needs the model itself: pass --config, and no --cluster")
    if options.cluster is None or options.profile is None:
        raise PlanError(
            "`pipeshift plan` was given --cluster or --profile alone; it needs both, or --config "
            "to measure the present machines"
        )
    budgets = budgets_of(options)
    profile, cluster, estimates = completed(
        load_profile(options.profile), load_cluster(options.cluster)
    )
    cluster, assumed = with_assumed_links(cluster)
    for note in [*estimates, *assumed, *_memory_notes(cluster)]:
        print(f"{textwrap.fill(note, 100)}\n")
    request = PlanRequest(
        virtual_machines=options.virtual_machines,
        microbatches=options.microbatches,
        schedule=options.schedule,
        recompute=options.recompute,
        step_samples=float(options.batch_size or profile.num_samples),
        policy=Planned() if budgets is not None else None,
    )
    plan_and_show(profile, within(cluster, budgets), request, Path(options.out))
    print(f"\nwritten to {options.out}")


def with_assumed_links(cluster: Cluster) -> tuple[Cluster, list[str]]:
    """The machines with assumed links where the file gives none, and what to say of it."""
    devices = cluster.devices
    free = [
        devices[one].host == devices[other].host
        for one, other in itertools.combinations(range(cluster.num_ranks), 2)
        if cluster.link(one, other) == FREE
    ]
    assumed = []
    if True in free:
        cluster = replace(cluster, inside=_ASSUMED_INSIDE)
        assumed.append(f"between devices of one host `inside: {_link_text(_ASSUMED_INSIDE)}`")
    if False in free:
        cluster = replace(cluster, outside=_ASSUMED_OUTSIDE)
        assumed.append(f"between hosts `outside: {_link_text(_ASSUMED_OUTSIDE)}`")
    names = " and ".join(assumed)
    note = f"the cluster's file does not give all `links`; assumed are {names}. Give what you know:"
    return cluster, [f"{note} `pipeshift doctor` measures links"] if assumed else []


def _link_text(link: Link) -> str:
    latency = f"{link.latency_seconds * 1e6:g}us"
    return f"{{latency: {latency}, bandwidth: {link.bandwidth * 8 / 1e9:g} Gbit/s}}"


def _memory_notes(cluster: Cluster) -> Iterator[str]:
    if any(math.isfinite(device.usable_bytes) for device in cluster.devices):
        yield f"{_LEFT_FREE:.0%} of each device's memory is left free"
    if unknown := [n for n, one in enumerate(cluster.devices) if math.isinf(one.usable_bytes)]:
        yield (
            f"the memory of {count_text(len(unknown), 'device')} is not known, and counts as"
            " unlimited: give each a `memory` in the cluster's file"
        )


def within(cluster: Cluster, budgets: Budgets | None) -> Cluster:
    """The machines with the memory that a plan may use: of each device the budget, or its own
    memory less a reserve, whichever is smaller.

    Raises:
        PlanError: a device's memory, or the bandwidth to its host, is needed and not known.
    """
    devices = []
    for device in cluster.devices:
        usable = (1 - _LEFT_FREE) * device.usable_bytes
        if budgets is not None and budgets.device_bytes is not None:
            usable = min(usable, budgets.device_bytes)
        changed = device
        if math.isfinite(usable):
            changed = replace(device, memory_bytes=int(usable), free_bytes=0)
        elif budgets is not None:
            raise PlanError(
                f"`--budget auto` is the memory of a device, which is unknown for"
                f" {device.kind!r} on host {device.host!r}. Give it a `memory` in the cluster's"
                " file, or a budget."
            )
        if budgets is not None and budgets.host_bytes is not None:
            changed = replace(changed, host_bytes=int(budgets.host_bytes))
            if budgets.host_bytes and not device.host_bandwidth:
                raise PlanError(
                    f"`--host-budget {budgets.host_bytes:.0f}` has no effect for {device.kind!r} on"
                    f" host {device.host!r}, as the bandwidth to its host is unknown. Give the"
                    " device a `host_bandwidth` in the cluster's file, or omit the option."
                )
        devices.append(changed)
    return replace(cluster, devices=tuple(devices))
