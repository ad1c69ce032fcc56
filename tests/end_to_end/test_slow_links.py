"""A link that slows down while training runs is a reason for layers to move."""

from __future__ import annotations

import socket
from itertools import pairwise
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeshift import LayerMigration
from lightning_pipeshift.runtime.comm import link_meter
from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end.test_changing_plans import SLEPT, Sleeps, go_by_sleep, hearing
from tests.features_models import AwaitsPlanning, built, differences, parameters_of, quiet_trainer
from tests.models import NUM_FEATURES

# Weights are small beside payloads: moves go over the slow link, too.
WIDTHS = (NUM_FEATURES, 64, 64, 64, 64, 64, 4, 64, 8)
ROWS, NUM_STEPS = 64, 64
FAST, SLOW = 1e12, 20e3
# Bytes per second of every link, as far as the meter knows.
LINKS = {"bandwidth": FAST}


def go_by_bytes() -> None:
    """Makes this process believe that bytes take the time that the links' bandwidth says."""
    really = link_meter.carried
    known: dict[Any, link_meter.Carried] = {}

    def pretended(connection: socket.socket) -> link_meter.Carried | None:
        found = really(connection)
        if found is None:
            return None
        before = known.get((found.here, found.there), found._replace(num_bytes=0, seconds=0.0))
        seconds = before.seconds + (found.num_bytes - before.num_bytes) / LINKS["bandwidth"]
        known[found.here, found.there] = found._replace(seconds=seconds)
        return known[found.here, found.there]

    link_meter.carried = pretended


class Layer(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.linear = nn.Linear(before, after)

    def forward(self, x: Tensor) -> Any:
        return Sleeps.apply(self.linear(x))


class Waisted(L.LightningModule):
    """Layers that take equal time. What crosses the middle is large, and later there is a waist."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(before, after) for before, after in pairwise(WIDTHS))

    def training_step(self, batch: Any) -> Tensor:
        (x,) = batch
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Slows(L.Callback):
    """The network gets slow in the middle of training, and fast again."""

    def __init__(self, at: int, until: int) -> None:
        self.at, self.until = at, until
        self.counts: list[tuple[int, ...]] = []

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        self.counts.append(trainer.strategy.plan.placement.counts[0])
        if LINKS["bandwidth"] == SLOW and self.counts[-1][1]:
            # The stages have waited for the link, which this clock does not know.
            SLEPT["seconds"] += 1.0
        LINKS["bandwidth"] = SLOW if self.at <= len(self.counts) < self.until else FAST


def train(at: int, until: int) -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    go_by_sleep()
    go_by_bytes()
    module, slows = built(Waisted), Slows(at, until)
    how = {"devices": 2, "pipeshift": {"microbatches": 4, "profile_steps": 3}}
    callbacks = [slows, LayerMigration(patience=3), AwaitsPlanning()]
    trainer = quiet_trainer(how, callbacks=callbacks, max_epochs=1)
    data = TensorDataset(torch.randn(NUM_STEPS * ROWS, NUM_FEATURES))
    with hearing() as heard:
        trainer.fit(module, DataLoader(data, batch_size=ROWS))
    return {"counts": slows.counts, "heard": heard, "parameters": parameters_of(module)}


def test_layers_move_when_the_link_slows_down_and_back_when_it_recovers() -> None:
    # One slow step among three would be an accident: whole windows are slow.
    ranks = run_ranks(train, 2, 10, 25)
    counts = ranks[0]["counts"]
    assert set(counts[:10]) == {(4, 4)}, "the cut is even, as long as the link is fast"
    assert counts[24] == (8, 0), "nothing but the result crosses the link"
    # How fast the link is again, only the few bytes tell that crossed it meanwhile.
    assert counts[-1] in ((6, 2), (4, 4)), "both have work again"
    line, back = (line for line in ranks[0]["heard"] if "steps have been measured" in line)
    assert "The link between ranks 0 and 1 carries 20.0 kB/s now, 13.1 GB/s before" in line
    assert f"[8, 0] becomes {list(counts[-1])}" in back
    steady = run_ranks(train, 2, 100, 100)
    assert set(steady[0]["counts"]) == {(4, 4)}
    for one, other in zip(ranks, steady, strict=True):
        assert not differences(one["parameters"], other["parameters"], 0, 0)
