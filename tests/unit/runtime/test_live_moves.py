"""Moves of layers in an asynchronous pipeline, in very many orders in which its stages and the
threads of the moves can advance.

The runtime's own classes decide when weights are sent, taken and freed, and when each stage goes
on. The network, threads and compute are stand-ins: an update adds 1 to a weight, so a weight is its
own version.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_pipeshift.model.parameters.gradients import Gradients
from lightning_pipeshift.model.parameters.uses import parameter_uses
from lightning_pipeshift.plan.schedule.actions import Kind, Row
from lightning_pipeshift.plan.schedule.cut_over import cut_over
from lightning_pipeshift.runtime.comm.lane import Subject
from lightning_pipeshift.runtime.gradients.late_updates import LateUpdates
from lightning_pipeshift.runtime.ownership import transfers
from lightning_pipeshift.runtime.ownership.changes import Changes
from lightning_pipeshift.runtime.ownership.holdings import Holdings
from lightning_pipeshift.runtime.ownership.migration import Migration, Turn
from lightning_pipeshift.runtime.ownership.weight_versions import InFlight, WeightVersions
from lightning_pipeshift.step.minibatches import Minibatches
from tests.asynchronous_reference import _ends_of_groups, _newest
from tests.cases import some
from tests.unit.runtime.interleaving import Condition, Interleaving, Network, Queue, Threads

CPU = torch.device("cpu")

Stages = tuple[int, ...]
"""The stage of each layer."""


class Case(NamedTuple):
    """One run.

    Args:
        stage_of: at the start.
        moves: the stages of the layers that are asked for in front of a minibatch: one after
            another, in place of those that have not begun.
        num_stages: of the pipeline.
        epochs: how many minibatches each epoch has.
        delays: whether it is ``async-2bw``.
        num_accumulated: how many minibatches make an update.
        validates: the minibatches in front of which the pipeline drains within an epoch.
    """

    stage_of: Stages
    moves: Mapping[int, Sequence[Stages]]
    num_stages: int
    epochs: tuple[int, ...]
    delays: bool = False
    num_accumulated: int = 1
    validates: frozenset[int] = frozenset()


class Counts(torch.optim.Optimizer):
    """Adds 1 to each weight that has a gradient, and counts its steps for each."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Ignores the closure."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(1.0)
                    state = self.state[parameter]
                    state["num_steps"] = state.get("num_steps", torch.zeros(())) + 1


class Lane:
    """A lane of one stage."""

    def __init__(self, network: Network, number: int, stage: int, seen: Seen) -> None:
        self._network, self._name, self._stage = network, f"a move, lane {number}", stage
        self._sent_to: set[int] = set()
        self._acknowledged = seen.acknowledged if number == Subject.RECEIPTS else set()

    def send_object(self, message: Any, to: int) -> None:
        self._sent_to.add(to)
        self._network.send(self._name, self._stage, to, message)

    def receive_object(self, source: int) -> Any:
        message = self._network.receive(self._name, source, self._stage)
        self._acknowledged.add((self._stage, source))
        return message

    def send_tensor(self, tensor: Tensor, to: int) -> None:
        # What changes before it is taken arrives changed.
        self.send_object(tensor.detach(), to)
        self.settle()

    def receive_tensor(self, like: Tensor, source: int) -> Any:
        return self.receive_object(source).clone()

    def send_values(self, values: Any, to: int) -> None:
        self.send_object(values, to)
        self.settle()

    def receive_values(self, source: int) -> Any:
        return iter(
            {name: value.clone() for name, value in self.receive_object(source).items()}.items()
        )

    def settle(self) -> None:
        for to in self._sent_to:
            self._network.settle(self._name, self._stage, to)


class FreesByNan(Holdings):
    """A stage's tensors; what it does not hold is NaN."""

    acknowledged: set[tuple[int, int]] | None = None

    def settle(self, optimizers: Any, deferred: Any = None) -> None:
        held = {id(use.parameter) for use in self.held}
        if self.acknowledged is not None:
            freed = [
                use
                for use in self.uses
                if id(use.parameter) not in held and use.parameter.isfinite()
            ]
            owners = {self.layers[layer][1] for use in freed for layer in use.layers}
            assert self.acknowledged >= {(self.stage, owner) for owner in owners}
            self.acknowledged -= {(self.stage, owner) for owner in owners}
        for use in self.uses:
            if id(use.parameter) not in held:
                use.parameter.data = torch.full((), torch.nan)
                for optimizer in optimizers:
                    optimizer.state.pop(use.parameter, None)


class Seen:
    """What the stages have done: the same for all of them."""

    def __init__(self) -> None:
        self.placements: dict[int, dict[int, Stages]] = {}
        """By minibatch, what each stage takes for the placement in force."""
        self.used: dict[tuple[int, int], float] = {}
        """By minibatch and layer, the weight that the forward has used."""
        self.last: dict[int, tuple[float, float]] = {}
        """By layer, its last weight, and the optimizer's count, at its last owner."""
        self.cuts: list[int] = []
        """The minibatches from which other placements are in force."""
        self.acknowledged: set[tuple[int, int]] = set()
        """Old and new owner, where the new one has said that it has everything, until the old one
        frees it.
        """


class OneStage:
    """What one stage does, as :class:`Pipeline` and the asynchronous training do it."""

    def __init__(
        self, case: Case, stage: int, order: Interleaving, network: Network, seen: Seen
    ) -> None:
        self.case, self.stage = case, stage
        self._order, self._network, self._seen = order, network, seen
        self._threads = Threads(order, f"a thread of stage {stage}")
        root = nn.Module()
        self.weights = [nn.Parameter(torch.zeros(())) for _ in case.stage_of]
        root.layers = nn.ModuleList(nn.ParameterList([weight]) for weight in self.weights)
        self.optimizer = Counts(self.weights)
        channels: Any = SimpleNamespace(
            stage=stage,
            num_stages=case.num_stages,
            device=CPU,
            bulk=lambda subject: Lane(network, subject, stage, seen),
        )
        layers = list(root.layers)
        uses = parameter_uses(root, layers)
        self.holdings = FreesByNan(root, uses, layers, list(case.stage_of), channels)
        self.holdings.settle([self.optimizer])
        self.holdings.acknowledged = seen.acknowledged
        self.versions = WeightVersions(delays=case.delays)
        self.versions.follow(use.parameter for use in self.holdings.held)
        runner: Any = self
        self.minibatches = Minibatches(runner, stage, case.num_stages, self.versions)
        start: Any = self._start_moving
        self.live = Changes(start)
        self.late = LateUpdates()
        self.late.make = self._make_up_for
        self.placement = case.stage_of
        self._placements: dict[int, Stages] = {}

    def _start_moving(self, stage_of: Stages, turn: Turn) -> Migration:
        earliest = turn.number + 1
        for source, target in zip(self.placement, stage_of, strict=True):
            if source != target:
                earliest = max(earliest, cut_over(turn.number, source, min(source, target)))
        threads: Any = self._threads
        newest, num_stages = self.minibatches.newest_update, self.case.num_stages
        in_flight = InFlight(self.versions, newest, earliest, num_stages)
        move = Migration(self.holdings, stage_of, [self.optimizer], threads, in_flight)
        move.before_turn(turn)
        return move

    # --- the actions of a row ---

    def run(self, row: Row, ahead: Row) -> None:
        """Carries out a row."""
        do = {Kind.FORWARD: self._forward, Kind.BACKWARD: self._backward}
        move = self.live.migration
        for action in row:
            self.versions.begin_action(action)
            do[action.kind](action.microbatch)
            if move is not None:
                move.end_action(action)
            self.versions.end_action(action)

    def _send(self, what: str, to: int, minibatch: int) -> None:
        if 0 <= to < self.case.num_stages:
            self._network.send(what, self.stage, to, minibatch)

    def _receive(self, what: str, source: int, minibatch: int) -> None:
        if 0 <= source < self.case.num_stages:
            assert self._network.receive(what, source, self.stage) == minibatch

    def _own(self, minibatch: int) -> list[int]:
        stages = enumerate(self._placements[minibatch])
        return [layer for layer, stage in stages if stage == self.stage]

    def _forward(self, minibatch: int) -> None:
        self._receive("payload", self.stage - 1, minibatch)
        for layer in self._own(minibatch):
            assert (minibatch, layer) not in self._seen.used
            self._seen.used[minibatch, layer] = self.weights[layer].item()
        self._send("payload", self.stage + 1, minibatch)

    def _backward(self, minibatch: int) -> None:
        self._receive("gradient", self.stage + 1, minibatch)
        for layer in self._own(minibatch):
            weight = self.weights[layer]
            assert weight.item() == self._seen.used[minibatch, layer]
            weight.grad = torch.ones(()) + (0.0 if weight.grad is None else weight.grad)
        self._send("gradient", self.stage - 1, minibatch)

    # --- batches ---

    def train(self) -> None:
        """All of a run."""
        number = 0
        for length in self.case.epochs:
            for index in range(length):
                if number in self.case.validates:
                    self._drain()
                is_end = (index + 1) % self.case.num_accumulated == 0 or index + 1 == length
                self._train_on(number, is_end, index % self.case.num_accumulated + 1)
                number += 1
            self._drain()
            self.versions.begin_anew()
        for layer in self._own(number - 1) if number else ():
            count = self.optimizer.state[self.weights[layer]]["num_steps"]
            self._seen.last[layer] = self.weights[layer].item(), float(count)
        self.live.cancel()

    def _train_on(self, number: int, ends_update: bool, num_gradients: int) -> None:
        if number:
            self._take_notice(number)
            turn = Turn(number, self.versions.update, ends_update)
            plan = self.live.before_turn(turn)
            self.live.begin(turn)
            if plan is not None:
                found: Any = plan
                self.placement = found
            self.late.make_due()
        self._placements[number] = self.placement
        self._seen.placements.setdefault(number, {})[self.stage] = self.placement
        given: Any = SimpleNamespace(number=number, ends_update=ends_update, tag=num_gradients)
        finished = self.minibatches.begin(given)
        if finished is not None:
            self._finish(finished)

    def _take_notice(self, number: int) -> None:
        plans = self.case.moves.get(number, ())
        if self.stage:
            plans = self._network.receive("notices", self.stage - 1, self.stage)
        if self.stage + 1 < self.case.num_stages:
            self._network.send("notices", self.stage, self.stage + 1, plans)
            most = 2 * self.case.num_stages
            self._network.settle("notices", self.stage, self.stage + 1, most)
        if plans:
            asked: Any = plans
            self.live.request(asked)

    def _finish(self, minibatch: Any) -> None:
        if self.stage + 1 < self.case.num_stages:
            self._network.receive("reports", self.stage + 1, self.stage)
        if self.stage:
            self._network.send("reports", self.stage, self.stage - 1, None)
            self._network.settle("reports", self.stage, self.stage - 1, 2 * self.case.num_stages)
        if not minibatch.ends_update:
            return
        if self.live.migration is not None:
            self.live.migration.withhold(self.late, minibatch.tag)
        self._update(minibatch.tag, counts=True)

    def _update(self, num_gradients: int, counts: bool) -> None:
        held = [use.parameter for use in self.holdings.held]
        with self.versions.updating(held, counts):
            for parameter in held:
                # All minibatches of an update belong to one owner.
                assert parameter.grad is None or float(parameter.grad) == num_gradients
            self.optimizer.step()
        self.live.weights_are_final(self.minibatches.next)
        for parameter in held:
            parameter.grad = None

    def _make_up_for(self, tag: Any, gradients: Gradients, _: bool) -> None:
        # The gradients of an update that has begun are elsewhere meanwhile.
        aside = [(weight, weight.grad) for weight in self.weights]
        for weight in self.weights:
            weight.grad = None
        for parameter, gradient in gradients:
            parameter.grad = gradient
        self._update(tag, counts=False)
        for weight, before in aside:
            weight.grad = before

    def _drain(self) -> None:
        while self.minibatches.oldest is not None:
            finished = self.minibatches.end_one()
            self._finish(finished)
        self.minibatches.end_one()
        # The last stage's changes of user code.
        last = self.case.num_stages - 1
        if self.stage == last:
            for to in range(last):
                self._network.send("changes", last, to, None)
        else:
            self._network.receive("changes", last, self.stage)
        if self.live.migration is not None:
            self.live.migration.settle(self.minibatches.next)
        self.late.make_due()


def run(case: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Runs a case in one order, and checks what does not depend on it."""
    order, seen = Interleaving(seed), Seen()
    network = Network(order)
    with monkeypatch.context() as patch:
        stand_in = SimpleNamespace(Condition=partial(Condition, order))
        patch.setattr(transfers, "threading", stand_in)
        patch.setattr(transfers, "SimpleQueue", partial(Queue, order))
        for stage in range(case.num_stages):
            one = OneStage(case, stage, order, network, seen)
            order.start(f"stage {stage}", one.train)
        order.run()
    check(case, seen)
    return seen


def check(case: Case, seen: Seen) -> None:
    """All stages agree on the owners for each minibatch, and each weight has the version that the
    schedule says.
    """
    number, places = sum(case.epochs), [(0, case.stage_of)]
    for minibatch in range(number):
        views = seen.placements[minibatch]
        assert len(views) == case.num_stages
        (placement,) = set(views.values())
        if placement != places[-1][1]:
            places.append((minibatch, placement))
    seen.cuts = [begin for begin, _ in places[1:]]
    starts = [sum(case.epochs[:epoch]) for epoch in range(len(case.epochs) + 1)]
    drains = sorted({*starts, *case.validates})
    ends = _ends_of_groups(case.num_accumulated, starts)
    for layer in range(len(case.stage_of)):
        owners = [(begin, stage_of[layer]) for begin, stage_of in places]
        for minibatch in range(number):
            begins = starts if case.delays else drains
            first = begins[bisect_right(begins, minibatch) - 1]
            if case.delays:
                version = max(bisect_left(ends, first), bisect_left(ends, minibatch) - 1)
            else:
                newest = _newest(minibatch, owners, case.num_stages, first)
                version = bisect_right(ends, newest)
            assert seen.used[minibatch, layer] == version, (minibatch, layer)
        assert seen.last[layer] == (len(ends), len(ends))


PAIRS = [
    (num_stages, source, target)
    for num_stages in range(2, 6)
    for source in range(num_stages)
    for target in range(num_stages)
    if source != target
]


@pytest.mark.parametrize("delays", [False, True], ids=["async", "async-2bw"])
@pytest.mark.parametrize("num_stages", range(2, 6))
def test_every_pair_of_stages_in_many_orders(
    num_stages: int, delays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer moves from one stage to another, and back as soon as that is possible."""
    for of, source, target in PAIRS:
        if of != num_stages:
            continue
        stays = tuple(range(num_stages))
        there, back = (*stays, target), (*stays, source)
        for seed in some(range(4), 2):
            case = Case(
                back,
                {num_stages + seed: [there, back]},
                num_stages,
                (6 * num_stages + seed, 2 * num_stages),
                delays,
                num_stages if delays else 1 + seed % 2,
                # With two versions, where the new owner begins, if the move is downstream.
                frozenset([2 * num_stages] if seed % 2 else []),
            )
            found = run(case, seed, monkeypatch)
            first, second = found.cuts
            if case.num_accumulated == 1:
                # The last old minibatch has come back to stage 0, and the move upstream is known.
                assert second - first == num_stages + max(0, target - source)


@pytest.mark.parametrize("seed", some(range(50), 20))
def test_any_moves_in_any_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several layers at once, in both directions, one change after another."""
    draw = random.Random(seed)
    num_stages = draw.randint(2, 5)
    num_layers = draw.randint(2, 6)
    delays = draw.random() < 0.4
    epochs = tuple(draw.randint(num_stages, 6 * num_stages) for _ in range(3))

    def by_chance() -> Stages:
        return tuple(draw.randrange(num_stages) for _ in range(num_layers))

    moves: dict[int, list[Stages]] = {}
    for _ in range(draw.randint(1, 8)):
        moves.setdefault(draw.randrange(1, sum(epochs)), []).append(by_chance())
    accumulated = draw.randint(num_stages, num_stages + 2) if delays else draw.randint(1, 3)
    validates = frozenset(draw.sample(range(1, sum(epochs)), draw.choice([0, 0, 1, 3])))
    case = Case(by_chance(), moves, num_stages, epochs, delays, accumulated, validates)
    for order in range(4):
        run(case, 100 * seed + order, monkeypatch)
