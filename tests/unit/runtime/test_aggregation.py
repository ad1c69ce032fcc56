"""When sums of gradients over the virtual machines begin."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipeshift import Communication, PipeShiftStrategy
from lightning_pipeshift.model.parameters.uses import ParameterUse
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.runtime.gradients.aggregation import Aggregation
from lightning_pipeshift.runtime.gradients.replica_sync import gradient_groups
from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end.test_changing_plans import Adopts, Trains
from tests.features_models import QUIET, built
from tests.models import points


class _Done:
    def wait(self) -> None:
        pass

    def query(self) -> bool:
        return True


@pytest.mark.parametrize("in_order", [True, False])
def test_sums_begin_beside_the_backward_though_parameters_are_shared(in_order: bool) -> None:
    """A shared parameter's own sum begins at the step's end. Where all sums begin in one order,
    that of the backwards, no layer's waits for it.
    """
    layers: list[Any] = [nn.Linear(2, 2, bias=False) for _ in range(3)]
    scale = nn.Parameter(torch.ones(2))
    uses = [ParameterUse("scale", scale, (), everywhere=True)]
    uses += [ParameterUse(f"{n}", layer.weight, (n,)) for n, layer in enumerate(layers)]
    topology = Topology(((0, 1), (2, 3)))
    groups = gradient_groups(uses, Placement(((0, 3), (1, 2))), topology)
    started: list[int] = []

    def start(number: int, members: Sequence[int], buffer: Tensor, urgency: Any) -> Any:
        started.append(number // 8)
        return _Done()

    sums = Aggregation(groups, start, None, len(uses), torch.device("cpu"), in_order)
    sums.arm()
    hidden = torch.ones(1, 2)
    for layer in layers:
        hidden = layer(hidden)
    hidden.sum().backward()
    assert started == [2, 1, 0]
    sums.finish()
    assert started == [2, 1, 0, 3]
    sums.close()


class _Counts(L.Callback):
    def __init__(self) -> None:
        self.num_groups: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_groups.append(len(dist.distributed_c10d._world.pg_names))


def move_back_and_forth() -> list[int]:
    counts = _Counts()
    cuts = {batch: [[3, 4], [2 + batch % 3, 5 - batch % 3]] for batch in range(8)}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=PipeShiftStrategy(
            virtual_machines=2,
            microbatches=2,
            partition=[[3, 4], [4, 3]],
            communication=Communication(gradient_aggregation="allreduce"),
        ),
        callbacks=[Adopts(cuts), counts],
        max_epochs=1,
        **QUIET,  # type: ignore[arg-type]
    )
    trainer.fit(built(lambda: Trains("sgd")), points(20))
    return counts.num_groups


def test_plans_that_change_leave_no_groups_behind() -> None:
    """The sets of ranks that own a layer together change with each."""
    for counts in run_ranks(move_back_and_forth, 4):
        # Those that a rank is a member of: two lanes for each of two or three sets.
        assert len(counts) == 10
        assert max(counts) <= min(counts) + 2
