"""Where memory is planned, no more tensors are on their way than a budget counts."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from lightning_pipeshift.plan.cost.layer_memory import SENDS_UNDER_WAY
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.runtime.comm.messages import Key, Kind, Place
from lightning_pipeshift.runtime.comm.sends import Sends


class Slow(Sends):
    """Sends are complete only when they are waited for, as on a network that is slower than the
    stage. Large tensors are counted from their sends to that.
    """

    num_under_way = most_under_way = 0

    def _post(self, data: torch.Tensor, to: int, tag: int) -> Any:
        return None

    def _post_behind(self, to: int, fetch: Any) -> Future[None]:
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        sent: Future[None] = Future()
        inner = sent.result

        def complete(timeout: float | None = None) -> None:
            if not sent.done():
                self.num_under_way -= 1
                sent.set_result(None)
            return inner(timeout)

        sent.result = complete  # type: ignore[method-assign]
        return sent


class Deaf(Mailbox):
    """Receives nothing."""

    def __init__(self) -> None:
        super().__init__(None, [0, 1], [0, 1], 1, nowhere, others=())


def nowhere(_: int | None) -> AbstractContextManager[None]:
    """The context of communication with nobody."""
    return nullcontext()


@pytest.mark.parametrize(
    ("kind", "most", "num_elements", "expected"),
    [
        (Kind.GRADIENT, SENDS_UNDER_WAY, 1 << 16, SENDS_UNDER_WAY),
        (Kind.VALUE, SENDS_UNDER_WAY, 1 << 16, SENDS_UNDER_WAY),
        (Kind.VALUE, None, 1 << 16, 5),
        # What fits in a frame is copied.
        (Kind.GRADIENT, SENDS_UNDER_WAY, 8, 0),
    ],
)
def test_sends_under_way(kind: Kind, most: int | None, num_elements: int, expected: int) -> None:
    mailbox = Deaf()
    sends = Slow(None, [0, 1], [0, 1], nowhere, torch.device("cpu"), mailbox._inbox.fail)
    mailbox._sends, mailbox.most_large = sends, most
    send = partial(mailbox.send, 0, place=Place("a layer", 0, "train.py:1"))
    for turn in range(5):
        send(key=Key(1, 0, turn, kind, 0, turn), content=torch.ones(num_elements))
    assert sends.most_under_way == expected
    # As before a backward.
    mailbox.await_sent(Kind.VALUE)
    assert sends.num_under_way == (min(expected, SENDS_UNDER_WAY) if kind is Kind.GRADIENT else 0)
