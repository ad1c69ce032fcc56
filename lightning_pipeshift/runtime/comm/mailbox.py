"""A stage's end of all messages between the stages of a virtual machine.

The receiver of a message knows what has to come, and compares it with the message's label: programs
that run differently on two stages end with an error, at the first message that does not fit, or
when stages wait for each other (:mod:`.deadlock`).

A thread for each other stage receives what comes; the step takes messages in its own order. No step
waits for a device to send or to receive: see :mod:`.sends` and, where two stages share memory,
:mod:`.shared_buffers`. What is read goes through the host in any case; see :mod:`.offers` for what
other stages may read by themselves.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.runtime.comm.deadlock import NO_CIRCLE, Wait, Waits
from lightning_pipeshift.runtime.comm.frames import (
    Packed,
    frame_of,
    label_in_frame,
    packed_for_host,
)
from lightning_pipeshift.runtime.comm.inbox import Inbox
from lightning_pipeshift.runtime.comm.messages import ADVICE, Key, Kind, Message, Place, unpickled
from lightning_pipeshift.runtime.comm.offers import Answer, Offers
from lightning_pipeshift.runtime.comm.sends import Sends
from lightning_pipeshift.runtime.comm.shared_buffers import SharedBuffers
from lightning_pipeshift.runtime.comm.waits import Watched

# The run of what belongs to none: after all others.
_NO_RUN = 1 << 62
_NO_LINE = "no line of the step"
_HOST, _NOWHERE = torch.device("cpu"), Place("", 0, "")
# How long a stage waits before it tells the others, and before it tells them again.
_TELLS_EVERY_SECONDS = 1.0


class Mailbox:
    """This stage's end of all messages.

    Args:
        group: a gloo group of the virtual machine's ranks.
        members: the group's member for each stage.
        ranks: the global rank of each stage.
        stage: this one.
        watched: the context to communicate in.
        device: where this stage computes.
        shares_memory_with: the ranks that can reach the memory of this stage's device.
        others: the stages that it is connected with; ``None``: all.
    """

    room_bytes = 1 << 17
    """Larger payloads are sent behind the frame, without a copy."""

    def __init__(
        self,
        group: Any,
        members: Sequence[int],
        ranks: Sequence[int],
        stage: int,
        watched: Watched,
        device: torch.device = _HOST,
        shares_memory_with: Collection[int] = (),
        others: Collection[int] | None = None,
    ) -> None:
        self.stage, self.num_stages, self.device = stage, len(ranks), device
        self._shares_memory = [rank in shares_memory_with for rank in ranks]
        self._ranks, self._watched = ranks, watched
        self.waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Makes the context of a wait, for a profiler."""
        self.on_send: Callable[[int, Key, int], object] | None = None
        """Is told of each message: the stage that it goes to, its key, and the size of a tensor."""
        self.on_take: Callable[[], object] | None = None
        """Is called when a message has been taken."""
        self.most_large: int | None = None
        """How many large values, and how many gradients, may be on their way: one more waits.
        ``None``: any number."""
        self._buffers = SharedBuffers(device)
        self._offers = Offers(stage, self.num_stages)
        connected = range(self.num_stages) if others is None else others
        self._others = [other for other in connected if other != stage]
        self._inbox = Inbox(
            group,
            members,
            ranks,
            self._others,
            self.room_bytes,
            watched,
            device,
            self._handle,
            self._taken,
        )
        self._sends = Sends(group, members, ranks, watched, device, self._inbox.fail)
        # By sender and receiver.
        self._num_labelled: Counter[tuple[int, int]] = Counter()
        self._ended: set[int] = set()
        # The phase of each stage, as far as it has told it.
        self._phases = [0] * self.num_stages
        self._num_waits = 0
        self._waits = Waits(self.num_stages)
        self._telling = threading.Lock()
        self._inbox.start()

    # --- sending ---

    def send(self, to: int, key: Key, place: Place, content: Tensor | bytes | None) -> None:
        """Sends a message without waiting. A tensor in host memory must not change before
        :meth:`flush`; one of a device may.

        Args:
            to: the stage.
            key: of the message.
            place: in the program.
            content: a tensor, bytes, or ``None`` for a gradient that is not defined.
        """
        if self.on_send is not None:
            self.on_send(to, key, content.nbytes if isinstance(content, Tensor) else 0)
        is_shared = self._shares_memory[to] and key.kind is not Kind.READ
        if is_shared and isinstance(content, Tensor) and content.numel():
            self._send_packed(to, key, place, self._buffers.write(to, content))
        else:
            packed = packed_for_host(content, self.room_bytes)
            if packed.behind is not None and self.most_large is not None:
                self.await_sent(key.kind, self.most_large - 1)
            self._send_packed(to, key, place, packed)

    def _send_packed(self, to: int, key: Key, place: Place, content: Packed) -> None:
        self._sends.send(to, key.kind, frame_of(key, place, content), content.behind)

    def _own_key(self, kind: Kind, step: int = 0) -> Key:
        """The key of a message that no step waits for."""
        return Key(self.stage, step, 0, kind, 0, 0)

    def _send_to_others(self, kind: Kind, place: Place, content: bytes | None) -> None:
        for to in self._others:
            self.send(to, self._own_key(kind), place, content)

    # --- apart from programs ---

    def send_labelled(self, to: int, label: str, content: Tensor | None) -> None:
        """Sends a tensor that is no value of a program. See :meth:`send`.

        Args:
            to: the stage.
            label: names it.
            content: the tensor; ``None``: there is none.
        """
        self._num_labelled[self.stage, to] += 1
        self.send(to, self._labelled_key(self.stage, to), Place(label, 0, _NO_LINE), content)

    def take_labelled(self, source: int, label: str) -> Message:
        """Waits for what another stage sends with :meth:`send_labelled`.

        Args:
            source: the stage.
            label: as there.
        """
        self._num_labelled[source, self.stage] += 1
        return self.take(self._labelled_key(source, self.stage), Place(label, 0, _NO_LINE))

    def _labelled_key(self, source: int, to: int) -> Key:
        return Key(source, _NO_RUN, 0, Kind.LABELLED, 0, self._num_labelled[source, to])

    def await_sent(self, kind: Kind, all_but: int = 0) -> None:
        """Waits until large tensors have been sent, and so take no memory.

        Args:
            kind: of their messages.
            all_but: so many, the latest ones, may still be on their way.
        """
        self._sends.await_large(kind, all_but)

    def flush(self, all_but: int = 0) -> None:
        """Waits until everything has been sent: its memory may change then.

        Args:
            all_but: so many messages, the latest ones, may still be on their way.
        """
        self._sends.flush(all_but)
        self._check()

    def _check(self) -> None:
        if self._inbox.error is not None:
            raise self._inbox.error

    # --- reads ---

    def offer(self, key: Key, tensor: Tensor) -> None:
        """Lets other stages ask for a value of this one.

        Args:
            key: of the value: of a message that would carry it, without the run of a read.
            tensor: the value. See :meth:`copy_offer`.
        """
        self._send_all(self._offers.offer(key, tensor))

    def offered(self, key: Key) -> Tensor | None:
        """Returns the value that other stages may read; ``None`` if it is not kept any more. See
        :meth:`Offers.find`.
        """
        return self._offers.find(key)

    def copy_offer(self, key: Key) -> None:
        """Copies a value, if others may read it: its memory will be written to."""
        self._offers.copy(key)

    def take_offers(self, other: Mailbox, numbers: Sequence[int]) -> None:
        """Takes what stages could ask another mailbox of this rank for, which is closed.

        Args:
            other: it.
            numbers: the number that each stage has now, by the one that it had there.
        """
        self._offers.take(other._offers, numbers)

    def tell(self, key: Key, place: Place, tensor: Tensor) -> None:
        """Sends a value that is read to all other stages, once in a run."""
        todo = self._offers.not_told(key)
        # Before this phase a stage may only read what is kept.
        phase = self._offers.phase if self.offered(key) is None else 0
        if todo:
            content = packed_for_host(tensor, self.room_bytes)
            for to in todo:
                self._send_packed(to, key, place._replace(digest=phase), content)

    def ask(self, key: Key, place: Place) -> None:
        """Asks for a value that this stage reads, and its owner perhaps does not.

        Args:
            key: of the answer.
            place: where this stage needs it.
        """
        asked = key._replace(source=self.stage, kind=Kind.ASK)
        self.send(key.source, asked, place._replace(digest=self._offers.phase), None)

    def _send_all(self, answers: Iterable[Answer]) -> None:
        for to, key, tensor in answers:
            self.send(to, key, _NOWHERE, tensor)

    def pass_phase(self) -> None:
        """Begins the next phase: this stage sends and reads nothing any more in those before. Every
        stage calls this before it waits for all others by other means: they may wait for a message.
        """
        self._send_all(self._offers.pass_phase())

    def forget(self, oldest: int) -> None:
        """Drops what is kept for readers in runs before one.

        Args:
            oldest: the run. This stage, and all others, have passed those before it.
        """
        self._offers.forget(oldest)
        self._inbox.forget_reads(oldest)

    # --- receiving ---

    def _handle(self, key: Key, place: Place, data: Any) -> None:
        """Does what a message of another mailbox says: called in the thread of its source."""
        source = key.source
        if key.kind is Kind.TAKEN:
            self._buffers.note_answer(source, data)
        elif key.kind is Kind.END:
            self._ended.add(source)
        elif key.kind is Kind.PASSED:
            self._phases[source] = key.step
        elif key.kind is Kind.ASK:
            wanted = key._replace(source=self.stage, kind=Kind.READ, read_in=0)
            self._send_all(self._offers.ask(wanted, source, key.read_in, place.digest))
        else:
            wait: Wait = unpickled(data)
            with self._telling:
                self._waits.note(source, wait)
            if wait.phase < self._offers.phase:
                self.send(source, self._own_key(Kind.PASSED, self._offers.phase), _NOWHERE, None)

    def _taken(self, source: int, said: Tensor) -> Tensor:
        """The bytes that another stage has put into a buffer, in this device's memory."""
        found, answer = self._buffers.read(source, said)
        self.send(source, self._own_key(Kind.TAKEN), _NOWHERE, answer)
        return found

    def has(self, key: Key) -> bool:
        """Whether :meth:`take` would return, or raise, at once."""
        return self._inbox.has(key) or self._inbox.error is not None or self._is_passed(key)

    def _is_passed(self, key: Key) -> bool:
        """Whether the sender is past the message, which may have come meanwhile: see
        :meth:`Inbox.pop`.
        """
        if key.source in self._ended:
            return True
        if key.kind is Kind.READ:
            # Its owner answers.
            return False
        return self._phases[key.source] > self._offers.phase or self._inbox.is_past(key)

    def wait_for_any(self, keys: Sequence[Key], place: Place) -> None:
        """Waits until one of the messages is there, or will not come.

        Raises:
            LayerError: all stages that could send one wait for this stage in turn.
        """
        if not any(map(self.has, keys)):
            with self.waiting():
                self._wait_for_any(keys, place)

    def _wait_for_any(self, keys: Sequence[Key], place: Place) -> None:
        before = NO_CIRCLE
        self._num_waits += 1
        sources = tuple({key.source for key in keys})
        source = self._ranks[sources[0]] if len(sources) == 1 else None
        while True:
            with self._watched(source):
                if self._inbox.wait(lambda: any(map(self.has, keys)), _TELLS_EVERY_SECONDS):
                    return
            counts = tuple(self._sends.counts), tuple(self._inbox.counts)
            mine = Wait(self._num_waits, place, sources, *counts, self._offers.phase)
            with self._telling:
                self._waits.note(self.stage, mine)
                circle = self._waits.circle(self.stage)
            if circle.waits != before.waits:
                before = circle
            elif circle.lasts_since(before):
                raise circle.error(self._name)
            self._send_to_others(Kind.WAIT, place, pickle.dumps(mine))

    def take(self, key: Key, place: Place) -> Message:
        """Waits for a message, and checks that it was sent at the same place in the program.

        Args:
            key: of the message.
            place: where this stage needs it.

        Raises:
            LayerError: the stages run different programs.
        """
        self.wait_for_any([key], place)
        message = self._inbox.pop(key)
        if message is None:
            self._check()
            raise self._differs(key, place, None)
        if key.kind is Kind.READ:
            if message.data is None or message.place.digest > self._offers.phase:
                raise LayerError(
                    f"`{place.label}` ({place.line}) reads a value of {self._name(key.source)} that"
                    " is not kept there any more, or is too large to be kept, and that stage does"
                    " not read it. Read it on every rank (without `if trainer.is_global_zero`), in"
                    " the step that has computed it."
                )
        elif message.place[:2] != (label_in_frame(place.label), place.digest):
            raise self._differs(key, place, message.place)
        if self.on_take is not None:
            self.on_take()
        return message

    def _differs(self, key: Key, place: Place, other: Place | None) -> LayerError:
        if other is None:
            others = (
                found.place
                for one, found in self._inbox.untaken()
                if one[:3] == key[:3] and (one.kind is Kind.GRADIENT) == (key.kind is Kind.GRADIENT)
            )
            other = next(others, None)
        theirs = "went on without it"
        if other is not None and other.label == label_in_frame(place.label):
            theirs = f"came to `{other.label}` ({other.line}) with other operations,"
            theirs += " numbers, random draws, or tensors that every rank has"
        elif other is not None:
            theirs = f"is at `{other.label}` ({other.line})"
        what = "message" if key.kind is Kind.LABELLED else key.kind.name.lower()
        return LayerError(
            f"The ranks run different programs in microbatch {key.turn}: {self._name(self.stage)}"
            f" is at `{place.label}` ({place.line}) and needs a {what} of"
            f" {self._name(key.source)}, which {theirs}. {ADVICE}"
        )

    def _name(self, stage: int) -> str:
        return f"stage {stage} (rank {self._ranks[stage]})"

    def finish(self, step: int, all_but: int = 0) -> None:
        """Ends a run: everything was sent, and everything that came was taken. Messages of what
        follows the run, with a negative turn, may have come already.

        Args:
            step: its number.
            all_but: as for :meth:`flush`.

        Raises:
            LayerError: another stage sent what this one never asked for.
        """
        self.flush(all_but)
        left = [
            (key, found)
            for key, found in self._inbox.untaken()
            if key.step < step + (key.turn >= 0) and key.kind is not Kind.READ
        ]
        self._inbox.end_run(step)
        for key, found in left:
            raise self._differs(key, Place("the end of its step", 0, ""), found.place)

    def close(self) -> None:
        """Ends the threads. Every stage calls this, when no other one can read any more."""
        self._sends.close(self._check)
        self.flush()
        self._send_to_others(Kind.END, _NOWHERE, None)
        self.flush()
        self._inbox.join()
        self._buffers.close()
