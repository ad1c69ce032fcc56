"""The whole promise: training in a pipeline equals training without one.

Every model of the zoo trains on one, two and three stages, with many cuts (stages without layers
among them) and all schedules. Parameters, buffers, the optimizer's state and logged values are the
same to the last bit on every rank, because the microbatches are the same and each layer draws from
streams of its own. Against plain Lightning, which takes the batch whole, they are the same to float
tolerance.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeshift import Choice, MemoryCompression, PipeShiftStrategy, Policy, TensorRecord
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.schedule.schedules import INTERLEAVED, SYNCHRONOUS
from lightning_pipeshift.testing.ranks import run_ranks
from tests.cases import some
from tests.features_models import quiet_trainer
from tests.models import NUM_CLASSES, NUM_FEATURES, ZOO, Classifier, is_held, points

SEED = 11
MICROBATCHES = 4


class Pipelined(NamedTuple):
    """How to train in a pipeline."""

    partition: Any = "auto"
    schedule: str = "1f1b"
    microbatches: int = MICROBATCHES
    recompute: Any = "none"
    #: Cuts that take over while training runs, each after one more step.
    then: tuple[list[int], ...] = ()
    #: What becomes of saved tensors: one of `POLICIES`.
    memory: str | None = None

    @property
    def last_cut(self) -> tuple[int, ...]:
        return tuple(self.then[-1] if self.then else self.partition)


PLAIN = None


class Mixed:
    """Every tensor its own way, whatever it is."""

    def choose(self, record: TensorRecord) -> Choice | None:
        # Every third layer runs again.
        ways = [Choice.HOST, Choice.KEEP, Choice.DEVICE, None]
        again = record.index % 3 == 2 and record.number == 0
        return Choice.RECOMPUTE if again else ways[(record.index + record.number) % len(ways)]


class Everything:
    """One way for all."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice

    def choose(self, record: TensorRecord) -> Choice | None:
        return self.choice


POLICIES: dict[str, Policy] = {
    "host": Everything(Choice.HOST),
    "device": Everything(Choice.DEVICE),
    "mixed": Mixed(),
    "again": Everything(Choice.RECOMPUTE),
}


class Trained(NamedTuple):
    """The result of a training run on one rank."""

    state: dict[str, Tensor]
    #: The optimizer's state of the parameters that this rank held, by the parameter's name.
    optimizer_state: dict[str, dict[str, Any]]
    #: ``trainer.callback_metrics`` after every batch, and after the run.
    logged: list[dict[str, float]]
    #: The names of the plan's layers.
    layers: list[str]
    #: How many of them each stage owns.
    counts: tuple[int, ...]
    #: What saved tensors have been moved, in bytes.
    moved_bytes: float


class _Logged(L.Callback):
    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def take(self, trainer: L.Trainer) -> None:
        self.values.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.take(trainer)


class _Moves(L.Callback):
    """Lets layers change their owners after each of the first steps."""

    def __init__(self, cuts: Sequence[list[int]]) -> None:
        self.cuts = list(cuts)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.cuts:
            strategy: Any = trainer.strategy
            strategy.adopt(strategy.plan.with_placement(Placement((tuple(self.cuts.pop(0)),))))


def fit(
    module: L.LightningModule, loader: DataLoader, how: Pipelined | None, max_epochs: int = 1
) -> Trained:
    """Trains on all ranks of the job; ``PLAIN`` on this one alone and without PipeShift."""
    L.seed_everything(SEED, verbose=False)
    strategy: Any = "auto"
    moves = []
    plugins: list[Any] = []
    if how is not PLAIN and how.memory is not None:
        compression: Any = "lossless" if how.memory == "mixed" else None
        plugins.append(MemoryCompression(policy=POLICIES[how.memory], compression=compression))
    if how is not PLAIN:
        strategy = PipeShiftStrategy(
            microbatches=how.microbatches,
            schedule=how.schedule,
            partition=how.partition,
            recompute=how.recompute,
        )
        moves = [_Moves(how.then)]
    logged = _Logged()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=max_epochs,
        callbacks=[logged, *moves],
        plugins=plugins,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    logged.take(trainer)
    state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    (optimizer,) = trainer.optimizers
    optimizer_state = {
        name: dict(optimizer.state[parameter])
        for name, parameter in module.named_parameters()
        if parameter in optimizer.state
    }
    layers, counts, moved = [], (), 0.0
    if how is not PLAIN:
        plan = trainer.strategy.plan  # type: ignore[attr-defined]
        layers = [layer.name for layer in plan.layers]
        counts = plan.placement.counts[0]
        moved = trainer.strategy.memory_figures.get("moved_bytes", 0.0)  # type: ignore[attr-defined]
    return Trained(state, optimizer_state, logged.values, layers, counts, moved)


def train(name: str, runs: Sequence[Pipelined | None]) -> list[Trained]:
    """Trains a model of the zoo several times over, one after the other in the same processes."""
    specimen = ZOO[name]
    return [fit(specimen.build(), specimen.loader(), how) for how in runs]


# --------------------------------------------------------------------------------------------------
# What "the same" means
# --------------------------------------------------------------------------------------------------


def _differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Where two dicts (of dicts) of tensors and numbers are not the same to the last bit."""
    different = []
    for name, value in found.items():
        other = expected[name]
        if isinstance(value, dict):
            assert value.keys() == other.keys(), name
            different += [f"{name}: {line}" for line in _differences(value, other)]
        elif isinstance(value, Tensor):
            if value.dtype != other.dtype or not torch.equal(value, other):
                by = (value.double() - other.double()).abs().max() / other.double().abs().max()
                different.append(f"{name} (by {float(by):.1e} of the largest)")
        elif value != other:
            different.append(f"{name} ({value} and {other})")
    return different


def assert_same_bits(found: Trained, expected: Trained, what: str) -> None:
    assert found.layers == expected.layers, what
    assert found.state.keys() == expected.state.keys(), what
    different = _differences(found.state, expected.state)
    different += _differences(found.optimizer_state, expected.optimizer_state)
    assert not different, f"{what}: different after training: {', '.join(different)}"
    # `repr` so that a value that is not a number equals itself.
    assert repr(found.logged) == repr(expected.logged), f"{what}: different logged values"


def assert_close(
    found: Trained, expected: Trained, what: str, rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    assert found.state.keys() == expected.state.keys(), what
    for name, tensor in found.state.items():
        torch.testing.assert_close(
            tensor,
            expected.state[name],
            rtol=rtol,
            atol=atol,
            msg=functools.partial("{}, {}: {}".format, what, name),
        )
    assert len(found.logged) == len(expected.logged), what
    for step, (values, wanted) in enumerate(zip(found.logged, expected.logged, strict=True)):
        assert values == pytest.approx(wanted, rel=rtol, abs=atol, nan_ok=True), (
            f"{what}, logged values after step {step}"
        )


def assert_all_same(
    of_each_rank: Sequence[Sequence[Trained]],
    runs: Sequence[Pipelined],
    expected: Trained,
    same_bits: bool = True,
    moves: bool = True,
) -> None:
    for number, how in enumerate(runs):
        of_run = [trained[number] for trained in of_each_rank]
        for rank, found in enumerate(of_run):
            what = f"{how}, rank {rank} of {len(of_each_rank)}"
            assert found.counts == how.last_cut, what
            if same_bits:
                assert_same_bits(found, expected, what)
            else:
                assert_close(found, expected, what, rtol=1e-5, atol=1e-6)
                assert_same_bits(found._replace(optimizer_state={}), of_run[0], what)
        moved = sum(found.moved_bytes for found in of_run)
        if how.memory in ("host", "device") and moves:
            assert moved, how
        if how.memory is None:
            assert not moved, how
        held = set().union(*(found.optimizer_state for found in of_run))
        assert held == set(expected.optimizer_state), how


def assert_trained(trained: Trained, before: L.LightningModule) -> None:
    """Something was learned, so that equal results mean something."""
    parameters = dict(before.named_parameters())
    assert any(
        not torch.equal(parameter, trained.state[name]) for name, parameter in parameters.items()
    )
    assert all(tensor.isfinite().all() for tensor in trained.state.values())


# --------------------------------------------------------------------------------------------------
# Every model, on every number of stages
# --------------------------------------------------------------------------------------------------


def cuts_in_two(num_layers: int) -> list[list[int]]:
    """With few layers all cuts, else the outermost and the middle one; of these, the outermost."""
    between: Sequence[int] = range(1, num_layers)
    if len(between) > 3:
        between = [1, num_layers // 2, num_layers - 1]
    between = some(between, 2)
    return [[cut, num_layers - cut] for cut in between or (0, 1)]


def cuts_in_three(num_layers: int, number: int) -> list[list[int]]:
    """One cut with an empty stage, the first, middle or last by turns, and one without."""
    first = num_layers // 2
    rest = num_layers - first
    with_empty = [[0, first, rest], [first, 0, rest], [first, rest, 0]]
    full = [[1, 1, num_layers - 2], [num_layers - 2, 1, 1]]
    if num_layers < 3:
        return with_empty
    return [with_empty[number % 3], full[number % 2]]


def with_schedules(cuts: Sequence[list[int]], number: int) -> list[Pipelined]:
    """All schedules by turns, with and without recomputation; and every second one ends as the
    others are cut, and has saved tensors moved in some way.
    """
    names = tuple(name for name in SYNCHRONOUS if name not in INTERLEAVED)
    found = []
    for i, cut in enumerate(cuts):
        how = Pipelined(cut, names[(i + number) % len(names)])
        if (i + number // 3) % 2:
            how = how._replace(recompute="full")
        if i % 2:
            how = how._replace(then=tuple(cuts[i - 1 :: -1]))
            policy = list(POLICIES)[(i // 2 + number) % len(POLICIES)]
            how = how._replace(memory=policy, recompute="none")
        found.append(how)
    return found


@pytest.mark.parametrize("name", ZOO)
def test_every_split_trains_the_same(name: str) -> None:
    specimen = ZOO[name]
    # Taken whole, a batch has to give the very step of plain Lightning; in microbatches too, where
    # nothing looks at more than a row.
    in_one = [Pipelined(), PLAIN, Pipelined(microbatches=1)]
    (alone,) = run_ranks(train, 1, name, in_one[:1] if specimen.draws else in_one)
    expected = alone[0]
    assert_trained(expected, specimen.build())
    if not specimen.draws:
        _, plain, whole = alone
        assert_close(whole, plain, "one stage, one microbatch, against plain Lightning")
        if specimen.like_plain:
            assert_close(expected, plain, "one stage, against plain Lightning")

    num_layers, number = len(expected.layers), list(ZOO).index(name)
    for cuts in (cuts_in_two(num_layers), cuts_in_three(num_layers, number)):
        runs = with_schedules(cuts, number)
        of_each_rank = run_ranks(train, len(cuts[0]), name, runs)
        # A model that checkpoints by itself has its own way with what is saved. And a step that
        # reads a value behind its first layer is known when steps have been measured, not before.
        moves = "checkpoint" not in name and name != "control_dependence"
        assert_all_same(of_each_rank, runs, expected, specimen.same_bits, moves)


# --------------------------------------------------------------------------------------------------
# Batches of any size, in any number of microbatches
# --------------------------------------------------------------------------------------------------

# 17 points: the last batch is a partial one. One sample for all microbatches; more microbatches
# than samples; counts that do not divide.
SIZES = [(8, 3), (7, 4), (3, 8), (1, 4), (6, 1), (17, 16)]


def train_on_sizes(stages: list[int] | None) -> list[Trained]:
    dataset = torch.utils.data.Subset(points(3).dataset, range(17))
    found = []
    for batch_size, microbatches in SIZES:
        module = ZOO["sequential"].build()
        how = PLAIN if stages is None else Pipelined(stages, microbatches=microbatches)
        found.append(fit(module, DataLoader(dataset, batch_size=batch_size), how))
    return found


def test_batches_of_any_size_in_any_number_of_microbatches() -> None:
    (plain,) = run_ranks(train_on_sizes, 1, None)
    (expected,) = run_ranks(train_on_sizes, 1, [5])
    for size, found, wanted in zip(SIZES, expected, plain, strict=True):
        assert_close(found, wanted, f"batch size and microbatches {size}")
    for cut in ([2, 3], [1, 3, 1]):
        for rank in run_ranks(train_on_sizes, len(cut), cut):
            for size, found, wanted in zip(SIZES, rank, expected, strict=True):
                assert_same_bits(found, wanted, f"batch size and microbatches {size}, {cut}")


# --------------------------------------------------------------------------------------------------
# Several runs of one module
# --------------------------------------------------------------------------------------------------


def train_twice(cuts: Sequence[Any]) -> list[Trained]:
    """Trains one module for two shuffled epochs, and then again as differently cut."""
    module = ZOO["dropout" if None not in cuts else "sequential"].build()
    loader = DataLoader(points(3).dataset, batch_size=8, shuffle=True)
    return [
        fit(module, loader, PLAIN if cut is None else Pipelined(cut), max_epochs=2) for cut in cuts
    ]


def test_a_trained_module_trains_on_as_if_it_had_been_whole_all_the_time() -> None:
    (expected,) = run_ranks(train_twice, 1, [[5], [5]])
    for cuts in ([[2, 3], [4, 1]], [[0, 3, 2], [3, 1, 1]]):
        for rank in run_ranks(train_twice, len(cuts[0]), cuts):
            for found, wanted in zip(rank, expected, strict=True):
                assert_same_bits(found, wanted, str(cuts))


def train_shuffled(how: Pipelined | None) -> Trained:
    loader = DataLoader(points(3).dataset, batch_size=8, shuffle=True)
    return fit(ZOO["sequential"].build(), loader, how, max_epochs=3)


def placeholders_of_other_stages(partition: Any) -> list[str]:
    class Looks(L.Callback):
        held: list[str]

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.held = [n for n, p in module.named_parameters() if is_held(p)]

    looks = Looks()
    trainer = quiet_trainer(
        {"pipeshift": {"partition": partition}, "devices": 2}, callbacks=[looks], max_epochs=1
    )
    trainer.fit(ZOO["sequential"].build(), ZOO["sequential"].loader(2))
    return looks.held


@pytest.mark.parametrize("partition", ["auto", "uniform", [1, 4]])
def test_each_parameter_is_held_by_one_stage_only(partition: Any) -> None:
    first, second = run_ranks(placeholders_of_other_stages, 2, partition)
    names = [name for name, _ in ZOO["sequential"].build().named_parameters()]
    assert first + second == names


def test_shuffled_epochs_come_in_the_order_of_plain_lightning() -> None:
    (plain,) = run_ranks(train_shuffled, 1, PLAIN)
    for found in run_ranks(train_shuffled, 2, Pipelined([2, 3])):
        assert_close(found, plain, "three shuffled epochs")


# --------------------------------------------------------------------------------------------------
# Networks made by chance
# --------------------------------------------------------------------------------------------------


class _Pair(nn.Module):
    """Returns what it computes, and which of its inputs were positive."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(hidden).tanh(), hidden > 0


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.linear(self.norm(hidden)))


# What the code between two layers does to a layer's output.
BETWEEN: dict[str, Callable[[RandomNetwork, Tensor], Tensor]] = {
    "nothing": lambda network, output: output,
    "tanh": lambda network, output: output.tanh(),
    "relu_": lambda network, output: output.relu_(),
    "halve_": lambda network, output: output.mul_(0.5),
    "dropout": lambda network, output: network.dropout(output),  # type: ignore[has-type]
    "functional": lambda network, output: F.dropout(output, 0.2, network.training),
    "noise": lambda network, output: output + 0.1 * torch.randn_like(output),
    "shift": lambda network, output: output + network.shift,  # type: ignore[has-type]
    "detour": lambda network, output: output * random.choice([0.5, 1.0]),
    "where": lambda network, output: torch.where(output > 0, output, torch.rand(())),
}


class RandomNetwork(Classifier):
    """Layers, skips and the code between layers are drawn from ``seed``.

    Skips start at what left a layer. What the code between layers computes is used behind one cut
    only, so its gradient has the same bits on every split; see ``Specimen.same_bits``.
    """

    WIDTH = 8

    def __init__(self, seed: int) -> None:
        super().__init__()
        dice = random.Random(seed)
        depth = dice.randint(2, 7)
        kinds = [
            lambda: nn.Linear(self.WIDTH, self.WIDTH),
            lambda: _Residual(self.WIDTH),
            lambda: _Pair(self.WIDTH),
            lambda: nn.TransformerEncoderLayer(self.WIDTH, 2, 16, dropout=0.1, batch_first=True),
        ]
        first = nn.Linear(NUM_FEATURES, self.WIDTH)
        self.layers = nn.ModuleList([first, *(dice.choice(kinds)() for _ in range(depth))])
        self.head = nn.Linear(self.WIDTH, NUM_CLASSES)
        self.dropout = nn.Dropout(dice.choice([0.0, 0.1, 0.5]))
        self.shift = nn.Parameter(torch.randn(self.WIDTH))
        self.skips = [[j for j in range(i) if dice.random() < 0.3] for i in range(depth + 1)]
        skipped = {start for starts in self.skips for start in starts}
        in_place = [name for name in BETWEEN if name.endswith("_")]
        self.between = [
            dice.choice([name for name in BETWEEN if number not in skipped or name not in in_place])
            for number in range(depth + 1)
        ]

    def forward(self, features: Tensor) -> Tensor:
        hidden = features
        outputs: list[Any] = []
        for layer, skips, between in zip(self.layers, self.skips, self.between, strict=True):
            for skip in skips:
                hidden = hidden + outputs[skip]
            output = layer(hidden)
            output, positive = output if isinstance(output, tuple) else (output, None)
            outputs.append(output)
            if positive is not None:
                output = output.masked_fill(positive, 0.25)
            hidden = BETWEEN[between](self, output)
        return self.head(hidden)


class Draw(NamedTuple):
    """A network, its batches, and how it is cut into any number of stages."""

    seed: int

    @property
    def batch_size(self) -> int:
        return random.Random(self.seed + 1).randint(1, 9)

    def network(self) -> RandomNetwork:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return RandomNetwork(self.seed)

    def pipelined(self, num_stages: int) -> Pipelined:
        dice = random.Random(self.seed + 2)
        microbatches = dice.randint(1, 6)
        num_layers = len(self.network().layers) + 1
        ends = sorted(dice.randint(0, num_layers) for _ in range(num_stages - 1))
        counts = [b - a for a, b in zip([0, *ends], [*ends, num_layers], strict=True)]
        return Pipelined(counts, dice.choice(["gpipe", "1f1b"]), microbatches)


def train_networks(draws: Sequence[Draw]) -> list[Trained]:
    num_stages = int(os.environ["WORLD_SIZE"])
    return [
        fit(
            draw.network(),
            DataLoader(points(2).dataset, batch_size=draw.batch_size),
            draw.pipelined(num_stages),
        )
        for draw in draws
    ]


def test_networks_made_by_chance() -> None:
    draws = [Draw(seed) for seed in some(range(100, 116), 8)]
    (expected,) = run_ranks(train_networks, 1, draws)
    for num_stages in (2, 3):
        for rank in run_ranks(train_networks, num_stages, draws):
            for draw, found, wanted in zip(draws, rank, expected, strict=True):
                assert_same_bits(found, wanted, f"{draw}, {draw.pipelined(num_stages)}")
