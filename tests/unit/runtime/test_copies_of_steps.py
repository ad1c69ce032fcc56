"""What a step whose saved tensors move asks of the host, while the device is far behind it: counts,
on a simulated device, that no clock decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pipeshift.devices.buffers import BufferPool
from lightning_pipeshift.model.saved.saved_tensors import SavedTable
from lightning_pipeshift.plan.schedule.actions import Action, Kind
from lightning_pipeshift.runtime.offload.activation_store import ActivationStore, StagePolicy
from lightning_pipeshift.runtime.offload.copying import StreamCopier
from lightning_pipeshift.runtime.offload.targets import LocalTarget
from tests.simulated.device import SimulatedDevice
from tests.unit.runtime.test_activation_store import Stage, layers_of, same, saved_by

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
MICROBATCHES, STEPS = 4, 4
LAYERS = "P" * 12
ROW = tuple(
    Action(kind, number) for number in range(MICROBATCHES) for kind in (Kind.FORWARD, Kind.BACKWARD)
)


class FarBehind(SimulatedDevice):
    """A device that has reached none of the events, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_queries = self.num_pinned = self.num_waits = 0

    def __enter__(self) -> FarBehind:
        super().__enter__()

        def query(_: torch.Event) -> bool:
            self.num_queries += 1
            return False

        # The stand-in of this context.
        torch.Event.query = query  # type: ignore[assignment, method-assign]
        return self

    def pin(self, memory: Tensor) -> Callable[[], None]:
        self.num_pinned += 1
        return super().pin(memory)

    def note(self, what: str, num_behind: int = 0) -> None:
        self.num_waits += 1

    @property
    def counts(self) -> tuple[int, int, int]:
        """The events asked, the buffers pinned, and the waits of the host."""
        return self.num_queries, self.num_pinned, self.num_waits


@contextmanager
def counted_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the bytes of each copy of a tensor, there or back."""
    found: list[int] = []
    for way in ("out", "back"):
        plain = getattr(StreamCopier, way)

        def counts(self: Any, work: Any, done: Any, plain: Any = plain) -> Any:
            if getattr(work, "args", ()):
                found.append(work.args[0].nbytes)
            return plain(self, work, done)

        monkeypatch.setattr(StreamCopier, way, counts)
    yield found


def test_the_host_neither_waits_nor_pins_nor_asks_each_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = [torch.randn(16, 32, generator=generator) for _ in range(MICROBATCHES)]
    expected = Stage(layers_of(LAYERS)).step(ROW, batch)
    device = FarBehind()
    with device, counted_copies(monkeypatch) as copies:
        monkeypatch.setattr(SavedTable, "save", device.inside(SavedTable.save))
        monkeypatch.setattr(ActivationStore, "fetch", device.inside(ActivationStore.fetch))
        copier = StreamCopier(GPU)
        pool = BufferPool(CPU, float("inf"), GPU, copier.finish)
        host = LocalTarget(pool, copier)
        blocks = saved_by(layers_of(LAYERS), batch[0])
        places = {(layer, number): [host] for _, layer, number in blocks}
        # Room for a third of a microbatch: blocks leave while the forward goes on.
        store = ActivationStore(StagePolicy(sum(blocks.values()) / 3, places, host))
        stage = Stage([layer.to(GPU) for layer in layers_of(LAYERS)], store)
        there = [one.to(GPU) for one in batch]
        found: list[tuple[int, ...]] = []
        for _ in range(STEPS):
            before, num_before = device.counts, len(copies)
            gradients = stage.step(ROW, there)
            now = (after - earlier for after, earlier in zip(device.counts, before, strict=True))
            found.append((len(copies) - num_before, *now))
        moved = [gradient.cpu() for gradient in gradients]
        copier.close()
        pool.clear()
    assert same(moved, expected)
    for num_copies, num_queries, num_pinned, num_waits in found[1:]:
        assert num_copies > MICROBATCHES * len(LAYERS)
        assert num_pinned == 0
        assert num_waits == 0
        # Each copy is asked for a few times, and not each time another one begins.
        assert num_queries <= 8 * num_copies, found
