"""The simulated device says what a real one leaves to luck, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipeshift.devices.host_memory import pinned_like
from lightning_pipeshift.devices.simulated import DataRaceError, SimulatedDevice
from lightning_pipeshift.devices.streams import (
    elapsed_seconds,
    keep_for_stream,
    on_this_device,
    pin,
    record_event,
    side_stream,
    synchronize,
)

GPU = torch.device("cuda", 0)


def read_beside(waits: bool) -> None:
    """A side stream reads what the compute stream computes."""
    value = torch.ones(3, device=GPU) * 2
    is_computed = record_event(GPU)
    with side_stream(GPU, "copies"):
        if waits:
            is_computed.wait()
        value + 1


def read_what_a_side_stream_writes(waits: bool) -> None:
    value = torch.zeros(3, device=GPU)
    synchronize(GPU)
    with side_stream(GPU, "copies"):
        value.fill_(1)
        is_written = record_event(GPU)
    if waits:
        is_written.wait()
    value.sum()


def overwrite_what_a_side_stream_reads(waits: bool) -> None:
    value = torch.zeros(3, device=GPU)
    synchronize(GPU)
    with side_stream(GPU, "copies"):
        value.clone()
        is_read = record_event(GPU)
    if waits:
        is_read.wait()
    value.add_(1)


def read_on_the_host(waits: bool) -> None:
    value = torch.arange(3, device=GPU)
    copy = pinned_like(value).copy_(value, non_blocking=True)
    event = record_event(GPU)
    if waits:
        event.synchronize()
    assert copy.tolist() == [0, 1, 2]


def overwrite_on_the_host(waits: bool) -> None:
    source = torch.arange(3.0).pin_memory()
    source.to(GPU, non_blocking=True)
    if waits:
        synchronize(GPU)
    source.zero_()


def overwrite_before_a_thread_has_waited(waits: bool) -> None:
    value = torch.ones(3, device=GPU)
    copy = pinned_like(value).copy_(value, non_blocking=True)
    event = record_event(GPU)

    def work() -> None:
        if waits:
            event.synchronize()
        copy.add_(1)

    thread = threading.Thread(target=on_this_device(work))
    thread.start()
    thread.join()


def reuse_memory_that_is_read(waits: bool) -> None:
    """What is freed goes to the next allocation of its stream, as the allocator does it."""
    value = torch.ones(3, device=GPU)
    is_computed = record_event(GPU)
    with side_stream(GPU, "copies"):
        is_computed.wait()
        if waits:
            keep_for_stream(value)
        value.clone()
    del value
    torch.zeros(5, device=GPU)


def reuse_memory_of_a_side_stream(waits: bool) -> None:
    """The other way round: the compute uses memory that belongs to a side stream."""
    with side_stream(GPU, "copies"):
        value = torch.ones(3, device=GPU)
        is_written = record_event(GPU)
    is_written.wait()
    value.sum()
    is_used = record_event(GPU)
    del value
    with side_stream(GPU, "copies"):
        if waits:
            is_used.wait()
        torch.zeros(3, device=GPU)


def use_memory_that_another_operation_uses(waits: bool) -> None:
    """A side stream writes to new memory, whose last user on the compute stream is not done."""
    torch.ones(3, device=GPU).sum()
    target = torch.empty(3, device=GPU)
    is_free = record_event(GPU)
    with side_stream(GPU, "copies"):
        if waits:
            is_free.wait()
        target.fill_(1)


def unpin_what_is_copied(waits: bool) -> None:
    room = torch.zeros(3)
    unpin = pin(room, GPU)
    torch.ones(3, device=GPU).copy_(room, non_blocking=True)
    if waits:
        synchronize(GPU)
    unpin()


def lists_of_tensors(waits: bool) -> None:
    """An optimizer's operations."""
    values = [torch.ones(3, device=GPU) for _ in range(2)]
    synchronize(GPU)
    torch._foreach_add_(values, 1.0)
    event = record_event(GPU)
    with side_stream(GPU, "copies"):
        if waits:
            event.wait()
        values[1].clone()


CASES: list[Callable[[bool], None]] = [
    read_beside,
    read_what_a_side_stream_writes,
    overwrite_what_a_side_stream_reads,
    read_on_the_host,
    overwrite_on_the_host,
    overwrite_before_a_thread_has_waited,
    reuse_memory_that_is_read,
    reuse_memory_of_a_side_stream,
    use_memory_that_another_operation_uses,
    unpin_what_is_copied,
    lists_of_tensors,
]


@pytest.mark.parametrize("case", CASES)
def test_a_missing_wait_is_an_error(case: Callable[[bool], None]) -> None:
    with SimulatedDevice():
        case(True)
    with pytest.raises(DataRaceError, match="nothing orders"), SimulatedDevice():
        case(False)


def test_the_error_names_both_operations_and_their_lines() -> None:
    with pytest.raises(DataRaceError) as caught, SimulatedDevice():
        read_beside(False)
    message = str(caught.value)
    lines = read_beside.__code__.co_firstlineno
    assert f"add (devices/test_simulated.py:{lines + 7}) on the stream 'copies'" in message
    assert f"mul (devices/test_simulated.py:{lines + 2}) on the compute stream" in message


@pytest.mark.parametrize(("begin", "is_apart"), [(5, True), (4, False)])
def test_parts_of_memory_are_told_apart(begin: int, is_apart: bool) -> None:
    with nullcontext() if is_apart else pytest.raises(DataRaceError), SimulatedDevice():
        value = torch.zeros(10, device=GPU)
        synchronize(GPU)
        value[:5].fill_(1)
        with side_stream(GPU, "copies"):
            value[begin:].fill_(2)


def test_what_waits_for_the_device_needs_no_event() -> None:
    with SimulatedDevice():
        value = torch.ones(3, device=GPU) * 2
        assert value.sum().item() == 6
        with side_stream(GPU, "copies"):
            value + 1
        (value * 2).cpu()
        torch.zeros(3).copy_(value * 3)


def test_tensors_are_where_they_are_said_to_be() -> None:
    with SimulatedDevice():
        made: dict[str, Any] = {
            "zeros": torch.zeros(3, device=GPU),
            "like": torch.empty_like(torch.zeros(3), device=GPU),
            "moved": torch.ones(3).to(GPU, torch.float64),
            "computed": torch.ones(3, device=GPU)[1:] + 1,
            "numbers": torch.tensor([1.0], device=GPU),
            "new": torch.ones(3, device=GPU).new_zeros(4),
        }
        for name, value in made.items():
            assert value.device == GPU, name
            assert value.cpu().device.type == "cpu", name
        pinned = pinned_like(made["zeros"])
        assert pinned.device.type == "cpu"
        assert pinned.is_pinned()
        assert torch.empty_like(made["zeros"], device="meta").is_meta


def test_training_has_the_bits_of_the_cpu() -> None:
    def train(device: torch.device) -> list[Tensor]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        batch = torch.randn(6, 4).to(device)
        optimizer = torch.optim.AdamW(net.parameters())
        for parameter in net.parameters():
            parameter.data = parameter.to(device)
        for name, buffer in net.named_buffers():
            owner, _, last = name.rpartition(".")
            setattr(net.get_submodule(owner), last, buffer.to(device))
        for _ in range(3):
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in net.parameters()]

    expected = train(torch.device("cpu"))
    with SimulatedDevice() as device:
        found = train(GPU)
    assert device.num_done > 100
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_events_are_reached_sooner_or_later_and_time_passes() -> None:
    denials = set()
    for seed in range(20):
        with SimulatedDevice(seed):
            begin = record_event(GPU, is_timed=True)
            torch.zeros(3, device=GPU).add_(1)
            end = record_event(GPU, is_timed=True)
            count = 0
            while (seconds := elapsed_seconds(begin, end)) is None:
                with pytest.raises(RuntimeError, match="not reached"):
                    begin.elapsed_time(end)
                count += 1
            assert seconds == pytest.approx(0.002)
            denials.add(count)
    assert denials == {0, 1, 2, 3}


def test_outside_of_the_context_there_is_no_device() -> None:
    with SimulatedDevice():
        value = torch.ones(3, device=GPU)
    assert value.device.type == "cpu"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(3, device=GPU)
