"""What a message carries is let go of as soon as it has been sent."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipeshift.runtime.comm.messages import Key, Kind, Place
from lightning_pipeshift.testing.ranks import run_ranks
from tests.unit.values.models import connected

PLACE, NUMBERS = Place("layer", 0, "model.py:1"), 1 << 20


def sends_and_forgets() -> bool | list[float]:
    """The first rank tells whether the memory of what it sent is free; the second one gets it."""
    dist.init_process_group("gloo")
    mailbox = connected()
    key = Key(0, 1, 0, Kind.VALUE, 0, 1)
    answer = Key(1, 1, 0, Kind.VALUE, 0, 1)
    if mailbox.stage:
        got = mailbox.take(key, PLACE).tensor(torch.float32, (NUMBERS,))
        mailbox.send(0, answer, PLACE, torch.ones(()))
        mailbox.close()
        return [float(got.min()), float(got.max())]
    sent = torch.full((NUMBERS,), 3.0)
    memory = StorageWeakRef(sent.untyped_storage())
    mailbox.send(1, key, PLACE, sent)
    del sent
    mailbox.take(answer, PLACE)
    # It has arrived; the thread that lets go of it may run later.
    for _ in range(3000):
        if memory.expired():
            break
        time.sleep(0.01)
    was_free = memory.expired()
    mailbox.close()
    return was_free


def test_what_was_sent_is_let_go_of_before_a_flush() -> None:
    was_free, got = run_ranks(sends_and_forgets, 2)
    assert was_free
    assert got == [3.0, 3.0]
