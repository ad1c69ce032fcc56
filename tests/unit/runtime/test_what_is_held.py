"""The payloads that a stage holds: no more than it needs."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_pipeshift import MemoryCompression, PipeShiftStrategy, Planned, SwapAll
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.runtime.comm.messages import Key, Kind, Message, Place
from lightning_pipeshift.step.suspendable import SuspendableMicrobatch
from lightning_pipeshift.testing.ranks import LIMIT_SECONDS, run_ranks
from lightning_pipeshift.values.microbatch import Microbatch
from lightning_pipeshift.values.value import Value
from tests.features_models import AwaitsPlanning, built, quiet_trainer

# A microbatch's payload is longer than `Mailbox.room_bytes`: it travels without a copy.
WIDTH, SAMPLES, NUM_MICROBATCHES = 64, 5120, 8


class Block(nn.Module):
    """Saves its input, and does not save its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Trains(L.LightningModule):
    checkpoints = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def training_step(self, batch: Tensor) -> Tensor:
        x = batch
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x.square().mean()

    def validation_step(self, batch: Tensor) -> None:
        self.training_step(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class SavesResult(Block):
    """Saves what it returns, too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class SavesResults(Trains):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SavesResult() for _ in range(4))


class Checkpoints(Trains):
    checkpoints = True


class Count:
    """How many of some tensors are still there, at the most."""

    def __init__(self) -> None:
        self._there: list[StorageWeakRef] = []
        self.most = 0

    def add(self, tensor: Tensor) -> None:
        self._there = [one for one in self._there if not one.expired()]
        self._there.append(StorageWeakRef(tensor.untyped_storage()))
        self.most = max(self.most, len(self._there))

    def living(self) -> int:
        return sum(not one.expired() for one in self._there)

    def come_down_to(self, expected: int, memory: Any) -> None:
        """Waits for copies that free some of them; not for ever, should they free none."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.living() > expected and time.monotonic() < deadline:
            time.sleep(0.005)
            memory.store.advance()


def await_payloads(mailbox: Mailbox, number: int) -> None:
    """Waits until so many payloads have come that nobody has taken yet; not for ever."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        if sum(key.kind is Kind.VALUE for key, _ in mailbox._inbox.untaken()) >= number:
            return
        time.sleep(0.005)
    raise AssertionError("the payloads have not come")


def count(
    schedule: str, module: type[Trains] = Trains, swaps: bool = False, validates: bool = False
) -> dict[str, int]:
    """Trains a step, or validates one; runs on every rank."""
    sent = {Kind.VALUE: Count(), Kind.GRADIENT: Count()}
    received, after_forward = Count(), [0]
    send, take, advance = Mailbox.send, Mailbox.take, SuspendableMicrobatch.advance

    def counted_send(self: Mailbox, to: int, key: Key, place: Place, content: Any) -> None:
        if key.kind in sent and isinstance(content, Tensor):
            # What is on its way is held, and for how long is not up to the stage.
            self.flush()
            sent[key.kind].add(content)
        send(self, to, key, place, content)

    def counted_take(self: Mailbox, key: Key, place: Place) -> Message:
        message = take(self, key, place)
        if key.kind is Kind.VALUE:
            assert isinstance(message.data, Tensor)
            received.add(message.data)
        return message

    def counted_advance(self: SuspendableMicrobatch) -> None:
        if schedule == "gpipe" and self.stage and not self.turn and self.waits_for is None:
            # Else a stage that waits for a payload runs backwards meanwhile, and holds less.
            await_payloads(self.mailbox, NUM_MICROBATCHES)
        advance(self)
        if self.is_done:
            if swaps:
                received.come_down_to(3, trainer.strategy.pipeline.memory)
            after_forward[0] = max(after_forward[0], received.living())

    Mailbox.send, Mailbox.take = counted_send, counted_take  # type: ignore[method-assign]
    SuspendableMicrobatch.advance = counted_advance  # type: ignore[method-assign]
    strategy = PipeShiftStrategy(
        microbatches=NUM_MICROBATCHES, partition="uniform", profile_steps=0, schedule=schedule
    )
    compression = MemoryCompression(budget="1GB", policy=SwapAll("host", 1)) if swaps else None
    trainer: Any = quiet_trainer(
        {"devices": int(os.environ["WORLD_SIZE"]), "strategy": strategy},
        max_epochs=1,
        plugins=[compression] if compression is not None else [],
    )
    # A batch that is validated is one microbatch.
    batches: Any = [torch.randn(SAMPLES, WIDTH)] * (NUM_MICROBATCHES if validates else 1)
    data = DataLoader(batches, batch_size=None)
    if validates:
        trainer.validate(built(module), data, verbose=False)
    else:
        trainer.fit(built(module), data)
    return {
        "payloads": sent[Kind.VALUE].most,
        "gradients": sent[Kind.GRADIENT].most,
        "received": after_forward[0],
    }


def here(x: Any) -> Any:
    """The tensor of a value that this stage has."""
    return x.account.tensor if isinstance(x, Value) else x


class Between(Trains):
    """Keeps count of what the code between its layers saves, and the next layer too."""

    outputs = Count()

    def training_step(self, batch: Tensor) -> Tensor:
        x = batch
        for block in self.blocks:
            x = torch.tanh(block(x))
            self.outputs.add(here(x))
        return x.square().mean()


def outputs_that_stay(swaps: bool) -> int:
    """How many of the outputs are here when all forwards of a step are over."""
    found: list[int] = []
    advance = SuspendableMicrobatch.advance

    def counted_advance(self: SuspendableMicrobatch) -> None:
        advance(self)
        if trainer.global_step == num_steps - 1 and self.is_done:
            memory = trainer.strategy.pipeline.memory
            if memory is not None:
                Between.outputs.come_down_to(4, memory)
            found.append(Between.outputs.living())

    num_steps = 10
    SuspendableMicrobatch.advance = counted_advance  # type: ignore[method-assign]
    strategy = PipeShiftStrategy(
        microbatches=NUM_MICROBATCHES, partition="uniform", profile_steps=1, schedule="gpipe"
    )
    compression = MemoryCompression(budget="1GB", policy=SwapAll("host", 1)) if swaps else None
    trainer: Any = quiet_trainer(
        {"devices": 1, "strategy": strategy},
        max_epochs=1,
        callbacks=[AwaitsPlanning()],
        plugins=[compression] if compression is not None else [],
    )
    # What code between layers saves is known when a step has been measured, and planned for soon.
    batches: Any = [torch.randn(SAMPLES, WIDTH)] * num_steps
    trainer.fit(built(Between), DataLoader(batches, batch_size=None))
    return found[-1]


def test_what_code_between_layers_saves_goes() -> None:
    assert run_ranks(outputs_that_stay, 1, False) == [4 * NUM_MICROBATCHES]
    # Of the last microbatch some may be on their way.
    assert run_ranks(outputs_that_stay, 1, True)[0] <= 4


class Inside(Block):
    """Saves a tensor that it has computed."""

    results = Count()

    def forward(self, x: Tensor) -> Tensor:
        inside = self.linear(x).tanh()
        if type(inside) is Tensor:
            # Not in a run that only finds the results' shapes.
            self.results.add(inside)
        return inside * inside


class Recomputes(Trains):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inside() for _ in range(4))


def results_in_a_forward(recompute: Any) -> list[int]:
    """The most saved tensors of layers in the forward of each microbatch of a step."""
    found: list[int] = []
    advance = SuspendableMicrobatch.advance

    def counted_advance(self: SuspendableMicrobatch) -> None:
        before, Inside.results.most = Inside.results.living(), 0
        advance(self)
        found.append(Inside.results.most - before)

    SuspendableMicrobatch.advance = counted_advance  # type: ignore[method-assign]
    strategy = PipeShiftStrategy(
        microbatches=4, recompute=recompute, profile_steps=0, schedule="gpipe"
    )
    trainer: Any = quiet_trainer({"devices": 1, "strategy": strategy}, max_epochs=1)
    batches: Any = [torch.randn(SAMPLES, WIDTH)]
    trainer.fit(built(Recomputes), DataLoader(batches, batch_size=None))
    return found


def test_a_recomputed_layer_drops_its_saved_tensors_before_the_next_one_runs() -> None:
    assert run_ranks(results_in_a_forward, 1, "none") == [[4, 4, 4, 4]]
    # In the first microbatch code after a layer might still write to its inputs.
    assert run_ranks(results_in_a_forward, 1, "full") == [[4, 1, 1, 1]]


def test_gradients_that_were_sent_are_let_go_of() -> None:
    """The last stage of GPipe has sent all of them before the first has used the first one."""
    for schedule in ("gpipe", "1f1b"):
        first, second = run_ranks(count, 2, schedule)
        assert first["gradients"] == 0
        assert second["gradients"] == 1


def test_payloads_that_no_layer_saves_are_let_go_of_when_they_were_sent() -> None:
    for schedule in ("gpipe", "1f1b"):
        assert run_ranks(count, 2, schedule)[0]["payloads"] == 1


def test_payloads_are_held_from_forward_to_backward() -> None:
    assert run_ranks(count, 2, "gpipe", SavesResults)[0]["payloads"] == NUM_MICROBATCHES
    assert run_ranks(count, 2, "1f1b", SavesResults)[0]["payloads"] == 2


def test_without_a_backward_payloads_are_let_go_of() -> None:
    first, second = run_ranks(count, 2, "1f1b", SavesResults, validates=True)
    assert first["payloads"] == 1
    # The thread that has received one may not have let go of it yet.
    assert second["received"] <= 1


def test_what_was_received_is_gone_when_it_is_elsewhere() -> None:
    """What has just left is on its way."""
    assert run_ranks(count, 2, "gpipe")[1]["received"] == NUM_MICROBATCHES
    assert run_ranks(count, 2, "gpipe", swaps=True)[1]["received"] <= 3


def microbatches_left(recompute: Any, swaps: bool) -> list[int]:
    """How many microbatches there are after each of some steps; runs on every rank."""
    found = []

    class Counts(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            gc.collect()
            found.append(sum(isinstance(one, Microbatch) for one in gc.get_objects()))

    policy = SwapAll("host", 1) if swaps else Planned()
    strategy = PipeShiftStrategy(
        microbatches=NUM_MICROBATCHES, partition="uniform", profile_steps=1, recompute=recompute
    )
    batches: Any = [torch.randn(SAMPLES, WIDTH) for _ in range(4)]
    trainer: Any = quiet_trainer(
        {"devices": int(os.environ["WORLD_SIZE"]), "strategy": strategy},
        max_epochs=1,
        callbacks=[Counts()],
        plugins=[MemoryCompression(budget="1GB", policy=policy)],
    )
    trainer.fit(built(Trains), DataLoader(batches, batch_size=None))
    return found


@pytest.mark.parametrize(("recompute", "swaps"), [("none", False), ("none", True), ("full", False)])
def test_nothing_is_left_of_a_step(recompute: str, swaps: bool) -> None:
    """Graphs and what refers to them in a ring are never collected."""
    for found in run_ranks(microbatches_left, 2, recompute, swaps):
        # That of the operations between two steps.
        assert set(found) == {1}, found


def test_what_a_model_asks_for_again_is_still_there() -> None:
    """It checkpoints its layers: the first one of the second stage asks for its input once more."""
    for schedule in ("gpipe", "1f1b"):
        run_ranks(count, 2, schedule, Checkpoints)
