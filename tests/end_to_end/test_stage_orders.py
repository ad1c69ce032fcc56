"""A run chooses which rank is which stage, and that changes nothing that is computed."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeshift import MemoryCompression, PlanError
from lightning_pipeshift.lightning import grouping
from lightning_pipeshift.runtime.planning import probe
from lightning_pipeshift.testing.ranks import run_ranks
from lightning_pipeshift.text import seconds_text
from tests.end_to_end.test_changing_plans import SLOW, Sleeps, go_by_sleep, hearing
from tests.features_models import AwaitsPlanning, built, differences, parameters_of, quiet_trainer
from tests.models import NUM_FEATURES, ZOO, points

FIRST_IS_SLOW, LAST_IS_SLOW = 0, 1


class Heavy(nn.Module):
    """A layer that takes several times as long as a light one."""

    def __init__(self, times: int, width: int = NUM_FEATURES) -> None:
        super().__init__()
        self.times = times
        # Layers that look alike are tried once.
        self.linear = nn.Linear(width, width, bias=times > 1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Any:
        x = self.dropout(self.linear(x))
        for _ in range(self.times):
            x = Sleeps.apply(x)
        return x


class TailHeavy(L.LightningModule):
    """Half of the work is in the last layer, so no cut suits a last device of half the speed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Heavy(times) for times in (1, 1, 1, 1, 8))

    def training_step(self, batch: Any) -> Tensor:
        x, _ = batch
        for layer in self.layers:
            x = layer(x)
        self.log("loss", x.square().mean())
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class GetsSlow(L.Callback):
    """A rank takes twice the time from the second step on: nobody could have known."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_end(self, *_: Any) -> None:
        if os.environ["RANK"] == str(self.rank):
            SLOW["factor"] = 2.0


class SwapsSpeeds(L.Callback):
    """From the second step on, the fast rank is the slow one: the short measurement was misled."""

    def on_train_batch_start(self, *given: Any) -> None:
        if given[3] == 1:
            SLOW["factor"] = 3.0 - SLOW["factor"]


def train(
    slow: int, from_the_start: bool, how: dict[str, Any], swaps: bool = False
) -> dict[str, Any]:
    """Trains on devices of which one is slow. All times are of a clock that tests turn."""
    L.seed_everything(7, verbose=False)
    SLOW["factor"] = 2.0 if from_the_start and os.environ["RANK"] == str(slow) else 1.0
    go_by_sleep()
    module = built(TailHeavy)
    callbacks: list[L.Callback] = [AwaitsPlanning()]
    if not from_the_start:
        callbacks.append(GetsSlow(slow))
    if swaps:
        callbacks.append(SwapsSpeeds())
    num_ranks = int(os.environ["WORLD_SIZE"])
    strategy = {"microbatches": 8, "profile_steps": 3, **how}
    trainer = quiet_trainer(
        {"devices": num_ranks, "pipeshift": strategy}, callbacks=callbacks, max_epochs=1
    )
    with hearing() as heard:
        trainer.fit(module, DataLoader(points(22).dataset, batch_size=8))
    found: Any = trainer.strategy
    return {
        "ranks": found.plan.ranks,
        "counts": found.plan.placement.counts,
        "stage": found.stage,
        "loss": float(trainer.callback_metrics["loss"]),
        "heard": heard,
        "decisions": found.decisions,
        "parameters": parameters_of(module),
    }


def require_equal(ones: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for one, other in zip(ones, others, strict=True):
        for key in ("parameters", "loss"):
            assert not differences(one[key], other[key], 0, 0), key


def test_the_first_plan_has_the_best_order() -> None:
    own = run_ranks(train, 2, LAST_IS_SLOW, True, {})
    assert own[0]["ranks"] == ((1, 0),)
    assert own[0]["counts"] == ((4, 1),)
    assert [rank["stage"] for rank in own] == [1, 0]
    (change,) = own[0]["decisions"]
    assert own[1]["decisions"] == [change]
    assert change["is_estimated"]
    assert change["expected_seconds"] < change["before_seconds"] / 1.2
    assert change["verdict"] == "kept"
    said = [line for line in own[0]["heard"] if "the stages are the ranks [1, 0]" in line]
    first, later = (line.partition("a step would take ")[2] for line in said)
    assert first.endswith("is expected, by a short measurement of devices and links.")
    assert later.startswith(first.partition(", by")[0])
    assert f"; it takes {seconds_text(change['after_seconds'])}; kept, as by what " in later
    given = run_ranks(train, 2, LAST_IS_SLOW, True, {"virtual_machines": [[0, 1]]})
    assert given[0]["ranks"] == ((0, 1),), "an order of one's own stays"
    require_equal(own, given)


def test_a_first_order_that_makes_steps_slower_is_undone() -> None:
    own = run_ranks(train, 2, LAST_IS_SLOW, True, {}, True)
    assert own[0]["ranks"] == ((0, 1),)
    made, back = own[0]["decisions"]
    assert "the stages are the ranks [1, 0]" in made["what"]
    assert made["verdict"] == "undone"
    assert back["what"].endswith("on the ranks [0, 1]")
    assert back["before_seconds"] == made["after_seconds"]
    assert back["after_seconds"] < back["before_seconds"]
    assert back["verdict"] == "kept"


def test_an_order_that_is_best_stays() -> None:
    own = run_ranks(train, 2, FIRST_IS_SLOW, True, {})
    assert own[0]["ranks"] == ((0, 1),)
    assert own[0]["counts"] == ((4, 1),)


def test_ranks_change_places_when_the_first_steps_have_been_measured() -> None:
    own = run_ranks(train, 2, LAST_IS_SLOW, False, {})
    assert own[0]["ranks"] == ((1, 0),)
    assert own[0]["counts"] == ((4, 1),)
    (line,) = (line for line in own[0]["heard"] if "steps have been measured" in line)
    assert "on the ranks [0, 1] becomes [4, 1] on the ranks [1, 0]" in line
    given = run_ranks(train, 2, LAST_IS_SLOW, False, {"virtual_machines": [[0, 1]]})
    assert given[0]["ranks"] == ((0, 1),)
    require_equal(own, given)


def test_each_virtual_machine_has_an_order_of_its_own() -> None:
    own = run_ranks(train, 4, LAST_IS_SLOW, True, {"virtual_machines": 2})
    assert own[0]["ranks"] == ((1, 0), (2, 3))
    given = run_ranks(train, 4, LAST_IS_SLOW, True, {"virtual_machines": [[0, 1], [2, 3]]})
    require_equal(own, given)


def groups_of(slow: tuple[int, ...]) -> Any:
    """The virtual machines of a run on CPUs of which some take four times as long."""
    measure, rank = probe.found_here, int(os.environ["RANK"])

    def pretended(*given: Any) -> Any:
        seconds = 4.0 if rank in slow else 1.0
        return replace(measure(*given), processor=f"of rank {rank}", best_seconds=seconds)

    vars(grouping)["found_here"] = pretended
    how = {"devices": 4, "pipeshift": {"virtual_machines": 2, "partition": [2, 3]}}
    trainer = quiet_trainer(how, max_epochs=1)
    trainer.fit(ZOO["sequential"].build(), ZOO["sequential"].loader(2))
    found = trainer.strategy.topology.ranks  # type: ignore[attr-defined]
    vars(grouping)["found_here"] = None  # once is enough
    trainer.validate(ZOO["accuracy"].build(), ZOO["accuracy"].loader(2), verbose=False)
    assert trainer.strategy.topology.ranks == found  # type: ignore[attr-defined]
    return found


def test_virtual_machines_have_devices_of_each_speed() -> None:
    assert run_ranks(groups_of, 4, (2, 3))[0] == ((0, 2), (1, 3))
    assert run_ranks(groups_of, 4, ())[0] == ((0, 1), (2, 3))


# --- a plan with other ranks ---

CUTS = {1: [[2, 3, 2]], 3: [[3, 1, 3]], 6: [[3, 2, 2]]}


class Remembers(L.LightningModule):
    """A step uses what the one before has computed at the last stage, and at the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(NUM_FEATURES, NUM_FEATURES) for _ in range(4))
        self.early: Any = torch.zeros(NUM_FEATURES)
        self.late: Any = torch.zeros(NUM_FEATURES)
        self.now: Any = torch.zeros(())

    def training_step(self, batch: Any) -> Tensor:
        x, _ = batch
        first = x = self.layers[0](x) + 0.1 * self.late
        for layer in self.layers[1:]:
            x = layer(x).tanh()
        self.late = x.detach().mean(0)
        self.latest, self.now = self.now, self.late.sum()
        loss: Tensor = (x - self.early).square().mean()
        self.early = first.detach().mean(0)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ReadsLater(L.Callback):
    """Changes the order after a step, and reads values of steps before the change: those that it
    keeps itself on every rank, and one of the step before on the first rank alone.
    """

    def __init__(self, orders: dict[int, tuple[int, ...]]) -> None:
        self.orders = orders
        self.kept: list[Any] = []
        self.read: list[list[float]] = []
        self.stages: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
        self.stages.append(trainer.strategy.stage)
        self.kept.append(module.early)
        read = [float(kept.sum()) for kept in self.kept]
        if trainer.is_global_zero:
            read.append(float(module.latest))
        self.read.append(read)
        if others[2] in self.orders:
            ranks = (self.orders[others[2]],)
            trainer.strategy.adopt(replace(trainer.strategy.plan, ranks=ranks), at_once=True)


def remember(orders: dict[int, tuple[int, ...]]) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    module, reads = built(Remembers), ReadsLater(orders)
    how = {"devices": 3, "pipeshift": {"partition": [1, 1, 2], "microbatches": 1}}
    trainer = quiet_trainer(how, callbacks=[reads], max_epochs=1)
    trainer.fit(module, DataLoader(points(8).dataset, batch_size=8))
    return {"parameters": parameters_of(module), "read": reads.read, "stages": reads.stages}


def test_values_of_earlier_steps_stay_where_they_are_when_places_change() -> None:
    places = run_ranks(remember, 3, {0: (2, 0, 1), 2: (1, 0, 2), 4: (0, 1, 2)})
    stays = run_ranks(remember, 3, {})
    assert places[0]["stages"] == [0, 0, 1, 1, 1, 1, 0, 0]
    for one, other in zip(places, stays, strict=True):
        assert one["read"] == other["read"]
        assert not differences(one["parameters"], other["parameters"], 0, 0)


class AsksForOrders(L.Callback):
    """Asks for orders that are not possible."""

    def __init__(self, *wrong: tuple[tuple[int, ...], ...]) -> None:
        self.wrong = wrong
        self.errors: list[str] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        strategy, self.errors = trainer.strategy, []
        for ranks in self.wrong:
            try:
                strategy.adopt(replace(strategy.plan, ranks=ranks), at_once=True)
            except PlanError as error:
                self.errors.append(str(error))


def refused(wrong: Any, how: dict[str, Any], compresses: bool = False) -> list[str]:
    asks = AsksForOrders(*wrong)
    plugins = [MemoryCompression(budget="1GB")] if compresses else None
    num_ranks = int(os.environ["WORLD_SIZE"])
    trainer = quiet_trainer(
        {"devices": num_ranks, "pipeshift": how}, callbacks=[asks], max_epochs=1, plugins=plugins
    )
    trainer.fit(ZOO["sequential"].build(), ZOO["sequential"].loader(2))
    return asks.errors


def test_orders_that_are_refused() -> None:
    machines = [[0, 1], [2]]
    others = [((0, 2), (1,))]
    (vm,) = run_ranks(refused, 3, others, {"virtual_machines": machines})[0]
    assert "the ranks [[0, 2], [1]], and the stages are the ranks [[0, 1], [2]]" in vm
    assert "cannot change their virtual machine" in vm
    wrong = [((1, 0),)]
    (error,) = run_ranks(refused, 2, wrong, {"schedule": "async", "partition": [2, 3]})[0]
    assert "with an asynchronous schedule they cannot change places" in error
    (error,) = run_ranks(refused, 2, wrong, {"partition": [2, 3]}, True)[0]
    assert "with MemoryCompression they cannot change places" in error
