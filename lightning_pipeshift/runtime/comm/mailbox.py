"""A stage's end of all messages between the stages of a virtual machine.

The receiver of a message knows what has to come, and compares it with the message's label: programs
that run differently on two stages end with an error, at the first message that does not fit.

A message is a frame with its payload; a large payload is sent behind the frame, without a copy.
A thread for each other stage receives what comes; the step takes messages in its own order.

Programs that differ may also wait for each other for ever. So a stage that has waited for a second
tells all others what it waits for, and how many messages it has sent to and received from each of
them. If nothing is under way between stages that all wait for each other, and that is so twice in a
row, none of them will ever go on (F. Mattern, "Algorithms for distributed termination detection",
1987, section 5: the four counters).
"""

from __future__ import annotations

import enum
import pickle
import queue
import struct
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import USES_OF_ONE, counted_writes, storage_use_count
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.runtime.comm.messages import (
    ADVICE,
    MOST_DIMS,
    Key,
    Kind,
    Message,
    Place,
    packed,
)
from lightning_pipeshift.runtime.comm.waits import Watched, complete

_HEAD = struct.Struct(f"<2q4b2qQq64s96s{MOST_DIMS}q")
_FRAME_TAG, _PAYLOAD_TAG = (1 << 22), (1 << 22) + 1
# The strides of a tensor that is contiguous, or whose layout does not travel.
_CONTIGUOUS = -1
# How long a stage waits before it tells the others, and before it tells them again.
_TELLS_EVERY_SECONDS = 1.0


class _Form(enum.IntEnum):
    NOTHING = 0
    IN_FRAME = 1
    BEHIND = 2


_NOWHERE = Place("", 0, "")
_Answer = tuple[int, Key, Tensor | None]
"""Of a stage that has asked for a value: the stage, the message, and the value if there is one."""


class _Wait(NamedTuple):
    """A stage's wait, as it tells it to the other stages.

    Args:
        number: of the wait; the same while it lasts.
        place: in the program.
        sources: the stages that could end it.
        sent: how many messages it has sent to each stage.
        received: how many messages it has received from each.
        phase: in which it waits: see :meth:`Mailbox.pass_phase`.
    """

    number: int
    place: Place
    sources: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    phase: int


class Mailbox:
    """This stage's end of all messages.

    Args:
        group: a gloo group of the virtual machine's ranks.
        members: the group's member for each stage.
        ranks: the global rank of each stage.
        stage: this one.
        watched: the context to communicate in.
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
    ) -> None:
        self.stage, self.num_stages = stage, len(ranks)
        self.num_bytes_sent = 0
        self._group, self._members, self._ranks = group, members, ranks
        self._watched = watched
        self._arrived = threading.Condition()
        self._messages: dict[Key, Message] = {}
        # The number of the latest message, by source, step, turn and whether it is a gradient.
        self._latest: dict[tuple[int, ...], int] = {}
        self._reads: dict[Key, int] = {}
        """By message that is a read, the run in which it came: no stage has to take it."""
        self.run = 0
        """The run that has begun last."""
        self._error: BaseException | None = None
        self._ended: set[int] = set()
        self._num_waits = 0
        self._sent, self._received = [0] * self.num_stages, [0] * self.num_stages
        self._waits: dict[int, _Wait] = {}
        # How often each stage has told of its wait.
        self._num_told = [0] * self.num_stages
        self._under_way: list[tuple[Any, Tensor, int]] = []
        # What takes much memory is let go of when it has been sent; a thread waits for that.
        self._large: queue.Queue[tuple[Any, Tensor, int] | None] = queue.Queue()
        self._release: threading.Thread | None = None
        self._sending = threading.Lock()
        # What other stages may read, which of them have got it, and which have asked for it before
        # it was there, each in which phase.
        self._offers: dict[Key, tuple[Tensor, int]] = {}
        self._told: dict[Key, set[int]] = {}
        self._asked: dict[Key, dict[int, int]] = {}
        self.phase = 0
        """See :meth:`pass_phase`."""
        # The phase of each stage, as far as it has told it.
        self._phases = [0] * self.num_stages
        self._offering = threading.Lock()
        self._frames = [
            torch.empty(_HEAD.size + self.room_bytes, dtype=torch.uint8, device="cpu")
            for _ in range(self.num_stages)
        ]
        self._threads = [
            threading.Thread(target=self._receive_all, args=(source,), daemon=True)
            for source in range(self.num_stages)
            if source != stage
        ]
        for thread in self._threads:
            thread.start()

    # --- sending ---

    def send(self, to: int, key: Key, place: Place, content: Tensor | bytes | None) -> None:
        """Sends a message without waiting. A tensor must not change before :meth:`flush`.

        Args:
            to: the stage.
            key: of the message.
            place: in the program.
            content: a tensor, bytes, or ``None`` for a gradient that is not defined.
        """
        form, strides = _Form.NOTHING, None
        # Also where user code has set another default device.
        data = torch.empty(0, dtype=torch.uint8, device="cpu")
        is_view = False
        if isinstance(content, bytes):
            data = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else data
        elif content is not None:
            storage = content.untyped_storage()
            is_view = storage_use_count(storage) > USES_OF_ONE
            data, strides = packed(content.detach())
        if content is not None:
            form = _Form.IN_FRAME if data.numel() <= self.room_bytes else _Form.BEHIND
        in_frame = data.numel() if form is _Form.IN_FRAME else 0
        frame = torch.empty(_HEAD.size + in_frame, dtype=torch.uint8, device="cpu")
        _HEAD.pack_into(
            frame.numpy().data,
            0,
            key.step,
            key.turn,
            key.kind,
            form,
            _CONTIGUOUS if strides is None else len(strides),
            is_view,
            key.part,
            key.serial,
            place.digest,
            data.numel(),
            _cut(place.label, 64),
            _cut(place.line, 96),
            *((strides or ()) + (0,) * MOST_DIMS)[:MOST_DIMS],
        )
        if in_frame:
            frame[_HEAD.size :] = data
        with self._sending:
            if key.kind not in (Kind.WAIT, Kind.ASK, Kind.PASSED):
                self._sent[to] += 1
            self._post(frame, to, _FRAME_TAG)
            if form is _Form.BEHIND:
                self._post(data, to, _PAYLOAD_TAG)
            self.num_bytes_sent += data.numel()

    def _post(self, data: Tensor, to: int, tag: int) -> None:
        with self._watched(self._ranks[to]):
            work = self._group.send([data], self._members[to], tag)
        if tag == _FRAME_TAG:
            # It lives until the next flush.
            self._under_way.append((work, data, to))
            return
        self._large.put((work, data, to))
        if self._release is None:
            self._release = threading.Thread(target=self._release_all, daemon=True)
            self._release.start()

    def _release_all(self) -> None:
        while (sent := self._large.get()) is not None:
            try:
                self._complete_send(sent)
            except BaseException as error:
                self._fail(error)
            # Not until the next one comes.
            del sent
            self._large.task_done()

    def _complete_send(self, sent: tuple[Any, Tensor, int]) -> None:
        work, _, to = sent
        with self._watched(self._ranks[to]):
            complete(work)

    def _fail(self, error: BaseException) -> None:
        with self._arrived:
            self._error = self._error or error
            self._arrived.notify_all()

    def flush(self, all_but: int = 0) -> None:
        """Waits until everything has been sent: its memory may change then.

        Args:
            all_but: so many messages, the latest ones, may still be on their way.
        """
        with self._sending:
            end = max(0, len(self._under_way) - all_but)
            done, self._under_way = self._under_way[:end], self._under_way[end:]
        for sent in done:
            self._complete_send(sent)
        if not all_but:
            self._large.join()
        if self._error is not None:
            raise self._error

    # --- reads ---

    def offer(self, key: Key, tensor: Tensor) -> None:
        """Lets other stages ask for a value of this one.

        Args:
            key: of the message that would carry it.
            tensor: the value.
        """
        with self._offering:
            self._offers[key] = tensor, counted_writes(tensor)
            asked = self._asked.pop(key, {})
            answers = [self._answer(to, key, phase) for to, phase in asked.items()]
        self._send_all(answers)

    def offered(self, key: Key) -> Tensor | None:
        """Returns the value that other stages may read; ``None`` if it is not kept any more, or if
        its memory has been written to since.
        """
        tensor, version = self._offers.get(key) or (None, 0)
        return tensor if tensor is not None and counted_writes(tensor) == version else None

    def tell(self, key: Key, place: Place, tensor: Tensor) -> None:
        """Sends a value that is read to all other stages, once."""
        with self._offering:
            told = self._told.setdefault(key, set())
            todo = [to for to in range(self.num_stages) if to != self.stage and to not in told]
            told.update(todo)
        for to in todo:
            self.send(to, key, place, tensor)

    def ask(self, key: Key, place: Place) -> None:
        """Asks for a value that this stage reads, and its owner perhaps does not.

        Args:
            key: of the answer.
            place: where this stage needs it.
        """
        asked = key._replace(source=self.stage, kind=Kind.ASK)
        self.send(key.source, asked, place._replace(digest=self.phase), None)

    def _answer(self, to: int, key: Key, phase: int) -> _Answer | None:
        """The answer to a stage that has asked; ``None`` if it has one, or if this stage may still
        come to read the value.
        """
        told = self._told.setdefault(key, set())
        offer = self.offered(key)
        if to in told:
            return None
        if offer is None and phase >= self.phase:
            self._asked.setdefault(key, {})[to] = phase
            return None
        told.add(to)
        return to, key, offer

    def _send_all(self, answers: Iterable[_Answer | None]) -> None:
        for answer in answers:
            if answer is not None:
                to, key, tensor = answer
                self.send(to, key, _NOWHERE, tensor)

    def pass_phase(self) -> None:
        """Begins the next phase: this stage sends and reads nothing any more in those before. Every
        stage calls this before it waits for all others by other means: they may wait for a message.
        """
        with self._offering:
            self.phase += 1
            asked, self._asked = self._asked, {}
            answers = [
                self._answer(to, key, of_reader)
                for key, stages in asked.items()
                for to, of_reader in stages.items()
            ]
        self._send_all(answers)

    def forget(self, run: int, newest: int) -> None:
        """Drops what is kept for readers of runs before one.

        Args:
            run: the run.
            newest: the run that begins now.
        """
        self.run = newest
        with self._offering:
            for key in [key for key in self._told if key.step < run - 1]:
                del self._told[key]
            for key in [key for key in self._offers if key.step < run - 1]:
                del self._offers[key]
        with self._arrived:
            for key in [key for key, arrived in self._reads.items() if arrived < run - 1]:
                del self._reads[key]
                self._messages.pop(key, None)

    # --- receiving ---

    def _receive_all(self, source: int) -> None:
        try:
            while self._receive(source):
                pass
        except BaseException as error:
            self._fail(error)

    def _receive(self, source: int) -> bool:
        # What is sent may be shorter.
        frame = self._frames[source]
        self._complete(frame, source, _FRAME_TAG)
        step, turn, kind, form, num_dims, is_view, part, serial, digest, num_bytes, *rest = (
            _HEAD.unpack_from(frame.numpy().data)
        )
        label, line, *strides = rest
        data = None
        if form == _Form.IN_FRAME:
            data = frame[_HEAD.size : _HEAD.size + num_bytes].clone()
        elif form == _Form.BEHIND:
            data = torch.empty(num_bytes, dtype=torch.uint8)
            self._complete(data, source, _PAYLOAD_TAG)
        place = Place(_text(label), digest, _text(line))
        kept = None if num_dims == _CONTIGUOUS else tuple(strides[:num_dims])
        key = Key(source, step, turn, Kind(kind), part, serial)
        with self._arrived:
            if key.kind is Kind.WAIT:
                assert data is not None
                self._waits[source] = pickle.loads(data.numpy().tobytes())
                self._num_told[source] += 1
            elif key.kind is Kind.END:
                self._ended.add(source)
            elif key.kind is Kind.PASSED:
                self._phases[source] = step
            elif key.kind is not Kind.ASK:
                self._received[source] += 1
                if key.kind is not Kind.READ or data is not None or key not in self._messages:
                    # That there is nothing to read may be said after it has come.
                    self._messages[key] = Message(data, kept, place, bool(is_view))
                if key.kind is Kind.READ:
                    self._reads[key] = max(self.run, key.step)
                else:
                    self._latest[_direction(key)] = serial
            self._arrived.notify_all()
        if key.kind is Kind.ASK:
            wanted = key._replace(source=self.stage, kind=Kind.READ)
            with self._offering:
                answer = self._answer(source, wanted, digest)
            self._send_all([answer])
        if key.kind is Kind.WAIT and self._waits[source].phase < self.phase:
            passed = Key(self.stage, self.phase, 0, Kind.PASSED, 0, 0)
            self.send(source, passed, _NOWHERE, None)
        return key.kind is not Kind.END

    def _complete(self, buffer: Tensor, source: int, tag: int) -> None:
        with self._watched(self._ranks[source]):
            complete(self._group.recv([buffer], self._members[source], tag))

    def has(self, key: Key) -> bool:
        """Whether :meth:`take` would return, or raise, at once."""
        return key in self._messages or self._error is not None or self._is_passed(key)

    def _is_passed(self, key: Key) -> bool:
        """Whether the sender is past the message without having sent it. Values come by rising
        numbers, gradients by falling ones.
        """
        if key.source in self._ended or self._phases[key.source] > self.phase:
            return True
        if key.kind is Kind.READ:
            return False
        latest = self._latest.get(_direction(key))
        if latest is None:
            return False
        return latest < key.serial if key.kind is Kind.GRADIENT else latest > key.serial

    def wait_for_any(self, keys: Sequence[Key], place: Place) -> None:
        """Waits until one of the messages is there, or will not come.

        Raises:
            LayerError: all stages that could send one wait for this stage in turn.
        """
        before: dict[int, _Wait] = {}
        told_before: list[int] = []
        self._num_waits += 1
        while True:
            with self._arrived:
                if any(map(self.has, keys)):
                    return
                sources = tuple({key.source for key in keys})
                with self._watched(self._ranks[sources[0]] if len(sources) == 1 else None):
                    if self._arrived.wait_for(
                        lambda: any(map(self.has, keys)), _TELLS_EVERY_SECONDS
                    ):
                        return
                sent, received = tuple(self._sent), tuple(self._received)
                mine = _Wait(self._num_waits, place, sources, sent, received, self.phase)
                self._waits[self.stage] = mine
                self._num_told[self.stage] += 1
                stuck, told = _stuck(self._waits, self.stage), list(self._num_told)
            if stuck != before:
                before, told_before = stuck, told
            elif stuck and all(told[stage] > told_before[stage] for stage in stuck):
                raise self._wait_for_each_other(stuck)
            for to in range(self.num_stages):
                if to != self.stage:
                    key = Key(self.stage, 0, 0, Kind.WAIT, 0, 0)
                    self.send(to, key, place, pickle.dumps(mine))

    def take(self, key: Key, place: Place) -> Message:
        """Waits for a message, and checks that it was sent at the same place in the program.

        Args:
            key: of the message.
            place: where this stage needs it.

        Raises:
            LayerError: the stages run different programs.
        """
        self.wait_for_any([key], place)
        message = self._messages.pop(key, None)
        if message is None:
            if self._error is not None:
                raise self._error
            raise self._differs(key, place, None)
        if key.kind is Kind.READ:
            self._reads.pop(key, None)
            if message.data is None:
                raise LayerError(
                    f"`{place.label}` ({place.line}) reads a value of {self._name(key.source)} that"
                    " is not kept there any more, or is too large to be kept, and that stage does"
                    " not read it. Read it on every rank (without `if trainer.is_global_zero`), in"
                    " the step that has computed it."
                )
        elif message.place[:2] != (_text(_cut(place.label, 64)), place.digest):
            raise self._differs(key, place, message.place)
        return message

    def _differs(self, key: Key, place: Place, other: Place | None) -> LayerError:
        if other is None:
            sent = [
                found.place
                for one, found in self._messages.items()
                if one[:3] == key[:3] and (one.kind is Kind.GRADIENT) == (key.kind is Kind.GRADIENT)
            ]
            other = sent[0] if sent else None
        theirs = "went on without it"
        if other is not None and other.label == _text(_cut(place.label, 64)):
            theirs = f"came to `{other.label}` ({other.line}) with other operations,"
            theirs += " numbers, random draws, or tensors that every rank has"
        elif other is not None:
            theirs = f"is at `{other.label}` ({other.line})"
        return LayerError(
            f"The ranks run different programs in microbatch {key.turn}: {self._name(self.stage)}"
            f" is at `{place.label}` ({place.line}) and needs a {key.kind.name.lower()} of"
            f" {self._name(key.source)}, which {theirs}. {ADVICE}"
        )

    def _wait_for_each_other(self, stuck: dict[int, _Wait]) -> LayerError:
        each = "; ".join(
            f"{self._name(stage)} is at `{wait.place.label}` ({wait.place.line}) and waits for"
            f" {' or '.join(map(self._name, wait.sources))}"
            for stage, wait in sorted(stuck.items())
        )
        return LayerError(
            f"The ranks run different programs, and wait for each other: {each}. {ADVICE}"
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
        with self._arrived:
            left = [
                (key, found)
                for key, found in self._messages.items()
                if key.step < step + (key.turn >= 0) and key.kind is not Kind.READ
            ]
            self._latest = {at: last for at, last in self._latest.items() if at[1] != step}
        for key, found in left:
            place = Place("the end of its step", 0, "")
            raise self._differs(key, place, found.place)

    def close(self) -> None:
        """Ends the threads. Every stage calls this, when no other one can read any more."""
        self.flush()
        for to in range(self.num_stages):
            if to != self.stage:
                self.send(to, Key(self.stage, 0, 0, Kind.END, 0, 0), Place("", 0, ""), None)
        self.flush()
        self._large.put(None)
        for thread in (*self._threads, *([self._release] if self._release else [])):
            thread.join()


def _direction(key: Key) -> tuple[int, ...]:
    is_gradient = key.kind is Kind.GRADIENT
    return key.source, key.step, key.turn, is_gradient, key.part if is_gradient else 0


def _cut(text: str, num_bytes: int) -> bytes:
    """The end of a text that fits into so many bytes."""
    return text.encode()[-num_bytes:].decode(errors="ignore").encode()


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode()


def _stuck(waits: dict[int, _Wait], stage: int) -> dict[int, _Wait]:
    """The waits of all stages that a stage waits for, directly or not; nothing if one of them does
    not wait, or if a message is under way between them.
    """
    found: dict[int, _Wait] = {}
    todo = [stage]
    while todo:
        one = todo.pop()
        if one in found:
            continue
        if one not in waits:
            return {}
        found[one] = waits[one]
        todo += waits[one].sources
    for sender, wait in found.items():
        for receiver, other in found.items():
            if sender != receiver and wait.sent[receiver] != other.received[sender]:
                return {}
    return found
