"""Two processes that share a GPU's memory: the order of all that is done with each buffer.

On the simulated device each stage is a process with streams of its own, which nothing orders with
those of the other but what their hosts wait for and tell each other. The threads of both run in
many orders, and each knows only what it has waited for or was told.
"""

from __future__ import annotations

import queue
import random
import re
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pipeshift.devices.streams import record_event
from lightning_pipeshift.model.saved.codec import codec_named
from lightning_pipeshift.runtime.comm import threads as threads_module
from lightning_pipeshift.runtime.comm.threads import Threads
from lightning_pipeshift.runtime.offload import activation_store, copying, lending, shared_memory
from lightning_pipeshift.runtime.offload.lending import Borrower, Lender, RemoteTarget
from lightning_pipeshift.runtime.offload.shared_memory import Address
from lightning_pipeshift.runtime.offload.targets import OffloadedBlock
from tests.simulated.device import DataRaceError, SimulatedDevice
from tests.unit.runtime.forgotten_waits import forget
from tests.unit.runtime.interleaving import Interleaving
from tests.unit.runtime.ordered_threads import OrderedThreads
from tests.unit.runtime.test_activation_store import ROWS, Stage, layers_of, same
from tests.unit.runtime.test_simulated_streams import CPU, GPU, Net, batches, step_that_offloads

NUM_ORDERS = 8
NUM_POINTS = {"blocks": 400, "steps": 5000}
"""About how often a thread may give way to another one."""

Take = Callable[[int], None]


class Process:
    """A stage that lends memory to the other one of two, and borrows from it.

    Args:
        stage: 0 or 1.
        net: between the two.
        is_direct: whether blocks are copied to the other's memory, or sent.
        take_room: called with the bytes that it lends.
    """

    def __init__(self, stage: int, net: Net, is_direct: bool, take_room: Take) -> None:
        address = Address("this host", (), "cuda") if is_direct else None
        self.errors: list[BaseException] = []
        self._threads = Threads(f"stage {stage} lends", self.errors.append)
        Lender(net.of(stage), GPU, self._threads, take_room, address).serve(1 - stage)
        other, lanes = 1 - stage, net.of(stage)
        self.borrower = Borrower(other, lanes, 1e12, self.errors.append, GPU, address)

    def close(self) -> None:
        """Ends its threads."""
        self.borrower.close()
        self._threads.close()


def in_order(
    seed: int,
    kind: str,
    stage: Callable[[SimulatedDevice, pytest.MonkeyPatch, Process, int], Any],
    is_direct: bool = True,
    take_room: Take = lambda _: None,
    is_tied: bool = False,
) -> list[Any]:
    """Runs both stages; returns their results.

    Args:
        seed: of the order.
        kind: see :data:`NUM_POINTS`.
        stage: one stage's part.
        is_direct: see :class:`Process`.
        take_room: likewise.
        is_tied: whether opening memory makes the current stream wait, as CUDA does, for the work on
            the stream on which the other process has exported it.
    """
    order = Interleaving(seed, NUM_POINTS[kind])
    found: list[Any] = [None, None]
    with pytest.MonkeyPatch.context() as patch, SimulatedDevice(seed) as device:
        threads = OrderedThreads(order, device)
        modules = [lending, shared_memory, copying, activation_store, threads_module]
        threads.replace_in(patch, *modules)
        patch.setattr(queue, "SimpleQueue", threads.queue)
        patch.setattr(shared_memory, "exported", lambda memory: (memory, record_event(GPU)))
        patch.setattr(shared_memory, "imported", partial(_imported, is_tied))
        net = Net()

        def run(number: int) -> None:
            process = Process(number, net, is_direct, take_room)
            found[number] = stage(device, patch, process, number)
            process.close()
            assert not process.errors

        for number in range(2):
            with device.process(f"stage {number}"):
                order.start(f"stage {number}", device.on_this_device(partial(run, number)))
        order.run()
    return found


def _imported(is_tied: bool, handle: Any, _: torch.device) -> Tensor:
    memory, event = handle
    if is_tied:
        event.wait()
    return memory


# --- blocks ---


def lend_blocks(where: torch.device, codec: str | None, seed: int) -> Any:
    """Blocks of a few sizes leave and come back in any order, and some are forgotten: returns
    whether those that came back are what they were.
    """

    def stage(*given: Any) -> bool:
        process, number = given[-2:]
        place = RemoteTarget({1 - number: process.borrower}, codec=codec_named(codec))
        dice = random.Random(f"{seed} {number}")
        waiting: list[tuple[OffloadedBlock, Tensor]] = []
        is_same = True
        for value in range(6):
            block = torch.arange(float(dice.choice([10, 20])), device=where) + value
            parcel = place.put(block, lambda: None)
            assert parcel is not None
            waiting.append((parcel, block))
            while waiting and dice.random() < 0.6:
                parcel, before = waiting.pop(dice.randrange(len(waiting)))
                if dice.random() < 0.7:
                    # As the store does: not before it has left.
                    parcel.leaving.wait()
                    memory = torch.empty_like(before)
                    parcel.fetch(memory, lambda: None).wait()
                    is_same &= torch.equal(memory.mul(1).cpu(), before.cpu())
                parcel.forget()
        for parcel, _block in waiting:
            parcel.forget()
        return is_same

    return stage


WAYS = pytest.mark.parametrize("is_direct", [True, False], ids=["directly", "sent"])
PLACES = pytest.mark.parametrize("where", [GPU, CPU], ids=["of the GPU", "of its host"])


@WAYS
@PLACES
@pytest.mark.parametrize("codec", [None, "lossless"])
def test_blocks_come_back_in_any_order(
    where: torch.device, codec: str | None, is_direct: bool
) -> None:
    for seed in range(NUM_ORDERS):
        found = in_order(seed, "blocks", lend_blocks(where, codec, seed), is_direct)
        assert found == [True, True], seed


def races_without(
    module: ModuleType,
    function: str,
    where: torch.device,
    codec: str | None = None,
    is_tied: bool = False,
) -> set[str]:
    """The races without a wait, less the lines that asked for the operations; for the rest see
    :func:`in_order`.
    """
    found = set()
    for seed in range(NUM_ORDERS):
        with pytest.MonkeyPatch.context() as patch:
            forget(patch, module, function, "synchronize")
            try:
                in_order(seed, "blocks", lend_blocks(where, codec, seed), is_tied=is_tied)
            except DataRaceError as error:
                found |= set(re.sub(r" \(\w+/\w+\.py:\d+\)", "", str(error)).splitlines())
    return found


@PLACES
def test_a_buffer_is_lent_when_the_lenders_own_work_on_it_is_complete(where: torch.device) -> None:
    """Allocating it writes to it in torch's deterministic mode. A block that was copied there
    before would be lost.
    """
    races = races_without(shared_memory, "opening", where)
    lent = "'other ranks' of stage {}, which writes: nothing orders it and empty on the stream "
    for one, other in ((0, 1), (1, 0)):
        assert any(
            race.startswith("copy_ on the stream " + lent.format(one))
            and race.endswith(f"'other ranks' of stage {other}, which writes")
            for race in races
        ), races


@PLACES
def test_a_buffer_is_opened_on_the_stream_of_the_copies(where: torch.device) -> None:
    """CUDA's own wait for the lender's work is one of the stream on which a buffer is opened."""
    assert not races_without(shared_memory, "opening", where, is_tied=True)


@pytest.mark.parametrize(
    ("module", "function", "codec"),
    [
        pytest.param(lending, "_each", None, id="copies wait for the compute"),
        pytest.param(shared_memory, "copy", None, id="copies are complete"),
        pytest.param(lending, "_decode", "lossless", id="what is decoded is complete"),
    ],
)
def test_the_borrower_waits(module: ModuleType, function: str, codec: str | None) -> None:
    assert races_without(module, function, GPU, codec)


# --- steps ---


@WAYS
@pytest.mark.parametrize("budget", [1.3, 100.0], ids=["tight", "wide"])
@pytest.mark.parametrize("row", ["gpipe", "middle of 1f1b"])
def test_steps_train_the_same_bits_in_any_order(row: str, budget: float, is_direct: bool) -> None:
    """A stage's tensors leave and come back by its threads, while the other stage lends and borrows
    too.
    """
    expected = Stage(layers_of()).step(ROWS[row], batches(ROWS[row]))
    for seed in range(2):
        others = lend_blocks(GPU, None, seed)

        def stage(
            device: SimulatedDevice,
            patch: pytest.MonkeyPatch,
            process: Process,
            number: int,
            others: Any = others,
        ) -> Any:
            if number:
                return others(device, patch, process, number)
            place = RemoteTarget({1: process.borrower})
            return step_that_offloads(device, patch, ROWS[row], place, budget)

        found, is_same = in_order(seed, "steps", stage, is_direct)
        assert same(found, expected), seed
        assert is_same
