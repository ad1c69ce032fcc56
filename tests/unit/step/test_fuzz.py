"""Random programs train the bits of a plain loop, and none hangs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_pipeshift.plan.schedule.actions import Kind
from lightning_pipeshift.runtime.comm.messages import Key, Place
from lightning_pipeshift.runtime.comm.messages import Kind as MessageKind
from lightning_pipeshift.runtime.ownership.weight_versions import WeightVersions
from lightning_pipeshift.step.asynchronous_engine import AsynchronousEngine
from lightning_pipeshift.step.engine import Engine
from lightning_pipeshift.values.placed_layer import PlacedLayer
from tests.unit.step import fuzz, fuzz_asynchronous
from tests.unit.step.fuzz import Outcome, check, checked, shrunk
from tests.unit.step.programs import Block, Program, random_program
from tests.unit.step.together import Hang, StageError, Stages

PROGRAMS, PARTS = 300, 6
Check = Callable[[Program], Outcome]


# In an asynchronous schedule no gradient may go to a later stage, as it does in many programs.
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize(
    ("part", "check", "share"),
    [
        *((part, check, 0.8) for part in range(PARTS)),
        *((part, fuzz_asynchronous.check, 0.4) for part in range(PARTS // 3)),
    ],
)
def test_random_programs_train_the_bits_of_a_plain_loop(
    part: int, check: Check, share: float
) -> None:
    kinds: Counter[str] = Counter()
    num_suspended = 0
    for seed in range(part, PROGRAMS, PARTS):
        _, outcome = checked(seed, check)
        kinds[outcome.kind] += 1
        num_suspended += outcome.num_suspended
        if outcome.is_fault:
            program, outcome = shrunk(random_program(seed), outcome, check=check)
            pytest.fail(f"seed {seed} {outcome.kind}:\n{program}\n{outcome.text}")
    # Few programs are refused or no program at all: a fuzzer of these would find nothing.
    assert kinds["same"] > share * PROGRAMS / PARTS
    assert num_suspended > PROGRAMS / PARTS


def program(
    *body: Any,
    layers: str,
    owners: tuple[int, ...],
    rows: tuple[int, ...] = (2,),
    tied: tuple[tuple[int, int], ...] = (),
) -> Program:
    """A program by hand."""
    return Program(1, max(owners) + 1, tuple(layers.split()), owners, tied, (), rows, body)


# What the fuzzer has found, made smaller.
FOUND = {
    "a tied weight that another stage used twice, and then its owner": program(
        "x = self.layers[1](self.layers[1](x0))",
        "x = self.layers[0](x)",
        "return x.pow(2).mean()",
        layers="Linear Linear",
        owners=(0, 1),
        tied=((0, 1),),
    ),
    "a user's function, whose result another stage uses for nothing": program(
        "x = self.layers[0](x0)",
        "y, z = Mixed.apply(x, x0)",
        "unused = self.layers[1](y)",
        "return self.layers[2](x0).pow(2).mean()",
        layers="Linear Linear Linear",
        owners=(0, 1, 0),
    ),
    "a draw behind an operation on what an earlier step has kept": program(
        "x = self.layers[0](x0)",
        "self.queue.append(x.detach())",
        "x = x + sum(old.mean() for old in self.queue)",
        "return self.layers[1](F.dropout(x, 0.2)).pow(2).mean()",
        layers="Linear Linear",
        owners=(0, 1),
        rows=(2,),
    ),
    "a weight of another stage, used without a gradient": program(
        # `matmul` folds its first argument where the second one needs a gradient, even so.
        "x = self.layers[1](x0).detach()",
        "x = x.transpose(1, 2).contiguous().transpose(1, 2)",
        Block("with torch.no_grad():", ("y = F.linear(x, self.layers[0].weight)",)),
        "return self.layers[2](y).pow(2).mean()",
        layers="Linear Linear Linear",
        owners=(0, 1, 1),
    ),
    "a microbatch without a loss, whose value another stage has used": Program(
        10283,  # also draws the schedules, and which of them overlap
        2,
        ("Linear", "Partly", "Linear", "Linear", "Norm"),
        (0, 1, 1, 0, 1),
        (),
        (1,),
        (2, 1, 2, 2),
        (
            "x2 = self.layers[1](x0)",
            "x6 = torch.maximum(x2, x2)",
            "x7 = self.layers[4](x6)",
            "x10 = self.layers[0](self.layers[0](x2 * 0.4))",
            "x13 = self.layers[1](x10)",
            Block("if turn == 1:", ("return None",)),
            "x18 = self.layers[0](x7.cumsum(1))",
            "return x6.mean() + x18.pow(2).mean() + x18.mean()",
        ),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_the_fuzzer_found(name: str) -> None:
    for order in range(3):
        outcome = check(FOUND[name], order)
        assert outcome.kind == "same", f"{outcome.reason}\n{outcome.text}"


def test_a_gradient_to_a_later_stage_is_known_behind_another_backward() -> None:
    # The stages would wait for each other without an end.
    given = program(
        "x = self.layers[0](x0)",
        "y = self.layers[1](x)",
        "z = y.detach().requires_grad_()",
        "slope = torch.autograd.grad(self.layers[2](z).pow(2).sum(), z)[0]",
        "return self.layers[0](y + slope).pow(2).mean()",
        layers="Linear Linear Act",
        owners=(1, 0, 0),
        rows=(2, 2, 2),
    )
    outcome = fuzz_asynchronous.check(given)
    assert outcome.kind == "refused", outcome.text
    assert "needs a gradient of stage 0" in outcome.text


REFUSED = {
    "a value is written that the way back of an unused value needs": (
        program(
            "x = self.layers[0](x0)",
            "unused = self.layers[2](self.layers[1](x))",
            "x.mul_(1.3)",
            "return x.mean()",
            layers="Norm Linear Linear",
            owners=(1, 1, 0),
        ),
        "the loss does not depend on",
    ),
    "a view gets a gradient, and its base had none": (
        program(
            "y = x0 * 1.3",
            "x = self.layers[1](x0)",
            "y.masked_fill_(x > 1, 1.3)",
            "y[:, :2].mul_(x[:, 2:])",
            "return self.layers[0](y).mean()",
            layers="Linear Linear",
            owners=(0, 1),
        ),
        "Write into the whole tensor",
    ),
    "a view is written of a value that another stage has used before its owner uses it again": (
        program(
            "x = self.layers[0](x0)",
            "unused = self.layers[1](x)",
            "y = self.layers[2](x)",
            "v = x[:, 1:3]",
            "v *= 0.24",
            "return self.layers[2](x).pow(2).mean() + y.mean()",
            layers="Conv Linear Linear",
            owners=(0, 1, 0),
        ),
        "Use an operation that returns a new tensor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_fuzzer_found_is_refused_with_advice(name: str) -> None:
    refused, advice = REFUSED[name]
    outcome = check(refused)
    assert outcome.kind == "refused", f"{outcome.reason}\n{outcome.text}"
    assert advice in outcome.text


def _runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_may_begin", lambda *_: True)


def _keeps_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(self: Any, flight: Any) -> Any:
        todo = flight.todo
        return plain(self, flight) if todo and todo[0].kind is Kind.BACKWARD else iter(())

    plain = Engine._backwards
    monkeypatch.setattr(Engine, "_backwards", backwards)


def _keeps_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightVersions, "_kept", lambda _: [])


def _waits_for_what_cannot_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsynchronousEngine, "_require_no_gradient_to_later", lambda *_: None)


@pytest.mark.parametrize(
    ("fault", "kinds", "check"),
    [
        (_runs_ahead, {"differs", "fails"}, check),
        (_keeps_the_order, {"hangs"}, check),
        (_keeps_no_weights, {"differs"}, fuzz_asynchronous.check),
        (_waits_for_what_cannot_come, {"hangs"}, fuzz_asynchronous.check),
    ],
)
def test_faults_of_the_core_are_found(
    fault: Callable[[pytest.MonkeyPatch], None],
    kinds: set[str],
    check: Check,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    assert any(checked(seed, check)[1].kind in kinds for seed in range(PROGRAMS))


def test_a_tied_weight_that_moves_away_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tied = program(
        "return self.layers[2](self.layers[1](self.layers[0](x0))).pow(2).mean()",
        layers="Linear Linear Linear",
        owners=(0, 0, 1),
        tied=((0, 1),),
    )
    monkeypatch.setattr(
        fuzz, "owners_of", lambda _, steps: [(0, 0, 1), *((1, 0, 1),) * (steps - 1)]
    )
    outcome = check(tied)
    assert outcome.kind == "same", outcome.text
    monkeypatch.setattr(PlacedLayer, "forget_owners", lambda _: None)
    assert check(tied).kind == "differs"


KEY, PLACE = Key(0, 1, 0, MessageKind.VALUE, 0, 1), Place("layer", 0, "model.py:1")


def test_stages_that_wait_for_each_other_are_told_at_once() -> None:
    stages = Stages(2, seed=0)

    def work(stage: int) -> None:
        stages.mailboxes[stage].take(KEY._replace(source=1 - stage), PLACE)

    with pytest.raises(StageError, match=r"stage 0 is at `layer` .* stage 1 is at `layer`") as told:
        stages.run(work)
    assert isinstance(told.value.cause, Hang)


def test_a_write_before_a_flush_is_seen_by_the_receiver() -> None:
    def received(flushes: bool) -> list[float]:
        stages = Stages(2, seed=0, yields=0)

        def work(stage: int) -> list[float]:
            mailbox = stages.mailboxes[stage]
            if stage:
                found: list[float] = mailbox.take(KEY, PLACE).tensor(torch.float32, (400,)).tolist()
                return found
            x = torch.ones(400)
            mailbox.send(1, KEY, PLACE, x)
            if flushes:
                mailbox.flush()
            x.zero_()
            return []

        return stages.run(work)[1]

    assert received(flushes=True) == [1.0] * 400
    assert received(flushes=False) == [0.0] * 400


def test_a_failing_program_is_made_smaller() -> None:
    def fails(smaller: Program) -> Outcome:
        return Outcome("fails" if "softmax" in str(smaller) else "same", "softmax")

    large = next(one for one in map(random_program, range(100)) if "softmax" in str(one))
    small, _ = shrunk(large, fails(large), check=fails)
    assert len(small.lines()) == 3
