"""On a real GPU: what waits for it, memory that is pinned, counted, and lent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor

from lightning_pipeshift import MemoryCompression, PipeShiftStrategy, SwapAll
from lightning_pipeshift.devices.host_memory import pinned_buffer
from lightning_pipeshift.devices.shared_memory import address_here
from lightning_pipeshift.model.tensors.transfer import Fetch, to_device, to_host
from lightning_pipeshift.plan.inputs.cluster import Device
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.offload.copying import StreamCopier
from lightning_pipeshift.runtime.offload.lending import Borrower, Lender, RemoteTarget
from lightning_pipeshift.runtime.planning.probe import probe
from lightning_pipeshift.testing.ranks import run_ranks
from tests.end_to_end.test_waits import NUM_STEPS, Model
from tests.features_models import QUIET, built, parameters_of
from tests.models import points
from tests.unit.runtime.stages import connect
from tests.unit.runtime.test_lending import fetched, nothing
from tests.unit.runtime.test_probe import Alone

pytestmark = pytest.mark.cuda

GPU = torch.device("cuda", 0)


# --- waits ---


class NoWaits(L.Callback):
    """From the third step on, torch raises an error where the program waits for the GPU.

    It does not count waits for an event, of which there is one: see
    ``tests/end_to_end/test_waits.py``.
    """

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if batch_idx >= 2 else "default")

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


def train(
    kind: str, arguments: Mapping[str, Any], swaps: bool = False, may_wait: bool = False
) -> dict[str, Tensor]:
    """One rank's part; all stages are on the first GPU."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    L.seed_everything(7, verbose=False)
    module = built(lambda: Model(kind))
    stages = int(os.environ["WORLD_SIZE"])
    trainer = L.Trainer(
        strategy=PipeShiftStrategy(
            microbatches=4, partition="uniform", parallel_devices=[GPU] * stages
        ),
        plugins=[MemoryCompression(policy=SwapAll(min_bytes=1))] if swaps else None,
        callbacks=[] if may_wait else [NoWaits()],
        max_epochs=1,
        **{**QUIET, **arguments},
    )
    trainer.fit(module, points(NUM_STEPS))
    return parameters_of(module)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("plain", {}),
        ("logging", {}),
        ("weight", {"accumulate_grad_batches": 3}),
        ("logging", {"gradient_clip_val": 0.1}),
        ("weight", {"precision": "16-mixed"}),
        ("logging", {"precision": "16-mixed", "gradient_clip_val": 0.1}),
    ],
)
def test_a_step_does_not_wait_for_the_gpu(kind: str, arguments: Mapping[str, Any]) -> None:
    (alone,) = run_ranks(train, 1, kind, arguments, False, True)
    for found in run_ranks(train, 2, kind, arguments):
        assert_same(found, alone)


def test_a_step_that_swaps_does_not_wait_for_the_gpu() -> None:
    (alone,) = run_ranks(train, 1, "plain", {}, False, True)
    for found in run_ranks(train, 2, "plain", {}, True):
        assert_same(found, alone)


def test_a_structure_is_fetched_without_a_wait_of_torchs() -> None:
    there = {
        "scalar": torch.tensor(1.5, device=GPU),
        "others": torch.arange(5.0, device=GPU),
        "half": torch.ones(2, 3, dtype=torch.bfloat16, device=GPU),
        "laid out": torch.randn(2, 3, 4, 5, device=GPU).to(memory_format=torch.channels_last),
        "large": torch.randn(1 << 20, device=GPU),
        "is": torch.tensor([True, False], device=GPU),
    }
    expected = {name: value.cpu() for name, value in there.items()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        fetch = Fetch(there)
        # The copies have been queued behind what made the values, and in front of this.
        for value in there.values():
            value.zero_()
        found = fetch.wait()
        again = to_device(found, GPU)
        back = to_host(again)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, value in expected.items():
        for mine in (found[name], back[name]):
            assert torch.equal(mine, value)
            assert mine.stride() == value.stride()
            assert not mine.is_pinned()


# --- budgets ---


def test_pinned_memory_is_that_of_the_driver_and_is_released() -> None:
    copier = StreamCopier(GPU)
    finished: list[bool] = []

    def finish() -> None:
        copier.finish()
        finished.append(True)

    # No power of two, and often: what is not released could not be pinned again.
    num_bytes = 5_000_001
    for number in range(1, 51):
        buffer = pinned_buffer(num_bytes, GPU, finish)
        assert buffer.is_pinned()
        assert buffer.numel() == num_bytes
        source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=GPU)
        target = torch.zeros_like(source)
        copier.out(partial(buffer.copy_, source, non_blocking=True), nothing)
        copier.finish()
        back = copier.back(partial(target.copy_, buffer, non_blocking=True), nothing)
        back.wait()
        assert torch.equal(source, target)
        del buffer, back
        copier.close()
        assert len(finished) == number
    # An address that is not pinned any more says so, and the error is not somebody else's.
    torch.ones(3, device=GPU).sum().item()


def test_what_is_in_torchs_cache_is_free() -> None:
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info(GPU)
    block = torch.empty(before // 4, dtype=torch.uint8, device=GPU)
    del block
    assert torch.cuda.mem_get_info(GPU)[0] < 0.8 * before
    measured = probe(Alone(lambda: None), GPU, Device("here", "gpu"))  # type: ignore[arg-type]
    assert measured.cluster.devices[0].free_bytes > 0.9 * before


# --- lending ---


def lend_while_the_other_computes() -> Any:
    """A GPU's two ranks; the compute stream of the lender has work for seconds."""
    channels, _ = connect()
    torch.cuda.set_device(GPU)
    threads = Threads("lending")
    errors: list[BaseException] = []
    if channels.stage:
        lender = Lender(channels.swaps, GPU, threads, lambda _: None, address_here(GPU))
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000_000)
        lender.serve(0)
        channels.receive_object(0)
        return torch.cuda.current_stream().query()
    said: list[str] = []
    borrower = Borrower(1, channels.swaps, errors.append, GPU, address_here(GPU), said.append)
    place = RemoteTarget({1: borrower})
    blocks = [torch.randn(1_000_000 + number, device=GPU) for number in range(6)]
    parcels = [place.put(block, nothing) for block in blocks]
    for block, parcel in zip(blocks, parcels, strict=True):
        assert parcel is not None
        assert torch.equal(fetched(parcel, block), block)
    channels.send_object("it is all back", 1)
    borrower.close()
    channels.settle()
    assert not errors
    return borrower.num_direct, said


def test_ranks_on_one_gpu_lend_to_each_other_directly_and_beside_the_compute() -> None:
    (num_direct, said), is_idle = run_ranks(lend_while_the_other_computes, 2)
    assert not said
    assert num_direct == 6
    assert not is_idle, "the borrower has waited for the lender's compute"


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].cpu(), value.cpu()), name
