"""Ranks of one host that send tensors through memory that both can reach, as GPUs of one host do.
Files in memory stand in for the GPUs' memory, and each rank is a process of its own.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor

from lightning_pipeshift import Move, PipelineTimeline
from lightning_pipeshift.devices.shared_memory import address_here, opened
from lightning_pipeshift.lightning import connection
from lightning_pipeshift.runtime.comm import memory_link
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import Diary, built, parameters_of, quiet_trainer
from tests.models import SmallLanguageModel, sentences
from tests.sent_bytes import count_bytes

NUM_STEPS = 6
# The bytes of the embedding, and of a batch's values between two blocks.
EMBEDDING, PAYLOAD = 37 * 16 * 4, 8 * 9 * 16 * 4
# Those of a trial at the start, with each rank.
TRIAL = 64


class Tied(SmallLanguageModel):
    """The head has the embedding's weight; the largest parameter by far."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Moves(L.Callback):
    """Asks for a move of the first stage's last layer, and later for its way back."""

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, n: int) -> None:
        if n in (0, 2):
            trainer.strategy.migrate(Move(layer="blocks.1", stage=int(n == 0)))


class Dies(L.Callback):
    """Ends the second rank without a word."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, n: int) -> None:
        if n == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Result(NamedTuple):
    """What a rank has trained, logged, and sent."""

    parameters: dict[str, Tensor]
    diary: list[Any]
    sent: Counter[str]


def train(
    shares: bool,
    how: Mapping[str, Any],
    callbacks: Sequence[L.Callback] = (),
    num_steps: int = NUM_STEPS,
    **arguments: Any,
) -> Result:
    L.seed_everything(7, verbose=False)
    torch.set_num_threads(1)
    if shares:
        vars(connection)["payload_address"] = address_here
    sent, diary = count_bytes(), Diary()
    strategy = {"microbatches": 3, "schedule": "1f1b", "partition": "uniform", **how}
    trainer = quiet_trainer(
        {"devices": int(os.environ["WORLD_SIZE"]), "pipeshift": strategy},
        callbacks=[*callbacks, diary],
        max_epochs=1,
        limit_train_batches=num_steps,
        **arguments,
    )
    module = built(Tied)
    trainer.fit(module, sentences(num_steps), sentences(3))
    return Result(parameters_of(module), diary.entries, sent)


class Case(NamedTuple):
    """A run. Payloads cross a boundary in each step, and in three batches of validation."""

    num_ranks: int = 2
    how: Mapping[str, Any] = {}
    arguments: Mapping[str, Any] = {}
    callbacks: tuple[L.Callback, ...] = ()


CASES = {
    "1f1b": Case(),
    "gpipe": Case(how={"schedule": "gpipe", "microbatches": 4}),
    "eager_1f1b": Case(how={"schedule": "eager_1f1b"}),
    "three stages": Case(3),
    "a move": Case(callbacks=(Moves(),)),
    "a timeline": Case(callbacks=(PipelineTimeline(every_n_steps=1, folder="timeline"),)),
    "clipping": Case(arguments={"gradient_clip_val": 0.05}),
    "accumulation": Case(arguments={"accumulate_grad_batches": 2}),
    "virtual machines": Case(4, {"virtual_machines": 2}),
}


@pytest.mark.parametrize("shares", [False, True], ids=["sent", "shared memory"])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_one_stage(name: str, shares: bool) -> None:
    case = CASES[name]
    alone = {**case.how}
    vms = alone.get("virtual_machines", 1)
    (expected, *_) = run_ranks(train, vms, False, alone, **case.arguments)
    results = run_ranks(train, case.num_ranks, shares, case.how, case.callbacks, **case.arguments)
    for result in results:
        for key, value in expected.parameters.items():
            assert torch.equal(result.parameters[key], value), key
        if name != "a timeline":
            # It logs figures of its own.
            assert result.diary == expected.diary
        assert bool(result.sent["gloo"]) is not shares
        assert bool(result.sent["memory"]) is shares


@pytest.mark.parametrize("schedule", ["async", "async-2bw"])
def test_asynchronous_pipelines_train_the_same_bits_either_way(schedule: str) -> None:
    how = {"schedule": schedule, "microbatches": 1}
    arguments: dict[str, Any] = {"accumulate_grad_batches": 1 + (schedule == "async-2bw")}
    sent, shared = (run_ranks(train, 2, shares, how, **arguments) for shares in (False, True))
    for one, other in zip(sent, shared, strict=True):
        assert other.sent["memory"]
        assert not other.sent["gloo"]
        for key, value in one.parameters.items():
            assert torch.equal(other.parameters[key], value), key


def train_with_copies(how: Mapping[str, Any]) -> Result:
    """Opening memory of another process gives a copy of it, as some kinds of devices do."""
    vars(memory_link)["opened"] = lambda *args: opened(*args).clone()
    return train(True, how)


def test_memory_that_is_only_copied_is_not_taken_for_shared() -> None:
    (expected,) = run_ranks(train, 1, False, {})
    for result in run_ranks(train_with_copies, 2, {}):
        assert result.sent["gloo"]
        assert result.sent["memory"] == TRIAL
        for key, value in expected.parameters.items():
            assert torch.equal(result.parameters[key], value), key


@pytest.mark.parametrize(
    ("precision", "part"), [("32-true", 1.0), ("bf16-true", 0.5)], ids=["float32", "bfloat16"]
)
def test_a_shared_gradient_crosses_once_in_each_direction(precision: str, part: float) -> None:
    """In its own type; and nothing else crosses but the payloads and their gradients."""
    first, second = run_ranks(train, 2, True, {}, precision=precision)
    # Plain Lightning adds up a shared weight's gradients within each microbatch before it goes on
    # to the next one. So do stages; what comes back is the sum of all.
    num_parts = 3
    step = PAYLOAD + EMBEDDING
    assert first.sent["memory"] == part * (NUM_STEPS * step + 3 * PAYLOAD) + TRIAL
    step = PAYLOAD + num_parts * EMBEDDING
    assert second.sent["memory"] == part * NUM_STEPS * step + TRIAL


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", 3), ("gpipe", 4)])
def test_buffers_are_used_again(schedule: str, most: int) -> None:
    """As many as payloads, at most, are on their way to a stage that does not look yet."""
    how = {"schedule": schedule, "microbatches": 4}
    first, second = run_ranks(train, 2, True, how, num_steps=12)
    for result in (first, second):
        assert result.sent["messages"] > 12 * 4
    # For payloads, or their gradients; and one for shared gradients, and one for the trial. The
    # payloads of the three batches of validation are larger.
    assert first.sent["buffers"] <= most + 3 + 2
    # A shared gradient goes with the gradient of each payload.
    assert second.sent["buffers"] <= 2 * most + 2


def test_a_rank_that_dies_ends_the_other() -> None:
    first, second = run_ranks(train, 2, True, {}, (Dies(),), expect_failure=True)
    assert second.error_type == "Died"
    assert first.error_type == "StageFailedError"
