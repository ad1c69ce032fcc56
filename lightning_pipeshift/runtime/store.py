"""The activation store: where each block of saved tensors is, and that no budget is exceeded.

CN114880130B, after MPress (HPCA 2023), step 5: a table of every moved tensor and of every device's
memory. Layers say what they are about to save and what they have saved; the store moves what the
plan says as soon as its layer is done, and brings it back, in the order in which backwards need it,
as soon as there is room and before they do.
"""

from __future__ import annotations

import enum
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from lightning_pipeshift.errors import BudgetError
from lightning_pipeshift.model.saved import Block
from lightning_pipeshift.plan.action import Action, Kind, Row
from lightning_pipeshift.plan.saved_tensors import FRONT, place_in_forward
from lightning_pipeshift.runtime.copying import Ticket
from lightning_pipeshift.runtime.places import Parcel, Place

_PATIENCE_SECONDS: Final = 20.0
_PATIENCE_ACTIONS: Final = 5.0
_PAUSE_SECONDS: Final = 1e-3
"""How long at least, for how many of this stage's longest action so far, and how often, room is
looked for that another stage was promised."""

_MARGIN: Final = 1.1
"""How much more than was lacking is named as what would have been enough."""


class _Is(enum.Enum):
    HERE = enum.auto()
    LEAVING = enum.auto()
    AWAY = enum.auto()
    COMING = enum.auto()


class _Entry:
    """A block in the table."""

    __slots__ = (
        "block",
        "coming",
        "has_come",
        "is_gone",
        "layer",
        "memory",
        "microbatch",
        "num_bytes",
        "num_sent",
        "number",
        "parcel",
        "state",
    )

    def __init__(self, block: Block) -> None:
        self.block = weakref.ref(block)
        self.layer, self.number = block.layer, block.number
        self.microbatch = block.microbatch
        self.num_bytes = block.num_bytes
        self.state = _Is.HERE
        self.num_sent = 0
        """How often it has been sent away: tells a copy that is done from an earlier one, of which
        nobody wants to know any more."""
        self.parcel: Parcel | None = None
        self.coming: Ticket | None = None
        self.memory: Tensor | None = None
        self.has_come = False
        """Whether it was away, and has come back or is coming."""
        self.is_gone = False

    @property
    def need(self) -> tuple[int, int, int]:
        """Sorts by when backwards need it: the first microbatch first, and in it the last layer."""
        return self.microbatch, -self.layer, -place_in_forward(self.number)


@dataclass
class Traffic:
    """What a store has done.

    Args:
        peak_bytes: the most that saved tensors took of this device's memory.
        moved_bytes: what has left, of one step after the other.
        waited_seconds: how long the compute has waited for memory to come or go.
        num_evicted: how many blocks had to leave that were to stay.
    """

    peak_bytes: int = 0
    moved_bytes: int = 0
    waited_seconds: float = 0.0
    num_evicted: int = 0


@dataclass(frozen=True)
class Orders:
    """What the plan says of one stage.

    Args:
        budget_bytes: what saved tensors may take of the device's memory; infinite for no budget.
        places: where tensors go, by layer and number.
        spare: where what had to stay may go when the budget would be exceeded otherwise, if
            anywhere.
        expected_bytes: what each layer is going to save for a microbatch.
        fills_budget: whether tensors come back as early as the budget allows, or no earlier than
            two layers before they are needed.
        names: of the layers.
        where: this stage, in words.
        device_bytes: the budget that is for all that the device holds; ``None`` for none.
    """

    budget_bytes: float
    places: Mapping[tuple[int, int], Sequence[Place]] = field(default_factory=dict)
    spare: Place | None = None
    expected_bytes: Mapping[int, int] = field(default_factory=dict)
    fills_budget: bool = True
    names: Sequence[str] = ()
    where: str = "this stage"
    device_bytes: float | None = None


class ActivationStore:
    """One stage's store.

    Args:
        orders: what the plan says.
        say: tells the user something.
    """

    def __init__(self, orders: Orders, say: Callable[[str], None] = lambda _: None) -> None:
        self.traffic = Traffic()
        self._orders = orders
        self._say = say
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self._here_bytes = 0
        # Those of others, which are here for them.
        self._lent_bytes = 0
        # What a layer is about to save: its own, as soon as it has asked for it.
        self._promised_bytes = 0
        # What others are waiting for: nothing comes back into that room.
        self._awaited_bytes = 0
        self._expected = dict(orders.expected_bytes)
        self._measured: set[int] = set()
        self._entries: dict[int, list[_Entry]] = {}
        self._leaving: deque[_Entry] = deque()
        self._coming: list[_Entry] = []
        self._new: list[_Entry] = []
        # What goes by another name, too, and that.
        self._also: list[tuple[_Entry, tuple[int, int]]] = []
        # Told by whatever thread drops a block, in the middle of anything.
        self._dropped: deque[_Entry] = deque()
        self._row: Row = ()
        self._position = 0
        # The last that has begun in the action under way.
        self._layer = -1
        self._forwards: list[int] = []
        self._backward_at: dict[int, int] = {}
        self._forward_bytes = 0
        self._has_said: set[str] = set()
        self._begun = 0.0
        # Of all actions so far.
        self._longest_seconds = 0.0

    def follow(self, orders: Orders) -> None:
        """Another plan is in force; nothing is under way."""
        self._orders = orders
        self._expected = {**orders.expected_bytes, **self._expected}

    @property
    def device_bytes(self) -> float | None:
        """What all that the device holds may take, where there is a budget."""
        return self._orders.device_bytes

    @property
    def budget_bytes(self) -> float:
        """What saved tensors may take of this device's memory."""
        return self._orders.budget_bytes

    @property
    def held_bytes(self) -> int:
        """What saved tensors take of this device's memory, others' among them."""
        with self.lock:
            self._bury()
            return self._here_bytes + self._lent_bytes

    # --- a step ---

    def begin_step(self, row: Row) -> None:
        """The stage's actions of the step that begins."""
        with self.lock:
            self._row = row
            self._backward_at = {
                action.microbatch: place
                for place, action in enumerate(row)
                if action.kind is Kind.BACKWARD
            }
            self._forwards = [0]
            for action in row:
                self._forwards.append(self._forwards[-1] + (action.kind is Kind.FORWARD))
            self._position = 0

    def begin_action(self, place: int, action: Action) -> None:
        """The stage begins the action at a place of its row."""
        with self.lock:
            self._position, self._layer = place, -1
            # What was made again in a backward.
            self._new.clear()
            self._also.clear()
            self._begun = time.monotonic()
            if action.kind is Kind.BACKWARD:
                self._stay(action.microbatch)
        self.advance()

    def end_action(self, action: Action) -> None:
        """The action is over."""
        with self.lock:
            self._bury()
            self._promised_bytes = 0
            self._longest_seconds = max(self._longest_seconds, time.monotonic() - self._begun)
            if action.kind is Kind.FORWARD:
                # What code behind the last layer has saved.
                self._send_new()
                saved = sum(
                    entry.num_bytes
                    for entry in self._entries.get(action.microbatch, ())
                    if not entry.is_gone
                )
                self._forward_bytes = max(self._forward_bytes, saved)
            elif action.kind is Kind.BACKWARD:
                self._entries.pop(action.microbatch, None)
        self.advance()

    # --- layers ---

    def before_layer(self, layer: int) -> None:
        """A layer is about to save what it saves."""
        with self.lock:
            self._layer = layer
        self.make_room(self._expected.get(layer, 0), layer)

    def after_layer(self, layer: int) -> None:
        """A layer has saved what it saves: what is to leave, leaves."""
        with self.lock:
            self._promised_bytes = 0
            saved = sum(entry.num_bytes for entry in self._new if entry.number < FRONT)
            # What was measured replaces what was guessed.
            known = self._expected[layer] if layer in self._measured else 0
            self._expected[layer] = max(known, saved)
            self._measured.add(layer)
            self._send_new()
        self.make_room(0, layer)
        self.advance()

    def _send_new(self) -> None:
        """What is to leave of what has been saved, leaves."""
        new = [(entry, (entry.layer, entry.number)) for entry in self._new] + self._also
        self._new.clear()
        self._also.clear()
        for entry, name in new:
            places = self._orders.places.get(name)
            is_here = entry.state is _Is.HERE and not entry.is_gone
            if places and is_here and not self._sent(entry, places):
                self._say_once(
                    "room",
                    f"{self._orders.where} keeps tensors of layer {self._name(entry.layer)!r} that"
                    " were to be moved: there is no room for them where they were to go. Raise"
                    " `host_budget`, or the budget of the stages that have room.",
                )

    def add(self, block: Block) -> None:
        """Another block is here."""
        with self.lock:
            self._bury()
            entry = block.place = _Entry(block)
            self._entries.setdefault(entry.microbatch, []).append(entry)
            self._new.append(entry)
            self._count(entry.num_bytes)
            self._promised_bytes = max(0, self._promised_bytes - entry.num_bytes)

    def also(self, block: Block, layer: int, number: int) -> None:
        """A block goes by another name, too: what moves under that, moves."""
        if isinstance(block.place, _Entry):
            self._also.append((block.place, (layer, number)))

    def drop(self, place: object) -> None:
        """Nobody needs a block any more; what it had as its place."""
        if isinstance(place, _Entry):
            self._dropped.append(place)

    def lend(self, num_bytes: int) -> None:
        """Another stage puts so many bytes here, or takes them back.

        Raises:
            BudgetError: this stage has had no room for them for a while.
        """
        begun = time.monotonic()
        while num_bytes > 0:
            try:
                self._take_room(num_bytes, "another stage", None, partial(self._lend, num_bytes))
                return
            except BudgetError:
                # This stage's own backward may be about to end.
                patience = max(_PATIENCE_SECONDS, _PATIENCE_ACTIONS * self._longest_seconds)
                if time.monotonic() > begun + patience:
                    raise
                time.sleep(_PAUSE_SECONDS)
        with self.lock:
            self._lend(num_bytes)

    def _lend(self, num_bytes: int) -> None:
        self._lent_bytes += num_bytes
        self._count(0)

    def hold(self, num_bytes: int) -> None:
        """So much more, or less, is held that cannot leave: what was sent on, and may be in use.

        Raises:
            BudgetError: there is no room for it.
        """
        if num_bytes > 0:
            self._take_room(num_bytes, "what is sent on", None, partial(self._count, num_bytes))
            return
        with self.lock:
            self._count(num_bytes)

    # --- there and back ---

    def make_room(self, num_bytes: int, layer: int) -> None:
        """Returns when so many more bytes fit in the budget; they are kept free for a layer.

        Args:
            num_bytes: what it is going to save.
            layer: which.

        Raises:
            BudgetError: they never will.
        """
        with self.lock:
            self._promised_bytes = 0
        who = f"the layer {self._name(layer)!r}"
        self._take_room(num_bytes, who, layer, partial(self._promise, num_bytes))

    def _promise(self, num_bytes: int) -> None:
        self._promised_bytes = num_bytes

    def _take_room(
        self, num_bytes: int, who: str, layer: int | None, take: Callable[[], None]
    ) -> None:
        """Takes so many more bytes of the budget as soon as they fit.

        Args:
            num_bytes: how many.
            who: who needs them, in words.
            layer: which layer needs them, if one does.
            take: counts them. Called under the lock under which the room was found, so that no
                other thread takes the same room.

        Raises:
            BudgetError: they never will.
        """
        begun = None
        with self.lock:
            self._awaited_bytes += num_bytes
        try:
            while True:
                with self.lock:
                    self._settle()
                    lacking = self._here_bytes + self._lent_bytes + self._promised_bytes
                    lacking += num_bytes - int(min(self._orders.budget_bytes, 1 << 62))
                    if lacking <= 0:
                        take()
                        break
                    begun = begun or time.perf_counter()
                    if not self._first_leaving() and not self._evict(lacking, layer):
                        coming = next((e for e in self._coming if e.state is _Is.COMING), None)
                        if coming is None:
                            raise self._error(num_bytes, lacking, who)
                        moving, ticket = coming, coming.coming
                        num_sent = -1
                    else:
                        leaving = self._first_leaving()
                        assert leaving is not None
                        assert leaving.parcel is not None
                        moving, ticket = leaving, leaving.parcel.leaving
                        num_sent = leaving.num_sent
                if ticket is not None:
                    ticket.wait()
                self._has_left(moving, num_sent)
                self._has_come(moving, ticket)
        finally:
            with self.lock:
                self._awaited_bytes -= num_bytes
        if begun is not None:
            self.traffic.waited_seconds += time.perf_counter() - begun

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many more bytes fit in the budget now."""
        return self.held_bytes + num_bytes <= self._orders.budget_bytes

    def advance(self) -> None:
        """Begins to bring back what is needed next and has room."""
        with self.lock:
            self._settle()
            for microbatch in sorted(self._entries):
                reserve = self._reserve(microbatch)
                if reserve is None:
                    return
                away = [e for e in self._entries[microbatch] if e.state is _Is.AWAY]
                for entry in sorted(away, key=lambda entry: entry.need):
                    held = self._here_bytes + self._lent_bytes
                    held += reserve + self._promised_bytes + self._awaited_bytes
                    if held + entry.num_bytes > self._orders.budget_bytes:
                        return
                    if not self._orders.fills_budget and not self._is_soon(entry):
                        return
                    self._call_back(entry)

    def fetch(self, block: Block) -> None:
        """Brings a block back that is wanted now; returns when it is here."""
        entry: _Entry = block.place
        with self.lock:
            self._let_stay(entry)
            if entry.state is _Is.HERE:
                return
            is_away = entry.state is _Is.AWAY
        begun = time.perf_counter()
        if is_away:
            who = f"a tensor of the layer {self._name(entry.layer)!r} that is needed again"
            back = partial(self._call_back, entry)
            self._take_room(entry.num_bytes, who, entry.layer, back)
        with self.lock:
            ticket = entry.coming
        if ticket is not None:
            ticket.wait()
        self._has_come(entry, ticket)
        self.traffic.waited_seconds += time.perf_counter() - begun
        self.advance()

    def _first_leaving(self) -> _Entry | None:
        return next((e for e in self._leaving if e.state is _Is.LEAVING and not e.is_gone), None)

    def _sent(self, entry: _Entry, places: Iterable[Place]) -> bool:
        block = entry.block()
        memory = block.memory() if block is not None else None
        if memory is None:
            return True
        entry.num_sent += 1
        done = partial(self._has_left_meanwhile, entry, entry.num_sent)
        for place in places:
            parcel = place.put(memory, done)
            if parcel is not None:
                self.traffic.moved_bytes += entry.num_bytes
                entry.parcel, entry.state = parcel, _Is.LEAVING
                self._leaving.append(entry)
                return True
        return False

    def _has_left(self, entry: _Entry, num_sent: int) -> None:
        with self.lock:
            block = entry.block()
            if entry.state is not _Is.LEAVING or entry.is_gone or block is None:
                return
            if entry.num_sent != num_sent:
                return
            entry.state = _Is.AWAY
            block.leave()
            self._here_bytes -= entry.num_bytes

    def _has_left_meanwhile(self, entry: _Entry, num_sent: int) -> None:
        """Called by the thread that has copied it."""
        self._has_left(entry, num_sent)
        # It has nobody else to begin what there is room for now.
        self.advance()

    def _call_back(self, entry: _Entry) -> None:
        block = entry.block()
        if block is None or entry.parcel is None or entry.state is not _Is.AWAY:
            return
        entry.state, entry.has_come = _Is.COMING, True
        self._count(entry.num_bytes)
        size = entry.num_bytes // torch.empty(0, dtype=block.dtype).element_size()
        entry.memory = torch.empty(size, dtype=block.dtype, device=block.device)
        entry.coming = entry.parcel.fetch(entry.memory, lambda: None)
        self._coming.append(entry)

    def _has_come(self, entry: _Entry, ticket: Ticket | None) -> None:
        with self.lock:
            block = entry.block()
            if entry.state is not _Is.COMING or entry.coming is not ticket or block is None:
                return
            assert entry.memory is not None
            assert entry.parcel is not None
            entry.state = _Is.HERE
            block.come_back(entry.memory)
            entry.parcel.forget()
            entry.memory = entry.coming = entry.parcel = None

    def _stay(self, microbatch: int) -> None:
        """What has not left yet needs not leave any more."""
        for entry in self._entries.get(microbatch, ()):
            self._let_stay(entry)

    def _let_stay(self, entry: _Entry) -> None:
        if entry.state is _Is.LEAVING and entry.parcel is not None:
            entry.parcel.forget()
            entry.parcel, entry.state = None, _Is.HERE

    def _evict(self, lacking: int, layer: int | None) -> bool:
        """Lets blocks leave that were to stay, or have come back early: those first that are needed
        last.
        """
        spare = [self._orders.spare] if self._orders.spare is not None else []
        here = [e for entries in self._entries.values() for e in entries if e.state is _Is.HERE]
        current = self._row[self._position] if self._position < len(self._row) else None
        freed = 0
        for entry in sorted(here, key=lambda entry: entry.need, reverse=True):
            # What runs uses what belongs to its layer, or to the one it has just left.
            is_in_use = (
                current is not None
                and current.kind in (Kind.BACKWARD, Kind.RECOMPUTE)
                and entry.microbatch == current.microbatch
                and (layer is None or entry.layer >= layer)
            )
            places = self._orders.places.get((entry.layer, entry.number), spare)
            if entry.is_gone or is_in_use or not self._sent(entry, places):
                continue
            self.traffic.num_evicted += places is spare
            freed += entry.num_bytes
            if freed >= lacking:
                break
        return freed > 0

    def _is_soon(self, entry: _Entry) -> bool:
        """Whether no more than two layers' tensors are back, and not used yet."""
        back = sum(
            other.num_bytes
            for entries in self._entries.values()
            for other in entries
            if other.has_come and not other.is_gone
        )
        return back + entry.num_bytes <= 2 * max(self._expected.values(), default=0)

    def _reserve(self, microbatch: int) -> int | None:
        """What is to be left free for forwards that come before a backward; ``None`` where it is
        too early to think of it.
        """
        at = self._backward_at.get(microbatch)
        if at is None or at < self._position:
            return 0
        coming = self._forwards[at] - self._forwards[self._position]
        current = self._row[self._position]
        if coming > 1 or current == Action(Kind.FORWARD, microbatch):
            return None
        if coming and current.kind is Kind.FORWARD:
            # It is under way. What its layers have saved so far is here or has left, and what the
            # one that runs is about to save has been promised to it.
            return sum(size for layer, size in self._expected.items() if layer > self._layer)
        return coming * self._forward_bytes

    # --- the table ---

    def _count(self, num_bytes: int) -> None:
        self._here_bytes += num_bytes
        held = self._here_bytes + self._lent_bytes
        self.traffic.peak_bytes = max(self.traffic.peak_bytes, held)

    def _settle(self) -> None:
        """Takes note of what has happened elsewhere."""
        self._bury()
        while self._leaving:
            entry = self._leaving[0]
            if entry.state is _Is.LEAVING and not entry.is_gone:
                assert entry.parcel is not None
                if not entry.parcel.leaving.is_done():
                    return
                self._has_left(entry, entry.num_sent)
            self._leaving.popleft()
        for entry in list(self._coming):
            if entry.state is not _Is.COMING or entry.is_gone:
                self._coming.remove(entry)
            elif entry.coming is not None and entry.coming.is_done():
                self._coming.remove(entry)
                self._has_come(entry, entry.coming)

    def _bury(self) -> None:
        while self._dropped:
            entry = self._dropped.popleft()
            if entry.is_gone:
                continue
            entry.is_gone = True
            if entry.state is not _Is.AWAY:
                self._here_bytes -= entry.num_bytes
            if entry.parcel is not None:
                entry.parcel.forget()
            entry.parcel = entry.memory = entry.coming = None

    def _name(self, layer: int) -> str:
        names = self._orders.names
        return names[layer] if layer < len(names) else str(layer)

    def _error(self, num_bytes: int, lacking: int, who: str) -> BudgetError:
        budget = self._orders.budget_bytes
        return BudgetError(
            f"The budget for saved tensors on {self._orders.where} is {budget / 1e6:.1f} MB, and"
            f" {who} would exceed it by {lacking / 1e6:.1f} MB: {self._here_bytes / 1e6:.1f} MB are"
            f" held here, {self._lent_bytes / 1e6:.1f} MB for other stages, and"
            f" {num_bytes / 1e6:.1f} MB are to come. A budget that is"
            f" {_MARGIN * lacking / 1e6:.1f} MB larger would have been enough so far; so would"
            " smaller microbatches, or more room on the host (`host_budget`)."
        )

    def _say_once(self, what: str, message: str) -> None:
        if what not in self._has_said:
            self._has_said.add(what)
            self._say(message)
