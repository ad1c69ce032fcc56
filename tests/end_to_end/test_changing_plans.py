"""A plan that changes while training runs changes nothing that is computed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeshift import PlanError
from lightning_pipeshift.devices import streams
from lightning_pipeshift.model.measuring import measure
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.runtime.planning import link_probe, move_parts, probe, profiling, slow_rank
from lightning_pipeshift.testing.ranks import run_ranks
from tests.cases import some
from tests.features_models import (
    AwaitsPlanning,
    built,
    differences,
    parameters_of,
    plain,
    quiet_trainer,
)
from tests.models import NUM_CLASSES, NUM_FEATURES, ZOO, points

# --- any plan at any step ---


class Adopts(L.Callback):
    """Adopts placements between steps: by the number of the batch after which they are wanted.

    Args:
        cuts: the placements.
        at_once: whether all layers of each move in one part; one after the other.
        reorders: whether each comes with another order of the ranks.
    """

    def __init__(
        self,
        cuts: Mapping[int, Sequence[Sequence[int]]],
        at_once: Sequence[bool] = (True,),
        reorders: bool = False,
    ) -> None:
        self.cuts = dict(cuts)
        self.at_once = itertools.cycle(at_once)
        self.reorders = reorders
        self.seen: list[tuple[int, ...]] = []
        self.orders: list[tuple[tuple[int, ...], ...]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
        strategy, idx = trainer.strategy, others[2]
        self.seen.append(strategy.plan.placement.counts[strategy.virtual_machine])
        self.orders.append(strategy.topology.ranks)
        assert strategy.plan.ranks == strategy.topology.ranks
        machine = strategy.topology.ranks[strategy.virtual_machine]
        assert machine[strategy.stage] == strategy.global_rank
        if idx in self.cuts:
            placement = Placement(tuple(map(tuple, self.cuts[idx])))
            plan = strategy.plan.with_placement(placement)
            if self.reorders:
                draw = random.Random(idx)
                ranks = (draw.sample(ranks, len(ranks)) for ranks in strategy.topology.ranks)
                plan = replace(plan, ranks=tuple(map(tuple, ranks)))
            strategy.adopt(plan, next(self.at_once))


class Block(nn.Module):
    """Residual, and with dropout: one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.dropout(self.linear(x)))


class Trains(L.LightningModule):
    """Dropout, a tied and a loose parameter, running statistics."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.inputs = nn.Linear(NUM_FEATURES, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.scale = nn.Parameter(torch.ones(16))
        self.tied = nn.Linear(16, 16)
        first: Any = self.blocks[0]
        self.tied.weight = first.linear.weight
        self.head = nn.Linear(16, NUM_CLASSES)

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x) * self.scale
        loss = F.cross_entropy(self.head(self.tied(x)), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        groups: list[Any] = [
            {"params": list(self.inputs.parameters()), "lr": 0.01},
            {"params": [p for n, p in self.named_parameters() if not n.startswith("inputs")]},
        ]
        if self.optimizer == "adam":
            return torch.optim.AdamW(groups, lr=0.02, amsgrad=True)
        if self.optimizer == "adafactor":
            return torch.optim.Adafactor(groups, lr=0.02)
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


class Touches(L.Callback):
    """Changes weights between two steps, when moving ones are on their way: as autograd notices it,
    behind its back, and with a new tensor.
    """

    def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
        way = others[2] % 4
        for parameter in module.parameters():
            if parameter.is_meta or way == 3:
                continue
            if way == 0:
                with torch.no_grad():
                    parameter.mul_(0.99)
            elif way == 1:
                parameter.data.clamp_(-0.3, 0.3)
            else:
                parameter.data = parameter.data * 0.98


NUM_LAYERS = 7


def train(
    cuts: Mapping[int, Sequence[Sequence[int]]],
    optimizer: str,
    partition: Any,
    recompute: Any,
    virtual_machines: Any,
    accumulate: int,
    folder: str | None,
    touches: bool = False,
    at_once: Sequence[bool] = (True,),
    schedule: str = "1f1b",
    reorders: bool = False,
) -> dict[str, Any]:
    """Trains on all ranks; what is left behind. Unless all move ``at_once``, one layer moves over a
    link at a time.
    """
    if not all(at_once):
        move_parts._UNMEASURED_BYTES = 1.0  # type: ignore[misc]
    L.seed_everything(5, verbose=False)
    module = built(lambda: Trains(optimizer))
    adopts = Adopts(cuts, at_once, reorders)
    callbacks: list[L.Callback] = [adopts, *([Touches()] if touches else [])]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1))
    trainer = quiet_trainer(
        {
            "devices": int(os.environ["WORLD_SIZE"]),
            "pipeshift": {
                "partition": partition,
                "microbatches": 4,
                "recompute": recompute,
                "schedule": schedule,
                "virtual_machines": virtual_machines,
            },
        },
        max_epochs=1,
        callbacks=callbacks,
        gradient_clip_val=0.5,
        accumulate_grad_batches=accumulate,
        enable_checkpointing=folder is not None,
    )
    trainer.fit(module, DataLoader(points(12).dataset, batch_size=8))
    (wrapped,) = trainer.optimizers
    names = {id(p): name for name, p in module.named_parameters()}
    return plain(
        {
            "parameters": parameters_of(module),
            "optimizer": {names[id(p)]: dict(state) for p, state in wrapped.state.items()},
            "loss": float(trainer.callback_metrics["loss"]),
            "seen": adopts.seen,
            "orders": adopts.orders,
        }
    )


def drawn(seed: int, stages: Sequence[int]) -> dict[int, list[list[int]]]:
    """Random cuts at random steps; stages without layers among them."""
    draw = random.Random(seed)
    found = {}
    for step in sorted(draw.sample(range(10), 4)):
        rows = []
        for depth in stages:
            ends = [0, *sorted(draw.choices(range(NUM_LAYERS + 1), k=depth - 1)), NUM_LAYERS]
            rows.append([b - a for a, b in pairwise(ends)])
        found[step] = rows
    return found


CASES = [
    # seed, optimizer, virtual machines, accumulation
    (0, "adam", [[0, 1, 2]], 1),
    (1, "sgd", [[0, 1]], 2),
    (2, "adam", [[0, 1], [2]], 1),
    (3, "sgd", [[0, 2], [3, 1]], 3),
    (4, "adafactor", [[1, 0]], 2),
]


@pytest.mark.parametrize(("seed", "optimizer", "machines", "accumulate"), some(CASES, 3))
def test_random_moves_change_no_bit(
    seed: int, optimizer: str, machines: list[list[int]], accumulate: int, tmp_path: Path
) -> None:
    stages = [len(ranks) for ranks in machines]
    first = drawn(seed + 100, stages)
    partition = next(iter(first.values()))
    cuts = drawn(seed, stages)
    ranks = sum(stages)
    runs = []
    schedule = "gpipe" if seed % 2 else "1f1b"
    for name, wanted, recompute, more in (
        ("stays", {}, "none", ()),
        ("moves in parts", cuts, "full", (False, (False, True))),
        ("moves", cuts, "none", (False, (True,), schedule)),
        ("changes places", cuts, "full", (False, (True,), schedule, True)),
    ):
        given = (wanted, optimizer, partition, recompute, machines, accumulate)
        runs.append(run_ranks(train, ranks, *given, str(tmp_path / name), *more))
    stays, parts, moves, places = runs
    assert len(set(moves[0]["seen"])) > 1, "something has to move"
    # With these two seeds, no more than one layer moves at a time anyway, or for a single step.
    assert set(parts[0]["seen"]) != set(moves[0]["seen"]) or seed in (2, 4), "some move in parts"
    assert len(set(moves[0]["orders"])) == 1
    assert len(set(places[0]["orders"])) > 1
    for rank, (one, other) in enumerate(zip(stays * 3, parts + moves + places, strict=True)):
        # Who holds what optimizer state is what has changed; the checkpoints have all of it.
        problems = differences(
            {k: one[k] for k in ("parameters", "loss")},
            {k: other[k] for k in ("parameters", "loss")},
            0,
            0,
        )
        assert not problems, f"rank {rank}: {problems[:5]}"
    files = sorted(path.name for path in (tmp_path / "stays").iterdir())
    assert files
    for run in ("moves in parts", "moves", "changes places"):
        assert files == sorted(path.name for path in (tmp_path / run).iterdir())
        for name in files:
            saved = [torch.load(tmp_path / of / name) for of in ("stays", run)]
            for key in ("state_dict", "optimizer_states", "lr_schedulers", "pipeshift"):
                assert not differences(saved[0][key], saved[1][key], 0, 0), (run, name, key)


class CountsBackwards(L.Callback):
    """How often each block's backward has run here, in each batch."""

    def __init__(self) -> None:
        self.counts: list[list[int]] = []

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.now = [0 for _ in module.blocks]
        for number, block in enumerate(module.blocks):
            block.dropout.register_forward_hook(partial(self.listen, number))

    def listen(self, number: int, module: Any, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(self.count, number))

    def count(self, number: int, gradient: Any) -> None:
        self.now[number] += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts.append(self.now)
        self.now = [0 for _ in self.now]


def counted(schedule: str) -> list[list[int]]:
    counts = CountsBackwards()
    trainer = quiet_trainer(
        {"devices": 2, "pipeshift": {"partition": [3, 4], "microbatches": 4, "schedule": schedule}},
        max_epochs=1,
        callbacks=[Adopts({1: [[2, 5]], 3: [[4, 3]]}), counts],
    )
    trainer.fit(built(lambda: Trains("adam")), DataLoader(points(6).dataset, batch_size=8))
    return counts.counts


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_step_runs_on_one_owner(schedule: str) -> None:
    """Layer 2 (block 1) is on stage 0, from step 3 on stage 1, and from step 5 on stage 0 again, as
    layer 3 is then, whichever microbatch of these steps was asked for.
    """
    first, second = run_ranks(counted, 2, schedule)
    on_first = [[step[block] for step in first[1:]] for block in (1, 2)]
    on_second = [[step[block] for step in second[1:]] for block in (1, 2)]
    assert on_first == [[4, 4, 0, 0, 4], [0, 0, 0, 0, 4]]
    assert on_second == [[0, 0, 4, 4, 0], [4, 4, 4, 4, 0]]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_that_user_code_changes_between_steps(accumulate: int) -> None:
    """They leave as soon as the optimizer has stepped, and are compared before they are used."""
    cuts = {step: [[4, 3], [2, 5], [0, 7]][step % 3] for step in range(1, 10)}
    runs = [
        run_ranks(train, 2, wanted, "adam", [3, 4], "none", 1, accumulate, None, True)
        for wanted in ({}, {step: [counts] for step, counts in cuts.items()})
    ]
    for one, other in zip(*runs, strict=True):
        assert not differences(one["parameters"], other["parameters"], 0, 0)
    assert set(runs[1][0]["seen"]) == {(3, 4), (4, 3), (2, 5), (0, 7)}


# Beyond those of the runs above: all that torch has for any parameter, with all they can keep.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True, "capturable": False},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {"decoupled_weight_decay": True},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
}


class TrainsWith(Trains):
    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(
            self.parameters(), lr=0.01, **OPTIMIZERS[self.optimizer]
        )


def with_every_optimizer(cuts: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    found = {}
    for name in OPTIMIZERS:
        L.seed_everything(5, verbose=False)
        module = built(partial(TrainsWith, name))
        adopts = Adopts({step: [counts] for step, counts in cuts.items()})
        trainer = quiet_trainer(
            {"devices": 2, "pipeshift": {"partition": [3, 4], "microbatches": 2}},
            max_epochs=1,
            callbacks=[adopts],
        )
        trainer.fit(module, points(6))
        assert (len(set(adopts.seen)) > 1) == bool(cuts)
        found[name] = parameters_of(module)
    return found


def test_moves_take_along_what_any_optimizer_keeps() -> None:
    runs = [run_ranks(with_every_optimizer, 2, cuts) for cuts in ({}, {1: (5, 2), 2: (1, 6)})]
    for stays, moves in zip(*runs, strict=True):
        assert not differences(stays, moves, 0, 0)


def adopt_nonsense() -> list[str]:
    class Asks(L.Callback):
        errors: list[str]

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            strategy, self.errors = trainer.strategy, []
            plan = strategy.plan
            others = tuple(replace(layer, name=f"another.{layer.name}") for layer in plan.layers)
            for wrong in (
                replace(plan, microbatches=7),
                replace(plan, ranks=(), placement=Placement(((1, 2, 2),))),
                replace(plan, layers=others),
            ):
                self.refused(strategy, wrong)

        def refused(self, strategy: Any, plan: Any) -> None:
            try:
                strategy.adopt(plan, at_once=True)
            except PlanError as error:
                self.errors.append(str(error))

    asks = Asks()
    trainer = quiet_trainer(
        {"devices": 2, "pipeshift": {"partition": [2, 3]}}, callbacks=[asks], max_epochs=1
    )
    trainer.fit(ZOO["sequential"].build(), ZOO["sequential"].loader(2))
    return [*asks.errors, str(trainer.strategy.plan.placement.counts)]  # type: ignore[attr-defined]


def test_a_plan_that_would_change_what_is_computed_is_refused_and_training_goes_on() -> None:
    microbatches, stages, names, counts = run_ranks(adopt_nonsense, 2)[0]
    assert "('1f1b', 7, (2,))" in microbatches
    assert "one in force ('1f1b', 8, (2,))" in microbatches
    assert "(3,)" in stages
    assert "made for another model" in names
    assert counts == "((2, 3),)"


# --- by what was measured ---

SLOW = {"factor": 1.0}
# How long all layers together have slept here: a clock that no other process slows down.
SLEPT = {"seconds": 0.0, "ran": 0.0}
# After how much sleep this process is stopped each time, and for how long: a CPU quota.
STOPPED = {"each": math.inf, "seconds": 0.0}
# Where all that counts goes by that clock, nobody has to sleep.
PRETENDS = {"sleep": False}


def sleep(seconds: float) -> None:
    if not PRETENDS["sleep"]:
        time.sleep(seconds)
    before, SLEPT["ran"] = SLEPT["ran"], SLEPT["ran"] + seconds
    stops = SLEPT["ran"] // STOPPED["each"] - before // STOPPED["each"]
    SLEPT["seconds"] += seconds + stops * STOPPED["seconds"]


def go_by_sleep() -> None:
    """Lets this process take that clock's word for how long layers and steps take."""
    PRETENDS["sleep"] = True
    streams.time = SimpleNamespace(perf_counter=lambda: SLEPT["seconds"])  # type: ignore[assignment,attr-defined]
    # A step without any layers takes a moment, too.
    moments = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: SLEPT["seconds"] + 1e-3 * next(moments))
    profiling.time = clock  # type: ignore[assignment,attr-defined]
    # Neither the estimates before the first step nor the links depend on what else runs here.
    measure.time = SimpleNamespace(perf_counter=lambda: SLEPT["seconds"])  # type: ignore[assignment,attr-defined]
    # Nor does what a rank delivers later; its clock stands still while it waits for others.
    slow_rank._PROBED_PART = 1e6  # type: ignore[misc]
    slow_rank.time_slices = lambda *_: [1e-9 * SLOW["factor"]]  # type: ignore[attr-defined]
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 1e-4 * next(ticks), monotonic=time.monotonic)
    probe.time = link_probe.time = clock  # type: ignore[assignment,attr-defined]


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        sleep(0.002 * SLOW["factor"])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        sleep(0.002 * SLOW["factor"])
        return gradients[0]


class Sleeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Any:
        return Sleeps.apply(self.dropout(self.linear(x)))


class Sleeper(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sleeping() for _ in range(8))

    def training_step(self, batch: Any) -> Tensor:
        x, _ = batch
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class SlowsDown(L.Callback):
    """The last rank gets slow when training has begun: nobody could have known."""

    def on_train_batch_end(self, *_: Any) -> None:
        if os.environ["RANK"] == "1":
            SLOW["factor"] = 15.0


@contextlib.contextmanager
def hearing() -> Iterator[list[str]]:
    """Context in which the strategy's messages are collected."""
    heard: list[str] = []

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("PipeShift: "):
                heard.append(record.getMessage())

    handler = Hears()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)


class WithCopy(Sleeper):
    """Half of its layers are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.copied = self.layers[:3], self.layers[3:6]


def train_with_idle_layers(partition: Any) -> tuple[tuple[int, ...], list[str]]:
    strategy = {"partition": partition, "microbatches": 2, "profile_steps": 0}
    trainer = quiet_trainer({"devices": 2, "pipeshift": strategy}, max_epochs=1)
    with hearing() as heard:
        trainer.fit(built(WithCopy), DataLoader(points(2).dataset, batch_size=8))
    plan = trainer.strategy.plan  # type: ignore[attr-defined]
    return plan.placement.counts[0], heard


def test_layers_that_no_step_calls_are_no_work() -> None:
    counts, heard = run_ranks(train_with_idle_layers, 2, "uniform")[0]
    assert counts == (2, 4)
    assert not any("nothing to compute" in line for line in heard)
    counts, heard = run_ranks(train_with_idle_layers, 2, [3, 3])[0]
    assert counts == (3, 3)
    (line,) = (line for line in heard if "nothing to compute" in line)
    assert line.startswith("PipeShift: stage 1 (rank 1) has nothing to compute: the `partition`")


def train_unequally(partition: Any, profile_steps: int) -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    SLOW["factor"] = 1.0
    go_by_sleep()
    module = built(Sleeper)
    strategy = {"partition": partition, "microbatches": 4, "profile_steps": profile_steps}
    how = {"devices": 2, "pipeshift": strategy}
    callbacks = [SlowsDown(), AwaitsPlanning()]
    trainer = quiet_trainer(how, callbacks=callbacks, max_epochs=1)
    with hearing() as heard:
        trainer.fit(module, DataLoader(points(22).dataset, batch_size=8))
    plan = trainer.strategy.plan  # type: ignore[attr-defined]
    return {
        "counts": plan.placement.counts[0],
        "predicted": plan.prediction is not None and plan.prediction.step_seconds,
        "heard": heard,
        "parameters": parameters_of(module),
    }


def test_the_first_steps_are_measured_and_the_layers_change_their_owners() -> None:
    planned = run_ranks(train_unequally, 2, "auto", 3)
    fixed = run_ranks(train_unequally, 2, [4, 4], 3)
    first, second = planned[0]["counts"]
    assert first >= 6, "the slow stage has few layers in the end"
    assert planned[0]["predicted"] > 0
    heard = planned[0]["heard"]
    assert any("3 steps have been measured" in line and "is expected" in line for line in heard)
    assert any("it takes" in line and line.endswith("; kept.") for line in heard)
    assert not planned[1]["heard"], "the first rank speaks for all"
    for one, other in zip(planned, fixed, strict=True):
        assert not differences(one["parameters"], other["parameters"], 0, 0)
        assert one["counts"] == (first, second)
    assert not fixed[0]["heard"], "a partition of one's own stays"


def test_profile_steps_of_zero_plan_once() -> None:
    ranks = run_ranks(train_unequally, 2, "auto", 0)
    assert not [line for line in ranks[0]["heard"] if "measured" in line]
