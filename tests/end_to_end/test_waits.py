"""How often a step waits for the device: at most once on each rank, and not at the end of its work.

The device is pretended (``tests/pretended_gpu.py``): the numbers are those of the CPU, bit for bit,
and the run ends with an error where operations use the same memory and nothing orders them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_pipeshift import Communication, PipeShiftStrategy
from lightning_pipeshift.compat.torch_private import READ_NUMBER
from lightning_pipeshift.devices.shared_memory import address_here
from lightning_pipeshift.lightning import connection
from lightning_pipeshift.model.tensors.transfer import Fetch, to_device, to_host
from lightning_pipeshift.step.checksum import _FIRST_BATCHES
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import QUIET, Diary, built, parameters_of
from tests.models import NUM_CLASSES, NUM_FEATURES, points
from tests.pretended_gpu import CPU, GPU, OnAPretendedGPU, PretendedGPU, Wait

NUM_STEPS = 6


class Model(L.LightningModule):
    """Logs, returns weights, or asks a metric, as its kind says."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.ReLU()) for _ in range(3)),
            nn.Linear(NUM_FEATURES, NUM_CLASSES),
        )
        if kind == "tied":
            # On the first stage and on the last one.
            modules: list[Any] = list(self.net.modules())
            layers = [module for module in modules if isinstance(module, nn.Linear)]
            layers[2].weight = layers[0].weight
        if kind == "metric":
            self.accuracy = MulticlassAccuracy(NUM_CLASSES, validate_args=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, classes = batch
        scores = self.net(features)
        loss = F.cross_entropy(scores, classes)
        if self.kind in ("logging", "metric"):
            self.log("loss", loss, on_step=True, on_epoch=True)
            largest = scores.detach().amax()
            self.log("largest", largest, reduce_fx="max", on_step=True, on_epoch=True)
        if self.kind == "metric":
            self.accuracy(scores, classes)
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        if self.kind == "reading" and loss.item() > 100:
            return None
        if self.kind == "weight":
            # Some microbatches have a weight of 0.
            return {"loss": loss, "weight": classes.gt(3).sum()}
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, classes = batch
        scores = self.net(features)
        self.log("val_loss", F.cross_entropy(scores, classes))
        self.log("val_largest", scores.amax(), reduce_fx="max")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Trained(NamedTuple):
    """The result of a run: parameters and logged values, and the waits of its steps."""

    parameters: dict[str, Tensor]
    diary: list[Any]
    steps: list[list[Wait]]
    validation: list[Wait]
    mixed: list[str]


def train(
    kind: str,
    arguments: Mapping[str, Any],
    strategy: Mapping[str, Any] | None = None,
    on_gpu: bool = True,
    is_shared: bool = False,
    shares_memory: bool = False,
) -> Trained:
    """One rank's part; without a strategy, plain Lightning."""
    if shares_memory:
        vars(connection)["payload_address"] = address_here
    L.seed_everything(7, verbose=False)
    how = {"devices": 1, "limit_train_batches": NUM_STEPS, **arguments}
    if how.pop("fp16", False):
        how["plugins"] = [MixedPrecision("16-mixed", "cpu")]
    if strategy is not None:
        how["strategy"] = PipeShiftStrategy(microbatches=4, partition="uniform", **strategy)
        how["devices"] = int(os.environ["WORLD_SIZE"])
    module, gpu, diary = built(lambda: Model(kind)), OnAPretendedGPU(is_shared), Diary()
    callbacks = [diary, *([gpu] if on_gpu else [])]
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=callbacks, **{**QUIET, **how})
    val = points(3, seed=2) if kind == "logging" else None
    trainer.fit(module, points(2 * NUM_STEPS), val)
    return Trained(parameters_of(module), diary.entries, gpu.steps, gpu.validation, gpu.mixed)


@dataclass(frozen=True)
class Case:
    """A kind of training.

    Args:
        kind: that of the model.
        arguments: the Trainer's.
        ranks: how many.
        strategy: arguments of the strategy.
        at_the_end: how often a step may wait for all of the device's work: before an optimizer step
            that depends on the gradients of all stages.
        is_shared: whether the ranks share the device.
        shares_memory: whether tensors go through memory that the ranks share.
        reports_common: whether a step returns tensors that every stage on values computes: each
            fetches its own.
    """

    kind: str = "plain"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2
    strategy: Mapping[str, Any] = field(default_factory=dict)
    at_the_end: int = 0
    is_shared: bool = False
    shares_memory: bool = False
    reports_common: bool = False


CASES = {
    "three stages": Case(ranks=3),
    "logging": Case("logging"),
    "a metric": Case("metric"),
    "weights": Case("weight", reports_common=True),
    "accumulation": Case("weight", {"accumulate_grad_batches": 3}, reports_common=True),
    "clipping": Case("logging", {"gradient_clip_val": 0.1}, at_the_end=1),
    "fp16": Case("weight", {"fp16": True}, at_the_end=1, reports_common=True),
    "fp16, accumulation": Case("logging", {"fp16": True, "accumulate_grad_batches": 3}, 2, {}, 1),
    "one GPU for all": Case("logging", ranks=3, is_shared=True),
    "gpipe": Case("logging", strategy={"schedule": "gpipe"}),
    "shared memory": Case("tied", ranks=3, is_shared=True, shares_memory=True),
    "shared memory, gpipe": Case(
        "tied", strategy={"schedule": "gpipe"}, is_shared=True, shares_memory=True
    ),
    "virtual machines": Case(
        "logging",
        {},
        4,
        {"virtual_machines": 2, "communication": Communication(gradient_aggregation="allreduce")},
    ),
    "virtual machines on one GPU": Case(
        "plain",
        {},
        4,
        {"virtual_machines": 2, "communication": Communication(gradient_aggregation="ring")},
        is_shared=True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_once_and_while_the_device_has_work(name: str) -> None:
    case = CASES[name]
    strategy = dict(case.strategy)
    (plain,) = run_ranks(train, 1, case.kind, case.arguments)
    how = strategy, True, case.is_shared, case.shares_memory
    found = run_ranks(train, case.ranks, case.kind, case.arguments, *how)
    stages = case.ranks // strategy.get("virtual_machines", 1)
    for rank, mine in enumerate(found):
        assert len(mine.steps) == NUM_STEPS - 2
        assert not mine.mixed
        is_last = rank % stages == stages - 1
        for step, waits in enumerate(mine.steps):
            ours = [wait for wait in waits if wait.whose == "pipeshift"]
            # What a stage reports it fetches while the device has a backward to do.
            early = [wait for wait in ours if wait.num_behind]
            assert len(early) == (is_last or case.reports_common), ours
            assert len(ours) - len(early) <= case.at_the_end, ours
            # Others wait no more often than in plain Lightning.
            others = [wait for wait in waits if wait.whose != "pipeshift"]
            assert len(others) <= len(plain.steps[step]), others
        # A validation waits once for what all of its batches log, and compares its first batches
        # over the stages.
        if case.kind == "logging" and stages == case.ranks:
            ours = [wait for wait in mine.validation if wait.whose == "pipeshift"]
            assert len(ours) == _FIRST_BATCHES + is_last, ours
    # What is computed on the device, of what a CPU would read, has the same bits.
    for mine, on_cpu in zip(
        found, run_ranks(train, case.ranks, case.kind, case.arguments, strategy, False), strict=True
    ):
        assert mine.diary == on_cpu.diary
        for parameter, value in on_cpu.parameters.items():
            assert torch.equal(mine.parameters[parameter], value), parameter


def test_a_read_waits_once_where_the_value_is() -> None:
    first, last = run_ranks(train, 2, "reading", {}, {})
    for waits in first.steps:
        assert not waits
    for waits in last.steps:
        # One for each microbatch, and that for the report.
        *reads, report = waits
        assert [(wait.what, wait.num_behind) for wait in reads] == [(READ_NUMBER[6:], 0)] * 4
        assert report.what == "event"
        assert report.num_behind


# --- what is fetched ---


def test_the_probe_sees_what_waits() -> None:
    """Were it blind, the tests above would pass."""
    with PretendedGPU() as gpu:
        one = torch.ones(3).to(GPU, non_blocking=True)
        assert not gpu.waits
        assert one.device == (one + 1).device == GPU
        for read in (
            lambda: one.sum().item(),
            lambda: float(one[0]),
            lambda: bool(one.isnan().any()),
            lambda: one.tolist(),
            lambda: one.cpu(),
            lambda: one.to("cpu"),
            lambda: one.nonzero(),
            lambda: torch.equal(one, one),
            lambda: one[one > 0],
            lambda: torch.zeros(3).copy_(one),
            lambda: torch.ones(3).to(GPU),
            lambda: torch.tensor([1.0], device=GPU),
            lambda: torch.cuda.synchronize(),
        ):
            gpu.waits.clear()
            read()
            assert len(gpu.waits) == 1
            assert gpu.waits[0].whose == "user"
            assert not gpu.waits[0].num_behind
        one + torch.ones(3)
        assert len(gpu.mixed) == 1


def test_a_structure_is_fetched_at_once_and_as_it_is() -> None:
    with PretendedGPU() as gpu:
        there: dict[str, Any] = {
            "scalar": torch.tensor(1.5),
            "other": torch.tensor([2.5, 3.5]),
            "half": torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16),
            "count": torch.tensor(7),
            "is": torch.tensor([True, False]),
            "laid out": torch.arange(24.0).view(2, 2, 3, 2).to(memory_format=torch.channels_last),
            "part": torch.arange(12.0).view(3, 4)[:, 1:3],
            "large": torch.arange(1 << 15, dtype=torch.float32),
            "empty": torch.empty(0, 3),
            "graph": torch.ones(2, requires_grad=True) * 2,
        }
        expected = {name: value.detach().clone() for name, value in there.items()}
        gpu.take(*there.values())
        host = torch.tensor(4.0)
        fetch = Fetch({**there, "host": host, "text": "words", "more": [there["scalar"], None]})
        assert not gpu.waits
        there["count"].add(1)
        found = fetch.wait()
        assert [(wait.what, wait.num_behind) for wait in gpu.waits] == [("event", 1)]
        assert fetch.wait() is not None
        assert len(gpu.waits) == 1
        assert found["text"] == "words"
        assert found["more"][1] is None
        assert found["host"].data_ptr() == host.data_ptr()
        for name, value in expected.items():
            assert found[name].device == CPU
            assert not gpu.is_pinned(found[name])
            assert torch.equal(found[name], value)
            assert found[name].dtype == value.dtype
            assert not found[name].requires_grad
        assert found["laid out"].stride() == there["laid out"].stride()


def test_what_goes_to_the_device_is_not_waited_for() -> None:
    with PretendedGPU() as gpu:
        found = to_device({"a": torch.ones(3), "b": [1, "two"]}, GPU)
        assert found["a"].device == GPU
        assert found["b"] == [1, "two"]
        assert to_device(found, GPU)["a"] is found["a"]
        assert not gpu.waits
        assert torch.equal(to_host(found)["a"], torch.ones(3))
        assert len(gpu.waits) == 1
