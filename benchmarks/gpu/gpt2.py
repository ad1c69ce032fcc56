"""GPT-2 small of transformers on one GPU: what a budget costs, and what two stages cost.

All rows train the same model (by configuration, random weights) with bf16-mixed and a fused AdamW,
in steps of four microbatches. Each row has processes of its own, which all live at once and take
turns, a few steps at a time: what disturbs the machine in one minute disturbs them all, and no row
has the GPU beside another one. In its first turn a row starts, measures and plans.

A step's time is that between the device's starts of two consecutive steps, without waiting for it.
Left out are the first step of each turn, those behind which the plan has changed, and the last one,
of which a timeline is recorded.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.gpu.cases import Backend, payloads_over
from benchmarks.gpu.running import Findings, Run, Sizes, text_of
from benchmarks.measuring import print_table
from benchmarks.placements import Repeated
from lightning_pipeshift import (
    Communication,
    MemoryCompression,
    PipelineTimeline,
    PipeShiftStrategy,
    Plan,
    RecomputeAll,
)
from lightning_pipeshift.devices.streams import elapsed_seconds, record_event
from lightning_pipeshift.plan.inputs.profile import Profile
from lightning_pipeshift.timeline.metrics import metrics_of
from lightning_pipeshift.timeline.recording import Recording
from tests.features_models import QUIET
from tests.sent_bytes import count_bytes

GPU = torch.device("cuda", 0)
MICROBATCHES = 4
BUDGET = 0.6
"""Of the peak of one stage without a budget."""

PLAIN, ONE_STAGE, RECOMPUTED, BUDGETED, TWO_STAGES, OVER_GLOO = (
    "plain Lightning",
    "one stage",
    "one stage, everything recomputed",
    "one stage, a budget",
    "two stages",
    "two stages, gloo",
)

_POLL_SECONDS = 0.02
_LIMIT_SECONDS = 300.0


class LanguageModel(L.LightningModule):
    """GPT-2.

    Args:
        sizes: of the part.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        blocks, width, heads, length, vocabulary = sizes.gpt2
        config = GPT2Config(
            n_layer=blocks, n_embd=width, n_head=heads, n_positions=length, vocab_size=vocabulary
        )
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: Tensor) -> Tensor:
        """The usual loss."""
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> Optimizer:
        """The usual optimizer of such models."""
        return AdamW(self.parameters(), lr=1e-4, fused=True)


@dataclass(frozen=True)
class Row:
    """How one row trains.

    Args:
        stages: how many; 0: plain Lightning, which accumulates over the microbatches.
        backend: of payloads; ``None``: the package's own choice.
        plugin: makes the memory plugin, of the budget in bytes; ``None``: there is none.
    """

    stages: int = 1
    backend: Backend = None
    plugin: Callable[[float], MemoryCompression] | None = None

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return max(1, self.stages)


def _recomputing(_: float) -> MemoryCompression:
    return MemoryCompression(policy=RecomputeAll())


def _budgeted(peak_bytes: float) -> MemoryCompression:
    return MemoryCompression(budget=BUDGET * peak_bytes)


def rows() -> dict[str, Row]:
    """All of them."""
    return {
        PLAIN: Row(stages=0),
        ONE_STAGE: Row(),
        RECOMPUTED: Row(plugin=_recomputing),
        BUDGETED: Row(plugin=_budgeted),
        TWO_STAGES: Row(stages=2),
        OVER_GLOO: Row(stages=2, backend="gloo"),
    }


class _Turns:
    """The files by which rows take turns: ``ROW.TURN.go``, and ``ROW.TURN.RANK.done``.

    Args:
        folder: theirs.
        name: the row's.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    def wait(self, turn: int) -> None:
        """In a rank: returns when the turn begins. The run's limit ends this."""
        while not (self._folder / f"{self._name}.{turn}.go").exists():
            time.sleep(_POLL_SECONDS)

    def end(self, turn: int) -> None:
        """In a rank: lets others have their turn."""
        (self._folder / f"{self._name}.{turn}.{os.environ['RANK']}.done").touch()

    def give(self, turn: int, world_size: int, row: Future[Any]) -> None:
        """In the script: lets the row have a turn, and returns when it is over, or the row is."""
        (self._folder / f"{self._name}.{turn}.go").touch()
        done = [self._folder / f"{self._name}.{turn}.{rank}.done" for rank in range(world_size)]
        while not row.done() and not all(path.exists() for path in done):
            time.sleep(_POLL_SECONDS)


class _Clock(L.Callback):
    """Takes part in the turns, and times the steps.

    Args:
        turns: the row's.
        sizes: of the part.
        num_batches: how many of the Trainer's batches are one step.
        peak_path: where the peak of the first turn is written, if it is wanted.
    """

    def __init__(self, turns: _Turns, sizes: Sizes, num_batches: int, peak_path: Path) -> None:
        self.milliseconds: list[float] = []
        self.peak_bytes = 0
        self.num_excluded = 0
        self.grown: defaultdict[str, defaultdict[str, float]] = defaultdict(
            lambda: defaultdict(float)
        )
        """By kind, how much figures have grown in the turns."""
        self.num_steps = 0
        """In how many steps."""
        self.details: Findings = {}
        self._turns, self._sizes, self._num_batches = turns, sizes, num_batches
        self._peak_path = peak_path
        self._turn = 0
        self._events: list[tuple[Any, Plan | None]] = []
        self._plan: Plan | None = None
        self._sent = count_bytes()
        self._before: dict[str, Mapping[str, float]] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        """A step begins, and perhaps another row has its turn before."""
        step, rest = divmod(number, self._num_batches)
        if rest:
            return
        self._mark()
        if step == self._sizes.gpt2_warmup // 2:
            # Until here, much is measured that takes memory of its own.
            torch.cuda.reset_peak_memory_stats()
        if step == ends_of_turns(self._sizes)[self._turn]:
            self._end_turn(trainer, len(self._events) - 1)
            self._turns.wait(self._turn)
            self._mark()
            self._before = self._figures(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Notes the plan: before the first batch, there is none."""
        self._plan = _plan(trainer)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """The last turn ends with the run."""
        self.details = details_of(trainer)
        self._end_turn(trainer, len(self._events))

    def _mark(self) -> None:
        self._events.append((record_event(GPU, is_timed=True), self._plan))

    def _end_turn(self, trainer: Any, num_steps: int) -> None:
        torch.cuda.synchronize()
        self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())
        if self._turn:
            self._take(trainer, num_steps)
        else:
            self._peak_path.write_text(str(self.peak_bytes))
        self._events.clear()
        self._turns.end(self._turn)
        self._turn += 1

    def _take(self, trainer: Any, num_steps: int) -> None:
        steps = list(zip(self._events, self._events[1:], strict=False))
        # Behind the first one, the pipeline has been empty for long.
        for (begin, plan), (end, later) in steps[1:]:
            seconds = elapsed_seconds(begin, end)
            assert seconds is not None
            self.num_excluded += plan is not later
            self.milliseconds += [1e3 * seconds] if plan is later else []
        self.num_steps += num_steps
        for kind, figures in self._figures(trainer).items():
            for name, value in figures.items():
                self.grown[kind][name] += value - self._before[kind].get(name, 0)

    def _figures(self, trainer: Any) -> dict[str, Mapping[str, float]]:
        """Of the memory plugin; and the bytes of payloads, their gradients and those of shared
        parameters that this rank has sent, through the GPU's memory and by the backend.
        """
        return {"memory_a_step": _figures(trainer), "sent_a_step": dict(self._sent)}


def ends_of_turns(sizes: Sizes) -> list[int]:
    """The number of the step before which each turn ends. A turn has one more step than are timed,
    and the last one another one, of which a timeline is recorded.
    """
    first, each = sizes.gpt2_warmup, sizes.gpt2_steps + 1
    ends = [first + turn * each for turn in range(sizes.gpt2_rounds + 1)]
    return [*ends[:-1], ends[-1] + 1]


def _plan(trainer: Any) -> Plan | None:
    strategy = trainer.strategy
    return strategy.pipeline.plan if isinstance(strategy, PipeShiftStrategy) else None


def _figures(trainer: Any) -> Mapping[str, float]:
    strategy = trainer.strategy
    has_memory = isinstance(strategy, PipeShiftStrategy) and strategy.pipeline.memory is not None
    found: Mapping[str, float] = strategy.pipeline.memory.figures() if has_memory else {}
    return found


def details_of(trainer: Any) -> Findings:
    """The plan of a run, in numbers; of plain Lightning, and where nothing has been measured,
    nothing.
    """
    plan = _plan(trainer)
    if plan is None or not trainer.strategy.is_measured:
        return {"plan": str(plan)}
    planning, memory = trainer.strategy.pipeline.planning, trainer.strategy.pipeline.memory
    predicted = trainer.strategy.predicted(plan).prediction
    found = {
        "plan": str(plan),
        "predicted_milliseconds": 1e3 * predicted.step_seconds,
        "predicted_bytes": predicted.memory_bytes,
        "optimizer_on_host": [len(layers) for layers in plan.optimizer_on_host],
        "weights_on_host": [len(layers) for layers in plan.weights_on_host],
        # With the rates of pinned copies, in bytes per second.
        "measured": asdict(memory.memory) if memory is not None and memory.memory else {},
    }
    if planning.measured is not None:
        # Only the first rank knows all measurements.
        found["saved_tensors"] = saved_tensors(plan, planning.measured.profile)
        found["links"] = [asdict(link) for link in planning.measured.cluster.ranks.values()]
    return found


def saved_tensors(plan: Plan, profile: Profile) -> Findings:
    """What a plan does with the saved tensors of a microbatch: how many there are of each kind, and
    their bytes.
    """
    swapped = {
        (swap.layer, number): "stays beside a recomputation" if swap.stays else "swapped"
        for swap in plan.swapped(0)
        for number in swap.tensors
    }
    counts, num_bytes = Counter[str](), Counter[str]()
    for index, layer in enumerate(profile.layers):
        for tensor in layer.tensors:
            is_dropped = index in plan.recomputed(0) and not tensor.is_outside
            kind = swapped.get((index, tensor.number), "recomputed" if is_dropped else "kept")
            counts[kind] += bool(tensor.num_bytes)
            num_bytes[kind] += tensor.num_bytes
    return {kind: {"tensors": counts[kind], "bytes": num_bytes[kind]} for kind in counts}


def trained(name: str, sizes: Sizes, folder: Path, timelines: Path) -> Findings:
    """One rank of one row."""
    row, rank = rows()[name], int(os.environ["RANK"])
    turns = _Turns(folder, name)
    turns.wait(0)
    L.seed_everything(7, verbose=False)
    num_batches = 1 if row.stages else MICROBATCHES
    own_peak = folder / f"{name}.{rank}.peak"
    clock = _Clock(turns, sizes, num_batches, own_peak)
    num_steps = ends_of_turns(sizes)[-1]
    callbacks: list[L.Callback] = [clock]
    how: dict[str, Any] = {}
    if row.stages:
        how["strategy"] = PipeShiftStrategy(
            microbatches=MICROBATCHES,
            profile_steps=sizes.gpt2_profile,
            partition=sizes.gpt2_partition,
            parallel_devices=[GPU] * row.stages,
            # Others have their turn meanwhile.
            communication=Communication(process_group_backend=row.backend, stall_timeout=3600.0),
        )
        # The first step is number 0: of a number that divides no other, the last one is recorded.
        callbacks.append(PipelineTimeline(every_n_steps=num_steps - 1, folder=timelines / name))
    else:
        how["accumulate_grad_batches"] = MICROBATCHES
    if row.plugin is not None:
        peak = float((folder / f"{ONE_STAGE}.0.peak").read_text())
        how["plugins"] = [row.plugin(peak)]
    length, vocabulary = sizes.gpt2[3:]
    data = DataLoader(
        Repeated(torch.arange(length) % vocabulary), batch_size=sizes.gpt2_batch // num_batches
    )
    with payloads_over(row.backend, True, rank):
        L.Trainer(
            accelerator="gpu",
            devices=row.world_size,
            precision="bf16-mixed",
            max_steps=num_steps,
            callbacks=callbacks,
            **how,
            **QUIET,  # type: ignore[arg-type]
        ).fit(LanguageModel(sizes), data)
    return {
        "milliseconds": clock.milliseconds,
        "num_excluded": clock.num_excluded,
        "peak_bytes": clock.peak_bytes,
        **{
            name: {key: value / clock.num_steps for key, value in grown.items()}
            for name, grown in clock.grown.items()
        },
        **clock.details,
    }


def summary(found: list[Findings], plain: float, timelines: Path) -> Findings:
    """A row of the table.

    Args:
        found: by the row's ranks.
        plain: the milliseconds of plain Lightning's step.
        timelines: the folder of the row's timelines.
    """
    first = found[0]
    milliseconds = median(first["milliseconds"])
    recordings = {path: Recording.load(path) for path in sorted(timelines.glob("*-*.json"))}
    return {
        "milliseconds_a_step": milliseconds,
        "num_steps": len(first["milliseconds"]),
        "num_excluded": first["num_excluded"],
        "times_plain": milliseconds / plain,
        "peak_bytes": [mine["peak_bytes"] for mine in found],
        "ranks": found,
        "timelines": [str(path) for path in recordings],
        "recorded_step": [metrics_of(each) for each in recordings.values()],
    }


def figures(run: Run) -> tuple[Findings, list[str]]:
    """Runs all rows. Returns what they find, and problems in words."""
    timelines = run.folder / "timelines"
    names = list(rows())
    with tempfile.TemporaryDirectory() as folder:
        found, problems = _taking_turns(run, names, Path(folder) / "turns", timelines)
    summaries = _summaries(found, timelines)
    table = [
        [name, row["milliseconds_a_step"], row["times_plain"], row["num_steps"],
         " + ".join(f"{each / 1e9:.2f}" for each in row["peak_bytes"])]
        for name, row in sorted(summaries.items(), key=lambda each: names.index(each[0]))
    ]  # fmt: skip
    return {"rows": summaries, "table": table}, problems


def _summaries(found: Mapping[str, list[Findings]], timelines: Path) -> dict[str, Findings]:
    # Where plain Lightning has failed, the others are still worth having.
    plain = median(found[PLAIN][0]["milliseconds"]) if PLAIN in found else float("nan")
    return {name: summary(each, plain, timelines / name) for name, each in found.items()}


def _taking_turns(
    run: Run, names: list[str], folder: Path, timelines: Path
) -> tuple[dict[str, list[Findings]], list[str]]:
    """The findings of each rank of each row that has come to its end, and all problems."""
    folder.mkdir()
    sizes = {name: row.world_size for name, row in rows().items()}
    with ThreadPoolExecutor(len(names)) as pool:
        running: dict[str, Future[list[Findings]]] = {
            name: pool.submit(
                run.ranks_at_once, trained, sizes[name], name, run.sizes, folder, timelines,
                limit=_LIMIT_SECONDS,
            )
            for name in names
        }  # fmt: skip
        for turn in range(run.sizes.gpt2_rounds + 1):
            for name in names:
                _Turns(folder, name).give(turn, sizes[name], running[name])
    errors = {name: each.exception() for name, each in running.items()}
    found = {name: running[name].result() for name, error in errors.items() if error is None}
    return found, [f"{name}: {text_of(error)}" for name, error in errors.items() if error]


def show(found: Findings) -> None:
    """Prints the table."""
    print_table(
        "GPT-2 small, bf16-mixed, 4 microbatches",
        ["", "ms a step", "times plain", "steps", "peak GB"],
        found["table"],
    )
