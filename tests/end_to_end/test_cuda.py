"""The same bits on a GPU: stages that share one through host memory, and stages on one each."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor

from lightning_pipeshift import MemoryCompression, PipeShiftStrategy, RecomputeAll, SwapAll
from lightning_pipeshift.testing.ranks import run_ranks
from tests.features_models import QUIET, built, parameters_of
from tests.models import ZOO

pytestmark = pytest.mark.cuda

NAMES = ["sequential", "dropout", "random_mask", "gpt2", "loose_parameters", "functional_tying"]


def train(
    name: str, shared: bool, precision: Any = "32-true", policy: Any = None
) -> dict[str, Tensor]:
    """One rank's part; ``shared`` puts all stages on the first GPU."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    L.seed_everything(7, verbose=False)
    stages = int(os.environ["WORLD_SIZE"])
    devices = [torch.device("cuda", 0 if shared else stage) for stage in range(stages)]
    specimen = ZOO[name]
    module = built(specimen.make_module)
    trainer = L.Trainer(
        strategy=PipeShiftStrategy(microbatches=4, partition="uniform", parallel_devices=devices),
        precision=precision,
        plugins=[MemoryCompression(policy=policy)] if policy is not None else None,
        max_epochs=1,
        **QUIET,  # type: ignore[arg-type]
    )
    trainer.fit(module, specimen.loader(4), specimen.loader(2))
    return parameters_of(module)


@pytest.mark.parametrize("name", NAMES)
def test_stages_that_share_a_gpu(name: str) -> None:
    (alone,) = run_ranks(train, 1, name, True)
    for found in run_ranks(train, 2, name, True):
        assert_same(found, alone)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_precisions_on_a_shared_gpu(precision: str) -> None:
    (alone,) = run_ranks(train, 1, "dropout", True, precision)
    for found in run_ranks(train, 2, "dropout", True, precision):
        assert_same(found, alone)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "policy", [SwapAll(min_bytes=1), SwapAll("device", min_bytes=1), RecomputeAll()]
)
def test_saved_tensors_that_move(policy: Any, precision: str) -> None:
    (plain,) = run_ranks(train, 1, "dropout", True, precision)
    for stages in (1, 2):
        for found in run_ranks(train, stages, "dropout", True, precision, policy):
            assert_same(found, plain)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", NAMES)
def test_stages_on_a_gpu_each(name: str) -> None:
    (alone,) = run_ranks(train, 1, name, True)
    for found in run_ranks(train, 2, name, False):
        assert_same(found, alone)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].cpu(), value.cpu()), name
