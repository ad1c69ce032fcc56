"""``MemoryCompression`` in an asynchronous pipeline, and the memory of its weights and moves."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader

from lightning_pipeshift import KeepAll, MemoryCompression
from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.inputs.saved_tensors import BEHIND
from lightning_pipeshift.plan.schedule.asynchronous import shared_copies, weight_versions
from lightning_pipeshift.runtime.comm.messages import Message
from lightning_pipeshift.runtime.planning import move_parts
from lightning_pipeshift.testing.ranks import run_ranks
from tests.cases import by_turns, some
from tests.end_to_end import test_asynchronous
from tests.end_to_end.test_memory_compression import POLICIES, Between, Block, Trains
from tests.features_models import AwaitsPlanning, built, quiet_trainer
from tests.living_bytes import room_bytes
from tests.models import is_held

WIDTH, SAMPLES, NUM_BATCHES = 64, 16, 14

SCHEDULES = {"async": 1, "async-2bw": 3}
"""And how many minibatches make an update."""


class Moves(L.Callback):
    """Asks for other splits.

    Args:
        wanted: the layers of each stage, by the batch after which they are wanted.
    """

    # By measured links, layers would move in other parts in each run.
    at_once = True

    def __init__(self, wanted: Mapping[int, Sequence[int]]) -> None:
        self._wanted = dict(wanted)

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        counts = self._wanted.get(others[-1])
        if counts is not None:
            coming = trainer.strategy.pipeline.coming_plan
            plan = coming.with_placement(Placement((tuple(counts),)))
            trainer.strategy.adopt(plan, self.at_once)


class Validates(Trains):
    """Also validates, which drains the pipeline."""

    def validation_step(self, batch: Any) -> None:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        self.log("validation", F.cross_entropy(self.head(x), y))


class Result(NamedTuple):
    state: dict[str, Tensor]
    metrics: dict[str, float]
    figures: dict[str, float]
    counts: tuple[int, ...]
    swapped: set[int]
    """The numbers of the tensors that the plan swaps."""
    room: int


def train(
    compression: Mapping[str, Any] | None = None,
    schedule: str = "async",
    moves: Mapping[int, Sequence[int]] | None = None,
    callbacks: Sequence[L.Callback] = (),
    module: type[L.LightningModule] = Validates,
    accumulated: int | None = None,
    validates: int = 5,
    **how: Any,
) -> Result:
    """Trains on all ranks, with dropout; drains in the middle and at the end of each epoch."""
    L.seed_everything(3, verbose=False)
    generator = torch.Generator().manual_seed(1)
    batches: Any = [
        (
            torch.randn(SAMPLES, WIDTH, generator=generator),
            torch.randint(4, (SAMPLES,), generator=generator),
        )
        for _ in range(NUM_BATCHES)
    ]
    loader = DataLoader(batches, batch_size=None)
    model = built(module)
    strategy = {"schedule": schedule, "partition": "uniform", "profile_steps": 0, **how}
    trainer = quiet_trainer(
        {"devices": int(os.environ["WORLD_SIZE"]), "pipeshift": strategy},
        accumulate_grad_batches=accumulated or SCHEDULES[schedule],
        max_epochs=2,
        val_check_interval=validates,
        callbacks=[Moves(moves or {}), *callbacks],
        plugins=[MemoryCompression(**compression)] if compression is not None else [],
    )
    trainer.fit(model, loader, loader)
    found: Any = trainer.strategy
    swaps = found.plan.swapped(found.virtual_machine)
    return Result(
        {name: value.detach().clone() for name, value in model.state_dict().items()},
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        found.memory_figures if compression is not None else {},
        found.plan.placement.counts[0],
        {number for swap in swaps for number in swap.tensors},
        room_bytes(found) if compression is not None else 0,
    )


def train_each(runs: Sequence[dict[str, Any]]) -> list[Result]:
    return [train(**run) for run in runs]


def on_ranks(num_ranks: int, runs: Sequence[dict[str, Any]]) -> list[list[Result]]:
    """The results of all ranks, by run."""
    return [list(found) for found in zip(*run_ranks(train_each, num_ranks, runs), strict=True)]


def require_same(found: Sequence[Result], expected: Sequence[Result], what: str = "") -> None:
    for mine, theirs in zip(found, expected, strict=True):
        for name, value in theirs.state.items():
            assert torch.equal(mine.state[name], value), (what, name)
        assert mine.metrics == theirs.metrics, what


# --- nothing that is computed changes ---


@pytest.mark.parametrize("moves", [None, {2: [1, 3, 3], 6: [4, 1, 2]}], ids=["still", "moving"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_policy_changes_a_bit(schedule: str, moves: Any) -> None:
    """Tensors of several minibatches are elsewhere at once, and layers move meanwhile."""
    given = {"schedule": schedule, "moves": moves}
    policies = by_turns(POLICIES, 2 * list(SCHEDULES).index(schedule) + (moves is None), 3)
    wishes = [None, *(POLICIES[name] for name in policies)]
    runs = [{"compression": wish, **given} for wish in wishes]
    plain, *compressed = on_ranks(3, [*runs, {"recompute": "full", **given}])
    *compressed, recomputed = compressed
    assert plain[0].counts == ((4, 1, 2) if moves else (3, 2, 2))
    require_same(recomputed, plain, "recompute")
    for name, found in zip(policies, compressed, strict=True):
        require_same(found, plain, name)
        moved_bytes = sum(one.figures["moved_bytes"] for one in found)
        assert bool(moved_bytes) == (name != "again"), name


def test_what_code_between_layers_saves_moves_too_once_it_is_measured() -> None:
    # Code between layers counts for the layer before it.
    module, first = Between, BEHIND
    how = {"module": module, "profile_steps": 4, "callbacks": [AwaitsPlanning()]}
    plain, found = on_ranks(2, [how, {"compression": POLICIES["host"], **how}])
    require_same(found, plain)
    assert {first, first + 1} <= found[0].swapped


def test_one_stage_and_two_virtual_machines() -> None:
    for num_ranks, how in ((1, {}), (4, {"virtual_machines": 2})):
        runs: list[dict[str, Any]] = [{}, {"compression": POLICIES["host"]}]
        plain, found = on_ranks(num_ranks, [run | how for run in runs])
        require_same(found, plain)
        assert sum(one.figures["moved_bytes"] for one in found) > 0


def train_sharing(schedule: str) -> list[dict[str, Tensor]]:
    """What a run without the plugin, and those with some policies, make of shared parameters."""
    case = test_asynchronous.Case(
        [2, 2, 2], schedule, SCHEDULES[schedule], validates=7, shares=True, num_epochs=1
    )
    wishes: Any = some(POLICIES.values(), 2)
    plugins = [[], *([MemoryCompression(**wish)] for wish in wishes)]
    return [test_asynchronous.train(case, plugins=each).state for each in plugins]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tied_weights_and_a_parameter_of_code_between_layers(schedule: str) -> None:
    for plain, *others in run_ranks(train_sharing, 3, schedule):
        for found in others:
            assert all(torch.equal(found[name], value) for name, value in plain.items())


# --- budgets ---


def weight_bytes(num_blocks: int) -> int:
    return num_blocks * sum(p.numel() * p.element_size() for p in Block().parameters())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_budget_counts_every_version_of_the_weights(schedule: str) -> None:
    """Weights in as many versions as the schedule keeps, gradients, and Adam's two averages."""
    ((first, second, _),) = on_ranks(
        3, [{"compression": {"budget": 1e8, "policy": KeepAll()}, "schedule": schedule}]
    )
    payload = SAMPLES * WIDTH * 4
    # Where gradients are accumulated, those of one minibatch are beside them.
    num_others = 3 if schedule == "async" else 4
    for one, num_blocks, num_versions, passing in (
        (first, 3, 3 if schedule == "async" else 2, 2 * payload),
        (second, 2, 2, 5 * payload),
    ):
        static = 1e8 - one.figures["budget_bytes"] - passing - one.room
        assert static == (num_versions + num_others) * weight_bytes(num_blocks)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_budget_is_kept_on_every_stage_and_costs_no_bit(schedule: str) -> None:
    (plain,) = on_ranks(
        3, [{"compression": {"policy": KeepAll(), "budget": 1e8}, "schedule": schedule}]
    )
    first = plain[0].figures
    budget = 1e8 - first["budget_bytes"] + 0.6 * first["peak_bytes"]
    runs = [
        {"compression": {"budget": budget, "host_budget": host_budget}, "recompute": recompute}
        for host_budget, recompute in (("auto", "auto"), (0, "auto"), ("auto", "none"))
    ]
    for found in on_ranks(3, [{"schedule": schedule, **run} for run in runs]):
        require_same(found, plain)
        for one in found:
            assert 0 < one.figures["peak_bytes"] <= one.figures["budget_bytes"]
        assert found[0].figures["budget_bytes"] == int(0.6 * first["peak_bytes"])


def test_a_budget_that_nothing_can_meet_says_what_would() -> None:
    wish = {"budget": weight_bytes(3) * 5}
    outcomes = run_ranks(train, 3, wish, expect_failure=True)
    error = next(outcome for outcome in outcomes if outcome.error_type == "BudgetError")
    assert "for 3 versions of the weights, gradients" in error.message
    assert "schedule='async-2bw', which keeps 2 versions" in error.message
    needed = re.search(r"a budget of ([\d.]+) MB would do", error.message)
    assert needed is not None, error.message
    found, plain = on_ranks(3, [{"compression": {"budget": float(needed[1]) * 1e6}}, {}])
    require_same(found, plain)


def test_a_budget_follows_layers_that_move() -> None:
    wish = {"budget": 1e8, "policy": KeepAll()}
    moved, stayed = on_ranks(
        3,
        [
            {"compression": wish, "moves": {2: [1, 3, 3], 6: [4, 1, 2]}},
            {"compression": wish, "partition": [4, 1, 2]},
        ],
    )
    for mine, theirs in zip(moved, stayed, strict=True):
        assert mine.counts == theirs.counts
        assert mine.figures["budget_bytes"] == theirs.figures["budget_bytes"]


class Seen(Moves):
    """Notes the counts in force at the end of each batch, and what is refused."""

    at_once = False

    def __init__(self, wanted: Mapping[int, Sequence[int]]) -> None:
        super().__init__(wanted)
        self.counts: list[tuple[int, ...]] = []
        self.error = ""

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        try:
            super().on_train_batch_end(trainer, *others)
        except PlanError as error:
            self.error = str(error)
        self.counts.append(trainer.strategy.plan.placement.counts[0])


def move_within(
    budgets: Sequence[float], split: list[int], moves: Mapping[int, Sequence[int]]
) -> list[tuple[Result, list[Any], str]]:
    """Runs with budgets; links are no reason to move layers in parts."""
    move_parts._PART_OF_STEP = float("inf")  # type: ignore[misc]
    found = []
    for budget in budgets:
        seen = Seen(moves)
        how: Any = {"schedule": "async-2bw", "partition": split, "callbacks": [seen]}
        result = train({"budget": budget}, **how)
        found.append((result, list(dict.fromkeys(seen.counts)), seen.error))
    return found


def test_with_little_memory_layers_move_in_parts_or_not_at_all() -> None:
    """Of a layer, each stage holds two versions of the weights, two gradients and Adam's averages,
    and more than three layers do not fit.
    """
    budgets = [1e8, 21 * weight_bytes(1)]
    # The second stage would have four layers, or gives one away when it gets one.
    for large, small in run_ranks(move_within, 3, budgets, [3, 2, 2], {4: [1, 3, 3]}):
        assert large[1] == [(3, 2, 2), (1, 3, 3)]
        assert small[1] == [(3, 2, 2), (2, 2, 3), (1, 3, 3)]
        require_same([small[0]], [large[0]])
    # Both plans fit, but it would have four layers meanwhile.
    first, *others = run_ranks(move_within, 3, budgets, [2, 3, 2], {4: [1, 3, 3]})
    who = "stage 1 of virtual machine 0 (one replica of the pipeline)"
    assert f"while layers move, {who} would hold" in first[1][2]
    assert not first[0][2]
    for large, small in (first, *others):
        assert (large[1], small[1]) == ([(2, 3, 2), (1, 3, 3)], [(2, 3, 2)])
        require_same([small[0]], [large[0]])


# --- the memory of weights ---


class Memory(NamedTuple):
    """Bytes on one rank: of the weights that it owns, of all versions of weights, of the
    optimizer's state, and of gradients at most since the batch before.
    """

    owned: int
    weights: int
    state: int
    gradients: int


class Alive:
    """The memory of tensors until it is freed, whoever refers to it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, tensor: Tensor) -> None:
        """Follows a tensor's memory."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self._known[reference.cdata] = reference, storage.nbytes()

    @property
    def num_bytes(self) -> int:
        """Of those that are not freed."""
        self._known = {key: one for key, one in self._known.items() if not one[0].expired()}
        return sum(size for _, size in self._known.values())


class Living(L.Callback):
    """Follows the memory of weights, of the optimizer's state and of gradients; counts what is
    alive at the end of each batch.
    """

    def __init__(self) -> None:
        self.found: list[Memory] = []
        self._weights, self._state, self._gradients = Alive(), Alive(), Alive()
        self._most_gradients = 0
        self._heard: set[int] = set()

    def _note_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._gradients.add(parameter.grad)
        self._most_gradients = max(self._most_gradients, self._gradients.num_bytes)

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        for parameter in module.parameters() if self.found else ():
            if is_held(parameter) and id(parameter) not in self._heard:
                self._heard.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        # The newest version of each weight: older ones have been seen when they were that.
        held = [p for p in module.parameters() if is_held(p)]
        state = trainer.optimizers[0].state
        for parameter in held:
            self._weights.add(parameter)
            for value in state.get(parameter, {}).values():
                self._state.add(value)
        owned = sum(p.nbytes for p in held)
        self.found.append(
            Memory(owned, self._weights.num_bytes, self._state.num_bytes, self._most_gradients)
        )
        self._most_gradients = 0


def living(**how: Any) -> list[Memory]:
    """The memory of this rank at the end of each batch of a run."""
    watches = Living()
    train(callbacks=[watches], **how)
    return watches.found


NUM_VERSIONS = [
    ("async", 1, [4, 3, 2, 1]),
    ("async", 2, [3, 2, 2, 1]),
    ("async", 3, [2, 2, 2, 1]),
    ("async-2bw", 4, [2, 2, 2, 2]),
]


@pytest.mark.parametrize(
    ("schedule", "accumulated", "num_versions", "compression"),
    some(
        [(*each, wish) for each in NUM_VERSIONS for wish in (None, {"policy": KeepAll()})],
        6,
    ),
)
def test_a_stage_holds_what_the_planner_counts(
    schedule: str, accumulated: int, num_versions: list[int], compression: Any
) -> None:
    """As many versions of its weights as are in flight, and as many copies of its gradients."""
    how: Any = {"schedule": schedule, "accumulated": accumulated, "validates": NUM_BATCHES}
    ranks = run_ranks(living, 4, compression=compression, partition=[2, 2, 1, 2], **how)
    for most, found in zip(num_versions, ranks, strict=True):
        owned = found[0].owned
        assert found[0].weights == owned
        assert max(one.weights for one in found) == most * owned
        assert max(one.gradients for one in found) == (1 + (accumulated > 1)) * owned
        if accumulated == 1:
            # From where the pipeline is full until it drains.
            assert {one.weights for one in found[5 : NUM_BATCHES - 1]} == {most * owned}


def most_received(cases: Sequence[test_asynchronous.Case]) -> list[int]:
    """For each run, how many copies of the tied weights this stage had received at most."""
    tensor, alive = Message.tensor, Alive()
    size, most = test_asynchronous.WIDTH**2 * 4, 0

    def counted(message: Message, *args: Any) -> Any:
        nonlocal most
        found = tensor(message, *args)
        if isinstance(found, Tensor) and found.shape == 2 * (test_asynchronous.WIDTH,):
            alive.add(found)
        most = max(most, alive.num_bytes // size)
        return found

    Message.tensor = counted  # type: ignore[assignment,method-assign]
    numbers = []
    for case in cases:
        most, alive = 0, Alive()
        test_asynchronous.train(case)
        numbers.append(most)
    return numbers


def test_the_planner_counts_copies_of_tied_weights() -> None:
    """The first stage that has the weights trains them, and gets their gradients; the other one has
    a copy for each minibatch in flight.
    """
    kinds = [("async", 1), ("async", 2), ("async-2bw", 4)]
    cases = [
        test_asynchronous.Case([2, 2, 1, 1], *kind, shares=True, num_batches=24) for kind in kinds
    ]
    first, _, other, _ = run_ranks(most_received, 4, cases)
    assert first == [1, 1, 1]
    for kind, found in zip(kinds, other, strict=True):
        pipeline = kind[0], 4, kind[1]
        # In place of the versions and the gradient that the planner counts of all other weights.
        copies, versions = shared_copies(*pipeline)[2][1], weight_versions(*pipeline)[2]
        assert found <= copies + versions - 1
        assert found == 2


def test_a_move_frees_weights_and_optimizer_state_at_the_old_owner() -> None:
    """On each stage, in the end, there is as much as if the layers had always been there."""
    split, after = [3, 2, 2], [1, 2, 4]
    moved = run_ranks(living, 3, moves={6: after}, partition=split)
    stayed = run_ranks(living, 3, partition=after)
    for mine, theirs in zip(moved, stayed, strict=True):
        assert mine[-1] == theirs[-1]
    source, target = moved[0], moved[2]
    # The optimizer keeps two averages, and counts its steps in a number for each parameter.
    assert source[4].state == pytest.approx(2 * weight_bytes(3), rel=0.01)
    assert source[-1].state == pytest.approx(2 * weight_bytes(1), rel=0.01)
    assert source[-1].weights == 3 * source[-1].owned == 3 * weight_bytes(1)
    # While minibatches of both are in flight, both have the layers.
    shared = [a.owned + b.owned for a, b in zip(source, target, strict=True)]
    assert max(shared) > shared[0] == shared[-1]
