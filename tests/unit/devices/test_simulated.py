"""The simulated device says what a real one leaves to luck, and nothing else."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_pipeshift.devices import streams
from lightning_pipeshift.devices.host_memory import pinned_buffer, pinned_like
from lightning_pipeshift.devices.streams import (
    elapsed_seconds,
    keep_for_stream,
    on_this_device,
    pin,
    record_event,
    side_stream,
    synchronize,
)
from tests.simulated.device import DataRaceError, SimulatedDevice

GPU = torch.device("cuda", 0)


def read_beside(waits: bool) -> None:
    """A side stream reads what the compute stream computes."""
    value = torch.ones(3, device=GPU) * 2
    is_computed = record_event(GPU)
    with side_stream(GPU, "copies"):
        if waits:
            is_computed.wait()
        value + 1


def use_new_memory_beside(waits: bool) -> None:
    """Allocating memory writes to it in torch's deterministic mode."""
    value = torch.empty(3, device=GPU)
    is_new = record_event(GPU)
    with side_stream(GPU, "copies"):
        if waits:
            is_new.wait()
        value.fill_(1)


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
    use_new_memory_beside,
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


@pytest.mark.parametrize("missing", ["nothing", "the wait", "the message"])
def test_a_process_knows_what_another_one_has_waited_for_and_told(missing: str) -> None:
    is_right = missing == "nothing"
    fails = pytest.raises(DataRaceError, match="on the compute stream of the lender")
    with nullcontext() if is_right else fails, SimulatedDevice() as device:
        with device.process("the lender"):
            value = torch.ones(3, device=GPU)
            if missing != "the wait":
                synchronize(GPU)
            known = device.told()
        with device.process("the borrower"):
            if missing != "the message":
                device.heard(known)
            # Of its own streams.
            synchronize(GPU)
            value + 1


@pytest.mark.parametrize("is_told", [True, False])
def test_a_thread_may_know_only_what_it_was_told(is_told: bool) -> None:
    known = {}
    with nullcontext() if is_told else pytest.raises(DataRaceError), SimulatedDevice() as device:
        device.are_threads_apart = True
        value = torch.ones(3, device=GPU)
        copy = pinned_like(value).copy_(value, non_blocking=True)
        event = record_event(GPU)

        def work() -> None:
            event.synchronize()
            known.update(device.told())

        thread = threading.Thread(target=on_this_device(work))
        thread.start()
        thread.join()
        if is_told:
            device.heard(known)
        copy.add_(1)


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
                with pytest.raises(RuntimeError, match="must be completed"):
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


# --- what a real accelerator refuses ---


OTHER_GPU = torch.device("cuda", 1)
_MIXED = "Expected all tensors to be on the same device, but found at least two devices"


def recorded(device: torch.device = GPU, is_timed: bool = True) -> torch.Event:
    event = torch.Event(device, enable_timing=is_timed)
    event.record(torch.accelerator.current_stream(device))
    torch.accelerator.synchronize(device)
    return event


def of_a_subclass() -> Any:
    class Subclass(torch.Event):
        pass

    event = Subclass(GPU, enable_timing=True)
    event.record()
    return event


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "time to an event of a subclass": (
        lambda: recorded().elapsed_time(of_a_subclass()),
        RuntimeError,
        "expected other to be a torch.Event object",
    ),
    "time to no event": (
        lambda: recorded().elapsed_time(3),  # type: ignore[arg-type]
        RuntimeError,
        "expected other to be a torch.Event object",
    ),
    "time to an event that was not recorded": (
        lambda: recorded().elapsed_time(torch.Event(GPU, enable_timing=True)),
        ValueError,
        "Both events must be recorded",
    ),
    "time from an event that was not recorded": (
        lambda: torch.Event(GPU, enable_timing=True).elapsed_time(recorded()),
        ValueError,
        "Both events must be recorded",
    ),
    "time of events without timing": (
        lambda: recorded(is_timed=False).elapsed_time(recorded()),
        ValueError,
        "enable_timing=True",
    ),
    "time to another device's event": (
        lambda: recorded().elapsed_time(recorded(OTHER_GPU)),
        RuntimeError,
        "invalid resource handle",
    ),
    "an event on another device's stream": (
        lambda: recorded().record(torch.accelerator.current_stream(OTHER_GPU)),
        RuntimeError,
        "does not match recording stream's device index 1",
    ),
    "an event of another type of device": (
        lambda: torch.Event("cpu").record(torch.accelerator.current_stream()),
        RuntimeError,
        "Event device type CPU does not match recording stream's device type CUDA",
    ),
    "waiting in something that is no stream": (
        lambda: recorded().wait(GPU),  # type: ignore[arg-type]
        TypeError,
        "torch.Stream",
    ),
    "something that is no stream as the current one": (
        lambda: torch.accelerator.set_stream(GPU),  # type: ignore[arg-type]
        TypeError,
        "incompatible function arguments",
    ),
    "the stream of a CPU": (
        lambda: torch.accelerator.current_stream(torch.device("cpu")),
        ValueError,
        "cpu doesn't match the current accelerator cuda",
    ),
    "keeping a CPU's tensor for a stream": (
        lambda: torch.ones(1).record_stream(torch.accelerator.current_stream()),
        NotImplementedError,
        "Could not run 'aten::record_stream' with arguments from the 'CPU' backend",
    ),
    "keeping a tensor for something that is no stream": (
        lambda: torch.ones(1, device=GPU).record_stream(GPU),  # type: ignore[arg-type]
        TypeError,
        "must be Stream",
    ),
    "pinning a tensor of the device": (
        lambda: torch.ones(1, device=GPU).pin_memory(),
        RuntimeError,
        "only dense CPU tensors can be pinned",
    ),
    "making a pinned tensor on the device": (
        lambda: torch.empty(1, device=GPU, pin_memory=True),
        RuntimeError,
        "Only dense CPU tensors can be pinned",
    ),
    "pinning the device's memory": (
        lambda: pin(torch.ones(1, device=GPU), GPU),
        RuntimeError,
        "CUDA's error 1 ",
    ),
    "pinning memory twice": (
        lambda: [pin(one, GPU) for one in [torch.ones(1)] * 2],
        RuntimeError,
        "CUDA's error 712 ",
    ),
    "an array of a tensor of the device": (
        lambda: torch.ones(1, device=GPU).numpy(),
        TypeError,
        "can't convert cuda:0 device type tensor to numpy",
    ),
    "NumPy's own conversion": (
        lambda: np.asarray(torch.ones(1, device=GPU)),
        TypeError,
        "can't convert cuda:0 device type tensor to numpy",
    ),
    "a sum over two devices": (
        lambda: torch.ones(2, device=GPU) + torch.ones(2),
        RuntimeError,
        _MIXED,
    ),
    "writing to a number of the host": (
        lambda: torch.ones(()).add_(torch.ones((), device=GPU)),
        RuntimeError,
        _MIXED,
    ),
    "a list over two devices": (
        lambda: torch.cat([torch.ones(1), torch.ones(1, device=GPU)]),
        RuntimeError,
        _MIXED,
    ),
    "a product with a number as a matrix": (
        lambda: torch.dot(torch.ones(1, device=GPU), torch.ones(1)),
        RuntimeError,
        _MIXED,
    ),
    "indices of the host for an embedding": (
        lambda: nn.functional.embedding(torch.tensor([0]), torch.ones(2, 2, device=GPU)),
        RuntimeError,
        _MIXED,
    ),
    "a random generator of the host": (
        lambda: torch.ones(2, device=GPU).uniform_(generator=torch.Generator()),
        RuntimeError,
        "Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "a tensor on a device that is not there": (
        lambda: torch.ones(2, device=OTHER_GPU),
        RuntimeError,
        "invalid device ordinal",
    ),
    "a move to a device that is not there": (
        lambda: torch.ones(2).to(OTHER_GPU),
        RuntimeError,
        "invalid device ordinal",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_accelerator_refuses_is_refused(name: str) -> None:
    call, kind, message = REFUSED[name]
    with SimulatedDevice(), pytest.raises(kind, match=re.escape(message)):
        call()


def test_what_an_accelerator_takes_is_taken() -> None:
    with SimulatedDevice():
        value = torch.ones(3, device=GPU)
        # Numbers and indices of the host.
        assert (value + torch.tensor(2.0)).tolist() == [3, 3, 3]
        assert value[torch.tensor([0, 1])].tolist() == [1, 1]
        value[torch.tensor([0, 1])] = 3.0
        assert value.tolist() == [3, 3, 1]
        value.fill_(torch.tensor(4.0))
        torch._foreach_mul_([value], torch.tensor(0.5))
        assert value.tolist() == [2, 2, 2]
        # An event that was not recorded orders nothing, and counts as reached.
        event = torch.Event(GPU)
        event.wait()
        event.synchronize()
        assert event.query()
        # A stream of another device waits for an event of this one.
        recorded().wait(torch.accelerator.current_stream(OTHER_GPU))


def test_an_event_that_inherits_from_torch_is_found_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As PipeShift's own did once: on the first GPU, everything that measures failed."""

    def measured() -> float | None:
        begin = record_event(GPU, is_timed=True)
        torch.ones(3, device=GPU)
        end = record_event(GPU, is_timed=True)
        end.synchronize()
        return elapsed_seconds(begin, end)

    with SimulatedDevice():
        assert measured() == pytest.approx(0.001)

        class Inheriting(torch.Event):
            def wait(self, stream: torch.Stream | None = None) -> None:
                super().wait(stream or torch.accelerator.current_stream(self.device))

        def made(device: torch.device, is_timed: bool) -> torch.Event:
            event = Inheriting(device, enable_timing=is_timed)
            event.record(torch.accelerator.current_stream(device))
            return event

        monkeypatch.setattr(streams, "Event", made)
        with pytest.raises(RuntimeError, match=r"expected other to be a torch\.Event object"):
            measured()


def test_a_thread_begins_with_the_first_device() -> None:
    """As with torch: its own streams are those of another device, unless it is told."""
    found = []

    def index() -> None:
        found.append(torch.accelerator.current_device_index())

    with SimulatedDevice(device=OTHER_GPU):
        for target in (index, on_this_device(index)):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert found == [0, 1]


def test_memory_stays_pinned_while_a_view_uses_it() -> None:
    with SimulatedDevice():
        finished: list[None] = []
        view = pinned_buffer(8, GPU, lambda: finished.append(None)).view(torch.float32)
        gc.collect()
        assert view.is_pinned()
        assert not finished
        del view
        gc.collect()
        assert finished
