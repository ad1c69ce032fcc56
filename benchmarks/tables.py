"""The contents of the tables in the README and ``docs``, and claims without a measurement.

A table is a header and rows; a figure in a cell stands in braces, in the words of
:mod:`benchmarks.figures`: ``{file / key / key FORMAT}``. To try a change: ``python -m
benchmarks.figures``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Rows = list[list[str]]


class Values(Protocol):
    """Where figures come from."""

    def value(self, where: str) -> Any:
        """The value at ``file / key / key``."""


_CORE = "it was measured with the core that came before"
OLD: dict[str, str] = {
    "checkpoints": "how files are read and written has been cleaned up since",
    **dict.fromkeys(
        ("planned_gpt2", "planner_effort", "slow_network"),
        "the planner searches cuts, orders and lenders otherwise since",
    ),
    **dict.fromkeys(
        (
            "big_models",
            "compression",
            "convergence",
            "example",
            "exposed",
            "host_time",
            "lane_moves",
            "lanes",
            "memory_peaks",
            "memory_predictions_real",
            "memory_predictions_sleep",
            "migration",
            "migration_async",
            "migration_async_short",
            "network_orders",
            "overlap",
            "overlap_fast",
            "overlap_jobs",
            "recomputation",
            "rings",
            "rings_mtu1500",
            "simulator",
            "sleeping_stages",
            "sleeping_stages_eager",
            "slow_hosts",
            "slow_hosts_loaded",
            "slow_hosts_quota",
            "unequal_devices",
        ),
        _CORE,
    ),
}
"""Results that were not made with this code, and why they are still shown. They are marked as such
wherever they stand. Make them again, and take them out."""

_SETUP = "how a benchmark is set up, not what it found"
_LIMIT = "a default or a limit of the package, or a threshold that a reader sets"

_FIRST = "the first run on a GPU; its output was not kept"
_SETTING = "a setting, or what is assumed"

NOT_MEASURED: Mapping[str, Mapping[str, str]] = {
    "docs/gpu.md": {
        "one NVIDIA H100 (80 GB), with torch 2.11.0": _FIRST,
        "Lightning 2.6.6, Python 3.12 and NCCL 2.28.9": _FIRST,
        "A memory budget of 0.6 of the peak took 3.9 times as long": _FIRST,
        "615 ms a step, 156 ms without": _FIRST,
        "Two stages on one GPU took 3.3 times as long": _FIRST,
        "over gloo (518 ms), 2.5 times over NCCL's sockets (387 ms)": _FIRST,
        "16 x 1,024 tokens a step": _FIRST,
        "plain Lightning took 152.6 ms and 7.99 GB": _FIRST,
    },
    "docs/memory.md": {
        "3.9 times as long with a budget of 0.6 of its peak": "a run on a GPU before the change",
        "more than 5 % longer than expected": _LIMIT,
    },
    "README.md": {
        "Python 3.11 or newer": "a requirement",
        "Apache-2.0": "a licence",
    },
    "docs/plans.md": {
        "by a computation of 0.3 to 3 s that takes 5 % of the time at most": _SETTING,
        "10 GB/s and 10 us between devices of one host": _SETTING,
        "1 Gbit/s and 100 us between hosts": _SETTING,
        "promises 5 % or more, layers": _LIMIT,
        "differ by more than 20 %": _LIMIT,
        "a better plan promises 5 % for the rest": _LIMIT,
    },
    "docs/guides.md": {"of which Docker gives 64 MB": "Docker's default"},
    "docs/systems.md": {"arXiv 1806.03377": "an address"},
    "docs/two_hosts.md": {
        "of 24 GB and of 8 GB, train": "the sizes of devices",
        "that takes 26 GB with its optimizer": _SETUP,
        "are taken to reach 35 % of": _SETUP,
        "100 Mbit/s costs more than half of the pace": "the table above says so",
    },
    "docs/troubleshooting.md": {
        "`heartbeat_timeout` (10 seconds,": _LIMIT,
        "within 10 more seconds": _LIMIT,
        "nothing was heard for 10 s (`heartbeat_timeout` is 10 s)": _LIMIT,
        "`stall_timeout` (60 seconds)": _LIMIT,
    },
    "docs/performance.md": {
        "1.0 (0.9 to 1.1)": "an example of how a figure is written",
        "with 95 % confidence": "what an interval means",
        "2 x (1 + 1/8)": "the formula of the ideal",
        "20 ms forward and 40 ms backward": _SETUP,
        "sleep 20 ms in each of three parts": _SETUP,
        "can reach here is 1.22 (Qi et al., ICLR 2024, table 1), and": "the paper's bound",
        "`interleaved_1f1b` 1.16.": "33 / 28.5, by the formula in the benchmark",
        "joined at 200 Mbit/s, for 16 layers of 4 MB whose backwards take 250 ms each": _SETUP,
        "are 25 MiB, the first one 1 MiB": "torch's defaults",
        "the same sum of 64 MB": _SETUP,
        "speeds 1 : 0.5 : 0.25 and": _SETUP,
        "two of them at 200 and two at 50 Mbit/s": _SETUP,
        "with 8 MB a layer, `save_on_cpu`": _SETUP,
        "With 64 MB, three units": _SETUP,
    },
    "docs/asynchronous.md": {
        "arxiv.org/abs/1806.03377": "an address",
        "arxiv.org/abs/2006.09503": "an address",
    },
    "docs/compatibility.md": {},
    "docs/lanes.md": {
        "Each lane keeps 2 % of the link": _LIMIT,
        "swapped tensors, but keep 2 % of the link": _LIMIT,
        "NCCL 2.26 or newer": "a version",
        "with 200 Mbit/s between them": _SETUP,
        "The best possible value is 1.33": "(F + B) / (F + (F + B)) of the pace, F a third of both",
        "At 10 Gbit/s, lanes cost": _SETUP,
        "32 MB if not measured": _LIMIT,
        "Four layers of 25 MB move at 200 Mbit/s": _SETUP,
    },
}
"""The numbers on the pages that are no measurement, and what they are instead."""

PIPESHIFT, TORCH = "PipeShift, in Trainer.fit", "torch Schedule1F1B, bare loop"


def tables(results: Values) -> dict[str, Callable[[], Rows]]:
    """By name, what makes each table's header and rows."""
    return {
        "headlines": headlines,
        "throughput": throughput,
        "schedules": schedules,
        "sleeping_stages": sleeping_stages,
        "rings": rings,
        "rings_bound": rings_bound,
        "exposed": exposed,
        "checkpoints": checkpoints,
        "unequal_devices": unequal_devices,
        "recomputation": lambda: recomputation(results),
        "simulator": lambda: simulator(results),
        "slow_network": lambda: slow_network(results),
        "network_orders": lambda: network_orders(results),
        "migration": migration,
        "moves": moves,
        "slow_hosts": lambda: slow_hosts(results),
        "compression": lambda: compression(results),
        "lanes": lanes,
        "overlap": overlap,
        "lane_moves": lambda: lane_moves(results),
        "convergence": lambda: convergence(results),
        "memory_peaks": lambda: memory_peaks(results),
        "planned_gpt2": lambda: planned_gpt2(results),
        "host_time": lambda: host_time(results),
        "memory_predictions_sleep": lambda: memory_predictions_sleep(results),
        "memory_predictions_real": lambda: memory_predictions_real(results),
    }


def headlines() -> Rows:
    """The README's: some lines for each system, with the command of each."""
    moved = "moves / gap"
    save = "checkpoints / a later one / PipeShift, folder, asynchronous"
    unit = "compression / 64 MB / 1 unit: planned, that or recomputed"
    one = "memory / 1 stages / own .0f/1e6"
    rows = [
        (
            "pipeline in `Trainer.fit`, torch's `Schedule1F1B` in a bare loop: times as fast",
            "{throughput / pipeshift_over_torch .2f}",
        ),
        (
            f"memory of the largest of four stages, MB of the {{{one}}} MB that one device takes",
            "{memory / 4 stages / most_in_all .0f/1e6}",
        ),
        (
            ("rings, gradients in unlike orders, against `DistributedDataParallel`: times as fast"),
            "{rings / ddp / permuted / best_ddp_over_rings .2f}",
        ),
        (
            ("cut by measured speed, speeds 1 : 0.5 : 0.25, against equal numbers: times as fast"),
            "{unequal_devices / sleep / times_the_uniform .2f}",
        ),
        (
            "recomputing three of four stages in idle time: costs, % of a step",
            '{recomputation / recompute="full" / costs_percent +.1f}',
        ),
        (
            "`LayerMigration` when one of four stages gets half as fast: times as fast",
            "{migration / reaction / gain .2f}",
        ),
        ("a live move of 12 layers holds training up for, s", f"{{{moved} / held_up_seconds .3f}}"),
        (
            "a budget of a quarter of the first stage's saved tensors: times as long",
            f"{{{unit} / times_everything_stays .2f}}",
        ),
        (
            "payloads while bulk is sent, with lanes honoured: part of their pace alone",
            "{lanes / flows / lanes / pipeline .2f}",
        ),
        ("an asynchronous sharded checkpoint, part of DDP's pause", f"{{{save} / over_ddp .2f}}"),
    ]
    found = [["what", "measured", "command"]]
    for what, figure in rows:
        result = "moves" if "live move" in what else figure[1:].split(" / ")[0]
        found.append([what, figure, f"{{{result} command}}"])
    return found


def slow_network(results: Values) -> Rows:
    """Calculated, by the network's rate."""
    rows = [["Mbit/s", "a step, s", "part of the fastest network's pace"]]
    for megabits in results.value("slow_network"):
        where = f"slow_network / {megabits}"
        rows.append([megabits, f"{{{where} / step_seconds .2f}}", f"{{{where} / pace .2f}}"])
    return rows


def throughput() -> Rows:
    """Against torch's pipeline, and against the ideal."""
    files = ("throughput", "throughput_eager")

    def row(name: str, where: str, form: str) -> list[str]:
        return [name, *(f"{{{file} / {where} {form}}}" for file in files)]

    return [
        ["", "`1f1b`", "`eager_1f1b`"],
        row("PipeShift, inside `Trainer.fit`, s", f"step_seconds / {PIPESHIFT}", ".3f"),
        row(
            "torch's `Schedule1F1B` (plain 1F1B in both columns), in a bare loop, s",
            f"step_seconds / {TORCH}",
            ".3f",
        ),
        row("**PipeShift / torch, steps per second**", "pipeshift_over_torch", ".2f"),
        [
            "rounds in which PipeShift was faster",
            *(
                f"{{{file} / rounds_faster d}} of {{{file} / pipeshift_over_torch / rounds d}}"
                for file in files
            ),
        ],
        row("PipeShift / the ideal", "pipeshift_over_ideal", ".2f"),
        row("torch / the ideal", "torch_over_ideal", ".2f"),
        row(
            "PipeShift / the ideal, both cores busy",
            "pipeshift_over_ideal_both_cores_busy",
            ".2f",
        ),
        row("torch / the ideal, both cores busy", "torch_over_ideal_both_cores_busy", ".2f"),
    ]


def schedules() -> Rows:
    """By schedule, beside torch's 1F1B, or interleaved 1F1B."""
    names = ("1f1b", "eager_1f1b", "zb-h1", "interleaved_1f1b")
    rows = [["4 stages, 8 microbatches", *(f"`{name}`" for name in names)]]
    for title, field in (
        ("steps per second over torch's", "pipeshift_over_torch"),
        ("over the ideal time of 1F1B", "pipeshift_over_ideal_1f1b"),
    ):
        where = (f"schedules / 4 stages, 8 microbatches, {name} / {field}" for name in names)
        rows.append([title, *(f"{{{each} .2f}}" for each in where)])
    return rows


def sleeping_stages() -> Rows:
    """Overhead by the number of stages."""
    rows = [["stages, microbatches", "`1f1b`", "`eager_1f1b`", "torch's `Schedule1F1B`"]]
    for stages in (4, 8):
        plain, eager = (
            f"{name} / {stages} stages" for name in ("sleeping_stages", "sleeping_stages_eager")
        )
        rows.append(
            [
                f"{stages}, {2 * stages}",
                f"{{{plain} / pipeshift_over_ideal .2f}}",
                f"{{{eager} / pipeshift_over_ideal .2f}}",
                f"{{{plain} / torch_over_ideal .2f}}; {{{eager} / torch_over_ideal .2f}}",
            ]
        )
    return rows


def rings() -> Rows:
    """Against DistributedDataParallel."""
    cases = {
        "gradients ready in one order on all ranks": "in order",
        "in an order of its own on each rank": "permuted",
        "the same, and one rank late with half of its layers": "permuted, one late",
    }
    header = ["", "rings, s", "DDP, best buckets, s", "DDP, default buckets, s"]
    rows = [[*header, "best / rings", "default / rings"]]
    for name, case in cases.items():
        where = f"rings / ddp / {case}"
        rows.append(
            [
                name,
                f"{{{where} / rings_seconds .2f}}",
                f"{{{where} / best_ddp_seconds .2f}}",
                f"{{{where} / default_ddp_seconds .2f}}",
                f"**{{{where} / best_ddp_over_rings .2f}}**",
                f"{{{where} / default_ddp_over_rings .2f}}",
            ]
        )
    return rows


def rings_bound() -> Rows:
    """Against the bandwidth bound."""
    contenders = {
        "rings, 16 layers": "16 layers",
        "ring, 1 layer": "1 layer",
        "a TCP stream from each host to the next": "TCP, all hosts",
        "one TCP stream": "TCP",
    }
    files = {"MTU 9000": "rings", "MTU 1500": "rings_mtu1500"}
    return [
        ["part of the bound", *files],
        *(
            [
                name,
                *(f"{{{file} / bound / {key} / bound_over_time .3f}}" for file in files.values()),
            ]
            for name, key in contenders.items()
        ),
    ]


def exposed() -> Rows:
    """Waiting for gradients inside ``Trainer.fit``."""
    rows = [["% of a step spent waiting for gradients", "rings", "all-reduce"]]
    for megabits in (200, 1000):
        cells = [
            f"{{exposed / {megabits} {how} / exposed_percent .1f}}" for how in ("ring", "allreduce")
        ]
        rows.append([f"{megabits} Mbit/s", *cells])
    return rows


def checkpoints() -> Rows:
    """How long training stands still."""
    names = {
        "DDP, one file": "DDP",
        "`ModelParallelStrategy` (FSDP2), folder": "ModelParallelStrategy",
        "PipeShift, one file": "PipeShift, one file",
        "PipeShift, folder": "PipeShift, folder",
        "PipeShift, one file, asynchronous": "PipeShift, one file, asynchronous",
        "PipeShift, folder, asynchronous": "PipeShift, folder, asynchronous",
    }
    rows = [["", "the first save, s", "/ DDP", "a later one, s", "/ DDP"]]
    for name, key in names.items():
        cells = [name]
        for when in ("the first save", "a later one"):
            cells += [
                f"{{checkpoints / {when} / {key} / seconds .2f}}",
                f"{{checkpoints / {when} / {key} / over_ddp .2f}}",
            ]
        rows.append(cells)
    return rows


def unequal_devices() -> Rows:
    """Cuts by measured speed."""
    header = ["layers that", "cut by PipeShift", "times the uniform split's throughput"]
    rows = [[*header, "of the bound (all work / all speeds, with the fill)"]]
    for name, kind in (("sleep", "sleep"), ("compute, under a CPU quota", "compute")):
        where = f"unequal_devices / {kind}"
        rows.append(
            [
                name,
                f"{{{where} / counts s}}",
                f"**{{{where} / times_the_uniform .2f}}**",
                f"{{{where} / of_the_bound .2f}}",
            ]
        )
    return rows


def recomputation(results: Values) -> Rows:
    """In idle time, against checkpoints of the same layers."""
    rows = [["recomputed", "costs, % of a step", "MB of saved tensors at the peak, by stage"]]
    for name in results.value("recomputation"):
        where = f"recomputation / {name}"
        stages = range(len(results.value(f"{where} / peak_bytes")))
        peaks = ", ".join(f"{{{where} / peak_bytes / {stage} .0f/1e6}}" for stage in stages)
        cost = f"{{{where} / costs_percent +.1f}}" if name != "nothing" else "0"
        rows.append([f"`{name}`" if "=" in name else name, cost, peaks])
    return rows


def simulator(results: Values) -> Rows:
    """Predicted and measured steps."""
    rows = [["stages", "layers that", "schedule", "cut", "measured, s", "predicted is off by, %"]]
    for number, case in enumerate(results.value("simulator / cases")):
        where = f"simulator / cases / {number}"
        rows.append(
            [
                *(str(case[key]) for key in ("stages", "layers", "schedule")),
                ", ".join(map(str, case["counts"][0])),
                f"{{{where} / measured_seconds .2f}}",
                f"{{{where} / error_percent +.1f}}",
            ]
        )
    return rows


def memory_peaks(results: Values) -> Rows:
    """How often budgets were kept, and how near predictions of peaks were."""
    header = ["model", "runs", "over the budget", "over it in the first step"]
    rows = [[*header, "predicted / measured"]]
    for model in results.value("memory_peaks"):
        where = f"memory_peaks / {model}"
        rows.append(
            [
                model,
                f"{{{where} / num_runs d}}",
                f"{{{where} / num_over d}}",
                f"{{{where} / num_over_first d}}",
                f"{{{where} / least_predicted .2f}} to {{{where} / most_predicted .2f}}",
            ]
        )
    return rows


def planned_gpt2(results: Values) -> Rows:
    """Plans for a GPU that is not measured."""
    forms = (".0f", ".2f", ".0f", ".0f", ".2f", ".1f", ".0f")
    names = list(results.value("planned_gpt2"))
    header = list(results.value(f"planned_gpt2 / {names[0]}"))
    return [["plan", *header]] + [
        [name]
        + [
            f"{{planned_gpt2 / {name} / {key} {form}}}"
            for key, form in zip(header, forms, strict=True)
        ]
        for name in names
    ]


def host_time(results: Values) -> Rows:
    """Processor time beside what is computed."""
    rows = [["saved tensors", "ms a step", "times plain Lightning"]]
    for name in results.value("host_time / policies"):
        where = f"host_time / policies / {name}"
        rows.append([name, f"{{{where} / milliseconds .0f}}", f"{{{where} / times_plain .2f}}"])
    return rows


def memory_predictions_sleep(results: Values) -> Rows:
    """Predicted steps of layers that sleep, with tensors that move or are computed again."""
    return _memory_predictions(results, "memory_predictions_sleep", ("sleep",), "error_percent")


def memory_predictions_real(results: Values) -> Rows:
    """Those of layers that compute, relative to the steps in which everything is kept."""
    models = ("gpt2", "vit")
    name, kind = "memory_predictions_real", "error_beside_kept_percent"
    header, kept, *rows = _memory_predictions(results, name, models, kind)
    assert kept[0] == "all kept"  # itself: 0 by definition
    return [header, *rows]


def _memory_predictions(results: Values, name: str, models: Sequence[str], kind: str) -> Rows:
    """A row for each plan, and a column for each run of each model."""
    runs = [
        (model, number, f"run {number + 1}" if len(models) == 1 else f"{model}, run {number + 1}")
        for model in models
        for number in range(len(results.value(f"{name} / {model}")))
    ]
    rows = [["plan", *(f"{text}: off by, %" for _, _, text in runs)]]
    for case in results.value(f"{name} / {models[0]}")[0]["cases"]:
        cells = [
            f"{{{name} / {model} / {number} / cases / {case} / {kind} / median +.1f}}"
            for model, number, _ in runs
        ]
        # "as planned, 0.6": the part of saved tensors that the budget has room for.
        rows.append([re.sub(r"0\.(\d)", r"\1 of 10", case), *cells])
    return rows


def network_orders(results: Values) -> Rows:
    """Orders of hosts, by the rates of their stages."""
    kinds = results.value("network_orders / kinds")
    chosen = results.value("network_orders / chosen_kind")
    header = ["Mbit/s of the stages of both pipelines", "orders", "a step, s", "/ the chosen"]
    rows = [[*header, "slowest / fastest of equal orders"]]
    for kind in sorted(kinds, key=lambda kind: kinds[kind]["step_seconds"]["median"]):
        where = f"network_orders / kinds / {kind}"
        name = kind.replace("|", "and")
        rows.append(
            [
                f"**{name}** (chosen)" if kind == chosen else name,
                str(len(kinds[kind]["orders"])),
                f"{{{where} / step_seconds .2f}}",
                f"{{{where} / over_chosen .2f}}",
                f"{{{where} / slowest_over_fastest_alike .2f}}",
            ]
        )
    return rows


def migration() -> Rows:
    """A stage gets slow."""
    where = "migration / reaction"
    return [
        ["", "a step, s", "times as fast"],
        ["the split that stays: 6, 6, 6, 6", f"{{{where} / static_seconds .2f}}", "1"],
        [
            "`LayerMigration`",
            f"{{{where} / moved_seconds .2f}}",
            f"**{{{where} / gain .2f}}**",
        ],
    ]


def moves() -> Rows:
    """The cost of a move."""
    where = "moves / gap"
    return [
        ["", "holds training up for, s", "times the live move"],
        ["live move", f"{{{where} / held_up_seconds .4f}}", "1"],
        [
            "blocking send and receive of as many bytes, and a barrier",
            f"{{{where} / blocking_seconds .3f}}",
            f"{{{where} / blocking_over_live .1f}}",
        ],
        [
            "checkpoint, restart and resume",
            f"{{{where} / restart_seconds .1f}}",
            f"{{{where} / restart_over_live .0f}}",
        ],
    ]


def slow_hosts(results: Values) -> Rows:
    """A stage is held back for some time."""
    header = ["the second stage", "pauses, ms", "of the time, %", "a layer, ms", "layers"]
    header += ["moved after, steps", "of the optimum", "a step afterwards / before", "changes"]
    rows = [header]
    names = {"stop": "is stopped", "quota": "has a CPU quota"}
    for file in ("slow_hosts", "slow_hosts_quota"):
        cases = results.value(file)
        for case in sorted(cases, key=lambda case: [float(n) for n in re.findall(r"[\d.]+", case)]):
            found, where = cases[case], f"{file} / {case}"
            kind, *numbers = case.split()[0], *re.findall(r"[\d.]+", case)
            rows.append(
                [
                    names[kind],
                    *numbers,
                    "; ".join(f"{one}, {other}" for one, other in found["counts"]),
                    f"{{{where} / steps_until_moved d}}" if any(found["changes"]) else "never",
                    f"{{{where} / of_the_optimum .2f}}",
                    f"{{{where} / after_over_before .2f}}",
                    f"{{{where} / moves_during d}}, {{{where} / moves_after d}}",
                ]
            )
    return rows


def compression(results: Values) -> Rows:
    """At equal memory, by the size of what layers save."""
    sizes = [key for key in results.value("compression") if key.endswith(" MB")]
    rows = [["", "units on each stage", *(f"{size} a layer" for size in sizes)]]
    by_size = [results.value(f"compression / {size}") for size in sizes]
    for name in by_size[0]:
        peaks = results.value(f"compression / {sizes[0]} / {name} / peaks_in_units")
        units = ", ".join(
            f"{{compression / {sizes[0]} / {name} / peaks_in_units / {stage} .1f}}"
            for stage in range(len(peaks))
        )
        times = [
            f"{{compression / {size} / {name} / times_everything_stays .2f}}"
            if name in found
            else "refused"
            for size, found in zip(sizes, by_size, strict=True)
        ]
        rows.append([name.replace("save_on_cpu", "`save_on_cpu`"), units, *times])
    return rows


def lanes() -> Rows:
    """With and without marks, on hosts that honour them."""
    rows = [["part of the link", "with the lanes' marks", "without"]]
    for lane, what in (("pipeline", "`pipeline`, of what it has alone"), ("bulk", "`bulk`")):
        names = ("lanes", "no marks")
        rows.append([what, *(f"{{lanes / flows / {name} / {lane} .3f}}" for name in names)])
    return rows


def overlap() -> Rows:
    """Steps that overlap with the sums of gradients."""
    rows = [["a step", "times as fast as with one lane", "two jobs on the link"]]
    names = {
        "one lane": "one lane, first come, first served, and a barrier",
        "split": "reduce-scatter behind the backward, all-gather behind the next forward",
        "urgent first": "the most urgent first, decided by each sender",
        "lanes": "lanes that the network honours",
    }
    for name, what in names.items():
        cells = [
            f"{{{file} / times_as_fast_as / one lane / {name} .2f}}"
            for file in ("overlap", "overlap_jobs")
        ]
        rows.append([what, cells[0], "" if name == "split" else cells[1]])
    return rows


def lane_moves(results: Values) -> Rows:
    """Moves of large layers over a slow link."""
    rows = [["layers move", "all steps together take longer by, s"]]
    for name in results.value("lane_moves / 1f1b:4 / extra_seconds"):
        rows.append([name, f"{{lane_moves / 1f1b:4 / extra_seconds / {name} .2f}}"])
    return rows


def convergence(results: Values) -> Rows:
    """What each schedule has learned."""
    rows = [
        [
            "",
            "samples of an update",
            "learning rate",
            "loss in the end",
            "more than `1f1b` from as many samples",
            "more than `1f1b` in as much time",
        ]
    ]
    for name, found in results.value("convergence / contenders").items():
        where = f"convergence / contenders / {name}"
        schedule, _, what = found["name"].partition(", ")
        more = [
            "" if found["is_synchronous"] else f"{{{where} / more_by_{key} +.2f}}"
            for key in ("points", "seconds")
        ]
        rows.append(
            [
                f"`{schedule}`, {what}",
                f"{{{where} / samples d}}",
                f"{{{where} / rate g}}",
                f"{{{where} / end .2f}}",
                *more,
            ]
        )
    return rows
