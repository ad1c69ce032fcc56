"""The asynchronous pipeline has the bits of its reference in plain PyTorch, moves included."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_pipeshift import LayerMigration, Move
from lightning_pipeshift.errors import PipeShiftError, PlanError
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.runtime.planning import move_parts
from lightning_pipeshift.runtime.planning.replanning import Replanning
from lightning_pipeshift.testing.ranks import LIMIT_SECONDS, RanksFailed, run_ranks
from tests import asynchronous_reference
from tests.cases import some
from tests.end_to_end.test_changing_plans import SLOW, Sleeper, SlowsDown, go_by_sleep, hearing
from tests.end_to_end.test_checkpoint import StatefulLoader
from tests.features_models import AwaitsPlanning, built, quiet_trainer, read_csv
from tests.models import is_held, points

WIDTH, NUM_LAYERS, SIZE, DECAY = 8, 6, 4, 0.97
RATES = {"sgd": 0.05, "adam": 0.01, "clipped": 0.01}


class Block(nn.Module):
    """Residual, and what else is wanted: one layer."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.more = nn.Sequential(*more)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.more(self.linear(x)))


class Model(L.LightningModule):
    """Blocks, one after the other; with ``draws``, they have dropout and running statistics. With
    ``shares``, two of them have tied weights, and code between them has a parameter of its own.
    """

    def __init__(self, optimizer: str, draws: bool = False, shares: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Block(*([nn.Dropout(0.3), nn.BatchNorm1d(WIDTH)] if draws else []))
            for _ in range(NUM_LAYERS)
        )
        self.mean = MeanMetric(nan_strategy="disable")
        self.num_steps = 0
        self._optimizer = optimizer
        self.shift = None
        if shares:
            tied, other = (self.layers[number].get_submodule("linear") for number in (1, 4))
            other.weight = tied.weight
            self.shift = nn.Parameter(torch.zeros(WIDTH))

    def _between(self, x: Tensor) -> Tensor:
        return x if self.shift is None else x + self.shift

    def training_step(self, batch: Any) -> Tensor:
        x, target = batch
        self.num_steps += 1
        for layer in self.layers:
            x = layer(self._between(x))
        loss = loss_of(x, target)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.mean(loss.detach())
        self.log("mean", self.mean)
        return loss

    def validation_step(self, batch: Any) -> None:
        x, target = batch
        for layer in self.layers:
            x = layer(self._between(x))
        self.log("validation", loss_of(x, target))

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self._optimizer, list(self.parameters()))
        scheduler = {"scheduler": ExponentialLR(optimizer, DECAY), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class ClippedAdam(Adam):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.clamp_(-0.3, 0.3)
        return loss


def optimizer_of(kind: str, parameters: list[nn.Parameter]) -> Optimizer:
    if kind == "adam":
        return Adam(parameters, lr=RATES[kind])
    if kind == "clipped":
        return ClippedAdam(parameters, lr=RATES[kind])
    return SGD(parameters, lr=RATES[kind], momentum=0.9)


def loss_of(x: Tensor, target: Tensor) -> Tensor:
    return (x - target).square().mean()


def data(num_batches: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    shape = (SIZE * num_batches, WIDTH)
    return TensorDataset(*(torch.randn(shape, generator=generator) for _ in range(2)))


class Case(NamedTuple):
    """One run.

    Args:
        moves: the counts that are wanted after a batch, counted over the run.
        validates: after how many batches there is a validation within the epochs.
        has_slow_links: so that one layer moves over each at a time.
        at_once: whether all layers of a change are to move together all the same.
    """

    split: Any
    schedule: str = "async"
    accumulated: int = 1
    moves: Mapping[int, Any] = {}
    optimizer: str = "sgd"
    validates: int | None = None
    num_batches: int = 20
    draws: bool = False
    num_epochs: int = 2
    shares: bool = False
    resumes: bool = False
    has_slow_links: bool = False
    at_once: bool = False


def moves_to(plan: Plan, placement: Placement) -> list[Move]:
    """The moves from a plan's owners to others."""
    return [
        Move(layer=layer.name, stage=after, virtual_machine=vm)
        for vm in range(placement.num_virtual_machines)
        for layer, before, after in zip(
            plan.layers, plan.placement.stages(vm), placement.stages(vm), strict=True
        )
        if before != after
    ]


class Watches(L.Callback):
    """Moves layers, and notes what is in force at the end of each batch."""

    def __init__(self, moves: Mapping[int, Any], at_once: bool = False) -> None:
        self.moves = dict(moves)
        self.at_once = at_once
        self.counts: list[Any] = []
        self.versions: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        strategy = trainer.strategy
        if (wanted := self.moves.get(len(self.counts))) is not None:
            several = not isinstance(wanted[0], int)
            placement = Placement(tuple(map(tuple, wanted if several else [wanted])))
            coming = strategy.pipeline.coming_plan
            if self.at_once:
                strategy.adopt(coming.with_placement(placement), at_once=True)
            else:
                strategy.migrate(*moves_to(coming, placement))
        counts = strategy.plan.placement.counts
        self.counts.append(counts if len(counts) > 1 else counts[0])
        self.versions.append(strategy.pipeline.num_weight_versions)
        # Under the number of the batch, unlike what its training step has logged.
        self.log("own", float(len(self.counts) - 1))  # type: ignore[attr-defined]


class Result(NamedTuple):
    state: dict[str, Tensor]
    counts: list[Any]
    versions: list[int]
    metrics: dict[str, float]
    steps: tuple[int, int]


def train(case: Case, ckpt_path: str | None = None, **arguments: Any) -> Result:
    L.seed_everything(3, verbose=False)
    several = isinstance(case.split[0], list)
    counts = [n for row in case.split for n in row] if several else case.split
    strategy = {"schedule": case.schedule, "partition": case.split, "profile_steps": 0}
    if several:
        strategy["virtual_machines"] = len(case.split)
    move_parts._UNMEASURED_BYTES = 1.0 if case.has_slow_links else 1e9  # type: ignore[misc]
    watches = Watches(case.moves, case.at_once)
    trainer = quiet_trainer(
        {"devices": len(counts), "pipeshift": strategy},
        callbacks=[watches, *arguments.pop("callbacks", [])],
        accumulate_grad_batches=case.accumulated,
        val_check_interval=case.validates,
        max_epochs=case.num_epochs,
        **arguments,
    )
    module = built(lambda: Model(case.optimizer, case.draws, case.shares))
    loader: Any = DataLoader(data(case.num_batches), batch_size=SIZE)
    if case.resumes:
        loader = StatefulLoader(loader)
    validation = loader if case.validates else None
    trainer.fit(module, loader, validation, ckpt_path=ckpt_path, weights_only=False)
    return Result(
        {name: value.detach().clone() for name, value in module.state_dict().items()},
        watches.counts,
        watches.versions,
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        (trainer.global_step, module.num_steps),
    )


def train_all(cases: Sequence[Case]) -> list[Result]:
    return [train(case) for case in cases]


def on_ranks(cases: Sequence[Case]) -> list[list[Result]]:
    """The results of all ranks, by case. All cases have as many ranks."""
    (number,) = {
        sum(len(row) if isinstance(row, list) else 1 for row in case.split) for case in cases
    }
    return [list(found) for found in zip(*run_ranks(train_all, number, cases), strict=True)]


def moved(counts: Sequence[Any]) -> list[tuple[int, Any]]:
    """The minibatches from which on other counts are in force, given those of each minibatch."""
    found = enumerate(pairwise(counts), start=1)
    return [(minibatch, after) for minibatch, (before, after) in found if before != after]


def reference(
    case: Case, moves: Any = (), length: int | None = None, saves: Sequence[int] = ()
) -> Any:
    """What plain PyTorch makes of a case.

    Args:
        case: the case.
        moves: see :func:`moved`.
        length: if it ends after that many minibatches.
        saves: the minibatches before which a checkpoint is saved, at the end of an update.
    """
    pairs = data(case.num_batches).tensors
    batches = list(zip(*(tensor.split(SIZE) for tensor in pairs), strict=True))
    number = len(case.split) if isinstance(case.split[0], list) else 1
    # A global batch is as many times as large.
    epoch = list(zip(*[iter(batches)] * number, strict=True)) if number > 1 else batches
    rate, rates = RATES[case.optimizer], []
    for index in range(len(epoch) * case.num_epochs):
        rates.append(rate)
        batch = index % len(epoch) + 1
        if batch % case.accumulated == 0 or batch == len(epoch):
            rate *= DECAY
    every, number = case.validates, len(epoch)
    within = range(every, number, every) if every else ()
    model = built(lambda: Model(case.optimizer, shares=case.shares))
    layers = model.layers
    if model.shift is not None:
        layers = [Shifted(model.shift, layer) for layer in layers]
    return asynchronous_reference.train(
        layers,
        case.split,
        (epoch * case.num_epochs)[:length],
        lambda parameters: optimizer_of(case.optimizer, parameters),
        loss_of,
        case.schedule,
        case.accumulated,
        [epoch * number + batch for epoch in range(case.num_epochs) for batch in within],
        moves,
        rates.__getitem__,
        # After a checkpoint, as in a new epoch, the newest weights are used.
        sorted([*(number * epoch for epoch in range(1, case.num_epochs)), *saves]),
    )


class Shifted(nn.Module):
    """A layer, with the code before it."""

    def __init__(self, shift: nn.Parameter, layer: nn.Module) -> None:
        super().__init__()
        self.shift = shift
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.shift)


def require_same(state: Mapping[str, Tensor], layers: Sequence[nn.Module]) -> None:
    for number, layer in enumerate(layers):
        for name, value in layer.state_dict().items():
            assert torch.equal(state[f"layers.{number}.{name}"], value), (number, name)


def counts_by_chance(draw: random.Random, num_stages: int) -> list[int]:
    counts = [0] * num_stages
    for _ in range(NUM_LAYERS):
        counts[draw.randrange(num_stages)] += 1
    return counts


def case_by_chance(draw: random.Random, num_stages: int) -> Case:
    schedule, accumulated = draw.choice(
        [("async", 1), ("async", 1), ("async", 2), ("async", 3), ("async-2bw", 4)]
    )
    num_batches = draw.choice([11, 20, 25])
    wanted = sorted(draw.sample(range(2 * num_batches - 2), draw.choice([0, 2, 4, 8])))
    return Case(
        counts_by_chance(draw, num_stages),
        schedule,
        accumulated,
        {batch: counts_by_chance(draw, num_stages) for batch in wanted},
        draw.choice(["sgd", "adam"]),
        draw.choice([None, None, 5, 7]),
        num_batches,
    )


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_the_bits_of_the_reference(num_stages: int) -> None:
    """Moves in both directions, over several boundaries, one after another, to and from stages
    without layers, and where the pipeline drains and fills.
    """
    draw = random.Random(num_stages)
    cases = some([case_by_chance(draw, num_stages) for _ in range(6)], 3)
    # Layers of two stages, with their own ages, at one new owner.
    if num_stages == 4:
        cases.append(Case([2, 2, 2, 0], moves={8: [0, 1, 4, 1]}))
    num_moves = 0
    for case, ranks in zip(cases, on_ranks(cases), strict=True):
        moves = moved(ranks[0].counts)
        num_moves += len(moves)
        expected = reference(case, moves)
        for result in ranks:
            assert moved(result.counts) == moves
            require_same(result.state, expected.layers)
    assert num_moves > len(cases)


IN_PARTS = [
    Case([4, 2], moves={3: [1, 5]}, has_slow_links=True),
    Case([4, 2], "async", 2, {2: [1, 5]}, "adam", 7, has_slow_links=True),
    Case([5, 1, 0], moves={4: [1, 3, 2]}, optimizer="adam", validates=5, has_slow_links=True),
    Case([0, 2, 4], "async-2bw", 3, {4: [4, 1, 1]}, "adam", has_slow_links=True, num_batches=30),
    Case([[4, 2], [3, 3]], "async", 1, {5: [[1, 5], [4, 2]]}, "adam", has_slow_links=True),
]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_over_slow_links_layers_move_in_parts(num_ranks: int) -> None:
    """A run in which the plan of each part is asked for by itself, as soon as that of the part
    before is in force, has the same bits. So has the reference.
    """
    cases = [case for case in IN_PARTS if len(np.ravel(case.split)) == num_ranks]
    in_parts = on_ranks(cases)
    one_by_one = []
    for case, ranks in zip(cases, in_parts, strict=True):
        ((asked, wanted),) = case.moves.items()
        moves = moved(ranks[0].counts)
        assert len(moves) > 2
        ends = [asked, *(minibatch for minibatch, _ in moves)]
        plans = [plan for _, plan in moves]
        assert np.array_equal(plans[-1], wanted)
        one_by_one.append(case._replace(moves=dict(zip(ends, plans, strict=False)), at_once=True))
        expected = reference(case, moves).layers
        for result in ranks:
            assert result.counts == ranks[0].counts
            require_same(result.state, expected)
    for ranks, others in zip(in_parts, on_ranks(one_by_one), strict=True):
        for one, other in zip(ranks, others, strict=True):
            assert one.counts == other.counts
            assert all(torch.equal(one.state[name], value) for name, value in other.state.items())


def test_what_is_asked_for_meanwhile_replaces_the_parts_that_have_not_begun() -> None:
    """The part that has begun is done; and ``at_once`` means at once."""
    case = Case([5, 1], moves={3: [1, 5], 7: [6, 0]}, has_slow_links=True)
    back, at_once = on_ranks([case, case._replace(at_once=True)])
    plans = [plan for _, plan in moved(back[0].counts)]
    assert plans == [(4, 2), (3, 3), (4, 2), (5, 1), (6, 0)]
    assert [plan for _, plan in moved(at_once[0].counts)] == [(1, 5), (6, 0)]
    for ranks in (back, at_once):
        expected = reference(case, moved(ranks[0].counts)).layers
        for result in ranks:
            require_same(result.state, expected)


SHARED = [
    Case([2, 4], moves={5: [3, 3]}, validates=7),
    Case([4, 2], "async", 2, {6: [2, 4]}, "adam"),
    Case([2, 2, 2], moves={3: [2, 1, 3], 11: [3, 0, 3], 12: [2, 2, 2]}, optimizer="adam"),
    Case([1, 5, 0], "async", 3, {4: [1, 0, 5], 16: [1, 4, 1]}, num_batches=25),
    Case([1, 2, 3], "async-2bw", 4, {4: [1, 3, 2]}, "adam", 6, 11),
    Case([1, 1, 1, 3], moves={9: [1, 2, 1, 2]}, optimizer="adam", validates=5),
    Case([1, 3, 2, 0], "async-2bw", 5, {2: [1, 2, 3, 0]}, num_batches=24),
    Case([1, 1, 2, 2], "async-2bw", 4, {4: [1, 2, 1, 2]}, "sgd", 9, 21),
]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_shared_parameters_are_as_old_as_on_their_first_stage(num_stages: int) -> None:
    """Tied weights, alone on a stage that moves too, and a parameter of code between layers."""
    cases = [case._replace(shares=True) for case in SHARED if len(case.split) == num_stages]
    for case, ranks in zip(cases, on_ranks(cases), strict=True):
        moves = moved(ranks[0].counts)
        assert moves
        expected = reference(case, moves).layers
        for result in ranks:
            require_same(result.state, [one.layer for one in expected])
            assert torch.equal(result.state["shift"], expected[0].shift)


def test_two_versions_of_the_weights_have_the_same_bits_on_every_split() -> None:
    """Dropout, running statistics, validation in the middle of an update, and moves too."""
    draw = random.Random(5)
    whole = Case([NUM_LAYERS], "async-2bw", 4, {}, "adam", 7, draws=True)
    ((expected,),) = on_ranks([whole])
    for num_stages in (2, 4):
        wanted = {batch: counts_by_chance(draw, num_stages) for batch in (3, 9, 10, 21, 30)}
        case = whole._replace(split=counts_by_chance(draw, num_stages), moves=wanted)
        (ranks,) = on_ranks([case])
        assert len(moved(ranks[0].counts)) >= 2
        for result in ranks:
            for name, value in expected.state.items():
                assert torch.equal(result.state[name], value), name
            assert result.metrics == pytest.approx(expected.metrics)
            assert result.steps == expected.steps


MACHINES = [
    Case([[3, 3], [3, 3]]),
    Case([[3, 3], [3, 3]], moves={4: [[2, 4], [2, 4]], 6: [[4, 2], [4, 2]]}, optimizer="adam"),
    Case([[3, 3], [2, 4]], "async", 2, {2: [[4, 2], [2, 4]], 12: [[1, 5], [5, 1]]}, validates=4),
    Case([[3, 3], [3, 3]], moves={1: [[1, 5], [3, 3]], 13: [[3, 3], [4, 2]]}, optimizer="adam"),
    Case([[2, 4], [2, 4]], "async", 1, {3: [[3, 3], [2, 4]]}, "adam", shares=True),
    Case([[3, 3], [3, 3]], "async-2bw", 2, {4: [[2, 4], [3, 3]], 8: [[0, 6], [5, 1]]}, "adam", 5),
    Case([[2, 2, 2], [6]], "async-2bw", 3, {1: [[1, 3, 2], [6]], 13: [[3, 3, 0], [6]]}, "adam"),
]


def test_layers_of_several_virtual_machines_move() -> None:
    """Gradients of an update meet in the rings of its own owners."""
    for case, ranks in zip(MACHINES, on_ranks(MACHINES), strict=True):
        moves = moved(ranks[0].counts)
        assert len(moves) == len(case.moves)
        expected = reference(case, moves).layers
        for result in ranks:
            assert moved(result.counts) == moves
            require_same(result.state, [one.layer if case.shares else one for one in expected])


class AverageOfEpochs(WeightAveraging):
    """Averages when the pipeline is empty, and no update is to be made."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


def train_averaged(cases: Sequence[Case]) -> list[Result]:
    return [train(case, callbacks=[AverageOfEpochs()]) for case in cases]


def test_an_average_at_the_end_of_epochs_is_that_of_the_reference() -> None:
    """In the end the callback gives the module the average, also of layers that have moved."""
    cases = [
        Case([1, 3, 2]),
        Case([1, 3, 2], moves={5: [2, 2, 2], 27: [1, 2, 3]}),
        Case([1, 3, 2], "async-2bw", 4, {}, "adam"),
    ]
    for case, *ranks in zip(cases, *run_ranks(train_averaged, 3, cases), strict=True):
        moves = moved(ranks[0].counts)
        assert len(moves) == len(case.moves)
        epochs = [reference(case, moves, length=length).layers for length in (20, 40)]
        for result in ranks:
            for number, both in enumerate(zip(*epochs, strict=True)):
                for name, first in both[0].state_dict().items():
                    mean = (first + both[1].state_dict()[name]) / 2
                    found = result.state[f"layers.{number}.{name}"]
                    torch.testing.assert_close(found, mean)


def test_virtual_machines_of_unlike_depth_with_two_versions() -> None:
    case = Case([[6], [6]], "async-2bw", 2, optimizer="adam", num_batches=10)
    (whole,) = on_ranks([case])
    for split in ([[2, 4], [1, 5]], [[2, 4], [6]], [[2, 2, 2], [6]]):
        (ranks,) = on_ranks([case._replace(split=split, accumulated=max(map(len, split)))])
        if max(map(len, split)) == 2:
            for result in ranks:
                for name, value in whole[0].state.items():
                    assert torch.equal(result.state[name], value), name


def test_the_first_virtual_machine_has_to_be_the_deepest() -> None:
    case = Case([[6], [2, 4]], "async-2bw", 2)
    with pytest.raises(RanksFailed, match=r"1, 2 stages: the first one has to be as deep"):
        on_ranks([case])


class Predicts(L.Callback):
    """Asks for the prediction of the first plan after each minibatch."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.found: list[float | None] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        strategy = trainer.strategy
        self.plan = self.plan or strategy.plan
        try:
            prediction = strategy.predicted(self.plan).prediction
        except PlanError:
            assert not strategy.is_measured
            self.found.append(None)
        else:
            assert strategy.is_measured
            self.found.append(prediction.step_seconds)


def train_predicted(virtual_machines: Any) -> list[float | None]:
    predicts = Predicts()
    several = isinstance(virtual_machines, list)
    how = {"schedule": "async-2bw" if several else "async", "profile_steps": 3}
    trainer = quiet_trainer(
        {"devices": 3, "pipeshift": {**how, "virtual_machines": virtual_machines}},
        callbacks=[predicts],
        accumulate_grad_batches=2 if several else 1,
        max_epochs=1,
    )
    trainer.fit(built(lambda: Model("sgd", False, False)), DataLoader(data(30), batch_size=SIZE))
    return predicts.found


@pytest.mark.parametrize("virtual_machines", [1, [[0, 1], [2]]])
def test_predictions_are_of_measured_steps_and_the_same_on_all_ranks(virtual_machines: Any) -> None:
    found, *others = run_ranks(train_predicted, 3, virtual_machines)
    assert others == [found, found]
    assert found[0] is None
    # Once measured, always so, though a slow machine may measure more than once.
    measured = found[found.count(None) :]
    assert measured
    assert None not in measured


def test_one_minibatch_number_for_updates_rates_logs_and_progress() -> None:
    case = Case([2, 2, 2], num_batches=11)
    logged = run_ranks(train_and_log, 3, case)
    rows, (result, *_) = logged[0][1], [one[0] for one in logged]
    losses = [float(loss) for loss in reference(case).losses]
    # Every second one goes to the logger.
    logged_steps = range(1, 22, 2)
    assert column(rows, "loss_step") == pytest.approx({k: losses[k] for k in logged_steps})
    assert column(rows, "mean") == pytest.approx({k: losses[k] for k in logged_steps})
    assert column(rows, "own") == {k: float(k) for k in logged_steps}
    means = {10: sum(losses[:11]) / 11, 21: sum(losses[11:]) / 11}
    assert column(rows, "loss_epoch") == pytest.approx(means)
    assert result.steps == (22, 22)
    for one, _ in logged:
        assert one.metrics == result.metrics


def column(rows: Sequence[Mapping[str, Any]], name: str) -> dict[int, float]:
    """The values that a logger got under a name, by their step."""
    return {int(row["step"]): row[name] for row in rows if row.get(name) is not None}


def train_and_log(case: Case) -> Any:
    result = train(case, logger=CSVLogger("logs", name="", version=""), log_every_n_steps=2)
    return result, read_csv("logs/metrics.csv") if os.environ["RANK"] == "0" else []


class StopsInAStep(Model):
    """Stages run the step of one batch at different times; only the last one runs its end."""

    behind = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        if not self.behind:
            self.trainer.should_stop |= batch_idx == 6
        loss = super().training_step(batch)
        if self.behind:
            self.trainer.should_stop |= batch_idx == 6
        return loss


def stop_in_a_step(case: Case, behind: bool) -> Result:
    this: Any = sys.modules[__name__]
    this.Model = StopsInAStep
    StopsInAStep.behind = behind
    return train(case)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("split", [[4, 2], [2, 2, 2]])
def test_a_step_that_stops_the_trainer_stops_all_stages_at_one_batch(
    split: list[int], behind: bool
) -> None:
    case = Case(split)
    length = 6 + len(split)
    layers = reference(case, length=length).layers
    for result in run_ranks(stop_in_a_step, len(split), case, behind):
        assert result.steps == (length, length)
        require_same(result.state, layers)


def test_no_more_versions_than_minibatches_in_flight() -> None:
    cases = [Case([2, 2, 1, 1]), Case([2, 2, 1, 1], "async-2bw", 4)]
    stashed, double = on_ranks(cases)
    # At the end of a call, after the update: those in flight, and the newest.
    assert [max(result.versions) for result in stashed] == [4, 3, 2, 1]
    assert [max(result.versions) for result in double] == [2, 2, 2, 2]


def save_in_the_middle(folder: str) -> Any:
    callback = ModelCheckpoint(folder, every_n_train_steps=7, save_top_k=-1, filename="{step}")
    case = Case([1, 3, 2], num_batches=20, num_epochs=1)
    return train(case, callbacks=[callback], enable_checkpointing=True)


def test_a_checkpoint_has_all_updates_until_its_step(tmp_path: Path) -> None:
    case = Case([1, 3, 2], num_batches=20, num_epochs=1)
    run_ranks(save_in_the_middle, 3, str(tmp_path))
    saved = torch.load(tmp_path / "step=7.ckpt", weights_only=False)
    assert saved["global_step"] == 7
    require_same(saved["state_dict"], reference(case, length=7).layers)


def save_and_resume(folder: str, case: Case) -> Any:
    def saves() -> Any:
        return ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")

    whole = train(case, callbacks=[saves()], enable_checkpointing=True)
    path = f"{folder}/step=4.ckpt"
    again = train(case, callbacks=[saves()], enable_checkpointing=True, ckpt_path=path)
    return whole, again


@pytest.mark.parametrize("schedule", ["async", "async-2bw"])
def test_a_run_resumed_in_an_epoch_ends_with_the_same_bits(schedule: str, tmp_path: Path) -> None:
    # With "async", the bits depend on when layers move.
    moves = {4: [1, 2, 3]} if schedule == "async-2bw" else {}
    case = Case([1, 3, 2], schedule, 3, moves, "adam", num_epochs=1, shares=True, resumes=True)
    for whole, again in run_ranks(save_and_resume, 3, str(tmp_path), case):
        assert whole.steps[0] == again.steps[0] == 7
        for name, value in whole.state.items():
            assert torch.equal(again.state[name], value), name


class Holds(L.Callback):
    """Counts the blocks whose weights are here, at the end of each batch."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        here = [is_held(layer.linear.weight) for layer in module.layers]
        self.counts.append(sum(here))


def move_late_and_too_late() -> tuple[list[int], list[str]]:
    holds = Holds()
    with hearing() as heard:
        train(Case([3, 3], moves={5: [1, 5], 39: [2, 4]}), callbacks=[holds])
    return holds.counts, heard


def test_the_old_owner_frees_what_has_moved_and_a_move_too_late_is_said() -> None:
    (first, heard), (second, _) = run_ranks(move_late_and_too_late, 2)
    assert (first[0], second[0]) == (3, 3)
    # While both have minibatches of theirs in flight, both have the layers.
    assert (max(first), max(second)) == (3, 5)
    assert (first[-1], second[-1]) == (1, 5)
    assert any("1 changes of owners were given up" in line for line in heard)


class TakenAway(L.Callback):
    """One rank gets a SIGTERM while a batch runs."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, idx: int) -> None:
        if trainer.global_rank == self.rank and idx == 6:
            os.kill(os.getpid(), signal.SIGTERM)


def end_early(folder: str, rank: int) -> Any:
    checkpoint = ModelCheckpoint(folder, save_top_k=0)
    case = Case([1, 3, 2], num_epochs=1)
    try:
        train(case, callbacks=[TakenAway(rank), checkpoint], enable_checkpointing=True)
    except SIGTERMException as error:
        return error.code
    return None


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_sigterm_on_any_rank_ends_all_after_one_minibatch(rank: int, tmp_path: Path) -> None:
    assert run_ranks(end_early, 3, str(tmp_path), rank) == [143] * 3
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    length = saved["global_step"]
    assert 7 <= length <= 13
    case = Case([1, 3, 2], num_epochs=1)
    require_same(saved["state_dict"], reference(case, length=length).layers)


class ClipsInAHook(L.Callback):
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *rest: Any
    ) -> None:
        with torch.no_grad():
            for weight in pl_module.parameters():
                weight.clamp_(-0.3, 0.3)


def clip_in_a_hook() -> None:
    with pytest.raises(PipeShiftError, match="subclass of your optimizer"):
        train(Case([1, 3, 2]), callbacks=[ClipsInAHook()])


def test_weights_are_clipped_in_the_optimizer() -> None:
    """A hook would change weights that minibatches in flight have used."""
    for schedule, accumulated in (("async", 1), ("async", 3), ("async-2bw", 3)):
        case = Case([1, 3, 2], schedule, accumulated, optimizer="clipped")
        (ranks,) = on_ranks([case])
        require_same(ranks[0].state, reference(case).layers)
    run_ranks(clip_in_a_hook, 3)


def test_bf16_and_clipping_by_value() -> None:
    found = []
    for split in ([6], [2, 1, 3]):
        found.append(run_ranks(train_clipped, len(split), split))
    for result in found[1]:
        for name, value in found[0][0].state.items():
            assert torch.equal(result.state[name], value), name


def train_clipped(split: list[int]) -> Result:
    case = Case(split, "async-2bw", 3, optimizer="adam", draws=True)
    return train(
        case, precision="bf16-mixed", gradient_clip_val=0.01, gradient_clip_algorithm="value"
    )


BAD: list[tuple[Case, dict[str, Any], str]] = [
    (Case([3, 3]), {"gradient_clip_val": 1.0}, "gradient_clip_algorithm='value'"),
    (Case([3, 3], num_batches=1), {}, "an epoch has 1 batches, fewer than the 2 stages"),
    (Case([3, 3], "async-2bw"), {}, "accumulate_grad_batches=2 or more"),
    (Case([3, 3]), {"limit_train_batches": 1}, "an epoch has 1 batches"),
]


def all_bad() -> list[str]:
    found = []
    for case, arguments, _ in BAD:
        with pytest.raises(PipeShiftError) as error:
            train(case, **arguments)
        found.append(str(error.value))
    return found


def test_what_does_not_go_with_the_schedule_is_said() -> None:
    for messages in run_ranks(all_bad, 2):
        for message, (_, _, words) in zip(messages, BAD, strict=True):
            assert words in message
    with pytest.raises(PipeShiftError, match="has several batches in flight, and splits none"):
        quiet_trainer({"pipeshift": {"schedule": "async", "microbatches": 4}})


class TiedSleeper(Sleeper):
    """Its first and its last layer share their weights, like an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        first, *_, last = (layer.get_submodule("linear") for layer in self.layers)
        last.weight = first.weight


def train_slowly(
    partition: Any,
    migrates: bool,
    module: type[L.LightningModule] = Sleeper,
    in_parts: bool = False,
    refusal: str = "",
) -> dict[str, Any]:
    """The last stage gets slow; by a clock that no other process slows down.

    Args:
        partition: at the start.
        migrates: whether there is a :class:`LayerMigration`.
        module: what is trained.
        in_parts: whether layers move one by one.
        refusal: why no layer can move, if none can.
    """
    if in_parts:
        move_parts._PART_OF_STEP = 0.0  # type: ignore[misc]
    if refusal:

        def refuse(self: Replanning, old: Plan, new: Plan) -> list[Plan]:
            raise PlanError(refusal)

        Replanning.parts_here = refuse  # type: ignore[method-assign]
    L.seed_everything(7, verbose=False)
    SLOW["factor"] = 1.0
    go_by_sleep()
    callbacks: list[L.Callback] = [SlowsDown(), AwaitsPlanning()]
    if migrates:
        callbacks.insert(1, LayerMigration(patience=4))
    how = {"schedule": "async", "partition": partition, "profile_steps": 0 if migrates else 5}
    watches = Watches({})
    trainer = quiet_trainer(
        {"devices": 2, "pipeshift": how}, callbacks=[*callbacks, watches], max_epochs=1
    )
    trainer.fit(built(module), DataLoader(points(40).dataset, batch_size=8))
    return {"counts": watches.counts, "decisions": trainer.strategy.decisions}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("partition", "migrates"), [("auto", False), ([4, 4], True)])
def test_layers_leave_a_slow_stage_by_measured_times(partition: Any, migrates: bool) -> None:
    first, second = run_ranks(train_slowly, 2, partition, migrates)
    assert first["counts"][0] == (4, 4)
    assert first["counts"][-1][0] >= 6, first["counts"]
    assert first["counts"] == second["counts"]


@pytest.mark.parametrize(("partition", "migrates"), [("auto", False), ([4, 4], True)])
def test_the_best_move_that_keeps_shared_weights_where_they_are(
    partition: Any, migrates: bool
) -> None:
    first, second = run_ranks(train_slowly, 2, partition, migrates, TiedSleeper)
    assert (first["counts"][0], first["counts"][-1]) == ((4, 4), (7, 1)), first["counts"]
    assert first["counts"] == second["counts"]


def test_a_decision_is_announced_when_its_last_part_is_in_force() -> None:
    for rank in run_ranks(train_slowly, 2, [4, 4], True, in_parts=True):
        moves = moved(rank["counts"])
        assert {abs(before[0] - after[0]) for before, after in pairwise(rank["counts"])} == {0, 1}
        announced = [one["step"] for one in rank["decisions"] if one.get("verdict") != "refused"]
        assert len(announced) < len(moves)
        assert announced[-1] == moves[-1][0]


def test_a_decision_that_is_refused_is_not_announced() -> None:
    for rank in run_ranks(train_slowly, 2, [4, 4], True, refusal="Rank 1 lacks 3 MB."):
        assert set(rank["counts"]) == {(4, 4)}
        (refused,) = rank["decisions"]
        assert refused["reason"] == "Rank 1 lacks 3 MB"


class StaysBehind(L.Callback):
    """The second stage begins with a minibatch when the first one is done with it."""

    def __init__(self) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, idx: int) -> None:
        if trainer.global_rank and idx:
            self._store().wait([f"done {idx}"], timedelta(seconds=LIMIT_SECONDS))

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, idx: int
    ) -> None:
        if not trainer.global_rank:
            self._store().set(f"done {idx}", "")


def train_behind() -> int:
    num_decisions = 0
    heed = Replanning.accept

    def counted(*args: Any) -> None:
        nonlocal num_decisions
        num_decisions += 1
        heed(*args)

    Replanning.accept = counted  # type: ignore[assignment,method-assign]
    callbacks = [LayerMigration(patience=3), AwaitsPlanning(), StaysBehind()]
    # A change of owners takes some batches, and is measured before the next decision.
    train(Case([3, 3], num_batches=60, num_epochs=1), callbacks=callbacks)
    return num_decisions


def test_nobody_waits_for_others_to_hear_of_a_decision() -> None:
    first, second = run_ranks(train_behind, 2)
    assert first == second >= 2
