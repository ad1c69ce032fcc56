"""A stage's end of all messages between the stages of a virtual machine.

The receiver of a message knows what has to come, and compares it with the message's label: programs
that run differently on two stages end with an error, at the first message that does not fit.

A message is a frame with its payload; a large payload is sent behind the frame, without a copy.
A thread for each other stage receives what comes; the step takes messages in its own order.

No step waits for a device to send or to receive. Where two stages share memory, what a frame says
is in which buffer the payload is: see :mod:`.memory_link`. Elsewhere a payload is copied to the
host, and a thread waits until it is there. What is read goes through the host in any case.

Programs that differ may also wait for each other for ever. So a stage that has waited for a second
tells all others what it waits for, and how many messages it has sent to and received from each of
them. If nothing is under way between stages that all wait for each other, and that is so twice in a
row, none of them will ever go on (F. Mattern, "Algorithms for distributed termination detection",
1987, section 5: the four counters).
"""

from __future__ import annotations

import enum
import pickle
import struct
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeshift.compat.torch_private import counted_writes, num_other_uses
from lightning_pipeshift.devices.host_memory import pinned_like
from lightning_pipeshift.devices.streams import is_asynchronous, on_this_device
from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.execution.transfer import Fetch
from lightning_pipeshift.runtime.comm.memory_link import MemoryEnd, Taken, Written
from lightning_pipeshift.runtime.comm.messages import (
    ADVICE,
    MOST_DIMS,
    Key,
    Kind,
    Message,
    Place,
    packed,
)
from lightning_pipeshift.runtime.comm.threads import InOrder
from lightning_pipeshift.runtime.comm.waits import Watched, complete

_HEAD = struct.Struct(f"<2q4b3qQq64s96s{MOST_DIMS}q")
_FRAME_TAG, _PAYLOAD_TAG = (1 << 22), (1 << 22) + 1
# The strides of a tensor that is contiguous, or whose layout does not travel.
_CONTIGUOUS = -1
# How long a stage waits before it tells the others, and before it tells them again.
_TELLS_EVERY_SECONDS = 1.0


class _Form(enum.IntEnum):
    NOTHING = 0
    IN_FRAME = 1
    BEHIND = 2
    IN_BUFFER = 3


class _Packed(NamedTuple):
    """The content of a message, as it is sent.

    Args:
        form: where the bytes are.
        data: in the frame; of a form that has none there, empty.
        behind: the bytes that are sent behind the frame, on their way to the host.
        num_bytes: how many bytes the receiver gets of it by gloo.
        strides: of the tensor; ``None`` if they are those of a new one.
        is_view: whether something else has the tensor's memory.
    """

    form: _Form
    data: Tensor
    behind: Fetch | None = None
    num_bytes: int = 0
    strides: tuple[int, ...] | None = None
    is_view: bool = False


_HOST, _NOWHERE = torch.device("cpu"), Place("", 0, "")
_Answer = tuple[int, Key, Tensor | None]
"""Of a stage that has asked for a value: the stage, the message, and the value if there is one."""
KEPT_RUNS = 1
"""A stage may read a value that only another one has by itself in the run that computes it, and in
so many runs behind that; later, only if its owner reads it in the same run."""


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
        device: where this stage computes.
        shares_memory_with: the ranks that can reach the memory of this stage's device.
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
    ) -> None:
        self.stage, self.num_stages = stage, len(ranks)
        self.device = device
        self._shares_memory = [rank in shares_memory_with for rank in ranks]
        # Buffers for each other stage, and those of it, by the size of their content: a buffer is
        # at most twice as large.
        self._ends: dict[tuple[int, int], MemoryEnd] = {}
        self._answers: deque[tuple[MemoryEnd, Taken]] = deque()
        self._group, self._members, self._ranks = group, members, ranks
        self._watched = watched
        self.waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Makes the context of a wait, for a profiler."""
        self.on_send: Callable[[int, Key, int], object] | None = None
        """Is told of each message: the stage that it goes to, its key, and the size of a tensor."""
        self.on_take: Callable[[], object] | None = None
        """Is called when a message has been taken."""
        self.most_large: int | None = None
        """How many large values, and how many gradients, may be on their way: one more waits.
        ``None``: any number."""
        self._arrived = threading.Condition()
        self._messages: dict[Key, Message] = {}
        # The number of the latest message, by source, step, turn and whether it is a gradient.
        self._latest: dict[tuple[int, ...], int] = {}
        self._error: BaseException | None = None
        self._ended: set[int] = set()
        self._num_waits = 0
        self._sent, self._received = [0] * self.num_stages, [0] * self.num_stages
        self._waits: dict[int, _Wait] = {}
        # How often each stage has told of its wait.
        self._num_told = [0] * self.num_stages
        self._under_way: list[tuple[Any, Tensor, int]] = []
        # What takes much memory is let go of when it has been sent; a thread waits for that.
        self._release = InOrder("sent payloads", self._fail)
        self._large: list[tuple[Kind, Future[None]]] = []
        # Payloads leave in the order of their frames; another thread waits for the device.
        self._staging = InOrder("payloads of a device", self._fail)
        self._sending = threading.Lock()
        # What other stages may read; by read, which of them have got it; by value, which have asked
        # for it before it was there: in which run and phase.
        self._offers: dict[Key, tuple[Tensor, int]] = {}
        self._told: dict[Key, set[int]] = {}
        self._asked: dict[Key, list[tuple[int, int, int]]] = {}
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
            threading.Thread(target=on_this_device(partial(self._receive_all, source)), daemon=True)
            for source in range(self.num_stages)
            if source != stage
        ]
        for thread in self._threads:
            thread.start()

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
        is_payload = isinstance(content, Tensor) and content.numel() > 0
        if is_payload and key.kind is not Kind.READ and self._shares_memory[to]:
            assert isinstance(content, Tensor)
            self._send_packed(to, key, place, self._in_buffer(to, content))
        else:
            packed = self._packed(content)
            if packed.behind is not None and self.most_large is not None:
                self.await_sent(key.kind, self.most_large - 1)
            self._send_packed(to, key, place, packed)

    def await_sent(self, kind: Kind, all_but: int = 0) -> None:
        """Waits until large tensors have been sent, and so take no memory.

        Args:
            kind: of their messages.
            all_but: so many, the latest ones, may still be on their way.
        """
        # Not while the lock is held: threads that receive send answers, and a send is over when
        # another stage has received.
        with self._sending:
            under_way = [sent for each, sent in self._large if each is kind]
        for sent in under_way[: max(0, len(under_way) - all_but)]:
            sent.result()

    def _packed(self, content: Tensor | bytes | None) -> _Packed:
        """The content of a message that goes through the host."""
        # Also where user code has set another default device.
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        if content is None:
            return _Packed(_Form.NOTHING, nothing)
        if isinstance(content, bytes):
            data = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else nothing
            strides, is_view = None, False
        else:
            is_view = num_other_uses(content) > 0
            data, strides = packed(content.detach())
        is_on_host = data.device.type == "cpu"
        if data.numel() <= self.room_bytes * is_on_host:
            data = data if is_on_host else nothing
            return _Packed(_Form.IN_FRAME, data, None, data.numel(), strides, is_view)
        fetch = Fetch(data, is_kept=False)
        return _Packed(_Form.BEHIND, nothing, fetch, data.numel(), strides, is_view)

    def _in_buffer(self, to: int, content: Tensor) -> _Packed:
        """The content of a message that another stage copies from a buffer of this one."""
        self._give_back()
        is_view = num_other_uses(content) > 0
        data, strides = packed(content.detach())
        size = data.numel().bit_length()
        said = pickle.dumps((size, data.numel(), self._end(to, size).write([data])))
        frame = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        return _Packed(_Form.IN_BUFFER, frame, None, frame.numel(), strides, is_view)

    def _give_back(self) -> None:
        """Makes buffers free that other stages have copied from."""
        while self._answers:
            end, answer = self._answers.popleft()
            end.give_back(answer)

    def _end(self, stage: int, size: int) -> MemoryEnd:
        end = self._ends.get((stage, size))
        if end is None:
            end = self._ends[stage, size] = MemoryEnd(self.device)
        return end

    def _send_packed(self, to: int, key: Key, place: Place, content: _Packed) -> None:
        data, strides = content.data, content.strides
        frame = torch.empty(_HEAD.size + data.numel(), dtype=torch.uint8, device="cpu")
        _HEAD.pack_into(
            frame.numpy().data,
            0,
            key.step,
            key.turn,
            key.kind,
            content.form,
            _CONTIGUOUS if strides is None else len(strides),
            content.is_view,
            key.part,
            key.serial,
            key.read_in,
            place.digest,
            content.num_bytes,
            _cut(place.label, 64),
            _cut(place.line, 96),
            *((strides or ()) + (0,) * MOST_DIMS)[:MOST_DIMS],
        )
        if data.numel():
            frame[_HEAD.size :] = data
        with self._sending:
            if key.kind.is_of_program:
                self._sent[to] += 1
            # It lives until the next flush.
            self._under_way.append((self._post(frame, to, _FRAME_TAG), frame, to))
            if content.behind is not None:
                self._send_behind(to, key.kind, content.behind)

    def _send_behind(self, to: int, kind: Kind, fetch: Fetch) -> None:
        if is_asynchronous(self.device):
            self._staging.submit(partial(self._post_behind, to, fetch))
        else:
            self._large = [one for one in self._large if not one[1].done()]
            self._large.append((kind, self._post_behind(to, fetch)))

    def _post_behind(self, to: int, fetch: Fetch) -> Future[None]:
        data = fetch.wait()
        sent = self._post(data, to, _PAYLOAD_TAG), data, to
        return self._release.submit(partial(self._complete_send, sent))

    def _post(self, data: Tensor, to: int, tag: int) -> Any:
        with self._watched(self._ranks[to]):
            return self._group.send([data], self._members[to], tag)

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
            large, self._large = ([], self._large) if all_but else (self._large, [])
        for sent in done:
            self._complete_send(sent)
        for _, future in large:
            future.result()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # --- reads ---

    # Whether a read is answered must not depend on which stage is faster. The stage that reads says
    # in which run and phase; what its owner has to say of that is the same before and after.

    def offer(self, key: Key, tensor: Tensor) -> None:
        """Lets other stages ask for a value of this one.

        Args:
            key: of the value: of a message that would carry it, without the run of a read.
            tensor: the value. See :meth:`copy_offer`.
        """
        with self._offering:
            self._offers[key] = tensor, counted_writes(tensor)
            asked = self._asked.pop(key, [])
            answers = [self._answer(key, *each) for each in asked]
        self._send_all(answers)

    def offered(self, key: Key) -> Tensor | None:
        """Returns the value that other stages may read; ``None`` if it is not kept any more.

        Args:
            key: of the value; or of a read of it, which may come too late.
        """
        tensor, version = self._offers.get(key._replace(read_in=0)) or (None, 0)
        is_late = key.read_in > key.step + KEPT_RUNS
        return None if is_late or tensor is None or counted_writes(tensor) != version else tensor

    def copy_offer(self, key: Key) -> None:
        """Copies a value, if others may read it: its memory will be written to."""
        with self._offering:
            if key in self._offers:
                copied = self._offers[key][0].clone()
                self._offers[key] = copied, counted_writes(copied)

    def take_offers(self, other: Mailbox, numbers: Sequence[int]) -> None:
        """Takes what stages could ask another mailbox of this rank for, which is closed.

        Args:
            other: it.
            numbers: the number that each stage has now, by the one that it had there.
        """
        self._offers = {
            key._replace(source=numbers[key.source]): each for key, each in other._offers.items()
        }

    def tell(self, key: Key, place: Place, tensor: Tensor) -> None:
        """Sends a value that is read to all other stages, once in a run."""
        with self._offering:
            told = self._told.setdefault(key, set())
            todo = [to for to in range(self.num_stages) if to != self.stage and to not in told]
            told.update(todo)
        # Before this phase a stage may only read what is kept.
        phase = self.phase if self.offered(key) is None else 0
        content = self._packed(tensor) if todo else None
        for to in todo:
            assert content is not None
            self._send_packed(to, key, place._replace(digest=phase), content)

    def ask(self, key: Key, place: Place) -> None:
        """Asks for a value that this stage reads, and its owner perhaps does not.

        Args:
            key: of the answer.
            place: where this stage needs it.
        """
        asked = key._replace(source=self.stage, kind=Kind.ASK)
        self.send(key.source, asked, place._replace(digest=self.phase), None)

    def _answer(self, value: Key, to: int, read_in: int, phase: int) -> _Answer | None:
        """The answer to a stage that has asked; ``None`` if it has one, or if this stage may still
        come to read the value.
        """
        key = value._replace(read_in=read_in)
        told = self._told.setdefault(key, set())
        offer = self.offered(key)
        if to in told:
            return None
        if offer is None and phase >= self.phase:
            self._asked.setdefault(value, []).append((to, read_in, phase))
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
            answers = [self._answer(key, *each) for key, all_of in asked.items() for each in all_of]
        self._send_all(answers)

    def forget(self, oldest: int) -> None:
        """Drops what is kept for readers in runs before one.

        Args:
            oldest: the run. This stage, and all others, have passed those before it.
        """
        with self._offering:
            self._told = {key: told for key, told in self._told.items() if key.read_in >= oldest}
            kept = oldest - KEPT_RUNS
            self._offers = {key: x for key, x in self._offers.items() if key.step >= kept}
        with self._arrived:
            for key in [x for x in self._messages if x.kind is Kind.READ and x.read_in < oldest]:
                del self._messages[key]

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
        step, turn, kind, form, num_dims, is_view, part, serial, read_in, *rest = _HEAD.unpack_from(
            frame.numpy().data
        )
        digest, num_bytes, label, line, *strides = rest
        data = None
        if form in (_Form.IN_FRAME, _Form.IN_BUFFER):
            data = frame[_HEAD.size : _HEAD.size + num_bytes].clone()
        elif form == _Form.BEHIND:
            data = self._host_memory(num_bytes)
            self._complete(data, source, _PAYLOAD_TAG)
        place = Place(_text(label), digest, _text(line))
        kept = None if num_dims == _CONTIGUOUS else tuple(strides[:num_dims])
        key = Key(source, step, turn, Kind(kind), part, serial, read_in)
        with self._arrived:
            if key.kind is Kind.WAIT:
                assert data is not None
                self._waits[source] = pickle.loads(data.numpy().tobytes())
                self._num_told[source] += 1
            elif key.kind is Kind.END:
                self._ended.add(source)
            elif key.kind is Kind.PASSED:
                self._phases[source] = step
            elif key.kind is Kind.TAKEN:
                assert data is not None
                size, answer = pickle.loads(data.numpy().tobytes())
                self._answers.append((self._ends[source, size], answer))
            elif key.kind is not Kind.ASK:
                self._received[source] += 1
                if key.kind is not Kind.READ or data is not None or key not in self._messages:
                    # That there is nothing to read may be said after it has come.
                    bring: Any = data
                    if form == _Form.IN_BUFFER:
                        bring = partial(self._taken, source, data)
                    self._messages[key] = Message(bring, kept, place, bool(is_view))
                if key.kind is not Kind.READ:
                    self._latest[_direction(key)] = serial
            self._arrived.notify_all()
        if key.kind is Kind.ASK:
            wanted = key._replace(source=self.stage, kind=Kind.READ, read_in=0)
            with self._offering:
                answer = self._answer(wanted, source, read_in, digest)
            self._send_all([answer])
        if key.kind is Kind.WAIT and self._waits[source].phase < self.phase:
            passed = Key(self.stage, self.phase, 0, Kind.PASSED, 0, 0)
            self.send(source, passed, _NOWHERE, None)
        return key.kind is not Kind.END

    def _host_memory(self, num_bytes: int) -> Tensor:
        like = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        if is_asynchronous(self.device):
            # As every thread that is new to a device.
            return on_this_device(partial(pinned_like, like))()
        return torch.empty_like(like, device="cpu")

    def _taken(self, source: int, said: Any) -> Tensor:
        """The bytes that another stage has put into a buffer, in this device's memory."""
        message: tuple[int, int, Written] = pickle.loads(said.numpy().tobytes())
        size, num_bytes, written = message
        found = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        answer = self._end(source, size).take(written, [found])
        key = Key(self.stage, 0, 0, Kind.TAKEN, 0, 0)
        self.send(source, key, _NOWHERE, pickle.dumps((size, answer)))
        return found

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
        if key.source in self._ended:
            return True
        if key.kind is Kind.READ:
            # Its owner answers.
            return False
        if self._phases[key.source] > self.phase:
            return True
        latest = self._latest.get(_direction(key))
        if latest is None:
            return False
        return latest < key.serial if key.kind is Kind.GRADIENT else latest > key.serial

    def wait_for_any(self, keys: Sequence[Key], place: Place) -> None:
        """Waits until one of the messages is there, or will not come.

        Raises:
            LayerError: all stages that could send one wait for this stage in turn.
        """
        if not any(map(self.has, keys)):
            with self.waiting():
                self._wait_for_any(keys, place)

    def _wait_for_any(self, keys: Sequence[Key], place: Place) -> None:
        before: dict[int, _Wait] = {}
        told_before: list[int] = []
        self._num_waits += 1
        while True:
            with self._arrived:
                if any(map(self.has, keys)):
                    return
                sources = tuple({key.source for key in keys})
                source = self._ranks[sources[0]] if len(sources) == 1 else None
                with self._watched(source):
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
            if message.data is None or message.place.digest > self.phase:
                raise LayerError(
                    f"`{place.label}` ({place.line}) reads a value of {self._name(key.source)} that"
                    " is not kept there any more, or is too large to be kept, and that stage does"
                    " not read it. Read it on every rank (without `if trainer.is_global_zero`), in"
                    " the step that has computed it."
                )
        elif message.place[:2] != (_text(_cut(place.label, 64)), place.digest):
            raise self._differs(key, place, message.place)
        if self.on_take is not None:
            self.on_take()
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
        for line in (self._staging, self._release):
            line.submit(self._check).result()
            line.close()
        self.flush()
        for to in range(self.num_stages):
            if to != self.stage:
                self.send(to, Key(self.stage, 0, 0, Kind.END, 0, 0), Place("", 0, ""), None)
        self.flush()
        for thread in self._threads:
            thread.join()
        self._give_back()
        for end in self._ends.values():
            end.close()


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
