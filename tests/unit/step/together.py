"""Runs the stages of a virtual machine in one process, one at a time, in a random order.

Every stage is a thread with its own engine. Only one of them runs; where it waits for a message,
and now and then where it sends one, another goes on, or a message is delivered. A seed decides: a
run can be repeated exactly, and many runs see many orders of events. When all stages wait and no
message is under way, they wait for ever: that is found at once.

The mailboxes are the product's own, except for what moves the bytes. A message's bytes are copied
when it is delivered, or when its sender flushes, as they are on a network: a write to a tensor that
was sent, and not flushed, is seen by the receiver.
"""

from __future__ import annotations

import random
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.runtime.comm.frames import new_frame
from lightning_pipeshift.runtime.comm.inbox import Inbox
from lightning_pipeshift.runtime.comm.mailbox import Mailbox
from lightning_pipeshift.runtime.comm.messages import Key, Place
from lightning_pipeshift.runtime.comm.sends import FRAME_TAG, PAYLOAD_TAG, Sends
from lightning_pipeshift.values.core import Core
from lightning_pipeshift.values.value import run_by, running

T = TypeVar("T")

# A stage that asks so often in a row for a message which is there makes no progress.
_MOST_ASKS = 1000


class StageError(Exception):
    """What went wrong at a stage.

    Args:
        stage: at which stage.
        cause: what it raised there.
    """

    def __init__(self, stage: int, cause: BaseException) -> None:
        super().__init__(f"stage {stage}: {type(cause).__name__}: {cause}")
        self.stage, self.cause = stage, cause


class Hang(Exception):
    """The stages will never go on."""


class _Ended(BaseException):
    """Ends a stage since another one has failed."""


class Stages:
    """The stages, and the messages between them.

    Args:
        num_stages: how many.
        seed: of the order of events.
        yields: how likely a stage that has sent a message lets others run.
    """

    def __init__(self, num_stages: int, seed: int, yields: float = 0.3) -> None:
        self._random, self._yields = random.Random(seed), yields
        self.failure: tuple[int, BaseException] | None = None
        self._under_way: dict[tuple[int, int], deque[list[Tensor]]] = {}
        self._may_run = [threading.Semaphore(0) for _ in range(num_stages)]
        self._waits: dict[int, tuple[Sequence[Key], Place]] = {}
        self._num_begun = [0] * num_stages
        self._ahead: dict[int, int] = {}
        self._is_over = [False] * num_stages
        self._all_over = threading.Semaphore(0)
        self.mailboxes = [InMemoryMailbox(self, num_stages, stage) for stage in range(num_stages)]

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Runs a function for every stage.

        Raises:
            StageError: it raised something at a stage; :class:`Hang` if no stage can go on.
        """
        results: list[Any] = [None] * len(self.mailboxes)
        self._is_over = [False] * len(self.mailboxes)
        states = _states()

        def body(stage: int) -> None:
            self._may_run[stage].acquire()
            _set_states(states)
            torch.set_num_threads(1)
            try:
                if self.failure is None:
                    with run_by(None):
                        results[stage] = work(stage)
            except _Ended:
                pass
            except BaseException as error:
                self.failure = self.failure or (stage, error)
                # Steps that are suspended end with their thread.
                traceback.clear_frames(error.__traceback__)
            self._is_over[stage] = True
            self._next(stage)

        threads = [
            threading.Thread(target=body, args=(stage,), daemon=True)
            for stage in range(len(self.mailboxes))
        ]
        for thread in threads:
            thread.start()
        self._may_run[self._random.randrange(len(threads))].release()
        for thread in threads:
            thread.join()
        _set_states(states)
        if self.failure is not None:
            raise StageError(*self.failure) from self.failure[1]
        return results

    def run_on(self, cores: Sequence[Core], work: Callable[[int], T]) -> list[T]:
        """As :meth:`run`, where layers run at their owners.

        Args:
            cores: one for each stage.
            work: the function.
        """
        with ExitStack() as placed:
            for core in cores:
                placed.enter_context(core.placed())
                placed.enter_context(core.seeing_parameters())
            return self.run(work)

    def wait(self, stage: int, keys: Sequence[Key], place: Place) -> None:
        """Lets others run until one of the messages may be there."""
        self._waits[stage] = keys, place
        self._give_way(stage)
        self._waits.pop(stage, None)

    def begin(self, stage: int, num_ahead: int) -> None:
        """Waits, before a run, until this stage is at most so many runs ahead of the others."""
        self._num_begun[stage] += 1
        self._ahead[stage] = self._num_begun[stage] - num_ahead
        if not self._may_begin(stage):
            self._give_way(stage)
        del self._ahead[stage]

    def _may_begin(self, stage: int) -> bool:
        return stage not in self._ahead or min(self._num_begun) >= self._ahead[stage]

    def sent(self, stage: int) -> None:
        """Lets others run, now and then."""
        if self._random.random() < self._yields:
            self._give_way(stage)

    def _give_way(self, stage: int) -> None:
        # The stages share the process, and so what is global in it.
        with run_by(running()):
            states = _states()
            if self._next(stage):
                self._may_run[stage].acquire()
                _set_states(states)
        if self.failure is not None:
            raise _Ended

    def _next(self, stage: int) -> bool:
        """Picks what happens next; returns whether another stage runs then."""
        while True:
            if self.failure is not None:
                events: list[Any] = [at for at, is_over in enumerate(self._is_over) if not is_over]
            else:
                events = [
                    at
                    for at, is_over in enumerate(self._is_over)
                    if not is_over
                    and (at not in self._waits or self._has_any(at, self._waits[at][0]))
                    and self._may_begin(at)
                ]
                events += [way for way, queue in self._under_way.items() if queue]
            if not events:
                if all(self._is_over):
                    return False
                self.failure = -1, Hang(self._what_all_wait_for())
                continue
            event = self._random.choice(events)
            if isinstance(event, tuple):
                source, to = event
                self.mailboxes[to].deliver(source)
            else:
                if event != stage or self._is_over[stage]:
                    self._may_run[event].release()
                    return True
                return False

    def _has_any(self, stage: int, keys: Sequence[Key]) -> bool:
        return any(map(self.mailboxes[stage].has, keys))

    def _what_all_wait_for(self) -> str:
        return "; ".join(
            f"stage {stage} is at `{place.label}` ({place.line}) and waits for"
            f" {' or '.join(f'{k.kind.name} {k.turn}.{k.serial} of {k.source}' for k in keys)}"
            for stage, (keys, place) in sorted(self._waits.items())
        )

    # --- the network ---

    def post(self, source: int, to: int, data: Tensor, begins: bool) -> None:
        """Sends a part of a message."""
        queue = self._under_way.setdefault((source, to), deque())
        if begins:
            queue.append([])
        queue[-1].append(data)

    def flush(self, source: int) -> None:
        """Copies what a stage has sent: it may change now."""
        for (sender, _), queue in self._under_way.items():
            if sender == source:
                for parts in queue:
                    parts[:] = [part.clone() for part in parts]

    def taken(self, source: int, to: int) -> Tensor:
        """The next part of the next message."""
        queue = self._under_way[source, to]
        part = queue[0].pop(0)
        if not queue[0]:
            queue.popleft()
        return part


class _InMemorySends(Sends):
    """What a stage in this process has sent."""

    def __init__(self, stages: Stages, num_stages: int, stage: int) -> None:
        ranks = list(range(num_stages))
        cpu = torch.device("cpu")
        super().__init__(None, ranks, ranks, lambda _: nullcontext(), cpu, lambda _: None)
        self._stages, self._stage = stages, stage

    def _post(self, data: Tensor, to: int, tag: int) -> None:
        self._stages.post(self._stage, to, data, tag == FRAME_TAG)

    def _send_behind(self, to: int, kind: Any, fetch: Any) -> None:
        self._post(fetch.wait(), to, PAYLOAD_TAG)

    def flush(self, all_but: int = 0) -> None:
        self._stages.flush(self._stage)


class _InMemoryInbox(Inbox):
    """What has come to a stage in this process. No thread receives: messages are delivered."""

    def __init__(self, mailbox: InMemoryMailbox, stages: Stages) -> None:
        ranks = list(range(mailbox.num_stages))
        nowhere, cpu = lambda _: nullcontext(), torch.device("cpu")
        about = mailbox.room_bytes, nowhere, cpu, mailbox._handle, mailbox._taken
        super().__init__(None, ranks, ranks, (), *about)
        self._stages, self._stage = stages, mailbox.stage

    def receive(self, source: int) -> None:
        """Receives a message that is under way."""
        self._receive(source, new_frame(self._room_bytes))

    def _complete(self, buffer: Tensor, source: int, tag: int) -> None:
        part = self._stages.taken(source, self._stage)
        buffer[: part.numel()].copy_(part)


class InMemoryMailbox(Mailbox):
    """A mailbox of a stage in this process."""

    # So that a write before a flush is seen with small tensors, too.
    room_bytes = 700

    def __init__(self, stages: Stages, num_stages: int, stage: int) -> None:
        self._stages, self._num_asks, self._is_delivering = stages, 0, False
        ranks = list(range(num_stages))
        super().__init__(None, ranks, ranks, stage, lambda _: nullcontext(), others=())
        self._others = [other for other in ranks if other != stage]
        self._sends = _InMemorySends(stages, num_stages, stage)
        self._inbox: _InMemoryInbox = _InMemoryInbox(self, stages)

    def _send_packed(self, to: int, key: Key, place: Place, content: Any) -> None:
        self._num_asks = 0
        super()._send_packed(to, key, place, content)
        if not self._is_delivering:
            self._stages.sent(self.stage)

    def deliver(self, source: int) -> None:
        """Receives a message that is under way."""
        self._num_asks, self._is_delivering = 0, True
        self._inbox.receive(source)
        self._is_delivering = False

    def wait_for_any(self, keys: Sequence[Key], place: Place) -> None:
        if any(map(self.has, keys)):
            self._num_asks += 1
            if self._num_asks > _MOST_ASKS:
                raise Hang(f"stage {self.stage} makes no progress at `{place.label}`")
        while not any(map(self.has, keys)):
            self._stages.wait(self.stage, keys, place)


def _states() -> tuple[Any, ...]:
    function = torch.autograd.Function.__dict__["apply"]
    return torch.get_rng_state(), np.random.get_state(), random.getstate(), function


def _set_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    torch.autograd.Function.apply = states[3]  # type: ignore[method-assign]


def is_refusal(error: BaseException) -> bool:
    """Whether an error says that something is not supported: the stages run one program here, so
    an error that they do not is none of these.
    """
    return isinstance(error, LayerError) and "run different programs" not in str(error)
