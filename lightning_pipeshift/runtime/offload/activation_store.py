"""The activation store: keeps track of each block of saved tensors, and of the budget.

CN114880130B, after MPress (HPCA 2023), step 5: a table of every moved tensor and of every device's
memory. The store is called before and after each layer saves tensors. It evicts the tensors that
the plan names as soon as their layer is done, and prefetches them, in the order in which backwards
need them, as soon as memory is free.
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
from lightning_pipeshift.model.saved.saved_tensors import Block
from lightning_pipeshift.plan.inputs.saved_tensors import FRONT, place_in_forward
from lightning_pipeshift.plan.schedule.actions import Action, Kind, Row
from lightning_pipeshift.runtime.offload.copying import Ticket
from lightning_pipeshift.runtime.offload.targets import OffloadedBlock, OffloadTarget
from lightning_pipeshift.runtime.step.listeners import ActionListener

_PATIENCE_SECONDS: Final = 20.0
_PATIENCE_ACTIONS: Final = 5.0
_PAUSE_SECONDS: Final = 1e-3
"""How long to wait for memory that the plan reserves for another stage: at least so many seconds,
or so many times this stage's longest action so far; and how often to check."""

_MARGIN: Final = 1.1
"""The factor by which the recommended budget increase exceeds the missing bytes."""


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
        """How often the block has been offloaded; an outdated copy is recognised by its lower
        number."""
        self.parcel: OffloadedBlock | None = None
        self.coming: Ticket | None = None
        self.memory: Tensor | None = None
        self.has_come = False
        """Whether the block was offloaded, and has been fetched back or is being fetched."""
        self.is_gone = False

    @property
    def need(self) -> tuple[int, int, int]:
        """A sort key for the order in which backwards need the blocks: the first microbatch first,
        and in it the last layer first."""
        return self.microbatch, -self.layer, -place_in_forward(self.number)


@dataclass
class Traffic:
    """Statistics of a store.

    Args:
        peak_bytes: the peak of saved tensors in this device's memory.
        moved_bytes: the sum of the bytes moved out, over all steps.
        waited_seconds: how long the compute has waited for copies to finish.
        num_evicted: how many blocks were evicted although the plan keeps them here.
    """

    peak_bytes: int = 0
    moved_bytes: int = 0
    waited_seconds: float = 0.0
    num_evicted: int = 0


@dataclass(frozen=True)
class StagePolicy:
    """The plan's settings for one stage.

    Args:
        budget_bytes: for saved tensors in the device's memory; infinite for no budget.
        places: the offload targets of tensors, by layer and number.
        spare: the target for other tensors if the budget would be exceeded otherwise; ``None`` for
            no such target.
        expected_bytes: the bytes that each layer is expected to save for a microbatch.
        fills_budget: whether to prefetch tensors as early as the budget allows, or no earlier than
            two layers before they are needed.
        names: of the layers.
        where: this stage, in words.
        device_bytes: the budget for everything on the device; ``None`` for none.
    """

    budget_bytes: float
    places: Mapping[tuple[int, int], Sequence[OffloadTarget]] = field(default_factory=dict)
    spare: OffloadTarget | None = None
    expected_bytes: Mapping[int, int] = field(default_factory=dict)
    fills_budget: bool = True
    names: Sequence[str] = ()
    where: str = "this stage"
    device_bytes: float | None = None


class ActivationStore(ActionListener):
    """One stage's store.

    Args:
        orders: the plan's settings.
        say: shows a message to the user.
    """

    def __init__(self, orders: StagePolicy, say: Callable[[str], None] = lambda _: None) -> None:
        self.traffic = Traffic()
        self._orders = orders
        self._say = say
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self._here_bytes = 0
        # Bytes that this stage keeps for other stages.
        self._lent_bytes = 0
        # Bytes reserved for the tensors that the current layer is about to save.
        self._promised_bytes = 0
        # Bytes that a thread waits for: no block may be fetched into that memory.
        self._awaited_bytes = 0
        self._expected = dict(orders.expected_bytes)
        self._measured: set[int] = set()
        self._entries: dict[int, list[_Entry]] = {}
        self._leaving: deque[_Entry] = deque()
        self._coming: list[_Entry] = []
        self._new: list[_Entry] = []
        # Blocks that have a second name, and that name.
        self._also: list[tuple[_Entry, tuple[int, int]]] = []
        # Dropped blocks: any thread may drop one at any time, so this needs no lock.
        self._dropped: deque[_Entry] = deque()
        self._row: Row = ()
        self._position = 0
        # The last layer that has started in the current action.
        self._layer = -1
        self._forwards: list[int] = []
        self._backward_at: dict[int, int] = {}
        self._forward_bytes = 0
        self._has_said: set[str] = set()
        self._begun = 0.0
        # The longest action so far.
        self._longest_seconds = 0.0

    def follow(self, orders: StagePolicy) -> None:
        """Applies the settings of another plan to what is saved from now on."""
        with self.lock:
            self._orders = orders
            self._expected = {**orders.expected_bytes, **self._expected}

    @property
    def device_bytes(self) -> float | None:
        """The budget for everything on the device, if there is one."""
        return self._orders.device_bytes

    @property
    def budget_bytes(self) -> float:
        """The budget of saved tensors in this device's memory."""
        return self._orders.budget_bytes

    @property
    def held_bytes(self) -> int:
        """The bytes of saved tensors in this device's memory, including those of other stages."""
        with self.lock:
            self._bury()
            return self._here_bytes + self._lent_bytes

    # --- a step ---

    def begin_step(self, row: Row) -> None:
        """Called as a step begins, with the stage's actions in it."""
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
        """Called when the stage starts an action, given the action's index in its row."""
        with self.lock:
            self._position, self._layer = place, -1
            # Blocks that a backward has recomputed are not offloaded.
            self._new.clear()
            self._also.clear()
            self._begun = time.monotonic()
            if action.kind is Kind.BACKWARD:
                self._stay(action.microbatch)
        self.advance()

    def end_action(self, action: Action) -> None:
        """Called when the action has ended."""
        with self.lock:
            self._bury()
            self._promised_bytes = 0
            self._longest_seconds = max(self._longest_seconds, time.monotonic() - self._begun)
            if action.kind is Kind.FORWARD:
                # Blocks saved by code after the last layer.
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
        """Called before a layer runs: reserves memory for the tensors it saves."""
        with self.lock:
            self._layer = layer
        self.make_room(self._expected.get(layer, 0), layer)

    def after_layer(self, layer: int) -> None:
        """Called after a layer has run: starts to offload the tensors it saved, as planned."""
        with self.lock:
            self._promised_bytes = 0
            saved = sum(entry.num_bytes for entry in self._new if entry.number < FRONT)
            # A measured size replaces an estimated one.
            known = self._expected[layer] if layer in self._measured else 0
            self._expected[layer] = max(known, saved)
            self._measured.add(layer)
            self._send_new()
        self.make_room(0, layer)
        self.advance()

    def _send_new(self) -> None:
        """Starts to offload those of the newly saved blocks that the plan offloads."""
        new = [(entry, (entry.layer, entry.number)) for entry in self._new] + self._also
        self._new.clear()
        self._also.clear()
        for entry, name in new:
            places = self._orders.places.get(name)
            is_here = entry.state is _Is.HERE and not entry.is_gone
            if places and is_here and not self._sent(entry, places):
                self._say_once(
                    "room",
                    f"{self._orders.where} keeps tensors of layer {self._name(entry.layer)!r} "
                    "that were to be offloaded: there is no free memory at their targets. Raise "
                    "`host_budget`, or the budget of the stages with free memory.",
                )

    def add(self, block: Block) -> None:
        """Adds a block, which is on the device."""
        with self.lock:
            self._bury()
            entry = block.place = _Entry(block)
            self._entries.setdefault(entry.microbatch, []).append(entry)
            self._new.append(entry)
            self._count(entry.num_bytes)
            self._promised_bytes = max(0, self._promised_bytes - entry.num_bytes)

    def also(self, block: Block, layer: int, number: int) -> None:
        """Gives a block a second name: it is offloaded if the plan offloads either of the two."""
        if isinstance(block.place, _Entry):
            self._also.append((block.place, (layer, number)))

    def drop(self, place: object) -> None:
        """Drops a block that is no longer needed, given its ``place`` attribute."""
        if isinstance(place, _Entry):
            self._dropped.append(place)

    def lend(self, num_bytes: int) -> None:
        """Counts bytes that another stage offloads to this one; negative when it fetches them back.

        Raises:
            BudgetError: this stage has no free memory for them before a timeout.
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
        """Counts bytes that cannot be offloaded, such as a payload that was sent on; negative when
        they are freed.

        Raises:
            BudgetError: they exceed the budget.
        """
        if num_bytes > 0:
            self._take_room(num_bytes, "what is sent on", None, partial(self._count, num_bytes))
            return
        with self.lock:
            self._count(num_bytes)

    # --- there and back ---

    def make_room(self, num_bytes: int, layer: int) -> None:
        """Waits until ``num_bytes`` more fit in the budget, and reserves them for a layer.

        Args:
            num_bytes: the bytes that the layer is expected to save.
            layer: the layer.

        Raises:
            BudgetError: they can never fit.
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
        """Takes ``num_bytes`` more of the budget as soon as they fit.

        Args:
            num_bytes: how many.
            who: the user of the memory, in words.
            layer: the layer that needs them, if it is a layer.
            take: counts them. Called while the lock is held, so that no other thread takes the same
                memory.

        Raises:
            BudgetError: they can never fit.
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
        """Whether ``num_bytes`` more fit in the budget now."""
        return self.held_bytes + num_bytes <= self._orders.budget_bytes

    def advance(self) -> None:
        """Starts to prefetch the blocks that are needed next, as far as they fit in the budget."""
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
        """Fetches a block that is needed now; returns when it is on the device."""
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

    def _sent(self, entry: _Entry, places: Iterable[OffloadTarget]) -> bool:
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
        """Called by the thread that has copied the block."""
        self._has_left(entry, num_sent)
        # The compute thread may be waiting, so this thread uses the freed memory.
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
        """Keeps those blocks of a microbatch on the device that have not been offloaded yet."""
        for entry in self._entries.get(microbatch, ()):
            self._let_stay(entry)

    def _let_stay(self, entry: _Entry) -> None:
        if entry.state is _Is.LEAVING and entry.parcel is not None:
            entry.parcel.forget()
            entry.parcel, entry.state = None, _Is.HERE

    def _evict(self, lacking: int, layer: int | None) -> bool:
        """Starts to evict blocks that the plan keeps here, or that were prefetched early; blocks
        that are needed last are evicted first.
        """
        spare = [self._orders.spare] if self._orders.spare is not None else []
        here = [e for entries in self._entries.values() for e in entries if e.state is _Is.HERE]
        current = self._row[self._position] if self._position < len(self._row) else None
        freed = 0
        for entry in sorted(here, key=lambda entry: entry.need, reverse=True):
            # The running action uses the blocks of its layer, and of the one before.
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
        """Whether prefetching this block leaves no more than two layers' prefetched tensors
        unused.
        """
        back = sum(
            other.num_bytes
            for entries in self._entries.values()
            for other in entries
            if other.has_come and not other.is_gone
        )
        return back + entry.num_bytes <= 2 * max(self._expected.values(), default=0)

    def _reserve(self, microbatch: int) -> int | None:
        """Returns the bytes to leave free for forwards that run before a microbatch's backward;
        ``None`` if it is too early to prefetch its blocks.
        """
        at = self._backward_at.get(microbatch)
        if at is None or at < self._position:
            return 0
        coming = self._forwards[at] - self._forwards[self._position]
        current = self._row[self._position]
        if coming > 1 or current == Action(Kind.FORWARD, microbatch):
            return None
        if coming and current.kind is Kind.FORWARD:
            # The forward has started. Blocks of its earlier layers are already counted, and memory
            # for the current layer is reserved.
            return sum(size for layer, size in self._expected.items() if layer > self._layer)
        return coming * self._forward_bytes

    # --- the table ---

    def _count(self, num_bytes: int) -> None:
        self._here_bytes += num_bytes
        held = self._here_bytes + self._lent_bytes
        self.traffic.peak_bytes = max(self.traffic.peak_bytes, held)

    def _settle(self) -> None:
        """Updates the table for copies that are complete and blocks that were dropped."""
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
            f"The budget for saved tensors on {self._orders.where} is {budget / 1e6:.1f} MB, and "
            f"{who} would exceed it by {lacking / 1e6:.1f} MB: {self._here_bytes / 1e6:.1f} MB "
            f"are in use here, {self._lent_bytes / 1e6:.1f} MB for other stages, and "
            f"{num_bytes / 1e6:.1f} MB are to come. A budget that is "
            f"{_MARGIN * lacking / 1e6:.1f} MB larger would have been enough so far; so would "
            "smaller microbatches, or more host memory (`host_budget`)."
        )

    def _say_once(self, what: str, message: str) -> None:
        if what not in self._has_said:
            self._has_said.add(what)
            self._say(message)
