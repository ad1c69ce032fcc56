"""One stage: runs the actions of its row, with its microbatches in flight.

A stage lives for the run. What differs from step to step is in :class:`Step`; what belongs to one
microbatch, from its first action to its last, is in :class:`_InFlight`, and goes with that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_pipeshift.devices.properties import total_memory
from lightning_pipeshift.errors import BudgetError, LayerError, PipeShiftError, ScheduleError
from lightning_pipeshift.model.execution.finite import FiniteCheck, finite_check
from lightning_pipeshift.model.execution.stage_pass import StagePass
from lightning_pipeshift.model.execution.timing import Timer
from lightning_pipeshift.model.gates.gate import CurrentPass
from lightning_pipeshift.model.parameters.gradient_box import SharedParameters
from lightning_pipeshift.model.saved.saved_tensors import (
    Observer,
    SavedTable,
    addresses_of,
    resident_in,
)
from lightning_pipeshift.model.trace.conditions import PlainValues
from lightning_pipeshift.model.trace.placeholder import dtype_named
from lightning_pipeshift.model.trace.trace import Payload, Trace
from lightning_pipeshift.model.user_state.logs import LogRecorder
from lightning_pipeshift.model.user_state.random_streams import RandomStreams
from lightning_pipeshift.plan.cost.workload import SENDS_UNDER_WAY
from lightning_pipeshift.plan.inputs.flow import Value
from lightning_pipeshift.plan.schedule.actions import Action, Kind, Row
from lightning_pipeshift.plan.schedule.route import Place, Route
from lightning_pipeshift.runtime.comm.channels import Channels, Direction, Layout, Receipt
from lightning_pipeshift.runtime.comm.lane import Sent
from lightning_pipeshift.runtime.gradients.late_updates import LateUpdates
from lightning_pipeshift.runtime.offload.activation_store import ActivationStore
from lightning_pipeshift.runtime.offload.out_of_memory import explained
from lightning_pipeshift.runtime.ownership.live_migration import LiveMigration
from lightning_pipeshift.runtime.ownership.migration import Migration
from lightning_pipeshift.runtime.step.listeners import ActionListener, ActionTimes
from lightning_pipeshift.runtime.step.losses import Losses
from lightning_pipeshift.runtime.step.training_batch import UserStep
from lightning_pipeshift.runtime.step.weight_versions import WeightVersions

Profile = Callable[[str], AbstractContextManager[Any]]
"""A context around what its name says, as ``Profiler.profile`` of Lightning makes."""

WAIT: Final = "[PipeShift] wait for other stages"


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of a step.

    Args:
        batch: the slice.
        size: its number of samples.
        trace: the flow of a slice of this shape; ``None`` where one stage runs the step as it is.
        layers: the layers that this stage owns for it.
        key: its random streams depend on it.
        recompute: the layers that run again before the backward, with the numbers of the saved
            tensors that they do not drop.
    """

    batch: Any
    size: int
    trace: Trace | None
    layers: range
    key: tuple[int | str, ...]
    recompute: Mapping[int, Set[int]] = field(default_factory=dict)

    @property
    def recomputes(self) -> bool:
        """Whether this stage runs any of its layers again."""
        return any(layer in self.recompute for layer in self.layers)

    def payload(self, boundary: int) -> Payload:
        """The values that cross a boundary, and how to receive them."""
        return self.trace.payload(boundary) if self.trace is not None else []

    def gradients(self, boundary: int) -> Payload:
        """Those of them whose gradients come back."""
        return self.trace.gradients(boundary) if self.trace is not None else []


@dataclass(kw_only=True)
class Step:
    """One step: what a stage is given for it, and what came of it.

    Args:
        function: runs the user's step on a module and a slice, in the user's precision.
        microbatches: of the step.
        first: the number of the first of them.
        trains: whether each has a backward, maybe in a later row than its forward.
        is_in_flight: whether a microbatch may begin on one stage before the one before it has ended
            on another.
        shared: the shared parameters that the stage holds.
        losses: takes the results of the microbatches, on the last stage.
        after_last_forward: called on the last stage when all results are there.
        before_last_backward: called before the stage's last backward.
        timers: measure the layers of some microbatches, by number.
        observer: records what the first microbatch's layers save, if that is needed.
        store: keeps what layers save within a budget, if there is one.
        migration: the layers that change their owners in this step, if any do.
        versions: the weights that each microbatch uses, if they differ.
        live_migration: the layers that change their owners while others are in flight.
        late_updates: of the step before, if there are any.
        recorder: takes notes of the actions, if the step is recorded.
    """

    function: UserStep
    microbatches: Sequence[Microbatch]
    shared: SharedParameters
    losses: Losses
    first: int = 0
    trains: bool = False
    is_in_flight: bool = False
    after_last_forward: Callable[[], None] | None = None
    before_last_backward: Callable[[], None] | None = None
    timers: Mapping[int, Timer] = field(default_factory=dict)
    observer: Observer | None = None
    store: ActivationStore | None = None
    migration: Migration | None = None
    versions: WeightVersions | None = None
    live_migration: LiveMigration | None = None
    late_updates: LateUpdates | None = None
    recorder: ActionListener | None = None
    order: list[int] = field(default_factory=list, init=False)
    """The layers in the order in which the last forward called them; only if the step is not
    followed.
    """
    num_backwards: int = field(default=0, init=False)
    """How many backwards the stage has run."""

    @property
    def listeners(self) -> list[ActionListener]:
        """Those who take an interest in the step's actions, the outermost first."""
        times = ActionTimes(self.timers) if self.timers else None
        everyone = (
            self.recorder,
            self.late_updates,
            self.versions,
            self.live_migration,
            self.migration,
            self.store,
            times,
        )
        return [found for found in everyone if found is not None]

    @property
    def looks_at_saved(self) -> bool:
        """Whether saved tensors are counted or recorded."""
        return self.store is not None or self.observer is not None


@dataclass(slots=True)
class _InFlight:
    """The values that a stage holds of one microbatch between two actions.

    Args:
        microbatch: the microbatch.
        step: its step.
        number: its number.
        index: its index in the step.
    """

    microbatch: Microbatch
    step: Step
    number: int
    index: int
    payload: list[Receipt] = field(default_factory=list)
    """From the previous stage."""
    gradient: list[Receipt] = field(default_factory=list)
    """From the next stage."""
    forward: StagePass | None = None
    finite: FiniteCheck | None = None
    """Looks for NaN, if that is wanted."""
    outgoing: dict[Value, Tensor] = field(default_factory=dict)
    """The gradients for the previous stage."""

    @property
    def awaits_backward(self) -> bool:
        """Whether its forward has run, and its backward follows."""
        return self.step.trains and self.forward is not None

    @property
    def current(self) -> StagePass:
        """Its pass. Its forward has run."""
        assert self.forward is not None
        return self.forward


_MOST_LAYOUTS = 256
"""How many kinds of payloads are remembered for each boundary."""


class Stage:
    """Runs the actions of one stage, one method for each kind.

    Args:
        root: the LightningModule.
        channels: the stage's connections.
        current_pass: that of the gates.
        streams: the random generators.
        recorder: stands in for ``LightningModule.log``.
        resolve_state: puts values where user code has kept placeholders.
        profile: a context around what the name says.
        in_step: makes the context of user code.
    """

    def __init__(
        self,
        root: nn.Module,
        channels: Channels,
        current_pass: CurrentPass,
        streams: RandomStreams,
        recorder: LogRecorder,
        resolve_state: Callable[[Callable[[Any], Any]], None] | None = None,
        profile: Profile = nullcontext,
        in_step: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._root = root
        self._in_step = in_step
        self._channels = channels
        self._current_pass = current_pass
        self._streams = streams
        self._recorder = recorder
        self._resolve_state = resolve_state
        self._profile = profile
        self.find_neighbours()
        self._in_flight: dict[int, _InFlight] = {}
        self._sent: dict[tuple[Kind, int], Sent] = {}
        self._listeners: Sequence[ActionListener] = ()
        self._under_way: StagePass | None = None
        self._layouts: dict[Any, dict[Any, Layout]] = {}
        """Those that neighbours have agreed on: by kind, boundary and rank, and by what crosses."""
        self._warned: frozenset[str] = frozenset()

    def find_neighbours(self) -> None:
        """Called when the ranks of the virtual machine have become other stages."""
        route, here = Route(self._channels.num_stages), Place(self._channels.stage)
        neighbours = {kind: route.neighbour(here, kind.properties.neighbour) for kind in Kind}
        self._peers = {kind: there.stage for kind, there in neighbours.items() if there is not None}
        self._is_last = Kind.SEND_PAYLOAD not in self._peers

    def run(self, row: Row, step: Step, ahead: Row = ()) -> None:
        """Carries out a row's actions in order. What is sent may still be under way afterwards, and
        a microbatch whose backward is in a later row stays in flight.

        Args:
            row: the actions.
            step: that of the microbatches whose forward is among them; if there is none, that of
                any microbatch in the row.
            ahead: the actions of the next rows, as far as they are known.

        Raises:
            ScheduleError: the row has actions of further chunks; a stage runs all of its layers as
                one.
        """
        if further := [action for action in row if action.chunk]:
            raise ScheduleError(
                f"{further[0]} on stage {self._channels.stage}: an action of chunk"
                f" {further[0].chunk}; a stage runs one chunk, so use a schedule whose actions are"
                " all of chunk 0"
            )
        self._listeners = step.listeners
        last_place = {action.microbatch: place for place, action in enumerate(row)}
        try:
            with self._streams.switched(*step.microbatches[0].key):
                for listener in self._listeners:
                    listener.begin_step(row + ahead)
                for place, action in enumerate(row):
                    number = action.microbatch
                    held = self._in_flight.get(number)
                    if held is None:
                        index = number - step.first
                        held = _InFlight(step.microbatches[index], step, number, index)
                        self._in_flight[number] = held
                    self._carry_out(place, action, held)
                    if last_place[number] == place and not held.awaits_backward:
                        del self._in_flight[number]
                    self._channels.num_done += 1
        except BaseException:
            # Else the stage would keep activations for as long as the run lives.
            self._in_flight.clear()
            raise
        finally:
            self._under_way, self._listeners = None, ()

    def _carry_out(self, place: int, action: Action, held: _InFlight) -> None:
        for listener in self._listeners:
            listener.begin_action(place, action)
        try:
            getattr(self, action.kind.properties.method)(held)
        except torch.OutOfMemoryError as error:
            raise self._explained(error, action, held.step.store) from error
        for listener in reversed(self._listeners):
            listener.end_action(action)

    def _received(self, kind: Kind, held: _InFlight) -> None:
        """The action under way has what other stages had to send."""
        for listener in self._listeners:
            listener.received(Action(kind, held.number))

    def _explained(
        self, error: torch.OutOfMemoryError, action: Action, store: ActivationStore | None
    ) -> BudgetError:
        device = self._channels.device
        total = 0.0 if device.type == "cpu" else total_memory(device)
        return explained(
            error,
            f"stage {self._channels.stage}",
            str(action),
            self._under_way,
            store.device_bytes if store is not None else None,
            total,
        )

    def settle(self) -> None:
        """Waits for everything that is still being sent."""
        for sent in self.take_sends():
            sent.wait()

    def take_sends(self) -> list[Sent]:
        """The sends still under way, for a caller that waits for them later."""
        sends = list(self._sent.values())
        self._sent.clear()
        return sends

    def peer(self, kind: Kind) -> int:
        """The stage at the other end of a send or receive. There has to be one."""
        return self._peers[kind]

    def _post_receive(self, kind: Kind, held: _InFlight, boundary: int) -> list[Receipt]:
        """Posts the receive of what crosses the boundary before a layer, in one direction."""
        crossing, direction = _crossing(kind, held.microbatch, boundary)
        specs, layout = [spec for _, spec in crossing], self._layout(kind, held, boundary, crossing)
        return self._channels.post_receive(specs, direction, self.peer(kind), layout)

    def _send(self, kind: Kind, held: _InFlight, boundary: int, tensors: list[Tensor]) -> None:
        """Sends what crosses the boundary before a layer, in one direction."""
        crossing, direction = _crossing(kind, held.microbatch, boundary)
        specs, layout = [spec for _, spec in crossing], self._layout(kind, held, boundary, crossing)
        sent = self._channels.send(tensors, specs, direction, self.peer(kind), layout)
        self._sent[kind, held.number] = sent

    def _layout(self, kind: Kind, held: _InFlight, boundary: int, crossing: Payload) -> Layout:
        """The memory layout of what crosses a boundary, agreed on by each pair of neighbours."""
        # Not by the trace: one stage may follow a step again where others need not, if it branches
        # on its rank.
        ends = kind, boundary, self._channels.ranks[self.peer(kind)]
        known = self._layouts.setdefault(ends, {})
        key = held.microbatch.key[1], tuple(crossing)
        if key not in known and len(known) >= _MOST_LAYOUTS:
            # Both ends add theirs in the order of the messages, so they forget the same one.
            del known[next(iter(known))]
        return known.setdefault(key, Layout())

    # --- forward ---

    def receive_payload(self, held: _InFlight) -> None:
        """Posts the receive of the payload of the boundary before this stage's layers."""
        held.payload = self._post_receive(Kind.RECEIVE_PAYLOAD, held, held.microbatch.layers.start)

    @contextmanager
    def _followed(self, held: _InFlight) -> Iterator[None]:
        """Around user code: what later stages change is changed here as well."""
        trace, step, root = held.microbatch.trace, held.step, self._root
        if trace is None:
            yield
            return
        if step.is_in_flight:
            self._warn_of_stale(trace.changes.stale)
        with trace.switches.followed(root):
            if step.is_in_flight and trace.changes.early:
                values = PlainValues(root, step.function.arguments)
                with values.followed(trace.changes, self._is_last):
                    yield
            else:
                yield

    def _warn_of_stale(self, names: frozenset[str]) -> None:
        new = sorted(names - self._warned)
        self._warned |= names
        if new and self._is_last:
            shown = ", ".join(f"`self.{name}`" for name in new)
            warnings.warn(
                f"PipeShift: the step reads {shown} in front of a layer and changes it behind one."
                " With several microbatches in flight, earlier stages have read it in the next"
                " microbatch by then. If the step uses what earlier microbatches have put there,"
                " its values are wrong: read and change it behind the last layer, or in a hook"
                " (`on_train_batch_end`); or pass `microbatches=1`, without an asynchronous"
                " schedule. If it empties it first, nothing is wrong.",
                stacklevel=2,
            )

    def forward(self, held: _InFlight) -> None:
        """Runs this stage's part of the user's step."""
        microbatch, step = held.microbatch, held.step
        values = [value for value, _ in microbatch.payload(microbatch.layers.start)]
        receipts, held.payload = held.payload, []
        with self._profile(WAIT):
            received = [receipt.wait() for receipt in receipts]
        self._received(Kind.FORWARD, held)
        self._streams.begin(*microbatch.key)
        held.finite = finite_check(microbatch.key, self._channels.stage)
        listeners = (
            step.late_updates if held.index == 0 else None,
            step.migration,
            held.finite,
            step.timers.get(held.number),
        )
        current = StagePass(
            trace=microbatch.trace,
            layers=microbatch.layers,
            is_last=self._is_last,
            received=dict(zip(values, received, strict=True)),
            device=self._channels.device,
            streams=self._streams,
            key=microbatch.key,
            shared=step.shared,
            recompute=microbatch.recompute,
            table=self._table(held),
            memory=step.store,
            observer=step.observer if held.index == 0 else None,
            resident=resident_in(self._root) if step.looks_at_saved else frozenset(),
            listeners=[found for found in listeners if found is not None],
            resolve_state=self._resolve_state,
        )
        self._current_pass.value = self._under_way = current
        self._recorder.current = current
        # From here on only the model itself keeps parts of the payload alive.
        received.clear()
        receipts.clear()
        if step.late_updates is not None:
            step.late_updates.resume()
        try:
            with self._profile("[PipeShift] forward"), self._in_step(), self._followed(held):
                current.run(lambda: step.function(self._root, microbatch.batch))
        finally:
            self._current_pass.value = None
            self._recorder.current = None
        logs = self._recorder.take()
        held.forward = current
        step.order = current.order
        if self._is_last:
            if held.finite is not None and torch.is_grad_enabled():
                held.finite.loss(current.result)
            step.losses.add(current.result, logs, self._channels.device)
            current.result = None
            if step.after_last_forward is not None and step.losses.is_complete:
                step.after_last_forward()

    def _table(self, held: _InFlight) -> SavedTable:
        if not held.step.looks_at_saved or not torch.is_grad_enabled():
            return SavedTable()
        batch = addresses_of(held.microbatch.batch)
        return SavedTable(held.number, held.step.store, batch, self._channels.device)

    def send_payload(self, held: _InFlight) -> None:
        """Sends the payload of the boundary after this stage's layers."""
        microbatch, current = held.microbatch, held.current
        end = microbatch.layers.stop
        payload = microbatch.payload(end)
        for value, _ in payload:
            if value not in current.outgoing:
                raise LayerError(
                    "The step did not produce a value that the next stage needs (layer"
                    f" {value.layer}): it ended early. Let the step call the same layers for every"
                    " batch."
                )
        tensors = [current.outgoing.pop(value) for value, _ in payload]
        if not held.step.trains:
            self._wait_for_earlier(Kind.SEND_PAYLOAD)
        elif held.step.store is not None:
            held.step.store.hold(_payload_bytes(microbatch))
        self._send(Kind.SEND_PAYLOAD, held, end, tensors)

    # --- backward ---

    def recompute(self, held: _InFlight) -> None:
        """Runs the layers again that have dropped their saved tensors."""
        self._current_pass.value = held.current
        try:
            with self._profile("[PipeShift] recompute"), self._in_step():
                held.current.recompute_layers()
        finally:
            self._current_pass.value = None

    def receive_gradient(self, held: _InFlight) -> None:
        """Posts the receive of the gradients of the payload that was sent on."""
        held.gradient = self._post_receive(Kind.RECEIVE_GRADIENT, held, held.microbatch.layers.stop)

    def backward(self, held: _InFlight) -> None:
        """Runs this stage's part of the backward."""
        step, microbatch, current = held.step, held.microbatch, held.current
        # The graph, and what it saved, goes with the pass, when this method ends.
        held.forward = None
        self._under_way = current
        if step.observer is not None and held.index == 0:
            step.observer.end()
        if self._is_last:
            roots, gradients = self._from_loss(held)
        else:
            roots, gradients = self._from_next(held, current)
        step.num_backwards += 1
        is_last_backward = step.num_backwards == len(step.microbatches)
        if is_last_backward and step.before_last_backward is not None:
            step.before_last_backward()
        if roots:
            self._run_backward(held, current, roots, gradients)
        for value, box in current.boxes.items():
            is_expected = microbatch.trace is None or value in microbatch.trace.flow.differentiable
            if box.gradient is not None and not is_expected:
                raise LayerError(
                    f"A gradient flows back to the layer {value.layer}, which is on an earlier"
                    " stage, and did not when the step was first followed (a `detach` that depends"
                    " on the step, say). Let the same values be detached in every step, or change"
                    " `requires_grad` of parameters instead, which is noticed."
                )
        if self._is_last:
            outcome = step.losses.outcomes[held.index]
            outcome.result = _detached(outcome.result)
        for value, spec in microbatch.gradients(microbatch.layers.start):
            back = current.boxes[value].gradient
            if back is None:
                kind = dtype_named(spec.dtype)
                back = torch.zeros(spec.shape, dtype=kind, device=self._channels.device)
            held.outgoing[value] = back

    def _from_loss(self, held: _InFlight) -> tuple[list[Any], list[Tensor]]:
        """The loss, and its gradient; nothing for a microbatch that is left out."""
        outcome = held.step.losses.outcomes[held.index]
        if outcome.loss is None:
            return [], []
        loss, factor = outcome.loss, held.step.losses.factor(held.index)
        outcome.loss = loss.detach()
        if isinstance(factor, Tensor):
            return [loss], [factor.to(loss.dtype).reshape(loss.shape)]
        return [loss], [torch.full_like(loss, factor)]

    def _from_next(self, held: _InFlight, current: StagePass) -> tuple[list[Any], list[Tensor]]:
        """Where the next stage's gradients enter this stage's graph, and these gradients."""
        microbatch = held.microbatch
        # The next stage has used the payload, so its send is complete.
        self._sent.pop((Kind.SEND_PAYLOAD, held.number)).wait()
        if held.step.store is not None:
            held.step.store.hold(-_payload_bytes(microbatch))
        receipts, held.gradient = held.gradient, []
        with self._profile(WAIT):
            received = [receipt.wait() for receipt in receipts]
        roots, gradients = [], []
        values = [value for value, _ in microbatch.gradients(microbatch.layers.stop)]
        for value, gradient in zip(values, received, strict=True):
            if current.edges[value] is not None:
                roots.append(current.edges[value])
                gradients.append(gradient)
        self._received(Kind.BACKWARD, held)
        return roots, gradients

    def _run_backward(
        self, held: _InFlight, current: StagePass, roots: list[Any], gradients: list[Tensor]
    ) -> None:
        timer = held.step.timers.get(held.number)
        self._current_pass.value = current
        begin = timer.now() if timer is not None else None
        try:
            with self._profile("[PipeShift] backward"), self._in_step():
                current.backward(roots, gradients)
        except RuntimeError as error:
            found: PipeShiftError | None = None
            if held.finite is not None:
                found = held.finite.backward(error)
            if found is None and held.step.versions is not None:
                found = held.step.versions.explained(error)
            if found is None:
                raise
            raise found from error
        finally:
            self._current_pass.value = None
        if timer is not None:
            timer.end_backward(begin)

    def send_gradient(self, held: _InFlight) -> None:
        """Sends the gradients of the received payload back."""
        microbatch, begin = held.microbatch, held.microbatch.layers.start
        tensors = [held.outgoing[value] for value, _ in microbatch.gradients(begin)]
        held.outgoing.clear()
        self._wait_for_earlier(Kind.SEND_GRADIENT)
        self._send(Kind.SEND_GRADIENT, held, begin, tensors)

    def _wait_for_earlier(self, kind: Kind) -> None:
        """Waits until all sends of a kind but the last are complete, and their memory is free.

        The neighbour receives them in this order, and does not wait for later actions of this stage
        in between. So there is no deadlock; and running further ahead would only hold more memory.
        """
        under_way = [key for key in self._sent if key[0] is kind]
        for key in under_way[: 1 - SENDS_UNDER_WAY]:
            self._sent.pop(key).wait()


def _crossing(kind: Kind, microbatch: Microbatch, boundary: int) -> tuple[Payload, Direction]:
    if kind in (Kind.SEND_PAYLOAD, Kind.RECEIVE_PAYLOAD):
        return microbatch.payload(boundary), Direction.PAYLOAD
    return microbatch.gradients(boundary), Direction.GRADIENT


def _payload_bytes(microbatch: Microbatch) -> int:
    """The bytes of the payload that the stage sends on, held from its forward to its backward."""
    payload = microbatch.payload(microbatch.layers.stop)
    return sum(spec.num_bytes for _, spec in payload)


def _detached(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach()
    if isinstance(result, Mapping):
        return {key: _detached(value) for key, value in result.items()}
    return result
