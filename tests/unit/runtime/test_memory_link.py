"""Buffers through which two ranks of one host send tensors: here both ends are in one process."""

from __future__ import annotations

import torch

from lightning_pipeshift.runtime.comm.memory_link import MemoryEnd

CPU = torch.device("cpu")


def test_payloads_that_grow_get_larger_buffers_and_few_of_them() -> None:
    """Longer sequences, or a validation batch that is larger than the training's."""
    sender, receiver = MemoryEnd(CPU), MemoryEnd(CPU)
    opened, gone = 0, 0
    for length in (1000, 1010, 1100, 1200, 5000, 5001, 10, 6000):
        sent = torch.arange(length, dtype=torch.float32)
        message = sender.write([sent, sent + 1])
        opened += message.opening.handle is not None
        gone += len(message.opening.gone)
        received = [torch.zeros(length), torch.zeros(length)]
        sender.give_back(receiver.take(message, received))
        assert torch.equal(received[0], sent)
        assert torch.equal(received[1], sent + 1)
    # Of 1000, of a quarter more, and of 5000 and a quarter more; one at a time.
    assert opened == 4
    assert gone == 3
    sender.close()
