from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from lightning_pipeshift.devices import streams
from lightning_pipeshift.runtime.comm.threads import InOrder, Threads


@pytest.mark.parametrize("kind", [Threads, InOrder])
def test_a_thread_works_on_the_gpu_of_its_caller(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread has a current GPU of its own, and begins with the first."""
    current = threading.local()
    current.gpu = 3

    def index() -> int:
        return getattr(current, "gpu", 0)

    accelerator = torch.accelerator
    monkeypatch.setattr(streams, "initialized_accelerator", lambda: "cuda")
    monkeypatch.setattr(accelerator, "current_device_index", index)
    monkeypatch.setattr(
        accelerator, "set_device_index", lambda gpu: setattr(current, "gpu", gpu.index)
    )
    threads = kind("test")
    assert threads.submit(index).result() == 3
    current.gpu = 1
    assert threads.submit(index).result() == 1
    threads.close()


def test_nothing_touches_a_gpu_that_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("current_device_index", "set_device_index"):
        monkeypatch.setattr(
            torch.accelerator, name, lambda *_: pytest.fail("a context was created")
        )
    threads = Threads("test")
    assert threads.submit(lambda: 5).result() == 5
    threads.close()
