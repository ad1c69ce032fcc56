"""The activation store: keeps track of each block of saved tensors, and of the budget.

CN114880130B, after MPress (HPCA 2023), step 5: a table of every moved tensor and of every device's
memory. The store is called before and after each layer saves tensors. It evicts the tensors that
the plan names as soon as their layer is done, and prefetches them, in the order in which backwards
need them, as soon as memory is free.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from torch import Tensor

from lightning_pipeshift.errors import BudgetError
from lightning_pipeshift.plan.inputs.saved_tensors import FRONT
from lightning_pipeshift.plan.schedule.actions import Action, Kind, Row
from lightning_pipeshift.runtime.offload.expected_saves import ExpectedSaves
from lightning_pipeshift.runtime.offload.saved_blocks import Block, BlockMover
from lightning_pipeshift.runtime.offload.targets import OffloadTarget
from lightning_pipeshift.text import ceil_bytes_text

_PATIENCE_SECONDS: Final = 20.0
_PATIENCE_ACTIONS: Final = 5.0
_PAUSE_SECONDS: Final = 1e-3
"""How long to wait for memory that the plan reserves for another stage: at least so many seconds,
or so many times this stage's longest action so far; and how often to check."""

_MARGIN: Final = 1.1
"""The factor by which the recommended budget increase exceeds the missing bytes."""


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


class ActivationStore(BlockMover):
    """One stage's store.

    Args:
        orders: the plan's settings.
        say: shows a message to the user.
    """

    def __init__(self, orders: StagePolicy, say: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(self.advance, self._layer_name)
        self._orders = orders
        self._say = say
        # The part of the traffic's bytes on the device that this stage keeps for other stages.
        self._lent_bytes = 0
        # Bytes reserved for the tensors that the current layer is about to save.
        self._promised_bytes = 0
        # Bytes that a thread waits for: no block may be fetched into that memory.
        self._awaited_bytes = 0
        self._blocks: dict[int, list[Block]] = {}
        # What has been saved since the last layer: blocks with their layer and number, or with
        # those of another tensor that shares a block's memory.
        self._new: list[tuple[Block, tuple[int, int]]] = []
        # Dropped blocks: any thread may drop one at any time, so this needs no lock.
        self._dropped: deque[Block] = deque()
        # The microbatch whose backward runs, its lowest layer so far, and the bytes that it has
        # freed since it came to that layer. It may need them for what it computes: nothing comes
        # into that memory until the next layer.
        self._in_backward: int | None = None
        self._lowest_layer = math.inf
        self._spent_bytes = 0
        self._expected = ExpectedSaves()
        self._has_said = False
        self._begun = 0.0
        # The longest action so far.
        self._longest_seconds = 0.0
        self.follow(orders)

    def follow(self, orders: StagePolicy) -> None:
        """Applies the settings of another plan to what is saved from now on."""
        with self.lock:
            self._orders = orders
            self._expected.follow(orders.expected_bytes)

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
            return self.traffic.device_bytes

    # --- a step ---

    def begin_step(self, row: Row) -> None:
        """Called as a step begins, with the stage's actions in it; in an asynchronous pipeline also
        those of the next rows, until the backwards of all microbatches in flight after it.
        """
        with self.lock:
            self._expected.begin_step(row)

    def begin_action(self, place: int, action: Action) -> None:
        """Called when the stage starts an action, given the action's index in its row."""
        with self.lock:
            self._expected.begin_action(place)
            # Blocks that a backward has recomputed are not offloaded.
            self._new.clear()
            self._begun = time.monotonic()
            if action.kind is Kind.BACKWARD:
                self._bury()
                self._in_backward, self._lowest_layer = action.microbatch, math.inf
                # What has not been offloaded yet stays on the device.
                for block in self._blocks.get(action.microbatch, ()):
                    self._let_stay(block)
        self.advance()

    def end_action(self, action: Action) -> None:
        """Called when the action has ended."""
        with self.lock:
            self._bury()
            self._in_backward, self._spent_bytes = None, 0
            self._promised_bytes = 0
            self._longest_seconds = max(self._longest_seconds, time.monotonic() - self._begun)
            if action.kind is Kind.FORWARD:
                # Blocks saved by code after the last layer.
                self._send_new()
                blocks = self._blocks.get(action.microbatch, ())
                self._expected.end_forward(sum(b.num_bytes for b in blocks if not b.is_gone))
            elif action.kind is Kind.BACKWARD:
                self._blocks.pop(action.microbatch, None)
        self.advance()

    # --- layers ---

    def before_layer(self, layer: int) -> None:
        """Called before a layer runs: reserves memory for the tensors it saves."""
        with self.lock:
            expected_bytes = self._expected.begin_layer(layer)
        self.make_room(expected_bytes, layer)

    def after_layer(self, layer: int) -> None:
        """Called after a layer has run: starts to offload the tensors it saved, as planned."""
        with self.lock:
            self._promised_bytes = 0
            saved = sum(
                block.num_bytes
                for block, name in self._new
                if name == (block.layer, block.number) and block.number < FRONT
            )
            self._expected.end_layer(layer, saved)
            self._send_new()
        self.make_room(0, layer)
        self.advance()

    def _send_new(self) -> None:
        """Starts to offload those of the newly saved blocks that the plan offloads."""
        new, self._new = self._new, []
        for block, name in new:
            places = self._orders.places.get(name)
            if not places or not block.is_here or not block.is_in_use:
                continue
            if not self._sent(block, places) and not self._has_said:
                self._has_said = True
                self._say(
                    f"{self._orders.where} keeps tensors of layer"
                    f" {self._layer_name(block.layer)!r} that were to be offloaded: there is no"
                    " free memory at their targets. Raise `host_budget`, or the budget of the"
                    " stages with free memory."
                )

    def add(self, tensor: Tensor, layer: int, number: int, microbatch: int) -> Block:
        """Adds the memory of a tensor, which is on the device."""
        with self.lock:
            self._bury()
            block = Block(tensor, layer, number, microbatch)
            self._blocks.setdefault(microbatch, []).append(block)
            self.also(block, layer, number)
            self.traffic.count(block.num_bytes)
            self._promised_bytes = max(0, self._promised_bytes - block.num_bytes)
            return block

    def also(self, block: Block, layer: int, number: int) -> None:
        """Gives a block a second name: it is offloaded if the plan offloads either of the two."""
        self._new.append((block, (layer, number)))

    def drop(self, block: Block) -> None:
        """Drops a block that is no longer needed."""
        self._dropped.append(block)

    def lend(self, num_bytes: int) -> None:
        """Counts bytes that another stage offloads to this one; negative when it fetches them back.

        Raises:
            BudgetError: this stage has no free memory for them before a timeout.
        """
        begun = time.monotonic()
        while num_bytes > 0:
            waited = time.monotonic() - begun
            # A backward that waits for its gradient may wait for the very stage that asks.
            is_urgent = waited > self._longest_seconds
            lend = partial(self._lend, num_bytes)
            try:
                self._take_room(num_bytes, "another stage", None, lend, is_urgent)
                return
            except BudgetError:
                # This stage's own backward may be about to end.
                patience = max(_PATIENCE_SECONDS, _PATIENCE_ACTIONS * self._longest_seconds)
                if waited > patience:
                    raise
                time.sleep(_PAUSE_SECONDS)
        with self.lock:
            self._lend(num_bytes)

    def _lend(self, num_bytes: int) -> None:
        self._lent_bytes += num_bytes
        self.traffic.count(num_bytes)

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
            if self._in_backward is not None:
                self._come_to(layer)
        who = f"the layer {self._layer_name(layer)!r}"
        self._take_room(num_bytes, who, layer, partial(self._promise, num_bytes))

    def _promise(self, num_bytes: int) -> None:
        self._promised_bytes = num_bytes

    def _take_room(
        self,
        num_bytes: int,
        who: str,
        layer: int | None,
        take: Callable[[], None],
        is_urgent: bool = False,
        block: Block | None = None,
    ) -> None:
        """Takes ``num_bytes`` more of the budget as soon as they fit.

        Args:
            num_bytes: how many.
            who: the user of the memory, in words.
            layer: the layer that needs them, if it is a layer.
            take: counts them. Called while the lock is held, so that no other thread takes the same
                memory.
            is_urgent: whether a backward that has not begun gives way, too.
            block: the one to call back, if it is one.

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
                    if block is not None and not block.is_away:
                        # It has not left, or another thread has called it back: it is counted.
                        break
                    lacking = self.traffic.device_bytes + self._promised_bytes + num_bytes
                    lacking -= int(min(self._orders.budget_bytes, 1 << 62))
                    spent = self._spent_bytes if layer is None else 0
                    if lacking + spent <= 0:
                        take()
                        break
                    if lacking <= 0:
                        raise self._error(num_bytes, lacking + spent, who)
                    begun = begun or time.perf_counter()
                    if not self._is_any_leaving:
                        self._evict(lacking, layer, is_urgent)
                    move = self._first_move()
                    if move is None and self._dropped:
                        continue
                    if move is None:
                        raise self._error(num_bytes, lacking, who)
                move.ticket.wait()
                self._end(move)
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
            for microbatch in sorted(self._blocks):
                reserve = self._expected.bytes_before_backward(microbatch)
                if reserve is None:
                    return
                away = [block for block in self._blocks[microbatch] if block.is_away]
                for block in sorted(away, key=lambda block: block.need):
                    held = self.traffic.device_bytes + self._promised_bytes
                    held += reserve + self._awaited_bytes + self._spent_bytes
                    if held + block.num_bytes > self._orders.budget_bytes:
                        return
                    if not self._orders.fills_budget and not self._is_soon(block):
                        return
                    self._call_back(block)

    def fetch(self, block: Block) -> None:
        """Fetches a block that is needed now; returns when it is on the device."""
        with self.lock:
            is_next = block.microbatch == self._in_backward and self._come_to(block.layer)
            self._let_stay(block)
            if block.is_here:
                if is_next:
                    self.advance()
                return
        begun = time.perf_counter()
        who = f"a tensor of the layer {self._layer_name(block.layer)!r} that is needed again"
        back = partial(self._call_back, block)
        self._take_room(block.num_bytes, who, block.layer, back, block=block)
        with self.lock:
            move = block.move if block.move is not None and block.move.buffer is not None else None
        if move is not None:
            move.ticket.wait()
            self._end(move)
        self.traffic.waited_seconds += time.perf_counter() - begun
        self.advance()

    def _come_to(self, layer: int) -> bool:
        """Called with the layer whose tensors the running backward needs now. Returns whether it
        has come to another layer, and needs nothing of what it has freed before.
        """
        if layer >= self._lowest_layer:
            return False
        self._bury()
        self._lowest_layer, self._spent_bytes = layer, 0
        return True

    def _evict(self, lacking: int, layer: int | None, is_urgent: bool) -> None:
        """Starts to evict blocks that the plan keeps here, or that were prefetched early; blocks
        that are needed last are evicted first. For the arguments see :meth:`_take_room`.
        """
        spare = [self._orders.spare] if self._orders.spare is not None else []
        here = [b for blocks in self._blocks.values() for b in blocks if b.is_here]
        current = self._expected.action
        # A backward that still waits for its gradient has used none of its blocks.
        is_waiting = self._in_backward is not None and self._lowest_layer == math.inf
        freed = 0
        for block in sorted(here, key=lambda block: block.need, reverse=True):
            # The running action uses the blocks of its layer, and of the one before.
            is_in_use = (
                current is not None
                and current.kind in (Kind.BACKWARD, Kind.RECOMPUTE)
                and not (is_waiting and is_urgent)
                and block.microbatch == current.microbatch
                and (layer is None or block.layer >= layer)
            )
            places = self._orders.places.get((block.layer, block.number), spare)
            if block.is_gone or is_in_use or not self._sent(block, places):
                continue
            self.traffic.num_evicted += places is spare
            freed += block.num_bytes
            if freed >= lacking:
                break

    def _is_soon(self, block: Block) -> bool:
        """Whether prefetching this block leaves no more than two layers' prefetched tensors
        unused.
        """
        others = [other for blocks in self._blocks.values() for other in blocks]
        back = sum(other.num_bytes for other in others if other.has_come and not other.is_gone)
        return back + block.num_bytes <= 2 * self._expected.largest_layer_bytes

    # --- the table ---

    def _settle(self) -> None:
        """Updates the table for copies that are complete and blocks that were dropped."""
        self._bury()
        self._end_moves()

    def _bury(self) -> None:
        while self._dropped:
            block = self._dropped.popleft()
            block.is_gone = True
            if not block.is_away:
                self.traffic.count(-block.num_bytes)
                if block.microbatch == self._in_backward:
                    self._spent_bytes += block.num_bytes
            block.end_offload()

    def _layer_name(self, layer: int) -> str:
        names = self._orders.names
        return names[layer] if layer < len(names) else str(layer)

    def _error(self, num_bytes: int, lacking: int, who: str) -> BudgetError:
        budget, here = self._orders.budget_bytes, self.traffic.device_bytes - self._lent_bytes
        sizes = max(0.0, budget), lacking, here, self._lent_bytes, num_bytes, _MARGIN * lacking
        has, exceeds, used, lent, comes, more = map(ceil_bytes_text, sizes)
        return BudgetError(
            f"The budget for saved tensors on {self._orders.where} is {has}, and {who} would exceed"
            f" it by {exceeds}: {used} are in use here, {lent} for other stages, and {comes} are to"
            f" come. A budget that is {more} larger would have been enough so far; so would smaller"
            " microbatches, or more host memory (`host_budget`)."
        )
