"""Streams of an accelerator, with torch's own functions replaced, and of a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_pipeshift.devices import streams
from lightning_pipeshift.devices.streams import (
    elapsed_seconds,
    is_asynchronous,
    record_event,
    side_stream,
)

CPU = torch.device("cpu")


class Torch:
    """Stands in for what torch knows of streams: in one thread, with two devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_made = 0
        self.index = 0
        self.current = [SimpleNamespace(device_index=n, name=f"compute {n}") for n in range(2)]
        monkeypatch.setattr(torch, "Stream", self.make)
        for name in ("current_stream", "set_stream", "device_index"):
            monkeypatch.setattr(torch.accelerator, name, getattr(self, name))

    def make(self, device: torch.device) -> Any:
        self.num_made += 1
        return SimpleNamespace(device_index=device.index, name=f"side {self.num_made}")

    def current_stream(self, device: torch.device) -> Any:
        return self.current[device.index]

    def set_stream(self, stream: Any) -> None:
        self.index = stream.device_index
        self.current[stream.device_index] = stream

    @contextmanager
    def device_index(self, index: int) -> Iterator[None]:
        before, self.index = self.index, index
        try:
            yield
        finally:
            self.index = before

    @property
    def names(self) -> list[str]:
        return [stream.name for stream in self.current]


def test_each_kind_of_work_has_one_stream_and_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has 32 streams: with one for each copy, the next is one that others wait on."""
    fake = Torch(monkeypatch)
    monkeypatch.setattr(streams, "_side_streams", {})
    device = torch.device("cuda", 1)
    for _ in range(40):
        with side_stream(device, "out"):
            assert (fake.index, fake.names) == (1, ["compute 0", "side 1"])
            with side_stream(device, "back"), side_stream(device, "out"):
                assert fake.names[1] == "side 1"
            assert fake.names[1] == "side 1"
        assert (fake.index, fake.names) == (0, ["compute 0", "compute 1"])
    with pytest.raises(ValueError, match="fails"), side_stream(device, "out"):
        raise ValueError("fails")
    assert (fake.index, fake.names) == (0, ["compute 0", "compute 1"])
    assert fake.num_made == 2


def test_on_a_cpu_everything_is_complete_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.5])
    monkeypatch.setattr(streams, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    assert not is_asynchronous(CPU)
    begin = record_event(CPU, is_timed=True)
    with side_stream(CPU, "copies"):
        end = record_event(CPU, is_timed=True)
        begin.wait()
        end.synchronize()
    assert elapsed_seconds(begin, end) == 2.5
