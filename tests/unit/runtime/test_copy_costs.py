"""What copies to the host take from the compute: measured once, by the processor's time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_pipeshift.devices.buffers import BufferPool
from lightning_pipeshift.runtime.offload import copy_costs as module
from lightning_pipeshift.runtime.offload.copy_costs import copy_costs
from lightning_pipeshift.runtime.offload.copying import StreamCopier, ThreadCopier
from lightning_pipeshift.runtime.offload.targets import LocalTarget
from tests.simulated.device import SimulatedDevice

CPU = torch.device("cpu")


class BusyCopier(ThreadCopier):
    """A copier whose copies take the processor's time, by a clock of its own."""

    def __init__(self, per_copy: float, per_byte: float) -> None:
        super().__init__()
        self.now = 0.0
        self._costs = per_copy, per_byte

    def _submit(self, way: str, work: Callable[[], Any], done: Callable[[], None]) -> Any:
        def busy() -> None:
            work()
            owner = getattr(work, "func", work)
            if owner.__name__ in ("_leave", "_come"):
                per_copy, per_byte = self._costs
                self.now += per_copy + per_byte * work.args[0].nbytes  # type: ignore[attr-defined]

        return super()._submit(way, busy, done)


@pytest.mark.parametrize(("per_copy", "per_byte"), [(3.0, 0.5), (3.0, 0.0), (0.0, 0.5), (0.0, 0.0)])
def test_they_are_told_apart_by_size(
    per_copy: float, per_byte: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = BusyCopier(per_copy, per_byte)
    clock = SimpleNamespace(process_time=lambda: copier.now)
    monkeypatch.setattr(module, "time", clock)
    pool = BufferPool(CPU, float("inf"))
    found = copy_costs(CPU, LocalTarget(pool, copier))
    assert found == pytest.approx((per_copy, per_byte))
    # Nothing is left on the host.
    assert pool.used_bytes == 0
    copier.close()


def test_of_a_copier_that_needs_no_processor_only_the_computing_thread_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copier = BusyCopier(3.0, 0.5)
    copier.takes_processor = False
    own = iter(range(10**6))
    monkeypatch.setattr(module, "time", SimpleNamespace(thread_time=lambda: float(next(own))))
    # Each measurement takes a second of it, whatever the copies take.
    target = LocalTarget(BufferPool(CPU, float("inf")), copier)
    assert copy_costs(CPU, target) == (0.0, 0.0)
    assert copier.now > 0
    copier.close()


def test_of_a_device_that_copies_by_itself_the_host_that_asks_for_copies_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class AskingCopier(StreamCopier):
        """Each copy takes the thread that asks for it 3 seconds, by a clock of its own."""

        now = 0.0

        def _submit(self, way: str, work: Callable[[], Any], done: Callable[[], None]) -> Any:
            if getattr(work, "args", ()):
                self.now += 3.0
            return super()._submit(way, work, done)

    with SimulatedDevice():
        device = torch.device("cuda", 0)
        copier = AskingCopier(device)
        monkeypatch.setattr(module, "time", SimpleNamespace(thread_time=lambda: copier.now))
        target = LocalTarget(BufferPool(CPU, float("inf"), device), copier)
        assert copy_costs(device, target) == (3.0, 0.0)
        copier.close()
