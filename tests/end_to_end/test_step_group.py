"""Steps that call ``torch.distributed`` themselves, as losses of self-supervised models do."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeshift.runtime.comm.step_group import StepGroup
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import quiet_trainer
from tests.models import NUM_CLASSES, NUM_FEATURES, points


class Gather(torch.autograd.Function):
    """Rows of all replicas, with their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        found = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(found, rows)
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class Centred(nn.Module):
    """A loss with state that is the mean over all replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(NUM_CLASSES))
        self.centre: Tensor

    def forward(self, logits: Tensor, classes: Tensor) -> Tensor:
        loss = F.cross_entropy(logits - self.centre, classes)
        with torch.no_grad():
            mean = logits.mean(0)
            if dist.is_initialized():
                dist.all_reduce(mean)
                mean = mean / dist.get_world_size()
            self.centre.mul_(0.9).add_(mean, alpha=0.1)
        return loss


class CallsDistributed(L.LightningModule):
    """Stages waited for each other for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 8)
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, NUM_CLASSES)
        self.loss = Centred()
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, classes = batch
        hidden = self.second(self.first(x).relu()).relu()
        scale = hidden.detach().abs().max()
        if dist.is_initialized():
            hidden = Gather.apply(hidden)
            dist.all_reduce(scale, op=dist.ReduceOp.MAX)
            dist.barrier()
        return self.loss(self.last(hidden / (1 + scale)), classes)

    def on_train_batch_end(self, *_: Any) -> None:
        if dist.is_initialized():
            # Hooks run on all ranks, and their group is that of all ranks.
            count = torch.ones(())
            dist.all_reduce(count)
            self.sizes.append(int(count))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(strategy: dict[str, Any]) -> tuple[dict[str, Tensor], list[int]]:
    world = int(os.environ["WORLD_SIZE"])
    trainer = quiet_trainer({"devices": world, "pipeshift": strategy}, max_epochs=1)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        module = CallsDistributed()
    trainer.fit(module, points(3))
    return {name: value.clone() for name, value in module.state_dict().items()}, module.sizes


@pytest.mark.parametrize("how", [{"microbatches": 1}, {"microbatches": 2, "recompute": "full"}])
def test_a_step_finds_one_replica(how: dict[str, Any]) -> None:
    ((alone, _),) = run_ranks(trained, 1, {**how})
    for partition in ([1, 3], [1, 1, 2]):
        world = len(partition)
        for found, sizes in run_ranks(trained, world, {**how, "partition": partition}):
            assert sizes == [world] * 3
            for name, value in alone.items():
                assert torch.equal(value, found[name]), (name, partition)


def test_with_several_virtual_machines_it_is_an_error() -> None:
    strategy = {"virtual_machines": 2, "microbatches": 2, "partition": [2, 2]}
    outcomes = run_ranks(trained, 4, strategy, expect_failure=True, timeout=60.0)
    assert all(outcome.failed for outcome in outcomes)
    for part in ("2 virtual machines", "on_train_batch_end"):
        assert any(part in outcome.message for outcome in outcomes)


ROOTS = {"broadcast": {"src": 0}, "reduce": {"dst": 0}}


def collectives() -> dict[str, Any]:
    world = dist.get_world_size()
    rows = torch.arange(4.0) + dist.get_rank()
    found: dict[str, Any] = {}
    with StepGroup(0, 1).in_force():
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        assert dist.get_backend() == "gloo"
        for name in ("all_reduce", "broadcast", "reduce"):
            tensor = rows.clone()
            getattr(dist, name)(tensor, **ROOTS.get(name, {}))
            found[name] = tensor
        work = dist.all_reduce(rows, async_op=True)
        assert work is not None
        assert work.wait()
        assert work.is_completed()
        outputs = [torch.empty(4)]
        dist.all_gather(outputs, rows)
        found["all_gather"] = outputs[0]
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            output = torch.empty(4)
            getattr(dist, name)(output, rows)
            found[name] = output
        outputs = [torch.empty(4)]
        dist.all_to_all(outputs, [rows])
        found["all_to_all"] = outputs[0]
        output = torch.empty(4)
        dist.scatter(output, [rows], src=0)
        found["scatter"] = output
        objects: list[Any] = [None]
        dist.all_gather_object(objects, "text")
        assert objects == ["text"]
        dist.barrier()
    assert dist.get_world_size() == world
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == world
    return {name: tensor - rows for name, tensor in found.items()}


def in_a_group() -> dict[str, Any]:
    dist.init_process_group("gloo")
    try:
        return collectives()
    finally:
        dist.destroy_process_group()


def test_collectives_of_one_replica() -> None:
    for found in run_ranks(in_a_group, 2):
        assert len(found) == 8
        for name, difference in found.items():
            assert not difference.any(), name


def found_by_a_thread() -> Any:
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo")

    def look() -> tuple[int, int, int, bool]:
        world = dist.distributed_c10d.GroupMember.WORLD
        return dist.get_rank(), dist.get_rank(group), dist.get_world_size(), world is job

    job = dist.distributed_c10d.GroupMember.WORLD
    with ThreadPoolExecutor() as pool, StepGroup(0, 1).in_force():
        assert pool.submit(look).result() == (rank, rank, 2, True)
        assert look() == (0, 0, 1, False)
        with StepGroup(3, 5).in_force():
            assert (dist.get_rank(), dist.get_world_size()) == (3, 5)
            assert pool.submit(look).result() == (rank, rank, 2, True)
        assert look() == (0, 0, 1, False)
    assert look() == (rank, rank, 2, True)


def found_in_a_group() -> None:
    dist.init_process_group("gloo")
    try:
        found_by_a_thread()
    finally:
        dist.destroy_process_group()


def test_other_threads_find_the_job() -> None:
    """A checkpoint that is written meanwhile by a thread had the rank of another one, and hung."""
    run_ranks(found_in_a_group, 2)
