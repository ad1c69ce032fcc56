"""Asynchronous schedules: the bits of a plain loop with delayed weights."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipeshift import Move
from lightning_pipeshift.errors import PipeShiftError, PlanError
from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end import test_asynchronous as asynchronous
from tests.end_to_end.test_asynchronous import (
    DECAY,
    RATES,
    SIZE,
    Block,
    Case,
    Model,
    Result,
    column,
    data,
    loss_of,
    reference,
    require_same,
    train,
)
from tests.features_models import built, quiet_trainer, read_csv

CASES = {
    2: [
        Case([4, 2], num_batches=11),
        Case([2, 4], "async", 3, optimizer="adam", validates=5, num_batches=11),
        Case([3, 3], "async-2bw", 2, optimizer="adam", validates=4, num_batches=11),
        Case([3, 3], "async", 2, optimizer="adam", num_batches=11, shares=True),
        Case([3, 3], "async", 3, optimizer="clipped", num_batches=11),
    ],
    3: [
        Case([1, 3, 2], optimizer="adam", validates=5, num_batches=11),
        Case([2, 0, 4], "async", 2, num_batches=11),
        Case([2, 2, 2], "async-2bw", 3, num_batches=11, shares=True),
        Case([3, 2, 1], "async", optimizer="adam", num_batches=11, shares=True),
    ],
    4: [
        Case([[3, 3], [3, 3]], num_batches=12, optimizer="adam"),
        Case([[4, 2], [4, 2]], "async", 2, num_batches=12, validates=4, shares=True),
        Case([[2, 4], [4, 2]], "async-2bw", 2, optimizer="adam", num_batches=12),
        Case([[2, 2, 2], [6]], "async-2bw", 3, optimizer="adam", num_batches=12),
    ],
}


def train_all(cases: Sequence[Case]) -> list[Result]:
    return [train(case) for case in cases]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_bits_of_the_reference(num_ranks: int) -> None:
    """Validation in the middle of an epoch, stages without layers, shared parameters, and several
    virtual machines too.
    """
    cases = CASES[num_ranks]
    for case, *ranks in zip(cases, *run_ranks(train_all, num_ranks, cases), strict=True):
        layers = reference(case).layers
        for result in ranks:
            require_same(result.state, [one.layer for one in layers] if case.shares else layers)
            if case.shares:
                assert torch.equal(result.state["shift"], layers[0].shift)


def test_two_versions_have_the_same_bits_on_every_split() -> None:
    """Dropout, running statistics, a metric, and validation in the middle of an update."""
    whole = Case([6], "async-2bw", 3, {}, "adam", 7, draws=True, num_batches=11)
    ((expected,),) = run_ranks(train_all, 1, [whole])
    for split in ([2, 4], [3, 1, 2]):
        for (result,) in run_ranks(train_all, len(split), [whole._replace(split=split)]):
            for name, value in expected.state.items():
                assert torch.equal(result.state[name], value), name
            assert result.metrics == expected.metrics
            assert result.steps == expected.steps


LIMIT = 1.2
WATCHED = 2
"""So many steps are watched before a step runs ahead."""


class Begins(Block):
    """Writes a letter into a file when it is called."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            with self.file.open("a") as file:
                file.write("f")
        return super().forward(x)


class Ends(Block):
    """Returns only when the first stage has begun the next minibatch, from some minibatch on."""

    def __init__(self, file: Path, num_batches: int) -> None:
        super().__init__()
        self.file, self.num_batches, self.waits = file, num_batches, False
        self.calls = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and self.waits:
            number = next(self.calls)
            while WATCHED <= number < self.num_batches - 1:
                # If it never does, the test's time limit ends this.
                if len(self.file.read_text()) > number + 1:
                    break
                time.sleep(0.001)
        return super().forward(x)


class Reads(Model):
    """Reads its loss, and goes by it; and notes what it finds behind the read."""

    def __init__(self, file: Path, num_batches: int) -> None:
        super().__init__("adam")
        self.layers[0], self.layers[5] = Begins(file), Ends(file, num_batches)
        self.noted: list[Any] = []
        self.total = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        x, target = batch
        for layer in self.layers:
            x = layer(x)
        loss = loss_of(x, target)
        read = loss.item()
        (group,) = self.trainer.optimizers[0].param_groups
        self.total += read
        self.noted.append((batch_idx, self.global_step, group["lr"], read, self.total))
        if read > LIMIT:
            loss = loss * 1.5
        self.log("loss", loss.item(), on_step=True, on_epoch=True)
        return loss


class Looks(L.Callback):
    """Finds after each batch what its step has left."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.found.append(len(module.noted))


def train_reading(case: Case, file: str, looks: bool) -> Any:
    look = Looks()
    trainer = quiet_trainer(
        {
            "devices": len(case.split),
            "pipeshift": {"schedule": case.schedule, "partition": case.split, "profile_steps": 0},
        },
        callbacks=[look] if looks else [],
        max_epochs=case.num_epochs,
        accumulate_grad_batches=case.accumulated,
        val_check_interval=case.validates,
        logger=CSVLogger(f"{file}.{looks}", name="", version=""),
        log_every_n_steps=1,
    )
    module = built(lambda: Reads(Path(file), case.num_batches))
    module.layers[5].waits = not looks and case.num_epochs == 1
    loader = DataLoader(data(case.num_batches), batch_size=SIZE)
    validation = loader if case.validates else None
    trainer.fit(module, loader, validation)
    rows = read_csv(f"{file}.{looks}/metrics.csv") if trainer.is_global_zero else []
    return module.state_dict(), module.noted, look.found, rows


def branching(x: Tensor, target: Tensor) -> Tensor:
    loss = loss_of(x, target)
    return loss * 1.5 if loss.item() > LIMIT else loss


READS = [
    Case([3, 3], num_batches=12, num_epochs=1),
    Case([2, 2, 2], num_batches=12, num_epochs=1),
    Case([2, 1, 3], "async", 2, num_batches=8, validates=5),
    Case([3, 3], "async-2bw", 3, num_batches=11, validates=5),
]


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("case", READS)
def test_a_read_does_not_drain_the_pipeline(case: Case, looks: bool, tmp_path: Path) -> None:
    """The part of a step behind a read runs in a later call, and finds what it would in its own. A
    callback that looks at what steps leave finds it.
    """
    this: Any = asynchronous
    this.Model, this.loss_of, before = Plain, branching, (this.Model, this.loss_of)
    try:
        expected = reference(case._replace(optimizer="adam"))
    finally:
        this.Model, this.loss_of = before
    file = str(tmp_path / "begun")
    ranks = run_ranks(train_reading, len(case.split), case, file, looks)
    losses = [float(loss) for loss in expected.losses]
    reads = [loss / 1.5 if loss > LIMIT * 1.5 else loss for loss in losses]
    for state, noted, found, _ in ranks:
        require_same(state, expected.layers)
        assert noted == ranks[0][1]
        assert [read for *_, read, _ in noted] == pytest.approx(reads)
        assert found == [*range(1, len(noted) + 1)] * looks
        rate, step = RATES["adam"], 0
        for number, (batch_idx, global_step, lr, *_) in enumerate(noted):
            assert batch_idx == number % case.num_batches
            assert (global_step, lr) == (step, pytest.approx(rate))
            if (batch_idx + 1) % case.accumulated == 0 or batch_idx + 1 == case.num_batches:
                rate, step = rate * DECAY, step + 1
    logged = column(ranks[0][3], "loss_step")
    if case.accumulated == 1:
        assert logged == pytest.approx(dict(enumerate(losses)))


class Plain(Model):
    """The layers of :class:`Reads`, for the reference."""

    def __init__(self, *_: Any, **__: Any) -> None:
        reads = Reads(Path(os.devnull), 0)
        super().__init__("adam")
        self.layers = reads.layers


class GoesBack(Model):
    """The first layer is called again with what the last one has computed: in any order of the
    layers a value goes back to an earlier stage.
    """

    detaches = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        x, target = batch
        for layer in self.layers:
            x = layer(x)
        again = self.layers[0](x.detach() if self.detaches else x)
        return loss_of(x + again, target)


def train_going_back(partition: list[int], detaches: bool) -> str:
    trainer = quiet_trainer(
        {"devices": len(partition), "pipeshift": {"schedule": "async", "partition": partition}},
        max_epochs=1,
    )
    module = built(lambda: GoesBack("adam"))
    module.detaches = detaches
    try:
        trainer.fit(module, DataLoader(data(6), batch_size=SIZE))
    except PipeShiftError as error:
        return str(error)
    return ""


def test_a_gradient_that_a_later_stage_would_wait_for_for_ever_is_refused() -> None:
    """A value may go back to an earlier stage, if no gradient comes from there."""
    for partition in ([3, 3], [2, 2, 2]):
        texts = run_ranks(train_going_back, len(partition), partition, False)
        assert any("`layers.0`" in text and "use schedule='1f1b'" in text for text in texts)
        assert all(texts)
        assert not any(run_ranks(train_going_back, len(partition), partition, True))


class WantsToScatter(L.Callback):
    """Asks for a move after which a value would go to the last stage and back."""

    error = ""

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        if others[-1] == 2:
            with pytest.raises(PlanError) as caught:
                trainer.strategy.migrate(Move(layer="layers.1", stage=1))
            self.error = str(caught.value)


def train_where_a_move_is_refused() -> tuple[str, int]:
    asks = WantsToScatter()
    trainer = quiet_trainer(
        {"devices": 2, "pipeshift": {"schedule": "async", "partition": [3, 3]}},
        callbacks=[asks],
        max_epochs=1,
    )
    trainer.fit(built(lambda: Model("adam")), DataLoader(data(6), batch_size=SIZE))
    return asks.error, trainer.global_step


def test_a_move_after_which_gradients_would_go_both_ways_is_refused_at_once() -> None:
    """The run goes on. Without the refusal it would end in the next step."""
    for text, steps in run_ranks(train_where_a_move_is_refused, 2):
        assert "values would go back to an earlier stage" in text
        assert "((0, 1, 0, 1, 1, 1),)" in text
        assert steps == 6
